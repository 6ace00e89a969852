//! Canaries: copies of requests that show whether KV arrives undamaged from one engine at another one.
//!
//! vLLM checks nothing of the KV that it pulls. So a copy of a request, with few tokens, is answered divided
//! and by one engine alone, and the first tokens' log-probabilities are compared
//! (`mixfleet_scheduler::canary`). Each of the two has its own cache salt: no cached KV takes part, so that
//! the prompt is really transferred, and really computed. A pair of engines shares requests once it is
//! proven, until it fails. Clients wait for no canary, and none changes an answer.

use super::{ChoiceLimits, Fleetwide, Gateway, Passage, RelayRequest};
use crate::front::Decision;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{
    CanaryTerms, DrawnToken, EngineAnswer, EngineCall, EngineEndpoint, EngineFault, EngineFaultKind,
    EngineShare, EngineUsage,
};
use mixfleet_hal::random::unit;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::canary::{CanaryChange, CanaryFinding, CanaryPair, CanaryPlan, distance};
use mixfleet_scheduler::fleet::{Arrival, Event, InstanceId, RequestDivision};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Tokens of a canary's answer, and likely tokens listed for each.
const TOKENS: u32 = 4;
const RANKED: u32 = 5;
/// Time that a canary gets, all of its parts together.
const CANARY_MAX: Duration = Duration::from_secs(300);

/// A request that can be copied.
pub(super) struct CanarySubject {
    endpoint: EngineEndpoint,
    body: Arc<Vec<u8>>,
    id: String,
}

/// A canary to be run.
struct Canary {
    plan: CanaryPlan,
    subject: CanarySubject,
}

/// What an engine alone, or two, said.
type Drawn = Result<Vec<DrawnToken>, EngineFault>;

pub(super) fn pair_of(from: usize, to: usize) -> CanaryPair {
    CanaryPair { from: InstanceId(to_u32(from)), to: InstanceId(to_u32(to)) }
}

impl Passage {
    /// Runs a copy of the request before the answered one as a canary, if a pair that the answered one met is
    /// due for one. The latest KV that this pair transferred may be that of the answered request: if its
    /// blocks were mistaken for the canary's, a copy of that request would not reveal it.
    pub(super) fn send_canary(&self) {
        if self.canary_pairs.is_empty() {
            return;
        }
        let gateway = self.gateway.clone();
        let roll = unit(gateway.env.random(), 0);
        let RelayRequest { endpoint, body, id, .. } = &self.wanted;
        let answered = CanarySubject { endpoint: *endpoint, body: body.clone(), id: id.clone() };
        let canary = {
            let mut state = gateway.lock();
            let Some(subject) = state.canary_subject.replace(answered) else { return };
            let plan = state.plan_canary(gateway.env.now(), &self.canary_pairs, roll);
            let Some(plan) = plan else { return };
            Canary { plan, subject }
        };
        let env = gateway.env.clone();
        env.spawn(Box::pin(async move { gateway.run_canary(canary).await }));
    }
}

impl Gateway {
    async fn run_canary(&self, canary: Canary) {
        let found = tokio::select! {
            biased;
            found = self.compare(&canary) => found,
            () = self.env.sleep(CANARY_MAX) => {
                let detail = format!("no result within {} s", CANARY_MAX.as_secs());
                Err(EngineFault::new(EngineFaultKind::Busy, detail))
            }
        };
        let now = self.env.now();
        let pair = canary.plan.pair;
        let (change, view) = {
            let mut state = self.lock();
            let form = state.kv_form(pair);
            let Some(canaries) = state.canaries.as_mut() else { return };
            let change = canaries.end(now, &canary.plan, found.as_ref().ok().copied());
            (change, canaries.view(pair, &form))
        };
        let ends = [pair.from, pair.to].map(|end| self.engine(end.0 as usize).name());
        let [from, to] = ends;
        let result = match (&found, view) {
            (Err(_), _) => "inconclusive",
            (Ok(finding), Some(view)) if finding.divided > view.drift.exceeded_once_in_a_thousand() => {
                "differs"
            }
            (Ok(_), _) => "agrees",
        };
        self.metrics.canary_ended(ends, result);
        if let Some(view) = view {
            let shares = view.phase.barred().is_none();
            self.metrics.canary_state(ends, shares, view.drift.median());
        }
        match &found {
            Ok(finding) => {
                let (divided, control) = (finding.divided, finding.control);
                tracing::debug!(id = %canary.subject.id, from, to, divided, control, "a canary was compared");
            }
            Err(fault) => {
                tracing::warn!(id = %canary.subject.id, from, to, %fault, "a canary could not be compared");
            }
        }
        if let Some(change) = change {
            let latest_nats = found.map_or(0.0, |finding| finding.divided);
            self.say_change(ends, change, latest_nats);
        }
    }

