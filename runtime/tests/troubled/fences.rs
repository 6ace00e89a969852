//! Checks that no write lands after a fence.

use mixfleet_hal::Result;
use mixfleet_hal::fault::Fault;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_wire::FaultyTransport;
use std::sync::{Arc, Mutex};

/// A transport that records the contents of regions when they are deregistered.
pub(crate) struct Fences<T> {
    inner: T,
    open: Mutex<Vec<(Descriptor, Arc<dyn SharedMemory>)>>,
    closed: Mutex<Vec<Fenced>>,
}

/// The contents of a region when it was deregistered, and the region.
type Fenced = (Vec<u8>, Arc<dyn SharedMemory>);

fn content(memory: &dyn SharedMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.size_bytes() as usize];
    memory.load(0, &mut bytes).unwrap();
    bytes
}

impl<T: Transport> Fences<T> {
    pub(crate) fn new(inner: T) -> Self {
        Fences { inner, open: Mutex::default(), closed: Mutex::default() }
    }

    /// Number of fences, and of fences after which something landed.
    pub(crate) fn count(&self) -> (usize, usize) {
        let closed = self.closed.lock().unwrap();
        (closed.len(), closed.iter().filter(|(then, memory)| content(&**memory) != *then).count())
    }
}

impl<T: Transport> Fences<FaultyTransport<T>> {
    /// Number of batches of KV with this fault.
    pub(crate) fn struck(&self, fault: Fault) -> u64 {
        (0..self.inner.batches()).filter(|&batch| self.inner.plan().at(batch) == Some(fault)).count() as u64
    }
}

impl<T: Transport> Transport for Fences<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let region = self.inner.register(memory.clone(), access)?;
        self.open.lock().unwrap().push((region.clone(), memory));
        Ok(region)
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.inner.deregister(region)?;
        let mut open = self.open.lock().unwrap();
        let at = open.iter().position(|(known, _)| known == region).expect("it was registered");
        let (_, memory) = open.swap_remove(at);
        self.closed.lock().unwrap().push((content(&*memory), memory));
        Ok(())
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        self.inner.connect(local, region)
    }
}
