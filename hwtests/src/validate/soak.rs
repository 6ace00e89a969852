//! Level 5: the device under load for minutes to hours. Compute-bound and bandwidth-bound phases alternate.
//! Between them, golden results, which the oracle checked at the start, are recomputed and must be bitwise
//! equal, which exposes silent corruption.

use super::case::{CaseResult, CaseStatus};
use super::digest::sha256;
use super::protocol::{ChildMessage, Settings};
use crate::SuiteLevel;
use crate::bench::{BenchError, ConformanceBench, SubmitMode};
use crate::cases::{Case, TokenSpread};
use crate::checked::checked;
use crate::ids;
use crate::scaled::encoded_as;
use crate::suite::entries;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, OpSig, OperandAccess, Queue, Slice, Support};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Target duration of a batch: long compared with a launch, short compared with a phase.
const BATCH_S: f64 = 0.02;
/// Maximum number of repetitions of an operation in one batch.
const REPEATS_MAX: u32 = 256;
/// Number of rounds (compute, bandwidth, golden) in a soak before phases reach their maximum length.
const ROUNDS: f64 = 20.0;
/// Minimum and maximum length of a phase in seconds.
const PHASE_S: (f64, f64) = (0.25, 30.0);
/// Minimum number of rounds, however short the soak; a drift is measured between quarters of the phases.
const ROUNDS_MIN: usize = 4;
/// Share by which throughput may sink from the first quarter to the last before it is remarked upon.
const DRIFT_MAX: f64 = 0.10;
/// Shapes (m, n, k) of the loads, from slow devices to fast ones.
const COMPUTE: [(u32, u32, u32); 5] =
    [(16, 64, 64), (64, 256, 256), (256, 1024, 1024), (1024, 2048, 2048), (4096, 4096, 4096)];
const BANDWIDTH: [(u32, u32, u32); 4] = [(1, 256, 256), (1, 1024, 1024), (1, 4096, 4096), (1, 8192, 8192)];

/// A phase of a soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SoakPhase {
    /// GEMMs of many rows, compute-bound as prefill is.
    Compute,
    /// GEMMs of one row, bandwidth-bound as decode is.
    Bandwidth,
    /// Recomputation of the golden results.
    Golden,
}

/// A load: a GEMM with the digest of its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SoakLoad {
    /// Rows, output features, input features.
    pub shape: (u32, u32, u32),
    /// Dtype of all operands.
    pub dtype: String,
    /// Number of commands in a batch.
    pub repeats: u32,
    /// SHA-256 of the result.
    pub digest: String,
}

/// What a soak compares with, determined once and kept in the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Baseline {
    /// The compute-bound load.
    pub compute: SoakLoad,
    /// The bandwidth-bound load.
    pub bandwidth: SoakLoad,
    /// SHA-256 of every golden result, by case.
    pub golden: BTreeMap<String, String>,
    /// Seconds that the set-up took, which do not count towards the soak.
    #[serde(default)]
    pub set_up_s: f64,
}

/// Readings of one phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SoakSample {
    /// Seconds from the start of the soak to the end of the phase.
    pub t_s: f64,
    /// The phase of the soak.
    pub phase: SoakPhase,
    /// Number of batches, or of golden cases.
    pub batches: u64,
    /// Seconds in which the device worked, by its own report.
    pub busy_s: f64,
    /// Rate in FLOP/s or bytes/s; `None` for golden results.
    pub rate: Option<f64>,
    /// Cases whose results differ from those at the start.
    pub wrong: Vec<String>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Power in watts.
    pub power_w: Option<f64>,
    /// Clock in MHz.
    pub clock_mhz: Option<f64>,
}

