//! What other prices would change: of the fleets that were simulated, and of the parts by the program.

use super::Planned;
use super::found::ProvenFleet;
use super::stress::FACTORS;
use mixfleet_hal::units::{Ordered, UsdPerHour};
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::market::{Market, PlannedPool};

/// Break-evens that are shown, those nearest to the parts' prices.
const SHOWN: usize = 4;

/// A price of the first fleet's dearest part at which another fleet is cheaper.
pub(super) struct Repriced {
    pub(super) part: usize,
    /// On its price.
    pub(super) factor: f64,
    /// The fleet that is the cheapest then.
    pub(super) cheapest: usize,
}

/// The factors on the price of the first fleet's dearest part under which it is no longer the first.
pub(super) fn repriced(market: &Market, fleets: &[ProvenFleet]) -> Vec<Repriced> {
    let Some(best) = fleets.first() else { return Vec::new() };
    let rent = |part: usize| {
        let devices: u64 = best.pools.iter().map(|pool| pool.devices_of(part)).sum();
        market.parts()[part].usd_per_hour.0 * devices as f64
    };
    let parts = best.pools.iter().flat_map(PlannedPool::takes).map(|(part, _)| part);
    let Some(part) = parts.max_by_key(|part| Ordered(rent(*part))) else { return Vec::new() };
    let cheapest = |factor: f64| {
        let dearer = market.at_price(part, market.parts()[part].usd_per_hour * factor);
        (0..fleets.len())
            .min_by_key(|at| Ordered(dearer.usd_per_hour(&fleets[*at].pools, fleets[*at].stored).0))
    };
    let all =
        FACTORS.iter().filter_map(|&factor| Some(Repriced { part, factor, cheapest: cheapest(factor)? }));
    all.filter(|repriced| repriced.cheapest != 0).collect()
}

/// The price at which a part would enter or leave the first place: between the fleets that were simulated,
/// or, where all or none of these have it, by the program. `None` where the program contradicts them.
pub(super) fn break_even(market: &Market, fleets: &[ProvenFleet], part: usize) -> Option<BreakEven> {
    let offer = &market.parts()[part];
    let own = offer.usd_per_hour.0;
    let devices = |fleet: &ProvenFleet| {
        let all: u64 = fleet.pools.iter().map(|pool| pool.devices_of(part)).sum();
        all.saturating_sub(offer.owned.into()) as f64
    };
    let is_in = fleets.first().is_some_and(|first| devices(first) > 0.0);
    let rivals = fleets.iter().filter(|fleet| devices(fleet) == 0.0).map(|fleet| fleet.usd_per_hour);
    let rival = rivals.fold(f64::INFINITY, f64::min);
    // the price at which each fleet with the part costs as much as the best without
    let with = fleets.iter().filter(|fleet| devices(fleet) > 0.0);
    let at = with.map(|fleet| own + (rival - fleet.usd_per_hour) / devices(fleet)).fold(0.0, f64::max);
    let by_rates = || market.break_even(&Microlp, part);
    match (is_in, by_rates) {
        (true, _) if rival.is_finite() => Some(BreakEven::At(UsdPerHour(at))),
        (true, by_rates) => {
            Some(by_rates()).filter(|known| !matches!(known, BreakEven::At(usd) if usd.0 < own))
        }
        (false, by_rates) => match by_rates() {
            // a fleet that was given up may need less of it than those that were simulated to the end
            BreakEven::At(usd) if usd.0 < own => Some(BreakEven::At(UsdPerHour(usd.0.max(at)))),
            BreakEven::Useless if at == 0.0 => Some(BreakEven::Useless),
            _ => (at > 0.0).then_some(BreakEven::At(UsdPerHour(at))),
        },
    }
}

/// The break-evens nearest to the parts' prices, in words.
pub(super) fn break_evens(planned: &Planned<'_>) -> Vec<String> {
    let offers = planned.offers.parts.iter().zip(planned.break_evens);
    let at = offers.filter_map(|(offer, known)| match known {
        Some(BreakEven::At(usd)) => Some((offer, *usd)),
        Some(BreakEven::Useless | BreakEven::Indispensable) | None => None,
    });
    let mut near: Vec<(f64, String)> = at
        .map(|(offer, UsdPerHour(usd))| {
            let (name, own) = (offer.name(), offer.usd_per_hour.0);
            let word = if own <= usd { "would leave above" } else { "would enter below" };
            ((usd / own).ln().abs(), format!("{name} (${own:.3}/h) {word} ${usd:.3}/h"))
        })
        .collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    near.into_iter().take(SHOWN).map(|(_, words)| words).collect()
}
