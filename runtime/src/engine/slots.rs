//! The staging slots of a receiver: fixed pieces of registered memory, handed out as credits. A sender
//! without a slot waits, so what is on its way is bounded by the staging memory.

use std::sync::{Mutex, PoisonError};
use tokio::sync::Semaphore;

/// Free slots.
#[derive(Debug)]
pub(super) struct SlotPool {
    free: Mutex<Vec<u32>>,
    count: Semaphore,
    slot_bytes: u64,
}

impl SlotPool {
    /// `slots` free slots of `slot_bytes` bytes each.
    pub(super) fn new(slots: u32, slot_bytes: u64) -> Self {
        let free = Mutex::new((0..slots).rev().collect());
        SlotPool { free, count: Semaphore::new(slots as usize), slot_bytes }
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Waits for a free slot.
    pub(super) async fn take(&self) -> u32 {
        let permit = self.count.acquire().await.expect("the semaphore is never closed");
        permit.forget();
        let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        slot.expect("a permit stands for a slot")
    }

    /// Gives a slot back.
    pub(super) fn give(&self, slot: u32) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        self.count.add_permits(1);
    }
}
