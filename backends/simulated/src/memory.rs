//! Simulated memory: as much as the profile says, backed by the host only where it was touched.
//!
//! Kernels write a few bytes of each row, and what they have to know of the rest stands beside the
//! bytes: which elements can hold anything ([`Live`]), where logits have their peaks, and the hashes
//! of KV slots. Every write goes through [`BufferContents::edit`] or [`BufferContents::write_slots`], which
//! keep that true.

use crate::slots::Slots;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Buffer, BufferUsage, DType, Error, ErrorKind, HostMemory, Result, Slice};
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The memory of a simulated part.
#[derive(Debug)]
pub(crate) struct SimulatedMemoryBudget {
    id: String,
    used: AtomicU64,
    limit: u64,
}

/// Bytes charged to a budget, until dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<SimulatedMemoryBudget>,
    bytes: u64,
}

impl SimulatedMemoryBudget {
    pub(crate) fn new(id: &str, limit: u64) -> Arc<Self> {
        Arc::new(SimulatedMemoryBudget { id: id.to_owned(), used: AtomicU64::new(0), limit })
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// # Errors
    /// `OutOfMemory` if the part has less left.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge> {
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&total| total <= self.limit)
        });
        taken.map_err(|used| {
            let message = format!(
                "{}: {bytes} bytes wanted, {used} of {} in use: use a smaller KV budget or model, or a part \
                 with more memory",
                self.id, self.limit
            );
            Error::new(ErrorKind::OutOfMemory, message)
        })?;
        Ok(Charge { budget: self.clone(), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A buffer of a time-only device, which is a key to its [`BufferContents`].
pub(crate) struct SimBuffer {
    key: u64,
    bytes: u64,
    store: SharedStore,
    _charge: Charge,
}

impl fmt::Debug for SimBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimBuffer({}, {} bytes)", self.key, self.bytes)
    }
}

impl Buffer for SimBuffer {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimBuffer {
    fn drop(&mut self) {
        let content = lock(&self.store).contents.remove(&self.key);
        // unmapping gigabytes takes a while, so not under the lock
        drop(content);
    }
}

/// All buffers of a device.
pub(crate) type SharedStore = Arc<Mutex<BufferContents>>;

/// Bytes are valid even after a panic elsewhere.
pub(crate) fn lock(store: &SharedStore) -> MutexGuard<'_, BufferContents> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The contents of a device's buffers.
#[derive(Debug, Default)]
pub(crate) struct BufferContents {
    contents: HashMap<u64, Content>,
}

#[derive(Debug)]
enum ContentBytes {
    Owned(memmap2::MmapMut),
    Imported(Arc<dyn HostMemory>),
}

/// Which elements of a buffer may be non-zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    /// None.
    None,
    /// Only the lanes of rows (see [`crate::digest`]), and peaks.
    Rows(StridedRows),
    /// Any element.
    All,
}

/// Rows that are `stride` bytes apart, the first one at `phase`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StridedRows {
    pub(crate) stride: u64,
    pub(crate) phase: u64,
    pub(crate) dtype: DType,
}

#[derive(Debug)]
pub(crate) struct Content {
    bytes: ContentBytes,
    role: BufferUsage,
    pub(crate) live: Live,
    /// Offsets of the largest elements of logits; complete unless `live` is `All`.
    pub(crate) peaks: BTreeSet<u64>,
    pub(crate) slots: Vec<Slots>,
}

impl Content {
    fn new(bytes: ContentBytes, role: BufferUsage, live: Live) -> Self {
        Content { bytes, role, live, peaks: BTreeSet::new(), slots: Vec::new() }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        match &self.bytes {
            ContentBytes::Owned(map) => map,
            ContentBytes::Imported(memory) => memory.as_bytes(),
        }
    }

    /// Returns what the buffer is for.
    pub(crate) fn role(&self) -> BufferUsage {
        self.role
    }

    pub(crate) fn is_weights(&self) -> bool {
        self.role == BufferUsage::Weights || matches!(self.bytes, ContentBytes::Imported(_))
    }

    /// Returns the bytes mutably, for callers that keep the bookkeeping correct.
    pub(crate) fn as_bytes_mut(&mut self) -> Result<&mut [u8]> {
        match &mut self.bytes {
            ContentBytes::Owned(map) => Ok(map),
            ContentBytes::Imported(_) => {
                Err(Error::invalid("imported host memory is read-only; write to a buffer of `alloc`"))
            }
        }
    }
}

/// The effect of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WriteEffect {
    /// Any bytes may change.
    Any,
    /// Only lanes of rows of this many bytes change, the first row at the slice's start.
    Rows(u64, DType),
}

impl BufferContents {
    pub(crate) fn alloc(store: &SharedStore, bytes: u64, role: BufferUsage, charge: Charge) -> Result<Slice> {
        // an empty slice still needs an address
        let length = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // never reserved, since most of it stays untouched
        let map = memmap2::MmapOptions::new().len(length).no_reserve_swap().map_anon().map_err(|error| {
            let message = format!("the host has no address space for {bytes} simulated bytes: {error}");
            Error::new(ErrorKind::OutOfMemory, message)
        })?;
        Ok(BufferContents::insert(
            store,
            Content::new(ContentBytes::Owned(map), role, Live::None),
            bytes,
            charge,
        ))
    }

