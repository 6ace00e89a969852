//! What `serve` does and what `simulate` predicts are one: the real engine on simulated devices in virtual
//! time, and the simulator's driver of the same machine, place and turn away the same requests.

use super::parts;
use crate::fleet::clock::WorldClock;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::random::Stream;
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, Device, Error, OpSig, Result};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::events::EventLog;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv};
use mixfleet_runtime::metrics::{DeviceLabels, Metrics};
use mixfleet_runtime::model::random::tiny_variants;
use mixfleet_runtime::model::{Checkpoint, ModelConfig};
use mixfleet_runtime::request::{EngineHandle, GenerateRequest, Hints, Sampling, ServiceTier};
use mixfleet_scheduler::batch::BatchLimits;
use mixfleet_scheduler::fleet::{Action, Event, FleetConfig, Policy, Role};
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_sim::fleet_file::Routing;
use mixfleet_sim::fleet_file::{Class, ClassMembers, Promise, TbtMetric};
use mixfleet_sim::simulate::{InstanceSetup, Objectives, Observer, Setup, run};
use mixfleet_sim::trace::Request;
use mixfleet_simulated::TimeOnlyDevice;
use mixfleet_wire::InProcessTransport;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCK_TOKENS: u32 = 16;
/// Times are the same within this, a twentieth of the shortest step: the cost model interpolates what
/// attention takes.
const SAME_S: f64 = 5e-5;
const STEP_TOKENS_MAX: u32 = 192;
const REQUESTS: usize = 200;

/// No way between instances.
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

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A simulated part: FLOP/s, bytes/s, $/h.
#[derive(Clone, Copy)]
struct Part {
    role: Role,
    flops: f64,
    bandwidth: f64,
    usd_per_hour: f64,
}

/// Quick and dear. On both parts attention is bound by arithmetic: the cost model gives all sequences of a
/// step the mean length, and the width of the block table, which is that of the longest, would show in what
/// attention reads.
const DEAR: Part = Part { role: Role::Auto, flops: 4e8, bandwidth: 2e8, usd_per_hour: 4.0 };
/// Slow and cheap.
const CHEAP: Part = Part { role: Role::Auto, flops: 1.6e8, bandwidth: 7e7, usd_per_hour: 1.0 };

struct Scene {
    name: &'static str,
    parts: Vec<Part>,
    joined: bool,
    /// Two of three requests are flex.
    flex: bool,
    /// The third is of the tier `priority`.
    priority: bool,
    /// Sequences that an instance holds at a time.
    sequences_max: u32,
    /// Prompt tokens in a step that also decodes; as many as the TBT objective allows if none.
    beside_decode_max: Option<u32>,
    /// Prefixes come from where they are.
    pull: bool,
    policy: Policy,
    requests: usize,
    requests_per_s: f64,
    seed: u64,
}

/// What the machine decided on a request: where, or why not.
type Decision = (u64, std::result::Result<(u32, u32), String>);

fn decision(action: &Action) -> Option<Decision> {
    match action {
        Action::Place { request, prefill, decode, .. } => Some((*request, Ok((prefill.0, decode.0)))),
        Action::Reject { request, reason, .. } => {
            Some((*request, Err(serde_json::to_value(reason).unwrap()["reason"].to_string())))
        }
        _ => None,
    }
}

