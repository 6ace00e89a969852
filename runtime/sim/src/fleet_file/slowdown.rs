//! Instances that become slower during a run, for what-if questions.

use super::error::suggestion;
use super::resolve::{not_negative, positive};
use super::{FleetFileError, InstancePool};

/// Instances of a pool that become slower during a run.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSlowdown {
    /// Name of the pool.
    pub pool: String,
    /// Index of the instance in the pool; none means all.
    pub instance: Option<u32>,
    /// Start of the slowdown in seconds of the trace.
    pub from_s: f64,
    /// Factor by which steps take longer.
    pub times: f64,
    /// Whether the fleet machine's cost model changes too.
    #[serde(default)]
    pub told: bool,
}

pub(super) fn check(slowdown: &PoolSlowdown, pools: &[InstancePool]) -> Result<(), FleetFileError> {
    let name = &slowdown.pool;
    let place = format!("[[slowdown]] of pool '{name}'");
    let Some(&InstancePool { count, .. }) = pools.iter().find(|pool| pool.name == *name) else {
        let near = suggestion(name, pools.iter().map(|pool| pool.name.as_str()));
        return Err(FleetFileError::value(place, format!("no pool is called '{name}'{near}")));
    };
    if let Some(instance) = slowdown.instance.filter(|&instance| instance >= count) {
        let cause = format!("is {instance}; the pool has {count} instances, counted from 0");
        return Err(FleetFileError::value(format!("{place}: instance"), cause));
    }
    not_negative(&format!("{place}: from_s"), slowdown.from_s)?;
    positive(&format!("{place}: times"), slowdown.times)
}
