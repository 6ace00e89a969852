//! `mixfleet simulate`: a trace on a fleet that need not exist.

use crate::profiles;
use crate::scheduling::SchedulingArgs;
use crate::trace::{FileBar, ReplayArgs};
use anyhow::Result;
use clap::Args;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Distribution, Results, Setup, run as simulate};
use mixfleet_sim::trace::Requests;
use serde_json::json;
use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// The requests: any format of 'mixfleet trace stats'
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// The fleet: docs/fleet-file.md
    #[arg(long, value_name = "FLEET.toml")]
    fleet: PathBuf,
    #[command(flatten)]
    scheduling: SchedulingArgs,
    #[command(flatten)]
    replay: ReplayArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &SimulateArgs) -> Result<()> {
    let choices = args.scheduling.choices()?;
    let read = |path: &std::path::Path| profiles::read(path).map_err(|error| format!("{error:#}"));
    let fleet = FleetFile::read(&args.fleet, &read)?;
    let setup = Setup::new(&fleet, choices);
    let start = std::time::Instant::now();
    let mut trace = args.replay.open(&args.trace)?;
    let blocks = trace.block_tokens().unwrap_or(fleet.kv.block_tokens);
    let mut bar = FileBar::new(trace.progress());
    let requests = args.replay.play(&mut trace, args.scheduling.seed).rechain(blocks, fleet.kv.block_tokens);
    let results = simulate(&setup, requests, &mut bar)?;
    drop(bar);
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut document = serde_json::to_value(&results)?;
        // whole seconds, rounded up: documents of equal runs can be compared
        document["wall_s"] = json!(start.elapsed().as_secs_f64().ceil());
        writeln!(out, "{document:#}")?;
    } else {
        write!(out, "{}", table(&results))?;
    }
    Ok(())
}

fn table(r: &Results) -> String {
    let mut text = String::new();
    let rejected: u64 = r.rejected.values().sum();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    line(
        "requests",
        format!("{}: {} completed, {rejected} rejected, {} dropped", r.requests, r.completed, r.dropped),
    );
    for (reason, count) in &r.rejected {
        line("", format!("{count} rejected: {reason}"));
    }
    let spread = |d: &Distribution| {
        format!("mean {:.4}, p50 {:.4}, p90 {:.4}, p99 {:.4} s", d.mean, d.p50, d.p90, d.p99)
    };
    line("TTFT", spread(&r.ttft_s));
    line("TPOT", spread(&r.tpot_s));
    line("TBT", spread(&r.tbt_s));
    line("latency", spread(&r.e2e_s));
    line("within the SLO", format!("{:.2} %, {:.3} requests/s", 100.0 * r.slo_attainment, r.goodput_rps));
    line(
        "prefix hit",
        format!(
            "{:.2} % of blocks, {:.2} % of tokens",
            100.0 * r.prefix_hit.block,
            100.0 * r.prefix_hit.token
        ),
    );
    for pool in &r.pools {
        let busy = format!(
            "{:.1} % busy: prefill {:.0} s, decode {:.0} s",
            100.0 * pool.utilisation,
            pool.prefill_device_s,
            pool.decode_device_s
        );
        line(&pool.name, format!("{} instances, {busy}", pool.instances));
    }
    for (link, bytes) in &r.kv_bytes_moved {
        line("KV moved", format!("{:.1} GB {link}", bytes / 1e9));
    }
    if r.usd_rent > 0.0 {
        line("rent", format!("${:.2}, ${:.4} per million tokens", r.usd_rent, r.usd_rent_per_million_tokens));
        line(
            "of it used",
            format!("${:.2}, ${:.4} per million tokens", r.usd_busy, r.usd_busy_per_million_tokens),
        );
    }
    line("simulated", format!("{:.0} s", r.simulated_s));
    text
}
