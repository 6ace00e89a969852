//! Implements `--capacity`: the highest speed-up at which a fleet meets its SLO, and what a dollar of rent
//! serves then.

use super::opened::OpenedFleet;
use super::run::NO_REQUEST;
use super::subject::SimulationSubject;
use super::unmet::Unmet;
use super::watch::RunWatch;
use crate::failure::Failed;
use crate::screen;
use crate::trace_file::FileBar;
use anyhow::Result;
use mixfleet_sim::capacity::{Goal, PRECISION, Probe, SPEEDUP_MAX, SPEEDUP_MIN, search};
use mixfleet_sim::simulate::run as simulate;
use mixfleet_sim::trace::Requests;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};

#[derive(Serialize)]
struct CapacityDocument<'a> {
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
    simulated: &'a SimulationSubject,
    probes: &'a [Probe],
}

pub(super) fn run(fleet: &OpenedFleet<'_>, share: f64) -> Result<()> {
    let terminal = std::io::stderr().is_terminal();
    let prober = Prober::new(fleet, share)?;
    let capacity = search(|speedup| {
        let (probe, _) = prober.probe(speedup, false)?;
        if terminal {
            let (percent, word) =
                (100.0 * probe.slo_attainment, if probe.passed { "passed" } else { "failed" });
            let bound = if probe.passed { "" } else { "at most " };
            eprintln!("speed-up {speedup:.4}: {bound}{percent:.2} % within the SLO, {word}");
        }
        anyhow::Ok(probe)
    })?;
    let Some(best) = capacity.best else {
        let (slowest, unmet) = prober.probe(SPEEDUP_MIN, true)?;
        return Err(Failed(no_capacity(slowest.slo_attainment, share, &unmet)).into());
    };
    let usd_per_hour = fleet.file.usd_per_hour().filter(|&usd| usd > 0.0);
    let document = CapacityDocument {
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
        simulated: &fleet.simulated,
        probes: &capacity.probes,
    };
    let mut out = screen::output(fleet.args.json);
    if fleet.args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        write!(out, "{}", table(&document))?;
    }
    Ok(())
}

/// What the probes of a search have in common.
struct Prober<'a> {
    fleet: &'a OpenedFleet<'a>,
    goal: Goal,
    /// When the last request arrives at the trace's own speed.
    last_at_s: f64,
}

impl<'a> Prober<'a> {
    fn new(fleet: &'a OpenedFleet<'a>, share: f64) -> Result<Self> {
        let mut trace = fleet.args.open_trace()?;
        let (mut requests, mut last_at_s) = (0, 0.0);
        for request in fleet.args.replay.play_at(&mut trace, fleet.scheduling.seed, 1.0) {
            requests += 1;
            last_at_s = request?.at.0;
        }
        if requests == 0 {
            return Err(Failed(NO_REQUEST.into()).into());
        }
        Ok(Prober { fleet, goal: Goal { requests, share }, last_at_s })
    }

    /// Runs the trace at one speed-up. With `to_the_end` false the run ends as soon as it is sure to fail.
    fn probe(&self, speedup: f64, to_the_end: bool) -> Result<(Probe, Unmet)> {
        let &Prober { fleet, goal, last_at_s } = self;
        let mut trace = fleet.args.open_trace()?;
        let mut watch = RunWatch::new(FileBar::new(Some(trace.progress())), &fleet.setup);
        watch.goal = (!to_the_end).then_some(goal);
        let blocks = trace.block_tokens().unwrap_or(fleet.file.kv.block_tokens);
        let requests = fleet.args.replay.play_at(&mut trace, fleet.scheduling.seed, speedup);
        let requests = requests.rechain(blocks, fleet.file.kv.block_tokens);
        let results = simulate(&fleet.setup, requests, &mut watch)?;
        let attained = goal.attainable(results.missed);
        Ok((Probe::new(speedup, goal.share, goal.requests, last_at_s / speedup, attained), watch.unmet))
    }
}

fn no_capacity(attainment: f64, share: f64, unmet: &Unmet) -> String {
    let missed = match &unmet.text()[..] {
        [] => String::new(),
        all => format!(". Missed there: {}", all.join("; ")),
    };
    format!(
        "the fleet misses the SLO at any speed-up down to 1/{}, where {:.2} % of the requests meet it \
         and {:.2} % are required{missed}. Take quicker instances, a looser [slo], or a lower --capacity=SHARE",
        1.0 / SPEEDUP_MIN,
        100.0 * attainment,
        100.0 * share
    )
}

fn table(d: &CapacityDocument<'_>) -> String {
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
        _ => line("rent", "some pools have no known price: give usd_per_hour".into()),
    }
    for pool in &d.simulated.pools {
        line(&pool.name, pool.text());
    }
    if !d.bounded {
        line("", format!("no speed-up up to {SPEEDUP_MAX} fails: the trace is too short to tell"));
    }
    text
}
