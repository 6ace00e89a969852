//! `mixfleet compare`: what a dollar buys on each part, and what each is cheapest at.

mod devices;
mod json;
mod page;
mod table;

use crate::args::DevicePrice;
use crate::failure::Usage;
use crate::numbers::seconds;
use crate::prices;
use crate::screen;
use anyhow::{Context, Result};
use clap::Args;
use devices::Compared;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::economics::{Pick, Selection};
use mixfleet_hal::units::{Ordered, Seconds};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_report::files::write_whole;
use mixfleet_runtime::model::ModelConfig;
use mixfleet_scheduler::classes::{Classified, Demand, Job, PricedDevice, classify};
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_scheduler::models::find;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Tokens per KV page assumed for a checkpoint; only the size of a page table depends on it.
const PAGE_TOKENS: u32 = 16;

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Parts by catalog id (rtx-4090), or profiles by file [default: all parts with a price]
    #[arg(value_name = "PART|FILE")]
    parts: Vec<String>,
    /// A known model (llama-3.1-8b) or a checkpoint directory
    #[arg(long, value_name = "NAME|DIR")]
    model: String,
    /// How the model's weights are stored: f32, bf16, f16, fp8, int8, int4, mxfp4 or nvfp4 [default:
    /// bf16, or what the checkpoint has]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<StoredAs>,
    /// Dtype of the KV: f32, bf16, f16, fp8 or int8 [default: DTYPE, else bf16]
    #[arg(long, value_name = "DTYPE")]
    kv_dtype: Option<DType>,
    /// Offers in place of all built-in prices (docs/comparing-parts.md)
    #[arg(long, value_name = "CSV")]
    prices: Option<PathBuf>,
    /// Rent of a part; repeatable
    #[arg(long, value_name = "PART=USD", value_parser = part_price)]
    usd_per_hour: Vec<DevicePrice>,
    /// Measured profile of a part; repeatable
    #[arg(long, value_name = "PART=FILE", value_parser = part_file)]
    profile: Vec<(String, PathBuf)>,
    /// Use spot offers instead of on-demand ones
    #[arg(long)]
    spot: bool,
    /// Use the lowest offer instead of the median of providers
    #[arg(long)]
    least: bool,
    /// Length of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    prompt: u32,
    /// Context of a sequence while it decodes
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context: u32,
    /// Maximum sequences per decode step
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Objective: seconds in which a prompt must be computed
    #[arg(long, value_name = "S", value_parser = seconds)]
    ttft: Option<f64>,
    /// Objective: seconds between tokens; batches are no larger than it allows
    #[arg(long, value_name = "S", value_parser = seconds)]
    tbt: Option<f64>,
    /// Most parts that share one copy of the model
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    devices: u32,
    /// Serving engine: mixfleet, vllm, sglang or tensorrt-llm
    #[arg(long, value_name = "NAME", default_value = "mixfleet", value_parser = engines::find)]
    engine: &'static KnownEngine,
    /// Write an HTML page
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn part_file(text: &str) -> Result<(String, PathBuf), String> {
    let (part, file) = text.split_once('=').ok_or("expected PART=FILE, for example L40S=l40s.json")?;
    if part.is_empty() || file.is_empty() {
        return Err("expected PART=FILE, for example L40S=l40s.json".into());
    }
    Ok((part.into(), file.into()))
}

fn part_price(text: &str) -> Result<DevicePrice, String> {
    if !text.contains('=') {
        return Err("expected PART=USD, for example L4=0.8".into());
    }
    text.parse()
}

/// The kind of evidence that all times of a comparison use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Basis {
    Datasheet,
    Published,
    Measured,
    /// For each device the best evidence that exists.
    Mixed,
}

