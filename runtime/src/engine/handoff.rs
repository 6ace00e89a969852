//! KV on its way from the instance that has it to one that needs it: a prompt that is computed here and
//! decoded there, or a prefix that is lent.
//!
//! A layer's KV of the tokens just computed is gathered on the device into the wire layout, read to the host,
//! written to a staging slot of the receiver over a transport, checked there (XXH3-64 of the payload), and
//! scattered into the receiver's own pages. The wire layout is neutral, so unlike page sizes and dtypes meet
//! without a special case. While layer k travels, layers k+1.. compute: the sender keeps a few layers in its
//! queue. What is there already (a cached prefix, a lent one) waits in a queue of pieces: between steps,
//! pieces leave while there are slots for them. A piece that arrives corrupt, or does not arrive, is sent
//! again a few times, then given up; the receiver recomputes what is missing.

use super::courier::{SENDS_MAX, Sent};
use super::lend::{Lent, PieceSource};
use super::messages::{HandOff, Parcel, PeerWord, PieceId, Transfer};
use super::pages::Pages;
use super::worker::{Event, Worker};
use crate::env::Task;
use crate::model::graph::{self, StepShape};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, Result, Slice};
use mixfleet_scheduler::batch::{RequestId, Step};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Layers in the queue of an instance that hands KV off: one that runs, one that waits behind it so
/// that the device never idles, and two whose KV may be on its way to the host.
pub(super) const LAYERS_IN_FLIGHT: usize = 4;

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

/// An instance's device memory for pieces that leave and come.
pub(super) struct Staging {
    /// For `tokens_max` tokens in the wire layout each, on the device. A read waits for all that uses a
    /// buffer, so each layer has its own.
    gathered: [Slice; LAYERS_IN_FLIGHT],
    /// One piece on its way in, on the device.
    pub(super) landing: Slice,
    tokens_max: u32,
}

/// Tokens of a prompt that leave during a step.
pub(super) struct Leaving {
    request: RequestId,
    to: Arc<HandOff>,
    tokens: Range<u32>,
    /// Row of the first token in the step.
    row: u32,
    /// Where the KV of the first one is gathered.
    offset: u64,
}

impl Staging {
    /// Allocates on the device, for pieces of up to `slot_bytes`; with the pages that they are copied from
    /// and to.
    pub(super) fn new(
        device: &dyn Device,
        kv: KvShape,
        shape: &StepShape,
        slot_bytes: u64,
    ) -> Result<(Self, Pages)> {
        let widest = kv.wire_token_bytes(DType::F32);
        let tokens_max = shape.tokens_max.max(shape.block_tokens);
        let piece_tokens = (slot_bytes / (widest / 2)).max(u64::from(tokens_max));
        let gathered = || device.alloc(u64::from(shape.tokens_max) * widest, BufferUsage::Kv);
        let staging = Staging {
            gathered: [gathered()?, gathered()?, gathered()?, gathered()?],
            landing: device.alloc(slot_bytes.max(widest), BufferUsage::Kv)?,
            tokens_max: shape.tokens_max,
        };
        Ok((staging, Pages::new(device, kv, piece_tokens)?))
    }

    /// Where the gathered KV of `layer` lies.
    fn gathered(&self, layer: usize, offset: u64, bytes: u64) -> Slice {
        self.gathered[layer % LAYERS_IN_FLIGHT].range(offset, bytes)
    }
}

/// The sender's side of a transfer.
pub(super) struct Outgoing {
    pub(super) transfer: Transfer,
    pub(super) to: Arc<HandOff>,
    /// Where a prefix lies on the device; a prompt lies in its sequence's pages.
    pub(super) pages: Vec<u32>,
    /// What of a prefix lies in the lower tiers.
    pub(super) below: Option<Lent>,
    /// Pieces that leave when there are slots for them.
    pub(super) waiting: VecDeque<PieceId>,
    /// Pieces that left and have no verdict: tokens by first token and layer.
    open: BTreeMap<(u32, u32), u32>,
    handed_over: bool,
    /// When the first piece left.
    started: Option<Seconds>,
}

impl Outgoing {
    pub(super) fn new(transfer: Transfer, to: HandOff) -> Self {
        let (pages, below, waiting, open) = Default::default();
        Outgoing {
            transfer,
            to: Arc::new(to),
            pages,
            below,
            waiting,
            open,
            handed_over: false,
            started: None,
        }
    }

