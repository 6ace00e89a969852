//! The fewest instances of a fleet's pools that hold an objective, found by simulation.
//!
//! A plan rests on rates; waiting, bursts, caches and the scheduler's choices appear only in a run. From the
//! counts of a plan, pools grow ([`FleetGrowth`]) until a run holds the objective, or gets no further with
//! more instances. Then instances are removed, first from the pools where that saves most, until no single
//! one can be spared. On request, instances of one pool are then exchanged for those of another, until no
//! cheaper exchange holds.

use crate::growth::FleetGrowth;
use mixfleet_hal::units::Ordered;
use mixfleet_sim::capacity::Goal;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Choices, Observer, Results, Setup, run};
use mixfleet_sim::trace::{Request, Requests, TraceError};
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Share of a pool that is taken away at once, while that holds.
const DECREASE: u32 = 8;
/// Maximum number of instances of one pool that are exchanged for one of another.
const EXCHANGED_MAX: u32 = 16;
/// Events between two questions whether to go on.
const EVENTS: u32 = 256;

/// A load, and the objectives of fleets under it.
#[derive(Clone, Copy, Debug)]
pub struct TrialLoad<'a> {
    /// The requests, in order of arrival.
    pub requests: &'a [Request],
    /// Tokens in a block of their prefixes, where these are known.
    pub block_tokens: Option<u32>,
    /// Factor by which they arrive faster.
    pub speedup: f64,
    /// Share of requests that must meet the objectives.
    pub share: f64,
    /// How requests are placed.
    pub choices: Choices,
}

/// What limits a repair.
#[derive(Clone, Copy)]
pub struct RepairLimits<'a> {
    /// Whether a fleet with these counts of its pools may be rented.
    pub fits: &'a dyn Fn(&[u32]) -> bool,
    /// Rent of these counts of the pools; the pool where removing an instance saves most is tried first.
    pub rent: &'a dyn Fn(&[u32]) -> f64,
    /// Whether to go on; if not, the repair ends with what it has.
    pub go_on: &'a dyn Fn() -> bool,
    /// Whether instances of one pool are exchanged for those of another.
    pub exchanges: bool,
    /// Called for every run.
    pub told: &'a dyn Fn(&[u32], &FleetTrial),
}

/// A run with some counts.
#[derive(Clone, Debug)]
pub struct FleetTrial {
    /// Whether it met the objective.
    pub held: bool,
    /// Share of the requests that met their objectives; at most, if the run ended as soon as it was sure to
    /// fail.
    pub attained: f64,
    /// The run, perhaps ended early.
    pub results: Results,
}

/// Where a repair ended.
#[derive(Clone, Debug)]
pub struct Repaired {
    /// Number of instances of each pool.
    pub counts: Vec<u32>,
    /// The run with them.
    pub trial: FleetTrial,
    /// For each pool in use the run with one instance less, which failed. `None` where no run was made: of a
    /// pool that is not in use, of the only one that can prefill or decode, or where the repair was stopped.
    pub less: Vec<Option<FleetTrial>>,
    /// Whether it is certain that no single instance can be spared.
    pub least: bool,
}

/// Ends a run that is sure to fail, or is no longer wanted.
struct Hurry<'a> {
    goal: Option<Goal>,
    go_on: &'a dyn Fn() -> bool,
    events: Cell<u32>,
    stopped: Cell<bool>,
}

impl Observer for Hurry<'_> {
    fn is_decided(&self, missed: u64) -> bool {
        self.events.set(self.events.get() + 1);
        if self.events.get() >= EVENTS {
            self.events.set(0);
            self.stopped.set(self.stopped.get() || !(self.go_on)());
        }
        self.stopped.get() || self.goal.is_some_and(|goal| goal.is_out_of_reach(missed))
    }
}

