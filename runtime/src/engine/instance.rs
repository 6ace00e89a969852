//! A device with the model loaded, which becomes an instance of the fleet.

use super::compiled::GrammarWait;
use super::courier::{Courier, HandOffLimits, Links};
use super::directory::{Directory, Inboxes};
use super::health::HealthWatch;
use super::landings::Landings;
use super::members::{MemberModel, OtherMembers};
use super::messages::{FromWorker, Report};
use super::pages::{InstanceKv, KvPart};
use super::pinning::Pinner;
use super::receiver::KvReceiver;
use super::renew::PROBE_BYTES;
use super::sender::{KvSender, LAYERS_IN_FLIGHT};
use super::step::{Postponed, StepRunner};
use super::support::{check_attention, check_products, check_support};
use super::tiers::{InstanceTiers, LowerTiers, PendingDisk};
use super::worker::Worker;
use crate::env::{SharedEnv, no_thread};
use crate::grammar::Grammars;
use crate::mailbox::{INBOX_MAX, MessageSender, mailbox};
use crate::metrics::Metrics;
use crate::model::apart::AttentionMember;
use crate::model::graph::{Forward, StepShape};
use crate::model::{ModelConfig, Weights};
use crate::pool::{MakeRegion, Pool};
use mixfleet_hal::units::{Seconds, UsdPerHour};
use mixfleet_hal::{BufferUsage, DType, Device, Error, OpSig, Result, Support};
use mixfleet_scheduler::batch::{BatchLimits, Instance as BatchMachine, PageDevices};
use mixfleet_scheduler::cost::{AttnSplit, Coefficients, CostModel, KvCopyCost, Partition};
use mixfleet_scheduler::fleet::{Instance, InstanceId, Role};
use mixfleet_scheduler::kv::CachePolicy;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

mod predicted;

/// Time that an instance may take between two steps, in addition to the steps.
const SILENCE_SPARE: Seconds = Seconds(30.0);

/// Number of micro-batches of a step of prompts over pipeline stages; the step passes all stages before the
/// next one begins. 16 micro-batches keep the pipeline bubble small.
const MICRO_BATCHES: u32 = 16;
/// The least tokens of a micro-batch.
const MICRO_BATCH_MIN: u32 = 16;

/// Limits of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceLimits {
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of the KV.
    pub kv: DType,
    /// Memory for KV, in bytes.
    pub kv_bytes: u64,
    /// Maximum new tokens in a step.
    pub step_tokens_max: u32,
    /// Maximum prompt tokens in a step that also decodes; as many as TBT objectives allow if none.
    pub prefill_tokens_beside_decode_max: Option<u32>,
    /// Maximum concurrent sequences.
    pub sequences_max: u32,
    /// Tokens per KV block; the device's preference if none.
    pub block_tokens: Option<u32>,
}

/// The specification of an instance.
pub struct InstanceSpec {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The model's parameters on the device.
    pub weights: Weights,
    /// The instance's role.
    pub role: Role,
    /// Its rent, if known.
    pub price: Option<UsdPerHour>,
    /// The instance's limits.
    pub limits: InstanceLimits,
}

/// A further device of an instance, with its share of the model.
pub struct MemberSpec {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Its share of the parameters; none if it only attends.
    pub weights: Option<Weights>,
    /// Its memory for KV, in bytes.
    pub kv_bytes: u64,
}

/// A device with the model and its KV memory, or several that divide both, not serving yet.
pub struct Loaded {
    /// The whole model's.
    config: Arc<ModelConfig>,
    spec_device: Arc<dyn Device>,
    forward: Forward,
    others: Option<OtherMembers>,
    /// What each device has of the KV.
    kv_parts: Vec<Option<KvPart>>,
    role: Role,
    price: Option<UsdPerHour>,
    batch: BatchLimits,
    below: Option<Pool>,
    pending_disk: Option<PendingDisk>,
    grammars: Option<Arc<Grammars>>,
}

/// The environment of an instance.
pub(crate) struct Surroundings {
    pub(crate) env: SharedEnv,
    pub(crate) links: Links,
    pub(crate) hand_off: HandOffLimits,
    pub(crate) directory: Directory,
    pub(crate) reports: MessageSender<Report>,
    pub(crate) metrics: Metrics,
}

impl InstanceLimits {
    fn step_shape(&self, blocks: u32, block_tokens: u32) -> StepShape {
        StepShape {
            tokens_max: self.step_tokens_max.max(self.sequences_max),
            sequences_max: self.sequences_max,
            blocks,
            block_tokens,
            activations: self.activations,
            kv: self.kv,
        }
    }
}

