//! The sender's side of KV transfers: prompts computed here and decoded elsewhere, and lent prefixes.
//!
//! Layers with a window send what a token behind the prompt reads, if their receiver keeps no more; of
//! prefixes all layers are sent.
//!
//! A layer's KV of the tokens just computed is gathered on the device into the wire layout, read to the host,
//! written to a staging slot of the receiver over a transport, checked there (XXH3-64 of the payload), and
//! scattered into the receiver's own pages. The wire layout is neutral, so unlike page sizes, dtypes and
//! numbers of devices need no special case. While layer k is sent, layers k+1.. compute: the sender keeps a
//! few layers in its queue. KV that is already there (a cached or lent prefix, and pieces of a step on
//! several devices that found no slot) is sent from a queue of pieces, between steps, as slots become free. A
//! piece that arrives corrupt, or does not arrive, is resent a few times, then given up; the receiver
//! recomputes the missing tokens.

use super::courier::{Courier, SENDS_MAX, Sent};
use super::directory::Directory;
use super::instance::Surroundings;
use super::leaving::{LeavingTokens, Taken};
use super::lend::{Lent, PieceSource};
use super::messages::{HandOff, KvMessage, Parcel, PieceId, Transfer};
use super::pages::{InstanceKv, SequenceKv};
use crate::env::{SharedEnv, Task};
use crate::metrics::Metrics;
use crate::model::graph::StepInput;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Layers in the queue of an instance that hands KV off: one that runs, one queued behind it so that the
/// device never idles, and two whose KV may be in transit to the host.
pub(super) const LAYERS_IN_FLIGHT: usize = 4;

/// Minimum poll interval for sends.
pub(super) const SEND_POLL_INTERVAL: Duration = Duration::from_micros(500);

/// The dtype of KV between two instances: no wider than either needs, and lossless unless the receiver rounds
/// anyway. `codes`: whether both can convert KV of eight bits, which holds what the receiver keeps, or what
/// the sender has.
pub fn wire_dtype(sender: DType, receiver: DType, codes: bool) -> DType {
    match (sender, receiver) {
        (a, b) if a == b => a,
        (_, b) if b.is_scaled() && codes => b,
        (a, _) if a.is_scaled() && codes => a,
        (a, b) if a.is_scaled() => b,
        (a, b) if b.is_scaled() => a,
        (DType::F32, b) => b,
        (a, DType::F32) => a,
        _ => DType::F32,
    }
}

/// The sender's side of a transfer.
pub(super) struct Outgoing {
    transfer: Transfer,
    to: Arc<HandOff>,
    /// Device pages of a lent prefix; a prompt is in its sequence's pages.
    pages: Vec<u32>,
    /// The part of a lent prefix that is in lower tiers.
    below: Option<Lent>,
    /// Pieces to be sent as slots become free.
    waiting: VecDeque<PieceId>,
    /// Pieces sent that have no verdict yet: tokens by first token and layer.
    open: BTreeMap<(u32, u32), u32>,
    handed_over: bool,
    /// Time at which the first piece was sent.
    started: Option<Seconds>,
}

impl Outgoing {
    fn new(transfer: Transfer, to: HandOff) -> Self {
        let (pages, below, waiting, open) = Default::default();
        let (to, handed_over, started) = (Arc::new(to), false, None);
        Outgoing { transfer, to, pages, below, waiting, open, handed_over, started }
    }

    /// Whether the transfer ends when `peer` is lost, as only its verdicts are missing or only it wants the
    /// KV.
    fn ends_with(&self, peer: InstanceId) -> bool {
        self.to.to == peer && (self.handed_over || self.transfer == Transfer::Prefix)
    }

    /// Whether this is a prefix for which every piece has a verdict.
    fn is_settled(&self) -> bool {
        self.transfer == Transfer::Prefix && self.waiting.is_empty() && self.open.is_empty()
    }

