//! The report on the terminal.

use mixfleet_hwtests::validate::document::share_in_words;
use mixfleet_hwtests::validate::levels::purpose;
use mixfleet_hwtests::validate::{CaseResult, CaseStatus, Validation, ValidationVerdict};
use mixfleet_report::numbers::scaled;
use std::fmt::Write;
use std::path::Path;

/// Maximum number of cases that are listed with their reasons.
const SHOWN_MAX: usize = 20;

pub(crate) fn text(report: &Validation) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut text, report);
    text
}

fn write_all(text: &mut String, report: &Validation) -> std::fmt::Result {
    let asked = &report.asked;
    let (id, name) =
        report.device.as_ref().map_or((&asked.device, "could not be opened"), |d| (&d.id, &d.name));
    let verdict = report.verdict.word().to_uppercase().replace('-', " ");
    match report.first_failure().filter(|_| report.verdict == ValidationVerdict::Fail) {
        Some(first) => writeln!(text, "{id} ({name}): {verdict}: {first}")?,
        None => writeln!(text, "{id} ({name}): {verdict}")?,
    }
    for level in &report.levels {
        let counts: Vec<String> = CaseStatus::ALL
            .iter()
            .filter_map(|status| Some(format!("{} {}", level.counts.get(status.word())?, status.word())))
            .collect();
        let ratio =
            level.error_of_bound_max.map(|r| format!("; largest error {} of its bound", share_in_words(r)));
        let purpose = purpose(level.level);
        writeln!(
            text,
            "  L{} {purpose:<12} {}{}",
            level.level,
            counts.join(", "),
            ratio.unwrap_or_default()
        )?;
    }
    let list = &report.mustpass;
    let met = list.lines.iter().filter(|line| line.problem.is_none()).count();
    writeln!(text, "  mustpass {}: {met} of {} lines met", list.version, list.lines.len())?;
    claims(text, report)?;
    for row in report.datasheet.iter().flat_map(|shares| &shares.rows) {
        let (percent, measured) = (100.0 * row.share, scaled(row.measured, &row.unit));
        writeln!(
            text,
            "  datasheet {}: {measured}, {percent:.1} % of {}",
            row.what,
            scaled(row.claimed, &row.unit)
        )?;
    }
    let worth = |case: &&CaseResult| !matches!(case.status, CaseStatus::Pass | CaseStatus::Unsupported);
    let mut cases: Vec<&CaseResult> = report.cases.iter().filter(worth).collect();
    cases.sort_by_key(|case| std::cmp::Reverse(case.status));
    for case in cases.iter().take(SHOWN_MAX) {
        writeln!(text, "  {:<15} {}: {}", case.status.word(), case.id, case.reason.as_deref().unwrap_or(""))?;
    }
    if cases.len() > SHOWN_MAX {
        writeln!(text, "  and {} more; --out keeps them all", cases.len() - SHOWN_MAX)?;
    }
    for remark in &report.remarks {
        writeln!(text, "  {remark}")?;
    }
    Ok(())
}

/// The verdict and where the report is: the last line of the command.
pub(crate) fn conclusion(report: &Validation, folder: Option<&Path>) -> String {
    let verdict = report.verdict.word().to_uppercase().replace('-', " ");
    match folder {
        Some(folder) => format!("{verdict}; report: {}", folder.join("report.html").display()),
        None => {
            format!("{verdict}; no report was kept, as this user has no data directory: name one with --out")
        }
    }
}

fn claims(text: &mut String, report: &Validation) -> std::fmt::Result {
    for case in &report.cases {
        for claim in case.facts.get("claims").and_then(|claims| claims.as_array()).into_iter().flatten() {
            let word = |name: &str| claim.get(name).and_then(|word| word.as_str());
            let point = case.id.trim_start_matches("l3.");
            let (claimed, status) = (word("claimed_in_words").unwrap_or(""), word("status").unwrap_or(""));
            let share = claim.get("share").and_then(serde_json::Value::as_f64);
            match (word("measured_in_words"), share) {
                (Some(measured), Some(share)) => {
                    let percent = share * 100.0;
                    let remark = word("remark").map(|remark| format!(" ({remark})")).unwrap_or_default();
                    writeln!(
                        text,
                        "  claim {point}: {measured}, {percent:.1} % of the claimed {claimed}: {status}{remark}"
                    )?;
                }
                _ => writeln!(text, "  claim {point}: {claimed} claimed, not measured: {status}")?,
            }
        }
    }
    Ok(())
}
