//! The in-process transport.

use crate::one_sided::{Carrier, Direction, OneSided, Reach};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

const NAME: &str = "memory";

/// Bytes copied at a time, few enough to stay in the core's own cache between the two memories.
const BOUNCE_BYTES: u64 = 64 * 1024;

/// Connects ends within one process. A batch is copied on the caller's thread and is complete when `write` or
/// `read` returns; a worker that wants to overlap it with computation uses a thread of its own.
pub struct InProcessTransport {
    /// Distinguishes this value's addresses from those of other values, in this process and elsewhere.
    tag: u64,
    regions: Mutex<InProcessRegions>,
}

impl Default for InProcessTransport {
    fn default() -> Self {
        let tag = RandomState::new().hash_one(std::process::id());
        InProcessTransport { tag, regions: Mutex::default() }
    }
}

#[derive(Default)]
struct InProcessRegions {
    by_address: BTreeMap<u64, Arc<InProcessRegion>>,
    next_address: u64,
    next_epoch: u64,
}

/// A registered memory. The lock on its grant is held while a batch copies, so that a deregistered or
/// re-registered region is never accessed under its old epoch, not even by a batch that had begun before.
struct InProcessRegion {
    memory: Arc<dyn SharedMemory>,
    /// The current epoch and access; `None` if access was revoked.
    grant: RwLock<Option<(u64, RemoteAccess)>>,
}

impl InProcessRegion {
    fn grant(&self, grant: Option<(u64, RemoteAccess)>) {
        *self.grant.write().unwrap_or_else(PoisonError::into_inner) = grant;
    }
}

impl InProcessTransport {
    /// Creates a transport without regions. Only ends of this same value can connect to each other.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, InProcessRegions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InProcessRegions {
    fn find(&self, tag: u64, descriptor: &Descriptor) -> Result<(u64, Arc<InProcessRegion>)> {
        let Descriptor { transport, address, .. } = descriptor;
        let parts = address.split_once('/').filter(|_| transport == NAME);
        let parts = parts.and_then(|(tag, at)| Some((u64::from_str_radix(tag, 16).ok()?, at.parse().ok()?)));
        if parts.is_some_and(|(theirs, _)| theirs != tag) {
            return Err(Error::unsupported(
                "the region is in another process; use a transport that reaches it",
            ));
        }
        let found = parts.and_then(|(_, at)| Some((at, self.by_address.get(&at)?.clone())));
        found.ok_or_else(|| {
            Error::new(ErrorKind::Closed, format!("no region '{transport}:{address}' in this process"))
        })
    }
}

impl Transport for InProcessTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Memory that is already registered keeps its address and gets a new epoch, so that holders of an older
    /// descriptor lose access.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let mut regions = self.lock();
        let epoch = regions.next_epoch;
        regions.next_epoch += 1;
        let bytes = memory.size_bytes();
        let same =
            |region: &InProcessRegion| std::ptr::addr_eq(Arc::as_ptr(&region.memory), Arc::as_ptr(&memory));
        let known = regions.by_address.iter().find(|(_, region)| same(region));
        let address = match known {
            Some((&address, region)) => {
                region.grant(Some((epoch, access)));
                address
            }
            None => {
                let address = regions.next_address;
                regions.next_address += 1;
                let region = InProcessRegion { memory, grant: RwLock::new(Some((epoch, access))) };
                regions.by_address.insert(address, Arc::new(region));
                address
            }
        };
        let address = format!("{:016x}/{address}", self.tag);
        Ok(Descriptor { transport: NAME.into(), address, epoch, bytes })
    }

    /// Waits for batches that are being copied. Under an old epoch it only reports `Closed`.
    fn deregister(&self, region: &Descriptor) -> Result<()> {
        let mut regions = self.lock();
        let (address, found) = regions.find(self.tag, region)?;
        let mut grant = found.grant.write().unwrap_or_else(PoisonError::into_inner);
        if grant.is_none_or(|(epoch, _)| epoch != region.epoch) {
            return Err(outdated(address, region.epoch));
        }
        *grant = None;
        regions.by_address.remove(&address);
        Ok(())
    }

    /// Returns `Unsupported` for a region of another value of this type.
    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let (address, found) = self.lock().find(self.tag, region)?;
        let granted = *found.grant.read().unwrap_or_else(PoisonError::into_inner);
        let Some((_, access)) = granted.filter(|(epoch, _)| *epoch == region.epoch) else {
            return Err(outdated(address, region.epoch));
        };
        let reach =
            Reach { local_bytes: local.size_bytes(), remote_bytes: found.memory.size_bytes(), access };
        let (epoch, bounce) = (region.epoch, Vec::new());
        Ok(Box::new(OneSided::new(InProcessLink { local, address, region: found, epoch, reach, bounce })))
    }
}

fn outdated(address: u64, epoch: u64) -> Error {
    let detail = format!("region '{NAME}:{address}' is no longer registered under epoch {epoch}");
    Error::new(ErrorKind::Closed, detail)
}

/// A connection to one region under one epoch.
struct InProcessLink {
    local: Arc<dyn SharedMemory>,
    address: u64,
    region: Arc<InProcessRegion>,
    epoch: u64,
    reach: Reach,
    /// Intermediate buffer, so that no lock is held while waiting for the other memory's.
    bounce: Vec<u8>,
}

impl Carrier for InProcessLink {
    fn reach(&self) -> Reach {
        self.reach
    }

    fn begin(&mut self, _batch: u64, pieces: &[Piece], direction: Direction) -> Result<u64> {
        let grant = self.region.grant.read().unwrap_or_else(PoisonError::into_inner);
        if grant.filter(|(epoch, _)| *epoch == self.epoch).is_none() {
            return Err(outdated(self.address, self.epoch));
        }
        let (here, there) = (&*self.local, &*self.region.memory);
        for piece in pieces {
            for at in (0..piece.bytes).step_by(to_usize(BOUNCE_BYTES)) {
                self.bounce.resize(to_usize(BOUNCE_BYTES.min(piece.bytes - at)), 0);
                let (local, remote) = (piece.local + at, piece.remote + at);
                match direction {
                    Direction::Write => {
                        here.load(local, &mut self.bounce)?;
                        there.store(remote, &self.bounce)?;
                    }
                    Direction::Read => {
                        there.load(remote, &mut self.bounce)?;
                        here.store(local, &self.bounce)?;
                    }
                }
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostRegion;

    #[test]
    fn memory_that_is_registered_anew_keeps_its_address() {
        let (wire, memory) = (InProcessTransport::new(), Arc::new(HostRegion::new(4).unwrap()));
        let old = wire.register(memory.clone(), RemoteAccess::Write).unwrap();
        let new = wire.register(memory.clone(), RemoteAccess::Write).unwrap();
        assert_eq!((&old.address, old.epoch == new.epoch), (&new.address, false));
        wire.deregister(&new).unwrap();
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn a_region_of_another_process_is_not_taken_for_ones_own() {
        let (here, there) = (InProcessTransport::new(), InProcessTransport::new());
        let memory = Arc::new(HostRegion::new(4).unwrap());
        let theirs = there.register(memory.clone(), RemoteAccess::Write).unwrap();
        here.register(Arc::new(HostRegion::new(4).unwrap()), RemoteAccess::Write).unwrap();
        assert_eq!(here.connect(memory, &theirs).err().unwrap().kind, ErrorKind::Unsupported);
    }
}
