//! Grows ranked fleets until some hold, always the cheapest ones first.
//!
//! Of all fleets that may still hold, the four cheapest are simulated; those that miss the objective return
//! with more instances, finally with the most that cost less than the best fleet so far. So no more expensive
//! fleet is simulated, even if its rates looked good.

use super::{FleetTried, POLICIES, PlanSearch, WAVE, ended_missing, instances};
use crate::Result;
use crate::cores::on_all_cores;
use crate::found::{PlanFound, has_spare, is_apart};
use crate::growth::FleetGrowth;
use crate::repair::FleetTrial;
use mixfleet_hal::units::Ordered;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::market::{FormedFleet, PlannedPool};
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::{FleetFile, INSTANCES_MAX};

/// Fleets that are simulated to the end to say how near they come, where none holds.
const NEAREST: usize = 4;

/// A fleet that has not held yet.
struct GrowingFleet<'a> {
    fleet: &'a FormedFleet,
    usd_per_hour: f64,
    /// Its instances in the next run; `None` before the first one.
    next: Option<FleetGrowth>,
    simulated: Option<Box<SimulatedFleet>>,
}

/// What its runs left.
struct SimulatedFleet {
    file: FleetFile,
    /// Its instances in the last run.
    growth: FleetGrowth,
    policy: Policy,
    /// The last run.
    trial: FleetTrial,
}

