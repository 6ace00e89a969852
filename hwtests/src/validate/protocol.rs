//! What the parent tells a child process, and what the child tells back: one JSON document in, JSON lines
//! out.

use super::case::CaseResult;
use super::soak::{Baseline, SoakSample};
use mixfleet_hal::DeviceInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Something about the device that only its surroundings know: the link, the NUMA node, the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceFact {
    /// One word: `link`, `numa`, `driver`.
    pub name: String,
    /// What was read, in words.
    pub value: Option<String>,
    /// Why it could not be read, or what is wrong with it.
    pub remark: Option<String>,
}

impl DeviceFact {
    /// Read and as it should be.
    pub fn known(name: &str, value: impl Into<String>) -> DeviceFact {
        DeviceFact { name: name.to_owned(), value: Some(value.into()), remark: None }
    }

    /// Read, and something is wrong with it.
    pub fn suspect(name: &str, value: impl Into<String>, remark: impl Into<String>) -> DeviceFact {
        DeviceFact { name: name.to_owned(), value: Some(value.into()), remark: Some(remark.into()) }
    }

    /// Could not be read.
    pub fn unknown(name: &str, why: impl Into<String>) -> DeviceFact {
        DeviceFact { name: name.to_owned(), value: None, remark: Some(why.into()) }
    }
}

/// How thoroughly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ValidationEffort {
    /// A minute or two on a fast device.
    Quick,
    /// All edge shapes, all passes of the memory patterns, the longer profile.
    Full,
}

/// How much memory the memory level tries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryAsked {
    /// So many bytes.
    Bytes(u64),
    /// This share of what the device reports, from 0 to 1.
    Share(f64),
}

/// What every child of a run is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Settings {
    /// How thoroughly.
    pub effort: ValidationEffort,
    /// Seed of the memory patterns.
    pub seed: u64,
    /// Memory for the memory level.
    pub memory: MemoryAsked,
    /// A batch without an answer after this many seconds counts as hung.
    pub batch_timeout_s: f64,
    /// Facts that the caller read.
    pub facts: Vec<DeviceFact>,
    /// Seconds of soak; 0 = none.
    pub soak_s: f64,
    /// Points that the part file claims: measured whether the profile's plan has them or not.
    pub points: Vec<String>,
}

impl Settings {
    /// Quick, with 128 MiB of memory and 30 s for each batch: some devices compile kernels on first use.
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

    /// The longest wait for one batch.
    pub(crate) fn batch_timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.batch_timeout_s).unwrap_or(Duration::from_secs(30))
    }
}

/// One child's work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The device's selector.
    pub device: String,
    /// The group to run: `l1.gemm`.
    pub group: String,
    /// How.
    pub settings: Settings,
    /// Patterns of the cases to run; empty = all of the group.
    pub only: Vec<String>,
    /// Cases that an earlier child finished or broke on.
    pub done: Vec<String>,
    /// What a soak that is carried on began with, and the seconds that it has run.
    pub soak: Option<(Baseline, f64)>,
}

/// One line of a child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "line", content = "value", rename_all = "snake_case")]
pub enum ChildMessage {
    /// The device is open.
    Opened(DeviceInfo),
    /// The device could not be opened, and why.
    CannotOpen(String),
    /// A case begins.
    Begin(String),
    /// Work goes on.
    Alive,
    /// A case ended.
    Case(CaseResult),
    /// What a soak compares with.
    Baseline(Baseline),
    /// What a soak saw.
    Sample(SoakSample),
    /// All of the group is done.
    End,
}
