//! Predicts the time of steps and transfers, from numbers alone.

mod calibrated;
mod collective;
mod copies;
mod counted;
mod distinct;
mod engine;
mod knots;
#[cfg(test)]
mod latent_tests;
mod learn;
mod link;
mod lockstep;
mod mixture;
mod offload;
mod operations;
mod parameters;
mod partition;
mod pipeline;
mod profiled;
mod spare;
mod stored;
mod tables;

pub use calibrated::{CalibratedCost, CalibrationRatios, StepCalibration, StepPoint};
pub use collective::{AllReduce, DEVICES_MAX, Fabric, Interconnect};
pub use copies::{KvCopy, KvCopyCost, PIECE_BYTES, PieceCost};
pub use counted::OpCounts;
pub use engine::EngineCost;
pub use learn::{Corrections, DECLARED_WITHIN, MeasuredSteps, PREFILL_SIZES, STEP_SIZES, SizedCorrections};
pub(crate) use learn::{FADES_AFTER, Learner, Overhead};
pub use link::LinkCost;
pub use lockstep::{Attending, LockstepCost};
pub use offload::{AttnBytes, AttnSplit, MemberWork};
pub use parameters::ParameterCount;
pub use partition::{ExpertsBy, MemberShare, Partition};
pub use pipeline::{Pieces, PipelineCost};
pub use profiled::ProfileCost;
pub use spare::{Lending, SpareCost, SpareDevices};
pub use tables::{Grid, StepParts, StepTables};

pub use crate::layers::{EXPANDED_TOKENS, Experts, LatentAttention, LinearAttention, ModelShape, Prefill};

use mixfleet_hal::profile::Predictor;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Predicts the time of prefill and of decode steps on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CostModel {
    /// Computes each operation's time from a device's profile.
    Profile(Box<ProfileCost>),
    /// Uses coefficients fitted to a whole serving engine, which include effects that a profile cannot.
    Coefficients(Coefficients),
    /// Interpolates in tables: those measured of a serving engine, or computed from a profile
    /// ([`CostModel::compiled`]).
    Tables(Arc<StepTables>),
    /// Stages of layers, through which prompts run in chunks.
    Pipeline(Arc<PipelineCost>),
    /// Multiplies another model's times by a factor.
    Scaled(f64, Arc<CostModel>),
    /// Attention on separate devices.
    Lockstep(Arc<LockstepCost>),
    /// Attention of some sequences on devices of other instances.
    Spare(Arc<SpareCost>),
    /// Adjusts another model's times to measured steps.
    Calibrated(Arc<CalibratedCost>),
}

/// Coefficients of prefill and decode time, all in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// Coefficients of a prompt's time.
    pub prefill_s: PrefillCoefficients,
    /// Coefficients of a decode step's time.
    pub decode_s: DecodeCoefficients,
}

/// Prefill of n tokens with p reused takes overhead + per_token (n - p) + per_token_squared (n² - p²).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillCoefficients {
    /// Time per request.
    pub overhead: f64,
    /// Time per computed token.
    pub per_token: f64,
    /// Time per computed pair of tokens, without discount for causality.
    pub per_token_squared: f64,
}

/// A step takes base + per_sequence * batch + per_kv_token * KV tokens of the whole batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeCoefficients {
    /// Time per step.
    pub base: f64,
    /// Time per sequence in the step.
    pub per_sequence: f64,
    /// Time per token of context that the step reads.
    pub per_kv_token: f64,
}

