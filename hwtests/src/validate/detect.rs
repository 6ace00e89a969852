//! Tests the tester: faults of known kind and rate against every level, and how often each is seen.
//!
//! A *pass* is one run of a level. Under a rate of one in a million most passes meet no fault at all, so a
//! cell tells two numbers: in how many of many seeded passes a fault strikes, which follows from the plan
//! without running them, and how many of the passes that were run with an effective strike the level caught.
//! Their product is the chance that one pass of the level finds such a fault.

use super::case::{CaseResult, CaseStatus};
use super::metered::Metered;
use super::part::{Claim, Quantity};
use super::performance;
use super::protocol::{ChildMessage, MemoryAsked, Settings};
use super::runner::{self, ValidationPlan};
use super::soak;
use super::start::StartInProcess;
use crate::bench::BenchError;
use crate::profile::{ProfileLevel, ProfileOptions, TimeSource};
use mixfleet_hal::Device;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::fault::{Fault, FaultPlan};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device under a fault plan, with access to its counters.
pub struct FaultyTrial {
    /// The device with injected faults.
    pub device: Arc<dyn Device>,
    /// Returns the number of operations so far.
    pub operations: Box<dyn Fn() -> u64>,
    /// Returns the number of operations that were hit with an effect.
    pub struck: Box<dyn Fn() -> u64>,
}

/// Wraps a device with a plan; with `true`, the host's reads and writes count as operations too. The crate of
/// simulated devices has one (`FaultyDevice`), which this crate may not import.
pub type Wrap = dyn Fn(Arc<dyn Device>, FaultPlan, bool) -> FaultyTrial;

/// What a trial covers.
#[derive(Clone, Debug, PartialEq)]
pub struct DetectionTrial {
    /// Levels to try, out of 1, 2, 3 and 5.
    pub levels: Vec<u8>,
    /// Kinds of faults to inject.
    pub faults: Vec<Fault>,
    /// Fault probabilities per operation.
    pub rates: Vec<f64>,
    /// Number of seeds whose plans are examined.
    pub seeds: u64,
    /// Maximum number of passes to run per cell.
    pub passes_max: u64,
    /// Groups of level 1, without `l1.`; empty means all.
    pub operations: Vec<String>,
}

impl DetectionTrial {
    /// Selects every level and fault, at one in a hundred, ten thousand and a million operations.
    pub fn thorough() -> DetectionTrial {
        DetectionTrial {
            levels: vec![1, 2, 3, 5],
            faults: vec![Fault::BitFlip, Fault::Drop, Fault::Stale, Fault::Slow { times: 10 }, Fault::Hang],
            rates: vec![0.5, 1e-2, 1e-4, 1e-6],
            seeds: 10_000,
            passes_max: 3,
            operations: Vec::new(),
        }
    }

    /// Returns the number of rows in the table.
    pub fn rows(&self) -> usize {
        self.levels.len() * (1 + self.faults.len() * self.rates.len())
    }
}

/// How well a level detects a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Detection {
    /// The level of validation.
    pub level: u8,
    /// The injected fault; `None` for a pass without faults.
    #[schemars(with = "Option<serde_json::Value>")]
    pub fault: Option<Fault>,
    /// Probability of the fault per operation.
    pub rate: f64,
    /// Number of operations in a pass without faults.
    pub operations: u64,
    /// Share of seeded passes in which a fault occurs.
    pub struck_share: f64,
    /// Number of passes run in which a fault had an effect.
    pub passes: u64,
    /// Number of these that were caught.
    pub caught: u64,
    /// Number of these reported as a timeout.
    pub timeouts: u64,
}

impl Detection {
    /// Returns the probability that one pass finds such a fault; `None` if no pass could be run.
    pub fn chance(&self) -> Option<f64> {
        (self.passes > 0).then(|| self.struck_share * self.caught as f64 / self.passes as f64)
    }
}

