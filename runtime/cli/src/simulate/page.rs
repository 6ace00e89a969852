//! A run as one self-contained HTML page.

use super::additions::{Addition, Additions};
use super::history::{HistoryPoint, HistoryQuantity, RunHistory};
use super::subject::SimulationSubject;
use super::table::{NONE, per_million, used};
use super::unmet::Unmet;
use crate::trace_file::clock;
use mixfleet_report::html::{Html, TableCell, Tone};
use mixfleet_report::svg::{Chart, DISTINCT_MAX, Limit, Mark, PlotAxis, Scale, Series};
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::simulate::{Distribution, Quantiles, Results, Setup};

/// The content of a page.
pub(super) struct Subject<'a> {
    pub(super) setup: &'a Setup,
    pub(super) results: &'a Results,
    pub(super) history: &'a RunHistory,
    pub(super) simulated: &'a SimulationSubject,
    pub(super) additions: Option<&'a Additions>,
    pub(super) unmet: &'a Unmet,
}

/// Renders the page.
pub(super) fn page(subject: &Subject<'_>) -> String {
    let mut body = Html::default();
    tiles(&mut body, subject);
    for missed in subject.unmet.text() {
        body.note(Tone::Warn, &format!("Missed: {missed}."));
    }
    let mut facts = subject.simulated.facts();
    facts.push((
        "bottleneck",
        Bottleneck::of(subject.results).map_or_else(|| NONE.into(), |found| found.text()),
    ));
    body.facts(&facts);
    body.heading(2, "Load over time");
    over_time(&mut body, subject);
    body.heading(2, "Latencies");
    latencies(&mut body, subject);
    body.heading(2, "Requests");
    requests(&mut body, subject.results);
    body.heading(2, "Pools and dollars");
    pools(&mut body, subject);
    let r = subject.results;
    let subtitle = format!("{} requests in {} of virtual time", r.requests, clock(r.simulated_s));
    mixfleet_report::html::page("Simulation of a fleet", &subtitle, &body)
}

fn tiles(body: &mut Html, subject: &Subject<'_>) {
    let r = subject.results;
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let completed = |text: String| if r.completed == 0 { NONE.to_owned() } else { text };
    let times = |name: &str, d: &Distribution| match d.count {
        0 => (name.to_owned(), NONE.to_owned(), "nothing was completed".to_owned()),
        _ => {
            (name.to_owned(), format!("{:.4} s", d.p99), format!("p50 {:.4} s, mean {:.4} s", d.p50, d.mean))
        }
    };
    let [blocks, tokens] = [r.prefix_hit.block, r.prefix_hit.token].map(|share| completed(percent(share)));
    let mut tiles = vec![
        ("within the SLO".into(), percent(r.slo_attainment), format!("{:.3} requests/s", r.goodput_rps)),
        times("TTFT p99", &r.ttft_s),
        times("TBT p99", &r.tbt_s),
        ("prefix hit".into(), tokens, format!("{blocks} of blocks")),
    ];
    if r.usd_rent > 0.0 {
        let (rent, busy) = (r.usd_rent_per_million_tokens, r.usd_busy_per_million_tokens);
        if let Some(usd) = subject.simulated.usd_per_hour {
            tiles.push(("rent per hour".into(), format!("${usd:.2}"), "of the whole fleet".into()));
        }
        tiles.push(("rent".into(), format!("${:.2}", r.usd_rent), per_million(rent)));
        tiles.push(("busy rent".into(), format!("${:.2}", r.usd_busy), per_million(busy)));
    }
    body.tiles(&tiles);
}

/// A unit in which a run's times are short numbers: its length in seconds, and the axis.
fn time_axis(ended_s: f64) -> (f64, PlotAxis) {
    let (unit_s, label) = match ended_s {
        s if s <= 600.0 => (1.0, "time in s"),
        s if s <= 36_000.0 => (60.0, "time in min"),
        _ => (3600.0, "time in h"),
    };
    (unit_s, PlotAxis { label, unit: "", scale: Scale::Linear })
}

/// A pool's value in a curve: a label before the pool's name, and the value.
type CurveValue<'a> = (&'a str, &'a dyn Fn(&HistoryPoint) -> f64);

fn over_time(body: &mut Html, subject: &Subject<'_>) {
    let of = |quantity: HistoryQuantity| move |point: &HistoryPoint| point.get(quantity);
    let (prefill, decode) = (of(HistoryQuantity::PrefillUtilisation), of(HistoryQuantity::DecodeUtilisation));
    figure(
        body,
        subject,
        "utilisation (1: all of the time)",
        &[("prefill", &prefill), ("decode", &decode)],
        &[],
        "Utilisation by pool: share of the time that its instances computed prompts, and decoded.",
    );
    let (prefill, decode) = (of(HistoryQuantity::PrefillLoad), of(HistoryQuantity::DecodeLoad));
    figure(
        body,
        subject,
        "load (1: the objective)",
        &[("prefill", &prefill), ("decode", &decode)],
        &[Limit::Y(1.0, "objective")],
        "Load: queued prefill time over the objective for TTFT, time of a decode step over the one for TBT, mean of a \
         pool's instances.",
    );
    let (queued, decoding) = (of(HistoryQuantity::Queued), of(HistoryQuantity::Decoding));
    figure(
        body,
        subject,
        "requests",
        &[("queued", &queued), ("decoding", &decoding)],
        &[],
        "Prompts that wait, and sequences that decode.",
    );
    let (used, cached) = (of(HistoryQuantity::UsedTokens), of(HistoryQuantity::CachedTokens));
    figure(
        body,
        subject,
        "tokens of KV",
        &[("used", &used), ("cached", &cached)],
        &[],
        "KV memory: in use by sequences, and held for prompts to come.",
    );
    rates(body, subject);
}

