//! The receiver's side of KV transfers: pieces are awaited, verified and written to the sequence's pages.

use super::coverage::Coverage;
use super::directory::Directory;
use super::fault::{Fault, Outcome};
use super::instance::Surroundings;
use super::landings::Landings;
use super::messages::{FromWorker, KvMessage, Lacking, Landing, Parcel, PieceId, Transfer};
use super::pages::SequenceKv;
use super::worker::{Event, Worker};
use crate::metrics::Metrics;
use mixfleet_hal::{DType, Error, ErrorKind, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::transfer::PrefixSource;
use std::collections::HashMap;

/// KV that a sequence will get.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedKv {
    /// The number of the request's placement.
    pub(super) attempt: u32,
    pub(super) transfer: Transfer,
    pub(super) source: PrefixSource,
}

/// KV that a sequence waits for.
struct Incoming {
    attempt: u32,
    sender: InstanceId,
    transfer: Transfer,
    lacking: Lacking,
    length: u32,
    layers: u32,
    /// Token-layers that landed or were given up.
    settled: Coverage,
    /// Leading tokens of which no part was given up.
    valid: u32,
    next: Option<u32>,
}

impl Incoming {
    fn new(expected: ExpectedKv, lacking: Lacking, layers: u32) -> Self {
        let ExpectedKv { attempt, transfer, source: PrefixSource { holder: sender, until: length } } =
            expected;
        let (settled, valid) = (Coverage::new(layers), length);
        Incoming { attempt, sender, transfer, lacking, length, layers, settled, valid, next: None }
    }

    /// Limits the prefix to the `until` tokens that `sender` lends. The sender reports this before it sends;
    /// earlier pieces are not used.
    fn shorten(&mut self, sender: InstanceId, until: u32) {
        if self.is_lent_by(sender) {
            let until = if self.settled.token_layers() == 0 { until } else { 0 };
            self.length = self.length.min(until).max(self.lacking.from);
            self.valid = self.valid.min(self.length);
        }
    }

    /// Stops waiting for a prefix, and uses none of it.
    fn abandon(&mut self) {
        if self.transfer == Transfer::Prefix {
            (self.length, self.valid) = (self.lacking.from, self.lacking.from);
        }
    }

    /// Whether this is a prefix that `peer` lends.
    fn is_lent_by(&self, peer: InstanceId) -> bool {
        self.transfer == Transfer::Prefix && self.sender == peer
    }

    /// Whether this piece is expected: others must not be written to the pages.
    fn awaits(&self, sender: InstanceId, piece: &PieceId) -> bool {
        let PieceId { layer, first, tokens, .. } = *piece;
        sender == self.sender
            && layer < self.layers
            && first >= self.lacking.first(layer)
            && tokens > 0
            && first.checked_add(tokens).is_some_and(|end| end <= self.length)
            && !self.settled.has(layer, &(first..first + tokens))
    }

    fn settle(&mut self, piece: &PieceId) {
        self.settled.add(piece.layer, piece.first..piece.first + piece.tokens);
        debug_assert!(
            self.settled.token_layers() <= self.expected(),
            "{} of {} token-layers landed",
            self.settled.token_layers(),
            self.expected()
        );
    }

    /// Token-layers that are promised.
    fn expected(&self) -> u64 {
        let of_layer = |layer| u64::from(self.length.saturating_sub(self.lacking.first(layer)));
        (0..self.layers).map(of_layer).sum()
    }

    /// Records that `sender` computed the prompt. False if it is not the expected sender.
    fn hand_over(&mut self, sender: InstanceId, next: u32) -> bool {
        let expected = self.transfer == Transfer::HandOff && sender == self.sender;
        if expected {
            self.next = Some(next);
        }
        expected
    }

    fn lose(&mut self, sender: InstanceId, piece: PieceId) {
        if self.awaits(sender, &piece) {
            self.settle(&piece);
            // before what layers with a window were sent, a token could not be computed again
            let is_whole = self.lacking.read_from.is_empty();
            self.valid = if is_whole { self.valid.min(piece.first) } else { self.lacking.from };
        }
    }

    /// The leading tokens whose KV is here, and the next token of a hand-off, once nothing more will come.
    fn complete(&self) -> Option<(u32, Option<u32>)> {
        let drawn = self.transfer == Transfer::Prefix || self.next.is_some();
        (self.settled.token_layers() >= self.expected() && drawn).then_some((self.valid, self.next))
    }
}

