//! The report as one self-contained HTML page.

use super::case::{CaseResult, CaseStatus};
use super::charts;
use super::document::{Validation, ValidationVerdict, share_in_words};
use super::levels::{meaning, purpose};
use super::package::Environment;
use super::protocol::DeviceFact;
use mixfleet_report::html::{Html, TableCell, Tone, page as frame};
use mixfleet_report::numbers::scaled;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Number of cases listed one by one, beyond which the page refers to `results.json`.
const LISTED_MAX: usize = 200;
/// The same, of cases of one level that passed.
const PASSED_MAX: usize = 1000;
/// Number of cases whose reasons are shown at once.
const OPEN_MAX: usize = 5;

fn tone(status: CaseStatus) -> Tone {
    match status {
        CaseStatus::Pass => Tone::Good,
        CaseStatus::QualityWarning | CaseStatus::Waived | CaseStatus::NotRun => Tone::Warn,
        CaseStatus::Unsupported => Tone::Muted,
        CaseStatus::Fail | CaseStatus::Crash | CaseStatus::Timeout | CaseStatus::DeviceLost => Tone::Bad,
    }
}

/// Renders the page.
pub(crate) fn page(report: &Validation, environment: &Environment) -> String {
    let mut body = Html::default();
    verdict(&mut body, report);
    levels(&mut body, report);
    operations(&mut body, report);
    listed(&mut body, report);
    claims(&mut body, report);
    if let Some(shares) = &report.datasheet {
        body.heading(2, "Beside the datasheet");
        charts::datasheet(&mut body, shares);
    }
    charts::roofline(&mut body, report);
    charts::soak(&mut body, &report.soak);
    charts::errors(&mut body, report);
    passed(&mut body, report);
    waivers(&mut body, report);
    mandatory(&mut body, report);
    measured(&mut body, report);
    surroundings(&mut body, report, environment);
    let (name, id) =
        report.device.as_ref().map_or(("unopened device", &report.asked.device), |d| (&d.name, &d.id));
    let subtitle = format!("{id}, {}, by {}", report.date, suite(environment));
    frame(&format!("Validation of {name}"), &subtitle, &body)
}

fn verdict(body: &mut Html, report: &Validation) {
    let waived = report.cases.iter().any(|case| case.status == CaseStatus::Waived);
    let (tone, words) = match report.verdict {
        ValidationVerdict::Pass => {
            (Tone::Good, "PASS: the whole mandatory list was met and nothing is wrong.")
        }
        ValidationVerdict::PassedWithWaivers => {
            (Tone::Warn, "PASSED WITH WAIVERS: something is wrong, and the vendor's waivers let it through.")
        }
        ValidationVerdict::Fail => (Tone::Bad, "FAIL: something is wrong."),
        ValidationVerdict::Incomplete => (Tone::Warn, "INCOMPLETE: a requested case could not run."),
        ValidationVerdict::Partial if waived => {
            (Tone::Warn, "PARTIAL: only some cases were requested, and failures among them were waived.")
        }
        ValidationVerdict::Partial => {
            (Tone::Warn, "PARTIAL: no failures, but only some cases were requested.")
        }
    };
    match report.first_failure() {
        Some(first) if report.verdict == ValidationVerdict::Fail => {
            body.note(tone, &format!("FAIL: {first}"));
        }
        _ => body.note(tone, words),
    }
    report.remarks.iter().for_each(|remark| body.paragraph(remark));
}

fn levels(body: &mut Html, report: &Validation) {
    body.heading(2, "Levels");
    let mut header = vec!["level"];
    header.extend(CaseStatus::ALL.iter().map(|status| status.word()));
    header.push("error of bound");
    let row = |level: &super::document::LevelCounts| {
        let mut row = vec![TableCell::text(format!("L{} {}", level.level, purpose(level.level)))];
        for status in CaseStatus::ALL {
            let count = level.counts.get(status.word()).copied().unwrap_or(0);
            let cell = TableCell::number(count.to_string());
            row.push(if count > 0 { cell.tone(tone(status)) } else { cell.tone(Tone::Muted) });
        }
        row.push(TableCell::number(level.error_of_bound_max.map_or("-".to_owned(), share_in_words)));
        row
    };
    let rows: Vec<Vec<TableCell>> = report.levels.iter().map(row).collect();
    body.table(&header, &rows);
}

