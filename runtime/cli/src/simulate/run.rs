//! Simulates the requested fleets, and prints and writes the results.

use super::additions::Additions;
use super::args::SimulateArgs;
use super::history::RunHistory;
use super::opened::{BEYOND_CONTEXT, OpenedFleet, RequestSource};
use super::page::{Subject, page};
use super::timeline::TimelineFile;
use super::unmet::Unmet;
use super::watch::RunWatch;
use super::{answers, capacity, side_by_side, table};
use crate::failure::{Failed, UsageError};
use crate::output_files::leave_no_empty;
use crate::trace_file::FileBar;
use crate::{prices, screen};
use anyhow::{Context, Result};
use mixfleet_report::files::write_whole;
use mixfleet_sim::against::RunErrors;
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::simulate::Results;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

pub(crate) fn run(args: &SimulateArgs) -> Result<()> {
    args.interval_s()?;
    let list = args.prices.as_deref().map(prices::read).transpose()?;
    for warning in list.iter().flat_map(|list| list.warnings(&[])) {
        eprintln!("warning: {warning}");
    }
    if args.fleet.len() > 1 {
        return side_by_side::run(args, list.as_ref());
    }
    let path = args.fleet.first().ok_or_else(|| UsageError("--fleet is missing".into()))?;
    let fleet = OpenedFleet::open(args, path, &args.scheduling, list.as_ref())?;
    match args.capacity {
        Some(share) => capacity::run(&fleet, share),
        None => one(&fleet),
    }
}

/// Simulates one fleet, and writes and prints the requested results.
fn one(fleet: &OpenedFleet<'_>) -> Result<()> {
    let OpenedFleet { args, setup, .. } = fleet;
    let start = std::time::Instant::now();
    let mut load = fleet.load()?;
    args.check_files()?;
    let cannot_write = |path: &Path| format!("cannot write {}", path.display());
    let mut watch = RunWatch::new(FileBar::new(load.progress()), setup);
    watch.interval_s = args.interval_s()?;
    let timeline = args.timeline.as_deref();
    let timeline = timeline
        .map(|path| TimelineFile::create(path, &setup.pools).with_context(|| cannot_write(path)))
        .transpose()?;
    watch.timeline = timeline;
    watch.history = args.html.is_some().then(|| RunHistory::new(setup.pools.len()));
    watch.answers = (args.requests_out.is_some() || args.against.is_some()).then(Vec::new);
    let ran = fleet.play(&mut load, setup, &mut watch).and_then(|results| {
        check_context(&results, fleet.context())?;
        check_served(&results, &watch.unmet)?;
        Ok(results)
    });
    let results = ran.inspect_err(|_| leave_no_empty(args.html.as_deref()))?;
    let RunWatch { bar, timeline, history, answers, unmet, .. } = watch;
    drop(bar);
    let mut answers = answers.unwrap_or_default();
    let errors = match &load {
        RequestSource::Recorded(run) => Some(RunErrors::new(run, &answers)),
        _ => None,
    };
    if let (Some(timeline), Some(path)) = (timeline, &args.timeline) {
        timeline.finish().with_context(|| cannot_write(path))?;
    }
    if let Some(path) = &args.requests_out {
        answers::write_log(path, &mut answers).with_context(|| cannot_write(path))?;
    }
    let additions = args.add.then(|| Additions::simulate(fleet, &results)).transpose()?;
    if let (Some(history), Some(path)) = (&history, &args.html) {
        let subject = Subject {
            setup,
            results: &results,
            history,
            simulated: &fleet.simulated,
            additions: additions.as_ref(),
            unmet: &unmet,
        };
        write_whole(path, page(&subject).as_bytes()).with_context(|| cannot_write(path))?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        let mut document = document(fleet, &results)?;
        // Whole seconds, rounded up, so that documents of equal runs can be compared.
        document["wall_s"] = json!(start.elapsed().as_secs_f64().ceil());
        if let Some(errors) = errors {
            document["against"] = json!(errors);
        }
        if let Some(additions) = &additions {
            document["additions"] = json!(additions);
        }
        writeln!(out, "{document:#}")?;
        return Ok(());
    }
    write!(out, "{}", table::table(&fleet.simulated, &results, &unmet))?;
    if let Some(additions) = &additions {
        write!(out, "{}", additions.text())?;
    }
    if let Some(errors) = &errors {
        write!(out, "{}", answers::errors_table(errors))?;
    }
    Ok(())
}

/// The results of a run as a JSON document.
pub(super) fn document(fleet: &OpenedFleet<'_>, results: &Results) -> Result<Value> {
    let mut document = serde_json::to_value(results)?;
    document["simulated"] = json!(fleet.simulated);
    document["bottleneck"] = json!(Bottleneck::of(results));
    document["good_requests_per_usd"] = json!(good_per_usd(fleet, results));
    Ok(document)
}

/// Requests within the SLO per dollar of rent and traffic, where all prices are known.
pub(super) fn good_per_usd(fleet: &OpenedFleet<'_>, r: &Results) -> Option<f64> {
    let is_priced = fleet.simulated.usd_per_hour.is_some() && r.usd_rent > 0.0;
    is_priced.then(|| r.requests.saturating_sub(r.missed) as f64 / r.usd_rent)
}

/// The message about a load without requests.
pub(super) const NO_REQUEST: &str = "there is no request to simulate: the trace is empty";

/// Refuses the results of a load if no request fits into the model's context.
fn check_context(results: &Results, context: Option<u32>) -> Result<()> {
    let beyond = results.rejected.get(BEYOND_CONTEXT).copied().unwrap_or(0);
    let Some(context) = context.filter(|_| beyond > 0 && beyond == results.requests) else { return Ok(()) };
    let message = format!("all {beyond} requests are beyond the model's context, {context} tokens");
    Err(Failed(message).into())
}

/// Refuses the results of a fleet that can serve no request of the load at any speed.
pub(super) fn check_served(results: &Results, unmet: &Unmet) -> Result<()> {
    if results.requests == 0 {
        return Err(Failed(NO_REQUEST.into()).into());
    }
    let rejected: u64 = results.rejected.values().sum();
    let never = |reason: &String| ["too_large", "no_instance"].contains(&reason.as_str());
    if rejected < results.requests || !results.rejected.keys().all(never) {
        return Ok(());
    }
    let why = match unmet.too_large() {
        Some(why) => format!("up to {why}; take more or larger devices to an instance"),
        None => "no instance that computes prompts is linked to one that decodes".into(),
    };
    Err(Failed(format!("the fleet can serve none of the {} requests: {why}", results.requests)).into())
}
