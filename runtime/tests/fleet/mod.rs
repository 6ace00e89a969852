//! A small fleet in the seeded environment, and clients for it.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod clock;
mod memory;
mod runs;
pub(crate) mod wayward;

pub(crate) use memory::Log;

use futures_util::future::BoxFuture;
use memory::Rotting;
use mixfleet_hal::{
    DType, Device, fault::FaultPlan, memory::SharedMemory, random::Stream, transport::Transport,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
    LowerTiers, MemberSpec,
};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv, yield_now};
use mixfleet_runtime::events::EventLog;
use mixfleet_runtime::metrics::{DeviceLabels, Metrics, TierLabels};
use mixfleet_runtime::model::{Checkpoint, ModelConfig, Oracle};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{MakeRegion, SSD_TIMEOUT, SsdConfig};
use mixfleet_runtime::request::{
    EngineHandle, FinishReason, GenerateRequest, Hints, Sampling, ServiceTier, Update,
};
use mixfleet_scheduler::cost::{
    AttnSplit, Coefficients, DecodeCoefficients, MemberShare, Partition, PrefillCoefficients,
};
use mixfleet_scheduler::fleet::{FleetConfig, PartyId, Policy, Replicate, Role};
use mixfleet_simulated::FaultyDevice;
use mixfleet_wire::{FaultyTransport, HostRegion, InProcessTransport};
use std::future::ready;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Number of blocks of a KV node, more than any test uses.
const KV_NODE_BLOCKS: u64 = 400;

fn usage(metrics: &Metrics, instance: &str) -> f64 {
    let labels = DeviceLabels { device: instance.to_owned() };
    metrics.kv_cache_usage.get_or_create(&labels).get()
}

/// A request with its expected answer.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) prompt: Vec<u32>,
    pub(crate) expected: Vec<u32>,
}

/// The answer that a client received.
#[derive(Debug, Default)]
pub(crate) struct ReceivedAnswer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) cached_tokens: u32,
    pub(crate) placed: Vec<(String, String)>,
    pub(crate) failure: Option<String>,
}

/// The oracle's greedy continuation.
pub(crate) fn greedy(checkpoint: &Checkpoint, prompt: &[u32], count: usize) -> Vec<u32> {
    let oracle = Oracle::new(checkpoint);
    let mut ids = prompt.to_vec();
    for _ in 0..count {
        let logits = oracle.last_logits(&ids);
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        ids.push(best as u32);
    }
    ids.split_off(prompt.len())
}

pub(crate) fn prompt(length: u32, seed: u64, config: &ModelConfig) -> Vec<u32> {
    let mut rng = Stream::new(seed);
    (0..length).map(|_| rng.below(u64::from(config.vocab)) as u32).collect()
}

/// Requests of mixed lengths, some with common prefixes.
pub(crate) fn pressure(checkpoint: &Checkpoint, seed: u64, count: usize) -> Vec<Case> {
    let mut rng = Stream::new(seed ^ 0xabcd);
    let family: Vec<Vec<u32>> = (0..2).map(|i| prompt(40, 1000 + i, &checkpoint.config)).collect();
    let case = |_| {
        let shared = rng.below(30) as usize;
        let mut prompt = family[rng.below(2) as usize][..shared].to_vec();
        let own = 1 + rng.below(12);
        prompt.extend((0..own).map(|_| rng.below(u64::from(checkpoint.config.vocab)) as u32));
        let expected = greedy(checkpoint, &prompt, 1 + rng.below(24) as usize);
        Case { prompt, expected }
    };
    (0..count).map(case).collect()
}

struct Member {
    role: Role,
    block_tokens: u32,
    kv: DType,
    device: Arc<dyn Device>,
    /// The devices that share the model with it.
    others: Vec<Arc<dyn Device>>,
    /// Each device's part of the model.
    partition: Partition,
}

/// The configuration of a fleet.
pub(crate) struct TestFleet {
    checkpoint: Checkpoint,
    members: Vec<Member>,
    blocks: u32,
    transport: Arc<dyn Transport>,
    pub(crate) hand_off: HandOffLimits,
    /// What attention to a key is predicted to take.
    seconds_per_key: f64,
    /// Whether devices among which pages are divided have unlike room for them.
    unlike_rooms: bool,
    metrics: Metrics,
    policy: Policy,
    /// Budget for copies of hot prefixes in bytes per second; prefixes are then not pulled.
    copies: Option<f64>,
    log: Option<Log>,
    /// Number of blocks in host memory, and the disk with its size in bytes.
    lower: Option<(u64, Option<(SimDisk, u64)>)>,
    /// Bits of host memory flip when blocks below devices are looked at.
    rots: Arc<AtomicBool>,
    /// When it is known whose blocks on the disk may be used, if not at once.
    disk_known: Mutex<Option<BoxFuture<'static, Option<u64>>>>,
    /// The names of the instances, once they are started.
    names: Mutex<Vec<String>>,
    regions: Arc<MakeRegion>,
}

