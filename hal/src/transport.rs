//! Moving bytes between two memories: one small trait for in-process, shared memory, TCP and RDMA.
//!
//! The receiving end registers memory and describes it; the sending end connects to that description
//! and writes one-sidedly. The receiver learns of arrival from a control message of the layer above,
//! never by polling the bytes, and checks what landed before it uses it.

use crate::Result;
use crate::memory::SharedMemory;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// What a peer needs to reach a registered region. Opaque outside the transport that made it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Descriptor {
    /// The transport's name.
    pub transport: String,
    /// Where and how, in the transport's own form.
    pub address: String,
    /// Changes whenever the region is registered anew: a write under an old epoch is refused, so a
    /// late write can never land in memory that was given to somebody else.
    pub epoch: u64,
    /// Length of the region in bytes.
    pub bytes: u64,
}

/// One piece of a batched write.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The bytes to send.
    pub data: &'a [u8],
    /// Where they go in the peer's region.
    pub offset: u64,
}

/// A write under way on one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(pub u64);

/// A way to reach other memories.
pub trait Transport: Send + Sync {
    /// Lower-case name.
    fn name(&self) -> &'static str;

    /// Makes `memory` reachable and returns how to reach it.
    fn register(&self, memory: Arc<dyn SharedMemory>) -> Result<Descriptor>;

    /// Ends the reachability of a region; later writes to it fail.
    fn deregister(&self, region: &Descriptor) -> Result<()>;

    /// Opens a way to a peer's region.
    fn connect(&self, region: &Descriptor) -> Result<Box<dyn Endpoint>>;
}

/// The sending end of an open way.
pub trait Endpoint: Send {
    /// Starts to write all pieces. They may land in any order, and they have landed when `wait` says so.
    fn write(&mut self, pieces: &[Piece<'_>]) -> Result<TransferId>;

    /// Blocks until the write is complete at the peer, failed, or `timeout` is over.
    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()>;

    /// Gives up a write; pieces may or may not have landed.
    fn cancel(&mut self, transfer: TransferId) -> Result<()>;
}