    fn sent(&mut self, piece: &PieceId, now: Seconds) {
        self.open.insert((piece.first, piece.layer), piece.tokens);
        self.started.get_or_insert(now);
    }

    /// Whether a piece was sent and has no verdict yet. Verdicts on other pieces are ignored.
    fn is_open(&self, piece: &PieceId) -> bool {
        self.open.get(&(piece.first, piece.layer)) == Some(&piece.tokens)
    }

    /// Forgets a sent piece.
    fn close(&mut self, piece: &PieceId) {
        self.open.remove(&(piece.first, piece.layer));
    }

    /// Records a verdict on an open piece. A corrupt piece is queued again; false if it was sent too often.
    fn judge(&mut self, piece: PieceId, intact: bool) -> bool {
        self.close(&piece);
        let retries = piece.retries.saturating_add(1);
        if !intact && retries < SENDS_MAX {
            self.waiting.push_front(PieceId { retries, ..piece });
        }
        intact || retries < SENDS_MAX
    }

    /// Locates the bytes of a piece.
    fn locate(&self, piece: &PieceId, kv: &InstanceKv) -> Result<PieceSource> {
        let is_below = piece.first >= kv.tokens_in(&self.pages);
        match (&self.below, self.transfer) {
            (Some(lent), _) if is_below => lent.read(piece, kv),
            (_, Transfer::HandOff) => Ok(PieceSource::Sequence),
            (_, Transfer::Prefix) => Ok(PieceSource::Lent),
        }
    }
}

/// Cuts a token range of one layer into pieces.
pub(super) fn pieces(layer: u32, tokens: Range<u32>, tokens_max: u32) -> impl Iterator<Item = PieceId> {
    let end = tokens.end;
    let piece = move |first| PieceId { layer, first, tokens: tokens_max.min(end - first), retries: 0 };
    tokens.step_by(tokens_max as usize).map(piece)
}

/// A transfer that is over: its blocks are released.
pub(super) struct EndedTransfer {
    pub(super) request: RequestId,
    pub(super) transfer: Transfer,
    /// When its first piece was sent, if it was completed.
    pub(super) completed_since: Option<Seconds>,
}

/// A filled slot of the outbox.
struct FilledSlot {
    slot: u32,
    bytes: u64,
    hash: u64,
}

/// Tokens of a prompt whose KV is sent during a step.
pub(super) struct StepSend {
    pub(super) request: RequestId,
    pub(super) to: Arc<HandOff>,
    leaving: LeavingTokens,
}

impl StepSend {
    /// The tokens that are sent of a layer.
    pub(super) fn tokens(&self, layer: u32) -> Range<u32> {
        let Range { start, end } = self.leaving.tokens;
        self.to.lacking.first(layer).clamp(start, end)..end
    }

    /// The outgoing tokens, and whether this layer of any of them is sent.
    pub(super) fn leaving_of(&self, layer: u32) -> (&LeavingTokens, bool) {
        (&self.leaving, !self.tokens(layer).is_empty())
    }
}

/// The transfers of an instance to others, and its connections to them.
pub(super) struct KvSender {
    id: InstanceId,
    env: SharedEnv,
    courier: Courier,
    directory: Directory,
    metrics: Metrics,
    /// KV that is sent to others, by request: at most one transfer each.
    outgoing: HashMap<RequestId, Outgoing>,
    /// Transfers that are over.
    ended: Vec<EndedTransfer>,
}

impl KvSender {
    pub(super) fn new(id: InstanceId, courier: Courier, surroundings: &Surroundings) -> Self {
        let Surroundings { env, directory, metrics, .. } = surroundings;
        let (env, directory, metrics) = (env.clone(), directory.clone(), metrics.clone());
        KvSender { id, env, courier, directory, metrics, outgoing: HashMap::new(), ended: Vec::new() }
    }

