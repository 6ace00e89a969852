//! Distinguishes corrupted KV from numeric drift, for pairs of engines in which one computes prompts for the
//! other.
//!
//! A canary is a copy of a request that is answered twice: divided between the two engines of a pair, and by
//! one engine alone, which computes the prompt itself. The distance between the two ([`distance()`]) is
//! a difference of log-probabilities in nats. How large it is without corruption is learned from controls:
//! both engines alone, so that no corrupted KV can ever pass for drift ([`Drift`]). [`CanaryWatch`] sums up
//! the evidence of each pair and says which pairs may share requests and which requests become canaries.
//!
//! Per canary the likelihood ratio is `1 - FAULT_SHARE + FAULT_SHARE * g(x) / f(x)`, where x is the logarithm
//! of the distance, f the learned density of drift (Student's t, 5 degrees of freedom), and g two thirds of
//! a uniform density from the learned median to the largest distance that counts. Its logarithms add up to
//! the evidence, which is never below 0 (Page's CUSUM test). While drift has no heavier upper tail than f,
//! the mean number of canaries until a false alarm is at least `1 / false_alarm` (Lorden 1971), and n
//! canaries raise one with probability at most `n * false_alarm`.
//!
//! Absent: clocks, I/O, the meaning of tokens, randomness.

mod distance;
mod drift;
#[cfg(test)]
mod tests;

pub use distance::distance;
pub use drift::Drift;

use crate::fleet::InstanceId;
use drift::Controls;
use mixfleet_hal::units::Seconds;
use std::collections::BTreeMap;

/// Share of transfers that a fault damages at least, as the test assumes.
const FAULT_SHARE: f64 = 0.1;
/// Evidence (a ratio of likelihoods) from which on a proven pair shares nothing until it is cleared.
const SUSPECT_RATIO: f64 = 100.0;
/// Median distance of controls above which the two engines are not of one model: in nats.
const DISAGREEMENT: f64 = 0.5;
/// Controls of a proven pair: one in this many canaries.
const CONTROL_EVERY: u64 = 4;

/// When canaries run, and the consequences of their results.
#[derive(Clone, Debug, PartialEq)]
pub struct CanaryConfig {
    /// Share of a proven pair's requests that become canaries.
    pub share: f64,
    /// The same for its first `early` canaries, and for as many after one of its engines started again.
    pub early_share: f64,
    /// Number of canaries at the early share.
    pub early: u32,
    /// Canaries that must be compared before a pair is proven.
    pub proven_after: u32,
    /// Canaries in flight, of all pairs together; a pair has one.
    pub at_once: u32,
    /// Probability per canary of a false alarm.
    pub false_alarm: f64,
    /// First pause of a pair that failed; each further one is twice as long, up to the maximum.
    pub pause_first: Seconds,
    /// Longest pause.
    pub pause_max: Seconds,
}

impl Default for CanaryConfig {
    fn default() -> Self {
        CanaryConfig {
            share: 0.01,
            early_share: 0.1,
            early: 100,
            proven_after: 32,
            at_once: 2,
            false_alarm: 1e-6,
            pause_first: Seconds(60.0),
            pause_max: Seconds(3600.0),
        }
    }
}

/// Two engines, by the way that KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CanaryPair {
    /// The engine that computes the prompt.
    pub from: InstanceId,
    /// The engine that pulls its KV and answers.
    pub to: InstanceId,
}

/// Whether a pair shares requests, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CanaryPhase {
    /// Too few canaries were compared: no client's request is shared.
    Unproven,
    /// It shares requests.
    Proven,
    /// It was proven, and some canaries differed: nothing is shared until it is clear why.
    Suspect,
    /// It failed, and is tried again then.
    Quarantined {
        /// When canaries try it again.
        until: Seconds,
    },
}

impl CanaryPhase {
    /// The phase's name in explanations and metrics.
    pub fn name(self) -> &'static str {
        match self {
            CanaryPhase::Unproven => "unproven",
            CanaryPhase::Proven => "proven",
            CanaryPhase::Suspect => "suspect",
            CanaryPhase::Quarantined { .. } => "quarantined",
        }
    }

    /// Why a pair shares no requests, if it shares none.
    pub fn barred(self) -> Option<&'static str> {
        match self {
            CanaryPhase::Unproven => Some("KV between these two engines is not proven yet"),
            CanaryPhase::Proven => None,
            CanaryPhase::Suspect => Some("canaries of these two engines differed, and others will tell why"),
            CanaryPhase::Quarantined { .. } => Some("these two engines are quarantined: canaries differed"),
        }
    }
}

