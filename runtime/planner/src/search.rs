//! Simulates the fleets that the program ranks, and finds the fewest of their instances that hold.

mod frontier;
mod further;

use crate::Result;
use crate::cores::on_all_cores;
use crate::found::{ApartFound, PlanFound, ProvenFleet};
use crate::repair::{FleetTrial, RepairLimits, Repaired, TrialLoad};
use crate::stress::{FACTORS, FleetStress};
use mixfleet_hal::economics::Price;
use mixfleet_hal::units::Ordered;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::bound::LoadSlots;
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::margin::slower;
use mixfleet_scheduler::plan::market::{FormedFleet, Market, PlannedPool};
use mixfleet_scheduler::plan::shortfall::Shortfall;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::{FleetFile, INSTANCES_MAX, PlannedText};
use mixfleet_sim::simulate::Choices;
use mixfleet_sim::trace::Request;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Fleets of each sort of form that the program ranks.
const EACH: usize = 12;
/// Number of fleets simulated side by side, independent of the number of cores, so that one input gives one
/// plan.
const WAVE: usize = 4;

/// Multiples of the load, and of the times of devices, that fleets are simulated with.
const STRESSES: [(f64, f64); 4] =
    [(FACTORS[0], 1.0), (FACTORS[1], 1.0), (1.0, FACTORS[0]), (1.0, FACTORS[1])];

/// The policies that every fleet is simulated with; the first is the default of `simulate` and `serve`.
const POLICIES: [Policy; 2] = [Policy::PerDollar, Policy::LeastLoaded];

/// A fleet whose fewest instances are sought.
struct FleetTried<'a> {
    fleet: &'a FormedFleet,
    file: FleetFile,
    tiers: PlannedTiers,
    /// The rent beyond which it is not wanted.
    most_usd: f64,
    /// Whether instances of its pools are exchanged for those of others.
    exchanges: bool,
    /// A run that held, and its policy, if there was one.
    held: Option<(Policy, FleetTrial)>,
}

impl<'a> FleetTried<'a> {
    fn new(fleet: &'a FormedFleet, file: FleetFile, most_usd: f64) -> Self {
        FleetTried { fleet, file, tiers: PlannedTiers::default(), most_usd, exchanges: false, held: None }
    }
}

/// The sum of some pools' counts.
fn instances(counts: impl Iterator<Item = u32>) -> u64 {
    counts.map(u64::from).sum()
}

/// A fleet that misses the objective with `counts`.
fn ended_missing(counts: Vec<u32>, trial: FleetTrial) -> Repaired {
    Repaired { less: vec![None; counts.len()], counts, trial, least: false }
}

/// Input of a search.
#[derive(Clone, Copy)]
pub struct SearchAsk<'a> {
    /// The rentable instances, and the load that each carries.
    pub market: &'a Market,
    /// The price of each of its parts.
    pub prices: &'a [Price],
    /// The requests that fleets are simulated with, in order of arrival.
    pub requests: &'a [Request],
    /// Tokens in a block of their prefixes, where these are known.
    pub block_tokens: Option<u32>,
    /// The requests of a trace in the order of time, which the lower bound takes into account.
    pub slots: Option<&'a LoadSlots>,
    /// Factor by which the requests arrive faster.
    pub speedup: f64,
    /// Host memory and disks for KV to choose from.
    pub tiers: &'a [PlannedTiers],
    /// How long fleets are simulated.
    pub budget: Duration,
    /// Once set, the search ends with the best so far.
    pub cancelled: &'a AtomicBool,
    /// Called with progress, by any thread.
    pub progress: &'a (dyn Fn(SearchProgress<'_>) + Sync),
}

/// A step of a search.
#[derive(Clone, Copy, Debug)]
pub enum SearchProgress<'a> {
    /// Fleets were ranked by rates, and are simulated from now on.
    Ranked {
        /// Number of fleets.
        fleets: usize,
        /// Number of requests of a simulation.
        requests: usize,
    },
    /// A fleet was simulated.
    Simulated {
        /// Its pools, with spares.
        pools: &'a [PlannedPool],
        /// What its instances have for KV beside their devices.
        tiers: &'a PlannedTiers,
        /// The policy that placed requests.
        policy: Policy,
        /// The run.
        trial: &'a FleetTrial,
    },
    /// A fleet was simulated with more load or slower devices.
    Stressed {
        /// Its pools.
        pools: &'a [PlannedPool],
        /// Factor on the load.
        load: f64,
        /// Factor on the times of steps.
        times: f64,
        /// Share of the requests that met the objectives; `None` if the run was stopped.
        attained: Option<f64>,
    },
}