    /// Starts a transfer of the KV of `request`.
    pub(super) fn begin(&mut self, request: RequestId, transfer: Transfer, to: HandOff) {
        // This ends a transfer of an earlier placement, which was not cancelled because it was thought to be
        // over.
        self.stop(request);
        let outgoing = Outgoing::new(transfer, to);
        // The receiver has fenced off the slots that it gave away before.
        let to = outgoing.to.clone();
        self.stop_all(|o| o.transfer == Transfer::Prefix && o.to.to == to.to && o.to.landing != to.landing);
        self.outgoing.insert(request, outgoing);
    }

    /// The requests whose KV is being sent.
    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.outgoing.keys().copied()
    }

    /// Whether no KV is sent.
    pub(super) fn is_idle(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Whether a request is computed here and decoded elsewhere.
    pub(super) fn hands_off(&self, request: RequestId) -> bool {
        self.outgoing.get(&request).is_some_and(|outgoing| outgoing.transfer == Transfer::HandOff)
    }

    fn hand_off(&mut self, request: RequestId) -> Option<&mut Outgoing> {
        self.outgoing.get_mut(&request).filter(|outgoing| outgoing.transfer == Transfer::HandOff)
    }

    /// Whether a transfer goes on.
    pub(super) fn goes_on(&self, request: RequestId, to: &Arc<HandOff>) -> bool {
        self.outgoing.get(&request).is_some_and(|outgoing| Arc::ptr_eq(&outgoing.to, to))
    }

    /// Number of lent blocks of lower tiers.
    pub(super) fn blocks_below(&self) -> usize {
        self.outgoing.values().filter_map(|outgoing| outgoing.below.as_ref()).map(Lent::blocks).sum()
    }

    /// The pages of a request's lent blocks.
    pub(super) fn lent_pages(&mut self, request: RequestId, pages: Vec<u32>) {
        if let Some(outgoing) = self.outgoing.get_mut(&request) {
            outgoing.pages = pages;
        }
    }

    /// Number of leading tokens of a lent prefix that are on the device or devices.
    pub(super) fn tokens_lent(&self, request: RequestId, kv: &InstanceKv) -> u32 {
        self.outgoing.get(&request).map_or(0, |outgoing| kv.tokens_in(&outgoing.pages))
    }

    /// Queues the pieces of a lent prefix, a part of which may be in lower tiers.
    pub(super) fn queue_prefix(
        &mut self,
        request: RequestId,
        all: impl Iterator<Item = PieceId>,
        below: Option<Lent>,
    ) {
        if let Some(outgoing) = self.outgoing.get_mut(&request) {
            (outgoing.waiting, outgoing.below) = (all.collect(), below);
        }
    }

    /// Reports to a receiver that `until` leading tokens are lent to it.
    pub(super) fn tell_lent(&mut self, receiver: InstanceId, request: RequestId, attempt: u32, until: u32) {
        self.directory.tell(receiver, self.id, KvMessage::Lent { request, attempt, until });
        self.end_if_settled(request);
    }

    /// Queues the KV that the prefix cache already had and the receiver lacks.
    pub(super) fn queue_cached(&mut self, request: RequestId, tokens_cached: u32, kv: &InstanceKv) {
        let Some(outgoing) = self.hand_off(request) else { return };
        let most = kv.piece_tokens_in(&outgoing.to);
        let lacking = &outgoing.to.lacking;
        let cached =
            (0..kv.layers).flat_map(|layer| pieces(layer, lacking.first(layer)..tokens_cached, most));
        outgoing.waiting.extend(cached);
    }

    /// Queues a piece of a prompt that found no slot while it was computed.
    pub(super) fn queue_computed(&mut self, request: RequestId, piece: PieceId) {
        if let Some(outgoing) = self.hand_off(request) {
            outgoing.waiting.push_back(piece);
        }
    }

    /// The tokens of handed-off prompts that these parts of a step compute and the receiver lacks, in memory
    /// that is not `taken` yet.
    pub(super) fn step_sends<'a>(
        &self,
        parts: impl Iterator<Item = (RequestId, &'a StepInput<'a>)>,
        kv: &InstanceKv,
        taken: &mut Taken,
    ) -> Vec<StepSend> {
        let send = |(request, part): (RequestId, &StepInput<'_>)| {
            let outgoing = self.outgoing.get(&request)?;
            let to = (outgoing.transfer == Transfer::HandOff).then(|| outgoing.to.clone())?;
            let (start, end) = (part.start, part.start + to_u32(part.tokens.len()));
            let first = to.lacking.first_of_all().clamp(start, end);
            let leaving = || kv.leaving((part.pages, first..end), to.wire, taken);
            (first < end).then(leaving).map(|leaving| StepSend { request, to, leaving })
        };
        parts.filter_map(send).collect()
    }

    /// A free slot of a receiver.
    ///
    /// # Errors
    /// When there is no memory for the outbox, or no region to write to.
    pub(super) fn take_slot(&mut self, to: &HandOff) -> Result<Option<u32>> {
        self.courier.take_slot(to.to, &to.landing)
    }

    /// Frees a slot that its receiver has read, or that was taken for nothing.
    pub(super) fn give_slot(&mut self, receiver: InstanceId, slot: u32) {
        self.courier.give_slot(receiver, slot);
    }

    /// Whether a receiver has a free slot.
    pub(super) fn has_slot(&self, receiver: InstanceId) -> bool {
        self.courier.has_slot(receiver)
    }

    /// Puts a piece that devices gathered into a free slot, and starts sending it.
    pub(super) fn send_gathered(
        &mut self,
        kv: &mut InstanceKv,
        send: &StepSend,
        piece: PieceId,
        slot: u32,
    ) -> Result<()> {
        let StepSend { request, to, leaving } = send;
        let bytes = kv.layer_bytes(piece.tokens, to.wire);
        let tokens = (piece.layer, piece.first..piece.first + piece.tokens);
        let mut read = |place: &mut [u8]| kv.read_gathered(leaving, tokens.clone(), place);
        let hash = self.courier.fill(to.to, slot, bytes, &mut read)?;
        self.post(*request, piece, to, &FilledSlot { slot, bytes, hash });
        Ok(())
    }

    /// Sends queued pieces as far as there are free slots.
    pub(super) fn send_waiting(&mut self, from: &mut SequenceKv<'_>) -> Result<()> {
        let unsent = self.outgoing.iter().filter(|(_, outgoing)| !outgoing.waiting.is_empty());
        let mut its: Vec<RequestId> = unsent.map(|(&request, _)| request).collect();
        its.sort_unstable();
        for request in its {
            while self.send_next(request, from)? {}
            self.end_if_settled(request);
        }
        Ok(())
    }

    /// Sends one queued piece. False if there is none, or no slot for it.
    fn send_next(&mut self, request: RequestId, from: &mut SequenceKv<'_>) -> Result<bool> {
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
        let (bytes, hash) = match outgoing.locate(&piece, from.kv)? {
            PieceSource::Corrupt => {
                self.courier.give_slot(to.to, slot);
                self.stop(request);
                return Ok(true);
            }
            PieceSource::LowerTier(payload) => {
                let bytes = payload.len() as u64;
                let hash = self.courier.fill(to.to, slot, bytes, &mut |place| {
                    place.copy_from_slice(&payload);
                    Ok(())
                })?;
                (bytes, hash)
            }
            source @ (PieceSource::Sequence | PieceSource::Lent) => {
                let bytes = from.kv.layer_bytes(piece.tokens, to.wire);
                let lent = matches!(source, PieceSource::Lent).then_some(&outgoing.pages[..]);
                let mut read = |place: &mut [u8]| from.read(request, lent, &piece, to.wire, place);
                (bytes, self.courier.fill(to.to, slot, bytes, &mut read)?)
            }
        };
        self.post(request, piece, &to, &FilledSlot { slot, bytes, hash });
        Ok(true)
    }

    /// Starts sending a filled slot.
    fn post(&mut self, request: RequestId, piece: PieceId, to: &HandOff, filled: &FilledSlot) {
        let now = self.env.now();
        let HandOff { attempt, wire, .. } = *to;
        if let Some(outgoing) = self.outgoing.get_mut(&request) {
            outgoing.sent(&piece, now);
        }
        let FilledSlot { slot, bytes, hash } = *filled;
        self.courier.send(to.to, Parcel { request, attempt, piece, slot, bytes, hash, wire }, now);
        self.settle(Duration::ZERO);
    }

    /// Notifies receivers of landed pieces; waits for up to `patience` until one has landed.
    pub(super) fn settle(&mut self, patience: Duration) {
        for (to, sent) in self.courier.settle(self.env.now(), patience) {
            let (landed, parcel) = match sent {
                Sent::Landed(parcel) => (true, parcel),
                Sent::Failed(parcel) => (false, parcel),
            };
            let Parcel { request, attempt, piece, slot, bytes, .. } = parcel;
            self.metrics.kv_transfer_retries.inc_by(u64::from(piece.retries));
            if landed && self.directory.tell(to, self.id, KvMessage::Landed(parcel)) {
                self.metrics.kv_sent_bytes.inc_by(bytes);
                continue;
            }
            if landed {
                // A receiver without notice cannot return the slot, and may be connected again later.
                self.courier.give_slot(to, slot);
            }
            if let Some(outgoing) = self.open(request, to, attempt, &piece) {
                outgoing.close(&piece);
                let to = outgoing.to.clone();
                self.lose(request, &to, piece);
                self.end_if_settled(request);
            }
        }
    }

    /// Whether pieces are in transit, and the time for which one has been, if that is the longest.
    pub(super) fn longest_send(&self) -> Option<Seconds> {
        self.courier.longest_send(self.env.now())
    }

    /// Completes when `settle` is due again; never if nothing is in transit. Slow sends are polled less
    /// often.
    pub(super) fn due(&self) -> Task {
        match self.longest_send() {
            None => Box::pin(std::future::pending()),
            Some(since) => {
                self.env.sleep(SEND_POLL_INTERVAL.max(Duration::from_secs_f64(since.0.max(0.0) / 8.0)))
            }
        }
    }

    /// The transfer whose `piece` was sent to `peer` and has no verdict yet.
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

    /// Gives a piece up and tells the receiver.
    pub(super) fn lose(&self, request: RequestId, to: &HandOff, piece: PieceId) {
        self.directory.tell(to.to, self.id, KvMessage::Lost { request, attempt: to.attempt, piece });
        tracing::warn!(request, layer = piece.layer, first = piece.first, "KV is recomputed by the receiver");
    }

    /// Handles the receiver's verdict on a piece: it is done, or is resent.
    pub(super) fn verdict(
        &mut self,
        receiver: InstanceId,
        request: RequestId,
        attempt: u32,
        piece: PieceId,
        intact: bool,
    ) {
        let Some(outgoing) = self.open(request, receiver, attempt, &piece) else { return };
        let (is_over, to) = (!outgoing.judge(piece, intact), outgoing.to.clone());
        self.metrics.kv_transfer_retries.inc_by(u64::from(!intact));
        if is_over {
            self.lose(request, &to, piece);
        }
        self.end_if_settled(request);
    }

    /// Tells the receiver of a prompt that it is computed, and that `next` was drawn.
    pub(super) fn hand_over(&mut self, request: RequestId, next: u32) {
        let Some(outgoing) = self.hand_off(request) else { return };
        outgoing.handed_over = true;
        let HandOff { to, attempt, .. } = *outgoing.to;
        self.directory.tell(to, self.id, KvMessage::HandedOver { request, attempt, next });
    }

    /// Ends the transfer of a handed-over sequence, which the receiver decodes now.
    pub(super) fn taken_over(&mut self, receiver: InstanceId, request: RequestId, attempt: u32) {
        let is_meant = |o: &&mut Outgoing| o.handed_over && o.to.to == receiver && o.to.attempt == attempt;
        if self.hand_off(request).filter(is_meant).is_some() {
            self.end(request, true);
        }
    }

    /// Ends the transfer of a lent prefix once every piece has a verdict.
    fn end_if_settled(&mut self, request: RequestId) {
        if self.outgoing.get(&request).is_some_and(Outgoing::is_settled) {
            self.end(request, true);
        }
    }

    fn end(&mut self, request: RequestId, is_complete: bool) {
        let Some(Outgoing { transfer, started, .. }) = self.outgoing.remove(&request) else { return };
        let completed_since = started.filter(|_| is_complete);
        if let Some(started) = completed_since {
            self.metrics.kv_transfer_s.observe((self.env.now() - started).0);
        }
        self.ended.push(EndedTransfer { request, transfer, completed_since });
    }

    /// Takes the transfers that ended: their blocks must be released, in this order.
    pub(super) fn take_ended(&mut self) -> Vec<EndedTransfer> {
        std::mem::take(&mut self.ended)
    }

    /// Stops a transfer early; a receiver that still waits for a prefix is notified.
    fn stop(&mut self, request: RequestId) {
        let Some(Outgoing { transfer, to, .. }) = self.outgoing.get(&request) else { return };
        if *transfer == Transfer::Prefix {
            let word = KvMessage::Lent { request, attempt: to.attempt, until: 0 };
            self.directory.tell(to.to, self.id, word);
        }
        self.end(request, false);
    }

    fn stop_all(&mut self, which: impl Fn(&Outgoing) -> bool) {
        let its = self.outgoing.iter().filter(|(_, outgoing)| which(outgoing)).map(|(&request, _)| request);
        let mut its: Vec<RequestId> = its.collect();
        its.sort_unstable();
        its.into_iter().for_each(|request| self.stop(request));
    }

    /// Drops the transfer of a request whose blocks the caller releases.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.outgoing.remove(&request);
    }

    /// Stops transfers to a lost peer, which confirms nothing: requests handed over are placed again or were
    /// taken over. No more is sent of prompts that are being computed, since the slots would not be returned:
    /// the coordinator places them again, and cancels them here.
    pub(super) fn peer_down(&mut self, peer: InstanceId) {
        self.courier.forget(peer);
        self.stop_all(|outgoing| outgoing.ends_with(peer));
        self.outgoing.retain(|_, outgoing| outgoing.to.to != peer);
    }

    /// Completes when no more messages can be sent to a receiver.
    pub(super) fn gone(&self, receiver: InstanceId) -> Task {
        let directory = self.directory.clone();
        Box::pin(async move { directory.gone(receiver).await })
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.outgoing.clear();
        self.ended.clear();
        self.courier.forget_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::messages::{Lacking, Landing};

    fn outgoing(transfer: Transfer) -> Outgoing {
        let landing = Landing { regions: Vec::new(), slots: 1, slot_bytes: 64 };
        let (lacking, to, wire) = (Lacking::all(0), InstanceId(1), DType::F32);
        Outgoing::new(transfer, HandOff { attempt: 0, lacking, to, landing, wire })
    }

    #[test]
    fn tokens_are_cut_into_pieces_that_fit_and_none_into_none() {
        let cut = |tokens| pieces(3, tokens, 8).map(|piece| (piece.first, piece.tokens)).collect::<Vec<_>>();
        assert_eq!(cut(5..22), [(5, 8), (13, 8), (21, 1)]);
        // The receiver's prefix may end after the part cached here.
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
                // A second verdict on the same piece is ignored.
                assert!(!outgoing.is_open(&piece) && outgoing.waiting.len() == 1 && !outgoing.is_settled());
                piece = outgoing.waiting.pop_front().unwrap();
            }
            outgoing.sent(&piece, Seconds::ZERO);
            assert!(!outgoing.judge(piece, false) && outgoing.waiting.is_empty());
            assert_eq!(outgoing.is_settled(), transfer == Transfer::Prefix);
        }
    }
}