fn host_region(bytes: u64) -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
    Ok(Arc::new(HostRegion::new(bytes as usize)?))
}

impl TestFleet {
    pub(crate) fn new(checkpoint: Checkpoint) -> Self {
        TestFleet {
            checkpoint,
            members: Vec::new(),
            blocks: 64,
            transport: Arc::new(InProcessTransport::new()),
            hand_off: HandOffLimits { slot_bytes: 2048, slots: 3, ..HandOffLimits::default() },
            seconds_per_key: 0.0,
            unlike_rooms: false,
            metrics: Metrics::new(),
            policy: Policy::default(),
            copies: None,
            log: None,
            lower: None,
            rots: Arc::default(),
            disk_known: Mutex::default(),
            names: Mutex::default(),
            regions: Arc::new(host_region),
        }
    }

    /// Uses staging memory from this allocator.
    pub(crate) fn regions(
        mut self,
        make: impl Fn(u64) -> mixfleet_hal::Result<Arc<dyn SharedMemory>> + Send + Sync + 'static,
    ) -> Self {
        self.regions = Arc::new(make);
        self
    }

    /// Copies prefixes ahead of demand, and never pulls them.
    pub(crate) fn copies(mut self, bytes_per_s: f64) -> Self {
        self.copies = Some(bytes_per_s);
        self
    }

    /// Number of instances that are up.
    pub(crate) fn instances(&self) -> i64 {
        self.metrics.instances.get()
    }

    /// Returns the number of instances that are up, and whether they can serve.
    pub(crate) fn watch(&self) -> impl Fn() -> (i64, bool) + use<> {
        let metrics = self.metrics.clone();
        move || (metrics.instances.get(), metrics.serves.get() == 1)
    }

    /// Number of workers that panicked.
    pub(crate) fn panics(&self) -> u64 {
        self.metrics.worker_panics.get()
    }

    /// Adds host memory for this many blocks below each device, and a disk below the first.
    pub(crate) fn lower(mut self, dram_blocks: u64, disk: Option<(SimDisk, u64)>) -> Self {
        self.lower = Some((dram_blocks, disk));
        self
    }

    /// Turns bit flips in host memory below the devices on or off.
    pub(crate) fn rot(&self, rots: bool) {
        self.rots.store(rots, Ordering::Relaxed);
    }

    /// Number of outages of a member's disk.
    pub(crate) fn outages(&self, member: usize) -> u64 {
        let labels = TierLabels { device: self.name_of(member), tier: "ssd" };
        self.metrics.kv_tier_outages.get_or_create(&labels).get()
    }

    /// Lets the namespace of the disk's blocks be known later than at the start.
    pub(crate) fn disk_known(self, namespace: BoxFuture<'static, Option<u64>>) -> Self {
        *self.disk_known.lock().unwrap() = Some(namespace);
        self
    }

    /// Number of blocks that came from `tier` of a member.
    pub(crate) fn tier_hits(&self, member: usize, tier: &'static str) -> u64 {
        let labels = TierLabels { device: self.name_of(member), tier };
        self.metrics.kv_tier_hits.get_or_create(&labels).get()
    }

    /// Number of blocks of a member's disk that were found damaged.
    pub(crate) fn bad_blocks(&self, member: usize) -> u64 {
        let labels = DeviceLabels { device: self.name_of(member) };
        self.metrics.kv_tier_bad.get_or_create(&labels).get()
    }

    pub(crate) fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Logs the events and actions of the fleet machine.
    pub(crate) fn logged(mut self) -> (Self, Log) {
        let log = Log::default();
        self.log = Some(log.clone());
        (self, log)
    }

    pub(crate) fn with(self, role: Role) -> Self {
        self.with_blocks(role, 8)
    }

    pub(crate) fn with_blocks(self, role: Role, block_tokens: u32) -> Self {
        self.with_kv(role, block_tokens, DType::F32)
    }

