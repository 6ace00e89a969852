//! Level 1: every operation against the float64 oracle.

use super::case::{CaseResult, CaseStatus};
use super::protocol::{Settings, ValidationEffort};
use crate::ids;
use crate::report::{CaseReport, CheckOutcome};
use crate::suite::{SuiteEntry, attempt, entries};
use crate::{SuiteLevel, cases, checks};
use mixfleet_hal::{Device, DeviceLimits};

/// Returns the names of the operations and checks, one group each, in the order of the suite.
pub(crate) fn groups() -> Vec<&'static str> {
    // any limits do: the set of operations does not depend on them
    let limits = DeviceLimits {
        allocation_bytes_max: 1 << 30,
        alignment_bytes: 1,
        imports_host_memory: false,
        kv_page_tokens: 16,
        replay_pays: false,
        copies_beside: false,
    };
    let mut names: Vec<&'static str> = Vec::new();
    let operations = cases::cases(SuiteLevel::Quick, &limits).into_iter().map(|case| case.sig.name());
    for name in operations.chain(checks::ALL.iter().map(|(name, _)| *name)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns the cases of one group with their ids.
pub(crate) fn listed(device: &dyn Device, settings: &Settings, name: &str) -> Vec<(String, SuiteEntry)> {
    let level = match settings.effort {
        ValidationEffort::Quick => SuiteLevel::Quick,
        ValidationEffort::Full => SuiteLevel::Full,
    };
    let named = ids::with_ids(entries(level, &device.limits()));
    named.into_iter().filter(|(_, entry)| entry.name == name).collect()
}

/// Runs one case.
pub(crate) fn run(device: &dyn Device, settings: &Settings, id: &str, entry: &SuiteEntry) -> CaseResult {
    result(id, attempt(device, entry, settings.batch_timeout()))
}

fn result(id: &str, report: CaseReport) -> CaseResult {
    let (status, reason) = match report.outcome {
        CheckOutcome::Pass => (CaseStatus::Pass, String::new()),
        CheckOutcome::Fail { reason } => (CaseStatus::Fail, reason),
        CheckOutcome::Unsupported => (CaseStatus::Unsupported, "the device does not claim it".to_owned()),
        CheckOutcome::NotRun { reason } => (CaseStatus::NotRun, reason),
        CheckOutcome::Timeout { reason } => (CaseStatus::Timeout, reason),
        CheckOutcome::DeviceLost { reason } => (CaseStatus::DeviceLost, reason),
    };
    let mut result = CaseResult::new(id, status, reason);
    if let Some(ratio) = report.ratio_max {
        // a NaN result has an infinite ratio, which JSON cannot express
        result = result.fact("error_of_bound_max", ratio.min(f64::MAX));
    }
    if let Some(invariant) = report.batch_invariant {
        result = result.fact("batch_invariant", invariant);
    }
    if status.is_wrong() {
        // the case has the signature, distribution and seed with which it can be repeated
        result = result.fact("case", report.case);
    }
    result
}
