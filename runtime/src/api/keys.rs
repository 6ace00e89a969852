//! The file of tenants and their keys, read again when it changes.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Api;
use super::auth::Access;

/// Interval between two checks of the file.
const PERIOD: Duration = Duration::from_secs(2);
const BYTES_MAX: u64 = 4 << 20;

/// File metadata that changes with the content, so that the file need not be read to detect a change.
type Stamp = [i64; 7];

/// A file of tenants that has been read.
#[derive(Debug)]
pub struct KeysFile {
    path: PathBuf,
    /// None if the last check found no readable file.
    stamp: Option<Stamp>,
}

impl KeysFile {
    /// Reads a file of tenants.
    ///
    /// # Errors
    /// Why it cannot be read, or the fault of its content; the message contains no key.
    pub fn open(path: &Path) -> Result<(Self, Access), String> {
        let (stamp, text) = read(path)?;
        let access = Access::tenants(&text)?;
        Ok((KeysFile { path: path.to_path_buf(), stamp: Some(stamp) }, access))
    }

    /// Reads the file again if it has changed.
    fn look(&mut self, access: &Access) {
        let stamp = fs::metadata(&self.path).ok().map(|metadata| stamp(&metadata));
        if stamp == self.stamp {
            return;
        }
        let file = self.path.display().to_string();
        match read(&self.path).and_then(|(stamp, text)| Ok((stamp, access.replace(&text)?))) {
            Ok((read, tenants)) => {
                self.stamp = Some(read);
                tracing::info!(file, tenants, "keys reloaded");
            }
            Err(error) => {
                self.stamp = stamp;
                tracing::error!(file, error, "the changed keys are invalid; the previous ones stay valid");
            }
        }
    }
}

impl Api {
    /// Updates the keys from the file for as long as this interface exists.
    ///
    /// # Errors
    /// When the environment has no thread for it.
    pub fn follow(self: &Arc<Self>, mut file: KeysFile) -> io::Result<()> {
        let api: Weak<Api> = Arc::downgrade(self);
        let env = self.env.clone();
        let task = async move {
            loop {
                env.sleep(PERIOD).await;
                let Some(api) = api.upgrade() else { break };
                file.look(&api.access);
            }
        };
        // On a thread of its own, since a disk may hang.
        self.env.spawn_worker("keys", Box::pin(task))
    }
}

fn read(path: &Path) -> Result<(Stamp, String), String> {
    let metadata = fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() || metadata.len() > BYTES_MAX {
        return Err(format!("expected a file of at most {BYTES_MAX} bytes"));
    }
    if metadata.mode() & 0o077 != 0 {
        let (file, mode) = (path.display().to_string(), format!("{:o}", metadata.mode() & 0o777));
        tracing::warn!(file, mode, "other users of this machine may read the keys; chmod 600 keeps them out");
    }
    let mut text = String::new();
    let file = mixfleet_hal::files::open(path).map_err(|error| error.to_string())?;
    file.take(BYTES_MAX).read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok((stamp(&metadata), text))
}

fn stamp(metadata: &fs::Metadata) -> Stamp {
    let [device, inode, size] = [metadata.dev(), metadata.ino(), metadata.size()].map(u64::cast_signed);
    let (modified, changed) = (metadata.mtime(), metadata.ctime());
    [device, inode, size, modified, metadata.mtime_nsec(), changed, metadata.ctime_nsec()]
}
