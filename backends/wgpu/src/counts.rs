//! Counts of a device's work, which show the overhead of a step where times do not, such as on an adapter
//! that runs on the processor.

use std::sync::atomic::{AtomicU64, Ordering};

/// Work of a device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WgpuCounts {
    /// Submissions to the driver's queue.
    pub submissions: u64,
    /// Kernels dispatched.
    pub dispatches: u64,
    /// Copies between the device's own buffers.
    pub copies: u64,
    /// Commands that were planned, i.e. neither replayed nor empty.
    pub planned: u64,
    /// Bind groups made.
    pub bind_groups: u64,
    /// Maps of memory that the host reads.
    pub maps: u64,
    /// Bytes that the host wrote.
    pub bytes_written: u64,
    /// Bytes that the host read, timestamps included.
    pub bytes_read: u64,
}

impl std::ops::Sub for WgpuCounts {
    type Output = WgpuCounts;

    fn sub(self, before: WgpuCounts) -> WgpuCounts {
        WgpuCounts {
            submissions: self.submissions - before.submissions,
            dispatches: self.dispatches - before.dispatches,
            copies: self.copies - before.copies,
            planned: self.planned - before.planned,
            bind_groups: self.bind_groups - before.bind_groups,
            maps: self.maps - before.maps,
            bytes_written: self.bytes_written - before.bytes_written,
            bytes_read: self.bytes_read - before.bytes_read,
        }
    }
}

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) submissions: AtomicU64,
    pub(crate) dispatches: AtomicU64,
    pub(crate) copies: AtomicU64,
    pub(crate) planned: AtomicU64,
    pub(crate) bind_groups: AtomicU64,
    pub(crate) maps: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn read(&self) -> WgpuCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WgpuCounts {
            submissions: of(&self.submissions),
            dispatches: of(&self.dispatches),
            copies: of(&self.copies),
            planned: of(&self.planned),
            bind_groups: of(&self.bind_groups),
            maps: of(&self.maps),
            bytes_written: of(&self.bytes_written),
            bytes_read: of(&self.bytes_read),
        }
    }
}