/// A prompt and the tokens that it shall get.
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
    let families: Vec<Vec<u32>> = (0..5).map(|_| draw(220)).collect();
    let mut rng = Stream::new(!scene.seed);
    let wanted = |at: usize| {
        let shared = rng.below(200) as usize;
        let mut prompt = families[rng.below(5) as usize][..shared].to_vec();
        prompt.extend((0..12 + rng.below(150)).map(|_| rng.below(vocab) as u32));
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

/// KV leaves and lands in no time: what the wires between instances take is the transport's, and copies in
/// memory take none of the virtual time.
fn copies_of_kv(config: &ModelConfig) -> Vec<Point> {
    let (kv, wire) = (config.kv_shape(BLOCK_TOKENS, DType::Bf16), DType::Bf16);
    let sigs = [OpSig::KvGather { tokens: 64, wire, kv }, OpSig::KvScatter { tokens: 64, wire, kv }];
    sigs.map(|sig| Point { sig, time: Seconds(1e-15) }).to_vec()
}

fn start(
    scene: &Scene,
    checkpoint: &Checkpoint,
    env: &SeededEnv,
    log: Log,
    metrics: Metrics,
) -> EngineHandle {
    let config = Arc::new(checkpoint.config.clone());
    let instance = |(at, part): (usize, &Part)| {
        let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(part.flops)));
        let roof = DeviceProfile::roof(rates.to_vec(), BytesPerSecond(part.bandwidth), Bytes(1e9));
        let profile = if scene.joined {
            DeviceProfile { points: copies_of_kv(&config), ..roof }
        } else {
            DeviceProfile { launch: Seconds(2e-4), launch_per_command: Seconds(1e-6), ..roof }
        };
        let clock = Arc::new(WorldClock(env.clone()));
        let device = TimeOnlyDevice::new(&format!("part{at}"), profile.clone(), clock).unwrap();
        let device: Arc<dyn Device> = Arc::new(device);
        let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
        let limits = InstanceLimits {
            activations: DType::F32,
            kv: DType::Bf16,
            kv_bytes: 24_000 * config.kv_bytes_per_token(DType::Bf16),
            step_tokens_max: STEP_TOKENS_MAX,
            prefill_tokens_beside_decode_max: scene.beside_decode_max,
            sequences_max: scene.sequences_max,
            block_tokens: Some(BLOCK_TOKENS),
        };
        let price = Some(UsdPerHour(part.usd_per_hour));
        let loaded = Loaded::new(&config, InstanceSpec { device, weights, role: part.role, price, limits });
        let loaded = loaded.unwrap();
        let cost = loaded.predicted_by(profile);
        (loaded, cost)
    };
    let instances = scene.parts.iter().enumerate().map(instance).collect();
    let transport: Arc<dyn Transport> = if scene.joined {
        Arc::new(InProcessTransport::new())
    } else {
        Arc::new(Apart(InProcessTransport::new()))
    };
    let shared: SharedEnv = Arc::new(env.clone());
    let parts = EngineParts {
        identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
        events: Some(EventLog::start(&shared, Box::new(log)).0),
        env: shared,
        config,
        limits: EngineConfig {
            fleet: FleetConfig {
                ttft_slo: Some(Seconds(1.5)),
                tbt_slo: Some(Seconds(0.03)),
                policy: scene.policy,
                pull: scene.pull,
                seed: scene.seed,
                ..EngineConfig::default().fleet
            },
            hand_off: HandOffLimits { slot_bytes: 1 << 18, slots: 64, ..HandOffLimits::default() },
            ..EngineConfig::default()
        },
        placements: Arc::new(Placements::new(1)),
        metrics,
    };
    let links = Links { transports: vec![transport], ..parts::links() };
    parts.start(instances, links).unwrap()
}

/// The log of the real engine, and how often a sequence lost its blocks.
fn served(scene: &Scene) -> (Vec<serde_json::Value>, u64) {
    let checkpoint = tiny_variants().remove(1).1.load().unwrap();
    let env = SeededEnv::with_blocking_workers(scene.seed);
    let log = Log::default();
    let metrics = Metrics::new();
    let handle = start(scene, &checkpoint, &env, log.clone(), metrics.clone());
    let (trace, world) = (trace(scene, &checkpoint), env.clone());
    env.run(async move {
        let mut ends = Vec::new();
        for (at, wanted) in trace.into_iter().enumerate() {
            world.sleep(wanted.after).await;
            let request = GenerateRequest {
                id: at.to_string(),
                prompt_ids: wanted.prompt.into(),
                max_tokens: wanted.output_tokens,
                eos_ids: Arc::new([]),
                sampling: Sampling { temperature: 0.0, ..Sampling::default() },
                logprobs: None,
                cache_salt: None,
                hints: Hints { tier: wanted.tier, ..Hints::default() },
            };
            let Ok(mut updates) = handle.submit(request).await else { continue };
            let (sender, end) = tokio::sync::oneshot::channel();
            world.spawn(Box::pin(async move {
                while updates.recv().await.is_some() {}
                let _ = sender.send(());
            }));
            ends.push(end);
        }
        for end in ends {
            end.await.unwrap();
        }
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let labels = (0..scene.parts.len()).map(|at| DeviceLabels { device: format!("part{at}") });
    let preemptions = labels.map(|labels| metrics.preemptions.get_or_create(&labels).get()).sum();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), preemptions)
}