/// A search for the cheapest fleets that hold an objective in simulation.
pub struct PlanSearch<'a> {
    ask: SearchAsk<'a>,
    market: &'a Market,
    text: PlannedText<'a>,
    trials: TrialLoad<'a>,
    ends: Instant,
}

impl<'a> PlanSearch<'a> {
    /// Prepares a search, whose budget of time begins now.
    pub fn new(ask: SearchAsk<'a>) -> Self {
        let SearchAsk { market, prices, .. } = ask;
        let trials = TrialLoad {
            requests: ask.requests,
            block_tokens: ask.block_tokens,
            speedup: ask.speedup,
            share: market.ask().attain,
            choices: Choices::default(),
        };
        let text = PlannedText { market, prices };
        PlanSearch { ask, market, text, trials, ends: Instant::now() + ask.budget }
    }

    fn goes_on(&self) -> bool {
        !self.ask.cancelled.load(Ordering::Relaxed) && Instant::now() < self.ends
    }

    /// Finds the fleets.
    ///
    /// # Errors
    /// Those of a planned fleet's file and of a simulation.
    pub fn run(&self) -> Result<PlanFound> {
        let bound = self.market.whole_lower_bound(&Microlp, self.ask.slots);
        let lower_bound = bound.ok().map(|usd| usd.0);
        let (ranked, shortfall) = self.ranked();
        (self.ask.progress)(SearchProgress::Ranked {
            fleets: ranked.len(),
            requests: self.ask.requests.len(),
        });
        let mut outcome = PlanFound {
            fleets: Vec::new(),
            nearest: None,
            lower_bound,
            shortfall,
            apart: ApartFound::from(
                self.market.attention_apart(&Microlp).map(|mut fleets| fleets.swap_remove(0)),
            ),
            spare: ApartFound::from(self.market.spare_attention(&Microlp)),
            ranked: ranked.len(),
            with_tiers: 0,
            complete: true,
            interrupted: false,
        };
        self.prove_ranked(&ranked, &mut outcome)?;
        self.sort(&mut outcome);
        self.exchange(&mut outcome)?;
        self.prove_with_tiers(&mut outcome)?;
        self.sort(&mut outcome);
        self.keep_the_cheapest(&mut outcome);
        let stresses = on_all_cores(STRESSES.len() * outcome.fleets.len(), |at| {
            let (load, times) = STRESSES[at % STRESSES.len()];
            self.attained(&outcome.fleets[at / STRESSES.len()], load, times)
        });
        let attained: Vec<Option<f64>> = stresses.into_iter().collect::<Result<_>>()?;
        outcome.complete &= attained.iter().all(Option::is_some);
        for (fleet, attained) in outcome.fleets.iter_mut().zip(attained.chunks_exact(STRESSES.len())) {
            fleet.stress =
                FleetStress { load: [attained[0], attained[1]], times: [attained[2], attained[3]] };
        }
        outcome.interrupted = self.ask.cancelled.load(Ordering::Relaxed);
        Ok(outcome)
    }

    /// The fleets that the program ranks and a simulation takes; if there are none, why.
    fn ranked(&self) -> (Vec<FormedFleet>, Vec<Shortfall>) {
        let all = self.market.rank(&Microlp, EACH);
        if all.is_empty() {
            return (all, self.market.shortfall(&Microlp));
        }
        let instances = |fleet: &FormedFleet| instances(fleet.pools.iter().map(|pool| pool.count));
        let least = all.iter().map(instances).min().unwrap_or(0);
        let ranked: Vec<_> = all.into_iter().filter(|fleet| instances(fleet) <= INSTANCES_MAX).collect();
        let too_many = Shortfall::Simulation { instances: least, most: INSTANCES_MAX };
        let shortfall = if ranked.is_empty() { vec![too_many] } else { Vec::new() };
        (ranked, shortfall)
    }

    fn sort(&self, outcome: &mut PlanFound) {
        let asked =
            |fleet: &ProvenFleet| self.market.ask().stored.iter().position(|stored| *stored == fleet.stored);
        outcome.fleets.sort_by_key(|fleet| (Ordered(fleet.usd_per_hour), asked(fleet)));
    }

    /// Simulates a fleet with a multiple of the load, and of the times of its devices.
    fn attained(&self, fleet: &ProvenFleet, load: f64, times: f64) -> Result<Option<f64>> {
        let file = fleet.file.clone().slowed(|_| times);
        let counts: Vec<u32> = fleet.pools.iter().map(|pool| pool.count).collect();
        let choices = Choices { policy: fleet.policy, ..Choices::default() };
        let trials = TrialLoad { choices, speedup: self.trials.speedup * load, ..self.trials };
        let trial = trials.trial(&file, &counts, true, &|| self.goes_on())?;
        let attained = trial.map(|trial| trial.attained);
        (self.ask.progress)(SearchProgress::Stressed { pools: &fleet.pools, load, times, attained });
        Ok(attained)
    }

