//! A transport that injects the faults of a plan.

use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, TransferId, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Injects the faults of a [`FaultPlan`] into the batches of `inner`. Operation n of the plan is the n-th
/// call of `write` or `read`, counted over all endpoints.
///
/// - `BitFlip` flips one bit in the pieces: for a write, in the local memory before it is sent; for a read,
///   after it has arrived. A retry re-reads the data from the device.
/// - `Drop` moves nothing and reports success.
/// - `Fail` moves nothing, and `wait` reports `Other`.
/// - `Hang` moves nothing, and `wait` reports `Timeout` at once, as if the time had passed.
pub struct FaultyTransport<T> {
    inner: T,
    plan: Arc<FaultPlan>,
    batches: Arc<AtomicU64>,
}

impl<T: Transport> FaultyTransport<T> {
    /// Wraps `inner` with the faults of `plan`.
    pub fn new(inner: T, plan: FaultPlan) -> Self {
        FaultyTransport { inner, plan: Arc::new(plan), batches: Arc::default() }
    }

    /// Returns the plan.
    pub fn plan(&self) -> &FaultPlan {
        &self.plan
    }

    /// Returns how many batches were started so far.
    pub fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }
}

impl<T: Transport> Transport for FaultyTransport<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        self.inner.register(memory, access)
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.inner.deregister(region)
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let inner = self.inner.connect(local.clone(), region)?;
        let (plan, batches) = (self.plan.clone(), self.batches.clone());
        Ok(Box::new(FaultyEndpoint { inner, local, plan, batches, next: 0, open: BTreeMap::new() }))
    }
}

struct FaultyEndpoint {
    inner: Box<dyn Endpoint>,
    local: Arc<dyn SharedMemory>,
    plan: Arc<FaultPlan>,
    batches: Arc<AtomicU64>,
    next: u64,
    open: BTreeMap<u64, BatchFate>,
}

/// The fate of a batch.
#[derive(Clone)]
enum BatchFate {
    Sent(TransferId),
    /// Sent, and damaged on arrival at this local byte and bit.
    Struck(TransferId, u64, u8),
    Dropped,
    Failed {
        batch: u64,
    },
    Hung {
        batch: u64,
    },
}

impl Endpoint for FaultyEndpoint {
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.batch(pieces, |inner, pieces| inner.write(pieces), Moment::Before)
    }

    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.batch(pieces, |inner, pieces| inner.read(pieces), Moment::After)
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        let Some(course) = self.open.get(&transfer.0).cloned() else {
            let detail = format!("transfer {} never began, or has ended", transfer.0);
            return Err(Error::new(ErrorKind::Closed, detail));
        };
        let outcome = match course {
            BatchFate::Sent(inner) => self.inner.wait(inner, timeout),
            BatchFate::Struck(inner, byte, bit) => {
                self.inner.wait(inner, timeout).and_then(|()| self.flip(byte, bit))
            }
            BatchFate::Dropped => Ok(()),
            BatchFate::Failed { batch } => {
                Err(Error::new(ErrorKind::Other, format!("injected fault: batch {batch} failed")))
            }
            BatchFate::Hung { batch } => {
                Err(Error::new(ErrorKind::Timeout, format!("injected fault: batch {batch} hangs")))
            }
        };
        if !matches!(&outcome, Err(error) if error.kind == ErrorKind::Timeout) {
            self.open.remove(&transfer.0);
        }
        outcome
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        match self.open.remove(&transfer.0) {
            Some(BatchFate::Sent(inner) | BatchFate::Struck(inner, ..)) => self.inner.cancel(inner),
            _ => Ok(()),
        }
    }

    fn details(&self) -> String {
        self.inner.details()
    }
}

/// The point in time at which a bit flips.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    Before,
    After,
}

impl FaultyEndpoint {
    fn batch(
        &mut self,
        pieces: &[Piece],
        start: impl Fn(&mut dyn Endpoint, &[Piece]) -> Result<TransferId>,
        flips: Moment,
    ) -> Result<TransferId> {
        let batch = self.batches.fetch_add(1, Ordering::Relaxed);
        let course = match self.plan.at(batch) {
            // a transport has no clock, so a slow batch still arrives
            None | Some(Fault::Slow { .. }) => BatchFate::Sent(start(&mut *self.inner, pieces)?),
            Some(Fault::BitFlip) => match self.bit(batch, pieces) {
                None => BatchFate::Sent(start(&mut *self.inner, pieces)?),
                Some((byte, bit)) if flips == Moment::Before => {
                    self.flip(byte, bit)?;
                    BatchFate::Sent(start(&mut *self.inner, pieces)?)
                }
                Some((byte, bit)) => BatchFate::Struck(start(&mut *self.inner, pieces)?, byte, bit),
            },
            // the receiver keeps seeing the previous content
            Some(Fault::Drop | Fault::Stale) => BatchFate::Dropped,
            Some(Fault::Fail) => BatchFate::Failed { batch },
            Some(Fault::Hang) => BatchFate::Hung { batch },
        };
        let id = self.next;
        self.next += 1;
        self.open.insert(id, course);
        Ok(TransferId(id))
    }

