//! Both ends in one process.

use crate::region::range;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, TransferId, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

const NAME: &str = "memory";

/// Joins ends that live in one process. A write copies on the caller's thread and has landed when
/// `write` returns; a worker that wants it beside its computing calls from a thread of its own.
#[derive(Default)]
pub struct Memory {
    regions: Mutex<Regions>,
}

#[derive(Default)]
struct Regions {
    by_address: BTreeMap<u64, Arc<Region>>,
    next_address: u64,
    next_epoch: u64,
}

/// Registered memory. The epoch's lock is held while a write copies, so that a region that was
/// deregistered or registered anew is never written under its old epoch, not even by a write that
/// had begun before.
struct Region {
    memory: Arc<dyn SharedMemory>,
    /// The epoch under which it may be written; none: not at all.
    epoch: RwLock<Option<u64>>,
}

impl Region {
    fn set_epoch(&self, epoch: Option<u64>) {
        *self.epoch.write().unwrap_or_else(PoisonError::into_inner) = epoch;
    }
}

impl Memory {
    /// No region is registered yet. Only ends of this same value reach each other.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Regions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Regions {
    fn find(&self, descriptor: &Descriptor) -> Result<(u64, Arc<Region>)> {
        let Descriptor { transport, address, .. } = descriptor;
        let known = address.parse::<u64>().ok().filter(|_| transport == NAME);
        let found = known.and_then(|address| Some((address, self.by_address.get(&address)?.clone())));
        found.ok_or_else(|| {
            Error::new(ErrorKind::Closed, format!("no region '{transport}:{address}' in this process"))
        })
    }
}

impl Transport for Memory {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Memory that is registered already keeps its address and gets a new epoch: who holds an older
    /// descriptor can no longer write to it.
    fn register(&self, memory: Arc<dyn SharedMemory>) -> Result<Descriptor> {
        let mut regions = self.lock();
        let epoch = regions.next_epoch;
        regions.next_epoch += 1;
        let bytes = memory.size_bytes();
        let same = |region: &Region| std::ptr::addr_eq(Arc::as_ptr(&region.memory), Arc::as_ptr(&memory));
        let known = regions.by_address.iter().find(|(_, region)| same(region));
        let address = match known {
            Some((&address, region)) => {
                region.set_epoch(Some(epoch));
                address
            }
            None => {
                let address = regions.next_address;
                regions.next_address += 1;
                let region = Region { memory, epoch: RwLock::new(Some(epoch)) };
                regions.by_address.insert(address, Arc::new(region));
                address
            }
        };
        Ok(Descriptor { transport: NAME.into(), address: address.to_string(), epoch, bytes })
    }

    /// Waits for writes that are copying. Under an old epoch it does nothing but report `Closed`.
    fn deregister(&self, region: &Descriptor) -> Result<()> {
        let mut regions = self.lock();
        let (address, found) = regions.find(region)?;
        let mut epoch = found.epoch.write().unwrap_or_else(PoisonError::into_inner);
        if *epoch != Some(region.epoch) {
            return Err(outdated(address, region.epoch));
        }
        *epoch = None;
        regions.by_address.remove(&address);
        Ok(())
    }

    fn connect(&self, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let (address, found) = self.lock().find(region)?;
        let way = Way { address, region: found, epoch: region.epoch, next: 0, open: BTreeSet::new() };
        way.write_pieces(&[])?;
        Ok(Box::new(way))
    }
}

fn outdated(address: u64, epoch: u64) -> Error {
    let detail = format!("region '{NAME}:{address}' is no longer registered under epoch {epoch}");
    Error::new(ErrorKind::Closed, detail)
}

/// A way to one region under one epoch.
struct Way {
    address: u64,
    region: Arc<Region>,
    epoch: u64,
    next: u64,
    /// Written, neither waited for nor given up.
    open: BTreeSet<u64>,
}

impl Way {
    /// Copies all pieces, or none: they are checked before the first one lands.
    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<()> {
        let epoch = self.region.epoch.read().unwrap_or_else(PoisonError::into_inner);
        if *epoch != Some(self.epoch) {
            return Err(outdated(self.address, self.epoch));
        }
        let bytes = self.region.memory.size_bytes();
        for piece in pieces {
            range(piece.offset, piece.data.len(), bytes)?;
        }
        pieces.iter().try_for_each(|piece| self.region.memory.store(piece.offset, piece.data))
    }
}

