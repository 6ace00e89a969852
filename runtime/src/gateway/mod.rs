//! Requests answered by external engines: a fleet machine chooses the engine, and bodies are relayed whole.
//!
//! Each client's request runs in the task of its connection (`relay`). The task takes the machine's lock to
//! place the request and to report its first token, growth and end; it never holds the lock while it waits.
//! One task per engine (`keep`) probes it, measures it once, and tells the machine when it comes up or goes
//! down; another one (`cached`) follows what it has cached. Where the machine divides a request, one engine
//! computes the prompt, and another one takes over its KV and answers (`divided`); copies of requests show
//! whether KV arrives undamaged (`canary`). A request that may have crashed engines is retried apart from
//! others, or quarantined (`suspects`).
//!
//! Absent: the text of tokens, tokenizers, templates, vendors' fields, HTTP.

mod breaker;
#[cfg(test)]
mod breaker_tests;
mod cached;
mod calibrate;
mod canary;
#[cfg(test)]
mod canary_tests;
mod divided;
#[cfg(test)]
mod divided_tests;
mod keep;
mod meaning;
mod pass;
mod pick;
#[cfg(test)]
mod pick_tests;
mod relay;
mod speed;
#[cfg(test)]
mod speed_tests;
mod suspects;
#[cfg(test)]
mod suspects_tests;
#[cfg(test)]
mod tests;

pub(crate) use pass::pass;
pub(crate) use pick::{PickedPassage, pick};
pub(crate) use relay::{Passage, RelayError, RelayOpening, relay};

use crate::engine::EngineConfig;
use crate::env::SharedEnv;
use crate::events::{EventLog, LoggedFleet};
use crate::front::{Decision, Front, Placed, Rejected};
use crate::metrics::{Metrics, NOT_AS_DECLARED, ServingState, StateHolder};
use crate::placements::Placements;
use crate::request::Hints;
use breaker::Breaker;
use canary::CanarySubject;
use mixfleet_hal::cast::{to_i64, to_u32, to_u64};
use mixfleet_hal::outside::{EngineEndpoint, EngineFault, EngineFaultKind, EngineUsage, OutsideEngine};
use mixfleet_hal::units::{Seconds, UsdPerHour};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::canary::{CanaryConfig, CanaryPair, CanaryWatch};
use mixfleet_scheduler::cost::{CostModel, LinkCost};
use mixfleet_scheduler::fleet::{
    Arrival, Event, FleetConfig, Instance, InstanceId, OthersWork, PartyId, PromptChain, RejectReason,
    RequestDivision, Role, Terms,
};
use mixfleet_scheduler::kv::hash::PrefixHasher;
use mixfleet_scheduler::quarantine::{Quarantine, RequestDigest};
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// Assumed tokens per byte of a prompt, until answers report token counts.
const TOKENS_PER_BYTE: f64 = 0.25;
/// The weight of the latest prompt in the moving mean of that ratio.
const RATIO_FOLLOWS: f64 = 0.1;
/// Assumed context of an engine that does not report it.
const CONTEXT: u32 = 4096;
/// Assumed maximum number of sequences of an engine that does not report it.
const SEQUENCES: u32 = 64;
/// Assumed tokens per block of an engine that does not report it.
const BLOCK_TOKENS: u32 = 16;
/// Maximum number of requests from elsewhere (not sent by this gateway) that are counted per engine.
const OTHERS_MAX: u32 = 256;
/// Assumed prompt and answer of a request from elsewhere.
const OTHERS_TOKENS: u32 = 512;
/// KV bytes of a token if no engine's shape is known: those of a model of 8 billion weights with 8 KV heads,
/// bf16.
const KV_BYTES_PER_TOKEN: u64 = 131_072;
/// The first id of requests from elsewhere.
const OTHERS_FROM: RequestId = 1 << 63;
/// Time that a request waits for an unreachable engine to return.
const PATIENCE: Seconds = Seconds(3.0);
/// Time between two attempts to place such a request.
const RETRY_WAIT: Duration = Duration::from_millis(20);

