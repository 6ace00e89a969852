//! Batches that are complete when they have begun, and wait to be asked for.

use mixfleet_hal::transport::TransferId;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeSet;

/// The numbers of an endpoint's batches.
#[derive(Default)]
pub(crate) struct Batches {
    next: u64,
    /// Done, neither waited for nor given up.
    open: BTreeSet<u64>,
}

impl Batches {
    /// A batch that has just been moved.
    pub(crate) fn done(&mut self) -> TransferId {
        let id = self.next;
        self.next += 1;
        self.open.insert(id);
        TransferId(id)
    }

    /// Ends a batch.
    ///
    /// # Errors
    /// As [`Endpoint::wait`](mixfleet_hal::transport::Endpoint::wait).
    pub(crate) fn wait(&mut self, transfer: TransferId) -> Result<()> {
        if self.open.remove(&transfer.0) { Ok(()) } else { Err(not_open(transfer, self.next)) }
    }

    /// Gives up a batch.
    pub(crate) fn cancel(&mut self, transfer: TransferId) {
        self.open.remove(&transfer.0);
    }
}

/// What to say of a batch that is not open, where `next` is the next one's number.
pub(crate) fn not_open(transfer: TransferId, next: u64) -> Error {
    if transfer.0 < next {
        let detail = format!("transfer {} was given up or waited for before", transfer.0);
        return Error::new(ErrorKind::Closed, detail);
    }
    Error::invalid(format!("transfer {} never began on this endpoint", transfer.0))
}
