//! The restated facts against the collection they were taken from, where it is at hand.

use mixfleet_hal::catalog::{self, Confidence, Part, PartKind};
use mixfleet_hal::economics::{HYPERSCALERS, PriceSupport, REFERENCE_OFFERS};
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::path::Path;

type Row = HashMap<String, String>;

/// Rows of a file beside the repository; `None`, loudly, where it is absent.
fn rows(name: &str) -> Option<Vec<Row>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(name);
    if !path.exists() {
        eprintln!("SKIPPED: ../shared/data/{name} is absent; catalog not compared");
        return None;
    }
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_path(&path).expect("readable");
    Some(reader.deserialize().map(|row| row.expect("a well-formed row")).collect())
}

/// A number; none for an empty field and for zero, which the collection writes for "has none".
fn number(row: &Row, column: &str) -> Option<f64> {
    let text = &row[column];
    let value: f64 = if text.is_empty() { 0.0 } else { text.parse().expect("a number") };
    (value != 0.0).then_some(value)
}

/// Restated values that differ from the collection's on purpose.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("ASCEND-910B", "fp16acc16_dense_tflops", "belongs to another bin than the bf16 rate"),
    ("TPU-v5p", "fp8_dense_tflops", "the bf16 rate: there are no fp8 units"),
    ("TPU-v6e", "fp8_dense_tflops", "the bf16 rate: there are no fp8 units"),
];

/// Parts that the collection does not have, each with its source.
const BESIDE: &[(&str, &str)] =
    &[("A800-SXM-80GB", "the vendor's datasheet; an A100 with links of 400 GB/s")];

/// What Step-3's authors estimate for public clouds (arXiv 2507.19427, table 1), in $/h.
const ESTIMATES: &[(&str, f64)] =
    &[("H800-SXM-80GB", 2.0), ("H20-96GB", 0.80), ("A800-SXM-80GB", 0.75), ("ASCEND-910B", 0.67)];

fn differences(part: &Part, row: &Row) -> Vec<String> {
    let rates = part.rates;
    let numbers = [
        ("mem_gb", Some(part.memory.size_gb)),
        ("mem_bw_gbs", Some(part.memory.bandwidth_gb_s)),
        ("fp32_vec_tflops", rates.f32),
        ("bf16_dense_tflops", rates.bf16),
        ("fp16acc16_dense_tflops", rates.f16_accumulate_f16.or(rates.f16)),
        ("fp8_dense_tflops", rates.fp8),
        ("fp4_dense_tflops", rates.fp4),
        ("int8_dense_tops", rates.int8),
        ("tdp_w", part.power_w),
        ("year", Some(f64::from(part.year))),
        ("scaleup_gbs_bidir", part.scale_up.map(|link| link.gb_s)),
    ];
    let expected = |column| !EXCEPTIONS.iter().any(|(id, known, _)| *id == part.id && *known == column);
    let mut found: Vec<String> = numbers
        .into_iter()
        .filter(|(column, ours)| expected(*column) && *ours != number(row, column))
        .map(|(column, ours)| format!("{}: {column} is {ours:?} here and {} there", part.id, row[column]))
        .collect();
    let kind = match row["kind"].as_str() {
        "gpu" => PartKind::Gpu,
        "soc" | "apu" => PartKind::Shared,
        "cpu" => PartKind::Cpu,
        _ => PartKind::Accelerator,
    };
    let confidence = [(Confidence::A, "A"), (Confidence::B, "B"), (Confidence::C, "C")];
    let same = part.vendor == row["vendor"]
        && part.memory.technology == row["mem_type"]
        && part.kind == kind
        && confidence.contains(&(part.confidence, row["confidence"].as_str()))
        && part.host_link.is_none_or(|link| {
            link.name == row["host_link"] && Some(link.gb_s) == number(row, "host_gbs_dir")
        });
    if !same {
        found.push(format!("{}: vendor, kind, memory type, confidence or host link differ", part.id));
    }
    found
}

