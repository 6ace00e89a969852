//! Simulates the fleets that the program ranks first, and repairs their counts.

mod further;

use super::found::{ApartFound, PlanFound, ProvenFleet, is_apart, pools_words};
use super::load::PlanLoad;
use super::offers::Offers;
use super::stress::{FACTORS, FleetStress};
use super::{PlanArgs, on_all_cores, tiers};
use crate::interrupt::cancel_on_interrupt;
use anyhow::Result;
use mixfleet_hal::units::Ordered;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::margin::slower;
use mixfleet_scheduler::plan::market::{FormedFleet, Market, PlannedPool};
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::{FleetFile, PlannedText};
use mixfleet_sim::repair::{FleetTrial, RepairLimits, Repaired, TrialLoad};
use mixfleet_sim::simulate::Choices;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Fleets of each sort of form that the program ranks.
const EACH: usize = 3;
/// So many fleets that meet the objective are enough.
const PROVEN_MAX: usize = 5;
/// Fleets of one part that are simulated in any case: all that are ranked, whole and divided into roles,
/// since the best of them is shown beside the first.
const HOMOGENEOUS_MIN: usize = 2 * EACH;
/// Multiples of its rent by rates that a fleet may take to hold. Those that need more come again after the
/// others, when there may be some that cost less.
const TAKES: [f64; 3] = [2.0, 4.0, 8.0];
/// Fleets that are simulated side by side, whatever the number of cores, so that one input gives one plan.
const WAVE: usize = 4;

/// Multiples of the load, and of the times of devices, that fleets are simulated with.
const STRESSES: [(f64, f64); 4] =
    [(FACTORS[0], 1.0), (FACTORS[1], 1.0), (1.0, FACTORS[0]), (1.0, FACTORS[1])];

/// The policies that every fleet is simulated with; the first is the default of `simulate` and `serve`.
const POLICIES: [Policy; 2] = [Policy::PerDollar, Policy::LeastLoaded];

/// A fleet that is simulated.
struct FleetTried<'a> {
    fleet: &'a FormedFleet,
    tiers: PlannedTiers,
    /// The rent beyond which it is given up.
    most_usd: f64,
    /// Whether instances of its pools are exchanged for those of others.
    exchanges: bool,
}

impl<'a> FleetTried<'a> {
    fn new(fleet: &'a FormedFleet, most_usd: f64) -> Self {
        FleetTried { fleet, tiers: PlannedTiers::default(), most_usd, exchanges: false }
    }
}

/// Where the simulations of a fleet ended.
enum Ended {
    /// It holds, or more instances were seen not to help.
    Done,
    /// It missed the objective with these counts, and more instances would have cost too much.
    At(Vec<u32>),
}

/// Whether a fleet has the form and the dtype of another, with whatever counts.
fn is_of(fleet: &FormedFleet, other: &FormedFleet) -> bool {
    let kinds = |fleet: &FormedFleet| {
        let pools = fleet.pools.iter();
        pools.map(|pool| PlannedPool { count: 0, ..pool.clone() }).collect::<Vec<_>>()
    };
    fleet.form == other.form && fleet.stored == other.stored && kinds(fleet) == kinds(other)
}

pub(super) struct PlanSearch<'a> {
    args: &'a PlanArgs,
    market: &'a Market,
    load: &'a PlanLoad,
    text: PlannedText<'a>,
    trials: TrialLoad<'a>,
    cancelled: Arc<AtomicBool>,
    ends: Instant,
}

impl<'a> PlanSearch<'a> {
    pub(super) fn new(
        args: &'a PlanArgs,
        market: &'a Market,
        load: &'a PlanLoad,
        offers: &'a Offers,
    ) -> Self {
        let trials = TrialLoad {
            requests: &load.requests,
            block_tokens: load.block_tokens,
            speedup: 1.0 + args.headroom,
            share: args.attain,
            choices: Choices::default(),
        };
        PlanSearch {
            args,
            market,
            load,
            text: PlannedText { market, prices: &offers.prices },
            trials,
            cancelled: Arc::new(AtomicBool::new(false)),
            ends: Instant::now() + Duration::from_secs_f64(args.budget_s),
        }
    }

    fn goes_on(&self) -> bool {
        !self.cancelled.load(Ordering::Relaxed) && Instant::now() < self.ends
    }

