//! `mixfleet.links/1`: what the links of a host, or between two hosts, do. Its JSON Schema is
//! `docs/schema/links-1.json`. Added fields keep the version, so readers must ignore what they do not know.

use super::tool;
use crate::profile::{Fact, Tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Measured links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.links/1")]
pub struct LinksDocument {
    /// Name and version of the document: [`Document::SCHEMA`].
    pub schema: String,
    /// What measured them.
    pub tool: Tool,
    /// When it began, RFC 3339 in UTC.
    pub measured_at: String,
    /// Kernel, governor, load.
    pub conditions: Vec<Fact>,
    /// Every link that was tried.
    pub links: Vec<MeasuredLink>,
    /// Links that are not there to be tried.
    pub absent: Vec<Absence>,
}

/// One link, as it was tried. Without `problem` its data came back right before and after the times were taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredLink {
    /// A transport's name, or `copy`.
    pub link: String,
    /// The near memory.
    pub from: String,
    /// The far one.
    pub to: String,
    /// What the ends agreed on, such as RDMA's kind of address and MTU.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
    /// Writes: from near to far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub there: Option<LinkRate>,
    /// Reads: from far to near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back: Option<LinkRate>,
    /// Why there are no numbers: an error, or wrong data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// One direction of a link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkRate {
    /// Of 4 KiB, from the call to its completion.
    pub latency_us_median: f64,
    /// The least of them.
    pub latency_us_min: f64,
    /// How many.
    pub latency_tries: usize,
    /// Of long transfers.
    pub bytes_per_s_median: f64,
    /// Of the fastest of them.
    pub bytes_per_s_max: f64,
    /// Length of a long transfer.
    pub bytes: u64,
    /// How many.
    pub tries: usize,
}

/// A link that is not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Absence {
    /// Which.
    pub link: String,
    /// Why.
    pub reason: String,
}

impl LinksDocument {
    /// The document's name and version.
    pub const SCHEMA: &str = "mixfleet.links/1";

    /// Without links yet.
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

    /// The JSON Schema of this document, as in `docs/schema/links-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(LinksDocument).to_value()
    }
}

fn bytes_per_s(rate: f64) -> String {
    if rate >= 1e9 { format!("{:.2} GB/s", rate / 1e9) } else { format!("{:.1} MB/s", rate / 1e6) }
}

impl fmt::Display for LinksDocument {
    /// A table: medians, both ways.
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
