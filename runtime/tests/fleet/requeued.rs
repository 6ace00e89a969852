//! The reference device, behind another queue.

use mixfleet_hal::{
    Device, DeviceInfo, Export, Health, HostMemory, Limits, OpSig, Queue, Result, Role, Slice, Support,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use std::sync::Arc;

/// What a test makes of the device's own queue.
type Around = dyn Fn(Box<dyn Queue>) -> Box<dyn Queue> + Send + Sync;

pub(crate) struct Requeued {
    inner: ReferenceDevice,
    limits: Limits,
    around: Box<Around>,
}

impl Requeued {
    pub(crate) fn new(
        id: &str,
        around: impl Fn(Box<dyn Queue>) -> Box<dyn Queue> + Send + Sync + 'static,
    ) -> Self {
        let inner = ReferenceDevice::named(id);
        Requeued { limits: inner.limits(), inner, around: Box::new(around) }
    }

    /// Says whether recordings are to be made.
    pub(crate) fn replay_pays(mut self, pays: bool) -> Self {
        self.limits.replay_pays = pays;
        self
    }
}

impl Device for Requeued {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn limits(&self) -> Limits {
        self.limits
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
        self.inner.write(to, data)
    }
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.inner.read(from, data)
    }
    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok((self.around)(self.inner.queue()?))
    }
    fn health(&self) -> Health {
        self.inner.health()
    }
}
