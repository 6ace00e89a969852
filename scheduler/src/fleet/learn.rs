//! Predictions that follow what is measured: each instance has a factor for its prefills, its decode steps and its transfers.
//!
//! ```text
//! ratio   = moving mean of (measured / predicted), each value clamped to [1/4, 4], over 2 s of predicted time
//! applied = the ratio in whole steps of 5 %, once it is more than such a step from what is applied
//! ```
//!
//! The mean is over time that was predicted, so that a single hiccup counts as little as the step that it struck, and an idle
//! instance learns nothing. The steps of 5 % keep an instance whose predictions are right exactly at 1, and instances of a kind
//! alike, by which a large fleet is ranked quickly. What has not been measured for a minute fades: whoever gets no work because
//! it was slow is tried again.

use super::load::{Load, Works};
use super::{Fleet, InstanceId};
use crate::cost::{CostModel, LinkCost, Prefill};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// The bounds of a correction.
const LEAST: f64 = 0.25;
const MOST: f64 = 4.0;

/// Predicted time in which all but a third of an error is learnt.
const MEMORY: Seconds = Seconds(2.0);

/// A correction is a power of this.
const STEP: f64 = 1.05;

/// A correction that was not measured for so long loses half of its logarithm, and again after as long.
const FADES_AFTER: Seconds = Seconds(60.0);

/// Work of an instance whose time was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredSteps {
    /// Pieces of prompts in each step.
    pub parts: Vec<Prefill>,
    /// Sequences that decode in it, and the tokens that it attends to for them.
    pub sequences: u32,
    /// Tokens of context of those sequences together, in the middle one of the steps.
    pub kv_tokens: u64,
    /// Equal steps, one after the other.
    pub steps: u32,
    /// What all of them took.
    pub time: Seconds,
}

/// Factors by which an instance's predictions are multiplied, since they were measured to be wrong; 1 where they were right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corrections {
    /// Of the time that prompts take.
    pub prefill: f64,
    /// Of the time that a decode step takes.
    pub step: f64,
    /// Of the time that KV takes out of the instance.
    pub transfer: f64,
}

impl Default for Corrections {
    fn default() -> Self {
        Corrections { prefill: 1.0, step: 1.0, transfer: 1.0 }
    }
}

/// What was learnt of one kind of work on one instance.
#[derive(Clone, Copy, Debug)]
struct Learned {
    /// Measured over predicted.
    ratio: f64,
    /// What predictions are multiplied by.
    applied: f64,
    /// Mean of the error that is left with the correction, as a share of what is measured.
    error: f64,
    measured_at: Seconds,
}

impl Default for Learned {
    fn default() -> Self {
        Learned { ratio: 1.0, applied: 1.0, error: 0.0, measured_at: Seconds::ZERO }
    }
}

impl Learned {
    /// `predicted` without any correction; a part `share` of it is this kind's.
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

/// What was learnt of an instance.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Learner {
    prefill: Learned,
    step: Learned,
    transfer: Learned,
}

impl Learner {
    pub(super) fn corrections(&self) -> Corrections {
        let Learner { prefill, step, transfer } = self;
        Corrections { prefill: prefill.applied, step: step.applied, transfer: transfer.applied }
    }

    /// The correction of a decode step alone, which a decision asks for a thousand times.
    #[inline]
    pub(super) fn step_factor(&self) -> f64 {
        self.step.applied
    }

    /// Means of the errors that are left, as shares of what is measured.
    fn errors(&self) -> Corrections {
        let Learner { prefill, step, transfer } = self;
        Corrections { prefill: prefill.error, step: step.error, transfer: transfer.error }
    }

    /// Steps of prompts and of decodes may be one: what decoding alone would take of the time is the step's.
    fn observe_steps(&mut self, now: Seconds, cost: &CostModel, measured: &MeasuredSteps) {
        let MeasuredSteps { parts, sequences, kv_tokens, steps, time } = measured;
        let step = cost.step_s(parts, *sequences, *kv_tokens);
        let predicted = step * f64::from(*steps);
        // a clock that stands still has measured nothing
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

    fn fade(&mut self, now: Seconds) {
        [&mut self.prefill, &mut self.step, &mut self.transfer].into_iter().for_each(|kind| kind.fade(now));
    }
}

/// KV on its way from where the prompt was computed, on ways that were free.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnItsWay {
    left_at: Seconds,
    /// What it takes in all, without any correction,
    whole: Seconds,
    /// and what of it was to show behind the prefill.
    shows: Seconds,
}

