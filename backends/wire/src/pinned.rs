//! Memory by its address, for transports that move bytes by themselves.

use crate::region::range;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How often each mapped memory of this process, by its address, is in use by a [`Place`].
static IN_USE: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn in_use() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mapped memory, kept alive and where it is.
pub(crate) struct PinnedRange {
    _memory: Arc<dyn SharedMemory>,
    address: usize,
    bytes: u64,
}

impl PinnedRange {
    /// Where `memory` lies.
    ///
    /// # Errors
    /// `Unsupported` when it may only be reached by calls.
    pub(crate) fn new(memory: Arc<dyn SharedMemory>) -> Result<Self> {
        let mut in_use = in_use();
        let mapping = memory.mapping().ok_or_else(|| {
            Error::unsupported("this memory has no address; stage through memory that has one (HostRegion)")
        })?;
        *in_use.entry(mapping.address).or_default() += 1;
        Ok(PinnedRange { _memory: memory, address: mapping.address, bytes: mapping.bytes })
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of `bytes` bytes from `offset` on. It is valid as long as this place.
    ///
    /// # Errors
    /// `Invalid` when the range leaves the memory.
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

/// Renews memory unless a [`Place`] is in use, whose bytes could be lost on the way.
///
/// # Errors
/// As [`SharedMemory::renew`]; `Unsupported` when a place is in use.
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
