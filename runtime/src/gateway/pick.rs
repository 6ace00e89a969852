//! A request whose bytes another process relays: it is placed here, and the relayed answer is observed.

use super::relay::Passage;
use super::{Asked, Gateway, RelayError, RelayRequest};
use mixfleet_hal::outside::{EngineChunk, EngineFault, EngineFaultKind, EngineUsage};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Explanation, Outcome, Role};
use std::sync::Arc;
use std::time::Duration;

/// The reason why two engines never share a relayed request.
const CARRIED: &str = "a proxy carries it to one engine";

/// A request that a proxy relays. Dropping it before its end cancels the placement.
pub(crate) struct PickedPassage {
    passage: Box<Passage>,
    /// The runners-up, best first.
    pub(crate) runners_up: Vec<usize>,
    /// Predicted wait of the prompt.
    pub(crate) waits: Seconds,
}

/// The engines besides the chosen one that could answer the whole request: those that meet the objectives by
/// score, then the others.
pub(super) fn runners_up(explanation: &Explanation) -> Vec<usize> {
    let mut others: Vec<(bool, f64, usize)> = Vec::new();
    for candidate in &explanation.candidates {
        let misses = match candidate.outcome {
            Outcome::Chosen => continue,
            Outcome::MissesTtftSlo { .. }
            | Outcome::MissesTbtSlo { .. }
            | Outcome::OverrunsTbtSlo { .. }
            | Outcome::MissesDeadline { .. } => true,
            _ => false,
        };
        if candidate.prefill == candidate.decode
            && let Some(terms) = &candidate.terms
        {
            others.push((misses, terms.score, candidate.decode.0 as usize));
        }
    }
    others.sort_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)));
    others.into_iter().map(|(_, _, at)| at).collect()
}

/// Places a request on one of the engines that may answer, except those in `left_out`.
///
/// # Errors
/// The reason for a missing placement.
pub(crate) async fn pick(
    gateway: &Arc<Gateway>,
    wanted: RelayRequest,
    left_out: &[usize],
) -> Result<PickedPassage, RelayError> {
    let came = gateway.env.now();
    let wanted = gateway.read_prompt(wanted).await;
    let request = gateway.next_request();
    let mut left_out = left_out.to_vec();
    left_out.extend(gateway.members_that(|role| !role.decodes()));
    let asked = Asked {
        avoided: &left_out,
        left_out: &left_out,
        undivided: Some(CARRIED),
        ..Asked::first(request, &wanted)
    };
    let place = gateway.place_apart(&asked).await.map_err(|why| why.error(gateway))?;
    // from here on the proxy holds the bytes
    let wanted = RelayRequest { body: Arc::default(), ..wanted };
    let mut passage = Box::new(Passage::new(gateway.clone(), request, wanted, came, place.due));
    passage.take_place(&place);
    Ok(PickedPassage { passage, runners_up: place.runners_up, waits: place.waits })
}

impl Gateway {
    /// Number of engines.
    pub(crate) fn engines(&self) -> usize {
        self.members.len()
    }

    /// The name of an engine.
    pub(crate) fn engine_name(&self, at: usize) -> &str {
        self.engine(at).name()
    }

    /// Whether an engine is up and gets requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.lock().seats.iter().any(|seat| seat.instance.is_some() && !seat.rests)
    }

    fn members_that(&self, meets: impl Fn(Role) -> bool) -> Vec<usize> {
        let members = self.members.iter().enumerate();
        members.filter(|(_, member)| meets(member.spec.role)).map(|(at, _)| at).collect()
    }
}

impl PickedPassage {
    /// The engine of the placement; none after the end.
    pub(crate) fn at(&self) -> Option<usize> {
        self.passage.at
    }

    /// Predicted time to the first token.
    pub(crate) fn ttft(&self) -> Seconds {
        self.passage.ttft
    }

    /// Records the engine that answers, by the proxy's report; true if the request was placed on another one.
    pub(crate) fn served_by(&mut self, at: usize) -> bool {
        if self.passage.at == Some(at) || at >= self.passage.gateway.engines() {
            return false;
        }
        let detail = "the proxy had another engine answer in its place";
        self.passage.failed(&EngineFault::new(EngineFaultKind::Unreachable, detail));
        let gateway = self.passage.gateway.clone();
        let avoided: Vec<usize> = (0..gateway.engines()).filter(|other| *other != at).collect();
        let others = avoided.iter().filter(|at| !self.passage.avoided.contains(at));
        let left_out: Vec<usize> = others.copied().collect();
        let asked = Asked {
            due: Some(self.passage.due),
            avoided: &avoided,
            left_out: &left_out,
            undivided: Some(CARRIED),
            ..Asked::first(self.passage.request, &self.passage.wanted)
        };
        match gateway.place(&asked) {
            Ok(place) => self.passage.take_place(&place),
            Err((reason, _)) => {
                tracing::debug!(id = %self.passage.wanted.id, %reason, "the answering engine has no free place");
            }
        }
        true
    }

    /// Time from now until the prompt of an unstreamed answer is assumed to be computed.
    pub(crate) fn prompt_due(&self) -> Duration {
        let left = self.passage.times.asked + self.passage.ttft - self.passage.gateway.env.now();
        Duration::try_from_secs_f64(left.0.max(0.0)).unwrap_or_default()
    }

    /// Records that the prompt is assumed to be computed: an unstreamed answer does not show the time.
    pub(crate) fn guess_first_token(&mut self) {
        if let Some(at) = self.passage.at {
            self.passage.gateway.metrics.guess_first_token(self.passage.request);
            self.passage.first_token(at);
        }
    }

    /// Handles a relayed chunk of a stream.
    pub(crate) fn chunk(&mut self, chunk: &EngineChunk) {
        self.passage.account(chunk);
    }

    /// Handles the end of a complete answer, with its lengths if they are known.
    pub(crate) fn done(&mut self, usage: Option<EngineUsage>) {
        self.passage.usage = usage.or(self.passage.usage);
        self.passage.clear();
        self.passage.finish();
    }

    /// Lengths of the answer, as far as they are known.
    pub(crate) fn usage(&self) -> Option<EngineUsage> {
        self.passage.usage
    }

    /// Handles an engine's failure. It never counts as the end of an engine: the body, by which a deadly
    /// request would be recognised, is not here.
    pub(crate) fn failed(&mut self, fault: &EngineFault) {
        assert!(
            fault.kind != EngineFaultKind::Cut,
            "a relayed request must not count as the end of an engine"
        );
        self.passage.failed(fault);
    }
}
