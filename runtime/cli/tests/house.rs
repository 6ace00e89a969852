//! The rules of the house: allowed imports, and banned content of source files.

mod lexicon;
mod names;
mod prints;
mod release;
mod results;
mod shrink;
mod size;
mod tuples;
mod unsafe_code;

use cargo_metadata::camino::Utf8Path;
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A crate's place and what it may import. A dev-dependency is free.
struct Room {
    name: &'static str,
    directory: &'static str,
    /// Crates of this workspace.
    rooms: &'static [&'static str],
    /// Crates from outside; none: any.
    outside: Option<&'static [&'static str]>,
}

const HAL: &str = "mixfleet-hal";
const SCHEDULER: &str = "mixfleet-scheduler";
const SIM: &str = "mixfleet-sim";
const PLANNER: &str = "mixfleet-planner";
const REPORT: &str = "mixfleet-report";

const ROOMS: &[Room] = &[
    Room {
        name: HAL,
        directory: "hal",
        rooms: &[],
        outside: Some(&["bytemuck", "half", "schemars", "serde", "thiserror", "twox-hash"]),
    },
    Room {
        name: "mixfleet-cpu",
        directory: "backends/cpu",
        rooms: &[HAL],
        outside: Some(&["bytemuck", "half", "libc", "memmap2", "thiserror", "tracing"]),
    },
    Room {
        name: "mixfleet-opencl",
        directory: "backends/opencl",
        rooms: &[HAL],
        outside: Some(&["bytemuck", "half", "ocl", "thiserror", "tracing"]),
    },
    Room {
        name: "mixfleet-cuda",
        directory: "backends/cuda",
        rooms: &[HAL],
        outside: Some(&["cudarc", "libloading", "tracing", "twox-hash"]),
    },
    Room {
        name: "mixfleet-discover",
        directory: "backends/discover",
        rooms: &[HAL],
        outside: Some(&["hwloc2", "ibverbs", "serde", "tracing"]),
    },
    Room {
        name: "mixfleet-plugin",
        directory: "backends/plugin",
        rooms: &[HAL],
        outside: Some(&["libloading"]),
    },
    Room {
        name: "mixfleet-remote",
        directory: "backends/remote",
        rooms: &[HAL, "mixfleet-wire"],
        outside: Some(&["getrandom", "serde_json", "tracing"]),
    },
    Room {
        name: "mixfleet-simulated",
        directory: "backends/simulated",
        rooms: &[HAL, "mixfleet-cpu"],
        outside: Some(&["half", "memmap2", "tracing"]),
    },
    Room {
        name: "mixfleet-wgpu",
        directory: "backends/wgpu",
        rooms: &[HAL],
        outside: Some(&["bytemuck", "half", "pollster", "tracing", "twox-hash", "wgpu"]),
    },
    Room {
        name: "mixfleet-wire",
        directory: "backends/wire",
        rooms: &[HAL],
        outside: Some(&["getrandom", "ibverbs-sys", "libc", "memmap2", "rustls", "serde", "serde_json"]),
    },
    Room {
        name: SCHEDULER,
        directory: "scheduler",
        rooms: &[HAL],
        // microlp only with the feature of its name, which is off unless the planner asks for it
        outside: Some(&["hashbrown", "microlp", "serde", "thiserror", "twox-hash"]),
    },
    Room {
        name: SIM,
        directory: "runtime/sim",
        rooms: &[HAL, SCHEDULER],
        outside: Some(&[
            "csv",
            "flate2",
            "parquet",
            "schemars",
            "serde",
            "serde-saphyr",
            "serde_json",
            "thiserror",
            "toml",
            "zstd",
        ]),
    },
    Room {
        name: "mixfleet-engines",
        directory: "runtime/engines",
        rooms: &[HAL, SCHEDULER],
        outside: Some(&[
            "http-body-util",
            "hyper",
            "hyper-rustls",
            "hyper-util",
            "rmp-serde",
            "rustls",
            "rustls-native-certs",
            "serde",
            "serde_json",
            "tokio",
        ]),
    },
    Room {
        name: PLANNER,
        directory: "runtime/planner",
        rooms: &[HAL, SCHEDULER, SIM],
        outside: Some(&["thiserror"]),
    },
    Room { name: REPORT, directory: "runtime/report", rooms: &[HAL], outside: Some(&[]) },
    Room { name: "mixfleet-hwtests", directory: "hwtests", rooms: &[HAL, REPORT], outside: None },
    Room { name: "mixfleet-runtime", directory: "runtime", rooms: &[HAL, SCHEDULER], outside: None },
    Room {
        name: "mixfleet-epp",
        directory: "runtime/epp",
        rooms: &[HAL, SCHEDULER, "mixfleet-engines", "mixfleet-runtime"],
        outside: Some(&[
            "envoy-types",
            "futures-util",
            "k8s-openapi",
            "kube",
            "prost",
            "serde",
            "serde-saphyr",
            "serde_json",
            "tokio",
            "tonic",
            "tonic-build",
            "tonic-health",
            "tonic-prost",
            "tracing",
        ]),
    },
    Room {
        name: "mixfleet-fuzz",
        directory: "runtime/fuzz",
        rooms: &[
            HAL,
            SCHEDULER,
            "mixfleet-cpu",
            "mixfleet-hwtests",
            "mixfleet-remote",
            "mixfleet-runtime",
            SIM,
            "mixfleet-wire",
        ],
        outside: None,
    },
    Room {
        name: "mixfleet",
        directory: "runtime/cli",
        rooms: &[
            HAL,
            SCHEDULER,
            "mixfleet-cpu",
            "mixfleet-cuda",
            "mixfleet-discover",
            "mixfleet-engines",
            "mixfleet-epp",
            "mixfleet-opencl",
            "mixfleet-plugin",
            "mixfleet-remote",
            "mixfleet-simulated",
            "mixfleet-wgpu",
            "mixfleet-wire",
            "mixfleet-hwtests",
            "mixfleet-runtime",
            SIM,
            PLANNER,
            REPORT,
        ],
        outside: None,
    },
];

