//! The messages: each a length of four bytes, a byte that says what it is, and the rest.
//!
//! The called end sends [`MAGIC`], its [`VERSION`] and random bytes; the caller answers with both and the
//! proof that it has the token, if there are no certificates; the called end answers with its own proof and
//! what its device is. From then on the user gives numbers to its buffers, queues and recorded batches, and
//! everything happens in the order in which it was sent. Only calls have answers, and batches an end, which
//! brings along the results requested with the batch.

use std::time::Duration;

/// Changes with every change of a message or of the bytes of a command.
pub(crate) const VERSION: u32 = 4;

/// What the first messages in both directions begin with.
pub(crate) const MAGIC: [u8; 8] = *b"mixfleet";

/// Bytes of data that a message has at most; longer writes and reads take several.
pub(crate) const DATA_BYTES_MAX: usize = 8 << 20;

/// Bytes of data moved at a time: one piece is copied into or out of the device while the next one is on the
/// connection, and it is still in a cache when it is copied on.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// Bytes of a message at most: data, and the commands of a batch.
pub(crate) const FRAME_BYTES_MAX: usize = DATA_BYTES_MAX + (1 << 20);

/// Maximum bytes of a message before the other end has authenticated.
pub(crate) const HELLO_BYTES_MAX: usize = 16 << 10;

/// Time for the first messages.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Silence after which the other end's host counts as gone.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

/// Time for a call that computes nothing, and in which the other end must take at least a byte.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Of a client. `Done` answers `Submit` and `Replay`, `Reply` all that have the number of a call.
pub(crate) mod ask {
    /// `call, buffer, bytes, usage`.
    pub(crate) const ALLOC: u8 = 1;
    /// `buffer`.
    pub(crate) const FREE: u8 = 2;
    /// `buffer, offset`, then data.
    pub(crate) const WRITE: u8 = 3;
    /// `call, slice`.
    pub(crate) const READ: u8 = 4;
    /// `call, queue`.
    pub(crate) const OPEN_QUEUE: u8 = 5;
    /// `queue`.
    pub(crate) const CLOSE_QUEUE: u8 = 6;
    /// `queue, results, slices, commands`.
    pub(crate) const SUBMIT: u8 = 7;
    /// `call, queue, graph, commands`.
    pub(crate) const RECORD: u8 = 8;
    /// `queue, graph`.
    pub(crate) const REPLAY: u8 = 9;
    /// `queue, graph`.
    pub(crate) const FORGET: u8 = 10;
    /// `call, operation`.
    pub(crate) const SUPPORT: u8 = 11;
    /// `call`.
    pub(crate) const MEMORY_FREE: u8 = 12;
    /// `call`.
    pub(crate) const HEALTH: u8 = 13;
}

/// Of a server.
pub(crate) mod tell {
    /// `call`, 0 and the answer, or 1 and an error.
    pub(crate) const REPLY: u8 = 1;
    /// `queue`, 0, time, clock and the results, or 1 and an error. Batches of a queue end in their order.
    pub(crate) const DONE: u8 = 2;
    /// An error of a message that has no answer, after which the buffers' content is undefined.
    pub(crate) const FAILED: u8 = 3;
}
