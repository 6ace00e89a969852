//! Fits what engines add to their kernels, with every group of runs left out in turn.

use crate::runs::{Group, Run, mean};
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_scheduler::cost::{AllReduce, CostModel, EngineCost, Prefill, ProfileCost};
use std::collections::BTreeMap;

/// Expected size of each number of [`EngineCost`] that is fitted, in units of the mean error that is expected
/// of the kernels: without such a pull, few groups would explain each other's kernels by an engine.
const EXPECTED: [f64; 3] = [10e-6, 0.5e-6, 0.1];
/// The error that is expected of the kernels.
const KERNELS: f64 = 0.1;

/// A run's decode time between two tokens: what its kernels take, and what multiplies each number of an
/// engine.
#[derive(Debug)]
pub(crate) struct Terms {
    kernels_s: f64,
    /// Per sequence, per kernel, and in all-reduces.
    by: [f64; 3],
    /// Layers of experts.
    mixtures: f64,
}

impl Terms {
    /// Between two tokens of a sequence, one step decodes for all, and (clients - 1) / answer prompts of
    /// others run beside it.
    pub(crate) fn of(run: &Run, costs: &mut Costs) -> Terms {
        let cost = costs.of(run);
        let (prompt, answer) = (mean(run.prompt), mean(run.answer));
        let kv_tokens = (f64::from(run.clients) * (prompt + answer / 2.0)) as u64;
        let prompt_alone = [Prefill { context: 0, tokens: prompt as u32, last: true }];
        let prompts = f64::from(run.clients - 1) / answer;
        let both = |of: &dyn Fn(&[Prefill]) -> f64| (1.0 - prompts) * of(&[]) + prompts * of(&prompt_alone);
        let rows = |parts: &[Prefill]| parts.iter().map(|part| part.tokens).sum::<u32>() + run.clients;
        let sums = AllReduce::of(part(run), run.devices);
        let sums_s = |parts: &[Prefill]| sums.map_or(0.0, |sums| sums.of_step(&run.shape(), rows(parts)).0);
        // q, k and v; o; gate and up; down; attention
        let kernels = 5.0 * f64::from(run.model.layers) + 1.0;
        Terms {
            kernels_s: both(&|parts| cost.step_s(parts, run.clients, kv_tokens).0),
            by: [f64::from(run.clients), kernels, both(&sums_s)],
            mixtures: f64::from(run.shape().mlp_layers()[1]),
        }
    }

    fn tpot_s(&self, x: [f64; 3]) -> f64 {
        self.kernels_s + self.by.iter().zip(x).map(|(by, x)| by * x).sum::<f64>()
    }

    /// The time between two tokens with an engine that adds `engine`.
    pub(crate) fn with(&self, engine: &EngineCost) -> f64 {
        let EngineCost { per_sequence_s, per_kernel_s, all_reduces, per_expert_layer_s, .. } = *engine;
        self.tpot_s([per_sequence_s, per_kernel_s, all_reduces - 1.0]) + per_expert_layer_s * self.mixtures
    }
}

/// The costs of runs, without what engines add; those of one model, part and split are made once.
#[derive(Default)]
pub(crate) struct Costs {
    made: BTreeMap<String, CostModel>,
    /// Whether every kernel reaches the part's datasheet.
    at_best: bool,
}

impl Costs {
    /// Of parts whose kernels all reach the datasheet.
    pub(crate) fn at_best() -> Self {
        Costs { at_best: true, ..Costs::default() }
    }

    fn of(&mut self, run: &Run) -> &CostModel {
        let engine = EngineCost::FUSED;
        let make = || if self.at_best { on(run, part(run).profile(), engine) } else { cost(run, engine) };
        let key = format!("{} {} {} {} {}", run.model.name, run.part, run.devices, run.stored, run.kv.name());
        self.made.entry(key).or_insert_with(make)
    }
}

/// The cost of a run's steps with an engine that adds `engine`.
pub(crate) fn cost(run: &Run, engine: EngineCost) -> CostModel {
    let part = part(run);
    let profile = part.reached_profile().unwrap_or_else(|| part.profile());
    on(run, profile, engine)
}