/// Permission for one canary. It ends with [`CanaryWatch::end`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CanaryPlan {
    /// The pair.
    pub pair: CanaryPair,
    /// Whether the engine that computes prompts answers alone too, as a control.
    pub control: bool,
    /// The state that it was planned in: what it finds counts only while this lasts.
    run: u64,
}

/// What a canary found, in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CanaryFinding {
    /// Distance between the divided answer and that of one engine.
    pub divided: f64,
    /// Distance between the answers of both engines alone.
    pub control: Option<f64>,
}

/// A change of phase that a finding brought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CanaryChange {
    /// The pair shares requests from now on.
    Proven,
    /// The pair shares nothing until more canaries were compared.
    Suspected,
    /// The divided answers differ from those of one engine. The pair is suspended for this long.
    Corrupt(Seconds),
    /// The two engines also differ without a hand-off, so that canaries cannot judge. The pair is suspended
    /// for this long.
    Disagree(Seconds),
}

/// A pair's state, for display.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CanaryView {
    /// Its phase.
    pub phase: CanaryPhase,
    /// Canaries compared in this phase and those before it, since the pair came up or last failed.
    pub compared: u64,
    /// Logarithm of the likelihood ratio for corruption.
    pub evidence: f64,
    /// The learned drift.
    pub drift: Drift,
    /// Distance that the latest canary found.
    pub latest: Option<f64>,
}

#[derive(Clone, Debug)]
struct PairRecord {
    /// Layout and dtype of KV at both ends.
    form: String,
    phase: CanaryPhase,
    run: u64,
    compared: u64,
    evidence: f64,
    controls: Controls,
    latest: Option<f64>,
    /// Canaries left at the early share.
    early: u32,
    in_flight: bool,
    /// Length of the next pause.
    pause: Seconds,
}

/// All pairs. A value without a clock: times and random numbers come in with events.
#[derive(Clone, Debug)]
pub struct CanaryWatch {
    config: CanaryConfig,
    pairs: BTreeMap<CanaryPair, PairRecord>,
    in_flight: u32,
    runs: u64,
}

impl CanaryWatch {
    /// A watch that knows no pair.
    pub fn new(config: CanaryConfig) -> Self {
        CanaryWatch { config, pairs: BTreeMap::new(), in_flight: 0, runs: 0 }
    }

    /// A pair's phase; one with KV of another form was never proven.
    pub fn phase(&self, pair: CanaryPair, form: &str) -> CanaryPhase {
        let known = self.pairs.get(&pair).filter(|record| record.form == form);
        known.map_or(CanaryPhase::Unproven, |record| record.phase)
    }

    /// A pair's state, for display.
    pub fn view(&self, pair: CanaryPair, form: &str) -> Option<CanaryView> {
        let record = self.pairs.get(&pair).filter(|record| record.form == form)?;
        Some(CanaryView {
            phase: record.phase,
            compared: record.compared,
            evidence: record.evidence,
            drift: record.controls.drift(),
            latest: record.latest,
        })
    }

    /// Decides whether a request that this pair answered, or would have, becomes a canary. `roll` is uniform
    /// in [0, 1).
    pub fn begin(&mut self, now: Seconds, pair: CanaryPair, form: &str, roll: f64) -> Option<CanaryPlan> {
        self.meet(pair, form);
        let config = &self.config;
        let record = self.pairs.get_mut(&pair)?;
        if record.in_flight || self.in_flight >= config.at_once {
            return None;
        }
        if matches!(record.phase, CanaryPhase::Quarantined { until } if until <= now) {
            self.runs += 1;
            (record.phase, record.run) = (CanaryPhase::Unproven, self.runs);
            (record.compared, record.evidence) = (0, 0.0);
            record.controls = Controls::default();
        }
        let share = match record.phase {
            CanaryPhase::Unproven | CanaryPhase::Suspect => 1.0,
            CanaryPhase::Proven if record.early > 0 => config.early_share.max(config.share),
            CanaryPhase::Proven => config.share,
            CanaryPhase::Quarantined { .. } => 0.0,
        };
        if roll >= share {
            return None;
        }
        record.in_flight = true;
        self.in_flight += 1;
        let is_settled = record.phase == CanaryPhase::Proven && record.controls.is_learned();
        let control = !is_settled || record.compared.is_multiple_of(CONTROL_EVERY);
        Some(CanaryPlan { pair, control, run: record.run })
    }

