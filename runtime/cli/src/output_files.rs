//! Output files, checked before long work and removed if it fails.

use anyhow::Context;
use std::fs;
use std::path::Path;

/// Checks before long work that a file can be written; an existing file keeps its content.
pub(crate) fn writable(file: &Path) -> anyhow::Result<()> {
    let opened = fs::OpenOptions::new().create(true).append(true).open(file);
    opened.map(drop).with_context(|| format!("cannot write {}", file.display()))
}

/// Removes the empty file that [`writable`] made, after work that failed.
pub(crate) fn leave_no_empty(file: Option<&Path>) {
    if let Some(file) = file
        && fs::metadata(file).is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
    {
        // The error to report is the work's own.
        let _ = fs::remove_file(file);
    }
}