impl Endpoint for Way {
    fn write(&mut self, pieces: &[Piece<'_>]) -> Result<TransferId> {
        self.write_pieces(pieces)?;
        let id = self.next;
        self.next += 1;
        self.open.insert(id);
        Ok(TransferId(id))
    }

    fn wait(&mut self, transfer: TransferId, _timeout: Duration) -> Result<()> {
        if self.open.remove(&transfer.0) {
            return Ok(());
        }
        if transfer.0 < self.next {
            let detail = format!("transfer {} was given up or waited for before", transfer.0);
            return Err(Error::new(ErrorKind::Closed, detail));
        }
        Err(Error::invalid(format!("transfer {} never began on this endpoint", transfer.0)))
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        self.open.remove(&transfer.0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostRegion;

    const NOW: Duration = Duration::ZERO;

    fn content(region: &HostRegion) -> Vec<u8> {
        let mut bytes = vec![0; region.size_bytes() as usize];
        region.load(0, &mut bytes).unwrap();
        bytes
    }

    fn piece(offset: u64, data: &[u8]) -> Piece<'_> {
        Piece { data, offset }
    }

    #[test]
    fn pieces_land_where_they_should_and_nowhere_else() {
        let (wire, region) = (Memory::new(), Arc::new(HostRegion::new(8)));
        let descriptor = wire.register(region.clone()).unwrap();
        assert_eq!(descriptor.bytes, 8);
        let mut way = wire.connect(&descriptor).unwrap();
        let transfer = way.write(&[piece(6, &[1, 2]), piece(1, &[3])]).unwrap();
        way.wait(transfer, NOW).unwrap();
        assert_eq!(content(&region), [0, 3, 0, 0, 0, 0, 1, 2]);
    }

    #[test]
    fn one_piece_out_of_bounds_stops_all() {
        let (wire, region) = (Memory::new(), Arc::new(HostRegion::new(8)));
        let mut way = wire.connect(&wire.register(region.clone()).unwrap()).unwrap();
        let error = way.write(&[piece(0, &[1, 2]), piece(7, &[3, 4])]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
        assert_eq!(content(&region), [0; 8]);
    }

    #[test]
    fn a_write_under_an_old_epoch_never_lands() {
        let (wire, region) = (Memory::new(), Arc::new(HostRegion::new(4)));
        let old = wire.register(region.clone()).unwrap();
        let mut late = wire.connect(&old).unwrap();
        let new = wire.register(region.clone()).unwrap();
        assert_eq!((&old.address, old.epoch == new.epoch), (&new.address, false));
        assert_eq!(late.write(&[piece(0, &[1])]).unwrap_err().kind, ErrorKind::Closed);
        assert_eq!(wire.connect(&old).err().unwrap().kind, ErrorKind::Closed);
        assert_eq!(wire.deregister(&old).unwrap_err().kind, ErrorKind::Closed);
        wire.connect(&new).unwrap().write(&[piece(1, &[2])]).unwrap();
        assert_eq!(content(&region), [0, 2, 0, 0]);
    }

    #[test]
    fn after_deregistration_the_region_is_closed_and_freed() {
        let (wire, region) = (Memory::new(), Arc::new(HostRegion::new(4)));
        let descriptor = wire.register(region.clone()).unwrap();
        let mut way = wire.connect(&descriptor).unwrap();
        wire.deregister(&descriptor).unwrap();
        assert_eq!(way.write(&[piece(0, &[1])]).unwrap_err().kind, ErrorKind::Closed);
        assert_eq!(wire.connect(&descriptor).err().unwrap().kind, ErrorKind::Closed);
        assert_eq!(wire.deregister(&descriptor).unwrap_err().kind, ErrorKind::Closed);
        drop(way);
        assert_eq!(Arc::strong_count(&region), 1);
    }

    #[test]
    fn descriptors_of_others_are_refused() {
        let wire = Memory::new();
        let good = wire.register(Arc::new(HostRegion::new(4))).unwrap();
        let other = [
            Descriptor { transport: "tcp".into(), ..good.clone() },
            Descriptor { address: "7".into(), ..good.clone() },
            Descriptor { address: "not a number".into(), ..good.clone() },
            Descriptor { epoch: good.epoch + 1, ..good },
        ];
        for descriptor in other {
            assert_eq!(wire.connect(&descriptor).err().unwrap().kind, ErrorKind::Closed, "{descriptor:?}");
        }
    }

    #[test]
    fn a_transfer_ends_once() {
        let wire = Memory::new();
        let mut way = wire.connect(&wire.register(Arc::new(HostRegion::new(4))).unwrap()).unwrap();
        let done = way.write(&[piece(0, &[1])]).unwrap();
        way.wait(done, NOW).unwrap();
        assert_eq!(way.wait(done, NOW).unwrap_err().kind, ErrorKind::Closed);
        let given_up = way.write(&[piece(0, &[2])]).unwrap();
        way.cancel(given_up).unwrap();
        assert_eq!(way.wait(given_up, NOW).unwrap_err().kind, ErrorKind::Closed);
        assert_eq!(way.wait(TransferId(99), NOW).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn writers_on_many_threads_stop_at_the_fence() {
        let (wire, region) = (Memory::new(), Arc::new(HostRegion::new(64)));
        let descriptor = wire.register(region.clone()).unwrap();
        let started = std::sync::Barrier::new(5);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let mut way = wire.connect(&descriptor).unwrap();
                let started = &started;
                scope.spawn(move || {
                    started.wait();
                    // Ends only because the region closes.
                    for round in 1u64.. {
                        let data = [thread + 1; 16];
                        match way.write(&[piece(u64::from(thread) * 16, &data)]) {
                            Ok(transfer) => way.wait(transfer, NOW).unwrap(),
                            Err(error) => return assert_eq!(error.kind, ErrorKind::Closed, "round {round}"),
                        }
                    }
                });
            }
            started.wait();
            wire.deregister(&descriptor).unwrap();
            // Whatever the new owner writes stays, however late the old writers are.
            region.store(0, &[99; 64]).unwrap();
        });
        assert_eq!(content(&region), [99; 64]);
    }
}