impl CostModel {
    /// Time to compute `new_tokens` of a prompt after `context_before` tokens whose KV is already computed,
    /// alone and in chunks. No tokens take no time.
    pub fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        if new_tokens == 0 {
            return Seconds::ZERO;
        }
        match self {
            CostModel::Profile(cost) => {
                let chunk_tokens = cost.chunk_tokens.max(1);
                let chunk = |done: u32| {
                    let tokens = chunk_tokens.min(new_tokens - done);
                    let last = done + tokens == new_tokens;
                    cost.step_s(&[Prefill { context: context_before + done, tokens, last }], 0, 0)
                };
                (0..new_tokens.div_ceil(chunk_tokens)).map(|index| chunk(index * chunk_tokens)).sum()
            }
            CostModel::Coefficients(cost) => {
                cost.step_s(&[Prefill { context: context_before, tokens: new_tokens, last: true }], 0, 0)
            }
            CostModel::Tables(tables) => tables.prefill_s(context_before, new_tokens),
            CostModel::Pipeline(cost) => cost.prefill_s(context_before, new_tokens),
            CostModel::Scaled(times, cost) => cost.prefill_s(context_before, new_tokens) * *times,
            CostModel::Lockstep(cost) => cost.prefill_s(context_before, new_tokens),
            CostModel::Spare(cost) => cost.prefill_s(context_before, new_tokens),
            CostModel::Calibrated(cost) => cost.prefill_s(context_before, new_tokens),
        }
    }

    /// Time of one decode step of `batch` sequences with `kv_tokens` tokens of context in total. An empty
    /// batch takes no time.
    #[inline]
    pub fn decode_step_s(&self, batch: u32, kv_tokens: u64) -> Seconds {
        match self {
            // A placement evaluates a thousand of these.
            CostModel::Coefficients(cost) if batch > 0 => cost.step_s(&[], batch, kv_tokens),
            _ => self.step_s(&[], batch, kv_tokens),
        }
    }

    /// Time of one mixed step, as in engines with chunked prefill. The rows of all `parts`, and one row of
    /// each of `batch` sequences with `kv_tokens` tokens of context in total, go through the dense operations
    /// together; attention is computed per sequence; the LM head processes the rows that draw a token. Parts
    /// must not be empty; an empty step takes no time.
    pub fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        if parts.is_empty() && batch == 0 {
            return Seconds::ZERO;
        }
        match self {
            CostModel::Profile(cost) => cost.step_s(parts, batch, kv_tokens),
            CostModel::Coefficients(cost) => cost.step_s(parts, batch, kv_tokens),
            CostModel::Tables(tables) => tables.step_s(parts, batch, kv_tokens),
            CostModel::Pipeline(cost) => cost.step_s(parts, batch, kv_tokens),
            CostModel::Scaled(times, cost) => cost.step_s(parts, batch, kv_tokens) * *times,
            CostModel::Lockstep(cost) => cost.step_s(parts, batch, kv_tokens),
            CostModel::Spare(cost) => cost.step_s(parts, batch, kv_tokens),
            CostModel::Calibrated(cost) => cost.step_s(parts, batch, kv_tokens),
        }
    }

    /// The number of micro-batches over which the sequences of a step are to be divided.
    pub fn decode_groups(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> u32 {
        match self {
            CostModel::Pipeline(cost) => cost.groups(parts, batch, kv_tokens),
            CostModel::Lockstep(cost) => cost.groups(parts, batch, kv_tokens),
            CostModel::Scaled(_, cost) => cost.decode_groups(parts, batch, kv_tokens),
            _ => 1,
        }
    }

    /// A model with the same results within 1 %, in tens of nanoseconds: the times of a profile are computed
    /// in advance and stored in tables. The other models are fast as they are.
    pub fn compiled(&self) -> CostModel {
        match self {
            CostModel::Profile(cost) => {
                let predictor = Arc::new(Predictor::new(&cost.profile));
                let tables = Arc::new(ProfileCost::clone(cost)).tables(&predictor);
                CostModel::Tables(Arc::new(tables.computed()))
            }
            CostModel::Pipeline(cost) => {
                let whole = cost.whole.compiled();
                CostModel::Pipeline(Arc::new(PipelineCost { whole, ..PipelineCost::clone(cost) }))
            }
            CostModel::Scaled(times, cost) => CostModel::Scaled(*times, Arc::new(cost.compiled())),
            CostModel::Lockstep(cost) => CostModel::Lockstep(Arc::new(LockstepCost::clone(cost).computed())),
            CostModel::Spare(cost) => CostModel::Spare(Arc::new(SpareCost::clone(cost).computed())),
            CostModel::Calibrated(cost) => CostModel::Calibrated(Arc::new(cost.compiled())),
            other => other.clone(),
        }
    }
}

impl Coefficients {
    /// Time of a mixed step. The weights are read once: `base` overlaps with the arithmetic of prompt tokens,
    /// and the longer of the two counts. `overhead` is paid with a prompt's last chunk, so that the chunks of
    /// a prompt together take the time of the whole.
    #[inline]
    fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let Coefficients { prefill_s: prefill, decode_s: decode } = self;
        let (mut tokens, mut own) = (0.0, 0.0);
        for part in parts {
            let (before, new) = (f64::from(part.context), f64::from(part.tokens));
            let after = before + new;
            tokens += new;
            own += prefill.per_token_squared * (after * after - before * before);
            own += if part.last { prefill.overhead } else { 0.0 };
        }
        let base = if batch == 0 { 0.0 } else { decode.base };
        let sequences = decode.per_sequence * f64::from(batch) + decode.per_kv_token * kv_tokens as f64;
        Seconds(own + sequences + base.max(prefill.per_token * tokens))
    }
}

#[cfg(test)]
mod tests;
