//! The command line.

use crate::compare::CompareArgs;
use crate::connections::ConnectionArgs;
use crate::explain::ExplainArgs;
use crate::numbers::{CHUNK_MAX, SEQUENCES_MAX, gib, requests, seconds};
use crate::parts::PartsArgs;
use crate::profile::ProfileArgs;
use crate::replay::ReplayLogArgs;
use crate::scheduling::SchedulingArgs;
use crate::simulate::SimulateArgs;
use crate::trace::TraceArgs;
use crate::validate::ValidateArgs;
use clap::{Args, Parser, Subcommand};
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
    /// Play a trace on a fleet that need not exist: latencies, hits, dollars
    Simulate(SimulateArgs),
    /// Serve a model over HTTP with the OpenAI API
    Serve(ServeArgs),
    /// Serve a model with the workers of a fleet: the part that clients call and that decides
    #[cfg(feature = "fleet")]
    Router(crate::fleet::RouterArgs),
    /// Lend this machine's devices to the routers of a fleet
    #[cfg(feature = "fleet")]
    Worker(crate::fleet::WorkerArgs),
    /// Look at a fleet
    #[cfg(feature = "fleet")]
    Fleet(crate::fleet::FleetArgs),
    /// Check that a log of 'serve --events' gives the same decisions again, and explain one
    Replay(ReplayLogArgs),
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

#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Checkpoint directory [default: a small built-in random model]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Between operations: f32, bf16 or f16 [default: the weights' own]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) activations: Option<DType>,
    /// Of the KV cache: f32, bf16 or f16 [default: as activations]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) kv_dtype: Option<DType>,
    /// Memory for KV on each device
    #[arg(long, value_name = "GIB", default_value_t = 1.0, value_parser = gib)]
    pub(crate) kv_memory: f64,
    /// Prompt tokens in one step [default: 512]
    #[arg(long, value_name = "TOKENS", default_value_t = 512, hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..=CHUNK_MAX))]
    pub(crate) chunk: u32,
}

/// `DEV[=prefill|decode|auto]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRole {
    pub(crate) device: String,
    pub(crate) role: Role,
}

impl DeviceRole {
    /// What does prefill and what decodes, which may be one.
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

/// Reads a role.
pub(crate) fn role(text: &str) -> Result<Role, String> {
    match text {
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        "auto" => Ok(Role::Auto),
        other => Err(format!("unknown role '{other}'; known: prefill, decode, auto")),
    }
}

/// The least price that is not a slip: what it buys must stay a number.
pub(crate) const USD_PER_HOUR_MIN: f64 = 1e-6;

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
        if usd_per_hour > 0.0 && usd_per_hour < USD_PER_HOUR_MIN {
            return Err(format!("'{price}' is below {USD_PER_HOUR_MIN} $/h; write $/h as in 0.35"));
        }
        Ok(DevicePrice { device: device.to_string(), usd_per_hour })
    }
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) instances: InstanceArgs,
    #[command(flatten)]
    pub(crate) front: FrontArgs,
}

/// The devices that serve.
#[derive(Debug, Args)]
pub(crate) struct InstanceArgs {
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]")]
    pub(crate) device: Vec<DeviceRole>,
    /// Rent of a device; with all, placement weighs dollars
    #[arg(long, value_name = "DEV=USD")]
    pub(crate) usd_per_hour: Vec<DevicePrice>,
    /// Sequences in work on a device at a time [default: 64]
    #[arg(long, value_name = "N", default_value_t = 64, hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..=SEQUENCES_MAX))]
    pub(crate) sequences: u32,
    #[command(flatten)]
    pub(crate) tiers: TierArgs,
    /// Predict a device by its profile; repeatable [default: calibrate]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Vec<PathBuf>,
    /// Measure the devices anew despite a kept calibration
    #[arg(long)]
    pub(crate) recalibrate: bool,
}

/// Where KV goes that a device's memory gives up.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TierArgs {
    /// Host memory for KV that a device's memory gives up, each
    #[arg(long, value_name = "GIB", value_parser = gib)]
    pub(crate) kv_dram: Option<f64>,
    /// Directory for KV that host memory gives up; kept between runs
    #[arg(long, value_name = "DIR", requires_all = ["kv_dram", "kv_ssd_gib"])]
    pub(crate) kv_ssd: Option<PathBuf>,
    /// Room there, for each device
    #[arg(long, value_name = "GIB", requires = "kv_ssd", value_parser = gib)]
    pub(crate) kv_ssd_gib: Option<f64>,
}

