//! The worker of one instance: a device, a copy of the model and the instance machine.
//!
//! The worker carries out what the machine decides and makes no choice of its own. It is a task that may
//! block (on its device), so it has its own thread. Everything it shares goes through its two inboxes: orders
//! are carried out between steps, peers' messages about KV also during them (`beside.rs`).

use super::beside::Postponed;
use super::compiled::GrammarWait;
use super::draw::{Draw, draw_input, read_rows};
use super::fault;
use super::handoff::{LAYERS_IN_FLIGHT, Outgoing, SEND_POLL_INTERVAL};
use super::health::HealthWatch;
use super::incoming::{Incoming, Intake};
use super::leaving::Taken;
use super::loading::BlockLoad;
use super::members::OtherMembers;
use super::messages::{FromPeer, FromWorker, KvMessage, Report, ToWorker, Transfer};
use super::pages::InstanceKv;
use super::recordings::Recordings;
use super::sender::{LayersLeaving, Sender};
use super::shaping::Shaping;
use super::spans::WorkPhase;
use super::tiers::InstanceTiers;
use crate::env::{SharedEnv, yield_now};
use crate::mailbox::{MessageReceiver, MessageSender};
use crate::metrics::{DeviceLabels, Metrics};
use crate::model::divided::{MemberRun, MicroBatch};
use crate::model::graph::{Forward, StepInput};
use crate::request::{Failure, FinishReason, GenerateRequest};
use futures_util::FutureExt;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Device, Queue, Result, Slice, Ticket};
use mixfleet_scheduler::batch::{
    BatchLimits, BatchLoad, Instance, RequestId, Sampled, Step, StepSequence, TokenIds,
};
use mixfleet_scheduler::cost::{CostModel, MeasuredSteps, Prefill};
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::Tier;
use mixfleet_scheduler::transfer::PrefixSource;
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
    /// What changes its logits; none if nothing does.
    pub(super) shaping: Option<Shaping>,
    /// The instance that will send KV of it.
    pub(super) sender: Option<(Transfer, PrefixSource)>,
    /// What is done for it now.
    pub(super) phase: WorkPhase,
}

/// The instance's worker.
pub(super) struct Worker {
    pub(super) id: InstanceId,
    pub(super) env: SharedEnv,
    pub(super) device: Arc<dyn Device>,
    pub(super) queue: Box<dyn Queue>,
    /// Queues for KV that comes and goes beside steps, in the order of members; none if an only device does
    /// not copy beside a step.
    pub(super) copies: Vec<Box<dyn Queue>>,
    pub(super) postponed: Postponed,
    pub(super) forward: Forward,
    /// The devices that divide the model with this one.
    pub(super) others: Option<OtherMembers>,
    pub(super) machine: Instance<TokenIds>,
    pub(super) recordings: Recordings,
    pub(super) limits: BatchLimits,
    /// The cost model of its steps.
    pub(super) cost: Arc<CostModel>,
    /// The report that it is up, with its current role.
    pub(super) up: FromWorker,
    /// Timeout of a step, after which the device counts as hung.
    pub(super) step_timeout: Duration,
    pub(super) active: HashMap<RequestId, Active>,
    pub(super) sender: Sender,
    /// The KV that sequences wait for.
    pub(super) incoming: HashMap<RequestId, Incoming>,
    /// The KV in the pages of the device or devices.
    pub(super) kv: InstanceKv,
    /// Memory on the device for what it is probed with.
    pub(super) probed: Slice,
    /// The grammars of answers, and the orders that wait for one.
    pub(super) grammars: GrammarWait,
    /// The tiers that store evicted KV.
    pub(super) below: Option<InstanceTiers>,
    /// The loads from lower tiers that sequences wait for, in the order of their beginnings.
    pub(super) loads: VecDeque<BlockLoad>,
    pub(super) orders: MessageReceiver<ToWorker>,
    pub(super) words: MessageReceiver<FromPeer>,
    pub(super) reports: MessageSender<Report>,
    /// Time of the last report.
    pub(super) reported_at: Cell<Seconds>,
    /// The load that was reported last.
    pub(super) load_reported: Cell<Option<BatchLoad>>,
    /// Time of the current step spent waiting for others.
    pub(super) waited: Seconds,
    pub(super) metrics: Metrics,
    pub(super) health: HealthWatch,
}

impl Worker {
    pub(super) fn report(&self, message: FromWorker) {
        self.reported_at.set(self.env.now());
        // Sending fails only without a coordinator; `serve` then ends by itself.
        let _ = self.reports.send((self.id, message));
    }

