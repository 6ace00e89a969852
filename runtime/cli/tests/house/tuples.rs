//! No tuple patterns in parameters: a pair that is passed together is a struct with names.

use super::{assert_none, is_product, shrink, sources};
use std::collections::BTreeMap;

/// Functions with such a parameter, by file.
const TUPLES: &[(&str, usize)] = &[
    ("runtime/sim/src/fleet_file/attending.rs", 1),
    ("runtime/sim/src/fleet_file/resolve.rs", 1),
    ("runtime/sim/src/fleet_file/spare.rs", 1),
    ("runtime/sim/src/import/aiconfigurator.rs", 1),
    ("runtime/sim/src/simulate/engine/keys.rs", 1),
    ("runtime/sim/src/simulate/network.rs", 1),
    ("runtime/sim/src/simulate/results.rs", 1),
    ("runtime/src/api/generate.rs", 3),
    ("runtime/src/api/kv.rs", 3),
    ("runtime/src/api/routes.rs", 1),
    ("runtime/src/api/tally.rs", 1),
    ("runtime/src/engine/calibrate.rs", 1),
    ("runtime/src/engine/instance.rs", 2),
    ("runtime/src/engine/leaving.rs", 4),
    ("runtime/src/engine/losses.rs", 1),
    ("runtime/src/engine/members.rs", 2),
    ("runtime/src/engine/pages.rs", 4),
    ("runtime/src/engine/tiers.rs", 1),
    ("runtime/src/engine/watch.rs", 1),
    ("runtime/src/events/replay.rs", 1),
    ("runtime/src/fleet/ledger.rs", 2),
    ("runtime/src/model/apart.rs", 4),
    ("runtime/src/model/attention.rs", 1),
    ("runtime/src/model/divided.rs", 3),
    ("runtime/src/model/exchange.rs", 1),
    ("runtime/src/model/expanded.rs", 1),
    ("runtime/src/model/graph.rs", 1),
    ("runtime/src/model/held.rs", 1),
    ("runtime/src/model/in_place.rs", 1),
    ("runtime/src/model/made.rs", 2),
    ("runtime/src/model/names.rs", 1),
    ("runtime/src/model/oracle.rs", 1),
    ("runtime/src/model/peers.rs", 1),
    ("runtime/src/model/place.rs", 4),
    ("runtime/src/model/repack.rs", 1),
    ("runtime/src/model/schemes.rs", 9),
    ("runtime/src/trace.rs", 2),
    ("scheduler/src/batch/blocks.rs", 2),
    ("scheduler/src/batch/refusal.rs", 1),
    ("scheduler/src/batch/rows.rs", 1),
    ("scheduler/src/cost/counted.rs", 1),
    ("scheduler/src/cost/learn.rs", 1),
    ("scheduler/src/cost/lockstep.rs", 3),
    ("scheduler/src/cost/operations.rs", 1),
    ("scheduler/src/cost/partition.rs", 1),
    ("scheduler/src/cost/pipeline.rs", 1),
    ("scheduler/src/cost/spare.rs", 1),
    ("scheduler/src/fleet/landing.rs", 1),
    ("scheduler/src/fleet/learn.rs", 1),
    ("scheduler/src/fleet/mod.rs", 1),
    ("scheduler/src/fleet/offers.rs", 1),
    ("scheduler/src/fleet/place/memory.rs", 1),
    ("scheduler/src/fleet/place/ranks.rs", 1),
    ("scheduler/src/layers/attention.rs", 3),
    ("scheduler/src/layers/experts.rs", 2),
    ("scheduler/src/layers/mod.rs", 1),
    ("scheduler/src/layers/sizes.rs", 1),
    ("scheduler/src/plan/candidates.rs", 4),
    ("scheduler/src/plan/offered.rs", 1),
];

