//! Two reports beside each other: two drivers, two boards, two versions of the suite.
//!
//! What passed in the first and is wrong in the second is a regression; measured numbers count as moved only
//! beyond their spread; equal arithmetic gives equal errors, so that a changed error tells of changed kernels
//! even where both pass.

use super::case::{CaseResult, CaseStatus};
use super::document::{Validation, ValidationVerdict, share_in_words};
use super::package::Environment;
use super::protocol::DeviceFact;
use super::soak::SoakPhase;
use crate::profile::SampleStats;
use crate::profile::compare::{ComparisonVerdict, noise};
use mixfleet_report::numbers::scaled;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Number of entries of a list that are printed; JSON has all.
const SHOWN_MAX: usize = 20;

/// Facts that differ between any two runs, since they are of the moment.
const PASSING: [&str; 4] = ["load average", "memory available", "other runnable threads", "other_load"];

/// A report as it was read from its folder.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadReport {
    /// The report.
    pub report: Validation,
    /// What surrounded it, if `environment.json` is there.
    pub environment: Option<Environment>,
}

impl ReadReport {
    /// Reads a report's folder, or its `results.json` alone.
    ///
    /// # Errors
    /// Which file cannot be read, or is no report of this version.
    pub fn open(path: &Path) -> Result<ReadReport, String> {
        let folder = path.is_dir();
        let file = if folder { path.join("results.json") } else { path.to_owned() };
        let report: Validation = read(&file)?;
        if report.schema != Validation::SCHEMA {
            return Err(format!(
                "{}: schema is '{}', not '{}'",
                file.display(),
                report.schema,
                Validation::SCHEMA
            ));
        }
        let beside = path.join("environment.json");
        let environment = if folder && beside.exists() { Some(read(&beside)?) } else { None };
        Ok(ReadReport { report, environment })
    }

    fn side(&self) -> DiffSide {
        let report = &self.report;
        let of =
            |pick: fn(&super::document::DeviceRecord) -> &String| report.device.as_ref().map(pick).cloned();
        DiffSide {
            device: report.asked.device.clone(),
            name: of(|device| &device.name).unwrap_or_else(|| "never opened".to_owned()),
            fingerprint: of(|device| &device.fingerprint).unwrap_or_default(),
            date: report.date.clone(),
            verdict: report.verdict,
        }
    }

    /// Everything about device, host and suite that may explain a difference.
    fn surroundings(&self) -> BTreeMap<String, String> {
        let mut facts = BTreeMap::new();
        if let Some(device) = &self.report.device {
            facts.insert("device".to_owned(), device.name.clone());
            facts.insert("fingerprint".to_owned(), device.fingerprint.clone());
            facts.extend(device.notes.clone());
        }
        facts.insert("effort".to_owned(), format!("{:?}", self.report.asked.effort).to_lowercase());
        if let Some(environment) = &self.environment {
            let told = |fact: &DeviceFact| Some((fact.name.clone(), fact.value.clone()?));
            facts.extend(environment.device.iter().chain(&environment.host).filter_map(told));
            facts.insert("suite".to_owned(), environment.version.clone());
            facts.extend(environment.commit.clone().map(|commit| ("commit".to_owned(), commit)));
            facts.insert("features".to_owned(), environment.features.join(", "));
            facts.insert("build".to_owned(), environment.build.clone());
        }
        PASSING.iter().for_each(|name| drop(facts.remove(*name)));
        facts
    }
}

fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Result<T, String> {
    let text = mixfleet_hal::files::read_text(file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{} is no report: {error}", file.display()))
}

/// Which report one side is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiffSide {
    /// The selector of the device.
    pub device: String,
    /// Name of the part.
    pub name: String,
    /// The fingerprint of part, driver and kernels.
    pub fingerprint: String,
    /// The day of the report.
    pub date: String,
    /// Its verdict.
    pub verdict: ValidationVerdict,
}

