//! Host memory that two ends of a transport share.

use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{Error, Result};
use std::sync::{PoisonError, RwLock};

/// Heap memory behind a lock: many may read it at a time, one may write.
#[derive(Debug)]
pub struct HostRegion {
    bytes: RwLock<Box<[u8]>>,
}

impl HostRegion {
    /// `bytes` zero bytes.
    pub fn new(bytes: usize) -> Self {
        HostRegion { bytes: RwLock::new(vec![0; bytes].into_boxed_slice()) }
    }
}

/// The place of `length` bytes at `offset` in a region of `bytes` bytes.
///
/// # Errors
/// `Invalid` when it leaves the region.
pub(crate) fn range(offset: u64, length: usize, bytes: u64) -> Result<std::ops::Range<usize>> {
    let end = offset.checked_add(length as u64).filter(|&end| end <= bytes);
    match end {
        Some(end) => Ok(offset as usize..end as usize),
        None => {
            Err(Error::invalid(format!("{length} bytes at offset {offset} leave a region of {bytes} bytes")))
        }
    }
}

impl SharedMemory for HostRegion {
    fn size_bytes(&self) -> u64 {
        // Plain bytes are whole after any panic: a poisoned lock says nothing about them.
        self.bytes.read().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn store(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        let range = range(offset, data.len(), bytes.len() as u64)?;
        bytes[range].copy_from_slice(data);
        Ok(())
    }

    fn load(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        let range = range(offset, data.len(), bytes.len() as u64)?;
        data.copy_from_slice(&bytes[range]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::ErrorKind;

    #[test]
    fn what_was_stored_is_loaded_up_to_the_very_end() {
        let region = HostRegion::new(8);
        region.store(5, &[1, 2, 3]).unwrap();
        let mut data = [9; 8];
        region.load(0, &mut data).unwrap();
        assert_eq!(data, [0, 0, 0, 0, 0, 1, 2, 3]);
        region.store(8, &[]).unwrap();
    }

    #[test]
    fn nothing_is_reached_beyond_the_end() {
        let region = HostRegion::new(8);
        for (offset, length) in [(6, 3), (8, 1), (9, 0), (u64::MAX, 2)] {
            let mut data = vec![7; length];
            assert_eq!(region.store(offset, &data).unwrap_err().kind, ErrorKind::Invalid);
            assert_eq!(region.load(offset, &mut data).unwrap_err().kind, ErrorKind::Invalid);
        }
        let mut all = [1; 8];
        region.load(0, &mut all).unwrap();
        assert_eq!(all, [0; 8]);
    }
}
