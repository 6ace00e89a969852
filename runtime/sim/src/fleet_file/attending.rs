//! Instances with attention offload.

use super::cost::{Hardware, Refusal};
use super::{FleetFileError, FleetSources, Model, raw};
use mixfleet_hal::profile::Predictor;
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_scheduler::cost::{
    Attending, AttnSplit, CostModel, KvCopyCost, LinkCost, LockstepCost, ModelShape, Partition,
};
use mixfleet_scheduler::engines::KnownEngine;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// Devices of an instance that keep its KV and run attention, beside those with the weights.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttentionDevices {
    /// The catalog's id of the device, if known.
    pub device: Option<String>,
    /// Their number.
    pub count: u32,
    /// How they divide the KV.
    pub split: AttnSplit,
}

/// What stands before the two devices.
pub(super) const WORD: &str = "attn:";

/// The devices of a pool that are written as `attn:A,B`.
pub(super) fn names(pool: &raw::RawPool) -> Result<Option<[&str; 2]>, FleetFileError> {
    let wrong =
        |key: &str, cause: String| FleetFileError::value(format!("pool '{}': {key}", pool.name), cause);
    let Some(names) = pool.device.as_deref().and_then(|device| device.strip_prefix(WORD)) else {
        let keys = [
            ("attn_devices", pool.attn_devices.is_some()),
            ("attn_split", pool.attn_split.is_some()),
            ("attn_batches", pool.attn_batches.is_some()),
            ("attn_link", pool.attn_link.is_some() && pool.attn_pool.is_none()),
        ];
        return match keys.into_iter().find(|(_, given)| *given) {
            Some((key, _)) => Err(wrong(key, format!("needs device = \"{WORD}A,B\" beside it"))),
            None => Ok(None),
        };
    };
    let names: Vec<&str> = names.split(',').map(str::trim).collect();
    match <[&str; 2]>::try_from(names) {
        Ok(names) if names.iter().all(|name| !name.is_empty()) => Ok(Some(names)),
        _ => {
            let cause = format!(
                "needs two parts, \"{WORD}A,B\": A has the weights and B attends; devices_per_instance and \
                 attn_devices say how many there are of each"
            );
            Err(wrong("device", cause))
        }
    }
}

/// The link to the attention devices, if the file states one.
pub(super) fn link(pool: &raw::RawPool) -> Result<Option<LinkCost>, FleetFileError> {
    let link = pool.attn_link.as_ref().map(|link| match link.gb_per_s > 0.0 && link.latency_s >= 0.0 {
        true => Ok(LinkCost {
            latency: Seconds(link.latency_s),
            seconds_per_byte: 1.0 / (link.gb_per_s * GB),
            usd_per_byte: 0.0,
        }),
        false => {
            let cause = "needs gb_per_s above 0 and latency_s of 0 or more";
            Err(FleetFileError::value(format!("pool '{}': attn_link", pool.name), cause))
        }
    });
    link.transpose()
}

/// The devices that attend in the instances of a pool.
pub(super) struct AttendingHardware {
    pub(super) hardware: Hardware,
    pub(super) count: u32,
    split: Option<AttnSplit>,
    staggered: bool,
    link: Option<LinkCost>,
}

