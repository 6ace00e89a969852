//! What a search for plans found.

use super::stress::{FleetStress, most_robust};
use mixfleet_hal::StoredAs;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::margin::ERROR_UNKNOWN;
use mixfleet_scheduler::plan::market::{FormedFleet, PlannedPool};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_scheduler::plan::shortfall::Shortfall;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::repair::FleetTrial;

/// Fleets that hold which are wanted, so that the cheapest is compared with others.
const SHOWN: usize = 3;
/// How many times as much as the cheapest these may cost.
const DEARER_MAX: f64 = 1.5;
/// How many times as much as the cheapest of one part others of one part may cost: with more instances of one
/// kind than needed they hold, and can then spare those of another.
const DEARER_OF_ONE_PART_MAX: f64 = 1.25;

/// A fleet that was simulated.
pub(super) struct ProvenFleet {
    /// The pools in use.
    pub(super) pools: Vec<PlannedPool>,
    pub(super) usd_per_hour: f64,
    /// What the program asked for it.
    pub(super) planned_usd_per_hour: f64,
    pub(super) trial: FleetTrial,
    /// Whether instances of its pools were exchanged for others as far as that saves.
    pub(super) exchanged: bool,
    /// For each pool the run with one instance less.
    pub(super) less: Vec<Option<FleetTrial>>,
    /// Whether no single instance can be spared for sure.
    pub(super) least: bool,
    /// Likely relative error of its times, by rent, where it is known.
    pub(super) likely_error: Option<f64>,
    /// How it stands more load and slower devices.
    pub(super) stress: FleetStress,
    /// How its weights are stored.
    pub(super) stored: StoredAs,
    /// What its instances have for KV beside their devices.
    pub(super) tiers: PlannedTiers,
    /// The policy that places its requests.
    pub(super) policy: Policy,
    /// As FLEET.toml.
    pub(super) text: String,
    /// Its parts, each once, in order.
    pub(super) ids: Vec<&'static str>,
    /// The same, read.
    pub(super) file: FleetFile,
}

impl ProvenFleet {
    pub(super) fn is_homogeneous(&self) -> bool {
        self.ids.len() == 1
    }

    /// Whether attention has devices of its own.
    pub(super) fn is_apart(&self) -> bool {
        is_apart(&self.pools)
    }

    /// Whether devices that compute prompts attend to a part of what others decode.
    pub(super) fn has_spare(&self) -> bool {
        has_spare(&self.pools)
    }

    /// Whether its price does not tell it from a cheaper one.
    pub(super) fn ties_with(&self, cheaper: &ProvenFleet) -> bool {
        let errors = [self, cheaper].map(|fleet| (fleet.usd_per_hour, fleet.likely_error));
        tie(errors, self.ids == cheaper.ids && self.stored == cheaper.stored)
    }
}

pub(super) fn is_apart(pools: &[PlannedPool]) -> bool {
    pools.iter().any(|pool| pool.attends.is_some())
}

pub(super) fn has_spare(pools: &[PlannedPool]) -> bool {
    pools.iter().any(|pool| pool.spare.is_some())
}

/// Whether a price is not told from a lower one, each with the likely error of its times. The errors of the
/// same parts in one dtype are common to both.
fn tie([(usd, error), (cheaper, its_error)]: [(f64, Option<f64>); 2], same_parts: bool) -> bool {
    let [a, b] = [error, its_error].map(|error| error.unwrap_or(ERROR_UNKNOWN));
    let error = if same_parts { 0.0 } else { a.hypot(b) };
    usd <= cheaper * (1.0 + error)
}

/// What became of the cheapest fleet of those whose attention is not where the weights are.
pub(super) enum ApartFound {
    /// There is none, for this reason.
    None(String),
    /// The cheapest by rates; among those that hold is it, or one with prompts on instances of their own.
    Planned(FormedFleet),
}

impl From<Result<FormedFleet, String>> for ApartFound {
    fn from(found: Result<FormedFleet, String>) -> Self {
        found.map_or_else(ApartFound::None, ApartFound::Planned)
    }
}

/// What a search found.
pub(super) struct PlanFound {
    /// The fleets that meet the objective, cheapest first.
    pub(super) fleets: Vec<ProvenFleet>,
    /// The fleet that came nearest, if none did.
    pub(super) nearest: Option<ProvenFleet>,
    pub(super) lower_bound: Option<f64>,
    /// What binds, where no fleet can be planned.
    pub(super) shortfall: Vec<Shortfall>,
    /// The cheapest fleet whose attention has devices of its own.
    pub(super) apart: ApartFound,
    /// The cheapest fleet in which devices that compute prompts attend.
    pub(super) spare: ApartFound,
    /// Number of fleets that the program ranked.
    pub(super) ranked: usize,
    /// Number of fleets that were tried with host memory or disks for KV.
    pub(super) with_tiers: usize,
    /// Whether all simulations came to their end.
    pub(super) complete: bool,
}

impl PlanFound {
    /// The rent of the cheapest fleet that holds, of one part if that is asked for; infinite if there is
    /// none.
    pub(super) fn least_usd(&self, homogeneous: bool) -> f64 {
        let of = self.fleets.iter().filter(|fleet| !homogeneous || fleet.is_homogeneous());
        of.map(|fleet| fleet.usd_per_hour).fold(f64::INFINITY, f64::min)
    }

    /// The rent from which on a fleet is not worth a run.
    pub(super) fn most_usd(&self, homogeneous: bool) -> f64 {
        let mut rents: Vec<f64> = self.fleets.iter().map(|fleet| fleet.usd_per_hour).collect();
        rents.sort_by(f64::total_cmp);
        let shown = rents.get(SHOWN - 1).copied().unwrap_or(f64::INFINITY);
        let most = shown.min(DEARER_MAX * self.least_usd(false));
        if homogeneous { most.max(DEARER_OF_ONE_PART_MAX * self.least_usd(true)) } else { most }
    }

    /// The cheapest fleet of one part, where another costs less.
    pub(super) fn dearer_homogeneous(&self) -> Option<&ProvenFleet> {
        self.fleets
            .iter()
            .skip(1)
            .find(|fleet| fleet.is_homogeneous())
            .filter(|_| !self.fleets[0].is_homogeneous())
    }

    /// The fleet that stands more load and slower devices best, of those near the cheapest.
    pub(super) fn most_robust(&self) -> Option<usize> {
        let fleets: Vec<_> = self.fleets.iter().map(|fleet| (fleet.usd_per_hour, fleet.stress)).collect();
        most_robust(&fleets)
    }
}

/// Pools in words, those in use: `2 x 4 H100-SXM-80GB prefill + 3 x RTX-4090 decode`.
pub(super) fn pools_words(parts: &[OfferedPart], pools: &[PlannedPool]) -> String {
    let used = pools.iter().filter(|pool| pool.count > 0);
    used.map(|pool| pool_words(parts, pool)).collect::<Vec<_>>().join(" + ")
}

fn pool_words(parts: &[OfferedPart], pool: &PlannedPool) -> String {
    let name = parts[pool.part].name();
    let devices = if pool.layout.devices == 1 { String::new() } else { format!("{} ", pool.layout.devices) };
    let attends = pool.attends.map_or_else(String::new, |others| {
        format!(" with {} {} for attention", others.devices, parts[others.part].name())
    });
    let spare = pool.spare.map_or("", |_| " with attention on those for prompts");
    let duty = match pool.duty {
        Duty::Whole => "",
        Duty::Prefill => " prefill",
        Duty::Decode => " decode",
    };
    format!("{} x {devices}{name}{}{attends}{duty}{spare}", pool.count, pool.layout.words())
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