    /// Adds an instance with its own block size and KV dtype.
    pub(crate) fn with_kv(self, role: Role, block_tokens: u32, kv: DType) -> Self {
        let (device, partition) = (self.reference(), self.checkpoint.config.divided(1).unwrap());
        self.add((role, block_tokens, kv), device, Vec::new(), partition)
    }

    pub(crate) fn with_device(self, role: Role, device: Arc<dyn Device>) -> Self {
        let partition = self.checkpoint.config.divided(1).unwrap();
        self.add((role, 8, DType::F32), device, Vec::new(), partition)
    }

    /// Adds an instance whose devices divide the model in stages of this many.
    pub(crate) fn with_stages(
        self,
        device: Arc<dyn Device>,
        others: Vec<Arc<dyn Device>>,
        stages: &[usize],
    ) -> Self {
        let weights: Vec<_> = stages.iter().map(|count| vec![1.0; *count]).collect();
        let partition = self.checkpoint.config.in_stages(&weights).unwrap();
        self.add((Role::Auto, 8, DType::F32), device, others, partition)
    }

    /// Adds devices that have the model as `partition` says, in this role and with such blocks.
    pub(crate) fn with_partition(
        self,
        kind: (Role, u32, DType),
        mut devices: Vec<Arc<dyn Device>>,
        partition: Partition,
    ) -> Self {
        let others = devices.split_off(1);
        self.add(kind, devices.remove(0), others, partition)
    }

    /// Adds a device with the weights, and devices that attend for it and divide the KV so.
    pub(crate) fn with_attention(
        self,
        device: Arc<dyn Device>,
        others: Vec<Arc<dyn Device>>,
        split: AttnSplit,
    ) -> Self {
        let partition = self.checkpoint.config.with_attention(others.len(), split).unwrap();
        self.add((Role::Auto, 8, DType::F32), device, others, partition)
    }

    /// Predicts that decodes take so long for each key that they attend to.
    pub(crate) fn attending_slowly(self, seconds_per_key: f64) -> Self {
        TestFleet { seconds_per_key, ..self }
    }

    /// Gives the second of devices that divide pages twice as many as the first, and so on.
    pub(crate) fn with_unlike_rooms(self) -> Self {
        TestFleet { unlike_rooms: true, ..self }
    }

    fn add(
        mut self,
        (role, block_tokens, kv): (Role, u32, DType),
        device: Arc<dyn Device>,
        others: Vec<Arc<dyn Device>>,
        partition: Partition,
    ) -> Self {
        self.members.push(Member { role, block_tokens, kv, device, others, partition });
        self
    }

    fn reference(&self) -> Arc<dyn Device> {
        Arc::new(ReferenceDevice::named(&format!("device{}", self.members.len())))
    }

    pub(crate) fn with_faults(self, role: Role, faults: FaultPlan) -> Self {
        // Steps that warm the device would be the first to fail.
        let inner = Arc::new(wayward::Wayward::over(self.reference()).replay_pays(false));
        let device = Arc::new(FaultyDevice::new(inner, faults));
        self.with_device(role, device)
    }