/// The received part of the KV that a sequence waited for.
struct CompleteKv {
    sender: InstanceId,
    attempt: u32,
    /// The leading tokens whose KV is here.
    tokens_valid: u32,
    /// The next token, of a hand-off.
    next: Option<u32>,
}

/// Receives the KV that other instances send, and owns the memory in which it lands.
pub(super) struct KvReceiver {
    id: InstanceId,
    landings: Landings,
    directory: Directory,
    metrics: Metrics,
    /// The KV that sequences wait for.
    incoming: HashMap<RequestId, Incoming>,
}

impl KvReceiver {
    pub(super) fn new(id: InstanceId, landings: Landings, surroundings: &Surroundings) -> Self {
        let Surroundings { directory, metrics, .. } = surroundings;
        let (directory, metrics) = (directory.clone(), metrics.clone());
        KvReceiver { id, landings, directory, metrics, incoming: HashMap::new() }
    }

    /// Whether no sequence waits for KV.
    pub(super) fn is_idle(&self) -> bool {
        self.incoming.is_empty()
    }

    /// Waits for KV of a request from now on. Returns where it may land.
    ///
    /// # Errors
    /// When there is no memory or descriptor for the staging slots. A prefix is not waited for then.
    fn expect(
        &mut self,
        request: RequestId,
        expected: ExpectedKv,
        lacking: Lacking,
        layers: u32,
    ) -> Result<Landing> {
        let landing = self.landings.landing(expected.source.holder).cloned();
        if landing.is_ok() || expected.transfer == Transfer::Prefix {
            self.incoming.insert(request, Incoming::new(expected, lacking, layers));
        }
        if landing.is_err() {
            self.abandon(request, expected.attempt);
        }
        landing
    }

    /// Stops waiting for a prefix. False if none is waited for in this placement.
    pub(super) fn abandon(&mut self, request: RequestId, attempt: u32) -> bool {
        self.expected(request, attempt).map(Incoming::abandon).is_some()
    }

    fn expected(&mut self, request: RequestId, attempt: u32) -> Option<&mut Incoming> {
        self.incoming.get_mut(&request).filter(|incoming| incoming.attempt == attempt)
    }

    /// Handles a message that only moves bytes here. Returns the request whose KV may be complete now.
    pub(super) fn take_in(
        &mut self,
        peer: InstanceId,
        word: KvMessage,
        into: &mut SequenceKv<'_>,
    ) -> Result<Option<RequestId>> {
        let (request, attempt) = match word {
            KvMessage::Landed(parcel) => return self.receive(peer, parcel, into),
            KvMessage::Lent { request, attempt, .. } | KvMessage::Lost { request, attempt, .. } => {
                (request, attempt)
            }
            _ => return Ok(None),
        };
        Ok(self.expected(request, attempt).map(|incoming| {
            match word {
                KvMessage::Lent { until, .. } => incoming.shorten(peer, until),
                KvMessage::Lost { piece, .. } => incoming.lose(peer, piece),
                _ => {}
            }
            request
        }))
    }

    /// Copies a piece out of its slot, verifies the copy in the same pass, and writes it to the sequence's
    /// pages. The slot itself may be written by the sender at any time.
    fn receive(
        &mut self,
        sender: InstanceId,
        parcel: Parcel,
        into: &mut SequenceKv<'_>,
    ) -> Result<Option<RequestId>> {
        let Parcel { request, attempt, piece, slot, bytes, hash, wire } = parcel;
        let awaits = self.expected(request, attempt).is_some_and(|incoming| incoming.awaits(sender, &piece));
        let is_sized = DType::KV.contains(&wire) && bytes == into.kv.layer_bytes(piece.tokens, wire);
        let copied = self.landings.take_out(sender, slot, bytes);
        self.directory.tell(sender, self.id, KvMessage::Credit { slot });
        let (intact, private) = match copied {
            Ok((private, copy_hash)) => (copy_hash == hash, Some(private)),
            Err(error) => {
                tracing::warn!(request, %sender, %error, "a piece cannot be taken out of its slot");
                (false, None)
            }
        };
        if !intact {
            tracing::warn!(request, layer = piece.layer, first = piece.first, "KV arrived corrupt");
        }
        let taken = private.filter(|_| awaits && is_sized && intact);
        if let Some(private) = &taken {
            let mut written = Ok(());
            private.view(0, bytes, &mut |payload| written = into.write(request, &piece, wire, payload))?;
            written?;
            self.incoming.get_mut(&request).expect("still there").settle(&piece);
            self.metrics.kv_transfer_bytes.inc_by(bytes);
        }
        let verdict = KvMessage::Verdict { request, attempt, piece, intact };
        self.directory.tell(sender, self.id, verdict);
        Ok(taken.map(|_| request))
    }

