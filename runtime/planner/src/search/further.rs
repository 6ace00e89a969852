//! Simulates variants of the ranked fleets: exchanged instances, and KV tiers.

use super::{FleetTried, PlanSearch};
use crate::Result;
use crate::found::{PlanFound, ProvenFleet};
use mixfleet_hal::units::UsdPerHour;
use mixfleet_scheduler::plan::forms::FleetForm;
use mixfleet_scheduler::plan::market::{FormedFleet, PlannedPool};
use std::collections::BTreeSet;

/// The cheapest fleets whose pools' instances are exchanged; the cheapest of one part is another one.
const EXCHANGED: usize = 2;
/// Fleets that are simulated with more load and slower devices, the cheapest and the cheapest of one part.
const STRESSED_MAX: usize = 8;
/// Fleets that are simulated with host memory and disks for KV, the cheapest without.
const TIERED_MAX: usize = 2;

impl PlanSearch<'_> {
    /// Exchanges instances of the cheapest fleets, and of the cheapest of one part, until none of these has
    /// an exchange that saves and holds.
    pub(super) fn exchange(&self, outcome: &mut PlanFound) -> Result<()> {
        while self.goes_on() {
            let of_one_part = outcome.fleets.iter().position(ProvenFleet::is_homogeneous);
            let near: Vec<usize> = (0..EXCHANGED.min(outcome.fleets.len())).chain(of_one_part).collect();
            let is_open = |at: &usize| !outcome.fleets[*at].exchanged;
            let open: BTreeSet<usize> = near.into_iter().filter(is_open).collect();
            if open.is_empty() {
                return Ok(());
            }
            let from = open.iter().map(|&at| {
                let mut fleet = self.formed(&outcome.fleets[at]);
                fleet.pools.extend(self.market.alternatives(&fleet));
                (fleet, at)
            });
            let from: Vec<_> = from.collect();
            let tried = from.iter().map(|(fleet, at)| {
                let known = &outcome.fleets[*at];
                let file = self.parsed(fleet, &known.tiers)?;
                let tried = FleetTried::new(fleet, file, known.usd_per_hour);
                Ok(FleetTried { tiers: known.tiers, exchanges: true, ..tried })
            });
            let tried: Vec<_> = tried.collect::<Result<_>>()?;
            let count = outcome.fleets.len();
            self.prove(tried, outcome)?;
            let (known, found) = outcome.fleets.split_at_mut(count);
            found.iter_mut().for_each(|fleet| fleet.exchanged = true);
            let is_of = |new: &ProvenFleet, from: &FormedFleet, at: usize| {
                let kind = |pool: &PlannedPool| PlannedPool { count: 0, ..pool.clone() };
                let all: Vec<_> = from.pools.iter().map(kind).collect();
                let same = (new.stored, new.tiers) == (known[at].stored, known[at].tiers);
                same && new.pools.iter().all(|pool| all.contains(&kind(pool)))
            };
            let left = from.iter().filter(|(from, at)| found.iter().any(|new| is_of(new, from, *at)));
            let left: Vec<usize> = left.map(|(_, at)| *at).collect();
            open.iter().for_each(|&at| outcome.fleets[at].exchanged = true);
            let mut at = 0..;
            outcome.fleets.retain(|_| at.next().is_some_and(|at| !left.contains(&at)));
            self.sort(outcome);
        }
        outcome.complete = false;
        Ok(())
    }

    /// Leaves the cheapest fleets, the cheapest of one part, the cheapest with attention apart, and the
    /// cheapest in which devices that compute prompts attend.
    pub(super) fn keep_the_cheapest(&self, outcome: &mut PlanFound) {
        let first = |of: fn(&ProvenFleet) -> bool| outcome.fleets.iter().position(of);
        let kept = [ProvenFleet::is_homogeneous, ProvenFleet::is_apart, ProvenFleet::has_spare].map(first);
        let mut at = 0..;
        outcome.fleets.retain(|_| {
            let at = at.next();
            at < Some(STRESSED_MAX) || kept.contains(&at)
        });
    }

    /// A fleet that was simulated, as one to simulate again.
    fn formed(&self, fleet: &ProvenFleet) -> FormedFleet {
        FormedFleet {
            form: FleetForm::Free,
            stored: fleet.stored,
            pools: fleet.pools.clone(),
            usd_per_hour: UsdPerHour(fleet.planned_usd_per_hour),
        }
    }

    /// Simulates the cheapest fleets with each choice of tiers. Of a fleet with them only one that costs less
    /// than without is worth having.
    pub(super) fn prove_with_tiers(&self, outcome: &mut PlanFound) -> Result<()> {
        let cheapest: Vec<FormedFleet> =
            outcome.fleets.iter().take(TIERED_MAX).map(|fleet| self.formed(fleet)).collect();
        let usd: Vec<f64> = outcome.fleets.iter().map(|fleet| fleet.usd_per_hour).collect();
        for &tiers in self.ask.tiers {
            let with = cheapest.iter().zip(&usd).map(|(fleet, usd)| {
                let file = self.parsed(fleet, &tiers)?;
                Ok(FleetTried { tiers, ..FleetTried::new(fleet, file, *usd) })
            });
            let tried: Vec<_> = with.collect::<Result<_>>()?;
            outcome.with_tiers += tried.len();
            self.prove(tried, outcome)?;
        }
        Ok(())
    }
}
