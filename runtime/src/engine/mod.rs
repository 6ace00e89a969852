//! Runs requests on devices: one coordinator, one worker per instance.
//!
//! ```text
//!   API --Submission--> coordinator --ToWorker--> worker (device A: prefill) --KV--> worker (device B: decode)
//!    ^-----Update-----------'  ^--------FromWorker-------'--------------------------------'
//! ```
//!
//! All choices are the scheduler's: the coordinator carries the fleet machine's, each worker its own
//! instance machine's.

pub mod calibrate;
mod coordinator;
mod courier;
mod directory;
pub mod events;
mod handoff;
mod health;
mod messages;
mod worker;

pub use coordinator::Identity;
pub use courier::{HandOffLimits, Links};
pub use handoff::wire_dtype;

use crate::api::Placements;
use crate::env::SharedEnv;
use crate::metrics::Metrics;
use crate::model::graph::{Forward, StepShape};
use crate::model::{ModelConfig, Weights};
use crate::request::EngineHandle;
use coordinator::{Coordinator, InstanceHandle};
use courier::Courier;
use directory::Directory;
use events::{EventLog, LoggedFleet};
use handoff::Staging;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::transport::{Access, Piece};
use mixfleet_hal::units::{Seconds, UsdPerHour};
use mixfleet_hal::{DType, Device, Error, OpSig, Result, Scalar, Support};
use mixfleet_scheduler::batch::BatchLimits;
use mixfleet_scheduler::cost::{Coefficients, CostModel, LinkCost, ProfileCost};
use mixfleet_scheduler::fleet::{Admission, Event, FleetConfig, Instance, InstanceId, Link, Policy, Role};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;
use worker::{Worker, WorkerParts};

/// How an instance runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceLimits {
    /// Dtype between operations.
    pub activations: DType,
    /// Dtype of the KV.
    pub kv: DType,
    /// Memory for KV, in bytes.
    pub kv_bytes: u64,
    /// New tokens in a step.
    pub step_tokens_max: u32,
    /// Prompt tokens in a step that also decodes.
    pub prefill_tokens_beside_decode_max: u32,
    /// Sequences at a time.
    pub sequences_max: u32,
    /// Tokens in a KV block; the device's preference if none.
    pub block_tokens: Option<u32>,
}

/// A device that shall serve.
pub struct InstanceSpec {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The model's parameters on it.
    pub weights: Weights,
    /// What it may do.
    pub role: Role,
    /// Its rent, if known.
    pub price: Option<UsdPerHour>,
    /// Its bounds.
    pub limits: InstanceLimits,
}

/// A device with the model and its KV memory, not serving yet.
pub struct Loaded {
    spec_device: Arc<dyn Device>,
    forward: Forward,
    role: Role,
    price: Option<UsdPerHour>,
    batch: BatchLimits,
}

/// The fleet's bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Requests in work.
    pub requests_max: usize,
    /// Requests predicted to get their first token later than this are turned away.
    pub ttft_slo: Option<Seconds>,
    /// Requests predicted to get their tokens slower than this are turned away.
    pub tbt_slo: Option<Seconds>,
    /// Answers of [`ServiceTier::Flex`](crate::request::ServiceTier) are complete so long after their request came, or it is turned away.
    pub flex_deadline: Seconds,
    /// How placements are picked.
    pub policy: Policy,
    /// What is turned away on arrival.
    pub admission: Admission,
    /// Of policies that draw.
    pub seed: u64,
    /// Staging of KV between instances.
    pub hand_off: HandOffLimits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            requests_max: 1024,
            ttft_slo: None,
            tbt_slo: None,
            flex_deadline: Seconds(600.0),
            policy: Policy::default(),
            admission: Admission::default(),
            seed: 0,
            hand_off: HandOffLimits::default(),
        }
    }
}

/// Makes so many bytes of staging memory.
pub type MakeRegion = dyn Fn(u64) -> Result<Arc<dyn SharedMemory>> + Send + Sync;