/// Soaks `device` for the seconds in the settings, and for at least [`ROUNDS_MIN`] rounds. `clock` counts
/// seconds from an arbitrary start; the soak begins once its baseline is determined. `carried` is the
/// baseline of a soak that an earlier process began, and the seconds that it ran.
pub(crate) fn run(
    device: &dyn Device,
    settings: &Settings,
    carried: Option<(Baseline, f64)>,
    clock: &mut dyn FnMut() -> f64,
    emit: &mut dyn FnMut(ChildMessage),
) -> Result<(), BenchError> {
    let came = clock();
    let bench = ConformanceBench { device, timeout: settings.batch_timeout() };
    let mut golden = golden_cases(device);
    let (baseline, before_s) = match carried {
        Some(carried) => carried,
        None => {
            let mut baseline = Baseline {
                compute: calibrate(device, &COMPUTE, bench.timeout, emit)?,
                bandwidth: calibrate(device, &BANDWIDTH, bench.timeout, emit)?,
                golden: first_golden(&bench, &golden, emit)?,
                set_up_s: 0.0,
            };
            baseline.set_up_s = clock() - came;
            emit(ChildMessage::Baseline(baseline.clone()));
            (baseline, 0.0)
        }
    };
    golden.retain(|(id, _)| baseline.golden.contains_key(id));
    let mut compute = SoakRun::new(device, &baseline.compute)?;
    let mut bandwidth = SoakRun::new(device, &baseline.bandwidth)?;
    let phase_s = (settings.soak_s / ROUNDS / 2.0).clamp(PHASE_S.0, PHASE_S.1);
    let begin = clock();
    let mut soaked_s = || before_s + clock() - begin;
    for round in 1.. {
        for (phase, load, first) in [
            (SoakPhase::Compute, &mut compute, &baseline.compute),
            (SoakPhase::Bandwidth, &mut bandwidth, &baseline.bandwidth),
        ] {
            let sample = load.phase(&bench, phase, first, phase_s, &mut soaked_s, emit)?;
            emit(ChildMessage::Sample(sample));
        }
        let wrong = again(&bench, &golden, &baseline.golden)?;
        let t_s = soaked_s();
        emit(ChildMessage::Sample(sampled(
            device,
            t_s,
            SoakPhase::Golden,
            golden.len() as u64,
            0.0,
            None,
            wrong,
        )));
        if t_s >= settings.soak_s && round >= ROUNDS_MIN {
            break;
        }
    }
    Ok(())
}

fn sampled(
    device: &dyn Device,
    t_s: f64,
    phase: SoakPhase,
    batches: u64,
    busy_s: f64,
    rate: Option<f64>,
    wrong: Vec<String>,
) -> SoakSample {
    let health = device.health();
    let (temperature_c, power_w, clock_mhz) = (health.temperature_c, health.power_w, health.clock_mhz);
    SoakSample { t_s, phase, batches, busy_s, rate, wrong, temperature_c, power_w, clock_mhz }
}

/// Returns the conformance case of every operation that moves the most bytes.
fn golden_cases(device: &dyn Device) -> Vec<(String, Case)> {
    let mut cases: Vec<(String, Case)> = Vec::new();
    for (id, entry) in ids::with_ids(entries(SuiteLevel::Quick, &device.limits())) {
        let Some(case) = entry.case.filter(|case| device.support(&case.sig) != Support::No) else { continue };
        match cases.iter_mut().find(|(_, known)| known.sig.name() == case.sig.name()) {
            None => cases.push((id, case)),
            Some(known) if case.sig.bytes() > known.1.sig.bytes() => *known = (id, case),
            Some(_) => {}
        }
    }
    cases
}

fn digest(written: &[Vec<u8>]) -> String {
    sha256(&written.concat())
}

/// Computes the golden results at the start, which must be within bounds and reproducible.
fn first_golden(
    bench: &ConformanceBench<'_>,
    cases: &[(String, Case)],
    emit: &mut dyn FnMut(ChildMessage),
) -> Result<BTreeMap<String, String>, BenchError> {
    let mut golden = BTreeMap::new();
    for (id, case) in cases {
        emit(ChildMessage::Alive);
        match checked(bench, &case.sig, &case.operands()) {
            Ok(checked) => drop(golden.insert(id.clone(), digest(&checked.done.written))),
            Err(BenchError::Unsupported | BenchError::NotRun(_)) => {}
            Err(BenchError::Failed(reason) | BenchError::OutOfBounds(reason, _)) => {
                return Err(BenchError::Failed(format!("{id}: {reason}")));
            }
            Err(trouble) => return Err(trouble),
        }
    }
    if golden.is_empty() {
        return Err(BenchError::NotRun("no operation can serve as a golden result".to_owned()));
    }
    Ok(golden)
}

/// Returns the golden cases whose results have changed.
fn again(
    bench: &ConformanceBench<'_>,
    cases: &[(String, Case)],
    golden: &BTreeMap<String, String>,
) -> Result<Vec<String>, BenchError> {
    let mut wrong = Vec::new();
    for (id, case) in cases {
        let same = match bench.execute(&case.sig, &case.operands(), SubmitMode::Submit) {
            Ok(done) => golden.get(id) == Some(&digest(&done.written)),
            Err(BenchError::Failed(_) | BenchError::OutOfBounds(..)) => false,
            Err(trouble) => return Err(trouble),
        };
        if !same {
            wrong.push(id.clone());
        }
    }
    Ok(wrong)
}

