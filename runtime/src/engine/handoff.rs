//! The KV of a prompt on its way from the instance that computes it to the one that decodes it.
//!
//! A layer's KV of the tokens just computed is gathered on the device into the wire layout, read to
//! the host, written to a staging slot of the receiver over a transport, checked there (XXH3-64 of
//! the payload), and scattered into the receiver's own pages. The wire layout is neutral, so unlike
//! page sizes and dtypes meet without a special case. While layer k travels, layers k+1.. compute:
//! the sender keeps `depth` layers in its queue. A piece that arrives corrupt, or does not arrive, is
//! sent again a few times, then given up; the receiver recomputes what is missing.

use super::courier::{SENDS_MAX, Sent};
use super::lend::Prefix;
use super::messages::{HandOff, Parcel, PieceId, ToWorker};
use super::worker::{Event, Worker};
use crate::env::Task;
use crate::model::ModelConfig;
use crate::model::graph::{self, StepShape};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, OpSig, Result, Slice};
use mixfleet_scheduler::batch::{RequestId, Step};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Layers in the queue of an instance that hands KV off: one that runs, one that waits behind it so
/// that the device never idles, and two whose KV may be on its way to the host.
const LAYERS_IN_FLIGHT: usize = 4;

/// While nothing else happens, what is on its way is looked after so often at most.
pub(super) const LOOK_AFTER_SENDS: Duration = Duration::from_micros(500);

/// Which dtype two pools exchange: no wider than either needs, and lossless unless the receiver
/// rounds anyway.
pub fn wire_dtype(sender: DType, receiver: DType) -> DType {
    match (sender, receiver) {
        (a, b) if a == b => a,
        (DType::F32, b) => b,
        (a, DType::F32) => a,
        _ => DType::F32,
    }
}

/// An instance's device memory for pieces that leave and come, and how KV lies in its pages.
pub(super) struct Staging {
    /// For `tokens_max` tokens in the wire layout each, on the device. A read waits for all that uses a
    /// buffer, so each layer has its own.
    gathered: [Slice; LAYERS_IN_FLIGHT],
    /// One piece on its way in, on the device.
    pub(super) landing: Slice,
    /// Slot numbers of a piece, on the device.
    slot_ids: Slice,
    pub(super) page_tokens: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) kv: DType,
    tokens_max: u32,
}

/// Tokens of a prompt that leave during a step.
pub(super) struct Leaving {
    request: RequestId,
    first: u32,
    tokens: u32,
    /// Row of the first token in the step.
    row: u32,
}

impl Staging {
    /// Allocates on the device, for pieces of up to `slot_bytes`.
    pub(super) fn new(
        device: &dyn Device,
        config: &ModelConfig,
        shape: &StepShape,
        slot_bytes: u64,
    ) -> Result<Self> {
        let widest = 2 * u64::from(config.kv_heads * config.head_dim) * 4;
        let piece_tokens = (slot_bytes / (widest / 2)).max(u64::from(shape.tokens_max));
        let gathered = || device.alloc(u64::from(shape.tokens_max) * widest, BufferUsage::Kv);
        Ok(Staging {
            gathered: [gathered()?, gathered()?, gathered()?, gathered()?],
            landing: device.alloc(slot_bytes.max(widest), BufferUsage::Kv)?,
            slot_ids: device.alloc(piece_tokens * 4, BufferUsage::Staging)?,
            page_tokens: shape.block_tokens,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            kv: shape.kv,
            tokens_max: shape.tokens_max,
        })
    }

    /// Layers that may be in the queue at a time.
    pub(super) fn depth(&self) -> usize {
        LAYERS_IN_FLIGHT
    }

    /// Bytes of one token of one layer on the wire.
    pub(super) fn token_bytes(&self, wire: DType) -> u64 {
        2 * u64::from(self.kv_heads * self.head_dim) * wire.size_bytes()
    }

    fn gather_sig(&self, tokens: u32, wire: DType) -> OpSig {
        let Staging { kv_heads, head_dim, page_tokens, kv, .. } = *self;
        OpSig::KvGather { tokens, kv_heads, head_dim, page_tokens, kv, wire }
    }

