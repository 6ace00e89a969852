//! Tables of further parts, laid beside the published ones in the same formats.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use super::tables::{PARTS, decodes_of, gemms_of, lines_of, prefills_of};
use mixfleet_hal::DType;
use mixfleet_hal::profile::Point;
use std::collections::BTreeMap;
use std::path::Path;

/// Tables in bf16 of parts without a law: all in `root` but those of [`PARTS`] in its folder `measured`, by
/// folder and the tables' name of the part. A folder that lacks one of the three tables is reported.
pub(crate) fn further_in(root: &Path) -> BTreeMap<String, Vec<Point>> {
    let mut further = BTreeMap::<String, Vec<Point>>::new();
    let folders =
        std::fs::read_dir(root).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    for folder in folders.filter(|path| path.is_dir()) {
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let tables = ["gemm.csv", "decode_attention.csv", "context_attention.csv"];
        let rows = tables.map(|table| lines_of(&folder.join(table)));
        if rows.iter().all(Option::is_none) {
            continue;
        }
        for (table, _) in tables.iter().zip(&rows).filter(|(_, rows)| rows.is_none()) {
            println!("SKIPPED: no {table} in {name}");
        }
        let [gemms, decodes, prefills] = rows.map(Option::unwrap_or_default);
        let kinds = [gemms_of(gemms, DType::Bf16), decodes_of(decodes, DType::Bf16), prefills_of(&prefills)];
        for (device, points) in kinds.into_iter().flatten() {
            if name != "measured" || PARTS.iter().all(|(known, _)| *known != device) {
                further.entry(format!("{name}/{device}")).or_default().extend(points);
            }
        }
    }
    further
}
