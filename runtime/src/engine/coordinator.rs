//! The coordinator between clients, the fleet machine and the workers. It alone writes to a client, so that
//! every token reaches the client exactly once.

use super::answers::Drawn;
use super::copies::CopyInProgress;
use super::directory::Directory;
use super::identity::Identity;
use super::messages::{EndNotice, FromWorker, Job, Order, Report, Source};
use super::transfers;
use super::watch::KvLinks;
use crate::env::SharedEnv;
use crate::front::{Decision, Front, Placed};
use crate::mailbox::MessageReceiver;
use crate::metrics::Metrics;
use crate::placements::Placements;
use crate::request::{
    Failure, GenerateRequest, Rejection, Submission, UPDATES_BESIDE_TOKENS, Update, UpdateSender,
};
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{BatchLoad, RequestId, Urgency};
use mixfleet_scheduler::fleet::{Action, Arrival, Event, InstanceId, Objective, PromptChain, RejectReason};
use mixfleet_scheduler::kv::hash::PrefixHasher;
use mixfleet_scheduler::quarantine::Quarantine;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

/// Clients that left and are not handled yet; tasks that report more wait.
pub(super) const CLIENTS_LEAVING_MAX: usize = 64;

/// An instance as the coordinator sees it.
#[derive(Clone, Debug)]
pub(super) struct InstanceHandle {
    /// The device's id.
    pub(super) device: String,
    /// Dtype of its KV.
    pub(super) kv: DType,
    /// Whether it sends and takes KV of eight bits.
    pub(super) codes: bool,
    /// Tokens per KV block.
    pub(super) block_tokens: u32,
    /// Maximum interval between its reports while it has work.
    pub(super) silence_max: Seconds,
    /// Time of its last report.
    pub(super) heard_at: Seconds,
}

impl InstanceHandle {
    /// Time at which it counts as silent, if it has had work since `since` and reports nothing more.
    pub(super) fn silent_after(&self, since: Seconds) -> Seconds {
        since.max(self.heard_at) + self.silence_max
    }
}

/// The stage of a placement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stage {
    /// Its prompt is not computed yet, or it decodes where it was computed.
    Placed,
    /// Its prompt was computed on another instance than the one that decodes it.
    Computed { at: Seconds },
    /// All of its KV was sent to where it decodes.
    Joined,
}

/// A request in progress.
pub(super) struct Tracked {
    pub(super) wanted: Arc<GenerateRequest>,
    updates: UpdateSender,
    /// Tokens that the client has.
    pub(super) generated: Vec<u32>,
    /// Tokens of the decode instance that came before the first one, which another instance draws, by index.
    pub(super) early: BTreeMap<u32, Drawn>,
    pub(super) attempt: u32,
    /// The objective, which stays when an instance is lost.
    pub(super) objective: Objective,
    /// The place in the order, which stays when an instance is lost.
    pub(super) urgency: Urgency,
    /// Predicted time at which its KV is where it decodes.
    pub(super) ready: Seconds,
    pub(super) prefill: InstanceId,
    pub(super) decode: InstanceId,
    /// The instance that lends a part of the prefix; none once it has been sent.
    pub(super) pull: Option<Source>,
    /// When the client was told that work on it began.
    pub(super) started_at: Option<Seconds>,
    pub(super) stage: Stage,
    placed_at: Seconds,
    /// Time at which its instances were last given an order.
    pub(super) asked_at: Seconds,
    /// Instances that were lost while working on it, and whether each loss is certain: an instance that is
    /// only unreachable may return.
    pub(super) losses: Vec<(InstanceId, bool)>,
    /// Whether it waits while another suspect is tried.
    pub(super) waits_apart: bool,
    /// Tokens that the client had when it was last placed.
    pub(super) generated_before: usize,
    /// Number of times that there was no memory for its KV.
    pub(super) refusals: u32,
    _watched: oneshot::Sender<()>,
}