/// A fact about device, host or suite that is not the same on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedFact {
    /// Name of the fact.
    pub name: String,
    /// Its value in the first report, if it has one.
    pub a: Option<String>,
    /// Its value in the second report, if it has one.
    pub b: Option<String>,
}

/// A case that ended differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedCase {
    /// Name of the case.
    pub id: String,
    /// The status in the first report; `None` if it is not there.
    pub was: Option<CaseStatus>,
    /// The status in the second report; `None` if it is not there.
    pub is: Option<CaseStatus>,
    /// The second report's reason, or the first one's if only it has one.
    pub reason: Option<String>,
}

/// A measured number of both reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MovedNumber {
    /// Name of the case, or of the series of a soak.
    pub id: String,
    /// `s`, `FLOP/s` or `B/s`.
    pub unit: String,
    /// The number in the first report.
    pub a: f64,
    /// The number in the second report.
    pub b: f64,
    /// Speed of the second over the first; above 1 is faster.
    pub ratio: f64,
    /// Noise, as a share: ratios between 1 - noise and 1 + noise mean nothing.
    pub noise: f64,
    /// `faster`, `slower` or `same`.
    pub verdict: ComparisonVerdict,
}

/// A case whose largest error is another one, so that it is computed in another way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedError {
    /// Name of the case.
    pub id: String,
    /// The largest error as a share of its bound in the first report.
    pub a: f64,
    /// The same in the second report.
    pub b: f64,
}

/// Two reports side by side: `mixfleet.validation-diff/1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ValidationDiff {
    /// Name and version of the document schema: [`ValidationDiff::SCHEMA`].
    pub schema: String,
    /// The first report.
    pub a: DiffSide,
    /// The second report.
    pub b: DiffSide,
    /// Facts that are not the same.
    pub surroundings: Vec<ChangedFact>,
    /// What passed and is wrong now.
    pub broke: Vec<ChangedCase>,
    /// What passed, is wrong now, and is let through by a waiver.
    pub waived: Vec<ChangedCase>,
    /// What passed and was not tried now, or could not be.
    pub lost: Vec<ChangedCase>,
    /// Cases that failed before and pass now.
    pub mended: Vec<ChangedCase>,
    /// What passes now and was not tried before, or could not be.
    pub gained: Vec<ChangedCase>,
    /// All numbers that were measured in both.
    pub numbers: Vec<MovedNumber>,
    /// Cases that pass in both, with other errors.
    pub errors: Vec<ChangedError>,
}

impl ValidationDiff {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.validation-diff/1";

    /// Compares two reports; `a` is the earlier one or the reference.
    pub fn new(a: &ReadReport, b: &ReadReport) -> ValidationDiff {
        let by_id = |report: &ReadReport| -> BTreeMap<String, CaseResult> {
            report.report.cases.iter().map(|case| (case.id.clone(), case.clone())).collect()
        };
        let (first, second) = (by_id(a), by_id(b));
        let mut diff = ValidationDiff {
            schema: Self::SCHEMA.to_owned(),
            a: a.side(),
            b: b.side(),
            surroundings: changed(&a.surroundings(), &b.surroundings()),
            broke: Vec::new(),
            waived: Vec::new(),
            lost: Vec::new(),
            mended: Vec::new(),
            gained: Vec::new(),
            numbers: Vec::new(),
            errors: Vec::new(),
        };
        // in the order of the reports
        let ids =
            a.report.cases.iter().chain(b.report.cases.iter().filter(|case| !first.contains_key(&case.id)));
        for id in ids.map(|case| &case.id) {
            diff.case(id, first.get(id), second.get(id));
        }
        diff.numbers.extend(soak(a, b));
        diff
    }

