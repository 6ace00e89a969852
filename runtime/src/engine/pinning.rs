//! Host memory that an instance's device copies to and from by itself.

use mixfleet_hal::Device;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pins memory for one device. What is refused is only slower: it is said once.
pub(super) struct Pinner {
    device: Arc<dyn Device>,
    said: AtomicBool,
}

impl Pinner {
    pub(super) fn new(device: Arc<dyn Device>) -> Self {
        Pinner { device, said: AtomicBool::new(false) }
    }

    /// Pins `memory` where that helps and is allowed. It may not be deregistered while the guard lives:
    /// fencing renews it.
    pub(super) fn pin(&self, memory: &Arc<dyn SharedMemory>) -> Option<Pinned> {
        self.device.pin(memory.clone()).unwrap_or_else(|error| {
            if !self.said.swap(true, Ordering::Relaxed) {
                let (device, bytes) = (&self.device.info().id, memory.size_bytes());
                tracing::warn!(device, bytes, %error, "host memory is not pinned: copies of KV take longer");
            }
            None
        })
    }
}
