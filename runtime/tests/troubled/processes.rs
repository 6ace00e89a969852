//! Worker processes and routers: their start, and how they find each other.

use super::groups::GroupDivision;
use super::hosts::Host;
use super::lent::LentMember;
use super::network::{Cut, Wire};
use super::partitions::{Parted, router_host, worker_host};
use super::parts::Part;
use super::{BLOCK_TOKENS, Kind, RouterProcess, Worker, World, profile, workload};
use futures_util::future::BoxFuture;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Error, ErrorKind};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
    LowerTiers,
};
use mixfleet_runtime::env::{Env, SharedEnv};
use mixfleet_runtime::fleet::registry::{Charter, InstanceRecord, Member, Registry, RegistryError, Seat};
use mixfleet_runtime::fleet::{Hello, PROTOCOL, SessionRefusal, WorkerProcess, call_members};
use mixfleet_runtime::grammar::{Grammars, TrialEnd, Trials};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::builtin;
use mixfleet_scheduler::cost::{CostModel, LinkCost};
use mixfleet_scheduler::fleet::{InstanceId, Role};
use mixfleet_simulated::FaultyDevice;
use mixfleet_wire::HostRegion;
use std::sync::Arc;
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(3);
const FLEET: &str = "chaos";
/// Time that a router waits for a place for an accepted request.
const PATIENCE: Seconds = Seconds(10.0);
/// Timeout of a call without an answer.
const UNHEARD: Duration = Duration::from_secs(1);

/// The instance of a new worker.
pub(super) struct NewInstance {
    pub(super) loaded: Loaded,
    pub(super) cost: CostModel,
    /// As of a worker.
    pub(super) struck: Option<[Arc<FaultyDevice>; 2]>,
    pub(super) members: Vec<LentMember>,
    pub(super) division: Option<GroupDivision>,
}

impl World {
    /// An instance of one device.
    fn single(
        &self,
        name: &str,
        kind: &Kind,
        host: &Host,
        (role, limits): (Role, InstanceLimits),
    ) -> NewInstance {
        let config = kind.config(&self.workload);
        let Part { device, struck, said_flops } = self.part(name, host, kind);
        let (loaded, cost) = if role.keeps() {
            (Loaded::keeping(&config, device, None, limits).unwrap(), Loaded::predicted_idle())
        } else {
            let weights = kind.checkpoint.place(&*device, &mut |_, _| {}).unwrap();
            let spec = InstanceSpec { device, weights, role, price: None, limits };
            let loaded = Loaded::new(&config, spec).unwrap();
            let cost = loaded.predicted_by(profile(said_flops));
            (loaded, cost)
        };
        NewInstance { loaded, cost, struck: Some(struck), members: Vec::new(), division: None }
    }

    /// Compiles grammars after trials in children that may be killed.
    fn grammars(&self, kind: &Kind) -> Arc<Grammars> {
        struct Struck(World);
        impl Trials for Struck {
            fn run(&self, _: &[u8], _: &dyn Fn() -> bool) -> TrialEnd {
                let Struck(world) = self;
                if !world.strikes(world.workload.trials_killed) {
                    return TrialEnd::passed(1000);
                }
                world.count("grammar trials killed", 1);
                TrialEnd::Killed
            }
        }
        let trials = Box::new(Struck(self.clone()));
        Arc::new(Grammars::new(builtin::tokenizer().unwrap(), kind.checkpoint.config.vocab, Some(trials)))
    }

    fn links(&self, host: String) -> Links {
        let world = self.clone();
        let region = move |bytes: u64| {
            if world.strikes(world.workload.regions_refused) {
                world.count("regions refused", 1);
                return Err(Error::new(ErrorKind::OutOfMemory, "no descriptors are left"));
            }
            Ok(Arc::new(HostRegion::new(bytes as usize)?) as Arc<dyn SharedMemory>)
        };
        let transport = Parted { inner: self.transport.clone(), world: self.clone(), host };
        Links { transports: vec![Arc::new(transport)], make_region: Arc::new(region) }
    }

