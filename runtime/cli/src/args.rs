//! The command line.

use crate::connections::ConnectionArgs;
use crate::numbers::{CHUNK_MAX, SEQUENCES_MAX, USD_PER_HOUR_MIN, count, gib, requests, seconds};
use crate::remote::RemoteArgs;
use crate::scheduling::SchedulingArgs;
use crate::worker_engines::{KvCanary, WorkerEngine};
use clap::Args;
use mixfleet_hal::DType;
use mixfleet_scheduler::cost::AttnSplit;
use mixfleet_scheduler::fleet::Role;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Open the devices and show memory, load, temperature, power and clock until stopped
    #[arg(long)]
    pub(crate) watch: bool,
    /// Time between readings, in seconds
    #[arg(long, value_name = "S", default_value = "1", requires = "watch", value_parser = seconds)]
    pub(crate) every: f64,
    /// Stop after this many readings
    #[arg(long, value_name = "N", requires = "watch", value_parser = crate::numbers::count::<u64>(1..=u64::MAX))]
    pub(crate) count: Option<u64>,
    /// Watch this device alone, repeatable
    #[arg(long = "device", value_name = "DEV", requires = "watch")]
    pub(crate) devices: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TopoArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Record the files read from /sys and /proc, for --from
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Read a recording, or a directory with a copy of /sys and /proc, instead of this machine
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) from: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Args)]
pub(crate) struct ModelArgs {
    /// Directory, GGUF file, Hub name or random:NAME [default: built in]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Draw weights at random for a --model DIR that has none; its answers mean nothing
    #[arg(long, requires = "model", hide = true)]
    pub(crate) random_weights: bool,
    /// Dtype of activations: f32, bf16, f16 [default: as weights]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) activations: Option<DType>,
    /// Dtype of KV: f32, bf16, f16, fp8, int8 [default: as activations]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) kv_dtype: Option<DType>,
    /// Memory for KV on each device [default: the free memory]
    #[arg(long, value_name = "GIB", value_parser = gib)]
    pub(crate) kv_memory: Option<f64>,
    /// Maximum prompt tokens per step [default: by device]
    #[arg(long, value_name = "TOKENS", value_parser = crate::numbers::count::<u32>(1..=CHUNK_MAX))]
    pub(crate) chunk: Option<u32>,
}

/// A device and its role, written as `DEV[=prefill|decode|auto]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRole {
    pub(crate) device: String,
    pub(crate) role: Role,
}

impl DeviceRole {
    /// Assigns prefill and decode to devices, which may be the same.
    pub(crate) fn pair(prefill: &str, decode: &str) -> Vec<Self> {
        let one = |device: &str, role| DeviceRole { device: device.to_owned(), role };
        match prefill == decode {
            true => vec![one(prefill, Role::Auto)],
            false => vec![one(prefill, Role::Prefill), one(decode, Role::Decode)],
        }
    }
}

impl std::str::FromStr for DeviceRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (device, role) = text.split_once('=').unwrap_or((text, "auto"));
        let role = self::role(role)?;
        if device.is_empty() {
            return Err("a device is missing before '='; 'mixfleet devices' lists them".into());
        }
        Ok(DeviceRole { device: device.to_string(), role })
    }
}

/// Parses a role.
pub(crate) fn role(text: &str) -> Result<Role, String> {
    match text {
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        "auto" => Ok(Role::Auto),
        "attention" => {
            Err("attention is not a role: name the attention devices after the one with the weights, as in \
                 'attn:cuda:0,cpu=decode'"
                .into())
        }
        other => Err(format!("unknown role '{other}'; known: prefill, decode, auto")),
    }
}

/// Parses the role of a worker's devices, or that of a KV node.
#[cfg(feature = "fleet")]
pub(crate) fn worker_role(text: &str) -> Result<Role, String> {
    if text == "kv" { Ok(Role::Kv) } else { role(text).map_err(|error| error + ", and kv") }
}

/// The rent of a device, written as `DEV=USD`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DevicePrice {
    pub(crate) device: String,
    pub(crate) usd_per_hour: f64,
}

impl std::str::FromStr for DevicePrice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (device, price) = text.rsplit_once('=').ok_or("expected DEV=USD, for example cpu=0.12")?;
        let usd_per_hour: f64 = price
            .trim_start_matches('$')
            .parse()
            .map_err(|_| format!("'{price}' is not a number of dollars"))?;
        if !(usd_per_hour.is_finite() && usd_per_hour >= 0.0) {
            return Err(format!("'{price}' is not a price"));
        }
        if usd_per_hour > 0.0 && usd_per_hour < USD_PER_HOUR_MIN {
            return Err(format!("'{price}' is below {USD_PER_HOUR_MIN} $/h; write $/h as in 0.35"));
        }
        Ok(DevicePrice { device: device.to_string(), usd_per_hour })
    }
}

