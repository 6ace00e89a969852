//! The reference device with a will of its own.

use mixfleet_hal::{
    Device, DeviceInfo, Export, Health, HostMemory, Limits, OpSig, Queue, Result, Role, Slice, Support,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use std::sync::Arc;

type Write = dyn Fn(&Slice, &[u8]) -> Result<()> + Send + Sync;
type Read = dyn Fn(&Slice, &mut [u8]) -> Result<()> + Send + Sync;

/// What a test makes of what passes between host and device: an error stands for the device's own, and is told before anything is
/// written, or after it was read.
pub(crate) struct Wayward {
    inner: ReferenceDevice,
    write: Box<Write>,
    read: Box<Read>,
}

impl Wayward {
    pub(crate) fn new(id: &str) -> Self {
        let inner = ReferenceDevice::named(id);
        Wayward { inner, write: Box::new(|_, _| Ok(())), read: Box::new(|_, _| Ok(())) }
    }

    pub(crate) fn writing(
        mut self,
        write: impl Fn(&Slice, &[u8]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.write = Box::new(write);
        self
    }

    pub(crate) fn reading(
        mut self,
        read: impl Fn(&Slice, &mut [u8]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.read = Box::new(read);
        self
    }
}

impl Device for Wayward {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn support(&self, sig: &OpSig) -> Support {
        self.inner.support(sig)
    }
    fn alloc(&self, bytes: u64, role: Role) -> Result<Slice> {
        self.inner.alloc(bytes, role)
    }
    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        self.inner.import(memory)
    }
    fn export(&self, slice: &Slice) -> Option<Export> {
        self.inner.export(slice)
    }
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        (self.write)(to, data)?;
        self.inner.write(to, data)
    }
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.inner.read(from, data)?;
        (self.read)(from, data)
    }
    fn queue(&self) -> Result<Box<dyn Queue>> {
        self.inner.queue()
    }
    fn health(&self) -> Health {
        self.inner.health()
    }
}