    pub(super) fn run(&self) -> Result<PlanFound> {
        cancel_on_interrupt(self.cancelled.clone(), "stopping with the best so far");
        let bound = self.market.whole_lower_bound(&Microlp, self.load.slots.as_ref());
        let lower_bound = bound.ok().map(|usd| usd.0);
        let ranked = self.market.rank(&Microlp, EACH);
        let shortfall = if ranked.is_empty() { self.market.shortfall(&Microlp) } else { Vec::new() };
        self.say(&format!(
            "{} fleets by rates; simulating {} requests",
            ranked.len(),
            self.load.requests.len()
        ));
        let mut outcome = PlanFound {
            fleets: Vec::new(),
            nearest: None,
            lower_bound,
            shortfall,
            apart: match self.market.attention_apart(&Microlp) {
                Ok(mut fleets) => ApartFound::Planned(fleets.swap_remove(0)),
                Err(why) => ApartFound::None(why),
            },
            ranked: ranked.len(),
            with_tiers: 0,
            complete: true,
        };
        let mut open: Vec<FormedFleet> = ranked.clone();
        for times in TAKES {
            open = self.prove_ranked(open, times, &mut outcome)?;
        }
        let done: Vec<&FormedFleet> =
            ranked.iter().filter(|fleet| !open.iter().any(|o| is_of(o, fleet))).collect();
        self.sort(&mut outcome);
        self.prove_rivals(&done, &mut outcome)?;
        self.exchange(&mut outcome)?;
        self.prove_with_tiers(&mut outcome)?;
        self.sort(&mut outcome);
        self.keep_the_cheapest(&mut outcome);
        let stresses = on_all_cores(STRESSES.len() * outcome.fleets.len(), |at| {
            self.attained(&outcome.fleets[at / STRESSES.len()], STRESSES[at % STRESSES.len()])
        });
        let attained: Vec<Option<f64>> = stresses.into_iter().collect::<Result<_>>()?;
        outcome.complete &= attained.iter().all(Option::is_some);
        for (fleet, attained) in outcome.fleets.iter_mut().zip(attained.chunks_exact(STRESSES.len())) {
            fleet.stress =
                FleetStress { load: [attained[0], attained[1]], times: [attained[2], attained[3]] };
        }
        Ok(outcome)
    }

    /// Simulates fleets, the cheapest by rates first, until enough of them hold; those of one part, and those
    /// with attention apart, in any case. Returns those that may hold with more than `times` their rent by
    /// rates, with the counts that they got to.
    fn prove_ranked(
        &self,
        ranked: Vec<FormedFleet>,
        times: f64,
        outcome: &mut PlanFound,
    ) -> Result<Vec<FormedFleet>> {
        let (mut of_one_part, mut open) = (0, Vec::new());
        let mut rest = ranked.iter().peekable();
        while rest.peek().is_some() {
            let mut wave = Vec::new();
            while let Some(fleet) = rest.next_if(|_| wave.len() < WAVE) {
                let one = self.is_of_one_part(fleet);
                let always = one && of_one_part < HOMOGENEOUS_MIN || is_apart(&fleet.pools);
                if always || outcome.fleets.len() < PROVEN_MAX {
                    of_one_part += usize::from(one);
                    wave.push(fleet);
                } else {
                    open.push(fleet.clone());
                }
            }
            let tried = wave.iter().map(|fleet| {
                // that attention apart costs more is said with what it costs
                let most_usd = match is_apart(&fleet.pools) {
                    true => f64::INFINITY,
                    false => outcome.most_usd(self.is_of_one_part(fleet)),
                };
                FleetTried::new(fleet, most_usd.min(times * fleet.usd_per_hour.0))
            });
            let tried: Vec<_> = tried.collect();
            let ended = self.prove(&tried, outcome)?;
            for (fleet, ended) in wave.into_iter().zip(ended) {
                let Ended::At(counts) = ended else { continue };
                let mut fleet = fleet.clone();
                fleet.pools.iter_mut().zip(counts).for_each(|(pool, count)| pool.count = count);
                open.push(fleet);
            }
        }
        open.sort_by_key(|fleet| Ordered(fleet.usd_per_hour.0));
        Ok(open)
    }