    /// Reports the load if nothing was reported for a while: a step may have to wait for its receivers.
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
            // Messages that come meanwhile wait for the next step, so that fast senders cannot keep the step
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
            let due = self.sends_due();
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
            self.health.stepped(tokens, self.env.now(), || self.device.health());
            self.load_after(self.env.now() - began)?;
        } else if step.is_none() {
            self.load_alone()?;
        }
        // While it waits for sends to end, it takes turns in which nothing changes.
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
        debug_assert!(step.is_none(), "an idle device is given a step, and no other");
        Ok(())
    }

    /// Feeds the machine an event and carries out its actions except for the step to be run, which is
    /// returned. The step is empty if a load began instead.
    fn carry_out(&mut self, event: Event) -> Result<Option<Step>> {
        let (mut actions, mut run) = (Vec::new(), None);
        self.machine.step(event, &mut actions);
        // Blocks to load are leased before room is made below for evicted blocks.
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
                    self.queue_cached(request, tokens_cached);
                }
                Action::Reserved { request, tokens_cached } => {
                    // It is contained here, since the other actions must be carried out too.
                    let awaited = self.await_kv(request, tokens_cached);
                    self.contain(awaited)?;
                }
                Action::Lent { request, pages } => {
                    if let Some(outgoing) = self.sender.outgoing.get_mut(&request) {
                        outgoing.pages = pages;
                    }
                }
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
                    let device = self.device.info().id.clone();
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
        if self.sender.hand_off(request).is_some() {
            self.sender.outgoing.remove(&request);
        }
        self.remove(request)
    }

    /// Stops tracking a request and waiting for its KV.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Active> {
        self.incoming.remove(&request);
        self.stop_load(request);
        let active = self.active.remove(&request)?;
        self.tell_decoded(&active);
        Some(active)
    }

    /// Runs a step. If the device rejects it, each sequence is run alone, so that only those fail that the
    /// device cannot run.
    async fn compute(&mut self, step: &Step) -> Result<()> {
        self.waited = Seconds::ZERO;
        let began = self.env.now();
        let error = match self.run_step(step).await {
            Ok(drawn) => {
                self.report_time(step, self.env.now() - began - self.waited);
                return self.finish_step(step, drawn);
            }
            Err(error) if fault::concerns_step_only(&error) => error,
            Err(error) => return Err(error),
        };
        tracing::warn!(device = %self.device.info().id, %error, "a step failed; its sequences run alone");
        let mut drawn = Vec::new();
        self.renew_queue()?;
        for sequence in &step.sequences {
            let alone = Step { sequences: vec![*sequence] };
            match self.run_step(&alone).await {
                Ok(more) => drawn.extend(more),
                Err(error) if fault::concerns_step_only(&error) => {
                    // It is dropped with the step, and nothing of it is published.
                    self.fail_request(sequence.request, fault::failure(&error))?;
                    self.renew_queue()?;
                }
                Err(error) => return Err(error),
            }
        }
        self.finish_step(step, drawn)
    }

    /// Reports a step's time, from which predictions learn.
    fn report_time(&mut self, step: &Step, time: Seconds) {
        let steps = MeasuredSteps { time, ..sizes_of(step) };
        self.machine.learn(&steps);
        self.report(FromWorker::Ran(steps));
    }

    /// Runs one forward pass and samples; the KV of handed-off prompts is sent layer by layer meanwhile.
    async fn run_step(&mut self, step: &Step) -> Result<Vec<Draw>> {
        self.follow_drawn(step);
        let (machine, active) = (&self.machine, &self.active);
        let block = (self.limits.block_tokens, self.limits.page_parts.count());
        let part = |part| input_of(machine, active, part, block);
        let parts: Vec<StepInput<'_>> = step.sequences.iter().map(part).collect();
        if let Some(members) = &mut self.others {
            let MeasuredSteps { parts: prompts, sequences, kv_tokens, .. } = sizes_of(step);
            let groups = self.cost.decode_groups(&prompts, sequences, kv_tokens);
            let batches = members.cut(&parts, groups, block);
            // stages have one batch at a time; of devices that attend, each has all of them
            let (mut taken, at_once) = (Taken::default(), members.partition().is_some());
            // what comes would wait for the attention of one batch, and the products of the other for that
            let takes_in = !at_once || batches.len() == 1 || members.copy_beside();
            let sends = batches.iter().map(|MicroBatch { parts, numbers }| {
                let its = numbers.iter().map(|&number| step.sequences[number].request).zip(parts);
                if !at_once {
                    taken = Taken::default();
                }
                self.sender.step_sends(its, &self.kv, &mut taken)
            });
            let sends: Vec<_> = sends.collect();
            let Worker { sender, kv, incoming, queue, copies, words, postponed, .. } = self;
            let first = MemberRun { device: &*self.device, queue: &mut **queue, forward: &self.forward };
            let queues = copies.iter_mut().map(|queue| &mut **queue as &mut dyn Queue).collect();
            let intake = Intake { sender, kv, incoming, machine, queues };
            let mut leaving = LayersLeaving::new(intake, &sends, (words, postponed), takes_in);
            let rows = members.run(first, &batches, &mut leaving, self.step_timeout)?;
            leaving.end();
            return self.draw(step, rows);
        }
        let its = step.sequences.iter().map(|sequence| sequence.request).zip(&parts);
        let sends = self.sender.step_sends(its, &self.kv, &mut Taken::default());
        let pass = self.forward.begin(&*self.device, &parts)?;
        if let (Some(key), true) = (pass.key(), sends.is_empty()) {
            let ticket = self.recordings.run(&mut *self.queue, &self.forward, &pass, key)?;
            self.await_step(ticket).await?;
            return self.draw(step, read_rows(&*self.device, &self.forward, &pass)?);
        }
        let layers = self.forward.config().layers as usize;
        let depth = LAYERS_IN_FLIGHT;
        let mut tickets: Vec<Ticket> = Vec::with_capacity(layers);
        for layer in 0..layers {
            let mut list = if layer == 0 { self.forward.embed(&pass)? } else { Vec::new() };
            list.extend(self.forward.layer(layer, &pass)?);
            list.extend(self.kv.gather((0, layer), sends.iter().map(|send| send.leaving_of(to_u32(layer))))?);
            tickets.push(self.queue.submit(&list)?);
            if !sends.is_empty() && layer + 1 >= depth {
                let ready = layer + 1 - depth;
                self.queue.wait(tickets[ready], self.step_timeout)?;
                self.deliver(ready, &sends).await?;
            }
        }
        let list = self.forward.head(&pass)?;
        let last = if list.is_empty() {
            tickets[layers - 1]
        } else {
            self.queue.submit_for(&list, &self.forward.results(&pass))?
        };
        if !sends.is_empty() {
            let behind = (layers + 1).saturating_sub(depth);
            for (ready, &ticket) in tickets.iter().enumerate().skip(behind) {
                self.queue.wait(ticket, self.step_timeout)?;
                self.deliver(ready, &sends).await?;
            }
            self.queue.wait(last, self.step_timeout)?;
        } else {
            self.await_step(last).await?;
        }
        self.draw(step, read_rows(&*self.device, &self.forward, &pass)?)
    }

    /// Prompt and output so far of a request whose sequence is here.
    pub(super) fn ids(&self, request: RequestId) -> &[u32] {
        self.machine.text(request).map_or(&[], TokenIds::ids)
    }

    fn finish_step(&mut self, step: &Step, drawn: Vec<Draw>) -> Result<()> {
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
                // before the client hears that it is there
                self.keep_prompt(request)?;
            }
            let Some(text) = self.machine.text_mut(request) else { continue };
            let index = to_u32(text.ids().len() - wanted.prompt_ids.len());
            text.push(token);
            let finish = if wanted.eos_ids.contains(&token) {
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
        if let Some(to) = self.sender.hand_off(request).map(Outgoing::hand_over) {
            let word = KvMessage::HandedOver { request, attempt: to.attempt, next };
            self.sender.directory.tell(to.to, self.id, word);
        }
        Ok(())
    }

    /// Ends all transfers with a lost peer.
    pub(super) fn peer_down(&mut self, peer: InstanceId) -> Result<()> {
        self.sender.courier.forget(peer);
        self.stop_all_to(peer)?;
        self.lender_down(peer)
    }
}

