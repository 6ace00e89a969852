//! The command line.

use crate::compare::CompareArgs;
use crate::explain::ExplainArgs;
use crate::parts::PartsArgs;
use crate::profile::ProfileArgs;
use crate::trace::TraceArgs;
use crate::validate::ValidateArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use mixfleet_hal::DType;
use mixfleet_scheduler::fleet::Role;
use std::path::PathBuf;

/// Serve large language models on the cheapest mix of hardware.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the devices of this machine, and what was not found and why
    Devices(DevicesArgs),
    /// Show sockets, memory, PCI links, and how far each GPU is from each NIC
    Topo(TopoArgs),
    /// Measure what a device really does: products, attention, memory, copies, launches, long runs
    Profile(ProfileArgs),
    /// Say what a measured number means, how it is measured and what it decides
    Explain(ExplainArgs),
    /// Test a part: conformance, memory, performance against the vendor's claims, soak; with a report
    Validate(ValidateArgs),
    /// What a dollar buys on parts, what each is cheapest at, and the price at which that changes
    Compare(CompareArgs),
    /// List the parts of the catalog
    Parts(PartsArgs),
    /// Look into a trace of requests, or generate one
    Trace(TraceArgs),
    /// Serve a model over HTTP with the OpenAI API
    Serve(ServeArgs),
    /// Complete one prompt on standard output
    Generate(GenerateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopoArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep what was read of /sys and /proc in a file that --from reads on any machine
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Read a recording, or a directory with a copy of /sys and /proc, instead of this machine
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) from: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Checkpoint directory in the Hugging Face layout [default: a small built-in random model]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Dtype between operations [default: the weights' own; f32 is exact and slower]
    #[arg(long, value_name = "f32|bf16|f16")]
    pub(crate) activations: Option<DType>,
    /// Dtype of the KV cache [default: that of the activations]
    #[arg(long, value_name = "f32|bf16|f16")]
    pub(crate) kv_dtype: Option<DType>,
    /// Memory for KV on each device, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 1.0)]
    pub(crate) kv_memory: f64,
    /// Prompt tokens in one step [default: 512]
    #[arg(long, value_name = "TOKENS", default_value_t = 512, hide_default_value = true)]
    pub(crate) chunk: u32,
    /// Rope frequencies: exact (f32), or rounded to the weights' dtype as in a model that was cast by
    /// torch's `.to(dtype)` [default: exact; stored with --activations f32]
    #[arg(long, value_name = "exact|stored", hide_short_help = true)]
    pub(crate) rope_frequencies: Option<RopeFrequencies>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RopeFrequencies {
    Exact,
    Stored,
}

/// `DEV[=prefill|decode|auto]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRole {
    pub(crate) device: String,
    pub(crate) role: Role,
}

impl std::str::FromStr for DeviceRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (device, role) = text.split_once('=').unwrap_or((text, "auto"));
        let role = match role {
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            "auto" => Role::Auto,
            other => return Err(format!("unknown role '{other}'; known: prefill, decode, auto")),
        };
        if device.is_empty() {
            return Err("a device is missing before '='; 'mixfleet devices' lists them".into());
        }
        Ok(DeviceRole { device: device.to_string(), role })
    }
}

/// `DEV=USD`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DevicePrice {
    pub(crate) device: String,
    pub(crate) usd_per_hour: f64,
}

impl std::str::FromStr for DevicePrice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (device, price) = text.rsplit_once('=').ok_or("expected DEV=USD, for example cpu=0.12")?;
        let usd_per_hour: f64 = price.parse().map_err(|_| format!("'{price}' is not a number of dollars"))?;
        if !(usd_per_hour.is_finite() && usd_per_hour >= 0.0) {
            return Err(format!("'{price}' is not a price"));
        }
        Ok(DevicePrice { device: device.to_string(), usd_per_hour })
    }
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A device and what it does; repeatable ('mixfleet devices' lists them) [default: auto]
    #[arg(long, value_name = "DEV[=prefill|decode|auto]")]
    pub(crate) device: Vec<DeviceRole>,
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: String,
    /// What clients call the model [default: the directory's name]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Key that clients must send; required to listen beyond this machine
    #[arg(long, value_name = "KEY", env = "MIXFLEET_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Turn away requests whose first token is predicted later than this
    #[arg(long, value_name = "SECONDS")]
    pub(crate) ttft_slo: Option<f64>,
    /// Rent of a device; with one for each, placement weighs dollars too
    #[arg(long, value_name = "DEV=USD")]
    pub(crate) usd_per_hour: Vec<DevicePrice>,
    /// Sequences in work on a device at a time [default: 64]
    #[arg(long, value_name = "N", default_value_t = 64, hide_default_value = true)]
    pub(crate) sequences: u32,
    /// Requests in work, beyond which new ones are turned away [default: 512]
    #[arg(long, value_name = "N", default_value = "512", hide_default_value = true)]
    pub(crate) requests: std::num::NonZeroUsize,
    /// Predict a device by its profile, from 'mixfleet profile --out FILE'; repeatable [default: calibrate]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Vec<PathBuf>,
    /// Measure the devices anew instead of using the kept calibration
    #[arg(long)]
    pub(crate) recalibrate: bool,
    /// Log as JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The prompt
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    pub(crate) prompt_ids: Vec<u32>,
    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_tokens: u32,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    pub(crate) temperature: f32,
    /// Key of the random draws
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Do not stop at an end token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// A device and what it does; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=prefill|decode|auto]", conflicts_with_all = ["prefill", "decode"])]
    pub(crate) device: Vec<DeviceRole>,
    /// Device that computes the prompt
    #[arg(long, value_name = "DEV", requires = "decode")]
    pub(crate) prefill: Option<String>,
    /// Device that generates the tokens
    #[arg(long, value_name = "DEV", requires = "prefill")]
    pub(crate) decode: Option<String>,
    /// Print `{prompt_ids, ids, text, placement, ttft_s, tbt_s, energy_j}` as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn temperature(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|t: &f32| t.is_finite() && *t >= 0.0);
    value.ok_or_else(|| "expected a number from 0 on".into())
}