    /// Records that `peer` computed a prompt and drew `next`. False if it is not waited for.
    fn hand_over(&mut self, peer: InstanceId, request: RequestId, attempt: u32, next: u32) -> bool {
        self.expected(request, attempt).is_some_and(|incoming| incoming.hand_over(peer, next))
    }

    /// Takes the KV that a sequence waited for, once no more will come.
    fn take_arrived(&mut self, request: RequestId) -> Option<CompleteKv> {
        let (tokens_valid, next) = self.incoming.get(&request)?.complete()?;
        let Incoming { sender, attempt, transfer, lacking, length, .. } = self.incoming.remove(&request)?;
        if tokens_valid < length {
            self.metrics.kv_transfer_recomputes.inc();
        }
        if transfer == Transfer::Prefix {
            self.metrics.kv_pulled_tokens.inc_by(tokens_valid.saturating_sub(lacking.from).into());
        }
        Some(CompleteKv { sender, attempt, tokens_valid, next })
    }

    /// Stops waiting for KV of a request that is gone.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.incoming.remove(&request);
    }

    /// Fences off a lost peer. Returns the requests whose prefixes it was to send, which are not waited for
    /// any more.
    fn peer_down(&mut self, peer: InstanceId) -> Vec<RequestId> {
        self.landings.forget(peer);
        let lent = self.incoming.iter_mut().filter(|(_, incoming)| incoming.is_lent_by(peer));
        let lent = lent.map(|(&request, incoming)| {
            incoming.abandon();
            request
        });
        let mut its: Vec<RequestId> = lent.collect();
        its.sort_unstable();
        its
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.incoming.clear();
        self.landings.forget_all();
    }
}

impl Worker {
    /// Handles a message of a peer about KV.
    pub(super) fn handle_kv_message(&mut self, peer: InstanceId, word: KvMessage) -> Result<()> {
        match word {
            KvMessage::Landed(_) | KvMessage::Lent { .. } | KvMessage::Lost { .. } => {
                let Worker { receiver, kv, machine, steps, .. } = self;
                let mut into = SequenceKv { kv, machine, queues: steps.copy_queues() };
                if let Some(request) = receiver.take_in(peer, word, &mut into)? {
                    self.settle_incoming(request)?;
                }
            }
            KvMessage::Credit { slot } => self.sender.give_slot(peer, slot),
            KvMessage::HandedOver { request, attempt, next } => {
                if !self.receiver.hand_over(peer, request, attempt, next) {
                    return Ok(());
                }
                let vocabulary = self.steps.forward.config().vocab;
                if next >= vocabulary {
                    let detail = format!("{peer} drew token {next} of a vocabulary of {vocabulary}");
                    let fault = Fault::of_request(request, Error::new(ErrorKind::Corrupt, detail));
                    return self.contain(Err(fault));
                }
                self.settle_incoming(request)?;
            }
            KvMessage::Verdict { request, attempt, piece, intact } => {
                self.sender.verdict(peer, request, attempt, piece, intact);
                self.release_sent()?;
            }
            KvMessage::TakenOver { request, attempt } => {
                self.sender.taken_over(peer, request, attempt);
                self.release_sent()?;
            }
            KvMessage::Down => self.peer_down(peer)?,
        }
        Ok(())
    }

    /// Ends all transfers with a lost peer.
    fn peer_down(&mut self, peer: InstanceId) -> Result<()> {
        let lent = self.receiver.peer_down(peer);
        self.sender.peer_down(peer);
        self.release_sent()?;
        lent.into_iter().try_for_each(|request| self.settle_incoming(request))
    }

