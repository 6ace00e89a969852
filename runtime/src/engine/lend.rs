//! A prefix that this instance holds and another one wants: sent from the device's pages, and where those end
//! from the lower tiers.
//!
//! The holder is asked because the fleet's machine expects the transfer to be faster than computing, but what
//! the machine knows is late: the holder says first how much it sends. It serves others meanwhile, so a piece
//! leaves whenever a slot is free, and nothing waits for one.

use super::handoff::Outgoing;
use super::messages::{HandOff, Job, PieceId, ToWorker};
use super::worker::{Action, Event, Worker};
use crate::pool::Lease;
use mixfleet_hal::Result;
use mixfleet_scheduler::batch::{RequestId, TokenIds};
use mixfleet_scheduler::kv::BlockHash;
use std::collections::VecDeque;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// What is still to be sent of a prefix.
pub(super) struct Prefix {
    waiting: VecDeque<PieceId>,
    below: Option<Lent>,
}

/// Blocks of the lower tiers that are lent.
struct Lent {
    /// The first token in them.
    from: u32,
    lease: Lease,
    /// XXH3-64 of each layer of those that were what was stored when they were looked at, by block.
    digests: Vec<Vec<u64>>,
}

/// Where the bytes of a piece are.
enum Place {
    Device,
    /// In the lower tiers, and not what was stored there.
    Rotten,
    Below(Vec<u8>),
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

/// Of the leading blocks that are what was stored, the XXH3-64 of each layer.
fn digests(lease: &Lease, layers: usize) -> Vec<Vec<u64>> {
    let of_block = |block: usize| {
        let mut digests = Vec::new();
        let intact = lease.view(block, &mut |bytes| {
            digests = bytes.chunks_exact(bytes.len() / layers).map(xxh3_64).collect();
        });
        intact.is_ok_and(|intact| intact).then_some(digests)
    };
    (0..lease.len()).map_while(of_block).collect()
}

impl Worker {
    /// Begins to send the KV of the first `until` tokens, as far as it is here, from where the receiver's
    /// ends.
    pub(super) fn lend(&mut self, job: &Job, until: u32, to: HandOff) {
        let Job { request, attempt, .. } = *job;
        let (sender, peer) = (self.id, to.to);
        let until = match self.hand_off(request) {
            // It is computed here: whoever asks for it has an old view.
            Some(_) => 0,
            None => self.begin_to_lend(job, until, to),
        };
        self.directory.tell(peer, ToWorker::Lent { sender, request, attempt, until });
        self.settle_lent(request);
    }

    /// Returns how many leading tokens the receiver will have.
    fn begin_to_lend(&mut self, job: &Job, until: u32, to: HandOff) -> u32 {
        let request = job.request;
        let mut tokens = job.tokens();
        tokens.truncate(until as usize);
        let mut actions = Vec::new();
        self.stop_outgoing(request);
        let text = TokenIds::new(tokens.clone(), job.hasher, self.limits.block_tokens);
        self.machine.step(Event::Lend { request, text }, &mut actions);
        let Some(Action::Lent { pages, .. }) = actions.pop() else {
            unreachable!("what is asked for is lent")
        };

        let (from, page_tokens) = (to.from, self.staging.page_tokens);
        let on_device = pages.len() as u32 * page_tokens;
        // What the receiver has already is not brought.
        let below_from = on_device.max(from / page_tokens * page_tokens);
        let mut below = None;
        // Below lies what the device gave up, in its dtype.
        if to.wire == self.staging.kv && below_from < tokens.len() as u32 {
            let chain = job.hasher.chain(&tokens, page_tokens);
            let wanted = (below_from / page_tokens) as usize..chain.len();
            below = self.lease_to_lend(&chain[wanted], &tokens[below_from as usize..]);
        }
        let layers = self.forward.config().layers as usize;
        let below = below.map(|lease| Lent { from: below_from, digests: digests(&lease, layers), lease });
        // What was found to be bad is gone.
        self.tell_tiers();
        let end = below_from + below.as_ref().map_or(0, |lent| lent.digests.len()) as u32 * page_tokens;

        let most = self.piece_tokens_max(&to);
        let mut waiting = VecDeque::new();
        for layer in 0..self.forward.config().layers {
            waiting.extend(pieces(layer, from..on_device, most));
            waiting.extend(pieces(layer, from.max(below_from)..end, most));
        }
        let prefix = Prefix { waiting, below };
        self.begin_outgoing(request, Outgoing::new(to, pages, Some(prefix)));
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
            self.settle_lent(request);
        }
        Ok(())
    }