    pub(crate) fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks;
        self
    }

    pub(crate) fn faults(self, faults: FaultPlan) -> Self {
        self.transport(Arc::new(FaultyTransport::new(InProcessTransport::new(), faults)))
    }

    pub(crate) fn transport(mut self, transport: Arc<dyn Transport>) -> Self {
        self.transport = transport;
        self
    }

    pub(crate) fn hand_off_timeout(mut self, timeout: Duration) -> Self {
        self.hand_off.timeout = timeout;
        self
    }

    /// Sum of `kv_exposed_s`, and its count.
    pub(crate) fn exposed_s(&self) -> (f64, u64) {
        let text = self.metrics.encode();
        let value = |what: &str| {
            let name = format!("mixfleet_kv_exposed_seconds_{what} ");
            text.lines().find_map(|line| line.strip_prefix(&name)).expect("it is registered").to_owned()
        };
        (value("sum").parse().unwrap(), value("count").parse().unwrap())
    }

    pub(crate) fn transfer_troubles(&self) -> (u64, u64) {
        (self.metrics.kv_transfer_retries.get(), self.metrics.kv_transfer_recomputes.get())
    }

    /// Number of pulled prompt tokens.
    pub(crate) fn pulled(&self) -> u64 {
        self.metrics.kv_pulled_tokens.get()
    }

    /// The last reported share of blocks in use.
    pub(crate) fn usage_of(&self, member: usize) -> f64 {
        usage(&self.metrics, &self.name_of(member))
    }

    /// A started instance's name.
    fn name_of(&self, member: usize) -> String {
        self.names.lock().unwrap()[member].clone()
    }

    /// Bytes of KV that were sent.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.metrics.kv_sent_bytes.get()
    }

    #[expect(clippy::too_many_lines, reason = "the one place where a test's fleet is put together")]
    pub(crate) fn start(&self, env: SharedEnv) -> EngineHandle {
        // tiers keep blocks of all layers
        let config = Arc::new(match &self.lower {
            None => self.checkpoint.config.clone().in_window_pages(),
            Some(_) => self.checkpoint.config.clone(),
        });
        let instances = self.members.iter().enumerate().map(|(at, member)| {
            let device = member.device.clone();
            let partition = &member.partition;
            let place = |device: &Arc<dyn Device>, share| match member.others.is_empty() {
                true => Some(self.checkpoint.place(&**device, &mut |_, _| {}).unwrap()),
                false => self.checkpoint.place_share(&**device, share, &mut |_, _| {}).unwrap(),
            };
            let block_bytes = u64::from(member.block_tokens) * config.kv_bytes_per_token(member.kv);
            let blocks = self.blocks * 8 / member.block_tokens;
            // a device that has a part of the KV has memory for as many blocks
            let kv_bytes = |share: &MemberShare| {
                let token_bytes = config.of_member(share).kv_bytes_per_token(member.kv);
                let holders = partition.page_holders();
                let own_blocks = match self.unlike_rooms && holders > 1 {
                    true => (2 * blocks * share.member).div_ceil(holders * (holders + 1)),
                    false => blocks.div_ceil(holders),
                };
                u64::from(member.block_tokens * own_blocks) * token_bytes
            };
            let limits = InstanceLimits {
                activations: DType::F32,
                kv: member.kv,
                kv_bytes: kv_bytes(&partition.shares()[0]),
                step_tokens_max: 24,
                prefill_tokens_beside_decode_max: Some(12),
                sequences_max: 8,
                block_tokens: Some(member.block_tokens),
            };
            if member.role.keeps() {
                let limits = InstanceLimits { kv_bytes: block_bytes * KV_NODE_BLOCKS, ..limits };
                let loaded = Loaded::keeping(&config, device, None, limits).unwrap();
                return (loaded, Loaded::predicted_idle());
            }
            let weights = place(&device, &partition.shares()[0]).unwrap();
            let spec = InstanceSpec { device, weights, role: member.role, price: None, limits };
            let cost = Coefficients {
                prefill_s: PrefillCoefficients { overhead: 1e-3, per_token: 1e-4, per_token_squared: 0.0 },
                decode_s: DecodeCoefficients {
                    base: 1e-3,
                    per_sequence: 1e-5,
                    per_kv_token: self.seconds_per_key,
                },
            };
            let others =
                member.others.iter().zip(&partition.shares()[1..]).map(|(device, share)| MemberSpec {
                    device: device.clone(),
                    weights: place(device, share),
                    kv_bytes: kv_bytes(share),
                });
            let loaded = match member.others.is_empty() {
                true => Loaded::new(&config, spec).unwrap(),
                false => Loaded::divided(&config, partition, spec, others.collect()).unwrap(),
            };
            let loaded = match &self.lower {
                None => loaded,
                Some((blocks, disk)) => {
                    let disk = disk.clone().filter(|_| at == 0);
                    let ssd = disk.map(|(disk, bytes)| SsdConfig {
                        disk: Arc::new(disk),
                        bytes,
                        wipe: false,
                        timeout: SSD_TIMEOUT,
                    });
                    let later = ssd.as_ref().and_then(|_| self.disk_known.lock().unwrap().take());
                    let namespace = later.unwrap_or_else(|| Box::pin(ready(Some(7))));
                    let tiers = LowerTiers { dram_bytes: blocks * block_bytes, ssd, namespace };
                    let rots = self.rots.clone();
                    let region = move |bytes: u64| {
                        let memory = HostRegion::new(bytes as usize)?;
                        Ok(Arc::new(Rotting { memory, rots: rots.clone() }) as Arc<dyn SharedMemory>)
                    };
                    loaded.with_lower_tiers(tiers, &region).unwrap()
                }
            };
            let cost = loaded.predicted_by_coefficients(cost);
            (loaded, cost)
        });
        let instances: Vec<_> = instances.collect();
        *self.names.lock().unwrap() = instances.iter().map(|(loaded, _)| loaded.id()).collect();
        let events = self.log.clone().map(|log| EventLog::start(&env, Box::new(log)).0);
        let parts = EngineParts {
            // It is the same in every engine, so that they can find each other's blocks.
            identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
            env,
            config,
            limits: EngineConfig {
                hand_off: self.hand_off,
                fleet: FleetConfig {
                    policy: self.policy,
                    pull: self.copies.is_none(),
                    replicate: self.copies.map(Replicate::new),
                    ..EngineConfig::default().fleet
                },
                ..EngineConfig::default()
            },
            events,
            placements: Arc::new(Placements::new(100)),
            metrics: self.metrics.clone(),
        };
        let links = Links { transports: vec![self.transport.clone()], make_region: self.regions.clone() };
        parts.start(instances, links).unwrap()
    }

    /// The largest share of blocks in use on any instance, once every worker had time to notice.
    async fn settled_usage(metrics: Metrics, names: &[String], env: &SeededEnv) -> f64 {
        for _ in 0..20 {
            env.sleep(Duration::from_secs(1)).await;
            yield_now().await;
        }
        names.iter().map(|name| usage(&metrics, name)).fold(0.0, f64::max)
    }

    pub(crate) fn run_one(&self, env: &SeededEnv, prompt: Vec<u32>, count: u32) -> ReceivedAnswer {
        let handle = self.start(Arc::new(env.clone()));
        env.run(async move { ask(&handle, "one".into(), prompt, count, None).await })
    }

    /// Runs all requests at once; every answer must be the expected one. Returns the blocks' usage
    /// afterwards.
    pub(crate) fn run_many(&self, env: &SeededEnv, cases: Vec<Case>) -> f64 {
        let (handle, metrics) = (self.start(Arc::new(env.clone())), self.metrics.clone());
        let names = self.names.lock().unwrap().clone();
        let world = env.clone();
        env.run(async move {
            let mut answers = Vec::new();
            for (at, case) in cases.into_iter().enumerate() {
                let (sender, receiver) = tokio::sync::oneshot::channel();
                let (handle, env) = (handle.clone(), world.clone());
                world.spawn(Box::pin(async move {
                    env.sleep(Duration::from_millis(env.random() % 50)).await;
                    let count = case.expected.len() as u32;
                    let answer =
                        ask(&handle, format!("request-{at}"), case.prompt.clone(), count, None).await;
                    let _ = sender.send((case, answer));
                }));
                answers.push(receiver);
            }
            for answer in answers {
                let (case, answer) = answer.await.unwrap();
                assert_eq!(answer.failure, None);
                assert_eq!(answer.tokens, case.expected, "{world:?}: prompt {:?}", case.prompt);
            }
            TestFleet::settled_usage(metrics, &names, &world).await
        })
    }
}

