//! The report: `mixfleet.validation/1`. Its JSON Schema is `docs/schema/validation-1.json`; fields may be added under
//! the same version, so readers must ignore those they do not know.

use super::case::{CaseResult, CaseStatus, level_of};
use super::mustpass::{self, Met};
use super::part::{Claim, PartFile, Waiver};
use super::performance;
use super::protocol::ValidationEffort;
use super::runner::{Plan, RunOutcome};
use super::soak::SoakSample;
use mixfleet_hal::DeviceInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The highest level of a whole report; a soak comes on top.
const LEVEL_MAX: u8 = 3;

/// The judgement over a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ValidationVerdict {
    /// The whole mandatory list was met, nothing is wrong, every claim was held against a measurement.
    Pass,
    /// Something is wrong, and waivers let it through; everything else is as for a pass.
    PassedWithWaivers,
    /// Something is wrong.
    Fail,
    /// Nothing unwaived is wrong, but something that was asked for could not run, or a mandatory line has no pass.
    Incomplete,
    /// Nothing unwaived is wrong, but only a part was asked for: no report to publish.
    Partial,
}

impl ValidationVerdict {
    /// The word in reports.
    pub const fn word(self) -> &'static str {
        match self {
            ValidationVerdict::Pass => "pass",
            ValidationVerdict::PassedWithWaivers => "passed-with-waivers",
            ValidationVerdict::Fail => "fail",
            ValidationVerdict::Incomplete => "incomplete",
            ValidationVerdict::Partial => "partial",
        }
    }

    /// The program's exit code: 1 the thing tested failed, 3 could not run.
    pub const fn exit_code(self) -> u8 {
        match self {
            ValidationVerdict::Pass | ValidationVerdict::PassedWithWaivers | ValidationVerdict::Partial => 0,
            ValidationVerdict::Fail => 1,
            ValidationVerdict::Incomplete => 3,
        }
    }
}

/// The device as it describes itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceRecord {
    /// The selector that opens it.
    pub id: String,
    /// The backend's name.
    pub backend: String,
    /// The part's name.
    pub name: String,
    /// `cpu`, `gpu`, `accelerator` or `simulated`.
    pub kind: String,
    /// Memory for buffers.
    pub memory_bytes: f64,
    /// Cores, compute units or multiprocessors.
    pub compute_units: u32,
    /// Part, driver and kernels: results hold for an equal one only.
    pub fingerprint: String,
    /// Further facts.
    pub notes: BTreeMap<String, String>,
}

impl From<&DeviceInfo> for DeviceRecord {
    fn from(info: &DeviceInfo) -> Self {
        DeviceRecord {
            id: info.id.clone(),
            backend: info.backend.clone(),
            name: info.name.clone(),
            kind: format!("{:?}", info.kind).to_lowercase(),
            memory_bytes: info.memory.0,
            compute_units: info.compute_units,
            fingerprint: info.fingerprint.clone(),
            notes: info.notes.iter().cloned().collect(),
        }
    }
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Asked {
    /// The selector of the device.
    #[serde(default)]
    pub device: String,
    /// The highest level.
    pub level: u8,
    /// Patterns; empty = all.
    pub only: Vec<String>,
    /// How thoroughly.
    pub effort: ValidationEffort,
    /// Seconds of soak.
    pub soak_s: f64,
    /// Seed of the memory patterns.
    pub seed: u64,
}

/// Statuses of a level, counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LevelCounts {
    /// The level.
    pub level: u8,
    /// Cases by status; those that did not occur are absent.
    pub counts: BTreeMap<String, u64>,
    /// The largest error of a result as a share of its bound; none where nothing was compared.
    pub error_of_bound_max: Option<f64>,
}

/// The mandatory list and how it was met.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Mustpass {
    /// The list's version.
    pub version: String,
    /// Its SHA-256.
    pub sha256: String,
    /// All of it was met.
    pub met: bool,
    /// Line by line.
    pub lines: Vec<Met>,
}

