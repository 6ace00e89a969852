//! What an instance carries of requests of one size, within objectives: the rates of a plan.
//!
//! Of a request with n uncached tokens of c + n, and m further tokens after its first, at a context of
//! s = c + n + m/2 tokens while it decodes, an instance is busy for
//!
//! ```text
//! prefill    T(c, n)                           where T(c, n) <= TTFT
//! decode     m step(b, b s) / b                for the largest b with b KV(s) in memory and step <= TBT
//! whole      m step(b, b s, b n / m) / b       likewise, with the rows of prompts that b answers call for
//! ```
//!
//! With attention offload the step is that of [`LockstepCost`], and the attention devices' memory holds the
//! KV. Waiting is not counted: an instance that is always busy has an endless queue, so these loads make a
//! lower bound, and a plan divides them by the utilisation that it allows.

use super::layouts::{InstanceLayout, LayoutExperts};
use super::program::Duty;
use crate::cost::{
    AllReduce, Attending, AttnSplit, Coefficients, CostModel, ExpertsBy, LockstepCost, ModelShape, Partition,
    PipelineCost, Prefill, ProfileCost, SpareCost, SpareDevices, StepTables,
};
use crate::engines::KnownEngine;
use crate::models::KnownModel;
use crate::sizing::usable_bytes;
use mixfleet_hal::StoredAs;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::catalog::Part;
use mixfleet_hal::profile::{DeviceProfile, Predictor};
use mixfleet_hal::units::{Bytes, BytesPerSecond, GB, Seconds};
use serde::Serialize;
use std::sync::Arc;

/// Requests of one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RequestSize {
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Share of the prompt's tokens whose KV a cache holds, from 0 to 1.
    pub cached_share: f64,
}

impl RequestSize {
    fn cached(&self) -> u32 {
        to_u32((f64::from(self.input_tokens) * self.cached_share.clamp(0.0, 1.0)).floor())
            .min(self.input_tokens.saturating_sub(1))
    }

    fn uncached(&self) -> u32 {
        self.input_tokens.max(1) - self.cached()
    }

    /// Tokens that decode steps generate: all but the first.
    fn decoded(&self) -> u32 {
        self.output_tokens.saturating_sub(1)
    }

    /// Context in the middle of the answer.
    fn context(&self) -> u32 {
        self.input_tokens.saturating_add(self.decoded() / 2).max(1)
    }
}

/// What requests are meant to get.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ServiceLevel {
    /// Maximum time to the first token.
    pub ttft: Seconds,
    /// Maximum time between tokens.
    pub tbt: Seconds,
}

/// The times of a part's kernels, which instances of any number of devices have in common.
#[derive(Clone, Debug)]
pub struct PartKernels {
    profile: DeviceProfile,
    predictor: Arc<Predictor>,
}

impl PartKernels {
    /// As published kernels or else the datasheet say.
    pub fn of(part: &Part) -> Self {
        let profile = part.best_profile();
        PartKernels { predictor: Arc::new(Predictor::new(&profile)), profile }
    }
}

/// Attention devices of an instance, which keep its KV, beside those with the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct AttendingKind {
    /// Their profile.
    pub profile: DeviceProfile,
    /// Their number.
    pub devices: u32,
    /// Bytes of memory that a byte of KV takes.
    copies: f64,
    /// Whether each has a part of the pages, of all layers.
    pages_divided: bool,
}

/// Devices with the weights: their rates, with any attention devices.
#[derive(Clone, Debug)]
pub struct ProductsKind {
    instance: InstanceKind,
    cost: ProfileCost,
    products: Arc<StepTables>,
}

/// One or several devices with a copy of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceKind {
    /// The profile of the devices with the weights.
    pub profile: DeviceProfile,
    /// Their number, and how they share the model.
    pub layout: InstanceLayout,
    /// The devices that attend, if others do.
    pub attending: Option<AttendingKind>,
    /// Memory for KV on devices of other instances, which attend to it.
    pub borrowed: Bytes,
    /// The time of steps.
    pub cost: CostModel,
    /// The model.
    pub shape: ModelShape,
    /// Memory of its weights.
    pub weights: Bytes,
    /// Maximum sequences in a step.
    pub sequences_max: u32,
    /// Maximum rows in a step.
    pub step_tokens_max: u32,
    /// Whether its engine is external; see [`usable_bytes`].
    pub is_external: bool,
}

/// What an instance carries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Carried {
    /// Instances that one request per second keeps busy.
    pub instances: f64,
    /// Sequences in a step; 1 for prompts alone.
    pub batch: u32,
    /// Time of a prompt alone, or of a step.
    pub latency: Seconds,
}

