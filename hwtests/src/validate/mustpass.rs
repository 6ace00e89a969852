//! The mandatory list: cases that must have been tested and passed before a report counts as a pass.

use super::case::{CaseResult, CaseStatus, matches};
use super::digest::sha256;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The checked-in list. A changed list is another version, in another file.
pub const TEXT: &str = include_str!("../../mustpass.v5.txt");

/// Version of the list.
pub const VERSION: &str = "v5";

/// One line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MustPassRule {
    /// Pattern of case ids.
    pub pattern: String,
    /// Minimum number of cases that match.
    pub cases_min: usize,
    /// Whether all of its cases may be unsupported.
    pub optional: bool,
}

/// How one line of the list was met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Met {
    /// Pattern of the line.
    pub pattern: String,
    /// Number of cases found.
    pub cases: usize,
    /// Number of cases that passed, including quality warnings.
    pub passed: usize,
    /// Number of wrong cases let through by a waiver, which do not count as passes.
    #[serde(default)]
    pub waived: usize,
    /// Why the line is not met, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Returns the SHA-256 of the list.
pub fn digest() -> String {
    sha256(TEXT.as_bytes())
}

/// Parses a list of lines `pattern least-number-of-cases [optional]`; `#` begins a comment.
///
/// # Panics
/// If a line is malformed, since the list is part of the program and covered by a test.
pub fn lines(text: &str) -> Vec<MustPassRule> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (pattern, count, optional) = match words[..] {
            [pattern, count] => (pattern, count, false),
            [pattern, count, "optional"] => (pattern, count, true),
            _ => panic!("mandatory list: '{line}' is no line"),
        };
        let cases_min = count.parse().unwrap_or_else(|_| panic!("mandatory list: '{line}' has no number"));
        MustPassRule { pattern: pattern.to_owned(), cases_min, optional }
    };
    lines.filter(|line| !line.is_empty()).map(parse).collect()
}

impl Met {
    /// Whether only waivers keep the line from being met.
    pub fn only_waived(&self) -> bool {
        self.problem.as_ref().is_some_and(|problem| *problem == waived_only(self.waived))
    }
}

/// Returns the problem of a line that lacks only waived cases.
fn waived_only(count: usize) -> String {
    format!("{count} wrong and waived")
}

/// Checks the results against a list. A line is met if enough cases were found, none of them is wrong, waived
/// or could not run, and, unless the line is optional, at least one passed: a device that declares or waives
/// everything meets no line.
pub fn check(lines: &[MustPassRule], cases: &[CaseResult]) -> Vec<Met> {
    let met = |line: &MustPassRule| {
        let found: Vec<&CaseResult> = cases.iter().filter(|case| matches(&line.pattern, &case.id)).collect();
        let count = |test: fn(CaseStatus) -> bool| found.iter().filter(|case| test(case.status)).count();
        let passed = count(|s| matches!(s, CaseStatus::Pass | CaseStatus::QualityWarning));
        let waived = count(|s| s == CaseStatus::Waived);
        let (wrong, missed) = (count(CaseStatus::is_wrong), count(|s| s == CaseStatus::NotRun));
        let problem = if wrong > 0 {
            Some(format!("{wrong} wrong"))
        } else if missed > 0 {
            Some(format!("{missed} could not run"))
        } else if found.len() < line.cases_min {
            Some(format!("{} of at least {} cases were tried", found.len(), line.cases_min))
        } else if passed == 0 && !line.optional {
            let beside = if waived > 0 { format!(", {waived} waived") } else { String::new() };
            Some(format!("not one passed{beside}"))
        } else if waived > 0 {
            Some(waived_only(waived))
        } else {
            None
        };
        Met { pattern: line.pattern.clone(), cases: found.len(), passed, waived, problem }
    };
    lines.iter().map(met).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{conformance, memory};
    use super::*;
    use crate::ids::with_ids;
    use crate::reference::ReferenceDevice;
    use crate::{SuiteLevel, entries};
    use mixfleet_hal::{Device, DeviceLimits};

    /// Returns the ids of levels 1 and 2 on a device with these limits.
    fn ids(limits: &DeviceLimits) -> Vec<String> {
        let cases = with_ids(entries(SuiteLevel::Quick, limits)).into_iter().map(|(id, _)| id);
        cases.chain(memory::groups().map(|name| format!("l2.{name}"))).collect()
    }

    #[test]
    fn the_list_covers_every_operation_check_and_pattern_at_every_page_size() {
        let lines = lines(TEXT);
        for name in conformance::groups() {
            let covered = lines
                .iter()
                .any(|l| matches(&l.pattern, &format!("l1.{name}.x")) || l.pattern == format!("l1.{name}"));
            assert!(covered, "{name}");
        }
        for page in [1, 2, 8, 16, 32, 256] {
            let limits = DeviceLimits { kv_page_tokens: page, ..ReferenceDevice::default().limits() };
            let ids = ids(&limits);
            for line in lines.iter().filter(|line| !line.pattern.starts_with("l0")) {
                let found = ids.iter().filter(|id| matches(&line.pattern, id)).count();
                assert!(found >= line.cases_min, "{line:?}: {found} at pages of {page}");
                // a list that requires far fewer cases than exist would not notice omissions
                assert!(
                    found <= line.cases_min + line.cases_min / 4 + 1,
                    "{line:?}: {found} at pages of {page}"
                );
            }
        }
    }

    #[test]
    fn nothing_but_a_pass_meets_a_line() {
        let line = |optional| MustPassRule { pattern: "l1.add.*".to_owned(), cases_min: 2, optional };
        let problem_of = |optional: bool, statuses: &[CaseStatus]| {
            let case =
                |(i, &status): (usize, &CaseStatus)| CaseResult::new(format!("l1.add.n{i}"), status, "");
            let cases: Vec<_> = statuses.iter().enumerate().map(case).collect();
            check(&[line(optional)], &cases).remove(0).problem.unwrap_or_default()
        };
        let problem = |statuses: &[CaseStatus]| problem_of(false, statuses);
        use CaseStatus::*;
        assert_eq!(problem(&[Pass, Unsupported]), "");
        assert_eq!(problem(&[Pass, QualityWarning]), "");
        assert_eq!(problem(&[Waived, QualityWarning]), "1 wrong and waived");
        assert_eq!(problem(&[Waived, Waived]), "not one passed, 2 waived");
        assert_eq!(problem_of(true, &[Waived, Unsupported]), "1 wrong and waived");
        assert_eq!(problem(&[Unsupported, Unsupported]), "not one passed");
        assert_eq!(problem_of(true, &[Unsupported, Unsupported]), "");
        assert_eq!(problem_of(true, &[Unsupported, Fail]), "1 wrong");
        assert_eq!(problem(&[Pass]), "1 of at least 2 cases were tried");
        assert_eq!(problem(&[Pass, Pass, NotRun]), "1 could not run");
        for status in [Fail, Crash, Timeout, DeviceLost] {
            assert_eq!(problem(&[Pass, Pass, status]), "1 wrong");
        }
        assert_eq!(problem(&[]), "0 of at least 2 cases were tried");
    }
}