/// What one operation's cases gave.
#[derive(Default)]
struct OperationCounts<'a> {
    passed: u64,
    failed: u64,
    unsupported: u64,
    other: u64,
    error_of_bound_max: Option<f64>,
    first_failing: Option<&'a str>,
}

/// Counts conformance cases by operation, those with failures first.
fn operations(body: &mut Html, report: &Validation) {
    let mut by_name: BTreeMap<&str, OperationCounts<'_>> = BTreeMap::new();
    for case in report.cases.iter().filter(|case| case.level() == Some(1)) {
        let shape = case.id.split_once('.').map_or(case.id.as_str(), |(_, rest)| rest);
        let (name, shape) = shape.split_once('.').unwrap_or((shape, ""));
        let entry = by_name.entry(name).or_default();
        match case.status {
            CaseStatus::Pass => entry.passed += 1,
            CaseStatus::Unsupported => entry.unsupported += 1,
            status if status.is_wrong() => {
                entry.failed += 1;
                entry.first_failing.get_or_insert(shape);
            }
            _ => entry.other += 1,
        }
        if let Some(error) = case.facts.get("error_of_bound_max").and_then(Value::as_f64) {
            entry.error_of_bound_max = Some(entry.error_of_bound_max.unwrap_or(0.0).max(error));
        }
    }
    if by_name.is_empty() {
        return;
    }
    body.heading(2, "Operations");
    let mut all: Vec<_> = by_name.into_iter().collect();
    all.sort_by_key(|(_, of)| std::cmp::Reverse(of.failed));
    let count = |count: u64, tone: Tone| {
        TableCell::number(count.to_string()).tone(if count > 0 { tone } else { Tone::Muted })
    };
    let row = |(name, of): &(&str, OperationCounts<'_>)| {
        vec![
            TableCell::text(*name),
            count(of.passed, Tone::Good),
            count(of.failed, Tone::Bad),
            count(of.unsupported, Tone::Muted),
            count(of.other, Tone::Warn),
            TableCell::number(of.error_of_bound_max.map_or("-".to_owned(), share_in_words)),
            TableCell::text(of.first_failing.unwrap_or("")),
        ]
    };
    let header = [
        "operation",
        "passed",
        "failed",
        "unsupported",
        "other",
        "worst error, of its bound",
        "first failing shape",
    ];
    body.table(&header, &all.iter().map(row).collect::<Vec<_>>());
}

fn claims(body: &mut Html, report: &Validation) {
    if report.claims.is_empty() {
        return;
    }
    body.heading(2, "Claims of the vendor");
    let mut rows = Vec::new();
    for case in &report.cases {
        for claim in case.facts.get("claims").and_then(Value::as_array).into_iter().flatten() {
            let number = |name: &str| claim.get(name).and_then(Value::as_f64);
            let word = |name: &str| claim.get(name).and_then(Value::as_str).unwrap_or("-").to_owned();
            let status: CaseStatus =
                claim.get("status").and_then(|s| CaseStatus::deserialize(s).ok()).unwrap_or(case.status);
            let percent =
                |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{:.1} %", v * 100.0));
            rows.push(vec![
                TableCell::text(case.id.trim_start_matches("l3.")),
                TableCell::badge(status.word(), tone(status)),
                TableCell::number(word("measured_in_words")),
                TableCell::number(word("claimed_in_words")),
                TableCell::number(percent(number("share"))),
                TableCell::number(percent(number("at_least"))),
                TableCell::text(word("source")),
                TableCell::text(word("remark").trim_start_matches('-')).tone(Tone::Warn),
            ]);
        }
    }
    let header = ["point", "status", "measured", "claimed", "of claim", "required", "source", "remark"];
    body.table(&header, &rows);
    charts::claims(body, report);
}

