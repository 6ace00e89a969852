//! A directory of files as the pool uses it: a real one, and one in memory that injects faults.

#[cfg(unix)]
mod private;
#[cfg(unix)]
mod real;
#[cfg(any(test, feature = "testing"))]
mod sim;

#[cfg(unix)]
pub use private::{Opening, PrivateDirectory};
#[cfg(unix)]
pub use real::RealDisk;
#[cfg(any(test, feature = "testing"))]
pub use sim::{Crash, SimDisk};

use std::io::Result;

/// Named files in a place that nothing else uses. Calls may overlap, and block.
pub trait Disk: Send + Sync {
    /// Names of all files.
    ///
    /// # Errors
    /// When the medium fails.
    fn names(&self) -> Result<Vec<String>>;

    /// Length of a file in bytes; none if there is no such file.
    ///
    /// # Errors
    /// When the medium fails.
    fn len(&self, file: &str) -> Result<Option<u64>>;

    /// Reads up to `data.len()` bytes starting at `offset`; fewer only at the end of the file.
    ///
    /// # Errors
    /// When the medium fails, or `NotFound`.
    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> Result<usize>;

    /// Writes all of `data` at `offset`; creates and grows the file as needed. After an error any part may be
    /// written.
    ///
    /// # Errors
    /// When the medium fails; `StorageFull` where there is no room.
    fn write_at(&self, file: &str, offset: u64, data: &[u8]) -> Result<()>;

    /// Truncates a file to at most `bytes` bytes.
    ///
    /// # Errors
    /// When the medium fails.
    fn cut(&self, file: &str, bytes: u64) -> Result<()>;

    /// Returns when all earlier writes to a file are durable.
    ///
    /// # Errors
    /// When the medium fails.
    fn sync(&self, file: &str) -> Result<()>;

    /// Returns when the names of all files are durable: until then, creations, renames and removals may be
    /// undone by a loss of power.
    ///
    /// # Errors
    /// When the medium fails.
    fn sync_names(&self) -> Result<()>;

    /// Renames a file, and replaces a file that had the new name.
    ///
    /// # Errors
    /// When the medium fails.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// Removes a file if it exists.
    ///
    /// # Errors
    /// When the medium fails.
    fn remove(&self, file: &str) -> Result<()>;
}
