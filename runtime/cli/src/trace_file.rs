//! A trace file as commands play it: the flags, and a progress bar.

use crate::numbers::{count, positive, seconds};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hal::cast::{to_u64, to_usize};
use mixfleet_hal::units::Seconds;
use mixfleet_sim::trace::{Progress, ReadOptions, Request, Requests, Trace, TraceError};
use std::fmt::Write as _;
use std::path::Path;

/// Options for replaying a trace file.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Speed up arrivals by this factor, leaving think times
    #[arg(long, value_name = "F", default_value_t = 1.0, hide_default_value = true, value_parser = positive)]
    speedup: f64,
    /// Spread equal arrivals over this time [alone: 3]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "3", value_parser = seconds)]
    jitter: Option<f64>,
    /// Stop after this many requests
    #[arg(long, value_name = "N", value_parser = count::<u64>(0..=u64::MAX))]
    limit: Option<u64>,
    /// Tokens per block id in Mooncake's format [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = crate::numbers::count::<u32>(1..=u32::MAX.into()), hide = true)]
    block_tokens: Option<u32>,
    /// Interval between agentic session starts, which the format lacks [default: 60]
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, hide = true, value_parser = seconds)]
    session_every: f64,
}

impl ReplayArgs {
    /// Parts of the file that are not replayed as they stand, as text after its name.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        if self.speedup != 1.0 {
            let _ = write!(text, ", {} times as fast", self.speedup);
        }
        if let Some(seconds) = self.jitter {
            let _ = write!(text, ", spread over {seconds} s");
        }
        if let Some(count) = self.limit {
            let _ = write!(text, ", the first {count} requests");
        }
        text
    }

    /// Opens the trace at `path`.
    pub(crate) fn open(&self, path: &Path) -> Result<Trace, TraceError> {
        Trace::open(path, self.reading())
    }

    /// Reads a trace from standard input, which can be played once.
    pub(crate) fn open_stdin(&self) -> Result<Trace, TraceError> {
        Trace::from_reader("standard input", std::io::stdin(), self.reading())
    }

    fn reading(&self) -> ReadOptions {
        ReadOptions { block_tokens: self.block_tokens, session_every: Seconds(self.session_every) }
    }

    /// The requests of `trace` to be replayed, with jitter drawn by `seed`.
    pub(crate) fn play<'a>(
        &self,
        trace: &'a mut Trace,
        seed: u64,
    ) -> Box<dyn Iterator<Item = Result<Request, TraceError>> + 'a> {
        self.play_at(trace, seed, self.speedup)
    }

    /// The requests of `trace` with arrivals `speedup` times as fast, ignoring the flag.
    pub(crate) fn play_at<'a>(
        &self,
        trace: &'a mut Trace,
        seed: u64,
        speedup: f64,
    ) -> Box<dyn Iterator<Item = Result<Request, TraceError>> + 'a> {
        let limited = trace.take(self.limit.map_or(usize::MAX, to_usize));
        match self.jitter {
            Some(bin) => Box::new(limited.jitter(Seconds(bin), seed).speedup(speedup)),
            None => Box::new(limited.speedup(speedup)),
        }
    }
}

/// Requests between two updates of the progress bar.
const EVERY: u64 = 1024;

/// A progress bar over the bytes of a trace file, if there is one, on standard error if that is a terminal.
pub(crate) struct FileBar {
    bar: ProgressBar,
    progress: Option<Progress>,
    requests: u64,
}

impl FileBar {
    pub(crate) fn new(progress: Option<Progress>) -> Self {
        let bar = match progress.as_ref().and_then(Progress::total) {
            Some(total) => {
                let template = "{wide_bar} {bytes}/{total_bytes} {eta} {msg}";
                let style = ProgressStyle::with_template(template).expect("a fixed template");
                ProgressBar::new(total).with_style(style)
            }
            None => ProgressBar::new_spinner(),
        };
        FileBar { bar, progress, requests: 0 }
    }

    /// Counts one more request.
    pub(crate) fn tick(&mut self) {
        self.count("");
    }

    /// Counts one more request, which arrives at `now_s` of virtual time.
    pub(crate) fn tick_at(&mut self, now_s: f64) {
        // The clock's text is not built if it is not shown.
        let due = (self.requests + 1).is_multiple_of(EVERY);
        let clock = if due { format!(", {} simulated", clock(now_s)) } else { String::new() };
        self.count(&clock);
    }

    fn count(&mut self, more: &str) {
        self.requests += 1;
        if self.requests.is_multiple_of(EVERY) {
            let rate = self.requests as f64 / self.bar.elapsed().as_secs_f64().max(1e-3);
            self.bar.set_position(self.progress.as_ref().map_or(self.requests, Progress::bytes));
            self.bar.set_message(format!("{} requests, {rate:.0}/s{more}", self.requests));
        }
    }
}

/// A time as `1:02:03`.
pub(crate) fn clock(time_s: f64) -> String {
    let seconds = to_u64(time_s);
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

impl Drop for FileBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
