//! What share of its datasheet a part of the catalog reaches.

use super::case::CaseResult;
use crate::datasheet::catalog_part;
use crate::profile::WorkItem;
use mixfleet_hal::OpSig;
use mixfleet_hal::profile::Traffic;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One number of a datasheet and its measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DatasheetRow {
    /// What the number is of: `memory read`, `products in bf16`.
    pub what: String,
    /// The point that came closest to it, or for memory the one of the largest working set.
    pub point: String,
    /// The measurement, in `unit`.
    pub measured: f64,
    /// What the datasheet says, in `unit`.
    pub claimed: f64,
    /// `B/s` or `FLOP/s`.
    pub unit: String,
    /// The measured number as a share of the datasheet's.
    pub share: f64,
}

/// A part of the catalog beside its datasheet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DatasheetShares {
    /// The part's id in the catalog.
    pub part: String,
    /// Sources of the catalog's numbers.
    pub sources: String,
    /// The numbers, memory first.
    pub rows: Vec<DatasheetRow>,
}

/// Returns the shares that the points of level 3 reach; `None` for a part that the catalog lacks, or if
/// nothing of its datasheet was measured.
pub(crate) fn shares(name: &str, cases: &[CaseResult]) -> Option<DatasheetShares> {
    let part = catalog_part(name)?;
    let rate = |case: &CaseResult, fact: &str| case.facts.get(fact).and_then(Value::as_f64);
    // the rank (the highest counts), and the row
    let mut best: Vec<(f64, DatasheetRow)> = Vec::new();
    for case in cases {
        let Some(point) = case.id.strip_prefix("l3.") else { continue };
        let found = match WorkItem::parse(point, 16) {
            Some(WorkItem::Memory(traffic, bytes)) => rate(case, "bytes_per_s").map(|measured| {
                let what = match traffic {
                    Traffic::Read => "memory read",
                    Traffic::Write => "memory write",
                    Traffic::Copy => "memory copy",
                };
                // small working sets are served by caches
                (bytes as f64, what.to_owned(), measured, part.bandwidth().0, "B/s")
            }),
            Some(WorkItem::Op(OpSig::Gemm { x, .. })) => {
                let claimed = part.rates.of(x);
                rate(case, "flop_per_s").zip(claimed).map(|(measured, claimed)| {
                    (measured, format!("products in {x}"), measured, claimed.0, "FLOP/s")
                })
            }
            _ => None,
        };
        let Some((rank, what, measured, claimed, unit)) = found else { continue };
        let row = DatasheetRow {
            what,
            point: point.to_owned(),
            measured,
            claimed,
            unit: unit.to_owned(),
            share: measured / claimed,
        };
        match best.iter_mut().find(|(_, known)| known.what == row.what) {
            Some(known) if known.0 >= rank => {}
            Some(known) => *known = (rank, row),
            None => best.push((rank, row)),
        }
    }
    best.sort_by(|(_, a), (_, b)| (&a.unit, &a.what).cmp(&(&b.unit, &b.what)));
    let rows: Vec<DatasheetRow> = best.into_iter().map(|(_, row)| row).collect();
    let (part, sources) = (part.id.to_owned(), part.sources.to_owned());
    (!rows.is_empty()).then_some(DatasheetShares { part, sources, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_working_set_and_the_best_product_count() {
        let point = |id: &str, fact: &str, rate: f64| CaseResult::pass(format!("l3.{id}")).fact(fact, rate);
        let cases = [
            point("memory_read.1MiB", "bytes_per_s", 9e12),
            point("memory_read.512MiB", "bytes_per_s", 504e9),
            point("gemm.bf16.m64.n8192.k8192", "flop_per_s", 10e12),
            point("gemm.bf16.m2048.n8192.k8192", "flop_per_s", 99e12),
            point("launch.empty", "seconds", 1e-5),
        ];
        let shares = shares("NVIDIA GeForce RTX 4090", &cases).unwrap();
        assert_eq!((shares.part.as_str(), shares.rows.len()), ("RTX-4090", 2));
        let told: Vec<(&str, f64)> =
            shares.rows.iter().map(|row| (row.what.as_str(), (row.share * 100.0).round())).collect();
        assert_eq!(told, [("memory read", 50.0), ("products in bf16", 60.0)]);
        assert_eq!(super::shares("no such part", &cases), None);
        assert_eq!(super::shares("RTX-4090", &cases[4..]), None);
    }
}