#[test]
fn every_restated_number_is_the_collections() {
    let Some(rows) = rows("devices.csv") else { return };
    let mut errors = Vec::new();
    for part in catalog::parts() {
        match rows.iter().find(|row| row["id"] == part.id) {
            Some(row) => errors.extend(differences(part, row)),
            None if BESIDE.iter().any(|(id, source)| *id == part.id && !source.is_empty()) => {}
            None => errors.push(format!("{} is not in devices.csv", part.id)),
        }
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

#[test]
fn every_built_in_price_is_the_collections() {
    let Some(rows) = rows("price-per-device.csv") else { return };
    let mut compared = 0;
    for offer in REFERENCE_OFFERS {
        let Some(row) = rows.iter().find(|row| row["device_id"] == offer.id) else {
            assert!(ESTIMATES.contains(&(offer.id, offer.usd_per_hour)), "{}", offer.id);
            continue;
        };
        assert_eq!(Some(offer.usd_per_hour), number(row, "ref_price"), "{}", offer.id);
        compared += 1;
    }
    assert!(compared >= 30, "{compared} prices compared");
}

/// Clouds that rent out the devices of single owners.
const MARKETPLACES: [&str; 5] = ["akash", "salad", "spheron", "vast", "vast-ai"];

#[test]
fn every_price_has_the_providers_of_the_collection() {
    let Some(rows) = rows("gpu-prices.csv") else { return };
    for offer in REFERENCE_OFFERS {
        let offers = rows.iter().filter(|row| {
            row["device_id"] == offer.id
                && number(row, "price_hourly").is_some()
                && number(row, "gpu_count").is_some_and(|count| count > 0.0)
        });
        let clouds: BTreeSet<&str> = offers.map(|row| row["cloud"].as_str()).collect();
        let (markets, clouds): (Vec<&str>, Vec<&str>) =
            clouds.into_iter().partition(|cloud| MARKETPLACES.contains(cloud));
        let others = clouds.iter().filter(|cloud| !HYPERSCALERS.contains(cloud)).count();
        let expected = match (others, clouds.is_empty(), markets.is_empty()) {
            (0, true, true) => PriceSupport::Estimate,
            (0, true, false) => PriceSupport::Marketplaces,
            (0, false, _) => PriceSupport::Hyperscalers,
            _ => PriceSupport::Clouds(u32::try_from(others).expect("few")),
        };
        assert_eq!(offer.support, expected, "{}", offer.id);
    }
}

#[test]
fn every_published_share_is_the_collections() {
    let Some(rows) = rows("measured/price_spec_snapshot.csv") else { return };
    let mut compared = 0;
    for (name, id) in [
        ("H100", "H100-SXM-80GB"),
        ("H200", "H200-SXM-141GB"),
        ("B200", "B200-SXM"),
        ("A100", "A100-SXM-80GB"),
        ("L40S", "L40S"),
        ("RTX4090", "RTX-4090"),
        ("RTXPRO6000", "RTX-PRO-6000-SE"),
        ("B60", "ARC-PRO-B60"),
    ] {
        let row = rows.iter().find(|row| row["name"] == name).expect("a row of the snapshot");
        let reached = catalog::part(id).and_then(Part::reached).expect("a part with shares");
        assert_eq!(Some(reached.attention_decode), number(row, "attn_mbu"), "{id}");
        assert_eq!(Some(reached.gemm), number(row, "gemm_mfu"), "{id}");
        compared += 1;
    }
    let best = rows_of_best_kernels();
    for (id, gemm, few_rows) in best.iter().flatten() {
        let reached = catalog::part(id).and_then(Part::reached).expect("a part with shares");
        assert!((reached.gemm - 0.86 * gemm).abs() < 0.006, "{id}: {} of {gemm}", reached.gemm);
        assert!((reached.gemm_few_rows - 0.94 * few_rows).abs() < 0.006, "{id}");
        compared += 1;
    }
    assert_eq!(compared, catalog::parts().iter().filter(|part| part.reached().is_some()).count());
}

/// Parts of which only the best of all kernels is published, with its shares in bf16: of the rate in large
/// products, and of the bandwidth in those of few rows.
fn rows_of_best_kernels() -> Option<Vec<(String, f64, f64)>> {
    let rows = rows("measured/roofline-efficiency.csv")?;
    let wanted = ["GB200", "B300-SXM", "GB300"];
    let of = |row: &Row| wanted.contains(&row["device_id"].as_str()) && row["gemm_dtype"] == "bfloat16";
    let shares = |row: &Row| {
        Some((row["device_id"].clone(), number(row, "peak_fraction")?, number(row, "bw_fraction")?))
    };
    Some(rows.iter().filter(|row| of(row)).filter_map(shares).collect())
}

/// The parts that people compare models of this year on: nothing that a prediction needs is missing.
#[test]
fn parts_of_comparisons_are_complete() {
    for id in [
        "A800-SXM-80GB",
        "H800-SXM-80GB",
        "H20-96GB",
        "L20",
        "L4",
        "RTX-5090",
        "MI300X",
        "MI355X",
        "B200-SXM",
        "B300-SXM",
        "GAUDI3",
        "TPU-v6e",
        "ASCEND-910B",
    ] {
        let part = catalog::part(id).expect(id);
        assert!(part.rates.bf16.is_some() && part.rates.f16.is_some(), "{id}");
        assert!(part.rates.fp8.or(part.rates.int8).is_some(), "{id}");
        assert!(part.power_w.is_some() && part.host_link.is_some(), "{id}");
        assert_eq!(part.scale_up.is_some(), !["L20", "L4", "RTX-5090"].contains(&id), "{id}");
        let offered = REFERENCE_OFFERS.iter().any(|offer| offer.id == id);
        assert_eq!(offered, !["L20", "MI355X", "GAUDI3"].contains(&id), "{id}");
    }
}
