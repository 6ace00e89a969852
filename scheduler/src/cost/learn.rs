//! Online correction of predictions: each instance has a factor for its prefills, its decode steps and its
//! transfers.
//!
//! ```text
//! ratio   = moving mean of (measured / predicted), each clamped to [1/4, 4], over 2 s of predicted time
//! applied = the ratio in whole steps of 5 %, once it is more than such a step from what is applied
//! ```
//!
//! The mean is over predicted time, so that a single outlier counts only as much as the step it affects, and
//! an idle instance learns nothing. Steps of 5 % keep an instance whose predictions are right exactly at 1,
//! and instances of a kind equal, which lets a large fleet be ranked quickly. Corrections that were not
//! measured for a minute fade, so that an instance that gets no work because it was slow is tried again.

use super::{CostModel, Prefill};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// The lower bound of a correction; the upper bound follows.
const LEAST: f64 = 0.25;
const MOST: f64 = 4.0;

/// Predicted time after which two thirds of an error are learned.
const MEMORY: Seconds = Seconds(2.0);

/// Corrections are powers of this.
const STEP: f64 = 1.05;

/// Time after which a correction without measurements loses half of its logarithm, repeatedly.
pub(crate) const FADES_AFTER: Seconds = Seconds(60.0);

/// Equal steps of an instance, with their measured time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredSteps {
    /// Prompt chunks in each step.
    pub parts: Vec<Prefill>,
    /// Number of sequences that decode in each step.
    pub sequences: u32,
    /// Total context of those sequences in tokens, in the middle step.
    pub kv_tokens: u64,
    /// Number of equal steps, one after the other.
    pub steps: u32,
    /// Measured time of all these steps.
    pub time: Seconds,
}

/// Learned factors by which an instance's predictions are multiplied; 1 where they are right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corrections {
    /// Factor for the time of prompts.
    pub prefill: f64,
    /// Factor for the time of decode steps.
    pub step: f64,
    /// Factor for the time of KV transfers out of the instance.
    pub transfer: f64,
}

impl Default for Corrections {
    fn default() -> Self {
        Corrections { prefill: 1.0, step: 1.0, transfer: 1.0 }
    }
}

impl Corrections {
    /// The corrected time of a step, of which decoding alone is corrected as a decode step.
    pub(crate) fn step_s(
        &self,
        cost: &CostModel,
        pieces: &[Prefill],
        (sequences, kv_tokens): (u32, u64),
    ) -> Seconds {
        let step = cost.step_s(pieces, sequences, kv_tokens);
        if *self == Corrections::default() {
            return step;
        }
        let decodes = cost.decode_step_s(sequences, kv_tokens).min(step);
        (step - decodes) * self.prefill + decodes * self.step
    }
}

/// The learned correction of one kind of work on one instance.
#[derive(Clone, Copy, Debug)]
struct Learned {
    /// Mean of measured divided by predicted time.
    ratio: f64,
    /// The factor applied to predictions.
    applied: f64,
    /// Mean remaining error, relative to the measured time.
    error: f64,
    measured_at: Seconds,
}

impl Default for Learned {
    fn default() -> Self {
        Learned { ratio: 1.0, applied: 1.0, error: 0.0, measured_at: Seconds::ZERO }
    }
}

impl Learned {
    /// Adds a measurement; `predicted` is uncorrected, and the part `share` of it is of this kind.
    fn observe(&mut self, now: Seconds, predicted: Seconds, share: f64, measured: Seconds) {
        let ratio = (measured / predicted).clamp(LEAST, MOST);
        let weight = 1.0 - (-(predicted.0 * share) / MEMORY.0).exp();
        if !(weight > 0.0 && ratio.is_finite()) {
            return;
        }
        let error = (1.0 - self.applied / ratio).abs();
        self.error += weight * (error - self.error);
        self.ratio += weight * (ratio - self.ratio);
        self.measured_at = now;
        self.apply();
    }

    fn apply(&mut self) {
        let steps = self.ratio.ln() / STEP.ln();
        if (steps - self.applied.ln() / STEP.ln()).abs() > 1.0 {
            self.applied = STEP.powf(steps.round()).clamp(LEAST, MOST);
        }
    }

    fn fade(&mut self, now: Seconds) {
        if (self.applied != 1.0 || self.ratio != 1.0) && (now - self.measured_at).0 > FADES_AFTER.0 {
            self.ratio = self.ratio.sqrt();
            self.measured_at = now;
            self.apply();
            if (self.ratio.ln() / STEP.ln()).abs() <= 1.0 {
                self.applied = 1.0;
            }
        }
    }
}

/// The learned corrections of an instance.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Learner {
    prefill: Learned,
    step: Learned,
    transfer: Learned,
}

impl Learner {
    pub(crate) fn corrections(&self) -> Corrections {
        let Learner { prefill, step, transfer } = self;
        Corrections { prefill: prefill.applied, step: step.applied, transfer: transfer.applied }
    }

    /// The correction of decode steps, which a decision uses a thousand times.
    #[inline]
    pub(crate) fn step_factor(&self) -> f64 {
        self.step.applied
    }

    /// The factor of the time of prompts.
    #[inline]
    pub(crate) fn prefill_factor(&self) -> f64 {
        self.prefill.applied
    }

    /// The factor of the time of KV transfers.
    #[inline]
    pub(crate) fn transfer_factor(&self) -> f64 {
        self.transfer.applied
    }

    /// Mean remaining errors, relative to measured times.
    pub(crate) fn errors(&self) -> Corrections {
        let Learner { prefill, step, transfer } = self;
        Corrections { prefill: prefill.error, step: step.error, transfer: transfer.error }
    }

    /// Adds measured steps. A step may contain prompts and decodes: the predicted time of decoding alone
    /// counts as decode.
    pub(crate) fn observe_steps(&mut self, now: Seconds, cost: &CostModel, measured: &MeasuredSteps) {
        let MeasuredSteps { parts, sequences, kv_tokens, steps, time } = measured;
        let step = cost.step_s(parts, *sequences, *kv_tokens);
        let predicted = step * f64::from(*steps);
        // A clock that stands still has measured nothing.
        let is_time = |time: Seconds| time.0 > 0.0 && time.0.is_finite();
        if !is_time(predicted) || !is_time(*time) {
            return;
        }
        let decodes = if parts.is_empty() {
            1.0
        } else {
            (cost.decode_step_s(*sequences, *kv_tokens) / step).clamp(0.0, 1.0)
        };
        self.prefill.observe(now, predicted, 1.0 - decodes, *time);
        self.step.observe(now, predicted, decodes, *time);
    }

    /// Adds a measured transfer of KV out of the instance; `predicted` is uncorrected.
    pub(crate) fn observe_transfer(&mut self, now: Seconds, predicted: Seconds, measured: Seconds) {
        self.transfer.observe(now, predicted, 1.0, measured);
    }

    pub(crate) fn fade(&mut self, now: Seconds) {
        [&mut self.prefill, &mut self.step, &mut self.transfer].into_iter().for_each(|kind| kind.fade(now));
    }
}
