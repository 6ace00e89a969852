//! The sender's side of KV transfers: prompts that are computed here and decoded elsewhere, and prefixes that
//! are lent.
//!
//! Layers with a window send what a token behind the prompt reads, if their receiver keeps no more; of
//! prefixes all layers are sent.
//!
//! A layer's KV of the tokens just computed is gathered on the device into the wire layout, read to the host,
//! written to a staging slot of the receiver over a transport, checked there (XXH3-64 of the payload), and
//! scattered into the receiver's own pages. The wire layout is neutral, so unlike page sizes, dtypes and
//! numbers of devices need no special case. While layer k is sent, layers k+1.. compute: the sender keeps a
//! few layers in its queue. KV that is already there (a cached or lent prefix, and what several devices
//! computed in a step and had no slot for) is sent from a queue of pieces, between steps, as slots become
//! free. A piece that arrives corrupt, or does not arrive, is resent a few times, then given up; the receiver
//! recomputes what is missing.

use super::courier::SENDS_MAX;
use super::lend::{Lent, PieceSource};
use super::messages::{HandOff, KvMessage, PieceId, Transfer};
use super::sender::StepSend;
use super::worker::{Event, Worker, queues};
use crate::env::Task;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::{BTreeMap, VecDeque};
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
    pub(super) transfer: Transfer,
    pub(super) to: Arc<HandOff>,
    /// Device pages of a lent prefix; a prompt is in its sequence's pages.
    pub(super) pages: Vec<u32>,
    /// The part of a lent prefix that is in lower tiers.
    pub(super) below: Option<Lent>,
    /// Pieces to be sent as slots become free.
    pub(super) waiting: VecDeque<PieceId>,
    /// Pieces sent that have no verdict yet: tokens by first token and layer.
    open: BTreeMap<(u32, u32), u32>,
    handed_over: bool,
    /// Time at which the first piece was sent.
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

    /// Marks the prompt as computed; the receiver decodes it.
    pub(super) fn hand_over(&mut self) -> Arc<HandOff> {
        self.handed_over = true;
        self.to.clone()
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

    pub(super) fn sent(&mut self, piece: &PieceId, now: Seconds) {
        self.open.insert((piece.first, piece.layer), piece.tokens);
        self.started.get_or_insert(now);
    }

    /// Whether a piece was sent and has no verdict yet. Verdicts on other pieces are ignored.
    pub(super) fn is_open(&self, piece: &PieceId) -> bool {
        self.open.get(&(piece.first, piece.layer)) == Some(&piece.tokens)
    }

    /// Forgets a sent piece.
    pub(super) fn close(&mut self, piece: &PieceId) {
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
}

/// Cuts a token range of one layer into pieces.
pub(super) fn pieces(layer: u32, tokens: Range<u32>, tokens_max: u32) -> impl Iterator<Item = PieceId> {
    let end = tokens.end;
    let piece = move |first| PieceId { layer, first, tokens: tokens_max.min(end - first), retries: 0 };
    tokens.step_by(tokens_max as usize).map(piece)
}

impl Worker {
    /// Sends the KV of `layer` that the only device gathered.
    pub(super) async fn deliver(&mut self, layer: usize, sends: &[StepSend]) -> Result<()> {
        for send in sends {
            let StepSend { request, to, .. } = send;
            let layer = to_u32(layer);
            for piece in pieces(layer, send.tokens(layer), self.kv.piece_tokens_in(to)) {
                let began = self.env.now();
                let slot = self.credit(to).await?;
                self.waited += self.env.now() - began;
                // The transfer may have ended meanwhile.
                if !self.sender.goes_on(*request, to) {
                    slot.inspect(|&slot| self.sender.courier.give_slot(to.to, slot));
                    break;
                }
                match slot {
                    Some(slot) => {
                        self.sender.send_gathered(&mut self.kv, send, (piece, slot))?;
                        self.settle_given_up()?;
                    }
                    None => self.sender.lose(*request, to, piece),
                }
            }
        }
        Ok(())
    }

    /// Queues the KV that the prefix cache already had and the receiver lacks.
    pub(super) fn queue_cached(&mut self, request: RequestId, tokens_cached: u32) {
        let Some(outgoing) = self.sender.hand_off(request) else { return };
        let (layers, most) = (self.kv.layers, self.kv.piece_tokens_in(&outgoing.to));
        let lacking = &outgoing.to.lacking;
        let cached = (0..layers).flat_map(|layer| pieces(layer, lacking.first(layer)..tokens_cached, most));
        outgoing.waiting.extend(cached);
    }

    /// Sends queued pieces as far as there are free slots.
    pub(super) fn send_waiting(&mut self) -> Result<()> {
        let unsent = self.sender.outgoing.iter().filter(|(_, outgoing)| !outgoing.waiting.is_empty());
        let mut its: Vec<RequestId> = unsent.map(|(&request, _)| request).collect();
        its.sort_unstable();
        for request in its {
            while self.send_next_of(request)? {}
            self.settle_outgoing(request)?;
        }
        Ok(())
    }

    /// Sends one queued piece. False if there is none, or no slot for it.
    fn send_next_of(&mut self, request: RequestId) -> Result<bool> {
        let Some(outgoing) = self.sender.outgoing.get_mut(&request) else { return Ok(false) };
        let Some(&piece) = outgoing.waiting.front() else { return Ok(false) };
        let to = outgoing.to.clone();
        let slot = match self.sender.courier.take_slot(to.to, &to.landing) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Ok(false),
            Err(error) => {
                tracing::warn!(request, to = %to.to, %error, "KV is not sent");
                outgoing.waiting.pop_front();
                self.sender.lose(request, &to, piece);
                return Ok(true);
            }
        };
        outgoing.waiting.pop_front();
        match self.place(request, &piece)? {
            PieceSource::LowerTier(payload) => {
                let bytes = payload.len() as u64;
                let hash = self.sender.courier.fill(to.to, slot, bytes, &mut |place| {
                    place.copy_from_slice(&payload);
                    Ok(())
                })?;
                self.post(request, piece, &to, (slot, bytes, hash))?;
            }
            PieceSource::Corrupt => {
                self.sender.courier.give_slot(to.to, slot);
                self.stop_outgoing(request)?;
                self.report_tiers();
            }
            PieceSource::Pages(pages) => {
                let bytes = self.kv.layer_bytes(piece.tokens, to.wire);
                let Worker { sender, kv, queue, copies, .. } = self;
                let (span, mut queues) = (piece.span(&pages, to.wire), queues(queue, copies));
                let mut read = |place: &mut [u8]| kv.read(&mut queues, &span, place);
                let hash = sender.courier.fill(to.to, slot, bytes, &mut read)?;
                self.post(request, piece, &to, (slot, bytes, hash))?;
            }
        }
        Ok(true)
    }

    /// Starts sending what was filled into a free slot.
    fn post(
        &mut self,
        request: RequestId,
        piece: PieceId,
        to: &HandOff,
        filled: (u32, u64, u64),
    ) -> Result<()> {
        self.sender.post(request, piece, to, filled);
        self.settle_given_up()
    }

    /// Notifies receivers of landed pieces; waits for up to `patience` until one has landed.
    pub(super) fn settle_sends(&mut self, patience: Duration) -> Result<()> {
        self.sender.settle(patience);
        self.settle_given_up()
    }

    fn settle_given_up(&mut self) -> Result<()> {
        let its = std::mem::take(&mut self.sender.given_up);
        its.into_iter().try_for_each(|request| self.settle_outgoing(request))
    }

    /// Completes when `settle_sends` is due again; never if nothing is in transit. Slow sends are polled less
    /// often.
    pub(super) fn sends_due(&self) -> Task {
        match self.sender.courier.longest_send(self.env.now()) {
            None => Box::pin(std::future::pending()),
            Some(since) => {
                self.env.sleep(SEND_POLL_INTERVAL.max(Duration::from_secs_f64(since.0.max(0.0) / 8.0)))
            }
        }
    }

    /// Waits for a free slot of a receiver; none if it is gone. Peers' messages are handled meanwhile, since
    /// two instances that send to each other would deadlock otherwise.
    async fn credit(&mut self, to: &HandOff) -> Result<Option<u32>> {
        loop {
            match self.sender.courier.take_slot(to.to, &to.landing) {
                Ok(None) => {}
                Ok(slot) => return Ok(slot),
                Err(error) => {
                    tracing::warn!(to = %to.to, %error, "KV is not sent");
                    return Ok(None);
                }
            }
            self.settle_sends(SEND_POLL_INTERVAL)?;
            // A failed send frees its slot, of which no message tells.
            if self.sender.courier.has_slot(to.to) {
                continue;
            }
            self.report_alive();
            let due = self.sends_due();
            tokio::select! {
                biased;
                Some((peer, word)) = self.words.recv() => {
                    let lost = peer == to.to && matches!(word, KvMessage::Down);
                    self.handle_kv_message(peer, word)?;
                    if lost {
                        return Ok(None);
                    }
                }
                () = self.sender.directory.gone(to.to) => return Ok(None),
                () = due => {}
            }
        }
    }

    /// Handles the receiver's verdict on a piece: it is done, or is resent.
    pub(super) fn verdict(
        &mut self,
        receiver: InstanceId,
        (request, attempt): (RequestId, u32),
        (piece, intact): (PieceId, bool),
    ) -> Result<()> {
        let Some(outgoing) = self.sender.open(request, receiver, attempt, &piece) else { return Ok(()) };
        let (is_over, to) = (!outgoing.judge(piece, intact), outgoing.to.clone());
        self.metrics.kv_transfer_retries.inc_by(u64::from(!intact));
        if is_over {
            self.sender.lose(request, &to, piece);
        }
        self.settle_outgoing(request)
    }

    /// Releases the blocks of a handed-over sequence once the receiver decodes it.
    pub(super) fn taken_over(
        &mut self,
        receiver: InstanceId,
        request: RequestId,
        attempt: u32,
    ) -> Result<()> {
        let is_meant = |o: &&mut Outgoing| o.handed_over && o.to.to == receiver && o.to.attempt == attempt;
        match self.sender.hand_off(request).filter(is_meant) {
            Some(_) => self.complete_outgoing(request),
            None => Ok(()),
        }
    }

    /// Releases the blocks of a lent prefix once every piece has a verdict.
    pub(super) fn settle_outgoing(&mut self, request: RequestId) -> Result<()> {
        match self.sender.outgoing.get(&request).is_some_and(Outgoing::is_settled) {
            true => self.complete_outgoing(request),
            false => Ok(()),
        }
    }

    fn complete_outgoing(&mut self, request: RequestId) -> Result<()> {
        if let Some(started) = self.sender.outgoing.get(&request).and_then(|outgoing| outgoing.started) {
            self.metrics.kv_transfer_s.observe((self.env.now() - started).0);
            self.tell_handed_off(request, started);
        }
        self.end_outgoing(request)
    }

    /// Stops sending KV of `request`, and releases its blocks.
    fn end_outgoing(&mut self, request: RequestId) -> Result<()> {
        match self.sender.outgoing.remove(&request).map(|outgoing| outgoing.transfer) {
            Some(Transfer::Prefix) => self.machine_step(Event::Unlend { request }),
            Some(Transfer::HandOff) => {
                self.remove(request);
                self.machine_step(Event::Release { request })
            }
            None => Ok(()),
        }
    }

    /// Starts a transfer of the KV of `request`.
    pub(super) fn begin_outgoing(&mut self, request: RequestId, outgoing: Outgoing) -> Result<()> {
        // This ends a transfer of an earlier placement, which was not cancelled because it was thought to be
        // over.
        self.stop_outgoing(request)?;
        // The receiver has fenced off the slots that it gave away before.
        let to = outgoing.to.clone();
        self.stop_all(|o| o.transfer == Transfer::Prefix && o.to.to == to.to && o.to.landing != to.landing)?;
        self.sender.outgoing.insert(request, outgoing);
        Ok(())
    }

    /// Stops transfers to a lost peer, which confirms nothing: what was handed over is placed again or was
    /// taken over. Of prompts that are being computed nothing more is sent, since nobody would return the
    /// slots: the coordinator places them again, and cancels them here.
    pub(super) fn stop_all_to(&mut self, peer: InstanceId) -> Result<()> {
        self.stop_all(|outgoing| outgoing.ends_with(peer))?;
        self.sender.outgoing.retain(|_, outgoing| outgoing.to.to != peer);
        Ok(())
    }

    fn stop_all(&mut self, which: impl Fn(&Outgoing) -> bool) -> Result<()> {
        let its =
            self.sender.outgoing.iter().filter(|(_, outgoing)| which(outgoing)).map(|(&request, _)| request);
        let mut its: Vec<RequestId> = its.collect();
        its.sort_unstable();
        its.into_iter().try_for_each(|request| self.stop_outgoing(request))
    }

    /// Stops a transfer early; a receiver that still waits for a prefix is told not to.
    pub(super) fn stop_outgoing(&mut self, request: RequestId) -> Result<()> {
        let Some(Outgoing { transfer, to, .. }) = self.sender.outgoing.get(&request) else { return Ok(()) };
        if *transfer == Transfer::Prefix {
            let word = KvMessage::Lent { request, attempt: to.attempt, until: 0 };
            self.sender.directory.tell(to.to, self.id, word);
        }
        self.end_outgoing(request)
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
        // The receiver's prefix may end after what is cached here.
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
