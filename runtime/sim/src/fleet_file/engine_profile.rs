//! The profile of a serving engine as a directory of tables (the format of LLMServingSim 2.0): the measured
//! time of an engine's own kernels by the composition of a step.
//!
//! - `dense.csv [layer, tokens, time_us]`: the operations over all rows of a step;
//! - `per_sequence.csv [layer, sequences, time_us]`: those over the rows that draw a token;
//! - `attention.csv [prefill_chunk, kv_prefill, n_decode, kv_decode, time_us]`: attention of one layer in a
//!   step of one prompt chunk (its tokens, the context before it) and decoding sequences (their number, the
//!   context of each);
//! - `meta.json`, if present: the engine's configuration.
//!
//! Newer files give a chunk's context as `prefill_key`, the mean number of keys that its queries attend to.
//! Tables of a model that is split over k devices may be in `tpk/`.
//!
//! Every number is for one layer; the embedding, the last norm, the head and the sampler run once.

use super::attention_table::AttentionTable;
use mixfleet_scheduler::cost::{Grid, StepParts, StepTables};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The content of a profile directory.
#[derive(Debug)]
pub(super) struct EngineProfile {
    dense: BTreeMap<String, BTreeMap<u32, f64>>,
    per_sequence: BTreeMap<String, BTreeMap<u32, f64>>,
    attention: AttentionTable,
    pub(super) meta: Meta,
}

/// The fields of `meta.json` that are used.
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

/// Operations that run once in a step; the others run once in each layer, except the norm between them, which
/// runs twice.
const ONCE: [&str; 2] = ["embedding", "final_layernorm"];
const TWICE_PER_LAYER: &str = "layernorm";
/// Tables of models with experts or with linear attention, which are refused: without their times a step
/// would seem too short.
const NOT_READ: [&str; 2] = ["moe.csv", "linear_attention.csv"];

impl EngineProfile {
    /// Reads a profile directory.
    ///
    /// # Errors
    /// A description of the file that is missing or does not conform to the format above.
    pub(super) fn read(directory: &Path, devices: u32) -> Result<Self, String> {
        let cut = directory.join(format!("tp{devices}"));
        let whole = directory.join("dense.csv").exists() || !cut.exists();
        let tables = if whole { directory } else { &cut };
        if let Some(file) = NOT_READ.iter().find(|file| tables.join(file).exists()) {
            return Err(format!("has {file}; models of that kind cannot be costed yet"));
        }
        let mut dense: BTreeMap<String, BTreeMap<u32, f64>> = BTreeMap::new();
        for row in rows::<DenseRow>(&tables.join("dense.csv"))? {
            dense.entry(row.layer).or_default().insert(row.tokens, positive(row.time_us, "dense.csv")?);
        }
        let mut per_sequence: BTreeMap<String, BTreeMap<u32, f64>> = BTreeMap::new();
        for row in rows::<SequenceRow>(&tables.join("per_sequence.csv"))? {
            let time_us = positive(row.time_us, "per_sequence.csv")?;
            per_sequence.entry(row.layer).or_default().insert(row.sequences, time_us);
        }
        let attention = AttentionTable::read(&tables.join("attention.csv"))?;
        let mut meta = meta(&directory.join("meta.json"))?;
        if tables != directory {
            meta.engine_kwargs.tensor_parallel_size = Some(devices);
        }
        Ok(EngineProfile { dense, per_sequence, attention, meta })
    }

    /// Tokens of KV that the engine had memory for.
    pub(super) fn cache_tokens(&self) -> Option<u64> {
        self.meta.kv_cache.num_gpu_blocks?.checked_mul(u64::from(self.meta.kv_cache.block_size?))
    }

    /// The tables of a model with `layers` layers, whose dense operations take an additional `more_s(rows)`.
    ///
    /// # Errors
    /// A description of what the tables lack.
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
        let attention = &self.attention;
        let (prefill, decode) = (attention.prefill(scale)?, attention.decode(scale)?);
        let mixed = attention.mixed(scale)?;
        StepTables::new(StepParts { overhead_s: 0.0, dense, head, prefill, decode, mixed, chunk_tokens })
    }
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

pub(super) fn floats(knots: &[u32]) -> Vec<f64> {
    knots.iter().map(|&knot| f64::from(knot)).collect()
}

pub(super) fn positive(time_us: f64, file: &str) -> Result<f64, String> {
    if time_us.is_finite() && time_us > 0.0 {
        return Ok(time_us);
    }
    Err(format!("{file} has the time {time_us}; times are positive microseconds"))
}

pub(super) fn rows<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let failed = |error: csv::Error| format!("{}: {error}", path.display());
    let mut reader = csv::Reader::from_path(path).map_err(failed)?;
    reader.deserialize().map(|row| row.map_err(failed)).collect()
}

/// Reads `meta.json`, which may be absent: the tables alone determine a step's time.
fn meta(path: &Path) -> Result<Meta, String> {
    match std::fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Meta::default()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}
