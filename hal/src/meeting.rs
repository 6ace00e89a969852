//! Synchronises the threads that run the batches of several devices, between two batches.

use crate::{Result, Slice};
use std::sync::Arc;

/// Memory of a device, for the thread that runs its batches.
pub trait BatchMemory {
    /// Copies a slice of the device's memory.
    ///
    /// # Errors
    /// As for [`Device::read`](crate::Device::read).
    fn read(&self, from: &Slice, into: &mut [u8]) -> Result<()>;

    /// Writes a slice of the device's memory.
    ///
    /// # Errors
    /// As for [`Device::write`](crate::Device::write).
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()>;
}

/// An exchange between members of an instance, for which the threads that run their batches wait for each
/// other, without the thread that submits.
pub trait Meeting: Send + Sync {
    /// Exchanges what member `member` has in its `memory`, once all members have come as often.
    ///
    /// # Errors
    /// Those of the memory, and `Closed` once a member has left.
    fn meet(&self, member: usize, memory: &dyn BatchMemory) -> Result<()>;

    /// Ends all meetings, present and future, because a member has left.
    fn end(&self);
}

/// A member's place at a [`Meeting`].
#[derive(Clone)]
pub struct MeetingSeat {
    /// The meeting.
    pub meeting: Arc<dyn Meeting>,
    /// The member's number.
    pub member: usize,
}
