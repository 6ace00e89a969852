//! Page-aligned host memory that a device can pin.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_hal::{Error, Result};
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

const PAGE_BYTES: usize = 4096;

/// Bytes owned by this process.
pub(crate) struct Paged {
    memory: RwLock<Vec<u8>>,
    /// The range in use, which excludes the padding up to page boundaries.
    used: Range<usize>,
}

impl Paged {
    /// Allocates `bytes` zero bytes.
    pub(crate) fn new(bytes: u64) -> Self {
        let pages = to_usize(bytes).div_ceil(PAGE_BYTES);
        let memory = vec![0; (pages + 1) * PAGE_BYTES];
        let first = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr();
        Paged { memory: RwLock::new(memory), used: first..first + to_usize(bytes) }
    }

    fn range(&self, offset: u64, bytes: u64) -> Result<Range<usize>> {
        match offset.checked_add(bytes).filter(|&end| end <= self.used.len() as u64) {
            Some(end) => Ok(self.used.start + to_usize(offset)..self.used.start + to_usize(end)),
            None => Err(Error::invalid(format!("{bytes} bytes at {offset} leave {} bytes", self.used.len()))),
        }
    }
}

impl SharedMemory for Paged {
    fn size_bytes(&self) -> u64 {
        self.used.len() as u64
    }

    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        let range = self.range(offset, bytes)?;
        look(&self.memory.read().unwrap_or_else(PoisonError::into_inner)[range]);
        Ok(())
    }

    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let range = self.range(offset, bytes)?;
        change(&mut self.memory.write().unwrap_or_else(PoisonError::into_inner)[range]);
        Ok(())
    }

    fn mapping(&self) -> Option<Mapping> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        let address = memory.as_ptr().addr() + self.used.start;
        Some(Mapping { address, bytes: self.size_bytes(), fd: None })
    }
}
