//! Starts an engine from arguments: opens devices, places weights, calibrates.

use crate::affinity::LocatedDevices;
use crate::args::{DeviceRole, ModelArgs, TierArgs};
use crate::digest::Digest;
use crate::failure::UsageError;
use crate::groups::SimGroup;
use crate::model::LoadedModel;
use crate::predictions::{self, Measuring};
use crate::remote::{OpenDevice, RemoteArgs};
use crate::tiers::{self, InstancePools};
use crate::{backends, calibration, profiles, sizes};
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hal::cast::{to_u32, to_u64, to_usize};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::Transport;
use mixfleet_hal::units::{Bytes, GIB, UsdPerHour};
use mixfleet_hal::{Device, DeviceKind};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, Identity, InstanceLimits, InstanceSpec, Links, Loaded, MemberSpec,
};
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::events::EventLog;
use mixfleet_runtime::kv_exchange::{KvExchange, KvExchangeParts};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::pool::Pool;
use mixfleet_runtime::request::EngineHandle;
use mixfleet_scheduler::cost::{AttnSplit, CostModel, MemberShare};
use mixfleet_scheduler::fleet::Role;
use mixfleet_scheduler::sizing::{GivenSizes, InstanceSize};
use mixfleet_wire::{HostRegion, InProcessTransport};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// Chunks of a device in a step over stages of layers, which is cut into micro-batches.
const CHUNKS_OF_STAGES: u32 = 4;

/// The devices that serve, and their configuration.
pub(crate) struct ServingDevices {
    pub(crate) devices: Vec<DeviceRole>,
    pub(crate) prices: BTreeMap<String, f64>,
    pub(crate) sequences_max: Option<u32>,
    /// Whether prompts run in full steps beside decodes too, since no user reads the stream.
    pub(crate) prompts_first: bool,
    /// How KV is divided under attention offload.
    pub(crate) attn_split: Option<AttnSplit>,
    /// How devices of other processes are reached.
    pub(crate) remote: RemoteArgs,
    pub(crate) tiers: TierArgs,
    pub(crate) profiles: Vec<PathBuf>,
    pub(crate) recalibrate: bool,
    /// Whether devices are calibrated at few sizes, since an answer waits for it.
    pub(crate) brief: bool,
    /// Whether threads stay on the NUMA nodes of the devices that they drive.
    pub(crate) pinned: bool,
}

impl ServingDevices {
    /// Maximum sequences on `devices`, without lower tiers.
    pub(crate) fn plain(devices: Vec<DeviceRole>, sequences_max: u32) -> Self {
        ServingDevices {
            devices,
            prices: BTreeMap::new(),
            sequences_max: Some(sequences_max),
            prompts_first: true,
            attn_split: None,
            remote: RemoteArgs::default(),
            tiers: TierArgs::default(),
            profiles: Vec::new(),
            recalibrate: false,
            brief: true,
            pinned: true,
        }
    }
}

/// The caller's choices besides the model.
pub(crate) struct StartOptions {
    pub(crate) instances: ServingDevices,
    pub(crate) engine: EngineConfig,
    pub(crate) events: Option<EventLog>,
    /// The address at which external engines exchange KV with this process, if allowed.
    pub(crate) kv_exchange: Option<String>,
}

/// A running engine, and the longest sequence that it can hold.
pub(crate) struct Started {
    pub(crate) handle: EngineHandle,
    pub(crate) context: u32,
    pub(crate) pools: InstancePools,
    pub(crate) exchange: Option<Arc<KvExchange>>,
    devices: Vec<Arc<dyn Device>>,
}

impl Started {
    /// The sum of all devices' energy counters; none if one device has none.
    pub(crate) fn energy_j(&self) -> Option<f64> {
        self.devices.iter().map(|device| device.health().energy_j).sum()
    }
}

