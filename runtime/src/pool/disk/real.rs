//! A directory of the operating system.

use super::Disk;
use crate::pool::PoolError;
use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

const LOCK: &str = "lock";

/// A directory that this process alone uses, as long as this lives.
#[derive(Debug)]
pub struct RealDisk {
    directory: PathBuf,
    /// Open files by name.
    files: Mutex<HashMap<String, Arc<File>>>,
    /// Holds the lock.
    _lock: File,
}

impl RealDisk {
    /// Takes `directory` for this process; it is created if need be.
    ///
    /// # Errors
    /// [`PoolError::InUse`] while another pool has it; [`PoolError::Io`] where it cannot be created or written.
    pub fn open(directory: &Path) -> std::result::Result<Self, PoolError> {
        let failed = |doing: &str| {
            let doing = format!("{doing} {}", directory.display());
            move |source| PoolError::Io { doing, source }
        };
        std::fs::create_dir_all(directory).map_err(failed("create the directory"))?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(directory.join(LOCK));
        let lock = lock.map_err(failed("write to the directory"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(PoolError::InUse(directory.to_path_buf())),
            Err(TryLockError::Error(source)) => return Err(failed("lock the directory")(source)),
        }
        Ok(RealDisk { directory: directory.to_path_buf(), files: Mutex::default(), _lock: lock })
    }

    fn file(&self, name: &str, create: bool) -> Result<Arc<File>> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(name) {
            return Ok(file.clone());
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(create);
        let file = Arc::new(options.open(self.directory.join(name))?);
        files.insert(name.to_string(), file.clone());
        Ok(file)
    }
}

impl Disk for RealDisk {
    fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != LOCK);
        names.sort();
        Ok(names)
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        match self.file(file, false) {
            Ok(file) => Ok(Some(file.metadata()?.len())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> Result<usize> {
        let file = self.file(file, false)?;
        let mut read = 0;
        while read < data.len() {
            match file.read_at(&mut data[read..], offset + read as u64) {
                Ok(0) => break,
                Ok(bytes) => read += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    fn write_at(&self, file: &str, offset: u64, data: &[u8]) -> Result<()> {
        self.file(file, true)?.write_all_at(data, offset)
    }

    fn cut(&self, file: &str, bytes: u64) -> Result<()> {
        match self.len(file)? {
            Some(length) if length > bytes => self.file(file, false)?.set_len(bytes),
            _ => Ok(()),
        }
    }

    fn sync(&self, file: &str) -> Result<()> {
        self.file(file, false)?.sync_data()
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        std::fs::rename(self.directory.join(from), self.directory.join(to))?;
        let moved = files.remove(from);
        files.remove(to);
        if let Some(file) = moved {
            files.insert(to.to_string(), file);
        }
        Ok(())
    }

    fn remove(&self, file: &str) -> Result<()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).remove(file);
        match std::fs::remove_file(self.directory.join(file)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }
}
