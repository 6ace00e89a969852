//! FLEET.toml: a model, what is promised, and pools of instances, with everything resolved. Every key stands
//! in docs/fleet-file.md.

mod attention_table;
mod class;
mod cost;
mod engine_profile;
mod error;
mod limits;
mod model;
mod pipeline;
mod raw;
mod rebalance;
mod resolve;
mod routing;
mod slowdown;

pub use class::{Class, Members, Promise};
pub use error::FleetFileError;
pub use routing::Routing;
pub use slowdown::PoolSlowdown;

use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::Bytes;
use mixfleet_scheduler::cost::{CostModel, ModelShape};
use mixfleet_scheduler::fleet::{Rebalance, Role};
use mixfleet_scheduler::kv::CachePolicy;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The version of the format that is read here.
pub const VERSION: u32 = 1;

/// Reads the JSON file of a measured device. The binary gives it, for it knows all its schemas.
pub type ReadProfile<'a> = &'a dyn Fn(&Path) -> Result<DeviceProfile, String>;

/// A fleet as a file describes it.
#[derive(Clone, Debug)]
pub struct FleetFile {
    /// What it serves.
    pub model: Model,
    /// What it promises.
    pub slo: Slo,
    /// How KV is kept.
    pub kv: Kv,
    /// At least one.
    pub pools: Vec<Pool>,
    /// In the file's order; see [`FleetFile::link`].
    pub links: Vec<Link>,
    /// Requests with promises of their own, in the file's order.
    pub classes: Vec<Class>,
    /// When instances change their role; none: never.
    pub rebalance: Option<Rebalance>,
    /// Instances that become slower on the way.
    pub slowdowns: Vec<PoolSlowdown>,
    /// Who decides.
    pub routers: Routing,
}

/// A model as far as costs depend on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The catalog's name, or the file's.
    pub name: String,
    /// Decoder layers: the pieces in which KV is sent.
    pub layers: u32,
    /// KV of one token over all layers, kept once.
    pub kv_bytes_per_token: f64,
    /// Memory for the weights.
    pub weights: Bytes,
    /// `None`: only the numbers above were given, and every pool has a calibration.
    pub shape: Option<ModelShape>,
}

/// What is promised to each request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slo {
    /// Until the first token, in seconds.
    pub ttft_s: f64,
    /// Between tokens, in seconds.
    pub tbt_s: f64,
    /// Which of a request's gaps count.
    pub tbt_metric: TbtMetric,
}

/// The number that stands for a request's gaps between tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TbtMetric {
    /// Mean of the longest tenth of them.
    #[default]
    Longest10,
    /// Mean of all.
    Mean,
    /// The 99th of a hundred.
    P99,
}

impl TbtMetric {
    /// So large a part of a request's gaps counts, the longest ones.
    pub fn share(self) -> f64 {
        match self {
            TbtMetric::Longest10 => 0.1,
            TbtMetric::Mean => 1.0,
            TbtMetric::P99 => 0.01,
        }
    }
}

/// How KV is kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kv {
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Who goes first when a cache is full.
    pub policy: CachePolicy,
    /// Bytes that copies of hot prefixes may take, GB/s; none are made without.
    pub replicate_gb_per_s: Option<f64>,
}

/// Bounds of an instance's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Engine {
    /// Rows of a step: prompt tokens, and one for each decoding sequence.
    pub max_batched_tokens: u32,
    /// Rows of prompts in a step that decodes too.
    pub max_prefill_tokens_beside_decode: u32,
    /// Sequences that run at a time.
    pub max_sequences: u32,
}

/// Instances that are alike.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Its name, unique.
    pub name: String,
    /// What its instances may do.
    pub role: Role,
    /// Instances.
    pub count: u32,
    /// The catalog's id of the device, where it is known.
    pub device: Option<String>,
    /// Devices that share one copy of the model, or of a stage's layers.
    pub devices_per_instance: u32,
    /// Stages of layers, each on so many devices; 1: all layers are together.
    pub pipeline_stages: u32,
    /// What steps take; quick to ask and cheap to clone.
    pub cost: CostModel,
    /// Where that comes from, for people.
    pub cost_basis: String,
    /// Rent of an instance, where it is known.
    pub usd_per_hour: Option<f64>,
    /// Where that comes from and of when it is, for people.
    pub price_basis: String,
    /// Tokens of KV that an instance holds.
    pub cache_tokens: u64,
    /// Tokens of KV in host memory.
    pub dram: Tier,
    /// Tokens of KV on disk.
    pub ssd: Tier,
    /// Network of an instance, GB/s each direction.
    pub nic_gb_per_s: f64,
    /// Bounds of its steps.
    pub engine: Engine,
}

/// A store of an instance beside its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Tier {
    /// Its size; 0: there is none.
    pub tokens: u64,
    /// To and from the devices, GB/s.
    pub gb_per_s: f64,
}

/// What lies between pools beyond their networks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Pools it leads from; `*` stands for any characters.
    pub from: String,
    /// Pools it leads to.
    pub to: String,
    /// Shared by all its transfers, GB/s; `None`: the networks are the bound.
    pub gb_per_s: Option<f64>,
    /// Of each message, in seconds.
    pub latency_s: f64,
    /// Of the traffic, $ per 1e9 bytes.
    pub usd_per_gb: f64,
}

impl FleetFile {
    /// Reads `path`; profiles are looked for beside it.
    ///
    /// # Errors
    /// [`FleetFileError`], with the place, the value and what is allowed.
    pub fn read(path: &Path, read_profile: ReadProfile) -> Result<Self, FleetFileError> {
        let failed = |source| FleetFileError::Read { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        Self::parse(&text, path.parent().unwrap_or(Path::new("")), read_profile)
    }

    /// Parses the text of a file that stands in `directory`.
    ///
    /// # Errors
    /// As [`FleetFile::read`].
    pub fn parse(text: &str, directory: &Path, read_profile: ReadProfile) -> Result<Self, FleetFileError> {
        let syntax = |error: toml::de::Error| FleetFileError::syntax(&error);
        limits::check(&text.parse().map_err(syntax)?)?;
        let file: raw::File = toml::from_str(text).map_err(syntax)?;
        resolve::file(file, directory, read_profile)
    }

    /// What lies between two pools: the first link in the file that fits. `None`: nothing but their networks.
    pub fn link(&self, from: &str, to: &str) -> Option<&Link> {
        self.links.iter().find(|link| resolve::fits(&link.from, from) && resolve::fits(&link.to, to))
    }

    /// Rent of the whole fleet, where every pool's is known.
    pub fn usd_per_hour(&self) -> Option<f64> {
        self.pools.iter().map(|pool| Some(pool.usd_per_hour? * f64::from(pool.count))).sum()
    }
}

#[cfg(test)]
mod tests;
