//! What an instance carries of requests of one size, within objectives: the rates of a plan.
//!
//! Of a request with n uncached tokens of c + n, and m further tokens after its first, at a context of
//! s = c + n + m/2 tokens while it decodes, an instance is busy for
//!
//! ```text
//! prefill    T(c, n)                           where T(c, n) <= TTFT
//! decode     m step(b, b s) / b                for the largest b with b KV(s) in memory and step <= TBT
//! whole      m step(b, b s, b n / m) / b       likewise, with the rows of prompts that b answers call for
//! linear     m step(b) / b                     without attention, for the largest b with step <= TBT / 2
//! attention  m attention(b, b s) / b           on a device without weights, likewise
//! ```
//!
//! With attention elsewhere two batches take turns, so that a step has half the time between tokens, and so
//! do the activations that cross: `layers x round trip + b x (2 heads + 2 KV heads) x head x bytes /
//! bandwidth` (Lamina, arXiv 2405.01814). Waiting is not counted: an instance that is always busy has a queue
//! without end, so these loads make a lower bound, and a plan divides them by the utilisation that it allows.

use super::apart::{PartRates, TokenWork};
use super::layouts::InstanceLayout;
use super::program::Duty;
use crate::cost::{AllReduce, CostModel, ModelShape, PipelineCost, Prefill, ProfileCost};
use crate::engines::KnownEngine;
use crate::models::KnownModel;
use crate::sizing::MEMORY_SHARE;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::catalog::Part;
use mixfleet_hal::profile::{DeviceProfile, Predictor};
use mixfleet_hal::units::{Bytes, BytesPerSecond, Flop, GB, Seconds};
use mixfleet_hal::{OpSig, StoredAs};
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

/// The network between devices for attention and those for the rest of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AttentionLink {
    /// Time of a message there and back.
    pub round_trip: Seconds,
    /// Bandwidth of one instance.
    pub bandwidth: BytesPerSecond,
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
        let profile = part.reached_profile().unwrap_or_else(|| part.profile());
        PartKernels { predictor: Arc::new(Predictor::new(&profile)), profile }
    }
}

