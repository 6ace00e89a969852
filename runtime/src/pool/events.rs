//! What a pool tells of its tiers.

use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::collections::VecDeque;

/// A block came to a tier, or left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolEvent {
    /// Counted from 1; the number 0 is what a pool held when it was opened.
    pub sequence: u64,
    /// Which block.
    pub hash: BlockHash,
    /// Where: DRAM or SSD.
    pub tier: Tier,
    /// Whether it came.
    pub stored: bool,
}

/// What a pool held after its event `sequence`: for `PrefixIndex::resync`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The number of the last event that it contains; 0 before the first.
    pub sequence: u64,
    /// Blocks in host memory, in order.
    pub dram: Vec<BlockHash>,
    /// Blocks on the disk, in order.
    pub ssd: Vec<BlockHash>,
}

/// Events that nobody took yet. The oldest go when there are too many: their numbers are missing then, and
/// whoever counts asks for a snapshot.
#[derive(Debug)]
pub(super) struct Events {
    last: u64,
    waiting: VecDeque<PoolEvent>,
    waiting_max: usize,
}

impl Events {
    pub(super) fn new(waiting_max: usize) -> Self {
        Events { last: 0, waiting: VecDeque::new(), waiting_max }
    }

    pub(super) fn add(&mut self, hash: BlockHash, tier: Tier, stored: bool) {
        self.last += 1;
        if self.waiting.len() == self.waiting_max {
            self.waiting.pop_front();
        }
        if self.waiting_max > 0 {
            self.waiting.push_back(PoolEvent { sequence: self.last, hash, tier, stored });
        }
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn take(&mut self) -> Vec<PoolEvent> {
        self.waiting.drain(..).collect()
    }
}