/// Modules of a crate that import each other, each group with the reason; all others import one way.
const CYCLES: &[(&str, &[&str], &str)] = &[
    (
        "runtime/cli/src",
        &["command_line", "epp", "fleet", "help", "serve", "settings", "shells"],
        "a fleet file fills in the whole command line and help rearranges it; serve, on whose server epp runs, prints settings",
    ),
    (
        "backends/cuda/src",
        &["device", "queue"],
        "a device opens queues; a queue holds what its device shares",
    ),
    ("backends/cuda/src", &["memory", "pinned"], "transfers pin host memory; pinned memory is transferred"),
    ("backends/cpu/src", &["pool", "queue"], "a queue gives jobs to threads, which write into its timeline"),
    (
        "backends/opencl/src",
        &["device", "kernels", "memory", "queue"],
        "a device opens queues and makes kernels and memory, which hold what the device shares",
    ),
    (
        "backends/wgpu/src",
        &["device", "queue"],
        "a device opens queues; a queue holds what its device shares",
    ),
    ("hwtests/src", &["experts", "oracle"], "the oracle has that of experts, whose products are its own"),
    (
        "runtime/cli/src",
        &["backends", "groups", "notation"],
        "backends open selectors in this notation, which begin with a backend's name",
    ),
    (
        "backends/remote/src",
        &["device", "queue"],
        "a device opens queues; a queue holds what its device shares",
    ),
    ("backends/wire/src", &["stream", "tls"], "a stream may have a TLS session, and TLS makes such streams"),
];

/// Texts that no source file may hold. Put together here, so that this file holds none of them.
const BANNED: &[&str] = &[
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("db", "g!("),
    concat!("FIX", "ME"),
    concat!("XX", "X:"),
    concat!("Rng", "Seed"),
];

/// What the scheduler, which decides from numbers alone, may not name.
const BANNED_IN_SCHEDULER: &[&str] = &[
    "std::time",
    "std::thread",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::sync::Mutex",
    "RandomState",
];

const LINES_MAX: usize = 600;

/// Files that read better long, each with the reason.
const LONG: &[(&str, &str)] = &[
    ("runtime/cli/tests/house.rs", "the rules, and what they list"),
    ("runtime/report/src/svg.rs", "one drawing of curves, at two widths"),
    ("runtime/src/gateway/mod.rs", "the gateway's state and what is asked of it"),
    ("runtime/src/metrics.rs", "the one list of metrics"),
    ("scheduler/src/batch/mod.rs", "the instance machine's state and events"),
    ("scheduler/src/batch/tests.rs", "one world that drives all of these tests"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace exists")
}

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .other_options(vec!["--offline".into()])
        .exec()
        .expect("cargo metadata runs")
}

