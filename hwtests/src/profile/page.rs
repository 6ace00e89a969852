//! A profile as one self-contained HTML page.

use super::document::{PointResult, PointStatus, ProfileDocument};
use super::work::{PointGroup, WorkItem};
use crate::roofline::Roofline;
use mixfleet_hal::profile::Traffic;
use mixfleet_hal::{KvShape, OpSig};
use mixfleet_report::html::{Html, TableCell, Tone};
use mixfleet_report::numbers::scaled;
use mixfleet_report::svg::{Chart, DISTINCT_MAX, Mark, PlotAxis, Scale, Series};
use mixfleet_report::text::gibibytes;
use std::collections::BTreeMap;

/// Renders the page.
pub fn page(document: &ProfileDocument) -> String {
    let mut body = Html::default();
    tiles(&mut body, document);
    warnings(&mut body, document);
    body.heading(2, "Roofline");
    roofline(&mut body, document);
    body.heading(2, "Curves");
    curves(&mut body, document);
    facts(&mut body, document);
    checks(&mut body, document);
    points(&mut body, document);
    let device = &document.device;
    let subtitle = format!(
        "{} ({}), measured {} by {} {}",
        device.name, device.id, document.measured_at, document.tool.name, document.tool.version
    );
    mixfleet_report::html::page("Device profile", &subtitle, &body)
}

fn tiles(body: &mut Html, document: &ProfileDocument) {
    let s = &document.summary;
    let per_dollar = |rate: f64, unit: &str| match &document.economics {
        Some(price) => format!("{} per $/h", scaled(rate / price.usd_per_hour, unit)),
        None => String::new(),
    };
    let mut tiles = Vec::new();
    for c in &s.compute {
        let remark = per_dollar(c.reached.rate, "FLOP/s");
        tiles.push((format!("compute {}", c.dtype), scaled(c.reached.rate, "FLOP/s"), remark));
    }
    for (name, reached) in [
        ("memory read", &s.memory_read),
        ("memory write", &s.memory_write),
        ("memory copy", &s.memory_copy),
        ("decode attention", &s.decode_attention),
        ("host to device", &s.host_to_device),
        ("device to host", &s.device_to_host),
    ] {
        if let Some(reached) = reached {
            tiles.push((name.to_owned(), scaled(reached.rate, "B/s"), per_dollar(reached.rate, "B/s")));
        }
    }
    if let Some(reached) = &s.prefill_attention {
        tiles.push(("prefill attention".into(), scaled(reached.rate, "FLOP/s"), String::new()));
    }
    let memory = document.device.memory_bytes;
    let remark = document.economics.as_ref().map(|p| format!("{} per $/h", gibibytes(p.bytes)));
    tiles.push(("memory".into(), gibibytes(memory), remark.unwrap_or_default()));
    if let Some(rows) = s.ridge_rows {
        tiles.push(("ridge".into(), format!("{rows:.0} rows"), "bf16 product".into()));
    }
    if let Some(launch) = document.fits.launch_s {
        let more = document.fits.launch_per_command_s.unwrap_or(0.0);
        tiles.push(("launch".into(), scaled(launch, "s"), format!("{} a command", scaled(more, "s"))));
    }
    body.tiles(&tiles);
}

fn warnings(body: &mut Html, document: &ProfileDocument) {
    if !document.complete {
        body.note(Tone::Bad, "Incomplete: the measurement was interrupted or the device was lost.");
    }
    let flags: Vec<&str> = document.conditions.flags.iter().map(|flag| flag.name()).collect();
    if !flags.is_empty() {
        body.note(Tone::Warn, &format!("Beware: {}.", flags.join(", ")));
    }
    let s = &document.summary;
    let (ok, flagged) = (s.ok, s.flagged);
    let tone = if s.error > 0 { Tone::Bad } else { Tone::Plain };
    body.note(
        tone,
        &format!(
            "{ok} points measured, {flagged} flagged; {} unsupported, {} skipped, {} wrong or failed.",
            s.unsupported, s.skipped, s.error
        ),
    );
}

fn roofline(body: &mut Html, document: &ProfileDocument) {
    let s = &document.summary;
    let (Some(read), Some(compute)) =
        (&s.memory_read, s.compute.iter().max_by(|a, b| a.reached.rate.total_cmp(&b.reached.rate)))
    else {
        body.paragraph("Needs a measured bandwidth and a measured product.");
        return;
    };
    let mut by_kind: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (p, seconds) in measured(document).filter(|(p, _)| p.flops > 0.0 && p.bytes > 0.0) {
        let kind = match p.group {
            PointGroup::Gemm => "matrix products",
            PointGroup::Experts => "mixtures of experts",
            PointGroup::Decode => "decode attention",
            PointGroup::Prefill => "prefill attention",
            PointGroup::Small => "small operations",
            _ => continue,
        };
        by_kind.entry(kind).or_default().push((p.flops / p.bytes, p.flops / seconds));
    }
    let best = (compute.reached.rate, compute.dtype.as_str());
    Roofline { read: read.rate, compute: best, points: by_kind }.draw(body);
}

