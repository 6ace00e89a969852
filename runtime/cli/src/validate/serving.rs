//! Level 6: a small model with random weights, from prompt to tokens.

use crate::args::{DeviceRole, ModelArgs};
use crate::model::LoadedModel;
use crate::start::{self, ServingDevices, StartOptions};
use anyhow::{Result, bail};
use mixfleet_hal::{DType, Error, ErrorKind};
use mixfleet_hwtests::validate::{CaseResult, CaseStatus};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::request::{GenerateRequest, Update};
use std::sync::Arc;

/// A prompt of several chunks and several pages.
const PROMPT_TOKENS: u32 = 150;
const TOKENS: u32 = 32;

/// Compares the tokens of three placements with those of the CPU alone: all on the device, the prompt on the
/// device and the tokens on the CPU, and the reverse.
pub(super) fn run(device: &str, wanted: &dyn Fn(&str) -> bool, emit: &mut dyn FnMut(CaseResult)) {
    // A device does not hand off to itself.
    let other = if device == "cpu" { "cpu@0" } else { "cpu" };
    let placements = [
        ("l6.serving.alone", device, device),
        ("l6.serving.prefill_here", device, other),
        ("l6.serving.decode_here", other, device),
    ];
    let placements: Vec<_> = placements.into_iter().filter(|(id, ..)| wanted(id)).collect();
    if placements.is_empty() {
        return;
    }
    let expected = tokens("cpu", "cpu");
    for (id, prefill, decode) in placements {
        let result = match (&expected, tokens(prefill, decode)) {
            (Ok(expected), Ok(tokens)) if tokens == *expected => CaseResult::pass(id).fact("tokens", tokens),
            (Ok(expected), Ok(tokens)) => {
                let at = tokens.iter().zip(expected).take_while(|(a, b)| a == b).count();
                let why = format!("from token {at} on the tokens are not those of the CPU alone");
                CaseResult::new(id, CaseStatus::Fail, why).fact("tokens", tokens).fact("expected", expected)
            }
            (Err(error), _) => {
                CaseResult::new(id, CaseStatus::NotRun, format!("the CPU alone does not serve: {error:#}"))
            }
            (_, Err(error)) if is_unsupported(&error) => {
                CaseResult::new(id, CaseStatus::Unsupported, format!("{error:#}"))
            }
            (_, Err(error)) => CaseResult::new(id, CaseStatus::Fail, format!("{error:#}")),
        };
        emit(result);
    }
}

fn is_unsupported(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(|error| error.kind == ErrorKind::Unsupported)
}

/// Greedy tokens of the built-in model in f32, in which rounding differences of devices change no token.
fn tokens(prefill: &str, decode: &str) -> Result<Vec<u32>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
        let args = ModelArgs {
            model: None,
            random_weights: false,
            activations: Some(DType::F32),
            kv_dtype: Some(DType::F32),
            kv_memory: Some(0.02),
            chunk: Some(64),
        };
        let model = LoadedModel::load(&args, &env)?;
        let vocab = model.checkpoint.config.vocab;
        let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|i| (i * 7919 + 11) % vocab).collect();
        let instances = ServingDevices::plain(DeviceRole::pair(prefill, decode), 1);
        let choice =
            StartOptions { instances, engine: EngineConfig::default(), events: None, kv_exchange: None };
        let engine =
            start::engine(&model, &args, choice, &env, Metrics::new(), Arc::new(Placements::new(1)))?;
        let request = GenerateRequest::greedy("validate", prompt, TOKENS);
        let (mut updates, mut ids) = (engine.handle.submit(request).await?, Vec::new());
        while let Some(update) = updates.recv().await {
            match update {
                Update::Token { id, .. } => ids.push(id),
                Update::Failed(failure) => bail!(failure.message),
                Update::Finished { .. } => break,
                Update::Placed { .. } | Update::Started { .. } => {}
            }
        }
        Ok(ids)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_serves_as_itself() {
        let mut results = Vec::new();
        run("cpu", &|id| id != "l6.serving.prefill_here", &mut |result| results.push(result));
        let passed = results.iter().filter(|result| result.status == CaseStatus::Pass).count();
        assert_eq!((results.len(), passed), (2, 2), "{results:?}");
    }
}
