//! Measured runs of serving engines, as ai-dynamo/aiconfigurator collects them.

use mixfleet_hal::catalog;
use mixfleet_hal::{DType, StoredAs, WeightFormat};
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_scheduler::models::{self, KnownModel};
use serde::Deserialize;
use std::fmt;
use std::path::Path;

/// Devices of the largest instance whose links are known.
const DEVICES_MAX: f64 = mixfleet_scheduler::cost::DEVICES_MAX as f64;

/// A closed loop: a number of clients, each of which sends its next request when the last is answered.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) model: &'static KnownModel,
    /// The part's id in the catalog.
    pub(crate) part: &'static str,
    pub(crate) engine: &'static KnownEngine,
    pub(crate) stored: StoredAs,
    pub(crate) kv: DType,
    /// Devices that share the model by tensor parallelism.
    pub(crate) devices: u32,
    pub(crate) clients: u32,
    /// Least and most tokens of a prompt.
    pub(crate) prompt: [u32; 2],
    /// Least and most tokens of an answer.
    pub(crate) answer: [u32; 2],
    pub(crate) ttft_s: f64,
    pub(crate) tpot_s: f64,
    /// Whether prompts are known to share nothing: the benchmark's scripts switch prefix caching off.
    pub(crate) without_reuse: bool,
}

/// A run whose prompts are computed by some workers and answered by others; `run.devices` are of one of the
/// latter.
#[derive(Clone, Debug)]
pub(crate) struct SplitRun {
    pub(crate) run: Run,
    pub(crate) prefill: Workers,
    pub(crate) decode: Workers,
}

/// Workers of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workers {
    pub(crate) count: u32,
    pub(crate) devices: u32,
    /// Whether the devices divide sequences (data parallel attention) and experts among them.
    pub(crate) divided: bool,
}

/// The published runs.
#[derive(Default)]
pub(crate) struct Runs {
    pub(crate) together: Vec<Run>,
    pub(crate) split: Vec<SplitRun>,
    /// Number of skipped runs: of unknown models and parts, on more devices, or without the number of
    /// workers.
    pub(crate) others: usize,
}

/// The group of runs that are held out of a fit together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Group {
    pub(crate) engine: &'static str,
    pub(crate) model: &'static str,
    pub(crate) part: &'static str,
    pub(crate) stored: &'static str,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} on {}, {}", self.model, self.stored, self.part, self.engine)
    }
}

impl Run {
    pub(crate) fn group(&self) -> Group {
        let stored = self.stored.name();
        Group { engine: self.engine.name, model: self.model.name, part: self.part, stored }
    }

    /// Whether there are laws of its products: of none in 4 bits.
    pub(crate) fn is_known(&self) -> bool {
        self.stored.format().is_none_or(|format| format == WeightFormat::Fp8)
    }

    /// Whether the fit uses it.
    pub(crate) fn is_usable(&self) -> bool {
        self.without_reuse && self.fits() && self.model.experts.is_some()
    }

    /// Whether all clients' KV fits beside the weights at a time, so that none waits for memory.
    fn fits(&self) -> bool {
        let part = catalog::part(self.part).map_or(0.0, |part| part.memory_bytes().0);
        let room = f64::from(self.devices) * part * 0.9 - self.model.weight_bytes(self.stored).0;
        let tokens = f64::from(self.clients) * (mean(self.prompt) + mean(self.answer));
        tokens * self.shape().kv_bytes_per_token() as f64 <= room
    }

    pub(crate) fn shape(&self) -> ModelShape {
        self.model.shape_as(self.stored).with_kv(self.kv)
    }
}

pub(crate) fn mean([least, most]: [u32; 2]) -> f64 {
    (f64::from(least) + f64::from(most)) / 2.0
}

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
    attention_dp_size: Option<f64>,
    moe_ep_size: Option<f64>,
    prefill_num_workers: Option<f64>,
    prefill_tp_size: Option<f64>,
    prefill_attention_dp_size: Option<f64>,
    decode_batch_size: Option<f64>,
    decode_num_workers: Option<f64>,
    decode_tp_size: Option<f64>,
    decode_attention_dp_size: Option<f64>,
    silicon_ttft_ms: f64,
    silicon_tpot_ms: f64,
}

impl Workers {
    /// `None` if the file does not say how many there are, or they are larger than what can be predicted.
    fn of(count: Option<f64>, tensor: Option<f64>, data: Option<f64>) -> Option<Workers> {
        let (tensor, data) = (tensor?, data.unwrap_or(1.0));
        let divided = data > 1.0;
        // Either kind of parallelism alone, as in nearly all runs.
        let devices = if divided { data } else { tensor };
        let is_known = devices <= DEVICES_MAX && (tensor <= 1.0 || !divided);
        is_known.then_some(Workers { count: count? as u32, devices: devices as u32, divided })
    }
}

