//! A request whose bytes another process carries: it is placed here, and what passes of its answer is learned
//! from, as if it were relayed.

use super::relay::Passage;
use super::suspects::NoPlace;
use super::{Asked, Gateway, RelayError, RelayRequest};
use mixfleet_hal::outside::{EngineChunk, EngineFault, EngineFaultKind, EngineUsage};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Explanation, Outcome, Role};
use std::sync::Arc;
use std::time::Duration;

/// Why no two engines share a request that a proxy carries.
const CARRIED: &str = "a proxy carries it to one engine";

/// A request that a proxy carries. Dropping it before it is done cancels it here.
pub(crate) struct PickedPassage {
    passage: Box<Passage>,
    /// The other engines that could take it, best first.
    pub(crate) runners_up: Vec<usize>,
    /// Predicted wait of its prompt.
    pub(crate) waits: Seconds,
}

/// The engines besides the chosen one that could take all of a request: those that meet the objectives by
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

/// Places a request on one of the engines that may answer, but for those `left_out`.
///
/// # Errors
/// Why it has no place.
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
    let place = gateway.place_apart(&asked).await.map_err(NoPlace::error)?;
    // the bytes are the proxy's from here on
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
    /// The engine that it is placed on; none once it is done.
    pub(crate) fn at(&self) -> Option<usize> {
        self.passage.at
    }

    /// Predicted time to its first token.
    pub(crate) fn ttft(&self) -> Seconds {
        self.passage.ttft
    }

    /// Notes the engine that answers, as the proxy reports it; true if the request was placed on another one.
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
                tracing::debug!(id = %self.passage.wanted.id, %reason, "who answers has no place for it");
            }
        }
        true
    }

    /// Time from now until the prompt of a whole answer is taken to be computed.
    pub(crate) fn prompt_due(&self) -> Duration {
        let left = self.passage.times.asked + self.passage.ttft - self.passage.gateway.env.now();
        Duration::try_from_secs_f64(left.0.max(0.0)).unwrap_or_default()
    }

    /// Takes the prompt to be computed: of a whole answer nothing tells when it is.
    pub(crate) fn guess_first_token(&mut self) {
        if let Some(at) = self.passage.at {
            self.passage.gateway.metrics.guess_first_token(self.passage.request);
            self.passage.first_token(at);
        }
    }

    /// Takes a chunk of a stream that passes.
    pub(crate) fn chunk(&mut self, chunk: &EngineChunk) {
        self.passage.account(chunk);
    }

    /// Takes the end of a complete answer, with its lengths if they are known.
    pub(crate) fn done(&mut self, usage: Option<EngineUsage>) {
        self.passage.usage = usage.or(self.passage.usage);
        self.passage.clear();
        self.passage.finish();
    }

    /// Lengths of its answer, as far as they are known.
    pub(crate) fn usage(&self) -> Option<EngineUsage> {
        self.passage.usage
    }

    /// Takes an engine's failure. None counts as the engine's end: the body is not here, by which a request
    /// that ends engines would be known.
    pub(crate) fn failed(&mut self, fault: &EngineFault) {
        assert!(fault.kind != EngineFaultKind::Cut, "what a proxy carries ends no engine");
        self.passage.failed(fault);
    }
}
