//! What other prices would change: of the fleets that were simulated, and of the parts by the program.

use crate::cores::on_all_cores;
use crate::found::ProvenFleet;
use crate::stress::FACTORS;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Ordered, UsdPerHour};
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::market::{FormedFleet, Market, PlannedPool};

/// Prices of each of two parts at which the cheapest fleet is found, and their range around the parts' own.
const PRICES: usize = 9;
const RANGE: f64 = 2.0;

/// A price of the first fleet's dearest part at which another fleet is cheaper.
pub struct Repriced {
    /// Index of the part among those on offer.
    pub part: usize,
    /// Factor on its price.
    pub factor: f64,
    /// Index of the fleet that is the cheapest then.
    pub cheapest: usize,
}

/// The factors on the price of the first fleet's dearest part under which it is no longer the first.
pub fn repriced(market: &Market, fleets: &[ProvenFleet]) -> Vec<Repriced> {
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

/// Returns for each part the price at which it would enter or leave the first place, where there is a first
/// place; computed on all cores.
pub fn break_evens(market: &Market, fleets: &[ProvenFleet]) -> Vec<Option<BreakEven>> {
    let parts = if fleets.is_empty() { 0 } else { market.parts().len() };
    on_all_cores(parts, |part| break_even(market, fleets, part))
}

/// The price at which a part would enter or leave the first place: between the fleets that were simulated,
/// or, where all or none of these have it, by the program. `None` where the program contradicts them.
fn break_even(market: &Market, fleets: &[ProvenFleet], part: usize) -> Option<BreakEven> {
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
            // an abandoned fleet may need fewer instances than the fully simulated ones
            BreakEven::At(usd) if usd.0 < own => Some(BreakEven::At(UsdPerHour(usd.0.max(at)))),
            BreakEven::Useless if at == 0.0 => Some(BreakEven::Useless),
            _ => (at > 0.0).then_some(BreakEven::At(UsdPerHour(at))),
        },
    }
}

/// The cheapest fleet at a price of each of two parts.
pub struct PricedFleet {
    /// The prices.
    pub usd_per_hour: [f64; 2],
    /// The fleet, by the program.
    pub fleet: FormedFleet,
}

/// Finds the cheapest fleet of the parts of `fleets` at prices of two parts around their own, on all cores.
pub fn price_map(market: &Market, fleets: &[ProvenFleet], pair: [usize; 2]) -> Vec<PricedFleet> {
    let mut parts: Vec<usize> = fleets.iter().flat_map(|fleet| &fleet.pools).map(|pool| pool.part).collect();
    parts.sort_unstable();
    parts.dedup();
    let own = pair.map(|part| market.parts()[part].usd_per_hour.0);
    let at = |own: f64, step: usize| {
        let share = f64::from(to_u32(step)) / f64::from(to_u32(PRICES - 1));
        own * RANGE.powf(2.0 * share - 1.0)
    };
    let cells = on_all_cores(PRICES * PRICES, |cell| {
        let usd_per_hour = [at(own[0], cell % PRICES), at(own[1], cell / PRICES)];
        let market = market.at_price(pair[0], UsdPerHour(usd_per_hour[0]));
        let market = market.at_price(pair[1], UsdPerHour(usd_per_hour[1]));
        Some(PricedFleet { usd_per_hour, fleet: market.cheapest_of(&Microlp, &parts)? })
    });
    cells.into_iter().flatten().collect()
}