    /// The prompt is computed, and the rest is the receiver's.
    pub(super) fn hand_over(&mut self) -> Arc<HandOff> {
        self.handed_over = true;
        self.to.clone()
    }

    /// Nothing but the word of `peer` on what was sent is missing, or it is the only one who wants it.
    fn ends_with(&self, peer: InstanceId) -> bool {
        self.to.to == peer && (self.handed_over || self.transfer == Transfer::Prefix)
    }

    /// A prefix of which the receiver has a word on every piece.
    fn is_settled(&self) -> bool {
        self.transfer == Transfer::Prefix && self.waiting.is_empty() && self.open.is_empty()
    }

    fn sent(&mut self, piece: &PieceId, now: Seconds) {
        self.open.insert((piece.first, piece.layer), piece.tokens);
        self.started.get_or_insert(now);
    }

    /// A piece is on its way that nobody has given a verdict on. False for others: a receiver that has lost
    /// count asks in vain.
    fn is_open(&self, piece: &PieceId) -> bool {
        self.open.get(&(piece.first, piece.layer)) == Some(&piece.tokens)
    }

    /// A piece that was open has this verdict. It leaves again, unless it has done so too often: false then.
    fn judge(&mut self, piece: PieceId, intact: bool) -> bool {
        self.open.remove(&(piece.first, piece.layer));
        let retries = piece.retries.saturating_add(1);
        if !intact && retries < SENDS_MAX {
            self.waiting.push_front(PieceId { retries, ..piece });
        }
        intact || retries < SENDS_MAX
    }
}

/// Cuts a token range of one layer into pieces.
pub(super) fn pieces(layer: u32, tokens: Range<u32>, tokens_max: u32) -> impl Iterator<Item = PieceId> {
    let end = tokens.end;
    let piece = move |first| PieceId { layer, first, tokens: tokens_max.min(end - first), retries: 0 };
    tokens.step_by(tokens_max as usize).map(piece)
}

impl Worker {
    /// The tokens of handed-off prompts that this step computes and the receiver lacks.
    pub(super) fn leaving(&mut self, step: &Step) -> Vec<Leaving> {
        let (mut row, mut offset) = (0, 0);
        let mut leaving = Vec::new();
        for part in &step.sequences {
            let (start, end, request) = (part.start, part.start + part.tokens, part.request);
            if let Some(to) = self.hand_off(request).map(|outgoing| outgoing.to.clone()) {
                let first = to.from.clamp(start, end);
                if first < end {
                    let bytes = u64::from(end - first) * self.pages.shape.wire_token_bytes(to.wire);
                    let (tokens, row) = (first..end, row + first - start);
                    leaving.push(Leaving { request, to, tokens, row, offset });
                    offset += bytes;
                }
            }
            row += part.tokens;
        }
        leaving
    }

    /// What goes on elsewhere once it is computed here.
    pub(super) fn hand_off(&mut self, request: RequestId) -> Option<&mut Outgoing> {
        self.outgoing.get_mut(&request).filter(|outgoing| outgoing.transfer == Transfer::HandOff)
    }

    /// Commands that gather what leaves of `layer`.
    pub(super) fn gathers(&self, layer: usize, pass: &graph::Pass, leaving: &[Leaving]) -> Result<Vec<Cmd>> {
        let gather = |part: &Leaving| {
            let (tokens, wire) = (part.tokens.len() as u32, part.to.wire);
            let bytes = u64::from(tokens) * self.pages.shape.wire_token_bytes(wire);
            let slots = self.forward.slots(pass, part.row, tokens);
            let to = self.staging.gathered(layer, part.offset, bytes);
            self.pages.gather(&self.forward, layer, slots, (to, wire))
        };
        leaving.iter().map(gather).collect()
    }

