//! The tiers below an instance's device: KV that the device's memory evicts goes to a [`Pool`], and is loaded
//! from there.
//!
//! A block is copied when it is evicted, not when it is computed: its KV is still in its page then, because
//! the worker copies it before it writes to the page, and blocks that are reused while on the device cost no
//! traffic. Blocks that only a lost device held are lost with it, and are computed again.
//!
//! Blocks are loaded while steps of other sequences run (`loading.rs`), unless computing them is predicted to
//! be better.

use super::pages::{InstanceKv, KvSpan};
use super::pinning::Pinner;
use super::worker::{Action, Worker};
use crate::engine::messages::FromWorker;
use crate::env::SharedEnv;
use crate::metrics::{DeviceLabels, Metrics, TierLabels};
use crate::model::ModelConfig;
use crate::model::graph::StepShape;
use crate::pool::{
    Kept, Lease, MakeRegion, Pool, PoolConfig, PoolError, PoolEvent, PoolStats, Snapshot, SsdConfig,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use mixfleet_hal::cast::{to_i64, to_u32, to_usize};
use mixfleet_hal::memory::Pinned;
use mixfleet_hal::{Error, Queue, Result};
use mixfleet_scheduler::batch::{Evicted, RequestId, Text};
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::collections::{BTreeSet, VecDeque};
use std::future::{pending, ready};

/// Factor by which the measured cost of the disk may differ from the reported one.
const COST_DRIFT: f64 = 1.25;

/// Configuration of the tiers below an instance's device.
pub struct LowerTiers {
    /// Bytes of host memory, which must hold at least one block.
    pub dram_bytes: u64,
    /// A disk for blocks that host memory evicts.
    pub ssd: Option<SsdConfig>,
    /// Digest of everything that must be equal before blocks of earlier processes may be used. The disk is
    /// used once it is known, or never if it resolves to none.
    pub namespace: BoxFuture<'static, Option<u64>>,
}

impl LowerTiers {
    /// Opens the pool of an instance of such a model, with the disk if its namespace is known already.
    pub(super) fn open(
        self,
        (config, shape): (&ModelConfig, &StepShape),
        make_region: &MakeRegion,
    ) -> Result<(Pool, Option<PendingDisk>)> {
        let LowerTiers { dram_bytes, ssd, mut namespace } = self;
        let known = namespace.as_mut().now_or_never();
        let pool = PoolConfig {
            block_bytes: u64::from(shape.block_tokens) * config.kv_bytes_per_token(shape.kv),
            block_tokens: shape.block_tokens,
            namespace: known.flatten().unwrap_or_default(),
            dram_bytes,
            ssd: ssd.clone().filter(|_| known.flatten().is_some()),
        };
        let pool = Pool::new(pool, make_region).map_err(refused)?;
        // Errors that can be found now are reported to the operator.
        ssd.as_ref().filter(|_| known.is_none()).map_or(Ok(()), |ssd| pool.check(ssd)).map_err(refused)?;
        let namespace = match known {
            Some(known) => Box::pin(ready(known)),
            None => namespace,
        };
        Ok((pool, ssd.map(|ssd| PendingDisk { ssd, namespace })))
    }
}

/// The disk of a pool, opened or to be opened.
pub(super) struct PendingDisk {
    ssd: SsdConfig,
    namespace: BoxFuture<'static, Option<u64>>,
}

impl PendingDisk {
    /// Starts the disk's thread. If that fails, a disk that is not open yet is left out.
    pub(super) fn start_disk(self, pool: &Pool, device: &str, env: &SharedEnv) {
        let PendingDisk { ssd, namespace } = self;
        if let Err(error) = pool.start_disk(ssd, namespace, &format!("disk below {device}"), env) {
            tracing::warn!(device, %error, "the disk below the device has no thread");
        }
    }
}

/// An instance's lower tiers.
pub(super) struct InstanceTiers {
    /// The instance, in metrics.
    device: String,
    pub(super) pool: Pool,
    /// Pins the pool's host memory.
    _pinned: Vec<Pinned>,
    /// Bytes of a block: `[layers, page_tokens, 2, kv_heads, head_dim]`, as it is sent.
    block_bytes: u64,
    /// Number of blocks that fit into host memory.
    dram_blocks: usize,
    /// Whether the cost of loading from the disk was reported.
    reported_disk: bool,
    /// Measured seconds per byte from host memory to the device.
    upload_s: f64,
    /// Reported seconds per byte from the disk to host memory.
    read_s: f64,
    counted: PoolStats,
}

impl InstanceTiers {
    /// Pins the pool's host memory.
    pub(super) fn new(device: String, pool: Pool, block_bytes: u64, pinner: &Pinner) -> Self {
        let dram_bytes: u64 = pool.regions().iter().map(|region| region.size_bytes()).sum();
        InstanceTiers {
            device,
            _pinned: pool.regions().iter().filter_map(|region| pinner.pin(region)).collect(),
            block_bytes,
            dram_blocks: to_usize(dram_bytes / block_bytes),
            reported_disk: false,
            pool,
            upload_s: 0.0,
            read_s: 0.0,
            counted: PoolStats::default(),
        }
    }

    /// Begins a turn of the worker, which resets the time that it may wait for the disk.
    pub(super) fn begin_turn(&self) {
        self.pool.begin_turn();
    }

    /// Copies an evicted block, which is in its page still, to host memory.
    pub(super) fn keep(
        &self,
        Evicted { hash, tokens, page }: &EvictedBlock,
        kv: &mut InstanceKv,
        queues: &mut [&mut dyn Queue],
    ) -> Result<Kept> {
        let span = block(kv, page);
        self.pool.keep(*hash, tokens, &mut |place| kv.read(queues, &span, place))
    }

    /// Measured time to load this many blocks from host memory, and from the disk.
    pub(super) fn load_s(&self, [in_memory, on_disk]: [usize; 2]) -> f64 {
        let bytes = |blocks: usize| (blocks as u64 * self.block_bytes) as f64;
        bytes(in_memory + on_disk) * self.upload_s + bytes(on_disk) * self.read_s
    }

    /// Number of blocks that fit into host memory.
    pub(super) fn dram_blocks(&self) -> usize {
        self.dram_blocks
    }

    /// The blocks that the tiers hold, by tier.
    pub(super) fn held(&self) -> impl Iterator<Item = (Tier, BlockHash)> + use<> {
        let Snapshot { dram, ssd, .. } = self.pool.snapshot();
        let dram = dram.into_iter().map(|hash| (Tier::Dram, hash));
        dram.chain(ssd.into_iter().map(|hash| (Tier::Ssd, hash)))
    }

    /// Completes when a disk was added or lost, or others left KV here; never for an instance without lower
    /// tiers.
    pub(super) fn changed(below: Option<&InstanceTiers>) -> BoxFuture<'static, ()> {
        match below.map(|below| below.pool.clone()) {
            Some(pool) => Box::pin(async move { pool.changed().await }),
            None => Box::pin(pending()),
        }
    }

    fn costs(&mut self) -> Vec<(Tier, LinkCost)> {
        let cost = |seconds_per_byte| LinkCost { seconds_per_byte, ..LinkCost::default() };
        self.reported_disk = self.pool.has_disk();
        let disk = self.reported_disk.then(|| (Tier::Ssd, cost(self.upload_s + self.read_s)));
        std::iter::once((Tier::Dram, cost(self.upload_s))).chain(disk).collect()
    }

    /// Learns from `blocks` that were read from the disk in `seconds`. True if the cost must be reported
    /// again.
    pub(super) fn learn(&mut self, blocks: u64, seconds: f64) -> bool {
        let measured = seconds / (blocks * self.block_bytes).max(1) as f64;
        let (told, is) = (self.upload_s + self.read_s, self.upload_s + measured);
        let off = is > told * COST_DRIFT || told > is * COST_DRIFT;
        if off {
            self.read_s = measured;
        }
        off
    }

    fn count(&mut self, metrics: &Metrics) {
        let device = &self.device;
        let now = self.pool.stats();
        let labels = |tier| TierLabels { device: device.clone(), tier };
        for (tier, hits, before, blocks) in [
            ("dram", now.hits_dram, self.counted.hits_dram, now.dram_blocks),
            ("ssd", now.hits_ssd, self.counted.hits_ssd, now.ssd_blocks),
        ] {
            metrics.kv_tier_hits.get_or_create(&labels(tier)).inc_by(hits - before);
            metrics.kv_tier_blocks.get_or_create(&labels(tier)).set(to_i64(blocks));
        }
        metrics.kv_tier_out.get_or_create(&labels("ssd")).set(i64::from(now.ssd_out.is_some()));
        let outages = now.ssd_outages - self.counted.ssd_outages;
        metrics.kv_tier_outages.get_or_create(&labels("ssd")).inc_by(outages);
        let bad = metrics.kv_tier_bad.get_or_create(&DeviceLabels { device: device.clone() }).clone();
        bad.inc_by(now.bad - self.counted.bad);
        self.counted = now;
    }
}