    /// Finds the fewest instances of fleets under each policy, and adds the fleets that hold.
    fn prove(&self, wave: Vec<FleetTried<'_>>, outcome: &mut PlanFound) -> Result<()> {
        let policies = POLICIES.len();
        let repaired = on_all_cores(policies * wave.len(), |at| {
            let (tried, policy) = (&wave[at / policies], POLICIES[at % policies]);
            Ok(self.fewest_under(policy, tried)?.map(|repaired| (policy, repaired)))
        });
        let repaired: Vec<Option<(Policy, Repaired)>> = repaired.into_iter().collect::<Result<_>>()?;
        for (tried, of_each) in wave.into_iter().zip(repaired.chunks(policies)) {
            let is_whole = |of: &Option<_>| {
                of.as_ref().is_some_and(|(_, of): &(_, Repaired)| of.least || !of.trial.held)
            };
            outcome.complete &= self.goes_on() && of_each.iter().all(is_whole);
            self.add(tried, of_each.iter().flatten().cloned().collect(), outcome)?;
        }
        Ok(())
    }

    /// The pools of a plan, without its spares.
    fn without_spares(&self, planned: &FormedFleet) -> Vec<PlannedPool> {
        let mut pools = planned.pools.clone();
        pools.iter_mut().for_each(|pool| {
            pool.count = pool.count.saturating_sub(self.spares(pool)).max(pool.count.min(1));
        });
        pools
    }

    /// The pools with other counts, and spares of those in use.
    fn with_spares(&self, pools: &[PlannedPool], counts: &[u32]) -> Vec<PlannedPool> {
        let mut pools = pools.to_vec();
        pools.iter_mut().zip(counts).for_each(|(pool, count)| {
            pool.count = if *count > 0 { count + self.spares(pool) } else { 0 };
        });
        pools
    }

    /// The fewest instances of a fleet that hold the objective under a policy; the present ones if they do
    /// not hold it. `None` if the first run was stopped.
    fn fewest_under(&self, policy: Policy, tried: &FleetTried<'_>) -> Result<Option<Repaired>> {
        let FleetTried { fleet, file, tiers, .. } = tried;
        let pools = self.without_spares(fleet);
        let counts: Vec<u32> = file.pools[..pools.len()].iter().map(|pool| pool.count).collect();
        let rent = |counts: &[u32]| self.usd_per_hour(&self.with_spares(&pools, counts), fleet, tiers);
        let fits = |counts: &[u32]| self.is_in_stock(&self.with_spares(&pools, counts));
        let told = |counts: &[u32], trial: &FleetTrial| self.tell(&pools, counts, tiers, policy, trial);
        let known = tried.held.as_ref().filter(|(held, _)| *held == policy).map(|(_, trial)| trial.clone());
        let trial = match known {
            Some(trial) => trial,
            None => match self.under(policy).trial(file, &counts, false, &|| self.goes_on())? {
                Some(trial) => {
                    told(&counts, &trial);
                    trial
                }
                None => return Ok(None),
            },
        };
        if !trial.held {
            return Ok(Some(ended_missing(counts, trial)));
        }
        let limits = RepairLimits {
            fits: &fits,
            rent: &rent,
            go_on: &|| self.goes_on(),
            exchanges: tried.exchanges,
            told: &told,
        };
        Ok(Some(self.under(policy).fewest(file, &counts, trial, &limits)?))
    }

    /// Tells of a run.
    fn tell(
        &self,
        pools: &[PlannedPool],
        counts: &[u32],
        tiers: &PlannedTiers,
        policy: Policy,
        trial: &FleetTrial,
    ) {
        let pools = &self.with_spares(pools, counts);
        (self.ask.progress)(SearchProgress::Simulated { pools, tiers, policy, trial });
    }

