//! Steps, and the KV that comes and goes while one runs, from and to other instances, and from lower tiers.
//!
//! A device that copies beside a step has a second queue for it, and the worker handles peers' messages while
//! it waits for a step that sends nothing itself. Slots thus return to senders during a long step, not once
//! per step. Each of several devices has such a queue, and messages are handled during each wait for one of
//! them, in steps that send too ([`LayersLeaving`]).
//!
//! Steps and copies are not ordered against each other, which is right because they touch different pages:
//!
//! - Pages are given out only while the instance machine is idle (`Event::Idle`), which is asserted to be
//!   never during a step. Pages released during a step therefore have no new owner before the step ends, and
//!   those of its sequences are released after it.
//! - A block from lower tiers is written only to pages of a sequence that waits for it (`Phase::Loading`),
//!   which is in no step, from the end of its cached prefix on.
//! - A piece is written only to pages of a sequence that waits for KV (`Phase::Receiving`), which is in no
//!   step, and only from the end of its cached prefix on, where it owns the pages: they cannot be found
//!   before they are published, and the sequence joins a step at the next idle event at the earliest.
//! - A piece is read from computed tokens, of lent pages or of a prompt: a step writes others only.
//! - Evicted blocks are copied to lower tiers before their pages are written, and the worker waits for that.
//!
//! The worker waits for each copy before it does anything else, so nothing is copied while a step is
//! recorded, or while its results are read.
//!
//! Only bytes move during a step. What changes a sequence's state (all its KV is here, a prompt was handed or
//! taken over, a verdict, a lost peer) takes effect after it, in the order in which it came: nothing can join
//! a step that runs, and the simulator's instances handle such messages between steps too.

use super::draw::{Draw, LogitsRow, draw_input, read_rows};
use super::fault;
use super::leaving::Taken;
use super::loading::LoadProgress;
use super::members::OtherMembers;
use super::messages::{FromPeer, FromWorker, HandOff, KvMessage, PieceId};
use super::pages::{InstanceKv, SequenceKv};
use super::receiver::KvReceiver;
use super::recordings::Recordings;
use super::sender::{KvSender, LAYERS_IN_FLIGHT, SEND_POLL_INTERVAL, StepSend, pieces};
use super::worker::{Active, Worker};
use crate::env::yield_now;
use crate::mailbox::MessageReceiver;
use crate::model::divided::{MemberRun, MicroBatch};
use crate::model::graph::{Forward, StepInput};
use crate::model::leaving::LayerKv;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Device, Error, ErrorKind, Queue, Result, Ticket};
use mixfleet_scheduler::batch::{Instance, RequestId, Step, StepSequence, TokenIds};
use mixfleet_scheduler::cost::{MeasuredSteps, Prefill};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The device or devices of an instance, and the model on them.
pub(super) struct StepRunner {
    pub(super) device: Arc<dyn Device>,
    pub(super) queue: Box<dyn Queue>,
    /// Queues for KV that comes and goes beside steps, in the order of members; none if an only device does
    /// not copy beside a step.
    pub(super) copies: Vec<Box<dyn Queue>>,
    pub(super) forward: Forward,
    /// The devices that divide the model with this one.
    pub(super) others: Option<OtherMembers>,
    pub(super) recordings: Recordings,
    /// Timeout of a step, after which the device counts as hung.
    pub(super) timeout: Duration,
    /// Time of the current step spent waiting for others.
    pub(super) waited: Seconds,
}