/// Loads `model` on the chosen devices and starts the engine. Blocks, so it must not run on an async thread.
pub(crate) fn engine(
    model: &LoadedModel,
    args: &ModelArgs,
    mut choice: StartOptions,
    env: &SharedEnv,
    metrics: Metrics,
    placements: Arc<Placements>,
) -> Result<Started> {
    check_roles(&choice.instances.devices)?;
    // Block hashes are valid for one shape and secret; the namespace of a disk identifies the weights.
    let (model_digest, tokenizer_digest) = (model.shape_digest.clone(), model.tokenizer_digest.clone());
    let identity = match tiers::secret(&mut choice.instances.tiers, env)? {
        Some(secret) => Identity { model_digest, tokenizer_digest, secret },
        None => Identity::new(model_digest, tokenizer_digest, [env.random(), env.random()]),
    };
    let digest = Digest::kept(&model.checkpoint);
    let has_disk = choice.instances.tiers.kv_ssd.is_some();
    let chosen: Vec<String> = choice.instances.devices.iter().map(|one| one.device.clone()).collect();
    metrics.loading(env.now(), &chosen);
    let instances = instances(model, args, &choice.instances, &identity, &digest, env)?;
    let ids: Vec<String> = instances.iter().map(|(loaded, _)| loaded.id()).collect();
    metrics.loading(env.now(), &ids);
    let context = context(model, &instances);
    let pools = InstancePools::of(&instances);
    let devices = instances.iter().flat_map(|(loaded, _)| loaded.devices().cloned()).collect();
    let exchange = match choice.kv_exchange {
        Some(url) => Some(exchange(url, model, &identity, &instances, &metrics)?),
        None => None,
    };
    let worker_env = match choice.instances.pinned {
        true => LocatedDevices::of(&instances).bind_instances(env),
        false => env.clone(),
    };
    let parts = EngineParts {
        env: worker_env,
        identity,
        config: Arc::new(model.checkpoint.config.clone()),
        limits: choice.engine,
        events: choice.events,
        placements,
        metrics,
    };
    let handle = parts.start(instances, links(vec![Arc::new(InProcessTransport::new())]))?;
    if let Some(exchange) = exchange.clone() {
        let known = digest.wait();
        env.spawn(Box::pin(async move {
            if let Some(digest) = known.await {
                exchange.know(digest);
                tracing::info!("digest of the weights computed: external engines may read and write KV");
            }
        }));
    }
    if has_disk || exchange.is_some() {
        digest.begin(model.checkpoint.clone());
    }
    Ok(Started { handle, context, pools, exchange, devices })
}

/// Memory that external engines read and write: the host memory below prefill instances, and below others.
fn exchange(
    url: String,
    model: &LoadedModel,
    identity: &Identity,
    instances: &[(Loaded, CostModel)],
    metrics: &Metrics,
) -> Result<Arc<KvExchange>> {
    let mut with_pools: Vec<(Role, &Pool)> =
        instances.iter().filter_map(|(loaded, _)| Some((loaded.role(), loaded.pool()?))).collect();
    with_pools.sort_by_key(|(role, _)| !role.prefills());
    let pools: Vec<Pool> = with_pools.into_iter().map(|(_, pool)| pool.clone()).collect();
    let config = &model.checkpoint.config;
    if config.latent.is_some() {
        return Err(
            UsageError("--kv-exchange: other engines' layout of latents is not known".to_owned()).into()
        );
    }
    let parts = KvExchangeParts {
        url,
        identity: identity.clone(),
        layers: config.layers,
        kv: config.kv_shape(pools.first().map_or(0, |pool| to_u32(pool.block_size().1)), model.kv),
        pools,
        metrics: metrics.clone(),
    };
    parts.open().map(Arc::new).map_err(|error| UsageError(format!("--kv-exchange: {error}")).into())
}

/// Links over memory that all of `transports` can access.
pub(crate) fn links(transports: Vec<Arc<dyn Transport>>) -> Links {
    Links { transports, make_region: Arc::new(region) }
}

pub(crate) fn region(bytes: u64) -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
    Ok(Arc::new(HostRegion::new(to_usize(bytes))?))
}