    /// Where the gathered KV of `layer` lies, from row `at` of those that leave.
    fn gathered_at(&self, layer: usize, at: u32, tokens: u32, wire: DType) -> Slice {
        let token_bytes = self.token_bytes(wire);
        let part = &self.gathered[layer % LAYERS_IN_FLIGHT];
        part.range(u64::from(at) * token_bytes, u64::from(tokens) * token_bytes)
    }
}

/// The sender's side of a hand-off, or of a prefix that it lends.
pub(super) struct Outgoing {
    pub(super) to: Arc<HandOff>,
    pub(super) pages: Vec<u32>,
    /// Pieces without a verdict: tokens by first token and layer.
    open: BTreeMap<(u32, u32), u32>,
    handed_over: bool,
    /// When the first piece left.
    started: Option<Seconds>,
    /// What is still to be sent of a prefix; none for a hand-off, whose pieces are made as they are computed.
    pub(super) prefix: Option<Prefix>,
}

impl Outgoing {
    /// Of a prompt that is computed here, or of `prefix`, of which the first tokens lie in `pages`.
    pub(super) fn new(to: HandOff, pages: Vec<u32>, prefix: Option<Prefix>) -> Self {
        Outgoing { to: Arc::new(to), pages, open: BTreeMap::new(), handed_over: false, started: None, prefix }
    }

    /// The prompt is computed and `next` drawn: whom to tell, and what.
    pub(super) fn hand_over(
        &mut self,
        sender: InstanceId,
        request: RequestId,
        next: u32,
    ) -> (InstanceId, ToWorker) {
        self.handed_over = true;
        (self.to.to, ToWorker::HandedOver { sender, request, attempt: self.to.attempt, next })
    }

    /// Nothing but the word of `peer` on what was sent is missing, or it is the only one who wants it.
    pub(super) fn ends_with(&self, peer: InstanceId) -> bool {
        self.to.to == peer && (self.handed_over || self.prefix.is_some())
    }

    fn started(&self) -> Option<Seconds> {
        self.started
    }

    /// A prefix of which the receiver has confirmed every piece.
    fn is_confirmed(&self) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| prefix.is_sent() && self.open.is_empty())
    }

    /// A piece is on its way that nobody has given a verdict on. False for others: a receiver that has lost
    /// count asks in vain.
    fn is_open(&self, piece: &PieceId) -> bool {
        self.open.get(&(piece.first, piece.layer)) == Some(&piece.tokens)
    }

    fn close(&mut self, piece: &PieceId) {
        self.open.remove(&(piece.first, piece.layer));
    }
}

impl Worker {
    /// The tokens of handed-off prompts that this step computes and the receiver lacks.
    pub(super) fn leaving(&mut self, step: &Step) -> Vec<Leaving> {
        let mut row = 0;
        let mut leaving = Vec::new();
        for part in &step.sequences {
            let (start, tokens) = (part.start, part.tokens);
            if let Some(outgoing) = self.hand_off(part.request) {
                let first = outgoing.to.from.clamp(start, start + tokens);
                if first < start + tokens {
                    let tokens = start + tokens - first;
                    leaving.push(Leaving { request: part.request, first, tokens, row: row + first - start });
                }
            }
            row += tokens;
        }
        leaving
    }

    /// What goes on elsewhere once it is computed here.
    pub(super) fn hand_off(&mut self, request: RequestId) -> Option<&mut Outgoing> {
        self.outgoing.get_mut(&request).filter(|outgoing| outgoing.prefix.is_none())
    }

    fn wire_of(&self, request: RequestId) -> Option<DType> {
        Some(self.outgoing.get(&request)?.to.wire)
    }

    /// Commands that gather what leaves of `layer`.
    pub(super) fn gathers(&self, layer: usize, pass: &graph::Pass, leaving: &[Leaving]) -> Result<Vec<Cmd>> {
        let mut at = 0;
        let mut list = Vec::new();
        for part in leaving {
            let Some(wire) = self.wire_of(part.request) else { continue };
            let (k_pool, v_pool) = self.forward.pools(layer);
            let slots = self.forward.slots(pass, part.row, part.tokens);
            let out = self.staging.gathered_at(layer, at, part.tokens, wire);
            let sig = self.staging.gather_sig(part.tokens, wire);
            list.push(Cmd::new(sig, &[slots, k_pool.clone(), v_pool.clone(), out])?);
            at += part.tokens;
        }
        Ok(list)
    }

