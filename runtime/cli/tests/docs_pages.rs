//! The pages of docs/: the reference of options is what `--help` prints, options that pages show exist, and
//! links lead somewhere.

use crate::common::mixfleet;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The rest of the page after this line is written from `--help`.
const WRITTEN: &str = "<!-- Below this line: what --help --all prints. -->\n";

/// Characters of a line of text, and of one in a table's cell.
const LINE: usize = 120;
const CELL_LINE: usize = 100;

/// This many options that a command shares with an earlier one are listed by name alone.
const REPEATED_MIN: usize = 3;

/// Options on pages that belong to other programs.
const FOREIGN: [&str; 14] = [
    "--abbrev",
    "--all",
    "--always",
    "--block-size",
    "--dirty",
    "--enable-scale-out",
    "--features",
    "--here",
    "--kv-events-config",
    "--kv-transfer-config",
    "--max-logprobs",
    "--release",
    "--scheduling-policy",
    "--served-model-name",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn help(words: &[&str]) -> String {
    let output = mixfleet().args(words).args(["--help", "--all"]).env("COLUMNS", "100").output().unwrap();
    assert!(output.status.success(), "{words:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The headings of a help text that stand above arguments and options.
fn headings(help: &str) -> Vec<&str> {
    let is_heading = |line: &&str| {
        let is_list = !matches!(*line, "Commands:" | "Examples:");
        is_list && line.ends_with(':') && line.starts_with(|c: char| c.is_ascii_uppercase())
    };
    help.lines().filter(is_heading).collect()
}

/// The entries of one section of a help text, each an option or argument and its description.
fn entries(help: &str, section: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for line in help.lines().skip_while(|line| *line != section).skip(1) {
        let text = line.trim_start();
        if !text.is_empty() && text.len() == line.len() {
            break;
        }
        let begins = line.len() - text.len() <= 6 && (text.starts_with('-') || text.starts_with(['<', '[']));
        if begins {
            let (name, description) = text.split_once("  ").unwrap_or((text, ""));
            found.push((name.trim().to_owned(), description.trim().to_owned()));
        } else if let Some((_, description)) = found.last_mut() {
            let separator = if description.is_empty() || text.is_empty() { "" } else { " " };
            let _ = write!(description, "{separator}{text}");
        }
    }
    found
}

/// Text in which Markdown finds no tags and no emphasis.
fn escaped(text: &str) -> String {
    text.replace('<', "\\<").replace('*', "\\*").replace('_', "\\_")
}

/// The section of a command, and those of its subcommands. `known` maps an option to the first command with
/// it.
fn sections(words: &[&str], known: &mut BTreeMap<(String, String), String>, page: &mut String) {
    let text = help(words);
    let name = ["mixfleet"].iter().chain(words).copied().collect::<Vec<_>>().join(" ");
    let usage = text.lines().skip_while(|line| !line.starts_with("Usage: "));
    let usage: Vec<&str> = usage.take_while(|line| !line.is_empty()).map(str::trim_start).collect();
    let _ = write!(page, "\n## {name}\n\n{}.\n\n", text.lines().next().unwrap_or_default());
    let _ = writeln!(page, "`{}`", usage.join("`\n`").replace("Usage: ", ""));
    let mut all: Vec<_> = headings(&text).into_iter().flat_map(|heading| entries(&text, heading)).collect();
    all.retain(|(option, _)| !option.contains("--help"));
    page.push_str(if all.is_empty() { "" } else { "\n" });
    let mut repeated: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for entry in &all {
        if let Some(first) = known.get(entry) {
            repeated.entry(first).or_default().push(&entry.0);
        }
    }
    repeated.retain(|_, options| options.len() >= REPEATED_MIN);
    let is_repeated = |entry: &(String, String)| {
        known.get(entry).is_some_and(|first| repeated.contains_key(first.as_str()))
    };
    for (option, description) in all.iter().filter(|entry| !is_repeated(entry)) {
        let _ = writeln!(page, "- `{option}`: {}", escaped(description));
    }
    for (first, options) in &repeated {
        let _ = writeln!(page, "- As in `{first}`: `{}`", options.join("`, `"));
    }
    for entry in all {
        known.entry(entry).or_insert_with(|| name.clone());
    }
    let listed = text.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    for below in names.filter(|name| !name.is_empty() && *name != "help") {
        sections(&[words, &[below]].concat(), known, page);
    }
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|kind| kind == extension) {
            found.push(path);
        }
    }
    found
}

/// Pages for readers, without results and decisions.
fn guides() -> Vec<PathBuf> {
    let docs = root().join("docs");
    let kinds = ["tutorials", "how-to", "reference", "explanation"];
    let pages: Vec<PathBuf> = kinds.iter().flat_map(|kind| files(&docs.join(kind), "md")).collect();
    assert!(pages.len() > 20, "{pages:?}");
    pages
}

/// Texts that look like whole long options.
fn long_options(text: &str) -> BTreeSet<String> {
    let is_of_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let begins = text.match_indices("--").map(|(at, _)| text.split_at(at));
    let begins = begins.filter(|(before, _)| !before.ends_with(|c: char| c.is_alphanumeric() || c == '-'));
    let words = begins.map(|(_, rest)| rest.chars().take_while(|c| is_of_word(*c)).collect::<String>());
    words.filter(|word| word.len() > 3 && !word.starts_with("---") && !word.ends_with('-')).collect()
}

/// The name that a heading has in a link.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The lines of a page outside of its code blocks.
fn prose(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        is_code ^= fence;
        lines.push(if is_code || fence { "" } else { line });
    }
    lines
}

