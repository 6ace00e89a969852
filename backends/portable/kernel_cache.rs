//! Compiled kernels in the user's cache directory, so that only the first start of a version compiles them.
//! Backends that have such kernels share this source.
//!
//! An entry is named by the hash of its source and options, and begins with a hash over these and the code: a
//! damaged, truncated or foreign entry is not used. Correctness never depends on the cache: after any failure
//! it counts as empty.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use twox_hash::XxHash3_128;

/// First bytes of an entry: its format.
const FORMAT: &[u8; 16] = b"mixfleet kernel1";
const HEADER_BYTES: usize = FORMAT.len() + size_of::<u128>();
/// Maximum number of entries, most of about 50 KB: enough for several versions and devices.
const ENTRIES_MAX: usize = 1024;

/// Where entries are: `mixfleet/kernels` in `XDG_CACHE_HOME` or else `~/.cache`.
pub(crate) fn directory() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let root = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
    Some(root.join("mixfleet").join("kernels"))
}

/// What a program is compiled from.
pub(crate) struct KernelKey {
    bytes: Vec<u8>,
}

impl KernelKey {
    /// Joins the compiler's version, its options and the source.
    pub(crate) fn new(parts: &[&str]) -> KernelKey {
        let mut bytes = Vec::new();
        for part in parts {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part.as_bytes());
        }
        KernelKey { bytes }
    }

    fn file(&self) -> String {
        format!("{:032x}", XxHash3_128::oneshot(&self.bytes))
    }

    fn seal(&self, code: &[u8]) -> [u8; size_of::<u128>()] {
        let mut hasher = XxHash3_128::new();
        hasher.write(&self.bytes);
        hasher.write(code);
        hasher.finish_128().to_le_bytes()
    }
}

/// Whether this user wrote a file and no other user could have.
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

/// Returns the code of `key`, if an intact entry of this user has it.
pub(crate) fn load(directory: &Path, key: &KernelKey) -> Option<Vec<u8>> {
    let path = directory.join(key.file());
    let mut entry = is_ours(&path).then(|| fs::read(&path).ok()).flatten()?;
    let (header, code) = entry.split_at_checked(HEADER_BYTES)?;
    let intact = header.starts_with(FORMAT) && header.ends_with(&key.seal(code)) && !code.is_empty();
    intact.then(|| entry.split_off(HEADER_BYTES))
}

/// Stores the code of `key`, replacing an older entry.
///
/// # Errors
/// What the file system refused.
pub(crate) fn store(directory: &Path, key: &KernelKey, code: &[u8]) -> std::io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    private_directory(directory)?;
    make_room(directory)?;
    // renamed when complete, since other processes read it concurrently
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let part = directory.join(format!("{}.{number}.part", std::process::id()));
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&part)?;
    let written = file.write_all(&[&FORMAT[..], &key.seal(code), code].concat());
    let renamed = written.and_then(|()| fs::rename(&part, directory.join(key.file())));
    if renamed.is_err() {
        let _ = fs::remove_file(&part);
    }
    renamed
}

/// Creates the directory for this user alone.
fn private_directory(directory: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}

/// Removes the oldest file if there are as many as there may be.
fn make_room(directory: &Path) -> std::io::Result<()> {
    let files: Vec<fs::DirEntry> = fs::read_dir(directory)?.flatten().collect();
    if files.len() < ENTRIES_MAX {
        return Ok(());
    }
    let age = |file: &&fs::DirEntry| file.metadata().and_then(|known| known.modified()).ok();
    files.iter().min_by_key(age).map_or(Ok(()), |oldest| fs::remove_file(oldest.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temporary(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("mixfleet-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        directory
    }

    #[test]
    fn an_entry_is_found_by_all_that_it_was_compiled_from() {
        let directory = temporary("kernel-keys");
        let key = KernelKey::new(&["12.9", "sm_90", "a source"]);
        assert_eq!(load(&directory, &key), None);
        store(&directory, &key, b"code").unwrap();
        assert_eq!(load(&directory, &key).as_deref(), Some(&b"code"[..]));
        for other in
            [["12.8", "sm_90", "a source"], ["12.9", "sm_80", "a source"], ["12.9", "sm_90a", " source"]]
        {
            assert_eq!(load(&directory, &KernelKey::new(&other)), None, "{other:?}");
        }
        store(&directory, &key, b"other code").unwrap();
        assert_eq!(load(&directory, &key).as_deref(), Some(&b"other code"[..]));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "no parts are left");
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_damaged_or_foreign_entry_is_not_used() {
        let directory = temporary("kernel-damage");
        let (key, other) = (KernelKey::new(&["a"]), KernelKey::new(&["b"]));
        store(&directory, &key, b"some code").unwrap();
        let path = directory.join(key.file());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(load(&directory, &key), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(load(&directory, &key), None, "cut at {at}");
        }
        fs::write(directory.join(other.file()), &whole).unwrap();
        assert_eq!(load(&directory, &other), None, "another's code");
        fs::remove_dir_all(directory).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn only_the_user_may_read_or_write() {
        use std::os::unix::fs::PermissionsExt;
        let directory = temporary("kernel-private").join("deep");
        let key = KernelKey::new(&["a"]);
        store(&directory, &key, b"code").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let file = directory.join(key.file());
        assert_eq!((mode(&directory), mode(&file)), (0o700, 0o600));
        assert!(load(&directory, &key).is_some());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o660)).unwrap();
        assert_eq!(load(&directory, &key), None, "others could have written it");
        fs::remove_dir_all(directory.parent().unwrap()).unwrap();
    }

    #[test]
    fn the_oldest_entries_make_room() {
        let directory = temporary("kernel-room");
        for number in 0..ENTRIES_MAX + 3 {
            store(&directory, &KernelKey::new(&[&number.to_string()]), b"code").unwrap();
        }
        assert_eq!(fs::read_dir(&directory).unwrap().count(), ENTRIES_MAX);
        let newest = KernelKey::new(&[&(ENTRIES_MAX + 2).to_string()]);
        assert!(load(&directory, &newest).is_some());
        fs::remove_dir_all(directory).unwrap();
    }
}