impl Tracked {
    /// Sends an update to the client. The channel has room for every mandatory update; the watching task
    /// notices when the client is gone.
    pub(super) fn tell(&self, update: Update) {
        if let Err(TrySendError::Full(update)) = self.updates.try_send(update) {
            debug_assert!(false, "request {}: no room for {update:?}", self.wanted.id);
            tracing::error!(id = %self.wanted.id, "a client's channel is full: please report this");
        }
    }

    /// Tells the client the placement, unless the channel only has room for the mandatory updates.
    fn tell_place(&self, prefill: String, decode: String) {
        let still_to_come =
            self.wanted.max_tokens as usize - self.generated.len() + UPDATES_BESIDE_TOKENS - 1;
        if self.updates.capacity() > still_to_come {
            self.tell(Update::Placed { prefill, decode });
        }
    }
}

/// The coordinator's state.
pub(super) struct Coordinator {
    pub(super) env: SharedEnv,
    pub(super) front: Front,
    /// Instances that are up.
    pub(super) instances: BTreeMap<InstanceId, InstanceHandle>,
    /// Inboxes of the instances.
    pub(super) directory: Directory,
    /// The model's identity in block hashes.
    pub(super) identity: Identity,
    /// Upper bound of token ids.
    pub(super) vocabulary: u32,
    /// Requests from the API.
    pub(super) submissions: mpsc::Receiver<Submission>,
    /// Time that a request without a place waits for one.
    pub(super) patience: Seconds,
    /// Reports of the workers.
    pub(super) reports: MessageReceiver<Report>,
    /// Decisions for `/debug/placement`.
    pub(super) placements: Arc<Placements>,
    pub(super) metrics: Metrics,
    /// Requests by id: those that end together end in this order.
    pub(super) requests: BTreeMap<RequestId, Tracked>,
    /// Prefixes that are being copied ahead of demand.
    pub(super) copies: BTreeMap<RequestId, CopyInProgress>,
    /// Requests that lost their place and have no other yet, with the times at which they fail.
    pub(super) unplaced: BTreeMap<RequestId, Seconds>,
    /// Requests that may have ended instances.
    pub(super) quarantine: Quarantine,
    /// What other routers told of instances that are up here.
    pub(super) rumours: VecDeque<EndNotice>,
    /// Those that clients sent again while others are tried.
    pub(super) held: VecDeque<Submission>,
    pub(super) links: KvLinks,
    /// Start of the environment in seconds since 1970: instances order the requests of all routers by one
    /// clock.
    pub(super) began: Seconds,
    pub(super) left: mpsc::Receiver<RequestId>,
    pub(super) leave: mpsc::Sender<RequestId>,
    /// Whether a tick of the watch is scheduled.
    pub(super) watching: bool,
    pub(super) tick: mpsc::Sender<()>,
    pub(super) ticks: mpsc::Receiver<()>,
}

impl Coordinator {
    /// Serves until every handle to the engine is gone and the last request is done.
    pub(super) async fn serve(mut self) {
        let mut open = true;
        while open || !self.requests.is_empty() {
            let retry_due = self.retry_due();
            tokio::select! {
                biased;
                report = self.reports.recv() => match report {
                    Some((instance, message)) => self.report(instance, message),
                    None => return,
                },
                Some(request) = self.left.recv() => self.client_left(request),
                submission = self.submissions.recv(), if open => match submission {
                    Some(submission) => self.submit(submission),
                    None => open = false,
                },
                Some(()) = self.ticks.recv() => self.check_watch(),
                () = retry_due => {
                    self.place_again();
                    self.submit_held();
                }
            }
        }
    }

    pub(super) fn fleet_step(&mut self, event: Event) -> Vec<Action> {
        let actions = self.front.step(event);
        self.change_roles(&actions);
        actions
    }

    /// Has a request placed or rejected, and what goes with it done; `tokens` are all that it has by now.
    pub(super) fn decide(
        &mut self,
        arrival: Arrival,
        wanted: &Arc<GenerateRequest>,
        tokens: &[u32],
    ) -> Decision {
        let decision = self.front.decide(arrival);
        self.change_roles(&decision.before);
        self.begin_copies(&decision.before, wanted, tokens);
        decision
    }

