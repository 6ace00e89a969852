//! Online correction of predictions: factors of an instance for its prefills, its decode steps and its
//! transfers.
//!
//! ```text
//! factor(kind, size) = overall(kind) * own(kind, size)
//! overall            = median of the latest ratios of measured to predicted time, each over own(size)
//! own                = median of the latest ratios of that size, each over overall
//! ```
//!
//! The error of a prediction depends on the size of a step (launches, bandwidth, arithmetic), so each of
//! three sizes has its own factor; a size without measurements uses the overall one. Every measurement counts
//! alike, however long it took, so that three of a kind correct an error of any size, and a hiccup counts
//! nothing. No bound hides an error: a device beyond [`DECLARED_WITHIN`] times its prediction is reported as
//! another part than the declared one, and predicted as it is measured.
//!
//! Factors are applied in steps of 5 %, once they differ by more than a step from the applied value:
//! instances whose predictions are right stay exactly at 1, and instances of a kind stay equal, which lets a
//! large fleet be ranked quickly.

use super::{CostModel, Prefill};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Sizes that are corrected apart: the upper bounds of the first two, in prompt tokens of a step.
pub const PREFILL_SIZES: [u32; 2] = [128, 1024];
/// The same for decode steps, in sequences.
pub const STEP_SIZES: [u32; 2] = [4, 32];

/// Number of latest values whose median counts.
const LATEST: usize = 9;

/// Number of measurements that outvote the two assumed ones.
const PROVEN_BY: u32 = 3;

/// Corrections are powers of this.
const STEP: f64 = 1.05;

/// A device whose steps take more than this multiple of their prediction, or less than its inverse, is not
/// the declared part.
pub const DECLARED_WITHIN: f64 = 4.0;

/// Smaller differences are attributed to the host, and do not count against the part.
const NOTABLE: Seconds = Seconds(0.002);

/// Time after which earlier measurements count as only two.
const STALE_AFTER: Seconds = Seconds(10.0);

/// Time after which the correction of transfers, if nothing is measured, loses half of its logarithm,
/// repeatedly: the links of an instance that gets no work because they were slow are tried again. Devices are
/// tried by placements (`fleet::trials`).
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

/// The factors that apply to the prediction of a request; 1 where predictions are right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corrections {
    /// Factor for the time of its prompt.
    pub prefill: f64,
    /// Factor for the time of its decode steps.
    pub step: f64,
    /// Factor for the time of KV transfers out of the instance.
    pub transfer: f64,
}

impl Default for Corrections {
    fn default() -> Self {
        Corrections { prefill: 1.0, step: 1.0, transfer: 1.0 }
    }
}

/// Learned factors by which an instance's predictions are multiplied, by size; 1 where they are right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizedCorrections {
    /// Factors for the time of prompts of up to each size of [`PREFILL_SIZES`], and of larger ones.
    pub prefill: [f64; 3],
    /// Factors for the time of decode steps of up to each size of [`STEP_SIZES`], and of larger ones.
    pub step: [f64; 3],
    /// Factor for the time of KV transfers out of the instance.
    pub transfer: f64,
}

impl Default for SizedCorrections {
    fn default() -> Self {
        SizedCorrections { prefill: [1.0; 3], step: [1.0; 3], transfer: 1.0 }
    }
}

/// The place of `size` among sizes with these bounds.
#[inline]
fn size_class(size: u32, bounds: [u32; 2]) -> usize {
    usize::from(size > bounds[0]) + usize::from(size > bounds[1])
}

impl SizedCorrections {
    /// The factor for the time of a prompt that is computed in pieces of `tokens`.
    #[inline]
    pub fn prefill_of(&self, tokens: u32) -> f64 {
        self.prefill[size_class(tokens, PREFILL_SIZES)]
    }

    /// The factor for the time of a decode step.
    #[inline]
    pub fn step_of(&self, sequences: u32) -> f64 {
        self.step[size_class(sequences, STEP_SIZES)]
    }

