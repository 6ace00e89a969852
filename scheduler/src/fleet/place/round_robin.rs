//! Picks instances in turn, prefill and decode each in their own order.

use super::super::{Fleet, Role};
use super::Pick;
use mixfleet_hal::cast::to_usize;

pub(super) fn picks(fleet: &mut Fleet) -> Vec<Pick> {
    let turn = |fleet: &Fleet, can: fn(Role) -> bool, turn: u64| {
        let count = fleet.able(can).count() as u64;
        fleet.able(can).nth(to_usize(turn.checked_rem(count)?)).map(|(at, _)| at)
    };
    let Some(prefill) = turn(fleet, Role::prefills, fleet.turns) else { return Vec::new() };
    let own = fleet.loads[prefill].spec.role.decodes().then_some(prefill);
    let decode = own.or_else(|| turn(fleet, Role::decodes, fleet.turns));
    fleet.turns += 1;
    decode.map(|decode| Pick { prefill, decode, pull: None }).into_iter().collect()
}