/// An engine and the operator's options for it.
pub struct EngineSpec {
    /// How it is driven.
    pub engine: Arc<dyn OutsideEngine>,
    /// The engine's own name for the model, if clients use another.
    pub model: Option<String>,
    /// Its rent. Prices count only if every engine has one.
    pub price: Option<UsdPerHour>,
    /// Its cost model; if none, the engine is measured once it answers.
    pub cost: Option<CostModel>,
    /// Whether it computes prompts, generates, or both.
    pub role: Role,
    /// Whether it takes over KV although it computes prompts too.
    pub takes_kv: bool,
    /// The KV link out of it, or into it.
    pub nic: LinkCost,
    /// KV bytes of a token, where the model's shape is known.
    pub kv_bytes_per_token: Option<u64>,
}

/// What a gateway needs besides its engines.
pub struct GatewayParts {
    /// The environment.
    pub env: SharedEnv,
    /// The model's name for clients; by default the first one that an engine lists.
    pub name: Option<String>,
    /// Limits of the fleet. Values of the model are not used.
    pub limits: EngineConfig,
    /// The log of the fleet machine's events and actions, if wanted.
    pub events: Option<EventLog>,
    /// Where decisions are kept for display.
    pub placements: Arc<Placements>,
    /// The process's metrics.
    pub metrics: Metrics,
    /// Configuration of the canaries that prove KV between engines; none: engines share requests unproven.
    pub canaries: Option<CanaryConfig>,
}

/// A client's request.
#[derive(Clone, Debug)]
pub(crate) struct RelayRequest {
    /// The key of `/debug/placement/{id}` and of the log.
    pub(crate) id: String,
    pub(crate) endpoint: EngineEndpoint,
    pub(crate) body: Arc<Vec<u8>>,
    pub(crate) stream: bool,
    /// Length of the prompt's text.
    pub(crate) prompt_bytes: usize,
    /// Length of the prompt, if it came as token ids.
    pub(crate) prompt_ids: Option<u32>,
    /// The keys of its blocks, for each block size, as far as they are known.
    pub(crate) chains: Vec<PromptChain>,
    pub(crate) choices: u32,
    pub(crate) max_tokens: Option<u32>,
    /// The tenant's limit on answer tokens.
    pub(crate) granted_tokens: Option<u32>,
    /// The party whose share of the engines it uses.
    pub(crate) party: PartyId,
    pub(crate) hints: Hints,
    /// Its digest, once that is known.
    pub(crate) digest: OnceLock<RequestDigest>,
}

/// External engines behind one fleet machine.
pub struct Gateway {
    env: SharedEnv,
    metrics: Metrics,
    placements: Arc<Placements>,
    name: String,
    created: u64,
    hasher: PrefixHasher,
    members: Vec<Member>,
    /// Locked before `state`, where both are.
    quarantine: Mutex<Quarantine>,
    state: Mutex<Fleetwide>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("name", &self.name).finish_non_exhaustive()
    }
}

/// An engine, by its position.
struct Member {
    spec: EngineSpec,
    up: watch::Sender<bool>,
    /// Notified to probe it at once.
    look: Arc<Notify>,
}

/// What the lock guards.
struct Fleetwide {
    front: Front,
    tokens_per_byte: f64,
    /// Number of requests for token ids, by which engines take turns.
    reads: usize,
    /// Earliest time of the next such request.
    read_from: Seconds,
    seats: Vec<EngineSeat>,
    /// Which engines may share requests, if canaries run.
    canaries: Option<CanaryWatch>,
    /// The latest request that could have become a canary.
    canary_subject: Option<CanarySubject>,
}

/// The known state of an engine.
#[derive(Default)]
struct EngineSeat {
    /// Its description in the fleet machine; none while it is not up.
    instance: Option<Instance>,
    context: u32,
    /// Whether it is unreachable or leaving, and gets no work until a probe shows that it is back.
    rests: bool,
    /// Whether it is leaving: it is no longer listed, and ends its requests.
    is_leaving: bool,
    /// The latest fault that made it rest.
    rest_reason: String,
    /// Suspends it while it fails repeatedly.
    breaker: Breaker,
    /// Requests from here in progress there.
    own: u32,
    /// Requests whose first token has come.
    decoding: u32,
    /// Tokens in a chunk of its streams, once an answer has shown how many.
    tokens_per_chunk: Option<f64>,
    /// Requests from elsewhere that the machine knows of.
    others: u32,
    /// Number of requests from elsewhere at the latest probe.
    others_seen: u32,
    /// Suspends hand-offs of KV to it and from it while they fail.
    hand_offs: Breaker,
    /// Why it did not serve at the latest failed probe, and whether that is for want of its model.
    said: String,
    is_loading: bool,
    /// Whether nothing is expected at its address.
    is_vacant: bool,
    cache: cached::EngineCache,
    /// Layout and dtype of its KV, as far as it tells them.
    kv_form: String,
    /// Whether it checks all KV that it sends or takes.
    checks_kv: bool,
    /// Whether it refuses requests that have a priority.
    has_no_priorities: bool,
}

