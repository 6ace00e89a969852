//! Requests that may have ended engines: where they are tried again, and what counts as an end.

use super::meaning;
use super::relay::Passage;
use super::{Asked, EnginePlace, Gateway, PATIENCE, RETRY_WAIT, RelayRequest};
use crate::request::Rejection;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{EngineFault, EngineFaultKind};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{InstanceId, RejectReason};
use mixfleet_scheduler::quarantine::{
    AnswerMoment, EngineTry, Quarantine, Quarantined, RequestDigest, TryPermit,
};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

/// Longest time that a suspect waits until it can be tried apart from others; then it is tried beside them.
const APART_MAX: Seconds = Seconds(60.0);
/// Time within which the end of an engine counts as one before any token, where the answer comes whole, and
/// the multiple of the predicted time to the first token that is added.
const EARLY: Seconds = Seconds(3.0);
const EARLY_TIMES: f64 = 4.0;
/// Time for an engine that says that it failed to answer a probe.
const PROBE_MAX: Duration = Duration::from_secs(2);

/// Why a request has no place.
#[derive(Debug)]
pub(super) enum NoPlace {
    /// The machine turned it away.
    Rejected(RejectReason, Option<Seconds>),
    /// It ended too many engines.
    Quarantined(Quarantined),
}

impl NoPlace {
    /// The error of a request that was never placed.
    pub(super) fn error(self, gateway: &Gateway) -> super::RelayError {
        match self {
            NoPlace::Rejected(reason, after) => {
                let why = gateway.metrics.why_none_serves(gateway.env.now());
                super::RelayError::Rejected(Rejection::new(&reason, after).explained(why))
            }
            NoPlace::Quarantined(why) => super::RelayError::Quarantined(why),
        }
    }
}

/// What the machine's answer means for a request.
fn rejected(answer: (RejectReason, Option<Seconds>)) -> NoPlace {
    NoPlace::Rejected(answer.0, answer.1)
}

impl RelayRequest {
    /// Its digest. Computed once, and only if engines have ended.
    pub(super) fn digest(&self) -> RequestDigest {
        *self.digest.get_or_init(|| meaning::of_body(self.endpoint, &self.body))
    }
}

impl Gateway {
    pub(super) fn quarantine(&self) -> MutexGuard<'_, Quarantine> {
        self.quarantine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes a request's digest if it matters now. It takes time for large bodies, so it is called where
    /// bodies are read.
    pub(crate) fn note_digest(&self, wanted: &RelayRequest) {
        if !self.quarantine().is_empty() {
            wanted.digest();
        }
    }

    /// Places a request on an engine that it has not failed at: a suspect apart from other suspects, and a
    /// quarantined one nowhere.
    pub(super) async fn place_apart(&self, asked: &Asked<'_>) -> Result<EnginePlace, NoPlace> {
        if self.quarantine().is_empty() {
            return self.place_patiently(asked).await.map_err(rejected);
        }
        let began = self.env.now();
        loop {
            let waited = self.env.now() - began;
            let placed = self.place_now(asked, waited.0 > APART_MAX.0);
            let is_hopeful = match &placed {
                Ok(None) => true,
                Err(NoPlace::Rejected(RejectReason::NoInstance, _)) => {
                    waited.0 < PATIENCE.0 && self.lock().some_rest(asked.avoided)
                }
                _ => false,
            };
            match placed {
                Ok(Some(place)) => return Ok(place),
                Err(why) if !is_hopeful => return Err(why),
                _ => self.env.sleep(RETRY_WAIT).await,
            }
        }
    }

