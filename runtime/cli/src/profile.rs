//! Implements `mixfleet profile` and its subcommands.

mod check;
mod import;
mod links;
mod show;

use crate::failure::{Failed, UsageError};
use crate::interrupt::cancel_on_interrupt;
use crate::numbers::USD_PER_HOUR_MIN;
use crate::output_files::writable;
use crate::screen;
use crate::{backends, cache, machine};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hal::catalog::closest_names;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::{Device, DeviceKind, OpSig, cast};
use mixfleet_hwtests::profile::compare::Comparison;
use mixfleet_hwtests::profile::{
    PointGroup, PointResult, PointStatus, ProfileDocument, ProfileLevel, ProfileOptions, ProfileProgress,
    page, run as measure,
};
use mixfleet_report::files::write_whole;
use mixfleet_runtime::model::ModelConfig;
use serde::{Deserialize, Serialize};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// The page size with which names of points are looked up; no name depends on it.
const PAGE_TOKENS: u32 = 16;

/// Time limit of a brief profile in seconds.
const BRIEF_S: f64 = 20.0;
/// What a brief profile measures.
const BRIEF_GROUPS: [PointGroup; 5] =
    [PointGroup::Launch, PointGroup::Memory, PointGroup::Gemm, PointGroup::Decode, PointGroup::Prefill];
/// Products and attention steps in a brief profile.
const BRIEF_POINTS: usize = 24;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ProfileArgs {
    #[command(subcommand)]
    command: Option<ProfileCommand>,
    #[command(flatten)]
    measure: MeasureArgs,
}

#[derive(Debug, Subcommand)]
enum ProfileCommand {
    /// Compare two profiles point by point, accounting for noise
    Compare(ProfileCompareArgs),
    /// Turn published tables of kernel times into a profile
    Import(import::ImportArgs),
    /// Show the card of a profile that was measured before
    Show(show::ShowArgs),
    /// Check a profile's file against its schema
    Check(check::CheckArgs),
}

#[derive(Debug, Args)]
struct MeasureArgs {
    /// The device, of 'mixfleet devices' [default: the first that would serve]
    #[arg(long, value_name = "DEV")]
    device: Option<String>,
    /// Measure less, in under a minute [default: under five minutes]
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Measure everything, in up to half an hour
    #[arg(long)]
    full: bool,
    /// Measure the N most informative points (such as 32), predict the rest
    #[arg(long, value_name = "N", value_parser = crate::numbers::count::<u32>(8..=10_000))]
    budget: Option<u32>,
    /// Groups (launch, memory, links, small, kv, gemm, decode, prefill, attention, sustained) or points (*
    /// matches any text)
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure this checkpoint's own operations too
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Rent of the device, for results per dollar
    #[arg(long, value_name = "USD", allow_negative_numbers = true)]
    usd_per_hour: Option<f64>,
    /// List every point below the card, with its samples' distribution
    #[arg(long)]
    points: bool,
    /// Print the JSON document instead of the card
    #[arg(long, conflicts_with = "points")]
    json: bool,
    /// Write the JSON document to a file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write the device profile for schedulers and simulated devices
    #[arg(long, value_name = "FILE")]
    device_profile: Option<PathBuf>,
    /// Write a self-contained HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    links: links::LinksArgs,
}

#[derive(Debug, Args)]
struct ProfileCompareArgs {
    /// The first profile
    a: PathBuf,
    /// The second profile
    b: PathBuf,
    /// Exit with 1 if a point of the second is slower than RATIO times the first, beyond noise
    #[arg(long, value_name = "RATIO", allow_hyphen_values = true, value_parser = ratio)]
    fail_below: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn ratio(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|ratio: &f64| ratio.is_finite() && *ratio > 0.0);
    value.ok_or_else(|| "expected a ratio above 0, for example 0.95".into())
}

pub(crate) fn run(args: &ProfileArgs) -> Result<()> {
    match &args.command {
        Some(ProfileCommand::Compare(args)) => compare(args),
        Some(ProfileCommand::Import(args)) => import::run(args),
        Some(ProfileCommand::Show(args)) => show::run(args),
        Some(ProfileCommand::Check(args)) => check::run(args),
        None if args.measure.links.links => {
            links::run(&args.measure.links, args.measure.json, args.measure.quick)
        }
        None => profile(&args.measure),
    }
}

