//! Host memory and disks for the KV of a planned fleet: below its devices, or of nodes of their own.

use super::market::PlannedPool;
use super::program::Duty;
use mixfleet_hal::units::{Bytes, UsdPerHour};
use serde::Serialize;

/// What each instance of a fleet that computes prompts has for KV beside its devices, or what its KV nodes
/// have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PlannedTiers {
    /// Host memory.
    pub dram: Bytes,
    /// Disk, for what host memory gives up.
    pub ssd: Bytes,
    /// Rent of both, of one instance or node.
    pub usd_per_hour: UsdPerHour,
    /// KV nodes that have them; if there are none, the instances have.
    pub nodes: u32,
}

impl PlannedTiers {
    /// Whether instances of a pool have tiers: decode instances receive their KV and have none.
    pub fn are_of(&self, pool: &PlannedPool) -> bool {
        self.nodes == 0 && self.dram.0 > 0.0 && pool.duty != Duty::Decode
    }

    /// Rent of the tiers of all nodes, or of all instances of some pools.
    pub fn rent(&self, pools: &[PlannedPool]) -> UsdPerHour {
        let own = pools.iter().filter(|pool| self.are_of(pool));
        let instances: f64 = own.map(|pool| f64::from(pool.count)).sum();
        self.usd_per_hour * (instances + f64::from(self.nodes))
    }
}