    fn under(&self, policy: Policy) -> TrialLoad<'a> {
        TrialLoad { choices: Choices { policy, ..Choices::default() }, ..self.trials }
    }

    /// Adds the cheapest that the repairs of a fleet, one for each policy, ended with.
    fn add(
        &self,
        tried: FleetTried<'_>,
        of_each: Vec<(Policy, Repaired)>,
        outcome: &mut PlanFound,
    ) -> Result<()> {
        let FleetTried { fleet: planned, mut file, tiers, most_usd, .. } = tried;
        let pools = self.without_spares(planned);
        let rank = |of: &Repaired| {
            let usd = self.usd_per_hour(&self.with_spares(&pools, &of.counts), planned, &tiers);
            (!of.trial.held, Ordered(usd), Ordered(-of.trial.attained))
        };
        let cheapest = of_each.into_iter().min_by_key(|(_, of)| rank(of));
        let Some((policy, Repaired { counts, mut trial, less, least, .. })) = cheapest else { return Ok(()) };
        let used: Vec<usize> = (0..pools.len()).filter(|&pool| counts[pool] > 0).collect();
        let pools = self.with_spares(&pools, &counts);
        if pools.iter().any(|pool| self.spares(pool) > 0) {
            let all: Vec<u32> = pools.iter().map(|pool| pool.count).collect();
            match self.under(policy).trial(&file, &all, true, &|| self.goes_on())? {
                Some(with_spares) => trial = with_spares,
                None => outcome.complete = false,
            }
        }
        let text = self.text.of(&pools, planned.stored, &tiers, policy);
        let rents = |pool: &PlannedPool| self.market.rent_of(pool).0 * f64::from(pool.count);
        let usd_per_hour = self.usd_per_hour(&pools, planned, &tiers);
        if tiers != PlannedTiers::default() && (!trial.held || usd_per_hour >= most_usd) {
            return Ok(());
        }
        let errors = used.iter().map(|&pool| Some(file.pools[pool].likely_error? * rents(&pools[pool])));
        let rent: f64 = used.iter().map(|&pool| rents(&pools[pool])).sum();
        let likely_error = errors.sum::<Option<f64>>().map(|usd| usd / rent);
        let keeps = file.pools.split_off(pools.len());
        file.pools = used.iter().map(|&pool| file.pools[pool].clone()).chain(keeps).collect();
        let proven = ProvenFleet {
            likely_error,
            less: used.iter().map(|&pool| less[pool].clone()).collect(),
            pools: used.iter().map(|&pool| pools[pool].clone()).collect(),
            planned_usd_per_hour: planned.usd_per_hour.0,
            usd_per_hour,
            trial,
            least,
            exchanged: false,
            stress: FleetStress::default(),
            stored: planned.stored,
            tiers,
            policy,
            text,
            ids: self.ids(used.iter().map(|&pool| &pools[pool])),
            file,
        };
        if proven.trial.held {
            let what = |fleet: &ProvenFleet| (fleet.pools.clone(), fleet.stored, fleet.tiers);
            let same = |known: &ProvenFleet| what(known) == what(&proven);
            if !outcome.fleets.iter().any(same) {
                outcome.fleets.push(proven);
            }
        } else if outcome.nearest.as_ref().is_none_or(|known| known.trial.attained < proven.trial.attained) {
            outcome.nearest = Some(proven);
        }
        Ok(())
    }

    /// A fleet as its file describes it, with devices slowed down by `--confidence`. Computing the tables of
    /// its times takes longer than a run.
    fn parsed(&self, fleet: &FormedFleet, tiers: &PlannedTiers) -> Result<FleetFile> {
        let none = |path: &Path| Err(format!("{} is not read", path.display()));
        let pools = self.without_spares(fleet);
        // pools of none are read too
        let some = pools.iter().map(|pool| PlannedPool { count: pool.count.max(1), ..pool.clone() });
        let some: Vec<_> = some.collect();
        let text = self.text.of(&some, fleet.stored, tiers, Policy::default());
        let mut file = FleetFile::parse(&text, Path::new(""), &none)?;
        file.pools.iter_mut().zip(&pools).for_each(|(pool, planned)| pool.count = planned.count);
        Ok(file.slowed(|pool| slower(pool.likely_error, self.market.ask().confidence)))
    }

    fn spares(&self, pool: &PlannedPool) -> u32 {
        pool.takes().map(|(part, _)| self.market.parts()[part].spares).max().unwrap_or(0)
    }

    fn ids<'p>(&self, pools: impl Iterator<Item = &'p PlannedPool>) -> Vec<&'static str> {
        let parts = pools.flat_map(PlannedPool::takes);
        let mut ids: Vec<&str> = parts.map(|(at, _)| self.market.parts()[at].part.id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn is_of_one_part(&self, fleet: &FormedFleet) -> bool {
        self.ids(fleet.pools.iter()).len() == 1
    }

    fn usd_per_hour(&self, pools: &[PlannedPool], fleet: &FormedFleet, tiers: &PlannedTiers) -> f64 {
        (self.market.usd_per_hour(pools, fleet.stored) + tiers.rent(pools)).0
    }

    fn is_in_stock(&self, pools: &[PlannedPool]) -> bool {
        self.market.parts().iter().enumerate().all(|(part, offer)| {
            let devices: u64 = pools.iter().map(|pool| pool.devices_of(part)).sum();
            offer.most.is_none_or(|most| devices <= most.into())
        })
    }
}
