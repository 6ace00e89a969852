//! Trials: requests that run on an instance which gets no work because it is predicted to be slow.
//!
//! A prediction that keeps work away is never held against a measurement, so that a device once wrongly
//! predicted, or slow for a while, would stay idle. Each placement earns a share of the time that it is
//! predicted to take ([`FleetConfig::trial_share`](super::FleetConfig)); a trial spends what it is predicted
//! to lose against the best placement. So trials cost at most that share of all requests' time, and short
//! requests, which lose least, are tried first. A trial meets the objectives of its request, as predicted.

use super::explain::{Candidate, Outcome};
use super::load::Load;
use super::place::{Pick, Question};
use super::{Arrival, Fleet, Role};
use mixfleet_hal::random::Stream;

/// Placements elsewhere after which an instance without a measurement is tried.
const TRIED_AFTER: u64 = 16;

/// One in this many placements may be a trial, by chance, so that routers do not try the same instance
/// together.
const ONE_IN: u64 = 4;

/// Maximum time spent on one trial, in mean placements' times.
const SAVED_MAX: f64 = 16.0;

/// The weight of the latest placement in the mean time.
const MEAN_FOLLOWS: f64 = 0.05;

/// The budget of trials.
#[derive(Debug)]
pub(super) struct TrialBudget {
    /// Predicted seconds that trials may lose by now.
    saved_s: f64,
    /// Mean predicted time of a request.
    mean_s: f64,
    /// Number of placements.
    pub(super) placed: u64,
    random: Stream,
}

impl TrialBudget {
    pub(super) fn new(seed: u64) -> Self {
        TrialBudget { saved_s: 0.0, mean_s: 0.0, placed: 0, random: Stream::new(seed ^ 0x7472_6961_6c73) }
    }

    fn earn(&mut self, share: f64, seconds: f64) {
        self.placed += 1;
        if self.mean_s == 0.0 {
            self.mean_s = seconds;
        }
        self.mean_s += (seconds - self.mean_s) * MEAN_FOLLOWS;
        self.saved_s = (self.saved_s + share * seconds).min(SAVED_MAX * self.mean_s);
    }
}

impl Fleet {
    /// The placement that is tried instead of the `chosen` one of `candidates`, by its place among them, to
    /// which it may be added.
    pub(super) fn tried_instead(
        &mut self,
        question: &Question<'_>,
        candidates: &mut Vec<Candidate>,
        chosen: usize,
    ) -> Option<usize> {
        let best = &candidates[chosen];
        let best_s = best.terms?.ends_s;
        let share = self.config.trial_share;
        if share <= 0.0 || !best_s.is_finite() {
            return None;
        }
        self.trials.earn(share, best_s);
        if self.trials.random.below(ONE_IN) > 0 || question.arrival.replay.is_some() {
            return None;
        }
        let tried = self.idle_for_long(question.arrival)?;
        let pick = self.pick_of_trial(
            question.arrival,
            tried,
            (self.position(best.prefill)?, self.position(best.decode)?),
        )?;
        let mut candidate = self.candidates(question, &[pick]).pop()?;
        let terms = candidate.terms.filter(|terms| question.objectives.missed(terms).is_none())?;
        let loses_s = (terms.ends_s - best_s).max(0.0);
        if loses_s > self.trials.saved_s {
            return None;
        }
        self.trials.saved_s -= loses_s;
        let load = &self.loads[tried];
        candidates[chosen].outcome = Outcome::TrialElsewhere { instance: load.spec.id };
        // asked again only after as many placements
        let placed = self.trials.placed;
        self.loads.measured_after(tried, placed);
        candidate.outcome = Outcome::Chosen;
        let same = |known: &Candidate| {
            (known.prefill, known.decode, known.pull) == (candidate.prefill, candidate.decode, candidate.pull)
        };
        match candidates.iter().position(same) {
            Some(at) => candidates[at] = candidate,
            None => candidates.push(candidate),
        }
        candidates.iter().position(|candidate| candidate.outcome == Outcome::Chosen)
    }

    /// One of the instances that computed nothing while many requests were placed, by chance.
    fn idle_for_long(&mut self, arrival: &Arrival) -> Option<usize> {
        let until = self.trials.placed.checked_sub(TRIED_AFTER)?;
        let is_idle = |load: &Load| load.measured_after <= until && !load.is_busy();
        let idle = self.able_for(arrival, Role::computes).filter(|(_, load)| is_idle(load));
        let idle: Vec<usize> = idle.map(|(at, _)| at).collect();
        let chance = self.trials.random.below(idle.len().max(1) as u64);
        idle.get(usize::try_from(chance).ok()?).copied()
    }

    /// A placement that uses the instance at `tried`, and what it has no role for of the best one.
    fn pick_of_trial(&self, arrival: &Arrival, tried: usize, best: (usize, usize)) -> Option<Pick> {
        let may = |can| arrival.may_use(&self.loads[tried].spec, can);
        let prefill = if may(Role::prefills) { tried } else { best.0 };
        let decode = if may(Role::decodes) { tried } else { best.1 };
        ((prefill, decode) != best).then_some(Pick { prefill, decode, pull: None })
    }
}

#[cfg(test)]
mod tests;