impl InstanceKind {
    /// Devices of a part that share all layers: one stage of `layout`. Where they divide whole experts,
    /// `expert_skew` is how unlike these are ([`Experts::skew`](crate::cost::Experts::skew)).
    ///
    /// # Errors
    /// Why the model cannot be divided so.
    pub fn of(
        (part, kernels): (&Part, &PartKernels),
        layout: InstanceLayout,
        (model, expert_skew): (&KnownModel, f32),
        stored: StoredAs,
        engine: &KnownEngine,
    ) -> Result<Self, String> {
        let (cost, layout) = stage((part, kernels), layout, (model, expert_skew), stored, engine)?;
        let instance = InstanceKind::with(&cost, layout, model, engine);
        let tables = Arc::new(Arc::new(cost).tables(&kernels.predictor));
        Ok(InstanceKind { cost: CostModel::Tables(tables), ..instance })
    }

    fn with(cost: &ProfileCost, layout: InstanceLayout, model: &KnownModel, engine: &KnownEngine) -> Self {
        InstanceKind {
            profile: cost.profile.clone(),
            layout,
            attending: None,
            borrowed: Bytes(0.0),
            cost: CostModel::Coefficients(Coefficients::default()),
            weights: cost.shape.weight_bytes(model.tied_embeddings),
            shape: cost.shape.clone(),
            sequences_max: engine.sequences,
            step_tokens_max: cost.chunk_tokens,
            is_external: engine.cost.external,
        }
    }

    /// Devices of a part that share all layers and keep a part of the KV; the rest will be on `others`
    /// devices of other instances, over the bandwidth of `network`.
    ///
    /// # Errors
    /// Why the model cannot be divided so.
    pub fn with_others(
        (part, kernels): (&Part, &PartKernels),
        others: &PartKernels,
        layout: InstanceLayout,
        (model, stored): (&KnownModel, StoredAs),
        engine: &KnownEngine,
        network: BytesPerSecond,
    ) -> Result<Self, String> {
        let (cost, layout) = stage((part, kernels), layout, (model, 0.0), stored, engine)?;
        let instance = InstanceKind::with(&cost, layout, model, engine);
        let link = LockstepCost::network(network);
        let by = (&cost, &kernels.predictor);
        let cost = SpareCost::new(by, &others.predictor, link, SpareDevices::default())?;
        Ok(InstanceKind { cost: CostModel::Spare(Arc::new(cost)), ..instance })
    }

    /// The same with devices of other instances that have `room` for its KV, and `tenants` that work there.
    #[must_use]
    pub fn borrowing(&self, devices: u32, tenants: u32, room: Bytes) -> Self {
        let lent = room.0 / (self.room().0 + room.0).max(1.0);
        let cost = self.cost.on_spare(SpareDevices { devices, lent, tenants });
        InstanceKind { cost, borrowed: room, ..self.clone() }
    }

    /// Memory beside the weights, for the KV of each head once.
    pub fn room(&self) -> Bytes {
        let beside = self.memory(&self.profile, self.layout.devices) - self.weights.0;
        Bytes(beside.max(0.0) / self.shape.kv_copies(self.layout.per_stage()))
    }

    /// As many stages of such devices, which send each other activations over `network`.
    pub fn in_stages(mut self, stages: u32, network: BytesPerSecond) -> Self {
        if stages > 1 {
            let chunk_tokens = PipelineCost::CHUNK_TOKENS.min(self.step_tokens_max);
            let cost = PipelineCost::of(self.cost, stages, chunk_tokens, (&self.shape, network));
            self.cost = CostModel::Pipeline(Arc::new(cost));
            self.layout = InstanceLayout { devices: stages * self.layout.devices, stages, ..self.layout };
        }
        self
    }

    /// The same devices, whose steps take `times` as long as predicted.
    pub fn slowed(mut self, times: f64) -> Self {
        self.cost = CostModel::Scaled(times, Arc::new(self.cost));
        self
    }

    /// What an instance carries of requests of one size.
    ///
    /// # Errors
    /// Why it cannot serve them: memory or an objective.
    pub fn carries(&self, duty: Duty, size: &RequestSize, level: &ServiceLevel) -> Result<Carried, String> {
        match duty {
            Duty::Prefill => self.prefills(size, level),
            Duty::Decode => self.steps(size, level.tbt, &|batch| Some(self.decode_s(size, batch))),
            Duty::Whole if size.decoded() == 0 => self.prefills(size, level),
            Duty::Whole => {
                self.prefills(size, level)?;
                self.steps(size, level.tbt, &|batch| self.mixed_s(size, batch))
            }
        }
    }

    /// The share of its time that each remote attention device spends on this instance, while the instance
    /// decodes as many requests of a size as [`InstanceKind::carries`] says.
    pub fn takes_of_others(&self, size: &RequestSize, batch: u32) -> f64 {
        self.cost.spare_share(batch, u64::from(batch) * u64::from(size.context()))
    }

