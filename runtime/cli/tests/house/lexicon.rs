//! Phrases that comments, messages, scripts and pages no longer use, and the length of doc summaries.
//!
//! `GONE` pairs each phrase with its replacement. Files that still hold some are in tables that only shrink.

use super::shrink::differences;
use super::{assert_none, root};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Phrases that only this tree used, each with the term to use.
const GONE: &[(&str, &str)] = &[
    ("anybody", "name the actor"),
    ("at its word", "name the claim"),
    ("at their word", "by datasheet"),
    ("backend of others", "plug-in, third-party backend"),
    ("backends of others", "plug-ins, third-party backends"),
    ("by so many", "by N"),
    ("engine of others", "external engine"),
    ("engines of others", "external engines"),
    ("in vain", "unsuccessfully"),
    ("is asked as", "is called"),
    ("is asked for", "is requested, is required"),
    ("is no report to publish", "partial run: not publishable"),
    ("is not told", "is unknown"),
    ("is not told from", "within model error of"),
    ("kv that was there", "prefix-cache hits"),
    ("lets go of", "releases"),
    ("nobody", "no process, no client, none"),
    ("not told", "unknown"),
    ("of it used", "busy rent"),
    ("of others that attend", "lenders"),
    ("on its way", "in flight"),
    ("on their way", "in flight"),
    ("so many", "this many, N"),
    ("somebody", "name the actor"),
    ("those who", "name the actors"),
    ("told from", "distinguished from"),
    ("under way", "in flight, in progress"),
    ("was asked for", "was requested"),
    ("were asked for", "were requested"),
    ("what became of", "the outcome of"),
    ("what came of", "the outcome of"),
    ("what completes", "completions"),
    ("what is wrong with", "the fault of"),
    ("whoever", "every caller that"),
    ("whom", "name the actor"),
];

/// Directories and pages that have not been revised yet.
const UNREVISED: &[&str] = &[];

/// Number of phrases that are gone elsewhere, by file.
const LEFT: &[(&str, usize)] = &[];

/// Maximum characters of the first sentence of a doc comment.
const SUMMARY_MAX: usize = 200;

/// Number of longer first sentences, by crate directory.
const LONG_SUMMARIES: &[(&str, usize)] = &[];

/// Files in which phrases are looked for, by the end of their names.
const ENDS: &[&str] = &[".rs", ".md", ".sh", ".py", ".toml", ".yaml", ".yml"];

/// Returns all files with one of these ends, as (path from the root, text).
fn files(ends: &[&str]) -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut directories: Vec<PathBuf> = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a readable directory") {
            let path = entry.expect("a readable entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_symlink() || name.starts_with('.') || ["target", "corpus", "shared"].contains(&&*name)
            {
                continue;
            }
            if path.is_dir() {
                directories.push(path);
            } else if ends.iter().any(|end| name.ends_with(end))
                && let Ok(text) = std::fs::read_to_string(&path)
            {
                found.push((relative(&path, &root), text));
            }
        }
    }
    found.sort();
    found
}

fn is_unrevised(path: &str) -> bool {
    UNREVISED.iter().any(|known| path.starts_with(known))
}

fn relative(path: &Path, root: &Path) -> String {
    path.strip_prefix(root).expect("under the root").to_string_lossy().into_owned()
}

/// Returns the comment and the string literals of a line of Rust, in lower case.
fn prose(line: &str) -> String {
    let mut found = String::new();
    let mut in_text = false;
    let mut chars = line.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' if in_text => drop(chars.next()),
            '\'' if !in_text && line[at..].starts_with("'\"'") => drop((chars.next(), chars.next())),
            '"' => {
                in_text = !in_text;
                found.push('\n');
            }
            '/' if !in_text && line[at..].starts_with("//") => {
                found.push_str(&line[at..]);
                break;
            }
            _ if in_text => found.push(char),
            _ => {}
        }
    }
    found.to_lowercase()
}

/// Whether `text` has the phrase as whole words.
fn has_phrase(text: &str, phrase: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    text.match_indices(phrase)
        .any(|(at, _)| !text[..at].ends_with(joins) && !text[at + phrase.len()..].starts_with(joins))
}

#[test]
fn phrases_that_are_gone_do_not_come_back() {
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    let mut places = Vec::new();
    for (path, text) in files(ENDS) {
        let is_exempt =
            UNREVISED.iter().any(|known| path.starts_with(known)) || path.ends_with("/lexicon.rs");
        if is_exempt {
            continue;
        }
        for (at, line) in text.lines().enumerate() {
            let line = if path.ends_with(".rs") { prose(line) } else { line.to_lowercase() };
            for (phrase, instead) in GONE.iter().filter(|(phrase, _)| has_phrase(&line, phrase)) {
                *found.entry(path.clone()).or_default() += 1;
                places.push(format!("{path}:{}: '{phrase}'; write: {instead}", at + 1));
            }
        }
    }
    let mut errors = differences(&found, LEFT, "LEFT", "use the term of shared/style.md");
    if !errors.is_empty() {
        errors.extend(places);
    }
    assert_none(&errors, "phrases that are gone");
    assert!(GONE.is_sorted() && GONE.iter().all(|(phrase, _)| *phrase == phrase.to_lowercase()), "GONE");
}

#[test]
fn phrases_are_found_in_prose_alone() {
    assert_eq!(prose("let a = \"on its way\"; // Nobody"), "\non its way\n// nobody");
    assert_eq!(prose("nobody('\"', \"a\\\"b\")"), "\nab\n");
    assert!(has_phrase("kv on its way.", "on its way") && !has_phrase("nobody_waits", "nobody"));
}

/// Returns the first sentence of each doc comment, joined to one line.
fn summaries(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut was_doc = false;
    let mut is_open = false;
    for line in text.lines().map(str::trim) {
        let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        match doc.map(str::trim) {
            Some(words) if !was_doc => {
                found.push(words.to_owned());
                is_open = true;
            }
            Some(words) if is_open && !words.is_empty() && !words.starts_with("- ") => {
                let summary = found.last_mut().expect("it is open");
                *summary = format!("{summary} {words}");
            }
            Some(_) => is_open = false,
            None => {}
        }
        was_doc = doc.is_some();
    }
    found.iter().map(|whole| whole.split(". ").next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn doc_summaries_are_short() {
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    let mut places = Vec::new();
    for (path, text) in files(&[".rs"]).iter().filter(|(path, _)| !is_unrevised(path)) {
        for summary in summaries(text).iter().filter(|summary| summary.chars().count() > SUMMARY_MAX) {
            let parts: Vec<&str> = path.split('/').take(2).collect();
            *found.entry(parts.join("/")).or_default() += 1;
            places.push(format!("{path}: {summary}"));
        }
    }
    let mut errors = differences(&found, LONG_SUMMARIES, "LONG_SUMMARIES", "begin with one short sentence");
    if !errors.is_empty() {
        errors.extend(places);
    }
    assert_none(&errors, "long summaries");
    assert_eq!(summaries("/// A. B.\n/// C\n\n//! D\n//! E.\n"), ["A", "D E."]);
}