/// A request to be placed.
struct Asked<'a> {
    request: RequestId,
    wanted: &'a RelayRequest,
    /// Number of tokens of its answer that were generated before.
    generated: u32,
    /// Due time of its first placement, if this is a further one.
    due: Option<Seconds>,
    /// Engines that do not get it.
    avoided: &'a [usize],
    /// The avoided engines that the caller excluded; the others failed at this request.
    left_out: &'a [usize],
    /// Why no two engines share it, if so.
    undivided: Option<&'static str>,
}

impl<'a> Asked<'a> {
    /// A request that is placed for the first time, on any engine.
    fn first(request: RequestId, wanted: &'a RelayRequest) -> Self {
        Asked { request, wanted, generated: 0, due: None, avoided: &[], left_out: &[], undivided: None }
    }
}

/// Exceptions to the engines' states for one request.
#[derive(Clone, Copy)]
struct ChoiceLimits<'a> {
    /// Engines that must not get it.
    avoided: &'a [usize],
    /// Suspended engines that may get it anyway.
    resting: &'a [usize],
}

/// Where a request is placed.
struct EnginePlace {
    /// The engine that answers.
    at: usize,
    /// The engine that computes its prompt, if it is another one.
    prompt_at: Option<usize>,
    due: Seconds,
    /// Predicted time until the prompt is computed, and from then until its KV has landed.
    ttft: Seconds,
    transfer: Seconds,
    /// Predicted time of a further token.
    tbt: Seconds,
    /// Prompt tokens assumed to be cached on the engine that computes the prompt.
    cached: u32,
    /// Predicted wait of the prompt for others and for room.
    waits: Seconds,
    /// The two engines that share it, and those that would if their KV were proven.
    pairs: Vec<CanaryPair>,
    /// The other engines that could take all of it, best first.
    runners_up: Vec<usize>,
}

impl GatewayParts {
    /// Waits for the first engine that answers, and starts.
    pub async fn start(self, specs: Vec<EngineSpec>) -> Arc<Gateway> {
        let GatewayParts { env, name, limits, events, placements, metrics, canaries } = self;
        let name = keep::first_name(&env, name, &specs, &metrics).await;
        let kv_bytes_per_token = specs.iter().filter_map(|spec| spec.kv_bytes_per_token).max();
        let fleet = FleetConfig {
            drop_at_decode: false,
            pull: false,
            rebalance: None,
            replicate: None,
            kv_bytes_per_token: kv_bytes_per_token.unwrap_or(KV_BYTES_PER_TOKEN),
            // KV leaves when all of the prompt is computed, and the first token is drawn where it lands
            layers: 1,
            first_token_at_decode: true,
            ..limits.fleet
        };
        let seat =
            |spec: &EngineSpec| EngineSeat { checks_kv: spec.engine.checks_kv(), ..Default::default() };
        let seats = specs.iter().map(seat).collect();
        let member = |spec| Member { spec, up: watch::Sender::new(false), look: Arc::default() };
        let fleet = LoggedFleet::new(fleet, events, metrics.clone());
        let state = Fleetwide {
            front: Front::new(env.clone(), fleet, limits.flex_deadline, 1),
            tokens_per_byte: TOKENS_PER_BYTE,
            reads: 0,
            read_from: Seconds::ZERO,
            seats,
            canaries: canaries.map(CanaryWatch::new),
            canary_subject: None,
        };
        let gateway = Arc::new(Gateway {
            created: to_u64(env.unix_time().0),
            hasher: cached::hasher(&*env, &name),
            env,
            metrics,
            placements,
            name,
            members: specs.into_iter().map(member).collect(),
            quarantine: Mutex::default(),
            state: Mutex::new(state),
        });
        keep::first_looks(&gateway).await;
        for at in 0..gateway.members.len() {
            gateway.env.spawn(Box::pin(cached::follow(Arc::downgrade(&gateway), at)));
        }
        gateway
    }
}

