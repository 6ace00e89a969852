//! Verifies before timing: conformance of each class of operations, and spot checks of the very products that
//! were timed.

use super::document::ClassCheck;
use crate::cases::{Case, SuiteLevel, TokenSpread};
use crate::ids;
use crate::suite::{SuiteEntry, attempt, entries};
use crate::{CaseReport, CheckOutcome};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::random::Stream;
use mixfleet_hal::{Cmd, DType, Device, OpSig, Slice};
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum number of cases tried per class.
const CASES_MAX: usize = 6;
/// Number of elements of a product to compare.
const SPOTS: usize = 6;

/// The classes checked so far.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    by_class: BTreeMap<String, ClassCheck>,
}

/// Returns the operation and dtypes, which decide what kernels run.
pub(crate) fn class(sig: &OpSig) -> String {
    let dtypes: Vec<&str> = sig.operands().iter().map(|operand| operand.dtype.name()).collect();
    format!("{}({})", sig.name(), dtypes.join(","))
}

impl Checks {
    /// Checks at most once per class that operations like `sig` are right on `device`. `Err` has the fault.
    pub(crate) fn require(
        &mut self,
        device: &dyn Device,
        sig: &OpSig,
        timeout: Duration,
    ) -> Result<(), String> {
        let class = class(sig);
        let check = self.by_class.entry(class.clone()).or_insert_with(|| check(device, sig, class, timeout));
        if check.passed {
            return Ok(());
        }
        let reason = check.reason.as_deref().unwrap_or("unknown");
        Err(format!("not measured, conformance of {} failed: {reason}", check.class))
    }

    pub(crate) fn into_vec(self) -> Vec<ClassCheck> {
        self.by_class.into_values().collect()
    }
}

fn check(device: &dyn Device, sig: &OpSig, class: String, timeout: Duration) -> ClassCheck {
    if !device.info().computes() {
        let reason = Some("the device takes time only, and its results were not checked".to_owned());
        return ClassCheck { class, cases: 0, passed: true, ratio_max: None, reason };
    }
    let limits = device.limits();
    let alike = |entry: &SuiteEntry| entry.case.as_ref().is_some_and(|case| self::class(&case.sig) == class);
    let all: Vec<SuiteEntry> = entries(SuiteLevel::Quick, &limits).into_iter().filter(alike).collect();
    let step = all.len().div_ceil(CASES_MAX).max(1);
    let mut tried: Vec<SuiteEntry> = all.into_iter().step_by(step).collect();
    let small = Case { sig: shrunk(sig), spread: TokenSpread::Even, seed: 1 };
    if matches!(sig, OpSig::Gemm { .. }) || tried.is_empty() && !needs_spread(sig) {
        tried.push(SuiteEntry { name: sig.name(), case: Some(small) });
    }
    let mut result =
        ClassCheck { class, cases: to_u32(tried.len()), passed: true, ratio_max: None, reason: None };
    if tried.is_empty() {
        (result.passed, result.reason) = (false, Some("the suite has no case of these dtypes".to_owned()));
    }
    for entry in &tried {
        let CaseReport { outcome, ratio_max, .. } = attempt(device, entry, timeout);
        result.ratio_max = result.ratio_max.into_iter().chain(ratio_max).reduce(f64::max);
        if outcome != CheckOutcome::Pass {
            (result.passed, result.reason) = (false, Some(in_words(entry, &outcome)));
            break;
        }
    }
    result
}

/// Describes the fault of a case.
fn in_words(entry: &SuiteEntry, outcome: &CheckOutcome) -> String {
    let name = entry.case.as_ref().map_or_else(|| entry.name.to_owned(), ids::of);
    format!("{name}: {}", outcome.reason())
}

fn needs_spread(sig: &OpSig) -> bool {
    matches!(sig, OpSig::AttnDecode { .. } | OpSig::AttnPrefill { .. } | OpSig::GroupedGemm { .. })
}

/// Returns the same kind of operation, small enough for the oracle and large enough for blocked kernels.
fn shrunk(sig: &OpSig) -> OpSig {
    match *sig {
        OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } => {
            OpSig::Gemm { m: m.min(70), n: n.min(129), k: k.min(257), x, weight, out, bias, accumulate }
        }
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            OpSig::Embed { tokens: tokens.min(5), vocab: vocab.min(37), hidden: hidden.min(65), table, out }
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            OpSig::RmsNorm { rows: rows.min(3), cols: cols.min(67), eps, x, weight, out }
        }
        OpSig::Rope { tokens, heads, head_dim, part, x } => {
            OpSig::Rope { tokens: tokens.min(3), heads: heads.min(5), head_dim, part, x }
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            OpSig::CopyColumns { rows: rows.min(17), cols, from, to, x }
        }
        OpSig::SiluMul { elements, x } => OpSig::SiluMul { elements: elements.min(1009), x },
        OpSig::GeluMul { elements, x } => OpSig::GeluMul { elements: elements.min(1009), x },
        OpSig::Add { elements, x } => OpSig::Add { elements: elements.min(1009), x },
        OpSig::Sample { rows, cols, history, tops } => OpSig::Sample {
            rows: rows.min(17),
            cols: cols.min(1009),
            history: history.min(300),
            tops: tops.min(20),
        },
        OpSig::ClampedSwiglu { elements, alpha, limit, x } => {
            OpSig::ClampedSwiglu { elements: elements.min(1009), alpha, limit, x }
        }
        OpSig::SoftCap { elements, cap } => OpSig::SoftCap { elements: elements.min(1009), cap },
        OpSig::Route { tokens, bias, routing } => OpSig::Route { tokens: tokens.min(17), bias, routing },
        OpSig::Combine { tokens, active, cols, x, accumulate } => {
            OpSig::Combine { tokens: tokens.min(17), active, cols: cols.min(257), x, accumulate }
        }
        OpSig::Copy { bytes } => OpSig::Copy { bytes: bytes.min(4004) },
        OpSig::Fill { bytes, word } => OpSig::Fill { bytes: bytes.min(4004), word },
        OpSig::AttnMerge { parts, rows, head_dim, out, .. } => {
            OpSig::AttnMerge { parts, rows: rows.min(6), head_dim, sinks: 0, out }
        }
        other => other,
    }
}

