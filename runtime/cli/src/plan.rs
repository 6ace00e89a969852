//! Implements `mixfleet plan`: the cheapest fleet for a model, a load and objectives.

mod deploy;
mod document;
mod load;
mod offers;
mod page;
mod several;
mod table;
mod tiers;
mod words;

use crate::failure::{Failed, Usage};
use crate::interrupt::cancel_on_interrupt;
use crate::numbers::{positive, seconds, share};
use crate::output_files::{leave_no_empty, writable};
use crate::screen;
use crate::trace_file::ReplayArgs;
use anyhow::{Context, Result};
use clap::Args;
use load::{LoadSource, PlanLoad};
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_planner::found::PlanFound;
use mixfleet_planner::hours::{self, HourPlan};
use mixfleet_planner::market_of;
use mixfleet_planner::prices::{Repriced, break_evens, repriced};
use mixfleet_planner::search::{PlanSearch, SearchAsk, SearchProgress};
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_scheduler::models::{KnownModel, find};
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::candidates::ServiceLevel;
use mixfleet_scheduler::plan::market::{Market, MarketAsk, PlannedPool};
use mixfleet_sim::fleet_file::InstancePool;
use mixfleet_sim::simulate::Setup;
use mixfleet_sim::trace::TOKENS_MAX;
use offers::Offers;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use words::{pools_words, progress_words};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Models of 'mixfleet models', each with a load of its own
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', required = true)]
    model: Vec<String>,
    /// Forms of its weights to choose from [default: bf16]
    #[arg(long, value_name = "DTYPE,..", value_delimiter = ',')]
    dtype: Vec<StoredAs>,
    /// The load as a request trace ('mixfleet trace stats' reads it)
    #[arg(long, value_name = "FILE,..", value_delimiter = ',', conflicts_with = "rate")]
    trace: Vec<PathBuf>,
    /// The load by the hour, planned for the dearest (docs/plan.md)
    #[arg(long, value_name = "CSV,..", value_delimiter = ',', conflicts_with_all = ["rate", "trace"])]
    workload: Vec<PathBuf>,
    /// The load as requests per second of one size
    #[arg(long, value_name = "R,..", value_delimiter = ',', requires_all = ["input_tokens", "output_tokens"], value_parser = positive)]
    rate: Vec<f64>,
    /// Tokens of a prompt
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', requires = "rate", value_parser = clap::value_parser!(u32).range(1..=i64::from(TOKENS_MAX)))]
    input_tokens: Vec<u32>,
    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', requires = "rate", value_parser = clap::value_parser!(u32).range(1..=i64::from(TOKENS_MAX)))]
    output_tokens: Vec<u32>,
    /// Objective: seconds to the first token
    #[arg(long, value_name = "S", value_parser = seconds)]
    ttft: f64,
    /// Objective: seconds between tokens, in the longest tenth of gaps
    #[arg(long, value_name = "S", value_parser = seconds)]
    tbt: f64,
    /// Share of requests that must meet both
    #[arg(long, value_name = "SHARE", default_value_t = 0.99, value_parser = share)]
    attain: f64,
    /// Offers in place of all built-in prices (docs/comparing-parts.md)
    #[arg(long, value_name = "CSV")]
    prices: Option<PathBuf>,
    /// Devices there are; columns device_id, count [, region, spot]
    #[arg(long, value_name = "CSV")]
    inventory: Option<PathBuf>,
    /// Links between regions; columns from, to, gb_per_s, usd_per_gb
    #[arg(long, value_name = "CSV", requires = "inventory")]
    links: Option<PathBuf>,
    /// Spot offers too, N further instances to each pool of them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    spot: Option<u32>,
    /// The fleet that is owned, which costs nothing more
    #[arg(long, value_name = "FLEET.toml")]
    have: Option<PathBuf>,
    /// Parts to choose from [default: all with a price]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    parts: Vec<String>,
    /// Serving engine: mixfleet (default), vllm, sglang, tensorrt-llm
    #[arg(long, value_name = "NAME", default_value = "mixfleet", hide_default_value = true, value_parser = engines::find)]
    engine: &'static KnownEngine,
    /// How unlike experts are in popularity [default: 0]
    #[arg(long, value_name = "SKEW", default_value_t = 0.0, hide_default_value = true, allow_negative_numbers = true, value_parser = skew)]
    expert_skew: f32,
    /// Plan for a load higher by this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, hide_default_value = true, value_parser = headroom)]
    headroom: f64,
    /// Probability that devices are as fast as planned [default: 0.5]
    #[arg(long, value_name = "P", default_value_t = 0.5, hide_default_value = true, value_parser = confidence)]
    confidence: f64,
    /// Network of an instance, each direction [default: 12.5]
    #[arg(long, value_name = "GB/S", default_value_t = InstancePool::NIC_GB_PER_S, hide_default_value = true, value_parser = positive)]
    nic: f64,
    /// Further instances of each pool, in case others fail
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(u32).range(0..=64))]
    spares: u32,
    /// Host memory for KV to choose from, GiB an instance
    #[arg(long, value_name = "GIB,..", value_delimiter = ',', requires = "dram_usd", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    dram: Vec<u32>,
    /// Rent of a GiB of it per hour; 0 if a device's rent includes it
    #[arg(long, value_name = "USD", requires = "dram", value_parser = usd)]
    dram_usd: Option<f64>,
    /// Disk for KV to choose from, beside host memory
    #[arg(long, value_name = "GIB,..", value_delimiter = ',', requires_all = ["dram", "ssd_usd"], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    ssd: Vec<u32>,
    /// Rent of a GiB of it per hour
    #[arg(long, value_name = "USD", requires = "ssd", value_parser = usd)]
    ssd_usd: Option<f64>,
    /// Numbers of KV nodes that have this memory
    #[arg(long, value_name = "N,..", value_delimiter = ',', requires = "dram", value_parser = clap::value_parser!(u32).range(1..=1024))]
    kv_nodes: Vec<u32>,
    /// End the simulations after this time
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    budget_s: f64,
    /// Write FLEET.toml and what starts the fleet here
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write the plan as an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
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

