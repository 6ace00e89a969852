//! The disks below devices, which outlive workers.

use super::{BLOCK_TOKENS, Worker, World};
use futures_util::future::BoxFuture;
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::engine::Held;
use mixfleet_runtime::env::Env;
use mixfleet_runtime::metrics::{DeviceLabels, TierLabels};
use mixfleet_runtime::pool::SsdConfig;
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_wire::HostRegion;
use serde::Deserialize;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time of a read or a write: usual, slow, and hanging, some for longer than any history.
const OPERATION: Duration = Duration::from_micros(200);
const SLOW: Fault = Fault::Slow { times: 100 };
const HANG_SHORT: Duration = Duration::from_secs(1);
pub(super) const HANG_LONG: Duration = Duration::from_secs(1000);
/// Time after which a disk counts as out.
const TIMEOUT: Duration = Duration::from_millis(50);

/// Host memory with bit flips.
struct Rotting {
    memory: HostRegion,
    plan: FaultPlan,
    updates: AtomicU64,
    world: World,
}

impl SharedMemory for Rotting {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> mixfleet_hal::Result<()> {
        self.memory.view(offset, bytes, look)
    }

    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> mixfleet_hal::Result<()> {
        self.memory.update(offset, bytes, change)?;
        let update = self.updates.fetch_add(1, Ordering::Relaxed);
        if self.plan.at(update).is_none() {
            return Ok(());
        }
        self.world.count("rotten in host memory", 1);
        let bit = self.plan.bit(update, bytes);
        self.memory.update(offset + bit / 8, 1, &mut |byte| byte[0] ^= 1 << (bit % 8))
    }

    fn mapping(&self) -> Option<Mapping> {
        self.memory.mapping()
    }
}

/// Faults of disks, with their probabilities per read or write.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Disks {
    /// Number of blocks that a pool may keep there.
    blocks: u64,
    /// Bit flips.
    #[serde(default)]
    rot: f64,
    /// Writes that are lost but reported as done.
    #[serde(default)]
    lost: f64,
    /// Reads and writes that fail.
    #[serde(default)]
    fail: f64,
    /// Reads and writes that are slow.
    #[serde(default)]
    slow: f64,
    /// Reads and writes that hang.
    #[serde(default)]
    hang: f64,
    /// Blocks in host memory with a bit flip.
    #[serde(default)]
    dram_rot: f64,
    /// One disk in this many has room for a third of the blocks; 0 = none.
    #[serde(default)]
    full_one_in: u64,
}

impl Disks {
    fn plan(&self, seed: u64) -> FaultPlan {
        let rates = [
            (Fault::BitFlip, self.rot),
            (Fault::Drop, self.lost),
            (Fault::Fail, self.fail),
            (SLOW, self.slow),
            (Fault::Hang, self.hang),
        ];
        // A pool that cannot read its directory's owner fails to open, which is an error for the operator:
        // such faults start later.
        let rule = |(fault, probability)| Rule { fault, probability, from: 12, until: None };
        FaultPlan { seed, rules: rates.map(rule).to_vec() }
    }

    fn bytes(&self, block_bytes: u64) -> u64 {
        // This is a frame's trailer, and its records in the journal.
        48 + self.blocks * (block_bytes + 48 + 4 * u64::from(BLOCK_TOKENS) + 128).next_multiple_of(4096)
    }

    pub(super) fn below(&self, disk: SimDisk, block_bytes: u64) -> SsdConfig {
        SsdConfig { disk: Arc::new(disk), bytes: self.bytes(block_bytes), wipe: true, timeout: TIMEOUT }
    }
}