impl Loaded {
    /// Checks that the device can run the model and allocates KV and activations.
    ///
    /// # Errors
    /// `Unsupported` with the operation, `OutOfMemory`, or `Invalid` for bounds that hold nothing.
    pub fn new(config: &Arc<ModelConfig>, spec: InstanceSpec) -> Result<Self> {
        let InstanceSpec { device, weights, role, price, limits } = spec;
        let block_tokens = limits.block_tokens.unwrap_or_else(|| device.limits().kv_page_tokens);
        let block_bytes = u64::from(block_tokens) * config.kv_bytes_per_token(limits.kv);
        let blocks = u32::try_from(limits.kv_bytes / block_bytes.max(1)).unwrap_or(u32::MAX / block_tokens);
        if blocks == 0 {
            return Err(Error::invalid(format!(
                "{}: {} bytes of KV memory hold no block of {block_tokens} tokens ({block_bytes} bytes); give it more",
                device.info().id,
                limits.kv_bytes
            )));
        }
        let shape = StepShape {
            tokens_max: limits.step_tokens_max.max(limits.sequences_max),
            sequences_max: limits.sequences_max,
            blocks,
            block_tokens,
            activations: limits.activations,
            kv: limits.kv,
        };
        check_support(&*device, config, &weights, &shape)?;
        let forward = Forward::new(&*device, config.clone(), weights, shape)?;
        let batch = BatchLimits {
            blocks_total: blocks,
            block_tokens,
            step_tokens_max: shape.tokens_max,
            prefill_tokens_beside_decode_max: limits.prefill_tokens_beside_decode_max,
            sequences_max: limits.sequences_max as usize,
            // Room for every running sequence to begin a block, up to a hundredth of the memory.
            spare_blocks: (blocks as usize / 100).min(limits.sequences_max as usize),
        };
        Ok(Loaded { spec_device: device, forward, role, price, batch })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.spec_device
    }

    /// Tokens that the KV memory holds.
    pub fn kv_capacity_tokens(&self) -> u64 {
        u64::from(self.batch.blocks_total) * u64::from(self.batch.block_tokens)
    }

    /// What it may do.
    pub fn role(&self) -> Role {
        self.role
    }

    /// What steps take here; before serving only.
    ///
    /// # Errors
    /// The device's.
    pub fn calibrate(&self) -> Result<Coefficients> {
        calibrate::measure(&*self.spec_device, &self.forward)
    }

    /// What steps take here by a profile of the device, measured before.
    pub fn predicted_by(&self, profile: DeviceProfile) -> CostModel {
        let shape = self.forward.shape();
        let cost = ProfileCost {
            profile,
            shape: self.forward.config().cost_shape(shape.activations, shape.kv, shape.block_tokens),
            chunk_tokens: shape.tokens_max,
            all_reduce: None,
        };
        CostModel::Profile(Box::new(cost))
    }
}

