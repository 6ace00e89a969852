//! What an instance sends of its KV, and how its layers leave while devices run a step.

use super::beside::{Postponed, next_look, of_instance};
use super::courier::{Courier, Sent};
use super::directory::Directory;
use super::handoff::{Outgoing, pieces};
use super::incoming::Intake;
use super::instance::Surroundings;
use super::leaving::{LeavingTokens, Taken};
use super::messages::{FromPeer, HandOff, KvMessage, Parcel, PieceId, Transfer};
use super::pages::InstanceKv;
use crate::env::SharedEnv;
use crate::mailbox::MessageReceiver;
use crate::metrics::Metrics;
use crate::model::graph::StepInput;
use crate::model::leaving::LayerKv;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Cmd, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The transfers of an instance to others, and its connections to them.
pub(super) struct Sender {
    pub(super) id: InstanceId,
    pub(super) env: SharedEnv,
    pub(super) courier: Courier,
    pub(super) directory: Directory,
    pub(super) metrics: Metrics,
    /// KV that is sent to others, by request: at most one transfer each.
    pub(super) outgoing: HashMap<RequestId, Outgoing>,
    /// Transfers of which a piece was given up, and which may be over.
    pub(super) given_up: Vec<RequestId>,
}

/// Tokens of a prompt whose KV is sent during a step.
pub(super) struct StepSend {
    pub(super) request: RequestId,
    pub(super) to: Arc<HandOff>,
    pub(super) leaving: LeavingTokens,
}

impl StepSend {
    /// The tokens that are sent of a layer.
    pub(super) fn tokens(&self, layer: u32) -> Range<u32> {
        let Range { start, end } = self.leaving.tokens;
        self.to.lacking.first(layer).clamp(start, end)..end
    }

    /// The tokens that leave, and whether this layer of any of them is sent.
    pub(super) fn leaving_of(&self, layer: u32) -> (&LeavingTokens, bool) {
        (&self.leaving, !self.tokens(layer).is_empty())
    }
}

impl Sender {
    pub(super) fn new(id: InstanceId, courier: Courier, surroundings: &Surroundings) -> Self {
        let Surroundings { env, directory, metrics, .. } = surroundings;
        let (env, directory, metrics) = (env.clone(), directory.clone(), metrics.clone());
        Sender { id, env, courier, directory, metrics, outgoing: HashMap::new(), given_up: Vec::new() }
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

    /// The transfer of a request that is computed here and decoded elsewhere.
    pub(super) fn hand_off(&mut self, request: RequestId) -> Option<&mut Outgoing> {
        self.outgoing.get_mut(&request).filter(|outgoing| outgoing.transfer == Transfer::HandOff)
    }

    /// Whether a transfer goes on.
    pub(super) fn goes_on(&self, request: RequestId, to: &Arc<HandOff>) -> bool {
        self.outgoing.get(&request).is_some_and(|outgoing| Arc::ptr_eq(&outgoing.to, to))
    }

    /// Puts a piece that devices gathered into a free slot, and starts sending it.
    pub(super) fn send_gathered(
        &mut self,
        kv: &mut InstanceKv,
        StepSend { request, to, leaving }: &StepSend,
        (piece, slot): (PieceId, u32),
    ) -> Result<()> {
        let bytes = kv.layer_bytes(piece.tokens, to.wire);
        let tokens = (piece.layer, piece.first..piece.first + piece.tokens);
        let mut read = |place: &mut [u8]| kv.read_gathered(leaving, tokens.clone(), place);
        let hash = self.courier.fill(to.to, slot, bytes, &mut read)?;
        self.post(*request, piece, to, (slot, bytes, hash));
        Ok(())
    }

    /// Starts sending what was filled into a free slot.
    pub(super) fn post(
        &mut self,
        request: RequestId,
        piece: PieceId,
        to: &HandOff,
        (slot, bytes, hash): (u32, u64, u64),
    ) {
        let now = self.env.now();
        let HandOff { attempt, wire, .. } = *to;
        if let Some(outgoing) = self.outgoing.get_mut(&request) {
            outgoing.sent(&piece, now);
        }
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
                // A receiver that was not told cannot return the slot, and may be connected again later.
                self.courier.give_slot(to, slot);
            }
            if let Some(outgoing) = self.open(request, to, attempt, &piece) {
                outgoing.close(&piece);
                let to = outgoing.to.clone();
                self.lose(request, &to, piece);
                self.given_up.push(request);
            }
        }
    }

    /// The transfer whose `piece` was sent to `peer` and has no verdict yet.
    pub(super) fn open(
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
}