/// Returns the violation if `from` may not import `to`.
fn edge_error(from: &str, to: &str) -> Option<String> {
    let Some(room) = ROOMS.iter().find(|room| room.name == from) else {
        return Some(format!("{from} has no row in ROOMS: say what it may import"));
    };
    let inside = to == "mixfleet" || to.starts_with("mixfleet-");
    let allowed = match room.outside {
        _ if inside => room.rooms.contains(&to),
        Some(outside) => outside.contains(&to),
        None => true,
    };
    (!allowed).then(|| format!("{from} may not import {to}"))
}

/// All lines of `text` that hold one of `words`.
fn find_words(text: &str, words: &[&str]) -> Vec<String> {
    let lines = text.lines().enumerate();
    let hits = lines.filter(|(_, line)| words.iter().any(|word| line.contains(word)));
    hits.map(|(i, line)| format!("{}: {}", i + 1, line.trim())).collect()
}

/// All Rust files of the repository, as (path from the root, text).
fn sources() -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a readable directory") {
            let path = entry.expect("a readable entry").path();
            // a link of a crate to a source that crates share
            if path.is_symlink() {
                continue;
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    directories.push(path);
                }
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(&path).expect("UTF-8 source");
                let path = path.strip_prefix(&root).expect("under the root");
                found.push((path.to_string_lossy().into_owned(), text));
            }
        }
    }
    found.sort();
    assert!(found.len() > ROOMS.len(), "the walk missed the sources");
    found
}

fn directory(package: &Package) -> String {
    let manifest = package.manifest_path.as_std_path().canonicalize().expect("the manifest exists");
    let directory = manifest.parent().expect("a manifest has a directory");
    directory.strip_prefix(root()).expect("under the root").to_string_lossy().into_owned()
}

/// The root files of a crate's library and binaries, with their text.
fn crate_roots(package: &Package) -> impl Iterator<Item = (&Utf8Path, String)> {
    let product = package.targets.iter().filter(|target| target.is_lib() || target.is_bin());
    product.map(|target| {
        let text = std::fs::read_to_string(&target.src_path).expect("a readable crate root");
        (&*target.src_path, text)
    })
}

fn assert_none(errors: &[String], what: &str) {
    assert!(errors.is_empty(), "{what}:\n  {}", errors.join("\n  "));
}

#[test]
fn every_import_edge_is_allowed() {
    let metadata = metadata();
    let mut errors = Vec::new();
    for package in &metadata.packages {
        let at_home = ROOMS.iter().any(|r| r.name == *package.name && r.directory == directory(package));
        if !at_home {
            errors.push(format!("{} in {} has no row in ROOMS", package.name, directory(package)));
        }
        let real = package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development);
        errors.extend(real.filter_map(|dependency| edge_error(&package.name, &dependency.name)));
    }
    assert_none(&errors, "import edges that the house does not have");
    assert_eq!(metadata.packages.len(), ROOMS.len(), "a row in ROOMS has no crate");
}

#[test]
fn forbidden_edges_are_seen() {
    for (from, to) in [
        (SCHEDULER, "tokio"),
        (SCHEDULER, "mixfleet-cpu"),
        (HAL, SCHEDULER),
        (HAL, "tokio"),
        ("mixfleet-cpu", "mixfleet-opencl"),
        ("mixfleet-cpu", "ocl"),
        ("mixfleet-hwtests", "mixfleet-cpu"),
        ("mixfleet-runtime", "mixfleet-wire"),
        ("mixfleet-runtime", "mixfleet-engines"),
        (REPORT, "mixfleet-hwtests"),
        (SIM, PLANNER),
        ("mixfleet-engines", "mixfleet-runtime"),
        ("mixfleet-runtime", "mixfleet"),
        ("mixfleet-new", HAL),
    ] {
        assert!(edge_error(from, to).is_some(), "{from} -> {to}");
    }
    assert_eq!(edge_error("mixfleet", "mixfleet-cpu"), None);
    assert_eq!(edge_error("mixfleet-opencl", "ocl"), None);
}