fn skew(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value: &f32| (0.0..=100.0).contains(value));
    value.ok_or_else(|| "expected a deviation over the mean, 0 or more, as in 0.5".into())
}

fn usd(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| (0.0..=1000.0).contains(value));
    value.ok_or_else(|| "expected a rent in dollars per hour, as in 0.004".into())
}

fn confidence(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| (0.5..=0.999).contains(value));
    value.ok_or_else(|| "expected a probability from 0.5 to 0.999".into())
}

/// The dtypes that were asked for, each once.
fn dtypes(args: &PlanArgs) -> Vec<StoredAs> {
    let mut stored: Vec<StoredAs> = Vec::new();
    for dtype in &args.dtype {
        if !stored.contains(dtype) {
            stored.push(*dtype);
        }
    }
    if stored.is_empty() { vec![StoredAs::Plain(DType::Bf16)] } else { stored }
}

/// Everything that the command prints.
struct Planned<'a> {
    args: &'a PlanArgs,
    model: &'static KnownModel,
    /// The dtypes to choose from.
    stored: &'a [StoredAs],
    load: &'a PlanLoad,
    /// The directory for files.
    out: Option<&'a Path>,
    offers: &'a Offers,
    outcome: &'a PlanFound,
    /// What each hour takes; empty for less than two hours.
    hours: &'a [HourPlan],
    /// For each part; `None` where the program contradicts the simulations.
    break_evens: &'a [Option<BreakEven>],
    repriced: &'a [Repriced],
}

impl Planned<'_> {
    /// The model and the dtypes in words.
    fn model_words(&self) -> String {
        let names: Vec<&str> = self.stored.iter().map(|stored| stored.name()).collect();
        format!("{} in {}, engine {}", self.model.name, names.join(" or "), self.args.engine.name)
    }

    /// A fleet in words, with its dtype where there are several to choose from.
    fn words(&self, pools: &[PlannedPool], stored: StoredAs) -> String {
        let pools = pools_words(&self.offers.parts, pools);
        if self.stored.len() > 1 { format!("{pools}, {stored}") } else { pools }
    }
}

/// A model, its load, and the directory for its files.
struct ModelWanted {
    model: &'static KnownModel,
    load: PlanLoad,
    out: Option<PathBuf>,
}

impl ModelWanted {
    /// The models that were asked for.
    fn read(args: &PlanArgs) -> Result<Vec<Self>> {
        let sources = LoadSource::of(args)?;
        let mut wanted = Vec::new();
        for (name, source) in args.model.iter().zip(sources) {
            let model = find(name).map_err(|error| Usage(format!("--model: {error}")))?;
            if let Some(why) = model.unserved().filter(|_| args.engine.name == engines::OURS) {
                let message = format!(
                    "--model: mixfleet's own engine does not serve {}, since {why}; --engine names another",
                    model.name
                );
                return Err(Usage(message).into());
            }
            wanted.push(ModelWanted { model, load: PlanLoad::read(args, source)?, out: args.out.clone() });
        }
        Ok(wanted)
    }
}

/// A plan as it is printed.
struct Printed {
    document: serde_json::Value,
    table: String,
    /// Rent of the cheapest fleet.
    usd_per_hour: Option<f64>,
    /// Its pools.
    pools: Vec<PlannedPool>,
    /// Why there is none.
    unmet: Option<String>,
}