/// Compares some elements of the product that `cmd` has just computed with the float64 dot product, since
/// large shapes run kernels that no conformance case reaches. `Err` names the first element that is further
/// off than any order of f32 sums allows (`bounds`), or a failed read. A device that takes time only passes.
pub(crate) fn spot(device: &dyn Device, cmd: &Cmd) -> Result<(), String> {
    if !device.info().computes() {
        return Ok(());
    }
    let OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false } = *cmd.sig() else {
        return Ok(());
    };
    let [x_at, weight_at, out_at] = cmd.args() else { return Ok(()) };
    let row = |slice: &Slice, row: u32, cols: u32, dtype: DType| -> Result<Vec<f64>, String> {
        let bytes = u64::from(cols) * dtype.size_bytes();
        let start = u64::from(row) * bytes;
        let aligned = start - start % device.limits().alignment_bytes.max(4);
        let mut data = vec![0; to_usize(start + bytes - aligned)];
        let part = slice.range(aligned, data.len() as u64);
        device.read(&part, &mut data).map_err(|e| format!("reading the result back: {e}"))?;
        Ok(dtype.decode(&data[to_usize(start - aligned)..]))
    };
    let mut stream = Stream::new(u64::from(m) << 40 ^ u64::from(n) << 20 ^ u64::from(k));
    for spot in 0..SPOTS {
        // always including the last element, behind the last whole tile
        let last = spot == 0;
        let r = if last { m - 1 } else { to_u32(stream.below(u64::from(m))) };
        let c = if last { n - 1 } else { to_u32(stream.below(u64::from(n))) };
        let got = row(out_at, r, n, out)?[c as usize];
        let (a, b) = (row(x_at, r, k, x)?, row(weight_at, c, k, weight)?);
        let want: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
        let terms: f64 = a.iter().zip(&b).map(|(a, b)| (a * b).abs()).sum();
        let error = (f64::from(k) + 2.0) * DType::F32.unit_roundoff() * terms;
        let bound = error + out.unit_roundoff() * (want.abs() + error) + 1e-30;
        // NaN is never within
        if (got - want).abs() > bound || !got.is_finite() {
            return Err(format!("out[{r},{c}] is {got:e}, must be {want:e} within {bound:.1e}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::ground::Ground;
    use crate::profile::work::WorkItem;
    use crate::reference::ReferenceDevice;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn sig(id: &str) -> OpSig {
        let Some(WorkItem::Op(sig)) = WorkItem::parse(id, 8) else { panic!("{id}") };
        sig
    }

    #[test]
    fn each_class_is_checked_once_and_the_reference_passes() {
        let (device, mut checks) = (ReferenceDevice::default(), Checks::default());
        for id in ["gemm.bf16.m512.n4096.k4096", "gemm.bf16.m1.n64.k64", "attn_decode.bf16.b1.c64.gqa4"] {
            checks.require(&device, &sig(id), TIMEOUT).unwrap();
        }
        let checks = checks.into_vec();
        assert_eq!(checks.len(), 2);
        assert!(checks.iter().all(|c| c.passed && c.cases > 0 && c.ratio_max.is_some()), "{checks:?}");
    }

    #[test]
    fn a_problem_names_the_operation_as_people_do() {
        let case = Case { sig: sig("gemm.bf16.m5.n32.k64"), spread: TokenSpread::Even, seed: 1 };
        let entry = SuiteEntry { name: "gemm", case: Some(case) };
        let outcome = CheckOutcome::Fail { reason: "out[0] is 1, must be 2".to_owned() };
        let words = in_words(&entry, &outcome);
        assert!(
            words.starts_with("gemm.bf16.bf16.") && words.ends_with(": out[0] is 1, must be 2"),
            "{words}"
        );
        assert!(words.contains(".m5.n32.k64") && !words.contains(['{', '(']), "{words}");
    }

    #[test]
    fn a_wrong_element_of_a_product_is_seen() {
        let device = ReferenceDevice::default();
        let mut ground = Ground::new(&device, 1 << 16, 0, 1 << 20).unwrap();
        let cmd = ground.commands(&sig("gemm.bf16.m5.n32.k64")).unwrap().remove(0);
        let mut queue = device.queue().unwrap();
        let ticket = queue.submit(std::slice::from_ref(&cmd)).unwrap();
        queue.wait(ticket, TIMEOUT).unwrap();
        spot(&device, &cmd).unwrap();
        // the last bf16 element, one ulp up
        let out = &cmd.args()[2];
        let last = out.range(out.bytes - 2, 2);
        let mut bytes = [0; 2];
        device.read(&last, &mut bytes).unwrap();
        device.write(&last, &(u16::from_le_bytes(bytes) ^ 2).to_le_bytes()).unwrap();
        assert!(spot(&device, &cmd).unwrap_err().contains("out[4,31]"));
    }
}
