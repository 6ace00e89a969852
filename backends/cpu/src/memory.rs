//! Buffers: anonymous host memory, or imported host memory.

use crate::kernels::OperandSpan;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{BatchMemory, Buffer, Error, ErrorKind, HostMemory, Result, Slice};
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The memory budget of a device: bytes in use, and their limit.
#[derive(Debug)]
pub(crate) struct CpuMemoryBudget {
    pub(crate) used: AtomicU64,
    pub(crate) limit: u64,
}

/// The storage of a buffer.
enum CpuStorage {
    /// Anonymous zeroed pages; freed with the buffer.
    Owned { map: memmap2::MmapMut, budget: Arc<CpuMemoryBudget>, charged: u64 },
    /// Imported memory, which is read-only.
    Imported(Arc<dyn HostMemory>),
}

/// A buffer of the CPU backend, which all devices of this backend can use.
pub(crate) struct CpuBuffer {
    /// Held for reading or writing by a running batch or a host copy.
    pub(crate) lock: RwLock<()>,
    start: *mut u8,
    bytes: u64,
    storage: CpuStorage,
}

// SAFETY: the bytes behind `start` are only touched under `lock`, and never written if imported.
unsafe impl Send for CpuBuffer {}
// SAFETY: as above.
unsafe impl Sync for CpuBuffer {}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_read_only() { "imported" } else { "owned" };
        write!(f, "CpuBuffer({kind}, {} bytes)", self.bytes)
    }
}

impl Buffer for CpuBuffer {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl CpuBuffer {
    /// Allocates zeroed memory, charged to `budget` until it is dropped.
    pub(crate) fn owned(bytes: u64, budget: &Arc<CpuMemoryBudget>) -> Result<Self> {
        let full = |used: u64| {
            let message = format!(
                "cpu: {bytes} bytes wanted, {used} of {} in use: use a smaller KV budget or model",
                budget.limit
            );
            Error::new(ErrorKind::OutOfMemory, message)
        };
        let charge = budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&total| total <= budget.limit)
        });
        charge.map_err(full)?;
        let refund = || budget.used.fetch_sub(bytes, Ordering::Relaxed);
        // an empty slice still needs an address
        let length = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let mut map = memmap2::MmapMut::map_anon(length).map_err(|e| {
            let used = refund() - bytes;
            full(used).context(e)
        })?;
        #[cfg(target_os = "linux")]
        if length >= 4 << 20 {
            // best effort: fewer page-table walks if the kernel has huge pages available
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let start = map.as_mut_ptr();
        let storage = CpuStorage::Owned { map, budget: budget.clone(), charged: bytes };
        Ok(CpuBuffer { lock: RwLock::new(()), start, bytes, storage })
    }

    /// Wraps host memory in place.
    pub(crate) fn imported(memory: Arc<dyn HostMemory>) -> Self {
        let bytes = memory.as_bytes();
        let (start, bytes) = (bytes.as_ptr().cast_mut(), bytes.len() as u64);
        CpuBuffer { lock: RwLock::new(()), start, bytes, storage: CpuStorage::Imported(memory) }
    }

    /// Whether commands may only read the buffer.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.storage, CpuStorage::Imported(_))
    }

    /// Checks that imported memory is unchanged.
    ///
    /// # Errors
    /// As for [`HostMemory::check`].
    pub(crate) fn check(&self) -> Result<()> {
        match &self.storage {
            CpuStorage::Owned { .. } => Ok(()),
            CpuStorage::Imported(memory) => memory.check(),
        }
    }

    /// Returns the bytes of a slice of this buffer, which must lie inside it.
    pub(crate) fn span(&self, slice: &Slice) -> OperandSpan {
        OperandSpan { start: self.start.wrapping_add(to_usize(slice.offset)), bytes: to_usize(slice.bytes) }
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        match &self.storage {
            CpuStorage::Owned { map, budget, charged } => {
                debug_assert!(map.len() as u64 >= self.bytes);
                budget.used.fetch_sub(*charged, Ordering::Relaxed);
            }
            CpuStorage::Imported(memory) => debug_assert!(memory.as_bytes().len() as u64 == self.bytes),
        }
    }
}

/// Returns the CPU buffer of a slice after checking that the slice lies inside it.
///
/// # Errors
/// `Invalid` for another backend's buffer or a range outside.
pub(crate) fn buffer_of(slice: &Slice) -> Result<&CpuBuffer> {
    let buffer = slice.buffer.as_any().downcast_ref::<CpuBuffer>();
    let buffer = buffer
        .ok_or_else(|| Error::invalid(format!("{:?} is not a buffer of the cpu backend", slice.buffer)))?;
    let inside = slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= buffer.bytes);
    if !inside {
        let message =
            format!("slice {}+{} leaves its buffer of {} bytes", slice.offset, slice.bytes, buffer.bytes);
        return Err(Error::invalid(message));
    }
    Ok(buffer)
}

fn check_length(slice: &Slice, length: usize) -> Result<()> {
    if slice.bytes != length as u64 {
        return Err(Error::invalid(format!("{length} bytes of host memory for a slice of {}", slice.bytes)));
    }
    Ok(())
}

/// Copies `data` to a slice.
///
/// # Errors
/// `Invalid` for another length or backend, or for imported memory.
pub(crate) fn write(to: &Slice, data: &[u8]) -> Result<()> {
    let buffer = buffer_of(to)?;
    check_length(to, data.len())?;
    if buffer.is_read_only() {
        return Err(Error::invalid("imported host memory is read-only; write to a buffer of `alloc`"));
    }
    let guard = buffer.lock.write().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the slice is inside the buffer, which is locked for writing and owned by it.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.span(to).start, data.len()) };
    drop(guard);
    Ok(())
}

/// Copies a slice to `data`.
///
/// # Errors
/// `Invalid` for another length or backend.
pub(crate) fn read(from: &Slice, data: &mut [u8]) -> Result<()> {
    let buffer = buffer_of(from)?;
    check_length(from, data.len())?;
    let guard = buffer.lock.read().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the slice is inside the buffer, which is locked for reading.
    unsafe { std::ptr::copy_nonoverlapping(buffer.span(from).start, data.as_mut_ptr(), data.len()) };
    drop(guard);
    Ok(())
}

/// The memory of the device whose thread is at a meeting.
pub(crate) struct AtMeeting;

impl BatchMemory for AtMeeting {
    fn read(&self, from: &Slice, into: &mut [u8]) -> Result<()> {
        read(from, into)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        write(to, data)
    }
}