impl Gateway {
    /// The model's name for clients.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Unix time at which the gateway started, in seconds.
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    /// Returns the maximum tokens of prompt and answer together, over all engines.
    pub(crate) fn context(&self) -> u32 {
        self.lock().context()
    }

    fn lock(&self) -> MutexGuard<'_, Fleetwide> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engine(&self, at: usize) -> &Arc<dyn OutsideEngine> {
        &self.members[at].spec.engine
    }

    /// Assumed length of a request's prompt, until an engine tells it.
    pub(crate) fn assumed_prompt_tokens(&self, wanted: &RelayRequest) -> u32 {
        self.lock().lengths(wanted).0
    }

    /// The next request's id.
    fn next_request(&self) -> RequestId {
        self.lock().front.next_request()
    }

    /// Places a request on an engine, or on two, excluding the avoided ones.
    fn place(&self, asked: &Asked<'_>) -> Result<EnginePlace, Rejected> {
        let &Asked { request, wanted, generated, due, avoided, left_out, mut undivided } = asked;
        let now = self.env.now();
        let mut state = self.lock();
        let (prompt_tokens, max_tokens) = state.lengths(wanted);
        let arrival = Arrival {
            prompt_tokens: prompt_tokens + generated,
            max_tokens: max_tokens.saturating_sub(generated).max(1),
            chains: wanted.chains.clone(),
            replay: due,
            ..state.front.arrival(request, &wanted.hints, wanted.party)
        };
        let (decided, pairs) = state.decide_any(now, &arrival, avoided, &mut undivided);
        let Decision { verdict, explanation, .. } = decided;
        let told_pairs: Vec<Value> = pairs.iter().map(|pair| self.explain_pair(&state, *pair)).collect();
        let placed = verdict.map(|Placed { prefill, decode, urgency, .. }| {
            let (at, prompt_at) = (decode.0 as usize, prefill.0 as usize);
            let prompt_at = (prompt_at != at).then_some(prompt_at);
            for at in prompt_at.into_iter().chain([at]) {
                state.seats[at].own += 1;
                self.note_placed(&mut state, at, now, request);
            }
            let terms = explanation.chosen().and_then(|chosen| chosen.terms);
            let time = |of: fn(&Terms) -> f64| Seconds(terms.as_ref().map_or(0.0, of));
            EnginePlace {
                at,
                prompt_at,
                due: urgency.due,
                ttft: time(|terms| terms.ttft_s),
                transfer: time(|terms| terms.transfer_s),
                tbt: time(|terms| terms.tbt_s),
                cached: terms.map_or(0, |terms| terms.cached_tokens),
                waits: time(|terms| terms.queue_s + terms.kv_wait_s),
                pairs,
                runners_up: pick::runners_up(&explanation),
            }
        });
        drop(state);
        let names = |engines: &mut dyn Iterator<Item = &usize>| -> Vec<&str> {
            engines.map(|&at| self.engine(at).name()).collect()
        };
        let failed = names(&mut avoided.iter().filter(|at| !left_out.contains(at)));
        let fields = [
            ("resting", self.resting_engines().into()),
            ("failed", failed.into()),
            ("left_out", names(&mut left_out.iter()).into()),
            ("undivided", undivided.into()),
            ("canary", told_pairs.into()),
        ];
        self.placements.decided(&wanted.id, &explanation, &fields);
        placed
    }

    /// Like [`place`](Self::place), but waits up to `PATIENCE` while an unreachable engine could take it.
    async fn place_patiently(&self, asked: &Asked<'_>) -> Result<EnginePlace, Rejected> {
        let until = self.env.now() + PATIENCE;
        loop {
            let placed = self.place(asked);
            let is_hopeful = matches!(placed, Err((RejectReason::NoInstance, _)))
                && self.env.now() < until
                && self.lock().some_rest(asked.avoided);
            if !is_hopeful {
                return placed;
            }
            self.env.sleep(RETRY_WAIT).await;
        }
    }

    /// Reports an event to the fleet machine.
    fn tell(&self, event: Event) {
        self.lock().front.step(event);
    }

    /// Handles a fault of an engine: an unreachable one gets no requests until it answers a probe.
    fn fault(&self, at: usize, id: &str, fault: &EngineFault) {
        let engine = self.engine(at).name();
        tracing::warn!(id, engine, kind = ?fault.kind, %fault, "an engine gave no answer");
        self.metrics.engine_failed(engine, fault.kind);
        if matches!(fault.kind, EngineFaultKind::Unreachable | EngineFaultKind::Cut) {
            let mut state = self.lock();
            let seat = &mut state.seats[at];
            (seat.rests, seat.rest_reason) = (true, fault.to_string());
            self.count_instances(&state);
            drop(state);
            self.members[at].look.notify_one();
        }
    }

    /// Learns from the lengths of a request that is done.
    fn learn_lengths(&self, wanted: &RelayRequest, usage: &EngineUsage) {
        if wanted.prompt_ids.is_none() && wanted.prompt_bytes > 0 && usage.prompt_tokens > 0 {
            let ratio = f64::from(usage.prompt_tokens) / wanted.prompt_bytes as f64;
            let mut state = self.lock();
            state.tokens_per_byte += (ratio.clamp(0.001, 4.0) - state.tokens_per_byte) * RATIO_FOLLOWS;
        }
    }

    fn count_instances(&self, state: &Fleetwide) {
        let up = state.seats.iter().filter(|seat| seat.instance.is_some()).count();
        self.metrics.instances.set(to_i64(up));
        // in any role, and even while it is suspended
        let serves = |seat: &EngineSeat| seat.instance.is_some() && !seat.rests;
        self.metrics.serves.set(state.seats.iter().any(serves).into());
        let now = self.env.now();
        for (at, seat) in state.seats.iter().enumerate() {
            let engine = self.engine(at).name();
            self.metrics.engine_rests_now(engine, seat.breaker.is_open());
            if seat.is_vacant {
                self.metrics.leave_state(engine);
                continue;
            }
            if seat.instance.is_none() && seat.said.is_empty() {
                // it has not been probed yet
                continue;
            }
            let (serving, reason) = seat.state(self.metrics.is_degraded(engine));
            self.metrics.enter_state(now, (StateHolder::Engine, engine), serving, &reason);
        }
    }
}

