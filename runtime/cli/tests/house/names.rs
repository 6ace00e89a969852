//! A public type has a name that no other one has.

use super::{assert_none, is_product, sources};
use std::collections::BTreeMap;

/// Words that meant many things once: no two types of any visibility may have one of them as their name.
const OVERLOADED: &[&str] =
    &["Access", "HandOff", "Line", "Link", "Load", "Pool", "Role", "Running", "Step", "Way"];

/// Names that more than one type has, each with the reason.
const HOMONYMS: &[(&str, &str)] = &[
    ("Action", "the two machines of the scheduler have one form; it is written with its module"),
    ("Error", "each crate has one; it is written with its crate or module"),
    ("Event", "the two machines of the scheduler have one form; it is written with its module"),
    ("Instance", "the two machines of the scheduler each describe one; it is written with its module"),
    ("Result", "each crate has one; it is written with its crate or module"),
];

/// The visibility and the name of the type that a line declares, if it declares one.
fn declared_type(line: &str) -> Option<(bool, &str)> {
    let line = line.trim_start();
    let (public, rest) = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with(' ') => (true, rest),
        Some(rest) => (false, rest.strip_prefix('(')?.split_once(')')?.1),
        None => (false, line),
    };
    let rest = rest.trim_start();
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (keyword, rest) = rest.split_once(' ')?;
    // without `pub`, `type` is an associated type more often than not
    let is_type = matches!(keyword, "struct" | "enum" | "union" | "trait") || keyword == "type" && public;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (is_type && end > 0).then(|| (public, &rest[..end]))
}

/// Where each name stands that two public types have, or two types of any visibility if it is overloaded.
fn homonyms(sources: &[(String, String)]) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in sources {
        for (i, line) in text.lines().enumerate() {
            let Some((public, name)) = declared_type(line) else { continue };
            if public || OVERLOADED.contains(&name) {
                found.entry(name.to_owned()).or_default().push(format!("{path}:{}", i + 1));
            }
        }
    }
    found.retain(|_, places| places.len() > 1);
    found
}

#[test]
fn a_public_type_has_a_name_of_its_own() {
    let sources: Vec<_> = sources().into_iter().filter(|(path, _)| is_product(path)).collect();
    let homonyms = homonyms(&sources);
    let listed = |name: &str| HOMONYMS.iter().any(|(known, reason)| *known == name && !reason.is_empty());
    let mut errors: Vec<String> = homonyms
        .iter()
        .filter(|(name, _)| !listed(name))
        .map(|(name, places)| format!("{name} is declared in {}: rename all but one", places.join(", ")))
        .collect();
    let stale = HOMONYMS.iter().filter(|(known, _)| !homonyms.contains_key(*known));
    errors.extend(stale.map(|(known, _)| format!("{known} is listed in HOMONYMS and is declared once")));
    assert_none(&errors, "names that mean more than one thing");
}

#[test]
fn homonyms_are_seen() {
    for (line, declared) in [
        ("pub struct Block<T> {", Some((true, "Block"))),
        ("    pub unsafe trait Pod: Copy {}", Some((true, "Pod"))),
        ("pub type Bytes = Vec<u8>;", Some((true, "Bytes"))),
        ("pub(in crate::kv) enum Tier {", Some((false, "Tier"))),
        ("struct Unit;", Some((false, "Unit"))),
        ("    type Item = u8;", None),
        ("// pub struct Old;", None),
        ("pub fn structure() {", None),
        ("use enum_map::EnumMap;", None),
    ] {
        assert_eq!(declared_type(line), declared, "{line}");
    }
    let sources = |texts: &[&str]| -> Vec<(String, String)> {
        texts.iter().enumerate().map(|(i, text)| (format!("{i}.rs"), (*text).to_owned())).collect()
    };
    let nested = "mod inner {\n    pub enum Block {\n    }\n}\n";
    let found = homonyms(&sources(&["pub struct Block;\n", nested]));
    assert_eq!(found["Block"], ["0.rs:1", "1.rs:2"]);
    assert!(
        homonyms(&sources(&["pub struct Block;\n", "pub(crate) struct Block;\nstruct Block;\n"])).is_empty()
    );
    assert_eq!(homonyms(&sources(&["struct Way;\n", "pub(crate) enum Way {\n"])).len(), 1);
}