    /// Starts waiting for KV once a sequence has its blocks.
    ///
    /// # Errors
    /// A fault of the link, if there is no memory or descriptor for the staging slots.
    pub(super) fn await_kv(&mut self, request: RequestId, tokens_cached: u32) -> Outcome<()> {
        let Some(expected) = self.active.get(&request).and_then(|active| active.expected) else {
            return Ok(());
        };
        let ExpectedKv { attempt, transfer, source: PrefixSource { holder, until } } = expected;
        let lacking = match transfer {
            Transfer::HandOff => self.kv.lacking(tokens_cached, until),
            Transfer::Prefix => Lacking::all(tokens_cached),
        };
        match (self.receiver.expect(request, expected, lacking.clone(), self.kv.layers), transfer) {
            (Ok(landing), _) => {
                self.report(FromWorker::Reserved { request, attempt, lacking, landing });
                Ok(())
            }
            (Err(error), Transfer::HandOff) => Err(Fault::of_link(request, holder, error)),
            (Err(error), Transfer::Prefix) => {
                tracing::warn!(request, %holder, %error, "a prefix is computed: it has nowhere to land");
                Ok(self.settle_incoming(request)?)
            }
        }
    }

    /// Lets a sequence join the batch once nothing more of its KV will come.
    pub(super) fn settle_incoming(&mut self, request: RequestId) -> Result<()> {
        if self.postponed.takes(request) {
            return Ok(());
        }
        let Some(arrived) = self.receiver.take_arrived(request) else { return Ok(()) };
        let CompleteKv { sender, attempt, tokens_valid, next } = arrived;
        if let (Some(text), Some(next)) = (self.machine.text_mut(request), next) {
            text.push(next);
        }
        if next.is_some() {
            self.receiver.directory.tell(sender, self.id, KvMessage::TakenOver { request, attempt });
            self.report(FromWorker::Joined { request });
            self.decode_begins(request);
        }
        self.machine_step(Event::Landed { request, tokens_valid, next: next.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDER: InstanceId = InstanceId(1);

    fn piece(layer: u32, first: u32, tokens: u32) -> PieceId {
        PieceId { layer, first, tokens, retries: 0 }
    }

    fn expected() -> ExpectedKv {
        let source = PrefixSource { holder: SENDER, until: 16 };
        ExpectedKv { attempt: 0, transfer: Transfer::HandOff, source }
    }

    fn handed_off() -> Incoming {
        let mut incoming = Incoming::new(expected(), Lacking::all(0), 1);
        assert!(incoming.hand_over(SENDER, 7));
        incoming
    }

    #[test]
    fn pieces_that_overlap_do_not_stand_for_tokens_that_never_came() {
        let mut incoming = handed_off();
        for (first, tokens) in [(0, 8), (2, 8)] {
            assert!(incoming.awaits(SENDER, &piece(0, first, tokens)));
            incoming.settle(&piece(0, first, tokens));
        }
        // Sixteen tokens came, but six of them twice.
        assert_eq!(incoming.complete(), None);
        assert!(!incoming.awaits(SENDER, &piece(0, 2, 8)));
        incoming.settle(&piece(0, 10, 6));
        assert_eq!(incoming.complete(), Some((16, Some(7))));
    }

    #[test]
    fn of_layers_with_a_window_only_what_is_read_behind_the_prompt_is_awaited() {
        let lacking = Lacking { from: 4, read_from: vec![0, 8] };
        let mut incoming = Incoming::new(expected(), lacking.clone(), 2);
        assert!(incoming.hand_over(SENDER, 7));
        assert!(!incoming.awaits(SENDER, &piece(0, 3, 4)) && !incoming.awaits(SENDER, &piece(1, 4, 4)));
        incoming.settle(&piece(0, 4, 12));
        assert_eq!(incoming.complete(), None);
        incoming.settle(&piece(1, 8, 8));
        assert_eq!(incoming.complete(), Some((16, Some(7))));
        // a token before those sent of the second layer could not be recomputed
        let mut incoming = Incoming::new(expected(), lacking, 2);
        incoming.hand_over(SENDER, 7);
        incoming.settle(&piece(0, 4, 12));
        incoming.lose(SENDER, piece(1, 8, 8));
        assert_eq!(incoming.complete(), Some((4, Some(7))));
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "asserted in debug builds")]
    #[should_panic(expected = "24 of 16 token-layers landed")]
    fn more_than_was_promised_is_a_bug() {
        handed_off().settle(&piece(0, 0, 24));
    }
}