    /// Sends what was gathered of `layer`.
    pub(super) async fn deliver(&mut self, layer: usize, leaving: &[Leaving]) -> Result<()> {
        let mut at = 0;
        for part in leaving {
            let Some(wire) = self.wire_of(part.request) else { continue };
            for (first, tokens) in self.pieces(part.request, part.first, part.tokens) {
                let row = at + first - part.first;
                let from = self.staging.gathered_at(layer, row, tokens, wire);
                let piece = PieceId { layer: layer as u32, first, tokens, retries: 0 };
                self.open_piece(part.request, &piece);
                self.send_piece(part.request, piece, &from).await?;
            }
            at += part.tokens;
        }
        Ok(())
    }

    /// Cuts a token range into pieces that fit the receiver's slots.
    fn pieces(&self, request: RequestId, first: u32, tokens: u32) -> Vec<(u32, u32)> {
        let Some(outgoing) = self.outgoing.get(&request) else { return Vec::new() };
        let most = self.piece_tokens_max(&outgoing.to);
        (first..first + tokens).step_by(most as usize).map(|at| (at, most.min(first + tokens - at))).collect()
    }

    /// Tokens of the largest piece that fits a slot there and the staging here.
    pub(super) fn piece_tokens_max(&self, to: &HandOff) -> u32 {
        let token_bytes = self.staging.token_bytes(to.wire);
        let most = (to.landing.slot_bytes / token_bytes).max(1);
        most.min(u64::from(self.staging.tokens_max)) as u32
    }

    pub(super) fn open_piece(&mut self, request: RequestId, piece: &PieceId) {
        if let Some(outgoing) = self.outgoing.get_mut(&request) {
            outgoing.open.insert((piece.first, piece.layer), piece.tokens);
            outgoing.started.get_or_insert(self.env.now());
        }
    }

    /// Sends the KV that the prefix cache already had and the receiver lacks.
    pub(super) async fn send_cached(&mut self, request: RequestId, tokens_cached: u32) -> Result<()> {
        let Some(outgoing) = self.hand_off(request) else { return Ok(()) };
        let from = outgoing.to.from;
        for layer in 0..self.forward.config().layers {
            for (first, tokens) in self.pieces(request, from, tokens_cached.saturating_sub(from)) {
                let piece = PieceId { layer, first, tokens, retries: 0 };
                self.open_piece(request, &piece);
                self.gather_and_send(request, piece).await?;
            }
        }
        Ok(())
    }

    /// Gathers one piece from the pages and sends it.
    async fn gather_and_send(&mut self, request: RequestId, piece: PieceId) -> Result<()> {
        let Some(outgoing) = self.outgoing.get(&request) else { return Ok(()) };
        let pages = self.machine.pages(request);
        let (wire, slots) = (outgoing.to.wire, self.upload_slots(pages, piece.first, piece.tokens)?);
        let from = self.gather(&piece, wire, slots)?;
        self.send_piece(request, piece, &from).await
    }

    /// One piece from its slots in the pages, on the device.
    pub(super) fn gather(&mut self, piece: &PieceId, wire: DType, slots: Slice) -> Result<Slice> {
        let (k_pool, v_pool) = self.forward.pools(piece.layer as usize);
        let from = self.staging.gathered_at(0, 0, piece.tokens, wire);
        let sig = self.staging.gather_sig(piece.tokens, wire);
        let command = Cmd::new(sig, &[slots, k_pool.clone(), v_pool.clone(), from.clone()])?;
        self.run_now(&[command])?;
        Ok(from)
    }