    fn sort(&self, outcome: &mut PlanFound) {
        let asked =
            |fleet: &ProvenFleet| self.market.ask().stored.iter().position(|stored| *stored == fleet.stored);
        outcome.fleets.sort_by_key(|fleet| (Ordered(fleet.usd_per_hour), asked(fleet)));
    }

    /// Simulates a fleet with a multiple of the load, and of the times of its devices.
    fn attained(&self, fleet: &ProvenFleet, (load, times): (f64, f64)) -> Result<Option<f64>> {
        let file = fleet.file.clone().slowed(|_| times);
        let counts: Vec<u32> = fleet.pools.iter().map(|pool| pool.count).collect();
        let choices = Choices { policy: fleet.policy, ..Choices::default() };
        let trials = TrialLoad { choices, speedup: self.trials.speedup * load, ..self.trials };
        let trial = trials.trial(&file, &counts, true, &|| self.goes_on())?;
        let percent = trial.as_ref().map_or(0.0, |trial| 100.0 * trial.attained);
        self.say(&format!("{}, load x {load}, times x {times}: {percent:.2} %", self.words(&fleet.pools)));
        Ok(trial.map(|trial| trial.attained))
    }

    /// Simulates fleets, and adds what comes of them.
    fn prove(&self, wave: &[FleetTried<'_>], outcome: &mut PlanFound) -> Result<Vec<Ended>> {
        let files = on_all_cores(wave.len(), |at| self.parsed(&wave[at]));
        let files: Vec<FleetFile> = files.into_iter().collect::<Result<_>>()?;
        let repaired = on_all_cores(wave.len(), |at| self.repair(&wave[at], &files[at]));
        let (mut repaired, mut done) = (repaired.into_iter(), Vec::new());
        for (fleet, file) in wave.iter().zip(files) {
            let of_each = repaired.next().transpose()?.unwrap_or_default();
            let is_whole = |of: &Repaired| of.least || !of.trial.held && self.goes_on();
            outcome.complete &= !of_each.is_empty() && of_each.iter().all(|(_, of)| is_whole(of));
            let open = of_each.first().filter(|(_, of)| !of.trial.held && !of.hopeless);
            done.push(open.map_or(Ended::Done, |(_, of)| {
                let pools = self.with_spares(&fleet.fleet.pools, &of.counts);
                Ended::At(pools.iter().map(|pool| pool.count).collect())
            }));
            self.add(fleet, file, of_each, outcome)?;
        }
        Ok(done)
    }

    /// The pools that a plan asks for, without its spares.
    fn without_spares(&self, planned: &FormedFleet) -> Vec<PlannedPool> {
        let mut pools = planned.pools.clone();
        pools.iter_mut().for_each(|pool| {
            pool.count = pool.count.saturating_sub(self.spares(pool)).max(pool.count.min(1));
        });
        pools
    }

    /// Pools with other counts, and with spares of those in use.
    fn with_spares(&self, pools: &[PlannedPool], counts: &[u32]) -> Vec<PlannedPool> {
        let mut pools = pools.to_vec();
        pools.iter_mut().zip(counts).for_each(|(pool, count)| {
            pool.count = if *count > 0 { count + self.spares(pool) } else { 0 };
        });
        pools
    }

    /// The fewest instances of a fleet that hold the objective within its most rent, under the policy that
    /// gets further with the counts that are planned; and, if some hold, the fewest under the other policy
    /// that cost no more. None if not even the first runs came to an end.
    fn repair(&self, tried: &FleetTried<'_>, file: &FleetFile) -> Result<Vec<(Policy, Repaired)>> {
        let counts: Vec<u32> = file.pools.iter().map(|pool| pool.count).collect();
        let planned = |policy: Policy| self.under(policy).trial(file, &counts, false, &|| self.goes_on());
        let [one, other] = POLICIES.map(planned);
        let (Some(one), Some(other)) = (one?, other?) else { return Ok(Vec::new()) };
        let reached = |trial: &FleetTrial| (trial.held, trial.results.requests);
        let policies = if reached(&other) > reached(&one) { [POLICIES[1], POLICIES[0]] } else { POLICIES };
        let Some(found) = self.repair_under(policies[0], tried, tried.most_usd, file)? else {
            return Ok(Vec::new());
        };
        if !found.trial.held {
            return Ok(vec![(policies[0], found)]);
        }
        let mut fewest = file.clone();
        fewest.pools.iter_mut().zip(&found.counts).for_each(|(pool, count)| pool.count = *count);
        let pools = self.with_spares(&self.without_spares(tried.fleet), &found.counts);
        let most_usd = self.usd_per_hour(&pools, tried);
        let too = self.repair_under(policies[1], tried, most_usd, &fewest)?;
        Ok(policies.into_iter().zip([Some(found), too]).filter_map(|(of, too)| Some((of, too?))).collect())
    }

    fn repair_under(
        &self,
        policy: Policy,
        tried: &FleetTried<'_>,
        most_usd: f64,
        file: &FleetFile,
    ) -> Result<Option<Repaired>> {
        let pools = self.without_spares(tried.fleet);
        let fits = |counts: &[u32]| {
            let pools = self.with_spares(&pools, counts);
            self.usd_per_hour(&pools, tried) <= most_usd && self.is_in_stock(&pools)
        };
        let told = |counts: &[u32], trial: &FleetTrial| {
            let (bound, word) = if trial.held { ("", "held") } else { ("at most ", "missed") };
            let (fleet, percent) = (self.words(&self.with_spares(&pools, counts)), 100.0 * trial.attained);
            let fleet = format!("{fleet}{}", tiers::words(&tried.tiers));
            self.say(&format!("{fleet}, {}: {bound}{percent:.2} %, {word}", crate::simulate::word(&policy)));
        };
        let rent = |counts: &[u32]| self.usd_per_hour(&self.with_spares(&pools, counts), tried);
        let limits = RepairLimits {
            fits: &fits,
            rent: &rent,
            go_on: &|| self.goes_on(),
            exchanges: tried.exchanges,
            told: &told,
        };
        Ok(self.under(policy).repair(file, &limits)?)
    }

    fn under(&self, policy: Policy) -> TrialLoad<'a> {
        TrialLoad { choices: Choices { policy, ..Choices::default() }, ..self.trials }
    }

