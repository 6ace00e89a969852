//! Simulates the fleets that the program ranks first, and repairs their counts.

use super::load::PlanLoad;
use super::offers::Offers;
use super::stress::{FACTORS, FleetStress, most_robust};
use super::{PlanArgs, on_all_cores, tiers};
use crate::interrupt::cancel_on_interrupt;
use anyhow::Result;
use mixfleet_hal::StoredAs;
use mixfleet_hal::units::{Ordered, UsdPerHour};
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::forms::FleetForm;
use mixfleet_scheduler::plan::margin::{ERROR_UNKNOWN, slower};
use mixfleet_scheduler::plan::market::{FormedFleet, Market, PlannedPool};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_scheduler::plan::shortfall::Shortfall;
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
/// Fleets that are simulated with host memory and disks for KV, the cheapest without.
const TIERED_MAX: usize = 2;
/// Fleets that are simulated side by side, whatever the number of cores, so that one input gives one plan.
const WAVE: usize = 4;
/// A fleet is given up that costs so many times as much as the best, once there are some.
const DEARER_MAX: f64 = 1.5;
const SOME: usize = 3;

/// Multiples of the load, and of the times of devices, that fleets are simulated with.
const STRESSES: [(f64, f64); 4] =
    [(FACTORS[0], 1.0), (FACTORS[1], 1.0), (1.0, FACTORS[0]), (1.0, FACTORS[1])];

/// The policies that every fleet is simulated with; the first is the default of `simulate` and `serve`.
const POLICIES: [Policy; 2] = [Policy::PerDollar, Policy::LeastLoaded];

/// A fleet that was simulated.
pub(super) struct ProvenFleet {
    /// The pools in use.
    pub(super) pools: Vec<PlannedPool>,
    pub(super) usd_per_hour: f64,
    /// What the program asked for it.
    pub(super) planned_usd_per_hour: f64,
    pub(super) trial: FleetTrial,
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
    ids: Vec<&'static str>,
    /// The same, read.
    file: FleetFile,
}

impl ProvenFleet {
    pub(super) fn is_homogeneous(&self) -> bool {
        self.ids.len() == 1
    }

    /// Whether attention has devices of its own.
    pub(super) fn is_apart(&self) -> bool {
        is_apart(&self.pools)
    }

    /// Whether its price does not tell it from a cheaper one.
    pub(super) fn ties_with(&self, cheaper: &ProvenFleet) -> bool {
        let errors = [self, cheaper].map(|fleet| (fleet.usd_per_hour, fleet.likely_error));
        tie(errors, self.ids == cheaper.ids && self.stored == cheaper.stored)
    }
}

fn is_apart(pools: &[PlannedPool]) -> bool {
    pools.iter().any(|pool| pool.attends.is_some())
}

/// Whether a price is not told from a lower one, each with the likely error of its times. The errors of the
/// same parts in one dtype are common to both.
fn tie([(usd, error), (cheaper, its_error)]: [(f64, Option<f64>); 2], same_parts: bool) -> bool {
    let [a, b] = [error, its_error].map(|error| error.unwrap_or(ERROR_UNKNOWN));
    let error = if same_parts { 0.0 } else { a.hypot(b) };
    usd <= cheaper * (1.0 + error)
}

/// What became of the cheapest fleet whose attention has devices of its own.
pub(super) enum ApartFound {
    /// There is none, for this reason.
    None(String),
    /// The cheapest by rates; among those that hold is it, or one with prompts on instances of their own.
    Planned(FormedFleet),
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
    /// Number of fleets that the program ranked.
    pub(super) ranked: usize,
    /// Number of fleets that were tried with host memory or disks for KV.
    pub(super) with_tiers: usize,
    /// Whether all simulations came to their end.
    pub(super) complete: bool,
}