/// Number of blocks of this many tokens that fit into a device's KV memory, given the dtype of KV.
fn blocks(
    device: &dyn Device,
    config: &ModelConfig,
    (kv, kv_bytes): (DType, u64),
    block_tokens: u32,
) -> Result<u32> {
    let block_bytes = u64::from(block_tokens) * config.kv_bytes_per_token(kv);
    let slots_max = u32::MAX / block_tokens / config.pages.parts.count();
    let blocks = u32::try_from(kv_bytes / block_bytes.max(1)).unwrap_or(slots_max);
    if blocks == 0 {
        let id = &device.info().id;
        return Err(Error::invalid(format!(
            "{id}: {kv_bytes} bytes of KV memory hold no block of {block_tokens} tokens ({block_bytes} bytes); \
             give it more"
        )));
    }
    Ok(blocks)
}

impl Loaded {
    /// Checks that the device can run the model and allocates KV and activations.
    ///
    /// # Errors
    /// `Unsupported` with the operation, `OutOfMemory`, or `Invalid` for limits that allow no block.
    pub fn new(config: &Arc<ModelConfig>, spec: InstanceSpec) -> Result<Self> {
        let InstanceSpec { device, weights, role, price, limits } = spec;
        let block_tokens = limits.block_tokens.unwrap_or_else(|| device.limits().kv_page_tokens);
        let blocks = blocks(&*device, config, (limits.kv, limits.kv_bytes), block_tokens)?;
        let shape = limits.step_shape(blocks, block_tokens);
        check_products(&*device, config, &weights, &shape)?;
        check_attention(&*device, config, &shape)?;
        let forward = Forward::new(&*device, config.clone(), weights, shape)?;
        Ok(Loaded::of_one(config, (device, forward), (role, price), limits))
    }

    /// A KV node: memory that keeps KV of the model, for which no weights are needed.
    ///
    /// # Errors
    /// As of [`Loaded::new`].
    pub fn keeping(
        config: &Arc<ModelConfig>,
        device: Arc<dyn Device>,
        price: Option<UsdPerHour>,
        limits: InstanceLimits,
    ) -> Result<Self> {
        // all the KV that it keeps is sent
        let config = &Arc::new(config.in_whole_pages());
        let block_tokens = limits.block_tokens.unwrap_or_else(|| device.limits().kv_page_tokens);
        let blocks = blocks(&*device, config, (limits.kv, limits.kv_bytes), block_tokens)?;
        let shape = limits.step_shape(blocks, block_tokens);
        let (tokens, wire, kv) = (1, limits.kv, shape.kv_shape(config));
        check_support(
            &*device,
            &[OpSig::KvGather { tokens, wire, kv }, OpSig::KvScatter { tokens, wire, kv }],
        )?;
        let forward = Forward::keeping(&*device, config.clone(), shape)?;
        Ok(Loaded::of_one(config, (device, forward), (Role::Kv, price), limits))
    }

    /// The cost model of an instance that runs no steps.
    pub fn predicted_idle() -> CostModel {
        CostModel::Coefficients(Coefficients::default())
    }