/// One or several devices with a copy of a model, or, for attention alone, with KV and no weights.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceKind {
    /// The devices' profile.
    pub profile: DeviceProfile,
    /// Their number, and how they share the model.
    pub layout: InstanceLayout,
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
    /// Devices of a part that share all layers: one stage of `layout`.
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
        let (profile, layout) = (kernels.profile.clone(), layout.stage());
        let devices = layout.devices;
        let plain = model.shape_as(stored).on(&profile);
        let shape = match layout.expert_parallel {
            true => plain.with_whole_experts(devices).ok_or("the model has no experts")?,
            false => plain,
        };
        let all_reduce = match devices {
            1 => None,
            _ => {
                shape.check_split(devices)?;
                let known = AllReduce::of(part, devices);
                Some(known.ok_or_else(|| format!("what {devices} devices exchange takes is not known"))?)
            }
        };
        let cost = ProfileCost {
            profile: profile.clone(),
            shape: shape.clone(),
            chunk_tokens: engine.step_tokens,
            all_reduce,
            engine: engine.cost,
        };
        Ok(InstanceKind {
            profile,
            layout,
            cost: CostModel::Tables(Arc::new(Arc::new(cost).tables(&kernels.predictor))),
            weights: shape.weight_bytes(model.tied_embeddings),
            shape,
            sequences_max: engine.sequences,
            step_tokens_max: engine.step_tokens,
        })
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

    /// What an instance carries of requests of one size. `link` is between attention and the rest, where they
    /// are apart.
    ///
    /// # Errors
    /// Why it cannot serve them: memory, an objective, or a link that is missing.
    pub fn carries(
        &self,
        duty: Duty,
        size: &RequestSize,
        level: &ServiceLevel,
        link: Option<&AttentionLink>,
    ) -> Result<Carried, String> {
        match duty {
            Duty::Prefill => self.prefills(size, level),
            Duty::Decode => self.steps(size, level.tbt, &|batch| Some(self.decode_s(size, batch))),
            Duty::Whole if size.decoded() == 0 => self.prefills(size, level),
            Duty::Whole => {
                self.prefills(size, level)?;
                self.steps(size, level.tbt, &|batch| self.mixed_s(size, batch))
            }
            Duty::Linear | Duty::Attention => {
                let link = link.ok_or("no link between attention and the rest is given")?;
                self.apart(duty, size, level.tbt * 0.5, link)
            }
        }
    }

    /// Whether its memory holds a sequence of `tokens` tokens.
    pub fn holds(&self, tokens: u32) -> bool {
        self.sequences(tokens, self.weights) > 0
    }

    /// The least time to the first token of a request, and the least between its tokens: alone, whatever the
    /// objectives.
    ///
    /// # Errors
    /// When memory does not hold it.
    pub fn fastest(&self, size: &RequestSize) -> Result<(Seconds, Seconds), String> {
        let longest = size.input_tokens.saturating_add(size.decoded());
        match self.sequences(longest, self.weights) {
            0 => Err(self.too_large(longest)),
            _ => Ok((self.cost.prefill_s(size.cached(), size.uncached()), self.decode_s(size, 1))),
        }
    }

    fn prefills(&self, size: &RequestSize, level: &ServiceLevel) -> Result<Carried, String> {
        if self.sequences(size.input_tokens, self.weights) == 0 {
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
        if self.sequences(longest, self.weights) == 0 {
            return Err(self.too_large(longest));
        }
        largest(size, self.sequences(size.context(), self.weights), tbt, step_s)
    }

    fn apart(
        &self,
        duty: Duty,
        size: &RequestSize,
        turn: Seconds,
        link: &AttentionLink,
    ) -> Result<Carried, String> {
        let shape = &self.shape;
        let elements = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let row = f64::from(elements) * shape.activation.size_bytes() as f64 * f64::from(shape.layers());
        let network = |batch: u32| {
            link.round_trip * f64::from(shape.layers()) + Bytes(row * f64::from(batch)) / link.bandwidth
        };
        if duty == Duty::Linear {
            let room = self.profile.memory.0 * f64::from(self.layout.devices) * MEMORY_SHARE;
            if room < self.weights.0 {
                return Err(self.too_large(1));
            }
            let step = |batch: u32| self.cost.decode_step_s(batch, batch.into()).max(network(batch));
            return largest(size, self.sequences_max, turn, &|batch| Some(step(batch)));
        }
        let context = size.context();
        let attention = |batch: u32| -> Vec<(OpSig, u64)> {
            let ops = shape.decode_ops(batch, u64::from(batch) * u64::from(context));
            ops.into_iter().filter(|(sig, _)| matches!(sig, OpSig::AttnDecode { .. })).collect()
        };
        let work = TokenWork {
            attention: Flop(attention(1).iter().map(|(sig, count)| sig.flops() * *count as f64).sum()),
            kv: Bytes(shape.sequence_bytes(context) as f64),
            projections: Flop(0.0),
            feed_forward: Flop(0.0),
        };
        let rate = self.profile.compute.iter().find(|(dtype, _)| *dtype == shape.activation);
        let rates = rate.map(|(_, flop)| PartRates { flop: *flop, bytes: self.profile.bandwidth });
        if rates.is_none_or(|rates| work.is_bound_by_arithmetic(&rates)) {
            return Err("arithmetic and not bandwidth limits this model's attention here".into());
        }
        // devices for attention exchange nothing among each other, so that several are as good as one each
        let step = |batch: u32| {
            let each = batch.div_ceil(self.layout.devices);
            let times =
                attention(each).into_iter().map(|(sig, count)| self.profile.time(&sig) * count as f64);
            (self.profile.launch * f64::from(shape.layers()) + times.sum()).max(network(batch))
        };
        largest(size, self.sequences(context, Bytes::ZERO), turn, &|batch| Some(step(batch)))
    }

    /// The sequences of a length whose KV fits beside `weights`.
    fn sequences(&self, tokens: u32, weights: Bytes) -> u32 {
        let room = self.profile.memory.0 * f64::from(self.layout.devices) * MEMORY_SHARE - weights.0;
        let copies = if weights == Bytes::ZERO { 1.0 } else { self.shape.kv_copies(self.layout.per_stage()) };
        let each = self.shape.sequence_bytes(tokens) as f64 * copies;
        to_u32(to_u64((room / each).floor().max(0.0)).min(self.sequences_max.into()))
    }

    fn too_large(&self, tokens: u32) -> String {
        let (memory, weights) = (self.profile.memory.0 / GB, self.weights.0 / GB);
        let devices = self.layout.devices;
        format!("{devices} x {memory:.0} GB do not hold {weights:.0} GB of weights and {tokens} tokens of KV")
    }
}

/// What is carried in the largest batch, up to `most`, whose step takes no longer than `tbt`.
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
