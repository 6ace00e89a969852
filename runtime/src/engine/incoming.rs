//! The receiver's side of KV transfers: pieces are awaited, verified and written to the sequence's pages.

use super::coverage::Coverage;
use super::fault::{Fault, Outcome};
use super::messages::{FromWorker, KvMessage, Lacking, Parcel, PieceId, Transfer};
use super::pages::InstanceKv;
use super::sender::Sender;
use super::worker::{Event, Worker, queues};
use mixfleet_hal::{DType, Error, ErrorKind, Queue, Result};
use mixfleet_scheduler::batch::{Instance, RequestId, TokenIds};
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::transfer::PrefixSource;
use std::collections::HashMap;

/// KV that a sequence waits for.
pub(super) struct Incoming {
    attempt: u32,
    sender: InstanceId,
    transfer: Transfer,
    lacking: Lacking,
    length: u32,
    layers: u32,
    /// Token-layers that landed or were given up.
    settled: Coverage,
    /// Leading tokens of which nothing was given up.
    valid: u32,
    next: Option<u32>,
}

impl Incoming {
    fn new(
        attempt: u32,
        (transfer, source): (Transfer, PrefixSource),
        lacking: Lacking,
        layers: u32,
    ) -> Self {
        let PrefixSource { holder: sender, until: length } = source;
        let (settled, valid) = (Coverage::new(layers), length);
        Incoming { attempt, sender, transfer, lacking, length, layers, settled, valid, next: None }
    }

    /// Limits the prefix to the `until` tokens that `sender` lends. It tells this before it sends; pieces
    /// that came earlier are not used.
    pub(super) fn shorten(&mut self, sender: InstanceId, until: u32) {
        if self.is_lent_by(sender) {
            let until = if self.settled.token_layers() == 0 { until } else { 0 };
            self.length = self.length.min(until).max(self.lacking.from);
            self.valid = self.valid.min(self.length);
        }
    }

    /// Stops waiting for a prefix, of which nothing is used.
    pub(super) fn abandon(&mut self) {
        if self.transfer == Transfer::Prefix {
            (self.length, self.valid) = (self.lacking.from, self.lacking.from);
        }
    }

