//! Pinning host memory that an instance's device copies to and from.

use mixfleet_hal::Device;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pins memory for one device. Unpinned memory is only slower, so a refusal is logged once.
pub(super) struct Pinner {
    device: Arc<dyn Device>,
    said: AtomicBool,
}

impl Pinner {
    pub(super) fn new(device: Arc<dyn Device>) -> Self {
        Pinner { device, said: AtomicBool::new(false) }
    }

    /// Pins `memory` where that helps and is allowed. It must not be deregistered while the guard lives,
    /// since fencing replaces its pages.
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