    /// The same without waiting; none if it is to wait until other suspects have been tried. Looking and
    /// placing are one step, so that no two suspects come together.
    fn place_now(&self, asked: &Asked<'_>, is_late: bool) -> Result<Option<EnginePlace>, NoPlace> {
        let (digest, now) = (asked.wanted.digest(), self.env.now());
        let mut quarantine = self.quarantine();
        let permit = quarantine.permit(digest, now);
        match permit {
            TryPermit::Refused(why) => {
                self.metrics.requests_quarantined.inc();
                return Err(NoPlace::Quarantined(why));
            }
            TryPermit::Later if !is_late => return Ok(None),
            _ => {}
        }
        let on_trial = match is_late {
            true => Vec::new(),
            false => quarantine.engines_on_trial(permit).iter().map(|id| id.0 as usize).collect(),
        };
        let avoided = [asked.avoided, &on_trial].concat();
        let mut placed = self.place(&Asked { avoided: &avoided, ..*asked });
        if placed.is_err() && !on_trial.is_empty() {
            if permit != TryPermit::Free {
                return Ok(None);
            }
            placed = self.place(asked);
        }
        let place = placed.map_err(rejected)?;
        let engine = InstanceId(to_u32(place.prompt_at.unwrap_or(place.at)));
        quarantine.tried(&EngineTry { request: asked.request, digest, engine, began: now });
        Ok(Some(place))
    }

    /// A fault of an engine; its end, if it says that it failed and does not answer a probe either. vLLM
    /// answers with status 500 while it dies.
    pub(super) async fn judged(&self, at: usize, fault: EngineFault) -> EngineFault {
        if fault.kind != EngineFaultKind::Failed {
            return fault;
        }
        let probed = tokio::select! {
            probed = self.engine(at).probe() => probed,
            () = self.env.sleep(PROBE_MAX) => return fault,
        };
        match probed {
            Err(probe) if probe.kind != EngineFaultKind::Vacant => {
                let detail = format!("it failed ({fault}), and then did not answer ({probe})");
                EngineFault::new(EngineFaultKind::Cut, detail)
            }
            _ => fault,
        }
    }

    /// Reports the end of an engine under a request.
    pub(super) fn note_end(
        &self,
        wanted: &RelayRequest,
        tried: (RequestId, usize, Seconds),
        moment: AnswerMoment,
    ) {
        let ((request, at, began), now) = (tried, self.env.now());
        let digest = wanted.digest();
        let tried = EngineTry { request, digest, engine: InstanceId(to_u32(at)), began };
        let mut quarantine = self.quarantine();
        quarantine.ended(&tried, moment, true, now);
        let (engine, id) = (self.engine(at).name(), &wanted.id);
        match quarantine.permit(digest, now) {
            TryPermit::Refused(why) => {
                tracing::error!(id, engine, ?moment, digest = %format!("{:032x}", digest.0), engines = why.engines, quarantined_s = why.left.0, "a request is quarantined: engines ended with it");
            }
            _ => tracing::warn!(id, engine, ?moment, "an engine ended while it had a request"),
        }
    }
}

impl Passage {
    /// Reports its engine's end.
    pub(super) fn note_own_end(&self, at: usize) {
        let tried = (self.request, at, self.times.asked);
        self.gateway.note_end(&self.wanted, tried, self.moment());
    }

    /// What its engine has given of the answer.
    fn moment(&self) -> AnswerMoment {
        let is_early = self.gateway.env.now().0 - self.times.asked.0 < self.early().0;
        if self.times.came || !(self.wanted.stream || is_early) {
            AnswerMoment::Answering
        } else if self.begun.is_some() {
            AnswerMoment::Continuing
        } else {
            AnswerMoment::Unanswered
        }
    }

    /// Time in which a whole answer counts as not begun.
    pub(super) fn early(&self) -> Seconds {
        EARLY + self.ttft * EARLY_TIMES
    }

    /// Another engine continues it.
    pub(super) fn tried_next(&self, at: usize, began: Seconds) {
        let mut quarantine = self.gateway.quarantine();
        if !quarantine.is_empty() {
            let (request, digest) = (self.request, self.wanted.digest());
            quarantine.tried(&EngineTry { request, digest, engine: InstanceId(to_u32(at)), began });
        }
    }

    /// The first token of this try is there, or time enough has passed for it.
    pub(super) fn survives(&self) {
        self.gateway.quarantine().began(self.request);
    }

    /// The answer is complete.
    pub(super) fn is_cleared(&self) {
        let mut quarantine = self.gateway.quarantine();
        if !quarantine.is_empty() {
            quarantine.answered(self.wanted.digest());
        }
    }
}
