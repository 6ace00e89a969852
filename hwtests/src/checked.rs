//! One operation on a device, held against the oracle.

use crate::bench::{BenchError, ConformanceBench, FinishedOperands, SubmitMode};
use crate::{bounds, oracle};
use mixfleet_hal::OpSig;
use mixfleet_hal::op::Extent;

/// A result within its bounds.
pub(crate) struct Checked {
    pub(crate) done: FinishedOperands,
    /// The largest error as a share of its bound.
    pub(crate) ratio: f64,
}

/// Runs an operation by submission and by replay; both results must be within the bounds and bitwise equal.
pub(crate) fn checked(
    bench: &ConformanceBench<'_>,
    sig: &OpSig,
    operands: &[Vec<f64>],
) -> Result<Checked, BenchError> {
    let done = bench.execute(sig, operands, SubmitMode::Submit)?;
    let mut want = operands.to_vec();
    oracle::run(sig, &mut want)
        .map_err(|e| BenchError::NotRun(format!("the oracle refuses the case: {e}")))?;
    let ratio = compare(sig, operands, &done.operands, &want)?;
    let again = bench.execute(sig, operands, SubmitMode::Replay)?;
    if again.written != done.written {
        return Err(BenchError::Failed("two runs of the same command differ".to_owned()));
    }
    Ok(Checked { done, ratio })
}

/// Returns the largest error as a share of its bound, or the first element out of bounds and the worst.
fn compare(sig: &OpSig, before: &[Vec<f64>], got: &[Vec<f64>], want: &[Vec<f64>]) -> Result<f64, BenchError> {
    let (kinds, mut worst) = (sig.operands(), 0.0f64);
    let (mut first, mut wrong) = (None, 0u64);
    for (o, bounds) in bounds::bounds(sig, before, want).into_iter().enumerate() {
        for (i, bound) in bounds.into_iter().flatten().enumerate() {
            let (got, want) = (got[o][i], want[o][i]);
            // slots of paged KV that hold no token are NaN and are not compared; a NaN that must stay does
            let dead = want.is_nan()
                && (matches!(kinds[o].extent, Extent::PagesOf(_)) || bound == 0.0 && got.is_nan());
            let ratio = match (got - want).abs() / bound {
                _ if got == want || dead => 0.0,
                ratio if ratio.is_nan() => f64::INFINITY,
                ratio => ratio,
            };
            if ratio > 1.0 {
                let name = kinds[o].name;
                wrong += 1;
                first.get_or_insert_with(|| {
                    let times = times(ratio);
                    format!("{name}[{i}] is {got:e}, must be {want:e} within {bound:.2e}: {times} times that")
                });
            }
            worst = worst.max(ratio);
        }
    }
    match first {
        None => Ok(worst),
        Some(first) if wrong == 1 => Err(BenchError::OutOfBounds(first, worst)),
        Some(first) => {
            let all =
                format!("{first}; {wrong} elements are out of bounds, the worst {} times", times(worst));
            Err(BenchError::OutOfBounds(all, worst))
        }
    }
}

/// How many times its bound an error is, in digits that say something.
fn times(ratio: f64) -> String {
    if ratio < 1e3 { format!("{ratio:.3}") } else { format!("{ratio:.2e}") }
}