    /// Takes what a canary found; none if it could not be compared.
    pub fn end(
        &mut self,
        now: Seconds,
        plan: &CanaryPlan,
        finding: Option<CanaryFinding>,
    ) -> Option<CanaryChange> {
        assert!(self.in_flight > 0, "a canary ends that never began");
        self.in_flight -= 1;
        let record = self.pairs.get_mut(&plan.pair).expect("pairs stay known");
        assert!(record.in_flight, "a pair's canary ends that never began");
        record.in_flight = false;
        let finding = finding.filter(|_| plan.run == record.run)?;
        record.take(&finding);
        let alarm = -self.config.false_alarm.ln();
        let disagree = record.controls.is_learned() && record.controls.drift().median() > DISAGREEMENT;
        if record.evidence >= alarm || disagree {
            let pause = record.quarantine(now, &self.config);
            self.runs += 1;
            record.run = self.runs;
            return Some(if disagree { CanaryChange::Disagree(pause) } else { CanaryChange::Corrupt(pause) });
        }
        record.settle(&self.config)
    }

    /// An engine started again: its pairs keep their phase, and have more canaries for a while.
    pub fn restarted(&mut self, instance: InstanceId) {
        for (pair, record) in &mut self.pairs {
            if pair.from == instance || pair.to == instance {
                record.early = self.config.early;
            }
        }
    }

    /// Adds a pair, or begins anew with one whose KV has another form now.
    fn meet(&mut self, pair: CanaryPair, form: &str) {
        let known = self.pairs.get(&pair);
        if known.is_some_and(|record| record.form == form) {
            return;
        }
        let in_flight = known.is_some_and(|record| record.in_flight);
        self.runs += 1;
        let record = PairRecord {
            form: form.to_owned(),
            phase: CanaryPhase::Unproven,
            run: self.runs,
            compared: 0,
            evidence: 0.0,
            controls: Controls::default(),
            latest: None,
            early: self.config.early,
            in_flight,
            pause: self.config.pause_first,
        };
        self.pairs.insert(pair, record);
    }
}

impl PairRecord {
    /// Adds a canary's evidence to what there is, by the drift that was learned before it.
    fn take(&mut self, finding: &CanaryFinding) {
        let ratio = self.controls.drift().likelihood_ratio(finding.divided, FAULT_SHARE);
        self.evidence = (self.evidence + ratio.ln()).max(0.0);
        self.compared += 1;
        self.latest = Some(finding.divided);
        self.early = self.early.saturating_sub(u32::from(self.phase == CanaryPhase::Proven));
        if let Some(control) = finding.control {
            self.controls.learn(control);
        }
    }

    fn quarantine(&mut self, now: Seconds, config: &CanaryConfig) -> Seconds {
        let pause = self.pause;
        self.phase = CanaryPhase::Quarantined { until: now + pause };
        self.pause = Seconds((pause.0 * 2.0).min(config.pause_max.0));
        self.early = config.early;
        pause
    }

    /// The change of phase that the evidence brings, if it is no alarm.
    fn settle(&mut self, config: &CanaryConfig) -> Option<CanaryChange> {
        let is_clear = self.evidence == 0.0;
        match self.phase {
            CanaryPhase::Proven if self.evidence >= SUSPECT_RATIO.ln() => {
                self.phase = CanaryPhase::Suspect;
                Some(CanaryChange::Suspected)
            }
            CanaryPhase::Proven => {
                if self.early == 0 && is_clear {
                    self.pause = config.pause_first;
                }
                None
            }
            CanaryPhase::Suspect if is_clear => {
                (self.phase, self.early) = (CanaryPhase::Proven, config.early);
                Some(CanaryChange::Proven)
            }
            CanaryPhase::Unproven if is_clear && self.compared >= u64::from(config.proven_after) => {
                (self.phase, self.early) = (CanaryPhase::Proven, config.early);
                Some(CanaryChange::Proven)
            }
            CanaryPhase::Unproven | CanaryPhase::Suspect | CanaryPhase::Quarantined { .. } => None,
        }
    }
}
