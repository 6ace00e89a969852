//! FLEET.toml: a model, an SLO and pools of instances, with all defaults resolved. Every key is documented in
//! docs/reference/fleet-file.md.

mod attending;
mod class;
mod cost;
mod error;
mod keeping;
mod limits;
mod model;
mod own;
mod pipeline;
mod planned;
mod prices;
mod raw;
mod rebalance;
mod resolve;
mod routing;
mod slowdown;
mod spare;

pub use attending::AttentionDevices;
pub use class::{Class, ClassMembers, Promise};
pub use error::FleetFileError;
pub use limits::INSTANCES_MAX;
pub use own::{OwnCalibration, OwnDevice};
pub use planned::{PlannedText, role_of};
pub use routing::Routing;
pub use slowdown::PoolSlowdown;
pub use spare::SparePool;

use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::Bytes;
use mixfleet_scheduler::cost::{CostModel, KvCopyCost, ModelShape};
use mixfleet_scheduler::engines::KnownEngine;
use mixfleet_scheduler::fleet::{Rebalance, Role};
use mixfleet_scheduler::kv::CachePolicy;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// The version of the format.
pub const VERSION: u32 = 1;

/// A function that reads the JSON file of a measured device. The binary provides it, since it knows all
/// schemas.
pub type ReadProfile<'a> = &'a dyn Fn(&Path) -> Result<DeviceProfile, String>;

/// A function that finds a device of this machine by the selector that serving takes; none if there is no
/// such kind of devices. The binary provides it, since it has the backends and keeps the calibrations.
pub type FindDevice<'a> = &'a dyn Fn(&str) -> Result<Option<OwnDevice>, String>;

/// What a fleet file may name beside the parts of the catalog.
#[derive(Clone, Copy)]
pub struct FleetSources<'a> {
    /// Reads measured profiles.
    pub profile: ReadProfile<'a>,
    /// Finds devices of this machine.
    pub device: FindDevice<'a>,
}

impl std::fmt::Debug for FleetSources<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetSources").finish_non_exhaustive()
    }
}

impl<'a> FleetSources<'a> {
    /// Measured profiles, and no device of this machine.
    pub fn profiles(profile: ReadProfile<'a>) -> Self {
        FleetSources { profile, device: &|_| Ok(None) }
    }
}

/// A fleet as a file describes it.
#[derive(Clone, Debug)]
pub struct FleetFile {
    /// The model that the fleet serves.
    pub model: Model,
    /// The objectives of requests without a class.
    pub slo: Slo,
    /// How KV is kept.
    pub kv: Kv,
    /// The pools, at least one.
    pub pools: Vec<InstancePool>,
    /// The links in the file's order; see [`FleetFile::link`].
    pub links: Vec<PoolLink>,
    /// Requests with objectives or a deadline of their own, in the file's order.
    pub classes: Vec<Class>,
    /// When instances change their role; none means never.
    pub rebalance: Option<Rebalance>,
    /// Instances that become slower during the run.
    pub slowdowns: Vec<PoolSlowdown>,
    /// The routers that place requests.
    pub routers: Routing,
}

/// The properties of a model that affect costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The model's name in the catalog or in the file.
    pub name: String,
    /// Number of decoder layers, which are the pieces in which KV is sent.
    pub layers: u32,
    /// Bytes of the KV of one token over all layers, stored once.
    pub kv_bytes_per_token: f64,
    /// Memory for the weights.
    pub weights: Bytes,
    /// The model's shape. `None` if only the numbers above were given; every pool then has a calibration.
    pub shape: Option<ModelShape>,
}

/// The objectives of each request, by default those of FAST'25's evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slo {
    /// TTFT in seconds.
    pub ttft_s: f64,
    /// TBT in seconds.
    pub tbt_s: f64,
    /// How a request's TBT is measured.
    pub tbt_metric: TbtMetric,
}

impl Default for Slo {
    fn default() -> Self {
        Slo { ttft_s: 30.0, tbt_s: 0.1, tbt_metric: TbtMetric::default() }
    }
}

