//! Buffers, the batches that use them, and transfers, which are direct or use pinned bounce buffers.

use crate::driver::{At, CudaContext, CudaEvent, DeviceMemory, EventPool, HostPinned, Stream};
use crate::pinned::Ranges;
use crate::plan::DeviceRange;
use cudarc::driver::result;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Buffer, BufferUsage, Error, Result, Slice};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// The storage of a buffer.
enum CudaStorage {
    Device(DeviceMemory),
    /// Pinned host memory mapped for the device: `BufferUsage::Staging`.
    Host(HostPinned),
}

/// A buffer, freed once the batches in flight that use it are done.
pub(crate) struct CudaMemory {
    storage: CudaStorage,
    address: u64,
    bytes: u64,
    /// For each queue, of any device, the end of its last batch that uses the buffer.
    users: Mutex<Vec<(u64, Arc<CudaEvent>)>>,
}

impl std::fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("address", &self.address).field("bytes", &self.bytes).finish()
    }
}

impl CudaMemory {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: u64, role: BufferUsage) -> Result<CudaMemory> {
        let (storage, address) = match role {
            BufferUsage::Staging => {
                let pinned = HostPinned::new(context, bytes)?;
                let address = pinned.device_address()?;
                (CudaStorage::Host(pinned), address)
            }
            _ => {
                let memory = DeviceMemory::new(context, bytes)?;
                let address = memory.raw;
                (CudaStorage::Device(memory), address)
            }
        };
        Ok(CudaMemory { storage, address, bytes, users: Mutex::default() })
    }

    /// Returns the memory of a slice, which must lie inside.
    pub(crate) fn of(slice: &Slice) -> Result<&CudaMemory> {
        let memory = slice.buffer.as_any().downcast_ref::<CudaMemory>();
        let memory = memory.ok_or_else(|| Error::invalid("cuda: the slice belongs to another device"))?;
        let inside = slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= memory.bytes);
        if inside {
            Ok(memory)
        } else {
            let message =
                format!("cuda: {} bytes at {} leave a buffer of {}", slice.bytes, slice.offset, memory.bytes);
            Err(Error::invalid(message))
        }
    }

    /// Returns a slice as kernels see it.
    pub(crate) fn place(slice: &Slice) -> Result<DeviceRange> {
        Ok(DeviceRange { address: CudaMemory::of(slice)?.address + slice.offset, bytes: slice.bytes })
    }

    /// Returns the context that it belongs to.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        match &self.storage {
            CudaStorage::Device(memory) => &memory.context,
            CudaStorage::Host(memory) => &memory.context,
        }
    }

    /// Whether it belongs to `context`.
    pub(crate) fn is_in(&self, context: &Arc<CudaContext>) -> bool {
        Arc::ptr_eq(self.context(), context)
    }

    /// Whether it is memory of the device itself.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self.storage, CudaStorage::Device(_))
    }

    /// Records that the batch of `queue` that ends with `event` uses the buffer. Batches of a queue end in
    /// order, so only the last one matters.
    pub(crate) fn used_by(&self, queue: u64, event: &Arc<CudaEvent>) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        match users.iter_mut().find(|(other, _)| *other == queue) {
            Some((_, last)) => *last = event.clone(),
            None => {
                // queues that are gone leave events behind
                users.retain(|(_, event)| !event.is_done().unwrap_or(true));
                users.push((queue, event.clone()));
            }
        }
    }

    /// Waits until no batch in flight uses the buffer. Failures of batches are reported by their tickets.
    pub(crate) fn settle(&self) {
        let users = std::mem::take(&mut *self.users.lock().unwrap_or_else(PoisonError::into_inner));
        for (_, event) in users {
            let _ = event.synchronize();
        }
    }
}

impl Buffer for CudaMemory {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Size of a bounce buffer: large enough for the link's full rate, small enough to stay in the host's caches.
const HALF_BYTES: usize = 4 << 20;

/// Copies between host and device memory. Pinned memory is copied directly; everything else goes through two
/// pinned bounce buffers: one is in flight while the other is filled or emptied. No copy of pinned memory is
/// in flight when a call returns.
pub(crate) struct Transfers {
    stream: Stream,
    events: Arc<EventPool>,
    halves: [HostPinned; 2],
    pub(crate) pinned: Ranges,
}

impl Transfers {
    pub(crate) fn new(context: &Arc<CudaContext>, events: &Arc<EventPool>) -> Result<Transfers> {
        let half = || HostPinned::new(context, HALF_BYTES as u64);
        let (stream, halves) = (Stream::new(context)?, [half()?, half()?]);
        Ok(Transfers { stream, events: events.clone(), halves, pinned: Ranges::default() })
    }