    pub(super) fn upload_slots(&self, pages: &[u32], first: u32, tokens: u32) -> Result<Slice> {
        let page_tokens = self.staging.page_tokens;
        let slot = |i: u32| pages[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
        let slots: Vec<u32> = (first..first + tokens).map(slot).collect();
        let target = self.staging.slot_ids.range(0, u64::from(tokens) * 4);
        self.device.write(&target, bytemuck::cast_slice(&slots))?;
        Ok(target)
    }

    /// Reads a piece from the device and begins to send it.
    async fn send_piece(&mut self, request: RequestId, piece: PieceId, from: &Slice) -> Result<()> {
        let Some(to) = self.outgoing.get(&request).map(|outgoing| outgoing.to.clone()) else {
            return Ok(());
        };
        let began = self.env.now();
        let slot = self.credit(&to).await?;
        self.waited += self.env.now() - began;
        let Some(slot) = slot else {
            self.give_up(request, to.attempt, piece);
            return Ok(());
        };
        let device = self.device.clone();
        self.send_from(request, piece, &to, (slot, from.bytes), &mut |place| device.read(from, place))
    }

    /// Has `read` fill a free slot, and begins to send it.
    pub(super) fn send_from(
        &mut self,
        request: RequestId,
        piece: PieceId,
        to: &HandOff,
        (slot, bytes): (u32, u64),
        read: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let hash = self.courier.fill(to.to, slot, bytes, read)?;
        let HandOff { attempt, wire, .. } = *to;
        let parcel = Parcel { request, attempt, piece, slot, bytes, hash, wire };
        self.courier.send(to.to, parcel, self.env.now());
        self.settle_sends(Duration::ZERO);
        Ok(())
    }

    /// Tells receivers what has landed with them; waits for up to `patience` for something that has.
    pub(super) fn settle_sends(&mut self, patience: Duration) {
        for (to, sent) in self.courier.settle(self.env.now(), patience) {
            let (landed, parcel) = match sent {
                Sent::Landed(parcel) => (true, parcel),
                Sent::Failed(parcel) => (false, parcel),
            };
            let Parcel { request, attempt, piece, slot, bytes, .. } = parcel;
            self.metrics.kv_transfer_retries.inc_by(u64::from(piece.retries));
            if landed && self.directory.tell(to, ToWorker::Landed { sender: self.id, parcel }) {
                self.metrics.kv_sent_bytes.inc_by(bytes);
                continue;
            }
            if landed {
                // A receiver that was not told gives no slot back, and may be met again.
                self.courier.give_slot(to, slot);
            }
            self.give_up(request, attempt, piece);
            self.settle_lent(request);
        }
    }

    /// Completes when it is time to `settle_sends` again; never if nothing is on its way. What is slow is
    /// asked after less often.
    pub(super) fn sends_due(&self) -> Task {
        match self.courier.longest_send(self.env.now()) {
            None => Box::pin(std::future::pending()),
            Some(since) => {
                self.env.sleep(LOOK_AFTER_SENDS.max(Duration::from_secs_f64(since.0.max(0.0) / 8.0)))
            }
        }
    }

    fn give_up(&mut self, request: RequestId, attempt: u32, piece: PieceId) {
        let outgoing =
            self.outgoing.get_mut(&request).filter(|o| o.to.attempt == attempt && o.is_open(&piece));
        let Some(outgoing) = outgoing else { return };
        outgoing.close(&piece);
        let sender = self.id;
        self.directory.tell(outgoing.to.to, ToWorker::Lost { sender, request, attempt, piece });
        tracing::warn!(request, layer = piece.layer, first = piece.first, "KV is recomputed by the receiver");
    }

    /// Waits for a free slot of a receiver; none if it is gone. KV that arrives here meanwhile is taken
    /// in at once: two instances that send to each other would wait for ever otherwise.
    async fn credit(&mut self, to: &HandOff) -> Result<Option<u32>> {
        loop {
            match self.courier.take_slot(to.to, &to.landing) {
                Ok(None) => {}
                Ok(slot) => return Ok(slot),
                Err(error) => {
                    tracing::warn!(to = %to.to, %error, "KV is not sent");
                    return Ok(None);
                }
            }
            self.settle_sends(LOOK_AFTER_SENDS);
            self.show_life();
            let due = self.sends_due();
            let message = tokio::select! {
                biased;
                Some(message) = self.inbox.recv() => message,
                () = self.directory.gone(to.to) => return Ok(None),
                () = due => continue,
            };
            match message {
                ToWorker::Credit { receiver, slot } => self.courier.give_slot(receiver, slot),
                ToWorker::Landed { sender, parcel } => {
                    if let Some(request) = self.receive(sender, parcel)? {
                        // Joins the batch between steps.
                        self.deferred.push_back(ToWorker::Settle { request });
                    }
                }
                ToWorker::PeerDown { peer } => {
                    self.courier.forget(peer);
                    self.deferred.push_back(ToWorker::PeerDown { peer });
                    if peer == to.to {
                        return Ok(None);
                    }
                }
                other => self.deferred.push_back(other),
            }
        }
    }

    /// The receiver's word on a piece: done, or once more.
    pub(super) async fn verdict(
        &mut self,
        receiver: InstanceId,
        request: RequestId,
        attempt: u32,
        (piece, intact): (PieceId, bool),
    ) -> Result<()> {
        let is_meant =
            |o: &&mut Outgoing| o.to.to == receiver && o.to.attempt == attempt && o.is_open(&piece);
        let outgoing = self.outgoing.get_mut(&request).filter(is_meant);
        let Some(outgoing) = outgoing else { return Ok(()) };
        if intact {
            outgoing.close(&piece);
            return Ok(());
        }
        self.metrics.kv_transfer_retries.inc();
        let retries = piece.retries.saturating_add(1);
        if retries >= SENDS_MAX {
            self.give_up(request, attempt, piece);
            return Ok(());
        }
        let piece = PieceId { retries, ..piece };
        match &mut outgoing.prefix {
            Some(prefix) => prefix.again(piece),
            None => self.gather_and_send(request, piece).await?,
        }
        Ok(())
    }

    /// The receiver goes on with the sequence that was handed over to it: its blocks here are released.
    pub(super) fn taken_over(&mut self, receiver: InstanceId, request: RequestId, attempt: u32) {
        let is_meant = |o: &&mut Outgoing| o.handed_over && o.to.to == receiver && o.to.attempt == attempt;
        if self.hand_off(request).filter(is_meant).is_some() {
            self.complete_outgoing(request);
        }
    }

    /// Blocks of a lent prefix are released when the receiver has confirmed every piece.
    pub(super) fn settle_lent(&mut self, request: RequestId) {
        if self.outgoing.get(&request).is_some_and(Outgoing::is_confirmed) {
            self.complete_outgoing(request);
        }
    }

    fn complete_outgoing(&mut self, request: RequestId) {
        if let Some(started) = self.outgoing.get(&request).and_then(Outgoing::started) {
            self.metrics.kv_transfer_s.observe((self.env.now() - started).0);
        }
        self.end_outgoing(request);
    }

    /// Nothing of it is sent any more.
    pub(super) fn end_outgoing(&mut self, request: RequestId) {
        let Some(outgoing) = self.outgoing.remove(&request) else { return };
        if outgoing.prefix.is_some() {
            self.machine_step(Event::Unlend { request });
        } else {
            self.active.remove(&request);
            self.machine_step(Event::Release { request });
        }
    }

    /// From now on KV goes to `outgoing.to`.
    pub(super) fn begin_outgoing(&mut self, request: RequestId, outgoing: Outgoing) {
        // One of an earlier placement, which was not cancelled because it was thought to be over.
        self.stop_outgoing(request);
        // The receiver has fenced off the slots that it gave away before.
        let to = outgoing.to.clone();
        let fenced = |o: &Outgoing| o.prefix.is_some() && o.to.to == to.to && o.to.landing != to.landing;
        let its = self.outgoing.iter().filter(|(_, o)| fenced(o)).map(|(&request, _)| request);
        let mut its: Vec<RequestId> = its.collect();
        its.sort_unstable();
        its.into_iter().for_each(|request| self.stop_outgoing(request));
        self.outgoing.insert(request, outgoing);
    }

    /// It ends here before its receiver has all: whoever still waits for a prefix is told not to.
    pub(super) fn stop_outgoing(&mut self, request: RequestId) {
        let Some(outgoing) = self.outgoing.get(&request) else { return };
        if outgoing.prefix.is_some() {
            let HandOff { to, attempt, .. } = *outgoing.to;
            self.directory.tell(to, ToWorker::Lent { sender: self.id, request, attempt, until: 0 });
        }
        self.end_outgoing(request);
    }
}