fn gemm(shape: (u32, u32, u32), dtype: DType) -> OpSig {
    let (m, n, k) = shape;
    OpSig::Gemm { m, n, k, x: dtype, weight: dtype, out: dtype, bias: false, accumulate: false }
}

/// Returns the largest shape and repetition count whose batch is not far beyond [`BATCH_S`].
fn calibrate(
    device: &dyn Device,
    shapes: &[(u32, u32, u32)],
    timeout: Duration,
    emit: &mut dyn FnMut(ChildMessage),
) -> Result<SoakLoad, BenchError> {
    let dtypes = [DType::Bf16, DType::F16, DType::F32];
    let able = dtypes.into_iter().find(|&dtype| device.support(&gemm(shapes[0], dtype)) != Support::No);
    let dtype =
        able.ok_or_else(|| BenchError::NotRun("the device has no GEMM to load it with".to_owned()))?;
    let mut chosen = None;
    for &shape in shapes {
        if gemm(shape, dtype).operands().iter().any(|operand| {
            let elements = u64::from(shape.1) * u64::from(shape.2);
            elements * operand.dtype.size_bytes() > device.limits().allocation_bytes_max
        }) {
            break;
        }
        emit(ChildMessage::Alive);
        let mut load = SoakLoad { shape, dtype: dtype.to_string(), repeats: 1, digest: String::new() };
        let mut running = SoakRun::new(device, &load)?;
        // the first run may compile, allocate, or wake the device
        running.batch(timeout)?;
        let mut busy_s = running.best(timeout)?;
        while busy_s < BATCH_S / 2.0 && load.repeats < REPEATS_MAX {
            load.repeats *= 2;
            running.repeat(load.repeats);
            busy_s = running.best(timeout)?;
        }
        load.digest = running.digest()?;
        let enough = busy_s >= BATCH_S / 2.0 && load.repeats < 8;
        chosen = Some(load);
        if enough {
            break;
        }
    }
    chosen.ok_or_else(|| BenchError::NotRun("no load fits into an allocation of the device".to_owned()))
}

/// A load bound to a device.
struct SoakRun<'a> {
    device: &'a dyn Device,
    queue: Box<dyn Queue>,
    sig: OpSig,
    out: Slice,
    cmds: Vec<Cmd>,
}

impl<'a> SoakRun<'a> {
    fn new(device: &'a dyn Device, load: &SoakLoad) -> Result<Self, BenchError> {
        let dtype = DType::FLOATS.into_iter().find(|dtype| dtype.to_string() == load.dtype);
        let dtype = dtype.ok_or_else(|| BenchError::NotRun(format!("no dtype '{}'", load.dtype)))?;
        let sig = gemm(load.shape, dtype);
        let case = Case { sig, spread: TokenSpread::Even, seed: 5 };
        let mut args = Vec::new();
        for (operand, values) in sig.operands().iter().zip(case.operands()) {
            let bytes = encoded_as(operand.dtype, &values);
            let slice = device.alloc(bytes.len() as u64, BufferUsage::Activations)?;
            if operand.access == OperandAccess::Read {
                device.write(&slice, &bytes)?;
            }
            args.push(slice);
        }
        let out = args[args.len() - 1].clone();
        let cmds = vec![Cmd::new(sig, &args)?; load.repeats.max(1) as usize];
        Ok(SoakRun { device, queue: device.queue()?, sig, out, cmds })
    }

    fn repeat(&mut self, times: u32) {
        let cmd = self.cmds[0].clone();
        self.cmds.resize(times as usize, cmd);
    }

    /// Runs one batch and returns its seconds.
    fn batch(&mut self, timeout: Duration) -> Result<f64, BenchError> {
        let ticket = self.queue.submit(&self.cmds)?;
        Ok(self.queue.wait(ticket, timeout)?.time.0)
    }

    /// Returns the minimum of a few runs, so that other work does not make the load small.
    fn best(&mut self, timeout: Duration) -> Result<f64, BenchError> {
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            best = best.min(self.batch(timeout)?);
        }
        Ok(best)
    }

    fn digest(&self) -> Result<String, BenchError> {
        let mut bytes = vec![0; to_usize(self.out.bytes)];
        self.device.read(&self.out, &mut bytes)?;
        Ok(sha256(&bytes))
    }

    fn phase(
        &mut self,
        bench: &ConformanceBench<'_>,
        phase: SoakPhase,
        first: &SoakLoad,
        phase_s: f64,
        clock: &mut dyn FnMut() -> f64,
        emit: &mut dyn FnMut(ChildMessage),
    ) -> Result<SoakSample, BenchError> {
        let begin = clock();
        let (mut batches, mut busy_s, mut spoken, mut now) = (0u64, 0.0, begin, begin);
        while batches == 0 || now - begin < phase_s {
            busy_s += self.batch(bench.timeout)?;
            batches += 1;
            now = clock();
            if now - spoken > 1.0 {
                spoken = now;
                emit(ChildMessage::Alive);
            }
        }
        let wrong = if self.digest()? == first.digest { Vec::new() } else { vec![format!("{phase:?}")] };
        let one = if phase == SoakPhase::Compute { self.sig.flops() } else { self.sig.bytes() };
        let work = one * self.cmds.len() as f64 * batches as f64;
        let rate = (busy_s > 0.0).then(|| work / busy_s);
        Ok(sampled(self.device, now, phase, batches, busy_s, rate, wrong))
    }
}