    /// The corrected time of a step; its decodes alone are corrected as a decode step.
    pub(crate) fn step_s(
        &self,
        cost: &CostModel,
        pieces: &[Prefill],
        (sequences, kv_tokens): (u32, u64),
    ) -> Seconds {
        let step = cost.step_s(pieces, sequences, kv_tokens);
        if *self == SizedCorrections::default() {
            return step;
        }
        let decodes = cost.decode_step_s(sequences, kv_tokens).min(step);
        (step - decodes) * self.prefill_of(tokens_of(pieces)) + decodes * self.step_of(sequences)
    }
}

fn tokens_of(pieces: &[Prefill]) -> u32 {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.tokens))
}

/// The latest values, whose median counts. It begins with two zeros, which say that predictions are right.
#[derive(Clone, Copy, Debug)]
struct Latest {
    values: [f64; LATEST],
    len: usize,
    next: usize,
}

impl Default for Latest {
    fn default() -> Self {
        Latest::assuming(0.0)
    }
}

impl Latest {
    /// As if two measurements had given `value`.
    fn assuming(value: f64) -> Self {
        let mut values = [0.0; LATEST];
        values[..2].fill(value);
        Latest { values, len: 2, next: 2 }
    }

    fn push(&mut self, value: f64) {
        self.values[self.next] = value;
        self.next = (self.next + 1) % LATEST;
        self.len = (self.len + 1).min(LATEST);
    }

    fn median(&self) -> f64 {
        let mut sorted = self.values;
        let sorted = &mut sorted[..self.len];
        sorted.sort_unstable_by(f64::total_cmp);
        f64::midpoint(sorted[(self.len - 1) / 2], sorted[self.len / 2])
    }
}

/// The learned correction of one kind of work on one instance.
#[derive(Clone, Copy, Debug)]
struct Learned {
    /// Logarithms of ratios of all sizes.
    overall: Latest,
    /// Logarithms of the ratios of each size beyond the overall one.
    own: [Latest; 3],
    /// The factors applied to predictions.
    applied: [f64; 3],
    /// Number of measurements.
    measured: u32,
    /// By size, the number of latest measurements with a notable difference from the prediction.
    notable: [u32; 3],
    measured_at: Seconds,
}

impl Default for Learned {
    fn default() -> Self {
        let (overall, own) = (Latest::default(), [Latest::default(); 3]);
        let (applied, measured_at) = ([1.0; 3], Seconds::ZERO);
        Learned { overall, own, applied, measured: 0, notable: [0; 3], measured_at }
    }
}

impl Learned {
    /// Adds a measurement of work of a size, which took `ratio` times the uncorrected prediction.
    fn observe(&mut self, now: Seconds, size: usize, predicted: Seconds, ratio: f64) {
        let log = ratio.ln();
        if !log.is_finite() {
            return;
        }
        if (now - self.measured_at).0 > STALE_AFTER.0 {
            self.overall = Latest::assuming(self.overall.median());
        }
        self.overall.push(log - self.own[size].median());
        self.measured = self.measured.saturating_add(1);
        // before, what the sizes have in common is not known
        if self.measured >= PROVEN_BY {
            self.own[size].push(log - self.overall.median());
        }
        let differs = (predicted * ratio - predicted).0.abs() >= NOTABLE.0;
        self.notable[size] = if differs { self.notable[size].saturating_add(1) } else { 0 };
        self.measured_at = now;
        self.apply();
    }

    fn apply(&mut self) {
        let overall = self.overall.median();
        for (applied, own) in self.applied.iter_mut().zip(&self.own) {
            let steps = (overall + own.median()) / STEP.ln();
            if (steps - applied.ln() / STEP.ln()).abs() > 1.0 {
                *applied = STEP.powf(steps.round());
            }
        }
    }

    fn fade(&mut self, now: Seconds) {
        let overall = self.overall.median();
        if (overall != 0.0 || self.applied != [1.0; 3]) && (now - self.measured_at).0 > FADES_AFTER.0 {
            self.overall = Latest::assuming(overall / 2.0);
            self.measured_at = now;
            self.apply();
            if overall.abs() / 2.0 <= STEP.ln() {
                self.applied = [1.0; 3];
            }
        }
    }