impl TrialLoad<'_> {
    /// Runs the load on `counts` instances of the pools of `file`; with `to_the_end` even if it is sure to
    /// fail. `None` if `go_on` ended it.
    ///
    /// # Errors
    /// Those of a run.
    pub fn trial(
        &self,
        file: &FleetFile,
        counts: &[u32],
        to_the_end: bool,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<FleetTrial>, TraceError> {
        let mut file = file.clone();
        file.pools.iter_mut().zip(counts).for_each(|(pool, count)| pool.count = *count);
        let goal = Goal { requests: self.requests.len() as u64, share: self.share };
        let mut hurry = Hurry {
            goal: (!to_the_end).then_some(goal),
            go_on,
            events: Cell::new(EVENTS),
            stopped: Cell::new(false),
        };
        let requests = self.requests.iter().cloned().map(Ok).speedup(self.speedup);
        let (from, to) = (self.block_tokens.unwrap_or(file.kv.block_tokens), file.kv.block_tokens);
        let results = run(&Setup::new(&file, self.choices), requests.rechain(from, to), &mut hurry)?;
        if hurry.stopped.get() {
            return Ok(None);
        }
        let attained = goal.attainable(results.missed);
        Ok(Some(FleetTrial { held: attained >= self.share, attained, results }))
    }

    /// Finds the fewest instances, from those in `file` on. KV nodes, which are the last pools, stay as many
    /// as they are. `None` if not even the first run was ended.
    ///
    /// # Errors
    /// Those of a run.
    pub fn repair(&self, file: &FleetFile, limits: &RepairLimits) -> Result<Option<Repaired>, TraceError> {
        let mut search = RepairSearch { trials: self, file, limits, known: BTreeMap::new() };
        let mut growth = FleetGrowth::of(file);
        let mut counts = growth.counts().to_vec();
        let Some(mut trial) = search.trial(&counts)? else { return Ok(None) };
        while !trial.held && growth.grow(&trial.results, limits.fits, limits.rent) {
            let Some(next) = search.trial(growth.counts())? else { break };
            (counts, trial) = (growth.counts().to_vec(), next);
        }
        if !trial.held {
            let whole = self.trial(file, &counts, true, limits.go_on)?;
            let (trial, less) = (whole.unwrap_or(trial), vec![None; counts.len()]);
            return Ok(Some(Repaired { counts, trial, less, least: false }));
        }
        search.fewest(counts, trial).map(Some)
    }

    /// Finds the fewest instances, from `counts` on, with which `trial` held.
    ///
    /// # Errors
    /// Those of a run.
    pub fn fewest(
        &self,
        file: &FleetFile,
        counts: &[u32],
        trial: FleetTrial,
        limits: &RepairLimits,
    ) -> Result<Repaired, TraceError> {
        let known = BTreeMap::from([(counts.to_vec(), trial.clone())]);
        RepairSearch { trials: self, file, limits, known }.fewest(counts.to_vec(), trial)
    }
}

struct RepairSearch<'a> {
    trials: &'a TrialLoad<'a>,
    file: &'a FleetFile,
    limits: &'a RepairLimits<'a>,
    known: BTreeMap<Vec<u32>, FleetTrial>,
}

