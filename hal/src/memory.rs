//! Memory as the callers see it: buffers behind `dyn`, slices as plain values.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::path::Path;
use std::sync::Arc;

/// What a buffer is for. A backend may place buffers by it; it changes no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferUsage {
    /// Model parameters: written once, then only read.
    Weights,
    /// KV pages, and KV on its way to them or from them.
    Kv,
    /// Inputs and outputs of one step.
    Activations,
    /// What the host writes or reads often and in small parts: pinned memory of the host where that exists.
    Staging,
}

/// A device's memory object. Freed on drop, after the commands in flight that use it.
pub trait Buffer: Send + Sync + std::fmt::Debug {
    /// Bytes of the allocation.
    fn size_bytes(&self) -> u64;
    /// For the backend to find its own type again.
    fn as_any(&self) -> &dyn Any;
}

/// A range of a buffer. Cheap to clone; keeps the buffer alive.
#[derive(Clone, Debug)]
pub struct Slice {
    /// The buffer.
    pub buffer: Arc<dyn Buffer>,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Slice {
    /// The whole of `buffer`.
    pub fn whole(buffer: Arc<dyn Buffer>) -> Self {
        let bytes = buffer.size_bytes();
        Slice { buffer, offset: 0, bytes }
    }

    /// `bytes` bytes of this slice from `offset` on.
    ///
    /// # Panics
    /// When the range leaves the slice: a bug of the caller.
    pub fn range(&self, offset: u64, bytes: u64) -> Slice {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "range {offset}+{bytes} leaves a slice of {} bytes",
            self.bytes
        );
        Slice { buffer: self.buffer.clone(), offset: self.offset + offset, bytes }
    }

    /// Whether both name some byte of the same buffer.
    pub fn overlaps(&self, other: &Slice) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.buffer), Arc::as_ptr(&other.buffer))
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// Host memory that does not move and that its holders do not change: a mapped checkpoint.
/// A device that can, uses it in place.
pub trait HostMemory: Send + Sync + std::fmt::Debug {
    /// The bytes.
    fn as_bytes(&self) -> &[u8];

    /// Whether the bytes were always what they were at first: others may cut or overwrite a file under its mapping.
    /// Whoever computes with the bytes asks afterwards, before anybody uses the result.
    ///
    /// # Errors
    /// `DeviceLost` if they were not; what they are now means nothing.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Which file it is and when it last changed, as of now; none for memory that is no file.
    fn stamp(&self) -> Option<FileStamp> {
        None
    }

    /// Whoever calls this has found that all bytes are what they were at first, while the file had this stamp: that it was
    /// written to before then is forgotten. What was cut stays lost.
    fn accept(&self, stamp: &FileStamp) {
        let _ = stamp;
    }
}

/// A file's content without reading it: equal stamps are the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    /// The file system's device.
    pub device: u64,
    /// The file's number there.
    pub inode: u64,
    /// Its length.
    pub bytes: u64,
    /// When its content changed, as its owner may set it: seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// When its content, owner, mode or number of names changed, as nobody can set it.
    pub changed: (i64, i64),
}

impl HostMemory for Vec<u8> {
    fn as_bytes(&self) -> &[u8] {
        self
    }
}

/// Maps files as host memory. Mapping needs `unsafe`, so a backend provides it.
pub trait FileMapper: Send + Sync {
    /// Maps all of the file at `path`, read-only.
    fn map(&self, path: &Path) -> std::io::Result<Arc<dyn HostMemory>>;
}

/// How another party may reach a slice without a copy through the host.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Export {
    /// It is host memory: readable in place once the tickets that write it are done.
    Host(Arc<dyn HostMemory>),
    /// A DMA-BUF file descriptor, for RDMA registration.
    DmaBuf {
        /// The descriptor, owned by the buffer.
        fd: i32,
        /// Offset of the slice in it, in bytes.
        offset: u64,
    },
    /// An opaque handle for another process on this host.
    Ipc(Vec<u8>),
}

/// Host memory that both ends of a transport reach: staging, and the pages of a KV pool.
///
/// Calls in this process exclude each other as a lock would. What a peer writes meanwhile through a
/// transport that moves bytes by itself (shared pages, a NIC) is not excluded: who reads a range has been
/// told that it is complete, and checks it.
pub trait SharedMemory: Send + Sync {
    /// Length in bytes.
    fn size_bytes(&self) -> u64;

    /// Shows `bytes` bytes from `offset` on to `look`, once.
    ///
    /// # Errors
    /// `Invalid` when the range leaves the memory; `look` is not called then.
    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// Lets `change` write `bytes` bytes from `offset` on, once.
    ///
    /// # Errors
    /// `Invalid` when the range leaves the memory; `change` is not called then.
    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Where it lies, for transports that move bytes by themselves; none if it may only be reached by calls.
    fn mapping(&self) -> Option<Mapping>;

    /// Puts fresh pages with the same bytes in place of those that another process may have mapped: whatever
    /// it still writes reaches this memory no more. The address and the number of the file descriptor stay.
    /// Not while something in this process moves bytes by [`mapping`](Self::mapping), as a device that has it
    /// [pinned](crate::Device::pin) does: they could be lost.
    ///
    /// # Errors
    /// `Unsupported` if it cannot, `OutOfMemory` when the operating system gives no pages.
    fn renew(&self) -> Result<()> {
        Err(Error::unsupported("this memory cannot take its pages back from another process"))
    }

    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// As `update`.
    fn store(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.update(offset, data.len() as u64, &mut |place| place.copy_from_slice(data))
    }

    /// Copies from `offset` into `data`.
    ///
    /// # Errors
    /// As `view`.
    fn load(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.view(offset, data.len() as u64, &mut |place| data.copy_from_slice(place))
    }
}

/// Keeps memory pinned for a device: see [`Device::pin`](crate::Device::pin).
pub type Pinned = Box<dyn Send + Sync>;

/// The place of shared memory in this process. Valid as long as the memory that gave it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes.
    pub bytes: u64,
    /// A file descriptor that another process on this host can map, owned by the memory; none where there is none.
    pub fd: Option<i32>,
}
