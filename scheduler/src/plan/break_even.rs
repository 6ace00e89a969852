//! The price at which a part would enter or leave the cheapest fleet.
//!
//! Both are one number: where the cheapest fleet with the part costs as much as the cheapest one without it.
//! Fleets are the programs' optima over one or two parts at the other parts' prices; nothing is simulated.

use super::linear::Solver;
use super::market::Market;
use mixfleet_hal::units::UsdPerHour;
use serde::Serialize;

/// Halvings of the range of prices.
const HALVINGS: u32 = 8;
/// The highest price that is tried, as a multiple of the part's own.
const TIMES_MAX: f64 = 16.0;

/// The price at which a part would enter or leave the cheapest fleet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BreakEven {
    /// The price of a device, within 1 %: below it the part is in the cheapest fleet.
    At(UsdPerHour),
    /// No price brings it in: it serves too little, or at any price others do it as well.
    Useless,
    /// No price up to 16 times its own brings it out.
    Indispensable,
}

impl Market {
    /// The price at which the part of this index would enter or leave the cheapest fleet.
    pub fn break_even(&self, solver: &dyn Solver, part: usize) -> BreakEven {
        let own = self.parts()[part].usd_per_hour.0;
        let (with, without): (Vec<_>, Vec<_>) = (self.forms().into_iter().flatten())
            .partition(|form| form.parts().is_some_and(|parts| parts.contains(&part)));
        let rival =
            self.best_of(solver, without, 1).first().map_or(f64::INFINITY, |fleet| fleet.usd_per_hour.0);
        let mut market = self.clone();
        let mut wins = |price: f64| {
            market.ask.parts[part].usd_per_hour = UsdPerHour(price);
            market.costs_less(solver, &with, rival)
        };
        let (mut low, mut high) = (own, own);
        if wins(own) {
            while wins(high) {
                if high >= TIMES_MAX * own {
                    return BreakEven::Indispensable;
                }
                (low, high) = (high, 2.0 * high);
            }
        } else {
            while !wins(low) {
                if low < own / TIMES_MAX.powi(2) {
                    return BreakEven::Useless;
                }
                (low, high) = (0.5 * low, low);
            }
        }
        for _ in 0..HALVINGS {
            let middle = 0.5 * (low + high);
            if wins(middle) { low = middle } else { high = middle }
        }
        BreakEven::At(UsdPerHour(low))
    }
}