/// Judges the readings of all processes of the soak; `set_up_s` is the time that the baseline took.
pub(crate) fn judge(samples: &[SoakSample], asked_s: f64, set_up_s: Option<f64>) -> Vec<CaseResult> {
    let ran_s = samples.iter().map(|sample| sample.t_s).fold(0.0, f64::max);
    let mut results = Vec::new();
    let of = |phase: SoakPhase| samples.iter().filter(move |sample| sample.phase == phase);
    let result = |id: &str, phases: &[SoakPhase]| {
        let mut seen = samples.iter().filter(|sample| phases.contains(&sample.phase)).peekable();
        if seen.peek().is_none() {
            return CaseResult::new(id, CaseStatus::NotRun, "the soak ended before it could look");
        }
        let checks: u64 =
            seen.clone().map(|s| if s.phase == SoakPhase::Golden { s.batches } else { 1 }).sum();
        let wrong: Vec<&SoakSample> = seen.filter(|sample| !sample.wrong.is_empty()).collect();
        let count: usize = wrong.iter().map(|sample| sample.wrong.len()).sum();
        match wrong.first() {
            None => CaseResult::pass(id),
            Some(first) => {
                let reason = format!(
                    "{count} of {checks} results were not the same as at the start; first at {:.1} s: {}",
                    first.t_s,
                    first.wrong.join(", ")
                );
                CaseResult::new(id, CaseStatus::Fail, reason)
            }
        }
        .fact("checks", checks)
        .fact("seconds", ran_s)
    };
    results.push(result("l5.golden", &[SoakPhase::Golden]));
    results.push(result("l5.load_results", &[SoakPhase::Compute, SoakPhase::Bandwidth]));
    for (id, phase) in
        [("l5.drift.compute", SoakPhase::Compute), ("l5.drift.bandwidth", SoakPhase::Bandwidth)]
    {
        results.push(drift(id, &of(phase).filter_map(|sample| sample.rate).collect::<Vec<_>>()));
    }
    let duration = if ran_s >= asked_s {
        CaseResult::pass("l5.duration")
    } else {
        let reason = format!("soaked {ran_s:.1} of {asked_s:.1} s");
        CaseResult::new("l5.duration", CaseStatus::NotRun, reason)
    };
    let duration = duration.fact("seconds", ran_s).fact("seconds_asked", asked_s);
    results.push(match set_up_s {
        Some(seconds) => duration.fact("set_up_seconds", seconds),
        None => duration,
    });
    results
}

