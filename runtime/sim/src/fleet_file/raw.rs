//! The fleet file as written. The keys are documented in docs/reference/fleet-file.md.

use super::{PoolLink, PoolSlowdown, Routing, Slo};
use mixfleet_scheduler::cost::{DecodeCoefficients, PrefillCoefficients};
use mixfleet_scheduler::fleet::Role;
use mixfleet_scheduler::kv::CachePolicy;
use serde::de::{Error, IntoDeserializer};
use serde::{Deserialize, Deserializer};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) version: u32,
    pub(super) model: Model,
    #[serde(default)]
    pub(super) slo: Slo,
    #[serde(default)]
    pub(super) kv: Kv,
    #[serde(default)]
    pub(super) engine: Engine,
    pub(super) pool: Vec<RawPool>,
    #[serde(default)]
    pub(super) link: Vec<PoolLink>,
    #[serde(default)]
    pub(super) class: Vec<Class>,
    pub(super) rebalance: Option<Rebalance>,
    #[serde(default)]
    pub(super) slowdown: Vec<PoolSlowdown>,
    #[serde(default)]
    pub(super) routers: Routing,
    /// Flags of commands, which the binary reads.
    #[serde(rename = "scheduling")]
    pub(super) _scheduling: Option<toml::Table>,
    #[serde(rename = "serve")]
    pub(super) _serve: Option<toml::Table>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rebalance {
    pub(super) high: Option<f64>,
    pub(super) low: Option<f64>,
    pub(super) hold_s: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Class {
    pub(super) name: String,
    pub(super) share: Option<f64>,
    pub(super) label: Option<String>,
    pub(super) ttft_s: Option<f64>,
    pub(super) tbt_s: Option<f64>,
    pub(super) deadline_s: Option<f64>,
    pub(super) priority: Option<f64>,
    #[serde(default)]
    pub(super) workflow: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    pub(super) name: Option<String>,
    pub(super) layers: Option<u32>,
    pub(super) hidden: Option<u32>,
    pub(super) heads: Option<u32>,
    pub(super) kv_heads: Option<u32>,
    pub(super) head_dim: Option<u32>,
    pub(super) intermediate: Option<u32>,
    pub(super) vocab: Option<u32>,
    pub(super) tied_embeddings: Option<bool>,
    pub(super) dtype: Option<String>,
    pub(super) kv_dtype: Option<String>,
    pub(super) kv_bytes_per_token: Option<f64>,
    pub(super) weight_bytes: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kv {
    pub(super) block_tokens: Option<u32>,
    #[serde(default)]
    pub(super) policy: CachePolicy,
    pub(super) replicate_gb_per_s: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Engine {
    pub(super) name: Option<String>,
    pub(super) max_batched_tokens: Option<u32>,
    pub(super) max_prefill_tokens_beside_decode: Option<u32>,
    pub(super) max_sequences: Option<u32>,
}

/// A role by its name. Attention is none: it is a part of an instance, whose KV others may fill.
fn role<'de, D: Deserializer<'de>>(from: D) -> Result<Role, D::Error> {
    let name = String::deserialize(from)?;
    if name == "attention" {
        return Err(D::Error::custom(
            "attention is not a role: attention devices are in one instance with those that have the weights; give \
             role = \"decode\" or \"auto\", and device = \"attn:A,B\" with attn_devices for the number of B",
        ));
    }
    Role::deserialize(name.into_deserializer())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPool {
    pub(super) name: String,
    #[serde(default, deserialize_with = "role")]
    pub(super) role: Role,
    #[serde(default)]
    pub(super) flexible: bool,
    #[serde(default = "one")]
    pub(super) count: u32,
    pub(super) device: Option<String>,
    pub(super) profile: Option<String>,
    pub(super) calibration: Option<Calibration>,
    #[serde(default = "one")]
    pub(super) devices_per_instance: u32,
    pub(super) engine: Option<String>,
    pub(super) interconnect: Option<RawInterconnect>,
    #[serde(default)]
    pub(super) expert_parallel: bool,
    #[serde(default)]
    pub(super) experts_by_member: bool,
    pub(super) expert_skew: Option<f32>,
    pub(super) pipeline_stages: Option<u32>,
    pub(super) pipeline_chunk_tokens: Option<u32>,
    pub(super) attn_devices: Option<u32>,
    pub(super) attn_split: Option<String>,
    pub(super) attn_batches: Option<u32>,
    pub(super) attn_link: Option<StatedLink>,
    pub(super) attn_pool: Option<String>,
    pub(super) attn_pool_share: Option<f64>,
    pub(super) usd_per_hour: Option<f64>,
    pub(super) usd_per_gib_hour: Option<f64>,
    pub(super) cache_tokens: Option<u64>,
    pub(super) cache_bytes: Option<f64>,
    pub(super) dram_tokens: Option<u64>,
    pub(super) dram_bytes: Option<f64>,
    pub(super) dram_gb_per_s: Option<f64>,
    pub(super) ssd_tokens: Option<u64>,
    pub(super) ssd_bytes: Option<f64>,
    pub(super) ssd_gb_per_s: Option<f64>,
    pub(super) nic_gb_per_s: Option<f64>,
    pub(super) max_batched_tokens: Option<u32>,
    pub(super) max_prefill_tokens_beside_decode: Option<u32>,
    pub(super) max_sequences: Option<u32>,
}

/// The links between an instance's devices: a name, or numbers.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a name, or { gb_per_s = ..., latency_s = ... }")]
pub(super) enum RawInterconnect {
    Named(String),
    Stated(StatedLink),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StatedLink {
    pub(super) gb_per_s: f64,
    #[serde(default)]
    pub(super) latency_s: f64,
}

const fn one() -> u32 {
    1
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Calibration {
    pub(super) prefill_s: Option<PrefillCoefficients>,
    pub(super) decode_s: Option<DecodeCoefficients>,
}
