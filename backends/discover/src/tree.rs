//! The source of facts: the files of a machine, or a recording of them.
//!
//! Everything in this crate is a function of a [`Tree`]. A tree is a directory (`/`, or a copied sysfs) or a
//! [`Recording`]: the files, links and listings that were read, in one document. A recording answers exactly
//! as the machine did, so that a user's machine can become a test case.

use mixfleet_hal::{Error, Result};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Name and version of the recording's schema.
pub const RECORDING_SCHEMA: &str = "mixfleet.machine/1";

/// Maximum number of bytes read from a file; sysfs files have at most a page.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// The files read from a machine. Paths are relative to the root, without a leading `/`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recording {
    /// Name and version of the document schema: [`RECORDING_SCHEMA`].
    pub schema: String,
    /// Contents of files, without the final line break.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// Targets of symbolic links.
    #[serde(default)]
    pub links: BTreeMap<String, String>,
    /// Names in directories.
    #[serde(default)]
    pub lists: BTreeMap<String, Vec<String>>,
}

impl Default for Recording {
    fn default() -> Self {
        let (files, links, lists) = Default::default();
        Recording { schema: RECORDING_SCHEMA.into(), files, links, lists }
    }
}

#[derive(Debug)]
enum TreeSource {
    Directory(PathBuf),
    Recording(Recording),
}

/// A machine's files, live or recorded. A missing file reads as absent, never as an error.
#[derive(Debug)]
pub struct Tree {
    source: TreeSource,
    seen: Option<RefCell<Recording>>,
}

impl Tree {
    /// Opens the tree under `root`; `/` is this machine.
    pub fn at(root: impl Into<PathBuf>) -> Tree {
        Tree { source: TreeSource::Directory(root.into()), seen: None }
    }

    /// Opens the tree that `recording` holds.
    ///
    /// # Errors
    /// `Invalid` if the recording has another schema.
    pub fn recorded(recording: Recording) -> Result<Tree> {
        if recording.schema != RECORDING_SCHEMA {
            return Err(Error::invalid(format!(
                "a recording of schema '{}'; this version reads '{RECORDING_SCHEMA}'",
                recording.schema
            )));
        }
        Ok(Tree { source: TreeSource::Recording(recording), seen: None })
    }

    /// Returns the same tree, which records the files read from now on.
    pub fn keeping(mut self) -> Tree {
        self.seen = Some(RefCell::default());
        self
    }

    /// Returns the files read since [`Tree::keeping`].
    pub fn kept(&self) -> Recording {
        self.seen.as_ref().map(|seen| seen.borrow().clone()).unwrap_or_default()
    }

    /// Returns the text of the file at `path`, without trailing white space.
    pub fn text(&self, path: &str) -> Option<String> {
        let text = match &self.source {
            TreeSource::Directory(root) => read_text(&root.join(path)),
            TreeSource::Recording(recording) => recording.files.get(path).cloned(),
        }?;
        if let Some(seen) = &self.seen {
            seen.borrow_mut().files.insert(path.into(), text.clone());
        }
        Some(text)
    }

    /// Returns the target of the symbolic link at `path`, as written there.
    pub fn link(&self, path: &str) -> Option<String> {
        let target = match &self.source {
            TreeSource::Directory(root) => {
                Some(std::fs::read_link(root.join(path)).ok()?.to_string_lossy().into_owned())
            }
            TreeSource::Recording(recording) => recording.links.get(path).cloned(),
        }?;
        if let Some(seen) = &self.seen {
            seen.borrow_mut().links.insert(path.into(), target.clone());
        }
        Some(target)
    }

