//! Implements `mixfleet fit`: which models a device holds, in which formats, and their predicted speed.

use crate::failure::UsageError;
use crate::{backends, model_shape, profile, profiles, screen};
use anyhow::{Result, bail};
use clap::Args;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::catalog::{self, Part, is_claim, part_of_driver};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{GB, Seconds};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::cost::{CostModel, EngineCost, ProfileCost};
use mixfleet_scheduler::engines;
use mixfleet_scheduler::models::models;
use mixfleet_scheduler::sizing::MEMORY_SHARE;
use model_shape::SizedModel;
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// Number of concurrent sequences in the second column of speeds.
const TOGETHER: u32 = 8;
/// Names in a line of models that do not fit.
const NAMES_PER_LINE: usize = 4;

#[derive(Debug, Args)]
pub(crate) struct FitArgs {
    /// Known models (llama-3.1-8b), checkpoint directories or GGUF files [default: all known models]
    #[arg(value_name = "MODEL|PATH")]
    models: Vec<String>,
    /// A device of this machine, a part of the catalog, or a profile's file [default: the first device that
    /// would serve]
    #[arg(long, value_name = "DEV|PART|FILE")]
    device: Option<String>,
    /// Formats of the weights of known models
    #[arg(long, value_name = "DTYPES", value_delimiter = ',', default_values = ["bf16", "fp8", "int4"])]
    dtype: Vec<StoredAs>,
    /// Context of each sequence while it decodes
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = crate::numbers::count::<u32>(1..=1 << 20))]
    context: u32,
    /// Length of the prompt whose rate is shown
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = crate::numbers::count::<u32>(1..=1 << 20))]
    prompt: u32,
    /// Measure the device again, though an earlier run kept its measurements
    #[arg(long)]
    again: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The device whose memory models must fit.
struct FittedDevice {
    name: String,
    part: Option<&'static Part>,
    profile: DeviceProfile,
    /// The source of the device's times, for display.
    basis: String,
}

/// A model in a format that fits.
#[derive(Serialize)]
struct FittingModel {
    model: String,
    weights: String,
    weight_bytes: f64,
    /// Predicted tokens a second of one sequence.
    decode_tokens_per_s: f64,
    /// Predicted tokens a second of eight concurrent sequences in total; none if their KV does not fit.
    decode_8_tokens_per_s: Option<f64>,
    /// Predicted tokens a second of a prompt.
    prefill_tokens_per_s: f64,
    /// Tokens of KV that fit beside the weights.
    kv_tokens: u64,
    /// Maximum length of a sequence.
    context_max: u32,
    /// Likely relative error of the times; none if unknown.
    error: Option<f64>,
}

/// A model that fits in none of the requested formats.
#[derive(Serialize)]
struct OversizedModel {
    model: String,
    /// Size in the smallest format.
    weights: String,
    weight_bytes: f64,
}

pub(crate) fn run(args: &FitArgs) -> Result<()> {
    // names are checked before a device is measured
    let subjects = subjects(args)?;
    let device = device(args)?;
    let mut fitting = Vec::new();
    let mut oversized = Vec::new();
    for forms in subjects {
        let Some(first) = forms.first() else { continue };
        let wide = model_shape::of(&first.name, Some(StoredAs::Plain(DType::Bf16)))?;
        let fits: Vec<FittingModel> =
            forms.iter().filter_map(|form| fit(form, &wide, &device, args)).collect();
        if fits.is_empty() {
            let least = forms.iter().min_by(|a, b| a.weight_bytes().total_cmp(&b.weight_bytes()));
            oversized.extend(least.map(|form| OversizedModel {
                model: form.name.clone(),
                weights: form.shape.stored().to_string(),
                weight_bytes: form.weight_bytes(),
            }));
        }
        fitting.extend(fits);
    }
    let mut out = screen::output(args.json);
    if args.json {
        let document = serde_json::json!({"schema": "mixfleet.fit/1", "device": device.name, "basis": device.basis,
            "memory_bytes": device.profile.memory.0, "memory_share": MEMORY_SHARE, "context_tokens": args.context,
            "prompt_tokens": args.prompt, "fits": fitting, "too_large": oversized});
        writeln!(out, "{document:#}")?;
        return Ok(());
    }
    write_table(&mut out, &device, &fitting, args)?;
    write_oversized(&mut out, &oversized)
}

