//! Moving bytes between two memories: one small trait for in-process, shared memory, TCP and RDMA.
//!
//! One end registers memory and describes it; the other connects a memory of its own to that description,
//! and writes or reads one-sidedly. The passive end learns of arrival from a control message of the layer
//! above, never by polling the bytes, and checks what landed before it uses it.

use crate::Result;
use crate::memory::SharedMemory;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// What a peer needs to reach a registered region. Whoever has it can reach the region, so it travels only
/// between ends that trust each other.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Descriptor {
    /// The transport's name.
    pub transport: String,
    /// Where and how, in the transport's own form.
    pub address: String,
    /// Changes whenever the region is registered anew: a transfer under an old epoch is refused, so a
    /// late write can never land in memory that was given to somebody else.
    pub epoch: u64,
    /// Length of the region in bytes.
    pub bytes: u64,
}

impl std::fmt::Debug for Descriptor {
    /// Leaves out the address: it may hold a key, and this gets into logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Descriptor { transport, epoch, bytes, .. } = self;
        write!(f, "Descriptor({transport}, epoch {epoch}, {bytes} bytes)")
    }
}

/// What peers may do to a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoteAccess {
    /// Write to it.
    Write,
    /// Read from it.
    Read,
    /// Both.
    ReadWrite,
}

impl RemoteAccess {
    /// Whether peers may write.
    pub fn may_write(self) -> bool {
        self != RemoteAccess::Read
    }

    /// Whether peers may read.
    pub fn may_read(self) -> bool {
        self != RemoteAccess::Write
    }
}

/// One piece of a batch: a range of the endpoint's own memory and a range of the peer's region, equally long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// First byte here.
    pub local: u64,
    /// First byte there.
    pub remote: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A batch under way on one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(pub u64);

/// A way to reach other memories.
pub trait Transport: Send + Sync {
    /// Lower-case name.
    fn name(&self) -> &'static str;

    /// Makes `memory` reachable and returns how to reach it.
    ///
    /// # Errors
    /// `Unsupported` if this transport cannot reach such memory, `OutOfMemory` at a limit of registrations.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor>;

    /// Ends the reachability of a region. When it returns, no transfer under this description writes to the
    /// memory any more, not even one that had begun.
    ///
    /// # Errors
    /// `Closed` if it is not registered under this epoch.
    fn deregister(&self, region: &Descriptor) -> Result<()>;

    /// Opens a way between `local` and a peer's region; it closes when it is dropped.
    ///
    /// # Errors
    /// `Closed` if there is no such region or peer, `Unsupported` if `local` cannot be moved from, or the region is
    /// not for this end at all, so that another transport must reach it.
    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>>;
}

/// The active end of an open way. After an error of `write`, `read` or `wait` other than `Timeout` and
/// `Invalid`, the way is broken: connect anew.
pub trait Endpoint: Send {
    /// Starts to write all pieces to the peer. They move while the caller does something else (of more than a queue
    /// pair's depth, RDMA moves the rest when it is next called), land in any order, and have landed when `wait` says so;
    /// the bytes here must not change until then.
    ///
    /// # Errors
    /// `Invalid` when a piece leaves either memory or peers may not write; nothing has begun then. `Closed` when the way is.
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId>;

    /// Starts to read all pieces from the peer, as `write` the other way.
    ///
    /// # Errors
    /// As `write`.
    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId>;

    /// Blocks until the batch is complete, failed, or `timeout` is over; zero only asks. A batch ends once:
    /// after `Ok` or an error other than `Timeout` its id means nothing any more.
    ///
    /// # Errors
    /// `Timeout` while it is under way; whatever broke it; `Closed` if it was given up or waited for before.
    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()>;

    /// Gives up a batch. Its pieces may or may not have landed, and may still land until the peer deregisters
    /// the region.
    ///
    /// # Errors
    /// When the way is broken.
    fn cancel(&mut self, transfer: TransferId) -> Result<()>;

    /// What an operator wants to know of this way beside its transport's name, such as addresses and packet sizes that
    /// the ends agreed on; empty if there is nothing.
    fn details(&self) -> String {
        String::new()
    }
}
