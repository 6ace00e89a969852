//! The arguments of `mixfleet plan`.

use crate::numbers::{per_second, positive, seconds, share, share_or_percent};
use crate::trace_file::ReplayArgs;
use clap::{Args, ValueEnum};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_sim::fleet_file::InstancePool;
use mixfleet_sim::trace::TOKENS_MAX;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Models of 'mixfleet models', each with its own load
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', required = true)]
    pub(super) model: Vec<String>,
    /// Dtypes of the weights to choose from [default: bf16]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    pub(super) dtype: Vec<StoredAs>,
    /// The load as a request trace ('mixfleet trace stats' reads it)
    #[arg(long, value_name = "FILE,..", value_delimiter = ',', conflicts_with = "rate")]
    pub(super) trace: Vec<PathBuf>,
    /// Load by the hour; the costliest counts (docs/reference/plan.md)
    #[arg(long, value_name = "CSV,..", value_delimiter = ',', conflicts_with_all = ["rate", "trace"])]
    pub(super) workload: Vec<PathBuf>,
    /// The load as requests per second of one size
    #[arg(long, value_name = "R,..", value_delimiter = ',', requires_all = ["input_tokens", "output_tokens"], value_parser = per_second)]
    pub(super) rate: Vec<f64>,
    /// Tokens of a prompt
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', requires = "rate", value_parser = crate::numbers::count::<u32>(1..=u64::from(TOKENS_MAX)))]
    pub(super) input_tokens: Vec<u32>,
    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', requires = "rate", value_parser = crate::numbers::count::<u32>(1..=u64::from(TOKENS_MAX)))]
    pub(super) output_tokens: Vec<u32>,
    /// Objective: seconds to the first token
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(super) ttft: f64,
    /// Objective: seconds between tokens, in the longest tenth of gaps
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(super) tbt: f64,
    /// Share of requests that must meet both
    #[arg(long, value_name = "SHARE", default_value_t = 0.99, value_parser = share)]
    pub(super) attain: f64,
    /// Offers in place of built-in prices (docs/reference/compare.md)
    #[arg(long, value_name = "CSV")]
    pub(super) prices: Option<PathBuf>,
    /// Choose also from parts that only marketplaces rent out, if no part is named
    #[arg(long, hide = true)]
    pub(super) marketplaces: bool,
    /// Choose also from parts whose built-in price is a paper's estimate, if no part is named
    #[arg(long, hide = true)]
    pub(super) estimates: bool,
    /// Available devices; columns device_id, count [, region, spot]
    #[arg(long, value_name = "CSV")]
    pub(super) inventory: Option<PathBuf>,
    /// Links between regions; columns from, to, gb_per_s, usd_per_gb
    #[arg(long, value_name = "CSV", requires = "inventory")]
    pub(super) links: Option<PathBuf>,
    /// Also use spot offers, with N spare instances per spot pool
    #[arg(long, value_name = "N", value_parser = crate::numbers::count::<u32>(0..=64))]
    pub(super) spot: Option<u32>,
    /// A fleet already owned, at no further cost
    #[arg(long, value_name = "FLEET.toml")]
    pub(super) have: Option<PathBuf>,
    /// Parts to choose from [default: all with a price]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub(super) parts: Vec<String>,
    /// Serving engine: mixfleet (default), vllm, sglang, tensorrt-llm
    #[arg(long, value_name = "NAME", default_value = "mixfleet", hide_default_value = true, value_parser = engines::find)]
    pub(super) engine: &'static KnownEngine,
    /// Skew of the experts' popularity [default: 0]
    #[arg(long, value_name = "SKEW", default_value_t = 0.0, hide_default_value = true, allow_negative_numbers = true, value_parser = skew)]
    pub(super) expert_skew: f32,
    /// Plan for a load higher by this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, hide_default_value = true, value_parser = headroom)]
    pub(super) headroom: f64,
    /// Probability that devices are as fast as planned [default: 0.5]
    #[arg(long, value_name = "P", default_value_t = 0.5, hide_default_value = true, value_parser = confidence)]
    pub(super) confidence: f64,
    /// Network of an instance, each direction [default: 12.5]
    #[arg(long, value_name = "GB/S", default_value_t = InstancePool::NIC_GB_PER_S, hide_default_value = true, value_parser = positive)]
    pub(super) nic: f64,
    /// Spare instances of each pool, for failures
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = crate::numbers::count::<u32>(0..=64))]
    pub(super) spares: u32,
    /// Host memory for KV to choose from, GiB an instance
    #[arg(long, value_name = "GIB,..", value_delimiter = ',', requires = "dram_usd", value_parser = crate::numbers::count::<u32>(1..=1_000_000))]
    pub(super) dram: Vec<u32>,
    /// Rent of --dram per GiB and hour; 0 if a device's rent includes it
    #[arg(long, value_name = "USD", requires = "dram", value_parser = usd)]
    pub(super) dram_usd: Option<f64>,
    /// Disk for KV to choose from, beside host memory
    #[arg(long, value_name = "GIB,..", value_delimiter = ',', requires_all = ["dram", "ssd_usd"], value_parser = crate::numbers::count::<u32>(1..=1_000_000))]
    pub(super) ssd: Vec<u32>,
    /// Rent of --ssd per GiB and hour
    #[arg(long, value_name = "USD", requires = "ssd", value_parser = usd)]
    pub(super) ssd_usd: Option<f64>,
    /// Numbers of KV nodes with this memory to choose from
    #[arg(long, value_name = "N,..", value_delimiter = ',', requires = "dram", value_parser = crate::numbers::count::<u32>(1..=1024))]
    pub(super) kv_nodes: Vec<u32>,
    /// End the simulations after this time
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    pub(super) budget_s: f64,
    /// Write FLEET.toml and the deployment files to this directory (docs/reference/plan.md)
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// What runs the planned instances
    #[arg(long = "for", value_name = "TARGET", requires = "out", value_enum, hide = true)]
    pub(super) target: Option<DeployTarget>,
    /// Write the plan as an HTML page
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    #[command(flatten)]
    pub(super) replay: ReplayArgs,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