/// A waiver and what it did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WaiverUse {
    /// The waiver.
    pub waiver: Waiver,
    /// It no longer holds.
    pub expired: bool,
    /// Cases that it let through.
    pub used: u64,
}

/// A validation report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.validation/1")]
pub struct Validation {
    /// Name and version of the document: [`Validation::SCHEMA`].
    pub schema: String,
    /// The judgement.
    pub verdict: ValidationVerdict,
    /// Why it is not a pass; on a pass, what to know beside it.
    pub remarks: Vec<String>,
    /// The day, `YYYY-MM-DD`, by which waivers were judged.
    pub date: String,
    /// The device; none if it never opened.
    pub device: Option<DeviceRecord>,
    /// What was asked for.
    pub asked: Asked,
    /// The mandatory list.
    pub mustpass: Mustpass,
    /// By level.
    pub levels: Vec<LevelCounts>,
    /// The vendor's claims. How each fared stands in its case's facts.
    pub claims: Vec<Claim>,
    /// The vendor's waivers.
    pub waivers: Vec<WaiverUse>,
    /// Every case.
    pub cases: Vec<CaseResult>,
    /// What the soak saw, phase by phase.
    pub soak: Vec<SoakSample>,
}

impl Validation {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.validation/1";

    /// Judges what came of a run: claims, then waivers that hold on `today` (`YYYY-MM-DD`), then the mandatory list.
    pub fn new(plan: &Plan, outcome: RunOutcome, part: Option<&PartFile>, today: &str) -> Validation {
        let RunOutcome { device, mut cases, samples } = outcome;
        let claims = part.map(|part| part.claims.clone()).unwrap_or_default();
        if plan.level >= 3 {
            performance::judge(&mut cases, &claims);
        }
        if let Some(part) = part {
            part.waive(&mut cases, today);
        }
        let uses = part.map(|part| uses(part, &cases, today)).unwrap_or_default();
        let lines = mustpass::check(&mustpass::lines(mustpass::TEXT), &cases);
        let met = lines.iter().all(|line| line.problem.is_none());
        let asked = Asked {
            device: plan.device.clone(),
            level: plan.level,
            only: plan.only.clone(),
            effort: plan.settings.effort,
            soak_s: plan.settings.soak_s,
            seed: plan.settings.seed,
        };
        let (verdict, remarks) = judged(&asked, &cases, &lines, &claims, &uses);
        let (version, sha256) = (mustpass::VERSION.to_owned(), mustpass::digest());
        Validation {
            schema: Validation::SCHEMA.to_owned(),
            verdict,
            remarks,
            date: today.to_owned(),
            device: device.as_ref().map(DeviceRecord::from),
            asked,
            mustpass: Mustpass { version, sha256, met, lines },
            levels: levels(&cases),
            claims,
            waivers: uses,
            cases,
            soak: samples,
        }
    }

    /// The JSON Schema of this document, as in `docs/schema/validation-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Validation).to_value()
    }
}

/// An error as a share of its bound, to three decimals, never rounded up to the bound nor down to it.
pub fn share_in_words(share: f64) -> String {
    let thousandths = if share < 1.0 { (share * 1e3).floor() } else { (share * 1e3).ceil() };
    format!("{:.3}", thousandths / 1e3)
}

fn uses(part: &PartFile, cases: &[CaseResult], today: &str) -> Vec<WaiverUse> {
    let used = |waiver: &Waiver| {
        let by = |case: &&CaseResult| {
            case.waived_by.as_ref().is_some_and(|w| w.waiver == waiver.case && w.until == waiver.until)
        };
        cases.iter().filter(by).count() as u64
    };
    let each = part.waivers.iter().map(|waiver| WaiverUse {
        expired: waiver.until.as_str() < today,
        used: used(waiver),
        waiver: waiver.clone(),
    });
    each.collect()
}