    /// Adds the cheapest that the repairs of a fleet, one for each policy, ended with.
    fn add(
        &self,
        tried: &FleetTried<'_>,
        mut file: FleetFile,
        of_each: Vec<(Policy, Repaired)>,
        outcome: &mut PlanFound,
    ) -> Result<()> {
        let FleetTried { fleet: planned, tiers, most_usd, .. } = *tried;
        let pools = self.without_spares(planned);
        let rank = |of: &Repaired| {
            let usd = self.usd_per_hour(&self.with_spares(&pools, &of.counts), tried);
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
        let usd_per_hour = self.usd_per_hour(&pools, tried);
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

    /// A fleet as its file has it, with devices as slow as `--confidence` asks for. To make the tables of its
    /// times takes longer than a run.
    fn parsed(&self, tried: &FleetTried<'_>) -> Result<FleetFile> {
        let none = |path: &Path| Err(format!("{} is not read", path.display()));
        let pools = self.without_spares(tried.fleet);
        // pools of none are read too
        let some = pools.iter().map(|pool| PlannedPool { count: pool.count.max(1), ..pool.clone() });
        let some: Vec<_> = some.collect();
        let text = self.text.of(&some, tried.fleet.stored, &tried.tiers, Policy::default());
        let mut file = FleetFile::parse(&text, Path::new(""), &none)?;
        file.pools.iter_mut().zip(&pools).for_each(|(pool, planned)| pool.count = planned.count);
        Ok(file.slowed(|pool| slower(pool.likely_error, self.args.confidence)))
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

    fn usd_per_hour(&self, pools: &[PlannedPool], tried: &FleetTried<'_>) -> f64 {
        (self.market.usd_per_hour(pools, tried.fleet.stored) + tried.tiers.rent(pools)).0
    }

    fn is_in_stock(&self, pools: &[PlannedPool]) -> bool {
        self.market.parts().iter().enumerate().all(|(part, offer)| {
            let devices: u64 = pools.iter().map(|pool| pool.devices_of(part)).sum();
            offer.most.is_none_or(|most| devices <= most.into())
        })
    }

    fn words(&self, pools: &[PlannedPool]) -> String {
        pools_words(self.market.parts(), pools)
    }

    fn say(&self, line: &str) {
        if std::io::stderr().is_terminal() {
            eprintln!("{line}");
        }
    }
}
