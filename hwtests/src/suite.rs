//! Runs the conformance cases and checks on a device.

use crate::bench::{BenchError, ConformanceBench};
use crate::cases::{self, Case, SuiteLevel};
use crate::checked::checked;
use crate::checks;
use crate::report::{CaseReport, CheckOutcome, ConformanceReport};
use mixfleet_hal::cast::{to_u64, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{Device, DeviceLimits, OpSig};
use std::time::Duration;

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct SuiteOptions {
    /// How thorough the run is.
    pub level: SuiteLevel,
    /// Time without an answer after which a device counts as hung and is not used any further.
    pub timeout: Duration,
    /// Names of the operations and checks to run; empty means all.
    pub only: Vec<String>,
}

impl SuiteOptions {
    /// Selects all of `level`, with 30 s for each batch because some devices compile kernels on first use.
    pub fn new(level: SuiteLevel) -> Self {
        SuiteOptions { level, timeout: Duration::from_secs(30), only: Vec::new() }
    }
}

/// One entry of the suite: a case of an operation, or a named check.
#[derive(Clone, Debug, PartialEq)]
pub struct SuiteEntry {
    /// Name of the operation or check.
    pub name: &'static str,
    /// The case of the operation; `None` for a check.
    pub case: Option<Case>,
}

/// Returns everything that a level tries on a device with these limits, in order.
pub fn entries(level: SuiteLevel, limits: &DeviceLimits) -> Vec<SuiteEntry> {
    let cases = cases::cases(level, limits);
    let cases = cases.into_iter().map(|case| SuiteEntry { name: case.sig.name(), case: Some(case) });
    cases.chain(checks::ALL.iter().map(|&(name, _)| SuiteEntry { name, case: None })).collect()
}

/// Runs one entry; a batch that takes longer than `timeout` counts as hung.
pub fn attempt(device: &dyn Device, entry: &SuiteEntry, timeout: Duration) -> CaseReport {
    let bench = ConformanceBench { device, timeout };
    let trial = match &entry.case {
        Some(case) => operation(&bench, case),
        None => match checks::ALL.iter().find(|(name, _)| *name == entry.name) {
            Some((_, check)) => match check(&bench) {
                Ok(ratio_max) => CheckInProgress { ratio_max, ..CheckInProgress::pass() },
                Err(trouble) => trouble.into(),
            },
            None => BenchError::NotRun(format!("there is no check '{}'", entry.name)).into(),
        },
    };
    trial.report(entry)
}

/// Runs the suite on `device`, passing each result to `observe` as it comes.
pub fn run(
    device: &dyn Device,
    options: &SuiteOptions,
    observe: &mut dyn FnMut(&CaseReport),
) -> ConformanceReport {
    let mut report = ConformanceReport {
        schema: ConformanceReport::SCHEMA.to_owned(),
        device: device.info().clone(),
        level: options.level,
        cases: Vec::new(),
    };
    let wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|only| only == name);
    let mut ended: Option<&'static str> = None;
    for entry in entries(options.level, &device.limits()).iter().filter(|entry| wanted(entry.name)) {
        let result = match ended {
            Some(earlier) => {
                let reason = format!("the device hung or was lost before, in {earlier}");
                CheckInProgress::from(BenchError::NotRun(reason)).report(entry)
            }
            None => attempt(device, entry, options.timeout),
        };
        if result.outcome.ends_the_device() {
            ended = Some(entry.name);
        }
        observe(&result);
        report.cases.push(result);
    }
    report
}

/// The state of one check in progress.
struct CheckInProgress {
    outcome: CheckOutcome,
    ratio_max: Option<f64>,
    batch_invariant: Option<bool>,
}

impl CheckInProgress {
    fn pass() -> CheckInProgress {
        CheckInProgress { outcome: CheckOutcome::Pass, ratio_max: None, batch_invariant: None }
    }

    fn report(self, entry: &SuiteEntry) -> CaseReport {
        let CheckInProgress { outcome, ratio_max, batch_invariant } = self;
        let (name, case) = (entry.name.to_owned(), entry.case.clone());
        CaseReport { name, case, outcome, ratio_max, batch_invariant }
    }
}

impl From<BenchError> for CheckInProgress {
    fn from(trouble: BenchError) -> Self {
        let ratio_max = match &trouble {
            BenchError::OutOfBounds(_, ratio) => Some(*ratio),
            _ => None,
        };
        let outcome = match trouble {
            BenchError::Unsupported => CheckOutcome::Unsupported,
            BenchError::NotRun(reason) => CheckOutcome::NotRun { reason },
            BenchError::Failed(reason) | BenchError::OutOfBounds(reason, _) => CheckOutcome::Fail { reason },
            BenchError::Hung(reason) => {
                CheckOutcome::Timeout { reason: format!("no answer in time: {reason}") }
            }
            BenchError::Lost(reason) => CheckOutcome::DeviceLost { reason },
        };
        CheckInProgress { outcome, ratio_max, ..CheckInProgress::pass() }
    }
}

/// Runs a case, and its first row alone if its rows are independent.
fn operation(bench: &ConformanceBench<'_>, case: &Case) -> CheckInProgress {
    let operands = case.operands();
    let checked = match checked(bench, &case.sig, &operands) {
        Ok(checked) => checked,
        Err(trouble) => return trouble.into(),
    };
    let mut trial = CheckInProgress { ratio_max: Some(checked.ratio), ..CheckInProgress::pass() };
    if let Some((sig, first)) = first_row(&case.sig, &operands) {
        match self::checked(bench, &sig, &first) {
            Ok(alone) => {
                let mut pairs = alone.done.written.iter().zip(&checked.done.written);
                trial.batch_invariant = Some(pairs.all(|(alone, batch)| batch.starts_with(alone)));
                trial.ratio_max = Some(checked.ratio.max(alone.ratio));
            }
            Err(BenchError::Unsupported) => {}
            Err(trouble) => return trouble.into(),
        }
    }
    trial
}

/// Extracts the first row of an operation over independent rows, as a separate operation.
fn first_row(sig: &OpSig, operands: &[Vec<f64>]) -> Option<(OpSig, Vec<Vec<f64>>)> {
    let alone = match *sig {
        OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } if m > 1 => {
            OpSig::Gemm { m: 1, n, k, x, weight, out, bias, accumulate }
        }
        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } if m > 1 => {
            OpSig::QuantisedGemm { m: 1, n, k, x, weight, out, bias, accumulate }
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } if rows > 1 => {
            OpSig::RmsNorm { rows: 1, cols, eps, x, weight, out }
        }
        OpSig::AttnDecode { sequences, heads, pages_max, cap, x, kv, .. } if sequences > 1 => {
            let kv_tokens = to_u64(operands[1][1] - operands[1][0]);
            OpSig::AttnDecode { sequences: 1, kv_tokens, heads, pages_max, cap, x, kv }
        }
        _ => return None,
    };
    // an operand of the single row is a prefix of the batch's, except paged KV, which is whole
    let first = alone.operands().into_iter().zip(operands).map(|(operand, values)| match operand.extent {
        Extent::Exactly(n) => values[..to_usize(n)].to_vec(),
        Extent::PagesOf(_) => values.clone(),
    });
    Some((alone, first.collect()))
}