/// The runs of models and parts that the catalog has.
pub(crate) fn read(path: &Path) -> Result<Runs, String> {
    let failed = |error: &dyn fmt::Display| format!("{}: {error}", path.display());
    let file = std::fs::File::open(path).map_err(|error| failed(&error))?;
    let text = zstd::Decoder::new(file).map_err(|error| failed(&error))?;
    let mut runs = Runs::default();
    for row in csv::Reader::from_reader(text).deserialize() {
        let row: Row = row.map_err(|error| failed(&error))?;
        match (row.mode.as_str(), together(&row), split(&row)) {
            ("agg", Some(run), _) => runs.together.push(run),
            ("disagg", _, Some(run)) => runs.split.push(run),
            _ => runs.others += 1,
        }
    }
    Ok(runs)
}

fn together(row: &Row) -> Option<Run> {
    let alone = |size: Option<f64>| size.is_none_or(|size| size <= 1.0);
    let is_tensor_parallel = alone(row.attention_dp_size) && alone(row.moe_ep_size);
    // Few runs, on parts and in formats that no law is of.
    let is_apart = row.system == "gb200" || row.model_path == "nvidia/Qwen3-32B-NVFP4";
    let is_predicted = is_tensor_parallel && !is_apart;
    let devices = row.tp_size.filter(|devices| is_predicted && *devices <= DEVICES_MAX)?;
    run(row, devices as u32, row.batch_size? as u32)
}

fn split(row: &Row) -> Option<SplitRun> {
    let prefill = Workers::of(row.prefill_num_workers, row.prefill_tp_size, row.prefill_attention_dp_size)?;
    let decode = Workers::of(row.decode_num_workers, row.decode_tp_size, row.decode_attention_dp_size)?;
    let stated = row.silicon_data_source.split("silicon_concurrency=").nth(1);
    let stated = stated.and_then(|text| text.split(';').next()?.parse().ok());
    // Where the number of clients is not stated, decoders are full.
    let full = || Some(row.decode_batch_size? as u32 * decode.count);
    let clients = stated.or_else(full)?;
    Some(SplitRun { run: run(row, decode.devices, clients)?, prefill, decode })
}

/// Fields that both kinds of runs have.
fn run(row: &Row, devices: u32, clients: u32) -> Option<Run> {
    let model = match row.model_path.as_str() {
        "meta-llama/Llama-3.1-70B" => "llama-3.1-70b",
        "Qwen/Qwen3-32B" | "nvidia/Qwen3-32B-NVFP4" => "qwen3-32b",
        "Qwen/Qwen3-235B-A22B-FP8" => "qwen3-235b-a22b",
        "MiniMaxAI/MiniMax-M2.5" => "minimax-m2.5",
        "deepseek-ai/DeepSeek-R1" | "deepseek-ai/DeepSeek-V3" | "nvidia/DeepSeek-R1-NVFP4" => "deepseek-v3",
        "Qwen/Qwen3.5-397B-A17B" => "qwen3.5-397b-a17b",
        "moonshotai/Kimi-K2.5" => "kimi-k2.5",
        "openai/gpt-oss-120b" => "gpt-oss-120b",
        "nvidia/Llama-3.1-8B-Instruct-FP8" => "llama-3.1-8b",
        _ => return None,
    };
    let part = match row.system.as_str() {
        "h100_sxm" => "H100-SXM-80GB",
        "h200_sxm" => "H200-SXM-141GB",
        "gb200" => "GB200",
        "b200_sxm" => "B200-SXM",
        "b300_sxm" => "B300-SXM",
        _ => return None,
    };
    let stored = match row.precision.as_str() {
        // It is published in this format alone.
        _ if model == "gpt-oss-120b" => StoredAs::Quantised(WeightFormat::Mxfp4),
        "bf16" => StoredAs::Plain(DType::Bf16),
        "fp8" => StoredAs::Quantised(WeightFormat::Fp8),
        "int4" => StoredAs::Quantised(WeightFormat::Int4),
        "fp4" => StoredAs::Quantised(WeightFormat::Nvfp4),
        _ => return None,
    };
    // The scripts set 8-bit KV for vLLM and TensorRT-LLM.
    let kv = if row.backend == "sglang" || row.precision == "bf16" { DType::Bf16 } else { DType::F8E4m3 };
    // InferenceMAX draws lengths evenly from 0.8 of the stated ones (RANDOM_RANGE_RATIO), without prefix
    // caching.
    let source = &row.silicon_data_source;
    let inferencemax = source.contains("db-dump") || source.contains("2026-04-06.csv");
    let lengths = |stated: u32| [if inferencemax { stated * 4 / 5 } else { stated }, stated];
    Some(Run {
        model: models::find(model).ok()?,
        part,
        engine: engines::find(&row.backend).ok()?,
        stored,
        kv,
        devices,
        clients,
        prompt: lengths(row.isl),
        answer: lengths(row.osl),
        ttft_s: row.silicon_ttft_ms / 1e3,
        tpot_s: row.silicon_tpot_ms / 1e3,
        without_reuse: inferencemax || source.contains("/1.0.0rc3/"),
    })
}
