//! Sending a cached prefix to another instance: first from the device's pages, then from the lower tiers.
//!
//! The fleet machine orders a prefix if it expects the transfer to be faster than computing, but its view may
//! be outdated: the holder first reports how much it sends. It serves other requests during the transfer: a
//! piece is sent whenever a slot is free, and nothing waits for one.

use super::messages::{HandOff, Job, PieceId, Transfer};
use super::pages::InstanceKv;
use super::sender::pieces;
use super::worker::{Event, Worker};
use crate::pool::Lease;
use mixfleet_hal::Result;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_scheduler::batch::{Text, TokenIds};
use mixfleet_scheduler::kv::BlockHash;
use twox_hash::XxHash3_64;

/// Lent blocks of the lower tiers.
pub(super) struct Lent {
    /// The first token in them.
    from: u32,
    lease: Lease,
    /// XXH3-64 of each layer of the leading blocks that were intact when they were leased, by block.
    digests: Vec<Vec<u64>>,
}

/// The location of a piece's bytes.
pub(super) enum PieceSource {
    /// The piece is on the device or devices, in the pages of its sequence.
    Sequence,
    /// The piece is on the device or devices, in lent pages.
    Lent,
    /// The piece is in the lower tiers, and corrupt.
    Corrupt,
    /// The piece is in the lower tiers: its bytes.
    LowerTier(Vec<u8>),
}

/// The XXH3-64 of each layer of the leading intact blocks.
fn digests(lease: &Lease, layers: usize) -> Vec<Vec<u64>> {
    let of_block = |block: usize| {
        let mut digests = Vec::new();
        let intact = lease.view(block, &mut |bytes| {
            digests = bytes.chunks_exact(bytes.len() / layers).map(XxHash3_64::oneshot).collect();
        });
        intact.is_ok_and(|intact| intact).then_some(digests)
    };
    (0..lease.len()).map_while(of_block).collect()
}

impl Lent {
    /// Number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.lease.len()
    }

    /// Copies and verifies the bytes of a piece.
    pub(super) fn read(&self, piece: &PieceId, kv: &InstanceKv) -> Result<PieceSource> {
        let Lent { from, lease, digests } = self;
        let page_tokens = kv.shape.page_tokens;
        let token_bytes = to_usize(kv.layer_bytes(1, kv.shape.dtype));
        let mut payload = Vec::with_capacity(piece.tokens as usize * token_bytes);
        let (mut at, end) = (piece.first - *from, piece.first + piece.tokens - *from);
        while at < end {
            let next = end.min((at / page_tokens + 1) * page_tokens);
            let (block, layer) = ((at / page_tokens) as usize, piece.layer as usize);
            let (mut copy, layer_bytes) = (Vec::new(), page_tokens as usize * token_bytes);
            lease.view_unchecked(block, &mut |bytes| {
                copy.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
            })?;
            if XxHash3_64::oneshot(&copy) != digests[block][layer] {
                lease.drop_corrupt(block)?;
                return Ok(PieceSource::Corrupt);
            }
            let begin = (at % page_tokens) as usize * token_bytes;
            payload.extend_from_slice(&copy[begin..begin + (next - at) as usize * token_bytes]);
            at = next;
        }
        Ok(PieceSource::LowerTier(payload))
    }
}

impl Worker {
    /// Starts sending the KV of the first `until` tokens, as far as it is here and the receiver lacks it.
    pub(super) fn lend(&mut self, job: &Job, until: u32, to: HandOff) -> Result<()> {
        let Job { request, attempt, .. } = *job;
        let peer = to.to;
        // Tokens that are being computed here are not lent: the requester's view is outdated.
        let until = if self.sender.hands_off(request) { 0 } else { self.begin_to_lend(job, until, to)? };
        self.sender.tell_lent(peer, request, attempt, until);
        self.release_sent()
    }

    /// Queues the pieces, and returns how many leading tokens the receiver will have.
    fn begin_to_lend(&mut self, job: &Job, until: u32, to: HandOff) -> Result<u32> {
        let request = job.request;
        let mut tokens = job.tokens();
        tokens.truncate(until as usize);
        let (from, wire, most) = (to.lacking.from, to.wire, self.kv.piece_tokens_in(&to));
        self.sender.begin(request, Transfer::Prefix, to);
        self.release_sent()?;
        let mut text = TokenIds::new(tokens.clone(), job.hasher, self.limits.block_tokens);
        let blocks = to_u32(tokens.len()) / self.limits.block_tokens;
        let chain: Vec<BlockHash> = (0..blocks).map(|block| text.hash(block)).collect();
        self.machine_step(Event::Lend { request, text })?;

        let page_tokens = self.kv.shape.page_tokens;
        let on_device = self.sender.tokens_lent(request, &self.kv);
        // What the receiver has already is not loaded.
        let below_from = on_device.max(from / page_tokens * page_tokens);
        let mut below = None;
        // The lower tiers hold what the device evicted, in its dtype.
        if wire == self.kv.shape.dtype && below_from < to_u32(tokens.len()) {
            let wanted = &chain[(below_from / page_tokens) as usize..];
            below = self.lease_to_lend(wanted, &tokens[below_from as usize..]);
        }
        let layers = self.kv.layers;
        let below =
            below.map(|lease| Lent { from: below_from, digests: digests(&lease, layers as usize), lease });
        // Blocks found to be corrupt are gone.
        self.report_tiers();
        let end = below_from + to_u32(below.as_ref().map_or(0, |lent| lent.digests.len())) * page_tokens;
        let of_layer = |layer| {
            let above = pieces(layer, from..on_device, most);
            above.chain(pieces(layer, from.max(below_from)..end, most))
        };
        self.sender.queue_prefix(request, (0..layers).flat_map(of_layer), below);
        Ok(end)
    }

    /// Loads blocks of a prefix to be lent into host memory. All lent blocks together take at most half of
    /// it, so that the device can still evict blocks to the rest.
    fn lease_to_lend(&mut self, chain: &[BlockHash], tokens: &[u32]) -> Option<Lease> {
        let lent = self.sender.blocks_below();
        let most = (self.below.as_ref()?.dram_blocks() / 2).saturating_sub(lent).min(chain.len());
        let lease = self.lease(&chain[..most], &tokens[..most * self.kv.shape.page_tokens as usize]);
        self.report_tiers();
        lease
    }
}
