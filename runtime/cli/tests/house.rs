//! The rules of the house: who may import whom, and what no source file may hold.

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
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

const ROOMS: &[Room] = &[
    Room {
        name: HAL,
        directory: "hal",
        rooms: &[],
        outside: Some(&["bytemuck", "half", "serde", "thiserror"]),
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
        outside: Some(&["cudarc", "libloading", "tracing"]),
    },
    Room {
        name: "mixfleet-discover",
        directory: "backends/discover",
        rooms: &[HAL],
        outside: Some(&["hwloc2", "ibverbs", "serde", "tracing"]),
    },
    Room {
        name: "mixfleet-simulated",
        directory: "backends/sim",
        rooms: &[HAL, "mixfleet-cpu"],
        outside: Some(&["half", "memmap2", "tracing"]),
    },
    Room {
        name: "mixfleet-wgpu",
        directory: "backends/wgpu",
        rooms: &[HAL],
        outside: Some(&["bytemuck", "half", "pollster", "tracing", "wgpu"]),
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
        outside: Some(&["serde", "thiserror", "xxhash-rust"]),
    },
    Room {
        name: "mixfleet-sim",
        directory: "runtime/sim",
        rooms: &[HAL, SCHEDULER],
        outside: Some(&["csv", "flate2", "serde", "serde_json", "thiserror", "toml", "zstd"]),
    },
    Room { name: "mixfleet-hwtests", directory: "hwtests", rooms: &[HAL], outside: None },
    Room { name: "mixfleet-runtime", directory: "runtime", rooms: &[HAL, SCHEDULER], outside: None },
    Room {
        name: "mixfleet-fuzz",
        directory: "runtime/fuzz",
        rooms: &[HAL, SCHEDULER, "mixfleet-hwtests", "mixfleet-runtime", "mixfleet-sim", "mixfleet-wire"],
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
            "mixfleet-opencl",
            "mixfleet-simulated",
            "mixfleet-wgpu",
            "mixfleet-wire",
            "mixfleet-hwtests",
            "mixfleet-runtime",
            "mixfleet-sim",
        ],
        outside: None,
    },
];

/// Words that no source file may hold. Put together here, so that this file holds none of them.
const BANNED: &[&str] = &[
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("db", "g!("),
    concat!("FIX", "ME"),
    concat!("XX", "X:"),
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
const LONG: &[(&str, &str)] = &[];

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

/// What is wrong with `from` importing `to`.
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
        let product = package.targets.iter().filter(|t| t.is_lib() || t.is_bin());
        for target in product.filter(|_| !directory(package).starts_with("backends/")) {
            let text = std::fs::read_to_string(&target.src_path).expect("a readable crate root");
            if !text.lines().any(|line| line == "#![forbid(unsafe_code)]") {
                errors.push(format!("{}: no #![forbid(unsafe_code)]", target.src_path));
            }
        }
    }
    assert_none(&errors, "crates without their lints");
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
