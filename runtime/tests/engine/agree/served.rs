//! The real engine on simulated devices in virtual time: as `serve`, or as several routers before one worker
//! process.

use super::{BLOCK_TOKENS, Part, STEP_TOKENS_MAX, Scene, Step};
use crate::engine::parts;
use crate::fleet::Log;
use crate::fleet::clock::WorldClock;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::random::Stream;
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, Device, Error, OpSig, Result};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv};
use mixfleet_runtime::events::EventLog;
use mixfleet_runtime::fleet::{Hub, ModelIdentity, RouterId, WorkerProcess};
use mixfleet_runtime::metrics::{DeviceLabels, Metrics};
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::model::{Checkpoint, ModelConfig};
use mixfleet_runtime::request::{EngineHandle, GenerateRequest, Hints, Sampling, ServiceTier};
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{Action, Event, FleetConfig, InstanceId, PartyId};
use mixfleet_simulated::TimeOnlyDevice;
use mixfleet_wire::InProcessTransport;
use std::sync::Arc;
use std::time::Duration;

/// A transport without links between instances.
struct Apart(InProcessTransport);

impl Transport for Apart {
    fn name(&self) -> &'static str {
        "apart"
    }

    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        self.0.register(memory, access)
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.0.deregister(region)
    }

    fn connect(&self, _: Arc<dyn SharedMemory>, _: &Descriptor) -> Result<Box<dyn Endpoint>> {
        Err(Error::unsupported("these instances are not joined"))
    }
}

/// Turns of a conversation, and tokens of the prompt that each adds: the model has a context of 512.
const TURNS: usize = 4;
const TURN_TOKENS: u64 = 100;

/// A prompt and the number of tokens to generate.
struct Wanted {
    after: Duration,
    tier: ServiceTier,
    prompt: Vec<u32>,
    output_tokens: u32,
}

fn trace(scene: &Scene, checkpoint: &Checkpoint) -> Vec<Wanted> {
    let mut rng = Stream::new(scene.seed);
    let vocab = u64::from(checkpoint.config.vocab);
    let mut draw = |count: u64| -> Vec<u32> { (0..count).map(|_| rng.below(vocab) as u32).collect() };
    let talks = scene.requests / TURNS;
    let said: Vec<Vec<u32>> =
        (0..if scene.talks { talks } else { 0 }).map(|_| draw(TURN_TOKENS * TURNS as u64)).collect();
    let families: Vec<Vec<u32>> = (0..5).map(|_| draw(220)).collect();
    let mut rng = Stream::new(!scene.seed);
    let wanted = |at: usize| {
        let shared = rng.below(200) as usize;
        let mut prompt = families[rng.below(5) as usize][..shared].to_vec();
        prompt.extend((0..12 + rng.below(150)).map(|_| rng.below(vocab) as u32));
        if scene.talks {
            // the first turns of all, then the second ones, and so on
            prompt = said[at % talks][..TURN_TOKENS as usize * (at / talks + 1).min(TURNS)].to_vec();
        }
        let gap_s = -(1.0 - rng.next_unit()).ln() / scene.requests_per_s;
        let tier = match at % 3 {
            0 if scene.priority => ServiceTier::Priority,
            1 | 2 if scene.flex => ServiceTier::Flex,
            _ => ServiceTier::Default,
        };
        Wanted {
            after: Duration::from_secs_f64(gap_s),
            tier,
            prompt,
            output_tokens: 2 + rng.below(60) as u32,
        }
    };
    (0..scene.requests).map(wanted).collect()
}

/// KV copies take no time: the links between instances have that of the transport, and copies in memory take
/// no virtual time.
fn copies_of_kv(config: &ModelConfig) -> Vec<Point> {
    let (kv, wire) = (config.kv_shape(BLOCK_TOKENS, DType::Bf16), DType::Bf16);
    let sigs = [OpSig::KvGather { tokens: 64, wire, kv }, OpSig::KvScatter { tokens: 64, wire, kv }];
    sigs.map(|sig| Point { sig, time: Seconds(1e-15) }).to_vec()
}

