//! The arguments of `mixfleet compare`.

use crate::args::DevicePrice;
use crate::numbers::seconds;
use clap::Args;
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::engines::{self, KnownEngine};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Parts by catalog id (rtx-4090), profiles by file, or devices of this machine (cpu, cuda:0) as serve
    /// calibrated them [default: all parts with a price]
    #[arg(value_name = "PART|FILE|DEVICE")]
    pub(super) parts: Vec<String>,
    /// A known model (llama-3.1-8b) or a checkpoint directory
    #[arg(long, value_name = "NAME|DIR")]
    pub(super) model: String,
    /// How the model's weights are stored: f32, bf16, f16, fp8, int8, int4, mxfp4 or nvfp4 [default:
    /// bf16, or what the checkpoint has]
    #[arg(long, value_name = "DTYPE")]
    pub(super) dtype: Option<StoredAs>,
    /// Dtype of the KV: f32, bf16, f16, fp8 or int8 [default: DTYPE, else bf16]
    #[arg(long, value_name = "DTYPE")]
    pub(super) kv_dtype: Option<DType>,
    /// Offers in place of built-in prices (docs/reference/compare.md)
    #[arg(long, value_name = "CSV")]
    pub(super) prices: Option<PathBuf>,
    /// Rent of a part; repeatable
    #[arg(long, value_name = "PART=USD", value_parser = part_price)]
    pub(super) usd_per_hour: Vec<DevicePrice>,
    /// Measured profile of a part; repeatable
    #[arg(long, value_name = "PART=FILE", value_parser = part_file)]
    pub(super) profile: Vec<(String, PathBuf)>,
    /// Use spot offers instead of on-demand ones
    #[arg(long)]
    pub(super) spot: bool,
    /// Use the lowest offer instead of the median of providers
    #[arg(long)]
    pub(super) least: bool,
    /// Length of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = crate::numbers::count::<u32>(1..=1 << 20))]
    pub(super) prompt: u32,
    /// Context of a sequence while it decodes
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = crate::numbers::count::<u32>(1..=1 << 20))]
    pub(super) context: u32,
    /// Maximum sequences per decode step
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = crate::numbers::count::<u32>(1..=4096))]
    pub(super) batch: u32,
    /// Objective: seconds in which a prompt must be computed
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(super) ttft: Option<f64>,
    /// Objective: seconds between tokens; batches are no larger than it allows
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(super) tbt: Option<f64>,
    /// Maximum parts that share one copy of the model
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = crate::numbers::count::<u32>(1..=1024))]
    pub(super) devices: u32,
    /// Serving engine: mixfleet, vllm, sglang or tensorrt-llm
    #[arg(long, value_name = "NAME", default_value = "mixfleet", value_parser = engines::find)]
    pub(super) engine: &'static KnownEngine,
    /// Write an HTML page
    #[arg(long, value_name = "FILE.html")]
    pub(super) html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

fn part_file(text: &str) -> Result<(String, PathBuf), String> {
    let (part, file) = text.split_once('=').ok_or("expected PART=FILE, for example L40S=l40s.json")?;
    if part.is_empty() || file.is_empty() {
        return Err("expected PART=FILE, for example L40S=l40s.json".into());
    }
    Ok((part.into(), file.into()))
}

fn part_price(text: &str) -> Result<DevicePrice, String> {
    if !text.contains('=') {
        return Err("expected PART=USD, for example L4=0.8".into());
    }
    text.parse()
}
