//! Mixtures of experts: which experts tokens choose, and the sum of what those make. `grouped` has their
//! products.

use super::elementwise::{load_n, store_n};
use super::simd::{Simd, SimdTask};
use super::{KernelWorker, OperandSpan};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, ExpertRouting, Scoring};
use std::ops::Range;

/// Choices of experts.
pub(crate) struct ExpertChoice {
    pub(crate) logits: OperandSpan,
    pub(crate) bias: Option<OperandSpan>,
    pub(crate) chosen: OperandSpan,
    pub(crate) weights: OperandSpan,
    pub(crate) order: OperandSpan,
    pub(crate) starts: OperandSpan,
    pub(crate) tokens: usize,
    pub(crate) routing: ExpertRouting,
}

/// Inserts a key among the best ones, after equal ones; a NaN ranks lowest.
fn insert(best: &mut Vec<(f32, u32)>, most: usize, key: f32, expert: u32) {
    let key = if key.is_nan() { f32::NEG_INFINITY } else { key };
    if best.len() == most {
        if best.last().is_none_or(|last| key <= last.0) {
            return;
        }
        best.pop();
    }
    let at = best.iter().rposition(|other| other.0 >= key).map_or(0, |at| at + 1);
    best.insert(at, (key, expert));
}

fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

impl ExpertChoice {
    /// Chooses for this worker's tokens.
    ///
    /// # Safety
    /// Spans are the operands of the operation.
    pub(crate) unsafe fn choose(&self, worker: &KernelWorker<'_>) {
        let ExpertRouting { experts, active, .. } = self.routing;
        let (experts, active) = (experts as usize, active as usize);
        // SAFETY: the caller's promise.
        let bias = self.bias.map(|bias| unsafe { floats(bias, 0, experts) });
        let mut best = Vec::with_capacity(active);
        for token in worker.share(self.tokens) {
            // SAFETY: the caller's promise.
            let logits = unsafe { floats(self.logits, token * experts, experts) };
            let (max, sum) = self.softmax(&logits, self.routing.normalise);
            let score = |expert: usize| match self.routing.scoring {
                Scoring::Softmax => (logits[expert] - max).exp() / sum,
                Scoring::Sigmoid => sigmoid(logits[expert]),
            };
            if self.routing.by_logits(bias.is_some()) {
                best.clear();
                logits.iter().zip(0..).for_each(|(&key, expert)| insert(&mut best, active, key, expert));
            } else {
                // keys are scores of all experts; weights may differ
                let (max, sum) = self.softmax(&logits, false);
                let keys = |expert: usize| {
                    let score = match self.routing.scoring {
                        Scoring::Softmax => (logits[expert] - max).exp() / sum,
                        Scoring::Sigmoid => sigmoid(logits[expert]),
                    };
                    score + bias.as_ref().map_or(0.0, |bias| bias[expert])
                };
                self.choose_in_groups(&(0..experts).map(keys).collect::<Vec<f32>>(), &mut best);
            }
            // SAFETY: the caller's promise.
            unsafe { self.put(token, &best, &logits, score) };
        }
    }

