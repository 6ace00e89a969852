//! Implements `mixfleet generate`.

use crate::args::{DeviceRole, GenerateArgs};
use crate::model::Model;
use crate::start::{self, Choice, Instances};
use crate::{Usage, backends};
use anyhow::{Result, bail};
use mixfleet_hal::cast::to_u32;
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::request::{GenerateRequest, Hints, Sampling, Update};
use mixfleet_scheduler::fleet::Role;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;

pub(crate) fn run(args: GenerateArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(generate(args))
}

fn devices(args: &GenerateArgs) -> Vec<DeviceRole> {
    match (&args.prefill, &args.decode) {
        (Some(prefill), Some(decode)) => DeviceRole::pair(prefill, decode),
        _ if args.device.is_empty() => {
            backends::expand(&DeviceRole { device: "auto".into(), role: Role::Auto })
        }
        _ => args.device.iter().flat_map(backends::expand).collect(),
    }
}

async fn generate(args: GenerateArgs) -> Result<()> {
    let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
    if args.model.model.is_none() {
        eprintln!("no --model: this is a small built-in model with random weights; its text means nothing");
    }
    let model = Model::load(&args.model, &env)?;
    let prompt_ids = prompt_ids(&args, &model)?;
    let config = &model.checkpoint.config;
    let room = config.context_max.saturating_sub(to_u32(prompt_ids.len()));
    if args.max_tokens == 0 || args.max_tokens > room {
        let (tokens, context) = (prompt_ids.len(), config.context_max);
        let message = format!(
            "--max-tokens {}: the prompt has {tokens} tokens and the model's context is {context}",
            args.max_tokens
        );
        return Err(Usage(message).into());
    }
    let choice =
        Choice { instances: Instances::plain(devices(&args)), engine: EngineConfig::default(), events: None };
    let placements = Arc::new(Placements::new(1));
    let engine = start::engine(&model, &args.model, choice, &env, Metrics::new(), placements)?;
    let request = GenerateRequest {
        id: "generate".into(),
        prompt_ids: prompt_ids.clone().into(),
        max_tokens: args.max_tokens,
        eos_ids: if args.ignore_eos { Arc::new([]) } else { config.eos_ids.clone().into() },
        sampling: Sampling { temperature: args.temperature, seed: args.seed, ..Sampling::default() },
        logprobs: None,
        cache_salt: None,
        hints: Hints::default(),
    };
    let energy_before_j = engine.energy_j();
    let start_s = env.now().0;
    let mut updates = engine.handle.submit(request).await?;
    let mut text = model.text.tokenizer.stream();
    let mut printed = String::new();
    let (mut ids, mut placement, mut times_s) = (Vec::new(), None, Vec::new());
    while let Some(update) = updates.recv().await {
        match update {
            Update::Placed { prefill, decode } => {
                placement = Some(json!({"prefill": prefill, "decode": decode}))
            }
            Update::Token { id, .. } => {
                times_s.push(env.now().0);
                ids.push(id);
                print(&args, &mut printed, &text.push(id)?)?;
            }
            Update::Started { .. } => {}
            Update::Finished { .. } => break,
            Update::Failed(failure) => bail!(failure.message),
        }
    }
    print(&args, &mut printed, &text.finish()?)?;
    if args.json {
        let ttft_s = times_s.first().map(|first| first - start_s);
        let gaps = times_s.len().saturating_sub(1);
        let tbt_s = (gaps > 0).then(|| (times_s[gaps] - times_s[0]) / gaps as f64);
        let energy_j = engine.energy_j().zip(energy_before_j).map(|(after, before)| after - before);
        let joules_per_token = energy_j.filter(|_| !ids.is_empty()).map(|joules| joules / ids.len() as f64);
        let document = json!({
            "schema": "mixfleet.generate/1", "prompt_ids": prompt_ids, "ids": ids, "text": printed,
            "placement": placement, "ttft_s": ttft_s, "tbt_s": tbt_s,
            "energy_j": energy_j, "joules_per_token": joules_per_token,
        });
        writeln!(std::io::stdout(), "{document}")?;
    } else {
        writeln!(std::io::stdout())?;
    }
    Ok(())
}

/// Prints text to the terminal as it comes, or collects it for the document at the end.
fn print(args: &GenerateArgs, printed: &mut String, part: &str) -> Result<()> {
    printed.push_str(part);
    if !args.json {
        let mut out = std::io::stdout().lock();
        out.write_all(part.as_bytes())?;
        out.flush()?;
    }
    Ok(())
}

fn prompt_ids(args: &GenerateArgs, model: &Model) -> Result<Vec<u32>> {
    let ids = match &args.prompt {
        Some(text) => model.text.tokenizer.encode(text)?,
        None => args.prompt_ids.clone(),
    };
    if ids.is_empty() {
        return Err(Usage("the prompt has no tokens".into()).into());
    }
    let vocab = model.checkpoint.config.vocab;
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        return Err(Usage(format!("token id {id} is not below the model's vocabulary of {vocab}")).into());
    }
    Ok(ids)
}
