//! `mixfleet.links/1`: measurements of the links of a host or between two hosts. Its JSON Schema is
//! `docs/schema/links-1.json`. Added fields keep the version, so readers must ignore unknown ones.

use super::tool;
use crate::profile::{Fact, Tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Measurements of links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.links/1")]
pub struct LinksDocument {
    /// Name and version of the document schema: [`LinksDocument::SCHEMA`].
    pub schema: String,
    /// The program that measured them.
    pub tool: Tool,
    /// Start time, RFC 3339 in UTC.
    pub measured_at: String,
    /// Conditions such as kernel, governor and load.
    pub conditions: Vec<Fact>,
    /// All links that were tried.
    pub links: Vec<MeasuredLink>,
    /// Links that could not be tried.
    pub absent: Vec<Absence>,
}

/// The results for one link. Without a `problem`, its data came back intact before and after the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredLink {
    /// Name of the transport, or `copy`.
    pub link: String,
    /// Description of the near memory.
    pub from: String,
    /// Description of the far memory.
    pub to: String,
    /// What the ends agreed on, such as the RDMA address kind and MTU.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
    /// Rates of writes, from near to far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub there: Option<LinkRate>,
    /// Rates of reads, from far to near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back: Option<LinkRate>,
    /// Why there are no numbers: an error or wrong data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Rates in one direction of a link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkRate {
    /// Median latency of 4 KiB, from the call to its completion, in microseconds.
    pub latency_us_median: f64,
    /// Minimum latency of 4 KiB in microseconds.
    pub latency_us_min: f64,
    /// Number of latency measurements.
    pub latency_tries: usize,
    /// Median rate of long transfers in bytes per second.
    pub bytes_per_s_median: f64,
    /// Maximum rate of long transfers in bytes per second.
    pub bytes_per_s_max: f64,
    /// Size of a long transfer in bytes.
    pub bytes: u64,
    /// Number of long transfers.
    pub tries: usize,
}

/// A link that could not be tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Absence {
    /// Name of the link.
    pub link: String,
    /// Why it could not be tried.
    pub reason: String,
}

impl LinksDocument {
    /// Name and version of the document schema.
    pub const SCHEMA: &str = "mixfleet.links/1";

    /// Creates a document without links.
    pub fn new(measured_at: String, command: String, conditions: Vec<Fact>) -> Self {
        let (links, absent) = Default::default();
        LinksDocument {
            schema: Self::SCHEMA.into(),
            tool: tool(command),
            measured_at,
            conditions,
            links,
            absent,
        }
    }

    /// Returns the JSON Schema of this document, as in `docs/schema/links-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(LinksDocument).to_value()
    }
}

fn bytes_per_s(rate: f64) -> String {
    if rate >= 1e9 { format!("{:.2} GB/s", rate / 1e9) } else { format!("{:.1} MB/s", rate / 1e6) }
}

impl fmt::Display for LinksDocument {
    /// Prints a table of medians in both directions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |link: &MeasuredLink| format!("{} to {}", link.from, link.to);
        let width = self.links.iter().map(|link| place(link).len()).max().unwrap_or(0).max(4);
        writeln!(
            f,
            "{:<8} {:<width$} {:>12} {:>11} {:>12} {:>11}",
            "link", "from, to", "there", "4 KiB", "back", "4 KiB"
        )?;
        for link in &self.links {
            write!(f, "{:<8} {:<width$}", link.link, place(link))?;
            for rate in [&link.there, &link.back].into_iter().flatten() {
                let latency = format!("{:.1} us", rate.latency_us_median);
                write!(f, " {:>12} {latency:>11}", bytes_per_s(rate.bytes_per_s_median))?;
            }
            match &link.problem {
                Some(problem) => writeln!(f, " FAILED: {problem}")?,
                None if link.details.is_empty() => writeln!(f)?,
                None => writeln!(f, "  {}", link.details)?,
            }
        }
        for Absence { link, reason } in &self.absent {
            writeln!(f, "{link:<8} absent: {reason}")?;
        }
        Ok(())
    }
}