    pub(crate) fn import(store: &SharedStore, memory: Arc<dyn HostMemory>, charge: Charge) -> Slice {
        let bytes = memory.as_bytes().len() as u64;
        BufferContents::insert(
            store,
            Content::new(ContentBytes::Imported(memory), BufferUsage::Weights, Live::All),
            bytes,
            charge,
        )
    }

    fn insert(store: &SharedStore, content: Content, bytes: u64, charge: Charge) -> Slice {
        // unique over all devices, so that a buffer of another one is detected
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(store).contents.insert(key, content);
        Slice::whole(Arc::new(SimBuffer { key, bytes, store: store.clone(), _charge: charge }))
    }

    fn key(slice: &Slice) -> Option<u64> {
        slice.buffer.as_any().downcast_ref::<SimBuffer>().map(|buffer| buffer.key)
    }

    /// Returns the buffer of `slice`, and the range of the slice in it.
    pub(crate) fn content(&self, slice: &Slice) -> Result<(&Content, Range<usize>)> {
        let content =
            BufferContents::key(slice).and_then(|key| self.contents.get(&key)).ok_or_else(foreign)?;
        let range = inside(content, slice)?;
        Ok((content, range))
    }

    pub(crate) fn content_mut(&mut self, slice: &Slice) -> Result<(&mut Content, Range<usize>)> {
        let key = BufferContents::key(slice).ok_or_else(foreign)?;
        let content = self.contents.get_mut(&key).ok_or_else(foreign)?;
        let range = inside(content, slice)?;
        Ok((content, range))
    }

    pub(crate) fn bytes(&self, slice: &Slice) -> Result<&[u8]> {
        let (content, range) = self.content(slice)?;
        Ok(&content.as_bytes()[range])
    }

    pub(crate) fn words(&self, slice: &Slice) -> Result<Vec<u32>> {
        Ok(self.bytes(slice)?.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect())
    }

    /// Returns the bytes of `slice` for a change described by `edit`.
    pub(crate) fn edit(&mut self, slice: &Slice, edit: WriteEffect) -> Result<&mut [u8]> {
        let (content, range) = self.content_mut(slice)?;
        content.as_bytes_mut()?;
        let now = match edit {
            WriteEffect::Any => Live::All,
            WriteEffect::Rows(stride, dtype) if stride > 0 => {
                Live::Rows(StridedRows { stride, phase: slice.offset % stride, dtype })
            }
            WriteEffect::Rows(..) => content.live,
        };
        if content.live == Live::None {
            content.live = now;
        } else if content.live != now {
            content.live = Live::All;
        }
        if content.live == Live::All {
            content.peaks.clear();
        }
        content.slots.iter_mut().for_each(|slots| slots.forget(&range));
        Ok(&mut content.as_bytes_mut()?[range])
    }

    /// Zeroes `slice` so that only lanes and peaks of f32 rows of `stride` bytes remain, cheaply if nothing
    /// else can be there.
    pub(crate) fn clear_rows(&mut self, slice: &Slice, stride: u64) -> Result<()> {
        let (content, range) = self.content_mut(slice)?;
        let rows = Live::Rows(StridedRows { stride, phase: slice.offset % stride.max(1), dtype: DType::F32 });
        if content.live != Live::None && content.live != rows {
            let whole = range.len() == content.as_bytes().len();
            content.as_bytes_mut()?[range].fill(0);
            content.peaks.clear();
            content.live = if whole { rows } else { Live::All };
            return Ok(());
        }
        let offsets: Vec<u64> = content.peaks.range(range.start as u64..range.end as u64).copied().collect();
        for offset in offsets {
            content.peaks.remove(&offset);
            content.as_bytes_mut()?[to_usize(offset)..][..4].fill(0);
        }
        Ok(())
    }

    /// Writes row `i` of `rows` to slot `slots[i]`, after checking all slots.
    pub(crate) fn write_slots(&mut self, pool: &Slice, slots: &[u32], rows: &[u8]) -> Result<()> {
        let row_bytes = rows.len() / slots.len().max(1);
        let (content, range) = self.content_mut(pool)?;
        let count = range.len() / row_bytes.max(1);
        if let Some(slot) = slots.iter().find(|&&slot| slot as usize >= count) {
            return Err(Error::invalid(format!("slot {slot} is outside a pool of {count}")));
        }
        content.as_bytes_mut()?;
        content.live = Live::All;
        content.peaks.clear();
        for (&slot, row) in slots.iter().zip(rows.chunks_exact(row_bytes.max(1))) {
            let at = range.start + slot as usize * row_bytes;
            content.slots.iter_mut().for_each(|slots| slots.forget(&(at..at + row_bytes)));
            content.as_bytes_mut()?[at..at + row_bytes].copy_from_slice(row);
        }
        Ok(())
    }
}

fn foreign() -> Error {
    Error::invalid("a slice belongs to another device")
}

fn inside(content: &Content, slice: &Slice) -> Result<Range<usize>> {
    let end = slice.offset.checked_add(slice.bytes).filter(|&end| end <= content.as_bytes().len() as u64);
    let end = end.ok_or_else(|| Error::invalid("a slice leaves its buffer"))?;
    Ok(to_usize(slice.offset)..to_usize(end))
}
