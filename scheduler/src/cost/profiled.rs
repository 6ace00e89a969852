//! Predicts a model's time on a profiled device, operation by operation.

use super::counted::LayerWork;
use super::mixture::{share, share_keys};
use super::stored::{StoredKernels, stored_time};
use super::tables::{Grid, StepParts, StepTables};
use super::{AllReduce, EngineCost, MemberWork, ModelShape, OpCounts, Prefill, knots};
use mixfleet_hal::OpSig;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::{DeviceProfile, Predictor};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A model on a profiled device, or split over several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileCost {
    /// The device's profile.
    pub profile: DeviceProfile,
    /// The model's shape.
    pub shape: ModelShape,
    /// Prompt tokens of one step; longer prompts run in chunks, each of which pays the launch cost and reads
    /// the weights again.
    pub chunk_tokens: u32,
    /// Tensor parallelism: the devices share the model and sum activations twice per layer. Gathering the
    /// logits is not counted. `None` for one device. Where the shape divides whole experts over as many
    /// devices, they exchange rows in their place, and each computes an even share of the rows and of the
    /// attention.
    #[serde(default)]
    pub all_reduce: Option<AllReduce>,
    /// What the engine adds to the kernels.
    #[serde(default)]
    pub engine: EngineCost,
}

/// Sequences in a step up to which tables are made; beyond that times are extrapolated linearly.
const SEQUENCES_MAX: u32 = 1024;
/// Tokens of context up to which tables are made; beyond that times are extrapolated linearly.
const CONTEXT_MAX: u32 = 131_072;