impl AttendingHardware {
    /// `None` if the pool's instances have none.
    pub(super) fn of(
        pool: &raw::RawPool,
        directory: &Path,
        sources: FleetSources<'_>,
    ) -> Result<Option<Self>, FleetFileError> {
        let Some([_, name]) = names(pool)? else { return Ok(None) };
        let wrong =
            |key: &str, cause: String| FleetFileError::value(format!("pool '{}': {key}", pool.name), cause);
        let beside = [
            ("calibration", pool.calibration.is_some()),
            ("profile", pool.profile.is_some()),
            ("pipeline_stages", pool.pipeline_stages.is_some()),
            ("expert_parallel", pool.expert_parallel),
            ("experts_by_member", pool.experts_by_member),
        ];
        if let Some((key, _)) = beside.into_iter().find(|(_, given)| *given) {
            return Err(wrong(
                key,
                format!("cannot be combined with a device \"{WORD}...\"; give one of them"),
            ));
        }
        let count = pool.attn_devices.unwrap_or(1);
        if count == 0 {
            return Err(wrong("attn_devices", "is 0; it must be at least 1".into()));
        }
        let split = pool.attn_split.as_deref().map(str::parse).transpose();
        let split = split.map_err(|cause| wrong("attn_split", cause))?;
        let staggered = match pool.attn_batches.unwrap_or(2) {
            1 => false,
            2 => true,
            other => return Err(wrong("attn_batches", format!("is {other}; known are 1 and 2"))),
        };
        let hardware = Hardware::named(pool, Some(name), directory, sources)?;
        Ok(Some(AttendingHardware { hardware, count, split, staggered, link: link(pool)? }))
    }

    fn split(&self, shape: &ModelShape) -> AttnSplit {
        self.split.unwrap_or_else(|| AttnSplit::even(shape, self.count))
    }

    /// Which devices have which part of a model.
    pub(super) fn partition(&self, model: &Model) -> Result<(Partition, ModelShape), Refusal> {
        let missing = || ("device", "is missing the model's shape, without which nothing is divided".into());
        let shape = model.shape.as_ref().ok_or_else(missing)?;
        let partition = Partition::attention(shape, self.count, self.split(shape));
        Ok((partition.map_err(|cause| ("device", cause))?, shape.clone()))
    }

    /// The cost model of an instance whose weights are on `first`, and its origin. What crosses has the
    /// instance's network, unless the file says otherwise.
    pub(super) fn cost(
        &self,
        first: &Hardware,
        (pool, model): (&raw::RawPool, &Model),
        chunk_tokens: u32,
        engine: &KnownEngine,
        nic_gb_per_s: f64,
    ) -> Result<(CostModel, String), Refusal> {
        let (partition, _) = self.partition(model)?;
        let (products, basis) = first.profiled(pool, model, chunk_tokens, engine)?;
        let unknown = || ("device", "the second part has no profile of its operations".into());
        let (profile, attends) = self.hardware.profile().ok_or_else(unknown)?;
        let by = Arc::new(Predictor::new(&products.profile));
        let network = LockstepCost::network(BytesPerSecond(nic_gb_per_s * GB));
        let how = Attending { staggered: self.staggered, ..Attending::STAGGERED };
        let attends_by = Arc::new(Predictor::new(profile));
        let others = vec![attends_by; self.count as usize];
        let first = (&products, LockstepCost::products(&products, &by, how));
        let cost = LockstepCost::new(&partition, first, &others, self.link.unwrap_or(network), how);
        let cost = CostModel::Lockstep(Arc::new(cost.map_err(|cause| ("device", cause))?));
        let split = partition.split().unwrap_or_default();
        let basis = format!("{basis}; attention by {split} on {} others: {attends}", self.count);
        Ok((cost.compiled(), basis))
    }

    /// Tokens of KV that fit, and how that was counted.
    pub(super) fn kv_tokens(&self, model: &Model, known: &KnownEngine) -> Result<Option<f64>, Refusal> {
        let (partition, shape) = self.partition(model)?;
        let bytes = model.kv_bytes_per_token * partition.kv_copies(&shape);
        let usable = self.hardware.usable_memory(known);
        Ok(usable.map(|usable| usable * f64::from(self.count) / bytes))
    }

    /// What copies of KV take of the steps.
    pub(super) fn kv_copies(&self) -> KvCopyCost {
        self.hardware.kv_copies(self.count)
    }

    /// As the fleet has them.
    pub(super) fn devices(&self, model: &Model) -> AttentionDevices {
        AttentionDevices {
            device: self.hardware.part.map(|part| part.id.to_owned()),
            count: self.count,
            split: model.shape.as_ref().map_or_else(AttnSplit::default, |shape| self.split(shape)),
        }
    }
}