    /// Whether its memory holds a sequence of `tokens` tokens.
    pub fn holds(&self, tokens: u32) -> bool {
        self.sequences(tokens) > 0
    }

    /// The least time to the first token of a request, and the least between its tokens: alone on the
    /// instance, under any objectives.
    ///
    /// # Errors
    /// When memory does not hold it.
    pub fn fastest(&self, size: &RequestSize) -> Result<(Seconds, Seconds), String> {
        let longest = size.input_tokens.saturating_add(size.decoded());
        match self.sequences(longest) {
            0 => Err(self.too_large(longest)),
            _ => Ok((self.cost.prefill_s(size.cached(), size.uncached()), self.decode_s(size, 1))),
        }
    }

    fn prefills(&self, size: &RequestSize, level: &ServiceLevel) -> Result<Carried, String> {
        if self.sequences(size.input_tokens) == 0 {
            return Err(self.too_large(size.input_tokens));
        }
        let latency = self.cost.prefill_s(size.cached(), size.uncached());
        if latency > level.ttft {
            return Err(format!("a prompt takes {:.3} s, and TTFT is {:.3} s", latency.0, level.ttft.0));
        }
        Ok(Carried { instances: latency.0, batch: 1, latency })
    }

    fn decode_s(&self, size: &RequestSize, batch: u32) -> Seconds {
        self.cost.decode_step_s(batch, u64::from(batch) * u64::from(size.context()))
    }

    /// A step of `batch` sequences with the rows of prompts that their answers make room for; `None` if these
    /// are too many. Of less than one row, the step has its share.
    fn mixed_s(&self, size: &RequestSize, batch: u32) -> Option<Seconds> {
        let rows = f64::from(batch) * f64::from(size.uncached()) / f64::from(size.decoded());
        let tokens = to_u32(rows.ceil()).max(1);
        if u64::from(tokens) + u64::from(batch) > u64::from(self.step_tokens_max) {
            return None;
        }
        let (cached, uncached) = (size.cached(), size.uncached());
        let whole = Prefill { context: cached, tokens: uncached, last: true };
        let mut parts = vec![whole; (tokens / uncached) as usize];
        let rest = tokens % uncached;
        if rest > 0 {
            // on average in the middle of its prompt
            parts.push(Prefill { context: cached + (uncached - rest) / 2, tokens: rest, last: false });
        }
        let keys = u64::from(batch) * u64::from(size.context());
        let (alone, mixed) = (self.decode_s(size, batch), self.cost.step_s(&parts, batch, keys));
        Some(alone + (mixed - alone) * (rows / f64::from(tokens)))
    }

    /// The largest batch whose step is in time and whose KV fits beside the weights.
    fn steps(
        &self,
        size: &RequestSize,
        tbt: Seconds,
        step_s: &dyn Fn(u32) -> Option<Seconds>,
    ) -> Result<Carried, String> {
        let longest = size.input_tokens.saturating_add(size.decoded());
        if self.sequences(longest) == 0 {
            return Err(self.too_large(longest));
        }
        largest(size, self.sequences(size.context()), tbt, step_s)
    }

    /// The sequences of a length whose KV fits beside the weights, or where attention is.
    fn sequences(&self, tokens: u32) -> u32 {
        let beside = self.memory(&self.profile, self.layout.devices) - self.weights.0;
        let (room, copies) = match &self.attending {
            // without room for the weights there is none for KV
            Some(_) if beside < 0.0 => (0.0, 1.0),
            Some(others) => (self.memory(&others.profile, others.devices), others.copies),
            None => (beside, self.shape.kv_copies(self.layout.per_stage())),
        };
        let each = self.sequence_bytes(tokens);
        let borrowed = (self.borrowed.0 / each).floor();
        let all = (room / (each * copies)).floor().max(0.0) + borrowed;
        to_u32(to_u64(all).min(self.sequences_max.into()))
    }

    /// Whether its pages hold all layers; pages of pipeline stages and of divided pages do.
    fn has_whole_pages(&self) -> bool {
        self.layout.stages > 1
            || self.borrowed.0 > 0.0
            || self.attending.as_ref().is_some_and(|others| others.pages_divided)
    }

    /// Bytes that are sent to it of a prompt which another instance computed.
    pub(super) fn sent_bytes(&self, tokens: u32) -> f64 {
        let bytes = match self.has_whole_pages() {
            true => u64::from(tokens) * self.shape.kv_bytes_per_token() + self.shape.state_bytes(),
            false => self.shape.sent_bytes(tokens),
        };
        bytes as f64
    }

    /// Bytes that a sequence holds.
    fn sequence_bytes(&self, tokens: u32) -> f64 {
        let bytes = match self.has_whole_pages() {
            true => self.shape.whole_sequence_bytes(tokens),
            false => self.shape.sequence_bytes(tokens),
        };
        bytes as f64
    }

