//! A persistent cache of values that can be recomputed: one file each, named by the hash of its key.

use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_128;

/// The file for `key`; none if this user has no cache directory.
pub(crate) fn file(kind: &str, key: &impl Serialize) -> Option<PathBuf> {
    let name = XxHash3_128::oneshot(serde_json::to_string(key).ok()?.as_bytes());
    Some(directory()?.join(format!("{kind}-{name:032x}.json")))
}

/// All files of a kind, in order.
pub(crate) fn files(kind: &str) -> Vec<PathBuf> {
    let entries = directory().and_then(|directory| fs::read_dir(directory).ok());
    let is_of_kind = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('-') && rest.ends_with(".json"))
    };
    let mut files: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(is_of_kind);
    files.sort();
    files
}

fn directory() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("mixfleet"))
}

/// The content of a file, if this user wrote it and no other user could have.
pub(crate) fn read(file: &Path) -> Option<Vec<u8>> {
    is_ours(file).then(|| fs::read(file).ok()).flatten()
}

#[cfg(target_os = "linux")]
fn is_ours(file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let (Ok(found), Ok(own)) = (fs::symlink_metadata(file), fs::metadata("/proc/self")) else { return false };
    found.is_file() && found.uid() == own.uid() && found.mode() & 0o022 == 0
}

#[cfg(not(target_os = "linux"))]
fn is_ours(file: &Path) -> bool {
    fs::symlink_metadata(file).is_ok_and(|found| found.is_file())
}

/// Writes `content`, readable by this user alone. Concurrent readers see all of the old or all of the new
/// content.
pub(crate) fn write(file: &Path, content: &[u8]) -> Result<()> {
    fs::create_dir_all(file.parent().context("a file in a directory")?)?;
    let partial = file.with_extension(format!("{}.partial", std::process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(&partial).and_then(|mut to| to.write_all(content));
    if let Err(error) = written.and_then(|()| fs::rename(&partial, file)) {
        let _ = fs::remove_file(&partial);
        return Err(error.into());
    }
    Ok(())
}
