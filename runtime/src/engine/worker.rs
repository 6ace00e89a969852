//! The worker of one instance: a device, a copy of the model and the instance machine.
//!
//! The worker carries out the machine's decisions and makes none of its own. It is a task that may block (on
//! its device), so it has its own thread. Everything it shares goes through its two inboxes: orders are
//! carried out between steps, peers' messages about KV also during them (`step.rs`).

use super::compiled::GrammarWait;
use super::draw::Draw;
use super::health::HealthWatch;
use super::loading::BlockLoad;
use super::messages::{FromPeer, FromWorker, Report, ToWorker, Transfer};
use super::pages::{InstanceKv, SequenceKv};
use super::receiver::{ExpectedKv, KvReceiver};
use super::sender::{EndedTransfer, KvSender, SEND_POLL_INTERVAL};
use super::shaping::Shaping;
use super::spans::WorkPhase;
use super::step::{Postponed, StepRunner};
use super::tiers::InstanceTiers;
use crate::env::{SharedEnv, yield_now};
use crate::mailbox::{MessageReceiver, MessageSender};
use crate::metrics::{DeviceLabels, Metrics};
use crate::request::{Failure, FinishReason, GenerateRequest};
use futures_util::FutureExt;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Result, Slice};
use mixfleet_scheduler::batch::{BatchLimits, BatchLoad, Instance, RequestId, Sampled, Step, TokenIds};
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::Tier;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Timeout of a KV copy between a device and its host, after which the device counts as hung.
pub(super) const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval at which an instance reports while it waits during a step.
const ALIVE_INTERVAL: Seconds = Seconds(10.0);

/// An input of the instance machine.
pub(super) type Event = mixfleet_scheduler::batch::Event<TokenIds>;

/// An output of the instance machine.
pub(super) type Action = mixfleet_scheduler::batch::Action<Box<[u32]>>;

/// A request on this instance. The instance machine has its tokens.
pub(super) struct Active {
    pub(super) attempt: u32,
    pub(super) wanted: Arc<GenerateRequest>,
    /// Penalties, masks and forced tokens that change its logits, if any.
    pub(super) shaping: Option<Shaping>,
    /// KV of the request that another instance will send.
    pub(super) expected: Option<ExpectedKv>,
    /// The work in progress for it.
    pub(super) phase: WorkPhase,
}

/// The instance's worker.
pub(super) struct Worker {
    pub(super) id: InstanceId,
    pub(super) env: SharedEnv,
    pub(super) steps: StepRunner,
    pub(super) postponed: Postponed,
    pub(super) machine: Instance<TokenIds>,
    pub(super) limits: BatchLimits,
    /// The cost model of its steps.
    pub(super) cost: Arc<CostModel>,
    /// The report that it is up, with its current role.
    pub(super) up: FromWorker,
    pub(super) active: HashMap<RequestId, Active>,
    pub(super) sender: KvSender,
    pub(super) receiver: KvReceiver,
    /// The KV in the pages of the device or devices.
    pub(super) kv: InstanceKv,
    /// Device memory for the bytes that a probe writes and reads back.
    pub(super) probed: Slice,
    /// The grammars of answers, and the orders that wait for one.
    pub(super) grammars: GrammarWait,
    /// The tiers that store evicted KV.
    pub(super) below: Option<InstanceTiers>,
    /// The loads from lower tiers that sequences wait for, oldest first.
    pub(super) loads: VecDeque<BlockLoad>,
    pub(super) orders: MessageReceiver<ToWorker>,
    pub(super) words: MessageReceiver<FromPeer>,
    pub(super) reports: MessageSender<Report>,
    /// Time of the last report.
    pub(super) reported_at: Cell<Seconds>,
    /// The load that was reported last.
    pub(super) load_reported: Cell<Option<BatchLoad>>,
    pub(super) metrics: Metrics,
    pub(super) health: HealthWatch,
}

impl Worker {
    pub(super) fn report(&self, message: FromWorker) {
        self.reported_at.set(self.env.now());
        // Sending fails only without a coordinator; `serve` then ends by itself.
        let _ = self.reports.send((self.id, message));
    }

    /// Reports the load if nothing was reported for `ALIVE_INTERVAL`: a step may have to wait for receivers.
    pub(super) fn report_alive(&self) {
        if (self.env.now() - self.reported_at.get()).0 > ALIVE_INTERVAL.0 {
            self.report_load();
        }
    }

    fn report_load(&self) {
        let load = self.machine.load();
        self.load_reported.set(Some(load));
        self.report(FromWorker::Load(load));
    }