#[derive(Debug, Args)]
#[command(mut_args(RemoteArgs::hidden))]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) instances: InstanceArgs,
    /// Let external engines read and write KV; they reach this server at URL
    #[arg(long, value_name = "URL", requires = "kv_dram", value_parser = address, hide = true)]
    pub(crate) kv_exchange: Option<String>,
    /// vLLM or llama.cpp for devices: docs/how-to/external-engines.md
    #[arg(long, value_name = "KIND:URL", conflicts_with_all = OF_DEVICES)]
    pub(crate) worker_engine: Vec<WorkerEngine>,
    /// Share of divided requests that prove KV between engines, or off
    #[arg(long, value_name = "SHARE", default_value = "0.01", requires = "worker_engine", hide = true)]
    pub(crate) kv_canary: KvCanary,
    #[command(flatten)]
    pub(crate) front: FrontArgs,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
    /// Fleet file with any of these settings; flags override it
    #[arg(long, value_name = "FLEET.toml")]
    pub(crate) fleet: Option<PathBuf>,
    /// Print every setting in force and its origin, and exit
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Options that do not apply to external engines.
const OF_DEVICES: [&str; 17] = [
    "model",
    "activations",
    "kv_dtype",
    "kv_memory",
    "chunk",
    "device",
    "usd_per_hour",
    "sequences",
    "attn_split",
    "kv_dram",
    "kv_ssd",
    "kv_exchange",
    "profile",
    "recalibrate",
    "no_pin",
    "hide_cached_tokens",
    "flexible",
];

/// The devices that serve.
#[derive(Debug, Args)]
pub(crate) struct InstanceArgs {
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]")]
    pub(crate) device: Vec<DeviceRole>,
    /// Rent of a device; if all have one, dollars count
    #[arg(long, value_name = "DEV=USD")]
    pub(crate) usd_per_hour: Vec<DevicePrice>,
    /// Maximum sequences per device [default: by KV memory]
    #[arg(long, value_name = "N", value_parser = crate::numbers::count::<u32>(1..=SEQUENCES_MAX))]
    pub(crate) sequences: Option<u32>,
    /// KV of 'attn:DEV,DEV' by head, request or range [default: head]
    #[arg(long, value_name = "BY")]
    pub(crate) attn_split: Option<AttnSplit>,
    #[command(flatten)]
    pub(crate) tiers: TierArgs,
    /// Predict a device by its profile; repeatable [default: calibrate]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Vec<PathBuf>,
    /// Repeat the calibration of devices
    #[arg(long)]
    pub(crate) recalibrate: bool,
    /// Let threads leave the NUMA node of their device
    #[arg(long, hide = true)]
    pub(crate) no_pin: bool,
}

/// Options of the tiers below device memory.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TierArgs {
    /// Host memory per device for KV evicted from the device
    #[arg(long, value_name = "GIB", value_parser = gib)]
    pub(crate) kv_dram: Option<f64>,
    /// Directory for KV evicted from host memory; persistent
    #[arg(long, value_name = "DIR", requires_all = ["kv_dram", "kv_ssd_gib"])]
    pub(crate) kv_ssd: Option<PathBuf>,
    /// Space in --kv-ssd per device
    #[arg(long, value_name = "GIB", requires = "kv_ssd", value_parser = gib)]
    pub(crate) kv_ssd_gib: Option<f64>,
}