/// The scene's instances with their cost models.
fn instances(scene: &Scene, checkpoint: &Checkpoint, env: &SeededEnv) -> Vec<(Loaded, CostModel)> {
    let config = Arc::new(checkpoint.config.clone());
    let instance = |(at, part): (usize, &Part)| {
        let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(part.flops)));
        let roof = DeviceProfile::roof(rates.to_vec(), BytesPerSecond(part.bandwidth), Bytes(1e9));
        let profile = if scene.copies_take {
            roof
        } else if scene.joined {
            DeviceProfile { points: copies_of_kv(&config), ..roof }
        } else {
            DeviceProfile { launch: Seconds(2e-4), launch_per_command: Seconds(1e-6), ..roof }
        };
        let clock = Arc::new(WorldClock(env.clone()));
        let device = TimeOnlyDevice::new(&format!("part{at}"), profile.clone(), clock).unwrap();
        let device: Arc<dyn Device> = Arc::new(device);
        let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
        let limits = limits(scene, &config, scene.kv_tokens);
        let price = Some(UsdPerHour(part.usd_per_hour));
        let loaded = Loaded::new(&config, InstanceSpec { device, weights, role: part.role, price, limits });
        let loaded = loaded.unwrap();
        let cost = loaded.predicted_by(profile);
        (loaded, cost)
    };
    let node = scene.node_tokens.map(|tokens| {
        let roof = DeviceProfile::roof(Vec::new(), BytesPerSecond(1e12), Bytes(1e9));
        let profile = DeviceProfile { points: copies_of_kv(&config), ..roof };
        let device = TimeOnlyDevice::new("node", profile, Arc::new(WorldClock(env.clone()))).unwrap();
        let limits = limits(scene, &config, tokens);
        (Loaded::keeping(&config, Arc::new(device), None, limits).unwrap(), Loaded::predicted_idle())
    });
    scene.parts.iter().enumerate().map(instance).chain(node).collect()
}

fn limits(scene: &Scene, config: &ModelConfig, kv_tokens: u64) -> InstanceLimits {
    InstanceLimits {
        activations: DType::F32,
        kv: DType::Bf16,
        kv_bytes: kv_tokens * config.kv_bytes_per_token(DType::Bf16),
        step_tokens_max: STEP_TOKENS_MAX,
        prefill_tokens_beside_decode_max: scene.beside_decode_max,
        sequences_max: scene.sequences_max,
        block_tokens: Some(BLOCK_TOKENS),
    }
}

/// The engines that get the scene's requests in turn, each with its log.
struct Served {
    handles: Vec<EngineHandle>,
    logs: Vec<Log>,
    /// The worker process, which lives as long as this.
    hub: Option<Hub>,
}

fn start(scene: &Scene, checkpoint: &Checkpoint, env: &SeededEnv, metrics: &Metrics) -> Served {
    let instances = instances(scene, checkpoint, env);
    let transport: Arc<dyn Transport> = if scene.joined {
        Arc::new(InProcessTransport::new())
    } else {
        Arc::new(Apart(InProcessTransport::new()))
    };
    let links = Links { transports: vec![transport], ..parts::links() };
    let shared: SharedEnv = Arc::new(env.clone());
    let hand_off = HandOffLimits { slot_bytes: 1 << 18, slots: 64, ..HandOffLimits::default() };
    let logs: Vec<Log> = (0..scene.routers).map(|_| Log::default()).collect();
    let engine = |log: &Log, metrics: Metrics| EngineParts {
        identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
        events: Some(EventLog::start(&shared, Box::new(log.clone())).0),
        env: shared.clone(),
        config: Arc::new(checkpoint.config.clone()),
        limits: EngineConfig {
            fleet: FleetConfig {
                ttft_slo: Some(Seconds(1.5)),
                tbt_slo: Some(Seconds(0.03)),
                policy: scene.policy,
                admission: scene.admission,
                drop_at_decode: scene.drops_late,
                pull: scene.pull,
                seed: scene.seed,
                ..EngineConfig::default().fleet
            },
            hand_off,
            ..EngineConfig::default()
        },
        placements: Arc::new(Placements::new(1)),
        metrics,
    };
    if let [log] = &logs[..] {
        let handles = vec![engine(log, metrics.clone()).start(instances, links).unwrap()];
        return Served { handles, logs, hub: None };
    }
    let process = WorkerProcess {
        env: shared.clone(),
        model: ModelIdentity { digest: "model".into(), tokenizer_digest: "tokenizer".into() },
        instances: (0..)
            .map(InstanceId)
            .zip(instances)
            .map(|(id, (loaded, cost))| (id, loaded, cost))
            .collect(),
        links,
        hand_off,
        metrics: metrics.clone(),
    };
    let hub = process.start().unwrap();
    let router = |(id, log)| {
        let (handle, router) = engine(log, Metrics::new()).start_router(RouterId(id), DType::Bf16);
        let session = hub.accept_router(&router.hello(), router.id()).unwrap();
        env.spawn(Box::pin(async move { router.add_worker(session).await }));
        handle
    };
    let handles = (0..).zip(&logs).map(router).collect();
    Served { handles, logs, hub: Some(hub) }
}

