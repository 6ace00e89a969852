//! The comparison as one self-contained HTML page.

use super::Comparison;
use super::table::{DTYPES, cost_row, rate, words};
use mixfleet_hal::units::GB;
use mixfleet_hwtests::html::{Cell, Html, Tone};

/// Renders the page.
pub(super) fn page(comparison: &Comparison) -> String {
    let mut body = Html::default();
    body.facts(&facts(comparison));
    body.heading(2, "What a token costs");
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
    mixfleet_hwtests::html::page("Comparison of parts", &subtitle, &body)
}

fn facts(comparison: &Comparison) -> Vec<(&'static str, String)> {
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
    facts.extend(comparison.warnings.iter().map(|warning| ("warning", warning.clone())));
    facts
}

fn costs(body: &mut Html, comparison: &Comparison) {
    let mut rows = Vec::new();
    for (at, (device, compared)) in comparison.classified.iter().zip(&comparison.devices).enumerate() {
        let likely = comparison.likely(at);
        let rent = device.price.map_or_else(|| "-".into(), |price| format!("{:.2}", price.0));
        let mut row = vec![Cell::text(&device.name), Cell::number(rent)];
        row.extend(cost_row(device).map(Cell::number));
        let tone = if comparison.is_in_doubt(at) { Tone::Warn } else { Tone::Plain };
        row.push(Cell::number(likely).tone(tone));
        row.push(Cell::text(compared.price.as_ref().map_or("no offer known", |price| price.basis.as_str())));
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

fn per_dollar(body: &mut Html, comparison: &Comparison) {
    let mut rows = Vec::new();
    for device in &comparison.devices {
        for line in device.per_dollar() {
            let mut row = vec![Cell::text(&device.name), Cell::text(line.origin)];
            row.extend(DTYPES.map(|dtype| Cell::number(rate(&line, dtype))));
            row.push(Cell::number(format!("{:.0}", line.bytes_per_second / GB)));
            row.push(Cell::number(format!("{:.1}", line.bytes / GB)));
            rows.push(row);
        }
    }
    let dtypes = DTYPES.map(|dtype| format!("TFLOP/s in {}", dtype.name()));
    let mut head = vec!["device", "origin"];
    head.extend(dtypes.iter().map(String::as_str));
    head.extend(["GB/s", "GB"]);
    body.table(&head, &rows);
}
