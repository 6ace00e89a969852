//! The fleet of the chaos test.

mod disks;
mod fences;
mod network;
mod workload;

use crate::fleet::clock::WorldClock;
use crate::fleet::{Case, Fleet, prompt};
use fences::Fences;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, Device, Error, ErrorKind};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded, LowerTiers,
};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv, yield_now};
use mixfleet_runtime::fleet::{Hub, Model, Router, RouterId, RouterParts, WorkerProcess};
use mixfleet_runtime::metrics::{DeviceLabels, Metrics};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::random::tiny_variants;
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::request::{EngineHandle, GenerateRequest, Rejection, Sampling, ServiceTier, Update};
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::fleet::{InstanceId, Role};
use mixfleet_simulated::{FaultyDevice, TimeOnlyDevice, VirtualClock};
use mixfleet_wire::{Faulty, HostRegion, Memory};
use network::{Cut, splice};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub(crate) use workload::{Outcome, Workload};

pub(crate) fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// What one client asks in turn: each prompt is all that was said before and some more.
pub(crate) type Talk = Arc<[Case]>;

/// Requests of mixed lengths, some with common prefixes, every other one with a second turn, and what they must give.
pub(crate) fn talks(checkpoint: &Checkpoint, count: usize) -> Vec<Talk> {
    let mut rng = Stream::new(5);
    let family = prompt(60, 2000, &checkpoint.config);
    let turn = |rng: &mut Stream, said: &[u32], more: u64, answer: u64| {
        let own = (0..1 + rng.below(more)).map(|_| rng.below(u64::from(checkpoint.config.vocab)) as u32);
        let prompt: Vec<u32> = said.iter().copied().chain(own).collect();
        let device =
            TimeOnlyDevice::new("device0", profile(1e12), Arc::new(VirtualClock::default())).unwrap();
        let alone = Fleet::new(checkpoint.clone()).with_device(Role::Auto, Arc::new(device));
        let tokens = 1 + rng.below(answer) as u32;
        let expected = alone.run_one(&SeededEnv::new(1), prompt.clone(), tokens).tokens;
        Case { prompt, expected }
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

/// All requests of a world have ended by then.
const LONGEST: Duration = Duration::from_secs(3600);

/// A worker process that runs.
struct Worker {
    hub: Hub,
    device: String,
    role: Role,
    disk: Option<SimDisk>,
    /// Its device, as it is struck.
    struck: Arc<FaultyDevice>,
    /// Of everything that it is connected by.
    cut: Cut,
}

struct RouterProcess {
    handle: EngineHandle,
    router: Router,
    metrics: Metrics,
    cut: Cut,
}

/// Everything there is.
#[derive(Clone)]
struct World {
    env: SeededEnv,
    checkpoint: Arc<Checkpoint>,
    workload: Arc<Workload>,
    transport: Arc<Fences<Faulty<Memory>>>,
    metrics: Metrics,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    workers: BTreeMap<u64, Worker>,
    routers: BTreeMap<u16, RouterProcess>,
    /// Cuts of single connections, by their ends' names.
    wires: BTreeMap<(String, String), Cut>,
    /// What workers left that were killed.
    shelf: VecDeque<SimDisk>,
    workers_made: u64,
    routers_made: u16,
    outcome: Outcome,
    over: bool,
}

fn model() -> Model {
    Model { digest: "model".into(), tokenizer_digest: "tokenizer".into() }
}

impl World {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn shared(&self) -> SharedEnv {
        Arc::new(self.env.clone())
    }

    fn below(&self, bound: u64) -> u64 {
        self.env.random() % bound
    }

    /// An exponentially distributed span.
    fn span(&self, mean_s: f64) -> Duration {
        let unit = (self.env.random() >> 11) as f64 / (1u64 << 53) as f64;
        Duration::from_secs_f64(-mean_s * (1.0 - unit).ln())
    }

    fn links(&self) -> Links {
        let world = self.clone();
        let region = move |bytes: u64| {
            let refused = world.workload.regions_refused;
            if refused > 0.0 && (world.below(1 << 32) as f64) < refused * (1u64 << 32) as f64 {
                world.state().outcome.regions_refused += 1;
                return Err(Error::new(ErrorKind::OutOfMemory, "no descriptors are left"));
            }
            Ok(Arc::new(HostRegion::new(bytes as usize)?) as Arc<dyn SharedMemory>)
        };
        Links { transports: vec![self.transport.clone()], make_region: Arc::new(region) }
    }

    /// The first two can do everything between them, whatever roles the others get.
    fn role(&self, number: u64) -> Role {
        match number {
            0 => Role::Prefill,
            1 => Role::Decode,
            _ => [Role::Auto, Role::Prefill, Role::Decode][self.below(3) as usize],
        }
    }

    /// Of the worker that comes for a killed one: any, unless the others could serve nobody without its own.
    fn next_role(&self, killed: Role) -> Role {
        let others: Vec<Role> = self.state().workers.values().map(|worker| worker.role).collect();
        let somebody = |wanted| others.iter().any(|&role| role == Role::Auto || role == wanted);
        if somebody(Role::Prefill) && somebody(Role::Decode) { self.role(2) } else { killed }
    }

    fn start_worker(&self, role: Role) {
        let number = {
            let mut state = self.state();
            state.workers_made += 1;
            state.workers_made - 1
        };
        let flops = [2e8, 4e8, 8e8][self.below(3) as usize];
        let device = format!("part{number}");
        let clock = Arc::new(WorldClock(self.env.clone()));
        let simulated: Arc<dyn Device> =
            Arc::new(TimeOnlyDevice::new(&device, profile(flops), clock).unwrap());
        let struck = Arc::new(FaultyDevice::new(simulated, self.workload.commands(self.env.random())));
        let simulated: Arc<dyn Device> = struck.clone();
        let config = Arc::new(self.checkpoint.config.clone());
        let weights = self.checkpoint.place(&*simulated, &mut |_, _| {}).unwrap();
        let block_bytes = u64::from(BLOCK_TOKENS) * config.kv_bytes_per_token(DType::F32);
        let limits = InstanceLimits {
            activations: DType::F32,
            kv: DType::F32,
            kv_bytes: u64::from(self.workload.device_blocks) * block_bytes,
            step_tokens_max: 24,
            prefill_tokens_beside_decode_max: 12,
            sequences_max: 8,
            block_tokens: Some(BLOCK_TOKENS),
        };
        let spec = InstanceSpec { device: simulated, weights, role, price: None, limits };
        let disk = self.disk(block_bytes);
        let loaded = Loaded::new(&config, spec).unwrap();
        let loaded = match self.workload.dram_blocks {
            0 => loaded,
            blocks => {
                let disk = disk.clone().zip(self.workload.disks.as_ref());
                let ssd = disk.map(|(disk, disks)| disks.below(disk, block_bytes));
                let namespace = self.namespace();
                let tiers = LowerTiers { dram_bytes: blocks * block_bytes, ssd, namespace };
                let world = self.clone();
                loaded.with_lower_tiers(tiers, &move |bytes| world.host_memory(bytes)).unwrap()
            }
        };
        let cost = loaded.predicted_by(profile(flops));
        let process = WorkerProcess {
            env: self.shared(),
            model: model(),
            instances: vec![(InstanceId(number as u32), loaded, cost)],
            links: self.links(),
            hand_off: HandOffLimits { slot_bytes: 2048, slots: 3, timeout: Duration::from_millis(200) },
            metrics: self.metrics.clone(),
        };
        let hub = process.start().unwrap();
        self.state().workers.insert(number, Worker { hub, device, role, disk, struck, cut: Cut::new() });
        let (routers, peers) = {
            let state = self.state();
            let peers: Vec<u64> = state.workers.keys().copied().filter(|&other| other != number).collect();
            (state.routers.keys().copied().collect::<Vec<_>>(), peers)
        };
        for router in routers {
            self.keep_attended(router, number);
        }
        for peer in peers {
            self.keep_met(number, peer);
        }
    }

    fn start_router(&self) {
        let number = {
            let mut state = self.state();
            state.routers_made += 1;
            state.routers_made - 1
        };
        let metrics = Metrics::new();
        let parts = RouterParts {
            env: self.shared(),
            config: Arc::new(self.checkpoint.config.clone()),
            identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
            id: RouterId(number),
            kv: DType::F32,
            limits: EngineConfig { patience: Seconds(10.0), ..EngineConfig::default() },
            events: None,
            placements: Arc::new(Placements::new(1)),
            metrics: metrics.clone(),
        };
        let (handle, router) = parts.start();
        self.state().routers.insert(number, RouterProcess { handle, router, metrics, cut: Cut::new() });
        let workers: Vec<u64> = self.state().workers.keys().copied().collect();
        for worker in workers {
            self.keep_attended(number, worker);
        }
    }

    /// A connection between two, which may be cut: anew at each call.
    fn wire(&self, from: String, to: String) -> Cut {
        let cut = Cut::new();
        self.state().wires.insert((from, to), cut.clone());
        cut
    }

    /// Connects a router to a worker process as long as both live.
    fn keep_attended(&self, router: u16, worker: u64) {
        let world = self.clone();
        self.env.spawn(Box::pin(async move {
            loop {
                let ends = {
                    let state = world.state();
                    let (Some(r), Some(w)) = (state.routers.get(&router), state.workers.get(&worker)) else {
                        return;
                    };
                    (r.router.clone(), w.hub.clone(), [r.cut.clone(), w.cut.clone()])
                };
                let (router_end, hub, [a, b]) = ends;
                let session = hub.accept_router(&router_end.hello(), router_end.id());
                drop(hub);
                if let Ok(session) = session {
                    let wire = world.wire(format!("router{router}"), format!("worker{worker}"));
                    let delay = Duration::from_millis(workload::quick_ms());
                    let (session, _) = splice(&world.env, session, delay, vec![a, b, wire]);
                    router_end.attend(session).await;
                }
                drop(router_end);
                world.env.sleep(Duration::from_millis(20)).await;
            }
        }));
    }

    /// Connects two worker processes as long as both live.
    fn keep_met(&self, from: u64, to: u64) {
        let world = self.clone();
        self.env.spawn(Box::pin(async move {
            loop {
                let ends = {
                    let state = world.state();
                    let (Some(f), Some(t)) = (state.workers.get(&from), state.workers.get(&to)) else {
                        return;
                    };
                    (f.hub.clone(), t.hub.clone(), [f.cut.clone(), t.cut.clone()])
                };
                let (caller, called, [a, b]) = ends;
                let cost = LinkCost { latency: Seconds(1e-3), seconds_per_byte: 1e-9, usd_per_byte: 0.0 };
                let session = called.accept_peer(&caller.hello(), caller.instances().to_vec(), cost);
                let instances = called.instances().to_vec();
                drop(called);
                if let Ok(session) = session {
                    let wire = world.wire(format!("worker{from}"), format!("worker{to}"));
                    let (session, ended) = splice(
                        &world.env,
                        session,
                        Duration::from_millis(world.workload.peer_delay_ms),
                        vec![a, b, wire],
                    );
                    caller.meet(instances, cost, session);
                    drop(caller);
                    ended.await;
                }
                world.env.sleep(Duration::from_millis(20)).await;
            }
        }));
    }

    fn over(&self) -> bool {
        self.state().over
    }

    /// Kills a worker process now and then; another one takes its place later.
    async fn kill_workers(self, mean_s: f64) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let struck = self.below(8);
            let dead = {
                let mut state = self.state();
                let nth = struck as usize % state.workers.len().max(1);
                let number = state.workers.keys().copied().nth(nth);
                number.and_then(|number| state.workers.remove(&number))
            };
            let Some(Worker { cut, hub, role, disk, .. }) = dead else { continue };
            self.shelve(disk);
            cut.now();
            drop(hub);
            self.state().outcome.worker_deaths += 1;
            self.env.sleep(self.span(0.2)).await;
            self.start_worker(self.next_role(role));
        }
    }

    async fn kill_routers(self, mean_s: f64) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let struck = self.below(8);
            let dead = {
                let mut state = self.state();
                let nth = struck as usize % state.routers.len().max(1);
                let number = state.routers.keys().copied().nth(nth);
                number.and_then(|number| state.routers.remove(&number))
            };
            let Some(RouterProcess { cut, .. }) = dead else { continue };
            cut.now();
            self.state().outcome.router_deaths += 1;
            self.env.sleep(self.span(0.1)).await;
            self.start_router();
        }
    }

    async fn cut_wires(self, mean_s: f64, from: &'static str) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let struck = self.env.random() as usize;
            let wire = {
                let mut state = self.state();
                state.wires.retain(|_, cut| !cut.is_cut());
                let meant = || state.wires.iter().filter(|((end, _), _)| end.starts_with(from));
                let nth = struck % meant().count().max(1);
                meant().nth(nth).map(|(_, cut)| cut.clone())
            };
            let Some(wire) = wire else { continue };
            wire.now();
            self.state().outcome.cuts += 1;
        }
    }

    /// A client that comes some time, and goes on when it has its answer.
    async fn client(self, at: usize, talk: Talk) {
        self.env.sleep(self.span(0.5)).await;
        for case in &*talk {
            if !self.ask(at, case).await {
                return;
            }
        }
    }

    /// Asks any router, and another one if that is gone, until there is an answer, or an error: then false.
    async fn ask(&self, at: usize, case: &Case) -> bool {
        for turn in 0..200u32 {
            if turn > 0 {
                self.state().outcome.asked_again += 1;
                self.env.sleep(Duration::from_millis(50)).await;
            }
            let nth = self.env.random() as usize;
            let handle = {
                let state = self.state();
                state.routers.values().nth(nth % state.routers.len().max(1)).map(|r| r.handle.clone())
            };
            let Some(handle) = handle else { continue };
            let request = GenerateRequest {
                id: format!("request-{at}-{turn}"),
                prompt_ids: case.prompt.clone().into(),
                max_tokens: case.expected.len() as u32,
                eos_ids: Arc::new([]),
                sampling: Sampling { temperature: 0.0, ..Sampling::default() },
                logprobs: None,
                cache_salt: None,
                tier: ServiceTier::Default,
            };
            let mut updates = match handle.submit(request).await {
                Ok(updates) => updates,
                Err(Rejection::TooLarge(why)) => panic!("{:?}: {why}", self.env),
                // An honest answer that says to come again.
                Err(_) => {
                    self.state().outcome.refused += 1;
                    continue;
                }
            };
            drop(handle);
            let mut tokens = Vec::new();
            while let Some(update) = updates.recv().await {
                match update {
                    Update::Placed { .. } | Update::Started { .. } => {}
                    Update::Token { id, .. } => {
                        tokens.push(id);
                        assert!(
                            case.expected.starts_with(&tokens),
                            "{:?}: request {at}: wrong tokens",
                            self.env
                        );
                    }
                    Update::Finished { .. } => {
                        assert_eq!(tokens, case.expected, "{:?}: request {at}", self.env);
                        assert!(updates.recv().await.is_none(), "{:?}: request {at} ended twice", self.env);
                        let now = self.env.now();
                        let mut state = self.state();
                        state.outcome.right += 1;
                        state.outcome.answered_ns += (now.0 * 1e9) as u64;
                        return true;
                    }
                    Update::Failed(_) => {
                        assert!(updates.recv().await.is_none(), "{:?}: request {at} ended twice", self.env);
                        self.state().outcome.errors += 1;
                        return false;
                    }
                }
            }
            // The router is gone: clients ask another.
        }
        let roles: Vec<Role> = self.state().workers.values().map(|worker| worker.role).collect();
        panic!("{:?}: request {at} found no router that answers; workers are {roles:?}", self.env);
    }

    /// Blocks in use on any instance, by any router's view, once all had time to notice.
    async fn usage_at_rest(&self) -> f64 {
        for _ in 0..20 {
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
}

/// One history.
pub(crate) fn run(workload: &Workload, talks: &[Talk], seed: u64) -> Outcome {
    let env = SeededEnv::with_blocking_workers(seed);
    let world = World {
        env: env.clone(),
        checkpoint: Arc::new(checkpoint()),
        transport: Arc::new(Fences::new(Faulty::new(Memory::new(), workload.wires(seed)))),
        workload: Arc::new(workload.clone()),
        metrics: Metrics::new(),
        state: Arc::default(),
    };
    let (workload, talks) = (workload.clone(), talks.to_vec());
    let outcome = env.run(async move {
        for _ in 0..workload.routers {
            world.start_router();
        }
        for number in 0..workload.workers as u64 {
            world.start_worker(world.role(number));
        }
        let mut clients = Vec::new();
        for at in 0..workload.requests {
            let talk = talks[world.below(talks.len() as u64) as usize].clone();
            let (done, ends) = tokio::sync::oneshot::channel::<()>();
            let client = world.clone().client(at, talk);
            world.env.spawn(Box::pin(async move {
                client.await;
                let _ = done.send(());
            }));
            clients.push(ends);
        }
        let Workload { kill_worker_every_s, kill_router_every_s, cut_every_s, cut_router_every_s, .. } =
            workload;
        if kill_worker_every_s > 0.0 {
            world.env.spawn(Box::pin(world.clone().kill_workers(kill_worker_every_s)));
        }
        if kill_router_every_s > 0.0 {
            world.env.spawn(Box::pin(world.clone().kill_routers(kill_router_every_s)));
        }
        if cut_every_s > 0.0 {
            world.env.spawn(Box::pin(world.clone().cut_wires(cut_every_s, "")));
        }
        if cut_router_every_s > 0.0 {
            world.env.spawn(Box::pin(world.clone().cut_wires(cut_router_every_s, "router")));
        }
        let watched = world.clone();
        world.env.spawn(Box::pin(async move {
            watched.env.sleep(LONGEST).await;
            assert!(watched.state().over, "{:?}: a request waits for ever", watched.env);
        }));
        for client in clients {
            client.await.unwrap();
        }
        world.state().over = true;
        let end = world.env.now().0;
        assert!(end < disks::HANG_LONG.as_secs_f64(), "{:?}: {end} s: somebody waited for a disk", world.env);
        assert_eq!(world.metrics.worker_panics.get(), 0, "{:?}: a worker panicked", world.env);
        let silent: u64 = world.state().routers.values().map(|r| r.metrics.instances_silent.get()).sum();
        assert_eq!(silent, 0, "{:?}: an instance kept a request and said nothing of it", world.env);
        assert_eq!(world.usage_at_rest().await, 0.0, "{:?}: KV blocks leak", world.env);
        world.assert_that_routers_know_who_holds_what().await;
        let (fences, broken) = world.transport.count();
        assert_eq!(broken, 0, "{:?}: KV landed in memory that was fenced off", world.env);
        let mut outcome = world.state().outcome.clone();
        outcome.fences = fences as u64;
        world.count_tiers(&mut outcome);
        outcome.device_failures = world.state().workers.values().map(|worker| worker.struck.struck()).sum();
        outcome.retries = world.metrics.kv_transfer_retries.get();
        outcome.pulled_tokens = world.metrics.kv_pulled_tokens.get();
        outcome.recomputes = world.metrics.kv_transfer_recomputes.get();
        // What still runs gets the time to end: threads and memory of thousands of worlds add up.
        let ended = {
            let mut state = world.state();
            (std::mem::take(&mut state.workers), std::mem::take(&mut state.routers))
        };
        ended.0.values().filter_map(|worker| worker.disk.as_ref()).for_each(|disk| world.count_disk(disk));
        let Outcome { slow_disks, hung_disks, .. } = world.state().outcome;
        (outcome.slow_disks, outcome.hung_disks) = (slow_disks, hung_disks);
        drop(ended);
        world.env.sleep(disks::HANG_LONG + Duration::from_secs(5)).await;
        outcome
    });
    env.end();
    outcome
}