    /// Sends one piece of a prefix. False if there is none, or no slot for it.
    fn send_next_of(&mut self, request: RequestId) -> Result<bool> {
        let Some(outgoing) = self.outgoing.get_mut(&request) else { return Ok(false) };
        let Some(prefix) = &mut outgoing.prefix else { return Ok(false) };
        let Some(&piece) = prefix.waiting.front() else { return Ok(false) };
        let to = outgoing.to.clone();
        let slot = match self.courier.take_slot(to.to, &to.landing) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Ok(false),
            Err(error) => {
                tracing::warn!(request, to = %to.to, %error, "a prefix is not sent");
                self.stop_outgoing(request);
                return Ok(false);
            }
        };
        prefix.waiting.pop_front();
        // A piece that leaves anew is open already.
        if piece.retries == 0 {
            self.open_piece(request, &piece);
        }
        match self.read_below(request, &piece)? {
            Place::Below(payload) => {
                let bytes = payload.len() as u64;
                self.send_from(request, piece, &to, (slot, bytes), &mut |place| {
                    place.copy_from_slice(&payload);
                    Ok(())
                })?;
            }
            Place::Rotten => {
                self.courier.give_slot(to.to, slot);
                self.stop_outgoing(request);
                self.tell_tiers();
                return Ok(false);
            }
            Place::Device => {
                let slots = self.upload_slots(&self.outgoing[&request].pages, piece.first, piece.tokens)?;
                let from = self.gather(&piece, to.wire, slots)?;
                let device = self.device.clone();
                let read = &mut |place: &mut [u8]| device.read(&from, place);
                self.send_from(request, piece, &to, (slot, from.bytes), read)?;
            }
        }
        Ok(true)
    }

    /// The bytes of a piece, if it lies in the lower tiers: a copy, which is checked.
    fn read_below(&self, request: RequestId, piece: &PieceId) -> Result<Place> {
        let outgoing = &self.outgoing[&request];
        let (page_tokens, first) = (self.staging.page_tokens, piece.first);
        let Some(Lent { from, lease, digests }) =
            outgoing.prefix.as_ref().and_then(|prefix| prefix.below.as_ref())
        else {
            return Ok(Place::Device);
        };
        if first < outgoing.pages.len() as u32 * page_tokens {
            return Ok(Place::Device);
        }
        let token_bytes = self.staging.token_bytes(self.staging.kv) as usize;
        let mut payload = Vec::with_capacity(piece.tokens as usize * token_bytes);
        let (mut at, end) = (first - *from, first - *from + piece.tokens);
        while at < end {
            let next = end.min((at / page_tokens + 1) * page_tokens);
            let (block, layer) = ((at / page_tokens) as usize, piece.layer as usize);
            let (mut copy, layer_bytes) = (Vec::new(), page_tokens as usize * token_bytes);
            lease.view_unchecked(block, &mut |bytes| {
                copy.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
            })?;
            if xxh3_64(&copy) != digests[block][layer] {
                lease.drop_rotten(block)?;
                return Ok(Place::Rotten);
            }
            let begin = (at % page_tokens) as usize * token_bytes;
            payload.extend_from_slice(&copy[begin..begin + (next - at) as usize * token_bytes]);
            at = next;
        }
        Ok(Place::Below(payload))
    }

    /// Brings blocks of a prefix that is lent to host memory. All lent ones together take half of it: the
    /// device goes on giving up blocks to the rest.
    fn lease_to_lend(&mut self, chain: &[BlockHash], tokens: &[u32]) -> Option<Lease> {
        let leases = self.outgoing.values().filter_map(|outgoing| outgoing.prefix.as_ref()?.below.as_ref());
        let lent: usize = leases.map(|lent| lent.lease.len()).sum();
        let most = (self.below.as_ref()?.dram_blocks() / 2).saturating_sub(lent).min(chain.len());
        let lease = self.lease(&chain[..most], &tokens[..most * self.staging.page_tokens as usize]);
        self.tell_tiers();
        lease
    }
}