/// Runs the trial on `base`, passing each row to `observe` as it comes. The first row of each level is a pass
/// without faults, which must catch nothing.
///
/// # Errors
/// If a level cannot be run on `base` at all, even without faults.
pub fn detect(
    base: Arc<dyn Device>,
    wrap: &Wrap,
    trial: &DetectionTrial,
    observe: &mut dyn FnMut(&Detection),
) -> Result<Vec<Detection>, String> {
    let mut rows = Vec::new();
    for &level in &trial.levels {
        let bed = Bed::new(level, base.clone(), wrap, &trial.operations)?;
        let mut add = |row: Detection| {
            observe(&row);
            rows.push(row);
        };
        let clean = bed.pass(&FaultPlan::default());
        add(Detection {
            level,
            fault: None,
            rate: 0.0,
            operations: bed.operations,
            struck_share: 0.0,
            passes: 1,
            caught: u64::from(clean.wrong > 0),
            timeouts: clean.timeouts,
        });
        for &fault in &trial.faults {
            for &rate in &trial.rates {
                add(bed.cell(fault, rate, trial));
            }
        }
    }
    Ok(rows)
}

/// A level that is ready to be run repeatedly.
struct Bed<'a> {
    level: u8,
    base: Arc<dyn Device>,
    wrap: &'a Wrap,
    plan: ValidationPlan,
    claims: Vec<Claim>,
    baseline: Option<soak::Baseline>,
    operations: u64,
}

/// The outcome of a pass.
struct PassCounts {
    operations: u64,
    struck: u64,
    wrong: u64,
    timeouts: u64,
}

/// Points of level 3 that are small enough for a slow device, one compute-bound and one bandwidth-bound.
const POINTS: [&str; 2] = ["gemm.f32.m4.n16.k16", "rms_norm.bf16.t4.h64"];
/// Seconds of a soak on its own clock, which advances by [`TICK_S`] per reading.
const SOAK_S: f64 = 4.0;
const TICK_S: f64 = 0.1;

impl<'a> Bed<'a> {
    fn new(level: u8, base: Arc<dyn Device>, wrap: &'a Wrap, operations: &[String]) -> Result<Self, String> {
        let only = match (level, operations) {
            (1, [_, ..]) => operations.iter().map(|name| format!("l1.{name}")).collect(),
            _ => vec![format!("l{level}")],
        };
        let settings = Settings {
            memory: MemoryAsked::Bytes(1 << 20),
            soak_s: if level == 5 { SOAK_S } else { 0.0 },
            ..Settings::quick()
        };
        let plan = ValidationPlan { level, only, settings, ..ValidationPlan::new("self-test") };
        let base: Arc<dyn Device> = if level == 3 { Arc::new(Metered(base)) } else { base };
        let mut bed = Bed { level, base, wrap, plan, claims: Vec::new(), baseline: None, operations: 0 };
        if level == 3 {
            bed.claims = claimed(&*bed.base)?;
        }
        if level == 5 {
            bed.baseline = Some(bed.first()?);
        }
        bed.operations = bed.pass(&FaultPlan::default()).operations;
        Ok(bed)
    }

    /// Returns the baseline of a soak without faults.
    fn first(&self) -> Result<soak::Baseline, String> {
        let (mut ticks, mut baseline) = (0.0, None);
        let mut clock = || {
            ticks += SOAK_S;
            ticks
        };
        let mut emit = |line: ChildMessage| {
            if let ChildMessage::Baseline(found) = line {
                baseline = Some(found);
            }
        };
        soak::run(&*self.base, &self.plan.settings, None, &mut clock, &mut emit)
            .map_err(|trouble| format!("the soak does not run without faults: {trouble:?}"))?;
        baseline.ok_or_else(|| "the soak found no baseline".to_owned())
    }

    /// Runs one pass under `plan`.
    fn pass(&self, plan: &FaultPlan) -> PassCounts {
        let faulty = (self.wrap)(self.base.clone(), plan.clone(), self.level == 2);
        let device = faulty.device.clone();
        let cases = match self.level {
            3 => {
                let mut cases = points(&*device);
                performance::judge(&mut cases, &self.claims);
                cases
            }
            5 => self.soaked(&*device),
            _ => {
                let start = StartInProcess { open: Box::new(move |_| Ok(device.clone())) };
                runner::run(&self.plan, &start, &[], &mut |_| {}).cases
            }
        };
        let count =
            |test: fn(CaseStatus) -> bool| cases.iter().filter(|case| test(case.status)).count() as u64;
        PassCounts {
            operations: (faulty.operations)(),
            struck: (faulty.struck)(),
            wrong: count(CaseStatus::is_wrong),
            timeouts: count(|status| status == CaseStatus::Timeout),
        }
    }