/// A brief profile of a device of this machine.
#[derive(Serialize, Deserialize)]
pub(crate) struct BriefProfile {
    pub(crate) profile: DeviceProfile,
    /// Date, `2026-11-30`.
    pub(crate) measured_on: String,
}

/// The device's brief profile: what an earlier call kept, unless `again`, or one that is measured now.
pub(crate) fn brief(device: &dyn Device, again: bool) -> Result<BriefProfile> {
    let file = cache::file("profile", &(&device.info().fingerprint, env!("CARGO_PKG_VERSION")));
    let kept = file.as_deref().filter(|_| !again).and_then(cache::read);
    if let Some(kept) = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
        return Ok(kept);
    }
    eprintln!("measuring {} for about {BRIEF_S:.0} s; later runs use the result", device.info().id);
    let mut options = ProfileOptions {
        budget_s: Some(BRIEF_S),
        points_max: Some(BRIEF_POINTS),
        only: BRIEF_GROUPS.map(|group| group.name().to_owned()).into(),
        measured_at: machine::now(),
        ..ProfileOptions::new(ProfileLevel::Quick)
    };
    settle(device, &mut options);
    if options.other_load {
        eprintln!(
            "warning: other processes use this machine now, so its rates come out too low; --again measures anew"
        );
    }
    let document = with_progress(device, &options);
    verdict(&document)?;
    let profile = document.device_profile().context("neither memory bandwidth nor a product was measured")?;
    let measured_on = document.measured_at.chars().take("2026-11-30".len()).collect();
    let brief = BriefProfile { profile, measured_on };
    let written = file.map(|file| cache::write(&file, &serde_json::to_vec(&brief)?));
    if let Some(Err(error)) = written {
        tracing::warn!(%error, "the profile cannot be kept; the next run measures again");
    }
    Ok(brief)
}

/// Sets what depends on the machine of a CPU.
fn settle(device: &dyn Device, options: &mut ProfileOptions) {
    if device.info().kind == DeviceKind::Cpu {
        options.cold_bytes = machine::cold_bytes(options.cold_bytes);
        options.other_load = machine::busy();
    }
}

fn profile(args: &MeasureArgs) -> Result<()> {
    let mut options = options(args)?;
    for file in [&args.out, &args.html, &args.device_profile].into_iter().flatten() {
        writable(file)?;
    }
    let selector = match &args.device {
        Some(selector) => selector.clone(),
        None => backends::first_selector()?,
    };
    let device = backends::open(&selector)?;
    options.model = operations(args, options.level, device.limits().kv_page_tokens)?;
    settle(&*device, &mut options);
    let document = with_progress(&*device, &options);
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        write!(out, "{}", show::text(&document, args.points))?;
    }
    write_files(args, &document)?;
    let missing = document.missing(&args.only);
    for why in &missing {
        eprintln!("--only {why}");
    }
    verdict(&document)?;
    if !args.only.is_empty() && missing.len() == args.only.len() {
        return Err(Failed("no point named by --only could be measured".into()).into());
    }
    Ok(())
}

fn write_files(args: &MeasureArgs, document: &ProfileDocument) -> Result<()> {
    let write = |file: &Path, text: String| {
        write_whole(file, text.as_bytes()).with_context(|| format!("cannot write {}", file.display()))
    };
    if let Some(file) = &args.out {
        write(file, serde_json::to_string_pretty(document)? + "\n")?;
    }
    if let Some(file) = &args.html {
        write(file, page(document))?;
    }
    if let Some(file) = &args.device_profile {
        let Some(profile) = document.device_profile() else {
            // Removes the empty file that `writable` made.
            if std::fs::metadata(file).is_ok_and(|metadata| metadata.len() == 0) {
                std::fs::remove_file(file)?;
            }
            bail!("no device profile without a measured memory bandwidth and a measured product");
        };
        write(file, serde_json::to_string_pretty(&profile)? + "\n")?;
    }
    Ok(())
}

/// The exit status: an interrupted run could not complete; a wrong or failed point is a failure of the
/// device.
fn verdict(document: &ProfileDocument) -> Result<()> {
    let wrong: Vec<&PointResult> =
        document.points.iter().filter(|p| p.status == PointStatus::Error).collect();
    if let Some(first) = wrong.first() {
        let reason = first.reason.as_deref().unwrap_or("");
        return Err(Failed(format!("{} points went wrong; {}: {reason}", wrong.len(), first.id)).into());
    }
    if !document.complete {
        bail!("interrupted: the profile is marked incomplete");
    }
    Ok(())
}

