//! Implements `mixfleet plan`: the cheapest fleet for a model, a load and objectives.

mod document;
mod fleet_text;
mod load;
mod offers;
mod search;
mod table;

use crate::numbers::seconds;
use crate::simulate::share;
use crate::trace::{ReplayArgs, positive};
use crate::{Failed, Usage};
use anyhow::{Context, Result};
use clap::Args;
use load::PlanLoad;
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::engines::KnownEngine;
use mixfleet_scheduler::models::{KnownModel, find};
use mixfleet_scheduler::plan::candidates::ServiceLevel;
use mixfleet_scheduler::plan::market::{Market, MarketAsk, PartOnOffer};
use mixfleet_sim::fleet_file::InstancePool;
use mixfleet_sim::simulate::Setup;
use mixfleet_sim::trace::TOKENS_MAX;
use offers::Offers;
use search::{PlanFound, PlanSearch};
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A model of 'mixfleet models'
    #[arg(long, value_name = "NAME")]
    model: String,
    /// How its weights are stored: bf16, f16, fp8, int8, int4, mxfp4 or nvfp4 [default: bf16]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<StoredAs>,
    /// The load as a request trace, in any format of 'mixfleet trace stats'
    #[arg(long, value_name = "FILE", required_unless_present = "rate", conflicts_with = "rate")]
    trace: Option<PathBuf>,
    /// The load as requests per second of one size
    #[arg(long, value_name = "R", requires_all = ["input_tokens", "output_tokens"], value_parser = positive)]
    rate: Option<f64>,
    /// Tokens of a prompt
    #[arg(long, value_name = "TOKENS", requires = "rate", value_parser = clap::value_parser!(u32).range(1..=i64::from(TOKENS_MAX)))]
    input_tokens: Option<u32>,
    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS", requires = "rate", value_parser = clap::value_parser!(u32).range(1..=i64::from(TOKENS_MAX)))]
    output_tokens: Option<u32>,
    /// Objective: seconds to the first token
    #[arg(long, value_name = "S", value_parser = seconds)]
    ttft: f64,
    /// Objective: seconds between tokens (of each request, the longest tenth of its gaps)
    #[arg(long, value_name = "S", value_parser = seconds)]
    tbt: f64,
    /// Share of requests that must meet both
    #[arg(long, value_name = "SHARE", default_value_t = 0.99, value_parser = share)]
    attain: f64,
    /// Offers in place of all built-in prices (docs/comparing-parts.md)
    #[arg(long, value_name = "CSV")]
    prices: Option<PathBuf>,
    /// The devices that there are, in place of any number; columns device_id, count
    #[arg(long, value_name = "CSV")]
    inventory: Option<PathBuf>,
    /// Parts to choose from [default: all with a price]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    parts: Vec<String>,
    /// Serving engine: mixfleet, vllm, sglang or tensorrt-llm
    #[arg(long, value_name = "NAME", default_value = "mixfleet", value_parser = crate::compare::engine)]
    engine: &'static KnownEngine,
    /// Plan for a load higher by this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, hide_default_value = true, value_parser = headroom)]
    headroom: f64,
    /// Further instances of each pool, in case others fail
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(u32).range(0..=64))]
    spares: u32,
    /// End the simulations after this time with the best so far
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    budget_s: f64,
    /// Write FLEET.toml, for 'mixfleet simulate', into this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    replay: ReplayArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn headroom(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| (0.0..=100.0).contains(value));
    value.ok_or_else(|| "expected a share of the load, 0 or more, as in 0.2".into())
}

/// The rates of all parts, each found by the next core that is free.
fn on_all_cores(ask: MarketAsk) -> Market {
    let (next, parts) = (AtomicUsize::new(0), ask.parts.len());
    let work = || {
        let mut found = Vec::new();
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                return found;
            }
            found.push((part, PartOnOffer::new(&ask, part)));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(parts);
    let mut rates: Vec<(usize, PartOnOffer)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a rate panics on no input")).collect()
    });
    rates.sort_by_key(|(part, _)| *part);
    Market::of(ask, rates.into_iter().map(|(_, rates)| rates).collect())
}

/// Everything that the command prints.
struct Planned<'a> {
    args: &'a PlanArgs,
    model: &'static KnownModel,
    stored: StoredAs,
    load: &'a PlanLoad,
    offers: &'a Offers,
    outcome: &'a PlanFound,
}

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let model = find(&args.model).map_err(|error| Usage(format!("--model: {error}")))?;
    let stored = args.dtype.unwrap_or(StoredAs::Plain(DType::Bf16));
    let offers = Offers::read(args)?;
    for warning in &offers.warnings {
        eprintln!("warning: {warning}");
    }
    let load = PlanLoad::read(args)?;
    if let Some(directory) = &args.out {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("--out: cannot make the directory {}", directory.display()))?;
    }
    let factor = 1.0 + args.headroom;
    let mut classes = load.classes.clone();
    classes.iter_mut().for_each(|class| class.rate *= factor);
    let market = on_all_cores(MarketAsk {
        model,
        stored,
        engine: args.engine,
        parts: offers.parts.clone(),
        classes,
        answer_tokens_max: Setup::MAX_TOKENS,
        level: ServiceLevel { ttft: Seconds(args.ttft), tbt: Seconds(args.tbt) },
        attain: args.attain,
        nic: BytesPerSecond(InstancePool::NIC_GB_PER_S * GB),
        spares: args.spares,
    });
    let outcome = PlanSearch::new(args, model, stored, &market, &load, &offers).run()?;
    let planned = Planned { args, model, stored, load: &load, offers: &offers, outcome: &outcome };
    if let (Some(directory), Some(best)) = (&args.out, outcome.fleets.first()) {
        let cannot_write = || format!("cannot write to {}", directory.display());
        std::fs::write(directory.join("FLEET.toml"), &best.text).with_context(cannot_write)?;
        if args.rate.is_some() {
            load.write_log(&directory.join("load.jsonl")).with_context(cannot_write)?;
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", document::of(&planned))?;
    } else {
        write!(out, "{}", table::of(&planned))?;
    }
    match outcome.fleets.is_empty() {
        true => Err(Failed(table::unmet(&planned)).into()),
        false => Ok(()),
    }
}