    fn case(&mut self, id: &str, a: Option<&CaseResult>, b: Option<&CaseResult>) {
        let (was, is) = (a.map(|case| case.status), b.map(|case| case.status));
        let right = |status: Option<CaseStatus>| {
            matches!(status, Some(CaseStatus::Pass | CaseStatus::QualityWarning))
        };
        let wrong = |status: Option<CaseStatus>| status.is_some_and(CaseStatus::is_wrong);
        let reason = b.and_then(|case| case.reason.clone()).or_else(|| a?.reason.clone());
        let list = match (right(was), right(is)) {
            (true, false) if wrong(is) => &mut self.broke,
            (true, false) if is == Some(CaseStatus::Waived) => &mut self.waived,
            (true, false) => &mut self.lost,
            (false, true) if wrong(was) || was == Some(CaseStatus::Waived) => &mut self.mended,
            (false, true) => &mut self.gained,
            _ => {
                if let (Some(a), Some(b), true) = (a, b, right(was)) {
                    self.numbers.extend(times(id, a, b));
                    self.errors.extend(error(id, a, b));
                }
                return;
            }
        };
        list.push(ChangedCase { id: id.to_owned(), was, is, reason });
    }

    /// Returns the numbers that moved beyond their spread, the most slowed first.
    pub fn moved(&self) -> Vec<&MovedNumber> {
        let mut moved: Vec<_> =
            self.numbers.iter().filter(|n| n.verdict != ComparisonVerdict::Same).collect();
        moved.sort_by(|x, y| x.ratio.total_cmp(&y.ratio));
        moved
    }

    /// Returns the JSON Schema of this document, as in `docs/schema/validation-diff-1.json`.
    pub fn json_schema() -> Value {
        schemars::schema_for!(ValidationDiff).to_value()
    }
}

fn changed(a: &BTreeMap<String, String>, b: &BTreeMap<String, String>) -> Vec<ChangedFact> {
    let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let fact = |name: &String| {
        let (a, b) = (a.get(name).cloned(), b.get(name).cloned());
        (a != b).then(|| ChangedFact { name: name.clone(), a, b })
    };
    names.into_iter().filter_map(fact).collect()
}

fn fact(case: &CaseResult, name: &str) -> Option<f64> {
    case.facts.get(name).and_then(Value::as_f64)
}

/// A measured value and its relative spread.
struct SpreadValue {
    value: f64,
    spread: f64,
}

fn number(id: &str, unit: &str, a: &SpreadValue, b: &SpreadValue) -> Option<MovedNumber> {
    let noise = noise(a.spread, b.spread);
    let (a, b) = (a.value, b.value);
    if !(a > 0.0 && b > 0.0 && a.is_finite() && b.is_finite()) {
        return None;
    }
    let ratio = if unit == "s" { a / b } else { b / a };
    let verdict = ComparisonVerdict::of(ratio, noise, 0.0);
    Some(MovedNumber { id: id.to_owned(), unit: unit.to_owned(), a, b, ratio, noise, verdict })
}

/// Compares the medians of a point of level 3. Half the width of the central nine tenths of the samples is
/// the spread; two standard deviations, where a report does not have it.
fn times(id: &str, a: &CaseResult, b: &CaseResult) -> Option<MovedNumber> {
    let of = |case: &CaseResult| {
        let median = fact(case, "seconds").filter(|_| case.level() == Some(3))?;
        let ends = fact(case, "seconds_p5").zip(fact(case, "seconds_p95"));
        let spread = match ends {
            Some((p5, p95)) => (p95 - p5) / 2.0 / median,
            None => 2.0 * fact(case, "coefficient_of_variation").unwrap_or(0.0),
        };
        Some(SpreadValue { value: median, spread })
    };
    number(id, "s", &of(a)?, &of(b)?)
}

/// Compares the rates of two soaks by their medians over the phases.
fn soak(a: &ReadReport, b: &ReadReport) -> Vec<MovedNumber> {
    let phases = [
        (SoakPhase::Compute, "l5.rate.compute", "FLOP/s"),
        (SoakPhase::Bandwidth, "l5.rate.bandwidth", "B/s"),
    ];
    let one = |(phase, id, unit)| {
        let of = |read: &ReadReport| {
            let samples = read.report.soak.iter().filter(|sample| sample.phase == phase);
            let stats = SampleStats::new(samples.filter_map(|sample| sample.rate).collect())?;
            let spread = (stats.p95 - stats.p5) / 2.0 / stats.median;
            Some(SpreadValue { value: stats.median, spread })
        };
        number(id, unit, &of(a)?, &of(b)?)
    };
    phases.into_iter().filter_map(one).collect()
}