impl EngineSeat {
    /// Its state, and the reason.
    fn state(&self, is_other_part: bool) -> (ServingState, String) {
        if self.instance.is_none() {
            let state = if self.is_loading { ServingState::Loading } else { ServingState::Down };
            (state, self.said.clone())
        } else if self.is_leaving {
            (ServingState::Draining, "its name no longer resolves to it".into())
        } else if self.rests {
            (ServingState::Degraded, format!("avoided until it answers a probe: {}", self.rest_reason))
        } else if let Some(fault) = self.breaker.open_fault() {
            (ServingState::Degraded, format!("avoided after repeated failures: {fault}"))
        } else if is_other_part {
            (ServingState::Degraded, NOT_AS_DECLARED.into())
        } else {
            (ServingState::Healthy, String::new())
        }
    }
}

impl Fleetwide {
    fn context(&self) -> u32 {
        self.seats.iter().map(|seat| seat.context).max().filter(|context| *context > 0).unwrap_or(CONTEXT)
    }

    /// Assumed tokens of the prompt, and the maximum of the answer. Both are clamped to the model's context;
    /// the engine checks the real lengths.
    fn lengths(&self, wanted: &RelayRequest) -> (u32, u32) {
        let context = self.context().max(2);
        let by_bytes = || to_u32(to_u64(wanted.prompt_bytes as f64 * self.tokens_per_byte));
        let prompt = wanted.prompt_ids.unwrap_or_else(by_bytes).clamp(1, context - 1);
        let most = wanted.max_tokens.unwrap_or(context).min(wanted.granted_tokens.unwrap_or(context));
        (prompt, most.clamp(1, context - prompt))
    }

    /// Whether an engine has a role or a KV link, so that the machine may divide requests.
    fn divides(&self) -> bool {
        let has_part = |own: &Instance| own.role != Role::Auto || own.nic.is_some();
        self.seats.iter().filter_map(|seat| seat.instance.as_ref()).any(has_part)
    }