    /// Whether this is a prefix that `peer` lends.
    pub(super) fn is_lent_by(&self, peer: InstanceId) -> bool {
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
    pub(super) fn hand_over(&mut self, sender: InstanceId, next: u32) -> bool {
        let expected = self.transfer == Transfer::HandOff && sender == self.sender;
        if expected {
            self.next = Some(next);
        }
        expected
    }

    pub(super) fn lose(&mut self, sender: InstanceId, piece: PieceId) {
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

/// What a worker needs to take in KV that others send.
pub(super) struct Intake<'a> {
    pub(super) sender: &'a mut Sender,
    pub(super) kv: &'a mut InstanceKv,
    pub(super) incoming: &'a mut HashMap<RequestId, Incoming>,
    pub(super) machine: &'a Instance<TokenIds>,
    /// The queues that copy KV, in the order of members.
    pub(super) queues: Vec<&'a mut dyn Queue>,
}

impl Intake<'_> {
    /// Handles a message that only moves bytes. Returns the request whose KV may be complete now.
    pub(super) fn take_in(&mut self, peer: InstanceId, word: KvMessage) -> Result<Option<RequestId>> {
        let (request, attempt) = match word {
            KvMessage::Landed(parcel) => return self.receive(peer, parcel),
            KvMessage::Credit { slot } => {
                self.sender.courier.give_slot(peer, slot);
                return Ok(None);
            }
            KvMessage::Lent { request, attempt, .. } | KvMessage::Lost { request, attempt, .. } => {
                (request, attempt)
            }
            _ => return Ok(None),
        };
        let incoming = self.incoming.get_mut(&request).filter(|incoming| incoming.attempt == attempt);
        Ok(incoming.map(|incoming| {
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
    fn receive(&mut self, sender: InstanceId, parcel: Parcel) -> Result<Option<RequestId>> {
        let Parcel { request, attempt, piece, slot, bytes, hash, wire } = parcel;
        let awaited = self.incoming.get(&request).is_some_and(|incoming| {
            incoming.attempt == attempt
                && incoming.awaits(sender, &piece)
                && DType::KV.contains(&wire)
                && bytes == self.kv.layer_bytes(piece.tokens, wire)
                && bytes <= self.sender.courier.slot_bytes()
        });
        let private = self.sender.courier.private();
        let mut copied = Err(Error::new(ErrorKind::OutOfMemory, "there is no memory to check a piece in"));
        let looked = self.sender.courier.look(sender, slot, bytes, &mut |payload| {
            if let Some(private) = &private {
                copied = private.store_hashed(0, payload);
            }
        });
        self.sender.directory.tell(sender, self.sender.id, KvMessage::Credit { slot });
        let intact = match looked.and(copied) {
            Ok(copy_hash) => copy_hash == hash,
            Err(error) => {
                tracing::warn!(request, %sender, %error, "a piece cannot be taken out of its slot");
                false
            }
        };
        if !intact {
            tracing::warn!(request, layer = piece.layer, first = piece.first, "KV arrived corrupt");
        }
        let taken = private.filter(|_| awaited && intact);
        if let Some(private) = &taken {
            let Intake { machine, kv, queues, .. } = self;
            let span = piece.span(machine.pages(request), wire);
            let mut written = Ok(());
            private.view(0, bytes, &mut |payload| written = kv.write(queues, &span, payload))?;
            written?;
            self.incoming.get_mut(&request).expect("still there").settle(&piece);
            self.sender.metrics.kv_transfer_bytes.inc_by(bytes);
        }
        let verdict = KvMessage::Verdict { request, attempt, piece, intact };
        self.sender.directory.tell(sender, self.sender.id, verdict);
        Ok(taken.map(|_| request))
    }
}

impl Worker {
    /// Starts waiting for KV once a sequence has its blocks.
    ///
    /// # Errors
    /// A fault of the link, if there is no memory or descriptor for the staging slots.
    pub(super) fn await_kv(&mut self, request: RequestId, tokens_cached: u32) -> Outcome<()> {
        let layers = self.kv.layers;
        let Some(active) = self.active.get(&request) else { return Ok(()) };
        let Some((transfer, source)) = active.sender else { return Ok(()) };
        let (attempt, holder) = (active.attempt, source.holder);
        let lacking = match transfer {
            Transfer::HandOff => self.kv.lacking(tokens_cached, source.until),
            Transfer::Prefix => Lacking::all(tokens_cached),
        };
        match (self.sender.courier.landing(holder), transfer) {
            (Ok(landing), _) => {
                let landing = landing.clone();
                let incoming = Incoming::new(attempt, (transfer, source), lacking.clone(), layers);
                self.incoming.insert(request, incoming);
                self.report(FromWorker::Reserved { request, attempt, lacking, landing });
                Ok(())
            }
            (Err(error), Transfer::HandOff) => Err(Fault::of_link(request, holder, error)),
            (Err(error), Transfer::Prefix) => {
                tracing::warn!(request, %holder, %error, "a prefix is computed: it has nowhere to land");
                let mut incoming = Incoming::new(attempt, (transfer, source), lacking, layers);
                incoming.abandon();
                self.incoming.insert(request, incoming);
                Ok(self.settle_incoming(request)?)
            }
        }
    }

    /// Lets a sequence join the batch once nothing more of its KV will come.
    pub(super) fn settle_incoming(&mut self, request: RequestId) -> Result<()> {
        if self.postponed.takes(request) {
            return Ok(());
        }
        let Some(incoming) = self.incoming.get(&request) else { return Ok(()) };
        let Some((tokens_valid, next)) = incoming.complete() else { return Ok(()) };
        if tokens_valid < incoming.length {
            self.metrics.kv_transfer_recomputes.inc();
        }
        if incoming.transfer == Transfer::Prefix {
            let pulled = tokens_valid.saturating_sub(incoming.lacking.from);
            self.metrics.kv_pulled_tokens.inc_by(u64::from(pulled));
        }
        let (sender, attempt) = (incoming.sender, incoming.attempt);
        self.incoming.remove(&request);
        if let (Some(text), Some(next)) = (self.machine.text_mut(request), next) {
            text.push(next);
        }
        if next.is_some() {
            self.sender.directory.tell(sender, self.id, KvMessage::TakenOver { request, attempt });
            self.report(FromWorker::Joined { request });
            self.decode_begins(request);
        }
        self.machine_step(Event::Landed { request, tokens_valid, next: next.is_some() })
    }

    /// Stops waiting for prefixes that `peer` lends.
    pub(super) fn lender_down(&mut self, peer: InstanceId) -> Result<()> {
        let lent = self.incoming.iter_mut().filter(|(_, incoming)| incoming.is_lent_by(peer));
        let lent = lent.map(|(&request, incoming)| {
            incoming.abandon();
            request
        });
        let mut its: Vec<RequestId> = lent.collect();
        its.sort_unstable();
        its.into_iter().try_for_each(|request| self.settle_incoming(request))
    }

    pub(super) fn incoming(&mut self, request: RequestId, attempt: u32) -> Option<&mut Incoming> {
        self.incoming.get_mut(&request).filter(|incoming| incoming.attempt == attempt)
    }

    /// What takes in KV, between steps or beside one that is not over.
    pub(super) fn intake(&mut self) -> Intake<'_> {
        let Worker { sender, kv, incoming, machine, queue, copies, .. } = self;
        Intake { sender, kv, incoming, machine, queues: queues(queue, copies) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDER: InstanceId = InstanceId(1);

    fn piece(layer: u32, first: u32, tokens: u32) -> PieceId {
        PieceId { layer, first, tokens, retries: 0 }
    }

    fn handed_off() -> Incoming {
        let source = PrefixSource { holder: SENDER, until: 16 };
        let mut incoming = Incoming::new(0, (Transfer::HandOff, source), Lacking::all(0), 1);
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
        let source = PrefixSource { holder: SENDER, until: 16 };
        let lacking = Lacking { from: 4, read_from: vec![0, 8] };
        let mut incoming = Incoming::new(0, (Transfer::HandOff, source), lacking.clone(), 2);
        assert!(incoming.hand_over(SENDER, 7));
        assert!(!incoming.awaits(SENDER, &piece(0, 3, 4)) && !incoming.awaits(SENDER, &piece(1, 4, 4)));
        incoming.settle(&piece(0, 4, 12));
        assert_eq!(incoming.complete(), None);
        incoming.settle(&piece(1, 8, 8));
        assert_eq!(incoming.complete(), Some((16, Some(7))));
        // a token before what was sent of the second layer could not be computed again
        let mut incoming = Incoming::new(0, (Transfer::HandOff, source), lacking, 2);
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
