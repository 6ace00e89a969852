//! Host memory and disks below the devices of a planned fleet.

use super::market::PlannedPool;
use super::program::Duty;
use mixfleet_hal::units::{Bytes, UsdPerHour};
use serde::Serialize;

/// What each instance of a fleet that computes prompts has for KV beside its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PlannedTiers {
    /// Host memory.
    pub dram: Bytes,
    /// Disk, for what host memory gives up.
    pub ssd: Bytes,
    /// Rent of both, of one instance.
    pub usd_per_hour: UsdPerHour,
}

impl PlannedTiers {
    /// Whether instances of a pool have them: those that only decode are handed their KV.
    pub fn are_of(&self, pool: &PlannedPool) -> bool {
        self.dram.0 > 0.0 && pool.duty != Duty::Decode
    }

    /// Rent of those of all instances of some pools.
    pub fn rent(&self, pools: &[PlannedPool]) -> UsdPerHour {
        let own = pools.iter().filter(|pool| self.are_of(pool));
        self.usd_per_hour * own.map(|pool| f64::from(pool.count)).sum::<f64>()
    }
}