fn drift(id: &str, rates: &[f64]) -> CaseResult {
    if rates.len() < ROUNDS_MIN {
        let reason = format!("{} phases are too few to see a drift; soak longer", rates.len());
        return CaseResult::new(id, CaseStatus::NotRun, reason);
    }
    let median = |rates: &[f64]| {
        let mut sorted = rates.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    let quarter = rates.len() / 4;
    let (first, last) = (median(&rates[..quarter]), median(&rates[rates.len() - quarter..]));
    let (status, reason) = if last < first * (1.0 - DRIFT_MAX) {
        let reason = format!("from {first:.3e} per second in the first quarter to {last:.3e} in the last");
        (CaseStatus::QualityWarning, reason)
    } else {
        (CaseStatus::Pass, String::new())
    };
    CaseResult::new(id, status, reason).fact("first_per_s", first).fact("last_per_s", last)
}

/// Returns the result of a soak that was cut short.
pub(crate) fn broken(trouble: BenchError) -> CaseResult {
    let (status, reason) = match trouble {
        BenchError::Unsupported => {
            (CaseStatus::NotRun, "the device lacks an operation of the load".to_owned())
        }
        BenchError::NotRun(reason) => (CaseStatus::NotRun, reason),
        BenchError::Failed(reason) | BenchError::OutOfBounds(reason, _) => (CaseStatus::Fail, reason),
        BenchError::Hung(reason) => (CaseStatus::Timeout, reason),
        BenchError::Lost(reason) => (CaseStatus::DeviceLost, reason),
    };
    CaseResult::new("l5.soak", status, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::ReferenceDevice;

    fn soaked(soak_s: f64, carried: Option<(Baseline, f64)>) -> Vec<ChildMessage> {
        let settings = Settings { soak_s, ..Settings::quick() };
        let (mut ticks, mut lines) = (0.0, Vec::new());
        let mut clock = || {
            ticks += 0.3;
            ticks
        };
        run(&ReferenceDevice::default(), &settings, carried, &mut clock, &mut |line| lines.push(line))
            .unwrap();
        lines
    }

    fn samples(lines: &[ChildMessage]) -> Vec<SoakSample> {
        let sample = |line: &ChildMessage| match line {
            ChildMessage::Sample(sample) => Some(sample.clone()),
            _ => None,
        };
        lines.iter().filter_map(sample).collect()
    }

    #[test]
    fn a_soak_ends_on_its_clock_and_finds_a_steady_device_steady() {
        let lines = soaked(6.0, None);
        let samples = samples(&lines);
        assert!(samples.last().unwrap().t_s >= 6.0 && samples.len() >= 12 && samples.len().is_multiple_of(3));
        assert!(samples.iter().all(|sample| sample.wrong.is_empty()));
        let results = judge(&samples, 6.0, Some(1.0));
        let wrong: Vec<_> = results.iter().filter(|r| r.status.is_wrong()).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        let status = |id: &str| results.iter().find(|r| r.id == id).unwrap().status;
        assert_eq!(status("l5.golden"), CaseStatus::Pass);
        assert_eq!(status("l5.duration"), CaseStatus::Pass);
        assert_eq!(judge(&samples, 60.0, None).last().unwrap().status, CaseStatus::NotRun, "too short");
    }

    #[test]
    fn a_soak_begins_behind_its_baseline_and_is_long_enough_to_judge() {
        let (mut looks, mut now, mut lines) = (0, 0.0, Vec::new());
        // a set-up of 1000 s, then 0.25 s per reading
        let mut clock = || {
            looks += 1;
            now += if looks == 2 { 1000.0 } else { 0.25 };
            now
        };
        let settings = Settings { soak_s: 0.01, ..Settings::quick() };
        run(&ReferenceDevice::default(), &settings, None, &mut clock, &mut |line| lines.push(line)).unwrap();
        let set_up_s = lines.iter().find_map(|line| match line {
            ChildMessage::Baseline(baseline) => Some(baseline.set_up_s),
            _ => None,
        });
        assert_eq!(set_up_s, Some(1000.0));
        let samples = samples(&lines);
        assert!(samples[0].t_s < 10.0 && samples.last().unwrap().t_s < 100.0, "{samples:?}");
        let results = judge(&samples, settings.soak_s, set_up_s);
        assert!(results.iter().all(|result| result.status != CaseStatus::NotRun), "{results:?}");
        assert_eq!(results.last().unwrap().facts["set_up_seconds"], 1000.0);
    }

    #[test]
    fn a_soak_that_is_carried_on_compares_with_what_it_began_with() {
        let lines = soaked(0.5, None);
        let Some(ChildMessage::Baseline(baseline)) =
            lines.iter().find(|l| matches!(l, ChildMessage::Baseline(_)))
        else {
            panic!("no baseline")
        };
        let again = soaked(0.5, Some((baseline.clone(), 0.0)));
        assert!(!again.iter().any(|line| matches!(line, ChildMessage::Baseline(_))));
        assert!(samples(&again).iter().all(|sample| sample.wrong.is_empty()));
        let mut other = baseline.clone();
        *other.golden.values_mut().next().unwrap() = "0".repeat(64);
        other.compute.digest = "0".repeat(64);
        let results = judge(&samples(&soaked(0.5, Some((other, 0.0)))), 0.5, None);
        let status = |id: &str| results.iter().find(|r| r.id == id).unwrap().status;
        assert_eq!(status("l5.golden"), CaseStatus::Fail);
        assert_eq!(status("l5.load_results"), CaseStatus::Fail);
    }

    #[test]
    fn sinking_throughput_is_remarked_upon() {
        assert_eq!(drift("d", &[10.0, 10.0, 9.5, 9.2, 9.1, 9.3]).status, CaseStatus::Pass);
        assert_eq!(drift("d", &[10.0, 10.0, 9.0, 9.0, 8.0, 8.0]).status, CaseStatus::QualityWarning);
        assert_eq!(drift("d", &[10.0, 1.0]).status, CaseStatus::NotRun);
    }
}
