//! The KV of a prompt on its way from the instance that computes it to the one that decodes it.
//!
//! A layer's KV of the tokens just computed is gathered on the device into the wire layout, read to
//! the host, written to a staging slot of the receiver over a transport, checked there (XXH3-64 of
//! the payload), and scattered into the receiver's own pages. The wire layout is neutral, so unlike
//! page sizes and dtypes meet without a special case. While layer k travels, layers k+1.. compute:
//! the sender keeps `depth` layers in its queue. A piece that arrives corrupt, or does not arrive, is
//! sent again a few times, then given up; the receiver recomputes what is missing.

use super::MakeRegion;
use super::messages::{HandOff, Piece, PieceId, ToWorker};
use super::slots::SlotPool;
use super::worker::Worker;
use crate::model::ModelConfig;
use crate::model::graph::{self, StepShape};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{self, Access, Descriptor, Endpoint, Transport};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, DType, Device, OpSig, Result, Role, Slice};
use mixfleet_scheduler::batch::{RequestId, Step};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// Layers in the queue of an instance that hands KV off: one that runs, one that waits behind it so
/// that the device never idles, and two whose KV may be on its way to the host.
const LAYERS_IN_FLIGHT: usize = 4;
/// Sends of one piece, over all kinds of failure, before it is recomputed.
const SENDS_MAX: u32 = 3;

/// How much may be on its way to an instance, and how long a piece may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOffLimits {
    /// Bytes of a staging slot: the largest piece.
    pub slot_bytes: u64,
    /// Slots.
    pub slots: u32,
    /// For one piece, after which it counts as failed.
    pub timeout: Duration,
}

impl Default for HandOffLimits {
    fn default() -> Self {
        HandOffLimits { slot_bytes: 1 << 20, slots: 32, timeout: Duration::from_secs(5) }
    }
}

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

/// An instance's staging memory, endpoints and device buffers for copies.
pub(super) struct Courier {
    transport: Arc<dyn Transport>,
    /// Where peers write.
    region: Arc<dyn SharedMemory>,
    /// Where a piece lies while it is sent.
    outbox: Arc<dyn SharedMemory>,
    descriptor: Descriptor,
    slots: Arc<SlotPool>,
    endpoints: HashMap<Descriptor, Box<dyn Endpoint>>,
    timeout: Duration,
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

impl Courier {
    /// Allocates staging on the device and the host, and registers what peers write to.
    pub(super) fn new(
        device: &dyn Device,
        config: &ModelConfig,
        shape: &StepShape,
        transport: Arc<dyn Transport>,
        make_region: &MakeRegion,
        limits: &HandOffLimits,
    ) -> Result<Self> {
        let region = make_region(limits.slot_bytes * u64::from(limits.slots))?;
        let outbox = make_region(limits.slot_bytes)?;
        let descriptor = transport.register(region.clone(), Access::Write)?;
        let widest = 2 * u64::from(config.kv_heads * config.head_dim) * 4;
        let piece_tokens = limits.slot_bytes / (widest / 2);
        let gathered = LAYERS_IN_FLIGHT as u64 * u64::from(shape.tokens_max) * widest;
        let alloc = |bytes| device.alloc(bytes, Role::Staging);
        Ok(Courier {
            transport,
            region,
            outbox,
            descriptor,
            slots: Arc::new(SlotPool::new(limits.slots, limits.slot_bytes)),
            endpoints: HashMap::new(),
            timeout: limits.timeout,
            gathered: alloc(gathered)?,
            landing: alloc(limits.slot_bytes.max(widest))?,
            slot_ids: alloc(piece_tokens.max(1) * 4)?,
            page_tokens: shape.block_tokens,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            kv: shape.kv,
            tokens_max: shape.tokens_max,
        })
    }

    /// How to reach this instance's staging memory.
    pub(super) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Its free slots.
    pub(super) fn slots(&self) -> &Arc<SlotPool> {
        &self.slots
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
        let Courier { kv_heads, head_dim, page_tokens, kv, .. } = *self;
        OpSig::KvGather { tokens, kv_heads, head_dim, page_tokens, kv, wire }
    }

    /// Where the gathered KV of `layer` lies, from row `at` of those that leave.
    fn gathered_at(&self, layer: usize, at: u32, tokens: u32, wire: DType) -> Slice {
        let token_bytes = self.token_bytes(wire);
        let part = (layer % LAYERS_IN_FLIGHT) as u64 * u64::from(self.tokens_max) * token_bytes;
        self.gathered.range(part + u64::from(at) * token_bytes, u64::from(tokens) * token_bytes)
    }