    fn change_roles(&self, actions: &[Action]) {
        for action in actions {
            if let Action::SetRole { instance, role } = *action {
                tracing::info!(%instance, ?role, "role changed");
                if let Some(handle) = self.instances.get(&instance) {
                    self.metrics.role_changed(&handle.device, role);
                }
                self.send(instance, Order::SetRole { role });
            }
        }
    }

    pub(super) fn hasher(&self, wanted: &GenerateRequest, kv: DType) -> PrefixHasher {
        self.identity.hasher(kv, wanted.cache_salt.clone())
    }

    /// The keys of the full blocks of a request's `tokens`, for every kind of KV blocks.
    pub(super) fn chains(&self, wanted: &GenerateRequest, tokens: &[u32]) -> Vec<PromptChain> {
        let mut kinds = BTreeSet::new();
        let instances = self.instances.values().filter(|i| kinds.insert((i.block_tokens, i.kv)));
        let chains = instances.map(|i| PromptChain {
            block_tokens: i.block_tokens,
            kv_dtype: i.kv,
            hashes: self.hasher(wanted, i.kv).chain(tokens, i.block_tokens),
        });
        chains.collect()
    }

    /// The arrival of a request for the fleet machine, with the block keys for every kind of KV blocks.
    pub(super) fn arrival(&self, request: RequestId, wanted: &GenerateRequest, tokens: &[u32]) -> Arrival {
        let generated = tokens.len() - wanted.prompt_ids.len();
        Arrival {
            prompt_tokens: to_u32(tokens.len()),
            max_tokens: wanted.max_tokens - to_u32(generated),
            chains: self.chains(wanted, tokens),
            ..self.front.arrival(request, &wanted.hints, wanted.party)
        }
    }

    pub(super) fn submit(&mut self, submission: Submission) {
        let Some(submission) = self.admit_suspect(submission) else { return };
        let Submission { request: wanted, updates, admitted } = submission;
        if wanted.prompt_ids.is_empty() || wanted.max_tokens == 0 {
            let message = "a request needs at least one prompt token and one token to generate";
            let _ = admitted.send(Err(Rejection::TooLarge(message.into())));
            return;
        }
        self.end_pauses();
        let request = self.front.next_request();
        let wanted = Arc::new(wanted);
        let arrival = self.arrival(request, &wanted, &wanted.prompt_ids);
        let objective = arrival.objective;
        let Decision { verdict, explanation, .. } = self.decide(arrival, &wanted, &wanted.prompt_ids);
        match verdict {
            Ok(Placed { prefill, decode, pull, urgency }) => {
                if admitted.send(Ok(())).is_err() {
                    self.fleet_step(Event::Cancelled { request });
                    return;
                }
                let _watched = self.watch(request, updates.clone());
                let tracked = Tracked {
                    wanted,
                    updates,
                    generated: Vec::new(),
                    attempt: 0,
                    objective,
                    urgency,
                    ready: self.env.now() + explanation.ready_in(),
                    prefill,
                    decode,
                    pull: transfers::source(pull, &explanation),
                    started_at: None,
                    stage: Stage::Placed,
                    placed_at: self.env.now(),
                    asked_at: self.env.now(),
                    early: BTreeMap::new(),
                    losses: Vec::new(),
                    waits_apart: false,
                    generated_before: 0,
                    refusals: 0,
                    _watched,
                };
                self.placements.decided(&tracked.wanted.id, &explanation, &[]);
                self.requests.insert(request, tracked);
                self.start(request);
            }
            Err((reason, retry_after)) => {
                self.placements.decided(&wanted.id, &explanation, &[]);
                refuse(admitted, &reason, retry_after);
            }
        }
    }

