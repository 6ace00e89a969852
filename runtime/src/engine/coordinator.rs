//! The coordinator between clients, the fleet machine and the workers. It alone writes to a client, so that
//! every token reaches the client exactly once.

use super::answers::Drawn;
use super::directory::Directory;
use super::identity::Identity;
use super::messages::{EndNotice, FromWorker, Order, Report};
use super::transfers::{ReceiverRoom, Transferred};
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
use mixfleet_scheduler::fleet::{Action, Arrival, Event, Explanation, InstanceId, Objective, PromptChain};
use mixfleet_scheduler::kv::hash::PrefixHasher;
use mixfleet_scheduler::quarantine::Quarantine;
use mixfleet_scheduler::transfer::{KvTransfers, PrefixSource, Reporter};
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

/// A request in progress.
pub(super) struct Tracked {
    pub(super) wanted: Arc<GenerateRequest>,
    updates: UpdateSender,
    /// Tokens that the client has.
    pub(super) generated: Vec<u32>,
    /// The objective, which stays when an instance is lost.
    pub(super) objective: Objective,
    /// The place in the order, which stays when an instance is lost.
    pub(super) urgency: Urgency,
    /// Predicted time at which its KV is where it decodes.
    pub(super) ready: Seconds,
    /// When the client got the notice that work on it began.
    pub(super) started_at: Option<Seconds>,
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
    /// Where requests and copies are, and what they wait for.
    pub(super) transfers: KvTransfers<Drawn>,
    /// Prefixes that are being copied ahead of demand, as prompts.
    pub(super) copies: BTreeMap<RequestId, Arc<GenerateRequest>>,
    /// Requests that lost their place and have no other yet, with the times at which they fail.
    pub(super) unplaced: BTreeMap<RequestId, Seconds>,
    /// Requests that may have ended instances.
    pub(super) quarantine: Quarantine,
    /// Other routers' reports about instances that are up here.
    pub(super) rumours: VecDeque<EndNotice>,
    /// Requests that clients sent again while others are tried.
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

    /// Places or rejects a request, and carries out the consequences; `tokens` are all tokens so far.
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
            Ok(placed) => {
                if admitted.send(Ok(())).is_err() {
                    self.fleet_step(Event::Cancelled { request });
                    return;
                }
                let _watched = self.watch(request, updates.clone());
                let tracked = Tracked {
                    wanted,
                    updates,
                    generated: Vec::new(),
                    objective,
                    urgency: placed.urgency,
                    ready: self.env.now(),
                    started_at: None,
                    placed_at: self.env.now(),
                    asked_at: self.env.now(),
                    losses: Vec::new(),
                    waits_apart: false,
                    generated_before: 0,
                    refusals: 0,
                    _watched,
                };
                self.requests.insert(request, tracked);
                self.start(request, &placed, &explanation);
            }
            Err((reason, retry_after)) => {
                self.placements.decided(&wanted.id, &explanation, &[]);
                let why = self.metrics.why_none_serves(self.env.now());
                let _ = admitted.send(Err(Rejection::new(&reason, retry_after).explained(why)));
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

    /// Sends a placed request to its instances.
    pub(super) fn start(&mut self, request: RequestId, placed: &Placed, explanation: &Explanation) {
        let now = self.env.now();
        let Placed { prefill, decode, pull, .. } = *placed;
        let tracked = self.requests.get_mut(&request).expect("placed by the caller");
        tracked.ready = now + explanation.ready_in();
        tracked.asked_at = now;
        tracked.generated_before = tracked.generated.len();
        self.placements.decided(&tracked.wanted.id, explanation, &[]);
        let device = |id| self.instances[&id].device.clone();
        tracked.tell_place(device(prefill), device(decode));
        let pull = PrefixSource::of(pull, explanation);
        self.transfer(Transferred::Placed { request, prefill, decode, pull });
        self.note_try(request, prefill);
        self.begin_watch();
    }

    pub(super) fn send(&self, instance: InstanceId, order: Order) {
        self.directory.order(instance, order);
    }

    pub(super) fn report(&mut self, instance: InstanceId, message: FromWorker) {
        let now = self.env.now();
        if let Some(handle) = self.instances.get_mut(&instance) {
            handle.heard_at = now;
        }
        let by = |request, attempt| Reporter { instance, request, attempt };
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
                self.admitted(by(request, attempt), tokens_cached);
            }
            FromWorker::Reserved { request, attempt, lacking, landing } => {
                let room = ReceiverRoom { lacking, landing };
                self.transfer(Transferred::Reserved { by: by(request, attempt), room });
            }
            FromWorker::Kept { request } => self.transfer(Transferred::Kept { request }),
            FromWorker::Revoked { request, attempt } => {
                self.transfer(Transferred::Revoked { by: by(request, attempt) });
            }
            FromWorker::Refused { request, attempt, sender, reason } => {
                if self.transfers.is_current(by(request, attempt)) {
                    self.refused(request, (sender, instance), reason);
                } else {
                    self.transfer(Transferred::CopyFailed { request });
                }
            }
            FromWorker::Progress { request, tokens } => {
                self.fleet_step(Event::PrefillProgress { request, instance, tokens });
            }
            FromWorker::LinkDown { to } => self.link_down(instance, to),
            FromWorker::Joined { request } => {
                self.transfer(Transferred::Joined { request, instance, at: now });
            }
            FromWorker::Drawn { request, attempt, index, token, logprobs, finish } => {
                self.drawn(by(request, attempt), index, Drawn { token, logprobs, finish });
            }
            FromWorker::RequestFailed { request, attempt, failure } => {
                if self.transfers.is_current(by(request, attempt)) {
                    self.fail(request, failure);
                } else {
                    self.transfer(Transferred::CopyFailed { request });
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

    fn admitted(&mut self, by: Reporter, tokens_cached: u32) {
        if !self.transfers.is_current(by) {
            return;
        }
        self.transfer(Transferred::Admitted { by });
        let (now, request) = (self.env.now(), by.request);
        let tracked = self.requests.get_mut(&request).expect("it has a place");
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
            self.transfer(Transferred::Cancelled { request });
            self.fleet_step(Event::Cancelled { request });
        }
    }

    pub(super) fn fail(&mut self, request: RequestId, failure: Failure) {
        self.unplaced.remove(&request);
        if let Some(tracked) = self.requests.remove(&request) {
            tracked.tell(Update::Failed(failure));
            self.note_over(request, &tracked.wanted, false);
            self.transfer(Transferred::Cancelled { request });
            self.fleet_step(Event::Cancelled { request });
        }
    }

    fn gauge(&self, instance: InstanceId, load: &BatchLoad) {
        self.metrics.load(&self.instances[&instance].device, load);
    }
}
