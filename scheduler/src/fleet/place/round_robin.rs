//! Picks instances in turn, prefill and decode each in their own order.

use super::super::{Arrival, Fleet, Role};
use super::Pick;
use mixfleet_hal::cast::to_usize;

pub(super) fn picks(fleet: &mut Fleet, arrival: &Arrival) -> Vec<Pick> {
    let turn = |fleet: &Fleet, can: fn(Role) -> bool, turn: u64| {
        let count = fleet.able_for(arrival, can).count() as u64;
        fleet.able_for(arrival, can).nth(to_usize(turn.checked_rem(count)?)).map(|(at, _)| at)
    };
    let Some(prefill) = turn(fleet, Role::prefills, fleet.turns) else { return Vec::new() };
    let own = arrival.may_use(&fleet.loads[prefill].spec, Role::decodes).then_some(prefill);
    let decode = own.or_else(|| turn(fleet, Role::decodes, fleet.turns));
    fleet.turns += 1;
    decode.map(|decode| Pick { prefill, decode, pull: None }).into_iter().collect()
}