    /// Lists the directory at `path`, with `mlx5_2` before `mlx5_10`; empty if it is absent.
    pub fn list(&self, path: &str) -> Vec<String> {
        let names = match &self.source {
            TreeSource::Directory(root) => read_names(&root.join(path)),
            TreeSource::Recording(recording) => recording.lists.get(path).cloned(),
        };
        let Some(mut names) = names else { return Vec::new() };
        names.sort_by_cached_key(|name| (natural(name), name.clone()));
        if let Some(seen) = &self.seen {
            seen.borrow_mut().lists.insert(path.into(), names.clone());
        }
        names
    }

    /// Lists the names in `path` that consist of `prefix` and a number, with the number, ascending.
    pub fn numbered(&self, path: &str, prefix: &str) -> Vec<(u32, String)> {
        let numbered = |name: String| Some((name.strip_prefix(prefix)?.parse().ok()?, name));
        let mut found: Vec<(u32, String)> = self.list(path).into_iter().filter_map(numbered).collect();
        found.sort();
        found
    }
}

fn read_text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

fn read_names(path: &Path) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(path).ok()?.flatten();
    Some(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// Returns a key that sorts numbers inside names numerically.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = vec![(String::new(), 0u64)];
    for character in name.chars() {
        let last = parts.len() - 1;
        let (text, number) = &mut parts[last];
        match character.to_digit(10) {
            Some(digit) => *number = number.saturating_mul(10).saturating_add(u64::from(digit)),
            None if *number > 0 => parts.push((character.to_string(), 0)),
            None => text.push(character),
        }
    }
    parts
}

/// Reads values from a tree, and notes implausible ones.
pub(crate) struct TreeReader<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) notes: Vec<String>,
}

impl TreeReader<'_> {
    /// Parses the file at `path` with `parse`; adds a note if that fails.
    pub(crate) fn value<T>(&mut self, path: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.tree.text(path)?;
        let value = parse(&text);
        if value.is_none() {
            self.note(path, &text);
        }
        value
    }

    /// Reads the number in the file at `path`.
    pub(crate) fn number<T: std::str::FromStr>(&mut self, path: &str) -> Option<T> {
        self.value(path, |text| text.trim().parse().ok())
    }

    /// Reads the hexadecimal number in the file at `path`, with or without `0x`.
    pub(crate) fn hex(&mut self, path: &str) -> Option<u32> {
        self.value(path, |text| u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok())
    }

    /// A vendor's or a device's id, of 16 bits.
    pub(crate) fn id(&mut self, path: &str) -> Option<u16> {
        self.hex(path).and_then(|id| u16::try_from(id).ok())
    }

    /// Notes that `text`, at `path`, is implausible.
    pub(crate) fn note(&mut self, path: &str, text: &str) {
        let shown: String = text.chars().take(40).collect();
        self.notes.push(format!("/{path} holds '{}', which is no such value", shown.escape_debug()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_their_numbers() {
        let mut names = ["mlx5_10", "mlx5_2", "eth0", "mlx5_0", "bonding_masters"];
        names.sort_by_cached_key(|name| natural(name));
        assert_eq!(names, ["bonding_masters", "eth0", "mlx5_0", "mlx5_2", "mlx5_10"]);
    }

    #[test]
    fn a_recording_of_another_version_is_refused() {
        let recording = Recording { schema: "mixfleet.machine/9".into(), ..Recording::default() };
        let error = Tree::recorded(recording).unwrap_err();
        assert!(error.detail.contains("machine/9") && error.detail.contains(RECORDING_SCHEMA), "{error}");
    }

    #[test]
    fn what_makes_no_sense_is_noted_and_what_is_absent_is_not() {
        let mut recording = Recording::default();
        recording.files.insert("sys/a".into(), "seven".into());
        let tree = Tree::recorded(recording).unwrap();
        let mut reader = TreeReader { tree: &tree, notes: Vec::new() };
        assert_eq!(reader.number::<u32>("sys/a"), None);
        assert_eq!(reader.number::<u32>("sys/b"), None);
        assert_eq!(reader.notes, ["/sys/a holds 'seven', which is no such value"]);
    }
}