impl StepRunner {
    /// Opens the queues of a model's devices.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn new(
        device: Arc<dyn Device>,
        forward: Forward,
        others: Option<OtherMembers>,
        timeout: Duration,
    ) -> Result<Self> {
        let (queue, recordings, waited) = (device.queue()?, Recordings::default(), Seconds::ZERO);
        let mut steps =
            StepRunner { device, queue, copies: Vec::new(), forward, others, recordings, timeout, waited };
        steps.renew_copies()?;
        Ok(steps)
    }

    /// Opens a new queue, since a failed batch fails all later ones in its queue.
    pub(super) fn renew_queue(&mut self) -> Result<()> {
        // Recordings belong to the queue, and must be dropped first.
        self.recordings.clear();
        self.queue = self.device.queue()?;
        self.others.as_mut().map_or(Ok(()), OtherMembers::renew_queues)
    }

    /// Opens a queue of each device for copies beside steps; none of an only device that cannot. Of several,
    /// which wait for each other in steps, each has times at which it has nothing else to do.
    pub(super) fn renew_copies(&mut self) -> Result<()> {
        let all = std::iter::once(&self.device).chain(self.others.iter().flat_map(OtherMembers::devices));
        let copies = self.others.is_some() || self.device.limits().copies_beside;
        self.copies = all.filter(|_| copies).map(|device| device.queue()).collect::<Result<_>>()?;
        Ok(())
    }

    /// The queues that copy KV, in the order of members: that of an only device's steps if it has no other.
    pub(super) fn copy_queues(&mut self) -> Vec<&mut dyn Queue> {
        let StepRunner { queue, copies, .. } = self;
        let own = if copies.is_empty() { std::slice::from_mut(queue) } else { &mut copies[..] };
        own.iter_mut().map(|queue| &mut **queue as &mut dyn Queue).collect()
    }
}

/// Part of a step's time so far after which peers' messages are looked at again. They take microseconds to
/// look at, and a sender with a few slots uses them many times per step.
const LOOKS_PER_WAIT: u32 = 64;

/// The time after which peers' messages are looked at again, where was `waited` so long for a step.
fn next_look(waited: Duration) -> Duration {
    SEND_POLL_INTERVAL.max(waited / LOOKS_PER_WAIT)
}

/// Work that follows a step.
enum AfterStep {
    /// KV of this sequence came.
    Settle(RequestId),
    /// A message that came.
    Handle(InstanceId, KvMessage),
}

/// Events during a step that take effect after it, in order.
#[derive(Default)]
pub(super) struct Postponed {
    waiting: VecDeque<AfterStep>,
    /// Whether a message is being handled during a step.
    active: bool,
}

impl Postponed {
    /// Whether settling this sequence is postponed.
    pub(super) fn takes(&mut self, request: RequestId) -> bool {
        if self.active {
            self.settle_later(request);
        }
        self.active
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Postponed::default();
    }

    /// Defers the consequences of received KV until after the step.
    fn settle_later(&mut self, request: RequestId) {
        self.waiting.push_back(AfterStep::Settle(request));
    }

    /// Leaves a message for after the step.
    fn handle_later(&mut self, peer: InstanceId, word: KvMessage) {
        self.waiting.push_back(AfterStep::Handle(peer, word));
    }

    /// Whether a message only moves bytes. Messages that come from a peer after it was lost wait too.
    fn moves_only(&self, peer: InstanceId, word: &KvMessage) -> bool {
        let lost = |after: &AfterStep| matches!(after, AfterStep::Handle(it, KvMessage::Down) if *it == peer);
        let moves = match word {
            KvMessage::Landed(_)
            | KvMessage::Credit { .. }
            | KvMessage::Lent { .. }
            | KvMessage::Lost { .. } => true,
            KvMessage::HandedOver { .. }
            | KvMessage::Verdict { .. }
            | KvMessage::TakenOver { .. }
            | KvMessage::Down => false,
        };
        moves && !self.waiting.iter().any(lost)
    }
}