#[test]
fn every_crate_outside_backends_forbids_unsafe_code_and_all_inherit_the_lints() {
    let mut errors = Vec::new();
    for package in &metadata().packages {
        let manifest = std::fs::read_to_string(&package.manifest_path).expect("a readable manifest");
        let lints = manifest.split("[lints]").nth(1).is_some_and(|rest| {
            rest.lines().map(str::trim).find(|line| !line.is_empty()) == Some("workspace = true")
        });
        if !lints {
            errors.push(format!("{}: no [lints] workspace = true", package.name));
        }
        for (root, text) in crate_roots(package).filter(|_| !directory(package).starts_with("backends/")) {
            if !text.lines().any(|line| line == "#![forbid(unsafe_code)]") {
                errors.push(format!("{root}: no #![forbid(unsafe_code)]"));
            }
        }
    }
    assert_none(&errors, "crates without their lints");
}

#[test]
fn every_crate_is_linted_for_casts_that_lose_bits_or_a_sign() {
    const LINTS: &str =
        "warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)";
    let packages = metadata().packages;
    let roots = packages.iter().flat_map(crate_roots);
    let errors: Vec<String> = roots
        .filter(|(_, text)| !text.contains(LINTS))
        .map(|(root, _)| format!("{root}: no {LINTS}"))
        .collect();
    assert_none(&errors, "crates whose casts are not linted");
}

#[test]
fn no_source_file_holds_a_banned_word() {
    let mut errors = Vec::new();
    for (path, text) in sources() {
        errors.extend(find_words(&text, BANNED).into_iter().map(|hit| format!("{path}:{hit}")));
        if path.starts_with("scheduler/src/") {
            let hits = find_words(&text, BANNED_IN_SCHEDULER);
            errors.extend(hits.into_iter().map(|hit| format!("{path}:{hit}")));
        }
    }
    assert_none(&errors, "banned words");
}

#[test]
fn banned_words_are_seen() {
    let text = format!("fine\n  {}x)\nfine", BANNED[0]);
    assert_eq!(find_words(&text, BANNED), [format!("2: {}x)", BANNED[0])]);
    assert_eq!(find_words("let t = std::time::Instant::now();", BANNED_IN_SCHEDULER).len(), 1);
}

#[test]
fn properties_draw_the_same_cases_in_every_run() {
    for name in ["PROPTEST_RNG_SEED", "PROPTEST_DISABLE_FAILURE_PERSISTENCE"] {
        assert!(
            std::env::var_os(name).is_some(),
            "{name} is not set: .cargo/config.toml does, cargo reads it"
        );
    }
}

#[test]
fn long_files_are_listed_with_a_reason() {
    let sources = sources();
    let long: Vec<(&str, usize)> = sources
        .iter()
        .map(|(path, text)| (path.as_str(), text.lines().count()))
        .filter(|&(_, lines)| lines > LINES_MAX)
        .collect();
    let listed = |path: &str| LONG.iter().any(|(known, reason)| *known == path && !reason.is_empty());
    let mut errors: Vec<String> = long
        .iter()
        .filter(|(path, _)| !listed(path))
        .map(|(path, lines)| format!("{path}: {lines} lines; split it, or list it in LONG with a reason"))
        .collect();
    let stale = LONG.iter().filter(|(known, _)| !long.iter().any(|(path, _)| path == known));
    errors.extend(stale.map(|(known, _)| format!("{known} is listed in LONG and is not long")));
    assert_none(&errors, "long files");
}

/// The crate's source directory, and the top-level module there, of a file of a product.
fn module_of(path: &str) -> Option<(&str, &str)> {
    let (before, inside) = path.split_once("/src/")?;
    let directory = &path[..before.len() + "/src".len()];
    let module = inside.split('/').next()?.trim_end_matches(".rs");
    (is_product(path) && !matches!(module, "lib" | "main" | "bin")).then_some((directory, module))
}

/// The names of the crate's root that `text` imports by `crate::`, tests and comments apart.
fn imported(text: &str) -> BTreeSet<&str> {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let in_comment = |at: usize| product[..at].rsplit('\n').next().is_some_and(|line| line.contains("//"));
    let paths = product.match_indices("crate::").filter(|(at, _)| !in_comment(*at));
    paths.flat_map(|(at, found)| first_names(&product[at + found.len()..])).collect()
}

/// The first name of a path, or of each path in braces.
fn first_names(path: &str) -> Vec<&str> {
    let name = |path: &'_ str| path.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(path.len());
    let Some(list) = path.strip_prefix('{') else { return vec![&path[..name(path)]] };
    let (mut names, mut depth, mut begin) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        if depth == 0 && matches!(c, ',' | '}') {
            let path = list[begin..at].trim_start();
            names.push(&path[..name(path)]);
            begin = at + 1;
        }
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    names
}