/// What happened: decisions, and when each request got its first token and its last.
#[derive(Default)]
struct Seen {
    decisions: Vec<(f64, Decision)>,
    firsts: BTreeMap<u64, f64>,
    ends: BTreeMap<u64, f64>,
}

impl Seen {
    fn saw(&mut self, now_s: f64, event: &Event) {
        match event {
            Event::PrefillDone { request, .. } => _ = self.firsts.entry(*request).or_insert(now_s),
            Event::Finished { request } => _ = self.ends.insert(*request, now_s),
            _ => {}
        }
        if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() && !matches!(event, Event::Arrived(_)) {
            println!("    {now_s:.9} {event:?}");
        }
    }

    /// Times of `self` that are none of `other`'s, within [`SAME_S`].
    fn unlike(&self, other: &Seen) -> usize {
        let off = |a: &BTreeMap<u64, f64>, b: &BTreeMap<u64, f64>| {
            let is = |request, at_s: f64| b.get(request).is_some_and(|other| (at_s - other).abs() < SAME_S);
            a.iter().filter(|&(request, &at_s)| !is(request, at_s)).count()
        };
        off(&self.firsts, &other.firsts) + off(&self.ends, &other.ends)
    }
}

impl Observer for Seen {
    fn decided(&mut self, now_s: f64, action: &Action) {
        if let (Action::Place { request, pull, .. }, true) =
            (action, std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some())
        {
            println!("    {now_s:.9} Placed {request} {pull:?}");
        }
        self.decisions.extend(decision(action).map(|decision| (now_s, decision)));
    }

    fn told(&mut self, now_s: f64, event: &Event) {
        self.saw(now_s, event);
    }
}

/// The fleet and the requests of `log`, through the simulator.
fn simulated(scene: &Scene, log: &[serde_json::Value]) -> Seen {
    let fleet: FleetConfig = serde_json::from_value(log[0]["fleet"].clone()).unwrap();
    let (mut instances, mut pool_links, mut requests) = (Vec::new(), Vec::new(), Vec::new());
    for step in log[1..].iter().filter(|step| step.get("event").is_some()) {
        match serde_json::from_value(step["event"].clone()).unwrap() {
            Event::InstanceUp(up) => instances.push(InstanceSetup {
                pool: up.id.0,
                device: up.device,
                role: up.role,
                cost: up.cost,
                price: up.price,
                limits: BatchLimits {
                    blocks_total: (up.kv_capacity_tokens / u64::from(BLOCK_TOKENS)) as u32,
                    block_tokens: BLOCK_TOKENS,
                    step_tokens_max: STEP_TOKENS_MAX,
                    prefill_tokens_beside_decode_max: up.prefill_tokens_beside_decode_max,
                    sequences_max: scene.sequences_max as usize,
                    spare_blocks: BatchLimits::spare_blocks(
                        (up.kv_capacity_tokens / u64::from(BLOCK_TOKENS)) as u32,
                        scene.sequences_max as usize,
                    ),
                    lower_tiers: false,
                    cache_policy: CachePolicy::Lru,
                },
                tiers: Vec::new(),
                nic: None,
            }),
            Event::LinkUp(link) => pool_links.push((link.from.0, link.to.0, link.cost)),
            // The simulator places anew by itself.
            Event::Arrived(arrival) if arrival.replay.is_none() => requests.push(Ok(Request {
                id: arrival.request,
                at: serde_json::from_value(step["now"].clone()).unwrap(),
                prompt_tokens: arrival.prompt_tokens,
                output_tokens: arrival.max_tokens,
                chain: arrival.chains[0].hashes.clone(),
                session: None,
                class: [None, Some("flex"), Some("priority")][arrival.class as usize].map(Into::into),
            })),
            _ => {}
        }
    }
    let setup = Setup {
        slo: Objectives { ttft_s: 1.5, tbt_s: 0.03, metric: TbtMetric::Mean },
        classes: vec![
            Class {
                name: "flex".into(),
                members: ClassMembers::Label("flex".into()),
                promise: Promise::Deadline(EngineConfig::default().flex_deadline.0),
                priority: 0.0,
            },
            Class {
                name: "priority".into(),
                members: ClassMembers::Label("priority".into()),
                promise: Promise::Interactive { ttft_s: 1.5, tbt_s: 0.03 },
                priority: -60.0,
            },
        ],
        slowdowns: Vec::new(),
        routers: Routing::default(),
        fleet,
        max_tokens: 1,
        block_tokens: BLOCK_TOKENS,
        pools: instances.iter().map(|i: &InstanceSetup| i.device.to_string()).collect(),
        instances,
        pool_links,
    };
    let mut seen = Seen::default();
    run(&setup, requests.into_iter(), &mut seen).unwrap();
    seen
}

