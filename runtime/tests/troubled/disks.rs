//! The disks below devices: they outlive workers.

use super::{BLOCK_TOKENS, Outcome, World};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::engine::Held;
use mixfleet_runtime::env::Env;
use mixfleet_runtime::metrics::{DeviceLabels, TierLabels};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{SSD_TIMEOUT, SsdConfig};
use serde::Deserialize;
use std::sync::Arc;

/// What breaks on disks; chances are per read or write.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Disks {
    /// Blocks that a pool may keep there.
    blocks: u64,
    /// Bits that rot.
    #[serde(default)]
    rot: f64,
    /// Writes that are lost and reported as done.
    #[serde(default)]
    lost: f64,
    /// Reads and writes that fail.
    #[serde(default)]
    fail: f64,
    /// One disk in so many has room for a third of that; 0 = none.
    #[serde(default)]
    full_one_in: u64,
}

impl Disks {
    fn plan(&self, seed: u64) -> FaultPlan {
        let rates = [(Fault::BitFlip, self.rot), (Fault::Drop, self.lost), (Fault::Fail, self.fail)];
        // Opening a pool that cannot read who owns the directory is an error for its operator: it comes first.
        let rule = |(fault, probability)| Rule { fault, probability, from: 12, until: None };
        FaultPlan { seed, rules: rates.map(rule).to_vec() }
    }

    fn bytes(&self, block_bytes: u64) -> u64 {
        // A frame's trailer, and its records in the journal.
        48 + self.blocks * (block_bytes + 48 + 4 * u64::from(BLOCK_TOKENS) + 128).next_multiple_of(4096)
    }

    pub(super) fn below(&self, disk: SimDisk, block_bytes: u64) -> SsdConfig {
        SsdConfig { disk: Arc::new(disk), bytes: self.bytes(block_bytes), wipe: true, timeout: SSD_TIMEOUT }
    }
}

impl World {
    /// The disk of a worker that starts: one that a killed worker left, or a new one.
    pub(super) fn disk(&self, block_bytes: u64) -> Option<SimDisk> {
        let disks = self.workload.disks.as_ref()?;
        let used = self.state().shelf.pop_front();
        let disk = used.unwrap_or_else(|| {
            let disk = SimDisk::with_power_losses();
            if disks.full_one_in > 0 && self.below(disks.full_one_in) == 0 {
                disk.set_room(Some(disks.bytes(block_bytes) / 3));
            }
            disk
        });
        disk.set_plan(disks.plan(self.env.random()));
        Some(disk)
    }

    /// Its worker is killed, or its host loses power: what was written last is there in part, or not at all.
    pub(super) fn shelve(&self, disk: Option<SimDisk>) {
        let Some(disk) = disk else { return };
        let left = if self.below(2) == 0 { disk.lose_power(self.env.random()) } else { disk.restart() };
        self.state().shelf.push_back(left);
    }

    pub(super) fn count_tiers(&self, outcome: &mut Outcome) {
        let made = self.state().workers_made;
        for device in (0..made).map(|number| format!("part{number}")) {
            let hits = |tier| {
                let labels = TierLabels { device: device.clone(), tier };
                self.metrics.kv_tier_hits.get_or_create(&labels).get()
            };
            outcome.dram_hits += hits("dram");
            outcome.ssd_hits += hits("ssd");
            let labels = DeviceLabels { device: device.clone() };
            outcome.bad_blocks += self.metrics.kv_tier_bad.get_or_create(&labels).get();
        }
    }

    /// All is quiet: every router's index is what the workers hold, tier by tier.
    pub(super) async fn assert_that_routers_know_who_holds_what(&self) {
        let (hubs, routers) = {
            let state = self.state();
            let hubs: Vec<_> = state.workers.values().map(|worker| worker.hub.clone()).collect();
            (hubs, state.routers.values().map(|router| router.router.clone()).collect::<Vec<_>>())
        };
        let mut truth = Held::new();
        for hub in hubs {
            truth.append(&mut hub.held().await);
        }
        for router in routers {
            let believed = router.held().await;
            assert_eq!(believed, truth, "{:?}: {:?} does not know who holds what", self.env, router.id());
        }
    }
}
