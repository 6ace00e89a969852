//! One-sided transfers: the layer that all transports share, above what moves their bytes.

use crate::region::range;
use mixfleet_hal::transport::{Endpoint, Piece, RemoteAccess, TransferId};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The direction of a batch, as the active end sees it; by its number in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Write = 1,
    Read = 2,
}

impl Direction {
    pub(crate) fn is_allowed(self, access: RemoteAccess) -> bool {
        match self {
            Direction::Write => access.may_write(),
            Direction::Read => access.may_read(),
        }
    }
}

/// The lengths of a connection's two memories, and what the active end may do with the remote one.
#[derive(Clone, Copy)]
pub(crate) struct Reach {
    pub(crate) local_bytes: u64,
    pub(crate) remote_bytes: u64,
    pub(crate) access: RemoteAccess,
}

impl Reach {
    /// Checks that peers may do this, and that every piece is inside both memories.
    ///
    /// # Errors
    /// `Invalid` otherwise.
    fn check(&self, pieces: &[Piece], direction: Direction) -> Result<()> {
        if !direction.is_allowed(self.access) && !pieces.is_empty() {
            return Err(Error::invalid(format!("the region was registered for {:?}", self.access)));
        }
        for piece in pieces {
            range(piece.local, piece.bytes, self.local_bytes).map_err(|e| e.context("this end"))?;
            range(piece.remote, piece.bytes, self.remote_bytes).map_err(|e| e.context("the peer's end"))?;
        }
        Ok(())
    }
}

/// The batches of a connection that were neither waited for nor cancelled.
#[derive(Default)]
pub(crate) struct Batches {
    next: u64,
    /// The number of parts of each that have not landed.
    open: BTreeMap<u64, u64>,
}

impl Batches {
    /// Records that parts of a batch have landed; those of a cancelled batch are not counted.
    pub(crate) fn landed(&mut self, batch: u64, parts: u64) {
        if let Some(left) = self.open.get_mut(&batch) {
            debug_assert!(parts <= *left, "{parts} parts of batch {batch} landed, of {left} in flight");
            *left -= parts;
        }
    }

    fn begin(&mut self, parts: u64) -> TransferId {
        let batch = self.next;
        self.next += 1;
        self.open.insert(batch, parts);
        TransferId(batch)
    }

    /// Takes the outcome of a batch that completed, failed or is unknown; `None` while it is in flight.
    fn take_outcome(&mut self, transfer: TransferId, broken: Option<&Error>) -> Option<Result<()>> {
        let outcome = match (self.open.get(&transfer.0), broken) {
            (None, _) => return Some(Err(self.not_open(transfer))),
            // what landed before the connection broke has landed
            (Some(0), _) => Ok(()),
            (Some(_), Some(error)) => Err(error.clone()),
            (Some(_), None) => return None,
        };
        self.open.remove(&transfer.0);
        Some(outcome)
    }

    fn not_open(&self, transfer: TransferId) -> Error {
        if transfer.0 < self.next {
            let detail = format!("transfer {} was already cancelled or waited for", transfer.0);
            return Error::new(ErrorKind::Closed, detail);
        }
        Error::invalid(format!("transfer {} never began on this endpoint", transfer.0))
    }
}

/// What moves the bytes of a connection. After an error other than `Invalid` it is used no more.
pub(crate) trait Carrier: Send {
    fn reach(&self) -> Reach;

    /// Checks that the region is still there, where that is known without a transfer.
    ///
    /// # Errors
    /// `Closed` if it is not.
    fn check_peer(&mut self) -> Result<()> {
        Ok(())
    }

    /// Starts a batch whose pieces were checked, and returns the number of its parts that have not landed.
    ///
    /// # Errors
    /// Every error that breaks the connection.
    fn begin(&mut self, batch: u64, pieces: &[Piece], direction: Direction) -> Result<u64>;

    /// Moves as much as possible without waiting, and records the parts that have landed.
    ///
    /// # Errors
    /// Every error that breaks the connection.
    fn progress(&mut self, _batches: &mut Batches) -> Result<()> {
        Ok(())
    }

