//! A directory of the operating system.

use super::Disk;
use super::private::{Opening, PrivateDirectory};
use crate::pool::PoolError;
use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

const LOCK: &str = "lock";

/// A directory that this process uses alone while this value lives, and that only its user may read.
#[derive(Debug)]
pub struct RealDisk {
    directory: PrivateDirectory,
    /// Open files by name.
    files: Mutex<HashMap<String, Arc<File>>>,
    /// The file that holds the lock.
    _lock: File,
}

impl RealDisk {
    /// Locks `directory` for this process, and creates it if necessary.
    ///
    /// # Errors
    /// [`PoolError::InUse`] while another pool uses it; [`PoolError::Exposed`] if other users can access it;
    /// [`PoolError::Io`] if it cannot be created or written.
    pub fn open(directory: &Path) -> std::result::Result<Self, PoolError> {
        let failed = |doing: &str| {
            let doing = format!("{doing} {}", directory.display());
            move |source| PoolError::Io { doing, source }
        };
        let private = PrivateDirectory::open(directory)?;
        let lock = private.file(LOCK, Opening::Any).map_err(failed("write to the directory"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(PoolError::InUse(directory.to_path_buf())),
            Err(TryLockError::Error(source)) => return Err(failed("lock the directory")(source)),
        }
        Ok(RealDisk { directory: private, files: Mutex::default(), _lock: lock })
    }

    fn file(&self, name: &str, opening: Opening) -> Result<Arc<File>> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(name) {
            return Ok(file.clone());
        }
        let file = Arc::new(self.directory.file(name, opening)?);
        files.insert(name.to_string(), file.clone());
        Ok(file)
    }
}

impl Disk for RealDisk {
    fn names(&self) -> Result<Vec<String>> {
        let mut names = self.directory.names()?;
        names.retain(|name| name != LOCK);
        Ok(names)
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        match self.file(file, Opening::Existing) {
            Ok(file) => Ok(Some(file.metadata()?.len())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> Result<usize> {
        let file = self.file(file, Opening::Existing)?;
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
        self.file(file, Opening::Any)?.write_all_at(data, offset)
    }

    fn cut(&self, file: &str, bytes: u64) -> Result<()> {
        match self.len(file)? {
            Some(length) if length > bytes => self.file(file, Opening::Existing)?.set_len(bytes),
            _ => Ok(()),
        }
    }

    fn sync(&self, file: &str) -> Result<()> {
        self.file(file, Opening::Existing)?.sync_data()
    }

    fn sync_names(&self) -> Result<()> {
        self.directory.sync_names()
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        self.directory.rename(from, to)?;
        let moved = files.remove(from);
        files.remove(to);
        if let Some(file) = moved {
            files.insert(to.to_string(), file);
        }
        Ok(())
    }

    fn remove(&self, file: &str) -> Result<()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).remove(file);
        match self.directory.remove(file) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }
}