impl PlanFound {
    /// The rent beyond which a fleet is given up.
    fn most_usd(&self, homogeneous: bool) -> f64 {
        let of = self.fleets.iter().filter(|fleet| !homogeneous || fleet.is_homogeneous());
        match self.fleets.len() {
            ..SOME => f64::INFINITY,
            _ => DEARER_MAX * of.map(|fleet| fleet.usd_per_hour).fold(f64::INFINITY, f64::min),
        }
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

/// A fleet that is simulated.
struct FleetTried<'a> {
    fleet: &'a FormedFleet,
    tiers: PlannedTiers,
    /// The rent beyond which it is given up.
    most_usd: f64,
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
        let (mut of_one_part, mut rest) = (0, ranked.iter().peekable());
        while rest.peek().is_some() {
            let mut wave = Vec::new();
            while let Some(fleet) = rest.next_if(|_| wave.len() < WAVE) {
                let one = self.is_of_one_part(fleet);
                let always = one && of_one_part < HOMOGENEOUS_MIN || is_apart(&fleet.pools);
                if always || outcome.fleets.len() < PROVEN_MAX {
                    of_one_part += usize::from(one);
                    wave.push(fleet);
                }
            }
            let tried = wave.iter().map(|fleet| {
                // that attention apart costs more is said with what it costs
                let most_usd = match is_apart(&fleet.pools) {
                    true => f64::INFINITY,
                    false => outcome.most_usd(self.is_of_one_part(fleet)),
                };
                FleetTried { fleet, tiers: PlannedTiers::default(), most_usd }
            });
            let tried: Vec<_> = tried.collect();
            self.prove(&tried, &mut outcome)?;
        }
        self.sort(&mut outcome);
        self.prove_with_tiers(&mut outcome)?;
        self.sort(&mut outcome);
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

    fn sort(&self, outcome: &mut PlanFound) {
        let asked =
            |fleet: &ProvenFleet| self.market.ask().stored.iter().position(|stored| *stored == fleet.stored);
        outcome.fleets.sort_by_key(|fleet| (Ordered(fleet.usd_per_hour), asked(fleet)));
    }

    /// Simulates the cheapest fleets with each choice of tiers. Of a fleet with them only one that costs less
    /// than without is worth having.
    fn prove_with_tiers(&self, outcome: &mut PlanFound) -> Result<()> {
        let cheapest: Vec<FormedFleet> = (outcome.fleets.iter().take(TIERED_MAX))
            .map(|fleet| FormedFleet {
                form: FleetForm::Free,
                stored: fleet.stored,
                pools: fleet.pools.clone(),
                usd_per_hour: UsdPerHour(fleet.planned_usd_per_hour),
            })
            .collect();
        let usd: Vec<f64> = outcome.fleets.iter().map(|fleet| fleet.usd_per_hour).collect();
        for tiers in tiers::choices(self.args) {
            let with = cheapest.iter().zip(&usd);
            let tried: Vec<_> =
                with.map(|(fleet, usd)| FleetTried { fleet, tiers, most_usd: *usd }).collect();
            outcome.with_tiers += tried.len();
            self.prove(&tried, outcome)?;
        }
        Ok(())
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

    /// Simulates fleets, each under every policy, and adds what comes of them.
    fn prove(&self, wave: &[FleetTried<'_>], outcome: &mut PlanFound) -> Result<()> {
        let files = on_all_cores(wave.len(), |at| self.parsed(&wave[at]));
        let files: Vec<FleetFile> = files.into_iter().collect::<Result<_>>()?;
        let repaired = on_all_cores(POLICIES.len() * wave.len(), |at| {
            let fleet = at / POLICIES.len();
            self.repair(&wave[fleet], &files[fleet], POLICIES[at % POLICIES.len()])
        });
        let mut repaired = repaired.into_iter();
        for (fleet, file) in wave.iter().zip(files) {
            let of_each: Vec<Option<Repaired>> =
                repaired.by_ref().take(POLICIES.len()).collect::<Result<_>>()?;
            for of_one in &of_each {
                outcome.complete &=
                    of_one.as_ref().is_some_and(|r| r.least || !r.trial.held && self.goes_on());
            }
            self.add(fleet, file, of_each, outcome)?;
        }
        Ok(())
    }

    /// The pools that a plan asks for, without its spares.
    fn without_spares(&self, planned: &FormedFleet) -> Vec<PlannedPool> {
        let mut pools = planned.pools.clone();
        pools.iter_mut().for_each(|pool| pool.count = pool.count.saturating_sub(self.spares(pool)).max(1));
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

    /// The fewest instances of a fleet that hold the objective under `policy`, within its most rent.
    fn repair(&self, tried: &FleetTried<'_>, file: &FleetFile, policy: Policy) -> Result<Option<Repaired>> {
        let pools = self.without_spares(tried.fleet);
        let fits = |counts: &[u32]| {
            let pools = self.with_spares(&pools, counts);
            self.usd_per_hour(&pools, tried) <= tried.most_usd && self.is_in_stock(&pools)
        };
        let told = |counts: &[u32], trial: &FleetTrial| {
            let (bound, word) = if trial.held { ("", "held") } else { ("at most ", "missed") };
            let (fleet, percent) = (self.words(&self.with_spares(&pools, counts)), 100.0 * trial.attained);
            let fleet = format!("{fleet}{}", tiers::words(&tried.tiers));
            self.say(&format!("{fleet}, {}: {bound}{percent:.2} %, {word}", crate::simulate::word(&policy)));
        };
        let rent = |counts: &[u32]| self.usd_per_hour(&self.with_spares(&pools, counts), tried);
        let limits = RepairLimits { fits: &fits, rent: &rent, go_on: &|| self.goes_on(), told: &told };
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
        of_each: Vec<Option<Repaired>>,
        outcome: &mut PlanFound,
    ) -> Result<()> {
        let FleetTried { fleet: planned, tiers, most_usd } = *tried;
        let pools = self.without_spares(planned);
        let rank = |of: &Repaired| {
            let usd = self.usd_per_hour(&self.with_spares(&pools, &of.counts), tried);
            (!of.trial.held, Ordered(usd), Ordered(-of.trial.attained))
        };
        let ended = POLICIES.into_iter().zip(of_each).filter_map(|(policy, of)| Some((policy, of?)));
        let cheapest = ended.min_by_key(|(_, of)| rank(of));
        let Some((policy, Repaired { counts, mut trial, less, least })) = cheapest else { return Ok(()) };
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
        file.pools = used.iter().map(|&pool| file.pools[pool].clone()).collect();
        let proven = ProvenFleet {
            likely_error,
            less: used.iter().map(|&pool| less[pool].clone()).collect(),
            pools: used.iter().map(|&pool| pools[pool].clone()).collect(),
            planned_usd_per_hour: planned.usd_per_hour.0,
            usd_per_hour,
            trial,
            least,
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
        let text = self.text.of(&pools, tried.fleet.stored, &tried.tiers, Policy::default());
        let file = FleetFile::parse(&text, Path::new(""), &none)?;
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
    let duty = match pool.duty {
        Duty::Whole => "",
        Duty::Prefill => " prefill",
        Duty::Decode => " decode",
    };
    format!("{} x {devices}{name}{}{attends}{duty}", pool.count, pool.layout.words())
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