    /// Waits at most `longest` until something may have landed; the user has waited for `waited` so far.
    ///
    /// # Errors
    /// Every error that breaks the connection.
    fn pause(&mut self, _batches: &mut Batches, _waited: Duration, _longest: Duration) -> Result<()> {
        Ok(())
    }

    /// Forgets the parts of a batch that have not begun to move, and the destination of the rest.
    fn discard(&mut self, _batch: u64) {}

    /// Releases what a broken connection holds.
    fn close(&mut self) {}

    /// As of [`Endpoint::details`].
    fn details(&self) -> String {
        String::new()
    }
}

/// The active end of a connection.
pub struct OneSided<C> {
    pub(crate) carrier: C,
    batches: Batches,
    broken: Option<Error>,
}

#[expect(private_bounds, reason = "all of these methods are the crate's own")]
impl<C: Carrier> OneSided<C> {
    pub(crate) fn new(carrier: C) -> Self {
        OneSided { carrier, batches: Batches::default(), broken: None }
    }

    /// Starts a batch.
    ///
    /// # Errors
    /// As for [`Endpoint::write`].
    pub(crate) fn start(&mut self, pieces: &[Piece], direction: Direction) -> Result<TransferId> {
        self.progress();
        self.check_open()?;
        self.carrier.reach().check(pieces, direction)?;
        let mut parts = 0;
        let next = self.batches.next;
        self.drive(|carrier, _| carrier.begin(next, pieces, direction).map(|begun| parts = begun))?;
        Ok(self.batches.begin(parts))
    }

    /// Lets the carrier work unless it is broken, and keeps the error that breaks it.
    pub(crate) fn drive(&mut self, work: impl FnOnce(&mut C, &mut Batches) -> Result<()>) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let worked = work(&mut self.carrier, &mut self.batches);
        if let Err(error) = &worked
            && error.kind != ErrorKind::Invalid
        {
            self.broken = Some(error.clone());
            self.carrier.close();
        }
        worked
    }

    /// Moves what can be moved without waiting. An error shows in the outcomes of batches.
    pub(crate) fn progress(&mut self) {
        let _ = self.drive(C::progress);
    }

    /// Checks that nothing has broken the connection, on either end.
    pub(crate) fn check_open(&mut self) -> Result<()> {
        self.drive(|carrier, _| carrier.check_peer()).map_err(|error| match error.kind {
            ErrorKind::Closed => error,
            _ => Error::new(ErrorKind::Closed, format!("the connection is broken: {}", error.detail)),
        })
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Takes the outcome of a batch; `None` while it is in flight.
    pub(crate) fn take_outcome(&mut self, transfer: TransferId) -> Option<Result<()>> {
        self.batches.take_outcome(transfer, self.broken.as_ref())
    }

    /// Abandons a batch.
    ///
    /// # Errors
    /// If the connection is broken.
    pub(crate) fn abandon(&mut self, transfer: TransferId) -> Result<()> {
        if self.batches.open.remove(&transfer.0).is_some() {
            self.carrier.discard(transfer.0);
        }
        self.check_open()
    }
}

/// The error of a wait that was too short.
pub(crate) fn in_flight(transfer: TransferId, timeout: Duration) -> Error {
    let detail = format!("transfer {} is still in flight after {timeout:?}", transfer.0);
    Error::new(ErrorKind::Timeout, detail)
}

impl<C: Carrier> Endpoint for OneSided<C> {
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.start(pieces, Direction::Write)
    }

    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.start(pieces, Direction::Read)
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            self.progress();
            if let Some(outcome) = self.take_outcome(transfer) {
                return outcome;
            }
            // what breaks it becomes the batch's outcome in the next round
            if self.check_open().is_err() {
                continue;
            }
            let waited = begun.elapsed();
            let Some(left) = timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(in_flight(transfer, timeout));
            };
            let _ = self.drive(|carrier, batches| carrier.pause(batches, waited, left));
        }
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        self.progress();
        self.abandon(transfer)
    }

    fn details(&self) -> String {
        self.carrier.details()
    }
}