impl Basis {
    /// The strongest evidence that all of `devices` have, since unlike evidence would decide the comparison.
    fn of(devices: &[Compared]) -> Self {
        let all = |has: &dyn Fn(&Compared) -> bool| devices.iter().all(has);
        if all(&|device| device.measured.is_some()) {
            Basis::Measured
        } else if all(&Compared::is_published) {
            Basis::Published
        } else if all(&|device| device.part.is_some()) {
            Basis::Datasheet
        } else {
            Basis::Mixed
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Basis::Datasheet => "datasheet",
            Basis::Published => "published",
            Basis::Measured => "measured",
            Basis::Mixed => "mixed",
        }
    }

    pub(crate) const fn explained(self) -> &'static str {
        match self {
            Basis::Datasheet => "rooflines of the datasheets, which kernels reach to 40 to 95 %",
            Basis::Published => "published kernel times, of the part or of its nearest relatives",
            Basis::Measured => "measured profiles",
            Basis::Mixed => "MIXED: a measured profile beside claims, which flatter; profile the others too",
        }
    }
}

/// Everything that the command prints.
pub(crate) struct Comparison {
    pub(crate) model: String,
    pub(crate) demand: Demand,
    pub(crate) basis: Basis,
    pub(crate) devices: Vec<Compared>,
    /// In the order of `devices`.
    pub(crate) classified: Vec<Classified>,
    /// Likely relative error of each device's times, where it is known, in the order of `devices`.
    pub(crate) likely_errors: Vec<Option<f64>>,
    /// Parts of the catalog that are not compared for want of an offer, if none were named.
    pub(crate) without_offer: Vec<&'static str>,
    /// Input that has no effect, or looks wrong.
    pub(crate) warnings: Vec<String>,
}

impl Comparison {
    /// The likely error of a device's times in a few characters.
    pub(crate) fn likely(&self, device: usize) -> String {
        match self.likely_errors[device] {
            Some(error) => format!("{:.0} %", error * 100.0),
            None if self.devices[device].is_measured_for(self.basis) => "measured".into(),
            None => "?".into(),
        }
    }

    /// Whether nothing is known of how far a device's times are off, beyond what the basis says of all.
    pub(crate) fn is_in_doubt(&self, device: usize) -> bool {
        is_in_doubt(&self.devices[device], self.basis, self.likely_errors[device])
    }

    /// What is said of those devices, if there are any.
    pub(crate) fn doubts(&self) -> Option<String> {
        let names: Vec<&str> = (0..self.devices.len())
            .filter(|device| self.is_in_doubt(*device))
            .map(|device| self.devices[device].name.as_str())
            .collect();
        let (some, more) = names.split_at(names.len().min(DOUBTS_MAX));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
        (!names.is_empty()).then(|| {
            let some = some.join(", ");
            format!("unknown how far the times of {some}{more} are off: they come last, whatever they cost")
        })
    }

