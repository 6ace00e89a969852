//! Implements `mixfleet models`: the shapes of known models, and whether a checkpoint would be served.

mod check;

use crate::failure::UsageError;
use crate::screen;
use anyhow::Result;
use clap::Args;
use mixfleet_hal::units::GB;
use mixfleet_hal::{DType, StoredAs, WeightFormat};
use mixfleet_runtime::model::families::{FAMILIES, FamilySupport, ModelFamily};
use mixfleet_scheduler::models::{KnownModel, find, models};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    /// Show one model in full
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Report whether a checkpoint directory or GGUF file can be served, and its memory
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    check: Option<PathBuf>,
    /// List families of checkpoints by model_type: served, or which operations are missing
    #[arg(long, conflicts_with_all = ["name", "check"])]
    families: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ModelsArgs) -> Result<()> {
    if let Some(path) = &args.check {
        return check::run(path, args.json);
    }
    if args.families {
        return list_families(args.json);
    }
    let found = args.name.as_deref().map(find).transpose().map_err(|error| UsageError(error.to_string()))?;
    let mut out = screen::output(args.json);
    if args.json {
        let chosen: Vec<Value> = match found {
            Some(model) => vec![document(model)],
            None => models().map(document).collect(),
        };
        writeln!(out, "{:#}", json!({"schema": "mixfleet.models/1", "models": chosen}))?;
        return Ok(());
    }
    match found {
        Some(model) => describe(&mut out, model),
        None => list(&mut out),
    }
}

fn list_families(as_json: bool) -> Result<()> {
    let mut out = screen::output(as_json);
    if as_json {
        let document = |family: &ModelFamily| {
            let support = family.support();
            let of = |read: fn(&FamilySupport) -> Value| support.as_ref().map(read);
            json!({"model_type": family.model_type, "models": family.models, "served": family.missing.is_empty(),
                "missing": family.missing, "gguf": of(|support| json!(support.gguf)),
                "divides": of(|support| support.divides.into()),
                "plug_ins": of(|support| support.plug_ins.into())})
        };
        let all: Vec<Value> = FAMILIES.iter().map(document).collect();
        writeln!(out, "{:#}", json!({"schema": "mixfleet.families/1", "families": all}))?;
        return Ok(());
    }
    let width = FAMILIES.iter().map(|family| family.models.chars().count()).max().unwrap_or(0) + 2;
    for family in FAMILIES {
        let state = match family.missing {
            [] => "served".to_owned(),
            missing => format!("missing: {}", missing.join("; ")),
        };
        writeln!(out, "{:<18}{:<width$}{state}", family.model_type, family.models)?;
    }
    Ok(())
}

/// Prints the support of a checkpoint, in the child that reads it.
pub(crate) fn check(path: &Path, as_json: bool) -> Result<()> {
    check::print(path, as_json)
}

fn list(out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "parameters of matrices; KV in bf16 without regard to windows; weights as stored in the dtype"
    )?;
    writeln!(
        out,
        "{:<24}{:>8}{:>8}{:>10}{:>10}{:>9}{:>9}{:>9}  from config.json of",
        "model", "total B", "active", "KV B/tok", "context", "bf16 GB", "fp8 GB", "int4 GB"
    )?;
    for model in models() {
        let count = model.parameters();
        let gb = |stored| model.weight_bytes(stored).0 / GB;
        writeln!(
            out,
            "{:<24}{:>8.1}{:>8.1}{:>10}{:>10}{:>9.1}{:>9.1}{:>9.1}  {}",
            model.name,
            count.resident() as f64 / 1e9,
            count.active() as f64 / 1e9,
            model.shape(DType::Bf16).kv_bytes_per_token(),
            model.context,
            gb(StoredAs::Plain(DType::Bf16)),
            gb(StoredAs::Quantised(WeightFormat::Fp8)),
            gb(StoredAs::Quantised(WeightFormat::Int4)),
            model.repository
        )?;
    }
    Ok(())
}

