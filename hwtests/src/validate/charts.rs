//! The drawings of a report: measurements beside claims, results beside their bounds, and the device under
//! load.

use super::case::CaseResult;
use super::datasheet::DatasheetShares;
use super::document::Validation;
use super::levels::purpose;
use super::soak::{SoakPhase, SoakSample};
use crate::profile::WorkItem;
use crate::roofline::Roofline;
use mixfleet_hal::OpSig;
use mixfleet_hal::profile::Traffic;
use mixfleet_report::bars::{BarRow, Bars};
use mixfleet_report::html::{Html, Tone};
use mixfleet_report::numbers::scaled;
use mixfleet_report::svg::{Chart, Limit, Mark, PlotAxis, Scale, Series};
use serde_json::Value;
use std::collections::BTreeMap;

fn fact(case: &CaseResult, name: &str) -> Option<f64> {
    case.facts.get(name).and_then(Value::as_f64)
}

/// Draws what share of each claim was measured.
pub(crate) fn claims(body: &mut Html, report: &Validation) {
    let mut rows = Vec::new();
    for case in &report.cases {
        for claim in case.facts.get("claims").and_then(Value::as_array).into_iter().flatten() {
            let number = |name: &str| claim.get(name).and_then(Value::as_f64);
            let Some((share, at_least)) = number("share").zip(number("at_least")) else { continue };
            let measured = claim.get("measured_in_words").and_then(Value::as_str).unwrap_or_default();
            rows.push(BarRow {
                name: case.id.trim_start_matches("l3.").to_owned(),
                value: share,
                words: format!("{:.1} %, {measured}", share * 100.0),
                tone: if share < at_least { Tone::Bad } else { Tone::Good },
                mark: Some(at_least),
            });
        }
    }
    let caption = "Measured as a share of the claim. The line across a bar is the required share, the dotted one the claim.";
    Bars { label: "share of the claim", full: Some(1.0), rows: &rows }.draw(body, caption);
}

/// Draws what share of its datasheet a known part reaches.
pub(crate) fn datasheet(body: &mut Html, shares: &DatasheetShares) {
    let row = |row: &super::datasheet::DatasheetRow| BarRow {
        name: row.what.clone(),
        value: row.share,
        words: format!("{:.1} %, {}", row.share * 100.0, scaled(row.measured, &row.unit)),
        tone: Tone::Plain,
        mark: None,
    };
    let rows: Vec<BarRow> = shares.rows.iter().map(row).collect();
    let caption = format!(
        "Measured as a share of the datasheet of {} ({}): the best product of each dtype, memory by the largest \
         working set. It judges nothing; claims do.",
        shares.part, shares.sources
    );
    Bars { label: "share of the datasheet", full: Some(1.0), rows: &rows }.draw(body, &caption);
}

/// Upper ends of the shares that are counted together, and their names.
const SHARES: [(f64, &str); 10] = [
    (0.0, "none"),
    (1e-3, "up to 0.001"),
    (1e-2, "up to 0.01"),
    (0.1, "up to 0.1"),
    (0.25, "up to 0.25"),
    (0.5, "up to 0.5"),
    (0.75, "up to 0.75"),
    (1.0, "up to the bound"),
    (10.0, "up to 10 times the bound"),
    (f64::INFINITY, "further beyond"),
];

/// Draws how many results of each level came how close to their bound.
pub(crate) fn errors(body: &mut Html, report: &Validation) {
    let mut by_level: BTreeMap<u8, [u32; SHARES.len()]> = BTreeMap::new();
    for case in &report.cases {
        let (Some(level), Some(share)) = (case.level(), fact(case, "error_of_bound_max")) else { continue };
        let at = SHARES.iter().position(|(most, _)| share <= *most).unwrap_or(SHARES.len() - 1);
        by_level.entry(level).or_default()[at] += 1;
    }
    if by_level.is_empty() {
        return;
    }
    body.heading(2, "Errors as a share of their bounds");
    for (level, counts) in by_level {
        let row = |(&(most, name), count): (&(f64, &str), u32)| BarRow {
            name: name.to_owned(),
            value: f64::from(count),
            words: format!("{count} cases"),
            tone: if most > 1.0 { Tone::Bad } else { Tone::Plain },
            mark: None,
        };
        let rows: Vec<BarRow> = SHARES.iter().zip(counts).map(row).collect();
        let label = format!("cases of L{level} by their largest error");
        let caption = format!(
            "L{level}, {}: cases by the largest error among their results. A bound is what rounding can amount to, \
             known before anything ran.",
            purpose(level)
        );
        Bars { label: &label, full: None, rows: &rows }.draw(body, &caption);
    }
}