    /// The maximum and the sum of a softmax over all logits; of no use where weights are normalised.
    fn softmax(&self, logits: &[f32], unused: bool) -> (f32, f32) {
        if unused || self.routing.scoring == Scoring::Sigmoid {
            return (0.0, 1.0);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        (max, logits.iter().map(|logit| (logit - max).exp()).sum())
    }

    fn choose_in_groups(&self, keys: &[f32], best: &mut Vec<(f32, u32)>) {
        let ExpertRouting { experts, active, groups, groups_active, group_best, .. } = self.routing;
        let size = (experts / groups) as usize;
        let mut open = Vec::with_capacity(groups_active as usize);
        for (group, keys) in (0..).zip(keys.chunks(size)) {
            best.clear();
            keys.iter().zip(0..).for_each(|(&key, expert)| insert(best, group_best as usize, key, expert));
            let sum = best.iter().fold(0.0, |sum, (key, _)| sum + key);
            insert(&mut open, groups_active as usize, sum, group);
        }
        best.clear();
        for (group, keys) in (0..).zip(keys.chunks(size)) {
            if open.iter().any(|(_, known)| *known == group) {
                let first = group * to_u32(size);
                keys.iter()
                    .zip(first..)
                    .for_each(|(&key, expert)| insert(best, active as usize, key, expert));
            }
        }
    }

    /// Writes a token's choices and their weights.
    ///
    /// # Safety
    /// As for [`ExpertChoice::choose`].
    unsafe fn put(&self, token: usize, best: &[(f32, u32)], logits: &[f32], score: impl Fn(usize) -> f32) {
        let of = |expert: u32| logits[expert as usize];
        let ExpertRouting { normalise, scoring, scale, .. } = self.routing;
        let mut weights: Vec<f32> = match (normalise, scoring) {
            (true, Scoring::Softmax) => {
                let max = best.iter().map(|(_, expert)| of(*expert)).fold(f32::NEG_INFINITY, f32::max);
                best.iter().map(|(_, expert)| (of(*expert) - max).exp()).collect()
            }
            _ => best.iter().map(|(_, expert)| score(*expert as usize)).collect(),
        };
        if normalise {
            let least = if scoring == Scoring::Sigmoid { ExpertRouting::SUM_MIN } else { 0.0 };
            let sum = weights.iter().sum::<f32>() + least;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        let first = token * best.len();
        for (i, ((_, expert), weight)) in best.iter().zip(weights).enumerate() {
            // SAFETY: the caller's promise; a token's choices are this worker's alone.
            unsafe {
                self.chosen.at(DType::U32, first + i).cast::<u32>().write_unaligned(*expert);
                let weight = weight * scale.0;
                self.weights.at(DType::F32, first + i).cast::<f32>().write_unaligned(weight);
            }
        }
    }

    /// Sorts all choices by expert.
    ///
    /// # Safety
    /// As for [`ExpertChoice::choose`], which is done.
    pub(crate) unsafe fn sort(&self) {
        let (experts, active) = (self.routing.experts as usize, self.routing.active as usize);
        let choices = self.tokens * active;
        // SAFETY: the caller's promise.
        let of = |choice: usize| unsafe { self.chosen.u32(choice) } as usize;
        let mut next = vec![0u32; experts + 1];
        (0..choices).for_each(|choice| next[of(choice) + 1] += 1);
        for expert in 0..experts {
            next[expert + 1] += next[expert];
        }
        // SAFETY: the caller's promise; every place is below the number of choices.
        unsafe {
            for (expert, start) in next.iter().enumerate() {
                self.starts.at(DType::U32, expert).cast::<u32>().write_unaligned(*start);
            }
            for choice in 0..choices {
                let place = &mut next[of(choice)];
                self.order.at(DType::U32, *place as usize).cast::<u32>().write_unaligned(to_u32(choice));
                *place += 1;
            }
        }
    }
}

/// # Safety
/// `from` holds that many f32.
unsafe fn floats(from: OperandSpan, first: usize, count: usize) -> Vec<f32> {
    // SAFETY: the caller's promise.
    (0..count).map(|i| unsafe { from.at(DType::F32, first + i).cast::<f32>().read_unaligned() }).collect()
}

/// `out[t] (+)= sum of weights[t, i] * x[t, i]`.
pub(crate) struct Combine {
    pub(crate) args: [OperandSpan; 3],
    pub(crate) tokens: Range<usize>,
    pub(crate) active: usize,
    pub(crate) cols: usize,
    pub(crate) dtype: DType,
    pub(crate) accumulate: bool,
}

impl SimdTask for Combine {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Combine { args: [x, weights, out], active, cols, dtype, .. } = self;
        for token in self.tokens {
            let mut column = 0;
            while column < cols {
                let n = (cols - column).min(S::LANES);
                // SAFETY: operands hold tokens * active * cols, tokens * active and tokens * cols elements.
                unsafe {
                    let mut sum = S::splat(0.0);
                    for choice in token * active..(token + 1) * active {
                        let weight = weights.at(DType::F32, choice).cast::<f32>().read_unaligned();
                        let from = x.at(dtype, choice * cols + column);
                        sum = S::fma(S::splat(weight), load_n::<S>(dtype, from, n), sum);
                    }
                    let to = out.at(DType::F32, token * cols + column);
                    if self.accumulate {
                        sum = S::add(sum, load_n::<S>(DType::F32, to, n));
                    }
                    store_n::<S>(DType::F32, to, sum, n);
                }
                column += S::LANES;
            }
        }
    }
}
