//! The validation report, `mixfleet.validation/1`. Its JSON Schema is `docs/schema/validation-1.json`. Added
//! fields keep the version, so readers must ignore unknown ones.

use super::case::{CaseResult, CaseStatus, level_of};
use super::datasheet::{self, DatasheetShares};
use super::mustpass::{self, Met};
use super::part::{Claim, PartFile, Waiver};
use super::performance;
use super::protocol::ValidationEffort;
use super::runner::{RunOutcome, ValidationPlan};
use super::soak::SoakSample;
use mixfleet_hal::DeviceInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Number of characters of a reason in the headline.
const REASON_MAX: usize = 240;
/// Shares from here on are shown in powers of ten.
const SHARE_MAX: f64 = 1e6;
/// The highest level required of a whole report; a soak is optional.
const LEVEL_MAX: u8 = 3;

/// The verdict of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ValidationVerdict {
    /// The whole mandatory list was met, nothing is wrong, and every claim was compared with a measurement.
    Pass,
    /// Something is wrong but waived; everything else is as for a pass.
    PassedWithWaivers,
    /// Something is wrong.
    Fail,
    /// Nothing unwaived is wrong, but something requested could not run, or a mandatory line has no pass.
    Incomplete,
    /// Nothing unwaived is wrong, but only a part was requested, so the report is not for publication.
    Partial,
}

impl ValidationVerdict {
    /// Returns the name used in reports.
    pub const fn word(self) -> &'static str {
        match self {
            ValidationVerdict::Pass => "pass",
            ValidationVerdict::PassedWithWaivers => "passed-with-waivers",
            ValidationVerdict::Fail => "fail",
            ValidationVerdict::Incomplete => "incomplete",
            ValidationVerdict::Partial => "partial",
        }
    }
}

/// The device, as it describes itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceRecord {
    /// The selector that opens it.
    pub id: String,
    /// Name of the backend.
    pub backend: String,
    /// Name of the part.
    pub name: String,
    /// `cpu`, `gpu`, `accelerator` or `simulated`.
    pub kind: String,
    /// Memory available to buffers, in bytes.
    pub memory_bytes: f64,
    /// Cores, compute units or multiprocessors.
    pub compute_units: u32,
    /// The fingerprint of part, driver and kernels; results hold only for devices with an equal one.
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

/// The requested plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Asked")]
pub struct ValidationRequest {
    /// The selector of the device.
    #[serde(default)]
    pub device: String,
    /// The highest level requested.
    pub level: u8,
    /// Patterns of groups or cases; empty means all.
    pub only: Vec<String>,
    /// How thorough the run was.
    pub effort: ValidationEffort,
    /// Duration of the soak in seconds.
    pub soak_s: f64,
    /// Seed of the memory patterns.
    pub seed: u64,
}

/// Case counts of one level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LevelCounts {
    /// The level of validation.
    pub level: u8,
    /// Number of cases by status, without those that did not occur.
    pub counts: BTreeMap<String, u64>,
    /// The largest error of a result as a share of its bound; `None` if nothing was compared.
    pub error_of_bound_max: Option<f64>,
}

/// The mandatory list and how it was met.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Mustpass {
    /// Version of the list.
    pub version: String,
    /// SHA-256 of the list.
    pub sha256: String,
    /// Whether the whole list was met.
    pub met: bool,
    /// The result for each line.
    pub lines: Vec<Met>,
}

/// A waiver and its effect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WaiverUse {
    /// The waiver in the part file.
    pub waiver: Waiver,
    /// Whether it no longer holds.
    pub expired: bool,
    /// Number of cases that it let through.
    pub used: u64,
}

/// A validation report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.validation/1")]
pub struct Validation {
    /// Name and version of the document schema: [`Validation::SCHEMA`].
    pub schema: String,
    /// The verdict.
    pub verdict: ValidationVerdict,
    /// Why it is not a pass, or what else to know about a pass.
    pub remarks: Vec<String>,
    /// The day against which waivers were judged, as `YYYY-MM-DD`.
    pub date: String,
    /// The validated device; `None` if it never opened.
    pub device: Option<DeviceRecord>,
    /// The requested plan.
    pub asked: ValidationRequest,
    /// The mandatory list and how it was met.
    pub mustpass: Mustpass,
    /// Case counts by level.
    pub levels: Vec<LevelCounts>,
    /// The vendor's claims; the facts of their cases say how they fared.
    pub claims: Vec<Claim>,
    /// The vendor's waivers.
    pub waivers: Vec<WaiverUse>,
    /// What share of its datasheet a part of the catalog reached; `None` for other parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datasheet: Option<DatasheetShares>,
    /// Results of all cases.
    pub cases: Vec<CaseResult>,
    /// Readings of the soak, phase by phase.
    pub soak: Vec<SoakSample>,
}

impl Validation {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.validation/1";

    /// Judges the outcome of a run: claims first, then waivers that hold on `today` (`YYYY-MM-DD`), then the
    /// mandatory list.
    pub fn new(
        plan: &ValidationPlan,
        outcome: RunOutcome,
        part: Option<&PartFile>,
        today: &str,
    ) -> Validation {
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
        let asked = ValidationRequest {
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
            datasheet: device.as_ref().and_then(|device| datasheet::shares(&device.name, &cases)),
            cases,
            soak: samples,
        }
    }

    /// Returns the first case that is wrong, with its reason in a line, and how many more there are.
    pub fn first_failure(&self) -> Option<String> {
        let mut wrong = self.cases.iter().filter(|case| case.status.is_wrong());
        let first = wrong.next()?;
        let reason = first.reason.as_deref().unwrap_or(first.status.word());
        let mut line: String = reason.lines().next().unwrap_or_default().chars().take(REASON_MAX).collect();
        if line.len() < reason.trim_end().len() {
            line.push('…');
        }
        let others = match wrong.count() {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        Some(format!("{}: {line}{others}", first.id))
    }

    /// Returns the JSON Schema of this document, as in `docs/schema/validation-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Validation).to_value()
    }
}

/// Formats an error as a share of its bound, to three decimals, never rounded up or down to the bound itself.
pub fn share_in_words(share: f64) -> String {
    if share >= SHARE_MAX {
        let times = format!("{share:.0e} times");
        return if share < f64::MAX { times } else { "beyond any multiple".to_owned() };
    }
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
    asked: &ValidationRequest,
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
    // in a partial run, only found cases can be missing
    let could_not = |line: &Met| {
        let missed = line.problem.as_deref().is_some_and(|problem| problem.ends_with("could not run"));
        let let_through = line.waived > 0 && line.passed == 0;
        line.problem.is_some() && !line.only_waived() && (missed || let_through || whole(line))
    };
    let waived = count(CaseStatus::Waived) > 0;
    let not_run = |case: &CaseResult| {
        let claimed = claims.iter().any(|claim| case.id == format!("l3.{}", claim.point));
        // requested although no list names it: the soak, and a device that did not open
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
        remarks.push("partial run: not publishable; use --full".to_owned());
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
        for (share, words) in [
            (0.0, "0.000"),
            (0.9964, "0.996"),
            (0.99999, "0.999"),
            (1.0001, "1.001"),
            (72_886.4, "72886.400"),
            (3e7, "3e7 times"),
            (f64::MAX, "beyond any multiple"),
        ] {
            assert_eq!(share_in_words(share), words);
        }
    }
}
