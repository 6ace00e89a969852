//! What a search for plans found.

use crate::repair::FleetTrial;
use crate::stress::{FleetStress, most_robust};
use mixfleet_hal::StoredAs;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::margin::ERROR_UNKNOWN;
use mixfleet_scheduler::plan::market::{FormedFleet, PlannedPool};
use mixfleet_scheduler::plan::shortfall::Shortfall;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::FleetFile;

/// Fleets that hold which are wanted, so that the cheapest is compared with others.
const SHOWN: usize = 3;
/// How many times as much as the cheapest these may cost.
const DEARER_MAX: f64 = 1.5;
/// Maximum rent of a single-part fleet to consider, as a multiple of the cheapest one's. Fleets with more
/// instances of one kind than needed hold the objective, and can then exchange some for another kind.
const DEARER_OF_ONE_PART_MAX: f64 = 1.25;

/// A fleet that was simulated.
pub struct ProvenFleet {
    /// The pools in use.
    pub pools: Vec<PlannedPool>,
    /// Its rent.
    pub usd_per_hour: f64,
    /// What the program asked for it.
    pub planned_usd_per_hour: f64,
    /// The run with these pools.
    pub trial: FleetTrial,
    /// Whether instances of its pools were exchanged for others as far as that saves.
    pub exchanged: bool,
    /// For each pool the run with one instance less.
    pub less: Vec<Option<FleetTrial>>,
    /// Whether no single instance can be spared for sure.
    pub least: bool,
    /// Likely relative error of its times, by rent, where it is known.
    pub likely_error: Option<f64>,
    /// How it stands more load and slower devices.
    pub stress: FleetStress,
    /// How its weights are stored.
    pub stored: StoredAs,
    /// What its instances have for KV beside their devices.
    pub tiers: PlannedTiers,
    /// The policy that places its requests.
    pub policy: Policy,
    /// As FLEET.toml.
    pub text: String,
    /// Its parts, each once, in order.
    pub ids: Vec<&'static str>,
    /// The same, read.
    pub file: FleetFile,
}

impl ProvenFleet {
    /// Whether all devices are of one part.
    pub fn is_homogeneous(&self) -> bool {
        self.ids.len() == 1
    }

    /// Whether the fleet uses attention offload.
    pub fn is_apart(&self) -> bool {
        is_apart(&self.pools)
    }

    /// Whether devices that compute prompts attend to a part of what others decode.
    pub fn has_spare(&self) -> bool {
        has_spare(&self.pools)
    }

    /// Whether it costs as much as a cheaper fleet within model error.
    pub fn ties_with(&self, cheaper: &ProvenFleet) -> bool {
        let errors = [self, cheaper].map(|fleet| (fleet.usd_per_hour, fleet.likely_error));
        tie(errors, self.ids == cheaper.ids && self.stored == cheaper.stored)
    }
}

pub(crate) fn is_apart(pools: &[PlannedPool]) -> bool {
    pools.iter().any(|pool| pool.attends.is_some())
}

pub(crate) fn has_spare(pools: &[PlannedPool]) -> bool {
    pools.iter().any(|pool| pool.spare.is_some())
}

/// Whether a price ties with a lower one, given the likely error of each one's times. Errors of the same
/// parts in one dtype are common to both.
fn tie([(usd, error), (cheaper, its_error)]: [(f64, Option<f64>); 2], same_parts: bool) -> bool {
    let [a, b] = [error, its_error].map(|error| error.unwrap_or(ERROR_UNKNOWN));
    let error = if same_parts { 0.0 } else { a.hypot(b) };
    usd <= cheaper * (1.0 + error)
}

/// Outcome for the cheapest fleet with attention offload.
pub enum ApartFound {
    /// There is none, for this reason.
    None(String),
    /// The cheapest by rates; among the fleets that hold, it or one with separate prefill instances.
    Planned(FormedFleet),
}

impl From<Result<FormedFleet, String>> for ApartFound {
    fn from(found: Result<FormedFleet, String>) -> Self {
        found.map_or_else(ApartFound::None, ApartFound::Planned)
    }
}

/// What a search found.
pub struct PlanFound {
    /// The fleets that meet the objective, cheapest first.
    pub fleets: Vec<ProvenFleet>,
    /// The fleet that came nearest, if none did.
    pub nearest: Option<ProvenFleet>,
    /// Rent below which no fleet carries the load by rates; `None` if none can be planned.
    pub lower_bound: Option<f64>,
    /// What binds, where no fleet can be planned.
    pub shortfall: Vec<Shortfall>,
    /// The cheapest fleet with attention offload.
    pub apart: ApartFound,
    /// The cheapest fleet in which devices that compute prompts attend.
    pub spare: ApartFound,
    /// Number of fleets that the program ranked.
    pub ranked: usize,
    /// Number of fleets that were tried with host memory or disks for KV.
    pub with_tiers: usize,
    /// Whether all simulations came to their end.
    pub complete: bool,
    /// Whether the user ended it before that.
    pub interrupted: bool,
}

impl PlanFound {
    /// The rent of the cheapest fleet that holds, of one part if requested; infinite if there is none.
    pub(crate) fn least_usd(&self, homogeneous: bool) -> f64 {
        let of = self.fleets.iter().filter(|fleet| !homogeneous || fleet.is_homogeneous());
        of.map(|fleet| fleet.usd_per_hour).fold(f64::INFINITY, f64::min)
    }

    /// The rent from which on a fleet is not worth a run.
    pub(crate) fn most_usd(&self, homogeneous: bool) -> f64 {
        let mut rents: Vec<f64> = self.fleets.iter().map(|fleet| fleet.usd_per_hour).collect();
        rents.sort_by(f64::total_cmp);
        let shown = rents.get(SHOWN - 1).copied().unwrap_or(f64::INFINITY);
        let most = shown.min(DEARER_MAX * self.least_usd(false));
        if homogeneous { most.max(DEARER_OF_ONE_PART_MAX * self.least_usd(true)) } else { most }
    }

    /// The cheapest fleet of one part, where another costs less.
    pub fn dearer_homogeneous(&self) -> Option<&ProvenFleet> {
        self.fleets
            .iter()
            .skip(1)
            .find(|fleet| fleet.is_homogeneous())
            .filter(|_| !self.fleets[0].is_homogeneous())
    }

    /// The fleet that best withstands more load and slower devices, of those near the cheapest.
    pub fn most_robust(&self) -> Option<usize> {
        let fleets: Vec<_> = self.fleets.iter().map(|fleet| (fleet.usd_per_hour, fleet.stress)).collect();
        most_robust(&fleets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_price_within_the_likely_errors_of_both_is_a_tie_unless_the_parts_are_the_same() {
        // 5 and 12 % come to 13 %
        let with = |usd: f64| [(usd, Some(0.12)), (100.0, Some(0.05))];
        assert!(tie(with(112.9), false) && !tie(with(113.1), false));
        assert!(!tie(with(100.1), true) && tie(with(100.0), true));
        // an unknown error counts as 30 %
        let unknown = |usd: f64| [(usd, None), (100.0, Some(0.0))];
        assert!(tie(unknown(129.9), false) && !tie(unknown(130.1), false));
    }
}