/// Counts of a served scene.
pub(super) struct SceneCounts {
    pub(super) preemptions: u64,
    /// Prompt tokens whose KV was reused.
    pub(super) cached_tokens: u64,
}

/// The steps of the scene's fleet machines, and the counts.
pub(super) fn served(scene: &Scene) -> (FleetConfig, Vec<Step>, SceneCounts) {
    let checkpoint = tiny_variants().remove(1).1.load().unwrap();
    let env = SeededEnv::with_blocking_workers(scene.seed);
    let metrics = Metrics::new();
    let Served { handles, logs, hub } = start(scene, &checkpoint, &env, &metrics);
    let (trace, world) = (trace(scene, &checkpoint), env.clone());
    let cached_tokens = env.run(async move {
        let (mut ends, mut cached_tokens) = (Vec::new(), 0);
        for (at, wanted) in trace.into_iter().enumerate() {
            world.sleep(wanted.after).await;
            let request = GenerateRequest {
                id: at.to_string(),
                forced_ids: Arc::new([]),
                minimum: None,
                vocabulary: None,
                prompt_ids: wanted.prompt.into(),
                max_tokens: wanted.output_tokens,
                eos_ids: Arc::new([]),
                sampling: Sampling { temperature: 0.0, ..Sampling::default() },
                logprobs: None,
                grammar: None,
                cache_salt: None,
                party: PartyId::NONE,
                hints: Hints { tier: wanted.tier, ..Hints::default() },
            };
            let Ok(updates) = handles[at % handles.len()].submit(request).await else { continue };
            ends.push(parts::end_of(&world, updates));
        }
        for end in ends {
            cached_tokens += u64::from(end.await.unwrap());
        }
        drop(hub);
        cached_tokens
    });
    let labels = (0..scene.parts.len()).map(|at| DeviceLabels { device: format!("part{at}") });
    let preemptions = labels.map(|labels| metrics.preemptions.get_or_create(&labels).get()).sum();
    let (fleets, steps): (Vec<FleetConfig>, Vec<_>) = logs.iter().map(|log| read(&log.text())).unzip();
    let counts = SceneCounts { preemptions, cached_tokens };
    (fleets[0].clone(), in_order(steps), counts)
}

/// The head of a log, and its steps.
fn read(log: &str) -> (FleetConfig, Vec<Step>) {
    let mut lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let fleet = serde_json::from_value(lines.next().unwrap()["fleet"].take()).unwrap();
    let steps = lines.filter(|line| line.get("event").is_some());
    (fleet, steps.map(|line| serde_json::from_value(line).unwrap()).collect())
}

/// The steps of all routers in order of time, with the requests renumbered in order of arrival: the first
/// router has those whose number divides without remainder, and so on.
fn in_order(steps: Vec<Vec<Step>>) -> Vec<Step> {
    let routers = steps.len() as u64;
    let number = |request: u64| (request & ((1 << 48) - 1)) * routers + (request >> 48);
    let mut all: Vec<Step> = steps.into_iter().flatten().collect();
    all.sort_by(|a, b| a.now.0.total_cmp(&b.now.0));
    for step in &mut all {
        match &mut step.event {
            Event::Arrived(arrival) => arrival.request = number(arrival.request),
            Event::PrefillDone { request, .. } | Event::Finished { request } => *request = number(*request),
            _ => {}
        }
        for action in &mut step.actions {
            if let Action::Place { request, .. } | Action::Reject { request, .. } = action {
                *request = number(*request);
            }
        }
    }
    all
}
