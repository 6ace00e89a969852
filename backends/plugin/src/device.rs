//! A device of a library.

use crate::library::PluginLibrary;
use crate::opened::OpenedDevice;
use crate::queue::PluginQueue;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    BufferUsage, Device, DeviceInfo, DeviceLimits, Error, ErrorKind, Health, HostMemory, OpSig, Queue,
    Result, Slice, Support,
};
use std::sync::Arc;

/// A device of a library, with what it says of itself.
pub(crate) struct PluginDevice {
    open: Arc<OpenedDevice>,
    info: DeviceInfo,
    limits: DeviceLimits,
}

impl PluginDevice {
    pub(crate) fn open(library: Arc<PluginLibrary>, index: u32) -> Result<Self> {
        let (info, limits) = library.describe(index)?;
        let open = OpenedDevice::open(library, index, &info.id)?;
        Ok(PluginDevice { open, info, limits })
    }
}

impl Device for PluginDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn support(&self, sig: &OpSig) -> Support {
        self.open.support(sig)
    }

    fn alloc(&self, bytes: u64, _: BufferUsage) -> Result<Slice> {
        let most = self.limits.allocation_bytes_max;
        if bytes > most {
            let message = format!("{}: {bytes} bytes are more than a buffer has, {most}", self.info.id);
            return Err(Error::new(ErrorKind::OutOfMemory, message));
        }
        self.open.alloc(bytes)
    }

    fn import(&self, _: Arc<dyn HostMemory>) -> Result<Slice> {
        Err(Error::unsupported(format!("{} does not use memory of the host in place", self.info.id)))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.open.write(to, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.open.read(from, data)
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(PluginQueue::start(self.open.clone(), &self.info.id)?))
    }

    fn memory_free(&self) -> Option<Bytes> {
        let bytes = self.open.memory_free()?;
        Some(Bytes((bytes as f64).min(self.info.memory.0)))
    }

    fn health(&self) -> Health {
        self.open.health()
    }
}
