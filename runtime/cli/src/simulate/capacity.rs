//! Implements `--capacity`: the highest speed-up at which a fleet meets its SLO, and what a dollar of rent
//! serves then.

use super::SimulateArgs;
use super::subject::Simulated;
use super::watch::Watch;
use crate::Failed;
use crate::trace::FileBar;
use anyhow::Result;
use mixfleet_sim::capacity::{Goal, PRECISION, Probe, SPEEDUP_MAX, SPEEDUP_MIN, search};
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Setup, run as simulate};
use mixfleet_sim::trace::Requests;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    /// The share of requests that must meet the SLO.
    share: f64,
    speedup: f64,
    /// Maximum ratio of the speed-up that failed to the one that passed.
    precision: f64,
    /// Whether any probe failed; if not, all numbers are lower bounds.
    bounded: bool,
    requests_per_s: f64,
    /// Requests per second that meet the SLO.
    good_requests_per_s: f64,
    slo_attainment: f64,
    usd_per_hour: Option<f64>,
    requests_per_usd: Option<f64>,
    simulated: &'a Simulated,
    probes: &'a [Probe],
}

pub(super) fn run(args: &SimulateArgs, fleet: &FleetFile, setup: &Setup, share: f64) -> Result<()> {
    let terminal = std::io::stderr().is_terminal();
    let prober = Prober::new(args, fleet, setup, share)?;
    let capacity = search(|speedup| {
        let probe = prober.probe(speedup, false)?;
        if terminal {
            let (percent, word) =
                (100.0 * probe.slo_attainment, if probe.passed { "passed" } else { "failed" });
            let bound = if probe.passed { "" } else { "at most " };
            eprintln!("speed-up {speedup:.4}: {bound}{percent:.2} % within the SLO, {word}");
        }
        anyhow::Ok(probe)
    })?;
    let Some(best) = capacity.best else {
        let slowest = prober.probe(SPEEDUP_MIN, true)?;
        return Err(Failed(no_capacity(slowest.slo_attainment, share)).into());
    };
    let usd_per_hour = fleet.usd_per_hour().filter(|&usd| usd > 0.0);
    let simulated = Simulated::new(args, fleet, setup)?;
    let document = Document {
        schema: "mixfleet.capacity/1",
        share,
        speedup: best.speedup,
        precision: PRECISION,
        bounded: capacity.bounded,
        requests_per_s: best.requests_per_s,
        good_requests_per_s: best.requests_per_s * best.slo_attainment,
        slo_attainment: best.slo_attainment,
        usd_per_hour,
        requests_per_usd: usd_per_hour.map(|usd| best.requests_per_s * 3600.0 / usd),
        simulated: &simulated,
        probes: &capacity.probes,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        write!(out, "{}", table(&document))?;
    }
    Ok(())
}

/// What the probes of a search have in common.
struct Prober<'a> {
    args: &'a SimulateArgs,
    fleet: &'a FleetFile,
    setup: &'a Setup,
    goal: Goal,
    /// When the last request arrives at the trace's own speed.
    last_at_s: f64,
}

impl<'a> Prober<'a> {
    fn new(args: &'a SimulateArgs, fleet: &'a FleetFile, setup: &'a Setup, share: f64) -> Result<Self> {
        let mut trace = args.open_trace()?;
        let (mut requests, mut last_at_s) = (0, 0.0);
        for request in args.replay.play_at(&mut trace, args.scheduling.seed, 1.0) {
            requests += 1;
            last_at_s = request?.at.0;
        }
        Ok(Prober { args, fleet, setup, goal: Goal { requests, share }, last_at_s })
    }

    /// Runs the trace at one speed-up. With `to_the_end` false the run ends as soon as it is sure to fail.
    fn probe(&self, speedup: f64, to_the_end: bool) -> Result<Probe> {
        let &Prober { args, setup, goal, .. } = self;
        let mut trace = args.open_trace()?;
        let bar = FileBar::new(Some(trace.progress()));
        let goal_watched = (!to_the_end).then_some(goal);
        let mut watch = Watch {
            bar,
            timeline: None,
            history: None,
            interval_s: f64::INFINITY,
            goal: goal_watched,
            answers: None,
        };
        let blocks = trace.block_tokens().unwrap_or(self.fleet.kv.block_tokens);
        let requests = args.replay.play_at(&mut trace, args.scheduling.seed, speedup);
        let results = simulate(setup, requests.rechain(blocks, self.fleet.kv.block_tokens), &mut watch)?;
        let last_at_s = self.last_at_s / speedup;
        Ok(Probe::new(speedup, goal.share, goal.requests, last_at_s, goal.attainable(results.missed)))
    }
}

fn no_capacity(attainment: f64, share: f64) -> String {
    format!(
        "the fleet misses the SLO at any speed-up down to {SPEEDUP_MIN}, where {:.2} % of the requests meet it \
         and {:.2} % were asked for: some prompts are too long for the TTFT, or steps too slow for the TBT, \
         even alone; take quicker instances, a looser [slo], or a lower --capacity=SHARE",
        100.0 * attainment,
        100.0 * share
    )
}

fn table(d: &Document<'_>) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    for (name, value) in d.simulated.facts() {
        line(name, value);
    }
    let bound = if d.bounded { "" } else { "at least " };
    line("speed-up", format!("{bound}{:.4}, by {} probes", d.speedup, d.probes.len()));
    line("arrivals", format!("{:.3} requests/s", d.requests_per_s));
    let percent = 100.0 * d.slo_attainment;
    line("within the SLO", format!("{percent:.2} %, {:.3} requests/s", d.good_requests_per_s));
    match (d.usd_per_hour, d.requests_per_usd) {
        (Some(usd), Some(requests)) => {
            line("rent", format!("${usd:.3} per hour"));
            line("requests", format!("{requests:.0} per dollar"));
        }
        _ => line("rent", "of some pools no price is known: give usd_per_hour".into()),
    }
    for pool in &d.simulated.pools {
        line(&pool.name, pool.text());
    }
    if !d.bounded {
        line("", format!("no speed-up up to {SPEEDUP_MAX} fails: the trace is too short to tell"));
    }
    text
}