    /// Whether one of these sizes is proven to be beyond [`DECLARED_WITHIN`].
    fn is_far_off(&self, sizes: Range<usize>) -> bool {
        let off = |size: usize| {
            self.notable[size] >= PROVEN_BY && self.applied[size].ln().abs() > DECLARED_WITHIN.ln()
        };
        sizes.into_iter().any(off)
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
    pub(crate) fn corrections(&self) -> SizedCorrections {
        let Learner { prefill, step, transfer } = self;
        SizedCorrections { prefill: prefill.applied, step: step.applied, transfer: transfer.applied[0] }
    }

    /// The correction of decode steps, which a decision uses a thousand times.
    #[inline]
    pub(crate) fn step_factor(&self, sequences: u32) -> f64 {
        self.step.applied[size_class(sequences, STEP_SIZES)]
    }

    /// The factor of the time of prompts that are computed in pieces of `tokens`.
    #[inline]
    pub(crate) fn prefill_factor(&self, tokens: u32) -> f64 {
        self.prefill.applied[size_class(tokens, PREFILL_SIZES)]
    }

    /// The factor of the time of KV transfers.
    #[inline]
    pub(crate) fn transfer_factor(&self) -> f64 {
        self.transfer.applied[0]
    }

    /// Whether prompts and steps take what the declared part would take, within [`DECLARED_WITHIN`]. Small
    /// prompts do not count, whose time may be mostly the engine's.
    pub(crate) fn is_as_declared(&self) -> bool {
        !(self.prefill.is_far_off(1..3) || self.step.is_far_off(0..3))
    }

    /// Adds measured steps. Of one with prompts and decodes, the kind learns that has most of its time; the
    /// other is taken to be predicted rightly by now.
    pub(crate) fn observe_steps(&mut self, now: Seconds, cost: &CostModel, measured: &MeasuredSteps) {
        let MeasuredSteps { parts, sequences, kv_tokens, steps, time } = measured;
        let step = cost.step_s(parts, *sequences, *kv_tokens);
        // A clock that stands still has measured nothing.
        let is_time = |time: Seconds| time.0 > 0.0 && time.0.is_finite();
        if !is_time(step) || !is_time(*time) || *steps == 0 {
            return;
        }
        let time = *time / f64::from(*steps);
        let prompts = !parts.is_empty();
        let decodes = if prompts { cost.decode_step_s(*sequences, *kv_tokens).min(step) } else { step };
        let (tokens, decodes) = (tokens_of(parts), decodes.max(Seconds::ZERO));
        let prompts = step - decodes;
        let (of_prompts, of_decodes) = (self.prefill_factor(tokens), self.step_factor(*sequences));
        let corrected = [prompts * of_prompts, decodes * of_decodes];
        let whole_off = time / (corrected[0] + corrected[1]);
        // what the other kind leaves of the time; nothing if that is predicted much too long
        let ratio = |own: Seconds, other: Seconds, factor: f64| {
            let left = (time - other) / own;
            if left > 0.0 { left } else { factor * whole_off }
        };
        if corrected[0] >= corrected[1] {
            let size = size_class(tokens, PREFILL_SIZES);
            self.prefill.observe(now, size, prompts, ratio(prompts, corrected[1], of_prompts));
        } else {
            let size = size_class(*sequences, STEP_SIZES);
            self.step.observe(now, size, decodes, ratio(decodes, corrected[0], of_decodes));
        }
    }

    /// Adds a measured transfer of KV out of the instance; `predicted` is uncorrected.
    pub(crate) fn observe_transfer(&mut self, now: Seconds, predicted: Seconds, measured: Seconds) {
        self.transfer.observe(now, 0, predicted, measured / predicted);
    }

    pub(crate) fn fade_transfers(&mut self, now: Seconds) {
        self.transfer.fade(now);
    }
}

/// Below this, what a first token takes beyond its prediction is noise.
const OVERHEAD_LEAST: Seconds = Seconds(5e-5);

/// What requests take on an instance beyond the predicted time of their steps: the median of the latest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Overhead {
    latest: Latest,
    time: Seconds,
}

impl Overhead {
    pub(crate) fn observe(&mut self, beyond: Seconds) {
        if beyond.0.is_finite() {
            self.latest.push(beyond.0);
            let median = Seconds(self.latest.median());
            self.time = if median.0 < OVERHEAD_LEAST.0 { Seconds::ZERO } else { median };
        }
    }

    pub(crate) fn time(&self) -> Seconds {
        self.time
    }
}
