//! The measured times of a serving engine's own kernels, by the composition of a step, as one document.
//!
//! It is read from a directory in LLMServingSim's format ([`EngineProfile::read_directory`]) or from the JSON
//! that `mixfleet profile import` writes ([`EngineProfile::from_json`]). `docs/schema/engine-profile-1.json`
//! is generated from here.

mod attention;
mod directory;

pub use directory::TableDirectory;

use attention::AttentionTable;
use mixfleet_hal::profile::Provenance;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{Grid, StepParts, StepTables};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Kernel times of one serving engine with one model on one kind of device. Every time is of one layer; the
/// embedding, the last norm, the head and the sampler run once in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.engine-profile/1")]
pub struct EngineProfile {
    /// Name and version of the document schema.
    pub schema: String,
    /// The engine with its version, as `vllm/0.19.0`; empty if unknown.
    #[serde(default)]
    pub engine: String,
    /// The model that it ran, as the engine names it; empty if unknown.
    #[serde(default)]
    pub model: String,
    /// The device as its driver names it; empty if unknown.
    #[serde(default)]
    pub device: String,
    /// Number of devices that shared the model.
    pub devices: u32,
    /// What the engine was configured with.
    #[serde(default)]
    pub limits: EngineLimits,
    /// The origin of the numbers.
    #[serde(default)]
    pub provenance: Provenance,
    /// Operations over all rows of a step, by layer: rows and seconds.
    pub dense: BTreeMap<String, Vec<(u32, Seconds)>>,
    /// Operations over the rows that draw a token, by layer: sequences and seconds.
    pub per_sequence: BTreeMap<String, Vec<(u32, Seconds)>>,
    /// Whether `prefill_context` of `attention` is the mean number of keys that a query of the chunk attends
    /// to, which is the context before the chunk and half of the chunk.
    #[serde(default)]
    pub mean_keys: bool,
    /// Attention of one layer.
    pub attention: Vec<AttentionPoint>,
}

/// Configuration of an engine; unknown values are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct EngineLimits {
    /// Sequences that run at a time.
    pub max_sequences: Option<u32>,
    /// Rows of a step: prompt tokens, and one for each decoding sequence.
    pub max_batched_tokens: Option<u32>,
    /// Tokens of a KV block.
    pub block_tokens: Option<u32>,
    /// Tokens of KV that the engine had memory for.
    pub cache_tokens: Option<u64>,
}

/// Measured attention of one layer in a step of one prompt chunk and decoding sequences.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AttentionPoint {
    /// Tokens of the prompt chunk; 0 for a step that only decodes.
    pub prefill_tokens: u32,
    /// Tokens of context before the chunk, or what `mean_keys` says.
    pub prefill_context: u32,
    /// Number of decoding sequences.
    pub decode_sequences: u32,
    /// Keys of each decoding sequence.
    pub decode_context: u32,
    /// Time in seconds.
    pub seconds: Seconds,
}

/// Operations that run once in a step; the others run once in each layer, except the norm between them, which
/// runs twice.
const ONCE: [&str; 2] = ["embedding", "final_layernorm"];
const TWICE_PER_LAYER: &str = "layernorm";

impl EngineProfile {
    /// The schema that this version reads and writes.
    pub const SCHEMA: &'static str = "mixfleet.engine-profile/1";

    /// Reads a document of this schema; `None` if `text` is of another.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn from_json(text: &str) -> Result<Option<Self>, String> {
        #[derive(Deserialize)]
        struct Named {
            schema: String,
        }
        match serde_json::from_str::<Named>(text) {
            Ok(named) if named.schema == Self::SCHEMA => {}
            _ => return Ok(None),
        }
        let profile: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        profile.check()?;
        Ok(Some(profile))
    }

    /// Returns the JSON Schema of this document, as in `docs/schema/engine-profile-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(EngineProfile).to_value()
    }

    /// Checks what the types cannot express: positive times, and attention that tables can be made of.
    ///
    /// # Errors
    /// A description of the first number that cannot be.
    pub fn check(&self) -> Result<(), String> {
        if self.devices == 0 {
            return Err("devices is 0; at least one device ran the model".into());
        }
        for (table, layers) in [("dense", &self.dense), ("per_sequence", &self.per_sequence)] {
            if layers.values().all(Vec::is_empty) {
                return Err(format!("{table} has no rows; import the engine's tables again"));
            }
            for (layer, rows) in layers {
                let what = format!("{table} of {layer}");
                rows.iter().try_for_each(|(rows, time)| positive(*time, &format!("{what}, {rows} rows")))?;
            }
        }
        for at in &self.attention {
            let AttentionPoint { prefill_tokens, decode_sequences, .. } = at;
            let what =
                format!("attention of {prefill_tokens} prompt tokens and {decode_sequences} sequences");
            positive(at.seconds, &what)?;
        }
        self.tables(1, 1, |_| 0.0).map(|_| ())
    }

    /// The tables of a model with `layers` layers, whose dense operations take an additional `more_s(rows)`.
    ///
    /// # Errors
    /// A description of what the tables lack.
    pub(crate) fn tables(
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
        let dense = summed(&self.dense, "dense", runs, more_s)?;
        let head = summed(&self.per_sequence, "per_sequence", |_| 1.0, |_| 0.0)?;
        let scale = f64::from(layers);
        let attention = AttentionTable::new(self);
        let (prefill, decode) = (attention.prefill(scale)?, attention.decode(scale)?);
        let mixed = attention.mixed(scale)?;
        StepTables::new(StepParts { overhead_s: 0.0, dense, head, prefill, decode, mixed, chunk_tokens })
    }
}

/// The sum of all layers' times over rows, in seconds, at every row count that any of them has.
fn summed(
    layers: &BTreeMap<String, Vec<(u32, Seconds)>>,
    table: &str,
    runs: impl Fn(&str) -> f64,
    more_s: impl Fn(u32) -> f64,
) -> Result<Grid, String> {
    let rows: BTreeSet<u32> = layers.values().flatten().map(|(rows, _)| *rows).collect();
    if rows.is_empty() {
        return Err(format!("{table} has no rows"));
    }
    let mut total: Vec<f64> = rows.iter().map(|&rows| more_s(rows)).collect();
    for (layer, times) in layers.iter().filter(|(_, times)| !times.is_empty()) {
        let times: BTreeMap<u32, f64> = times.iter().map(|(rows, time)| (*rows, time.0)).collect();
        let knots: Vec<u32> = times.keys().copied().collect();
        let own = Grid::new(vec![floats(&knots)], times.values().copied().collect())?;
        for (sum, &rows) in total.iter_mut().zip(&rows) {
            *sum += runs(layer) * own.at([f64::from(rows)]);
        }
    }
    let rows: Vec<u32> = rows.into_iter().collect();
    Grid::new(vec![floats(&rows)], total)
}

fn floats(knots: &[u32]) -> Vec<f64> {
    knots.iter().map(|&knot| f64::from(knot)).collect()
}

fn positive(time: Seconds, what: &str) -> Result<(), String> {
    if time.0.is_finite() && time.0 > 0.0 {
        return Ok(());
    }
    Err(format!("{what}: the time is {} s; times are positive", time.0))
}