/// Loads `model` on the chosen devices, and measures the time of their steps. Blocks.
#[expect(clippy::too_many_lines, reason = "one kind of device group after the other")]
pub(crate) fn instances(
    model: &LoadedModel,
    args: &ModelArgs,
    choice: &ServingDevices,
    identity: &Identity,
    digest: &Digest,
    env: &SharedEnv,
) -> Result<Vec<(Loaded, CostModel)>> {
    let config = Arc::new(model.checkpoint.config.clone());
    check_names(&choice.devices)?;
    if let Some(unknown) =
        choice.prices.keys().find(|name| !choice.devices.iter().any(|d| d.device == **name))
    {
        return Err(UsageError(format!("--usd-per-hour {unknown}: no such device serves here")).into());
    }
    let read = |file: &PathBuf| Ok((file.clone(), profiles::read(file)?));
    let known = choice.profiles.iter().map(read).collect::<Result<Vec<_>>>()?;
    digest.watch_over(model.checkpoint.clone());
    let (mut instances, mut costs) = (Vec::new(), Vec::new());
    let given = GivenSizes {
        kv: args.kv_memory.map(|gib| Bytes(gib * GIB as f64)),
        step_tokens_max: args.chunk,
        sequences_max: choice.sequences_max,
    };
    let mut host_devices = 0;
    // devices that keep KV, as often as they do
    let mut keeping = Vec::new();
    for DeviceRole { device, .. } in &choice.devices {
        let mut members = backends::members(device)?;
        host_devices += members.iter().filter(|member| member.starts_with("cpu")).count();
        keeping.extend(members.drain(usize::from(backends::attends_apart(device))..));
    }
    if choice.attn_split.is_some() && !choice.devices.iter().any(|d| backends::attends_apart(&d.device)) {
        let message = "--attn-split: no device is of the form 'attn:DEV,DEV', whose KV it divides".to_owned();
        return Err(UsageError(message).into());
    }
    for DeviceRole { device: selector, role } in &choice.devices {
        let group = SimGroup::of(selector)?.map(|group| group.open(model, given)).transpose()?;
        let given = group.as_ref().map_or(given, |group| group.given);
        let stages = backends::stages(selector)?;
        let members = stages.concat();
        let mut opened = Vec::<OpenDevice>::new();
        for member in &members {
            opened.push(match (&group, opened.first()) {
                (Some(group), _) => OpenDevice::here(group.device.clone()),
                // one that attends as well
                (None, Some(first)) if *member == members[0] => first.clone(),
                _ => backends::open_as(member, &choice.remote)?,
            });
        }
        let devices: Vec<_> = opened.iter().map(|open| open.device.clone()).collect();
        let partition = match backends::attends_apart(selector) && group.is_none() {
            true => config.with_attention(members.len() - 1, choice.attn_split.unwrap_or_default()),
            false => {
                let (digest, x) = (&model.shape_digest, model.activations);
                let speeds = calibration::speeds(&devices, &config, digest, x, choice.recalibrate)?;
                let mut rest = &speeds[..];
                let of_stage =
                    |stage: &Vec<String>| rest.split_off(..stage.len()).unwrap_or_default().to_vec();
                let weights: Vec<_> = stages.iter().map(of_stage).collect();
                match &group {
                    Some(_) => config.in_stages(&weights),
                    None => config.in_stages_by(&weights, &backends::experts_by(selector)),
                }
            }
        };
        let partition = partition.map_err(|reason| UsageError(format!("{selector}: {reason}")))?;
        let mut placed: Vec<(Arc<dyn Device>, _, InstanceSize, &MemberShare)> = Vec::new();
        for ((member, open), share) in members.iter().zip(opened).zip(partition.shares()) {
            let whole = members.len() == 1;
            let weights = place(model, &open, member, (!whole).then_some(share))?;
            let first = placed.first().filter(|(device, ..)| Arc::ptr_eq(device, &open.device));
            let taken = first.map_or(Bytes::ZERO, |(_, _, size, _)| size.activations);
            let mut sharing = keeping.iter().filter(|other| *other == member).count();
            if open.device.info().kind == DeviceKind::Cpu {
                sharing = host_devices;
            }
            if let Some(own) = keeping.iter().position(|other| share.keeps_kv() && other == member) {
                keeping.remove(own);
            }
            let size = sizes::of(model, share, &*open.device, given, taken, sharing)?;
            placed.push((open.device, weights, size, share));
        }
        let fewest = |which: fn(&MemberShare) -> bool, of: fn(&InstanceSize) -> u32| {
            let these = placed.iter().filter(|(.., share)| which(share));
            these.map(|(.., size, _)| of(size)).min().unwrap_or(1)
        };
        // prompts are bound by products with weights, and KV memory bounds sequences
        let mut step_tokens_max = fewest(MemberShare::has_weights, |size| size.step_tokens_max);
        if stages.len() > 1 && given.step_tokens_max.is_none() {
            step_tokens_max *= CHUNKS_OF_STAGES;
        }
        let sequences_max = fewest(MemberShare::keeps_kv, |size| size.sequences_max);
        let mut placed = placed.into_iter().map(|(device, weights, size, _)| MemberSpec {
            device,
            weights,
            kv_bytes: to_u64(size.kv.0),
        });
        let MemberSpec { device, weights, kv_bytes } = placed.next().context("an instance has a device")?;
        let weights = weights.context("the first device of an instance has weights")?;
        let limits = InstanceLimits {
            activations: model.activations,
            kv: model.kv,
            kv_bytes,
            step_tokens_max,
            prefill_tokens_beside_decode_max: choice.prompts_first.then_some(step_tokens_max),
            sequences_max,
            block_tokens: None,
        };
        let price = choice.prices.get(selector).map(|&usd| UsdPerHour(usd));
        let spec = InstanceSpec { device, weights, role: *role, price, limits };
        let below = tiers::of(&choice.tiers, selector, namespace(identity, model, digest))?;
        // tiers keep blocks of all layers, so keys outside windows stay as well
        let config = match below {
            None => Arc::new(model.checkpoint.config.clone().in_window_pages()),
            Some(_) => config.clone(),
        };
        let loaded = match members.len() {
            1 => Loaded::new(&config, spec)?,
            _ => Loaded::divided(&config, &partition, spec, placed.collect())?,
        };
        let loaded = loaded.with_grammars(model.text.grammars.clone());
        instances.push(match below {
            Some(tiers) => loaded.with_lower_tiers(tiers, &region)?,
            None => loaded,
        });
        costs.push(group.map(|group| group.cost));
    }
    let measuring = Measuring { again: choice.recalibrate, brief: choice.brief };
    predictions::of(model, instances.into_iter().zip(costs).collect(), &known, measuring, env)
}