impl Fleet {
    /// What predictions of `instance` are multiplied by, and the mean errors that are left; none of one that is not up.
    pub fn learned(&self, instance: InstanceId) -> Option<(Corrections, Corrections)> {
        let learner = &self.loads[self.position(instance)?].learner;
        Some((learner.corrections(), learner.errors()))
    }

    /// Instances took so long for what they did.
    pub(super) fn measured(&mut self, now: Seconds, instance: InstanceId, steps: &MeasuredSteps) {
        self.learn(instance, |load| {
            let cost = load.spec.cost.clone();
            load.learner.observe_steps(now, &cost, steps);
        });
    }

    /// KV of a prompt begins to leave `from` for `to`, beside a prefill that took `prefill`; none where others are in its way.
    pub(super) fn leaves(
        &self,
        now: Seconds,
        (from, to): (usize, usize),
        tokens: u32,
        prefill: Seconds,
    ) -> Option<OnItsWay> {
        let (from, to) = (&self.loads[from], &self.loads[to]);
        let link = self.uncorrected_link(from, to)?;
        let bytes = self.kv_bytes(tokens);
        let whole = link.time(bytes);
        let free = from.egress_until <= now && to.ingress_until <= now && whole.0 > 0.0;
        let shows = link.exposed(bytes, self.config.layers, prefill);
        free.then_some(OnItsWay { left_at: now, whole, shows })
    }

    /// That KV has arrived at `to`. A receiver looks between its steps, so one of those is no fault of the way.
    pub(super) fn arrived_at(&mut self, now: Seconds, from: InstanceId, to: InstanceId, kv: OnItsWay) {
        let Some(receiver) = self.position(to).map(|at| &self.loads[at]) else { return };
        let took = now - kv.left_at;
        let looked_after = receiver.step(receiver.batch());
        let late = (took - kv.shows - looked_after).max((took - kv.shows).min(Seconds::ZERO));
        let measured = (kv.whole + late).max(Seconds::ZERO);
        self.learn(from, |load| load.learner.transfer.observe(now, kv.whole, 1.0, measured));
    }

    /// What nobody has measured for long is forgotten, little by little.
    pub(super) fn fade_corrections(&mut self, now: Seconds) {
        if now.0 < self.fade_at.0 {
            return;
        }
        self.fade_at = now + FADES_AFTER * 0.25;
        let wrong = self.loads.iter().filter(|load| load.learner.corrections() != Corrections::default());
        for id in wrong.map(|load| load.spec.id).collect::<Vec<InstanceId>>() {
            self.learn(id, |load| load.learner.fade(now));
        }
    }

    fn learn(&mut self, instance: InstanceId, learn: impl FnOnce(&mut Load)) {
        let Some(at) = self.position(instance) else { return };
        self.loads.learn(at, learn, &mut self.works);
    }
}

impl Load {
    /// Time to compute `new_tokens` of a prompt after `context_before` tokens, as corrected.
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        self.spec.cost.prefill_s(context_before, new_tokens) * self.learner.prefill.applied
    }

    /// A way out of it, as corrected.
    pub(super) fn corrected(&self, link: LinkCost) -> LinkCost {
        let factor = self.learner.transfer.applied;
        LinkCost {
            latency: link.latency * factor,
            seconds_per_byte: link.seconds_per_byte * factor,
            usd_per_byte: link.usd_per_byte,
        }
    }

    /// The prompts of its queue take `factor` times as long as was thought.
    pub(super) fn stretch(&mut self, factor: f64, works: &mut Works) {
        for request in self.queued() {
            if let Some(work) = works.get_mut(request) {
                work.stretch(factor);
            }
        }
        self.stretch_backlog(factor);
    }
}

#[cfg(test)]
mod tests;