/// A block that the device's memory gives up.
pub(super) type EvictedBlock = Evicted<Box<[u32]>>;

/// All layers of a page.
pub(super) fn block<'a>(kv: &InstanceKv, page: &'a u32) -> KvSpan<'a> {
    let (pages, tokens) = (std::slice::from_ref(page), 0..kv.shape.page_tokens);
    KvSpan { layers: 0..kv.layers, pages, tokens, wire: kv.shape.dtype }
}

fn refused(error: PoolError) -> Error {
    match error {
        PoolError::Hal(error) => error,
        other => Error::invalid(format!("the lower tiers of the KV cache: {other}")),
    }
}

impl Worker {
    /// Reports the blocks that lower tiers hold from before, and the measured cost of loading them.
    pub(super) fn begin_tiers(&mut self) -> Result<()> {
        let Worker { below: Some(below), env, kv, steps, .. } = self else { return Ok(()) };
        // The contents do not matter: slot 0 and page 0 are not used yet.
        let (slot, bytes) = (below.pool.regions()[0].clone(), below.block_bytes);
        let (span, mut queues) = (block(kv, &0), steps.copy_queues());
        let mut least = f64::INFINITY;
        for _ in 0..3 {
            let start = env.now();
            let mut written = Ok(());
            slot.view(0, bytes, &mut |payload| written = kv.write(&mut queues, &span, payload))?;
            written?;
            least = least.min((env.now() - start).0);
        }
        below.upload_s = least / bytes as f64;
        let held = below.pool.begin_to_follow();
        self.tell_costs();
        if !held.ssd.is_empty() {
            self.report(FromWorker::Stored { tier: Tier::Ssd, hashes: held.ssd });
        }
        Ok(())
    }

