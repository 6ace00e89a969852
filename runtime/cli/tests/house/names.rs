//! A type has a name that no other one has, at any visibility.

use super::{assert_none, is_product, shrink, sources};
use std::collections::BTreeMap;

/// Names that more than one type has, each with the reason.
const HOMONYMS: &[(&str, &str)] = &[
    ("Action", "the machines of the scheduler have one form; it is written with its module"),
    ("Connector", "with and without TLS; a build has one of them"),
    ("EndSignals", "of Unix and of other systems; a build has one of them"),
    ("Error", "each crate has one; it is written with its crate or module"),
    ("Event", "the machines of the scheduler have one form; it is written with its module"),
    ("Instance", "the two machines of the scheduler each describe one; it is written with its module"),
    ("Result", "each crate has one; it is written with its crate or module"),
];

/// Number of types for each other name that several types have. At most one of them is public.
const REPEATED: &[(&str, usize)] = &[
    ("Active", 2),
    ("Answer", 3),
    ("Arrival", 2),
    ("Blocks", 2),
    ("Caller", 2),
    ("Candidate", 3),
    ("Change", 2),
    ("ChatMessage", 2),
    ("Class", 2),
    ("Conversation", 2),
    ("Decoder", 2),
    ("Demand", 2),
    ("Drawn", 3),
    ("DrawnToken", 2),
    ("End", 3),
    ("Endpoint", 2),
    ("Engine", 3),
    ("Entry", 10),
    ("Evicted", 2),
    ("Fault", 2),
    ("Fields", 2),
    ("File", 4),
    ("Head", 2),
    ("Held", 6),
    ("Histogram", 2),
    ("Hits", 2),
    ("Holder", 3),
    ("Incoming", 2),
    ("InstanceKv", 2),
    ("Job", 4),
    ("Keeper", 2),
    ("Kept", 2),
    ("Kind", 2),
    ("Known", 5),
    ("Kv", 2),
    ("Landing", 2),
    ("Lease", 2),
    ("Lengths", 4),
    ("Member", 3),
    ("Members", 2),
    ("Message", 2),
    ("Model", 2),
    ("Need", 2),
    ("Outcome", 3),
    ("Parameters", 2),
    ("Part", 2),
    ("Phase", 3),
    ("Piece", 2),
    ("Place", 2),
    ("Plan", 2),
    ("Probe", 2),
    ("Rebalance", 2),
    ("Refusal", 2),
    ("Replay", 2),
    ("Samples", 2),
    ("Scratch", 2),
    ("Seat", 5),
    ("Segment", 2),
    ("Shared", 2),
    ("Spread", 2),
    ("State", 5),
    ("Store", 2),
    ("Stream", 2),
    ("Table", 3),
    ("Target", 2),
    ("Text", 2),
    ("Time", 2),
    ("Token", 2),
    ("Watch", 3),
    ("Watched", 2),
    ("Watching", 2),
    ("Window", 2),
    ("Work", 2),
    ("Worker", 2),
    ("World", 3),
];

/// The visibility and the name of the type that a line declares, if it declares one.
fn declared_type(line: &str) -> Option<(bool, &str)> {
    // a `type` inside of something is an associated one, unless it is public
    let is_indented = line.starts_with(' ');
    let line = line.trim_start();
    let (public, rest) = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with(' ') => (true, rest),
        Some(rest) => (false, rest.strip_prefix('(')?.split_once(')')?.1),
        None => (false, line),
    };
    let rest = rest.trim_start();
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (keyword, rest) = rest.split_once(' ')?;
    let is_type = matches!(keyword, "struct" | "enum" | "union" | "trait")
        || keyword == "type" && (public || !is_indented);
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (is_type && end > 0).then(|| (public, &rest[..end]))
}

/// Where the types of a name are declared.
#[derive(Default)]
struct Places {
    /// The public ones.
    public: Vec<String>,
    all: Vec<String>,
}

/// The names of all types outside tests.
fn declared_types(sources: &[(String, String)]) -> BTreeMap<String, Places> {
    let mut found: BTreeMap<String, Places> = BTreeMap::new();
    for (path, text) in sources {
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for (i, line) in product.lines().enumerate() {
            let Some((public, name)) = declared_type(line) else { continue };
            let places = found.entry(name.to_owned()).or_default();
            let place = format!("{path}:{}", i + 1);
            if public {
                places.public.push(place.clone());
            }
            places.all.push(place);
        }
    }
    found
}

fn product() -> Vec<(String, String)> {
    sources().into_iter().filter(|(path, _)| is_product(path)).collect()
}

fn is_homonym(name: &str) -> bool {
    HOMONYMS.iter().any(|(known, reason)| *known == name && !reason.is_empty())
}

#[test]
fn a_public_type_has_a_name_of_its_own() {
    let types = declared_types(&product());
    let repeated = types.iter().filter(|(name, places)| places.public.len() > 1 && !is_homonym(name));
    let message = |(name, places): (&String, &Places)| {
        format!("{name} is declared in {}: rename all but one", places.public.join(", "))
    };
    let mut errors: Vec<String> = repeated.map(message).collect();
    let stale = HOMONYMS.iter().filter(|(known, _)| types.get(*known).is_none_or(|it| it.all.len() < 2));
    errors.extend(stale.map(|(known, _)| format!("{known} is listed in HOMONYMS and is declared once")));
    assert_none(&errors, "names that mean more than one thing");
}

#[test]
fn a_private_type_has_a_name_of_its_own_too() {
    let mut types = declared_types(&product());
    types.retain(|name, places| places.all.len() > 1 && !is_homonym(name));
    let counts = types.iter().map(|(name, places)| (name.clone(), places.all.len())).collect();
    let mut errors = shrink::differences(&counts, REPEATED, "REPEATED", "name it by what it is");
    for error in &mut errors {
        if let Some(places) = error.split(':').next().and_then(|name| types.get(name)) {
            *error += &format!(" ({})", places.all.join(", "));
        }
    }
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
        ("type Page = [u8; 16];", Some((false, "Page"))),
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
    let tests = "struct Block;\n#[cfg(test)]\nmod tests {\n    struct Block;\n}\n";
    let found = declared_types(&sources(&["pub struct Block;\n", nested, tests]));
    assert_eq!(found["Block"].public, ["0.rs:1", "1.rs:2"]);
    assert_eq!(found["Block"].all, ["0.rs:1", "1.rs:2", "2.rs:1"]);
}