/// Lists every case that is neither a plain pass nor plainly unsupported.
fn listed(body: &mut Html, report: &Validation) {
    let worth = |case: &&CaseResult| !matches!(case.status, CaseStatus::Pass | CaseStatus::Unsupported);
    let mut cases: Vec<&CaseResult> = report.cases.iter().filter(worth).collect();
    if cases.is_empty() {
        return;
    }
    cases.sort_by_key(|case| std::cmp::Reverse(case.status));
    body.heading(2, "Cases that did not simply pass");
    body.begin_details(&format!("{} cases with their reasons", cases.len()), cases.len() <= OPEN_MAX);
    let row = |case: &&CaseResult| {
        let reason = case.reason.as_deref().unwrap_or("");
        vec![
            TableCell::text(&case.id),
            TableCell::badge(case.status.word(), tone(case.status)),
            TableCell::text(reason),
        ]
    };
    let rows: Vec<Vec<TableCell>> = cases.iter().take(LISTED_MAX).map(row).collect();
    body.table(&["case", "status", "reason"], &rows);
    if cases.len() > LISTED_MAX {
        body.paragraph(&format!("and {} more, in results.json", cases.len() - LISTED_MAX));
    }
    body.end_details();
}

/// Lists what passed, by level, with what that means.
fn passed(body: &mut Html, report: &Validation) {
    let all = |level| report.cases.iter().filter(move |case| case.level() == Some(level));
    let passed = |case: &&CaseResult| case.status == CaseStatus::Pass;
    if !report.cases.iter().any(|case| passed(&case)) {
        return;
    }
    body.heading(2, "What passed");
    for level in report.levels.iter().map(|counts| counts.level) {
        let cases: Vec<&CaseResult> = all(level).filter(passed).collect();
        if cases.is_empty() {
            continue;
        }
        body.begin_details(&format!("L{level} {}: {} passed", purpose(level), cases.len()), false);
        body.paragraph(meaning(level));
        let row = |case: &&CaseResult| vec![TableCell::text(&case.id), TableCell::text(found(case))];
        body.table(&["case", "found"], &cases.iter().take(PASSED_MAX).map(row).collect::<Vec<_>>());
        if cases.len() > PASSED_MAX {
            body.paragraph(&format!("and {} more, in results.json", cases.len() - PASSED_MAX));
        }
        body.end_details();
    }
}

