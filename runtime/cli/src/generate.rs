//! Implements `mixfleet generate`.

pub(crate) mod answer;

use crate::args::{DeviceRole, GenerateArgs};
use crate::backends;
use crate::failure::{Failed, UsageError, with_causes};
use crate::model::LoadedModel;
use crate::start::{self, ServingDevices, StartOptions, Started};
use answer::{CollectedAnswer, PromptAnswers};
use anyhow::{Context, Result};
use clap::Parser;
use mixfleet_hal::cast::to_u32;
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{Env, RealEnv, SharedEnv};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::request::{GenerateRequest, Sampling};
use mixfleet_scheduler::fleet::{PartyId, Role};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Time in which a device that works is done with what it was given.
const END_TIME_MAX: Duration = Duration::from_secs(10);

/// Name and version of the document.
const SCHEMA: &str = "mixfleet.generate/1";

pub(crate) fn run(mut args: GenerateArgs) -> Result<()> {
    if let Some(prompt) = args.prompt.as_mut().filter(|prompt| *prompt == "-") {
        *prompt = std::io::read_to_string(std::io::stdin()).context("cannot read the prompt")?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let Some(file) = &args.each else {
            let ready = ReadyModel::new(&args)?;
            let document = ready.generate(&args).await;
            ready.end().await;
            let document = document?;
            print(if args.json { document.to_string() } else { String::new() })?;
            if !args.json {
                eprintln!("{}", in_words(&document));
            }
            return Ok(());
        };
        each(runs(file)?).await
    })
}

/// Arguments of one run, as a line of a file has them.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    args: GenerateArgs,
}

/// The runs of a file, one JSON array of arguments a line. All are checked before the first begins.
fn runs(file: &Path) -> Result<Vec<GenerateArgs>> {
    let name = file.display();
    let text = mixfleet_hal::files::read_text(file).with_context(|| format!("cannot read {name}"))?;
    let parse = |(at, line): (usize, &str)| {
        let wrong = |problem: String| UsageError(format!("{name}, line {}: {problem}", at + 1));
        let words: Vec<String> = serde_json::from_str(line)
            .map_err(|error| wrong(format!("expected a JSON array of arguments: {error}")))?;
        let Line { args } = Line::try_parse_from(words).map_err(|error| wrong(error.to_string()))?;
        if args.each.is_some() {
            return Err(wrong("a run within --each cannot have --each".into()));
        }
        Ok(GenerateArgs { json: true, ..args })
    };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    Ok(lines.map(parse).collect::<Result<_, UsageError>>()?)
}

/// Prints a document for each run as soon as it has ended. Neighbours of one model and placement share an
/// engine, so that the model is loaded once.
async fn each(runs: Vec<GenerateArgs>) -> Result<()> {
    let (count, mut failed) = (runs.len(), 0);
    let mut ready: Option<ReadyModel> = None;
    for args in runs {
        let kept = match ready.take() {
            Some(ready) if !ready.serves(&args) => {
                ready.end().await;
                None
            }
            kept => kept,
        };
        let document = match kept.map_or_else(|| ReadyModel::new(&args), Ok) {
            Ok(engine) => ready.insert(engine).generate(&args).await,
            Err(error) => Err(error),
        };
        let document = document.unwrap_or_else(|error| {
            failed += 1;
            json!({"schema": SCHEMA, "error": with_causes(&error)})
        });
        print(document.to_string())?;
    }
    if let Some(ready) = ready {
        ready.end().await;
    }
    if failed > 0 {
        return Err(Failed(format!("{failed} of {count} runs failed")).into());
    }
    Ok(())
}

/// Number of generated tokens, and their rate.
fn in_words(document: &Value) -> String {
    let tokens = document["ids"].as_array().map_or(0, Vec::len);
    let textless = document["text"].as_str().is_some_and(str::is_empty) && tokens > 0;
    let mut words = format!("{tokens} tokens");
    words += if textless { ", which have no text (--json has their ids)" } else { "" };
    if let Some(ttft_s) = document["ttft_s"].as_f64() {
        words += &format!(", the first after {ttft_s:.3} s");
    }
    if let Some(rate) = document["tokens_per_s"].as_f64() {
        words += &format!(", {rate:.1} tokens/s");
    }
    words
}

fn print(line: String) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
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

/// A model on its devices.
pub(crate) struct ReadyModel {
    /// The arguments that it was made for.
    args: GenerateArgs,
    pub(crate) model: LoadedModel,
    pub(crate) engine: Started,
    pub(crate) env: Arc<RealEnv>,
}

impl ReadyModel {
    fn new(args: &GenerateArgs) -> Result<Self> {
        ReadyModel::checked(args, |model| prompt_ids(args, model).map(drop))
    }

