//! What the tests share.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use mixfleet_sim::fleet_file::FleetFile;
use std::path::{Path, PathBuf};

/// The fleet that `text` describes, without profiles.
pub(crate) fn fleet_from(text: &str) -> FleetFile {
    let none = |path: &Path| Err(format!("{} is not needed here", path.display()));
    FleetFile::parse(text, Path::new(""), &none).unwrap_or_else(|error| panic!("{error}"))
}

/// A file of the data beside this clone, or nothing (said aloud) where it is not there.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(path);
    if file.is_file() {
        return Some(file);
    }
    println!("SKIPPED: no ../shared/data/{path}");
    None
}