/// Options of the HTTP front end and the scheduler.
#[derive(Debug, Args)]
pub(crate) struct FrontArgs {
    /// Address to listen on; or --host HOST, --port PORT
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: String,
    /// Host in place of that of --listen
    #[arg(long, value_name = "HOST", hide = true)]
    pub(crate) host: Option<String>,
    /// Port in place of that of --listen
    #[arg(long, value_name = "PORT", hide = true)]
    pub(crate) port: Option<u16>,
    /// Model name for clients [default: the directory's name]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Key required of all clients [env: MIXFLEET_API_KEY]
    #[arg(long, value_name = "KEY", env = "MIXFLEET_API_KEY", hide_env = true)]
    pub(crate) api_key: Option<String>,
    /// Keys of isolated tenants; reloaded on change
    #[arg(long, value_name = "FILE.toml", conflicts_with = "api_key")]
    pub(crate) api_keys: Option<PathBuf>,
    /// Omit cached tokens from usage
    #[arg(long, hide = true)]
    pub(crate) hide_cached_tokens: bool,
    #[command(flatten)]
    pub(crate) connections: ConnectionArgs,
    /// Reject requests whose predicted TTFT is longer
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) ttft_slo: Option<f64>,
    /// Reject requests whose predicted TBT is longer
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) tbt_slo: Option<f64>,
    /// Deadline of service_tier flex [default: 600]
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, hide_default_value = true, value_parser = seconds)]
    pub(crate) flex_deadline_s: f64,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    /// Let devices with a role change it with the load
    #[arg(long, hide = true)]
    pub(crate) flexible: bool,
    /// Load above which a side gets a device [default: 0.9]
    #[arg(long, hide = true, value_name = "LOAD", value_parser = above_zero)]
    pub(crate) rebalance_high: Option<f64>,
    /// Load below which a prefill device may change to decode [default: 0.7]
    #[arg(long, hide = true, value_name = "LOAD", value_parser = above_zero)]
    pub(crate) rebalance_low: Option<f64>,
    /// Time over which loads are averaged [default: 30]
    #[arg(long, hide = true, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) rebalance_hold_s: Option<f64>,
    /// Copy hot prefixes between devices ahead of demand, at up to this many GB/s
    #[arg(long, value_name = "GB", value_parser = above_zero, hide = true)]
    pub(crate) replicate_gb_per_s: Option<f64>,
    /// Never pull prefixes from other devices
    #[arg(long)]
    pub(crate) no_pull: bool,
    /// Maximum requests in progress [default: 512]
    #[arg(long, value_name = "N", default_value = "512", hide_default_value = true, value_parser = requests)]
    pub(crate) requests: std::num::NonZeroUsize,
    /// Log scheduler events for 'mixfleet replay'
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) events: Option<PathBuf>,
    /// Log as JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

impl FrontArgs {
    /// Puts `--host` and `--port` in their places in `--listen`.
    pub(crate) fn place(&mut self) {
        if self.host.is_none() && self.port.is_none() {
            return;
        }
        let (host, port) = self.listen.rsplit_once(':').unwrap_or((&self.listen, "8000"));
        let host = match self.host.take() {
            Some(given) if given.contains(':') && !given.starts_with('[') => format!("[{given}]"),
            Some(given) => given,
            None => host.to_owned(),
        };
        let port = self.port.take().map_or_else(|| port.to_owned(), |port| port.to_string());
        self.listen = format!("{host}:{port}");
    }
}

#[derive(Clone, Debug, Args)]
#[command(mut_args(RemoteArgs::hidden))]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
    /// The prompt; - reads it from standard input
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_ids", "each"], conflicts_with = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    pub(crate) prompt_ids: Vec<u32>,
    /// Maximum tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count::<u32>(0..=u32::MAX.into()))]
    pub(crate) max_tokens: u32,
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    pub(crate) temperature: f32,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Do not stop at an end token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]", conflicts_with_all = ["prefill", "decode"])]
    pub(crate) device: Vec<DeviceRole>,
    /// KV of 'attn:DEV,DEV' by head, request or range [default: head]
    #[arg(long, value_name = "BY")]
    pub(crate) attn_split: Option<AttnSplit>,
    /// Device that computes the prompt
    #[arg(long, value_name = "DEV", requires = "decode")]
    pub(crate) prefill: Option<String>,
    /// Device that generates the tokens
    #[arg(long, value_name = "DEV", requires = "prefill")]
    pub(crate) decode: Option<String>,
    /// Complete the prompt N times in one batch, each with its own KV and the next seed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = crate::numbers::count::<u32>(1..=BATCH_MAX))]
    pub(crate) batch: u32,
    /// Make one run for each line of a file, a JSON array of these arguments
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub(crate) each: Option<PathBuf>,
    /// Print schema, prompt_ids, ids, text, placement, ttft_s, batch, tbt_s, tokens_per_s,
    /// tokens_measured, energy_j, joules_per_token
    #[arg(long)]
    pub(crate) json: bool,
}

impl GenerateArgs {
    /// Options of a model on devices, without a prompt.
    pub(crate) fn of_devices(model: ModelArgs, remote: RemoteArgs, device: Vec<DeviceRole>) -> Self {
        GenerateArgs {
            model,
            remote,
            prompt: None,
            prompt_ids: Vec::new(),
            max_tokens: 1,
            temperature: 0.0,
            seed: 0,
            ignore_eos: false,
            device,
            attn_split: None,
            prefill: None,
            decode: None,
            batch: 1,
            each: None,
            json: false,
        }
    }
}

/// Copies that an engine takes at once.
const BATCH_MAX: u64 = 1024;

/// The address of a server, without a path.
fn address(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let is_one = host.is_some_and(|host| {
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
    });
    if is_one { Ok(text.into()) } else { Err("expected http://HOST:PORT or https://HOST:PORT".into()) }
}

fn above_zero(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    value.ok_or_else(|| "expected a number above 0".into())
}

pub(crate) fn temperature(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|t: &f32| t.is_finite() && *t >= 0.0);
    value.ok_or_else(|| "expected a number from 0 on".into())
}