fn seen(log: &[serde_json::Value]) -> Seen {
    let mut seen = Seen::default();
    for step in log[1..].iter().filter(|step| step.get("event").is_some()) {
        let now_s = step["now"].as_f64().unwrap();
        let event: Event = serde_json::from_value(step["event"].clone()).unwrap();
        seen.saw(now_s, &event);
        if matches!(event, Event::Arrived(_)) {
            let actions: Vec<Action> = serde_json::from_value(step["actions"].clone()).unwrap();
            actions.iter().for_each(|action| seen.decided(now_s, action));
        }
    }
    seen
}

/// Placements and times on which the two disagree, requests that were turned away, and sequences that lost
/// their blocks.
fn compare(scene: &Scene) -> (usize, usize, u64) {
    let (log, preemptions) = served(scene);
    if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() {
        println!("  served:");
    }
    let served = seen(&log);
    if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() {
        println!("  simulated:");
    }
    let simulated = simulated(scene, &log);
    assert!(served.decisions.len() >= scene.requests && !served.ends.is_empty());
    let same = |a: &(f64, Decision), b: &(f64, Decision)| (a.0 - b.0).abs() < SAME_S && a.1 == b.1;
    let mut unlike = served.decisions.iter().zip(&simulated.decisions).filter(|(a, b)| !same(a, b));
    let first = unlike.next();
    let longer = served.decisions.len().abs_diff(simulated.decisions.len());
    let places = first.iter().count() + unlike.count() + longer;
    let times = served.unlike(&simulated).max(simulated.unlike(&served));
    let rejected = served.decisions.iter().filter(|(_, (_, what))| what.is_err()).count();
    let Scene { name, policy, requests, requests_per_s, .. } = scene;
    println!(
        "{name}, {policy:?}, {requests_per_s} requests/s: {places} places and {times} times of {requests} requests differ, \
         {rejected} turned away, {preemptions} preempted"
    );
    if let Some((served, simulated)) = first {
        println!("  the first: served {served:?}, simulated {simulated:?}");
    }
    (places + times, rejected, preemptions)
}

const POLICIES: [Policy; 6] = [
    Policy::PerDollar,
    Policy::CacheAware,
    Policy::Random,
    Policy::LeastLoaded,
    Policy::RoundRobin,
    Policy::KvcacheCentric { threshold: 1.2 },
];

/// A load that leaves the instances idle half of the time, one with queues, and one beyond what they can do.
const LOADS: [(u64, f64); 3] = [(1, 2.0), (2, 12.0), (3, 18.0)];

fn scene(name: &'static str, parts: Vec<Part>, joined: bool, policy: Policy, load: (u64, f64)) -> Scene {
    let (seed, requests_per_s) = load;
    Scene {
        name,
        parts,
        joined,
        flex: false,
        priority: false,
        sequences_max: 32,
        beside_decode_max: Some(64),
        pull: false,
        policy,
        requests: REQUESTS,
        requests_per_s,
        seed,
    }
}

#[test]
fn two_unlike_instances_agree_on_every_placement() {
    let mut rejected = 0;
    for policy in POLICIES {
        for load in LOADS {
            let scene = scene("two instances", vec![DEAR, CHEAP], false, policy, load);
            let (unlike, away, _) = compare(&scene);
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
            rejected += away;
        }
    }
    assert!(rejected > 0, "nothing was turned away: admission was not compared");
}