/// Writes the files that were asked for, and says what starts the fleet.
fn write_files(planned: &Planned<'_>, market: &Market) -> Result<Option<String>> {
    let (args, mut started) = (planned.args, None);
    let Some(best) = planned.outcome.fleets.first() else { return Ok(None) };
    if let Some(directory) = planned.out {
        let cannot_write = || format!("cannot write to {}", directory.display());
        write_whole(&directory.join("FLEET.toml"), best.text.as_bytes()).with_context(cannot_write)?;
        if let Some(one) = planned.outcome.dearer_homogeneous() {
            write_whole(&directory.join("homogeneous.toml"), one.text.as_bytes())
                .with_context(cannot_write)?;
        }
        if args.trace.is_empty() {
            planned.load.write_log(&directory.join("load.jsonl")).with_context(cannot_write)?;
        }
        started = Some(deploy::write(planned, best, directory).with_context(cannot_write)?);
    }
    if let Some(path) = &args.html {
        let page = page::page(planned, market);
        write_whole(path, page.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(started)
}

/// What may be rented for a model, and what it carries of a load.
fn market(args: &PlanArgs, model: &'static KnownModel, load: &PlanLoad, offers: &Offers) -> Market {
    let mut classes = load.classes.clone();
    classes.iter_mut().for_each(|class| class.rate *= 1.0 + args.headroom);
    market_of(MarketAsk {
        model,
        stored: dtypes(args),
        expert_skew: args.expert_skew,
        engine: args.engine,
        parts: offers.parts.clone(),
        classes,
        answer_tokens_max: Setup::MAX_TOKENS,
        level: ServiceLevel { ttft: Seconds(args.ttft), tbt: Seconds(args.tbt) },
        attain: args.attain,
        confidence: args.confidence,
        nic: BytesPerSecond(args.nic * GB),
        links: offers.links.clone(),
    })
}

/// Searches for the fleets of a market that hold the objective under a load.
fn search(args: &PlanArgs, market: &Market, load: &PlanLoad, offers: &Offers) -> Result<PlanFound> {
    let (cancelled, tiers) = (Arc::new(AtomicBool::new(false)), tiers::choices(args));
    let progress = |progress: SearchProgress<'_>| {
        if std::io::stderr().is_terminal() {
            eprintln!("{}", progress_words(&offers.parts, progress));
        }
    };
    let search = PlanSearch::new(SearchAsk {
        market,
        prices: &offers.prices,
        requests: &load.requests,
        block_tokens: load.block_tokens,
        slots: load.slots.as_ref(),
        speedup: 1.0 + args.headroom,
        tiers: &tiers,
        budget: Duration::from_secs_f64(args.budget_s),
        cancelled: &cancelled,
        progress: &progress,
    });
    cancel_on_interrupt(cancelled.clone(), "stopping with the best so far");
    Ok(search.run()?)
}

/// Plans a model, and writes its files.
fn plan(args: &PlanArgs, wanted: ModelWanted, offers: &Offers) -> Result<Printed> {
    let ModelWanted { model, mut load, out } = wanted;
    let mut market = market(args, model, &load, offers);
    let factor = 1.0 + args.headroom;
    let by_hour: Vec<Vec<f64>> =
        load.hours.iter().map(|rates| rates.iter().map(|r| r * factor).collect()).collect();
    let hours = HourPlan::of_each(&market, &by_hour);
    if let Some(dearest) = hours::dearest(&hours).filter(|_| !args.workload.is_empty()) {
        load.be_of_hour(args, dearest);
        market = market.with_rates(&by_hour[dearest]);
    }
    let outcome = search(args, &market, &load, offers)?;
    let planned = Planned {
        args,
        model,
        stored: &market.ask().stored,
        load: &load,
        out: out.as_deref(),
        offers,
        outcome: &outcome,
        hours: &hours,
        break_evens: &break_evens(&market, &outcome.fleets),
        repriced: &repriced(&market, &outcome.fleets),
    };
    if let Some(directory) = &out {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("--out: cannot make the directory {}", directory.display()))?;
    }
    let started = write_files(&planned, &market)?;
    let best = outcome.fleets.first();
    Ok(Printed {
        document: document::of(&planned),
        table: table::of(&planned, started.as_deref()),
        usd_per_hour: best.map(|fleet| fleet.usd_per_hour),
        pools: best.map_or_else(Vec::new, |fleet| fleet.pools.clone()),
        unmet: best.is_none().then(|| table::unmet(&planned)),
    })
}

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let mut offers = Offers::read(args)?;
    let mut wanted = ModelWanted::read(args)?;
    offers.warnings.extend(wanted.iter().filter_map(|wanted| wanted.load.warning(args)));
    for warning in &offers.warnings {
        eprintln!("warning: {warning}");
    }
    if let Some(directory) = &args.out {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("--out: cannot make the directory {}", directory.display()))?;
    }
    if let Some(path) = &args.html {
        writable(path)?;
    }
    let one = match wanted.pop() {
        Some(one) if wanted.is_empty() => one,
        last => return several::run(args, wanted.into_iter().chain(last).collect(), &offers),
    };
    let printed = plan(args, one, &offers)?;
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{:#}", printed.document)?;
    } else {
        write!(out, "{}", printed.table)?;
    }
    let Some(unmet) = printed.unmet else { return Ok(()) };
    leave_no_empty(args.html.as_deref());
    Err(Failed(unmet).into())
}