    /// Works until the coordinator is gone or the device fails.
    pub(super) async fn serve(&mut self) -> Result<()> {
        self.begin_tiers()?;
        loop {
            // The coordinator waits for no worker, so it makes room.
            self.reports.room().await;
            self.catch_up()?;
            // Messages that arrive later wait for the next step, so that fast senders cannot keep the step
            // from running.
            for _ in 0..self.words.len() {
                let Ok((peer, word)) = self.words.try_recv() else { break };
                self.handle_kv_message(peer, word)?;
            }
            for _ in 0..self.orders.len() {
                let Ok(message) = self.orders.try_recv() else { break };
                self.handle_message(message)?;
            }
            while let Some(compiled) = self.grammars.try_compiled() {
                self.handle_compiled(compiled)?;
            }
            self.settle_sends(Duration::ZERO)?;
            if self.turn().await? {
                yield_now().await;
                continue;
            }
            let due = self.sender.due();
            let tiers_changed = InstanceTiers::changed(self.below.as_ref());
            tokio::select! {
                biased;
                Some((peer, word)) = self.words.recv() => self.handle_kv_message(peer, word)?,
                message = self.orders.recv() => match message {
                    Some(message) => self.handle_message(message)?,
                    None => return Ok(()),
                },
                Some(compiled) = self.grammars.compiled() => self.handle_compiled(compiled)?,
                () = self.reports.closed() => return Ok(()),
                () = due => self.settle_sends(SEND_POLL_INTERVAL)?,
                () = tiers_changed => self.report_tiers(),
            }
        }
    }

    /// Runs one turn of the machine. False if there is no work.
    async fn turn(&mut self) -> Result<bool> {
        if let Some(below) = &self.below {
            below.begin_turn();
            if InstanceTiers::changed(self.below.as_ref()).now_or_never().is_some() {
                self.report_tiers();
            }
        }
        self.settle_loads()?;
        let step = self.carry_out(Event::Idle)?;
        // Cached KV is sent before computed KV.
        self.send_waiting()?;
        let has_work = step.is_some() || !self.loads.is_empty();
        if let Some(step) = step.as_ref().filter(|step| !step.sequences.is_empty()) {
            let (tokens, began) = (step.sequences.iter().map(|s| u64::from(s.tokens)).sum(), self.env.now());
            self.compute(step).await?;
            self.health.stepped(tokens, self.env.now(), || self.steps.device.health());
            self.load_after(self.env.now() - began)?;
        } else if step.is_none() {
            self.load_alone()?;
        }
        // Turns in which only sends are awaited change nothing, so the load is not reported each time.
        if self.load_reported.get() == Some(self.machine.load()) {
            self.report_alive();
        } else {
            self.report_load();
        }
        Ok(has_work)
    }

    /// Feeds the machine an event in response to which it starts no step.
    pub(super) fn machine_step(&mut self, event: Event) -> Result<()> {
        let step = self.carry_out(event)?;
        debug_assert!(step.is_none(), "only Event::Idle may start a step");
        Ok(())
    }

    /// Feeds the machine an event and carries out its actions except for the step to be run, which is
    /// returned. The step is empty if a load began instead.
    fn carry_out(&mut self, event: Event) -> Result<Option<Step>> {
        let (mut actions, mut run) = (Vec::new(), None);
        self.machine.step(event, &mut actions);
        // Blocks to load are leased before lower tiers make room for evicted blocks.
        let mut lease = self.lease_wanted(&actions);
        let mut evicted = self.keep_evicted(&actions, &mut lease)?;
        for action in actions {
            match action {
                Action::Run(step) => run = Some(step),
                Action::Load { request, blocks, chain } => {
                    let evicted = std::mem::take(&mut evicted);
                    self.begin_load(request, lease.take(), &blocks, chain, evicted)?;
                    run = Some(Step::default());
                }
                Action::Admitted { request, tokens_cached } => {
                    if let Some(active) = self.active.get(&request) {
                        let attempt = active.attempt;
                        self.report(FromWorker::Admitted { request, attempt, tokens_cached });
                    }
                    self.prompt_begins(request);
                    self.sender.queue_cached(request, tokens_cached, &self.kv);
                }
                Action::Reserved { request, tokens_cached } => {
                    // A failure is contained here, since the remaining actions must be carried out too.
                    let awaited = self.await_kv(request, tokens_cached);
                    self.contain(awaited)?;
                }
                Action::Lent { request, pages } => self.sender.lent_pages(request, pages),
                Action::Revoked { request } => {
                    let attempt = self.forget(request).map_or(0, |active| active.attempt);
                    self.report(FromWorker::Revoked { request, attempt });
                }
                Action::Refused { request, reason } => {
                    if let Some(active) = self.forget(request) {
                        let (attempt, failure) = (active.attempt, Failure::engine(reason.to_string()));
                        self.report(FromWorker::RequestFailed { request, attempt, failure });
                    }
                }
                Action::Kept { request } => {
                    self.remove(request);
                    self.report(FromWorker::Kept { request });
                }
                Action::Preempted { .. } => {
                    let device = self.steps.device.info().id.clone();
                    self.metrics.preemptions.get_or_create(&DeviceLabels { device }).inc();
                }
                Action::Stored(hashes) => self.report(FromWorker::Stored { tier: Tier::Device, hashes }),
                Action::Evicted(evicted) => {
                    let hashes = evicted.into_iter().map(|evicted| evicted.hash).collect();
                    self.report(FromWorker::Evicted { tier: Tier::Device, hashes });
                }
            }
        }
        Ok(run)
    }

