//! The KV of a prompt on its way from the instance that computes it to the one that decodes it.
//!
//! A layer's KV of the tokens just computed is gathered on the device into the wire layout, read to
//! the host, written to a staging slot of the receiver over a transport, checked there (XXH3-64 of
//! the payload), and scattered into the receiver's own pages. The wire layout is neutral, so unlike
//! page sizes and dtypes meet without a special case. While layer k travels, layers k+1.. compute:
//! the sender keeps `depth` layers in its queue. A piece that arrives corrupt, or does not arrive, is
//! sent again a few times, then given up; the receiver recomputes what is missing.

use super::courier::{SENDS_MAX, Sent};
use super::messages::{HandOff, Parcel, PieceId, ToWorker};
use super::worker::Worker;
use crate::env::Task;
use crate::model::ModelConfig;
use crate::model::graph::{self, StepShape};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, DType, Device, OpSig, Result, Role, Slice};
use mixfleet_scheduler::batch::{RequestId, Step};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeSet;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

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
    /// `LAYERS_IN_FLIGHT` parts of `tokens_max` tokens in the wire layout, on the device.
    gathered: Slice,
    /// One piece on its way in, on the device.
    landing: Slice,
    /// Slot numbers of a piece, on the device.
    slot_ids: Slice,
    page_tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    kv: DType,
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
        let piece_tokens = slot_bytes / (widest / 2);
        let gathered = LAYERS_IN_FLIGHT as u64 * u64::from(shape.tokens_max) * widest;
        let alloc = |bytes| device.alloc(bytes, Role::Staging);
        Ok(Staging {
            gathered: alloc(gathered)?,
            landing: alloc(slot_bytes.max(widest))?,
            slot_ids: alloc(piece_tokens.max(1) * 4)?,
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
    fn token_bytes(&self, wire: DType) -> u64 {
        2 * u64::from(self.kv_heads * self.head_dim) * wire.size_bytes()
    }

    fn gather_sig(&self, tokens: u32, wire: DType) -> OpSig {
        let Staging { kv_heads, head_dim, page_tokens, kv, .. } = *self;
        OpSig::KvGather { tokens, kv_heads, head_dim, page_tokens, kv, wire }
    }

    /// Where the gathered KV of `layer` lies, from row `at` of those that leave.
    fn gathered_at(&self, layer: usize, at: u32, tokens: u32, wire: DType) -> Slice {
        let token_bytes = self.token_bytes(wire);
        let part = (layer % LAYERS_IN_FLIGHT) as u64 * u64::from(self.tokens_max) * token_bytes;
        self.gathered.range(part + u64::from(at) * token_bytes, u64::from(tokens) * token_bytes)
    }
}

/// The sender's side of a hand-off.
pub(super) struct Outgoing {
    to: HandOff,
    pages: Vec<u32>,
    /// Pieces without a verdict.
    open: u32,
    handed_over: bool,
    /// When the first piece left.
    started: Option<Seconds>,
}

impl Outgoing {
    pub(super) fn new(to: HandOff) -> Self {
        Outgoing { to, pages: Vec::new(), open: 0, handed_over: false, started: None }
    }

    /// The prompt is computed and `next` drawn: whom to tell, and what.
    pub(super) fn hand_over(&mut self, request: RequestId, next: u32) -> (InstanceId, ToWorker) {
        self.handed_over = true;
        (self.to.to, ToWorker::HandedOver { request, attempt: self.to.attempt, next })
    }

    /// Only the receiver's word on what was sent is missing.
    pub(super) fn is_handed_over_to(&self, peer: InstanceId) -> bool {
        self.handed_over && self.to.to == peer
    }

    pub(super) fn started(&self) -> Option<Seconds> {
        self.started
    }

    /// Nothing of it is read here any more.
    pub(super) fn complete(&self) -> bool {
        self.handed_over && self.open == 0
    }
}

/// The receiver's side.
pub(super) struct Incoming {
    sender: InstanceId,
    pages: Vec<u32>,
    from: u32,
    length: u32,
    layers: u32,
    /// First tokens and layers of the pieces that landed or were given up.
    seen: BTreeSet<(u32, u32)>,
    /// Token-layers in them.
    settled: u64,
    /// Leading tokens of which nothing was given up.
    valid: u32,
    next: Option<u32>,
}

impl Incoming {
    pub(super) fn new(sender: InstanceId, pages: Vec<u32>, from: u32, length: u32, layers: u32) -> Self {
        let seen = BTreeSet::new();
        Incoming { sender, pages, from, length, layers, seen, settled: 0, valid: length, next: None }
    }

    /// Whether this piece is waited for: a sender that has lost count must not disturb the pages.
    fn awaits(&self, sender: InstanceId, piece: &PieceId) -> bool {
        let PieceId { layer, first, tokens, .. } = *piece;
        sender == self.sender
            && layer < self.layers
            && first >= self.from
            && tokens > 0
            && first.checked_add(tokens).is_some_and(|end| end <= self.length)
            && !self.seen.contains(&(first, layer))
    }

    fn settle(&mut self, piece: &PieceId) {
        self.seen.insert((piece.first, piece.layer));
        self.settled += u64::from(piece.tokens);
    }

    pub(super) fn hand_over(&mut self, next: u32) {
        self.next = Some(next);
    }

    pub(super) fn lose(&mut self, piece: PieceId) {
        if self.awaits(self.sender, &piece) {
            self.settle(&piece);
            self.valid = self.valid.min(piece.first);
        }
    }

    /// The leading tokens whose KV is here, and the next token, once nothing more will come.
    pub(super) fn complete(&self) -> Option<(u32, u32)> {
        let expected = u64::from(self.length - self.from) * u64::from(self.layers);
        (self.settled >= expected).then_some((self.valid, self.next?))
    }
}

impl Worker {
    /// The tokens of handed-off prompts that this step computes and the receiver lacks.
    pub(super) fn leaving(&mut self, step: &Step) -> Vec<Leaving> {
        let mut row = 0;
        let mut leaving = Vec::new();
        for part in &step.sequences {
            let (start, tokens) = (part.start, part.tokens.len() as u32);
            if let Some(outgoing) = self.active.get_mut(&part.request).and_then(|a| a.outgoing.as_mut()) {
                outgoing.pages.clone_from(&part.pages);
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

    fn wire_of(&self, request: RequestId) -> Option<DType> {
        Some(self.active.get(&request)?.outgoing.as_ref()?.to.wire)
    }

    /// Commands that gather what leaves of `layer`.
    pub(super) fn gathers(&self, layer: usize, pass: &graph::Step, leaving: &[Leaving]) -> Result<Vec<Cmd>> {
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
                self.open_piece(part.request);
                self.send_piece(part.request, piece, &from).await?;
            }
            at += part.tokens;
        }
        Ok(())
    }

    /// Cuts a token range into pieces that fit the receiver's slots.
    fn pieces(&self, request: RequestId, first: u32, tokens: u32) -> Vec<(u32, u32)> {
        let outgoing = self.active.get(&request).and_then(|a| a.outgoing.as_ref());
        let Some(outgoing) = outgoing else { return Vec::new() };
        let token_bytes = self.staging.token_bytes(outgoing.to.wire);
        let most = (outgoing.to.landing.slot_bytes / token_bytes).max(1) as u32;
        (first..first + tokens).step_by(most as usize).map(|at| (at, most.min(first + tokens - at))).collect()
    }

    fn open_piece(&mut self, request: RequestId) {
        if let Some(outgoing) = self.active.get_mut(&request).and_then(|a| a.outgoing.as_mut()) {
            outgoing.open += 1;
            outgoing.started.get_or_insert(self.env.now());
        }
    }

    /// Sends the KV that the prefix cache already had and the receiver lacks.
    pub(super) async fn send_cached(
        &mut self,
        request: RequestId,
        tokens_cached: u32,
        pages: &[u32],
    ) -> Result<()> {
        let outgoing = self.active.get_mut(&request).and_then(|a| a.outgoing.as_mut());
        let Some(outgoing) = outgoing else { return Ok(()) };
        outgoing.pages = pages.to_vec();
        let from = outgoing.to.from;
        for layer in 0..self.forward.config().layers {
            for (first, tokens) in self.pieces(request, from, tokens_cached.saturating_sub(from)) {
                self.open_piece(request);
                self.gather_and_send(request, PieceId { layer, first, tokens, retries: 0 }).await?;
            }
        }
        Ok(())
    }

    /// Gathers one piece from the pages and sends it.
    async fn gather_and_send(&mut self, request: RequestId, piece: PieceId) -> Result<()> {
        let Some(active) = self.active.get(&request) else { return Ok(()) };
        let Some(outgoing) = &active.outgoing else { return Ok(()) };
        let wire = outgoing.to.wire;
        let slots = self.upload_slots(&outgoing.pages, piece.first, piece.tokens)?;
        let (k_pool, v_pool) = self.forward.pools(piece.layer as usize);
        let from = self.staging.gathered_at(0, 0, piece.tokens, wire);
        let sig = self.staging.gather_sig(piece.tokens, wire);
        let command = Cmd::new(sig, &[slots, k_pool.clone(), v_pool.clone(), from.clone()])?;
        self.run_now(&[command])?;
        self.send_piece(request, piece, &from).await
    }

    fn upload_slots(&self, pages: &[u32], first: u32, tokens: u32) -> Result<Slice> {
        let page_tokens = self.staging.page_tokens;
        let slot = |i: u32| pages[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
        let slots: Vec<u32> = (first..first + tokens).map(slot).collect();
        let target = self.staging.slot_ids.range(0, u64::from(tokens) * 4);
        self.device.write(&target, bytemuck::cast_slice(&slots))?;
        Ok(target)
    }

    /// Reads a piece from the device and begins to send it.
    async fn send_piece(&mut self, request: RequestId, piece: PieceId, from: &Slice) -> Result<()> {
        let Some(to) = self.active.get(&request).and_then(|a| Some(a.outgoing.as_ref()?.to.clone())) else {
            return Ok(());
        };
        let Some(slot) = self.credit(&to).await? else {
            self.give_up(request, to.attempt, piece);
            return Ok(());
        };
        let hash = self.courier.fill(to.to, slot, &*self.device, from)?;
        let (attempt, bytes, wire) = (to.attempt, from.bytes, to.wire);
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
            // A receiver that was not told gives no slot back, and may be met again.
            self.courier.give_slot(to, slot);
            self.give_up(request, attempt, piece);
            self.settle_outgoing(request);
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
        let outgoing = self.active.get_mut(&request).and_then(|a| a.outgoing.as_mut());
        let Some(outgoing) = outgoing.filter(|o| o.to.attempt == attempt) else { return };
        outgoing.open -= 1;
        self.directory.tell(outgoing.to.to, ToWorker::Lost { request, attempt, piece });
        tracing::warn!(request, layer = piece.layer, first = piece.first, "KV is recomputed by the receiver");
    }

    /// Waits for a free slot of a receiver; none if it is gone. KV that arrives here meanwhile is taken
    /// in at once: two instances that send to each other would wait for ever otherwise.
    async fn credit(&mut self, to: &HandOff) -> Result<Option<u32>> {
        loop {
            if let Some(slot) = self.courier.take_slot(to.to, &to.landing)? {
                return Ok(Some(slot));
            }
            self.settle_sends(LOOK_AFTER_SENDS);
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

    /// Takes a piece out of its slot, checks it and puts it into the sequence's pages. Returns the
    /// request if it still waits for KV.
    pub(super) fn receive(&mut self, sender: InstanceId, parcel: Parcel) -> Result<Option<RequestId>> {
        let Parcel { request, attempt, piece, slot, bytes, hash, wire } = parcel;
        let active = self.active.get(&request).filter(|a| a.job.attempt == attempt);
        let awaited = active.and_then(|a| a.incoming.as_ref()).is_some_and(|incoming| {
            incoming.awaits(sender, &piece)
                && bytes == u64::from(piece.tokens) * self.staging.token_bytes(wire)
                && bytes <= self.courier.slot_bytes()
        });
        let landed = self.staging.landing.clone();
        let mut written = Ok(());
        let mut intact = false;
        let looked = self.courier.look(sender, slot, bytes, &mut |payload| {
            intact = xxh3_64(payload) == hash;
            if awaited && intact {
                written = self.device.write(&landed.range(0, bytes), payload);
            }
        });
        self.directory.tell(sender, ToWorker::Credit { receiver: self.id, slot });
        written?;
        if let Err(error) = looked {
            tracing::warn!(request, %sender, %error, "a peer named a slot that it does not have");
        }
        if awaited && intact {
            self.scatter(request, piece, wire, bytes)?;
            self.metrics.kv_transfer_bytes.inc_by(bytes);
        }
        if !intact {
            tracing::warn!(request, layer = piece.layer, first = piece.first, "KV arrived corrupt");
        }
        self.directory.tell(sender, ToWorker::Verdict { request, attempt, piece, intact });
        Ok((awaited && intact).then_some(request))
    }

    /// From the landing buffer into the sequence's pages.
    fn scatter(&mut self, request: RequestId, piece: PieceId, wire: DType, bytes: u64) -> Result<()> {
        let PieceId { layer, first, tokens, .. } = piece;
        let landed = self.staging.landing.range(0, bytes);
        let incoming = self.active.get(&request).and_then(|a| a.incoming.as_ref());
        let slots = self.upload_slots(&incoming.expect("checked by the caller").pages, first, tokens)?;
        let Staging { kv_heads, head_dim, page_tokens, kv, .. } = self.staging;
        let sig = OpSig::KvScatter { tokens, kv_heads, head_dim, page_tokens, kv, wire };
        let (k_pool, v_pool) = self.forward.pools(layer as usize);
        let command = Cmd::new(sig, &[landed, slots, k_pool.clone(), v_pool.clone()])?;
        self.run_now(&[command])?;
        let incoming = self.active.get_mut(&request).and_then(|a| a.incoming.as_mut());
        incoming.expect("still there").settle(&piece);
        Ok(())
    }

    /// The receiver's word on a piece: done, or once more.
    pub(super) async fn verdict(
        &mut self,
        request: RequestId,
        attempt: u32,
        piece: PieceId,
        intact: bool,
    ) -> Result<()> {
        let Some(active) = self.active.get_mut(&request) else { return Ok(()) };
        let Some(outgoing) = active.outgoing.as_mut().filter(|o| o.to.attempt == attempt) else {
            return Ok(());
        };
        if intact {
            outgoing.open -= 1;
            return Ok(());
        }
        self.metrics.kv_transfer_retries.inc();
        if piece.retries + 1 < SENDS_MAX {
            let piece = PieceId { retries: piece.retries + 1, ..piece };
            self.gather_and_send(request, piece).await
        } else {
            self.give_up(request, attempt, piece);
            Ok(())
        }
    }
}