    /// The same as [`Loaded::new`] for several devices that share the model by `partition`: `spec` has the
    /// first one's weights and KV memory. If each has a part of every block, all have as many as the one with
    /// the least room. The first device may also run attention.
    ///
    /// # Errors
    /// As of [`Loaded::new`], and `Invalid` if the shares do not match the devices.
    #[expect(
        clippy::too_many_lines,
        reason = "the one place where an instance of several devices is put together"
    )]
    pub fn divided(
        config: &Arc<ModelConfig>,
        partition: &Partition,
        spec: InstanceSpec,
        others: Vec<MemberSpec>,
    ) -> Result<Self> {
        let InstanceSpec { device, weights, role, price, limits } = spec;
        let (shares, id) = (partition.shares(), device.info().id.clone());
        let in_whole = partition.stages().len() > 1 || partition.page_holders() > 1;
        let config = &if in_whole { Arc::new(config.in_whole_pages()) } else { config.clone() };
        let members = std::iter::once(&device).chain(others.iter().map(|other| &other.device));
        if let Some(idle) = members.map(|device| device.info()).find(|info| !info.computes()) {
            let id = &idle.id;
            return Err(Error::unsupported(format!(
                "{id} computes nothing, and several devices as one instance need real results of each other; add \
                 ',compute': {id},compute"
            )));
        }
        if shares.len() != 1 + others.len() {
            let devices = 1 + others.len();
            return Err(Error::invalid(format!("{} shares for {devices} devices", shares.len())));
        }
        let block_tokens = limits.block_tokens.unwrap_or_else(|| device.limits().kv_page_tokens);
        let first = MemberSpec { device, weights: Some(weights), kv_bytes: limits.kv_bytes };
        let members: Vec<_> = std::iter::once(first).chain(others).zip(shares).collect();
        let keeping = members.iter().filter(|(_, share)| share.keeps_kv());
        let room = keeping.map(|(member, share)| {
            let kv = (limits.kv, member.kv_bytes);
            blocks(&*member.device, &config.of_member(share), kv, block_tokens)
        });
        let mut rooms = room.collect::<Result<Vec<_>>>()?;
        let holders = partition.page_holders();
        rooms.iter_mut().for_each(|room| *room = (*room).min(u32::MAX / block_tokens / holders));
        let together = partition.split() != Some(AttnSplit::Range);
        let page_devices = match holders {
            1 => PageDevices::ONE,
            count => PageDevices { count, together, rooms: Some(rooms.as_slice().into()) },
        };
        let most = if holders == 1 { rooms.iter().min() } else { rooms.iter().max() };
        // page numbers go up to this, wherever there is room
        let blocks = most.copied().unwrap_or(0) * holders;
        let chunk_tokens = match partition.stages().len() {
            1 => limits.step_tokens_max,
            _ => limits.step_tokens_max.div_ceil(MICRO_BATCHES).max(MICRO_BATCH_MIN),
        };
        // sequences that decode go with a chunk of prompts
        let rows_max = (chunk_tokens + limits.sequences_max).min(limits.step_tokens_max);
        let of_rows = InstanceLimits { step_tokens_max: rows_max, ..limits };
        let shape = of_rows.step_shape(blocks, block_tokens);
        let loaded = members.into_iter().map(|(MemberSpec { device, weights, .. }, share)| {
            let own = config.of_member(share);
            if share.keeps_kv() {
                check_attention(&*device, &own, &shape)?;
            }
            let model = match weights.filter(|_| share.has_weights()) {
                Some(weights) => {
                    check_products(&*device, &own, &weights, &shape)?;
                    let forward = Forward::of_member(&*device, config, share, weights, shape)?;
                    MemberModel::Weights(Box::new(forward))
                }
                None if share.has_weights() => {
                    let id = &device.info().id;
                    return Err(Error::invalid(format!("{id} has no weights of its share of the model")));
                }
                None => {
                    let room = page_devices.room(share.member - 1, shape.blocks);
                    let shape = StepShape { blocks: room, ..shape };
                    let which = (partition, share.member);
                    MemberModel::Kv(Box::new(AttentionMember::new(&*device, config, which, shape)?))
                }
            };
            Ok((device, model))
        });
        let mut loaded = loaded.collect::<Result<Vec<_>>>()?;
        let (device, MemberModel::Weights(forward)) = loaded.remove(0) else {
            return Err(Error::invalid(format!("{id}: the first device must have weights")));
        };
        let first = (&*device, &*forward);
        let others = OtherMembers::open(first, loaded, (config, partition), chunk_tokens)?;
        let kept = (KvPart::of_members(partition), page_devices);
        Ok(Loaded::of_parts(config, (device, *forward), Some(others), kept, (role, price), limits))
    }

    fn of_one(
        config: &Arc<ModelConfig>,
        first: (Arc<dyn Device>, Forward),
        terms: (Role, Option<UsdPerHour>),
        limits: InstanceLimits,
    ) -> Self {
        let kept = (vec![Some(KvPart::whole(config.layers, config.kv_heads))], PageDevices::ONE);
        Loaded::of_parts(config, first, None, kept, terms, limits)
    }

    fn of_parts(
        config: &Arc<ModelConfig>,
        (spec_device, forward): (Arc<dyn Device>, Forward),
        others: Option<OtherMembers>,
        (kv_parts, page_devices): (Vec<Option<KvPart>>, PageDevices),
        (role, price): (Role, Option<UsdPerHour>),
        limits: InstanceLimits,
    ) -> Self {
        let shape = *forward.shape();
        let blocks = page_devices.all(shape.blocks);
        let batch = BatchLimits {
            blocks_total: blocks,
            block_tokens: shape.block_tokens,
            step_tokens_max: limits.step_tokens_max.max(limits.sequences_max),
            prefill_tokens_beside_decode_max: limits.prefill_tokens_beside_decode_max,
            sequences_max: limits.sequences_max as usize,
            spare_blocks: BatchLimits::spare_blocks(blocks, limits.sequences_max as usize),
            lower_tiers: false,
            cache_policy: CachePolicy::Lru,
            page_devices,
            page_parts: config.pages.parts.clone(),
        };
        let config = config.clone();
        Loaded {
            config,
            spec_device,
            forward,
            others,
            kv_parts,
            role,
            price,
            batch,
            below: None,
            pending_disk: None,
            grammars: None,
        }
    }

    /// Adds lower tiers, for KV that the memory of its device or devices evicts: host memory, and a disk.
    ///
    /// # Errors
    /// When they cannot be opened, and `Unsupported` if layers with a window have pages of their own, since
    /// tiers keep whole blocks.
    pub fn with_lower_tiers(mut self, tiers: LowerTiers, make_region: &MakeRegion) -> Result<Self> {
        if self.config.pages.parts.lets_go() {
            let problem = "lower tiers keep KV of all layers, but this instance frees keys outside windows";
            return Err(Error::unsupported(problem));
        }
        self.batch.lower_tiers = true;
        let (pool, pending_disk) = tiers.open((&self.config, self.forward.shape()), make_region)?;
        (self.below, self.pending_disk) = (Some(pool), pending_disk);
        Ok(self)
    }

    /// Compiles the grammars of answers by `grammars`; without it no answer follows one.
    pub fn with_grammars(mut self, grammars: Arc<Grammars>) -> Self {
        self.grammars = Some(grammars);
        self
    }

    /// The lower tiers.
    pub fn pool(&self) -> Option<&Pool> {
        self.below.as_ref()
    }

    /// The devices, in the order of members.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        std::iter::once(&self.spec_device).chain(self.others.iter().flat_map(OtherMembers::devices))
    }

    /// The selectors of all its devices by `of`, after the prefix of the instance's kind.
    fn joined(&self, how: &str, of: fn(&Arc<dyn Device>) -> &str) -> String {
        let words: Vec<&str> = self.devices().map(of).collect();
        match &self.others {
            None => words.concat(),
            Some(others) => others.joined(how, &words),
        }
    }

    /// The selector of its device or devices: `cpu`, `tp:cpu@0,cpu@1`, `pp:cpu@0,cpu@1`, `attn:cpu@0,cpu@1`.
    pub fn id(&self) -> String {
        self.joined("", |device| &device.info().id)
    }

    /// Identifies what measurements apply to, as a device's fingerprint does.
    pub fn fingerprint(&self) -> String {
        let split = self.others.as_ref().and_then(OtherMembers::split);
        let how = split.map_or(String::new(), |split| format!("-{split}"));
        self.joined(&how, |device| &device.info().fingerprint)
    }

    /// Whether all devices but the first one only attend.
    pub fn attends_apart(&self) -> bool {
        self.others.as_ref().is_some_and(|others| others.partition().is_some())
    }

    /// Tokens that fit into the KV memory.
    pub fn kv_capacity_tokens(&self) -> u64 {
        self.batch.kv_tokens()
    }

    /// Maximum new tokens in a step.
    pub fn step_tokens_max(&self) -> u32 {
        self.batch.step_tokens_max
    }

    /// The instance's role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Dtype of the KV.
    pub(super) fn kv_dtype(&self) -> DType {
        self.forward.shape().kv
    }

    /// Whether all of its devices send and take KV of eight bits.
    fn converts_codes(&self) -> bool {
        let kv = self.forward.shape().kv_shape(&self.config);
        let wires = || DType::KV.into_iter().filter(|wire| wire.is_scaled());
        let converts = |device: &Arc<dyn Device>| {
            let moves =
                |wire| [OpSig::KvGather { tokens: 1, wire, kv }, OpSig::KvScatter { tokens: 1, wire, kv }];
            wires().flat_map(moves).all(|sig| device.support(&sig) != Support::No)
        };
        self.devices().all(converts)
    }

    /// Bytes of a KV block, over all devices.
    fn block_bytes(&self) -> u64 {
        let shape = self.forward.shape();
        u64::from(shape.block_tokens) * self.config.kv_bytes_per_token(shape.kv)
    }

    /// The KV of each device that keeps some, with memory for copies of this many bytes.
    fn kv(&self, bytes_max: u64) -> Result<InstanceKv> {
        let whole = (self.forward.shape().kv_shape(&self.config), self.config.pages.clone());
        let others = self.others.iter().flat_map(OtherMembers::kv_pools);
        let pools = std::iter::once(self.forward.kv_pools()).chain(others);
        let parts = self.kv_parts.iter().cloned();
        let devices = self.devices().zip(parts).zip(pools);
        let devices = devices.map(|((device, part), pools)| (device.clone(), part, pools.to_vec()));
        InstanceKv::new(whole, devices.collect(), bytes_max)
    }

    /// The instance as the fleet machine sees it.
    pub(super) fn describe(&self, id: InstanceId, cost: CostModel) -> Instance {
        let kv_copies = match &cost {
            CostModel::Profile(cost) if self.spec_device.limits().copies_beside => {
                KvCopyCost::beside(&cost.profile)
            }
            CostModel::Profile(cost) => KvCopyCost::between(&cost.profile),
            // Calibration measures steps alone.
            _ => KvCopyCost::default(),
        };
        Instance {
            id,
            device: self.id().into(),
            role: self.role,
            pool: 0,
            cost: cost.into(),
            price: self.price,
            nic: None,
            kv_capacity_tokens: self.kv_capacity_tokens(),
            kv_block_tokens: self.batch.block_tokens,
            kv_dtype: self.kv_dtype(),
            prefill_tokens_beside_decode_max: self.batch.prefill_tokens_beside_decode_max,
            step_tokens_max: self.batch.step_tokens_max,
            kv_copies,
            kv_parts: self.batch.page_parts.clone(),
        }
    }

    /// Starts instance `id`: runs what it will serve first, reports that it is up, and works on its own
    /// thread until reports are no longer received.
    ///
    /// # Errors
    /// When the device gives no queue or no staging memory, or is lost.
    pub(crate) fn start(self, id: InstanceId, cost: CostModel, surroundings: &Surroundings) -> Result<()> {
        let Surroundings { env, links, hand_off, directory, reports, metrics } = surroundings;
        let step_timeout = self.step_timeout(&cost);
        // Twice, since a step may have started just before a request's first order came.
        let silence_max = Seconds(2.0 * step_timeout.as_secs_f64()) + SILENCE_SPARE;
        let instance = self.describe(id, cost);
        let cost = instance.cost.clone();
        let codes = self.converts_codes();
        let up = FromWorker::Up { instance: Box::new(instance), kv: self.kv_dtype(), codes, silence_max };
        let own_name = self.id();
        let name = format!("worker {own_name}");
        let block_bytes = self.block_bytes();
        let mut kv = self.kv(hand_off.slot_bytes.max(if self.below.is_some() { block_bytes } else { 0 }))?;
        let Loaded { spec_device: device, forward, others, batch, below, pending_disk, grammars, .. } = self;
        let alone = || vec![LAYERS_IN_FLIGHT];
        let layers = others.as_ref().map_or_else(alone, |others| others.layers_leaving(&forward));
        kv.leaves_in_steps(forward.shape(), &layers)?;
        let pinner = Arc::new(Pinner::new(device.clone()));
        if let (Some(pool), Some(disk)) = (&below, pending_disk) {
            disk.start_disk(pool, &own_name, env);
        }
        let below = below.map(|pool| InstanceTiers::new(own_name, pool, block_bytes, &pinner));
        let courier = Courier::new(links.clone(), *hand_off, pinner.clone());
        let landings = Landings::new(links.clone(), *hand_off, pinner);
        let (orders_sender, orders) = mailbox("orders", INBOX_MAX);
        let (words_sender, words) = mailbox("KV messages", INBOX_MAX);
        let mut worker = Worker {
            id,
            env: env.clone(),
            postponed: Postponed::default(),
            probed: device.alloc(2 * PROBE_BYTES as u64, BufferUsage::Staging)?,
            health: HealthWatch::new(device.info().id.clone(), metrics.clone()),
            steps: StepRunner::new(device, forward, others, step_timeout)?,
            machine: BatchMachine::new(batch.clone()).predicted_by(cost.clone()),
            limits: batch,
            cost,
            up: up.clone(),
            active: HashMap::new(),
            sender: KvSender::new(id, courier, surroundings),
            receiver: KvReceiver::new(id, landings, surroundings),
            kv,
            grammars: GrammarWait::new(grammars),
            below,
            loads: std::collections::VecDeque::new(),
            orders,
            words,
            reports: reports.clone(),
            reported_at: Cell::new(Seconds::ZERO),
            load_reported: Cell::new(None),
            metrics: metrics.clone(),
        };
        worker.warm()?;
        directory.enter(id, Inboxes { orders: Some(orders_sender), words: Some(words_sender) });
        // It is reported up before it works, so that later peers find it. Sending fails only once the worker
        // is no longer needed.
        let _ = reports.send((id, up));
        env.spawn_worker(&name, Box::pin(worker.run())).map_err(no_thread)
    }
}
