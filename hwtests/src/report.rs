//! The results of a conformance run.

use crate::cases::{Case, SuiteLevel};
use mixfleet_hal::{DeviceInfo, OperandAccess};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How one check ended; "could not run" never counts as a pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// It was tried and is right.
    Pass,
    /// It was tried and is wrong.
    Fail {
        /// The fault, with the values.
        reason: String,
    },
    /// The device does not claim support, and need not.
    Unsupported,
    /// It could not be tried.
    NotRun {
        /// Why it could not be tried.
        reason: String,
    },
    /// It was tried and did not complete in time; the device cannot be used any further.
    Timeout {
        /// What did not complete.
        reason: String,
    },
    /// The device went away and cannot be used any further.
    DeviceLost {
        /// The device's error message.
        reason: String,
    },
}

impl CheckOutcome {
    /// Whether it was tried and is wrong.
    pub fn is_wrong(&self) -> bool {
        matches!(
            self,
            CheckOutcome::Fail { .. } | CheckOutcome::Timeout { .. } | CheckOutcome::DeviceLost { .. }
        )
    }

    /// Returns why it is not a pass, for display; empty for a pass.
    pub fn reason(&self) -> &str {
        match self {
            CheckOutcome::Pass => "",
            CheckOutcome::Unsupported => "the device does not claim it",
            CheckOutcome::Fail { reason }
            | CheckOutcome::NotRun { reason }
            | CheckOutcome::Timeout { reason }
            | CheckOutcome::DeviceLost { reason } => reason,
        }
    }

    /// Whether the device cannot be used any further without reopening it.
    pub fn ends_the_device(&self) -> bool {
        matches!(self, CheckOutcome::Timeout { .. } | CheckOutcome::DeviceLost { .. })
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseReport {
    /// Name of the operation or check.
    pub name: String,
    /// The operation with its shape, distribution and seed, so that it can be repeated.
    pub case: Option<Case>,
    /// The outcome.
    pub outcome: CheckOutcome,
    /// The largest error as a share of its bound, where above 1 fails; `None` if nothing was compared.
    pub ratio_max: Option<f64>,
    /// Whether the first row alone gives bitwise the same result as in the batch; for information only.
    pub batch_invariant: Option<bool>,
}

/// Counts for one operation or check.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckCounts {
    /// Number of passes.
    pub pass: u32,
    /// Number of failures, hangs and losses.
    pub fail: u32,
    /// Number declared unsupported.
    pub unsupported: u32,
    /// Number that could not be tried.
    pub not_run: u32,
    /// The largest error as a share of its bound.
    pub ratio_max: f64,
    /// The largest error as a share of its bound among f32 results. Rounding to a narrow type uses up its
    /// share of a bound, so only this shows the arithmetic.
    pub ratio_max_f32: f64,
    /// Number of rows with the same result alone as in a batch, and of rows tried.
    pub batch_invariant: (u32, u32),
}

/// The verdict of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SuiteVerdict {
    /// Every claim of the device, at least one, was tested and is right.
    Pass,
    /// Something is wrong.
    Fail,
    /// Nothing is wrong, but not everything could be tried.
    Incomplete,
}

/// A conformance report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConformanceReport {
    /// Name and version of the document: [`ConformanceReport::SCHEMA`].
    pub schema: String,
    /// The device under test.
    pub device: DeviceInfo,
    /// How thorough the run was.
    pub level: SuiteLevel,
    /// Results of all checks, in order.
    pub cases: Vec<CaseReport>,
}

/// Whether a case's results are rounded to a type narrower than f32.
fn narrows(case: &Case) -> bool {
    let operands = case.sig.operands();
    operands.iter().any(|operand| operand.access != OperandAccess::Read && operand.dtype.size_bytes() < 4)
}

impl ConformanceReport {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.conformance/1";

    /// Returns the verdict.
    pub fn verdict(&self) -> SuiteVerdict {
        let any = |test: fn(&CheckOutcome) -> bool| self.cases.iter().any(|c| test(&c.outcome));
        if any(CheckOutcome::is_wrong) {
            SuiteVerdict::Fail
        } else if any(|o| matches!(o, CheckOutcome::NotRun { .. })) || !any(|o| *o == CheckOutcome::Pass) {
            SuiteVerdict::Incomplete
        } else {
            SuiteVerdict::Pass
        }
    }

    /// Returns counts and worst ratios by name.
    pub fn summary(&self) -> BTreeMap<String, CheckCounts> {
        let mut by_name: BTreeMap<String, CheckCounts> = BTreeMap::new();
        for case in &self.cases {
            let summary = by_name.entry(case.name.clone()).or_default();
            match case.outcome {
                CheckOutcome::Pass => summary.pass += 1,
                CheckOutcome::Fail { .. }
                | CheckOutcome::Timeout { .. }
                | CheckOutcome::DeviceLost { .. } => summary.fail += 1,
                CheckOutcome::Unsupported => summary.unsupported += 1,
                CheckOutcome::NotRun { .. } => summary.not_run += 1,
            }
            let ratio = case.ratio_max.unwrap_or(0.0);
            summary.ratio_max = summary.ratio_max.max(ratio);
            if !case.case.as_ref().is_some_and(narrows) {
                summary.ratio_max_f32 = summary.ratio_max_f32.max(ratio);
            }
            if let Some(invariant) = case.batch_invariant {
                summary.batch_invariant.0 += u32::from(invariant);
                summary.batch_invariant.1 += 1;
            }
        }
        by_name
    }
}

impl std::fmt::Display for ConformanceReport {
    /// Prints a table by operation, then every failure and everything that could not be tried.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} ({}): {:?}", self.device.id, self.device.name, self.verdict())?;
        writeln!(
            f,
            "{:<24} {:>5} {:>5} {:>11} {:>7} {:>11} {:>7} {:>15}",
            "check", "pass", "fail", "unsupported", "not run", "error/bound", "in f32", "batch-invariant"
        )?;
        for (name, s) in self.summary() {
            let (same, tried) = s.batch_invariant;
            let invariant = if tried == 0 { "-".to_owned() } else { format!("{same} of {tried}") };
            writeln!(
                f,
                "{name:<24} {:>5} {:>5} {:>11} {:>7} {:>11.3} {:>7.3} {invariant:>15}",
                s.pass, s.fail, s.unsupported, s.not_run, s.ratio_max, s.ratio_max_f32
            )?;
        }
        for case in &self.cases {
            let (word, reason) = match &case.outcome {
                CheckOutcome::Fail { reason } => ("FAIL", reason),
                CheckOutcome::Timeout { reason } => ("TIMEOUT", reason),
                CheckOutcome::DeviceLost { reason } => ("DEVICE LOST", reason),
                CheckOutcome::NotRun { reason } => ("NOT RUN", reason),
                _ => continue,
            };
            write!(f, "{word} {}: {reason}", case.name)?;
            match &case.case {
                Some(case) => writeln!(f, "\n    {case:?}")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}
