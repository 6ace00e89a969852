//! Limits the amount of product code of each crate: a table of budgets that only fall, unless a commit
//! argues.

use super::{ROOMS, assert_none, is_product, sources};
use std::collections::BTreeMap;

/// Lines of product code of each crate at most, without comments, blank lines and tests.
const LINES: &[(&str, usize)] = &[
    ("backends/cpu", 8235),
    ("backends/cuda", 3582),
    ("backends/discover", 1718),
    ("backends/opencl", 1162),
    ("backends/plugin", 1255),
    ("backends/remote", 2085),
    ("backends/simulated", 2442),
    ("backends/wgpu", 2921),
    ("backends/wire", 6469),
    ("hal", 6112),
    ("hwtests", 12_550),
    ("runtime", 44_170),
    ("runtime/cli", 17_645),
    ("runtime/engines", 3125),
    ("runtime/epp", 1555),
    ("runtime/fuzz", 1195),
    ("runtime/planner", 1236),
    ("runtime/report", 885),
    ("runtime/sim", 8406),
    ("scheduler", 16_791),
];

/// One in this many removed lines may grow again before the budget must fall.
const SLACK: usize = 50;

fn code_lines(text: &str) -> usize {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = product.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

/// The directory of the crate that a file belongs to: the longest one that leads to it.
fn crate_of(path: &str) -> Option<&'static str> {
    let directories = ROOMS.iter().map(|room| room.directory);
    let leads = |directory: &&str| path.strip_prefix(*directory).is_some_and(|rest| rest.starts_with('/'));
    directories.filter(leads).max_by_key(|directory| directory.len())
}

/// The fault of a crate's number of lines.
fn complaint(directory: &str, lines: usize, budget: usize) -> Option<String> {
    let advice = if lines > budget {
        "take out what it replaces, or raise the budget in a commit whose body says what the lines bring"
    } else if lines + budget / SLACK < budget {
        "lower the budget, so that it cannot grow back unnoticed"
    } else {
        return None;
    };
    Some(format!("{directory}: {lines} lines of code, and LINES has {budget}: {advice}"))
}

#[test]
fn code_grows_only_with_an_argument() {
    let mut found: BTreeMap<&str, usize> = ROOMS.iter().map(|room| (room.directory, 0)).collect();
    for (path, text) in sources() {
        if let Some(directory) = crate_of(&path).filter(|_| is_product(&path)) {
            *found.entry(directory).or_default() += code_lines(&text);
        }
    }
    let budget =
        |directory: &str| LINES.iter().find(|(of, _)| *of == directory).map_or(0, |(_, lines)| *lines);
    let errors = found.iter().filter_map(|(of, lines)| complaint(of, *lines, budget(of)));
    assert_none(&errors.collect::<Vec<_>>(), "sizes");
}

#[test]
fn growth_and_unclaimed_room_are_seen() {
    assert_eq!(code_lines("//! a\n\nfn f() {\n    // b\n}\n#[cfg(test)]\nmod tests {\nfn g() {}\n}\n"), 2);
    assert_eq!(
        (crate_of("runtime/sim/src/a.rs"), crate_of("runtime/src/b.rs")),
        (Some("runtime/sim"), Some("runtime"))
    );
    assert!(complaint("hal", 101, 100).is_some_and(|why| why.contains("raise")));
    assert!(complaint("hal", 97, 100).is_some_and(|why| why.contains("lower")));
    assert_eq!((complaint("hal", 100, 100), complaint("hal", 98, 100)), (None, None));
}
