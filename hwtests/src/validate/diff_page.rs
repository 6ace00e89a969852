//! A comparison of two reports as one self-contained HTML page.

use super::diff::{ChangedCase, DiffSide, ValidationDiff};
use super::document::{ValidationVerdict, share_in_words};
use mixfleet_report::bars::{BarRow, Bars};
use mixfleet_report::html::{Html, TableCell, Tone, page as frame};

/// Number of entries of a list on the page.
const LISTED_MAX: usize = 500;

/// Renders the page.
pub fn diff_page(diff: &ValidationDiff) -> String {
    let mut body = Html::default();
    match diff.broke.first() {
        Some(first) => {
            let reason = first.reason.as_deref().unwrap_or("no reason given");
            let words =
                format!("{} passed before and fail now; the first: {}: {reason}", diff.broke.len(), first.id);
            body.note(Tone::Bad, &words);
        }
        None => body.note(Tone::Good, "Nothing that passed before fails now."),
    }
    sides(&mut body, diff);
    let lists: [(&str, &[ChangedCase]); 5] = [
        ("Passed before, fails now", &diff.broke),
        ("Passed before, is wrong now, and waived", &diff.waived),
        ("Passed before, was not tried now", &diff.lost),
        ("Was wrong, passes now", &diff.mended),
        ("Passes now, was not tried before", &diff.gained),
    ];
    for (heading, cases) in lists {
        list(&mut body, heading, cases);
    }
    moved(&mut body, diff);
    errors(&mut body, diff);
    if !diff.surroundings.is_empty() {
        body.heading(2, "Surroundings that are not the same");
        let told = |value: &Option<String>| TableCell::text(value.as_deref().unwrap_or("unknown"));
        let rows = diff
            .surroundings
            .iter()
            .map(|fact| vec![TableCell::text(&fact.name), told(&fact.a), told(&fact.b)]);
        body.table(&["fact", "a", "b"], &rows.collect::<Vec<_>>());
    }
    let subtitle = format!("a: {}, {}; b: {}, {}", diff.a.name, diff.a.date, diff.b.name, diff.b.date);
    frame("Comparison of two validations", &subtitle, &body)
}

fn sides(body: &mut Html, diff: &ValidationDiff) {
    let row = |(letter, side): (&str, &DiffSide)| {
        let tone = match side.verdict {
            ValidationVerdict::Pass => Tone::Good,
            ValidationVerdict::Fail => Tone::Bad,
            _ => Tone::Warn,
        };
        vec![
            TableCell::text(letter),
            TableCell::badge(side.verdict.word(), tone),
            TableCell::text(&side.name),
            TableCell::text(&side.device),
            TableCell::text(&side.date),
            TableCell::text(&side.fingerprint),
        ]
    };
    let rows = [("a", &diff.a), ("b", &diff.b)].map(row);
    body.table(&["report", "verdict", "part", "device", "date", "fingerprint"], &rows);
}

fn list(body: &mut Html, heading: &str, cases: &[ChangedCase]) {
    if cases.is_empty() {
        return;
    }
    body.heading(2, heading);
    let row = |case: &ChangedCase| {
        let [was, is] = case.in_words();
        let reason = case.reason.as_deref().unwrap_or("");
        vec![TableCell::text(&case.id), TableCell::text(was), TableCell::text(is), TableCell::text(reason)]
    };
    body.table(&["case", "a", "b", "reason"], &cases.iter().take(LISTED_MAX).map(row).collect::<Vec<_>>());
    if cases.len() > LISTED_MAX {
        body.paragraph(&format!("and {} more; --json has all", cases.len() - LISTED_MAX));
    }
}

fn moved(body: &mut Html, diff: &ValidationDiff) {
    body.heading(2, "Measured numbers");
    let moved = diff.moved();
    let all = diff.numbers.len();
    body.paragraph(&format!("{} of {all} measured numbers moved beyond their spread.", moved.len()));
    let row = |number: &&super::diff::MovedNumber| {
        let [a, b, ratio] = number.in_words();
        let tone = if number.ratio > 1.0 { Tone::Good } else { Tone::Bad };
        BarRow {
            name: number.id.clone(),
            value: number.ratio,
            words: format!("{ratio}, {a} -> {b}"),
            tone,
            mark: None,
        }
    };
    let rows: Vec<BarRow> = moved.iter().take(LISTED_MAX).map(row).collect();
    let caption = "Speed of b over a, the most slowed first; the dotted line is no change.";
    Bars { label: "speed of b over a", full: Some(1.0), rows: &rows }.draw(body, caption);
}

fn errors(body: &mut Html, diff: &ValidationDiff) {
    if diff.errors.is_empty() {
        return;
    }
    body.heading(2, "Computed in another way");
    body.paragraph(
        "These cases pass in both reports with another largest error, so that other instructions computed them.",
    );
    body.begin_details(&format!("{} cases", diff.errors.len()), false);
    let row = |error: &super::diff::ChangedError| {
        let shares = [error.a, error.b].map(|share| TableCell::number(share_in_words(share)));
        let mut row = vec![TableCell::text(&error.id)];
        row.extend(shares);
        row
    };
    let rows: Vec<Vec<TableCell>> = diff.errors.iter().take(LISTED_MAX).map(row).collect();
    body.table(&["case", "error of bound in a", "error of bound in b"], &rows);
    body.end_details();
}