fn part(run: &Run) -> &'static Part {
    catalog::part(run.part).expect("a part of the catalog")
}

fn on(run: &Run, profile: DeviceProfile, engine: EngineCost) -> CostModel {
    let all_reduce = AllReduce::of(part(run), run.devices);
    let (shape, chunk_tokens) = (run.shape(), run.engine.step_tokens);
    CostModel::Profile(Box::new(ProfileCost { profile, shape, chunk_tokens, all_reduce, engine })).compiled()
}

/// The engine that explains `runs` best: what dense models tell, and then what layers of experts add to that.
pub(crate) fn fit(runs: &[(&Run, &Terms)]) -> EngineCost {
    let (mixed, dense): (Vec<_>, Vec<_>) = runs.iter().copied().partition(|(_, terms)| terms.mixtures > 0.0);
    let engine = fit_dense(&dense);
    let mut sizes: BTreeMap<Group, f64> = BTreeMap::new();
    mixed.iter().for_each(|(run, _)| *sizes.entry(run.group()).or_default() += 1.0);
    let mut per_expert_layer_s = 0.0;
    for _ in 0..50 {
        let (mut left, mut right) = (f64::MIN_POSITIVE, 0.0);
        for (run, terms) in &mixed {
            let time = terms.with(&EngineCost { per_expert_layer_s, ..engine });
            let (weight, slope) = (1.0 / sizes[&run.group()], terms.mixtures / time);
            left += weight * slope * slope;
            right += weight * slope * (run.tpot_s / time).ln();
        }
        per_expert_layer_s += right / left;
    }
    EngineCost { per_expert_layer_s: round(per_expert_layer_s.max(0.0), 1e-6), ..engine }
}

/// Least squares of the logarithms, every group with the same weight.
fn fit_dense(runs: &[(&Run, &Terms)]) -> EngineCost {
    let mut sizes: BTreeMap<Group, f64> = BTreeMap::new();
    runs.iter().for_each(|(run, _)| *sizes.entry(run.group()).or_default() += 1.0);
    let mut x = [0.0; 3];
    for _ in 0..50 {
        // Gauss-Newton: normal equations of the errors and of the pull to zero.
        let (mut left, mut right) = ([[0.0; 3]; 3], [0.0; 3]);
        for (run, terms) in runs {
            let (weight, time) = (1.0 / sizes[&run.group()], terms.tpot_s(x));
            let error = (run.tpot_s / time).ln();
            let slope = terms.by.map(|by| by / time);
            for i in 0..3 {
                right[i] += weight * slope[i] * error;
                (0..3).for_each(|j| left[i][j] += weight * slope[i] * slope[j]);
            }
        }
        for i in 0..3 {
            let pull = (KERNELS / EXPECTED[i]).powi(2);
            left[i][i] += pull;
            right[i] -= pull * x[i];
        }
        let step = solve(left, right);
        (0..3).for_each(|i| x[i] += step[i]);
    }
    let [per_sequence_s, per_kernel_s, all_reduces] = x;
    EngineCost {
        per_sequence_s: round(per_sequence_s.max(0.0), 1e-7),
        per_kernel_s: round(per_kernel_s, 1e-8),
        all_reduces: round(1.0 + all_reduces, 1e-3),
        ..EngineCost::FUSED
    }
}

fn round(value: f64, to: f64) -> f64 {
    // Division by the inverse writes the shortest decimal.
    (value / to).round() / (1.0 / to).round()
}

/// Solves three positive definite equations by elimination.
fn solve(mut a: [[f64; 3]; 3], mut b: [f64; 3]) -> [f64; 3] {
    for i in 0..3 {
        for j in i + 1..3 {
            let share = a[j][i] / a[i][i];
            (i..3).for_each(|k| a[j][k] -= share * a[i][k]);
            b[j] -= share * b[i];
        }
    }
    for i in (0..3).rev() {
        b[i] = (b[i] - (i + 1..3).map(|k| a[i][k] * b[k]).sum::<f64>()) / a[i][i];
    }
    b
}
