//! A directory of files as the pool sees it: the real one, and one in memory that fails on purpose.

#[cfg(unix)]
mod private;
#[cfg(unix)]
mod real;
mod sim;

#[cfg(unix)]
pub use private::{Opening, PrivateDirectory};
#[cfg(unix)]
pub use real::RealDisk;
pub use sim::{Crash, SimDisk};

use std::io::Result;

/// Named files in one place that nobody else uses. Calls may overlap, and block.
pub trait Disk: Send + Sync {
    /// Names of all files.
    ///
    /// # Errors
    /// As the medium fails.
    fn names(&self) -> Result<Vec<String>>;

    /// Length of a file in bytes; none if there is no such file.
    ///
    /// # Errors
    /// As the medium fails.
    fn len(&self, file: &str) -> Result<Option<u64>>;

    /// Reads up to `data.len()` bytes from `offset` on; fewer only where the file ends.
    ///
    /// # Errors
    /// As the medium fails, or `NotFound`.
    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> Result<usize>;

    /// Writes all of `data` at `offset`; creates and grows the file as needed. After an error any part may be written.
    ///
    /// # Errors
    /// As the medium fails; `StorageFull` where there is no room.
    fn write_at(&self, file: &str, offset: u64, data: &[u8]) -> Result<()>;

    /// Cuts a file to at most `bytes` bytes.
    ///
    /// # Errors
    /// As the medium fails.
    fn cut(&self, file: &str, bytes: u64) -> Result<()>;

    /// Returns when what was written before lies safe on the medium.
    ///
    /// # Errors
    /// As the medium fails.
    fn sync(&self, file: &str) -> Result<()>;

    /// Returns when which files there are, and by which names, lies safe on the medium: until then files that were made, renamed and removed may be
    /// as they were before.
    ///
    /// # Errors
    /// As the medium fails.
    fn sync_names(&self) -> Result<()>;

    /// Gives a file another name, in place of the file that had it.
    ///
    /// # Errors
    /// As the medium fails.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// As the medium fails.
    fn remove(&self, file: &str) -> Result<()>;
}
