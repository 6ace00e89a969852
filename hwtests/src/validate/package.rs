//! The report folder: `results.json`, `junit.xml`, `report.html`, `environment.json`, `log.jsonl`, and
//! `SHA256SUMS` over all of them.

use super::digest::sha256;
use super::document::Validation;
use super::mustpass;
use super::page;
use super::protocol::DeviceFact;
use super::{CaseResult, CaseStatus};
use mixfleet_report::files::write_whole;
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// Name of the journal in the folder.
pub const JOURNAL: &str = "log.jsonl";

/// Everything needed to repeat the run or question its result: `environment.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Name and version of the document schema: `mixfleet.validation-environment/1`.
    pub schema: String,
    /// Version of the suite.
    pub version: String,
    /// Commit that it was built from, if known.
    pub commit: Option<String>,
    /// Whether the build had uncommitted changes, if known.
    pub dirty: Option<bool>,
    /// Cargo features of the build.
    pub features: Vec<String>,
    /// What it was built for, and with which checks.
    #[serde(default)]
    pub build: String,
    /// The command line.
    pub command: Vec<String>,
    /// Seed of everything random.
    pub seed: u64,
    /// Start time, RFC 3339 in UTC.
    pub began_at: String,
    /// End time, RFC 3339 in UTC.
    pub ended_at: String,
    /// Facts about the host: processor, system, kernel, governor, load, other users of the device.
    pub host: Vec<DeviceFact>,
    /// Facts about the device: driver, clocks, ECC, link.
    pub device: Vec<DeviceFact>,
    /// Version and SHA-256 of the mandatory list.
    pub mustpass: (String, String),
    /// Waivers in use, with their last days.
    pub waivers: Vec<(String, String)>,
}

impl Environment {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.validation-environment/1";

    /// Takes what the report itself knows; the caller fills in the rest.
    pub fn of(report: &Validation) -> Environment {
        let waivers = report.waivers.iter();
        Environment {
            schema: Environment::SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: None,
            dirty: None,
            features: Vec::new(),
            build: String::new(),
            command: Vec::new(),
            seed: report.asked.seed,
            began_at: String::new(),
            ended_at: String::new(),
            host: Vec::new(),
            device: Vec::new(),
            mustpass: (mustpass::VERSION.to_owned(), report.mustpass.sha256.clone()),
            waivers: waivers.map(|u| (u.waiver.case.clone(), u.waiver.until.clone())).collect(),
        }
    }
}

/// Writes the folder around the existing journal, and the checksums last.
///
/// # Errors
/// The error of the file system, with the file's name.
pub fn write(folder: &Path, report: &Validation, environment: &Environment) -> io::Result<()> {
    let named = |name: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("{}: {error}", folder.join(name).display()))
    };
    std::fs::create_dir_all(folder).map_err(|error| named("", error))?;
    let files = [
        ("results.json", serde_json::to_vec_pretty(report)?),
        ("environment.json", serde_json::to_vec_pretty(environment)?),
        ("junit.xml", junit(report)?.into_bytes()),
        ("report.html", page::page(report, environment).into_bytes()),
    ];
    for (name, bytes) in &files {
        write_whole(&folder.join(name), bytes).map_err(|error| named(name, error))?;
    }
    let mut sums = String::new();
    for name in files.iter().map(|(name, _)| *name).chain([JOURNAL]) {
        let bytes = match std::fs::read(folder.join(name)) {
            Err(error) if name == JOURNAL && error.kind() == io::ErrorKind::NotFound => continue,
            read => read.map_err(|error| named(name, error))?,
        };
        sums.push_str(&format!("{}  {name}\n", sha256(&bytes)));
    }
    write_whole(&folder.join("SHA256SUMS"), sums.as_bytes()).map_err(|error| named("SHA256SUMS", error))
}

/// Renders the report for JUnit tools, with a suite per level. A case that could not run is an error there,
/// since those tools show skipped cases as harmless.
fn junit(report: &Validation) -> io::Result<String> {
    let device = report.device.as_ref().map_or("unopened device", |device| &device.id);
    let mut document = Report::new(format!("mixfleet validate {device}"));
    for counts in &report.levels {
        let mut suite = TestSuite::new(format!("l{}", counts.level));
        for case in report.cases.iter().filter(|case| case.level() == Some(counts.level)) {
            suite.add_test_case(junit_case(case));
        }
        document.add_test_suite(suite);
    }
    document.to_string().map_err(io::Error::other)
}

fn junit_case(case: &CaseResult) -> TestCase {
    let mut status = match case.status {
        CaseStatus::Pass | CaseStatus::QualityWarning => TestCaseStatus::success(),
        CaseStatus::Unsupported | CaseStatus::Waived => TestCaseStatus::skipped(),
        CaseStatus::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        CaseStatus::NotRun | CaseStatus::Crash | CaseStatus::Timeout | CaseStatus::DeviceLost => {
            TestCaseStatus::non_success(NonSuccessKind::Error)
        }
    };
    let reason = case.reason.clone().unwrap_or_default();
    if case.status != CaseStatus::Pass {
        status.set_message(format!("{}: {reason}", case.status.word()));
    }
    if case.status.is_wrong() || case.status == CaseStatus::NotRun {
        status.set_type(case.status.word());
    }
    let mut test = TestCase::new(case.id.clone(), status);
    test.set_classname(case.id.split('.').take(2).collect::<Vec<_>>().join("."));
    if case.status == CaseStatus::QualityWarning {
        test.set_system_out(format!("quality-warning: {reason}"));
    }
    test
}
