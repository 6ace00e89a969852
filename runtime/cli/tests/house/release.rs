//! Every crate can be published: it has metadata, versioned dependencies, and all files that it includes.

use super::{assert_none, directory, is_product, metadata, root, sources};
use cargo_metadata::{DependencyKind, Package};

/// Crates that are not published, each with the reason.
const UNPUBLISHED: &[(&str, &str)] = &[("mixfleet-fuzz", "test code only: no other crate depends on it")];

/// Limits of a registry: keywords of a crate, and characters of a keyword.
const KEYWORDS_MAX: usize = 5;
const KEYWORD_CHARS_MAX: usize = 20;

/// Fields missing in the manifest of `package`.
fn complaints(package: &Package) -> Vec<String> {
    let mut missing = Vec::new();
    let published = package.publish.as_ref().is_none_or(|registries| !registries.is_empty());
    if !published {
        let listed = UNPUBLISHED.iter().any(|(name, why)| package.name.as_str() == *name && !why.is_empty());
        return if listed { missing } else { vec!["publish = false without a reason".to_owned()] };
    }
    if package.description.as_deref().is_none_or(str::is_empty) {
        missing.push("no description".to_owned());
    }
    let keywords = &package.keywords;
    if keywords.is_empty()
        || keywords.len() > KEYWORDS_MAX
        || keywords.iter().any(|word| word.len() > KEYWORD_CHARS_MAX)
    {
        missing.push(format!("keywords {keywords:?}"));
    }
    if package.categories.is_empty() {
        missing.push("no categories".to_owned());
    }
    if package.metadata.pointer("/docs/rs").is_none() {
        missing.push("no [package.metadata.docs.rs]".to_owned());
    }
    for dependency in package.dependencies.iter().filter(|dependency| dependency.path.is_some()) {
        // a dev-dependency with a version must be published first; crates that test each other cannot be
        let versioned = dependency.req.to_string() != "*";
        if versioned == (dependency.kind == DependencyKind::Development) {
            missing.push(format!(
                "{}: dependencies have a version, dev-dependencies a path alone",
                dependency.name
            ));
        }
    }
    missing
}

#[test]
fn every_crate_has_what_publishing_needs() {
    let packages = metadata().packages;
    let errors = packages
        .iter()
        .flat_map(|package| complaints(package).into_iter().map(|what| format!("{}: {what}", package.name)));
    assert_none(&errors.collect::<Vec<_>>(), "manifests");
    let versions: Vec<String> = packages.iter().map(|package| package.version.to_string()).collect();
    assert!(versions.iter().all(|version| *version == versions[0]), "one version for all: {versions:?}");
}

/// The files that `text` includes, relative to its own directory.
fn included(text: &str) -> Vec<&str> {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let openings = ["include_str!(\"", "include_str!(concat!(\"", "include_bytes!(\"", "#[path = \""];
    let found = openings.iter().flat_map(|opening| product.split(*opening).skip(1));
    found.filter_map(|rest| rest.split('"').next()).collect()
}

#[test]
fn no_crate_includes_files_outside_itself() {
    let directories: Vec<String> = metadata().packages.iter().map(directory).collect();
    let mut errors = Vec::new();
    for (path, text) in sources().iter().filter(|(path, _)| is_product(path) && path.contains("/src/")) {
        let is_test = path.ends_with("tests.rs") || path.split('/').any(|part| part == "tests");
        let owner =
            directories.iter().filter(|at| path.starts_with(&format!("{at}/"))).max_by_key(|at| at.len());
        let (Some(owner), false) = (owner, is_test) else { continue };
        for file in included(text) {
            let depth = path[owner.len() + 1..].matches('/').count();
            let ups = file.matches("../").count();
            let at = root().join(path).with_file_name("").join(file);
            if ups > depth || !at.exists() {
                errors.push(format!("{path}: {file} is no file of {owner}; link to it from there"));
            }
        }
    }
    assert_none(&errors, "included files that a published crate would lack");
}

#[test]
fn includes_are_seen() {
    let text = "#[path = \"../a.rs\"]\nmod a;\nconst B: &str = include_str!(\"b.txt\");\n";
    assert_eq!(included(text), ["b.txt", "../a.rs"]);
}

/// The paths of this repository that a page names in backticks.
fn named_paths(page: &str) -> Vec<&str> {
    let quoted = page.split('`').skip(1).step_by(2);
    let tops = ["backends/", "docs/", "hal/", "hwtests/", "runtime/", "scheduler/", ".ci/", ".config/"];
    let is_path = |text: &&str| tops.iter().any(|top| text.starts_with(top)) && !text.contains([' ', '\n']);
    quoted.filter(is_path).filter(|path| !path.contains("NAME")).collect()
}

#[test]
fn contributing_names_files_that_exist() {
    let page = std::fs::read_to_string(root().join("CONTRIBUTING.md")).expect("CONTRIBUTING.md");
    let paths = named_paths(&page);
    assert!(paths.len() > 20, "{paths:?}");
    let lost = paths.iter().filter(|path| !root().join(path).exists());
    assert_none(&lost.map(|path| (*path).to_owned()).collect::<Vec<_>>(), "paths in CONTRIBUTING.md");
    assert_eq!(named_paths("`hal/a.rs` and `hal/NAME.rs`, `mixfleet x`"), ["hal/a.rs"]);
}

/// Lines of a release in the changelog at most.
const CHANGES_MAX: usize = 60;

#[test]
fn the_changelog_begins_with_this_version() {
    let text = std::fs::read_to_string(root().join("CHANGELOG.md")).expect("CHANGELOG.md");
    let mut releases = text.split("\n## ").skip(1);
    let newest = releases.next().expect("a release");
    let version = env!("CARGO_PKG_VERSION");
    assert!(newest.starts_with(version), "the first heading is not {version}");
    let lines = newest.lines().count();
    assert!(lines <= CHANGES_MAX, "{version} has {lines} lines: merge lines that users need not distinguish");
}
