//! Pools whose instances keep a part of their KV on devices that compute prompts, which attend to it.

use super::cost::{Hardware, Refusal};
use super::{FleetFile, FleetFileError, InstancePool, Model, attending, raw};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::profile::Predictor;
use mixfleet_hal::units::{BytesPerSecond, GB};
use mixfleet_scheduler::cost::{CostModel, Lending, LinkCost, LockstepCost, SpareCost, SpareDevices};
use mixfleet_scheduler::engines::KnownEngine;
use mixfleet_scheduler::fleet::Role;
use serde::Serialize;
use std::sync::Arc;

/// The pool whose devices attend to a part of the requests of another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SparePool {
    /// Its name.
    pub pool: String,
    /// Share of its instances' room for KV that is lent, if the file states one.
    pub share: Option<f64>,
    /// Devices of one of its instances.
    pub devices: u32,
}

/// The devices that a pool borrows.
pub(super) struct SpareHardware<'a> {
    lender: &'a raw::RawPool,
    hardware: &'a Hardware,
    share: Option<f64>,
    link: Option<LinkCost>,
}

impl<'a> SpareHardware<'a> {
    /// `None` if the pool borrows none.
    pub(super) fn of(
        pool: &raw::RawPool,
        pools: &'a [raw::RawPool],
        hardware: &'a [Hardware],
    ) -> Result<Option<Self>, FleetFileError> {
        let wrong =
            |key: &str, cause: String| FleetFileError::value(format!("pool '{}': {key}", pool.name), cause);
        let Some(name) = &pool.attn_pool else {
            return match pool.attn_pool_share {
                Some(_) => Err(wrong("attn_pool_share", "needs attn_pool beside it".into())),
                None => Ok(None),
            };
        };
        let beside = [
            ("device", pool.device.as_ref().is_some_and(|device| device.starts_with(attending::WORD))),
            ("calibration", pool.calibration.is_some()),
            ("pipeline_stages", pool.pipeline_stages.is_some()),
            ("expert_parallel", pool.expert_parallel),
            ("experts_by_member", pool.experts_by_member),
        ];
        if let Some((key, _)) = beside.into_iter().find(|(_, given)| *given) {
            return Err(wrong("attn_pool", format!("cannot be combined with this {key}; give one of them")));
        }
        let of_all = || pools.iter().zip(hardware);
        let Some((lender, hardware)) = of_all().find(|(other, _)| other.name == *name) else {
            let near = super::error::suggestion(name, pools.iter().map(|other| other.name.as_str()));
            return Err(wrong("attn_pool", format!("no pool is called '{name}'{near}")));
        };
        if lender.role != Role::Prefill || !matches!(attending::names(lender), Ok(None)) {
            let cause = format!("'{name}' is no pool of role \"prefill\" whose devices have the whole model");
            return Err(wrong("attn_pool", cause));
        }
        if let Some(other) = pools.iter().find(|other| {
            other.name != pool.name && other.attn_pool.as_ref().is_some_and(|theirs| theirs == name)
        }) {
            let cause = format!("'{name}' attends for '{}' already, and for one pool alone", other.name);
            return Err(wrong("attn_pool", cause));
        }
        match pool.attn_pool_share {
            Some(share) if !(share > 0.0 && share < 1.0) => {
                Err(wrong("attn_pool_share", format!("is {share}; it must be above 0 and below 1")))
            }
            share => {
                let link = attending::link(pool)?;
                Ok(Some(SpareHardware { lender, hardware, share, link }))
            }
        }
    }

    /// The hardware that attends.
    pub(super) fn hardware(&self) -> &Hardware {
        self.hardware
    }

    /// The cost model of an instance whose weights are on `first`, and its origin, without borrowed devices.
    /// Exchanges use the instance's network, unless the file says otherwise.
    pub(super) fn cost(
        &self,
        first: &Hardware,
        (pool, model): (&raw::RawPool, &Model),
        chunk_tokens: u32,
        engine: &KnownEngine,
        nic_gb_per_s: f64,
    ) -> Result<(CostModel, String), Refusal> {
        let (own, basis) = first.profiled(pool, model, chunk_tokens, engine)?;
        let unknown = || ("attn_pool", "has devices without a profile of their operations".into());
        let (profile, attends) = self.hardware.profile().ok_or_else(unknown)?;
        let [by, attends_by] = [&own.profile, profile].map(|profile| Arc::new(Predictor::new(profile)));
        let link = self.link.unwrap_or(LockstepCost::network(BytesPerSecond(nic_gb_per_s * GB)));
        let spare = SpareDevices { devices: self.devices(), lent: 0.5, tenants: 2 };
        let cost = SpareCost::new((&own, &by), &attends_by, link, spare);
        let cost = CostModel::Spare(Arc::new(cost.map_err(|cause| ("attn_pool", cause))?));
        let basis =
            format!("{basis}; attention to some requests by devices of '{}': {attends}", self.lender.name);
        Ok((cost.compiled(), basis))
    }

    /// Devices of an instance that lends.
    fn devices(&self) -> u32 {
        self.lender.devices_per_instance.saturating_mul(self.lender.stages())
    }

    /// As the fleet has them.
    pub(super) fn pool(&self) -> SparePool {
        SparePool { pool: self.lender.name.clone(), share: self.share, devices: self.devices() }
    }
}

impl FleetFile {
    /// The lenders of a pool's instances: the index of the lending pool, and which lender serves which
    /// borrower. `None` if there are none.
    pub fn lending(&self, pool: usize) -> Option<(usize, Lending)> {
        let own = &self.pools[pool];
        let name = &own.spare.as_ref()?.pool;
        let lender = self.pools.iter().position(|other| other.name == *name && other.count > 0)?;
        (own.count > 0).then(|| (lender, Lending::of(self.pools[lender].count, own.count)))
    }

    /// The pools with their present numbers of instances: borrowers have more room for KV, and step costs
    /// that assume all of their lenders busy; lenders have less room.
    pub fn lent(&self) -> Vec<InstancePool> {
        let mut pools = self.pools.clone();
        for (at, own) in self.pools.iter().enumerate() {
            let Some(spare) = &own.spare else { continue };
            let Some((lender, lending)) = self.lending(at) else {
                pools[at].cost = own.cost.on_spare(SpareDevices::default());
                continue;
            };
            let room = self.pools[lender].cache_tokens;
            let share = spare.share.unwrap_or(lending.even_share());
            let left = to_u64(room as f64 * (1.0 - share)).max(self.kv.block_tokens.into()).min(room);
            let each = f64::from(lending.lenders) / f64::from(lending.borrowers);
            let borrowed = to_u64((room - left) as f64 * each);
            pools[lender].cache_tokens = left;
            pools[at].cache_tokens = own.cache_tokens.saturating_add(borrowed);
            pools[at].cost = own.cost.on_spare(SpareDevices {
                devices: spare.devices.saturating_mul(lending.lenders),
                lent: borrowed as f64 / pools[at].cache_tokens.max(1) as f64,
                tenants: lending.borrowers.saturating_add(1),
            });
        }
        pools
    }
}