/// Groups of top-level modules that import each other, by crate.
fn cycles(sources: &[(String, String)]) -> Vec<(String, Vec<String>)> {
    let mut edges: BTreeMap<&str, BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
    for (path, text) in sources {
        if let Some((directory, module)) = module_of(path) {
            edges.entry(directory).or_default().entry(module).or_default().extend(imported(text));
        }
    }
    let mut found = Vec::new();
    for (directory, edges) in edges {
        let reached = |from| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(module) = next.pop() {
                let fresh = edges.get(module).into_iter().flatten().filter(|to| **to != module);
                next.extend(fresh.filter(|to| edges.contains_key(**to) && reached.insert(**to)));
            }
            reached
        };
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            edges.keys().map(|&from| (from, reached(from))).collect();
        let mut seen = BTreeSet::new();
        for (&module, to) in &reached {
            let group: Vec<String> =
                to.iter().filter(|to| reached[**to].contains(module)).map(|to| (*to).into()).collect();
            if group.len() > 1 && seen.insert(group.clone()) {
                found.push((directory.to_owned(), group));
            }
        }
    }
    found
}

#[test]
fn modules_of_a_crate_import_one_way() {
    let found = cycles(&sources());
    let is_listed = |(directory, group): &(String, Vec<String>)| {
        CYCLES.iter().any(|(at, modules, why)| directory == at && group == modules && !why.is_empty())
    };
    let errors: Vec<String> = found
        .iter()
        .filter(|group| !is_listed(group))
        .map(|(at, group)| format!("{at}: {group:?}"))
        .collect();
    assert_none(&errors, "modules that import each other: mend them, or list them in CYCLES with a reason");
    assert_eq!(found.len(), CYCLES.len(), "a cycle in CYCLES is gone: take it out");
}

#[test]
fn cycles_are_seen() {
    let file = |path: &str, text: &str| (path.to_string(), text.to_string());
    let sources = [
        file("x/src/a.rs", "use crate::b::B;\n"),
        file("x/src/b/mod.rs", "use super::c;\n"),
        file("x/src/b/c.rs", "fn f() -> crate::d::D {}\n"),
        file("x/src/d.rs", "use crate::a::A;\n"),
        file("x/src/e.rs", "use crate::a::A;\n#[cfg(test)]\nmod tests {\n    use crate::f::F;\n}\n"),
        file("x/src/f.rs", "// crate::a\nuse crate::e::E;\n"),
        file("x/src/g.rs", "use crate::{\n    e::{E, g},\n    h,\n};\n"),
        file("x/src/h.rs", "use crate::{f, g::G};\n"),
    ];
    let group = |names: &[&str]| {
        ("x/src".to_string(), names.iter().map(|name| (*name).to_string()).collect::<Vec<_>>())
    };
    assert_eq!(cycles(&sources), [group(&["a", "b", "d"]), group(&["g", "h"])]);
}

#[test]
fn no_module_of_the_binary_imports_from_its_root() {
    let sources = sources();
    let of_binary: Vec<(&str, &str, &str)> = sources
        .iter()
        .filter_map(|(path, text)| Some((path.as_str(), module_of(path)?, text.as_str())))
        .filter(|(_, (directory, _), _)| *directory == "runtime/cli/src")
        .map(|(path, (_, module), text)| (path, module, text))
        .collect();
    let is_module = |name: &str| of_binary.iter().any(|(_, module, _)| *module == name);
    let upward = of_binary.iter().flat_map(|(path, _, text)| {
        imported(text).into_iter().filter(|name| !is_module(name)).map(move |name| format!("{path}: {name}"))
    });
    assert_none(&upward.collect::<Vec<_>>(), "what main.rs has is imported by what it starts");
}

/// The functions that a walk of docs/ARCHITECTURE.md names, by file: "`file.rs: function, function`".
fn walked(text: &str) -> Vec<(&str, Vec<&str>)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted
        .filter_map(|name| name.split_once(".rs: "))
        .map(|(file, names)| (file, names.split(", ").collect()))
        .collect()
}

/// The walks of docs/ARCHITECTURE.md, each with the number of files that it may pass.
const WALKS: &[(&str, usize)] = &[("A request on two instances", 12), ("A KV block", 7), ("A weight", 4)];

