//! Memory of a library's device.

use crate::abi::{MixfleetBuffer, MixfleetSlice};
use crate::device::OpenDevice;
use mixfleet_hal::{Buffer, Error, Result, Slice};
use std::any::Any;
use std::sync::Arc;

/// A buffer, freed with the last slice of it.
pub(crate) struct PluginBuffer {
    pub(crate) device: Arc<OpenDevice>,
    pub(crate) raw: *mut MixfleetBuffer,
    pub(crate) bytes: u64,
}

// SAFETY: the pointer is only handed to the library, whose functions any thread may call.
unsafe impl Send for PluginBuffer {}
// SAFETY: as above.
unsafe impl Sync for PluginBuffer {}

impl std::fmt::Debug for PluginBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Buffer for PluginBuffer {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for PluginBuffer {
    fn drop(&mut self) {
        self.device.free(self.raw);
    }
}

/// A slice as the library gets it.
///
/// # Errors
/// `Invalid` if it is of another device.
pub(crate) fn raw(device: &Arc<OpenDevice>, slice: &Slice) -> Result<MixfleetSlice> {
    let buffer = slice.buffer.as_any().downcast_ref::<PluginBuffer>();
    let buffer = buffer.filter(|buffer| Arc::ptr_eq(&buffer.device, device));
    let buffer = buffer.ok_or_else(|| Error::invalid("the slice belongs to another device"))?;
    Ok(MixfleetSlice { buffer: buffer.raw, offset: slice.offset, bytes: slice.bytes })
}
