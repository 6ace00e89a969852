//! A `part.toml` to start from: known facts of a part, with a comment on each line that its vendor fills in.

use super::part::Quantity;
use crate::datasheet::catalog_part;
use crate::profile::{PointResult, ProfileDocument};
use mixfleet_hal::catalog::Part;
use mixfleet_hal::{DType, OpSig};
use std::fmt::Write as _;

/// What a template is made of.
#[derive(Clone, Copy, Debug)]
pub struct PartSketch<'a> {
    /// The device's name.
    pub name: &'a str,
    /// Its PCI id, `vendor:device` in hexadecimal.
    pub pci: Option<&'a str>,
    /// A profile of the part, if there is one.
    pub profile: Option<&'a ProfileDocument>,
}

/// One claim to be.
struct Sketch {
    point: String,
    value: f64,
    unit: &'static str,
    at_least: f64,
    source: String,
}

/// Returns the text of the template, which is a valid part file as it stands. Claims are those of the
/// catalog's datasheet if it knows the part, else the profile's measurements; without either they are
/// comments.
pub fn part_template(sketch: &PartSketch<'_>) -> String {
    let PartSketch { name, pci, profile } = *sketch;
    let mut text = String::from(
        "# What is claimed of a part, and what is known to be wrong with it; docs/reference/validation.md explains\n\
         # each key. Check it with: mixfleet validate --device DEV --part THIS_FILE\n\n\
         # Which part the file is about: a regular expression on the name that 'mixfleet devices' shows, a PCI id\n\
         # (vendor:device), or both.\n",
    );
    let regex = format!("^{}$", regex_lite::escape(name));
    let pci = pci.map(|pci| format!(", pci = {}", quoted(pci))).unwrap_or_default();
    let _ = writeln!(text, "match = {{ name = {}{pci} }}\n", quoted(&regex));
    let part = catalog_part(name);
    let claims = match (part, profile) {
        (Some(part), _) => of_datasheet(part),
        (None, Some(profile)) => of_profile(profile),
        (None, None) => Vec::new(),
    };
    text.push_str(
        "# Numbers that are claimed. point: any name that 'mixfleet profile --json' lists, or another of its form.\n\
         # at_least: the share of the value that must be measured. source: where the claim can be read.\n",
    );
    for claim in &claims {
        write_claim(&mut text, claim, "");
    }
    if claims.is_empty() {
        text.push_str("# Nothing is claimed yet: take away the # and write your numbers.\n");
        for (point, unit) in [("memory_read.512MiB", "GB/s"), ("gemm.bf16.m2048.n8192.k8192", "TFLOP/s")] {
            let source = "datasheet, page".to_owned();
            write_claim(
                &mut text,
                &Sketch { point: point.into(), value: 1.0, unit, at_least: 0.8, source },
                "# ",
            );
        }
    }
    text.push_str(
        "\n# What is wrong and let through until a day; it passes nothing. * stands for any characters.\n\
         # [[waiver]]\n# case = \"l1.attn_decode.f16.*\"\n# reason = \"errata 17, fixed in driver 3.2\"\n\
         # until = \"2027-03-01\"\n",
    );
    text
}

/// A TOML string; JSON's escapes are valid in TOML.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn write_claim(text: &mut String, claim: &Sketch, before: &str) {
    let Sketch { point, value, unit, at_least, source } = claim;
    let (point, source) = (quoted(point), quoted(source));
    let lines = [
        "[[claim]]".to_owned(),
        format!("point = {point}"),
        format!("value = {value}"),
        format!("unit = \"{unit}\""),
        format!("at_least = {at_least}"),
        format!("source = {source}"),
    ];
    for line in lines {
        let _ = writeln!(text, "{before}{line}");
    }
    text.push('\n');
}

/// Shares of a datasheet that good kernels reach: published ones reach 40 to 95 % of arithmetic, and nine
/// tenths of bandwidth.
const SHARE: (f64, f64) = (0.6, 0.8);

