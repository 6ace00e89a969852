//! The arguments of `mixfleet simulate`.

use super::closed_loop::ClosedLoopArgs;
use crate::failure::UsageError;
use crate::numbers::{seconds, share};
use crate::output_files::writable;
use crate::scheduling::SchedulingArgs;
use crate::trace_file::ReplayArgs;
use anyhow::Result;
use clap::Args;
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_sim::fleet_file::Routing;
use mixfleet_sim::trace::Trace;
use std::path::{Path, PathBuf};

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
    pub(super) trace: Option<PathBuf>,
    /// Fleet file (docs/reference/fleet-file.md); repeatable
    #[arg(long, value_name = "FLEET.toml", required = true)]
    pub(super) fleet: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) scheduling: SchedulingArgs,
    /// The scheduling of each of several fleets, which its file may set.
    #[arg(skip)]
    pub(crate) scheduling_of_each: Vec<SchedulingArgs>,
    /// Offers in place of all prices; a part without one is an error, unless its pool has usd_per_hour
    #[arg(long, value_name = "CSV")]
    pub(super) prices: Option<PathBuf>,
    #[command(flatten)]
    pub(super) replay: ReplayArgs,
    #[command(flatten)]
    pub(super) closed_loop: ClosedLoopArgs,
    /// In place of --trace: simulate a recorded run and print the errors
    #[arg(long, value_name = "RUN.jsonl", conflicts_with_all = ["trace", "capacity", "speedup", "jitter", "limit"])]
    pub(super) against: Option<PathBuf>,
    /// Serving engine of pools that name none [default: the fleet file's, or mixfleet]
    #[arg(long, value_name = "NAME", value_parser = engines::find)]
    pub(super) engine: Option<&'static KnownEngine>,
    /// Routers that share the requests [default: the file's, or 1]
    #[arg(long, value_name = "N", value_parser = crate::numbers::count::<u32>(1..=u64::from(Routing::COUNT_MAX)))]
    pub(super) routers: Option<u32>,
    /// Also simulate one more instance of each pool, and name the best
    #[arg(long, conflicts_with = "capacity")]
    pub(super) add: bool,
    /// Find the highest --speedup that meets the SLO for this share of requests [default: 0.99]
    #[arg(long, value_name = "SHARE", num_args = 0..=1, require_equals = true, default_missing_value = "0.99")]
    #[arg(value_parser = share, conflicts_with_all = ["speedup", "timeline", "html"])]
    pub(super) capacity: Option<f64>,
    /// Write the load of each pool over time as CSV
    #[arg(long, value_name = "FILE.csv")]
    pub(super) timeline: Option<PathBuf>,
    /// Interval of --timeline and --html samples [default: 10; 1 with --html alone]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, hide = true)]
    pub(super) timeline_interval_s: Option<f64>,
    /// Write each request with its times, as a run for --against
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "capacity")]
    pub(super) requests_out: Option<PathBuf>,
    /// Write an HTML report
    #[arg(long, value_name = "FILE.html")]
    pub(super) html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

impl SimulateArgs {
    pub(super) fn open_trace(&self) -> Result<Trace> {
        let path = self.trace.as_deref().ok_or_else(|| UsageError("--trace is missing".into()))?;
        Ok(self.replay.open(path)?)
    }

    pub(super) fn interval_s(&self) -> Result<f64> {
        let default = if self.timeline.is_some() { TABLE_INTERVAL_S } else { PAGE_INTERVAL_S };
        match self.timeline_interval_s {
            Some(_) if self.timeline.is_none() && self.html.is_none() => {
                Err(UsageError("--timeline-interval-s needs --timeline or --html".into()).into())
            }
            Some(s) if s < INTERVAL_S_MIN => {
                Err(UsageError(format!("--timeline-interval-s {s} is below {INTERVAL_S_MIN}")).into())
            }
            given => Ok(given.unwrap_or(default)),
        }
    }

    /// Checks before the run that its output files can be written, and that none is one of its other files.
    pub(super) fn check_files(&self) -> Result<()> {
        let mut others: Vec<_> = self.fleet.iter().map(|fleet| (fleet, "--fleet")).collect();
        others.extend(self.trace.iter().map(|trace| (trace, "--trace")));
        others.extend(self.against.iter().map(|run| (run, "--against")));
        others.extend(self.prices.iter().map(|list| (list, "--prices")));
        for (file, flag) in self.outputs() {
            let Some(file) = file else { continue };
            if let Some((_, other)) = others.iter().find(|(other, _)| place(file) == place(other)) {
                return Err(UsageError(format!("{flag} would write over the file of {other}")).into());
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