    /// Copies `data` to `offset` of `memory`, which no batch may be using.
    pub(crate) fn write(&self, memory: &CudaMemory, offset: u64, data: &[u8]) -> Result<()> {
        if let CudaStorage::Host(pinned) = &memory.storage {
            // SAFETY: the caller checked the range; no batch uses the buffer.
            let to = unsafe {
                std::slice::from_raw_parts_mut(pinned.raw.cast::<u8>().add(to_usize(offset)), data.len())
            };
            to.copy_from_slice(data);
            return Ok(());
        }
        if self.pinned.hold(data) {
            let to = memory.address + offset;
            // SAFETY: the target is inside `memory`, and `data` is borrowed until the copy is done.
            unsafe { result::memcpy_htod_async(to, data, self.stream.raw) }.at("a copy to the device")?;
            return self.stream.synchronize();
        }
        let mut sent: [Option<CudaEvent>; 2] = [None, None];
        for (i, piece) in data.chunks(HALF_BYTES).enumerate() {
            if let Some(event) = sent[i % 2].take() {
                event.synchronize()?;
            }
            let half = self.halves[i % 2].raw.cast::<u8>();
            let to = memory.address + offset + (i * HALF_BYTES) as u64;
            // SAFETY: the half is HALF_BYTES long and no copy uses it any more; the target is inside
            // `memory`, and `synchronize` below keeps both until the copy is done.
            unsafe {
                half.copy_from_nonoverlapping(piece.as_ptr(), piece.len());
                let from = std::slice::from_raw_parts(half, piece.len());
                result::memcpy_htod_async(to, from, self.stream.raw).at("a copy to the device")?;
            }
            sent[i % 2] = Some(self.events.record(&self.stream)?);
        }
        self.stream.synchronize()
    }

    /// Copies from `offset` of `memory`, which no batch may be using, into `data`.
    pub(crate) fn read(&self, memory: &CudaMemory, offset: u64, data: &mut [u8]) -> Result<()> {
        if let CudaStorage::Host(pinned) = &memory.storage {
            // SAFETY: as in `write`.
            let from = unsafe {
                std::slice::from_raw_parts(pinned.raw.cast::<u8>().add(to_usize(offset)), data.len())
            };
            data.copy_from_slice(from);
            return Ok(());
        }
        if self.pinned.hold(data) {
            let from = memory.address + offset;
            // SAFETY: the source is inside `memory`, and `data` is borrowed until the copy is done.
            unsafe { result::memcpy_dtoh_async(data, from, self.stream.raw) }.at("a copy from the device")?;
            return self.stream.synchronize();
        }
        let mut pieces: Vec<&mut [u8]> = data.chunks_mut(HALF_BYTES).collect();
        let mut arrived: [Option<CudaEvent>; 2] = [None, None];
        for i in 0..=pieces.len() {
            if i < pieces.len() {
                let from = memory.address + offset + (i * HALF_BYTES) as u64;
                // SAFETY: the half was emptied in the round before last; the source is inside `memory`; the
                // event keeps order.
                unsafe {
                    let half = self.halves[i % 2].raw.cast::<u8>();
                    let to = std::slice::from_raw_parts_mut(half, pieces[i].len());
                    result::memcpy_dtoh_async(to, from, self.stream.raw).at("a copy from the device")?;
                }
                arrived[i % 2] = Some(self.events.record(&self.stream)?);
            }
            let Some(last) = i.checked_sub(1) else { continue };
            if let Some(event) = arrived[last % 2].take() {
                event.synchronize()?;
            }
            // SAFETY: the copy into this half is done, and the next one into it begins a round later.
            let from = unsafe {
                std::slice::from_raw_parts(self.halves[last % 2].raw.cast::<u8>(), pieces[last].len())
            };
            pieces[last].copy_from_slice(from);
        }
        Ok(())
    }
}