    /// Pins the blocks to be loaded that are in host memory, if there are any to load.
    pub(super) fn lease_wanted(&self, actions: &[Action]) -> Option<Lease> {
        actions.iter().find_map(|action| match action {
            Action::Load { request, blocks, chain } => {
                let tokens = self.machine.text(*request)?.of_blocks(blocks.clone()).to_vec();
                Some(self.below.as_ref()?.pool.begin_lease(chain, &tokens))
            }
            _ => None,
        })
    }

    /// Loads the leading blocks of `chain` into host memory, as far as they are there and there is room.
    pub(super) fn lease(&mut self, chain: &[BlockHash], tokens: &[u32]) -> Option<Lease> {
        let below = self.below.as_mut()?;
        let start = self.env.now();
        let before = below.pool.stats().hits_ssd;
        let lease = below.pool.lease(chain, tokens);
        let read = below.pool.stats().hits_ssd - before;
        if read > 0 && below.learn(read, (self.env.now() - start).0) {
            self.tell_costs();
        }
        Some(lease)
    }

    /// Tells the fleet what it takes to load from the lower tiers.
    pub(super) fn tell_costs(&mut self) {
        for (tier, cost) in self.below.as_mut().map(InstanceTiers::costs).unwrap_or_default() {
            self.report(FromWorker::Tier { tier, cost });
        }
    }

