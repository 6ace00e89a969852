//! Statistics of a trace as one self-contained HTML page.

use super::stats::repairs;
use mixfleet_report::bars::{BarRow, Bars};
use mixfleet_report::html::{Html, TableCell, Tone};
use mixfleet_report::svg::{Chart, Limit, Mark, PlotAxis, Scale, Series};
use mixfleet_sim::trace::stats::{HitRates, Lengths, Stats};

/// Renders the page.
pub(super) fn page(name: &str, stats: &Stats) -> String {
    let mut body = Html::default();
    let rate = stats.requests_per_s.map_or("all at once".to_owned(), |rate| format!("{rate:.2} per second"));
    body.tiles(&[
        ("requests".into(), stats.requests.to_string(), rate),
        ("time".into(), format!("{:.0} s", stats.duration_s), "from the first to the last arrival".into()),
        ("prompt".into(), format!("{:.0} tokens", stats.input_tokens.mean), "mean".into()),
        ("answer".into(), format!("{:.0} tokens", stats.output_tokens.mean), "mean".into()),
    ]);
    body.heading(2, "Lengths");
    lengths(&mut body, stats);
    body.heading(2, "Prefixes");
    hits(&mut body, stats);
    if let Some(prefill) = stats.prefill_s {
        let (none, infinite) = (prefill.no_cache, prefill.infinite_cache);
        body.paragraph(&format!(
            "Mean prefill: {none:.3} s without cache, {infinite:.3} s with an infinite one."
        ));
    }
    for (count, what) in repairs(stats) {
        body.note(Tone::Warn, &format!("repaired: {count} {what}"));
    }
    mixfleet_report::html::page("Statistics of a trace", &format!("{name} ({})", stats.format), &body)
}

fn lengths(body: &mut Html, stats: &Stats) {
    let both = [("prompt", stats.input_tokens), ("answer", stats.output_tokens)];
    let row = |(what, lengths): &(&str, Lengths)| {
        let Lengths { mean, p50, p90, p99, max } = *lengths;
        let mut row = vec![TableCell::text(*what), TableCell::number(format!("{mean:.1}"))];
        row.extend([p50, p90, p99, max].map(|tokens| TableCell::number(tokens.to_string())));
        row
    };
    body.table(&["tokens", "mean", "p50", "p90", "p99", "max"], &both.iter().map(row).collect::<Vec<_>>());
    for (what, lengths) in both {
        let quantiles =
            [("p50", lengths.p50), ("p90", lengths.p90), ("p99", lengths.p99), ("max", lengths.max)];
        let bar = |(name, tokens): (&str, u32)| {
            let (name, value, words) = (name.to_owned(), f64::from(tokens), format!("{tokens} tokens"));
            BarRow { name, value, words, tone: Tone::Plain, mark: None }
        };
        let label = format!("tokens of a {what}");
        Bars { label: &label, full: None, rows: &quantiles.map(bar) }
            .draw(body, &format!("Tokens of a {what}."));
    }
}

fn hits(body: &mut Html, stats: &Stats) {
    let Some(block_tokens) = stats.block_tokens else {
        return body.paragraph("The format has no prefixes.");
    };
    let (blocks, hit) = (stats.blocks, &stats.prefix_hit);
    body.paragraph(&format!(
        "{} blocks of {block_tokens} tokens, {} distinct.",
        blocks.references, blocks.distinct
    ));
    let percent = |share: f64| TableCell::number(format!("{:.2}", share * 100.0));
    let row = |policy: &str, capacity: String, rates: HitRates| {
        vec![TableCell::text(policy), TableCell::number(capacity), percent(rates.block), percent(rates.token)]
    };
    let mut rows = vec![row("infinite", String::new(), hit.infinite)];
    let mut series = Vec::new();
    for (policy, caches) in [("lru", &hit.lru), ("lfu", &hit.lfu), ("length-aware", &hit.length_aware)] {
        let Some(caches) = caches else { continue };
        rows.extend(caches.iter().rev().map(|(capacity, rates)| row(policy, capacity.to_string(), *rates)));
        let points = caches.iter().map(|(&capacity, rates)| (capacity as f64, rates.token)).collect();
        series.push(Series { name: policy.to_owned(), points, mark: Mark::Both });
    }
    let x = PlotAxis { label: "blocks of a cache", unit: "", scale: Scale::Decimal };
    let y = PlotAxis { label: "share of prompt tokens", unit: "", scale: Scale::Linear };
    let limits = [Limit::Y(hit.infinite.token, "an infinite cache")];
    Chart { x, y, series: &series, roof: &[], limits: &limits }
        .draw(body, "Share of the tokens of prompts that a cache of this size holds, by what it evicts.");
    body.table(&["policy", "blocks", "% by block", "% by token"], &rows);
}