fn levels(cases: &[CaseResult]) -> Vec<LevelCounts> {
    let mut by_level: BTreeMap<u8, LevelCounts> = BTreeMap::new();
    for case in cases {
        let level = level_of(&case.id).unwrap_or_default();
        let fresh = || LevelCounts { level, counts: BTreeMap::new(), error_of_bound_max: None };
        let entry = by_level.entry(level).or_insert_with(fresh);
        *entry.counts.entry(case.status.word().to_owned()).or_default() += 1;
        if let Some(ratio) = case.facts.get("error_of_bound_max").and_then(serde_json::Value::as_f64) {
            entry.error_of_bound_max = Some(entry.error_of_bound_max.unwrap_or(0.0).max(ratio));
        }
    }
    by_level.into_values().collect()
}

fn judged(
    asked: &Asked,
    cases: &[CaseResult],
    lines: &[Met],
    claims: &[Claim],
    uses: &[WaiverUse],
) -> (ValidationVerdict, Vec<String>) {
    let count = |status: CaseStatus| cases.iter().filter(|case| case.status == status).count();
    let mut remarks = Vec::new();
    for status in CaseStatus::ALL {
        let worth_saying = status.is_wrong()
            || matches!(status, CaseStatus::Waived | CaseStatus::QualityWarning | CaseStatus::NotRun);
        if worth_saying && count(status) > 0 {
            remarks.push(format!("{} {}", count(status), status.word()));
        }
    }
    for lapsed in uses.iter().filter(|u| u.expired) {
        remarks.push(format!("the waiver '{}' expired on {}", lapsed.waiver.case, lapsed.waiver.until));
    }
    let partial = asked.level < LEVEL_MAX || !asked.only.is_empty();
    let whole = |line: &Met| asked.only.is_empty() && level_of(&line.pattern) <= Some(asked.level);
    let unmet = lines.iter().filter_map(|line| Some((line, line.problem.as_ref()?)));
    for (line, problem) in unmet.filter(|(line, _)| whole(line) || line.cases > 0) {
        remarks.push(format!("mandatory {}: {problem}", line.pattern));
    }
    // of a part that was asked for, only what was found there can be missed
    let could_not = |line: &Met| {
        let missed = line.problem.as_deref().is_some_and(|problem| problem.ends_with("could not run"));
        let let_through = line.waived > 0 && line.passed == 0;
        line.problem.is_some() && !line.only_waived() && (missed || let_through || whole(line))
    };
    let waived = count(CaseStatus::Waived) > 0;
    let not_run = |case: &CaseResult| {
        let claimed = claims.iter().any(|claim| case.id == format!("l3.{}", claim.point));
        // what no list names was asked for nevertheless: the soak, and a device that did not open
        let asked_for = claimed || !case.id.starts_with("l3.");
        case.status == CaseStatus::NotRun && asked_for
    };
    let verdict = if cases.iter().any(|case| case.status.is_wrong()) {
        ValidationVerdict::Fail
    } else if cases.is_empty() || cases.iter().any(not_run) || lines.iter().any(could_not) {
        ValidationVerdict::Incomplete
    } else if partial {
        ValidationVerdict::Partial
    } else if waived {
        ValidationVerdict::PassedWithWaivers
    } else {
        ValidationVerdict::Pass
    };
    if verdict == ValidationVerdict::Partial {
        remarks.push("only a part was asked for: this is no report to publish".to_owned());
    }
    if waived {
        remarks.push("waived is wrong, and let through: it passes nothing".to_owned());
    }
    if cases.is_empty() {
        remarks.push("nothing was tried".to_owned());
    }
    (verdict, remarks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_within_its_bound_never_reads_as_all_of_it() {
        for (share, words) in [(0.0, "0.000"), (0.9964, "0.996"), (0.99999, "0.999"), (1.0001, "1.001")] {
            assert_eq!(share_in_words(share), words);
        }
    }
}
