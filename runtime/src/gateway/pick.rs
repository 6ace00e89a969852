//! A request whose bytes another process relays: it is placed here, and the relayed answer is observed.

use super::relay::Passage;
use super::{Asked, Gateway, RelayError, RelayRequest};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{EngineChunk, EngineFault, EngineFaultKind, EngineUsage};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Event, Explanation, InstanceId, Outcome, Role};
use std::collections::BTreeSet;
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

/// The engines besides the chosen one that could answer, with the prompt computed there or where the chosen
/// placement has it computed: those that meet the objectives by score, then the others.
pub(super) fn runners_up(explanation: &Explanation) -> Vec<usize> {
    let chosen = explanation.chosen().map(|chosen| (chosen.prefill, chosen.decode));
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
        let is_whole = candidate.prefill == candidate.decode;
        let is_possible = chosen.is_none_or(|(prefill, decode)| {
            candidate.decode != decode && (is_whole || candidate.prefill == prefill)
        });
        if is_possible
            && (is_whole || chosen.is_some())
            && let Some(terms) = &candidate.terms
        {
            others.push((misses, terms.score, candidate.decode.0 as usize));
        }
    }
    others.sort_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)));
    let mut seen = BTreeSet::new();
    others.into_iter().map(|(_, _, at)| at).filter(|at| seen.insert(*at)).collect()
}

/// Places a request on one of the engines that may answer, except those in `left_out`, or on two of which one
/// has the role of computing prompts.
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
    let has_pairs = gateway.members.iter().any(|member| member.spec.role == Role::Prefill);
    let asked = Asked {
        avoided: left_out,
        left_out,
        undivided: (!has_pairs).then_some(CARRIED),
        ..Asked::first(request, &wanted)
    };
    let mut place = gateway.place_apart(&asked).await.map_err(|why| why.error(gateway))?;
    let is_pair_of_others = |from: usize| gateway.members[from].spec.role != Role::Prefill;
    if place.prompt_at.is_some_and(is_pair_of_others) {
        let mut passage = Passage::new(gateway.clone(), request, wanted.clone(), came, place.due);
        passage.take_place(&place);
        drop(passage);
        let asked = Asked { undivided: Some(CARRIED), ..asked };
        place = gateway.place_apart(&asked).await.map_err(|why| why.error(gateway))?;
    }
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
}

impl PickedPassage {
    /// The engine of the placement; none after the end.
    pub(crate) fn at(&self) -> Option<usize> {
        self.passage.at
    }

    /// The engine that computes the prompt, if it is another one.
    pub(crate) fn prompt_at(&self) -> Option<usize> {
        self.passage.prompt_at
    }

    /// Predicted time to the first token.
    pub(crate) fn ttft(&self) -> Seconds {
        match self.passage.prompt_at {
            Some(_) => self.passage.ttft + self.passage.transfer,
            None => self.passage.ttft,
        }
    }

    /// Records that the engine that answers has the prompt's KV. When the other one was done is not known, so
    /// that nothing is learned of either.
    fn took_over(&mut self) {
        let Some(from) = self.passage.prompt_at else { return };
        self.passage.leave_prompt();
        let instance = InstanceId(to_u32(from));
        self.passage.gateway.tell(Event::PrefillDone { request: self.passage.request, instance });
        (self.passage.is_divided, self.passage.times.alone) = (true, false);
    }

    /// Records the engine that answers, by the proxy's report; true if the request was placed on another one.
    pub(crate) fn served_by(&mut self, at: usize) -> bool {
        if self.passage.at == Some(at) || at >= self.passage.gateway.engines() {
            return false;
        }
        let detail = "the proxy had another engine answer in its place";
        self.passage.leave_prompt();
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
        let left = self.passage.times.asked + self.ttft() - self.passage.gateway.env.now();
        Duration::try_from_secs_f64(left.0.max(0.0)).unwrap_or_default()
    }

    /// Records that the prompt is assumed to be computed: an unstreamed answer does not show the time.
    pub(crate) fn guess_first_token(&mut self) {
        if let Some(at) = self.passage.at {
            self.took_over();
            self.passage.gateway.metrics.guess_first_token(self.passage.request);
            self.passage.first_token(at);
        }
    }

    /// Handles a relayed chunk of a stream.
    pub(crate) fn chunk(&mut self, chunk: &EngineChunk) {
        if chunk.has_token() {
            self.took_over();
        }
        self.passage.account(chunk);
    }

    /// Handles the end of a complete answer, with its lengths if they are known.
    pub(crate) fn done(&mut self, usage: Option<EngineUsage>) {
        self.took_over();
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
        // the proxy talks to the engine that answers
        self.passage.leave_prompt();
        self.passage.failed(fault);
    }
}