    /// The role of the `nth` worker of a kind: the first two together can do everything.
    pub(super) fn role(&self, nth: usize) -> Role {
        match nth {
            _ if self.workload.groups >= 1.0 => Role::Auto,
            0 => Role::Prefill,
            1 => Role::Decode,
            _ if self.workload.groups > 0.0 => Role::Auto,
            _ => [Role::Auto, Role::Prefill, Role::Decode][self.below(3) as usize],
        }
    }

    /// Starts a worker process, with retries.
    pub(super) async fn start_worker(&self, kind: usize, role: Role) {
        while !self.try_start_worker(kind, role).await {
            self.env.sleep(self.span(0.2)).await;
        }
    }

    #[expect(clippy::too_many_lines, reason = "the one place where a test's worker is put together")]
    async fn try_start_worker(&self, kind: usize, role: Role) -> bool {
        let number = {
            let mut state = self.state();
            state.workers_made += 1;
            state.workers_made - 1
        };
        let its = &self.kinds[kind];
        let (host, host_name) = (self.host(), worker_host(number));
        let env: SharedEnv = Arc::new(host.clone());
        let client = self.registry.client();
        let registry = client.registry(FLEET, LEASE);
        let charter = self.charter(&registry, kind).await;
        let id = registry.instance_ids(1).await.unwrap()[0];

        let name = format!("part{number}");
        let config = its.config(&self.workload);
        let block_bytes = u64::from(BLOCK_TOKENS) * config.kv_bytes_per_token(DType::F32);
        let limits = InstanceLimits {
            activations: DType::F32,
            kv: DType::F32,
            kv_bytes: u64::from(self.workload.device_blocks) * block_bytes,
            step_tokens_max: 24,
            prefill_tokens_beside_decode_max: Some(12),
            sequences_max: 8,
            block_tokens: Some(BLOCK_TOKENS),
        };
        let disk = self.disk(block_bytes);
        let made = match self.makes_group(role) {
            true => self.group(&name, its, &host, (role, limits)),
            false => self.single(&name, its, &host, (role, limits)),
        };
        let NewInstance { loaded, cost, struck, members, division } = made;
        let loaded = match self.workload.dram_blocks {
            0 => loaded,
            blocks => {
                let below = disk.clone().zip(self.workload.disks.as_ref());
                let ssd = below.map(|(disk, disks)| disks.below(disk, block_bytes));
                let namespace = self.namespace(kind);
                let tiers = LowerTiers { dram_bytes: blocks * block_bytes, ssd, namespace };
                let world = self.clone();
                loaded.with_lower_tiers(tiers, &move |bytes| world.host_memory(bytes)).unwrap()
            }
        };
        let loaded = loaded.with_grammars(self.grammars(its));
        let (device, kv_capacity_tokens) = (loaded.id(), loaded.kv_capacity_tokens());
        let process = WorkerProcess {
            env: env.clone(),
            model: its.model.clone(),
            instances: vec![(id, loaded, cost)],
            links: self.links(host_name),
            hand_off: HandOffLimits { slot_bytes: 2048, slots: 3, timeout: Duration::from_millis(200) },
            metrics: self.metrics.clone(),
        };
        let Ok(hub) = process.start() else {
            // There was no thread, or no staging memory: a supervisor would retry.
            self.count("workers that could not start", 1);
            self.shelve(disk);
            return false;
        };
        let record = InstanceRecord {
            id,
            device: device.clone(),
            role,
            usd_per_hour: None,
            kv_capacity_tokens,
            degraded: false,
        };
        let seat = Seat::Worker { instances: vec![record], transports: Vec::new(), not_offered: Vec::new() };
        let mut membership = registry.join(charter, self.member(kind, number.to_string(), seat));
        let (fleet, taken) = (membership.members(), membership.taken());
        let worker = Worker {
            hub,
            kind,
            device,
            role,
            disk,
            struck,
            members,
            division,
            cut: Cut::new(),
            client,
            _membership: membership,
        };
        self.state().workers.insert(number, worker);
        self.when_taken(taken, move |world| world.replace_worker(number));
        let world = self.clone();
        let dial = move |member: Member| -> BoxFuture<'static, Result<(), String>> {
            Box::pin(world.clone().add_peer(number, member))
        };
        // Of two workers, the later one calls the earlier one.
        let wanted = move |member: &Member| member.first_instance().is_some_and(|other| other < id);
        self.env.spawn(Box::pin(call_members(env, fleet, wanted, Arc::new(dial))));
        true
    }

    pub(super) async fn start_router(&self, kind: usize) {
        let number = {
            let mut state = self.state();
            state.routers_made += 1;
            state.routers_made - 1
        };
        let its = &self.kinds[kind];
        let env: SharedEnv = Arc::new(self.host());
        let client = self.registry.client();
        let registry = client.registry(FLEET, LEASE);
        let charter = self.charter(&registry, kind).await;
        let id = registry.router_id().await.unwrap();
        let metrics = Metrics::new();
        let digests = its.model.clone();
        let mut limits = EngineConfig { patience: PATIENCE, ..EngineConfig::default() };
        limits.fleet.requests_max = self.workload.requests_max;
        let parts = EngineParts {
            env: env.clone(),
            config: Arc::new(its.checkpoint.config.clone()),
            identity: Identity::new(digests.digest, digests.tokenizer_digest, [1, 2]),
            limits,
            events: None,
            placements: Arc::new(Placements::new(1)),
            metrics: metrics.clone(),
        };
        let (handle, router) = parts.start_router(id, DType::F32);
        let address = format!("router{number}");
        let mut membership = registry.join(charter, self.member(kind, address, Seat::Router { id }));
        let (members, taken, joined) = (membership.members(), membership.taken(), membership.joined());
        let process =
            RouterProcess { handle, router, metrics, kind, cut: Cut::new(), client, _membership: membership };
        self.state().routers.insert(number, process);
        self.when_taken(taken, move |world| world.replace_router(number));
        let world = self.clone();
        let dial = move |member: Member| -> BoxFuture<'static, Result<(), String>> {
            Box::pin(world.clone().add_worker(number, member))
        };
        let wanted = |member: &Member| member.first_instance().is_some();
        self.env.spawn(Box::pin(call_members(env, members, wanted, Arc::new(dial))));
        // Before that, a foreign process would find the fleet empty, and claim it.
        joined.await;
    }

    /// The charter of a process that joins. One of another model is refused, and joins anyway, as an old
    /// release might.
    async fn charter(&self, registry: &Registry, kind: usize) -> Charter {
        match registry.charter(&self.kinds[kind].model, [0; 16]).await {
            Ok(charter) => charter,
            Err(RegistryError::Refused(_)) => {
                assert_ne!(kind, 0, "{:?}: our own may not join", self.env);
                self.count("strangers refused by the charter", 1);
                registry.charter(&self.kinds[0].model, [0; 16]).await.unwrap()
            }
            Err(error) => panic!("{:?}: {error}", self.env),
        }
    }

    fn member(&self, kind: usize, address: String, seat: Seat) -> Member {
        let its = &self.kinds[kind];
        Member { protocol: its.protocol, ..Member::new(its.model.clone(), address, seat) }
    }

    /// Ends a process if another one has its id, and restarts it with a new id.
    fn when_taken(
        &self,
        taken: impl Future<Output = RegistryError> + Send + 'static,
        replace: impl FnOnce(World) -> BoxFuture<'static, ()> + Send + 'static,
    ) {
        let world = self.clone();
        self.env.spawn(Box::pin(async move {
            taken.await;
            world.count("processes whose id was taken", 1);
            replace(world.clone()).await;
        }));
    }

    fn replace_worker(self, number: u64) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Some((kind, role)) = self.end_worker(number) {
                self.start_worker(kind, role).await;
            }
        })
    }

    fn replace_router(self, number: u64) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Some(kind) = self.end_router(number) {
                self.start_router(kind).await;
            }
        })
    }

    /// The greeting of a process to one that may be of another kind.
    fn says(&self, hello: Hello, from: usize, to: usize, callee: Option<InstanceId>) -> Hello {
        let alike = self.kinds[from].protocol == self.kinds[to].protocol;
        Hello { protocol: if alike { PROTOCOL } else { PROTOCOL - 1 }, ..hello.to(callee) }
    }

    /// Checks that only processes of the same kind are accepted.
    fn judge<T>(&self, from: usize, to: usize, answer: Result<T, SessionRefusal>) -> Result<T, String> {
        match &answer {
            Ok(_) => assert_eq!(from, to, "{:?}: a stranger was let in", self.env),
            Err(SessionRefusal::Model { .. }) => self.count("strangers of another model", 1),
            Err(SessionRefusal::Protocol { .. }) => self.count("strangers of another protocol", 1),
            Err(_) => {}
        }
        answer.map_err(|refusal| refusal.to_string())
    }

    /// A call takes a moment, and arrives on both sides or not at all.
    async fn call(&self, from: &str, to: &str) -> Result<(), String> {
        if self.hears(from, to) && self.hears(to, from) {
            return Ok(());
        }
        self.env.sleep(UNHEARD).await;
        Err("no process answers".into())
    }

    /// Lets a router use a worker process until the session ends.
    async fn add_worker(self, router: u64, member: Member) -> Result<(), String> {
        let number: u64 = member.address.parse().expect("a worker's address is its number");
        let (near, far) = (router_host(router), worker_host(number));
        self.call(&near, &far).await?;
        let ends = {
            let state = self.state();
            let caller = state.routers.get(&router).map(|r| (r.router.clone(), r.kind, r.cut.clone()));
            caller.zip(Some(state.workers.get(&number).map(|w| (w.hub.clone(), w.kind, w.cut.clone()))))
        };
        // A caller that is gone calls no one.
        let Some((caller, called)) = ends else { return std::future::pending().await };
        let ((caller, from, cut), (hub, to, its_cut)) = (caller, called.ok_or("no process is there")?);
        let hello = self.says(caller.hello(), from, to, member.first_instance());
        let session = hub.accept_router(&hello, caller.id());
        drop(hub);
        let session = self.judge(from, to, session)?;
        let cuts = vec![cut, its_cut, self.wire(&near, &far)];
        let delay = Duration::from_millis(workload::quick_ms());
        let (session, _) = self.splice(session, Wire { near, far, delay, cuts });
        caller.add_worker(session).await;
        Ok(())
    }

    /// Lets a worker process exchange KV with an earlier one until the session ends.
    async fn add_peer(self, from: u64, member: Member) -> Result<(), String> {
        let number: u64 = member.address.parse().expect("a worker's address is its number");
        let (near, far) = (worker_host(from), worker_host(number));
        self.call(&near, &far).await?;
        let ends = {
            let state = self.state();
            let end = |number| state.workers.get(&number).map(|w| (w.hub.clone(), w.kind, w.cut.clone()));
            end(from).zip(Some(end(number)))
        };
        let Some((caller, called)) = ends else { return std::future::pending().await };
        let ((caller, from, cut), (called, to, its_cut)) = (caller, called.ok_or("no process is there")?);
        let cost = LinkCost { latency: Seconds(1e-3), seconds_per_byte: 1e-9, usd_per_byte: 0.0 };
        let hello = self.says(caller.hello(), from, to, member.first_instance());
        let session = called.accept_peer(&hello, caller.instances().to_vec(), cost);
        let instances = called.instances().to_vec();
        drop(called);
        let session = self.judge(from, to, session)?;
        let cuts = vec![cut, its_cut, self.wire(&near, &far)];
        let delay = Duration::from_millis(self.workload.peer_delay_ms);
        let (session, ended) = self.splice(session, Wire { near, far, delay, cuts });
        caller.add_peer(instances, cost, session);
        drop(caller);
        ended.await;
        Ok(())
    }

    /// A new connection between two processes, which may be cut.
    fn wire(&self, from: &str, to: &str) -> Cut {
        let cut = Cut::new();
        self.state().wires.insert((from.into(), to.into()), cut.clone());
        cut
    }
}