impl RepairSearch<'_> {
    fn trial(&mut self, counts: &[u32]) -> Result<Option<FleetTrial>, TraceError> {
        if let Some(known) = self.known.get(counts) {
            return Ok(Some(known.clone()));
        }
        let trial = self.trials.trial(self.file, counts, false, self.limits.go_on)?;
        if let Some(trial) = &trial {
            (self.limits.told)(counts, trial);
            self.known.insert(counts.to_vec(), trial.clone());
        }
        Ok(trial)
    }

    fn fewest(&mut self, mut counts: Vec<u32>, mut trial: FleetTrial) -> Result<Repaired, TraceError> {
        loop {
            let found = self.decrease(counts, trial)?;
            if !found.least || !self.limits.exchanges {
                return Ok(found);
            }
            match self.exchange(&found.counts)? {
                Some(less) => (counts, trial) = less,
                None => return Ok(found),
            }
        }
    }

    /// Whether some instance can prefill and some can decode.
    fn serves(&self, counts: &[u32]) -> bool {
        let used = || self.file.pools.iter().zip(counts).filter(|(_, count)| **count > 0);
        used().any(|(pool, _)| pool.role.prefills()) && used().any(|(pool, _)| pool.role.decodes())
    }

    /// The counts after the exchange between two pools that saves most and holds; none where none does, or
    /// where the repair was stopped.
    fn exchange(&mut self, counts: &[u32]) -> Result<Option<(Vec<u32>, FleetTrial)>, TraceError> {
        let pairs = (0..counts.len()).flat_map(|from| (0..counts.len()).map(move |to| (from, to)));
        let rent = (self.limits.rent)(counts);
        let exchanged = pairs.filter_map(|(from, to)| self.exchanged(counts, from, to));
        let mut tried: Vec<_> = exchanged.map(|other| ((self.limits.rent)(&other), other)).collect();
        tried.retain(|(other, counts)| *other < rent && self.serves(counts) && (self.limits.fits)(counts));
        tried.sort_by_key(|(rent, _)| Ordered(*rent));
        for (_, counts) in tried {
            match self.trial(&counts)? {
                Some(trial) if trial.held => return Ok(Some((counts, trial))),
                Some(_) => {}
                None => break,
            }
        }
        Ok(None)
    }

    /// Instances of pool `from` for instances of pool `to`, which do the same, at less rent: for a dear one
    /// as many cheap ones as it pays for, or for no more cheap ones than it takes a dear one.
    fn exchanged(&self, counts: &[u32], from: usize, to: usize) -> Option<Vec<u32>> {
        let with = |fewer: u32, more: u32| {
            let mut counts = counts.to_vec();
            counts[from] = counts[from].checked_sub(fewer)?;
            counts[to] += more;
            Some(counts)
        };
        let rent = (self.limits.rent)(counts);
        let costs_less = |counts: &Vec<u32>| (self.limits.rent)(counts) < rent;
        let does = |pool: usize| {
            let role = self.file.pools[pool].role;
            (role.prefills(), role.decodes())
        };
        if from == to || does(from) != does(to) {
            return None;
        }
        match with(1, 1).filter(costs_less) {
            Some(one) => {
                let more = (2..=EXCHANGED_MAX).map_while(|more| with(1, more).filter(costs_less)).last();
                more.or(Some(one))
            }
            None => (2..=EXCHANGED_MAX).find_map(|fewer| with(fewer, 1).filter(costs_less)),
        }
    }

    fn decrease(&mut self, mut counts: Vec<u32>, mut trial: FleetTrial) -> Result<Repaired, TraceError> {
        let mut order: Vec<usize> = (0..counts.len()).collect();
        loop {
            let before = counts.clone();
            let saved = |pool: &usize| {
                let mut fewer = before.clone();
                fewer[*pool] = fewer[*pool].saturating_sub(1);
                (self.limits.rent)(&before) - (self.limits.rent)(&fewer)
            };
            order.sort_by_key(|pool| Reverse(Ordered(saved(pool))));
            let mut less = vec![None; counts.len()];
            for &pool in &order {
                let mut by = (counts[pool] / DECREASE).max(1);
                loop {
                    let mut fewer = counts.clone();
                    fewer[pool] = fewer[pool].saturating_sub(by);
                    if counts[pool] == 0 || !self.serves(&fewer) {
                        break;
                    }
                    let Some(next) = self.trial(&fewer)? else {
                        return Ok(Repaired { counts, trial, less, least: false });
                    };
                    match (next.held, by) {
                        (true, _) => (counts, trial) = (fewer, next),
                        (false, 1) => {
                            less[pool] = Some(next);
                            break;
                        }
                        (false, _) => by /= 2,
                    }
                }
            }
            if counts == before {
                return Ok(Repaired { counts, trial, less, least: true });
            }
        }
    }
}
