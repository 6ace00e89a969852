//! Fits what engines add to their kernels, with every group of runs left out in turn.

use crate::published::Published;
use crate::runs::{Group, Run, mean};
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_scheduler::cost::{AllReduce, CostModel, EngineCost, Prefill, ProfileCost};
use mixfleet_scheduler::engines::KnownEngine;
use std::collections::BTreeMap;

/// A run's time between two tokens: what its kernels take, and what multiplies the number of an engine.
#[derive(Debug)]
pub(crate) struct Terms {
    kernels_s: f64,
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
        let of = |parts: &[Prefill]| cost.step_s(parts, run.clients, kv_tokens).0;
        Terms {
            kernels_s: (1.0 - prompts) * of(&[]) + prompts * of(&prompt_alone),
            mixtures: f64::from(run.shape().mlp_layers()[1]),
        }
    }

    /// The time between two tokens with an engine that adds `engine`.
    pub(crate) fn with(&self, engine: &EngineCost) -> f64 {
        self.kernels_s + engine.per_expert_layer_s * self.mixtures
    }
}

/// The costs of runs, without engine overheads; computed once per model, part and split.
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
        let own = EngineCost { per_expert_layer_s: 0.0, ..run.engine.cost };
        let engine = if self.at_best { EngineCost::FUSED } else { own };
        let make = || if self.at_best { on(run, part(run).profile(), engine) } else { cost(run, engine) };
        let Run { model, part, engine: KnownEngine { name, .. }, devices, stored, kv, .. } = run;
        let key = format!("{} {part} {name} {devices} {stored} {}", model.name, kv.name());
        self.made.entry(key).or_insert_with(make)
    }
}

/// The cost of a run's steps with an engine that adds `engine`.
pub(crate) fn cost(run: &Run, engine: EngineCost) -> CostModel {
    let part = part(run);
    let profile = part.best_profile();
    on(run, profile, engine)
}

/// The same for a published load, on the devices of one stage.
pub(crate) fn cost_of(figure: &Published, engine: EngineCost) -> CostModel {
    let mut shape = figure.model.shape_as(figure.stored).with_kv(figure.kv);
    if figure.experts_by_member && figure.tensor > 1 {
        shape = shape.with_experts_by_member(0.0).unwrap_or(shape);
    }
    let (profile, all_reduce) = (figure.part.best_profile(), AllReduce::of(figure.part, figure.tensor));
    let chunk_tokens = figure.engine.step_tokens;
    let shape = shape.on(&profile);
    CostModel::Profile(Box::new(ProfileCost { profile, shape, chunk_tokens, all_reduce, engine })).compiled()
}

fn part(run: &Run) -> &'static Part {
    catalog::part(run.part).expect("a part of the catalog")
}

fn on(run: &Run, profile: DeviceProfile, engine: EngineCost) -> CostModel {
    let all_reduce = AllReduce::of(part(run), run.devices);
    let (shape, chunk_tokens) = (run.shape(), run.engine.step_tokens);
    CostModel::Profile(Box::new(ProfileCost { profile, shape, chunk_tokens, all_reduce, engine })).compiled()
}

/// The engine that explains `runs` best, by least squares of the logarithms, every group with the same
/// weight. Dense models tell nothing about layers of experts.
pub(crate) fn fit(engine: &KnownEngine, runs: &[(&Run, &Terms)]) -> EngineCost {
    let mut sizes: BTreeMap<Group, f64> = BTreeMap::new();
    runs.iter().for_each(|(run, _)| *sizes.entry(run.group()).or_default() += 1.0);
    let mut per_expert_layer_s = 0.0;
    for _ in 0..50 {
        let (mut left, mut right) = (f64::MIN_POSITIVE, 0.0);
        for (run, terms) in runs {
            let time = terms.with(&EngineCost { per_expert_layer_s, ..EngineCost::FUSED });
            let (weight, slope) = (1.0 / sizes[&run.group()], terms.mixtures / time);
            left += weight * slope * slope;
            right += weight * slope * (run.tpot_s / time).ln();
        }
        per_expert_layer_s += right / left;
    }
    EngineCost { per_expert_layer_s: round(per_expert_layer_s.max(0.0), 1e-6), ..engine.cost }
}

fn round(value: f64, to: f64) -> f64 {
    // Division by the inverse writes the shortest decimal.
    (value / to).round() / (1.0 / to).round()
}