impl Worker {
    /// Runs a step. If the device rejects it, each sequence is run alone, so that only those fail that the
    /// device cannot run.
    pub(super) async fn compute(&mut self, step: &Step) -> Result<()> {
        self.steps.waited = Seconds::ZERO;
        let began = self.env.now();
        let error = match self.run_step(step).await {
            Ok(drawn) => {
                self.report_time(step, self.env.now() - began - self.steps.waited);
                return self.finish_step(step, drawn);
            }
            Err(error) if fault::concerns_step_only(&error) => error,
            Err(error) => return Err(error),
        };
        tracing::warn!(device = %self.steps.device.info().id, %error, "a step failed; its sequences run alone");
        let mut drawn = Vec::new();
        self.steps.renew_queue()?;
        for sequence in &step.sequences {
            let alone = Step { sequences: vec![*sequence] };
            match self.run_step(&alone).await {
                Ok(more) => drawn.extend(more),
                Err(error) if fault::concerns_step_only(&error) => {
                    // It is dropped with the step, and no part of it is published.
                    self.fail_request(sequence.request, fault::failure(&error))?;
                    self.steps.renew_queue()?;
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

    /// Runs one forward pass and samples; the KV of handed-off prompts is sent layer by layer during it.
    async fn run_step(&mut self, step: &Step) -> Result<Vec<Draw>> {
        self.follow_drawn(step);
        let rows = match self.steps.others {
            Some(_) => self.run_divided(step)?,
            None => self.run_alone(step).await?,
        };
        self.draw(step, rows)
    }

    /// Runs a step on several devices.
    fn run_divided(&mut self, step: &Step) -> Result<Vec<LogitsRow>> {
        let block = (self.limits.block_tokens, self.limits.page_parts.count());
        let Worker { machine, active, steps, sender, receiver, kv, words, postponed, cost, .. } = self;
        let StepRunner { device, queue, copies, forward, others, timeout, .. } = steps;
        let Some(members) = others else { return Ok(Vec::new()) };
        let parts = step.sequences.iter().map(|part| input_of(machine, active, part, block));
        let parts: Vec<StepInput<'_>> = parts.collect();
        let MeasuredSteps { parts: prompts, sequences, kv_tokens, .. } = sizes_of(step);
        let groups = cost.decode_groups(&prompts, sequences, kv_tokens);
        let batches = members.cut(&parts, groups, block);
        // stages have one batch at a time; each attention device has all batches
        let (mut taken, at_once) = (Taken::default(), members.partition().is_some());
        // a received piece would wait for the attention of one batch, and the products of the other for that
        let takes_in = !at_once || batches.len() == 1 || members.copy_beside();
        let sends = batches.iter().map(|MicroBatch { parts, numbers }| {
            let its = numbers.iter().map(|&number| step.sequences[number].request).zip(parts);
            if !at_once {
                taken = Taken::default();
            }
            sender.step_sends(its, kv, &mut taken)
        });
        let sends: Vec<Vec<StepSend>> = sends.collect();
        let first = MemberRun { device: &**device, queue: &mut **queue, forward };
        let queues = copies.iter_mut().map(|queue| &mut **queue as &mut dyn Queue).collect();
        let sequences = SequenceKv { kv, machine, queues };
        let (unsent, sends) = (VecDeque::new(), &sends[..]);
        let mut leaving =
            LayersLeaving { sender, receiver, sequences, sends, unsent, words, postponed, takes_in };
        let rows = members.run(first, &batches, &mut leaving, *timeout)?;
        leaving.end();
        Ok(rows)
    }

    /// Runs a step on an only device.
    async fn run_alone(&mut self, step: &Step) -> Result<Vec<LogitsRow>> {
        let block = (self.limits.block_tokens, self.limits.page_parts.count());
        let (machine, active) = (&self.machine, &self.active);
        let parts = step.sequences.iter().map(|part| input_of(machine, active, part, block));
        let parts: Vec<StepInput<'_>> = parts.collect();
        let its = step.sequences.iter().map(|sequence| sequence.request).zip(&parts);
        let sends = self.sender.step_sends(its, &self.kv, &mut Taken::default());
        let StepRunner { device, queue, forward, recordings, .. } = &mut self.steps;
        let pass = forward.begin(&**device, &parts)?;
        if let (Some(key), true) = (pass.key(), sends.is_empty()) {
            let ticket = recordings.run(&mut **queue, forward, &pass, key)?;
            self.await_step(ticket).await?;
            return read_rows(&*self.steps.device, &self.steps.forward, &pass);
        }
        let layers = self.steps.forward.config().layers as usize;
        let depth = LAYERS_IN_FLIGHT;
        let mut tickets: Vec<Ticket> = Vec::with_capacity(layers);
        for layer in 0..layers {
            let mut list = if layer == 0 { self.steps.forward.embed(&pass)? } else { Vec::new() };
            list.extend(self.steps.forward.layer(layer, &pass)?);
            list.extend(self.kv.gather((0, layer), sends.iter().map(|send| send.leaving_of(to_u32(layer))))?);
            tickets.push(self.steps.queue.submit(&list)?);
            if !sends.is_empty() && layer + 1 >= depth {
                let ready = layer + 1 - depth;
                self.steps.queue.wait(tickets[ready], self.steps.timeout)?;
                self.deliver(ready, &sends).await?;
            }
        }
        let list = self.steps.forward.head(&pass)?;
        let last = if list.is_empty() {
            tickets[layers - 1]
        } else {
            self.steps.queue.submit_for(&list, &self.steps.forward.results(&pass))?
        };
        if !sends.is_empty() {
            let behind = (layers + 1).saturating_sub(depth);
            for (ready, &ticket) in tickets.iter().enumerate().skip(behind) {
                self.steps.queue.wait(ticket, self.steps.timeout)?;
                self.deliver(ready, &sends).await?;
            }
            self.steps.queue.wait(last, self.steps.timeout)?;
        } else {
            self.await_step(last).await?;
        }
        read_rows(&*self.steps.device, &self.steps.forward, &pass)
    }

    /// Sends the KV of `layer` that the only device gathered.
    async fn deliver(&mut self, layer: usize, sends: &[StepSend]) -> Result<()> {
        for send in sends {
            let StepSend { request, to, .. } = send;
            let layer = to_u32(layer);
            for piece in pieces(layer, send.tokens(layer), self.kv.piece_tokens_in(to)) {
                let began = self.env.now();
                let slot = self.credit(to).await?;
                self.steps.waited += self.env.now() - began;
                // The transfer may have ended in between.
                if !self.sender.goes_on(*request, to) {
                    slot.inspect(|&slot| self.sender.give_slot(to.to, slot));
                    break;
                }
                match slot {
                    Some(slot) => {
                        self.sender.send_gathered(&mut self.kv, send, piece, slot)?;
                        self.release_sent()?;
                    }
                    None => self.sender.lose(*request, to, piece),
                }
            }
        }
        Ok(())
    }

    /// Waits for a free slot of a receiver; none if it is gone. Peers' messages are handled during the wait,
    /// since two instances that send to each other would deadlock otherwise.
    async fn credit(&mut self, to: &HandOff) -> Result<Option<u32>> {
        loop {
            match self.sender.take_slot(to) {
                Ok(None) => {}
                Ok(slot) => return Ok(slot),
                Err(error) => {
                    tracing::warn!(to = %to.to, %error, "KV is not sent");
                    return Ok(None);
                }
            }
            self.settle_sends(SEND_POLL_INTERVAL)?;
            // A failed send frees its slot without a message.
            if self.sender.has_slot(to.to) {
                continue;
            }
            self.report_alive();
            let due = self.sender.due();
            tokio::select! {
                biased;
                Some((peer, word)) = self.words.recv() => {
                    let lost = peer == to.to && matches!(word, KvMessage::Down);
                    self.handle_kv_message(peer, word)?;
                    if lost {
                        return Ok(None);
                    }
                }
                () = self.sender.gone(to.to) => return Ok(None),
                () = due => {}
            }
        }
    }

    /// Waits for a step that sends nothing. KV of other sequences is transferred during it.
    async fn await_step(&mut self, ticket: Ticket) -> Result<()> {
        let (mut waited, mut last_load) = (Duration::ZERO, Seconds::ZERO);
        let mut progress = LoadProgress::Moved;
        loop {
            let left = self.steps.timeout.saturating_sub(waited);
            let loads = !self.steps.copies.is_empty() && self.has_loads();
            let timeout = match self.kv_moves() || loads {
                false => left,
                true if (loads && progress == LoadProgress::Moved) || !self.words.is_empty() => {
                    Duration::ZERO
                }
                true => next_look(waited).min(left),
            };
            match self.steps.queue.wait(ticket, timeout) {
                Ok(_) => {
                    // the step ended during the last copy, on average half-way through
                    self.steps.waited += last_load * 0.5;
                    return Ok(());
                }
                Err(error) if error.kind == ErrorKind::Timeout && timeout < left => waited += timeout,
                Err(error) => return Err(error),
            }
            // One message at a time, so that a step that ended waits for one at most.
            if let Ok((peer, word)) = self.words.try_recv() {
                self.handle_beside(peer, word).map_err(of_instance)?;
            }
            if loads {
                let began = self.env.now();
                progress = self.load_block(Duration::ZERO).map_err(of_instance)?;
                last_load = (self.env.now() - began).max(Seconds::ZERO);
                waited += Duration::from_secs_f64(last_load.0);
            }
            self.settle_sends(Duration::ZERO).and_then(|()| self.send_waiting()).map_err(of_instance)?;
            yield_now().await;
        }
    }

    /// Whether KV may come or go beside the running step.
    fn kv_moves(&self) -> bool {
        !self.steps.copies.is_empty() && (!self.sender.is_idle() || !self.receiver.is_idle())
    }

    /// Handles a message of a peer during a step as far as bytes are concerned.
    fn handle_beside(&mut self, peer: InstanceId, word: KvMessage) -> Result<()> {
        if !self.postponed.moves_only(peer, &word) {
            self.postponed.handle_later(peer, word);
            return Ok(());
        }
        self.postponed.active = true;
        let handled = self.handle_kv_message(peer, word);
        self.postponed.active = false;
        handled
    }

    /// Does after a step what its messages left to do.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        while let Some(after) = self.postponed.waiting.pop_front() {
            match after {
                AfterStep::Settle(request) => self.settle_incoming(request)?,
                AfterStep::Handle(peer, word) => self.handle_kv_message(peer, word)?,
            }
        }
        Ok(())
    }
}

/// The input of the forward pass for a sequence.
fn input_of<'a>(
    machine: &'a Instance<TokenIds>,
    active: &'a HashMap<RequestId, Active>,
    &StepSequence { request, start, tokens, sample }: &StepSequence,
    block: (u32, u32),
) -> StepInput<'a> {
    let (block_tokens, block_pages) = block;
    let end = start + tokens;
    let pages = &machine.pages(request)[..(end.div_ceil(block_tokens) * block_pages) as usize];
    let tokens = machine.text(request).map_or(&[][..], |text| text.at(start..end));
    let draw = sample.then(|| draw_input(active.get(&request), end));
    StepInput { start, tokens, pages, draw }
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

/// KV of other sequences that several devices send and receive while they run a step. One thread drives them
/// all, and must not wait for a peer: pieces that find no slot in time join the queue of pieces.
struct LayersLeaving<'a> {
    sender: &'a mut KvSender,
    receiver: &'a mut KvReceiver,
    sequences: SequenceKv<'a>,
    /// The outgoing KV of each batch of the step.
    sends: &'a [Vec<StepSend>],
    /// Gathered pieces that are not sent yet.
    unsent: VecDeque<(&'a StepSend, PieceId)>,
    words: &'a mut MessageReceiver<FromPeer>,
    postponed: &'a mut Postponed,
    /// Whether pieces are taken in during this step.
    takes_in: bool,
}

impl LayersLeaving<'_> {
    /// Handles the byte-moving messages of peers: pieces one at a time, so that devices which are done wait
    /// for at most one.
    fn listen(&mut self) -> Result<()> {
        for _ in 0..self.words.len() {
            let Ok((peer, word)) = self.words.try_recv() else { break };
            let is_piece = matches!(word, KvMessage::Landed(_));
            if !self.postponed.moves_only(peer, &word) || is_piece && !self.takes_in {
                self.postponed.handle_later(peer, word);
                continue;
            }
            if let KvMessage::Credit { slot } = word {
                self.sender.give_slot(peer, slot);
                continue;
            }
            let taken = self.receiver.take_in(peer, word, &mut self.sequences).map_err(of_instance)?;
            if let Some(request) = taken {
                self.postponed.settle_later(request);
            }
            if is_piece {
                break;
            }
        }
        Ok(())
    }