/// The queues that copy KV, in the order of members: those of an only device's steps if it has no other.
pub(super) fn queues<'a>(
    queue: &'a mut Box<dyn Queue>,
    copies: &'a mut [Box<dyn Queue>],
) -> Vec<&'a mut dyn Queue> {
    let own = if copies.is_empty() { std::slice::from_mut(queue) } else { copies };
    own.iter_mut().map(|queue| &mut **queue as &mut dyn Queue).collect()
}

/// The input of the forward pass for a sequence.
fn input_of<'a>(
    machine: &'a Instance<TokenIds>,
    active: &'a HashMap<RequestId, Active>,
    &StepSequence { request, start, tokens, sample }: &StepSequence,
    (block_tokens, block_pages): (u32, u32),
) -> StepInput<'a> {
    let end = start + tokens;
    let pages = &machine.pages(request)[..(end.div_ceil(block_tokens) * block_pages) as usize];
    let ids = machine.text(request).map_or(&[][..], TokenIds::ids);
    let draw = sample.then(|| draw_input(active.get(&request), ids));
    StepInput { start, tokens: &ids[start as usize..end as usize], pages, draw }
}

/// What predictions know of a step, which takes no time yet.
fn sizes_of(step: &Step) -> MeasuredSteps {
    let (mut parts, mut sequences, mut kv_tokens) = (Vec::new(), 0, 0);
    for &StepSequence { start, tokens, sample, .. } in &step.sequences {
        if sample && tokens == 1 {
            sequences += 1;
            kv_tokens += u64::from(start) + 1;
        } else {
            parts.push(Prefill { context: start, tokens, last: sample });
        }
    }
    MeasuredSteps { parts, sequences, kv_tokens, steps: 1, time: Seconds::ZERO }
}