/// The named device, or the first that would serve.
fn device(args: &FitArgs) -> Result<FittedDevice> {
    let selector = match &args.device {
        Some(named) => named.clone(),
        None => backends::first_selector()?,
    };
    let is_other = Path::new(&selector).is_file() || backends::is_named(&selector);
    let part = match catalog::named(&selector) {
        Err(why) if !is_other => bail!(UsageError(format!("no device or file is called so, and {why}"))),
        found => found.ok().filter(|part| !is_other || part.id.eq_ignore_ascii_case(&selector)),
    };
    if let Some(part) = part {
        let basis = match part.reached_profile() {
            Some(_) => "published kernel times of the part, or of its nearest relatives",
            None => "the datasheet, of which kernels reach 40 to 95 %",
        };
        let (name, mut profile) = (part.id.to_owned(), part.best_profile());
        let driver = backends::memory_of(part);
        profile.memory = driver.unwrap_or(profile.memory);
        let memory = if driver.is_some() { "; memory as the driver of this machine has it" } else { "" };
        let basis = format!("{basis}{memory}");
        return Ok(FittedDevice { name, part: Some(part), profile, basis });
    }
    if Path::new(&selector).is_file() {
        let profile = profiles::read(Path::new(&selector))?;
        let name = if profile.name.is_empty() { selector.clone() } else { profile.name.clone() };
        let (part, basis) = (part_of_driver(&name), format!("the profile {selector}"));
        return Ok(FittedDevice { name, part, profile, basis });
    }
    let device = backends::open(&selector)?;
    let kept = profile::brief(&*device, args.again)?;
    let basis = format!("a brief profile of this device ({}; --again measures anew)", kept.measured_on);
    let name = format!("{selector} ({})", device.info().name);
    let part = part_of_driver(&device.info().name);
    Ok(FittedDevice { name, part, profile: kept.profile, basis })
}

/// The named models, or all that this runtime serves, each in its formats.
fn subjects(args: &FitArgs) -> Result<Vec<Vec<SizedModel>>> {
    let forms = |name: &str| -> Result<Vec<SizedModel>> {
        if model_shape::is_checkpoint(Path::new(name)) {
            return Ok(vec![model_shape::of(name, None)?]);
        }
        args.dtype.iter().map(|stored| model_shape::of(name, Some(*stored))).collect()
    };
    if args.models.is_empty() {
        let mut served: Vec<_> = models().filter(|model| model.unserved().is_none()).collect();
        served.sort_by_key(|model| model.parameters().resident());
        return served.into_iter().map(|model| forms(model.name)).collect();
    }
    args.models.iter().map(|name| forms(name)).collect()
}

/// The times of a model on a device with this profile.
fn cost_of(model: &SizedModel, device: &FittedDevice, profile: &DeviceProfile) -> CostModel {
    let ours = engines::find("mixfleet").expect("the engine of this runtime");
    let shape = model.shape.on(profile);
    CostModel::Profile(Box::new(ProfileCost {
        profile: profile.clone(),
        chunk_tokens: ours.step_tokens_on(device.part, &shape),
        shape,
        all_reduce: None,
        engine: EngineCost::OURS,
    }))
}

/// The share of launches in a decode step of one sequence, if they are assumed: the catalog has one cost of
/// them for all parts. It is large in the steps of small models.
fn assumed_share(model: &SizedModel, device: &FittedDevice, sequence: u32) -> f64 {
    if !is_claim(&device.profile) {
        return 0.0;
    }
    let step_s =
        |profile: &DeviceProfile| cost_of(model, device, profile).decode_step_s(1, sequence.into()).0;
    let zero = Seconds::ZERO;
    let bare = DeviceProfile { launch: zero, launch_per_command: zero, ..device.profile.clone() };
    1.0 - step_s(&bare) / step_s(&device.profile)
}