/// Draws a curve for each pool and reading that is ever above zero; only the largest if there are too many.
fn figure(
    body: &mut Html,
    subject: &Subject<'_>,
    label: &'static str,
    readings: &[CurveValue<'_>],
    limits: &[Limit],
    caption: &str,
) {
    let (unit_s, x) = time_axis(subject.results.simulated_s);
    let mut curves: Vec<(f64, Series)> = Vec::new();
    for (pool, name) in subject.history.pools.iter().zip(&subject.setup.pools) {
        for (word, value) in readings {
            let points: Vec<(f64, f64)> =
                pool.points().iter().map(|p| (p.time_s / unit_s, value(p))).collect();
            let sum: f64 = points.iter().map(|point| point.1).sum();
            if sum > 0.0 {
                let name = format!("{word}: {name}");
                curves.push((sum, Series { name, points, mark: Mark::Line }));
            }
        }
    }
    let all = curves.len();
    if all > DISTINCT_MAX {
        curves.sort_by(|a, b| b.0.total_cmp(&a.0));
        curves.truncate(DISTINCT_MAX);
    }
    let series: Vec<Series> = curves.into_iter().map(|(_, series)| series).collect();
    let left_out = match all.saturating_sub(DISTINCT_MAX) {
        0 => String::new(),
        some => format!(" The {some} lowest curves are left out."),
    };
    let y = PlotAxis { label, unit: "", scale: Scale::Linear };
    Chart { x, y, series: &series, roof: &[], limits }.draw(body, &format!("{caption}{left_out}"));
}

/// Draws requests per second of all pools together.
fn rates(body: &mut Html, subject: &Subject<'_>) {
    let (unit_s, x) = time_axis(subject.results.simulated_s);
    let pools = &subject.history.pools;
    // All pools are sampled at the same times.
    let at = |i: usize| pools.iter().filter_map(move |pool| pool.points().get(i));
    let count = pools.first().map_or(0, |pool| pool.points().len());
    let curve = |name: &str, value: &dyn Fn(usize) -> f64| {
        let time = |i: usize| at(i).next().map_or(0.0, |point| point.time_s / unit_s);
        let points: Vec<(f64, f64)> = (0..count).map(|i| (time(i), value(i))).collect();
        Series { name: name.to_owned(), points, mark: Mark::Line }
    };
    let fleet = |quantity| move |i| at(i).next().map_or(0.0, |point| point.get(quantity));
    let sum = |quantity| move |i| at(i).map(|point| point.get(quantity)).sum::<f64>();
    let series = [
        curve("arrived", &fleet(HistoryQuantity::Arrived)),
        curve("completed", &sum(HistoryQuantity::Completed)),
        curve("rejected", &fleet(HistoryQuantity::Rejected)),
        curve("dropped", &sum(HistoryQuantity::Dropped)),
    ];
    let y = PlotAxis { label: "requests per second", unit: "", scale: Scale::Linear };
    let chart = Chart { x, y, series: &series, roof: &[], limits: &[] };
    chart.draw(body, "Requests per second, whole fleet.");
}

fn latencies(body: &mut Html, subject: &Subject<'_>) {
    let (slo, history) = (subject.setup.slo, subject.history);
    let x = |label| PlotAxis { label, unit: "s", scale: Scale::Decimal };
    let y = PlotAxis { label: "share of requests", unit: "", scale: Scale::Linear };
    let to_end = [cumulative("TTFT", &history.ttft_s), cumulative("last token", &history.e2e_s)];
    let limits = [Limit::X(slo.ttft_s, "objective for TTFT")];
    let chart = Chart { x: x("time since arrival"), y, series: &to_end, roof: &[], limits: &limits };
    chart.draw(body, "Share of the completed requests whose first, and last, token came within this time.");
    let between = [cumulative("TBT", &history.tbt_s)];
    let limits = [Limit::X(slo.tbt_s, "objective for TBT")];
    let chart = Chart { x: x("time between tokens"), y, series: &between, roof: &[], limits: &limits };
    chart.draw(
        body,
        "Share of the completed requests whose time between tokens, by the SLO's metric, is within this.",
    );
    let r = subject.results;
    let row = |name: &str, d: &Distribution| {
        let seconds = |value: f64| {
            TableCell::number(if d.count == 0 { NONE.to_owned() } else { format!("{value:.4}") })
        };
        vec![TableCell::text(name), seconds(d.mean), seconds(d.p50), seconds(d.p90), seconds(d.p99)]
    };
    let rows =
        [row("TTFT", &r.ttft_s), row("TPOT", &r.tpot_s), row("TBT", &r.tbt_s), row("last token", &r.e2e_s)];
    body.table(&["seconds", "mean", "p50", "p90", "p99"], &rows);
}

fn cumulative(name: &str, values: &Quantiles) -> Series {
    const STEPS: u32 = 200;
    let shares = (1..=STEPS).map(|i| f64::from(i) / f64::from(STEPS)).chain([0.999]);
    let mut shares: Vec<f64> = shares.filter(|_| values.count() > 0).collect();
    shares.sort_by(f64::total_cmp);
    let points = shares.into_iter().map(|share| (values.at(share), share)).collect();
    Series { name: name.to_owned(), points, mark: Mark::Line }
}

fn requests(body: &mut Html, r: &Results) {
    let mut rows = vec![("completed".to_owned(), r.completed, Tone::Plain)];
    rows.extend(r.rejected.iter().map(|(reason, count)| (format!("rejected: {reason}"), *count, Tone::Warn)));
    if r.dropped > 0 {
        rows.push(("dropped after their prefill".into(), r.dropped, Tone::Warn));
    }
    let share = |count: u64| format!("{:.2} %", 100.0 * count as f64 / r.requests.max(1) as f64);
    let row = |(what, count, tone): &(String, u64, Tone)| {
        vec![
            TableCell::text(what).tone(*tone),
            TableCell::number(count.to_string()),
            TableCell::number(share(*count)),
        ]
    };
    let rows: Vec<Vec<TableCell>> = rows.iter().map(row).collect();
    body.table(&["requests", "count", "of all"], &rows);
    let from = r.prefix_hit_from;
    let sources = [
        ("device", from.device),
        ("host memory", from.dram),
        ("disk", from.ssd),
        ("another instance", from.pulled),
    ];
    let row = |(source, share): &(&str, f64)| {
        vec![TableCell::text(*source), TableCell::number(format!("{:.2} %", 100.0 * share))]
    };
    body.table(&["prefix found on", "of prompt tokens"], &sources.iter().map(row).collect::<Vec<_>>());
    if r.prefill_wasted_s > 0.0 {
        let share = 100.0 * r.prefill_wasted_s / r.prefill_device_s.max(f64::MIN_POSITIVE);
        body.paragraph(&format!(
            "{:.0} s of prefill ({share:.2} %) went to requests that were dropped.",
            r.prefill_wasted_s
        ));
    }
}

fn pools(body: &mut Html, subject: &Subject<'_>) {
    let r = subject.results;
    let number = |value: f64, digits: usize| TableCell::number(format!("{value:.digits$}"));
    let rows: Vec<Vec<TableCell>> = r
        .pools
        .iter()
        .zip(&subject.simulated.pools)
        .map(|(pool, rented)| {
            vec![
                TableCell::text(&pool.name),
                TableCell::text(rented.text()),
                number(100.0 * pool.utilisation, 1),
                number(pool.prefill_device_s, 0),
                number(pool.decode_device_s, 0),
                TableCell::text(used(&pool.used)),
                number(pool.usd_rent, 2),
                number(pool.usd_busy, 2),
                TableCell::text(pool.basis.text()),
            ]
        })
        .collect();
    let head = [
        "pool",
        "instances and rent",
        "busy %",
        "prefill s",
        "decode s",
        "of its resources",
        "rent $",
        "busy rent $",
        "times from",
    ];
    body.table(&head, &rows);
    if let Some(additions) = subject.additions {
        one_more(body, additions);
    }
    if !r.kv_bytes_moved.is_empty() {
        let row = |(link, bytes): (&String, &f64)| vec![TableCell::text(link), number(bytes / 1e9, 1)];
        let rows: Vec<Vec<TableCell>> = r.kv_bytes_moved.iter().map(row).collect();
        body.table(&["KV moved", "GB"], &rows);
    }
}

fn one_more(body: &mut Html, additions: &Additions) {
    let row = |addition: &Addition| {
        let times = |d: &Distribution| {
            TableCell::number(if d.count == 0 { NONE.to_owned() } else { format!("{:.4}", d.p90) })
        };
        vec![
            TableCell::text(&addition.pool),
            TableCell::text(addition.rent()),
            TableCell::number(format!("{:.2}", 100.0 * addition.slo_attainment)),
            times(&addition.ttft_s),
            times(&addition.tbt_s),
        ]
    };
    let rows: Vec<Vec<TableCell>> = additions.each.iter().map(row).collect();
    body.table(&["one more of", "rent", "% within the SLO", "TTFT p90 s", "TBT p90 s"], &rows);
    body.paragraph(&format!("Best addition: {}.", additions.best()));
}
