//! Picks any instance: the baseline that every other policy must beat.

use super::super::{Arrival, Fleet, Role};
use super::Pick;
use mixfleet_hal::cast::to_usize;

pub(super) fn picks(fleet: &mut Fleet, arrival: &Arrival) -> Vec<Pick> {
    let any = |fleet: &mut Fleet, can: fn(Role) -> bool| {
        let able: Vec<usize> = fleet.able_for(arrival, can).map(|(at, _)| at).collect();
        (!able.is_empty()).then(|| able[to_usize(fleet.random.below(able.len() as u64))])
    };
    let Some(prefill) = any(fleet, Role::prefills) else { return Vec::new() };
    let own = arrival.may_use(&fleet.loads[prefill].spec, Role::decodes).then_some(prefill);
    let decode = own.or_else(|| any(fleet, Role::decodes));
    decode.map(|decode| Pick { prefill, decode, pull: None }).into_iter().collect()
}