    /// Returns the local byte and the bit that batch `batch` loses.
    fn bit(&self, batch: u64, pieces: &[Piece]) -> Option<(u64, u8)> {
        let total: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        let bit = self.plan.bit(batch, total);
        let mut byte = bit / 8;
        for piece in pieces {
            if byte < piece.bytes {
                return Some((piece.local + byte, (bit % 8) as u8));
            }
            byte -= piece.bytes;
        }
        None
    }

    fn flip(&self, byte: u64, bit: u8) -> Result<()> {
        self.local.update(byte, 1, &mut |place| place[0] ^= 1 << bit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostRegion, InProcessTransport};

    const NOW: Duration = Duration::ZERO;

    fn regions(bytes: usize) -> (Arc<HostRegion>, Arc<HostRegion>) {
        let [here, there] = [(); 2].map(|()| Arc::new(HostRegion::new(bytes).unwrap()));
        here.store(0, &vec![0xff; bytes]).unwrap();
        (here, there)
    }

    /// Moves bytes of ones three times, each to 4 bytes of its own in two pieces, with a fault in the second
    /// batch. Returns what its `wait` reported and what arrived.
    fn three(fault: Fault, reading: bool) -> (Result<()>, Vec<u8>) {
        let wire = FaultyTransport::new(InProcessTransport::new(), FaultPlan::exactly(fault, 1, 2));
        let (ones, zeros) = regions(12);
        let (here, there) = if reading { (zeros.clone(), ones) } else { (ones, zeros.clone()) };
        let descriptor = wire.register(there, RemoteAccess::ReadWrite).unwrap();
        // batches are counted over endpoints, and each batch here has an endpoint of its own
        let outcomes: Vec<Result<()>> = (0..3u64)
            .map(|i| {
                let mut way = wire.connect(here.clone(), &descriptor).unwrap();
                let piece = |at: u64, bytes| Piece { local: 4 * i + at, remote: 4 * i + at, bytes };
                let pieces = [piece(0, 1), piece(1, 3)];
                let transfer = if reading { way.read(&pieces) } else { way.write(&pieces) }.unwrap();
                way.wait(transfer, NOW)
            })
            .collect();
        assert_eq!((&outcomes[0], &outcomes[2], wire.batches()), (&Ok(()), &Ok(()), 3));
        let mut bytes = vec![0; 12];
        zeros.load(0, &mut bytes).unwrap();
        assert_eq!((&bytes[..4], &bytes[8..]), (&[0xff; 4][..], &[0xff; 4][..]));
        (outcomes[1].clone(), bytes[4..8].to_vec())
    }

    #[test]
    fn a_flip_changes_one_bit_and_is_reported_as_success() {
        for reading in [false, true] {
            let (outcome, bytes) = three(Fault::BitFlip, reading);
            assert_eq!(outcome, Ok(()));
            assert_eq!(bytes.iter().map(|byte| byte.count_zeros()).sum::<u32>(), 1);
            assert_eq!(three(Fault::BitFlip, reading).1, bytes);
        }
    }

    #[test]
    fn a_dropped_batch_looks_like_success() {
        assert_eq!(three(Fault::Drop, false), (Ok(()), vec![0; 4]));
        assert_eq!(three(Fault::Drop, true), (Ok(()), vec![0; 4]));
    }

    #[test]
    fn a_failure_and_a_hang_are_told_apart() {
        let (failed, bytes) = three(Fault::Fail, false);
        assert_eq!((failed.unwrap_err().kind, bytes), (ErrorKind::Other, vec![0; 4]));
        let (hung, bytes) = three(Fault::Hang, true);
        assert_eq!((hung.unwrap_err().kind, bytes), (ErrorKind::Timeout, vec![0; 4]));
    }

    #[test]
    fn a_hung_write_hangs_until_it_is_given_up() {
        let wire = FaultyTransport::new(InProcessTransport::new(), FaultPlan::exactly(Fault::Hang, 0, 1));
        let (here, there) = regions(1);
        let mut way = wire.connect(here, &wire.register(there, RemoteAccess::Write).unwrap()).unwrap();
        let transfer = way.write(&[Piece { local: 0, remote: 0, bytes: 1 }]).unwrap();
        for _ in 0..2 {
            assert_eq!(way.wait(transfer, NOW).unwrap_err().kind, ErrorKind::Timeout);
        }
        way.cancel(transfer).unwrap();
        assert_eq!(way.wait(transfer, NOW).unwrap_err().kind, ErrorKind::Closed);
    }

    #[test]
    fn empty_payloads_survive_a_flip() {
        let wire = FaultyTransport::new(InProcessTransport::new(), FaultPlan::exactly(Fault::BitFlip, 0, 1));
        let (here, there) = regions(1);
        let mut way = wire.connect(here, &wire.register(there, RemoteAccess::Write).unwrap()).unwrap();
        let transfer = way.write(&[]).unwrap();
        way.wait(transfer, NOW).unwrap();
    }
}
