//! Memory by its address, for transports that access it directly.

use crate::region::range;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Use counts of this process's mapped memories by address; each [`PinnedRange`] counts one.
static IN_USE: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn in_use() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mapped memory with its address, kept alive.
pub(crate) struct PinnedRange {
    _memory: Arc<dyn SharedMemory>,
    address: usize,
    bytes: u64,
}

impl PinnedRange {
    /// Resolves the address of `memory`.
    ///
    /// # Errors
    /// `Unsupported` if it can only be accessed through calls.
    pub(crate) fn new(memory: Arc<dyn SharedMemory>) -> Result<Self> {
        let mut in_use = in_use();
        let mapping = memory.mapping().ok_or_else(|| {
            Error::unsupported("this memory has no address; stage through memory that has one (HostRegion)")
        })?;
        *in_use.entry(mapping.address).or_default() += 1;
        Ok(PinnedRange { _memory: memory, address: mapping.address, bytes: mapping.bytes })
    }

    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the address of `bytes` bytes at `offset`, valid as long as this value lives.
    ///
    /// # Errors
    /// `Invalid` if the range exceeds the memory.
    pub(crate) fn address(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        let range = range(offset, bytes, self.bytes)?;
        Ok((self.address + range.start) as *mut u8)
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        let mut in_use = in_use();
        if let Some(count) = in_use.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                in_use.remove(&self.address);
            }
        }
    }
}

/// Renews memory unless a [`PinnedRange`] uses it, whose bytes in flight could be lost.
///
/// # Errors
/// As for [`SharedMemory::renew`]; `Unsupported` while a range is in use.
#[cfg(target_os = "linux")]
pub(crate) fn renew(memory: &dyn SharedMemory) -> Result<()> {
    let in_use = in_use();
    if memory.mapping().is_some_and(|mapping| in_use.contains_key(&mapping.address)) {
        return Err(Error::unsupported("another transport of this process moves bytes of this memory"));
    }
    memory.renew()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostRegion;
    use mixfleet_hal::ErrorKind;

    #[test]
    fn an_address_is_given_only_inside() {
        let memory = Arc::new(HostRegion::new(8).unwrap());
        let place = PinnedRange::new(memory.clone()).unwrap();
        assert_eq!(place.address(3, 5).unwrap() as usize, memory.mapping().unwrap().address + 3);
        for (offset, bytes) in [(8, 1), (0, 9), (u64::MAX, 1)] {
            assert_eq!(place.address(offset, bytes).unwrap_err().kind, ErrorKind::Invalid);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_in_use_by_address_is_not_renewed() {
        let memory = Arc::new(HostRegion::new(8).unwrap());
        let places = [(); 2].map(|()| PinnedRange::new(memory.clone()).unwrap());
        for place in places {
            assert_eq!(renew(&*memory).unwrap_err().kind, ErrorKind::Unsupported);
            drop(place);
        }
        renew(&*memory).unwrap();
    }
}