    /// Reports when the client leaves. The task, which holds the channel, ends when the returned sender is
    /// dropped: when the request is done.
    fn watch(&self, request: RequestId, updates: UpdateSender) -> oneshot::Sender<()> {
        let leave = self.leave.clone();
        let (watched, done) = oneshot::channel();
        self.env.spawn(Box::pin(async move {
            tokio::select! {
                biased;
                _ = done => {}
                () = updates.closed() => {
                    let _ = leave.send(request).await;
                }
            }
        }));
        watched
    }

    /// Sends a placed request to its instances; for a split one, room is made at the receiver first.
    pub(super) fn start(&mut self, request: RequestId) {
        let now = self.env.now();
        let tracked = self.requests.get_mut(&request).expect("placed by the caller");
        tracked.asked_at = now;
        tracked.generated_before = tracked.generated.len();
        self.note_try(request);
        self.begin_watch();
        let tracked = &self.requests[&request];
        let devices = [tracked.prefill, tracked.decode].map(|id| self.instances[&id].device.clone());
        let [prefill, decode] = devices;
        tracked.tell_place(prefill, decode);
        if tracked.prefill == tracked.decode {
            let (job, pull) = (self.job(request, tracked.prefill), tracked.pull);
            self.send(tracked.prefill, Order::Add { job, hand_off: None, pull });
        } else {
            let job = self.job(request, tracked.decode);
            self.send(tracked.decode, Order::Reserve { job, sender: tracked.prefill });
        }
    }

    pub(super) fn job(&self, request: RequestId, on: InstanceId) -> Job {
        let Tracked { wanted, generated, attempt, urgency, ready, .. } = &self.requests[&request];
        Job {
            request,
            urgency: Urgency { due: self.began + urgency.due, ..*urgency },
            ready: self.began + *ready,
            attempt: *attempt,
            wanted: wanted.clone(),
            generated: generated.clone(),
            hasher: self.hasher(wanted, self.instances[&on].kv),
        }
    }