/// The statistic of a request's gaps between tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TbtMetric {
    /// Mean of the longest tenth of the gaps.
    #[default]
    Longest10,
    /// Mean of all gaps.
    Mean,
    /// The 99th percentile of the gaps.
    P99,
}

impl TbtMetric {
    /// The share of a request's gaps that counts, the longest ones.
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
    /// Eviction policy of the caches.
    pub policy: CachePolicy,
    /// Bandwidth that copies of hot prefixes may use, GB/s; without it none are made.
    pub replicate_gb_per_s: Option<f64>,
}

/// Limits of an instance's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Engine {
    /// Maximum rows of a step: prompt tokens, and one for each decoding sequence.
    pub max_batched_tokens: u32,
    /// Maximum prompt rows in a step that also decodes; as many as TBT objectives allow if none.
    pub max_prefill_tokens_beside_decode: Option<u32>,
    /// Maximum number of running sequences.
    pub max_sequences: u32,
}

/// A group of identical instances.
#[derive(Clone, Debug)]
pub struct InstancePool {
    /// The pool's name, unique.
    pub name: String,
    /// The role of its instances.
    pub role: Role,
    /// Number of instances.
    pub count: u32,
    /// The catalog's id of the device, if known.
    pub device: Option<String>,
    /// The selector of the device, if it is one of this machine.
    pub own_device: Option<String>,
    /// Devices that share one copy of the model, or of a stage's layers.
    pub devices_per_instance: u32,
    /// Devices that keep the KV and attend, if they are others than those above.
    pub attention: Option<AttentionDevices>,
    /// The pool whose devices run attention for a part of the requests, if any; [`FleetFile::lent`] has the
    /// details.
    pub spare: Option<SparePool>,
    /// Number of pipeline stages, each on that many devices; 1 means that all layers are together.
    pub pipeline_stages: u32,
    /// The time of steps; fast to evaluate and cheap to clone.
    pub cost: CostModel,
    /// The origin of those times, for display.
    pub cost_basis: String,
    /// What KV that comes or goes takes of steps; nothing where no device is known.
    pub kv_copies: KvCopyCost,
    /// Likely relative error of those times, if known.
    pub likely_error: Option<f64>,
    /// Rent of an instance in USD per hour, if known.
    pub usd_per_hour: Option<f64>,
    /// The origin and date of the rent, for display.
    pub price_basis: String,
    /// Whether the file states the rent itself.
    pub price_stated: bool,
    /// Tokens of KV that an instance holds.
    pub cache_tokens: u64,
    /// Tier of KV in host memory.
    pub dram: TierSize,
    /// Tier of KV on disk.
    pub ssd: TierSize,
    /// Network bandwidth of an instance in each direction, GB/s.
    pub nic_gb_per_s: f64,
    /// Limits of its steps.
    pub engine: Engine,
}

impl InstancePool {
    /// Default bandwidth of the network: 100 Gbit/s.
    pub const NIC_GB_PER_S: f64 = 12.5;

    /// Its devices as a file names them, or its name where that is not known: `L4`, `attn:H100-SXM-80GB,L4`.
    pub fn device_words(&self) -> String {
        let own = self.device.as_deref().unwrap_or(&self.name);
        match &self.attention {
            Some(others) => format!("{}{own},{}", attending::WORD, others.device.as_deref().unwrap_or("?")),
            None => own.to_owned(),
        }
    }
}

/// A tier of KV below an instance's devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TierSize {
    /// Its size in tokens; 0 means that there is none.
    pub tokens: u64,
    /// Bandwidth to and from the devices, GB/s.
    pub gb_per_s: f64,
}

