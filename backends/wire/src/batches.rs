//! Bookkeeping for endpoints whose batches complete before `write` or `read` returns.

use mixfleet_hal::transport::TransferId;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeSet;

/// Allocates and tracks the ids of an endpoint's batches.
#[derive(Default)]
pub(crate) struct Batches {
    next: u64,
    /// Completed batches that were neither waited for nor cancelled.
    open: BTreeSet<u64>,
}

impl Batches {
    /// Registers a batch that has just completed.
    pub(crate) fn done(&mut self) -> TransferId {
        let id = self.next;
        self.next += 1;
        self.open.insert(id);
        TransferId(id)
    }

    /// Retires a batch.
    ///
    /// # Errors
    /// As for [`Endpoint::wait`](mixfleet_hal::transport::Endpoint::wait).
    pub(crate) fn wait(&mut self, transfer: TransferId) -> Result<()> {
        if self.open.remove(&transfer.0) { Ok(()) } else { Err(not_open(transfer, self.next)) }
    }

    /// Cancels a batch.
    pub(crate) fn cancel(&mut self, transfer: TransferId) {
        self.open.remove(&transfer.0);
    }
}

/// Returns the error for a batch that is not open, where `next` is the next id.
pub(crate) fn not_open(transfer: TransferId, next: u64) -> Error {
    if transfer.0 < next {
        let detail = format!("transfer {} was already cancelled or waited for", transfer.0);
        return Error::new(ErrorKind::Closed, detail);
    }
    Error::invalid(format!("transfer {} never began on this endpoint", transfer.0))
}