    /// Copies evicted blocks to lower tiers before they are overwritten. Those in pages of a sequence that
    /// waits for blocks are returned, and copied beside steps. If `lease` and the loads in progress leave no
    /// room, they are dropped: the disk keeps their blocks.
    pub(super) fn keep_evicted(
        &mut self,
        actions: &[Action],
        lease: &mut Option<Lease>,
    ) -> Result<VecDeque<EvictedBlock>> {
        let Worker { below: Some(below), kv, steps, loads, machine, .. } = self else {
            return Ok(VecDeque::new());
        };
        let waiting = actions.iter().find_map(|action| match action {
            Action::Load { request, .. } => Some(machine.pages(*request)),
            _ => None,
        });
        let waiting: BTreeSet<u32> = waiting.into_iter().flatten().copied().collect();
        let evicted = actions.iter().filter_map(|a| if let Action::Evicted(e) = a { Some(e) } else { None });
        let (later, now): (Vec<_>, Vec<_>) =
            evicted.flatten().partition(|block| waiting.contains(&block.page));
        let mut queues = steps.copy_queues();
        for block in &now {
            if below.keep(block, kv, &mut queues)? == Kept::Full && below.pool.has_disk() {
                let leases = loads.iter_mut().map(|load| &mut load.lease).chain([&mut *lease]);
                if leases.filter_map(Option::take).count() > 0 {
                    below.keep(block, kv, &mut queues)?;
                }
            }
        }
        let later = later.into_iter().cloned().collect();
        if !now.is_empty() {
            self.report_tiers();
        }
        Ok(later)
    }

    /// Copies the whole blocks of a request's prompt, whose KV is in its pages, to host memory for external
    /// engines, as far as there is room.
    pub(super) fn keep_prompt(&mut self, request: RequestId) -> Result<()> {
        let Worker { below: Some(below), kv, steps, machine, active, limits, .. } = self else {
            return Ok(());
        };
        let Some(active) = active.get(&request) else { return Ok(()) };
        let blocks = active.wanted.prompt_ids.len() / limits.block_tokens as usize;
        let pages: Vec<u32> = machine.pages(request).iter().copied().take(blocks).collect();
        let Some(text) = machine.text_mut(request) else { return Ok(()) };
        let mut queues = steps.copy_queues();
        // the last one first, so that it leaves host memory first
        for (at, page) in pages.iter().enumerate().take(below.dram_blocks).rev() {
            let at = to_u32(at);
            let (hash, tokens, span) = (text.hash(at), text.block(at), block(kv, page));
            below.pool.keep(hash, &tokens, &mut |place| kv.read(&mut queues, &span, place))?;
        }
        self.report_tiers();
        Ok(())
    }

    /// Reports the pool's events in order, and counts them.
    pub(super) fn report_tiers(&mut self) {
        let Some(below) = &mut self.below else { return };
        below.count(&self.metrics);
        let events = below.pool.take_events();
        if !below.reported_disk && below.pool.has_disk() {
            self.tell_costs();
        }
        for alike in events.chunk_by(|a, b| (a.tier, a.stored) == (b.tier, b.stored)) {
            let PoolEvent { tier, stored, .. } = alike[0];
            let hashes: Vec<BlockHash> = alike.iter().map(|event| event.hash).collect();
            self.report(match stored {
                true => FromWorker::Stored { tier, hashes },
                false => FromWorker::Evicted { tier, hashes },
            });
        }
    }
}
