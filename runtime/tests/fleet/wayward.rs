//! A reference device with hooks for tests.

use mixfleet_hal::{Device, DeviceLimits, OpSig, Queue, Result, Slice, Support};
use mixfleet_hwtests::reference::ReferenceDevice;
use std::sync::Arc;

type Write = dyn Fn(&Slice, &[u8]) -> Result<()> + Send + Sync;
type Read = dyn Fn(&Slice, &mut [u8]) -> Result<()> + Send + Sync;
type Lacks = dyn Fn(&OpSig) -> bool + Send + Sync;
type Around = dyn Fn(Box<dyn Queue>) -> Box<dyn Queue> + Send + Sync;

/// Hooks on the bytes between host and device: a hook's error becomes the device's. Hooks run before bytes
/// are written, and after they were read.
pub(crate) struct Wayward {
    inner: Arc<dyn Device>,
    limits: DeviceLimits,
    write: Box<Write>,
    read: Box<Read>,
    queue: Box<Around>,
    lacks: Box<Lacks>,
}

impl Wayward {
    /// The reference device with this name.
    pub(crate) fn new(id: &str) -> Self {
        Self::over(Arc::new(ReferenceDevice::named(id)))
    }

    pub(crate) fn over(inner: Arc<dyn Device>) -> Self {
        let limits = inner.limits();
        let (write, read) =
            (Box::new(|_: &Slice, _: &[u8]| Ok(())), Box::new(|_: &Slice, _: &mut [u8]| Ok(())));
        Wayward { inner, limits, write, read, queue: Box::new(|queue| queue), lacks: Box::new(|_| false) }
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

    /// Wraps its queues.
    pub(crate) fn queuing(
        mut self,
        queue: impl Fn(Box<dyn Queue>) -> Box<dyn Queue> + Send + Sync + 'static,
    ) -> Self {
        self.queue = Box::new(queue);
        self
    }

    /// Lets it lack some operations.
    pub(crate) fn refusing(mut self, lacks: impl Fn(&OpSig) -> bool + Send + Sync + 'static) -> Self {
        self.lacks = Box::new(lacks);
        self
    }

    /// Sets whether it copies beside steps.
    pub(crate) fn copies_beside(mut self, copies: bool) -> Self {
        self.limits.copies_beside = copies;
        self
    }

    /// Sets whether recordings pay off.
    pub(crate) fn replay_pays(mut self, pays: bool) -> Self {
        self.limits.replay_pays = pays;
        self
    }
}

impl Device for Wayward {
    mixfleet_hal::forward_device!(self => self.inner; info, alloc, import, reaches, pin, memory_free, health);

    fn limits(&self) -> DeviceLimits {
        self.limits
    }
    fn support(&self, sig: &OpSig) -> Support {
        if (self.lacks)(sig) { Support::No } else { self.inner.support(sig) }
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
        Ok((self.queue)(self.inner.queue()?))
    }
}