fn describe(out: &mut impl Write, model: &KnownModel) -> Result<()> {
    let (count, shape) = (model.parameters(), model.shape(DType::Bf16));
    let billions = |parameters: u64| parameters as f64 / 1e9;
    let mut line = |name: &str, text: String| writeln!(out, "{name:<12}{text}");
    line("model", model.name.into())?;
    line("source", format!("config.json of {}", model.repository))?;
    line(
        "parameters",
        format!(
            "{:.2} B resident, {:.2} B active with embedding and head ({:.2} B); published: {} B, {} B active",
            billions(count.resident()),
            billions(count.active()),
            billions(count.tables),
            model.parameters_b,
            model.active_b
        ),
    )?;
    line("layers", layers(model))?;
    line("attention", attention(model))?;
    line("MLP", mlp(model))?;
    line("vocabulary", format!("{}, hidden {}", model.vocab, model.hidden))?;
    line("context", format!("{} tokens", model.context))?;
    let eight = shape.clone().with_kv(DType::F8E4m3).kv_bytes_per_token();
    line("KV", format!("{} B per token in bf16, {eight} in fp8", shape.kv_bytes_per_token()))?;
    if shape.state_bytes() > 0 {
        let state = shape.state_bytes();
        line("state", format!("{state} B per sequence, of its linear attention in f32"))?;
    }
    for (name, bytes) in weights(model) {
        line("weights", format!("{name:<7}{:>9.2} GB", bytes / GB))?;
    }
    Ok(())
}

fn layers(model: &KnownModel) -> String {
    let shape = model.shape(DType::Bf16);
    let windows = model.windows.map_or_else(String::new, |windows| {
        let limited = shape.windows.iter().flatten().count();
        format!(", {limited} with a window of {} tokens", windows.tokens)
    });
    format!("{}{windows}", model.layers)
}

fn attention(model: &KnownModel) -> String {
    if let Some(latent) = model.latent {
        let queries = if latent.q_rank == 0 {
            "direct queries".into()
        } else {
            format!("query rank {}", latent.q_rank)
        };
        return format!(
            "latent: {} heads, {queries}, KV rank {} and {} rotated, keys of {} and {}, values of {}",
            model.heads, latent.kv_rank, latent.rope, latent.nope, latent.rope, latent.v
        );
    }
    let full = format!("{} heads, {} KV heads of {}", model.heads, model.kv_heads, model.head_dim);
    match model.linear {
        Some(linear) => format!(
            "full in every {}th layer: {full}; else linear: {} key heads of {}, {} value heads of {}",
            linear.period, linear.key_heads, linear.key_dim, linear.value_heads, linear.value_dim
        ),
        None => full,
    }
}

fn mlp(model: &KnownModel) -> String {
    let Some(experts) = model.experts else { return format!("inner length {}", model.intermediate) };
    let shared = match experts.shared {
        0 => String::new(),
        shared => format!(", a shared one of {shared}"),
    };
    let mixed = experts.layers(model.layers);
    let plain = match model.layers - mixed {
        0 => String::new(),
        plain => format!("; {plain} plain layers of {}", model.intermediate),
    };
    format!(
        "{} of {} experts of {}{shared}, in {mixed} layers{plain}",
        experts.active, experts.count, experts.intermediate
    )
}

/// Bytes of the weights in each of the dtypes that are served.
fn weights(model: &KnownModel) -> Vec<(&'static str, f64)> {
    let formats = WeightFormat::ALL.map(StoredAs::Quantised);
    let all = std::iter::once(StoredAs::Plain(DType::Bf16)).chain(formats);
    all.map(|stored| (stored.name(), model.weight_bytes(stored).0)).collect()
}

fn document(model: &KnownModel) -> Value {
    let (count, shape) = (model.parameters(), model.shape(DType::Bf16));
    let weight_bytes: Map<String, Value> =
        weights(model).into_iter().map(|(name, bytes)| (name.into(), json!(bytes))).collect();
    json!({
        "name": model.name,
        "source": format!("config.json of {}", model.repository),
        "published_parameters_b": model.parameters_b,
        "published_active_b": model.active_b,
        "parameters": {
            "resident": count.resident(),
            "active": count.active(),
            "tables": count.tables,
            "routed_experts": count.routed,
        },
        "context": model.context,
        "layers": model.layers,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
        "windows": shape.windows,
        "tied_embeddings": model.tied_embeddings,
        "experts": model.experts,
        "latent": model.latent,
        "linear": model.linear,
        "kv_bytes_per_token": {
            "bf16": shape.kv_bytes_per_token(),
            "fp8": shape.clone().with_kv(DType::F8E4m3).kv_bytes_per_token(),
        },
        "state_bytes_per_sequence": shape.state_bytes(),
        "weight_bytes": weight_bytes,
    })
}