fn error(id: &str, a: &CaseResult, b: &CaseResult) -> Option<ChangedError> {
    let (a, b) = (fact(a, "error_of_bound_max")?, fact(b, "error_of_bound_max")?);
    (a != b).then(|| ChangedError { id: id.to_owned(), a, b })
}

impl MovedNumber {
    /// Returns the two numbers and the ratio in words.
    pub(crate) fn in_words(&self) -> [String; 3] {
        let numbers = [self.a, self.b].map(|value| scaled(value, &self.unit));
        let [a, b] = numbers;
        [a, b, format!("x{:.3}", self.ratio)]
    }
}

impl ChangedCase {
    /// Returns the status on both sides in words.
    pub(crate) fn in_words(&self) -> [&'static str; 2] {
        [self.was, self.is].map(|status| status.map_or("absent", CaseStatus::word))
    }
}

impl std::fmt::Display for ValidationDiff {
    /// Prints what broke first, then what else changed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (letter, side) in [("a", &self.a), ("b", &self.b)] {
            let DiffSide { device, name, date, verdict, .. } = side;
            writeln!(f, "{letter}: {device} ({name}), {date}: {}", verdict.word())?;
        }
        let lists: [(&str, &[ChangedCase]); 5] = [
            ("passed before and fail now", &self.broke),
            ("passed before, are wrong now, and waived", &self.waived),
            ("passed before and were not tried now", &self.lost),
            ("were wrong and pass now", &self.mended),
            ("pass now and were not tried before", &self.gained),
        ];
        for (words, cases) in lists {
            if cases.is_empty() {
                continue;
            }
            writeln!(f, "\n{} {words}", cases.len())?;
            for case in cases.iter().take(SHOWN_MAX) {
                let [was, is] = case.in_words();
                let reason = case.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
                writeln!(f, "  {}: {was} -> {is}{reason}", case.id)?;
            }
            more(f, cases.len())?;
        }
        let moved = self.moved();
        writeln!(
            f,
            "\n{} of {} measured numbers moved beyond their spread",
            moved.len(),
            self.numbers.len()
        )?;
        for number in moved.iter().take(SHOWN_MAX) {
            let [a, b, ratio] = number.in_words();
            let word = if number.ratio > 1.0 { "faster" } else { "slower" };
            let noise = 100.0 * number.noise;
            writeln!(f, "  {:<44} {a:>12} -> {b:>12}  {word} {ratio} (noise {noise:.0} %)", number.id)?;
        }
        more(f, moved.len())?;
        if !self.errors.is_empty() {
            writeln!(
                f,
                "\n{} cases that pass in both are computed in another way (largest error)",
                self.errors.len()
            )?;
            for error in self.errors.iter().take(SHOWN_MAX) {
                let (a, b) = (share_in_words(error.a), share_in_words(error.b));
                writeln!(f, "  {}: {a} -> {b} of the bound", error.id)?;
            }
            more(f, self.errors.len())?;
        }
        if !self.surroundings.is_empty() {
            writeln!(f, "\nsurroundings that are not the same")?;
            for fact in &self.surroundings {
                let told = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
                writeln!(f, "  {}: {} -> {}", fact.name, told(&fact.a), told(&fact.b))?;
            }
        }
        Ok(())
    }
}

fn more(f: &mut std::fmt::Formatter<'_>, all: usize) -> std::fmt::Result {
    if all > SHOWN_MAX { writeln!(f, "  and {} more; --json has all", all - SHOWN_MAX) } else { Ok(()) }
}