/// Returns `text` without comments and without its module of unit tests.
fn code(text: &str) -> String {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    product.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the length of the text before the bracket that closes the one at the start of `code`.
fn to_closing(code: &str, open: char, close: char) -> Option<usize> {
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in code.char_indices() {
        if c == open {
            depth += 1;
        } else if c == close && !(close == '>' && before == '-') {
            depth -= 1;
            if depth == 0 {
                return Some(at);
            }
        }
        before = c;
    }
    None
}

/// Returns the parameters of the function whose name and all that follows is `code`.
fn parameters(code: &str) -> Option<Vec<&str>> {
    let name = code.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    let mut rest = &code[name..];
    if rest.starts_with('<') {
        rest = &rest[to_closing(rest, '<', '>')? + 1..];
    }
    let list =
        rest.starts_with('(').then(|| to_closing(rest, '(', ')').map(|end| &rest[1..end])).flatten()?;
    let (mut found, mut depth, mut from) = (Vec::new(), 0i32, 0);
    for (at, c) in list.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if !list[..at].ends_with('-') => depth -= 1,
            ',' if depth == 0 => {
                found.push(list[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(list[from..].trim());
    Some(found)
}

/// Returns the names of the functions that have a parameter with a tuple pattern.
fn with_tuples(text: &str) -> Vec<String> {
    let code = code(text);
    let functions = code.match_indices("fn ").filter(|(at, _)| {
        code[..*at].chars().next_back().is_none_or(|before| !before.is_alphanumeric() && before != '_')
    });
    let named = functions.filter_map(|(at, keyword)| {
        let function = &code[at + keyword.len()..];
        let is_tuple = |parameter: &&str| {
            let pattern = parameter.strip_prefix('&').unwrap_or(parameter);
            let end = to_closing(pattern, '(', ')').filter(|_| pattern.starts_with('('));
            end.is_some_and(|end| pattern[end + 1..].trim_start().starts_with(':'))
        };
        let name = function.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        parameters(function)?.iter().any(is_tuple).then(|| name.to_owned())
    });
    named.collect()
}

#[test]
fn parameters_have_names() {
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    let mut names = Vec::new();
    for (path, text) in sources().iter().filter(|(path, _)| is_product(path)) {
        let functions = with_tuples(text);
        if !functions.is_empty() {
            names.push(format!("{path}: {}", functions.join(", ")));
            found.insert(path.clone(), functions.len());
        }
    }
    let advice = "make the tuple a struct with names, or parameters";
    let mut errors = shrink::differences(&found, TUPLES, "TUPLES", advice);
    // says which functions of the files they are about
    let about: Vec<String> = names.into_iter().filter(|name| mentions(&errors, name)).collect();
    errors.extend(about);
    assert_none(&errors, "tuple patterns in parameters");
}

/// Whether one of the errors is about the file of `functions`.
fn mentions(errors: &[String], functions: &str) -> bool {
    let path = functions.split(':').next().unwrap_or_default();
    errors.iter().any(|error| error.split(':').next() == Some(path))
}

#[test]
fn tuple_patterns_are_seen() {
    let text = "fn plain(a: (u8, u8), [b, c]: [u8; 2]) -> (u8, u8) {\n\
                pub(crate) async fn pair<F: Fn((u8, u8)) -> u8>(\n    &self,\n    (first, end): (u8, u8),\n) {\n\
                fn of(&(key, value): &(u8, u8), f: impl Fn(u8) -> u8) {}\n\
                // fn comment((a, b): (u8, u8)) {}\n\
                const fn last<const N: usize>(x: [u8; N], (a, b): (Vec<u8>, u8)) {}\n\
                type Callback = fn((u8, u8)) -> u8;\n\
                let closure = |(a, b): (u8, u8)| a;\n\
                #[cfg(test)]\nmod tests {\nfn test((a, b): (u8, u8)) {}\n}\n";
    assert_eq!(with_tuples(text), ["pair", "of", "last"]);
}
