//! Host memory owned by others that the device copies directly.

use crate::driver::{CudaContext, HostRegistered};
use crate::memory::Transfers;
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::{Mapping, Pinned, SharedMemory};
use std::collections::{BTreeMap, btree_map};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ranges of pinned host memory by their first address, each with its end and its number of guards. The
/// ranges of one process are disjoint, since the driver pins no byte twice.
#[derive(Default)]
pub(crate) struct Ranges(BTreeMap<usize, (usize, usize)>);

impl Ranges {
    /// Whether all of `data` lies in one range.
    pub(crate) fn hold(&self, data: &[u8]) -> bool {
        let (first, end) = (data.as_ptr().addr(), data.as_ptr().addr() + data.len());
        self.0.range(..=first).next_back().is_some_and(|(_, &(pinned_end, _))| end <= pinned_end)
    }

    fn add(&mut self, first: usize, end: usize) {
        self.0.entry(first).or_insert((end, 0)).1 += 1;
    }

    fn remove(&mut self, first: usize) {
        if let btree_map::Entry::Occupied(mut range) = self.0.entry(first) {
            range.get_mut().1 -= 1;
            if range.get().1 == 0 {
                range.remove();
            }
        }
    }
}

/// Memory that the process pinned, for all of its devices: the driver pins a byte once, for all contexts.
struct PinnedRegistration {
    end: usize,
    guards: usize,
    // unpinned before the memory can be freed
    _registered: HostRegistered,
    _memory: Arc<dyn SharedMemory>,
}

/// The pinned ranges, by first address.
static REGISTERED: Mutex<BTreeMap<usize, PinnedRegistration>> = Mutex::new(BTreeMap::new());

fn registrations() -> MutexGuard<'static, BTreeMap<usize, PinnedRegistration>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that is pinned for as long as this lives.
struct PinGuard {
    transfers: Arc<Mutex<Transfers>>,
    /// First address of the registration that holds it.
    first: usize,
    _memory: Arc<dyn SharedMemory>,
}

/// Pins all of `memory` for the copies of `transfers`; `None` if it has no address or is empty. Memory that
/// is already pinned, for this or another device, stays pinned until its last guard is dropped.
pub(crate) fn pin(
    context: &Arc<CudaContext>,
    transfers: &Arc<Mutex<Transfers>>,
    memory: Arc<dyn SharedMemory>,
) -> Result<Option<Pinned>> {
    let Some(Mapping { address, bytes, .. }) = memory.mapping().filter(|mapping| mapping.bytes > 0) else {
        return Ok(None);
    };
    let end = address + to_usize(bytes);
    let mut registered = registrations();
    let around = registered.range_mut(..=address).next_back().filter(|(_, known)| end <= known.end);
    let (first, end) = match around {
        Some((&first, known)) => {
            known.guards += 1;
            (first, known.end)
        }
        None => {
            // SAFETY: the mapping is valid as long as the memory that gave it, which the registration holds.
            let pinned = unsafe { HostRegistered::new(context, address, bytes)? };
            let _memory = memory.clone();
            registered.insert(address, PinnedRegistration { end, guards: 1, _registered: pinned, _memory });
            (address, end)
        }
    };
    drop(registered);
    transfers.lock().unwrap_or_else(PoisonError::into_inner).pinned.add(first, end);
    Ok(Some(Box::new(PinGuard { transfers: transfers.clone(), first, _memory: memory })))
}

impl Drop for PinGuard {
    /// Each copy holds the lock of the transfers until it is done, so afterwards none uses the range, and
    /// later ones go through the bounce buffers.
    fn drop(&mut self) {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner).pinned.remove(self.first);
        if let btree_map::Entry::Occupied(mut known) = registrations().entry(self.first) {
            known.get_mut().guards -= 1;
            if known.get().guards == 0 {
                known.remove();
            }
        }
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
        let mut ranges = Ranges::default();
        ranges.add(first + 10, first + 50);
        ranges.add(first + 50, first + 90);
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
