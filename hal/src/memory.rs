//! Memory as callers see it: buffers behind `dyn`, slices as plain values.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::hash::Hasher;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// Bytes that [`SharedMemory::store_hashed`] copies before it hashes them: they and their copy fit a core's
/// first cache.
const HASHED_BYTES: usize = 8 << 10;

/// The purpose of a buffer. A backend may choose its placement by it, but results never depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferUsage {
    /// Model parameters: written once, then only read.
    Weights,
    /// KV pages, and KV in transit to or from them.
    Kv,
    /// Inputs and outputs of one step.
    Activations,
    /// Data that the host reads or writes often and in small parts; pinned host memory if available.
    Staging,
}

/// A memory object of a device, freed on drop once the commands in flight that use it are done.
pub trait Buffer: Send + Sync + std::fmt::Debug {
    /// Bytes of the allocation.
    fn size_bytes(&self) -> u64;
    /// Allows a backend to downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// A range of a buffer, which is cheap to clone and keeps the buffer alive.
#[derive(Clone, Debug)]
pub struct Slice {
    /// The buffer.
    pub buffer: Arc<dyn Buffer>,
    /// Offset of the first byte in the buffer.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Slice {
    /// Returns a slice of the whole buffer.
    pub fn whole(buffer: Arc<dyn Buffer>) -> Self {
        let bytes = buffer.size_bytes();
        Slice { buffer, offset: 0, bytes }
    }

    /// Returns `bytes` bytes of this slice, starting at `offset`.
    ///
    /// # Panics
    /// If the range exceeds the slice, which is a bug in the caller.
    pub fn range(&self, offset: u64, bytes: u64) -> Slice {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "range {offset}+{bytes} leaves a slice of {} bytes",
            self.bytes
        );
        Slice { buffer: self.buffer.clone(), offset: self.offset + offset, bytes }
    }

    /// Whether both slices share a byte of the same buffer.
    pub fn overlaps(&self, other: &Slice) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.buffer), Arc::as_ptr(&other.buffer))
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// Host memory that is neither moved nor modified, such as a mapped checkpoint. Devices that support it use
/// it in place.
pub trait HostMemory: Send + Sync + std::fmt::Debug {
    /// Returns the bytes.
    fn as_bytes(&self) -> &[u8];

    /// Checks that the bytes have not changed since they were mapped, since others may truncate or overwrite
    /// a mapped file. Callers compute first and check before the result is used.
    ///
    /// # Errors
    /// `DeviceLost` if the bytes changed, in which case their content is meaningless.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Announces that these bytes are about to be used in place, so that a file's bytes should be in memory.
    fn needed(&self, range: Range<usize>) {
        let _ = range;
    }

    /// Announces that these bytes were copied elsewhere and are not read again soon, so that a file's bytes
    /// may leave memory.
    fn unneeded(&self, range: Range<usize>) {
        let _ = range;
    }

    /// Returns which file this is and when it last changed; `None` for memory that is not a file.
    fn stamp(&self) -> Option<FileStamp> {
        None
    }

    /// Records that all bytes were verified to be unchanged while the file had this stamp, so that earlier
    /// writes to it no longer count. A truncation still does.
    fn accept(&self, stamp: &FileStamp) {
        let _ = stamp;
    }
}

/// Identifies a file's content without reading it: equal stamps mean equal bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    /// The file system's device.
    pub device: u64,
    /// The file's inode number on that device.
    pub inode: u64,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Modification time (mtime), which the owner can set, in seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// Status change time (ctime), which programs cannot set, in seconds and nanoseconds since 1970.
    pub changed: (i64, i64),
}

impl HostMemory for Vec<u8> {
    fn as_bytes(&self) -> &[u8] {
        self
    }
}

/// Maps files as host memory. Mapping needs `unsafe`, so a backend implements it.
pub trait FileMapper: Send + Sync {
    /// Maps the whole file at `path` read-only.
    fn map(&self, path: &Path) -> std::io::Result<Arc<dyn HostMemory>>;
}

/// Host memory that both ends of a transport can access: staging buffers and the pages of the KV pool.
///
/// Calls within this process are mutually exclusive. A peer that writes through shared pages or a NIC is not
/// excluded, so a reader must know that a range is complete, and must verify it.
pub trait SharedMemory: Send + Sync {
    /// Length in bytes.
    fn size_bytes(&self) -> u64;

    /// Calls `look` once with `bytes` bytes starting at `offset`.
    ///
    /// # Errors
    /// `Invalid` if the range exceeds the memory, in which case `look` is not called.
    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// Calls `change` once with `bytes` writable bytes starting at `offset`.
    ///
    /// # Errors
    /// `Invalid` if the range exceeds the memory, in which case `change` is not called.
    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Returns the memory's address for transports that access it directly; `None` if it can only be accessed
    /// through calls.
    fn mapping(&self) -> Option<Mapping>;

    /// Replaces the pages that another process may have mapped by fresh ones with the same bytes, so that its
    /// later writes no longer reach this memory. Address and file descriptor number stay the same. Must not
    /// be called while anything in this process accesses the memory through [`mapping`](Self::mapping), as a
    /// device that has it [pinned](crate::Device::pin) does, because those bytes could be lost.
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

    /// Copies `data` to `offset` and returns the XXH3-64 of the copy; each piece is hashed while it is in the
    /// cache. The hash is that of the copied bytes, even if `data` changes during the copy.
    ///
    /// # Errors
    /// As `update`.
    fn store_hashed(&self, offset: u64, data: &[u8]) -> Result<u64> {
        let mut hash = XxHash3_64::new();
        self.update(offset, data.len() as u64, &mut |place| {
            for (place, data) in place.chunks_mut(HASHED_BYTES).zip(data.chunks(HASHED_BYTES)) {
                place.copy_from_slice(data);
                hash.write(place);
            }
        })?;
        Ok(hash.finish())
    }

    /// Copies from `offset` into `data`.
    ///
    /// # Errors
    /// As `view`.
    fn load(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.view(offset, data.len() as u64, &mut |place| data.copy_from_slice(place))
    }
}

/// A guard that keeps memory pinned for a device; see [`Device::pin`](crate::Device::pin).
pub type Pinned = Box<dyn Send + Sync>;

/// Where shared memory is mapped in this process; valid as long as the memory it came from lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes.
    pub bytes: u64,
    /// A file descriptor that another process on this host can map, owned by the memory, if there is one.
    pub fd: Option<i32>,
}
