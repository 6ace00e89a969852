//! The profile of a serving engine as a directory of tables, the format of LLMServingSim 2.0:
//!
//! - `dense.csv [layer, tokens, time_us]`: the operations over all rows of a step;
//! - `per_sequence.csv [layer, sequences, time_us]`: those over the rows that draw a token;
//! - `attention.csv [prefill_chunk, kv_prefill, n_decode, kv_decode, time_us]`: attention of one layer in a
//!   step of one prompt chunk (its tokens, the context before it) and decoding sequences (their number, the
//!   context of each);
//! - `meta.yaml`, if present: what was profiled, and with which engine;
//! - `meta.json`, if present: the configuration of a run of that engine, which goes before.
//!
//! Newer files give a chunk's context as `prefill_key`, the mean number of keys that its queries attend to.
//! Tables of a model that is split over k devices may be in `tpk/`, below the `meta` files.

use super::{AttentionPoint, EngineLimits, EngineProfile};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::Provenance;
use mixfleet_hal::units::Seconds;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A directory of an engine's tables, for a number of devices that share the model.
#[derive(Clone, Debug)]
pub struct TableDirectory {
    /// Where the `meta` files are.
    whole: PathBuf,
    /// Where the tables are.
    tables: PathBuf,
    /// Number of devices, if the directory's name tells it.
    devices: Option<u32>,
}

/// The fields of `meta.json` that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RunMeta {
    model: String,
    vllm_version: String,
    engine_kwargs: EngineKwargs,
    kv_cache: KvCache,
    hardware: RunHardware,
}