/// A link between pools, in addition to their network interfaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolLink {
    /// Name of the source pools; `*` stands for any characters.
    #[serde(default = "any_pool")]
    pub from: String,
    /// Name of the destination pools; `*` stands for any characters.
    #[serde(default = "any_pool")]
    pub to: String,
    /// Bandwidth shared by all its transfers, GB/s; `None` if only the network interfaces limit them.
    pub gb_per_s: Option<f64>,
    /// Latency of each message in seconds.
    #[serde(default)]
    pub latency_s: f64,
    /// Cost of traffic in USD per 1e9 bytes.
    #[serde(default)]
    pub usd_per_gb: f64,
}

fn any_pool() -> String {
    "*".into()
}

impl FleetFile {
    /// Reads `path`; paths of profiles are relative to its directory. `engine` replaces the file's `[engine]
    /// name`.
    ///
    /// # Errors
    /// A [`FleetFileError`] with the place, the value and the allowed values.
    pub fn read(
        path: &Path,
        sources: FleetSources<'_>,
        engine: Option<&KnownEngine>,
    ) -> Result<Self, FleetFileError> {
        let failed = |source| FleetFileError::Read { path: path.to_owned(), source };
        let text = mixfleet_hal::files::read_text(path).map_err(failed)?;
        let mut file = parse(&text)?;
        file.engine.name = engine.map(|engine| engine.name.to_owned()).or(file.engine.name);
        resolve::file(file, path.parent().unwrap_or(Path::new("")), sources)
    }

    /// Parses the text of a file in `directory` that names no devices of this machine.
    ///
    /// # Errors
    /// As [`FleetFile::read`].
    pub fn parse(text: &str, directory: &Path, read_profile: ReadProfile) -> Result<Self, FleetFileError> {
        FleetFile::parse_with(text, directory, FleetSources::profiles(read_profile))
    }

    /// Parses the text of a file in `directory`.
    ///
    /// # Errors
    /// As [`FleetFile::read`].
    pub fn parse_with(
        text: &str,
        directory: &Path,
        sources: FleetSources<'_>,
    ) -> Result<Self, FleetFileError> {
        resolve::file(parse(text)?, directory, sources)
    }

    /// The same fleet, in which steps of a pool take `times` as long.
    #[must_use]
    pub fn slowed(mut self, times: impl Fn(&InstancePool) -> f64) -> Self {
        for pool in &mut self.pools {
            let times = times(pool);
            if times != 1.0 {
                pool.cost = CostModel::Scaled(times, Arc::new(pool.cost.clone()));
            }
        }
        self
    }

    /// Checks that some instance computes prompts, and some decode.
    ///
    /// # Errors
    /// What no pool does.
    pub fn check_serves(&self) -> Result<(), FleetFileError> {
        let lacks = |what: &str, role: &str| {
            let cause = format!(
                "no pool {what}, so that no request is served; add one of the role \"{role}\" or \"auto\""
            );
            Err(FleetFileError::value("[[pool]] role", cause))
        };
        match self {
            _ if !self.pools.iter().any(|pool| pool.role.prefills()) => lacks("computes prompts", "prefill"),
            _ if !self.pools.iter().any(|pool| pool.role.decodes()) => lacks("decodes", "decode"),
            _ => Ok(()),
        }
    }

    /// The first link in the file that matches two pools. `None` if only their network interfaces limit
    /// transfers.
    pub fn link(&self, from: &str, to: &str) -> Option<&PoolLink> {
        self.links.iter().find(|link| resolve::fits(&link.from, from) && resolve::fits(&link.to, to))
    }

    /// Rent of the whole fleet in USD per hour, if every pool's is known.
    pub fn usd_per_hour(&self) -> Option<f64> {
        self.pools.iter().map(|pool| Some(pool.usd_per_hour? * f64::from(pool.count))).sum()
    }
}

/// Parses the text of a file; its numbers are checked for their ranges only.
fn parse(text: &str) -> Result<raw::File, FleetFileError> {
    let syntax = |error: toml::de::Error| FleetFileError::syntax(&error);
    limits::check(&text.parse().map_err(syntax)?)?;
    toml::from_str(text).map_err(syntax)
}

#[cfg(test)]
mod attending_tests;
#[cfg(test)]
mod spare_tests;
#[cfg(test)]
mod tests;