#[test]
fn the_walks_through_the_runtime_are_short_and_name_functions_that_exist() {
    let root = root();
    let text = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    let section = text.split("\n## ").find(|section| section.starts_with("Follow a request"));
    let walks: Vec<&str> = section.expect("it is there").split("\n### ").skip(1).collect();
    let mut errors = Vec::new();
    for (title, files_max) in WALKS {
        let Some(walk) = walks.iter().find(|walk| walk.lines().next() == Some(title)) else {
            errors.push(format!("there is no walk '{title}'"));
            continue;
        };
        let walked = walked(walk);
        let files: BTreeSet<&str> = walked.iter().map(|(file, _)| *file).collect();
        if files.is_empty() || files.len() > *files_max {
            errors.push(format!("{title}: {} files; at most {files_max}", files.len()));
        }
        for (file, names) in walked {
            let path = root.join("runtime/src").join(file).with_extension("rs");
            let source = std::fs::read_to_string(&path).unwrap_or_default();
            let missing = names.iter().filter(|name| !source.contains(&format!("fn {name}(")));
            errors.extend(missing.map(|name| format!("{title}: no function {name} in {file}.rs")));
        }
    }
    assert_none(&errors, "walks in docs/ARCHITECTURE.md");
}

/// Whether a file is part of a crate's library or binary.
fn is_product(path: &str) -> bool {
    let is_in = |directory: &str| path.split('/').any(|part| part == directory);
    is_in("src") && !is_in("tests") && !path.ends_with("/tests.rs") && !path.ends_with("_tests.rs")
}

/// Test binaries beside a crate's one, each of which is linked by itself, and why.
const BINARIES: &[(&str, &str)] = &[
    ("runtime/tests/memory.rs", "counts what its whole process allocates"),
    ("backends/wire/tests/verbs.rs", "goes into an emulated machine alone"),
];

/// Cargo takes no file of `tests/` by itself where a crate has one binary of tests: a file that `main.rs`
/// does not name would never run.
#[test]
fn every_file_of_tests_is_in_its_crates_one_test_binary() {
    let mut errors = Vec::new();
    for package in &metadata().packages {
        let of_crate = directory(package);
        let tests = root().join(&of_crate).join("tests");
        let Ok(entries) = std::fs::read_dir(&tests) else { continue };
        let names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        let main = std::fs::read_to_string(tests.join("main.rs")).unwrap_or_default();
        let binaries = package.targets.iter().filter(|target| target.is_test());
        let alone = |path: &str| BINARIES.iter().any(|(known, reason)| *known == path && !reason.is_empty());
        let shared = binaries.filter(|target| {
            let path = target.src_path.as_std_path().strip_prefix(root()).expect("under the root");
            !alone(&path.to_string_lossy())
        });
        if shared.count() > 1 {
            errors.push(format!(
                "{of_crate}: more than one binary of tests; make them modules of tests/main.rs"
            ));
        }
        for name in names.iter().filter(|name| !main.is_empty() && *name != "main.rs") {
            let stem = name.strip_suffix(".rs").unwrap_or(name);
            let module = tests.join(stem).join("mod.rs").exists() || name.ends_with(".rs");
            let path = format!("{of_crate}/tests/{name}");
            if module && !alone(&path) && !main.lines().any(|line| line == format!("mod {stem};")) {
                errors.push(format!("{path}: tests/main.rs has no 'mod {stem};'"));
            }
        }
    }
    assert_none(&errors, "tests that never run, or are linked by themselves");
}

const COLUMNS_MAX: usize = 110;

/// The numbers of the lines of prose in a source file that are too long.
fn long_comments(text: &str) -> Vec<usize> {
    let lines = text.lines().enumerate();
    let long = lines.filter(|(_, line)| line.chars().count() > COLUMNS_MAX);
    long.filter(|(_, line)| line.trim_start().starts_with("//")).map(|(i, _)| i + 1).collect()
}

#[test]
fn comments_wrap() {
    let mut errors = Vec::new();
    for (path, text) in sources() {
        errors.extend(long_comments(&text).iter().map(|line| format!("{path}:{line}")));
    }
    assert_none(&errors, "comments beyond 110 columns");
    let long = format!("let x = 1;\n    // {}\n", "x".repeat(COLUMNS_MAX));
    assert_eq!(long_comments(&long), [2]);
}
