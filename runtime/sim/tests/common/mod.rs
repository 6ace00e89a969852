//! What the tests of traces share.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use std::path::{Path, PathBuf};

/// A file of the data beside this clone, or nothing (said aloud) where it is not there.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(path);
    if file.is_file() {
        return Some(file);
    }
    println!("SKIPPED: no ../shared/data/{path}");
    None
}
