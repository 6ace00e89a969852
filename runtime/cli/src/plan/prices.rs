//! What other prices would change: of the fleets that were simulated, and of the parts by the program.

use super::Planned;
use super::search::ProvenFleet;
use super::stress::FACTORS;
use mixfleet_hal::units::{Ordered, UsdPerHour};
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::market::Market;

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
        let own = best.pools.iter().filter(|pool| pool.part == part);
        own.map(|pool| market.rent(part, pool.devices).0 * f64::from(pool.count)).sum::<f64>()
    };
    let parts = best.pools.iter().map(|pool| pool.part);
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

/// The break-evens nearest to the parts' prices, in words.
pub(super) fn break_evens(planned: &Planned<'_>) -> Vec<String> {
    let offers = planned.offers.parts.iter().zip(planned.break_evens);
    let at = offers.filter_map(|(offer, known)| match known {
        BreakEven::At(usd) => Some((offer, *usd)),
        BreakEven::Useless | BreakEven::Indispensable => None,
    });
    let mut near: Vec<(f64, String)> = at
        .map(|(offer, UsdPerHour(usd))| {
            let (name, own) = (offer.name(), offer.usd_per_hour.0);
            let word = if own < usd { "would leave above" } else { "would enter below" };
            ((usd / own).ln().abs(), format!("{name} (${own:.3}/h) {word} ${usd:.3}/h"))
        })
        .collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    near.into_iter().take(SHOWN).map(|(_, words)| words).collect()
}