/// Predicts the model on the device, if its weights and the KV of one sequence fit.
///
/// Kernel times of a narrow format may be borrowed from larger shapes, which reach more of the bandwidth.
/// Relative to `wide`, the model in bf16, it therefore gains no more than the bytes that it does not read.
fn fit(model: &SizedModel, wide: &SizedModel, device: &FittedDevice, args: &FitArgs) -> Option<FittingModel> {
    let sequence = args.context.min(model.context_max);
    let prompt = args.prompt.min(sequence);
    let kv_per_token = model.shape.kv_bytes_per_token() as f64;
    let room = device.profile.memory.0 * MEMORY_SHARE - model.weight_bytes();
    let kv_tokens = (room / kv_per_token).floor();
    if kv_tokens < f64::from(sequence) {
        return None;
    }
    let ours = engines::find("mixfleet").expect("the engine of this runtime");
    let [cost, cost_of_wide] = [model, wide].map(|model| cost_of(model, device, &device.profile));
    let fewer = (model.step_bytes() / wide.step_bytes()).min(1.0);
    let decode = |batch: u32| {
        let step_s = |cost: &CostModel| cost.decode_step_s(batch, u64::from(batch * sequence)).0;
        f64::from(batch) / step_s(&cost).max(step_s(&cost_of_wide) * fewer)
    };
    let error = ours.likely_error(&device.profile, &model.shape);
    let together = kv_tokens >= f64::from(TOGETHER) * f64::from(sequence);
    Some(FittingModel {
        model: model.name.clone(),
        weights: model.shape.stored().to_string(),
        weight_bytes: model.weight_bytes(),
        decode_tokens_per_s: decode(1),
        decode_8_tokens_per_s: together.then(|| decode(TOGETHER)),
        prefill_tokens_per_s: f64::from(prompt) / cost.prefill_s(0, prompt).0,
        kv_tokens: to_u64(kv_tokens),
        context_max: model.context_max,
        error: error.map(|kernels| kernels.hypot(assumed_share(model, device, sequence))),
    })
}

fn write_table(
    out: &mut impl Write,
    device: &FittedDevice,
    fitting: &[FittingModel],
    args: &FitArgs,
) -> Result<()> {
    let (memory, share) = (device.profile.memory.0 / GB, MEMORY_SHARE * 100.0);
    writeln!(out, "{}: {memory:.1} GB, of which {share:.0} % for weights and KV", device.name)?;
    writeln!(out, "predicted from {}", device.basis)?;
    if fitting.is_empty() {
        writeln!(out, "no model fits")?;
        return Ok(());
    }
    let (context, prompt) = (args.context, args.prompt);
    writeln!(
        out,
        "decoding at {context} tokens of context, alone and {TOGETHER} at once; prompts of {prompt} tokens\n"
    )?;
    let width = fitting.iter().map(|row| row.model.len()).max().unwrap_or(0).max("model".len());
    writeln!(
        out,
        "{:<width$}  {:<6}{:>8}{:>13}{:>10}{:>14}{:>8}{:>11}",
        "model", "stored", "GB", "alone tok/s", "8 tok/s", "prompt tok/s", "error", "KV tokens"
    )?;
    let mut last = "";
    for row in fitting {
        let name = if row.model == last { "" } else { row.model.as_str() };
        last = &row.model;
        let whole = row.kv_tokens >= u64::from(row.context_max);
        writeln!(
            out,
            "{name:<width$}  {:<6}{:>8.1}{:>13}{:>10}{:>14}{:>8}{:>11}{}",
            row.weights,
            row.weight_bytes / GB,
            rate(row.decode_tokens_per_s),
            row.decode_8_tokens_per_s.map_or_else(|| "-".into(), rate),
            rate(row.prefill_tokens_per_s),
            row.error.map_or_else(|| "?".into(), |error| format!("{:.0} %", 100.0 * error)),
            row.kv_tokens,
            if whole { "" } else { " (< context)" }
        )?;
    }
    Ok(())
}

/// Formats a rate with about three digits.
fn rate(per_s: f64) -> String {
    let decimals = if per_s < 10.0 {
        2
    } else if per_s < 100.0 {
        1
    } else {
        0
    };
    format!("{per_s:.decimals$}")
}

fn write_oversized(out: &mut impl Write, oversized: &[OversizedModel]) -> Result<()> {
    if oversized.is_empty() {
        return Ok(());
    }
    writeln!(out, "\ntoo large, with the smallest format's GB:")?;
    let named = |one: &OversizedModel| format!("{} ({:.0})", one.model, one.weight_bytes / GB);
    for line in oversized.chunks(NAMES_PER_LINE) {
        writeln!(out, "  {}", line.iter().map(named).collect::<Vec<_>>().join(", "))?;
    }
    Ok(())
}