    /// Sends a piece. False if there is no slot.
    fn send(&mut self, send: &StepSend, piece: PieceId) -> Result<bool> {
        let StepSend { request, to, .. } = send;
        match self.sender.take_slot(to) {
            Ok(Some(slot)) => self.sender.send_gathered(self.sequences.kv, send, piece, slot).map(|()| true),
            Ok(None) => Ok(false),
            Err(error) => {
                tracing::warn!(request, to = %to.to, %error, "KV is not sent");
                self.sender.lose(*request, to, piece);
                Ok(true)
            }
        }
    }

    /// Leaves the unsent pieces for which this holds to the queue of pieces.
    fn leave_to_queue(&mut self, which: impl Fn(&InstanceKv, &PieceId) -> bool) {
        let LayersLeaving { sender, sequences, .. } = self;
        self.unsent.retain(|(send, piece)| {
            let leaves = which(sequences.kv, piece);
            if leaves {
                sender.queue_computed(send.request, *piece);
            }
            !leaves
        });
    }

    /// Leaves the unsent pieces of an ended step to the queue of pieces.
    fn end(mut self) {
        self.leave_to_queue(|_, _| true);
    }
}

impl LayerKv for LayersLeaving<'_> {
    fn leaves(&self, batch: usize) -> bool {
        self.sends.get(batch).is_some_and(|sends| !sends.is_empty())
    }

    fn gather(&mut self, member: usize, batch: usize, layer: usize) -> Result<Vec<Cmd>> {
        self.leave_to_queue(|kv, piece| kv.shares_memory((member, layer), piece.layer));
        let (sends, number) =
            (self.sends.get(batch).into_iter().flatten(), self.sequences.kv.layer_of(member, layer));
        self.sequences.kv.gather((member, layer), sends.map(|send| send.leaving_of(number)))
    }

    fn leave(&mut self, member: usize, batch: usize, layer: usize) -> Result<()> {
        let kv = &*self.sequences.kv;
        let layer = kv.layer_of(member, layer);
        for send in self.sends.get(batch).into_iter().flatten() {
            let all = pieces(layer, send.tokens(layer), kv.piece_tokens_in(&send.to));
            self.unsent.extend(all.map(|piece| (send, piece)));
        }
        self.go_on(Duration::ZERO).map(drop)
    }

    fn go_on(&mut self, waited: Duration) -> Result<Option<Duration>> {
        self.listen()?;
        self.sender.settle(Duration::ZERO);
        for _ in 0..self.unsent.len() {
            let Some((send, piece)) = self.unsent.pop_front() else { break };
            if !self.send(send, piece)? {
                self.unsent.push_back((send, piece));
            }
        }
        let in_transit = self.sender.longest_send().is_some();
        let more = in_transit || !self.unsent.is_empty() || !self.receiver.is_idle();
        Ok(more.then(|| if self.words.is_empty() { next_look(waited) } else { Duration::ZERO }))
    }
}

/// An error that ends the instance, and not just the step during which it came up.
fn of_instance(error: Error) -> Error {
    match fault::concerns_step_only(&error) {
        true => Error::new(ErrorKind::Other, error.detail),
        false => error,
    }
}
