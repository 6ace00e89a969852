//! Instances whose devices form pipeline stages.

use super::{Engine, FleetFileError, Model, raw};
use mixfleet_scheduler::cost::{CostModel, LinkCost, PipelineCost};
use mixfleet_scheduler::fleet::Role;
use std::sync::Arc;

/// Prompt tokens of a chunk: enough rows to keep a device busy, and few enough to have several chunks in
/// flight. For prompts of 32768 tokens and more, on 8 stages of A100s, H100s or L40Ss, 1024 is within 6 % of
/// the best of 512, 1024 and 2048.
const CHUNK_TOKENS: u32 = 1024;

/// The file's keys, and the model's properties.
pub(super) struct Pipeline {
    stages: u32,
    chunk_tokens: u32,
    bytes_per_token: f64,
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
    if pool.role != Role::Prefill || pool.flexible {
        let cause = "needs role = \"prefill\" without flexible: tokens would pass the stages one at a time";
        return wrong(stages_key, cause.into());
    }
    if pool.calibration.is_some() {
        let cause =
            "stands beside a calibration, which tells what the instance takes as it is; give one of them";
        return wrong(stages_key, cause.into());
    }
    let Some(shape) = &model.shape else {
        return wrong(
            stages_key,
            format!("is {stages}; without the model's shape a hop's bytes are not known"),
        );
    };
    let chunk_tokens = pool.pipeline_chunk_tokens.unwrap_or(CHUNK_TOKENS.min(engine.max_batched_tokens));
    if chunk_tokens == 0 || chunk_tokens > engine.max_batched_tokens {
        let cause = format!(
            "is {chunk_tokens}; it must be 1 to max_batched_tokens, which is {}",
            engine.max_batched_tokens
        );
        return wrong(chunk_key, cause);
    }
    let bytes_per_token = f64::from(shape.hidden) * shape.activation.size_bytes() as f64;
    Ok(Some(Pipeline { stages, chunk_tokens, bytes_per_token }))
}

impl Pipeline {
    /// The cost model of an instance, from that of one stage's devices with all layers. Stages are connected
    /// by the network.
    pub(super) fn of(&self, whole: CostModel, basis: &str, nic_gb_per_s: f64) -> (CostModel, String) {
        let &Pipeline { stages, chunk_tokens, bytes_per_token } = self;
        let hop = LinkCost { seconds_per_byte: 1e-9 / nic_gb_per_s, ..LinkCost::default() };
        let cost = PipelineCost { whole, stages, chunk_tokens, hop, bytes_per_token };
        (CostModel::Pipeline(Arc::new(cost)), format!("{basis}; {stages} stages in chunks of {chunk_tokens}"))
    }
}
