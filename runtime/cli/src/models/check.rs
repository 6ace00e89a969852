//! `mixfleet models --check PATH`: whether a checkpoint would be served, and what memory it takes, before it
//! is loaded.

use crate::failure::{Failed, UsageError, with_causes};
use crate::{check_files, hub, model, screen};
use anyhow::{Result, bail};
use mixfleet_hal::units::GB;
use mixfleet_runtime::model::{ChatTemplate, Checkpoint, GenerationDefaults, Tokenizer};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// A part of a checkpoint, and its content or the reason why it is unsupported.
type Finding = (&'static str, Result<String, String>);

/// Checks every part of a checkpoint and reports unsupported ones.
///
/// # Errors
/// `Failed` if something is not, `UsageError` if there is nothing.
pub(super) fn run(path: &Path, as_json: bool) -> Result<()> {
    let located = hub::located(path)?;
    let path = located.path.as_path();
    if let Some(why) = model::misnamed(path) {
        bail!(UsageError(why));
    }
    if let Err(error) = path.metadata() {
        bail!(UsageError(format!("cannot read {}: {error}", path.display())));
    }
    let (text, served) = check_files::report_of(path, as_json)?;
    screen::output(as_json).write_all(text.as_bytes())?;
    if served { Ok(()) } else { Err(not_served(path)) }
}

fn not_served(path: &Path) -> anyhow::Error {
    Failed(format!("{} would not be served", path.display())).into()
}

/// Prints the findings, in the child.
///
/// # Errors
/// As [`run`].
pub(super) fn print(path: &Path, as_json: bool) -> Result<()> {
    let (findings, memory) = findings(path);
    let served = findings.iter().all(|(_, found)| found.is_ok());
    // The parent folds lines at its terminal's width.
    let mut out = screen::output(true);
    if as_json {
        let parts: Vec<Value> = findings.iter().map(|(part, found)| document(part, found)).collect();
        let document = json!({"schema": "mixfleet.model_check/1", "path": path, "served": served,
            "parts": parts, "memory": memory});
        writeln!(out, "{document:#}")?;
    } else {
        for (part, found) in &findings {
            match found {
                Ok(text) => writeln!(out, "{part:<16}{text}")?,
                Err(problem) => writeln!(out, "{part:<16}NOT SUPPORTED: {problem}")?,
            }
        }
    }
    if served { Ok(()) } else { Err(not_served(path)) }
}

fn document(part: &str, found: &Result<String, String>) -> Value {
    match found {
        Ok(text) => json!({"part": part, "supported": true, "found": text}),
        Err(problem) => json!({"part": part, "supported": false, "problem": problem}),
    }
}

/// Tokens in a page, by which memory for expanded keys is rounded up.
const PAGE_TOKENS: u32 = 16;

fn findings(path: &Path) -> (Vec<Finding>, Value) {
    let words = |error: mixfleet_runtime::model::Error| with_causes(&anyhow::Error::from(error));
    let mut findings = Vec::new();
    let mut memory = Value::Null;
    check_files::begin(path, "config.json");
    match Checkpoint::open(path, &mixfleet_cpu::host::Mapper) {
        Ok(checkpoint) => {
            let (config, bytes) = (&checkpoint.config, checkpoint.size_bytes());
            let stored = config.format.map_or(config.dtype.name(), |format| format.name());
            let kv = config.kv_bytes_per_token(config.dtype);
            findings.push((
                "model",
                Ok(format!(
                    "{}, {} layers, hidden {}, {} heads, {} KV heads of {}, vocabulary {}, context {}",
                    config.family,
                    config.layers,
                    config.hidden,
                    config.heads,
                    config.kv_heads,
                    config.head_dim,
                    config.vocab,
                    config.context_max
                )),
            ));
            findings.push(("weights", Ok(format!("{:.3} GB, {stored}", bytes as f64 / GB))));
            let context = kv * u64::from(config.context_max);
            let text = format!(
                "{kv} B per token in {}, {:.3} GB for the whole context",
                config.dtype,
                context as f64 / GB
            );
            findings.push(("KV", Ok(text)));
            if let Some(latent) = config.latent.as_ref().filter(|latent| latent.lengths.expanded_tokens > 0) {
                let (tokens, matrix) =
                    (latent.lengths.expanded_tokens, latent.lengths.key_elements(config.heads));
                let layers = u64::from(config.layers) * matrix * config.dtype.size_bytes();
                let room = config.cost_shape(config.dtype, config.dtype, PAGE_TOKENS).expanded_bytes();
                let text = format!(
                    "keys of up to {tokens} tokens are made of latents, in {:.3} GB, by matrices of {:.3} GB",
                    room as f64 / GB,
                    layers as f64 / GB
                );
                findings.push(("prompts", Ok(text)));
            }
            memory = json!({"weight_bytes": bytes, "kv_bytes_per_token": kv, "context": config.context_max,
                "stored": stored, "activations": config.dtype});
        }
        Err(error) => findings.push(("weights", Err(words(error)))),
    }
    check_files::begin(path, "tokenizer.json");
    let tokenizer = Tokenizer::open(path);
    findings.push(("tokenizer", tokenizer.map(|t| format!("{} tokens", t.vocab())).map_err(words)));
    let tried = check_files::try_template(path);
    let template = ChatTemplate::open(path);
    let template =
        template.map(|t| t.map_or("none: it completes text but does not chat", |_| "there is one"));
    let template = template.map(str::to_owned).map_err(words);
    findings.push(("chat template", tried.map_err(|error| error.to_string()).and(template)));
    check_files::begin(path, "generation_config.json");
    let sampling = GenerationDefaults::open(path);
    findings.push(("sampling", sampling.map(|_| "understood".to_owned()).map_err(words)));
    (findings, memory)
}
