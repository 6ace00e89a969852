//! Events by which a pool reports what its tiers hold.

use mixfleet_scheduler::kv::{BlockHash, Tier};

/// A block came to a tier, or left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolEvent {
    /// The block's hash.
    pub hash: BlockHash,
    /// The tier: DRAM or SSD.
    pub tier: Tier,
    /// Whether the block came to the tier; false if it left.
    pub stored: bool,
}

/// What a pool holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Blocks in host memory, in order.
    pub dram: Vec<BlockHash>,
    /// Blocks on the disk, in order.
    pub ssd: Vec<BlockHash>,
}

/// Events that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct Events(Vec<PoolEvent>);

impl Events {
    pub(super) fn add(&mut self, hash: BlockHash, tier: Tier, stored: bool) {
        self.0.push(PoolEvent { hash, tier, stored });
    }

    pub(super) fn take(&mut self) -> Vec<PoolEvent> {
        std::mem::take(&mut self.0)
    }
}