/// Draws the roofline of what level 3 measured, if it has a plain read and a product.
pub(crate) fn roofline(body: &mut Html, report: &Validation) {
    let (mut read, mut compute) = (None::<(u64, f64)>, None::<(f64, String)>);
    let mut points: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for case in &report.cases {
        let Some(work) = case.id.strip_prefix("l3.").and_then(|point| WorkItem::parse(point, 16)) else {
            continue;
        };
        let (flops, bytes) = (fact(case, "flop_per_s"), fact(case, "bytes_per_s"));
        let kind = match work {
            WorkItem::Memory(Traffic::Read, size) => {
                let larger = read.is_none_or(|(known, _)| size > known);
                read = bytes.filter(|_| larger).map(|rate| (size, rate)).or(read);
                continue;
            }
            WorkItem::Op(OpSig::Gemm { x, .. }) => {
                let better = flops.filter(|&rate| compute.as_ref().is_none_or(|(known, _)| rate > *known));
                compute = better.map(|rate| (rate, x.to_string())).or(compute);
                "matrix products"
            }
            WorkItem::Op(OpSig::AttnDecode { .. }) => "decode attention",
            WorkItem::Op(OpSig::AttnPrefill { .. }) => "prefill attention",
            WorkItem::Op(_) => "small operations",
            _ => continue,
        };
        if let Some((flops, bytes)) = flops.zip(bytes) {
            points.entry(kind).or_default().push((flops / bytes, flops));
        }
    }
    if let (Some((_, read)), Some((rate, dtype))) = (read, compute) {
        body.heading(2, "Roofline");
        Roofline { read, compute: (rate, &dtype), points }.draw(body);
    }
}

/// Draws the readings of a soak.
pub(crate) fn soak(body: &mut Html, samples: &[SoakSample]) {
    if samples.is_empty() {
        return;
    }
    body.heading(2, "Soak");
    let phases = [(SoakPhase::Compute, "arithmetic load"), (SoakPhase::Bandwidth, "bandwidth load")];
    let series = |(phase, name): (SoakPhase, &str), of: &dyn Fn(&SoakSample) -> Option<f64>| {
        let seen = samples.iter().filter(|sample| sample.phase == phase);
        let points = seen.filter_map(|sample| Some((sample.t_s, of(sample)?))).collect();
        Series { name: name.to_owned(), points, mark: Mark::Both }
    };
    let wrong = samples.iter().filter(|sample| !sample.wrong.is_empty());
    let limits: Vec<Limit> = wrong.take(20).map(|sample| Limit::X(sample.t_s, "wrong results")).collect();
    let x = PlotAxis { label: "time in s", unit: "", scale: Scale::Linear };
    let mut chart = |label, unit, series: &[Series], caption: &str| {
        let y = PlotAxis { label, unit, scale: Scale::Linear };
        Chart { x, y, series, roof: &[], limits: &limits }.draw(body, caption);
    };
    let rate = |sample: &SoakSample| sample.rate;
    for (phase, label, unit, caption) in [
        (phases[0], "arithmetic rate", "FLOP/s", "Rate of the arithmetic load, phase by phase."),
        (phases[1], "bandwidth", "B/s", "Rate of the bandwidth load, phase by phase."),
    ] {
        chart(label, unit, &[series(phase, &rate)], caption);
    }
    let both = |of: &dyn Fn(&SoakSample) -> Option<f64>| phases.map(|phase| series(phase, of));
    chart(
        "clock",
        "Hz",
        &both(&|sample| sample.clock_mhz.map(|mhz| mhz * 1e6)),
        "Clock at the end of each phase.",
    );
    let caption = "Temperature at the end of each phase.";
    chart("temperature in C", "", &both(&|sample| sample.temperature_c), caption);
    chart("power", "W", &both(&|sample| sample.power_w), "Power at the end of each phase.");
    let absent = |of: &dyn Fn(&SoakSample) -> Option<f64>| samples.iter().all(|sample| of(sample).is_none());
    let missing: Vec<&str> = [
        ("clock", absent(&|sample| sample.clock_mhz)),
        ("temperature", absent(&|sample| sample.temperature_c)),
        ("power", absent(&|sample| sample.power_w)),
    ]
    .into_iter()
    .filter_map(|(name, is_absent)| is_absent.then_some(name))
    .collect();
    if !missing.is_empty() {
        body.paragraph(&format!("The device does not tell its {}.", missing.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(t_s: f64, phase: SoakPhase, rate: Option<f64>) -> SoakSample {
        let (wrong, temperature_c) = (Vec::new(), Some(40.0 + t_s));
        SoakSample {
            t_s,
            phase,
            batches: 1,
            busy_s: 1.0,
            rate,
            wrong,
            temperature_c,
            power_w: None,
            clock_mhz: None,
        }
    }

    #[test]
    fn a_soak_is_drawn_as_far_as_the_device_tells() {
        let mut samples = vec![
            sample(1.0, SoakPhase::Compute, Some(1e12)),
            sample(2.0, SoakPhase::Bandwidth, Some(1e9)),
            sample(3.0, SoakPhase::Golden, None),
        ];
        let page = |samples: &[SoakSample]| {
            let mut body = Html::default();
            soak(&mut body, samples);
            body.as_str().to_owned()
        };
        let drawn = page(&samples);
        assert_eq!(drawn.matches("<figure>").count(), 3, "two rates and a temperature: {drawn}");
        assert!(drawn.contains("does not tell its clock, power."), "{drawn}");
        assert!(!drawn.contains("wrong results"));
        samples[2].wrong.push("gemm".to_owned());
        samples.push(sample(4.0, SoakPhase::Compute, Some(1e12)));
        assert!(page(&samples).contains("wrong results"));
        assert_eq!(page(&[]), "");
    }
}
