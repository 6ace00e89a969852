//! Implements `mixfleet simulate`: a trace on a fleet that need not exist.

mod answers;
mod capacity;
mod closed_loop;
mod history;
mod page;
mod subject;
mod timeline;
mod watch;

use crate::scheduling::SchedulingArgs;
use crate::trace::{FileBar, ReplayArgs, clock, positive};
use crate::{Usage, profiles, writable};
use anyhow::{Context, Result};
use clap::Args;
use closed_loop::ClosedLoopArgs;
use history::History;
use mixfleet_scheduler::engines::KnownEngine;
use mixfleet_scheduler::fleet::Admission;
use mixfleet_sim::against::RunErrors;
use mixfleet_sim::fleet_file::{FleetFile, Routing};
use mixfleet_sim::simulate::{Distribution, Misses, Results, Setup, run as simulate};
use mixfleet_sim::trace::{ClosedLoop, RecordedRun, Requests, Trace};
use page::{Subject, page};
use serde_json::json;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use subject::Simulated;
pub(crate) use subject::word;
use timeline::TimelineFile;
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
    /// Fleet file (docs/fleet-file.md)
    #[arg(long, value_name = "FLEET.toml")]
    fleet: PathBuf,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    #[command(flatten)]
    replay: ReplayArgs,
    #[command(flatten)]
    closed_loop: ClosedLoopArgs,
    /// In place of --trace: simulate a recorded run (a request-log with times) and print the errors
    #[arg(long, value_name = "RUN.jsonl", conflicts_with_all = ["trace", "capacity", "speedup", "jitter", "limit"])]
    against: Option<PathBuf>,
    /// Serving engine of pools that name none: mixfleet, vllm, sglang or tensorrt-llm [default: the fleet
    /// file's, or mixfleet]
    #[arg(long, value_name = "NAME", value_parser = crate::compare::engine)]
    engine: Option<&'static KnownEngine>,
    /// Routers that share the requests [default: the fleet file's, or 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(Routing::COUNT_MAX)))]
    routers: Option<u32>,
    /// Find the highest --speedup that meets the SLO for this share of requests [default: 0.99]
    #[arg(long, value_name = "SHARE", num_args = 0..=1, require_equals = true, default_missing_value = "0.99")]
    #[arg(value_parser = share, conflicts_with_all = ["speedup", "timeline", "html"])]
    capacity: Option<f64>,
    /// Write the load of each pool over time as CSV
    #[arg(long, value_name = "FILE.csv")]
    timeline: Option<PathBuf>,
    /// Interval of --timeline and --html samples [default: 10; 1 with --html alone]
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
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
        let mut others = vec![(&self.fleet, "--fleet")];
        others.extend(self.trace.iter().map(|trace| (trace, "--trace")));
        others.extend(self.against.iter().map(|run| (run, "--against")));
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

    /// Removes the empty file that [`writable`] made, after a run that failed.
    fn leave_no_empty_page(&self) {
        if let Some(file) = &self.html
            && std::fs::metadata(file).is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
        {
            // The error to report is the run's own.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Parses a share.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "expected a share above 0, at most 1".into())
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
    let interval_s = args.interval_s()?;
    let mut choices = args.scheduling.choices()?;
    if args.against.is_some() {
        // What was recorded was served.
        choices.admission = Admission::None;
    }
    let read = |path: &std::path::Path| profiles::read(path).map_err(|error| format!("{error:#}"));
    let fleet = FleetFile::read(&args.fleet, &read, args.engine)
        .with_context(|| format!("the fleet file {}", args.fleet.display()))?;
    let mut setup = Setup::new(&fleet, choices);
    setup.fleet.drop_at_decode = args.scheduling.drop_late;
    setup.fleet.wait_usd_per_s = args.scheduling.wait_usd_per_s;
    setup.fleet.kv_weight = args.scheduling.kv_weight;
    setup.routers.count = args.routers.unwrap_or(setup.routers.count);
    if let Some(share) = args.capacity {
        return capacity::run(args, &fleet, &setup, share);
    }
    let simulated = Simulated::new(args, &fleet, &setup)?;
    let start = std::time::Instant::now();
    let closed_loop = args.closed_loop.load(args.scheduling.seed);
    let mut trace = args.trace.as_deref().map(|path| args.replay.open(path)).transpose()?;
    let recorded = args.against.as_deref().map(RecordedRun::read).transpose()?;
    args.check_files()?;
    let cannot_write = |path: &Path| format!("cannot write {}", path.display());
    let timeline = args
        .timeline
        .as_deref()
        .map(|path| TimelineFile::create(path, &setup.pools).with_context(|| cannot_write(path)));
    let mut watch = Watch {
        bar: FileBar::new(trace.as_ref().map(Trace::progress)),
        timeline: timeline.transpose()?,
        history: args.html.is_some().then(|| History::new(setup.pools.len())),
        interval_s,
        goal: None,
        answers: (args.requests_out.is_some() || recorded.is_some()).then(Vec::new),
    };
    let results = match (&mut trace, &recorded, closed_loop) {
        (None, Some(run), _) => simulate(&setup, run.trace(), &mut watch),
        (Some(trace), ..) => {
            let blocks = trace.block_tokens().unwrap_or(fleet.kv.block_tokens);
            let requests = args.replay.play(trace, args.scheduling.seed);
            simulate(&setup, requests.rechain(blocks, fleet.kv.block_tokens), &mut watch)
        }
        (None, None, load) => simulate(&setup, load.into_iter().flat_map(ClosedLoop::requests), &mut watch),
    };
    let results = results.inspect_err(|_| args.leave_no_empty_page())?;
    let Watch { bar, timeline, history, answers, .. } = watch;
    let mut answers = answers.unwrap_or_default();
    let errors = recorded.map(|run| RunErrors::new(&run, &answers));
    drop(bar);
    if let (Some(timeline), Some(path)) = (timeline, &args.timeline) {
        timeline.finish().with_context(|| cannot_write(path))?;
    }
    if let Some(path) = &args.requests_out {
        answers::write_log(path, &mut answers).with_context(|| cannot_write(path))?;
    }
    if let (Some(history), Some(path)) = (&history, &args.html) {
        let text = page(&Subject { setup: &setup, results: &results, history, simulated: &simulated });
        std::fs::write(path, text).with_context(|| cannot_write(path))?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut document = serde_json::to_value(&results)?;
        document["simulated"] = json!(simulated);
        // Whole seconds, rounded up, so that documents of equal runs can be compared.
        document["wall_s"] = json!(start.elapsed().as_secs_f64().ceil());
        if let Some(errors) = errors {
            document["against"] = json!(errors);
        }
        writeln!(out, "{document:#}")?;
    } else {
        write!(out, "{}", table(&simulated, &results))?;
        if let Some(errors) = &errors {
            write!(out, "{}", answers::errors_table(errors))?;
        }
    }
    Ok(())
}

fn table(simulated: &Simulated, r: &Results) -> String {
    let mut text = String::new();
    let rejected: u64 = r.rejected.values().sum();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    for (name, value) in simulated.facts() {
        line(name, value);
    }
    line(
        "requests",
        format!("{}: {} completed, {rejected} rejected, {} dropped", r.requests, r.completed, r.dropped),
    );
    for (reason, count) in &r.rejected {
        line("", format!("{count} rejected: {reason}"));
    }
    let spread = |d: &Distribution| {
        if r.completed == 0 {
            return "-".to_owned();
        }
        format!("mean {:.4}, p50 {:.4}, p90 {:.4}, p99 {:.4} s", d.mean, d.p50, d.p90, d.p99)
    };
    line("TTFT", spread(&r.ttft_s));
    line("TPOT", spread(&r.tpot_s));
    line("TBT", spread(&r.tbt_s));
    line("latency", spread(&r.e2e_s));
    line("throughput", format!("{:.1} output tokens/s", r.output_tokens_per_s));
    line("within the SLO", format!("{:.2} %, {:.3} requests/s", 100.0 * r.slo_attainment, r.goodput_rps));
    let Misses { ttft, tbt, deadline } = r.missed_by;
    let late = [("TTFT", ttft), ("TBT", tbt), ("deadline", deadline)];
    let late = late.iter().filter(|(_, count)| *count > 0);
    let late: Vec<String> = late.map(|(what, count)| format!("{what} {count}")).collect();
    if !late.is_empty() {
        let answers = r.missed.saturating_sub(rejected + r.dropped);
        line("", format!("{answers} answers missed it: {}", late.join(", ")));
    }
    for class in &r.classes {
        let (good, ttft, e2e) = (100.0 * class.slo_attainment, class.ttft_s.mean, class.e2e_s.mean);
        let times = format!("mean TTFT {ttft:.3}, latency {e2e:.3} s");
        line("", format!("{}: {good:.2} % of {}, {times}", class.name, class.requests));
    }
    line(
        "prefix hit",
        format!(
            "{:.2} % of blocks, {:.2} % of tokens",
            100.0 * r.prefix_hit.block,
            100.0 * r.prefix_hit.token
        ),
    );
    let from = r.prefix_hit_from;
    if from.dram + from.ssd + from.pulled > 0.0 {
        let shares =
            [("device", from.device), ("DRAM", from.dram), ("SSD", from.ssd), ("pulled", from.pulled)];
        let shares = shares.map(|(source, share)| format!("{source} {:.2} %", 100.0 * share));
        line("of tokens from", shares.join(", "));
    }
    for (pool, rented) in r.pools.iter().zip(&simulated.pools) {
        line(&pool.name, rented.text());
        let busy = format!(
            "{:.1} % busy: prefill {:.0} s, decode {:.0} s",
            100.0 * pool.utilisation,
            pool.prefill_device_s,
            pool.decode_device_s
        );
        line("", busy);
        line("", format!("times from {}", pool.basis.text()));
    }
    for (link, bytes) in &r.kv_bytes_moved {
        line("KV moved", format!("{:.1} GB {link}", bytes / 1e9));
    }
    if let Some(sent) = &r.replicated {
        let (gb, dropped) = (sent.bytes / 1e9, sent.dropped);
        line("of it ahead", format!("{gb:.1} GB, {} prefixes copied, {dropped} dropped", sent.copies));
    }
    if r.usd_rent > 0.0 {
        let per_hour = simulated.usd_per_hour.map_or(String::new(), |usd| format!("${usd:.2} per hour: "));
        let per_million = r.usd_rent_per_million_tokens;
        line("rent", format!("{per_hour}${:.2}, ${per_million:.4} per million tokens", r.usd_rent));
        line(
            "of it used",
            format!("${:.2}, ${:.4} per million tokens", r.usd_busy, r.usd_busy_per_million_tokens),
        );
    }
    line("simulated time", format!("{:.0} s", r.simulated_s));
    text
}