    /// Logs and counts what canaries changed.
    fn say_change(&self, ends: [&str; 2], change: CanaryChange, latest_nats: f64) {
        let [from, to] = ends;
        match change {
            CanaryChange::Proven => tracing::info!(from, to, "KV is proven; two engines share requests"),
            CanaryChange::Suspected => {
                tracing::warn!(from, to, latest_nats, "canaries differ; two engines share nothing for now");
            }
            CanaryChange::Corrupt(pause) => {
                self.metrics.canary_quarantined(ends, "corrupt");
                let pause_s = pause.0;
                tracing::error!(from, to, latest_nats, pause_s, "KV is corrupted; two engines share nothing");
            }
            CanaryChange::Disagree(pause) => {
                self.metrics.canary_quarantined(ends, "disagree");
                let pause_s = pause.0;
                let why = "they answer differently even alone: other weights?";
                tracing::error!(from, to, why, pause_s, "two engines share nothing");
            }
        }
    }

    /// Has the request answered divided, by one engine, and, as a control, by the other one.
    async fn compare(&self, canary: &Canary) -> Result<CanaryFinding, EngineFault> {
        let CanaryPair { from, to } = canary.plan.pair;
        let (from, to) = (from.0 as usize, to.0 as usize);
        let reference = self.ask_alone(canary, to).await;
        let control = match canary.plan.control || reference.is_err() {
            true => Some(self.ask_alone(canary, from).await),
            false => None,
        };
        let divided = self.ask_divided(canary, (from, to)).await?;
        let apart = |one: &[DrawnToken], other: &[DrawnToken]| {
            let detail = "the two answers have no tokens to compare";
            distance(one, other).ok_or_else(|| EngineFault::new(EngineFaultKind::Malformed, detail))
        };
        match (reference, control) {
            (Ok(reference), Some(Ok(control))) => {
                let (divided, control) = (apart(&divided, &reference)?, apart(&control, &reference)?);
                Ok(CanaryFinding { divided, control: Some(control) })
            }
            (Ok(alone), _) | (Err(_), Some(Ok(alone))) => {
                Ok(CanaryFinding { divided: apart(&divided, &alone)?, control: None })
            }
            (Err(fault), _) => Err(fault),
        }
    }

    async fn ask_divided(&self, canary: &Canary, ends: (usize, usize)) -> Drawn {
        let salt = self.canary_salt();
        let (from, to) = ends;
        let hand_off = match self.ask_part(canary, from, &salt, EngineShare::Prompt).await? {
            EngineAnswer::HandedOff { hand_off, .. } => hand_off,
            _ => return Err(not_an_answer()),
        };
        let answer = self.ask_part(canary, to, &salt, EngineShare::Answer(hand_off)).await?;
        self.drawn(canary, to, &answer)
    }

    /// The answer of an engine that computes the prompt itself: no other request has its salt.
    async fn ask_alone(&self, canary: &Canary, at: usize) -> Drawn {
        let salt = self.canary_salt();
        let answer = self.ask_part(canary, at, &salt, EngineShare::Whole).await?;
        self.drawn(canary, at, &answer)
    }

    fn drawn(&self, canary: &Canary, at: usize, answer: &EngineAnswer) -> Drawn {
        match answer {
            EngineAnswer::Whole(answer) => {
                self.engine(at).drawn_tokens(canary.subject.endpoint, &answer.body)
            }
            _ => Err(not_an_answer()),
        }
    }

    /// Sends an engine its part of a canary, at low priority if it supports priorities.
    async fn ask_part(
        &self,
        canary: &Canary,
        at: usize,
        salt: &str,
        share: EngineShare,
    ) -> Result<EngineAnswer, EngineFault> {
        let engine = self.engine(at);
        loop {
            let is_low_priority = !self.lock().seats[at].has_no_priorities;
            let terms =
                CanaryTerms { salt: salt.to_owned(), tokens: TOKENS, ranked: RANKED, is_low_priority };
            let call = EngineCall {
                endpoint: canary.subject.endpoint,
                body: Arc::new(engine.canary_body(canary.subject.endpoint, &canary.subject.body, &terms)?),
                stream: false,
                begun: None,
                tokens_max: None,
                trace: None,
                share: share.clone(),
            };
            let began = self.env.now();
            let answer = tokio::select! {
                biased;
                answer = engine.ask(&call) => answer,
                () = self.lost(at) => Err(super::relay::lost()),
            };
            self.meter_canary(at, self.env.now() - began, answer.as_ref().ok());
            match answer? {
                EngineAnswer::Refused { .. } if is_low_priority => {
                    self.lock().seats[at].has_no_priorities = true;
                }
                EngineAnswer::Refused { status, .. } => {
                    let detail = format!("it refuses a canary with status {status}");
                    return Err(EngineFault::new(EngineFaultKind::NotTaken, detail));
                }
                answer => return Ok(answer),
            }
        }
    }