    pub(super) fn send(&self, instance: InstanceId, order: Order) {
        self.directory.order(instance, order);
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each report")]
    pub(super) fn report(&mut self, instance: InstanceId, message: FromWorker) {
        let now = self.env.now();
        if let Some(handle) = self.instances.get_mut(&instance) {
            handle.heard_at = now;
        }
        match message {
            FromWorker::Up { instance, kv, codes, silence_max } => {
                self.up(*instance, (kv, codes), silence_max);
            }
            FromWorker::Inspect(answer) => {
                let _ = answer.try_send(self.front.machine().held());
            }
            // Reports after `Down` belong to the instance's earlier life.
            _ if !self.instances.contains_key(&instance) => {}
            FromWorker::Link { to, cost } => self.link_up(instance, to, cost),
            FromWorker::Admitted { request, attempt, tokens_cached } => {
                if self.is_current(instance, request, attempt) {
                    self.admitted(request, tokens_cached);
                }
            }
            FromWorker::Reserved { request, attempt, lacking, landing } => {
                self.reserved(instance, request, attempt, lacking, landing);
            }
            FromWorker::Kept { request } => {
                self.end_copy(request, true);
            }
            FromWorker::Revoked { request, attempt } => {
                if !self.end_copy(request, false) && self.is_current(instance, request, attempt) {
                    self.fleet_step(Event::Cancelled { request });
                    self.replay(request);
                }
            }
            FromWorker::Refused { request, attempt, sender, reason } => {
                if !self.end_copy(request, false) && self.is_current(instance, request, attempt) {
                    self.refused(request, (sender, instance), reason);
                }
            }
            FromWorker::Progress { request, tokens } => {
                self.fleet_step(Event::PrefillProgress { request, instance, tokens });
            }
            FromWorker::LinkDown { to } => self.link_down(instance, to),
            FromWorker::Joined { request } => {
                let tracked = self.requests.get_mut(&request).filter(|t| t.decode == instance);
                if let Some(tracked) = tracked
                    && let Stage::Computed { at } = std::mem::replace(&mut tracked.stage, Stage::Joined)
                {
                    self.metrics.kv_exposed_s.observe((self.env.now() - at).0);
                }
                self.fleet_step(Event::TransferDone { request, instance });
            }
            FromWorker::Drawn { request, attempt, index, token, logprobs, finish } => {
                if self.is_current(instance, request, attempt) {
                    self.drawn(instance, request, index, Drawn { token, logprobs, finish });
                }
            }
            FromWorker::RequestFailed { request, attempt, failure } => {
                if !self.end_copy(request, false) && self.is_current(instance, request, attempt) {
                    self.fail(request, failure);
                }
            }
            FromWorker::Stored { tier, hashes } => {
                self.fleet_step(Event::KvStored { instance, hashes, tier });
            }
            FromWorker::Evicted { tier, hashes } => {
                self.fleet_step(Event::KvEvicted { instance, hashes, tier });
            }
            FromWorker::Tier { tier, cost } => {
                self.fleet_step(Event::TierUp { instance, tier, cost });
            }
            FromWorker::Load(load) => self.gauge(instance, &load),
            FromWorker::Ran(steps) => self.ran(instance, steps),
            FromWorker::Others(works) => self.others(instance, works),
            FromWorker::Ended(notice) => self.hear_end(notice),
            FromWorker::Down(error) => self.failed(instance, &error),
            FromWorker::Unreachable(error) => self.down(instance, &error, false),
        }
    }

    /// Whether a report belongs to the current placement: reports of an earlier one may be late, and other
    /// instances have no say.
    fn is_current(&self, instance: InstanceId, request: RequestId, attempt: u32) -> bool {
        self.requests.get(&request).is_some_and(|tracked| {
            tracked.attempt == attempt && [tracked.prefill, tracked.decode].contains(&instance)
        })
    }

    fn admitted(&mut self, request: RequestId, tokens_cached: u32) {
        let now = self.env.now();
        let tracked = self.requests.get_mut(&request).expect("checked by the caller");
        tracked.pull = None;
        if tracked.started_at.is_none() {
            tracked.started_at = Some(now);
            tracked.tell(Update::Started { cached_tokens: tokens_cached });
            self.metrics.request_queue_time_s.observe((now - tracked.placed_at).0);
            self.metrics.request_began(request, now);
            let (env, trace) = (&*self.env, tracked.wanted.hints.trace);
            self.metrics.traces.phase(env, trace, "queue", (tracked.placed_at, now), Vec::new);
        }
    }

    /// Cancels the request of a client that left.
    fn client_left(&mut self, request: RequestId) {
        if let Some(tracked) = self.requests.remove(&request) {
            self.note_over(request, &tracked.wanted, false);
            self.cancel_everywhere(request, &tracked);
            self.fleet_step(Event::Cancelled { request });
        }
    }

    pub(super) fn fail(&mut self, request: RequestId, failure: Failure) {
        self.unplaced.remove(&request);
        if let Some(tracked) = self.requests.remove(&request) {
            tracked.tell(Update::Failed(failure));
            self.note_over(request, &tracked.wanted, false);
            self.cancel_everywhere(request, &tracked);
            self.fleet_step(Event::Cancelled { request });
        }
    }

    pub(super) fn cancel_everywhere(&self, request: RequestId, tracked: &Tracked) {
        let holder = tracked.pull.map(|source| source.holder);
        for instance in [Some(tracked.prefill), Some(tracked.decode), holder]
            .into_iter()
            .flatten()
            .collect::<BTreeSet<_>>()
        {
            self.send(instance, Order::Cancel { request });
        }
    }

    fn gauge(&self, instance: InstanceId, load: &BatchLoad) {
        self.metrics.load(&self.instances[&instance].device, load);
    }
}

fn refuse(
    admitted: oneshot::Sender<Result<(), Rejection>>,
    reason: &RejectReason,
    retry_after: Option<Seconds>,
) {
    let _ = admitted.send(Err(Rejection::new(reason, retry_after)));
}