fn measured(document: &ProfileDocument) -> impl Iterator<Item = (&PointResult, f64)> {
    let ok = document.points.iter().filter(|p| p.is_ok());
    ok.filter_map(|p| p.seconds.as_ref().map(|s| (p, s.median))).filter(|(_, seconds)| *seconds > 0.0)
}

/// Groups points into curves; `place` returns a curve's name with x and y.
fn gather(
    document: &ProfileDocument,
    place: impl Fn(&PointResult, &WorkItem, f64) -> Option<(String, f64, f64)>,
) -> Vec<Series> {
    let mut curves: Vec<Series> = Vec::new();
    for (p, seconds) in measured(document) {
        let Some(work) = WorkItem::parse(&p.id, document.device.kv_page_tokens) else { continue };
        let Some((name, x, y)) = place(p, &work, seconds) else { continue };
        match curves.iter_mut().find(|curve| curve.name == name) {
            Some(curve) => curve.points.push((x, y)),
            None => curves.push(Series { name, points: vec![(x, y)], mark: Mark::Both }),
        }
    }
    for curve in &mut curves {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    // the curves with the most points; the table has all
    curves.sort_by_key(|curve| std::cmp::Reverse(curve.points.len()));
    curves.truncate(DISTINCT_MAX);
    curves.sort_by(|a, b| a.name.cmp(&b.name));
    curves
}

fn curves(body: &mut Html, document: &ProfileDocument) {
    let bytes = PlotAxis { label: "bytes", unit: "B", scale: Scale::Binary };
    let bandwidth = PlotAxis { label: "bandwidth", unit: "B/s", scale: Scale::Decimal };
    let flops = PlotAxis { label: "arithmetic rate", unit: "FLOP/s", scale: Scale::Decimal };
    let rows = PlotAxis { label: "rows", unit: "", scale: Scale::Binary };
    let tokens = PlotAxis { label: "tokens", unit: "", scale: Scale::Binary };
    let memory = gather(document, |p, work, seconds| match work {
        WorkItem::Memory(traffic, bytes) => {
            let name = match traffic {
                Traffic::Read => "read",
                Traffic::Write => "write",
                Traffic::Copy => "copy",
            };
            Some((name.to_owned(), *bytes as f64, p.bytes / seconds))
        }
        _ => None,
    });
    figure(body, bytes, bandwidth, &memory, "Memory bandwidth by working set: the knees are the caches.");
    let products = gather(document, |p, work, seconds| match work {
        WorkItem::Op(OpSig::Gemm { m, n, k, x, .. }) => {
            Some((format!("{x} n {n} k {k}"), f64::from(*m), p.flops / seconds))
        }
        _ => None,
    });
    figure(
        body,
        rows,
        flops,
        &products,
        "Matrix products by rows: streaming weights at the left, arithmetic at the right.",
    );
    let decode = gather(document, |p, work, seconds| match work {
        WorkItem::Op(OpSig::AttnDecode {
            sequences,
            kv_tokens,
            heads,
            kv: KvShape { kv_heads, head_dim, dtype: kv, .. },
            ..
        }) => {
            let context = *kv_tokens as f64 / f64::from(*sequences);
            let ratio = heads / kv_heads;
            Some((format!("{kv} batch {sequences} gqa {ratio} d {head_dim}"), context, p.bytes / seconds))
        }
        _ => None,
    });
    figure(body, tokens, bandwidth, &decode, "Decode attention: KV bytes per second by context.");
    let prefill = gather(document, |p, work, seconds| match work {
        WorkItem::Op(OpSig::AttnPrefill {
            tokens,
            kv_tokens,
            kv: KvShape { head_dim, dtype: kv, .. },
            ..
        }) => {
            let before = kv_tokens - u64::from(*tokens);
            Some((format!("{kv} after {before} d {head_dim}"), f64::from(*tokens), p.flops / seconds))
        }
        _ => None,
    });
    figure(body, tokens, flops, &prefill, "Prefill attention by new tokens, at several context lengths.");
    let links = gather(document, |p, work, seconds| {
        let name = match work {
            WorkItem::HostToDevice(_) => "host to device",
            WorkItem::DeviceToHost(_) => "device to host",
            WorkItem::DeviceToDevice(_) => "within the device",
            _ => return None,
        };
        Some((name.to_owned(), p.bytes, p.bytes / seconds))
    });
    figure(body, bytes, bandwidth, &links, "Copies by size.");
}

fn figure(body: &mut Html, x: PlotAxis, y: PlotAxis, series: &[Series], caption: &str) {
    Chart { x, y, series, roof: &[], limits: &[] }.draw(body, caption);
}

fn facts(body: &mut Html, document: &ProfileDocument) {
    body.heading(2, "Device and conditions");
    let d = &document.device;
    let mut facts: Vec<(String, String)> = vec![
        ("device".into(), format!("{} ({}, {})", d.name, d.backend, d.kind)),
        ("fingerprint".into(), d.fingerprint.clone()),
        ("memory".into(), gibibytes(d.memory_bytes)),
        ("largest allocation".into(), gibibytes(d.allocation_bytes_max as f64)),
        ("KV page".into(), format!("{} tokens", d.kv_page_tokens)),
    ];
    facts.extend(d.notes.iter().chain(&document.conditions.facts).map(|f| (f.name.clone(), f.value.clone())));
    let c = &document.conditions;
    let states =
        |pick: fn(&super::document::DeviceReadings) -> Option<f64>| pick(&c.before).zip(pick(&c.after));
    for (name, values, unit) in [
        ("clock", states(|s| s.clock_mhz), "MHz"),
        ("temperature", states(|s| s.temperature_c), "C"),
        ("power", states(|s| s.power_w), "W"),
    ] {
        if let Some((before, after)) = values {
            facts.push((name.to_owned(), format!("{before:.0} {unit} before, {after:.0} {unit} after")));
        }
    }
    facts.push(("cold buffers over".into(), scaled(c.cold_bytes as f64, "B")));
    facts.push(("command".into(), document.tool.command.clone()));
    if let Some(price) = &document.economics {
        facts.push(("price".into(), format!("{} $/h ({})", price.usd_per_hour, price.source)));
    }
    body.facts(&facts);
}

fn checks(body: &mut Html, document: &ProfileDocument) {
    body.heading(2, "Conformance of the timed operations");
    let rows: Vec<Vec<TableCell>> = document
        .checks
        .iter()
        .map(|check| {
            let badge = if check.passed { ("right", Tone::Good) } else { ("wrong", Tone::Bad) };
            vec![
                TableCell::text(&check.class),
                TableCell::badge(badge.0, badge.1),
                TableCell::number(check.cases.to_string()),
                TableCell::number(check.ratio_max.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"))),
                TableCell::text(check.reason.clone().unwrap_or_default()),
            ]
        })
        .collect();
    body.begin_details(&format!("{} classes of operations", rows.len()), false);
    body.table(&["class", "result", "cases", "error / bound", "reason"], &rows);
    body.end_details();
}

fn points(body: &mut Html, document: &ProfileDocument) {
    body.heading(2, "All points");
    for group in PointGroup::ALL {
        let points: Vec<&PointResult> = document.points.iter().filter(|p| p.group == group).collect();
        if points.is_empty() {
            continue;
        }
        let ok = points.iter().filter(|p| p.is_ok()).count();
        body.begin_details(&format!("{}: {ok} of {} measured", group.name(), points.len()), false);
        let rows: Vec<Vec<TableCell>> = points.iter().map(|p| row(p)).collect();
        body.table(&["point", "result", "median", "p5", "p95", "CV", "rate", "clock", "remarks"], &rows);
        body.end_details();
    }
}

fn row(p: &PointResult) -> Vec<TableCell> {
    let (word, tone) = match p.status {
        PointStatus::Ok if p.flags.is_empty() => ("ok", Tone::Good),
        PointStatus::Ok => ("flagged", Tone::Warn),
        PointStatus::Unsupported => ("unsupported", Tone::Muted),
        PointStatus::Skipped => ("skipped", Tone::Muted),
        PointStatus::Error => ("wrong", Tone::Bad),
    };
    let seconds = |value: Option<f64>| TableCell::number(value.map_or("-".to_owned(), |s| scaled(s, "s")));
    let s = p.seconds.as_ref();
    let flags: Vec<&str> = p.flags.iter().map(|flag| flag.name()).collect();
    let remarks = p.reason.clone().unwrap_or_else(|| flags.join(", "));
    let timer = p.timer.map_or(String::new(), |timer| format!("{timer:?}").to_lowercase());
    vec![
        TableCell::text(&p.id),
        TableCell::badge(word, tone),
        seconds(s.map(|s| s.median)),
        seconds(s.map(|s| s.p5)),
        seconds(s.map(|s| s.p95)),
        TableCell::number(s.map_or("-".to_owned(), |s| format!("{:.1} %", 100.0 * s.cv))),
        TableCell::number(p.rate().map_or("-".to_owned(), |rate| rate.text())),
        TableCell::text(timer),
        TableCell::text(remarks),
    ]
}
