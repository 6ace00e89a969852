//! Searches for the cheapest fleets, and verifies by simulation which of them hold an objective.
//!
//! [`mixfleet_scheduler::plan`] ranks fleets by rates. [`search`] simulates the ranked fleets: those that
//! miss the objective get more instances ([`growth`]), and those that hold lose instances until none can be
//! spared ([`repair`]). [`found`] has the results, [`stress`] their margins beyond the plan, [`hours`] the
//! plan of each hour, [`prices`] the effect of other prices, and [`order`] the order in which models share a
//! limited stock.
//!
//! Absent by design: arguments, files, output, placement decisions. The caller gets progress reports and can
//! stop a search.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod cores;
pub mod found;
pub mod growth;
pub mod hours;
pub mod order;
pub mod prices;
pub mod repair;
pub mod search;
pub mod stress;

use cores::on_all_cores;
use mixfleet_scheduler::plan::market::{Market, MarketAsk};
use mixfleet_scheduler::plan::offered::PartOnOffer;
use mixfleet_sim::fleet_file::FleetFileError;
use mixfleet_sim::trace::TraceError;

/// Why a search ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file of a planned fleet cannot be read.
    #[error(transparent)]
    FleetFile(#[from] FleetFileError),
    /// The requests cannot be simulated.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// The result of a search.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns the market of the offers; rates are computed on all cores.
pub fn market_of(ask: MarketAsk) -> Market {
    let rates = on_all_cores(ask.parts.len(), |part| PartOnOffer::new(&ask, part));
    Market::of(ask, rates)
}
