//! Several fleets under one load, a row each.

use super::args::SimulateArgs;
use super::opened::OpenedFleet;
use super::run::{check_served, document, good_per_usd};
use super::table::NONE;
use super::watch::RunWatch;
use crate::failure::UsageError;
use crate::prices::PriceList;
use crate::screen;
use crate::trace_file::FileBar;
use anyhow::{Context, Result};
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::simulate::{Distribution, Results};
use serde_json::Value;
use std::fmt::Write as _;
use std::io::Write;

/// Simulates each fleet of the command line, and prints them side by side.
pub(super) fn run(args: &SimulateArgs, list: Option<&PriceList>) -> Result<()> {
    let for_one = [
        (args.capacity.is_some(), "--capacity"),
        (args.add, "--add"),
        (args.timeline.is_some(), "--timeline"),
        (args.html.is_some(), "--html"),
        (args.requests_out.is_some(), "--requests-out"),
        (args.against.is_some(), "--against"),
    ];
    if let Some((_, flag)) = for_one.iter().find(|(given, _)| *given) {
        return Err(UsageError(format!("{flag} is for one --fleet")).into());
    }
    let mut fleets = Vec::new();
    for (path, scheduling) in args.fleet.iter().zip(&args.scheduling_of_each) {
        fleets.push(OpenedFleet::open(args, path, scheduling, list)?);
    }
    let mut runs = Vec::new();
    for fleet in &fleets {
        let mut load = fleet.load()?;
        let mut watch = RunWatch::new(FileBar::new(load.progress()), &fleet.setup);
        let results = fleet.play(&mut load, &fleet.setup, &mut watch)?;
        check_served(&results, &watch.unmet)
            .with_context(|| format!("the fleet {}", fleet.simulated.fleet))?;
        runs.push(results);
    }
    let mut out = screen::output(args.json);
    if args.json {
        let documents: Result<Vec<Value>> =
            fleets.iter().zip(&runs).map(|(fleet, run)| document(fleet, run)).collect();
        writeln!(out, "{:#}", Value::Array(documents?))?;
    } else {
        write!(out, "{}", rows(&fleets, &runs))?;
    }
    Ok(())
}

fn rows(fleets: &[OpenedFleet<'_>], runs: &[Results]) -> String {
    let mut text = String::new();
    if let Some(first) = fleets.first() {
        let _ = writeln!(text, "  {:<16} {}", "load", first.simulated.load);
    }
    let names = fleets.iter().map(|fleet| fleet.simulated.fleet.as_str());
    let width = names.clone().map(str::len).max().unwrap_or(0).max("fleet".len());
    let [within, ttft, tbt, good] = ["within SLO", "TTFT p50, p90 s", "TBT p50, p90 s", "good/$"];
    let _ = writeln!(
        text,
        "\n{:<width$} {:>9} {within:>10} {ttft:>17} {tbt:>17} {good:>9}  bottleneck",
        "fleet", "$/h"
    );
    for (fleet, r) in fleets.iter().zip(runs) {
        let usd = fleet.simulated.usd_per_hour.map_or_else(|| NONE.into(), |usd| format!("{usd:.2}"));
        let two = |d: &Distribution| match d.count {
            0 => NONE.to_owned(),
            _ => format!("{:.4}  {:.4}", d.p50, d.p90),
        };
        let good = good_per_usd(fleet, r).map_or_else(|| NONE.into(), |good| format!("{good:.0}"));
        let bottleneck = Bottleneck::of(r).map_or_else(|| NONE.into(), |found| found.text());
        let (ttft, tbt) = (two(&r.ttft_s), two(&r.tbt_s));
        let _ = writeln!(
            text,
            "{:<width$} {usd:>9} {:>8.2} % {ttft:>17} {tbt:>17} {good:>9}  {bottleneck}",
            fleet.simulated.fleet,
            100.0 * r.slo_attainment
        );
    }
    let _ = writeln!(text);
    for fleet in fleets {
        let mut facts = fleet.simulated.facts();
        facts.retain(|(name, _)| *name != "load");
        facts.sort_by_key(|(name, _)| *name != "fleet");
        for (name, value) in facts {
            let _ = writeln!(text, "  {name:<16} {value}");
        }
        for pool in &fleet.simulated.pools {
            let _ = writeln!(text, "  {:<16} {}", pool.name, pool.text());
        }
    }
    text
}