    fn meter_canary(&self, at: usize, time: Seconds, answer: Option<&EngineAnswer>) {
        let usage = match answer {
            Some(EngineAnswer::Whole(answer)) => answer.usage,
            Some(EngineAnswer::HandedOff { usage, .. }) => *usage,
            _ => None,
        };
        let tokens = usage.map_or(0, |usage: EngineUsage| {
            u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens)
        });
        self.metrics.canary_cost(self.engine(at).name(), tokens, time);
    }

    fn canary_salt(&self) -> String {
        format!("canary-{:016x}{:016x}", self.env.random(), self.env.random())
    }

    /// What a placement's explanation says of a pair.
    pub(super) fn explain_pair(&self, state: &Fleetwide, pair: CanaryPair) -> Value {
        let [from, to] = [pair.from, pair.to].map(|end| self.engine(end.0 as usize).name());
        let Some(canaries) = &state.canaries else { return Value::Null };
        if state.checks_kv(pair) {
            return json!({"from": from, "to": to, "phase": "checked_by_digest"});
        }
        let form = state.kv_form(pair);
        let phase = canaries.phase(pair, &form);
        let view = canaries.view(pair, &form);
        json!({
            "from": from,
            "to": to,
            "phase": phase.name(),
            "why": phase.barred(),
            "compared": view.map_or(0, |view| view.compared),
            "evidence": view.map_or(0.0, |view| view.evidence),
            "drift_nats": view.map(|view| view.drift.median()),
            "latest_nats": view.and_then(|view| view.latest),
        })
    }
}

impl Fleetwide {
    /// Layout and dtype of KV at both ends of a pair, as far as engines tell them.
    pub(super) fn kv_form(&self, pair: CanaryPair) -> String {
        let [from, to] = [pair.from, pair.to].map(|end| self.seats[end.0 as usize].kv_form.as_str());
        format!("{from} > {to}")
    }

    /// Whether the receiver checks KV between them.
    fn checks_kv(&self, pair: CanaryPair) -> bool {
        [pair.from, pair.to].iter().any(|end| self.seats[end.0 as usize].checks_kv)
    }

    /// Why two engines share no requests, if their KV is not proven.
    pub(super) fn barred(&self, pair: CanaryPair) -> Option<&'static str> {
        let canaries = self.canaries.as_ref().filter(|_| !self.checks_kv(pair))?;
        canaries.phase(pair, &self.kv_form(pair)).barred()
    }

    /// A canary of the first of these pairs that is due for one.
    fn plan_canary(&mut self, now: Seconds, pairs: &[CanaryPair], roll: f64) -> Option<CanaryPlan> {
        for &pair in pairs {
            if self.checks_kv(pair) {
                continue;
            }
            let form = self.kv_form(pair);
            let plan = self.canaries.as_mut()?.begin(now, pair, &form, roll);
            if plan.is_some() {
                return plan;
            }
        }
        None
    }

    /// Has the machine place a request on one engine, or on two that are proven; also the pairs that it would
    /// have placed it on otherwise. Every engine that shares nothing in this decision is out of a pair that
    /// is not proven, and each round adds one, so that this ends.
    pub(super) fn decide_proven(
        &mut self,
        arrival: &Arrival,
        limits: ChoiceLimits<'_>,
        whole: bool,
    ) -> (Decision, Vec<CanaryPair>) {
        let mut unproven = Vec::new();
        let mut apart: Vec<usize> = Vec::new();
        let decided = loop {
            let division = if whole { RequestDivision::Undivided } else { self.divided_but_for(&apart) };
            let decided = self.decide(arrival, limits, division);
            let Some(pair) = placed_pair(&decided).filter(|pair| self.barred(*pair).is_some()) else {
                break decided;
            };
            unproven.push(pair);
            self.front.step(Event::Cancelled { request: arrival.request });
            let at = self.less_proven(pair);
            if apart.contains(&at) {
                break self.decide(arrival, limits, RequestDivision::Undivided);
            }
            apart.push(at);
        };
        (decided, unproven)
    }

    /// The end of a pair with fewer proven partners.
    fn less_proven(&self, pair: CanaryPair) -> usize {
        let partners = |at: usize, is_from: bool| {
            let others = (0..self.seats.len()).filter(|&other| other != at);
            others
                .map(|other| if is_from { pair_of(at, other) } else { pair_of(other, at) })
                .filter(|pair| self.barred(*pair).is_none())
                .count()
        };
        let (from, to) = (pair.from.0 as usize, pair.to.0 as usize);
        if partners(from, true) < partners(to, false) { from } else { to }
    }
}

/// The two engines of a placement that divides a request.
pub(super) fn placed_pair(decided: &Decision) -> Option<CanaryPair> {
    let placed = decided.verdict.as_ref().ok()?;
    let pair = CanaryPair { from: placed.prefill, to: placed.decode };
    (pair.from != pair.to).then_some(pair)
}

fn not_an_answer() -> EngineFault {
    EngineFault::new(EngineFaultKind::Malformed, "it answers a canary with something else")
}