/// Asks the device about the operations that differ between models.
fn check_support(device: &dyn Device, c: &ModelConfig, weights: &Weights, shape: &StepShape) -> Result<()> {
    let StepShape { activations: x, kv, block_tokens: page_tokens, .. } = *shape;
    let (heads, kv_heads, head_dim) = (c.heads, c.kv_heads, c.head_dim);
    let gemm = |weight, out| {
        let (m, n, k) = (1, c.hidden, c.hidden);
        OpSig::Gemm { m, n, k, x, weight, out, bias: c.qkv_bias, accumulate: false }
    };
    let needed = [
        OpSig::Embed {
            tokens: 1,
            vocab: c.vocab,
            hidden: c.hidden,
            table: weights.embed.dtype,
            out: DType::F32,
        },
        gemm(weights.layers[0].q.dtype, x),
        gemm(weights.lm_head.dtype, DType::F32),
        OpSig::RmsNorm {
            rows: 1,
            cols: c.hidden,
            eps: Scalar(c.norm_eps),
            x: DType::F32,
            weight: weights.norm.dtype,
            out: x,
        },
        OpSig::Rope { tokens: 1, heads, head_dim, x },
        OpSig::SiluMul { elements: 1, x },
        OpSig::Argmax { rows: 1, cols: c.vocab },
        OpSig::KvGather { tokens: 1, kv_heads, head_dim, page_tokens, kv, wire: kv },
        OpSig::KvScatter { tokens: 1, kv_heads, head_dim, page_tokens, kv, wire: kv },
        OpSig::KvWrite { tokens: 1, kv_heads, head_dim, page_tokens, x, kv },
        OpSig::AttnPrefill {
            tokens: 1,
            sequences: 1,
            pairs: 1,
            kv_tokens: 1,
            heads,
            kv_heads,
            head_dim,
            page_tokens,
            pages_max: 1,
            window: c.windows.iter().flatten().next().copied(),
            x,
            kv,
        },
        OpSig::AttnDecode {
            sequences: 1,
            kv_tokens: 1,
            heads,
            kv_heads,
            head_dim,
            page_tokens,
            pages_max: 1,
            x,
            kv,
        },
    ];
    match needed.iter().find(|sig| device.support(sig) == Support::No) {
        None => Ok(()),
        Some(sig) => Err(Error::unsupported(format!(
            "{} cannot run {sig:?}, which this model needs; choose another device or other dtypes",
            device.info().id
        ))),
    }
}

/// What an engine is made of.
pub struct EngineParts {
    /// The world.
    pub env: SharedEnv,
    /// The model.
    pub config: Arc<ModelConfig>,
    /// Names the model in block hashes.
    pub identity: Identity,
    /// Instances with what steps take on them.
    pub instances: Vec<(Loaded, CostModel)>,
    /// The ways between instances.
    pub links: Links,
    /// The fleet's bounds.
    pub limits: EngineConfig,
    /// Where all that the fleet's machine is told and answers goes, if it is wanted.
    pub events: Option<EventLog>,
    /// Where decisions are kept for people.
    pub placements: Arc<Placements>,
    /// Where everyone counts.
    pub metrics: Metrics,
}

impl EngineParts {
    /// Starts the workers and the coordinator; they end when the last handle and request are gone.
    ///
    /// # Errors
    /// When a device gives no queue or no staging memory.
    pub fn start(self) -> Result<EngineHandle> {
        let EngineParts { env, config, identity, instances, links, limits, .. } = self;
        let metrics = self.metrics;
        let (reports, incoming) = mpsc::unbounded_channel();
        let widest = instances.iter().map(|(i, _)| i.forward.shape().kv).max_by_key(|d| d.size_bytes());
        let fleet = FleetConfig {
            requests_max: limits.requests_max,
            ttft_slo: limits.ttft_slo,
            tbt_slo: limits.tbt_slo,
            policy: limits.policy,
            admission: limits.admission,
            seed: limits.seed,
            ..FleetConfig::new(config.kv_bytes_per_token(widest.unwrap_or(DType::F32)), config.layers)
        };
        let mut fleet = LoggedFleet::new(fleet, self.events);
        let mut handles = BTreeMap::new();
        let directory = Directory::default();
        for (at, (loaded, cost)) in instances.into_iter().enumerate() {
            let id = InstanceId(at as u32);
            let instance = describe(id, &loaded, cost);
            fleet.step(env.now(), Event::InstanceUp(instance));
            let Loaded { spec_device: device, forward, batch, .. } = loaded;
            let shape = *forward.shape();
            let staging = Staging::new(&*device, &config, &shape, limits.hand_off.slot_bytes)?;
            let courier = Courier::new(links.clone(), limits.hand_off);
            let (address, inbox) = mpsc::unbounded_channel();
            directory.enter(id, address);
            let handle = InstanceHandle {
                device: device.info().id.clone(),
                kv: shape.kv,
                block_tokens: shape.block_tokens,
            };
            let name = format!("worker {}", handle.device);
            handles.insert(id, handle);
            let (env2, reports, metrics) = (env.clone(), reports.clone(), metrics.clone());
            let parts = WorkerParts {
                id,
                env: env2,
                device,
                forward,
                limits: batch,
                staging,
                courier,
                directory: directory.clone(),
                inbox,
                reports,
                metrics,
            };
            let worker = Worker::new(parts)?;
            env.spawn_worker(&name, Box::pin(worker.run()));
        }
        // All ways within one process are alike.
        match measure_link(&env, &links, limits.hand_off) {
            _ if handles.len() < 2 => {}
            Ok(cost) => {
                for (from, to) in pairs(&handles) {
                    fleet.step(env.now(), Event::LinkUp(Link { from, to, cost: cost.clone() }));
                }
            }
            Err(error) => tracing::warn!(%error, "no KV can go from one device to another"),
        }
        let (handle, submissions) = EngineHandle::channel(limits.requests_max.max(1));
        let coordinator = Coordinator {
            env: env.clone(),
            fleet,
            instances: handles,
            directory,
            identity,
            submissions,
            flex_deadline: limits.flex_deadline,
            reports: incoming,
            placements: self.placements,
            metrics,
        };
        env.spawn(Box::pin(coordinator.run()));
        Ok(handle)
    }
}

