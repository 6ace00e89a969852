//! Opens files that come from outside, such as checkpoints, fleet files and keys.
//!
//! A file may not be a regular one: it may be a pipe without a writer, an endless device, or a directory.
//! Files that others can place are read through this module, the only one in this crate that touches a file
//! system.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Maximum size in bytes of text that people write: configurations, keys, price lists, profiles.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Makes an open of a pipe return at once.
#[cfg(all(
    any(target_os = "linux", target_os = "android"),
    any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")
))]
const NONBLOCK: i32 = 0o4000;

/// Opens a regular file for reading, through links but without waiting for a writer. A path such as
/// `/dev/stdin` or `/dev/fd/N` from a shell may be a pipe, since its writer exists already.
///
/// # Errors
/// Those of the file system, and `InvalidInput` for a directory, pipe, socket or device.
pub fn open(path: &Path) -> io::Result<File> {
    if path == Path::new("/dev/stdin") || path.starts_with("/dev/fd") {
        return File::open(path);
    }
    // The kind is also checked before opening, because opening some devices has side effects.
    check_regular(std::fs::metadata(path)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(all(
        any(target_os = "linux", target_os = "android"),
        any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")
    ))]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, NONBLOCK);
    let file = options.open(path)?;
    check_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a whole file, as [`open`] opens it.
///
/// # Errors
/// Those of [`open`], and `FileTooLarge` beyond `bytes_max`.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let told = file.metadata()?.len();
    let mut bytes = Vec::new();
    if told <= bytes_max {
        file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    if told > bytes_max || bytes.len() as u64 > bytes_max {
        let message = format!("it has more than {bytes_max} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Reads a whole file of text of at most [`TEXT_BYTES_MAX`].
///
/// # Errors
/// Those of [`read`], and `InvalidData` for text that is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let bytes = read(path, TEXT_BYTES_MAX)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Refuses everything but regular files.
///
/// # Errors
/// `InvalidInput`, which says what it is.
pub fn check_regular(kind: std::fs::FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    let what = if kind.is_dir() { "a directory" } else { "a pipe, socket or device" };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {what}, expected a regular file")))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        for path in ["/dev/zero", "/dev/null", "/tmp", "/"] {
            let error = read(Path::new(path), 10).unwrap_err();
            assert!(error.to_string().contains("expected a regular file"), "{path}: {error}");
        }
        assert!(open(Path::new("/proc/no/such/file")).is_err());
    }

    #[test]
    fn a_file_has_no_more_bytes_than_are_allowed() {
        let file = std::env::temp_dir().join(format!("mixfleet-files-{}", std::process::id()));
        std::fs::write(&file, "four").unwrap();
        assert_eq!(read(&file, 4).unwrap(), b"four");
        assert_eq!(read(&file, 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_text(&file).unwrap(), "four");
        std::fs::write(&file, [0xFF]).unwrap();
        assert_eq!(read_text(&file).unwrap_err().kind(), ErrorKind::InvalidData);
        std::fs::remove_file(&file).unwrap();
    }
}
