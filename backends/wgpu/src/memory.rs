//! Device buffers, and transfers between them and the host.

use crate::bindings::BindGroups;
use crate::counts::{Counters, count};
use crate::faults::Faults;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Buffer, Error, ErrorKind, Result, Slice};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use wgpu::{BufferDescriptor, BufferUsages, CommandEncoderDescriptor, MapMode, PollType};

/// Padding of buffers: bindings that kernels read 16 bytes at a time end at a multiple of 16, and none may be
/// empty.
const PAD_BYTES: u64 = 16;
/// Bytes that a transfer moves at once; it uses twice as much staging memory.
const STAGE_BYTES: u64 = 16 << 20;

/// A buffer, which wgpu frees once the commands in flight that use it are done.
#[derive(Debug)]
pub(crate) struct WgpuMemory {
    buffer: wgpu::Buffer,
    bytes: u64,
    number: u64,
    groups: Arc<BindGroups>,
}

impl WgpuMemory {
    /// Allocates `bytes` bytes on `link`'s device.
    pub(crate) fn new(link: &DeviceQueue, bytes: u64) -> Result<WgpuMemory> {
        let size = bytes.next_multiple_of(PAD_BYTES) + PAD_BYTES;
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        let buffer = link.buffer("an allocation", size, usage)?;
        let number = link.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(WgpuMemory { buffer, bytes, number, groups: link.groups.clone() })
    }

    /// Returns the memory of a slice.
    pub(crate) fn of(slice: &Slice) -> Result<&WgpuMemory> {
        let memory = slice.buffer.as_any().downcast_ref::<WgpuMemory>();
        memory.ok_or_else(|| Error::invalid("wgpu: the slice belongs to another device"))
    }

    pub(crate) fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Its number, which no other memory of the device has had.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for WgpuMemory {
    fn drop(&mut self) {
        self.groups.forget(self.number);
    }
}

impl Buffer for WgpuMemory {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What the host has of a range of memory.
#[derive(Debug)]
pub(crate) struct HostCopy {
    /// Number of the memory.
    pub(crate) memory: u64,
    pub(crate) offset: u64,
    pub(crate) data: Vec<u8>,
}

/// A wgpu device with its single queue, which orders everything: a transfer follows all earlier submissions
/// and precedes all later ones.
pub(crate) struct DeviceQueue {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) faults: Arc<Faults>,
    pub(crate) counters: Counters,
    pub(crate) groups: Arc<BindGroups>,
    allocations: AtomicU64,
    /// Number of batches and writes so far.
    changes: AtomicU64,
    /// The results of the last batch, unless something came after it.
    landed: Mutex<Vec<HostCopy>>,
    /// Host-visible memory for `read`. The lock is held during a whole transfer, so that two transfers that
    /// share a 32-bit element do not interleave.
    stage: Mutex<TransferStaging>,
}

/// The state of transfers.
#[derive(Default)]
struct TransferStaging {
    /// Memory that the host can read.
    readable: Option<wgpu::Buffer>,
    /// Bytes written since the last submission of a transfer; they go with the next submission of any kind.
    waiting_bytes: u64,
}

/// Waits without a timeout for this or the last submission.
fn until(submission_index: Option<wgpu::SubmissionIndex>) -> PollType {
    PollType::Wait { submission_index, timeout: None }
}

impl DeviceQueue {
    pub(crate) fn new(device: wgpu::Device, queue: wgpu::Queue) -> DeviceQueue {
        let faults = Faults::listen(&device);
        DeviceQueue {
            device,
            queue,
            faults,
            counters: Counters::default(),
            groups: Arc::default(),
            allocations: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            landed: Mutex::default(),
            stage: Mutex::default(),
        }
    }

    /// Runs calls of wgpu; see [`Faults::guard`].
    pub(crate) fn guard<T>(&self, place: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.faults.guard(&self.device, place, run)
    }

    pub(crate) fn buffer(&self, place: &str, size: u64, usage: BufferUsages) -> Result<wgpu::Buffer> {
        let descriptor = BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        self.guard(place, || self.device.create_buffer(&descriptor))
    }

    fn check(slice: &Slice, len: usize) -> Result<&WgpuMemory> {
        let memory = WgpuMemory::of(slice)?;
        let inside = slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= memory.bytes);
        if len as u64 != slice.bytes || !inside {
            let message = format!("wgpu: {len} bytes for {} at {}", slice.bytes, slice.offset);
            return Err(Error::invalid(message));
        }
        Ok(memory)
    }