    fn endpoint(&mut self, region: &Descriptor) -> Result<&mut Box<dyn Endpoint>> {
        if !self.endpoints.contains_key(region) {
            let endpoint = self.transport.connect(self.outbox.clone(), region)?;
            self.endpoints.insert(region.clone(), endpoint);
        }
        Ok(self.endpoints.get_mut(region).expect("just inserted"))
    }

    /// Reads a piece from the device into the outbox, and returns its hash.
    fn fill_outbox(&mut self, device: &dyn Device, from: &Slice) -> Result<u64> {
        let mut outcome = Ok(0);
        self.outbox.update(0, from.bytes, &mut |place| {
            outcome = device.read(from, place).map(|()| xxh3_64(place));
        })?;
        outcome
    }

    /// Writes the outbox's first `bytes` bytes to `offset` of a peer's region.
    fn write(&mut self, region: &Descriptor, bytes: u64, offset: u64) -> Result<()> {
        let timeout = self.timeout;
        let endpoint = self.endpoint(region)?;
        let transfer = endpoint.write(&[transport::Piece { local: 0, remote: offset, bytes }])?;
        endpoint.wait(transfer, timeout).inspect_err(|_| {
            // The write must not land after the slot has gone to somebody else.
            let _ = endpoint.cancel(transfer);
        })
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

    /// The prompt is computed and `next` drawn.
    pub(super) fn hand_over(&mut self, request: RequestId, next: u32) {
        let _ = self.to.inbox.send(ToWorker::HandedOver { request, attempt: self.to.attempt, next });
        self.handed_over = true;
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
    pages: Vec<u32>,
    from: u32,
    length: u32,
    layers: u32,
    /// Token-layers that landed or were given up.
    settled: u64,
    /// Leading tokens of which nothing was given up.
    valid: u32,
    next: Option<u32>,
}

impl Incoming {
    pub(super) fn new(pages: Vec<u32>, from: u32, length: u32, layers: u32) -> Self {
        Incoming { pages, from, length, layers, settled: 0, valid: length, next: None }
    }

    pub(super) fn hand_over(&mut self, next: u32) {
        self.next = Some(next);
    }

    pub(super) fn lose(&mut self, piece: PieceId) {
        self.settled += u64::from(piece.tokens);
        self.valid = self.valid.min(piece.first);
    }

    /// The leading tokens whose KV is here, and the next token, once nothing more will come.
    pub(super) fn complete(&self) -> Option<(u32, u32)> {
        let expected = u64::from(self.length - self.from) * u64::from(self.layers);
        assert!(self.settled <= expected, "more KV settled than was expected");
        (self.settled == expected).then_some((self.valid, self.next?))
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
            let out = self.courier.gathered_at(layer, at, part.tokens, wire);
            let sig = self.courier.gather_sig(part.tokens, wire);
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
                let from = self.courier.gathered_at(layer, row, tokens, wire);
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
        let token_bytes = self.courier.token_bytes(outgoing.to.wire);
        let most = (outgoing.to.slots.slot_bytes() / token_bytes).max(1) as u32;
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
        let from = self.courier.gathered_at(0, 0, piece.tokens, wire);
        let sig = self.courier.gather_sig(piece.tokens, wire);
        let command = Cmd::new(sig, &[slots, k_pool.clone(), v_pool.clone(), from.clone()])?;
        self.run_now(&[command])?;
        self.send_piece(request, piece, &from).await
    }

    fn upload_slots(&self, pages: &[u32], first: u32, tokens: u32) -> Result<Slice> {
        let page_tokens = self.courier.page_tokens;
        let slot = |i: u32| pages[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
        let slots: Vec<u32> = (first..first + tokens).map(slot).collect();
        let target = self.courier.slot_ids.range(0, u64::from(tokens) * 4);
        self.device.write(&target, bytemuck::cast_slice(&slots))?;
        Ok(target)
    }

    /// Reads a piece from the device and writes it to a slot of the receiver.
    async fn send_piece(&mut self, request: RequestId, piece: PieceId, from: &Slice) -> Result<()> {
        let hash = self.courier.fill_outbox(&*self.device, from)?;
        let Some(to) = self.active.get(&request).and_then(|a| Some(a.outgoing.as_ref()?.to.clone())) else {
            return Ok(());
        };
        let Some(slot) = self.credit(&to).await? else {
            self.give_up(request, piece);
            return Ok(());
        };
        let offset = u64::from(slot) * to.slots.slot_bytes();
        for retries in piece.retries..SENDS_MAX {
            match self.courier.write(&to.region, from.bytes, offset) {
                Ok(()) => {
                    let PieceId { layer, first, tokens, .. } = piece;
                    let (attempt, wire, reply) = (to.attempt, to.wire, self.address.clone());
                    let landed =
                        Piece { request, attempt, layer, first, tokens, slot, hash, wire, retries, reply };
                    // A receiver that is gone took its slots with it.
                    let _ = to.inbox.send(ToWorker::Landed(landed));
                    return Ok(());
                }
                Err(error) => {
                    self.metrics.kv_transfer_retries.inc();
                    tracing::warn!(request, layer = piece.layer, first = piece.first, %error, "KV transfer failed");
                }
            }
        }
        to.slots.give(slot);
        self.give_up(request, piece);
        Ok(())
    }

    fn give_up(&mut self, request: RequestId, piece: PieceId) {
        let Some(outgoing) = self.active.get_mut(&request).and_then(|a| a.outgoing.as_mut()) else { return };
        outgoing.open -= 1;
        let attempt = outgoing.to.attempt;
        let _ = outgoing.to.inbox.send(ToWorker::Lost { request, attempt, piece });
        tracing::warn!(request, layer = piece.layer, first = piece.first, "KV is recomputed by the receiver");
    }

    /// Waits for a free slot of a receiver; none if it is gone. KV that arrives here meanwhile is taken
    /// in at once: two instances that send to each other would wait for ever otherwise.
    async fn credit(&mut self, to: &HandOff) -> Result<Option<u32>> {
        loop {
            let message = tokio::select! {
                biased;
                slot = to.slots.take() => return Ok(Some(slot)),
                () = to.inbox.closed() => return Ok(None),
                Some(message) = self.inbox.recv() => message,
            };
            match message {
                ToWorker::Landed(piece) => {
                    if let Some(request) = self.receive(piece)? {
                        // Joins the batch between steps.
                        self.deferred.push_back(ToWorker::Settle { request });
                    }
                }
                other => self.deferred.push_back(other),
            }
        }
    }

    /// Takes a piece out of its slot, checks it and puts it into the sequence's pages. Returns the
    /// request if it still waits for KV.
    pub(super) fn receive(&mut self, piece: Piece) -> Result<Option<RequestId>> {
        let Piece { request, attempt, layer, first, tokens, slot, hash, wire, retries, reply } = piece;
        let bytes = u64::from(tokens) * self.courier.token_bytes(wire);
        let mut payload = vec![0; bytes as usize];
        self.courier.region.load(u64::from(slot) * self.courier.slots.slot_bytes(), &mut payload)?;
        self.courier.slots.give(slot);
        let intact = xxh3_64(&payload) == hash;
        let active = self.active.get(&request).filter(|a| a.job.attempt == attempt);
        let waits = active.is_some_and(|a| a.incoming.is_some());
        if waits && intact {
            self.scatter(request, layer, first, tokens, wire, &payload)?;
            self.metrics.kv_transfer_bytes.inc_by(bytes);
        }
        if !intact {
            tracing::warn!(request, layer, first, "KV arrived corrupt");
        }
        let piece = PieceId { layer, first, tokens, retries };
        let _ = reply.send(ToWorker::Verdict { request, attempt, piece, intact });
        Ok((waits && intact).then_some(request))
    }

    fn scatter(
        &mut self,
        request: RequestId,
        layer: u32,
        first: u32,
        tokens: u32,
        wire: DType,
        payload: &[u8],
    ) -> Result<()> {
        let landing = self.courier.landing.range(0, payload.len() as u64);
        self.device.write(&landing, payload)?;
        let incoming =
            self.active.get(&request).and_then(|a| a.incoming.as_ref()).expect("checked by the caller");
        let slots = self.upload_slots(&incoming.pages, first, tokens)?;
        let Courier { kv_heads, head_dim, page_tokens, kv, .. } = self.courier;
        let sig = OpSig::KvScatter { tokens, kv_heads, head_dim, page_tokens, kv, wire };
        let (k_pool, v_pool) = self.forward.pools(layer as usize);
        let command = Cmd::new(sig, &[landing, slots, k_pool.clone(), v_pool.clone()])?;
        self.run_now(&[command])?;
        let incoming = self.active.get_mut(&request).and_then(|a| a.incoming.as_mut()).expect("still there");
        incoming.settled += u64::from(tokens);
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
            self.give_up(request, piece);
            Ok(())
        }
    }
}
