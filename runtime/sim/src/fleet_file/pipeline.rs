//! Instances whose devices form pipeline stages.

use super::{Engine, FleetFileError, Model, raw};
use mixfleet_hal::units::{BytesPerSecond, GB};
use mixfleet_scheduler::cost::{CostModel, ModelShape, PipelineCost};
use std::sync::Arc;

/// The file's keys, and the model's shape.
pub(super) struct Pipeline {
    stages: u32,
    chunk_tokens: u32,
    shape: ModelShape,
}

impl raw::RawPool {
    pub(super) fn stages(&self) -> u32 {
        self.pipeline_stages.unwrap_or(1).max(1)
    }

    /// Number of devices of an instance, in all its stages.
    pub(super) fn devices(&self) -> f64 {
        f64::from(self.devices_per_instance) * f64::from(self.stages())
    }
}

/// Checks the keys of a pool. None if it has no stages.
pub(super) fn check(
    pool: &raw::RawPool,
    model: &Model,
    engine: Engine,
) -> Result<Option<Pipeline>, FleetFileError> {
    let wrong =
        |key: &str, cause: String| Err(FleetFileError::value(format!("pool '{}': {key}", pool.name), cause));
    let (stages_key, chunk_key) = ("pipeline_stages", "pipeline_chunk_tokens");
    let Some(stages) = pool.pipeline_stages else {
        return match pool.pipeline_chunk_tokens {
            Some(_) => wrong(chunk_key, format!("needs {stages_key} beside it")),
            None => Ok(None),
        };
    };
    if stages == 0 || stages > model.layers {
        return wrong(
            stages_key,
            format!("is {stages}; the model's {} layers make 1 to as many", model.layers),
        );
    }
    if pool.calibration.is_some() {
        let cause = "cannot be combined with a calibration, which has the times of the whole instance; give one of them";
        return wrong(stages_key, cause.into());
    }
    let Some(shape) = &model.shape else {
        return wrong(
            stages_key,
            format!("is {stages}; without the model's shape a hop's bytes are not known"),
        );
    };
    let chunk_tokens =
        pool.pipeline_chunk_tokens.unwrap_or(PipelineCost::CHUNK_TOKENS.min(engine.max_batched_tokens));
    if chunk_tokens == 0 || chunk_tokens > engine.max_batched_tokens {
        let cause = format!(
            "is {chunk_tokens}; it must be 1 to max_batched_tokens, which is {}",
            engine.max_batched_tokens
        );
        return wrong(chunk_key, cause);
    }
    Ok(Some(Pipeline { stages, chunk_tokens, shape: shape.clone() }))
}

impl Pipeline {
    /// The cost model of an instance, from that of one stage's devices with all layers. Stages are connected
    /// by the network.
    pub(super) fn of(&self, whole: CostModel, basis: &str, nic_gb_per_s: f64) -> (CostModel, String) {
        let &Pipeline { stages, chunk_tokens, ref shape } = self;
        let network = BytesPerSecond(nic_gb_per_s * GB);
        let cost = PipelineCost::of(whole, stages, chunk_tokens, (shape, network));
        (CostModel::Pipeline(Arc::new(cost)), format!("{basis}; {stages} stages in chunks of {chunk_tokens}"))
    }
}
