//! The KV node of `mixfleet worker --role kv`: host memory and a disk for KV that others computed.

use super::WorkerArgs;
use crate::args::TierArgs;
use crate::digest::Digest;
use crate::failure::UsageError;
use crate::model::LoadedModel;
use crate::{backends, start, tiers};
use anyhow::Result;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::{GIB, UsdPerHour};
use mixfleet_runtime::engine::{Identity, InstanceLimits, Loaded};
use mixfleet_scheduler::batch::BatchLimits;
use mixfleet_scheduler::cost::CostModel;
use std::sync::Arc;

/// Its name among devices.
const NODE: &str = "kv";

/// Refuses a KV node without memory, and flags of devices, which it has none of.
pub(super) fn check(args: &WorkerArgs) -> Result<()> {
    if !args.role.keeps() {
        return Ok(());
    }
    let instances = &args.instances;
    let no_device = |flag: &str| {
        let message =
            format!("{flag}: a KV node (--role kv) has no device that it could be of; leave it out");
        Err(UsageError(message).into())
    };
    if instances.tiers.kv_dram.is_none() {
        let message = "--role kv needs --kv-dram GIB, the host memory for other workers' KV";
        return Err(UsageError(message.into()).into());
    }
    match instances {
        _ if !instances.device.is_empty() => no_device("--device"),
        _ if !instances.profile.is_empty() => no_device("--profile"),
        _ if instances.attn_split.is_some() => no_device("--attn-split"),
        _ if instances.sequences.is_some() => no_device("--sequences"),
        _ if args.model.chunk.is_some() => no_device("--chunk"),
        _ if args.model.kv_memory.is_some() => no_device("--kv-memory"),
        _ => match instances.usd_per_hour.iter().find(|price| price.device != NODE) {
            Some(price) => {
                let message = format!(
                    "--usd-per-hour {}: no such device; write {NODE}=USD for a KV node",
                    price.device
                );
                Err(UsageError(message).into())
            }
            None => Ok(()),
        },
    }
}

/// Opens the node's memory, and its disk, with its rent. With a disk, half of the memory is for transfers to
/// and from it.
pub(super) fn open(
    args: &WorkerArgs,
    model: &LoadedModel,
    identity: &Identity,
    digest: &Digest,
) -> Result<(Loaded, CostModel, Option<f64>)> {
    let (instances, config) = (&args.instances, Arc::new(model.checkpoint.config.clone()));
    let all = instances.tiers.kv_dram.unwrap_or_default();
    let with_disk = instances.tiers.kv_ssd.is_some();
    let kept = if with_disk { all / 2.0 } else { all };
    let usd_per_hour = instances.usd_per_hour.last().map(|price| price.usd_per_hour);
    let limits = InstanceLimits {
        activations: model.activations,
        kv: model.kv,
        kv_bytes: to_u64(kept * GIB as f64),
        step_tokens_max: BatchLimits::STEP_TOKENS_MAX,
        prefill_tokens_beside_decode_max: None,
        sequences_max: BatchLimits::SEQUENCES_MAX,
        block_tokens: Some(BatchLimits::BLOCK_TOKENS),
    };
    let loaded = Loaded::keeping(&config, backends::memory(NODE)?, usd_per_hour.map(UsdPerHour), limits)?;
    let below = TierArgs { kv_dram: with_disk.then_some(all - kept), ..instances.tiers.clone() };
    let loaded = match tiers::of(&below, NODE, start::namespace(identity, model, digest))? {
        Some(below) => loaded.with_lower_tiers(below, &start::region)?,
        None => loaded,
    };
    Ok((loaded, Loaded::predicted_idle(), usd_per_hour))
}