/// The KV of other sequences that comes to several devices and leaves them while these run a step. One thread
/// drives them all, and nothing of them may wait for a peer: what finds no slot in time joins the queue of
/// pieces.
pub(super) struct LayersLeaving<'a> {
    intake: Intake<'a>,
    /// What is sent of each batch of the step.
    sends: &'a [Vec<StepSend>],
    /// What is gathered and not sent.
    unsent: VecDeque<(&'a StepSend, PieceId)>,
    words: &'a mut MessageReceiver<FromPeer>,
    postponed: &'a mut Postponed,
    /// Whether pieces are taken in during this step.
    takes_in: bool,
}

impl<'a> LayersLeaving<'a> {
    pub(super) fn new(
        intake: Intake<'a>,
        sends: &'a [Vec<StepSend>],
        (words, postponed): (&'a mut MessageReceiver<FromPeer>, &'a mut Postponed),
        takes_in: bool,
    ) -> Self {
        LayersLeaving { intake, sends, unsent: VecDeque::new(), words, postponed, takes_in }
    }

    /// Handles what came of peers as far as bytes are concerned: of pieces one at a time, so that devices
    /// which are done wait for one at most.
    fn listen(&mut self) -> Result<()> {
        for _ in 0..self.words.len() {
            let Ok((peer, word)) = self.words.try_recv() else { break };
            let is_piece = matches!(word, KvMessage::Landed(_));
            if !self.postponed.moves_only(peer, &word) || is_piece && !self.takes_in {
                self.postponed.handle_later(peer, word);
                continue;
            }
            if let Some(request) = self.intake.take_in(peer, word).map_err(of_instance)? {
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
        let (StepSend { request, to, .. }, Intake { sender, kv, .. }) = (send, &mut self.intake);
        match sender.courier.take_slot(to.to, &to.landing) {
            Ok(Some(slot)) => sender.send_gathered(kv, send, (piece, slot)).map(|()| true),
            Ok(None) => Ok(false),
            Err(error) => {
                tracing::warn!(request, to = %to.to, %error, "KV is not sent");
                sender.lose(*request, to, piece);
                Ok(true)
            }
        }
    }

    /// Leaves those of the unsent pieces to the queue of pieces for which this holds.
    fn leave_to_queue(&mut self, which: impl Fn(&InstanceKv, &PieceId) -> bool) {
        let Intake { sender, kv, .. } = &mut self.intake;
        self.unsent.retain(|(send, piece)| {
            let leaves = which(kv, piece);
            if let (true, Some(outgoing)) = (leaves, sender.hand_off(send.request)) {
                outgoing.waiting.push_back(*piece);
            }
            !leaves
        });
    }

    /// Leaves what was not sent in a step that has ended to the queue of pieces.
    pub(super) fn end(mut self) {
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
            (self.sends.get(batch).into_iter().flatten(), self.intake.kv.layer_of(member, layer));
        self.intake.kv.gather((member, layer), sends.map(|send| send.leaving_of(number)))
    }

    fn leave(&mut self, member: usize, batch: usize, layer: usize) -> Result<()> {
        let kv = &self.intake.kv;
        let layer = kv.layer_of(member, layer);
        for send in self.sends.get(batch).into_iter().flatten() {
            let all = pieces(layer, send.tokens(layer), kv.piece_tokens_in(&send.to));
            self.unsent.extend(all.map(|piece| (send, piece)));
        }
        self.go_on(Duration::ZERO).map(drop)
    }

    fn go_on(&mut self, waited: Duration) -> Result<Option<Duration>> {
        self.listen()?;
        self.intake.sender.settle(Duration::ZERO);
        for _ in 0..self.unsent.len() {
            let Some((send, piece)) = self.unsent.pop_front() else { break };
            if !self.send(send, piece)? {
                self.unsent.push_back((send, piece));
            }
        }
        let Intake { sender, incoming, .. } = &self.intake;
        let in_transit = sender.courier.longest_send(sender.env.now()).is_some();
        let more = in_transit || !self.unsent.is_empty() || !incoming.is_empty();
        Ok(more.then(|| if self.words.is_empty() { next_look(waited) } else { Duration::ZERO }))
    }
}