    /// Whether an unreachable engine outside `avoided` may soon take work again.
    fn some_rest(&self, avoided: &[usize]) -> bool {
        let resting = |seat: &EngineSeat| seat.rests && seat.instance.is_some();
        self.seats.iter().enumerate().any(|(at, seat)| resting(seat) && !avoided.contains(&at))
    }

    /// Has the machine place a request on engines that are not avoided. If none can take it, suspended
    /// engines are offered too, then all engines regardless of role. Also returns the pair that shares it,
    /// and the pair that would if its KV were proven. `undivided` is set to the reason why one engine does
    /// all of it.
    fn decide_any(
        &mut self,
        now: Seconds,
        arrival: &Arrival,
        avoided: &[usize],
        undivided: &mut Option<&'static str>,
    ) -> (Decision, Vec<CanaryPair>) {
        let divides = self.divides();
        let is_whole = divides && undivided.is_some();
        let due_again = self.resting(now, avoided, false);
        let limits = ChoiceLimits { avoided, resting: &due_again };
        let (mut decided, mut pairs) = self.decide_proven(arrival, limits, is_whole);
        // Failing engines are no reason to reject a request: if no other is left, one of them gets it.
        let resting = self.resting(now, avoided, true);
        let limits = ChoiceLimits { avoided, resting: &resting };
        if is_for_lack_of_engines(&decided) && !resting.is_empty() {
            let (again, more) = self.decide_proven(arrival, limits, is_whole);
            decided = again;
            pairs.extend(more);
        }
        let unproven = pairs.first().and_then(|pair| self.barred(*pair));
        // Last, roles are ignored: every engine can compute prompts and answer.
        if is_for_lack_of_engines(&decided) && divides && !is_whole {
            *undivided = unproven.or(Some("no two engines with these roles can take it"));
            decided = self.decide(arrival, limits, RequestDivision::Undivided);
        }
        match canary::placed_pair(&decided) {
            Some(pair) => pairs.push(pair),
            None => *undivided = undivided.or(unproven),
        }
        (decided, pairs)
    }

    /// Has the machine place a request on engines that [may take](Self::may_take) it.
    fn decide(&mut self, arrival: &Arrival, limits: ChoiceLimits<'_>, division: RequestDivision) -> Decision {
        let exclude = self.instances_where(|at| !self.may_take(at, limits));
        self.front.decide(Arrival { exclude, division, ..arrival.clone() })
    }

    /// Allows two engines to share a request, except engines in `apart` and those whose hand-offs fail.
    fn divided_but_for(&self, apart: &[usize]) -> RequestDivision {
        let shares_nothing = |at: usize| apart.contains(&at) || self.seats[at].hand_offs.is_open();
        RequestDivision::NotAmong(self.instances_where(shares_nothing))
    }

    /// Returns the engines that are up and meet a condition.
    fn instances_where(&self, meets: impl Fn(usize) -> bool) -> Vec<InstanceId> {
        let is_up = |at: &usize| self.seats[*at].instance.is_some();
        (0..self.seats.len()).filter(is_up).filter(|at| meets(*at)).map(|at| InstanceId(to_u32(at))).collect()
    }

    /// Reports to the machine how many requests from elsewhere an engine has.
    fn tell_others(&mut self, at: usize, others: u32) {
        let known = self.seats[at].others;
        let id = |k: u32| OTHERS_FROM + ((at as RequestId) << 32) + RequestId::from(k);
        let came = (known..others).map(|k| OthersWork::Answer {
            request: id(k),
            prompt_tokens: OTHERS_TOKENS,
            max_tokens: OTHERS_TOKENS,
            ready_in: Seconds::ZERO,
            class: 0,
            output_tokens_hint: None,
            generated: 1,
        });
        let gone = (others..known).map(|k| OthersWork::AnswerGone { request: id(k), length: None });
        let works: Vec<OthersWork> = came.chain(gone).collect();
        self.seats[at].others = others;
        if !works.is_empty() {
            self.front.step(Event::Others { instance: InstanceId(to_u32(at)), works });
        }
    }
}

/// Whether a request is rejected because no engine that gets requests could ever take it.
fn is_for_lack_of_engines(decided: &Decision) -> bool {
    let reasons = decided.verdict.as_ref().err().map(|(reason, _)| reason);
    matches!(reasons, Some(RejectReason::NoInstance | RejectReason::TooLarge { .. }))
}