    /// The objectives, if there are any.
    pub(crate) fn objectives(&self) -> Option<String> {
        let Demand { ttft, tbt, .. } = self.demand;
        let one = |what: &str, most: Option<Seconds>| most.map(|most| format!("{what} within {} s", most.0));
        let all: Vec<String> = [one("prompts", ttft), one("steps", tbt)].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

/// Parts in doubt that are named in a line.
const DOUBTS_MAX: usize = 4;

/// A part whose kernels nobody measured; where others are compared by more than datasheets, also one whose
/// error nobody knows.
fn is_in_doubt(device: &Compared, basis: Basis, likely: Option<f64>) -> bool {
    let unknown = likely.is_none() && basis != Basis::Datasheet;
    !device.is_measured_for(basis) && (unknown || !device.is_published())
}

pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    let comparison = compare(args)?;
    for warning in &comparison.warnings {
        eprintln!("warning: {warning}");
    }
    if let Some(path) = &args.html {
        let cannot_write = || format!("cannot write {}", path.display());
        write_whole(path, page::page(&comparison).as_bytes()).with_context(cannot_write)?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{:#}", json::document(&comparison))?;
        return Ok(());
    }
    table::write(&mut out, &comparison)
}

fn compare(args: &CompareArgs) -> Result<Comparison> {
    let demand = Demand {
        prompt_tokens: args.prompt,
        context_tokens: args.context,
        batch_max: args.batch,
        devices_max: args.devices,
        engine: args.engine.cost,
        ttft: args.ttft.map(Seconds),
        tbt: args.tbt.map(Seconds),
        ..model_demand(args)?
    };
    let list = args.prices.as_deref().map(prices::read).transpose()?.unwrap_or_default();
    let pick = if args.least { Pick::Least } else { Pick::Median };
    let mut devices = devices::resolve(&args.parts, &args.profile, |name| {
        Selection { spot: args.spot, pick }.price_or_reference(name, &list.offers)
    })?;
    devices::state_prices(&mut devices, &args.usd_per_hour)?;
    let basis = Basis::of(&devices);
    let candidates: Vec<PricedDevice> = devices.iter().map(|device| device.candidate(basis)).collect();
    let likely = |device: &PricedDevice| args.engine.likely_error(&device.profile, &demand.shape);
    let likely_errors: Vec<Option<f64>> = candidates.iter().map(likely).collect();
    let classified = classify(&demand, &candidates);
    // The cheapest decode first; then parts in doubt, and last those that cannot decode or have no price.
    let place = |compared: &Compared, device: &Classified, likely: Option<f64>| {
        let costs = [Job::Decode, Job::Prefill].map(|job| {
            let cost = device.standing(job).and_then(|standing| standing.cost);
            Ordered(cost.map_or(f64::INFINITY, |cost| cost.0))
        });
        (costs[0].0.is_infinite(), is_in_doubt(compared, basis, likely), costs)
    };
    let mut rows: Vec<_> = devices.into_iter().zip(classified.into_iter().zip(likely_errors)).collect();
    rows.sort_by_key(|(compared, (device, likely))| place(compared, device, *likely));
    let (devices, rest): (Vec<Compared>, Vec<_>) = rows.into_iter().unzip();
    let (classified, likely_errors): (Vec<Classified>, Vec<_>) = rest.into_iter().unzip();
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let mut warnings = list.warnings(&names);
    warnings.extend(devices.iter().filter_map(Compared::misnamed));
    let left_out = |part: &&Part| devices.iter().all(|device| device.name != part.id);
    let without_offer = match args.parts.is_empty() {
        true => catalog::parts().iter().filter(left_out).map(|part| part.id).collect(),
        false => Vec::new(),
    };
    let model = args.model.clone();
    Ok(Comparison { model, demand, basis, devices, classified, likely_errors, without_offer, warnings })
}

/// The demand of a known model, or of the shape in a directory's `config.json`.
fn model_demand(args: &CompareArgs) -> Result<Demand> {
    let directory = Path::new(&args.model);
    let is_gguf = directory.is_file() && directory.extension().is_some_and(|end| end == "gguf");
    let (shape, tied_embeddings) = if directory.is_dir() || is_gguf {
        let config = ModelConfig::open(directory)
            .with_context(|| format!("cannot read the model's shape in {}", directory.display()))?;
        let stored =
            args.dtype.unwrap_or(config.format.map_or(StoredAs::Plain(config.dtype), StoredAs::Quantised));
        let shape = config.cost_shape(stored.plain(), stored.kv(), PAGE_TOKENS);
        let weight = stored.plain();
        (ModelShape { weight, ..shape.stored_as(stored.format()) }, config.tied_embeddings)
    } else {
        let model = find(&args.model).map_err(|error| Usage(format!("--model: {error}")))?;
        (model.shape_as(args.dtype.unwrap_or(StoredAs::Plain(DType::Bf16))), model.tied_embeddings)
    };
    let kv = args.kv_dtype.unwrap_or(shape.kv);
    if kv == DType::U32 {
        return Err(Usage("--kv-dtype: KV is in f32, bf16, f16, fp8 or int8".into()).into());
    }
    let shape = shape.with_kv(kv);
    let weights = shape.weight_bytes(tied_embeddings);
    Ok(Demand::new(shape, weights))
}