/// The fields of `meta.yaml` that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProfileMeta {
    model: String,
    vllm_version: String,
    gpu: String,
    profiled_at: String,
    variant: String,
    tp_degrees: Vec<u32>,
    engine_effective: EngineKwargs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EngineKwargs {
    tensor_parallel_size: Option<u32>,
    max_num_seqs: Option<u32>,
    max_num_batched_tokens: Option<u32>,
    block_size: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KvCache {
    num_gpu_blocks: Option<u64>,
    block_size: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RunHardware {
    device_name: String,
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
    /// The layer's name; only in newer files, which may contain other layers' attention too.
    layer: Option<String>,
    prefill_chunk: u32,
    kv_prefill: Option<f64>,
    /// The mean number of keys; in newer files, instead of `kv_prefill`.
    prefill_key: Option<f64>,
    n_decode: u32,
    kv_decode: u32,
    /// Tokens per decoding sequence, in newer files; more than one with speculative decoding.
    decode_q_len: Option<u32>,
    time_us: f64,
}

/// Tables of models with experts or with linear attention, which are refused: without their times a step
/// would seem too short.
const NOT_READ: [&str; 2] = ["moe.csv", "linear_attention.csv"];

impl TableDirectory {
    /// Finds the tables below `path`, or in it, for a model that `devices` devices share.
    pub fn find(path: &Path, devices: u32) -> Self {
        let cut = path.join(format!("tp{devices}"));
        if !path.join("dense.csv").exists() && cut.exists() {
            return TableDirectory { whole: path.into(), tables: cut, devices: Some(devices) };
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let devices = name.strip_prefix("tp").and_then(|count| count.parse().ok());
        let whole = path.parent().filter(|_| devices.is_some()).unwrap_or(path).into();
        TableDirectory { whole, tables: path.into(), devices }
    }
}

impl EngineProfile {
    /// Reads a profile directory.
    ///
    /// # Errors
    /// A description of the file that is missing or does not conform to the format above.
    pub fn read_directory(directory: &TableDirectory) -> Result<Self, String> {
        let TableDirectory { whole, tables, devices } = directory;
        if let Some(file) = NOT_READ.iter().find(|file| tables.join(file).exists()) {
            return Err(format!("has {file}; models of that kind cannot be costed yet"));
        }
        let mut profile = meta(whole, tables)?;
        profile.devices = devices.unwrap_or(profile.devices);
        for row in rows::<DenseRow>(&tables.join("dense.csv"))? {
            let time = micro(row.time_us, "dense.csv")?;
            profile.dense.entry(row.layer).or_default().push((row.tokens, time));
        }
        for row in rows::<SequenceRow>(&tables.join("per_sequence.csv"))? {
            let time = micro(row.time_us, "per_sequence.csv")?;
            profile.per_sequence.entry(row.layer).or_default().push((row.sequences, time));
        }
        let path = tables.join("attention.csv");
        for row in rows::<AttentionRow>(&path)? {
            let other = row.layer.is_some_and(|layer| layer != "attention");
            if other || row.decode_q_len.unwrap_or(1) > 1 {
                continue;
            }
            let context = row
                .kv_prefill
                .or(row.prefill_key)
                .ok_or_else(|| format!("{} has neither column kv_prefill nor prefill_key", path.display()))?;
            profile.mean_keys |= row.kv_prefill.is_none();
            profile.attention.push(AttentionPoint {
                prefill_tokens: row.prefill_chunk,
                prefill_context: to_u32(context.round()),
                decode_sequences: row.n_decode,
                decode_context: row.kv_decode,
                seconds: micro(row.time_us, "attention.csv")?,
            });
        }
        Ok(profile)
    }
}

/// A profile without times, from the `meta` files; either may be absent.
fn meta(whole: &Path, tables: &Path) -> Result<EngineProfile, String> {
    let described = |error: &dyn std::fmt::Display, path: &Path| format!("{}: {error}", path.display());
    let near = |name: &str| {
        let beside = tables.join(name);
        if beside.exists() { beside } else { whole.join(name) }
    };
    let (json, yaml) = (near("meta.json"), near("meta.yaml"));
    let run: RunMeta = match text(&json)? {
        Some(text) => serde_json::from_str(&text).map_err(|error| described(&error, &json))?,
        None => RunMeta::default(),
    };
    let profiled: ProfileMeta = match text(&yaml)? {
        Some(text) => serde_saphyr::from_str(&text).map_err(|error| described(&error, &yaml))?,
        None => ProfileMeta::default(),
    };
    let or = |first: String, second: String| if first.is_empty() { second } else { first };
    let version = or(profiled.vllm_version, run.vllm_version);
    let (given, effective) = (run.engine_kwargs, profiled.engine_effective);
    let only = match profiled.tp_degrees[..] {
        [degree] => Some(degree),
        _ => effective.tensor_parallel_size,
    };
    let blocks = run.kv_cache.num_gpu_blocks.zip(run.kv_cache.block_size);
    let mut remarks =
        vec!["kernel times of one layer, without what the engine does between steps".to_owned()];
    if !profiled.variant.is_empty() {
        remarks.push(format!("variant {}", profiled.variant));
    }
    Ok(EngineProfile {
        schema: EngineProfile::SCHEMA.into(),
        engine: if version.is_empty() { version } else { format!("vllm/{version}") },
        model: or(run.model, profiled.model),
        device: or(run.hardware.device_name, profiled.gpu),
        devices: given.tensor_parallel_size.or(only).unwrap_or(1),
        limits: EngineLimits {
            max_sequences: given.max_num_seqs.or(effective.max_num_seqs),
            max_batched_tokens: given.max_num_batched_tokens.or(effective.max_num_batched_tokens),
            block_tokens: run.kv_cache.block_size.or(effective.block_size),
            cache_tokens: blocks.and_then(|(blocks, tokens)| blocks.checked_mul(u64::from(tokens))),
        },
        provenance: Provenance {
            tool: "LLMServingSim's profiler".into(),
            measured_at: profiled.profiled_at,
            remarks,
            evidence: Vec::new(),
        },
        dense: BTreeMap::new(),
        per_sequence: BTreeMap::new(),
        mean_keys: false,
        attention: Vec::new(),
    })
}

/// The text of a file, if it exists.
fn text(path: &Path) -> Result<Option<String>, String> {
    match mixfleet_hal::files::read_text(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn micro(time_us: f64, file: &str) -> Result<Seconds, String> {
    if time_us.is_finite() && time_us > 0.0 {
        return Ok(Seconds(time_us * 1e-6));
    }
    Err(format!("{file} has the time {time_us}; times are positive microseconds"))
}

fn rows<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let failed = |error: csv::Error| format!("{}: {error}", path.display());
    let mut reader = csv::Reader::from_path(path).map_err(failed)?;
    reader.deserialize().map(|row| row.map_err(failed)).collect()
}