    /// Sends what was gathered of `layer`.
    pub(super) async fn deliver(&mut self, layer: usize, leaving: &[Leaving]) -> Result<()> {
        for Leaving { request, to, tokens, offset, .. } in leaving {
            let token_bytes = self.pages.shape.wire_token_bytes(to.wire);
            for piece in pieces(layer as u32, tokens.clone(), self.piece_tokens_max(to)) {
                let offset = offset + u64::from(piece.first - tokens.start) * token_bytes;
                let from = self.staging.gathered(layer, offset, u64::from(piece.tokens) * token_bytes);
                let began = self.env.now();
                let slot = self.credit(to).await?;
                self.waited += self.env.now() - began;
                // It may have ended meanwhile.
                if !self.outgoing.get(request).is_some_and(|outgoing| Arc::ptr_eq(&outgoing.to, to)) {
                    slot.inspect(|&slot| self.courier.give_slot(to.to, slot));
                    break;
                }
                match slot {
                    Some(slot) => self.send_gathered(*request, piece, to, (slot, from))?,
                    None => self.lose(*request, to, piece),
                }
            }
        }
        Ok(())
    }

    /// Tokens of the largest piece that fits a slot there and the staging here.
    pub(super) fn piece_tokens_max(&self, to: &HandOff) -> u32 {
        let token_bytes = self.pages.shape.wire_token_bytes(to.wire);
        let most = (to.landing.slot_bytes / token_bytes).max(1);
        most.min(u64::from(self.staging.tokens_max)) as u32
    }

    /// The KV that the prefix cache already had and the receiver lacks is to be sent.
    pub(super) fn queue_cached(&mut self, request: RequestId, tokens_cached: u32) {
        let Some(to) = self.hand_off(request).map(|outgoing| outgoing.to.clone()) else { return };
        let (layers, most) = (self.forward.config().layers, self.piece_tokens_max(&to));
        let cached = (0..layers).flat_map(|layer| pieces(layer, to.from..tokens_cached, most));
        self.hand_off(request).expect("just found").waiting.extend(cached);
    }

    /// Sends what waits, as far as there are free slots.
    pub(super) fn send_waiting(&mut self) -> Result<()> {
        let unsent = self.outgoing.iter().filter(|(_, outgoing)| !outgoing.waiting.is_empty());
        let mut its: Vec<RequestId> = unsent.map(|(&request, _)| request).collect();
        its.sort_unstable();
        for request in its {
            while self.send_next_of(request)? {}
            self.settle_outgoing(request)?;
        }
        Ok(())
    }

