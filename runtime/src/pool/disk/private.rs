//! A directory that only this process's user can access.
//!
//! KV and the token ids beside it reveal prompts. So no other user may read a file, put one there, or
//! redirect a name: every file is opened relative to the open directory, symbolic links are not followed, and
//! each file's owner is checked.

use crate::pool::PoolError;
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;

/// An open directory of this user's.
#[derive(Debug)]
pub struct PrivateDirectory {
    path: PathBuf,
    open: File,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// It must exist.
    Existing,
    /// It is created if it does not exist.
    Any,
    /// It must not exist, and is created.
    New,
}

impl PrivateDirectory {
    /// Opens a directory, and creates it if necessary. If others may read it, its permissions are tightened.
    ///
    /// # Errors
    /// [`PoolError::Exposed`] if it is a symbolic link, another user's, or writable by others;
    /// [`PoolError::Io`] if it cannot be opened.
    pub fn open(path: &Path) -> std::result::Result<Self, PoolError> {
        // A trailing slash would follow a link.
        let path: PathBuf = path.components().collect();
        let failed = |doing: &str| {
            let doing = format!("{doing} {}", path.display());
            move |source: Error| PoolError::Io { doing, source }
        };
        let made = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&path);
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = match rustix::fs::openat(CWD, &path, flags, Mode::empty()) {
            Ok(open) => File::from(open),
            Err(Errno::LOOP | Errno::NOTDIR) if path.is_symlink() => {
                return Err(exposed(&path, "it is a symbolic link"));
            }
            Err(error) => {
                made.map_err(failed("create the directory"))?;
                return Err(failed("open the directory")(error.into()));
            }
        };
        let looked =
            rustix::fs::fstat(&open).map_err(|error| failed("look at the directory")(error.into()))?;
        if let Some(why) = fault(&looked) {
            return Err(exposed(&path, &why));
        }
        if looked.st_mode & OTHERS != 0 {
            let closed = rustix::fs::fchmod(&open, Mode::from_raw_mode(DIRECTORY_MODE));
            closed.map_err(|error| failed("close to others the directory")(error.into()))?;
        }
        Ok(PrivateDirectory { path, open })
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file of the directory for reading and writing. If others may read it, its permissions are
    /// tightened.
    ///
    /// # Errors
    /// `PermissionDenied` if it is not a regular file, is another user's, or is writable by others; otherwise
    /// the operating system's error.
    pub fn file(&self, name: &str, opening: Opening) -> Result<File> {
        let create = match opening {
            Opening::Existing => OFlags::empty(),
            Opening::Any => OFlags::CREATE,
            Opening::New => OFlags::CREATE | OFlags::EXCL,
        };
        // NONBLOCK: a pipe of that name is refused, not waited for.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | create;
        let refused = |why: &str| {
            let detail = format!("`{name}` in {} is not used: {why}; remove it", self.path.display());
            Error::new(ErrorKind::PermissionDenied, detail)
        };
        let file = match rustix::fs::openat(&self.open, name, flags, Mode::from_raw_mode(FILE_MODE)) {
            Ok(file) => File::from(file),
            Err(Errno::LOOP) => return Err(refused("it is a symbolic link")),
            Err(error) => return Err(error.into()),
        };
        let looked = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(looked.st_mode) != FileType::RegularFile {
            return Err(refused("it is not a plain file"));
        }
        if let Some(why) = fault(&looked) {
            return Err(refused(&why));
        }
        if looked.st_mode & OTHERS != 0 {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(FILE_MODE))?;
        }
        Ok(file)
    }

    /// Names of all files, in order.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.open)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }

    /// Renames a file.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        Ok(rustix::fs::renameat(&self.open, from, &self.open, to)?)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// The operating system's error; `NotFound` if there is no such file.
    pub fn remove(&self, name: &str) -> Result<()> {
        Ok(rustix::fs::unlinkat(&self.open, name, rustix::fs::AtFlags::empty())?)
    }

    /// Returns when creations, renames and removals so far would survive a loss of power.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn sync_names(&self) -> Result<()> {
        self.open.sync_all()
    }
}

fn exposed(path: &Path, why: &str) -> PoolError {
    PoolError::Exposed { path: path.to_path_buf(), why: why.into() }
}

/// Why other users have access that tightening the permissions cannot take back, if so.
fn fault(looked: &Stat) -> Option<String> {
    let (owner, own) = (looked.st_uid, rustix::process::geteuid().as_raw());
    if owner != own {
        return Some(format!("it belongs to user {owner}, and this process is of user {own}"));
    }
    (looked.st_mode & OTHERS_WRITE != 0)
        .then(|| format!("others may write to it (its mode is {:o})", looked.st_mode & 0o7777))
}