fn headroom(text: &str) -> Result<f64, String> {
    let value = share_or_percent(text).filter(|value| (0.0..=100.0).contains(value));
    value.ok_or_else(|| "expected a share of the load, 0 or more, as in 0.2".into())
}

fn skew(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value: &f32| (0.0..=100.0).contains(value));
    value.ok_or_else(|| "expected a deviation over the mean, 0 or more, as in 0.5".into())
}

fn usd(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| (0.0..=1000.0).contains(value));
    value.ok_or_else(|| "expected a rent in dollars per hour, as in 0.004".into())
}

fn confidence(text: &str) -> Result<f64, String> {
    let value = share_or_percent(text).filter(|value| (0.5..=0.999).contains(value));
    value.ok_or_else(|| "expected a probability from 0.5 to 0.999".into())
}

impl PlanArgs {
    /// The requested dtypes, each once.
    pub(super) fn dtypes(&self) -> Vec<StoredAs> {
        let mut stored: Vec<StoredAs> = Vec::new();
        for dtype in &self.dtype {
            if !stored.contains(dtype) {
                stored.push(*dtype);
            }
        }
        if stored.is_empty() { vec![StoredAs::Plain(DType::Bf16)] } else { stored }
    }
}

/// What runs the planned instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DeployTarget {
    Mixfleet,
    Vllm,
    Llmd,
    Dynamo,
    Kserve,
}

impl DeployTarget {
    /// The engine of its instances.
    pub(super) fn engine(self) -> &'static str {
        match self {
            DeployTarget::Mixfleet => engines::OURS,
            DeployTarget::Vllm | DeployTarget::Llmd | DeployTarget::Dynamo | DeployTarget::Kserve => "vllm",
        }
    }
}