/// What clients meet, and what decides about their requests.
#[derive(Debug, Args)]
pub(crate) struct FrontArgs {
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: String,
    /// What clients call the model [default: the directory's name]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Key that all clients must send [env: MIXFLEET_API_KEY]
    #[arg(long, value_name = "KEY", env = "MIXFLEET_API_KEY", hide_env = true)]
    pub(crate) api_key: Option<String>,
    /// Keys of several tenants, each kept apart; read again on change
    #[arg(long, value_name = "FILE.toml", conflicts_with = "api_key")]
    pub(crate) api_keys: Option<PathBuf>,
    /// Tell no client how much of its prompt was cached
    #[arg(long)]
    pub(crate) hide_cached_tokens: bool,
    #[command(flatten)]
    pub(crate) connections: ConnectionArgs,
    /// Turn away requests whose first token would come later
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) ttft_slo: Option<f64>,
    /// Turn away requests whose tokens would come slower
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) tbt_slo: Option<f64>,
    /// Time for answers of service_tier flex [default: 600]
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, hide_default_value = true, value_parser = seconds)]
    pub(crate) flex_deadline_s: f64,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    /// Compute what other devices hold, even where sending is faster
    #[arg(long)]
    pub(crate) no_pull: bool,
    /// Requests in work, at most [default: 512]
    #[arg(long, value_name = "N", default_value = "512", hide_default_value = true, value_parser = requests)]
    pub(crate) requests: std::num::NonZeroUsize,
    /// Log what the scheduler decides, for 'mixfleet replay'
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) events: Option<PathBuf>,
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
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]", conflicts_with_all = ["prefill", "decode"])]
    pub(crate) device: Vec<DeviceRole>,
    /// Device that computes the prompt
    #[arg(long, value_name = "DEV", requires = "decode")]
    pub(crate) prefill: Option<String>,
    /// Device that generates the tokens
    #[arg(long, value_name = "DEV", requires = "prefill")]
    pub(crate) decode: Option<String>,
    /// Print schema, prompt_ids, ids, text, placement, ttft_s, tbt_s, energy_j, joules_per_token
    #[arg(long)]
    pub(crate) json: bool,
}

fn temperature(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|t: &f32| t.is_finite() && *t >= 0.0);
    value.ok_or_else(|| "expected a number from 0 on".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn error(words: &[&str]) -> String {
        Cli::try_parse_from(["mixfleet"].iter().chain(words)).unwrap_err().to_string()
    }

    /// With the width that clap takes where there is no terminal.
    #[test]
    fn help_fits_a_screen() {
        let mut names = vec!["serve", "generate", "profile", "compare", "parts", "explain"];
        if cfg!(feature = "fleet") {
            names.extend(["router", "worker", "fleet"]);
        }
        for name in names {
            for flag in ["-h", "--help"] {
                let help = error(&[name, flag]);
                assert!(help.lines().count() <= 40, "{name} {flag}: {} lines\n{help}", help.lines().count());
            }
        }
        let generate = error(&["generate", "--help"]);
        assert!(generate.contains("schema") && generate.contains("joules_per_token"), "{generate}");
    }

    #[test]
    fn a_ratio_that_decides_nothing_is_a_usage_error() {
        for ratio in ["nan", "inf", "-inf", "-0.5", "0"] {
            let error = error(&["profile", "compare", "a", "b", "--fail-below", ratio]);
            assert!(error.contains("expected a ratio above 0"), "{ratio}: {error}");
        }
        assert!(
            Cli::try_parse_from(["mixfleet", "profile", "compare", "a", "b", "--fail-below", "0.9"]).is_ok()
        );
    }

    #[test]
    fn prices_are_refused_in_their_own_words() {
        let compare = |price| error(&["compare", "--model", "m", "--usd-per-hour", price]);
        assert!(compare("0.3").contains("expected PART=USD"), "{}", compare("0.3"));
        assert!(compare("L4=1e-300").contains("below 0.000001 $/h"), "{}", compare("L4=1e-300"));
        // what is no price is told by the command, not as an unknown flag
        assert!(Cli::try_parse_from(["mixfleet", "profile", "--usd-per-hour", "-1"]).is_ok());
    }
}