fn of_datasheet(part: &Part) -> Vec<Sketch> {
    let source = format!("datasheet, by the catalog of mixfleet ({})", part.sources);
    let mut claims = vec![Sketch {
        point: "memory_read.512MiB".to_owned(),
        value: part.memory.bandwidth_gb_s,
        unit: "GB/s",
        at_least: SHARE.1,
        source: source.clone(),
    }];
    let of = |dtype: DType| {
        let rate = part.rates.of(dtype)?;
        let point = format!("gemm.{dtype}.m2048.n8192.k8192");
        let value = rounded(rate.0 / 1e12);
        Some(Sketch { point, value, unit: "TFLOP/s", at_least: SHARE.0, source: source.clone() })
    };
    claims.extend([DType::Bf16, DType::F16].into_iter().filter_map(of));
    claims
}

/// A measured number is not a claim yet: it is marked so, with a number that a second run would meet.
fn of_profile(profile: &ProfileDocument) -> Vec<Sketch> {
    let day = profile.measured_at.get(..10).unwrap_or("an unknown day");
    let source = format!("measured by mixfleet profile on {day}: write where you claim it");
    let best = |belongs: &dyn Fn(&PointResult) -> bool, flops: bool| {
        let rate = |point: &PointResult| {
            let seconds = point.seconds.as_ref()?.median;
            let work = if flops { point.flops } else { point.bytes };
            (seconds > 0.0 && work > 0.0).then(|| work / seconds)
        };
        let points = profile.points.iter().filter(|point| point.is_ok() && belongs(point));
        points.filter_map(|point| Some((rate(point)?, point))).max_by(|a, b| a.0.total_cmp(&b.0))
    };
    let mut claims = Vec::new();
    // the largest working set, since caches serve small ones
    let reads = profile.points.iter().filter(|point| point.is_ok() && point.id.starts_with("memory_read."));
    if let Some(largest) = reads.max_by(|a, b| a.bytes.total_cmp(&b.bytes))
        && let Some((rate, point)) = best(&|point| point.id == largest.id, false)
    {
        claims.push(sketch(&point.id, rate, Quantity::BytesPerSecond, &source));
    }
    for dtype in DType::FLOATS {
        let products = |point: &PointResult| matches!(point.sig, Some(OpSig::Gemm { x, .. }) if x == dtype);
        if let Some((rate, point)) = best(&products, true) {
            claims.push(sketch(&point.id, rate, Quantity::FlopPerSecond, &source));
        }
    }
    let decodes = |point: &PointResult| matches!(point.sig, Some(OpSig::AttnDecode { .. }));
    if let Some((rate, point)) = best(&decodes, false) {
        claims.push(sketch(&point.id, rate, Quantity::BytesPerSecond, &source));
    }
    claims
}

fn sketch(point: &str, rate: f64, quantity: Quantity, source: &str) -> Sketch {
    let units = match quantity {
        Quantity::BytesPerSecond => [("TB/s", 1e12), ("GB/s", 1e9)],
        _ => [("TFLOP/s", 1e12), ("GFLOP/s", 1e9)],
    };
    let (unit, scale) = units.into_iter().find(|(_, scale)| rate >= *scale).unwrap_or(units[1]);
    Sketch {
        point: point.to_owned(),
        value: rounded(rate / scale),
        unit,
        at_least: 0.8,
        source: source.to_owned(),
    }
}

/// Three significant digits, as datasheets have them.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::super::PartFile;
    use super::*;

    #[test]
    fn a_template_is_a_part_file_about_its_part_whatever_its_name() {
        for name in ["acme X1 (rev. \"C\") [2]\\", "NVIDIA GeForce RTX 4090", "Ü\u{7}\n", ""] {
            for pci in [None, Some("1ae9:0042")] {
                let text = part_template(&PartSketch { name, pci, profile: None });
                let part = PartFile::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}\n{text}"));
                part.is_about(name, pci).unwrap();
                assert!(name.is_empty() || part.is_about("another", pci).is_err());
                assert_eq!(part.claims.len(), if name.contains("4090") { 3 } else { 0 }, "{text}");
            }
        }
    }

    #[test]
    fn the_commented_claims_are_claims_without_their_marks() {
        let text = part_template(&PartSketch { name: "x", pci: None, profile: None });
        let from = text.find("# [[claim]]").unwrap();
        let bare: String =
            text[from..].lines().map(|line| format!("{}\n", line.trim_start_matches("# "))).collect();
        let before = &text[..from];
        let bare = bare.replace("What is wrong", "# What is wrong");
        let part = PartFile::parse(&format!("{before}{bare}")).unwrap();
        assert_eq!((part.claims.len(), part.waivers.len()), (2, 1));
    }
}
