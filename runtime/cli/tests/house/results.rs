//! The table of docs/results/README.md says what its pages say.

use super::{assert_none, root};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

/// Words of all pages together, and length of a cell in characters: two lines of a rendered table.
const WORDS_MAX: usize = 16_500;
const CELL_MAX: usize = 240;
const PARAGRAPH_LINES_MAX: usize = 6;

/// A row of the table of claims.
#[derive(Debug)]
struct Claimed<'a> {
    claim: &'a str,
    today: &'a str,
    command: &'a str,
    date: &'a str,
    /// Name of the page without its suffix.
    page: &'a str,
    /// The path that the number depends on.
    code: &'a str,
}

fn results_directory() -> PathBuf {
    root().join("docs/results")
}

/// The pages by name without suffix, the table's own apart.
fn result_pages() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(results_directory()).expect("docs/results");
    let paths = entries.map(|entry| entry.expect("a readable entry").path());
    let mut found: Vec<(String, String)> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read_to_string(&path).expect("UTF-8"))
        })
        .filter(|page| page.0 != "README")
        .collect();
    found.sort();
    found
}

/// The cells of a line of a table, without the spaces around them.
fn table_cells(line: &str) -> Vec<&str> {
    let inner = line.trim().trim_start_matches('|');
    inner.strip_suffix('|').unwrap_or(inner).split('|').map(str::trim).collect()
}

/// The row in a line of the table of claims, or its fault.
fn claimed_row(line: &str) -> Result<Claimed<'_>, String> {
    let [claim, today, command, _machine, date, _limit, page, code] = table_cells(line)[..] else {
        return Err(format!("not eight cells: {line}"));
    };
    let is_date = date.len() == 10 && date.split('-').all(|part| part.parse::<u32>().is_ok());
    let name = page.strip_prefix('[').and_then(|rest| rest.split_once("](")).filter(|(name, target)| {
        target.strip_suffix(')').and_then(|file| file.strip_suffix(".md")) == Some(*name)
    });
    match (is_date, name) {
        (false, _) => Err(format!("{claim}: {date} is no date")),
        (_, None) => Err(format!("{claim}: {page} is no link to a page")),
        (true, Some((page, _))) => {
            let (command, code) = (command.trim_matches('`'), code.trim_matches('`'));
            Ok(Claimed { claim, today, command, date, page, code })
        }
    }
}

fn claims_table() -> String {
    std::fs::read_to_string(results_directory().join("README.md")).expect("docs/results/README.md")
}

fn claimed_rows(table: &str) -> Vec<Result<Claimed<'_>, String>> {
    let rows = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| claim |"));
    rows.map(claimed_row).collect()
}

/// The numbers of a text as they are written, with their decimal points and separators.
fn written_numbers(text: &str) -> BTreeSet<&str> {
    let parts = text.split(|c: char| !c.is_ascii_digit() && c != '.' && c != ',');
    parts.map(|part| part.trim_matches(['.', ','])).filter(|part| !part.is_empty()).collect()
}

/// What a page does not say that its row says.
fn disagreements(row: &Claimed<'_>, page: &str) -> Vec<String> {
    let flat = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let on_page = written_numbers(&flat);
    let mut wrong: Vec<String> = written_numbers(row.today)
        .into_iter()
        .filter(|number| !on_page.contains(number))
        .map(|number| format!("the number {number}"))
        .collect();
    wrong.extend((!flat.contains(row.command)).then(|| format!("the command {}", row.command)));
    wrong.extend((!flat.contains(row.date)).then(|| format!("the date {}", row.date)));
    wrong.iter().map(|what| format!("{}: {}.md does not have {what}", row.claim, row.page)).collect()
}