    /// Sends one piece that waits. False if there is none, or no slot for it.
    fn send_next_of(&mut self, request: RequestId) -> Result<bool> {
        let Some(outgoing) = self.outgoing.get_mut(&request) else { return Ok(false) };
        let Some(&piece) = outgoing.waiting.front() else { return Ok(false) };
        let to = outgoing.to.clone();
        let slot = match self.courier.take_slot(to.to, &to.landing) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Ok(false),
            Err(error) => {
                tracing::warn!(request, to = %to.to, %error, "KV is not sent");
                outgoing.waiting.pop_front();
                self.lose(request, &to, piece);
                return Ok(true);
            }
        };
        outgoing.waiting.pop_front();
        match self.place(request, &piece)? {
            PieceSource::Below(payload) => {
                let bytes = payload.len() as u64;
                self.send_from(request, piece, &to, (slot, bytes), &mut |place| {
                    place.copy_from_slice(&payload);
                    Ok(())
                })?;
            }
            PieceSource::Rotten => {
                self.courier.give_slot(to.to, slot);
                self.stop_outgoing(request)?;
                self.tell_tiers();
            }
            PieceSource::Device(slots) => {
                let bytes = u64::from(piece.tokens) * self.pages.shape.wire_token_bytes(to.wire);
                let from = self.staging.gathered(0, 0, bytes);
                let layer = piece.layer as usize;
                let copy = self.pages.gather(&self.forward, layer, slots, (from.clone(), to.wire))?;
                self.run_now(&[copy])?;
                self.send_gathered(request, piece, &to, (slot, from))?;
            }
        }
        Ok(true)
    }

    /// Reads a piece from the device into a free slot, and begins to send it.
    fn send_gathered(
        &mut self,
        request: RequestId,
        piece: PieceId,
        to: &HandOff,
        (slot, from): (u32, Slice),
    ) -> Result<()> {
        let device = self.device.clone();
        self.send_from(request, piece, to, (slot, from.bytes), &mut |place| device.read(&from, place))
    }

    /// Has `read` fill a free slot, and begins to send it.
    fn send_from(
        &mut self,
        request: RequestId,
        piece: PieceId,
        to: &HandOff,
        (slot, bytes): (u32, u64),
        read: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let now = self.env.now();
        let hash = self.courier.fill(to.to, slot, bytes, read)?;
        let HandOff { attempt, wire, .. } = *to;
        if let Some(outgoing) = self.outgoing.get_mut(&request) {
            outgoing.sent(&piece, now);
        }
        self.courier.send(to.to, Parcel { request, attempt, piece, slot, bytes, hash, wire }, now);
        self.settle_sends(Duration::ZERO)
    }

    /// Tells receivers what has landed with them; waits for up to `patience` for something that has.
    pub(super) fn settle_sends(&mut self, patience: Duration) -> Result<()> {
        for (to, sent) in self.courier.settle(self.env.now(), patience) {
            let (landed, parcel) = match sent {
                Sent::Landed(parcel) => (true, parcel),
                Sent::Failed(parcel) => (false, parcel),
            };
            let Parcel { request, attempt, piece, slot, bytes, .. } = parcel;
            self.metrics.kv_transfer_retries.inc_by(u64::from(piece.retries));
            if landed && self.directory.tell(to, self.id, PeerWord::Landed(parcel)) {
                self.metrics.kv_sent_bytes.inc_by(bytes);
                continue;
            }
            if landed {
                // A receiver that was not told gives no slot back, and may be met again.
                self.courier.give_slot(to, slot);
            }
            if let Some(outgoing) = self.open(request, to, attempt, &piece) {
                outgoing.open.remove(&(piece.first, piece.layer));
                let to = outgoing.to.clone();
                self.lose(request, &to, piece);
                self.settle_outgoing(request)?;
            }
        }
        Ok(())
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

    /// The transfer of which `piece` went to `peer` and waits for its verdict.
    fn open(
        &mut self,
        request: RequestId,
        peer: InstanceId,
        attempt: u32,
        piece: &PieceId,
    ) -> Option<&mut Outgoing> {
        let is_meant = |o: &&mut Outgoing| o.to.to == peer && o.to.attempt == attempt && o.is_open(piece);
        self.outgoing.get_mut(&request).filter(is_meant)
    }

    /// A piece is sent no more.
    fn lose(&self, request: RequestId, to: &HandOff, piece: PieceId) {
        self.directory.tell(to.to, self.id, PeerWord::Lost { request, attempt: to.attempt, piece });
        tracing::warn!(request, layer = piece.layer, first = piece.first, "KV is recomputed by the receiver");
    }

    /// Waits for a free slot of a receiver; none if it is gone. What peers say meanwhile is heard: two
    /// instances that send to each other would wait for ever otherwise.
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
            self.settle_sends(LOOK_AFTER_SENDS)?;
            self.show_life();
            let due = self.sends_due();
            tokio::select! {
                biased;
                Some((peer, word)) = self.words.recv() => {
                    let lost = peer == to.to && matches!(word, PeerWord::Down);
                    self.hear(peer, word)?;
                    if lost {
                        return Ok(None);
                    }
                }
                () = self.directory.gone(to.to) => return Ok(None),
                () = due => {}
            }
        }
    }

    /// The receiver's word on a piece: done, or once more.
    pub(super) fn verdict(
        &mut self,
        receiver: InstanceId,
        (request, attempt): (RequestId, u32),
        (piece, intact): (PieceId, bool),
    ) -> Result<()> {
        let Some(outgoing) = self.open(request, receiver, attempt, &piece) else { return Ok(()) };
        let (is_over, to) = (!outgoing.judge(piece, intact), outgoing.to.clone());
        self.metrics.kv_transfer_retries.inc_by(u64::from(!intact));
        if is_over {
            self.lose(request, &to, piece);
        }
        self.settle_outgoing(request)
    }

    /// The receiver goes on with the sequence that was handed over to it: its blocks here are released.
    pub(super) fn taken_over(
        &mut self,
        receiver: InstanceId,
        request: RequestId,
        attempt: u32,
    ) -> Result<()> {
        let is_meant = |o: &&mut Outgoing| o.handed_over && o.to.to == receiver && o.to.attempt == attempt;
        match self.hand_off(request).filter(is_meant) {
            Some(_) => self.complete_outgoing(request),
            None => Ok(()),
        }
    }

    /// Blocks of a lent prefix are released when the receiver has a word on every piece.
    pub(super) fn settle_outgoing(&mut self, request: RequestId) -> Result<()> {
        match self.outgoing.get(&request).is_some_and(Outgoing::is_settled) {
            true => self.complete_outgoing(request),
            false => Ok(()),
        }
    }

    fn complete_outgoing(&mut self, request: RequestId) -> Result<()> {
        if let Some(started) = self.outgoing.get(&request).and_then(|outgoing| outgoing.started) {
            self.metrics.kv_transfer_s.observe((self.env.now() - started).0);
        }
        self.end_outgoing(request)
    }

    /// Nothing of it is sent any more.
    fn end_outgoing(&mut self, request: RequestId) -> Result<()> {
        match self.outgoing.remove(&request).map(|outgoing| outgoing.transfer) {
            Some(Transfer::Prefix) => self.machine_step(Event::Unlend { request }),
            Some(Transfer::HandOff) => {
                self.active.remove(&request);
                self.machine_step(Event::Release { request })
            }
            None => Ok(()),
        }
    }

    /// From now on KV of `request` goes elsewhere.
    pub(super) fn begin_outgoing(&mut self, request: RequestId, outgoing: Outgoing) -> Result<()> {
        // One of an earlier placement, which was not cancelled because it was thought to be over.
        self.stop_outgoing(request)?;
        // The receiver has fenced off the slots that it gave away before.
        let to = outgoing.to.clone();
        self.stop_all(|o| o.transfer == Transfer::Prefix && o.to.to == to.to && o.to.landing != to.landing)?;
        self.outgoing.insert(request, outgoing);
        Ok(())
    }

    /// Nobody confirms what went to a lost peer: whatever was handed over to it is its own, or is placed
    /// anew.
    pub(super) fn stop_all_to(&mut self, peer: InstanceId) -> Result<()> {
        self.stop_all(|outgoing| outgoing.ends_with(peer))
    }

    fn stop_all(&mut self, which: impl Fn(&Outgoing) -> bool) -> Result<()> {
        let its = self.outgoing.iter().filter(|(_, outgoing)| which(outgoing)).map(|(&request, _)| request);
        let mut its: Vec<RequestId> = its.collect();
        its.sort_unstable();
        its.into_iter().try_for_each(|request| self.stop_outgoing(request))
    }

    /// It ends here before its receiver has all: whoever still waits for a prefix is told not to.
    pub(super) fn stop_outgoing(&mut self, request: RequestId) -> Result<()> {
        let Some(Outgoing { transfer, to, .. }) = self.outgoing.get(&request) else { return Ok(()) };
        if *transfer == Transfer::Prefix {
            let word = PeerWord::Lent { request, attempt: to.attempt, until: 0 };
            self.directory.tell(to.to, self.id, word);
        }
        self.end_outgoing(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::messages::Landing;

    fn outgoing(transfer: Transfer) -> Outgoing {
        let landing = Landing { regions: Vec::new(), slots: 1, slot_bytes: 64 };
        Outgoing::new(transfer, HandOff { attempt: 0, from: 0, to: InstanceId(1), landing, wire: DType::F32 })
    }

    #[test]
    fn tokens_are_cut_into_pieces_that_fit_and_none_into_none() {
        let cut = |tokens| pieces(3, tokens, 8).map(|piece| (piece.first, piece.tokens)).collect::<Vec<_>>();
        assert_eq!(cut(5..22), [(5, 8), (13, 8), (21, 1)]);
        // What the receiver has may end behind what is cached here.
        let (beyond, end) = (9, 7);
        assert_eq!((cut(end..end), cut(beyond..end)), (vec![], vec![]));
    }

    #[test]
    fn a_piece_leaves_again_once_for_each_time_that_it_left_and_not_for_ever() {
        for transfer in [Transfer::HandOff, Transfer::Prefix] {
            let mut outgoing = outgoing(transfer);
            let mut piece = pieces(0, 0..4, 4).next().unwrap();
            for _ in 1..SENDS_MAX {
                outgoing.sent(&piece, Seconds::ZERO);
                assert!(outgoing.is_open(&piece) && outgoing.judge(piece, false));
                // A receiver that says it twice is not listened to.
                assert!(!outgoing.is_open(&piece) && outgoing.waiting.len() == 1 && !outgoing.is_settled());
                piece = outgoing.waiting.pop_front().unwrap();
            }
            outgoing.sent(&piece, Seconds::ZERO);
            assert!(!outgoing.judge(piece, false) && outgoing.waiting.is_empty());
            assert_eq!(outgoing.is_settled(), transfer == Transfer::Prefix);
        }
    }
}
