//! Moves bytes between two memories through one small trait, implemented in process and over shared memory,
//! TCP and RDMA.
//!
//! One end registers memory and gets a descriptor; the other end connects a memory of its own to that
//! descriptor and does one-sided writes and reads. The passive end learns of arrival from a control message
//! of the layer above, never by polling the bytes, and checks what landed before it uses it.

use crate::Result;
use crate::memory::SharedMemory;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Everything that a peer needs to access a registered region. Possession of it grants access, so it is sent
/// only between ends that trust each other.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Descriptor {
    /// Name of the transport.
    pub transport: String,
    /// How to reach the region, in a transport-specific form that may include a key.
    pub address: String,
    /// Changes whenever the region is registered anew. Transfers under an old epoch are refused, so that a
    /// late write can never land in memory that has been reassigned.
    pub epoch: u64,
    /// Length of the region in bytes.
    pub bytes: u64,
}

impl std::fmt::Debug for Descriptor {
    /// Omits the address, since it may hold a key and this text gets into logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Descriptor { transport, epoch, bytes, .. } = self;
        write!(f, "Descriptor({transport}, epoch {epoch}, {bytes} bytes)")
    }
}

/// The remote access that peers have to a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoteAccess {
    /// Peers may write.
    Write,
    /// Peers may read.
    Read,
    /// Peers may read and write.
    ReadWrite,
}

impl RemoteAccess {
    /// Whether peers may write to the region.
    pub fn may_write(self) -> bool {
        self != RemoteAccess::Read
    }

    /// Whether peers may read from the region.
    pub fn may_read(self) -> bool {
        self != RemoteAccess::Write
    }
}

/// One piece of a batch: a range of the endpoint's own memory and an equally long range of the peer's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Offset of the first byte in the local memory.
    pub local: u64,
    /// Offset of the first byte in the remote region.
    pub remote: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A batch in flight on one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(pub u64);

/// A means of reaching the memory of other ends.
pub trait Transport: Send + Sync {
    /// Returns the transport's lower-case name.
    fn name(&self) -> &'static str;

    /// Makes `memory` accessible to peers and returns its descriptor.
    ///
    /// # Errors
    /// `Unsupported` if this transport cannot reach such memory, `OutOfMemory` at a limit on registrations.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor>;

    /// Revokes access to a region. Once it returns, no transfer under this descriptor writes to the memory
    /// any more, not even one that was in flight.
    ///
    /// # Errors
    /// `Closed` if the region is not registered under this epoch.
    fn deregister(&self, region: &Descriptor) -> Result<()>;

    /// Opens a connection between `local` and a peer's region, which closes on drop.
    ///
    /// # Errors
    /// `Closed` if there is no such region or peer; `Unsupported` if this transport cannot move bytes from
    /// `local`, or if the region must be reached over another transport.
    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>>;
}

/// The active end of a connection to a region. After an error of `write`, `read` or `wait` other than
/// `Timeout` and `Invalid`, the connection is broken and has to be opened anew.
pub trait Endpoint: Send {
    /// Starts to write all pieces to the peer. They move in the background, land in any order, and have
    /// landed once `wait` returns; the local bytes must not change until then. RDMA posts what exceeds the
    /// depth of its queue pairs on later calls.
    ///
    /// # Errors
    /// `Invalid` if a piece exceeds either memory or peers may not write, in which case nothing was started;
    /// `Closed` if the connection is.
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId>;

    /// Starts to read all pieces from the peer; otherwise like `write`.
    ///
    /// # Errors
    /// As for `write`.
    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId>;

    /// Blocks until the batch completes or fails, or until `timeout` has passed; a timeout of zero polls.
    /// After `Ok` or any error other than `Timeout`, the id is no longer valid.
    ///
    /// # Errors
    /// `Timeout` while the batch is in flight; `Closed` if it was cancelled or already waited for; otherwise
    /// the error that broke it.
    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()>;

    /// Abandons a batch. Its pieces may have landed or may still land until the peer deregisters the region.
    ///
    /// # Errors
    /// If the connection is broken.
    fn cancel(&mut self, transfer: TransferId) -> Result<()>;

    /// Returns details for operators, such as the addresses and packet sizes that the ends agreed on; may be
    /// empty.
    fn details(&self) -> String {
        String::new()
    }
}