    /// Notes that memory changes, and returns the number of the change.
    pub(crate) fn change(&self) -> u64 {
        self.landed.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.changes.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Keeps the results of the batch with this change number, if it is the latest one.
    pub(crate) fn keep(&self, change: u64, results: Vec<HostCopy>) {
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        if self.changes.load(Ordering::Acquire) == change {
            *landed = results;
        }
    }

    /// Copies a range into `data` if it has landed.
    fn take_landed(&self, memory: &WgpuMemory, from: &Slice, data: &mut [u8]) -> bool {
        let landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        let found = landed.iter().filter(|one| one.memory == memory.number).find_map(|one| {
            let first = to_usize(from.offset.checked_sub(one.offset)?);
            one.data.get(first..first.checked_add(data.len())?)
        });
        found.map(|bytes| data.copy_from_slice(bytes)).is_some()
    }

    /// Copies `data` to `to`. wgpu copies multiples of four bytes, so partial ones at the ends are read and
    /// patched.
    pub(crate) fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        let memory = DeviceQueue::check(to, data.len())?;
        self.change();
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, mut rest) = (to.offset, data);
        while !rest.is_empty() {
            let inside = (at % 4) as usize;
            let word_end = (4 - inside).min(rest.len());
            let (now, later) = if inside != 0 || rest.len() < 4 {
                let mut word = [0; 4];
                self.copy_out(&mut stage, memory, at - inside as u64, &mut word)?;
                word[inside..inside + word_end].copy_from_slice(&rest[..word_end]);
                self.copy_in(&mut stage, memory, at - inside as u64, &word)?;
                rest.split_at(word_end)
            } else {
                let whole = rest.split_at(rest.len().min(to_usize(STAGE_BYTES)) & !3);
                self.copy_in(&mut stage, memory, at, whole.0)?;
                whole
            };
            at += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Schedules multiples of four bytes to be copied to the device before the next submission.
    fn copy_in(&self, stage: &mut TransferStaging, memory: &WgpuMemory, at: u64, data: &[u8]) -> Result<()> {
        count(&self.counters.bytes_written, data.len() as u64);
        self.guard("write", || self.queue.write_buffer(&memory.buffer, at, data))?;
        stage.waiting_bytes += data.len() as u64;
        // bound the staging memory of large uploads
        if stage.waiting_bytes >= STAGE_BYTES {
            count(&self.counters.submissions, 1);
            let index = self.guard("write", || self.queue.submit([]))?;
            stage.waiting_bytes = 0;
            self.settle(index)?;
        }
        Ok(())
    }

    fn settle(&self, index: wgpu::SubmissionIndex) -> Result<()> {
        let polled = self.guard("a wait", || self.device.poll(until(Some(index))))?;
        polled.map_err(|error| Error::new(ErrorKind::Other, format!("wgpu: a wait: {error}")))?;
        Ok(())
    }

    /// Copies `from` into `data`.
    pub(crate) fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        let memory = DeviceQueue::check(from, data.len())?;
        if self.take_landed(memory, from, data) {
            return self.faults.alive();
        }
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = from.offset;
        let mut rest = data;
        while !rest.is_empty() {
            let piece = rest.len().min(to_usize(STAGE_BYTES - 4));
            let (now, later) = rest.split_at_mut(piece);
            self.copy_out(&mut stage, memory, at, now)?;
            at += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Copies at most one stage, starting at any byte.
    fn copy_out(
        &self,
        stage: &mut TransferStaging,
        memory: &WgpuMemory,
        at: u64,
        data: &mut [u8],
    ) -> Result<()> {
        let first = at & !3;
        let bytes = (at + data.len() as u64).next_multiple_of(4) - first;
        let staged = match stage.readable.take().filter(|kept| kept.size() >= bytes) {
            Some(kept) => kept,
            None => {
                let size = bytes.next_power_of_two().max(1 << 16);
                self.buffer("staging memory", size, BufferUsages::MAP_READ | BufferUsages::COPY_DST)?
            }
        };
        count(&self.counters.submissions, 1);
        count(&self.counters.maps, 1);
        count(&self.counters.bytes_read, bytes);
        let mapped = Arc::new(AtomicBool::new(false));
        let done = mapped.clone();
        let index = self.guard("read", || {
            let mut encoder = self.device.create_command_encoder(&CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(&memory.buffer, first, &staged, 0, bytes);
            let index = self.queue.submit([encoder.finish()]);
            staged.map_async(MapMode::Read, 0..bytes, move |result| {
                done.store(result.is_ok(), Ordering::Release)
            });
            index
        });
        let copied = index.and_then(|index| {
            self.settle(index)?;
            self.guard("mapping", || {
                let range = staged.get_mapped_range(0..bytes).map_err(|error| error.to_string())?;
                data.copy_from_slice(&range[to_usize(at - first)..][..data.len()]);
                drop(range);
                staged.unmap();
                Ok(())
            })?
            .map_err(|error: String| Error::new(ErrorKind::Other, format!("wgpu: mapping: {error}")))
        });
        // after a failure its state is unknown
        if copied.is_ok() {
            stage.readable = Some(staged);
        }
        stage.waiting_bytes = 0;
        copied
    }
}

/// Operands without a device, for tests of planning.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use mixfleet_hal::OpSig;
    use mixfleet_hal::op::Extent;

    #[derive(Debug)]
    struct Nowhere(u64);

    impl Buffer for Nowhere {
        fn size_bytes(&self) -> u64 {
            self.0
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    /// Returns the operands of `sig` at awkward offsets, in separate buffers or in one; paged KV has nine
    /// pages.
    pub(crate) fn slices(sig: &OpSig, together: bool) -> Vec<Slice> {
        let operands = sig.operands();
        let bytes: Vec<u64> = operands
            .iter()
            .map(|operand| match operand.extent {
                Extent::Exactly(n) => n * operand.dtype.size_bytes(),
                Extent::PagesOf(n) => 9 * n * operand.dtype.size_bytes(),
            })
            .collect();
        let mut offset = 4;
        let whole = bytes.iter().map(|n| n.next_multiple_of(4) + 12).sum::<u64>() + 4;
        let one: Arc<dyn Buffer> = Arc::new(Nowhere(whole));
        bytes
            .iter()
            .map(|&bytes| {
                if !together {
                    return Slice { buffer: Arc::new(Nowhere(bytes + 20)), offset: 20, bytes };
                }
                let slice = Slice { buffer: one.clone(), offset, bytes };
                offset += bytes.next_multiple_of(4) + 12;
                slice
            })
            .collect()
    }
}