impl PlanSearch<'_> {
    /// Simulates ranked fleets and adds those that hold. These are the cheapest, a few for comparison, the
    /// cheapest of one part, the cheapest with attention offload, and one in which prefill devices also run
    /// attention.
    pub(super) fn prove_ranked(&self, ranked: &[FormedFleet], outcome: &mut PlanFound) -> Result<()> {
        let planned =
            |fleet| GrowingFleet { fleet, usd_per_hour: fleet.usd_per_hour.0, next: None, simulated: None };
        let mut open: Vec<GrowingFleet<'_>> = ranked.iter().map(planned).collect();
        let mut given_up = Vec::new();
        while self.goes_on() {
            let is_wanted = |of: &GrowingFleet<'_>| of.usd_per_hour < self.most_usd(of.fleet, outcome);
            let (wanted, dear): (Vec<_>, Vec<_>) = open.into_iter().partition(is_wanted);
            open = wanted;
            for GrowingFleet { fleet, simulated, .. } in dear {
                let most_usd = self.most_usd(fleet, outcome);
                open.extend(simulated.and_then(|of| self.grown(fleet, of, most_usd).ok()));
            }
            if open.is_empty() {
                break;
            }
            open.sort_by_key(|of| Ordered(of.usd_per_hour));
            let count = WAVE.min(open.len());
            let rest = open.split_off(count);
            let runs = on_all_cores(count, |at| self.simulate(&open[at]));
            let mut held = Vec::new();
            for (of, run) in std::mem::replace(&mut open, rest).into_iter().zip(runs) {
                let Some(simulated) = run? else {
                    open.push(of);
                    continue;
                };
                match simulated.trial.held {
                    true => held.push(self.tried(of.fleet, simulated)),
                    false => match self.grown(of.fleet, simulated, f64::INFINITY) {
                        Ok(more) => open.push(more),
                        Err(missed) => given_up.push((of.fleet, missed)),
                    },
                }
            }
            self.prove(held, outcome)?;
        }
        outcome.complete &= self.goes_on();
        if outcome.fleets.is_empty() {
            let last = open.into_iter().filter_map(|of| Some((of.fleet, of.simulated?)));
            given_up.extend(last);
            self.add_nearest(given_up, outcome)?;
        }
        Ok(())
    }

    /// The rent from which on a fleet is not worth a run. Attention offload at a higher rent is reported with
    /// its price.
    fn most_usd(&self, fleet: &FormedFleet, outcome: &PlanFound) -> f64 {
        let first = |is: fn(&[PlannedPool]) -> bool| {
            is(&fleet.pools) && !outcome.fleets.iter().any(|known| is(&known.pools))
        };
        match first(is_apart) || first(has_spare) {
            true => f64::INFINITY,
            false => outcome.most_usd(self.is_of_one_part(fleet)),
        }
    }

    /// Simulates a fleet with the instances that it has got to, at first under each policy: that which gets
    /// further stays. `None` if the run did not come to its end.
    fn simulate(&self, of: &GrowingFleet<'_>) -> Result<Option<Box<SimulatedFleet>>> {
        let run = |file: &FleetFile, growth: &FleetGrowth, policy: Policy| -> Result<Option<FleetTrial>> {
            let trial = self.under(policy).trial(file, growth.counts(), false, &|| self.goes_on())?;
            if let Some(trial) = &trial {
                let pools = self.without_spares(of.fleet);
                self.tell(&pools, growth.counts(), &PlannedTiers::default(), policy, trial);
            }
            Ok(trial)
        };
        if let (Some(growth), Some(known)) = (&of.next, &of.simulated) {
            let SimulatedFleet { file, policy, .. } = &**known;
            let trial = run(file, growth, *policy)?;
            let simulated = |trial| {
                let (file, growth) = (file.clone(), growth.clone());
                Box::new(SimulatedFleet { file, growth, policy: *policy, trial })
            };
            return Ok(trial.map(simulated));
        }
        let file = self.parsed(of.fleet, &PlannedTiers::default())?;
        let growth = FleetGrowth::of(&file);
        let mut best: Option<(Policy, FleetTrial)> = None;
        for policy in POLICIES {
            let Some(trial) = run(&file, &growth, policy)? else { return Ok(None) };
            let reached = |trial: &FleetTrial| (trial.held, trial.results.requests);
            if best.as_ref().is_none_or(|(_, known)| reached(&trial) > reached(known)) {
                best = Some((policy, trial));
            }
        }
        Ok(best.map(|(policy, trial)| Box::new(SimulatedFleet { file, growth, policy, trial })))
    }

    /// A fleet that held, whose fewest instances are sought.
    fn tried<'a>(&self, fleet: &'a FormedFleet, simulated: Box<SimulatedFleet>) -> FleetTried<'a> {
        let SimulatedFleet { mut file, growth, policy, trial } = *simulated;
        file.pools.iter_mut().zip(growth.counts()).for_each(|(pool, count)| pool.count = *count);
        FleetTried { held: Some((policy, trial)), ..FleetTried::new(fleet, file, f64::INFINITY) }
    }

    /// A fleet that missed the objective, with more instances that cost less than `most_usd`, unless these
    /// are seen not to help it or are not in stock.
    fn grown<'a>(
        &self,
        fleet: &'a FormedFleet,
        simulated: Box<SimulatedFleet>,
        most_usd: f64,
    ) -> Result<GrowingFleet<'a>, Box<SimulatedFleet>> {
        let pools = self.without_spares(fleet);
        let rent = |counts: &[u32]| {
            let pools = self.with_spares(&pools, counts);
            self.usd_per_hour(&pools, fleet, &PlannedTiers::default())
        };
        let fits = |counts: &[u32]| {
            let is_simulated = instances(counts.iter().copied()) <= INSTANCES_MAX;
            is_simulated && rent(counts) < most_usd && self.is_in_stock(&self.with_spares(&pools, counts))
        };
        let mut next = simulated.growth.clone();
        match next.grow(&simulated.trial.results, &fits, &rent) {
            true => {
                let usd_per_hour = rent(next.counts());
                Ok(GrowingFleet { fleet, usd_per_hour, next: Some(next), simulated: Some(simulated) })
            }
            false => Err(simulated),
        }
    }

    /// Of fleets that all missed the objective, adds what those came to that got furthest.
    fn add_nearest(
        &self,
        mut missed: Vec<(&FormedFleet, Box<SimulatedFleet>)>,
        outcome: &mut PlanFound,
    ) -> Result<()> {
        missed.sort_by_key(|(_, simulated)| std::cmp::Reverse(simulated.trial.results.requests));
        missed.truncate(NEAREST);
        let mut whole = on_all_cores(missed.len(), |at| {
            let SimulatedFleet { file, growth, policy, .. } = &*missed[at].1;
            self.under(*policy).trial(file, growth.counts(), true, &|| self.goes_on())
        })
        .into_iter();
        for (fleet, mut simulated) in missed {
            if let Some(trial) = whole.next().transpose()?.flatten() {
                simulated.trial = trial;
            }
            let (counts, policy) = (simulated.growth.counts().to_vec(), simulated.policy);
            let missed = (policy, ended_missing(counts, simulated.trial.clone()));
            self.add(self.tried(fleet, simulated), vec![missed], outcome)?;
        }
        Ok(())
    }
}
