//! Limits the amount of unsafe code of each crate: a table that changes only together with an argument.

use super::{assert_none, sources};
use std::collections::BTreeMap;

/// The unsafe blocks, functions, traits, implementations and foreign interfaces of each crate that has any,
/// its tests included. All other crates have none.
const UNSAFE: &[(&str, usize)] = &[
    ("backends/cpu", 761),
    ("backends/cuda", 110),
    ("backends/opencl", 8),
    ("backends/plugin", 46),
    ("backends/wgpu", 5),
    ("backends/wire", 91),
];

/// Texts that follow the keyword; elsewhere it is a part of a name or of a text.
const BEGINNINGS: &[&str] = &["{", "fn ", "impl", "extern", "trait "];

/// The unsafe items that a source file declares, comments apart.
fn unsafe_items(text: &str) -> usize {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let of_line = |line: &str| {
        let words = line.match_indices("unsafe");
        let begins = words.filter(|(at, word)| {
            let before = line[..*at].chars().next_back();
            let rest = &line[at + word.len()..];
            let is_word = before.is_none_or(|c| !c.is_alphanumeric() && c != '_');
            let rest = rest.strip_prefix(' ').or_else(|| rest.starts_with('(').then_some("{"));
            is_word && rest.is_some_and(|rest| BEGINNINGS.iter().any(|begins| rest.starts_with(begins)))
        });
        begins.count()
    };
    code.map(of_line).sum()
}

/// The counts by crate, with a message for each that the table does not have.
fn differences(found: &BTreeMap<String, usize>, table: &[(&str, usize)]) -> Vec<String> {
    let known =
        |directory: &str| table.iter().find(|(of, _)| *of == directory).map_or(0, |(_, count)| *count);
    let listed = table.iter().map(|(directory, _)| (*directory).to_owned());
    let directories: std::collections::BTreeSet<String> = found.keys().cloned().chain(listed).collect();
    let message = |directory: String| {
        let (count, known) = (found.get(&directory).copied().unwrap_or(0), known(&directory));
        let what = match count.cmp(&known) {
            std::cmp::Ordering::Equal => return None,
            std::cmp::Ordering::Greater => {
                "do without, or raise the number in a commit whose body says why there is no safe way"
            }
            std::cmp::Ordering::Less => "lower the number, so that it cannot grow back unnoticed",
        };
        Some(format!("{directory}: {count} unsafe items, and UNSAFE has {known}: {what}"))
    };
    directories.into_iter().filter_map(message).collect()
}

#[test]
fn unsafe_code_grows_only_with_an_argument() {
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for (path, text) in sources() {
        let count = unsafe_items(&text);
        if count > 0 && !path.starts_with("runtime/cli/tests/house") {
            let directory: Vec<&str> = path.split('/').take(2).collect();
            *found.entry(directory.join("/")).or_default() += count;
        }
    }
    assert_none(
        &differences(&found, UNSAFE),
        "unsafe code that UNSAFE in house/unsafe_code.rs does not count",
    );
}

#[test]
fn unsafe_items_are_counted_and_other_words_are_not() {
    let text = "unsafe { f() }; let unsafe_since = 1; // unsafe { g() }\n\
        pub unsafe fn f() {}\nunsafe impl Send for X {}\nlet x = \"--unsafe-no-fsync\";\n\
        unsafe extern \"C\" {}\n#[unsafe(no_mangle)]\nunsafe impl<T> Y for T {}\n#![deny(unsafe_code)]";
    assert_eq!(unsafe_items(text), 6);
    let found = BTreeMap::from([("a".to_owned(), 3), ("b".to_owned(), 1), ("new".to_owned(), 1)]);
    let told = differences(&found, &[("a", 2), ("b", 2), ("gone", 1)]);
    assert_eq!(told.len(), 4, "{told:?}");
    assert!(told[0].contains("no safe way") && told[1].contains("lower the number"), "{told:?}");
}