    fn memory(&self, profile: &DeviceProfile, devices: u32) -> f64 {
        usable_bytes(profile.memory, self.is_external) * f64::from(devices)
    }

    fn too_large(&self, tokens: u32) -> String {
        let (memory, weights) = (self.profile.memory.0 / GB, self.weights.0 / GB);
        let devices = self.layout.devices;
        let others = self.attending.as_ref().map_or_else(String::new, |others| {
            format!(" with {} x {:.0} GB for KV", others.devices, others.profile.memory.0 / GB)
        });
        format!(
            "{devices} x {memory:.0} GB{others} do not hold {weights:.0} GB of weights and {tokens} tokens of KV"
        )
    }
}

/// The cost of devices of a part that share all layers, and their layout: one stage of `layout`.
fn stage(
    (part, kernels): (&Part, &PartKernels),
    layout: InstanceLayout,
    (model, expert_skew): (&KnownModel, f32),
    stored: StoredAs,
    engine: &KnownEngine,
) -> Result<(ProfileCost, InstanceLayout), String> {
    let (profile, layout) = (kernels.profile.clone(), layout.stage());
    let devices = layout.devices;
    let plain = model.shape_as(stored).on(&profile);
    let shape = match layout.experts {
        LayoutExperts::Divided(ExpertsBy::Columns) => Some(plain),
        LayoutExperts::Divided(ExpertsBy::Member) => plain.with_experts_by_member(expert_skew),
        LayoutExperts::WithSequences => plain.with_whole_experts(devices),
    };
    let shape = shape.ok_or("the model has no experts")?;
    let all_reduce = match devices {
        1 => None,
        _ => {
            shape.check_split(devices)?;
            let known = AllReduce::of(part, devices);
            Some(known.ok_or_else(|| format!("what {devices} devices need to exchange is unknown"))?)
        }
    };
    let chunk_tokens = engine.step_tokens_on(Some(part), &shape);
    Ok((ProfileCost { profile, shape, chunk_tokens, all_reduce, engine: engine.cost }, layout))
}

impl ProductsKind {
    /// Devices of a part that share all layers and attend to prompts alone.
    ///
    /// # Errors
    /// Why the model cannot be divided so.
    pub fn of(
        (part, kernels): (&Part, &PartKernels),
        layout: InstanceLayout,
        model: &KnownModel,
        stored: StoredAs,
        engine: &KnownEngine,
    ) -> Result<Self, String> {
        let (cost, layout) = stage((part, kernels), layout, (model, 0.0), stored, engine)?;
        let instance = InstanceKind::with(&cost, layout, model, engine);
        let products = LockstepCost::products(&cost, &kernels.predictor, Attending::STAGGERED);
        Ok(ProductsKind { instance, cost, products })
    }

    /// The instance with this many devices of a part that keep its KV and run attention, over the bandwidth
    /// of `network`.
    ///
    /// # Errors
    /// When the model's attention cannot be apart.
    pub fn with(
        &self,
        kernels: &PartKernels,
        devices: u32,
        network: BytesPerSecond,
    ) -> Result<InstanceKind, String> {
        let shape = &self.cost.shape;
        let partition = Partition::attention(shape, devices, AttnSplit::even(shape, devices))?;
        let others = vec![kernels.predictor.clone(); devices as usize];
        let (first, link) = ((&self.cost, self.products.clone()), LockstepCost::network(network));
        let cost = LockstepCost::new(&partition, first, &others, link, Attending::STAGGERED)?;
        let (copies, pages_divided) = (partition.kv_copies(shape), partition.page_holders() > 1);
        let attending =
            Some(AttendingKind { profile: kernels.profile.clone(), devices, copies, pages_divided });
        Ok(InstanceKind { cost: CostModel::Lockstep(Arc::new(cost)), attending, ..self.instance.clone() })
    }
}

/// The load of the largest batch, up to `most`, whose step takes no longer than `tbt`.
fn largest(
    size: &RequestSize,
    most: u32,
    tbt: Seconds,
    step_s: &dyn Fn(u32) -> Option<Seconds>,
) -> Result<Carried, String> {
    let in_time = |batch: u32| step_s(batch).is_some_and(|step| step <= tbt);
    if most == 0 || !in_time(1) {
        let takes =
            step_s(1).map_or("has too many rows of prompts".into(), |s| format!("takes {:.4} s", s.0));
        return Err(format!("a step of one sequence {takes}, and it may take {:.4} s", tbt.0));
    }
    let (mut low, mut high) = (1, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if in_time(middle) { low = middle } else { high = middle - 1 }
    }
    let latency = step_s(low).unwrap_or(tbt);
    let instances = f64::from(size.decoded()) * latency.0 / f64::from(low);
    Ok(Carried { instances, batch: low, latency })
}
