//! A transport that obeys a fault plan.

use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, TransferId, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Strikes the writes of `inner` as a [`FaultPlan`] says. Operation n of the plan is the n-th call of
/// `write`, counted over all endpoints.
///
/// - `BitFlip` changes one bit somewhere in the pieces.
/// - `Drop` sends nothing and reports success.
/// - `Fail` sends nothing, and `wait` reports `Other`.
/// - `Hang` sends nothing, and `wait` reports `Timeout` at once, as if its time had passed.
pub struct Faulty<T> {
    inner: T,
    plan: Arc<FaultPlan>,
    writes: Arc<AtomicU64>,
}

impl<T: Transport> Faulty<T> {
    /// `inner` with the faults of `plan`.
    pub fn new(inner: T, plan: FaultPlan) -> Self {
        Faulty { inner, plan: Arc::new(plan), writes: Arc::default() }
    }

    /// Calls of `write` so far.
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&self, memory: Arc<dyn SharedMemory>) -> Result<Descriptor> {
        self.inner.register(memory)
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.inner.deregister(region)
    }

    fn connect(&self, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let inner = self.inner.connect(region)?;
        let (plan, writes) = (self.plan.clone(), self.writes.clone());
        Ok(Box::new(FaultyEndpoint { inner, plan, writes, next: 0, open: BTreeMap::new() }))
    }
}

struct FaultyEndpoint {
    inner: Box<dyn Endpoint>,
    plan: Arc<FaultPlan>,
    writes: Arc<AtomicU64>,
    next: u64,
    open: BTreeMap<u64, Course>,
}

/// What becomes of a write.
#[derive(Clone, Copy)]
enum Course {
    Sent(TransferId),
    Dropped,
    Failed { write: u64 },
    Hung { write: u64 },
}

