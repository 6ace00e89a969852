//! The profile of a serving engine as a directory of tables (the format of LLMServingSim 2.0): what an engine's
//! own kernels took, by what is in a step.
//!
//! - `dense.csv [layer, tokens, time_us]`: the operations over all rows of a step;
//! - `per_sequence.csv [layer, sequences, time_us]`: those over the rows that draw a token;
//! - `attention.csv [prefill_chunk, kv_prefill, n_decode, kv_decode, time_us]`: attention of one layer in a
//!   step of one prompt chunk (its tokens, the context before it) and decoding sequences (how many, the
//!   context of each);
//! - `meta.json`, where it is there: what the engine ran with.
//!
//! Every number is of one layer; the embedding, the last norm, the head and the sampler run once.

use mixfleet_scheduler::cost::{Grid, StepTables};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a directory says.
#[derive(Debug)]
pub(super) struct EngineProfile {
    dense: BTreeMap<String, BTreeMap<u32, f64>>,
    per_sequence: BTreeMap<String, BTreeMap<u32, f64>>,
    attention: BTreeMap<[u32; 4], f64>,
    pub(super) meta: Meta,
}

/// What of `meta.json` is used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Meta {
    pub(super) model: String,
    pub(super) engine_kwargs: EngineKwargs,
    pub(super) kv_cache: KvCache,
    pub(super) hardware: Hardware,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EngineKwargs {
    pub(super) tensor_parallel_size: Option<u32>,
    pub(super) max_num_seqs: Option<u32>,
    pub(super) max_num_batched_tokens: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KvCache {
    pub(super) num_gpu_blocks: Option<u64>,
    pub(super) block_size: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Hardware {
    pub(super) device_name: String,
}

#[derive(Deserialize)]
struct DenseRow {
    layer: String,
    tokens: u32,
    time_us: f64,
}

#[derive(Deserialize)]
struct SequenceRow {
    layer: String,
    sequences: u32,
    time_us: f64,
}

#[derive(Deserialize)]
struct AttentionRow {
    prefill_chunk: u32,
    kv_prefill: u32,
    n_decode: u32,
    kv_decode: u32,
    time_us: f64,
}

/// Operations that run once in a step; the others once in each layer, but the norm between them twice.
const ONCE: [&str; 2] = ["embedding", "final_layernorm"];
const TWICE_PER_LAYER: &str = "layernorm";

impl EngineProfile {
    /// # Errors
    /// In words: a file that is missing or does not have the format above.
    pub(super) fn read(directory: &Path) -> Result<Self, String> {
        let mut dense: BTreeMap<String, BTreeMap<u32, f64>> = BTreeMap::new();
        for row in rows::<DenseRow>(&directory.join("dense.csv"))? {
            dense.entry(row.layer).or_default().insert(row.tokens, positive(row.time_us, "dense.csv")?);
        }
        let mut per_sequence: BTreeMap<String, BTreeMap<u32, f64>> = BTreeMap::new();
        for row in rows::<SequenceRow>(&directory.join("per_sequence.csv"))? {
            let time_us = positive(row.time_us, "per_sequence.csv")?;
            per_sequence.entry(row.layer).or_default().insert(row.sequences, time_us);
        }
        let mut attention = BTreeMap::new();
        for row in rows::<AttentionRow>(&directory.join("attention.csv"))? {
            let key = [row.prefill_chunk, row.kv_prefill, row.n_decode, row.kv_decode];
            attention.insert(key, positive(row.time_us, "attention.csv")?);
        }
        Ok(EngineProfile { dense, per_sequence, attention, meta: meta(&directory.join("meta.json"))? })
    }

    /// Tokens of KV that the engine had room for.
    pub(super) fn cache_tokens(&self) -> Option<u64> {
        self.meta.kv_cache.num_gpu_blocks?.checked_mul(u64::from(self.meta.kv_cache.block_size?))
    }

    /// The tables of a model of `layers`, whose dense operations take `more_s(rows)` besides.
    ///
    /// # Errors
    /// In words: what the tables lack.
    pub(super) fn tables(
        &self,
        layers: u32,
        chunk_tokens: u32,
        more_s: impl Fn(u32) -> f64,
    ) -> Result<StepTables, String> {
        let runs = |layer: &str| match layer {
            TWICE_PER_LAYER => 2.0 * f64::from(layers),
            _ if ONCE.contains(&layer) => 1.0,
            _ => f64::from(layers),
        };
        let dense = summed(&self.dense, "dense.csv", runs, more_s)?;
        let head = summed(&self.per_sequence, "per_sequence.csv", |_| 1.0, |_| 0.0)?;
        let scale = f64::from(layers) * 1e-6;
        let prefill = self.attention_grid(
            ["prefill_chunk", "kv_prefill"],
            |[c, k, n, _]| (n == 0).then_some([c, k]),
            scale,
        )?;
        let decode =
            self.attention_grid(["n_decode", "kv_decode"], |[c, _, n, d]| (c == 0).then_some([n, d]), scale)?;
        let both = |key: [u32; 4]| (key[0] > 0 && key[2] > 0).then_some(key);
        let mixed = self.attention.keys().any(|key| both(*key).is_some());
        let names = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"];
        let mixed = mixed.then(|| self.attention_grid(names, both, scale)).transpose()?;
        Ok(StepTables::new(0.0, dense, head, prefill, decode, mixed, chunk_tokens))
    }

    /// The rows that `pick` gives coordinates, as a grid.
    fn attention_grid<const D: usize>(
        &self,
        names: [&str; D],
        pick: impl Fn([u32; 4]) -> Option<[u32; D]>,
        scale: f64,
    ) -> Result<Grid, String> {
        let known: BTreeMap<[u32; D], f64> =
            self.attention.iter().filter_map(|(key, time)| Some((pick(*key)?, time * scale))).collect();
        if known.is_empty() {
            return Err(format!("attention.csv has no rows of {} alone", names.join(" and ")));
        }
        let axes: [Vec<u32>; D] = std::array::from_fn(|d| {
            let knots: BTreeSet<u32> = known.keys().map(|key| key[d]).collect();
            knots.into_iter().collect()
        });
        let values = filled(&axes, &known).map_err(|at| {
            let missing: Vec<String> =
                names.iter().zip(at).map(|(name, value)| format!("{name} {value}")).collect();
            format!("attention.csv lacks {} and its neighbours", missing.join(", "))
        })?;
        Grid::new(axes.iter().map(|axis| floats(axis)).collect(), values)
    }
}

/// Every knot's value, the last axis fastest. A value that was not measured (for want of memory, as a rule)
/// goes on straight from the two before it along some axis.
///
/// # Errors
/// The first knot for which there are no two.
fn filled<const D: usize>(
    axes: &[Vec<u32>; D],
    known: &BTreeMap<[u32; D], f64>,
) -> Result<Vec<f64>, [u32; D]> {
    let strides: [usize; D] = std::array::from_fn(|d| axes[d + 1..].iter().map(Vec::len).product());
    let count: usize = axes.iter().map(Vec::len).product();
    let mut values: Vec<f64> = Vec::with_capacity(count);
    for flat in 0..count {
        let index: [usize; D] = std::array::from_fn(|d| flat / strides[d] % axes[d].len());
        let at: [u32; D] = std::array::from_fn(|d| axes[d][index[d]]);
        let along = |d: usize| {
            let before = index[d].checked_sub(2)?;
            let (far, near) = (values[flat - 2 * strides[d]], values[flat - strides[d]]);
            let knot = |i: usize| f64::from(axes[d][i]);
            let share = (knot(before + 2) - knot(before + 1)) / (knot(before + 1) - knot(before));
            Some(near + (near - far).max(0.0) * share)
        };
        let value = known.get(&at).copied().or_else(|| (0..D).rev().find_map(along));
        values.push(value.ok_or(at)?);
    }
    Ok(values)
}

/// The sum of all layers' times over rows, in seconds, at every row count that any of them has.
fn summed(
    layers: &BTreeMap<String, BTreeMap<u32, f64>>,
    file: &str,
    runs: impl Fn(&str) -> f64,
    more_s: impl Fn(u32) -> f64,
) -> Result<Grid, String> {
    let rows: BTreeSet<u32> = layers.values().flat_map(|times| times.keys().copied()).collect();
    if rows.is_empty() {
        return Err(format!("{file} has no rows"));
    }
    let mut total: Vec<f64> = rows.iter().map(|&rows| more_s(rows)).collect();
    for (layer, times) in layers {
        let knots: Vec<u32> = times.keys().copied().collect();
        let own = Grid::new(vec![floats(&knots)], times.values().copied().collect())?;
        for (sum, &rows) in total.iter_mut().zip(&rows) {
            *sum += runs(layer) * own.at([f64::from(rows)]) * 1e-6;
        }
    }
    let rows: Vec<u32> = rows.into_iter().collect();
    Grid::new(vec![floats(&rows)], total)
}

fn floats(knots: &[u32]) -> Vec<f64> {
    knots.iter().map(|&knot| f64::from(knot)).collect()
}

fn positive(time_us: f64, file: &str) -> Result<f64, String> {
    if time_us.is_finite() && time_us > 0.0 {
        return Ok(time_us);
    }
    Err(format!("{file} has the time {time_us}; times are positive microseconds"))
}

fn rows<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let failed = |error: csv::Error| format!("{}: {error}", path.display());
    let mut reader = csv::Reader::from_path(path).map_err(failed)?;
    reader.deserialize().map(|row| row.map_err(failed)).collect()
}

/// Absence is allowed: the tables alone say what a step takes.
fn meta(path: &Path) -> Result<Meta, String> {
    match std::fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Meta::default()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}