/// The namespace of the model's KV on a disk, once the weights' digest is known.
pub(crate) fn namespace(identity: &Identity, model: &LoadedModel, digest: &Digest) -> tiers::NamespaceFuture {
    let (identity, kv, digest) = (identity.clone(), model.kv, digest.wait());
    Box::pin(async move {
        // The digest is not available at once, so that a disk is opened on its own thread, which may hang.
        tokio::task::yield_now().await;
        Some(Identity { model_digest: digest.await?, ..identity }.namespace(kv))
    })
}

/// The longest sequence that the model and the KV memory of some pair of devices can hold.
fn context(model: &LoadedModel, instances: &[(Loaded, CostModel)]) -> u32 {
    let most = |can: fn(Role) -> bool| {
        let able = instances.iter().filter(|(instance, _)| can(instance.role()));
        able.map(|(instance, _)| instance.kv_capacity_tokens()).max().unwrap_or(0)
    };
    let held = most(Role::prefills).min(most(Role::decodes));
    let context = model.checkpoint.config.context_max;
    if held < u64::from(context) {
        tracing::info!(
            tokens = held,
            context,
            "the KV memory holds less than the model's context; --kv-memory gives more"
        );
    }
    context.min(u32::try_from(held).unwrap_or(u32::MAX))
}

fn check_roles(devices: &[DeviceRole]) -> Result<()> {
    for (role, can) in [("prefill", Role::prefills as fn(Role) -> bool), ("decode", Role::decodes)] {
        if !devices.iter().any(|d| can(d.role)) {
            let message =
                format!("no device does {role}: add one with '--device DEV={role}' or '--device DEV'");
            return Err(UsageError(message).into());
        }
    }
    Ok(())
}

/// Devices may share one copy of the weights. Attention-only devices of an instance may serve others too, or
/// hold another instance's weights: a prefill instance can lend bandwidth to a decode instance.
fn check_names(devices: &[DeviceRole]) -> Result<()> {
    let mut with_weights = BTreeSet::new();
    for DeviceRole { device, .. } in devices {
        let mut members = backends::members(device)?;
        if backends::attends_apart(device) {
            members.truncate(1);
        }
        for member in members {
            if !with_weights.insert(member.clone()) {
                let message = format!("device '{member}' is named twice; one can do prefill and decode");
                return Err(UsageError(message).into());
            }
        }
    }
    Ok(())
}

fn place(
    model: &LoadedModel,
    open: &OpenDevice,
    selector: &str,
    share: Option<&MemberShare>,
) -> Result<Option<mixfleet_runtime::model::Weights>> {
    // what it needs is kept with a device of another process, which may come back without weights
    let (checkpoint, random, name) = (model.checkpoint.clone(), model.random.clone(), selector.to_owned());
    let share = share.cloned();
    let placed = open.place(move |device| {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}");
        let bar = ProgressBar::new(checkpoint.size_bytes());
        bar.set_style(style.expect("a fixed template"));
        bar.set_message(format!("loading on {name}"));
        let mut progress = |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        };
        let weights = match &share {
            None if !device.info().computes() && random.is_some() => {
                random.as_ref().map(|random| random.unwritten(device)).transpose()
            }
            None => checkpoint.place(device, &mut progress).map(Some),
            Some(share) => checkpoint.place_share(device, share, &mut progress),
        };
        bar.finish_and_clear();
        weights
    });
    placed.with_context(|| format!("cannot place the model on {selector}"))
}