impl Endpoint for FaultyEndpoint {
    fn write(&mut self, pieces: &[Piece<'_>]) -> Result<TransferId> {
        let write = self.writes.fetch_add(1, Ordering::Relaxed);
        let course = match self.plan.at(write) {
            // a transport has no clock: what is slow here arrives all the same
            None | Some(Fault::Slow { .. }) => Course::Sent(self.inner.write(pieces)?),
            Some(Fault::BitFlip) => Course::Sent(self.write_flipped(write, pieces)?),
            // the receiver goes on seeing what was there before
            Some(Fault::Drop | Fault::Stale) => Course::Dropped,
            Some(Fault::Fail) => Course::Failed { write },
            Some(Fault::Hang) => Course::Hung { write },
        };
        let id = self.next;
        self.next += 1;
        self.open.insert(id, course);
        Ok(TransferId(id))
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        let Some(&course) = self.open.get(&transfer.0) else {
            let detail = format!("transfer {} never began, or has ended", transfer.0);
            return Err(Error::new(ErrorKind::Closed, detail));
        };
        let outcome = match course {
            Course::Sent(inner) => self.inner.wait(inner, timeout),
            Course::Dropped => Ok(()),
            Course::Failed { write } => {
                Err(Error::new(ErrorKind::Other, format!("injected fault: write {write} failed")))
            }
            Course::Hung { write } => {
                Err(Error::new(ErrorKind::Timeout, format!("injected fault: write {write} hangs")))
            }
        };
        if !matches!(&outcome, Err(error) if error.kind == ErrorKind::Timeout) {
            self.open.remove(&transfer.0);
        }
        outcome
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        match self.open.remove(&transfer.0) {
            Some(Course::Sent(inner)) => self.inner.cancel(inner),
            _ => Ok(()),
        }
    }
}

impl FaultyEndpoint {
    fn write_flipped(&mut self, write: u64, pieces: &[Piece<'_>]) -> Result<TransferId> {
        let mut copies: Vec<(Vec<u8>, u64)> = pieces.iter().map(|p| (p.data.to_vec(), p.offset)).collect();
        let total: usize = copies.iter().map(|(data, _)| data.len()).sum();
        let bit = self.plan.bit(write, total as u64);
        let struck = copies.iter_mut().flat_map(|(data, _)| data).nth((bit / 8) as usize);
        if let Some(byte) = struck {
            *byte ^= 1 << (bit % 8);
        }
        let pieces: Vec<Piece<'_>> =
            copies.iter().map(|(data, offset)| Piece { data, offset: *offset }).collect();
        self.inner.write(&pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostRegion, Memory};

    const NOW: Duration = Duration::ZERO;

    /// Writes bytes of ones three times, each to 4 bytes of its own in two pieces; the second one is
    /// struck. Returns what `wait` said of it and what the memory holds.
    fn three_writes(fault: Fault) -> (Result<()>, Vec<u8>) {
        let wire = Faulty::new(Memory::new(), FaultPlan::exactly(fault, 1, 2));
        let region = Arc::new(HostRegion::new(12));
        let descriptor = wire.register(region.clone()).unwrap();
        // The count runs over endpoints: every write has its own.
        let outcomes: Vec<Result<()>> = (0..3)
            .map(|i| {
                let mut way = wire.connect(&descriptor).unwrap();
                let pieces =
                    [Piece { data: &[0xff], offset: 4 * i }, Piece { data: &[0xff; 3], offset: 4 * i + 1 }];
                let transfer = way.write(&pieces).unwrap();
                way.wait(transfer, NOW)
            })
            .collect();
        assert_eq!((&outcomes[0], &outcomes[2], wire.writes()), (&Ok(()), &Ok(()), 3));
        let mut bytes = vec![0; 12];
        region.load(0, &mut bytes).unwrap();
        assert_eq!((&bytes[..4], &bytes[8..]), (&[0xff; 4][..], &[0xff; 4][..]));
        (outcomes[1].clone(), bytes[4..8].to_vec())
    }

    #[test]
    fn a_flip_changes_one_bit_and_is_reported_as_success() {
        let (outcome, bytes) = three_writes(Fault::BitFlip);
        assert_eq!(outcome, Ok(()));
        assert_eq!(bytes.iter().map(|byte| byte.count_zeros()).sum::<u32>(), 1);
        assert_eq!(three_writes(Fault::BitFlip).1, bytes);
    }

    #[test]
    fn a_dropped_write_looks_like_success() {
        assert_eq!(three_writes(Fault::Drop), (Ok(()), vec![0; 4]));
    }

    #[test]
    fn a_failure_and_a_hang_are_told_apart() {
        let (failed, bytes) = three_writes(Fault::Fail);
        assert_eq!((failed.unwrap_err().kind, bytes), (ErrorKind::Other, vec![0; 4]));
        let (hung, bytes) = three_writes(Fault::Hang);
        assert_eq!((hung.unwrap_err().kind, bytes), (ErrorKind::Timeout, vec![0; 4]));
    }

    #[test]
    fn a_hung_write_hangs_until_it_is_given_up() {
        let wire = Faulty::new(Memory::new(), FaultPlan::exactly(Fault::Hang, 0, 1));
        let mut way = wire.connect(&wire.register(Arc::new(HostRegion::new(1))).unwrap()).unwrap();
        let transfer = way.write(&[Piece { data: &[1], offset: 0 }]).unwrap();
        for _ in 0..2 {
            assert_eq!(way.wait(transfer, NOW).unwrap_err().kind, ErrorKind::Timeout);
        }
        way.cancel(transfer).unwrap();
        assert_eq!(way.wait(transfer, NOW).unwrap_err().kind, ErrorKind::Closed);
    }

    #[test]
    fn empty_payloads_survive_a_flip() {
        let wire = Faulty::new(Memory::new(), FaultPlan::exactly(Fault::BitFlip, 0, 1));
        let mut way = wire.connect(&wire.register(Arc::new(HostRegion::new(1))).unwrap()).unwrap();
        let transfer = way.write(&[]).unwrap();
        way.wait(transfer, NOW).unwrap();
    }
}