#[test]
fn every_claim_is_what_its_page_says() {
    let (table, pages) = (claims_table(), result_pages());
    let mut errors = Vec::new();
    let mut without: BTreeSet<&str> = pages.iter().map(|page| page.0.as_str()).collect();
    for row in claimed_rows(&table) {
        match row {
            Err(error) => errors.push(error),
            Ok(row) => {
                without.remove(row.page);
                match pages.iter().find(|page| page.0 == row.page) {
                    None => errors.push(format!("{}: there is no page {}.md", row.claim, row.page)),
                    Some(page) => errors.extend(disagreements(&row, &page.1)),
                }
                let exists = !row.code.is_empty() && root().join(row.code).exists();
                errors.extend((!exists).then(|| format!("{}: there is no {}", row.claim, row.code)));
            }
        }
    }
    errors.extend(without.iter().map(|page| format!("{page}.md has no row in README.md")));
    assert_none(&errors, "docs/results/README.md and its pages");
}

#[test]
fn claims_that_disagree_with_their_page_are_seen() {
    let line = "| A claim | 1.5 %, 2,000 | `run me` | any | 2026-11-26 | 2 % | [page](page.md) | `src` |";
    let row = claimed_row(line).unwrap();
    assert_eq!(disagreements(&row, "2026-11-26: `run\nme` gives 1.5 % of 2,000."), [""; 0]);
    let wrong = disagreements(&row, "2026-11-27: `run` gives 11.5 % of 2,000.");
    assert_eq!(wrong.len(), 3, "{wrong:?}");
    for bad in [
        "| A claim | 1 | `a` | any | November | 2 | [page](page.md) | `src` |",
        "| A claim | 1 | `a` | any | 2026-11-26 | 2 | [page](other.md) | `src` |",
        "| A claim | 1 | `a` | any | 2026-11-26 | 2 | [page](page.md) |",
    ] {
        assert!(claimed_row(bad).is_err(), "{bad}");
    }
}

fn git_output(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(root()).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Prints rows and fails for none: a change need not have changed the number.
#[test]
fn claims_older_than_their_code_are_printed() {
    if git_output(&["rev-parse", "--is-shallow-repository"]).as_deref() != Some("false") {
        eprintln!("SKIPPED: ages of claims: this tree has no git history");
        return;
    }
    let table = claims_table();
    for row in claimed_rows(&table).into_iter().flatten() {
        let days = git_output(&["log", "--format=%cs", "--", row.code]).unwrap_or_default();
        let later = days.lines().filter(|day| *day > row.date).count();
        match (days.is_empty(), later) {
            (true, _) => eprintln!("SKIPPED: {}: no commit of {} is known", row.claim, row.code),
            (false, 0) => {}
            (false, _) => eprintln!("{}: {later} commits of {} since {}", row.claim, row.code, row.date),
        }
    }
}

/// Lines of a page that make a paragraph or a cell of a table too long.
fn too_long(page: &str) -> Vec<usize> {
    let (mut found, mut in_code, mut lines) = (Vec::new(), false, 0);
    for (at, line) in page.lines().enumerate() {
        in_code ^= line.starts_with("```");
        let is_table = line.starts_with('|');
        let begins = line.starts_with("- ") || line.starts_with("```");
        let is_text = !in_code && !is_table && !line.is_empty() && !line.starts_with(['#', '<']);
        lines = if !is_text {
            0
        } else if begins {
            1
        } else {
            lines + 1
        };
        let is_wide = is_table && table_cells(line).iter().any(|cell| cell.chars().count() > CELL_MAX);
        if is_wide || lines == PARAGRAPH_LINES_MAX + 1 {
            found.push(at + 1);
        }
    }
    found
}

#[test]
fn pages_of_results_stay_short() {
    let mut pages = result_pages();
    pages.push(("README".to_owned(), claims_table()));
    let is_word = |word: &&str| word.contains(|c: char| c.is_ascii_alphanumeric());
    let words: usize = pages.iter().map(|page| page.1.split_whitespace().filter(is_word).count()).sum();
    assert!(words <= WORDS_MAX, "docs/results has {words} words: delete what newer results supersede");
    let mut long = Vec::new();
    for page in &pages {
        long.extend(too_long(&page.1).iter().map(|line| format!("{}.md:{line}", page.0)));
    }
    assert_none(&long, "paragraphs of more than six lines, cells of more than two");
    let text = format!("a\n{}\n| {} |\n\nb\n", "b\n".repeat(6), "x".repeat(CELL_MAX + 1));
    assert_eq!(too_long(&text), [7, 9]);
}
