//! Pools of KV nodes, which have host memory, perhaps a disk, and a network interface.

use super::resolve::{
    DRAM_GB_PER_S, SSD_GB_PER_S, at_least_one, not_negative, positive, tokens_or_bytes, wrong,
};
use super::{Engine, FleetFileError, InstancePool, Kv, Model, TierSize, raw};
use mixfleet_hal::units::GIB;
use mixfleet_scheduler::batch::BatchLimits;
use mixfleet_scheduler::cost::{Coefficients, CostModel, KvCopyCost};

/// Keys in the file that only an instance with devices may have.
fn of_devices(raw: &raw::RawPool) -> impl Iterator<Item = &'static str> {
    let keys = [
        ("flexible", raw.flexible),
        ("device", raw.device.is_some()),
        ("profile", raw.profile.is_some()),
        ("calibration", raw.calibration.is_some()),
        ("devices_per_instance", raw.devices_per_instance != 1),
        ("engine", raw.engine.is_some()),
        ("interconnect", raw.interconnect.is_some()),
        ("expert_parallel", raw.expert_parallel),
        ("experts_by_member", raw.experts_by_member),
        ("expert_skew", raw.expert_skew.is_some()),
        ("pipeline_stages", raw.pipeline_stages.is_some()),
        ("attn_pool", raw.attn_pool.is_some()),
        ("attn_pool_share", raw.attn_pool_share.is_some()),
        ("pipeline_chunk_tokens", raw.pipeline_chunk_tokens.is_some()),
        ("cache_tokens", raw.cache_tokens.is_some()),
        ("cache_bytes", raw.cache_bytes.is_some()),
        ("dram_gb_per_s", raw.dram_gb_per_s.is_some()),
        ("max_batched_tokens", raw.max_batched_tokens.is_some()),
        ("max_prefill_tokens_beside_decode", raw.max_prefill_tokens_beside_decode.is_some()),
        ("max_sequences", raw.max_sequences.is_some()),
    ];
    keys.into_iter().filter(|(_, given)| *given).map(|(key, _)| key)
}

/// Resolves a pool of KV nodes. Transfers of a node go over its network interface, which is slower than its
/// memory.
pub(super) fn pool(
    raw: &raw::RawPool,
    model: &Model,
    kv: Kv,
    place: &str,
) -> Result<InstancePool, FleetFileError> {
    let key = |key: &str| format!("{place}: {key}");
    at_least_one(&key("count"), raw.count)?;
    if let Some(given) = of_devices(raw).next() {
        return Err(wrong(key(given), "is of devices, and a pool of role \"kv\" has none; leave it out"));
    }
    let tokens = tokens_or_bytes(place, "dram", raw.dram_tokens, raw.dram_bytes, model)?.unwrap_or(0);
    if tokens < u64::from(kv.block_tokens) {
        let cause = format!(
            "{tokens} tokens of KV are less than one block of {}; a pool of role \"kv\" needs them, or dram_bytes",
            kv.block_tokens
        );
        return Err(wrong(key("dram_tokens"), cause));
    }
    let ssd_tokens = tokens_or_bytes(place, "ssd", raw.ssd_tokens, raw.ssd_bytes, model)?.unwrap_or(0);
    let ssd = TierSize { tokens: ssd_tokens, gb_per_s: raw.ssd_gb_per_s.unwrap_or(SSD_GB_PER_S) };
    positive(&key("ssd_gb_per_s"), ssd.gb_per_s)?;
    // as in `worker`, half of the memory is then for transfers to and from the disk
    let below = if ssd_tokens > 0 { tokens / 2 } else { 0 };
    let (cache_tokens, dram) = (tokens - below, TierSize { tokens: below, gb_per_s: DRAM_GB_PER_S });
    let nic_gb_per_s = raw.nic_gb_per_s.unwrap_or(InstancePool::NIC_GB_PER_S);
    positive(&key("nic_gb_per_s"), nic_gb_per_s)?;
    let gib = tokens as f64 * model.kv_bytes_per_token / GIB as f64;
    let (usd_per_hour, price_basis) = match (raw.usd_per_hour, raw.usd_per_gib_hour) {
        (Some(_), Some(_)) => {
            return Err(wrong(place, "has usd_per_hour and usd_per_gib_hour; give one of them"));
        }
        (Some(usd), None) => (Some(usd), "stated in the fleet file".to_owned()),
        (None, Some(usd)) => (Some(usd * gib), format!("{gib:.0} GiB at ${usd} per hour")),
        (None, None) => (None, "no offer known".to_owned()),
    };
    not_negative(&key("usd_per_hour"), usd_per_hour.unwrap_or(0.0))?;
    Ok(InstancePool {
        name: raw.name.clone(),
        role: raw.role,
        count: raw.count,
        device: None,
        own_device: None,
        devices_per_instance: 1,
        attention: None,
        spare: None,
        pipeline_stages: 1,
        cost: CostModel::Coefficients(Coefficients::default()),
        cost_basis: "nothing: it only keeps KV".into(),
        kv_copies: KvCopyCost::default(),
        likely_error: None,
        price_stated: usd_per_hour.is_some(),
        usd_per_hour,
        price_basis,
        cache_tokens,
        dram,
        ssd,
        nic_gb_per_s,
        engine: Engine {
            max_batched_tokens: BatchLimits::STEP_TOKENS_MAX,
            max_prefill_tokens_beside_decode: None,
            max_sequences: BatchLimits::SEQUENCES_MAX,
        },
    })
}
