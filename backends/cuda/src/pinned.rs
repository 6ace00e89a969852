//! Host memory of others that the device copies directly.

use crate::driver::{Context, HostRegistered};
use crate::memory::Transfers;
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::{Mapping, Pinned, SharedMemory};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Ranges of pinned host memory, as the end of each by its first address. The driver pins no byte twice, so
/// they are disjoint.
#[derive(Default)]
pub(crate) struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    /// Whether all of `data` lies in one range.
    pub(crate) fn hold(&self, data: &[u8]) -> bool {
        let (first, end) = (data.as_ptr().addr(), data.as_ptr().addr() + data.len());
        self.0.range(..=first).next_back().is_some_and(|(_, &pinned_end)| end <= pinned_end)
    }
}

/// Memory that is pinned for as long as this lives.
struct Guard {
    transfers: Arc<Mutex<Transfers>>,
    first: usize,
    // unpinned before the memory can be freed
    _registered: HostRegistered,
    _memory: Arc<dyn SharedMemory>,
}

/// Pins all of `memory` for the copies of `transfers`; `None` if it has no address or is empty.
pub(crate) fn pin(
    context: &Arc<Context>,
    transfers: &Arc<Mutex<Transfers>>,
    memory: Arc<dyn SharedMemory>,
) -> Result<Option<Pinned>> {
    let Some(Mapping { address, bytes, .. }) = memory.mapping().filter(|mapping| mapping.bytes > 0) else {
        return Ok(None);
    };
    // SAFETY: the mapping is valid as long as the memory that gave it, which the guard holds.
    let registered = unsafe { HostRegistered::new(context, address, bytes)? };
    let mut locked = transfers.lock().unwrap_or_else(PoisonError::into_inner);
    locked.pinned.0.insert(address, address + to_usize(bytes));
    drop(locked);
    let transfers = transfers.clone();
    Ok(Some(Box::new(Guard { transfers, first: address, _registered: registered, _memory: memory })))
}

impl Drop for Guard {
    /// Each copy holds the lock until it is done, so afterwards none uses the range, and later ones go
    /// through the bounce buffers.
    fn drop(&mut self) {
        let mut locked = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        locked.pinned.0.remove(&self.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_holds_what_lies_in_it_from_its_first_byte_to_its_last() {
        let bytes = [0u8; 100];
        let first = bytes.as_ptr().addr();
        // two adjacent ranges: what spans both is in neither
        let ranges = Ranges([(first + 10, first + 50), (first + 50, first + 90)].into());
        for (range, held) in [
            (10..50, true),
            (10..11, true),
            (49..50, true),
            (50..90, true),
            (9..11, false),
            (49..51, false),
            (10..90, false),
            (89..91, false),
            (0..100, false),
            (95..99, false),
        ] {
            assert_eq!(ranges.hold(&bytes[range.clone()]), held, "{range:?}");
        }
    }
}
