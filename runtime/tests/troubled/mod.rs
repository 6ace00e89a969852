//! The fleet of the chaos test.

mod breaking;
mod census;
mod clients;
mod disks;
mod fences;
mod groups;
mod hosts;
mod lent;
mod network;
mod partitions;
mod parts;
mod processes;
mod workload;

use crate::fleet::{TestFleet, prompt};
use fences::Fences;
use futures_util::future::BoxFuture;
use groups::GroupDivision;
use lent::LentMember;
use mixfleet_hal::fault::Fault;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv, yield_now};
use mixfleet_runtime::fleet::registry::Membership;
use mixfleet_runtime::fleet::registry::sim::{SimClient, SimRegistry};
use mixfleet_runtime::fleet::{Hub, ModelIdentity, PROTOCOL, Router};
use mixfleet_runtime::metrics::{DeviceLabels, Metrics};
use mixfleet_runtime::model::random::RandomCheckpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::model::{Checkpoint, ModelConfig, Oracle};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::request::EngineHandle;
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::{FaultyDevice, TimeOnlyDevice, VirtualClock};
use mixfleet_wire::{FaultyTransport, InProcessTransport};
use network::Cut;
use partitions::Deaf;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::oneshot::Receiver;

pub(crate) use census::{Census, EFFECTS, FAULTS, GROUP_EFFECTS, MEMBER_FAULTS, Totals};
pub(crate) use workload::Workload;

/// Processes that belong together. The first kind is the fleet's own; the others are in the registry too.
#[derive(Clone)]
pub(crate) struct Kind {
    checkpoint: Arc<Checkpoint>,
    model: ModelIdentity,
    protocol: u32,
    /// The namespace of its blocks on disks.
    namespace: u64,
    /// Whether its parts compute, as members of one instance must. Others answer with hashes of what they
    /// read.
    computes: bool,
    talks: Arc<[Talk]>,
}

/// Which model a fleet serves.
#[derive(Clone, Copy)]
pub(crate) enum ModelLayers {
    /// All layers attend to all tokens, so that a block is one page.
    Alike,
    /// Two layers of three attend to a window of two and a half blocks, so that a block is three pages.
    Windowed,
}

impl ModelLayers {
    fn checkpoint(self) -> RandomCheckpoint {
        let mut variants = tiny_variants().into_iter();
        match self {
            ModelLayers::Alike => variants.next().unwrap().1,
            ModelLayers::Windowed => {
                let mut found = variants.find(|(name, _)| *name == "qwen3-layer-types").unwrap().1;
                found.config.insert("sliding_window".into(), (5 * BLOCK_TOKENS / 2).into());
                found
            }
        }
    }
}

/// The fleet's own kind, one with other weights, and one of an earlier release.
pub(crate) fn kinds(layers: ModelLayers) -> Vec<Kind> {
    let kind = |seed: u64, protocol| {
        let mut checkpoint = layers.checkpoint();
        checkpoint.seed += seed;
        let checkpoint = checkpoint.load().unwrap();
        let digest = format!("weights {seed}");
        let model = ModelIdentity { digest, tokenizer_digest: "tokenizer".into() };
        let talks = talks(&checkpoint, 40, &|prompt, tokens| digests(&checkpoint, prompt, tokens)).into();
        let checkpoint = Arc::new(checkpoint);
        Kind { checkpoint, model, protocol, namespace: 7 + seed, computes: false, talks }
    };
    let own = kind(0, PROTOCOL);
    let earlier = Kind { protocol: PROTOCOL - 1, ..own.clone() };
    vec![own, kind(1, PROTOCOL), earlier]
}

/// A fleet whose parts compute.
pub(crate) fn kinds_that_compute(layers: ModelLayers) -> Vec<Kind> {
    let checkpoint = Arc::new(layers.checkpoint().load().unwrap());
    let model = ModelIdentity { digest: "weights".into(), tokenizer_digest: "tokenizer".into() };
    let oracle = Oracle::new(&checkpoint);
    let talks = talks(&checkpoint, 16, &|prompt, tokens| computed(&oracle, prompt, tokens)).into();
    vec![Kind { checkpoint, model, protocol: PROTOCOL, namespace: 7, computes: true, talks }]
}

impl Kind {
    /// The model's shape, with layers with a window in pages of their own where no tier is below a device.
    fn config(&self, workload: &Workload) -> Arc<ModelConfig> {
        let config = self.checkpoint.config.clone();
        Arc::new(if workload.dram_blocks == 0 { config.in_window_pages() } else { config })
    }
}