impl ProfileCost {
    /// Time of a mixed step; see [`super::CostModel::step_s`].
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let each = |sig: &OpSig| self.profile.time(sig) + self.launch();
        let shape = self.own_shape();
        let rows = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        let drawn = to_u32(parts.iter().filter(|part| part.last).count()) + batch;
        self.per_step()
            + self.dense_s(&shape, rows, MemberWork::All, &each)
            + self.head_s(&shape, drawn, rows, &each)
            + self.attention_s(&shape, parts, batch, kv_tokens, &each)
    }

    /// What a step takes before its kernels.
    fn per_step(&self) -> Seconds {
        self.profile.launch + Seconds(self.engine.per_step_s)
    }

    /// What an operation takes in a step beyond its kernel.
    fn launch(&self) -> Seconds {
        if self.engine.fused { Seconds::ZERO } else { self.profile.launch_per_command }
    }

    /// Time of what of `work` is done row by row, and of what the devices then exchange.
    fn dense_s(
        &self,
        shape: &ModelShape,
        rows: u32,
        work: MemberWork,
        each: &impl Fn(&OpSig) -> Seconds,
    ) -> Seconds {
        let ops = shape.dense_ops(share(rows, shape.spread()), work, self.engine.fused);
        if work == MemberWork::Attention {
            return self.work_s(&ops, each);
        }
        let [_, mixed] = if rows > 0 { shape.mlp_layers() } else { [0; 2] };
        let routing = Seconds(self.engine.per_expert_layer_s * f64::from(mixed));
        self.work_s(&ops, each) + self.all_reduces(rows) + routing
    }

    fn head_s(
        &self,
        shape: &ModelShape,
        drawn: u32,
        rows: u32,
        each: &impl Fn(&OpSig) -> Seconds,
    ) -> Seconds {
        let spread = shape.spread();
        let host = Seconds(self.engine.per_sequence_s * f64::from(drawn));
        sum(&shape.head_ops(share(drawn, spread), share(rows, spread)), each) + host
    }

    fn attention_s(
        &self,
        shape: &ModelShape,
        parts: &[Prefill],
        batch: u32,
        kv_tokens: u64,
        each: &impl Fn(&OpSig) -> Seconds,
    ) -> Seconds {
        let spread = shape.spread();
        let prompts =
            self.work_s(&shape.attention_ops(parts, 0, 0, self.engine.fused), each) / f64::from(spread);
        let keys = share_keys(kv_tokens, batch, spread);
        let decodes = shape.attention_ops(&[], share(batch, spread), keys, self.engine.fused);
        let lifts = match self.engine.fused {
            true => Seconds::ZERO,
            false if spread == 1 => sum(&shape.lift_ops(parts, batch), each),
            // each device has its part of the rows
            false => {
                let prompts = sum(&shape.lift_ops(parts, 0), each) / f64::from(spread);
                prompts + sum(&shape.lift_ops(&[], share(batch, spread)), each)
            }
        };
        prompts + self.work_s(&decodes, each) + lifts
    }

    fn work_s(&self, work: &LayerWork, each: &impl Fn(&OpSig) -> Seconds) -> Seconds {
        let kernels = match (self.engine.external, self.shape.experts) {
            (false, _) => StoredKernels::AsPlain,
            (true, None) => StoredKernels::OfDense,
            (true, Some(_)) => StoredKernels::OfMixture,
        };
        let stored = |sig: &OpSig| stored_time(&self.profile, self.shape.format, sig, kernels, each);
        sum(&work.plain, each) + sum(&work.stored, stored)
    }

    /// The part of the model on each device.
    fn own_shape(&self) -> ModelShape {
        self.all_reduce.map_or_else(|| self.shape.clone(), |all_reduce| self.shape.split(all_reduce.devices))
    }

    fn all_reduces(&self, rows: u32) -> Seconds {
        self.all_reduce
            .map_or(Seconds::ZERO, |all_reduce| all_reduce.of_step(&self.shape, rows, self.engine.external))
    }

    /// The model's times as tables; see [`super::CostModel::compiled`]. Times of attention are computed on
    /// demand. `predictor` was made of the profile: making one takes as long as the tables of several models.
    pub(crate) fn tables(self: &Arc<Self>, predictor: &Arc<Predictor>) -> StepTables {
        self.tables_of(predictor, MemberWork::All, true)
    }

    /// The same for a part of the work. Attention of prompts is included if `prompts`; attention of decodes
    /// is not among the products, and the LM head is not a part of attention.
    pub(super) fn tables_of(
        self: &Arc<Self>,
        predictor: &Arc<Predictor>,
        work: MemberWork,
        prompts: bool,
    ) -> StepTables {
        let each = |sig: &OpSig| predictor.time(sig) + self.launch();
        let shape = self.own_shape();
        let chunk_tokens = self.chunk_tokens.max(1);
        let dense = |rows: u32| self.dense_s(&shape, rows, work, &each).0;
        let head = |rows: u32| self.head_s(&shape, rows, rows, &each).0;
        let attention = {
            let (cost, predictor, shape) = (self.clone(), predictor.clone(), shape.clone());
            move |parts: &[Prefill], sequences: u32, context: u32| {
                let keys = u64::from(sequences) * u64::from(context);
                let each = |sig: &OpSig| predictor.time(sig) + cost.launch();
                cost.attention_s(&shape, parts, sequences, keys, &each).0
            }
        };
        let decode = {
            let attention = attention.clone();
            move |sequences: u32, context: u32| attention(&[], sequences, context)
        };
        let prefill =
            move |tokens: u32, context: u32| attention(&[Prefill { context, tokens, last: false }], 0, 0);
        let contexts = knots::geometric(CONTEXT_MAX, 4);
        let with_none: Vec<u32> = std::iter::once(0).chain(contexts.iter().copied()).collect();
        StepTables::of(StepParts {
            overhead_s: self.per_step().0,
            dense: knots::adaptive(chunk_tokens.max(SEQUENCES_MAX), dense),
            head: match work {
                MemberWork::Attention => Grid::zero(1),
                _ => knots::adaptive(SEQUENCES_MAX, head),
            },
            prefill: match prompts {
                true => Grid::of_two(knots::geometric(chunk_tokens, 8), with_none, prefill),
                false => Grid::zero(2),
            },
            decode: match work {
                MemberWork::Products => Grid::zero(2),
                _ => Grid::of_two(knots::geometric(SEQUENCES_MAX, 4), contexts, decode),
            },
            mixed: None,
            chunk_tokens,
        })
    }
}

fn sum(ops: &OpCounts, each: impl Fn(&OpSig) -> Seconds) -> Seconds {
    ops.iter().map(|(sig, count)| each(sig) * *count as f64).sum()
}
