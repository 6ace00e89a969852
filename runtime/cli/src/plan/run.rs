//! Plans the requested models, and prints and writes the plans.

use super::args::PlanArgs;
use super::load::{PlanLoad, PlanLoadSource};
use super::offers::PlanOffers;
use super::render::{Planned, document, page, progress_words, table};
use super::{deploy, several, tiers};
use crate::failure::{Failed, UsageError};
use crate::interrupt::cancel_on_interrupt;
use crate::output_files::{leave_no_empty, writable};
use crate::screen;
use anyhow::{Context, Result};
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_planner::found::PlanFound;
use mixfleet_planner::hours::{self, HourPlan};
use mixfleet_planner::market_of;
use mixfleet_planner::prices::{break_evens, repriced};
use mixfleet_planner::search::{PlanSearch, SearchAsk, SearchProgress};
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::engines;
use mixfleet_scheduler::models::{KnownModel, find};
use mixfleet_scheduler::plan::candidates::ServiceLevel;
use mixfleet_scheduler::plan::market::{Market, MarketAsk, PlannedPool};
use mixfleet_sim::simulate::Setup;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A model, its load, and the directory for its files.
pub(super) struct ModelWanted {
    pub(super) model: &'static KnownModel,
    pub(super) load: PlanLoad,
    pub(super) out: Option<PathBuf>,
}

impl ModelWanted {
    /// The requested models.
    fn read(args: &PlanArgs) -> Result<Vec<Self>> {
        if let Some(target) = args.target.filter(|target| target.engine() != args.engine.name) {
            let (needed, given) = (target.engine(), args.engine.name);
            let message = format!("--for: its instances run --engine {needed}, and the plan is for {given}");
            return Err(UsageError(message).into());
        }
        let sources = PlanLoadSource::of(args)?;
        let mut wanted = Vec::new();
        for (name, source) in args.model.iter().zip(sources) {
            let model = find(name).map_err(|error| UsageError(format!("--model: {error}")))?;
            if let Some(why) = model.unserved().filter(|_| args.engine.name == engines::OURS) {
                let message = format!(
                    "--model: mixfleet's own engine does not serve {}, since {why}; --engine names another",
                    model.name
                );
                return Err(UsageError(message).into());
            }
            wanted.push(ModelWanted {
                model,
                load: PlanLoad::read(args, source, model)?,
                out: args.out.clone(),
            });
        }
        Ok(wanted)
    }
}

/// A plan as it is printed.
pub(super) struct Printed {
    pub(super) document: serde_json::Value,
    pub(super) table: String,
    /// Rent of the cheapest fleet.
    pub(super) usd_per_hour: Option<f64>,
    /// Its pools.
    pub(super) pools: Vec<PlannedPool>,
    /// Why there is none.
    pub(super) unmet: Option<String>,
}

/// Writes the requested files, and prints how to start the fleet.
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

/// The rentable instances for a model, and the load that each carries.
pub(super) fn market(
    args: &PlanArgs,
    model: &'static KnownModel,
    load: &PlanLoad,
    offers: &PlanOffers,
) -> Market {
    let mut classes = load.classes.clone();
    classes.iter_mut().for_each(|class| class.rate *= 1.0 + args.headroom);
    market_of(MarketAsk {
        model,
        stored: args.dtypes(),
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
fn search(args: &PlanArgs, market: &Market, load: &PlanLoad, offers: &PlanOffers) -> Result<PlanFound> {
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
pub(super) fn plan(args: &PlanArgs, wanted: ModelWanted, offers: &PlanOffers) -> Result<Printed> {
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
    let mut offers = PlanOffers::read(args)?;
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
