//! Messages between the parent and a child process: one JSON document in, JSON lines out.

use super::case::CaseResult;
use super::soak::{Baseline, SoakSample};
use mixfleet_hal::DeviceInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A fact about the device that only its environment knows: the link, the NUMA node, the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceFact {
    /// Name of the fact in one word: `link`, `numa`, `driver`.
    pub name: String,
    /// The value read, if any.
    pub value: Option<String>,
    /// Why it could not be read, or its fault.
    pub remark: Option<String>,
}

impl DeviceFact {
    /// Creates a fact that is as it should be.
    pub fn known(name: &str, value: impl Into<String>) -> DeviceFact {
        DeviceFact { name: name.to_owned(), value: Some(value.into()), remark: None }
    }

    /// Creates a fact with something wrong.
    pub fn suspect(name: &str, value: impl Into<String>, remark: impl Into<String>) -> DeviceFact {
        DeviceFact { name: name.to_owned(), value: Some(value.into()), remark: Some(remark.into()) }
    }

    /// Creates a fact that could not be read.
    pub fn unknown(name: &str, why: impl Into<String>) -> DeviceFact {
        DeviceFact { name: name.to_owned(), value: None, remark: Some(why.into()) }
    }
}

/// How thorough a validation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ValidationEffort {
    /// A minute or two on a fast device.
    Quick,
    /// All edge shapes, all passes of the memory patterns, the longer profile.
    Full,
}

/// The amount of memory to test, for the memory level.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryAsked {
    /// This many bytes.
    Bytes(u64),
    /// This share, from 0 to 1, of what the device reports.
    Share(f64),
}

/// Settings for every child of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Settings {
    /// How thorough the run is.
    pub effort: ValidationEffort,
    /// Seed of the memory patterns.
    pub seed: u64,
    /// Bytes of memory to test.
    pub memory: MemoryAsked,
    /// Seconds without an answer after which a batch counts as hung.
    pub batch_timeout_s: f64,
    /// Facts that the caller read.
    pub facts: Vec<DeviceFact>,
    /// Seconds of soak; 0 for none.
    pub soak_s: f64,
    /// Points that the part file claims, which are measured even if the profile's plan lacks them.
    pub points: Vec<String>,
}

impl Settings {
    /// Quick settings with 128 MiB of memory and 30 s for each batch, since some devices compile kernels on
    /// first use.
    pub fn quick() -> Settings {
        Settings {
            effort: ValidationEffort::Quick,
            seed: 1,
            memory: MemoryAsked::Bytes(128 << 20),
            batch_timeout_s: 30.0,
            facts: Vec::new(),
            soak_s: 0.0,
            points: Vec::new(),
        }
    }

    /// Returns the timeout of one batch.
    pub(crate) fn batch_timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.batch_timeout_s).unwrap_or(Duration::from_secs(30))
    }
}

/// The work of one child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// Selector of the device.
    pub device: String,
    /// The group to run: `l1.gemm`.
    pub group: String,
    /// Settings of the run.
    pub settings: Settings,
    /// Patterns of the cases to run; empty means all of the group.
    pub only: Vec<String>,
    /// Cases that an earlier child finished or failed on.
    pub done: Vec<String>,
    /// For a resumed soak: its baseline, and the seconds that it has run.
    pub soak: Option<(Baseline, f64)>,
}

/// A message from a child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "line", content = "value", rename_all = "snake_case")]
pub enum ChildMessage {
    /// The device is open.
    Opened(DeviceInfo),
    /// The device could not be opened, for this reason.
    CannotOpen(String),
    /// A case begins.
    Begin(String),
    /// Work continues.
    Alive,
    /// A case ended.
    Case(CaseResult),
    /// The baseline of a soak.
    Baseline(Baseline),
    /// A reading of a soak.
    Sample(SoakSample),
    /// The group is complete.
    End,
}