impl World {
    /// The disk of a new worker: one that a killed worker left, or a new one.
    pub(super) fn disk(&self, block_bytes: u64) -> Option<SimDisk> {
        let disks = self.workload.disks.as_ref()?;
        let used = self.state().shelf.pop_front();
        let disk = used.unwrap_or_else(|| {
            let disk = SimDisk::with_power_losses();
            if disks.full_one_in > 0 && self.below(disks.full_one_in) == 0 {
                disk.set_room(Some(disks.bytes(block_bytes) / 3));
                self.count("disks full", 1);
            }
            disk
        });
        disk.set_plan(disks.plan(self.env.random()));
        let (world, hangs) = (self.env.clone(), [HANG_SHORT, HANG_LONG][self.below(2) as usize]);
        disk.takes(OPERATION, hangs, move |span| {
            world.block_until(world.now() + Seconds(span.as_secs_f64()));
        });
        Some(disk)
    }

    /// The namespace of a worker's disk, known at its start or later.
    pub(super) fn namespace(&self, kind: usize) -> BoxFuture<'static, Option<u64>> {
        let namespace = Some(self.kinds[kind].namespace);
        if self.workload.disks.is_none() || self.below(2) == 0 {
            return Box::pin(ready(namespace));
        }
        let known = self.env.sleep(self.span(0.3));
        Box::pin(async move {
            known.await;
            namespace
        })
    }

    /// Host memory for blocks, some of which get bit flips when they are stored.
    pub(super) fn host_memory(&self, bytes: u64) -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
        let memory = HostRegion::new(bytes as usize)?;
        let rate = self.workload.disks.as_ref().map_or(0.0, |disks| disks.dram_rot);
        let plan = FaultPlan::at_rate(Fault::BitFlip, rate, self.env.random());
        Ok(Arc::new(Rotting { memory, plan, updates: AtomicU64::new(0), world: self.clone() }))
    }

    /// Counts the faults of a disk that is no longer used.
    fn count_disk(&self, disk: &SimDisk) {
        self.count("disks slow", disk.struck(SLOW));
        self.count("disks hung", disk.struck(Fault::Hang));
        self.count("rotten on disks", disk.struck(Fault::BitFlip));
    }

    /// Counts the faults of a worker's device and disk.
    pub(super) fn count_part(&self, worker: &Worker) {
        if let Some([fails, hangs]) = &worker.struck {
            self.count("devices failed", fails.struck());
            self.count("devices hung", hangs.struck());
        }
        if let Some(disk) = &worker.disk {
            self.count_disk(disk);
        }
    }

    /// Keeps the disk of a killed worker, or after a power loss: the last writes are partial or missing.
    pub(super) fn shelve(&self, disk: Option<SimDisk>) {
        let Some(disk) = disk else { return };
        let left = if self.below(2) == 0 { disk.lose_power(self.env.random()) } else { disk.restart() };
        self.state().shelf.push_back(left);
    }

    pub(super) fn count_tiers(&self) {
        let made = self.state().workers_made;
        for device in (0..made).map(|number| format!("part{number}")) {
            let labels = |tier| TierLabels { device: device.clone(), tier };
            let hits = |tier| self.metrics.kv_tier_hits.get_or_create(&labels(tier)).get();
            self.count("blocks from host memory", hits("dram"));
            self.count("blocks from disks", hits("ssd"));
            self.count("disks out", self.metrics.kv_tier_outages.get_or_create(&labels("ssd")).get());
            let labels = DeviceLabels { device: device.clone() };
            self.count("bad blocks found", self.metrics.kv_tier_bad.get_or_create(&labels).get());
        }
    }

    /// Checks, once the fleet is idle, that every router's index equals what the workers of its kind hold, by
    /// tier.
    pub(super) async fn assert_that_routers_know_who_holds_what(&self) {
        for kind in 0..self.kinds.len() {
            let (hubs, routers) = {
                let state = self.state();
                let workers = state.workers.values().filter(|worker| worker.kind == kind);
                let hubs: Vec<_> = workers.map(|worker| worker.hub.clone()).collect();
                let routers = state.routers.values().filter(|router| router.kind == kind);
                (hubs, routers.map(|router| router.router.clone()).collect::<Vec<_>>())
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
}
