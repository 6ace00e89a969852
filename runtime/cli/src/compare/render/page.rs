//! The comparison as one self-contained HTML page.

use super::table::{DTYPES, cost_row, rate, significant, words};
use crate::compare::comparison::PartsComparison;
use mixfleet_hal::units::GB;
use mixfleet_report::bars::{BarRow, Bars};
use mixfleet_report::html::{Html, TableCell, Tone};
use mixfleet_scheduler::classes::{Classified, Job};

/// Maximum number of bars of a chart, for the cheapest parts; the table has all.
const BARS_MAX: usize = 24;

/// Renders the page.
pub(in crate::compare) fn page(comparison: &PartsComparison) -> String {
    let mut body = Html::default();
    body.facts(&facts(comparison));
    body.heading(2, "What a token costs");
    charts(&mut body, comparison);
    costs(&mut body, comparison);
    body.heading(2, "What 1 $/h buys");
    per_dollar(&mut body, comparison);
    body.heading(2, "Where roles change");
    let priced = comparison.classified.iter().filter(|device| device.price.is_some()).count();
    for device in &comparison.classified {
        body.begin_details(&device.name, false);
        for sentence in words(device, priced + usize::from(device.price.is_none())) {
            body.paragraph(&sentence);
        }
        body.end_details();
    }
    let subtitle = format!("{} parts for {}", comparison.devices.len(), comparison.model);
    mixfleet_report::html::page("Comparison of parts", &subtitle, &body)
}

fn facts(comparison: &PartsComparison) -> Vec<(&'static str, String)> {
    let demand = &comparison.demand;
    let (weights, kv) = (demand.weights.0 / GB, demand.shape.kv_bytes_per_token());
    let mut facts = vec![
        ("model", format!("{} in {}", comparison.model, demand.shape.stored())),
        ("memory", format!("{weights:.1} GB of weights, {kv} B of KV per token in {}", demand.shape.kv)),
        ("prompts", format!("{} tokens", demand.prompt_tokens)),
        ("decoding", format!("up to {} sequences at {} tokens", demand.batch_max, demand.context_tokens)),
        (
            "devices",
            format!("up to {} share the layers of a model; the network is not counted", demand.devices_max),
        ),
        ("times", comparison.basis.explained().to_owned()),
    ];
    facts.extend(comparison.objectives().map(|objectives| ("objectives", objectives)));
    if !comparison.without_offer.is_empty() {
        facts.push(("without offer", format!("not compared: {}", comparison.without_offer.join(", "))));
    }
    let own = comparison.devices.iter().filter_map(|device| device.own.as_ref());
    facts.extend(own.map(|own| ("this machine", own.times_from.clone())));
    facts.extend(comparison.warnings.iter().map(|warning| ("warning", warning.clone())));
    facts
}

/// What a token of each job costs on each part, and at which rent a part would decode for the least.
fn charts(body: &mut Html, comparison: &PartsComparison) {
    for (job, what) in [(Job::Decode, "output"), (Job::Prefill, "input")] {
        let cost = |device: &Classified| Some(device.standing(job)?.cost?.0 * 1e6);
        let words = |cost: f64| format!("{} $", significant(cost));
        let rows = bars(comparison, cost, words, |_| None);
        let caption = format!("{}: dollars for a million tokens of {what}, the cheapest first.", job.name());
        Bars { label: &format!("cost of {}", job.name()), full: None, rows: &rows }.draw(body, &caption);
    }
    let rent = |device: &Classified| Some(device.price?.0);
    let below = |device: &Classified| Some(device.standing(Job::Decode)?.break_even?.0);
    let rows = bars(comparison, rent, |rent| format!("{rent:.2} $/h"), below);
    let caption = "Rent of each part; the line is the rent below which it decodes for less than all others.";
    Bars { label: "rent and break-even rent of decode", full: None, rows: &rows }.draw(body, caption);
}

/// A bar for each part that has a value, the least first.
fn bars(
    comparison: &PartsComparison,
    value: impl Fn(&Classified) -> Option<f64>,
    words: impl Fn(f64) -> String,
    mark: impl Fn(&Classified) -> Option<f64>,
) -> Vec<BarRow> {
    let known = comparison.classified.iter().enumerate();
    let mut rows: Vec<BarRow> = known
        .filter_map(|(at, device)| {
            let value = value(device).filter(|value| value.is_finite())?;
            let tone = if comparison.is_in_doubt(at) { Tone::Warn } else { Tone::Plain };
            Some(BarRow { name: device.name.clone(), value, words: words(value), tone, mark: mark(device) })
        })
        .collect();
    rows.sort_by(|a, b| a.value.total_cmp(&b.value));
    rows.truncate(BARS_MAX);
    rows
}

fn costs(body: &mut Html, comparison: &PartsComparison) {
    let mut rows = Vec::new();
    for (at, (device, compared)) in comparison.classified.iter().zip(&comparison.devices).enumerate() {
        let likely = comparison.likely(at);
        let rent = device.price.map_or_else(|| "-".into(), |price| format!("{:.2}", price.0));
        let mut row = vec![TableCell::text(&device.name), TableCell::number(rent)];
        row.extend(cost_row(device).map(TableCell::number));
        let tone = if comparison.is_in_doubt(at) { Tone::Warn } else { Tone::Plain };
        row.push(TableCell::number(likely).tone(tone));
        row.push(TableCell::text(
            compared.price.as_ref().map_or("no offer known", |price| price.basis.as_str()),
        ));
        rows.push(row);
    }
    let head = [
        "device",
        "$/h",
        "class",
        "prefill, $/Mtoken in",
        "decode, $/Mtoken out",
        "devices",
        "batch",
        "step, ms",
        "attention, $/Mtoken out",
        "memory, $/TB/h",
        "likely error",
        "price from",
    ];
    body.table(&head, &rows);
    if let Some(doubts) = comparison.doubts() {
        body.paragraph(&doubts);
    }
}

fn per_dollar(body: &mut Html, comparison: &PartsComparison) {
    let mut rows = Vec::new();
    for device in &comparison.devices {
        for line in device.per_dollar() {
            let mut row = vec![TableCell::text(&device.name), TableCell::text(line.origin)];
            row.extend(DTYPES.map(|dtype| TableCell::number(rate(&line, dtype))));
            row.push(TableCell::number(format!("{:.0}", line.bytes_per_second / GB)));
            row.push(TableCell::number(format!("{:.1}", line.bytes / GB)));
            rows.push(row);
        }
    }
    let dtypes = DTYPES.map(|dtype| format!("TFLOP/s in {}", dtype.name()));
    let mut head = vec!["device", "origin"];
    head.extend(dtypes.iter().map(String::as_str));
    head.extend(["GB/s", "GB"]);
    body.table(&head, &rows);
}
