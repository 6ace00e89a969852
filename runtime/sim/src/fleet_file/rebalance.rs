//! Which pools' instances may change their role, and when.

use super::resolve::positive;
use super::{FleetFileError, raw};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Rebalance, Role};

/// Resolves the `[rebalance]` table. None if every instance keeps its role.
pub(super) fn resolve(
    raw: Option<&raw::Rebalance>,
    pools: &[raw::RawPool],
) -> Result<Option<Rebalance>, FleetFileError> {
    if let Some(pool) = pools.iter().find(|pool| pool.flexible && pool.role == Role::Auto) {
        let cause = "is true, but the role is auto, which does both already; give prefill or decode";
        return Err(FleetFileError::value(format!("pool '{}': flexible", pool.name), cause));
    }
    let flexible: Vec<u32> = (0..).zip(pools).filter(|(_, pool)| pool.flexible).map(|(at, _)| at).collect();
    if flexible.is_empty() {
        let cause = "needs a pool that has flexible = true";
        return raw.map_or(Ok(None), |_| Err(FleetFileError::value("[rebalance]", cause)));
    }
    let usual = Rebalance::new(flexible);
    let Some(raw) = raw else { return Ok(Some(usual)) };
    let rule = Rebalance {
        high: raw.high.unwrap_or(usual.high),
        low: raw.low.unwrap_or(usual.low),
        hold: raw.hold_s.map_or(usual.hold, Seconds),
        pools: usual.pools,
    };
    positive("[rebalance] high", rule.high)?;
    positive("[rebalance] low", rule.low)?;
    positive("[rebalance] hold_s", rule.hold.0)?;
    if rule.low >= rule.high {
        let cause = format!("is {}; it must be less than high, which is {}", rule.low, rule.high);
        return Err(FleetFileError::value("[rebalance] low", cause));
    }
    Ok(Some(rule))
}