fn describe(id: InstanceId, loaded: &Loaded, cost: CostModel) -> Instance {
    Instance {
        id,
        device: loaded.spec_device.info().id.as_str().into(),
        role: loaded.role,
        pool: 0,
        cost: cost.into(),
        price: loaded.price,
        nic: None,
        kv_capacity_tokens: loaded.kv_capacity_tokens(),
        kv_block_tokens: loaded.batch.block_tokens,
        prefill_tokens_beside_decode_max: loaded.batch.prefill_tokens_beside_decode_max,
    }
}

fn pairs(handles: &BTreeMap<InstanceId, InstanceHandle>) -> Vec<(InstanceId, InstanceId)> {
    let ids: Vec<InstanceId> = handles.keys().copied().collect();
    let all = ids.iter().flat_map(|&from| ids.iter().map(move |&to| (from, to)));
    all.filter(|(from, to)| from != to).collect()
}

/// `a + b * bytes` of a staged write, from a small one and a whole slot; the least of a few tries.
fn measure_link(env: &SharedEnv, links: &Links, limits: HandOffLimits) -> Result<LinkCost> {
    const TRIES: usize = 5;
    const SMALL_BYTES: u64 = 4096;
    let large_bytes = limits.slot_bytes;
    let transport = links.transports.first().ok_or_else(|| Error::unsupported("there is no transport"))?;
    let region = transport.register((links.make_region)(large_bytes)?, Access::Write)?;
    let mut endpoint = transport.connect((links.make_region)(large_bytes)?, &region)?;
    let mut least = |bytes: u64| -> Result<f64> {
        let piece = Piece { local: 0, remote: 0, bytes: bytes.min(large_bytes) };
        let mut best = f64::INFINITY;
        for _ in 0..TRIES {
            let start = env.now();
            let transfer = endpoint.write(&[piece])?;
            endpoint.wait(transfer, limits.timeout)?;
            best = best.min((env.now() - start).0);
        }
        Ok(best)
    };
    let measured = least(SMALL_BYTES).and_then(|small| Ok((small, least(large_bytes)?)));
    drop(endpoint);
    transport.deregister(&region)?;
    let (small, large) = measured?;
    let seconds_per_byte =
        ((large - small) / (large_bytes.saturating_sub(SMALL_BYTES)).max(1) as f64).max(0.0);
    Ok(LinkCost { latency: Seconds(small), seconds_per_byte, usd_per_byte: 0.0 })
}
