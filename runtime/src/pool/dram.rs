//! Blocks in host memory: slots of equal size in regions that a transport can register.

use super::MakeRegion;
use super::check::Layout;
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy};
use mixfleet_scheduler::table::IdMap;
use std::sync::Arc;

/// Bytes of one region. Calls on a region exclude each other, so there are several; each is registered and
/// mapped separately, so there are not many.
const REGION_BYTES: u64 = 256 << 20;

/// The memory of all slots.
pub(super) struct Slab {
    regions: Vec<Arc<dyn SharedMemory>>,
    slots_per_region: u32,
    block_bytes: u64,
}

impl Slab {
    pub(super) fn new(slots: u32, block_bytes: u64, make_region: &MakeRegion) -> Result<Self> {
        let slots_per_region =
            u32::try_from(REGION_BYTES / block_bytes).unwrap_or(u32::MAX).clamp(1, slots.max(1));
        let starts = (0..slots).step_by(slots_per_region as usize);
        let sizes = starts.map(|start| u64::from((slots - start).min(slots_per_region)) * block_bytes);
        let regions = sizes.map(make_region).collect::<Result<_>>()?;
        Ok(Slab { regions, slots_per_region, block_bytes })
    }

    pub(super) fn regions(&self) -> &[Arc<dyn SharedMemory>] {
        &self.regions
    }

    /// The region of a slot, and its offset in bytes.
    fn place(&self, slot: u32) -> (usize, u64) {
        let offset = u64::from(slot % self.slots_per_region) * self.block_bytes;
        ((slot / self.slots_per_region) as usize, offset)
    }

    pub(super) fn update(&self, slot: u32, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let (region, offset) = self.place(slot);
        self.regions[region].update(offset, self.block_bytes, change)
    }

    pub(super) fn view(&self, slot: u32, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        let (region, offset) = self.place(slot);
        self.regions[region].view(offset, self.block_bytes, look)
    }
}

/// A block that has a slot.
#[derive(Clone)]
pub(super) struct Held {
    pub(super) slot: u32,
    /// XXH3-64 of the payload.
    pub(super) digest: u64,
    pub(super) tokens: Box<[u32]>,
    /// Whether its bytes have arrived. Until then only the task that stores it uses it, and holds its one
    /// pin.
    ready: bool,
    /// Whether its bytes were found to differ from the stored ones. It is removed with its last pin.
    bad: bool,
}

/// Which block is in which slot.
pub(super) struct Dram {
    pub(super) cache: BlockCache,
    held: IdMap<Held>,
    free: Vec<u32>,
}

/// A slot for a new block, and the block that must leave it first.
pub(super) struct Admitted {
    pub(super) slot: u32,
    pub(super) leaves: Option<(BlockHash, Held)>,
}

impl Dram {
    pub(super) fn new(slots: u32) -> Self {
        let cache = BlockCache::new(slots as usize, CachePolicy::Lru);
        Dram { cache, held: IdMap::default(), free: (0..slots).rev().collect() }
    }

    /// Looks up a block that can be served.
    pub(super) fn get(&self, hash: BlockHash) -> Option<&Held> {
        self.held.get(hash.0).filter(|held| held.ready)
    }

    /// Whether the block has a slot, though its bytes may not have arrived.
    pub(super) fn has_slot(&self, hash: BlockHash) -> bool {
        self.held.contains(hash.0)
    }

    /// Counts a use of a block that can be served, and pins it.
    pub(super) fn pin(&mut self, hash: BlockHash) {
        self.cache.pin(&[hash]);
    }

    /// Assigns a slot to a new block, which is pinned once and not ready. None if all blocks are pinned.
    pub(super) fn admit(&mut self, hash: BlockHash, tokens: &[u32]) -> Option<Admitted> {
        let mut evicted = Vec::new();
        if !self.cache.insert_pinned(hash, 0, &mut evicted) {
            return None;
        }
        let leaves = evicted.pop().and_then(|victim| Some((victim, self.held.remove(victim.0)?)));
        let slot = leaves.as_ref().map(|(_, held)| held.slot).or_else(|| self.free.pop())?;
        self.held.insert(hash.0, Held { slot, digest: 0, tokens: tokens.into(), ready: false, bad: false });
        Some(Admitted { slot, leaves })
    }

    /// Marks an admitted block as arrived.
    pub(super) fn arrived(&mut self, hash: BlockHash, digest: u64) {
        if let Some(held) = self.held.get_mut(hash.0) {
            held.digest = digest;
            held.ready = true;
        }
    }

    /// Marks a pinned block as bad. False if it already is, or if the slot holds another block by now.
    pub(super) fn mark_bad(&mut self, hash: BlockHash, slot: u32) -> bool {
        match self.held.get_mut(hash.0) {
            Some(held) if held.ready && held.slot == slot => {
                (held.ready, held.bad) = (false, true);
                true
            }
            _ => false,
        }
    }

    /// Removes one pin from each block.
    pub(super) fn unpin(&mut self, blocks: &[BlockHash]) {
        self.cache.unpin(blocks);
        for &hash in blocks {
            let bad = self.held.get(hash.0).is_some_and(|held| held.bad);
            if bad && self.cache.pins(hash) == 0 {
                self.cancel(hash);
            }
        }
    }

    /// Removes an admitted block whose bytes did not arrive.
    pub(super) fn cancel(&mut self, hash: BlockHash) {
        self.cache.remove(hash);
        self.free.extend(self.held.remove(hash.0).map(|held| held.slot));
    }

    /// All blocks that can be served, in order.
    pub(super) fn hashes(&self) -> Vec<BlockHash> {
        self.held.ids_where(|held| held.ready).into_iter().map(BlockHash).collect()
    }
}

/// Number of slots that fit into `bytes` bytes.
pub(super) fn slots(layout: &Layout, bytes: u64) -> u32 {
    // `BlockCache` counts up to 2^32 - 2.
    to_u32((bytes / layout.block_bytes as u64).min(u64::from(u32::MAX) - 2))
}