#[test]
fn prefill_and_decode_pairs_agree_on_every_placement() {
    let mut rejected = 0;
    for policy in POLICIES {
        for load in LOADS {
            let of = |role| [DEAR, CHEAP].map(|part| Part { role, ..part });
            let parts = [of(Role::Prefill), of(Role::Decode)].concat();
            let (unlike, away, _) = compare(&scene("two pairs", parts, true, policy, load));
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
            rejected += away;
        }
    }
    assert!(rejected > 0, "nothing was turned away: admission was not compared");
}

#[test]
fn joined_instances_that_do_both_agree_on_every_placement() {
    for policy in POLICIES {
        // in the last one sequences wait for the places of others, whose KV waits to be taken in
        for load in LOADS.into_iter().chain([(4, 26.0)]) {
            let (unlike, ..) = compare(&scene("two joined instances", vec![DEAR, CHEAP], true, policy, load));
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
        }
    }
}

/// At 26 requests/s, where many are preempted and both instances hand over at one instant, the two differ.
#[test]
fn requests_of_three_tiers_agree_on_every_placement() {
    for (flex, load) in [(false, (2, 12.0)), (true, (3, 18.0))] {
        let scene = scene("tiers", vec![DEAR, CHEAP], true, Policy::PerDollar, load);
        let (unlike, ..) = compare(&Scene { flex, priority: true, sequences_max: 8, ..scene });
        assert_eq!(unlike, 0, "at {} requests/s, flex: {flex}", load.1);
    }
}

/// Both size the prompt rows beside decodes by the TBT objective, of which flex requests have none.
#[test]
fn steps_sized_by_the_tbt_objective_agree_on_every_placement() {
    for policy in [Policy::PerDollar, Policy::CacheAware] {
        for load in LOADS {
            for flex in [false, true] {
                let scene = scene("sized steps", vec![DEAR, CHEAP], true, policy, load);
                let (unlike, ..) = compare(&Scene { flex, beside_decode_max: None, ..scene });
                assert_eq!(unlike, 0, "{policy:?} at {} requests/s, flex: {flex}", load.1);
            }
        }
    }
}

#[test]
fn pulled_prefixes_agree_on_every_placement() {
    for policy in [Policy::PerDollar, Policy::KvcacheCentric { threshold: 1.2 }] {
        for load in LOADS {
            let scene = scene("pulls", vec![DEAR, CHEAP, CHEAP], true, policy, load);
            let (unlike, ..) = compare(&Scene { pull: true, ..scene });
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
        }
    }
}

/// Split and joint roles, and requests with deadlines beside others: the first policy and one seed, or all
/// policies and as many seeds as `MIXFLEET_AGREE_SEEDS` says.
#[test]
fn sixteen_instances_agree_on_every_placement() {
    let seeds: Option<u64> =
        std::env::var("MIXFLEET_AGREE_SEEDS").ok().map(|seeds| seeds.parse().expect("a number"));
    let of = |role| [DEAR, CHEAP, CHEAP, CHEAP].map(|part| Part { role, ..part });
    let parts = [of(Role::Prefill), of(Role::Decode), of(Role::Auto), of(Role::Auto)].concat();
    let policies = if seeds.is_some() { &POLICIES[..] } else { &POLICIES[..1] };
    for &policy in policies {
        for seed in 1..=seeds.unwrap_or(1) {
            let scene = scene("sixteen instances", parts.clone(), true, policy, (seed, 80.0));
            let (unlike, ..) = compare(&Scene { flex: true, sequences_max: 8, requests: 600, ..scene });
            assert_eq!(unlike, 0, "{policy:?} with seed {seed}");
        }
    }
}

#[test]
fn flexible_requests_that_give_way_agree_on_every_placement() {
    let mut preempted = 0;
    for policy in [Policy::PerDollar, Policy::CacheAware] {
        for load in [(4, 18.0), (6, 26.0), (5, 70.0)] {
            for joined in [false, true] {
                let scene = scene("flex and not", vec![DEAR, CHEAP], joined, policy, load);
                let (unlike, _, preemptions) = compare(&Scene { flex: true, sequences_max: 8, ..scene });
                assert_eq!(unlike, 0, "{policy:?} at {} requests/s, joined: {joined}", load.1);
                preempted += preemptions;
            }
        }
    }
    assert!(preempted > 50, "hardly anybody gave way: {preempted}");
}
