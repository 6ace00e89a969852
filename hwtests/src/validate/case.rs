//! The result of a case, and patterns of case names.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// How a case ended; only [`CaseStatus::Pass`] counts as passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CaseStatus {
    /// It was tried and is right.
    Pass,
    /// It is right, but not as it should be: a link at half its width, sinking throughput.
    QualityWarning,
    /// The device does not claim support, and need not.
    Unsupported,
    /// It is wrong, and the vendor's part file gives a reason to let it through until a date.
    Waived,
    /// It could not be tried.
    NotRun,
    /// It was tried and is wrong.
    Fail,
    /// The process that tried it died.
    Crash,
    /// It did not complete in time.
    Timeout,
    /// The device went away.
    DeviceLost,
}

impl CaseStatus {
    /// Every status, best first.
    pub const ALL: [CaseStatus; 9] = [
        CaseStatus::Pass,
        CaseStatus::QualityWarning,
        CaseStatus::Unsupported,
        CaseStatus::Waived,
        CaseStatus::NotRun,
        CaseStatus::Fail,
        CaseStatus::Crash,
        CaseStatus::Timeout,
        CaseStatus::DeviceLost,
    ];

    /// Returns the name used in reports.
    pub const fn word(self) -> &'static str {
        match self {
            CaseStatus::Pass => "pass",
            CaseStatus::QualityWarning => "quality-warning",
            CaseStatus::Unsupported => "unsupported",
            CaseStatus::Waived => "waived",
            CaseStatus::NotRun => "not-run",
            CaseStatus::Fail => "fail",
            CaseStatus::Crash => "crash",
            CaseStatus::Timeout => "timeout",
            CaseStatus::DeviceLost => "device-lost",
        }
    }

    /// Whether it was tested and is wrong, in any way.
    pub const fn is_wrong(self) -> bool {
        matches!(self, CaseStatus::Fail | CaseStatus::Crash | CaseStatus::Timeout | CaseStatus::DeviceLost)
    }

    /// Whether the process must end because the device cannot be used any further.
    pub const fn ends_the_device(self) -> bool {
        matches!(self, CaseStatus::Timeout | CaseStatus::DeviceLost)
    }
}

/// A waiver that let a wrong case through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WaivedBy {
    /// The waiver's pattern in the part file.
    pub waiver: String,
    /// The vendor's reason.
    pub reason: String,
    /// The last day on which it holds, `YYYY-MM-DD`.
    pub until: String,
    /// The status before the waiver.
    pub was: CaseStatus,
}

/// The result of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CaseResult {
    /// Dotted name, the level first: `l1.gemm.f32.bf16.f32.m1.n35.k70.bias.accumulate`.
    pub id: String,
    /// The status.
    pub status: CaseStatus,
    /// Why it is not a pass, with the values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The waiver, if the status is `waived`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waived_by: Option<WaivedBy>,
    /// Measured values, by name; names include units.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub facts: BTreeMap<String, Value>,
}

impl CaseResult {
    /// Creates a result without facts; a pass has no reason.
    pub fn new(id: impl Into<String>, status: CaseStatus, reason: impl Into<String>) -> Self {
        let reason = Some(reason.into()).filter(|text: &String| !text.is_empty());
        CaseResult { id: id.into(), status, reason, waived_by: None, facts: BTreeMap::new() }
    }

    /// Creates a passing result.
    pub fn pass(id: impl Into<String>) -> Self {
        CaseResult::new(id, CaseStatus::Pass, "")
    }

    /// Adds a fact. A value that JSON cannot represent, such as NaN, becomes null.
    pub fn fact(mut self, name: &str, value: impl Serialize) -> Self {
        self.facts.insert(name.to_owned(), serde_json::to_value(value).unwrap_or(Value::Null));
        self
    }

    /// Returns the level in its id: 1 for `l1.gemm...`.
    pub fn level(&self) -> Option<u8> {
        level_of(&self.id)
    }
}

/// Returns the level in the name of a case or group.
pub fn level_of(id: &str) -> Option<u8> {
    id.strip_prefix('l')?.split('.').next()?.parse().ok()
}

/// Whether `pattern` matches all of `id`; `*` matches any characters, including dots.
pub fn matches(pattern: &str, id: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = id.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Whether `pattern` matches `id` or a group that contains it: `l1.gemm` selects every `l1.gemm.*`.
pub fn selects(pattern: &str, id: &str) -> bool {
    let pattern = pattern.trim_end_matches('.');
    matches(pattern, id) || matches(&format!("{pattern}.*"), id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_shells_do() {
        for (pattern, id, want) in [
            ("l1.gemm.*", "l1.gemm.m1", true),
            ("l1.gemm.*", "l1.gemm", false),
            ("l1.*.bf16.*", "l1.gemm.f32.bf16.f32.m1", true),
            ("*", "", true),
            ("a*a", "a", false),
            ("a**b", "ab", true),
            ("l2.random", "l2.random", true),
            ("l2.random", "l2.randomly", false),
            ("*k70", "l1.gemm.k7.k70", true),
        ] {
            assert_eq!(matches(pattern, id), want, "{pattern} on {id}");
        }
        assert!(
            selects("l1", "l1.gemm.m1") && selects("l1.gemm", "l1.gemm") && selects("l1.g*", "l1.gemm.m1")
        );
        assert!(!selects("l1.gem", "l1.gemm.m1") && !selects("l1", "l10.gemm"));
    }

    #[test]
    fn words_are_those_of_the_document() {
        for status in CaseStatus::ALL {
            assert_eq!(serde_json::to_value(status).unwrap(), status.word());
        }
        assert_eq!(level_of("l2.random"), Some(2));
        assert_eq!(level_of("random"), None);
    }
}
