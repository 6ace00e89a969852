//! Instances that become slower during a run, for what-if questions.

use super::error::suggestion;
use super::resolve::positive;
use super::{FleetFileError, InstancePool, raw};

/// Instances of a pool that become slower during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolSlowdown {
    /// Index of the pool.
    pub pool: usize,
    /// Index of the instance in the pool; none means all.
    pub instance: Option<u32>,
    /// Start of the slowdown in seconds of the trace.
    pub from_s: f64,
    /// Factor by which steps take longer.
    pub times: f64,
    /// Whether the fleet machine's cost model changes too.
    pub told: bool,
}

pub(super) fn resolve(raw: &raw::Slowdown, pools: &[InstancePool]) -> Result<PoolSlowdown, FleetFileError> {
    let place = format!("[[slowdown]] of pool '{}'", raw.pool);
    let Some(pool) = pools.iter().position(|pool| pool.name == raw.pool) else {
        let near = suggestion(&raw.pool, pools.iter().map(|pool| pool.name.as_str()));
        return Err(FleetFileError::value(place, format!("no pool is called '{}'{near}", raw.pool)));
    };
    let count = pools[pool].count;
    if let Some(instance) = raw.instance.filter(|&instance| instance >= count) {
        let cause = format!("is {instance}; the pool has {count} instances, counted from 0");
        return Err(FleetFileError::value(format!("{place}: instance"), cause));
    }
    if !(raw.from_s.is_finite() && raw.from_s >= 0.0) {
        let cause = format!("is {}; it must be 0 or more", raw.from_s);
        return Err(FleetFileError::value(format!("{place}: from_s"), cause));
    }
    positive(&format!("{place}: times"), raw.times)?;
    let raw::Slowdown { instance, from_s, times, told, .. } = *raw;
    Ok(PoolSlowdown { pool, instance, from_s, times, told })
}
