//! Implements `mixfleet simulate`: a trace on a fleet that need not exist.

mod additions;
mod answers;
mod capacity;
mod closed_loop;
mod history;
mod opened;
mod page;
mod side_by_side;
mod subject;
mod table;
mod timeline;
mod unmet;
mod watch;

use crate::failure::{Failed, Usage};
use crate::numbers::{positive, share};
use crate::output_files::{leave_no_empty, writable};
use crate::prices;
use crate::scheduling::SchedulingArgs;
use crate::screen;
use crate::trace_file::{FileBar, ReplayArgs};
use additions::Additions;
use anyhow::{Context, Result};
use clap::Args;
use closed_loop::ClosedLoopArgs;
use history::History;
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_sim::against::RunErrors;
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::fleet_file::Routing;
use mixfleet_sim::simulate::Results;
use mixfleet_sim::trace::Trace;
use opened::{LoadSource, OpenedFleet};
use page::{Subject, page};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use timeline::TimelineFile;
use unmet::Unmet;
use watch::Watch;

/// Seconds between samples of a table, which keeps them all.
const TABLE_INTERVAL_S: f64 = 10.0;
/// Seconds between samples of a page alone, which averages them.
const PAGE_INTERVAL_S: f64 = 1.0;
/// Minimum interval of samples, since traces may span centuries.
const INTERVAL_S_MIN: f64 = 1e-3;

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Request trace, in any format of 'mixfleet trace stats'
    #[arg(long, value_name = "FILE", required_unless_present_any = ["against", "closed_loop"])]
    trace: Option<PathBuf>,
    /// Fleet file (docs/fleet-file.md); repeatable, to compare fleets
    #[arg(long, value_name = "FLEET.toml", required = true)]
    fleet: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    /// The scheduling of each of several fleets, which its file may set.
    #[arg(skip)]
    pub(crate) scheduling_of_each: Vec<SchedulingArgs>,
    /// Offers in place of all prices; a part without one is an error, unless its pool has usd_per_hour
    #[arg(long, value_name = "CSV")]
    prices: Option<PathBuf>,
    #[command(flatten)]
    replay: ReplayArgs,
    #[command(flatten)]
    closed_loop: ClosedLoopArgs,
    /// In place of --trace: simulate a recorded run and print the errors
    #[arg(long, value_name = "RUN.jsonl", conflicts_with_all = ["trace", "capacity", "speedup", "jitter", "limit"])]
    against: Option<PathBuf>,
    /// Serving engine of pools that name none [default: the fleet file's, or mixfleet]
    #[arg(long, value_name = "NAME", value_parser = engines::find)]
    engine: Option<&'static KnownEngine>,
    /// Routers that share the requests [default: the file's, or 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(Routing::COUNT_MAX)))]
    routers: Option<u32>,
    /// Simulate one instance more of each pool too, and name the best
    #[arg(long, conflicts_with = "capacity")]
    add: bool,
    /// Find the highest --speedup that meets the SLO for this share of requests [default: 0.99]
    #[arg(long, value_name = "SHARE", num_args = 0..=1, require_equals = true, default_missing_value = "0.99")]
    #[arg(value_parser = share, conflicts_with_all = ["speedup", "timeline", "html"])]
    capacity: Option<f64>,
    /// Write the load of each pool over time as CSV
    #[arg(long, value_name = "FILE.csv")]
    timeline: Option<PathBuf>,
    /// Interval of --timeline and --html samples [default: 10; 1 with --html alone]
    #[arg(long, value_name = "SECONDS", value_parser = positive, hide = true)]
    timeline_interval_s: Option<f64>,
    /// Write each request with its times, as a run for --against
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "capacity")]
    requests_out: Option<PathBuf>,
    /// Write an HTML report
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl SimulateArgs {
    fn open_trace(&self) -> Result<Trace> {
        let path = self.trace.as_deref().ok_or_else(|| Usage("--trace is missing".into()))?;
        Ok(self.replay.open(path)?)
    }

    fn interval_s(&self) -> Result<f64> {
        let default = if self.timeline.is_some() { TABLE_INTERVAL_S } else { PAGE_INTERVAL_S };
        match self.timeline_interval_s {
            Some(_) if self.timeline.is_none() && self.html.is_none() => {
                Err(Usage("--timeline-interval-s needs --timeline or --html".into()).into())
            }
            Some(s) if s < INTERVAL_S_MIN => {
                Err(Usage(format!("--timeline-interval-s {s} is below {INTERVAL_S_MIN}")).into())
            }
            given => Ok(given.unwrap_or(default)),
        }
    }

    /// Checks before the run that its output files can be written, and that none is one of its other files.
    fn check_files(&self) -> Result<()> {
        let mut others: Vec<_> = self.fleet.iter().map(|fleet| (fleet, "--fleet")).collect();
        others.extend(self.trace.iter().map(|trace| (trace, "--trace")));
        others.extend(self.against.iter().map(|run| (run, "--against")));
        others.extend(self.prices.iter().map(|list| (list, "--prices")));
        for (file, flag) in self.outputs() {
            let Some(file) = file else { continue };
            if let Some((_, other)) = others.iter().find(|(other, _)| place(file) == place(other)) {
                return Err(Usage(format!("{flag} would write over the file of {other}")).into());
            }
            others.push((file, flag));
        }
        self.outputs().into_iter().filter_map(|(file, _)| file.as_ref()).try_for_each(|file| writable(file))
    }

    /// The files that it writes, with their flags.
    fn outputs(&self) -> [(&Option<PathBuf>, &'static str); 3] {
        let requests = (&self.requests_out, "--requests-out");
        [(&self.timeline, "--timeline"), (&self.html, "--html"), requests]
    }
}

/// The path of an existing or future file, independent of how it was spelled.
fn place(file: &Path) -> PathBuf {
    let in_parent = || {
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(parent.canonicalize().ok()?.join(file.file_name()?))
    };
    file.canonicalize().ok().or_else(in_parent).unwrap_or_else(|| file.to_owned())
}

pub(crate) fn run(args: &SimulateArgs) -> Result<()> {
    args.interval_s()?;
    let list = args.prices.as_deref().map(prices::read).transpose()?;
    for warning in list.iter().flat_map(|list| list.warnings(&[])) {
        eprintln!("warning: {warning}");
    }
    if args.fleet.len() > 1 {
        return side_by_side::run(args, list.as_ref());
    }
    let path = args.fleet.first().ok_or_else(|| Usage("--fleet is missing".into()))?;
    let fleet = OpenedFleet::open(args, path, &args.scheduling, list.as_ref())?;
    match args.capacity {
        Some(share) => capacity::run(&fleet, share),
        None => one(&fleet),
    }
}

/// Simulates one fleet, and writes and prints what is asked for.
fn one(fleet: &OpenedFleet<'_>) -> Result<()> {
    let OpenedFleet { args, setup, .. } = fleet;
    let start = std::time::Instant::now();
    let mut load = fleet.load()?;
    args.check_files()?;
    let cannot_write = |path: &Path| format!("cannot write {}", path.display());
    let mut watch = Watch::new(FileBar::new(load.progress()), setup);
    watch.interval_s = args.interval_s()?;
    let timeline = args.timeline.as_deref();
    let timeline = timeline
        .map(|path| TimelineFile::create(path, &setup.pools).with_context(|| cannot_write(path)))
        .transpose()?;
    watch.timeline = timeline;
    watch.history = args.html.is_some().then(|| History::new(setup.pools.len()));
    watch.answers = (args.requests_out.is_some() || args.against.is_some()).then(Vec::new);
    let ran = fleet.play(&mut load, setup, &mut watch).and_then(|results| {
        check_served(&results, &watch.unmet)?;
        Ok(results)
    });
    let results = ran.inspect_err(|_| leave_no_empty(args.html.as_deref()))?;
    let Watch { bar, timeline, history, answers, unmet, .. } = watch;
    drop(bar);
    let mut answers = answers.unwrap_or_default();
    let errors = match &load {
        LoadSource::Recorded(run) => Some(RunErrors::new(run, &answers)),
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
fn document(fleet: &OpenedFleet<'_>, results: &Results) -> Result<Value> {
    let mut document = serde_json::to_value(results)?;
    document["simulated"] = json!(fleet.simulated);
    document["bottleneck"] = json!(Bottleneck::of(results));
    document["good_requests_per_usd"] = json!(good_per_usd(fleet, results));
    Ok(document)
}

/// Requests within the SLO per dollar of rent and traffic, where all prices are known.
fn good_per_usd(fleet: &OpenedFleet<'_>, r: &Results) -> Option<f64> {
    let is_priced = fleet.simulated.usd_per_hour.is_some() && r.usd_rent > 0.0;
    is_priced.then(|| r.requests.saturating_sub(r.missed) as f64 / r.usd_rent)
}

/// What is said of a load without requests.
const NO_REQUEST: &str = "there is no request to simulate: the trace is empty";

/// Refuses the results of a fleet that can serve no request of the load, whatever its speed.
fn check_served(results: &Results, unmet: &Unmet) -> Result<()> {
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
