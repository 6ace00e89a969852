//! How far predicted decode times of mixtures of experts are off on published runs, and the time that a layer
//! with experts takes beyond its kernels: one number per engine, and every group of runs (model, part, dtype)
//! is left out of the fit by which it is predicted. docs/models.md has the results.
//!
//! A run of c clients is predicted as a step of c sequences in the middle of their answers, and the prompts
//! of the others between two tokens of one: `step + (c - 1) prefill / answer`.

#![allow(clippy::print_stdout, reason = "it prints a table")]

use mixfleet_hal::StoredAs;
use mixfleet_hal::catalog;
use mixfleet_scheduler::cost::{AllReduce, CostModel, ProfileCost};
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_scheduler::models::{self, KnownModel};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Deserialize)]
struct Row {
    silicon_data_source: String,
    backend: String,
    model_path: String,
    system: String,
    precision: String,
    mode: String,
    isl: u32,
    osl: u32,
    batch_size: Option<f64>,
    tp_size: Option<f64>,
    pp_size: Option<f64>,
    attention_dp_size: Option<f64>,
    silicon_tpot_ms: f64,
}

/// A published run beside what is predicted of it.
struct Compared {
    group: String,
    engine: &'static str,
    measured_s: f64,
    /// Without anything for layers with experts.
    predicted_s: f64,
    /// Layers with experts.
    layers: f64,
}

impl Compared {
    fn error(&self, per_layer_s: f64) -> f64 {
        ((self.predicted_s + per_layer_s * self.layers) / self.measured_s - 1.0).abs()
    }
}

fn main() -> Result<(), String> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/measured/e2e-silicon-dev.csv.zst");
    if !path.exists() {
        println!("SKIPPED: ../shared/data/measured/e2e-silicon-dev.csv.zst is absent; nothing was compared");
        return Ok(());
    }
    let runs = read(&path)?;
    let mut groups: BTreeMap<(&str, &str), Vec<&Compared>> = BTreeMap::new();
    for run in &runs {
        groups.entry((run.engine, &run.group)).or_default().push(run);
    }
    println!("| group | runs | kernels alone | with the layers' time |\n|---|---|---|---|");
    let (mut before, mut after) = (0.0, 0.0);
    for ((engine, group), members) in &groups {
        let rest = |run: &&Compared| run.engine == *engine && run.group != *group;
        let fitted = fit(&runs.iter().filter(rest).collect::<Vec<_>>());
        let (alone, with) = (mean_error(members, 0.0), mean_error(members, fitted));
        before += alone * members.len() as f64;
        after += with * members.len() as f64;
        println!("| {group}, {engine} | {} | {:.1} | {:.1} |", members.len(), alone * 100.0, with * 100.0);
    }
    let count = runs.len() as f64;
    println!("| **all** | {count} | {:.1} | {:.1} |\n", before / count * 100.0, after / count * 100.0);
    let mut engines: Vec<&str> = groups.keys().map(|(engine, _)| *engine).collect();
    engines.dedup();
    for engine in engines {
        let of: Vec<&Compared> = runs.iter().filter(|run| run.engine == engine).collect();
        println!("{engine}: {:.0} us per layer with experts, of all its groups", fit(&of) * 1e6);
    }
    Ok(())
}

/// The time per layer of the least mean error, in steps of a microsecond.
fn fit(runs: &[&Compared]) -> f64 {
    let candidates = (0..200).map(|us| f64::from(us) * 1e-6);
    candidates.min_by(|a, b| mean_error(runs, *a).total_cmp(&mean_error(runs, *b))).unwrap_or(0.0)
}

fn mean_error(runs: &[&Compared], per_layer_s: f64) -> f64 {
    runs.iter().map(|run| run.error(per_layer_s)).sum::<f64>() / runs.len().max(1) as f64
}

fn read(path: &Path) -> Result<Vec<Compared>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(|error| failed(&error))?;
    let text = zstd::Decoder::new(file).map_err(|error| failed(&error))?;
    let (mut runs, mut costs) = (Vec::new(), BTreeMap::new());
    for row in csv::Reader::from_reader(text).deserialize() {
        runs.extend(compare(&row.map_err(|error| failed(&error))?, &mut costs));
    }
    Ok(runs)
}

fn compare(row: &Row, costs: &mut BTreeMap<String, CostModel>) -> Option<Compared> {
    let name = match row.model_path.as_str() {
        "deepseek-ai/DeepSeek-V3" => "deepseek-v3",
        "moonshotai/Kimi-K2.5" => "kimi-k2.5",
        "MiniMaxAI/MiniMax-M2.5" => "minimax-m2.5",
        "Qwen/Qwen3-235B-A22B-FP8" => "qwen3-235b-a22b",
        "Qwen/Qwen3.5-397B-A17B" => "qwen3.5-397b-a17b",
        "openai/gpt-oss-120b" => "gpt-oss-120b",
        _ => return None,
    };
    let part = match row.system.as_str() {
        "h100_sxm" => "H100-SXM-80GB",
        "h200_sxm" => "H200-SXM-141GB",
        "b200_sxm" => "B200-SXM",
        "b300_sxm" => "B300-SXM",
        _ => return None,
    };
    let stored = match (name, row.precision.as_str()) {
        ("gpt-oss-120b", "fp4") => "mxfp4",
        (_, "fp4") => "nvfp4",
        (_, other) => other,
    };
    let whole = row.attention_dp_size.is_some_and(|devices| devices > 1.0);
    if row.mode != "agg" || whole || row.pp_size.is_some_and(|stages| stages > 1.0) {
        return None;
    }
    let (devices, clients) = (row.tp_size? as u32, row.batch_size? as u32);
    if !(1..=8).contains(&devices) || clients == 0 {
        return None;
    }
    let model = models::find(name).ok()?;
    let engine = engines::find(&row.backend).ok()?;
    let group = format!("{name} on {part}, {stored}");
    let cost = costs
        .entry(format!("{group} {devices} {}", engine.name))
        .or_insert_with(|| predicted(model, part, stored, devices, engine));
    // what InferenceMAX states are the longest lengths; it draws evenly from 0.8 of them
    let source = &row.silicon_data_source;
    let drawn = source.contains("db-dump") || source.contains("2026-04-06.csv");
    let mean = |stated: u32| if drawn { stated * 9 / 10 } else { stated };
    let (prompt, answer) = (mean(row.isl), mean(row.osl));
    let step = cost.decode_step_s(clients, u64::from(clients) * u64::from(prompt + answer / 2)).0;
    let others = f64::from(clients - 1) * cost.prefill_s(0, prompt).0 / f64::from(answer.max(1));
    Some(Compared {
        group,
        engine: engine.name,
        measured_s: row.silicon_tpot_ms / 1e3,
        predicted_s: step + others,
        layers: f64::from(model.experts?.layers(model.layers)),
    })
}

/// The cost of a model on a part by the catalog, with what the engine adds to other kernels.
fn predicted(model: &KnownModel, part: &str, stored: &str, devices: u32, engine: &KnownEngine) -> CostModel {
    let part = catalog::part(part).expect("a part of the catalog");
    let stored: StoredAs = stored.parse().expect("a dtype");
    let mut cost = engine.cost;
    cost.per_expert_layer_s = 0.0;
    CostModel::Profile(Box::new(ProfileCost {
        profile: part.reached_profile().unwrap_or_else(|| part.profile()),
        shape: model.shape_as(stored),
        chunk_tokens: engine.step_tokens,
        all_reduce: AllReduce::of(part, devices),
        engine: cost,
    }))
    .compiled()
}