/// The remark for a case that passed.
fn found(case: &CaseResult) -> String {
    let number = |name: &str| case.facts.get(name).and_then(Value::as_f64);
    let of_its_bound = |share| format!("largest error {} of its bound", share_in_words(share));
    let median_rate = |way: &str| case.facts.get(way)?.get("bytes_per_s_median")?.as_f64();
    let known = [
        number("error_of_bound_max").map(of_its_bound),
        number("seconds").filter(|_| case.level() == Some(3)).map(|seconds| scaled(seconds, "s")),
        number("flop_per_s").map(|rate| scaled(rate, "FLOP/s")),
        number("bytes_per_s").map(|rate| scaled(rate, "B/s")),
        number("bytes_covered").map(|bytes| format!("{} tried", scaled(bytes, "B"))),
        number("checks").map(|checks| format!("{checks} results")),
        median_rate("there").map(|rate| format!("{} there", scaled(rate, "B/s"))),
        median_rate("back").map(|rate| format!("{} back", scaled(rate, "B/s"))),
        case.facts.get("value").and_then(Value::as_str).map(str::to_owned),
    ];
    known.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn waivers(body: &mut Html, report: &Validation) {
    if report.waivers.is_empty() {
        return;
    }
    body.heading(2, "Waivers");
    let row = |u: &super::document::WaiverUse| {
        let state = if u.expired {
            TableCell::badge("expired", Tone::Bad)
        } else {
            TableCell::badge("holds", Tone::Warn)
        };
        let waiver = &u.waiver;
        vec![
            TableCell::text(&waiver.case),
            state,
            TableCell::text(&waiver.until),
            TableCell::number(u.used.to_string()),
            TableCell::text(&waiver.reason),
        ]
    };
    let rows: Vec<Vec<TableCell>> = report.waivers.iter().map(row).collect();
    body.table(&["cases", "state", "until", "let through", "reason"], &rows);
}

fn mandatory(body: &mut Html, report: &Validation) {
    let list = &report.mustpass;
    let unmet = list.lines.iter().filter(|line| line.problem.is_some()).count();
    let is_partial = report.asked.level < 3 || !report.asked.only.is_empty();
    let tried_unmet = list.lines.iter().any(|line| line.problem.is_some() && (line.cases > 0 || !is_partial));
    body.heading(2, "Mandatory list");
    body.paragraph(&format!("mustpass {}, SHA-256 {}", list.version, list.sha256));
    body.begin_details(
        &format!("{} of {} lines met", list.lines.len() - unmet, list.lines.len()),
        tried_unmet,
    );
    let row = |line: &super::mustpass::Met| {
        let state = match &line.problem {
            None => TableCell::badge("met", Tone::Good),
            // nothing of it was requested
            Some(problem) if line.cases == 0 && is_partial => TableCell::badge(problem, Tone::Muted),
            Some(problem) => TableCell::badge(problem, Tone::Bad),
        };
        vec![
            TableCell::text(&line.pattern),
            state,
            TableCell::number(line.passed.to_string()),
            TableCell::number(line.waived.to_string()),
            TableCell::number(line.cases.to_string()),
        ]
    };
    let rows: Vec<Vec<TableCell>> = list.lines.iter().map(row).collect();
    body.table(&["cases", "state", "passed", "waived", "tried"], &rows);
    body.end_details();
}

fn measured(body: &mut Html, report: &Validation) {
    let points =
        report.cases.iter().filter(|case| case.facts.contains_key("seconds") && case.level() == Some(3));
    let row = |case: &CaseResult| {
        let number = |name: &str| case.facts.get(name).and_then(Value::as_f64);
        let shown = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4e}"));
        vec![
            TableCell::text(case.id.trim_start_matches("l3.")),
            TableCell::number(shown(number("seconds"))),
            TableCell::number(shown(number("flop_per_s"))),
            TableCell::number(shown(number("bytes_per_s"))),
        ]
    };
    let rows: Vec<Vec<TableCell>> = points.map(row).collect();
    if !rows.is_empty() {
        body.heading(2, "Measured");
        body.begin_details(&format!("{} points", rows.len()), false);
        body.table(&["point", "seconds", "FLOP/s", "bytes/s"], &rows);
        body.end_details();
    }
}

fn surroundings(body: &mut Html, report: &Validation, environment: &Environment) {
    body.heading(2, "Surroundings");
    let mut facts: Vec<(String, String)> = Vec::new();
    if let Some(device) = &report.device {
        facts.push(("device".to_owned(), format!("{} ({})", device.name, device.id)));
        facts.push(("fingerprint".to_owned(), device.fingerprint.clone()));
        facts.extend(device.notes.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    let told = |fact: &DeviceFact| {
        let value = fact.value.clone().unwrap_or_else(|| "could not be read".to_owned());
        let remark = fact.remark.as_ref().map(|remark| format!(": {remark}")).unwrap_or_default();
        (fact.name.clone(), format!("{value}{remark}"))
    };
    facts.extend(environment.device.iter().chain(&environment.host).map(told));
    facts.push(("suite".to_owned(), suite(environment)));
    facts.push(("command".to_owned(), environment.command.join(" ")));
    facts.push(("seed".to_owned(), environment.seed.to_string()));
    facts.push(("time".to_owned(), format!("{} to {}", environment.began_at, environment.ended_at)));
    body.facts(&facts);
}

/// The program that made the report, as `mixfleet --version` tells it.
fn suite(environment: &Environment) -> String {
    let commit = environment.commit.as_deref().unwrap_or("unknown");
    let dirty = if environment.dirty == Some(true) { ", with changes" } else { "" };
    let features = match &environment.features[..] {
        [] => "the default ones".to_owned(),
        features => features.join(", "),
    };
    let Environment { version, build, .. } = environment;
    let build = if build.is_empty() { "unknown" } else { build };
    format!("mixfleet {version}, commit {commit}{dirty}, features: {features}, build: {build}")
}
