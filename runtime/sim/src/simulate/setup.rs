//! Building a fleet from a fleet file.

use super::{InstanceSetup, KV, PoolBasis, Setup, TierSetup};
use crate::fleet_file::{AttentionDevices, FleetFile, InstancePool, TierSize};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::{GB, Seconds, UsdPerHour};
use mixfleet_scheduler::batch::{BatchLimits, PageDevices, PageParts};
use mixfleet_scheduler::cost::{AttnSplit, LinkCost};
use mixfleet_scheduler::fleet::{Admission, FleetConfig, Instance, InstanceId, Policy, Replicate};
use mixfleet_scheduler::kv::Tier;
use std::sync::Arc;

/// Options that are not in a fleet file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choices {
    /// The rule that picks placements.
    pub policy: Policy,
    /// The requests that are rejected on arrival.
    pub admission: Admission,
    /// Seed of policies that need one.
    pub seed: u64,
}

fn tiers(pool: &InstancePool) -> Vec<TierSetup> {
    let of = |tier, store: &TierSize| {
        let cost = LinkCost { seconds_per_byte: 1e-9 / store.gb_per_s, ..LinkCost::default() };
        (store.tokens > 0).then_some(TierSetup { tier, tokens: store.tokens, cost })
    };
    [of(Tier::Dram, &pool.dram), of(Tier::Ssd, &pool.ssd)].into_iter().flatten().collect()
}

/// The pages of an instance's blocks, as `serve` has them: layers with a window give back what no token reads
/// where there are no tiers below, no stages, and pages are not divided among devices.
fn page_parts(file: &FleetFile, pool: &InstancePool) -> PageParts {
    let divided = |others: &AttentionDevices| others.split != AttnSplit::Head;
    let whole = pool.role.keeps()
        || !tiers(pool).is_empty()
        || pool.pipeline_stages > 1
        || pool.spare.is_some()
        || pool.attention.as_ref().is_some_and(divided);
    match file.model.shape.as_ref().filter(|_| !whole) {
        Some(shape) => shape.window_pages().parts,
        None => PageParts::ONE,
    }
}

fn limits(file: &FleetFile, pool: &InstancePool) -> BatchLimits {
    let (block_tokens, sequences_max) = (file.kv.block_tokens, pool.engine.max_sequences as usize);
    let blocks_total = u32::try_from(pool.cache_tokens / u64::from(block_tokens)).unwrap_or(u32::MAX);
    BatchLimits {
        blocks_total,
        block_tokens,
        step_tokens_max: pool.engine.max_batched_tokens,
        prefill_tokens_beside_decode_max: pool.engine.max_prefill_tokens_beside_decode,
        sequences_max,
        spare_blocks: BatchLimits::spare_blocks(blocks_total, sequences_max),
        lower_tiers: !tiers(pool).is_empty(),
        cache_policy: file.kv.policy,
        page_devices: PageDevices::ONE,
        page_parts: page_parts(file, pool),
    }
}

impl PoolBasis {
    fn of(pool: &InstancePool) -> Self {
        PoolBasis { times_from: pool.cost_basis.clone(), likely_error: pool.likely_error }
    }
}

impl Setup {
    /// Whether instances attend for others.
    pub fn shares(&self) -> bool {
        self.instances.iter().any(|instance| !instance.lenders.is_empty())
    }

    /// Default `max_tokens` of requests.
    pub const MAX_TOKENS: u32 = 4096;

    /// The fleet that `file` describes.
    pub fn new(file: &FleetFile, choices: Choices) -> Self {
        let mut instances = Vec::new();
        let (pools, mut first) = (file.lent(), Vec::new());
        for (at, pool) in pools.iter().enumerate() {
            first.push(to_u32(instances.len()));
            let nic = LinkCost { seconds_per_byte: 1e-9 / pool.nic_gb_per_s, ..LinkCost::default() };
            let limits = limits(file, pool);
            let spec = Instance {
                id: InstanceId(0),
                device: pool.device_words().into(),
                role: pool.role,
                pool: to_u32(at),
                cost: Arc::new(pool.cost.clone()),
                price: pool.usd_per_hour.map(UsdPerHour),
                kv_capacity_tokens: limits.kv_tokens(),
                nic: Some(nic),
                kv_block_tokens: limits.block_tokens,
                kv_dtype: KV,
                prefill_tokens_beside_decode_max: limits.prefill_tokens_beside_decode_max,
                step_tokens_max: limits.step_tokens_max,
                kv_copies: pool.kv_copies,
                kv_parts: limits.page_parts.clone(),
            };
            let instance = InstanceSetup { spec, limits, tiers: tiers(pool), lenders: Vec::new() };
            instances.extend(std::iter::repeat_n(instance, pool.count as usize));
        }
        for (borrowing, pool) in pools.iter().enumerate() {
            let Some((lending, who)) = file.lending(borrowing) else { continue };
            let own = instances.iter_mut().skip(first[borrowing] as usize).take(pool.count as usize);
            for (number, instance) in (0..).zip(own) {
                instance.lenders = who.lenders_of(number).map(|lender| first[lending] + lender).collect();
            }
        }
        let mut pool_links = Vec::new();
        for (from, a) in file.pools.iter().enumerate() {
            for (to, b) in file.pools.iter().enumerate() {
                let Some(link) = file.link(&a.name, &b.name) else { continue };
                let cost = LinkCost {
                    latency: Seconds(link.latency_s),
                    seconds_per_byte: link.gb_per_s.map_or(0.0, |rate| 1e-9 / rate),
                    usd_per_byte: link.usd_per_gb * 1e-9,
                };
                pool_links.push((to_u32(from), to_u32(to), cost));
            }
        }
        let config = FleetConfig {
            ttft_slo: Some(Seconds(file.slo.ttft_s)),
            tbt_slo: Some(Seconds(file.slo.tbt_s)),
            tbt_share: file.slo.tbt_metric.share(),
            policy: choices.policy,
            admission: choices.admission,
            pull: true,
            rebalance: file.rebalance.clone(),
            replicate: file.kv.replicate_gb_per_s.map(|rate| Replicate::new(rate * GB)),
            seed: choices.seed,
            ..FleetConfig::new(to_u64(file.model.kv_bytes_per_token.round()), file.model.layers)
        };
        Setup {
            fleet: config,
            max_tokens: Setup::MAX_TOKENS,
            block_tokens: file.kv.block_tokens,
            pools: file.pools.iter().map(|pool| pool.name.clone()).collect(),
            bases: file.pools.iter().map(PoolBasis::of).collect(),
            instances,
            pool_links,
            slo: file.slo,
            classes: file.classes.clone(),
            routers: file.routers,
            slowdowns: file.slowdowns.clone(),
        }
    }
}