#[test]
fn the_reference_of_options_is_what_help_prints() {
    let path = root().join("docs/reference/options.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (head, kept) = page.split_once(WRITTEN).expect("the line below which the page is written");
    let mut written = String::new();
    sections(&[], &mut BTreeMap::new(), &mut written);
    if std::env::var_os("MIXFLEET_WRITE_OPTIONS").is_some() {
        std::fs::write(&path, format!("{head}{WRITTEN}{written}")).unwrap();
        return;
    }
    let differs = written.lines().zip(kept.lines()).find(|(written, kept)| written != kept);
    let hint = "docs/reference/options.md is not what --help prints; write it anew with \
                MIXFLEET_WRITE_OPTIONS=1 cargo nextest run --locked --workspace --features mixfleet/full \
                -E 'test(the_reference_of_options_is_what_help_prints)'";
    assert!(written == kept, "{hint}: {differs:?}");
}

/// Around the table of families.
const FAMILIES: [&str; 2] =
    ["<!-- Written from models --families --json. -->\n", "<!-- End of the table of families. -->"];

/// A row for each supported family: its files, and the devices that run it.
fn families() -> String {
    let output = mixfleet().args(["models", "--families", "--json"]).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut table =
        "\n| `model_type` | models | GGUF | `tp:` | C interface |\n|---|---|---|---|---|\n".to_owned();
    for family in document["families"].as_array().unwrap().iter().filter(|family| family["served"] == true) {
        let text = |field: &str| family[field].as_str().unwrap();
        let yes = |field: &str| if family[field] == true { "yes" } else { "no" };
        let files: Vec<String> = family["gguf"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| format!("`{}`", name.as_str().unwrap()))
            .collect();
        let files = if files.is_empty() { "-".to_owned() } else { files.join(", ") };
        let (name, models) = (text("model_type"), text("models"));
        writeln!(table, "| `{name}` | {models} | {files} | {} | {} |", yes("divides"), yes("plug_ins"))
            .unwrap();
    }
    table + "\n"
}

#[test]
fn the_table_of_families_is_what_the_program_says() {
    let path = root().join("docs/reference/models.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(FAMILIES[0]).expect("the line above the table");
    let (kept, tail) = rest.split_once(FAMILIES[1]).expect("the line below the table");
    let written = families();
    if std::env::var_os("MIXFLEET_WRITE_OPTIONS").is_some() {
        std::fs::write(&path, [head, FAMILIES[0], &written, FAMILIES[1], tail].concat()).unwrap();
        return;
    }
    assert!(
        written == kept,
        "docs/reference/models.md: write it anew with MIXFLEET_WRITE_OPTIONS=1: {written}"
    );
}

#[test]
fn options_that_pages_show_exist() {
    let page = std::fs::read_to_string(root().join("docs/reference/options.md")).unwrap();
    let known = long_options(&page);
    for path in guides() {
        for option in long_options(&std::fs::read_to_string(&path).unwrap()) {
            let is_known = known.contains(&option) || FOREIGN.contains(&option.as_str());
            assert!(is_known, "{}: there is no option {option}", path.display());
        }
    }
}

#[test]
fn links_of_pages_lead_somewhere() {
    let root = root();
    let mut pages = files(&root.join("docs"), "md");
    pages.extend(["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|file| root.join(file)));
    let mut broken = Vec::new();
    for path in pages {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = prose(&text).join("\n");
        let targets = lines.split("](").skip(1).filter_map(|rest| rest.split([')', ' ', '\n']).next());
        for target in targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:")) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let to = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let is_there = to.exists()
                && (heading.is_empty() || {
                    let text = std::fs::read_to_string(&to).unwrap_or_default();
                    prose(&text).iter().any(|line| line.starts_with('#') && anchor(line) == heading)
                });
            if !is_there {
                broken.push(format!("{}: {target}", path.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn paragraphs_and_table_cells_of_pages_are_short() {
    let mut long = Vec::new();
    for path in guides() {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = prose(&text);
        let mut length = 0;
        for line in &lines {
            let text = line.trim_start();
            let number = text.split_once(". ").map(|(number, _)| number);
            let is_item = text.starts_with("- ") || number.is_some_and(|number| number.parse::<u8>().is_ok());
            let is_text = !text.is_empty() && !text.starts_with('|');
            length =
                if is_text && !is_item { length + line.len() } else { line.len() * usize::from(is_text) };
            if length > 6 * LINE {
                long.push(format!("{}: ends in {line}", path.display()));
            }
        }
        let cells = lines.iter().filter(|line| line.starts_with('|')).flat_map(|line| line.split(" | "));
        long.extend(
            cells.filter(|cell| cell.len() > 2 * CELL_LINE).map(|cell| format!("{}: {cell}", path.display())),
        );
    }
    assert!(long.is_empty(), "{long:#?}");
}
