//! Picks any instance: the baseline that every other policy must beat.

use super::super::{Fleet, Role};
use super::Pick;
use mixfleet_hal::cast::to_usize;

pub(super) fn picks(fleet: &mut Fleet) -> Vec<Pick> {
    let any = |fleet: &mut Fleet, can: fn(Role) -> bool| {
        let able: Vec<usize> = fleet.able(can).map(|(at, _)| at).collect();
        (!able.is_empty()).then(|| able[to_usize(fleet.random.below(able.len() as u64))])
    };
    let Some(prefill) = any(fleet, Role::prefills) else { return Vec::new() };
    let own = fleet.loads[prefill].spec.role.decodes().then_some(prefill);
    let decode = own.or_else(|| any(fleet, Role::decodes));
    decode.map(|decode| Pick { prefill, decode, pull: None }).into_iter().collect()
}