    fn soaked(&self, device: &dyn Device) -> Vec<CaseResult> {
        let (mut now, mut samples) = (0.0, Vec::new());
        let mut clock = || {
            now += TICK_S;
            now
        };
        let mut emit = |line: ChildMessage| {
            if let ChildMessage::Sample(sample) = line {
                samples.push(sample);
            }
        };
        let settings = &self.plan.settings;
        let carried = self.baseline.clone().map(|baseline| (baseline, 0.0));
        let ended: Result<(), BenchError> = soak::run(device, settings, carried, &mut clock, &mut emit);
        let mut cases = soak::judge(&samples, settings.soak_s, None);
        cases.extend(ended.err().map(soak::broken));
        cases
    }

    fn cell(&self, fault: Fault, rate: f64, trial: &DetectionTrial) -> Detection {
        let plan = |seed: u64| FaultPlan::at_rate(fault, rate, seed);
        let strikes = |seed: &u64| {
            let plan = plan(*seed);
            (0..self.operations).any(|operation| plan.at(operation).is_some())
        };
        let struck: Vec<u64> = (0..trial.seeds).filter(strikes).collect();
        let (mut passes, mut caught, mut timeouts) = (0, 0, 0);
        // a hit may have no effect, so try some more seeds
        for &seed in struck.iter().take(2 * to_usize(trial.passes_max)) {
            if passes == trial.passes_max {
                break;
            }
            let passed = self.pass(&plan(seed));
            if passed.struck > 0 {
                passes += 1;
                caught += u64::from(passed.wrong > 0);
                timeouts += u64::from(passed.timeouts > 0);
            }
        }
        Detection {
            level: self.level,
            fault: Some(fault),
            rate,
            operations: self.operations,
            struck_share: struck.len() as f64 / trial.seeds.max(1) as f64,
            passes,
            caught,
            timeouts,
        }
    }
}

/// Returns claims that the device meets exactly, with 80 % required.
fn claimed(device: &dyn Device) -> Result<Vec<Claim>, String> {
    let claim = |case: &CaseResult| {
        let value = case.facts.get("seconds").and_then(serde_json::Value::as_f64).filter(|s| *s > 0.0);
        let value =
            value.ok_or_else(|| format!("{} has no time without faults: {:?}", case.id, case.reason))?;
        let point = case.id.trim_start_matches("l3.").to_owned();
        let source = "a pass without faults".to_owned();
        let (quantity, unit) = (Quantity::Seconds, "s".to_owned());
        Ok(Claim { point, value, quantity, unit, at_least: 0.8, source })
    };
    points(device).iter().map(claim).collect()
}

/// A clock that advances with each reading, so that decisions based on time are reproducible.
#[derive(Default)]
struct Ticking(AtomicU64);

impl TimeSource for Ticking {
    fn seconds(&self) -> f64 {
        self.0.fetch_add(1, Ordering::Relaxed) as f64 * 5e-3
    }
}

fn points(device: &dyn Device) -> Vec<CaseResult> {
    let options = ProfileOptions {
        cold_bytes: 1 << 20,
        memory_bytes_max: Some(16 << 20),
        clock: Arc::new(Ticking::default()),
        ..ProfileOptions::new(ProfileLevel::Quick)
    };
    performance::measure(device, &POINTS, &options)
}

impl std::fmt::Display for Detection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fault = match self.fault {
            None => "none".to_owned(),
            Some(Fault::BitFlip) => "bit flip".to_owned(),
            Some(Fault::Drop) => "dropped".to_owned(),
            Some(Fault::Fail) => "error".to_owned(),
            Some(Fault::Hang) => "hang".to_owned(),
            Some(Fault::Stale) => "stale".to_owned(),
            Some(Fault::Slow { times }) => format!("slow x{times}"),
        };
        // rare must not be rounded to nothing
        let percent = |share: f64| {
            if share > 0.0 && share < 1e-3 {
                format!("{share:.0e}")
            } else {
                format!("{:.1} %", share * 100.0)
            }
        };
        let chance = self.chance().map_or("-".to_owned(), percent);
        let caught = format!("{} of {}", self.caught, self.passes);
        let struck = percent(self.struck_share);
        write!(
            f,
            "L{}  {fault:<9} {:>7.0e} {:>9} {struck:>10} {caught:>10} {chance:>9}",
            self.level, self.rate, self.operations
        )
    }
}

/// Header of the table whose rows implement `Display`.
pub const TABLE_HEADER: &str = "    fault        rate  ops/pass   struck in     caught  per pass";
