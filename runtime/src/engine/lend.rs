//! A prefix that this instance holds and another one wants: sent from the device's pages, and where those end from the lower tiers.
//!
//! The holder is asked because the fleet's machine expects the transfer to be faster than computing, but what the machine knows is late:
//! the holder says first how much it sends. It serves others meanwhile, so a piece leaves whenever a slot is free, and nothing waits
//! for one.

use super::handoff::Outgoing;
use super::messages::{HandOff, Job, PieceId, ToWorker};
use super::worker::Worker;
use crate::pool::Lease;
use mixfleet_hal::Result;
use mixfleet_scheduler::batch::{Action, Event, RequestId};
use std::collections::VecDeque;
use std::ops::Range;

/// What is still to be sent of a prefix.
pub(super) struct Prefix {
    waiting: VecDeque<PieceId>,
    /// Blocks of the lower tiers, and the first token in them.
    below: Option<(u32, Lease)>,
}

impl Prefix {
    /// Every piece has left at least once.
    pub(super) fn is_sent(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A piece must leave anew.
    pub(super) fn again(&mut self, piece: PieceId) {
        self.waiting.push_front(piece);
    }
}

/// Cuts a token range into pieces of one layer.
fn pieces(layer: u32, range: Range<u32>, tokens_max: u32) -> impl Iterator<Item = PieceId> {
    let end = range.end;
    let piece = move |first| PieceId { layer, first, tokens: tokens_max.min(end - first), retries: 0 };
    range.step_by(tokens_max as usize).map(piece)
}

impl Worker {
    /// Begins to send the KV of the first `until` tokens, as far as it is here, from where the receiver's ends.
    pub(super) fn lend(&mut self, job: &Job, until: u32, to: HandOff) {
        let Job { request, attempt, .. } = *job;
        let peer = to.to;
        let end = match self.hand_off(request) {
            // It is computed here: whoever asks for it has an old view.
            Some(_) => 0,
            None => self.begin_to_lend(job, until, to),
        };
        self.directory.tell(peer, ToWorker::Lent { request, attempt, until: end });
        self.settle_outgoing(request);
    }

    /// Returns how many leading tokens the receiver will have.
    fn begin_to_lend(&mut self, job: &Job, until: u32, to: HandOff) -> u32 {
        let request = job.request;
        let mut tokens = job.tokens();
        tokens.truncate(until as usize);
        let mut actions = Vec::new();
        let hasher = job.hasher;
        self.machine.step(Event::Lend { request, tokens: tokens.clone(), hasher }, &mut actions);
        let Some(Action::Lent { pages, .. }) = actions.pop() else {
            unreachable!("what is asked for is lent")
        };

        let page_tokens = self.staging.page_tokens;
        let on_device = pages.len() as u32 * page_tokens;
        let mut below = None;
        // Below lies what the device gave up, in its dtype.
        if to.wire == self.staging.kv && on_device < tokens.len() as u32 {
            let chain = job.hasher.chain(&tokens, page_tokens);
            below = self.lease(&chain[pages.len()..], &tokens[on_device as usize..]);
            self.tell_tiers();
        }
        let blocks_below = below.as_ref().map_or(0, Lease::len) as u32;
        let end = on_device + blocks_below * page_tokens;

        let (from, most) = (to.from, self.piece_tokens_max(&to));
        let layers = 0..self.forward.config().layers;
        let mut waiting = VecDeque::new();
        for layer in layers.clone() {
            waiting.extend(pieces(layer, from.min(on_device)..on_device, most));
        }
        for block in (on_device..end).step_by(page_tokens as usize) {
            let range = from.clamp(block, block + page_tokens)..block + page_tokens;
            waiting.extend(layers.clone().flat_map(|layer| pieces(layer, range.clone(), most)));
        }
        let prefix = Prefix { waiting, below: below.map(|lease| (on_device, lease)) };
        self.outgoing.insert(request, Outgoing::new(to, pages, Some(prefix)));
        end
    }

    /// Sends what is wanted of prefixes, as far as there are free slots.
    pub(super) fn send_lent(&mut self) -> Result<()> {
        let unsent = |outgoing: &Outgoing| outgoing.prefix.as_ref().is_some_and(|prefix| !prefix.is_sent());
        let its = self.outgoing.iter().filter(|(_, outgoing)| unsent(outgoing)).map(|(&request, _)| request);
        let mut its: Vec<RequestId> = its.collect();
        its.sort_unstable();
        for request in its {
            while self.send_next_of(request)? {}
            self.settle_outgoing(request);
        }
        Ok(())
    }

    /// Sends one piece of a prefix. False if there is none, or no slot for it.
    fn send_next_of(&mut self, request: RequestId) -> Result<bool> {
        let Some(outgoing) = self.outgoing.get(&request) else { return Ok(false) };
        let Some(prefix) = &outgoing.prefix else { return Ok(false) };
        let Some(&piece) = prefix.waiting.front() else { return Ok(false) };
        let to = outgoing.to.clone();
        let slot = match self.courier.take_slot(to.to, &to.landing) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Ok(false),
            Err(error) => {
                tracing::warn!(request, to = %to.to, %error, "a prefix is not sent");
                let attempt = to.attempt;
                self.directory.tell(to.to, ToWorker::Lent { request, attempt, until: 0 });
                self.end_outgoing(request);
                return Ok(false);
            }
        };
        if let Some(prefix) = self.outgoing.get_mut(&request).and_then(|outgoing| outgoing.prefix.as_mut()) {
            prefix.waiting.pop_front();
        }
        // A piece that leaves anew is open already.
        if piece.retries == 0 {
            self.open_piece(request);
        }
        match self.below_of(request, &piece)? {
            Some(payload) => {
                let bytes = payload.len() as u64;
                self.send_from(request, piece, &to, (slot, bytes), &mut |place| {
                    place.copy_from_slice(&payload);
                    Ok(())
                })?;
            }
            None => {
                let Some(from) = self.gather(request, &piece)? else { return Ok(false) };
                let device = self.device.clone();
                self.send_from(request, piece, &to, (slot, from.bytes), &mut |place| {
                    device.read(&from, place)
                })?;
            }
        }
        Ok(true)
    }

    /// The bytes of a piece that lies in the lower tiers.
    fn below_of(&self, request: RequestId, piece: &PieceId) -> Result<Option<Vec<u8>>> {
        let below = self.outgoing.get(&request).and_then(|outgoing| outgoing.prefix.as_ref()?.below.as_ref());
        let Some((from, lease)) = below.filter(|(from, _)| piece.first >= *from) else { return Ok(None) };
        let (at, page_tokens) = (piece.first - from, self.staging.page_tokens);
        let token_bytes = self.staging.token_bytes(self.staging.kv) as usize;
        let first = (piece.layer * page_tokens + at % page_tokens) as usize * token_bytes;
        let mut payload = Vec::new();
        lease.view((at / page_tokens) as usize, &mut |block| {
            payload.extend_from_slice(&block[first..first + piece.tokens as usize * token_bytes]);
        })?;
        Ok(Some(payload))
    }
}