/// What the model of `--model` submits to a device with such pages; nothing without one.
fn operations(args: &MeasureArgs, level: ProfileLevel, page_tokens: u32) -> Result<Vec<OpSig>> {
    let Some(path) = &args.model else { return Ok(Vec::new()) };
    let config = ModelConfig::open(path)
        .with_context(|| format!("cannot read the model's shape in {}", path.display()))?;
    Ok(config.cost_shape(config.dtype, config.dtype, page_tokens).distinct_ops(level.rows()))
}

fn options(args: &MeasureArgs) -> Result<ProfileOptions> {
    let level = match (args.quick, args.full) {
        (true, _) => ProfileLevel::Quick,
        (_, true) => ProfileLevel::Full,
        _ => ProfileLevel::Default,
    };
    if let Some(usd) = args.usd_per_hour
        && !(usd.is_finite() && usd >= USD_PER_HOUR_MIN)
    {
        bail!(UsageError(format!("--usd-per-hour {usd} is not a price; write $/h as in 0.35")));
    }
    let options = ProfileOptions {
        only: args.only.clone(),
        model: operations(args, level, PAGE_TOKENS)?,
        points_max: args.budget.map(cast::to_usize),
        measured_at: machine::now(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        facts: machine::facts(),
        price: args.usd_per_hour.map(|usd| (usd, "--usd-per-hour".to_owned())),
        ..ProfileOptions::new(level)
    };
    for name in &options.only {
        let one = std::slice::from_ref(name);
        if mixfleet_hwtests::profile::plan(ProfileLevel::Full, PAGE_TOKENS, &options.model, one).is_empty() {
            let parts: Vec<&str> = PointGroup::ALL.iter().map(|group| group.name()).collect();
            let near = closest_names(name, parts.iter().copied());
            let near =
                if near.is_empty() { String::new() } else { format!("near it: {}; ", near.join(", ")) };
            bail!(UsageError(format!(
                "--only {name} names nothing; {near}parts: {}, attention; points: 'mixfleet explain'",
                parts.join(", ")
            )));
        }
    }
    Ok(options)
}

/// Measures with a progress bar on a terminal, or a line per part elsewhere. The first Ctrl-C ends the run
/// after the current point, the second at once.
fn with_progress(device: &dyn Device, options: &ProfileOptions) -> ProfileDocument {
    cancel_on_interrupt(options.cancelled.clone(), "stopping after this point");
    let terminal = std::io::stderr().is_terminal();
    let bar = if terminal { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.expect("a fixed template"));
    let mut part = None;
    let document = measure(device, options, &mut |progress| match progress {
        ProfileProgress::Begin { index, total, id } => {
            bar.set_length(total as u64);
            bar.set_position(index as u64);
            bar.set_message(id.to_owned());
        }
        ProfileProgress::Done(point) => {
            if !terminal && point.status != PointStatus::Skipped && part != Some(point.group) {
                part = Some(point.group);
                eprintln!("profile {}: {}", device.info().id, point.group.name());
            }
            if point.status == PointStatus::Error {
                let reason = point.reason.as_deref().unwrap_or("");
                bar.suspend(|| eprintln!("{}: {reason}", point.id));
            }
        }
    });
    bar.finish_and_clear();
    document
}

fn read(file: &Path) -> Result<ProfileDocument> {
    let text =
        mixfleet_hal::files::read_text(file).with_context(|| format!("cannot read {}", file.display()))?;
    ProfileDocument::from_json(&text).map_err(|why| anyhow::anyhow!("{}: {why}", file.display()))
}

fn compare(args: &ProfileCompareArgs) -> Result<()> {
    let comparison = Comparison::new(&read(&args.a)?, &read(&args.b)?);
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&comparison)?)?;
    } else {
        write!(out, "{comparison}")?;
    }
    let Some(ratio) = args.fail_below else { return Ok(()) };
    if comparison.points.is_empty() {
        bail!("no point was measured in both profiles");
    }
    let below = comparison.below(ratio);
    match below.first() {
        Some(first) => {
            Err(Failed(format!("{} points below {ratio}; {} x{:.3}", below.len(), first.id, first.ratio))
                .into())
        }
        None => Ok(()),
    }
}