/// Requests of every third prompt length are flex, so that both tiers occur in every test.
pub(crate) fn request(
    id: String,
    prompt: Vec<u32>,
    max_tokens: u32,
    cache_salt: Option<String>,
) -> GenerateRequest {
    let tier = if prompt.len().is_multiple_of(3) { ServiceTier::Flex } else { ServiceTier::Default };
    GenerateRequest {
        id,
        forced_ids: Arc::new([]),
        minimum: None,
        vocabulary: None,
        prompt_ids: prompt.into(),
        max_tokens,
        eos_ids: Arc::new([]),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        logprobs: None,
        grammar: None,
        cache_salt,
        party: PartyId::NONE,
        hints: Hints { tier, ..Hints::default() },
    }
}

pub(crate) async fn ask(
    handle: &EngineHandle,
    id: String,
    prompt: Vec<u32>,
    count: u32,
    salt: Option<String>,
) -> ReceivedAnswer {
    let mut updates = handle.submit(request(id, prompt, count, salt)).await.expect("admitted");
    let mut answer = ReceivedAnswer::default();
    while let Some(update) = updates.recv().await {
        match update {
            Update::Placed { prefill, decode } => answer.placed.push((prefill, decode)),
            Update::Token { id, .. } => answer.tokens.push(id),
            Update::Started { cached_tokens } => answer.cached_tokens = cached_tokens,
            Update::Finished { reason } => answer.finish = Some(reason),
            Update::Failed(failure) => answer.failure = Some(failure.message),
        }
    }
    answer
}