    /// Drops a request and its hand-off; a lent prefix of it is still sent.
    pub(super) fn forget(&mut self, request: RequestId) -> Option<Active> {
        if self.sender.hands_off(request) {
            self.sender.forget(request);
        }
        self.remove(request)
    }

    /// Stops tracking a request and waiting for its KV.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Active> {
        self.receiver.forget(request);
        self.stop_load(request);
        let active = self.active.remove(&request)?;
        self.tell_decoded(&active);
        Some(active)
    }

    /// Prompt and output so far of a request whose sequence is here.
    pub(super) fn ids(&self, request: RequestId) -> &[u32] {
        self.machine.text(request).map_or(&[], TokenIds::ids)
    }

    pub(super) fn finish_step(&mut self, step: &Step, drawn: Vec<Draw>) -> Result<()> {
        let mut sampled = Vec::new();
        let mut after = Vec::new();
        for (request, result) in drawn {
            let Some(active) = self.active.get_mut(&request) else {
                sampled.push(Sampled { request, finished: true });
                continue;
            };
            let (token, logprobs) = match result {
                Ok(drawn) => drawn,
                Err(message) => {
                    sampled.push(Sampled { request, finished: true });
                    after.push((request, None));
                    let attempt = active.attempt;
                    self.remove(request);
                    let failure = Failure::engine(message);
                    self.report(FromWorker::RequestFailed { request, attempt, failure });
                    continue;
                }
            };
            let (attempt, wanted) = (active.attempt, active.wanted.clone());
            if wanted.hints.keeps_kv && matches!(active.phase, WorkPhase::Prompt(_)) {
                // before the client is told that the KV is kept
                self.keep_prompt(request)?;
            }
            let Some(text) = self.machine.text_mut(request) else { continue };
            let index = to_u32(text.ids().len() - wanted.prompt_ids.len());
            text.push(token);
            let is_forced = (index as usize) < wanted.forced_ids.len();
            let finish = if wanted.eos_ids.contains(&token) && !is_forced {
                Some(FinishReason::Stop)
            } else {
                (index + 1 >= wanted.max_tokens).then_some(FinishReason::Length)
            };
            sampled.push(Sampled { request, finished: finish.is_some() });
            after.push((request, finish.is_none().then_some(token)));
            self.report(FromWorker::Drawn { request, attempt, index, token, logprobs, finish });
            self.prompt_done(request);
        }
        for part in step.sequences.iter().filter(|s| !s.sample || s.tokens > 1) {
            let tokens = part.start + part.tokens;
            self.report(FromWorker::Progress { request: part.request, tokens });
        }
        self.machine_step(Event::StepDone { sampled })?;
        after.into_iter().try_for_each(|(request, next)| self.after_draw(request, next))
    }

    /// Drops a finished request; tells the receiver of a handed-off one.
    fn after_draw(&mut self, request: RequestId, next: Option<u32>) -> Result<()> {
        let Some(next) = next else {
            self.forget(request);
            // This frees the blocks of a hand-off that ended with its first token.
            return self.machine_step(Event::Release { request });
        };
        self.sender.hand_over(request, next);
        Ok(())
    }

    /// Notifies receivers of landed pieces; waits for up to `patience` until one has landed.
    pub(super) fn settle_sends(&mut self, patience: Duration) -> Result<()> {
        self.sender.settle(patience);
        self.release_sent()
    }

    /// Sends queued pieces as far as there are free slots.
    pub(super) fn send_waiting(&mut self) -> Result<()> {
        let Worker { sender, kv, machine, steps, .. } = self;
        sender.send_waiting(&mut SequenceKv { kv, machine, queues: steps.copy_queues() })?;
        self.release_sent()
    }

    /// Releases the blocks of transfers that ended.
    pub(super) fn release_sent(&mut self) -> Result<()> {
        for EndedTransfer { request, transfer, completed_since } in self.sender.take_ended() {
            if let Some(since) = completed_since {
                self.tell_handed_off(request, since);
            }
            match transfer {
                Transfer::Prefix => {
                    self.machine_step(Event::Unlend { request })?;
                    // its corrupt blocks are gone
                    self.report_tiers();
                }
                Transfer::HandOff => {
                    self.remove(request);
                    self.machine_step(Event::Release { request })?;
                }
            }
        }
        Ok(())
    }
}