/// A request with its expected answer.
pub(crate) struct TalkTurn {
    prompt: Vec<u32>,
    expected: Vec<u32>,
    /// Their log-probabilities; none of parts that answer with hashes.
    logprobs: Option<Vec<f32>>,
}

/// The requests of one client: each prompt continues the previous one and its answer.
pub(crate) type Talk = Arc<[TalkTurn]>;

/// What one simulated part answers that keeps all layers of a block in one page, as for a tier below it.
fn digests(checkpoint: &Checkpoint, prompt: &[u32], tokens: u32) -> TalkTurn {
    let device = TimeOnlyDevice::new("device0", profile(1e12), Arc::new(VirtualClock::default())).unwrap();
    let alone = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, Arc::new(device)).lower(1, None);
    let expected = alone.run_one(&SeededEnv::new(1), prompt.to_vec(), tokens).tokens;
    TalkTurn { prompt: prompt.to_vec(), expected, logprobs: None }
}

/// The oracle's answer, which ends where the two likeliest tokens are nearly equally likely: devices that add
/// in other orders need not agree there.
fn computed(oracle: &Oracle, prompt: &[u32], tokens: u32) -> TalkTurn {
    const APART: f64 = 1e-3;
    let (mut text, mut logprobs) = (prompt.to_vec(), Vec::new());
    for _ in 0..tokens {
        let logits = oracle.last_logits(&text);
        let best = (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best });
        let others = logits.iter().enumerate().filter(|(at, _)| *at != best);
        let second = others.map(|(_, logit)| *logit).fold(f64::NEG_INFINITY, f64::max);
        if logits[best] - second < APART {
            assert!(!logprobs.is_empty(), "the first answer to {prompt:?} is nearly another one");
            break;
        }
        let sum: f64 = logits.iter().map(|logit| (logit - logits[best]).exp()).sum();
        text.push(best as u32);
        logprobs.push(-sum.ln() as f32);
    }
    let expected = text.split_off(prompt.len());
    TalkTurn { prompt: text, expected, logprobs: Some(logprobs) }
}

/// Requests of mixed lengths, some with common prefixes, every other one with a second turn, and their
/// expected answers by `answer`.
fn talks(checkpoint: &Checkpoint, count: usize, answer: &dyn Fn(&[u32], u32) -> TalkTurn) -> Vec<Talk> {
    let mut rng = Stream::new(5);
    let family = prompt(60, 2000, &checkpoint.config);
    let turn = |rng: &mut Stream, said: &[u32], more: u64, longest: u64| {
        let own = (0..1 + rng.below(more)).map(|_| rng.below(u64::from(checkpoint.config.vocab)) as u32);
        let prompt: Vec<u32> = said.iter().copied().chain(own).collect();
        answer(&prompt, 1 + rng.below(longest) as u32)
    };
    let talk = |at: usize| {
        let shared = rng.below(60) as usize;
        let first = turn(&mut rng, &family[..shared], 20, 24);
        if at.is_multiple_of(2) {
            return Arc::from([first]);
        }
        let said = [&first.prompt[..], &first.expected].concat();
        let second = turn(&mut rng, &said, 4, 12);
        Arc::from([first, second])
    };
    (0..count).map(talk).collect()
}

fn profile(flops: f64) -> DeviceProfile {
    let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(flops)));
    let roof = DeviceProfile::roof(rates.to_vec(), BytesPerSecond(flops / 2.0), Bytes(1e9));
    DeviceProfile { launch: Seconds(2e-4), launch_per_command: Seconds(1e-6), ..roof }
}

const BLOCK_TOKENS: u32 = 8;

/// Time by which all requests of a history have ended.
const LONGEST: Duration = Duration::from_secs(3600);

/// A running worker process.
struct Worker {
    hub: Hub,
    kind: usize,
    device: String,
    role: Role,
    disk: Option<SimDisk>,
    /// Its device, if it is the only one, with commands that fail, and with commands that hang.
    struck: Option<[Arc<FaultyDevice>; 2]>,
    /// Its devices, if they are several, and how they have the model.
    members: Vec<LentMember>,
    division: Option<GroupDivision>,
    /// Cuts all of its connections.
    cut: Cut,
    client: SimClient,
    _membership: Membership,
}

struct RouterProcess {
    handle: EngineHandle,
    router: Router,
    metrics: Metrics,
    kind: usize,
    cut: Cut,
    client: SimClient,
    _membership: Membership,
}