    /// Loads the model, checks a condition on it, and opens its devices.
    pub(crate) fn checked(
        args: &GenerateArgs,
        check: impl FnOnce(&LoadedModel) -> Result<()>,
    ) -> Result<Self> {
        let real = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
        let env: SharedEnv = real.clone();
        if args.model.model.is_none() {
            eprintln!(
                "no --model: this is a small built-in model with random weights; its text means nothing"
            );
        }
        let model = LoadedModel::load(&args.model, &env)?;
        check(&model)?;
        let instances = ServingDevices {
            attn_split: args.attn_split,
            remote: args.remote.clone(),
            ..ServingDevices::plain(devices(args), args.batch)
        };
        let choice =
            StartOptions { instances, engine: EngineConfig::default(), events: None, kv_exchange: None };
        let placements = Arc::new(Placements::new(1));
        let engine = start::engine(&model, &args.model, choice, &env, Metrics::new(), placements)?;
        Ok(ReadyModel { args: args.clone(), model, engine, env: real })
    }

    /// Waits until its devices are free. A device that hangs is left alone.
    pub(crate) async fn end(self) {
        let ReadyModel { model, engine, env, .. } = self;
        drop((model, engine));
        let _ = tokio::time::timeout(END_TIME_MAX, env.workers_ended()).await;
    }

    /// Whether it would be made the same for `args`, with room for at least as many sequences.
    fn serves(&self, args: &GenerateArgs) -> bool {
        let of = |args: &GenerateArgs| {
            let devices = (args.device.clone(), args.prefill.clone(), args.decode.clone());
            (args.model.clone(), devices, args.attn_split, args.remote.clone())
        };
        of(&self.args) == of(args) && args.batch <= self.args.batch
    }

    async fn generate(&self, args: &GenerateArgs) -> Result<Value> {
        let prompt_ids = prompt_ids(args, &self.model)?;
        let config = &self.model.checkpoint.config;
        let request = |copy: u32| GenerateRequest {
            eos_ids: if args.ignore_eos { Arc::new([]) } else { config.eos_ids.clone().into() },
            sampling: Sampling {
                temperature: args.temperature,
                seed: args.seed.wrapping_add(u64::from(copy)),
                ..Sampling::default()
            },
            // copies would share their prompt's KV, which other prompts do not
            cache_salt: (copy > 0).then(|| copy.to_string()),
            party: PartyId::NONE,
            ..GenerateRequest::greedy(format!("generate-{copy}"), prompt_ids.clone(), args.max_tokens)
        };
        let energy_before_j = self.engine.energy_j();
        let start_s = self.env.now().0;
        let mut copies = Vec::new();
        for copy in 0..args.batch {
            let updates = self.engine.handle.submit(request(copy)).await?;
            let shown = copy == 0 && !args.json;
            let answer = CollectedAnswer::new(self.model.text.tokenizer.stream(), shown);
            copies.push(tokio::spawn(answer.collect(updates, self.env.clone())));
        }
        let mut answers = Vec::new();
        for copy in copies {
            answers.push(copy.await??);
        }
        let energy_j = self.engine.energy_j().zip(energy_before_j).map(|(after, before)| after - before);
        let answers = PromptAnswers { answers, start_s, energy_j };
        Ok(answers.document(&prompt_ids))
    }
}

/// The prompt's tokens, for which and for the answer's the model has room.
fn prompt_ids(args: &GenerateArgs, model: &LoadedModel) -> Result<Vec<u32>> {
    let ids = match &args.prompt {
        Some(text) => model.text.tokenizer.encode(text)?,
        None => args.prompt_ids.clone(),
    };
    if ids.is_empty() {
        return Err(UsageError("the prompt has no tokens".into()).into());
    }
    let vocab = model.checkpoint.config.vocab;
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        return Err(
            UsageError(format!("token id {id} is not below the model's vocabulary of {vocab}")).into()
        );
    }
    let context = model.checkpoint.config.context_max;
    if args.max_tokens == 0 || args.max_tokens > context.saturating_sub(to_u32(ids.len())) {
        let (asked, tokens) = (args.max_tokens, ids.len());
        let message = format!(
            "--max-tokens {asked}: the prompt has {tokens} tokens and the model's context is {context}"
        );
        return Err(UsageError(message).into());
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_without_text_are_told_with_how_fast_they_came() {
        let document = json!({"ids": [1, 2, 3], "text": "", "ttft_s": 0.25, "tokens_per_s": 12.34});
        let told =
            "3 tokens, which have no text (--json has their ids), the first after 0.250 s, 12.3 tokens/s";
        assert_eq!(in_words(&document), told);
        assert_eq!(in_words(&json!({"ids": [1], "text": "a", "ttft_s": null})), "1 tokens");
    }
}
