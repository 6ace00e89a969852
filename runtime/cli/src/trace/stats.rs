//! Implements `mixfleet trace stats`.

use super::page;
use crate::screen;
use crate::trace_file::{FileBar, ReplayArgs};
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_sim::trace::Repairs;
use mixfleet_sim::trace::stats::{
    CAPACITIES_BLOCKS, HitRates, Lengths, PrefillFit, Stats, StatsOptions, TraceTally,
};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// Mooncake or agentic JSONL, Azure or ServeGen CSV, or a vLLM request log; also as .zst or .gz; - reads
    /// standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    replay: ReplayArgs,
    /// Seed of --jitter
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    seed: u64,
    /// Cache sizes, in blocks [default: 1000,10000,30000,50000,100000]
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = crate::numbers::count::<u32>(0..=u32::MAX.into()))]
    capacity: Vec<u32>,
    /// Eviction policies: lru, lfu, length-aware [default: lru,lfu]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = policy)]
    policy: Vec<CachePolicy>,
    /// Split prompts into blocks of this many tokens instead of the trace's own
    #[arg(long, value_name = "TOKENS", value_parser = crate::numbers::count::<u32>(1..=u32::MAX.into()))]
    rechain: Option<u32>,
    /// Also report mean prefill time: a (n - p) + b (n^2 - p^2) seconds for n tokens, p reused
    #[arg(long, value_name = "A,B", num_args = 0..=1, require_equals = true, default_missing_value = "1.19e-4,7.467e-10", value_parser = fit)]
    prefill: Option<PrefillFit>,
    /// Write an HTML page
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn policy(text: &str) -> Result<CachePolicy, String> {
    match text {
        "lru" => Ok(CachePolicy::Lru),
        "lfu" => Ok(CachePolicy::Lfu),
        "length-aware" => Ok(CachePolicy::LengthAware),
        other => Err(format!("unknown policy '{other}'; known: lru, lfu, length-aware")),
    }
}

fn fit(text: &str) -> Result<PrefillFit, String> {
    let number = |text: &str| text.trim().parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
    let pair = text.split_once(',').and_then(|(a, b)| Some((number(a)?, number(b)?)));
    let (per_token, per_token_squared) = pair.ok_or("expected two numbers, for example 1.19e-4,7.467e-10")?;
    Ok(PrefillFit { per_token, per_token_squared })
}

pub(crate) fn run(args: &StatsArgs) -> Result<()> {
    let stats = count(args)?;
    let name = if is_stdin(args) { "standard input".to_owned() } else { args.file.display().to_string() };
    if let Some(file) = &args.html {
        let cannot_write = || format!("cannot write {}", file.display());
        write_whole(file, page::page(&name, &stats).as_bytes()).with_context(cannot_write)?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&stats)?)?;
    } else {
        write!(out, "{}", StatsTable { name, stats: &stats })?;
    }
    Ok(())
}

fn is_stdin(args: &StatsArgs) -> bool {
    args.file.as_os_str() == "-"
}

fn count(args: &StatsArgs) -> Result<Stats> {
    let mut trace = match is_stdin(args) {
        true => args.replay.open_stdin()?,
        false => args.replay.open(&args.file)?,
    };
    let from = trace.block_tokens();
    let to = args.rechain.filter(|_| from.is_some()).or(from);
    let mut capacities: Vec<usize> = args.capacity.iter().map(|&blocks| blocks as usize).collect();
    if capacities.is_empty() {
        capacities = CAPACITIES_BLOCKS.to_vec();
    }
    let mut policies = args.policy.clone();
    if policies.is_empty() {
        policies = vec![CachePolicy::Lru, CachePolicy::Lfu];
    }
    let mut tally = TraceTally::new(StatsOptions {
        block_tokens: to.unwrap_or(0),
        capacities_blocks: capacities,
        policies,
        prefill: args.prefill,
    });
    let mut bar = FileBar::new(Some(trace.progress()));
    for request in args.replay.play(&mut trace, args.seed) {
        let request = request?;
        tally.add(&match from.zip(to) {
            Some((from, to)) if from != to => request.rechain(from, to),
            _ => request,
        });
        bar.tick();
    }
    Ok(tally.finish(trace.format().name(), trace.repairs()))
}

struct StatsTable<'a> {
    name: String,
    stats: &'a Stats,
}

impl std::fmt::Display for StatsTable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats;
        write!(
            f,
            "{} ({}): {} requests in {:.1} s",
            self.name, stats.format, stats.requests, stats.duration_s
        )?;
        if let Some(rate) = stats.requests_per_s {
            write!(f, ", {rate:.2}/s")?;
        }
        writeln!(
            f,
            "\n\n{:<18}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "tokens", "mean", "p50", "p90", "p99", "max"
        )?;
        for (what, lengths) in [("prompt", stats.input_tokens), ("answer", stats.output_tokens)] {
            let Lengths { mean, p50, p90, p99, max } = lengths;
            writeln!(f, "{what:<18}{mean:>10.1}{p50:>10}{p90:>10}{p99:>10}{max:>10}")?;
        }
        self.hits(f)?;
        if let Some(prefill) = stats.prefill_s {
            let (none, infinite) = (prefill.no_cache, prefill.infinite_cache);
            writeln!(f, "\nmean prefill: {none:.3} s without cache, {infinite:.3} s with an infinite one")?;
        }
        self.repairs(f)
    }
}

impl StatsTable<'_> {
    fn hits(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(block_tokens) = self.stats.block_tokens else {
            return writeln!(f, "\nthe format has no prefixes");
        };
        let blocks = self.stats.blocks;
        writeln!(
            f,
            "\n{} blocks of {block_tokens} tokens, {} distinct\n\n{:<18}{:>10}{:>10}{:>10}",
            blocks.references, blocks.distinct, "prefix hit, %", "blocks", "by block", "by token"
        )?;
        let line = |f: &mut std::fmt::Formatter<'_>, policy: &str, capacity: String, rates: HitRates| {
            let (block, token) = (rates.block * 100.0, rates.token * 100.0);
            writeln!(f, "{policy:<18}{capacity:>10}{block:>10.2}{token:>10.2}")
        };
        let hit = &self.stats.prefix_hit;
        line(f, "infinite", String::new(), hit.infinite)?;
        for (policy, caches) in [("lru", &hit.lru), ("lfu", &hit.lfu), ("length-aware", &hit.length_aware)] {
            for (capacity, &rates) in caches.iter().flatten().rev() {
                line(f, policy, capacity.to_string(), rates)?;
            }
        }
        Ok(())
    }

    fn repairs(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let needed = repairs(self.stats);
        if !needed.is_empty() {
            writeln!(f)?;
        }
        for (count, what) in needed {
            writeln!(f, "repaired: {count} {what}")?;
        }
        Ok(())
    }
}

/// What had to be repaired of a trace, as counts and words.
pub(super) fn repairs(stats: &Stats) -> Vec<(u64, &'static str)> {
    let Repairs { reordered, empty_outputs, unknown_thinks } = stats.repairs;
    let mut repairs = vec![
        (reordered, "requests were out of order and put in place"),
        (empty_outputs, "answers of no token count as one token"),
        (unknown_thinks, "unknown think times are taken from the gap between arrivals"),
    ];
    repairs.retain(|(count, _)| *count > 0);
    repairs
}
