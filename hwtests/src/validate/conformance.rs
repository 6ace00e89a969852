//! Level 1: every operation against the float64 oracle.

use super::case::{CaseResult, Status};
use super::ids;
use super::protocol::{Effort, Settings};
use crate::report::{CaseReport, Outcome};
use crate::suite::{Entry, attempt, entries};
use crate::{Level, cases, checks};
use mixfleet_hal::{Device, Limits};

/// Names of the operations and checks, in the order of the suite: a group each.
pub(crate) fn groups() -> Vec<&'static str> {
    // which operations there are does not depend on the limits
    let limits = Limits {
        allocation_bytes_max: 1 << 30,
        alignment_bytes: 1,
        imports_host_memory: false,
        kv_page_tokens: 16,
        replay_pays: false,
    };
    let mut names: Vec<&'static str> = Vec::new();
    let operations = cases::cases(Level::Quick, &limits).into_iter().map(|case| case.sig.name());
    for name in operations.chain(checks::ALL.iter().map(|(name, _)| *name)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The cases of one group with their ids.
pub(crate) fn listed(device: &dyn Device, settings: &Settings, name: &str) -> Vec<(String, Entry)> {
    let level = match settings.effort {
        Effort::Quick => Level::Quick,
        Effort::Full => Level::Full,
    };
    let named = ids::with_ids(entries(level, &device.limits()));
    named.into_iter().filter(|(_, entry)| entry.name == name).collect()
}

/// Runs one case.
pub(crate) fn run(device: &dyn Device, settings: &Settings, id: &str, entry: &Entry) -> CaseResult {
    result(id, attempt(device, entry, settings.batch_timeout()))
}

fn result(id: &str, report: CaseReport) -> CaseResult {
    let (status, reason) = match report.outcome {
        Outcome::Pass => (Status::Pass, String::new()),
        Outcome::Fail { reason } => (Status::Fail, reason),
        Outcome::Unsupported => (Status::Unsupported, "the device does not claim it".to_owned()),
        Outcome::NotRun { reason } => (Status::NotRun, reason),
        Outcome::Timeout { reason } => (Status::Timeout, reason),
        Outcome::DeviceLost { reason } => (Status::DeviceLost, reason),
    };
    let mut result = CaseResult::new(id, status, reason);
    if let Some(ratio) = report.ratio_max {
        result = result.fact("error_of_bound_max", ratio);
    }
    if let Some(invariant) = report.batch_invariant {
        result = result.fact("batch_invariant", invariant);
    }
    if status.is_wrong() {
        // the signature, spread and seed: enough to run it again
        result = result.fact("case", report.case);
    }
    result
}
