//! Device buffers, and the events of the commands that use them.

use crate::device::failure;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Buffer, Error, HostMemory, Result, Slice};
use ocl::core::{self, Context, Event, Mem, MemFlags};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// A buffer, which the driver frees once the commands in flight that use it are done.
pub(crate) struct OpenclMemory {
    mem: Mem,
    bytes: u64,
    /// For each queue, its number and the last event of its last batch that uses the buffer.
    users: Mutex<Vec<(u64, Event)>>,
    /// Imported memory, which must outlive `mem`, is read-only, and must not be freed while commands use it.
    host: Option<Arc<dyn HostMemory>>,
}

impl std::fmt::Debug for OpenclMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("bytes", &self.bytes).field("imported", &self.host.is_some()).finish()
    }
}

impl OpenclMemory {
    /// Allocates `bytes` bytes on the device.
    pub(crate) fn new(context: &Context, bytes: u64) -> Result<OpenclMemory> {
        // OpenCL rejects empty buffers
        let len = to_usize(bytes.max(1));
        // SAFETY: no host pointer is passed, so the flags refer to no memory of ours.
        let mem = unsafe { core::create_buffer::<_, u8>(context, MemFlags::READ_WRITE, len, None) };
        let mem = mem.map_err(|e| failure("clCreateBuffer", &e))?;
        Ok(OpenclMemory { mem, bytes, users: Mutex::default(), host: None })
    }

    /// Wraps host memory in place.
    pub(crate) fn imported(context: &Context, host: Arc<dyn HostMemory>) -> Result<OpenclMemory> {
        let bytes = host.as_bytes();
        if bytes.is_empty() {
            return Err(Error::invalid("opencl: an import of no bytes"));
        }
        let flags = MemFlags::READ_ONLY | MemFlags::USE_HOST_PTR;
        // SAFETY: `host` does not move or change while it is held, and `OpenclMemory` holds it until `mem` is
        // released and every command that uses it is done (see `drop`). READ_ONLY keeps kernels, and
        // `writable` keeps our own commands, from writing through the pointer.
        let mem = unsafe { core::create_buffer::<_, u8>(context, flags, bytes.len(), Some(bytes)) };
        let mem = mem.map_err(|e| failure("clCreateBuffer over host memory", &e))?;
        Ok(OpenclMemory { mem, bytes: bytes.len() as u64, users: Mutex::default(), host: Some(host) })
    }

    /// Returns the memory of a slice.
    pub(crate) fn of(slice: &Slice) -> Result<&OpenclMemory> {
        let memory = slice.buffer.as_any().downcast_ref::<OpenclMemory>();
        memory.ok_or_else(|| Error::invalid("opencl: the slice belongs to another device"))
    }

    pub(crate) fn mem(&self) -> &Mem {
        &self.mem
    }

    /// Returns an error for imported memory.
    pub(crate) fn writable(&self) -> Result<()> {
        match self.host {
            Some(_) => Err(Error::invalid("opencl: imported memory is read-only")),
            None => Ok(()),
        }
    }

    /// Records that the batch of `queue` that ends with `event` uses the buffer. Batches of a queue end in
    /// order, so only the last one matters.
    pub(crate) fn used_by(&self, queue: u64, event: &Event) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|(other, event)| {
            *other != queue && core::event_is_complete(event).is_ok_and(|done| !done)
        });
        users.push((queue, event.clone()));
    }

    /// Waits until no command in flight uses the buffer. Failures of batches are reported by their tickets.
    pub(crate) fn settle(&self) {
        let users = std::mem::take(&mut *self.users.lock().unwrap_or_else(PoisonError::into_inner));
        for (_, event) in users {
            let _ = core::wait_for_event(&event);
        }
    }
}

impl Buffer for OpenclMemory {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for OpenclMemory {
    fn drop(&mut self) {
        if self.host.is_some() {
            self.settle();
        }
    }
}
