//! Reads the devices that there are, and the links between their regions, from CSV files.

use super::part;
use anyhow::{Context, Result, anyhow};
use mixfleet_hal::files::{self, TEXT_BYTES_MAX};
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_scheduler::plan::regions::RegionLink;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Devices of a part.
#[derive(Debug)]
pub(super) struct Stock {
    /// The part's id.
    pub(super) id: &'static str,
    /// Their number.
    pub(super) count: u32,
    /// Where they stand; empty if that was not said.
    pub(super) region: String,
    /// Whether they may be taken back at any time.
    pub(super) spot: bool,
}

#[derive(Deserialize)]
struct StockRow {
    device_id: String,
    count: u32,
    #[serde(default)]
    region: String,
    #[serde(default)]
    spot: String,
}

#[derive(Deserialize)]
struct LinkRow {
    from: String,
    to: String,
    gb_per_s: f64,
    usd_per_gb: f64,
    latency_s: Option<f64>,
}

/// The rows of a file with the line of each.
fn rows<T: DeserializeOwned>(path: &Path, what: &str, columns: &str) -> Result<Vec<(u64, T)>> {
    let file = path.display();
    let bytes =
        files::read(path, TEXT_BYTES_MAX).with_context(|| format!("cannot read the {what} in {file}"))?;
    let mut reader =
        csv::ReaderBuilder::new().trim(csv::Trim::All).comment(Some(b'#')).from_reader(&bytes[..]);
    let headers = reader.headers().cloned().map_err(|error| anyhow!("{file}: not CSV: {error}"))?;
    let mut rows = Vec::new();
    let mut record = csv::StringRecord::new();
    while reader.read_record(&mut record).map_err(|error| anyhow!("{file}: {error}"))? {
        let line = record.position().map_or(1, csv::Position::line);
        let row = record.deserialize(Some(&headers));
        rows.push((line, row.map_err(|error| anyhow!("{file}:{line}: expected {columns}: {error}"))?));
    }
    Ok(rows)
}

/// A region's name, by which pools are named too.
fn region(name: &str) -> Result<String, String> {
    match name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-') {
        true => Ok(name.to_ascii_lowercase()),
        false => Err(format!("region '{name}': expected letters, digits and '-'")),
    }
}

/// The devices that there are.
pub(super) fn inventory(path: &Path) -> Result<Vec<Stock>> {
    let columns =
        "the columns device_id and count, as in H100-SXM-80GB,16, and if wanted region and spot (yes, no)";
    let of = |(line, row): (u64, StockRow)| {
        let at = |why: String| anyhow!("{}:{line}: {why}", path.display());
        let spot = match row.spot.to_ascii_lowercase().as_str() {
            "" | "no" | "false" => false,
            "yes" | "true" => true,
            other => return Err(at(format!("spot '{other}': expected yes or no"))),
        };
        let id = part(&row.device_id).map_err(at)?.id;
        Ok(Stock { id, count: row.count, region: region(&row.region).map_err(at)?, spot })
    };
    rows(path, "inventory", columns)?.into_iter().map(of).collect()
}

/// The links between regions.
pub(super) fn links(path: &Path) -> Result<Vec<RegionLink>> {
    let columns = "the columns from, to, gb_per_s and usd_per_gb, as in us-east,eu-west,12.5,0.02, and if wanted latency_s";
    let of = |(line, row): (u64, LinkRow)| {
        let at = |why: String| anyhow!("{}:{line}: {why}", path.display());
        let latency_s = row.latency_s.unwrap_or(0.0);
        if !(1e-6..=1e9).contains(&row.gb_per_s)
            || !(0.0..=1e6).contains(&row.usd_per_gb)
            || !(0.0..=60.0).contains(&latency_s)
        {
            return Err(at("expected from 1e-6 to 1e9 GB/s, up to 1e6 $/GB and up to 60 s".into()));
        }
        Ok(RegionLink {
            from: region(&row.from).map_err(at)?,
            to: region(&row.to).map_err(at)?,
            bandwidth: BytesPerSecond(row.gb_per_s * GB),
            latency: Seconds(latency_s),
            usd_per_gb: row.usd_per_gb,
        })
    };
    rows(path, "links", columns)?.into_iter().map(of).collect()
}