/// The state of a history.
#[derive(Clone)]
struct World {
    env: SeededEnv,
    seed: u64,
    /// What computes for all parts, where parts compute.
    computer: Arc<OnceLock<Arc<dyn Device>>>,
    kinds: Arc<[Kind]>,
    workload: Arc<Workload>,
    registry: SimRegistry,
    transport: Arc<Fences<FaultyTransport<InProcessTransport>>>,
    metrics: Metrics,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    workers: BTreeMap<u64, Worker>,
    routers: BTreeMap<u64, RouterProcess>,
    /// Cuts of single connections, by their ends' hosts.
    wires: BTreeMap<(String, String), Cut>,
    deaf: Deaf,
    /// The host of each address.
    regions: BTreeMap<String, String>,
    /// Disks of killed workers.
    shelf: VecDeque<SimDisk>,
    workers_made: u64,
    routers_made: u64,
    census: Census,
    over: bool,
}

impl World {
    fn new(workload: &Workload, kinds: &[Kind], seed: u64) -> (SeededEnv, World) {
        let env = SeededEnv::with_blocking_workers(seed);
        let shared: SharedEnv = Arc::new(env.clone());
        let world = World {
            env: env.clone(),
            seed,
            computer: Arc::default(),
            kinds: kinds.into(),
            registry: SimRegistry::new(&shared, workload.registry()),
            transport: Arc::new(Fences::new(FaultyTransport::new(
                InProcessTransport::new(),
                workload.wires(seed),
            ))),
            workload: Arc::new(workload.clone()),
            metrics: Metrics::new(),
            state: Arc::default(),
        };
        (env, world)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn count(&self, what: &'static str, times: u64) {
        self.state().census.count(what, times);
    }

    fn over(&self) -> bool {
        self.state().over
    }

    fn below(&self, bound: u64) -> u64 {
        self.env.random() % bound
    }

    /// A random number from 0 to 1.
    fn unit(&self) -> f64 {
        (self.env.random() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Whether a fault of this probability occurs, while faults are enabled.
    fn strikes(&self, chance: f64) -> bool {
        chance > 0.0 && !self.over() && self.unit() < chance
    }

    /// An exponentially distributed span.
    fn span(&self, mean_s: f64) -> Duration {
        Duration::from_secs_f64(-mean_s * (1.0 - self.unit()).ln())
    }

    /// The largest share of blocks in use on any instance, by any router's view, once all had time to notice.
    async fn usage_at_rest(&self) -> f64 {
        for _ in 0..self.workload.rest_s() {
            self.env.sleep(Duration::from_secs(1)).await;
            yield_now().await;
        }
        let state = self.state();
        let devices = state.workers.values().map(|worker| DeviceLabels { device: worker.device.clone() });
        let views = devices.flat_map(|labels| {
            state.routers.values().map(move |r| r.metrics.kv_cache_usage.get_or_create(&labels).get())
        });
        views.fold(0.0, f64::max)
    }

    async fn start_all(&self) {
        let kinds = self.kinds.len();
        for nth in 0..self.workload.routers {
            self.start_router(nth % kinds).await;
        }
        for nth in 0..self.workload.workers {
            self.start_worker(nth % kinds, self.role(nth / kinds)).await;
        }
        for nth in 0..self.workload.kv_nodes {
            self.start_worker(nth % kinds, Role::Kv).await;
        }
    }

    /// Starts a client; the receiver completes when it is done.
    fn send(&self, client: BoxFuture<'static, ()>) -> Receiver<()> {
        let (done, end) = tokio::sync::oneshot::channel();
        self.env.spawn(Box::pin(async move {
            client.await;
            let _ = done.send(());
        }));
        end
    }

    /// Starts this many clients whose requests have this prefix.
    fn send_talks(&self, name: &str, count: usize) -> Vec<Receiver<()>> {
        let client = |at: usize| {
            let kind = at % self.kinds.len();
            let talks = &self.kinds[kind].talks;
            let talk = talks[self.below(talks.len() as u64) as usize].clone();
            self.send(Box::pin(self.clone().client(format!("{name}-{at}"), kind, talk)))
        };
        (0..count).map(client).collect()
    }

    /// Starts all clients.
    fn send_clients(&self) -> Vec<Receiver<()>> {
        let mut ends = self.send_talks("request", self.workload.requests);
        for at in 0..self.workload.poison {
            ends.push(self.send(Box::pin(self.clone().poisoner(at))));
            ends.push(self.send(Box::pin(self.clone().stranger_to_the_vocabulary(at))));
        }
        ends
    }

    /// Checks the conditions at the end of any history.
    async fn assert_all_is_well(&self) {
        let env = &self.env;
        let end = env.now().0;
        assert!(end < disks::HANG_LONG.as_secs_f64(), "{env:?}: {end} s: a worker waited for a disk");
        assert_eq!(self.metrics.worker_panics.get(), 0, "{env:?}: a worker panicked");
        let silent: u64 = self.state().routers.values().map(|r| r.metrics.instances_silent.get()).sum();
        assert_eq!(silent, 0, "{env:?}: an instance kept a request and said nothing of it");
        let (poisoned, asked) = {
            let census = &self.state().census;
            (census.of("devices poisoned"), census.of("poison asked"))
        };
        assert!(poisoned <= 2 * asked, "{env:?}: {asked} requests took {poisoned} devices with them");
        if !self.workload.may_fail() {
            let errors = self.state().census.errors();
            assert_eq!(
                errors,
                0,
                "{env:?}: errors though no instance was lost for good: {:?}",
                self.state().census
            );
        }
        for unfit in ["errors: the request's own", "errors: the engine's"] {
            assert_eq!(self.state().census.of(unfit), 0, "{env:?}: {unfit}");
        }
        if self.workload.is_overload() {
            let refused = self.state().census.of("requests too many");
            assert!(refused > 0, "{env:?}: routers take more requests than they may");
        }
        assert_eq!(self.usage_at_rest().await, 0.0, "{env:?}: KV blocks leak");
        self.assert_that_routers_know_who_holds_what().await;
        let (fences, broken) = self.transport.count();
        assert_eq!(broken, 0, "{env:?}: KV landed in memory that was fenced off");
        self.count("fences", fences as u64);
    }

    /// Counts the faults that components recorded.
    fn count_the_rest(&self) {
        self.count_tiers();
        for (fault, name) in [
            (Fault::BitFlip, "transfers flipped"),
            (Fault::Fail, "transfers failed"),
            (Fault::Drop, "transfers lost"),
            (Fault::Hang, "transfers hung"),
        ] {
            self.count(name, self.transport.struck(fault));
        }
        self.count("transfers again", self.metrics.kv_transfer_retries.get());
        self.count("prompts computed again", self.metrics.kv_transfer_recomputes.get());
        self.count("tokens pulled", self.metrics.kv_pulled_tokens.get());
    }
}

/// Two routers with different clocks send one worker equally many requests, in turn; returns the routers of
/// the answers in order.
pub(crate) fn turns(workload: &Workload, kinds: &[Kind], seed: u64) -> Vec<u64> {
    let (env, world) = World::new(workload, &kinds[..1], seed);
    let turns = env.run(async move {
        world.start_all().await;
        world.env.sleep(Duration::from_secs(2)).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        for at in 0..world.workload.requests as u64 {
            let (world, order) = (world.clone(), order.clone());
            world.env.clone().spawn(Box::pin(async move {
                let router = at % 2;
                // Requests come faster than they can be answered.
                world.env.sleep(Duration::from_millis(4 * at)).await;
                world.ask_router(router, at).await;
                order.lock().unwrap().push(router);
            }));
        }
        while order.lock().unwrap().len() < world.workload.requests {
            world.env.sleep(Duration::from_secs(1)).await;
        }
        order.lock().unwrap().clone()
    });
    env.end();
    turns
}

/// Runs one history.
pub(crate) fn run(workload: &Workload, kinds: &[Kind], seed: u64) -> Census {
    let kinds = if workload.strangers { kinds } else { &kinds[..1] };
    let (env, world) = World::new(workload, kinds, seed);
    let census = env.run(async move {
        world.start_all().await;
        world.begin_troubles();
        let watched = world.clone();
        world.env.spawn(Box::pin(async move {
            watched.env.sleep(LONGEST).await;
            assert!(watched.over(), "{:?}: a request waits for ever", watched.env);
        }));
        for client in world.send_clients() {
            client.await.unwrap();
        }
        world.end_troubles();
        world.assert_all_is_well().await;
        if world.workload.groups > 0.0 {
            world.assert_that_all_serve_again().await;
            assert_eq!(world.usage_at_rest().await, 0.0, "{:?}: KV blocks leak", world.env);
            world.assert_that_routers_know_who_holds_what().await;
        }
        // Remaining tasks get time to end, since threads and memory of thousands of histories add up.
        let ended = {
            let mut state = world.state();
            (std::mem::take(&mut state.workers), std::mem::take(&mut state.routers))
        };
        ended.0.values().for_each(|worker| world.count_part(worker));
        world.count_the_rest();
        drop(ended);
        world.env.sleep(disks::HANG_LONG + Duration::from_secs(5)).await;
        world.state().census.clone()
    });
    env.end();
    census
}
