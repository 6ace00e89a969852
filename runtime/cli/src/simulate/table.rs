//! The results of a run as text.

use super::subject::SimulationSubject;
use super::unmet::Unmet;
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::simulate::{Distribution, Misses, PoolUse, Results};
use std::fmt::Write as _;

/// Stands where nothing was completed.
pub(super) const NONE: &str = "-";

/// Dollars per million tokens.
pub(super) fn per_million(usd: Option<f64>) -> String {
    usd.map_or_else(|| NONE.to_owned(), |usd| format!("${usd:.4} per million tokens"))
}

/// How far a pool's resources were used.
pub(super) fn used(used: &PoolUse) -> String {
    let PoolUse { prompts, decode_steps, kv_memory, sequences, network, .. } = *used;
    let all = [
        ("prompts", prompts),
        ("decode steps", decode_steps),
        ("KV memory", kv_memory),
        ("sequences", sequences),
        ("network", network),
    ];
    let all = all.map(|(what, share)| format!("{what} {:.0} %", 100.0 * share));
    format!("used: {}", all.join(", "))
}

/// The results of a run.
#[expect(clippy::too_many_lines, reason = "one row for each fact")]
pub(super) fn table(simulated: &SimulationSubject, r: &Results, unmet: &Unmet) -> String {
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
        let why = unmet.too_large().filter(|_| reason == "too_large");
        let why = why.map_or_else(String::new, |why| format!(": up to {why}"));
        line("", format!("{count} rejected: {reason}{why}"));
    }
    let spread = |d: &Distribution| match d.count {
        0 => NONE.to_owned(),
        _ => format!("mean {:.4}, p50 {:.4}, p90 {:.4}, p99 {:.4} s", d.mean, d.p50, d.p90, d.p99),
    };
    let completed = |text: String| if r.completed == 0 { NONE.to_owned() } else { text };
    line("TTFT", spread(&r.ttft_s));
    line("TPOT", spread(&r.tpot_s));
    line("TBT", spread(&r.tbt_s));
    line("latency", spread(&r.e2e_s));
    line("throughput", completed(format!("{:.1} output tokens/s", r.output_tokens_per_s)));
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
        let good = 100.0 * class.slo_attainment;
        let times = match class.ttft_s.count {
            0 => format!("mean TTFT {NONE}, latency {NONE}"),
            _ => format!("mean TTFT {:.3}, latency {:.3} s", class.ttft_s.mean, class.e2e_s.mean),
        };
        line("", format!("{}: {good:.2} % of {}, {times}", class.name, class.requests));
    }
    let [blocks, tokens] = [r.prefix_hit.block, r.prefix_hit.token].map(|share| 100.0 * share);
    line("prefix hit", completed(format!("{blocks:.2} % of blocks, {tokens:.2} % of tokens")));
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
        line("", used(&pool.used));
        line("", format!("times from {}", pool.basis.text()));
    }
    for (link, bytes) in &r.kv_bytes_moved {
        line("KV moved", format!("{:.1} GB {link}", bytes / 1e9));
    }
    if let Some(sent) = &r.replicated {
        let (gb, dropped) = (sent.bytes / 1e9, sent.dropped);
        line("copied ahead", format!("{gb:.1} GB, {} prefixes copied, {dropped} dropped", sent.copies));
    }
    if r.usd_rent > 0.0 {
        let per_hour = simulated.usd_per_hour.map_or(String::new(), |usd| format!("${usd:.2} per hour: "));
        line("rent", format!("{per_hour}${:.2}, {}", r.usd_rent, per_million(r.usd_rent_per_million_tokens)));
        line("busy rent", format!("${:.2}, {}", r.usd_busy, per_million(r.usd_busy_per_million_tokens)));
    }
    let found = Bottleneck::of(r);
    line("bottleneck", found.as_ref().map_or_else(|| NONE.into(), Bottleneck::text));
    if let Some(missed) = found.and_then(|found| found.missed) {
        line("", missed.text());
    }
    line("simulated time", format!("{:.0} s", r.simulated_s));
    text
}
