//! Blocks on a disk: frames in slots of equal size in one file, and a journal that says which block is where.
//!
//! Writes are not synced. Every frame is checked when it is read, so that a crash or power failure cannot
//! leave a wrong one.

use super::check::{FrameRefusal, Layout};
use super::directory;
use super::disk::Disk;
use super::events::Events;
use super::journal::{self, Journal, Stored};
use super::lane::{DiskAccess, DiskJob};
use super::{PoolError, SsdConfig};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy, Tier};
use mixfleet_scheduler::table::IdMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(super) const FILE: &str = "blocks";

/// Frames of at least this size start at a multiple of it, the operating system's page size.
const PAGE_BYTES: u64 = 4096;
/// While nothing can be stored, one block in this many is tried.
const TRY_EVERY: u32 = 64;
/// Buffers for frames that are kept for reuse.
const BUFFERS_MAX: usize = 8;

/// The file of frames: reading and writing, outside any lock.
pub(super) struct Frames {
    pub(super) access: DiskAccess,
    layout: Layout,
    stride: u64,
    buffers: Mutex<Vec<Vec<u8>>>,
}

/// Why a block could not be read.
pub(super) enum ReadError {
    Refused(FrameRefusal),
    Io(io::Error),
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ReadError::Refused(FrameRefusal::Damaged(why)) => f.write_str(why),
            ReadError::Refused(FrameRefusal::OtherTokens) => f.write_str("it is another prompt's"),
            ReadError::Io(error) => error.fmt(f),
        }
    }
}

impl Frames {
    /// Memory for a frame, with arbitrary content; to be returned after use.
    pub(super) fn buffer(&self) -> Vec<u8> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    pub(super) fn give_back(&self, buffer: Vec<u8>) {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < BUFFERS_MAX {
            buffers.push(buffer);
        }
    }

    /// Reads the frame in `slot` and checks that it is this block of this prompt. Returns its buffer, to be
    /// returned after use, and the XXH3-64 of its payload.
    pub(super) fn read(&self, slot: u32, hash: BlockHash, tokens: &[u32]) -> Result<CheckedFrame, ReadError> {
        self.checked(self.access.run(self.reading(slot)), hash, tokens)
    }

    /// Begins to read the frame in `slot`. None if too many jobs wait for the disk.
    pub(super) fn begin_read(&self, slot: u32) -> Option<FrameRead> {
        self.access.begin(self.reading(slot)).map(FrameRead)
    }

    /// The result of a read, as of [`read`](Self::read), and the time that the disk took for it. None if it
    /// is not done within `wait`.
    pub(super) fn end_read(
        &self,
        FrameRead(job): &mut FrameRead,
        hash: BlockHash,
        tokens: &[u32],
        wait: Duration,
    ) -> Option<(Result<CheckedFrame, ReadError>, Seconds)> {
        let (read, time) = self.access.poll(job, wait)?;
        Some((self.checked(read, hash, tokens), time))
    }

    /// Reads the frame in `slot`, or the part of it that is in the file: its buffer, and the bytes read.
    fn reading(&self, slot: u32) -> impl FnOnce(&dyn Disk) -> io::Result<(Vec<u8>, usize)> + Send + 'static {
        let (mut frame, offset) = (self.buffer(), u64::from(slot) * self.stride);
        frame.resize(self.layout.frame_bytes(), 0);
        move |disk| {
            let read = disk.read_at(FILE, offset, &mut frame)?;
            Ok((frame, read))
        }
    }

    fn checked(
        &self,
        read: io::Result<(Vec<u8>, usize)>,
        hash: BlockHash,
        tokens: &[u32],
    ) -> Result<CheckedFrame, ReadError> {
        let (frame, read) = read.map_err(ReadError::Io)?;
        match self.layout.check(&frame[..read], hash, tokens) {
            Ok(digest) => Ok((frame, digest)),
            Err(refusal) => {
                self.give_back(frame);
                Err(ReadError::Refused(refusal))
            }
        }
    }

    /// Appends the trailer of the block `hash` to a payload whose XXH3-64 is `digest`.
    pub(super) fn add_trailer(&self, frame: &mut Vec<u8>, hash: BlockHash, tokens: &[u32], digest: u64) {
        self.layout.add_trailer(frame, hash, tokens, digest);
    }

    pub(super) fn write(&self, slot: u32, frame: Vec<u8>) -> io::Result<()> {
        let offset = u64::from(slot) * self.stride;
        let (frame, written) = self.access.run(move |disk| {
            let written = disk.write_at(FILE, offset, &frame);
            Ok((frame, written))
        })?;
        self.give_back(frame);
        written
    }
}

/// A frame's buffer, and the XXH3-64 of its payload.
pub(super) type CheckedFrame = (Vec<u8>, u64);

/// A frame that is being read.
pub(super) struct FrameRead(DiskJob<(Vec<u8>, usize)>);

struct Held {
    place: FramePlace,
    /// Whether its frame is written. Until then only the task that writes it uses it.
    ready: bool,
}

/// Where a block is, and since which write: a slot may be given to other blocks and then to this one again
/// during a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FramePlace {
    pub(super) slot: u32,
    write: u64,
}

/// Which block is in which slot.
pub(super) struct Ssd {
    pub(super) frames: Arc<Frames>,
    pub(super) cache: BlockCache,
    held: IdMap<Held>,
    free: Vec<u32>,
    /// Number of writes begun.
    writes: u64,
    journal: Journal,
    paused: Option<String>,
    skipped: u32,
}

/// What happens to a block that leaves host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotDecision {
    /// The disk holds it already.
    Known,
    /// Its frame is to be written into this slot.
    Write(u32),
    /// It is lost, since nothing can be stored now.
    Lost,
}

/// The distance between frames in bytes, and the number of frames that fit into `bytes` bytes.
fn room(layout: &Layout, bytes: u64) -> Result<(u64, u32), PoolError> {
    let stride = match layout.frame_bytes() as u64 {
        small if small < PAGE_BYTES => small,
        large => large.next_multiple_of(PAGE_BYTES),
    };
    let slot_bytes = stride + journal::RECORDS_PER_SLOT_MAX * journal::RECORD_BYTES;
    // `BlockCache` counts up to 2^32 - 2.
    let slots =
        to_u32((bytes.saturating_sub(directory::META_BYTES) / slot_bytes).min(u64::from(u32::MAX) - 2));
    if slots == 0 {
        return Err(PoolError::TooSmall { tier: "ssd", bytes, needed: directory::META_BYTES + slot_bytes });
    }
    Ok((stride, slots))
}

/// Checks that a disk can become the tier, with any blocks. Changes nothing.
pub(super) fn check(config: &SsdConfig, layout: &Layout) -> Result<(), PoolError> {
    room(layout, config.bytes)?;
    directory::read_identity(&*config.disk).map(drop)
}

/// Opens or creates the tier. Returns it with the number of damaged journal records.
pub(super) fn open(config: SsdConfig, layout: Layout) -> Result<(Ssd, u64), PoolError> {
    let (stride, slots) = room(&layout, config.bytes)?;
    let SsdConfig { disk, wipe, .. } = config;
    directory::prepare(&*disk, &layout, wipe)?;
    let failed = |source| PoolError::Io { doing: "read the pool's journal".into(), source };
    let (journal, replayed) = Journal::open(&*disk, layout.namespace, slots).map_err(failed)?;
    let access = DiskAccess::new(disk.clone());
    let frames = Frames { access, layout, stride, buffers: Mutex::default() };
    let mut ssd = Ssd {
        frames: Arc::new(frames),
        cache: BlockCache::new(slots as usize, CachePolicy::Lru),
        held: IdMap::default(),
        free: Vec::new(),
        writes: 0,
        journal,
        paused: None,
        skipped: 0,
    };
    ssd.recover(&replayed.blocks, slots);
    let cut = disk.cut(FILE, u64::from(slots) * stride);
    if let Err(error) = cut.and_then(|()| ssd.compact(true)) {
        ssd.pause(&error);
    }
    Ok((ssd, replayed.damaged))
}

impl Ssd {
    fn recover(&mut self, blocks: &[Stored], slots: u32) {
        let mut used = vec![false; slots as usize];
        for &Stored { slot, hash } in blocks {
            used[slot as usize] = true;
            self.cache.insert_pinned(hash, 0, &mut Vec::new());
            self.cache.unpin(&[hash]);
            self.held.insert(hash.0, Held { place: FramePlace { slot, write: 0 }, ready: true });
        }
        self.free = (0..slots).rev().filter(|&slot| !used[slot as usize]).collect();
    }

    /// The place of a block that can be read.
    pub(super) fn place(&self, hash: BlockHash) -> Option<FramePlace> {
        self.held.get(hash.0).filter(|held| held.ready).map(|held| held.place)
    }

    /// Assigns a slot to a new block. The eviction of the block in it is reported at once, and recorded in
    /// the journal before the slot is written.
    pub(super) fn begin(&mut self, hash: BlockHash, events: &mut Events) -> SlotDecision {
        if self.held.contains(hash.0) {
            self.cache.touch(&[hash]);
            return SlotDecision::Known;
        }
        if !self.frames.access.has_time() {
            return SlotDecision::Lost;
        }
        if self.paused.is_some() {
            self.skipped += 1;
            if !self.skipped.is_multiple_of(TRY_EVERY) {
                return SlotDecision::Lost;
            }
        }
        let mut evicted = Vec::new();
        if !self.cache.insert_pinned(hash, 0, &mut evicted) {
            return SlotDecision::Lost;
        }
        let left = evicted.pop().and_then(|victim| {
            events.add(victim, Tier::Ssd, false);
            self.held.remove(victim.0).map(|held| held.place.slot)
        });
        let Some(slot) = left.or_else(|| self.free.pop()) else {
            self.cache.remove(hash);
            return SlotDecision::Lost;
        };
        self.writes += 1;
        self.held.insert(hash.0, Held { place: FramePlace { slot, write: self.writes }, ready: false });
        if left.is_some()
            && let Err(error) = self.journal.freed(&self.frames.access, slot)
        {
            self.fail(hash, &error);
            return SlotDecision::Lost;
        }
        SlotDecision::Write(slot)
    }

    /// Records the result of the write that [`begin`](Self::begin) asked for. True if the block is stored.
    pub(super) fn finish(&mut self, hash: BlockHash, written: io::Result<()>, events: &mut Events) -> bool {
        let Some(slot) = self.held.get(hash.0).map(|held| held.place.slot) else { return false };
        let told = written.and_then(|()| self.journal.stored(&self.frames.access, Stored { slot, hash }));
        if let Err(error) = told {
            self.fail(hash, &error);
            return false;
        }
        if let Some(held) = self.held.get_mut(hash.0) {
            held.ready = true;
        }
        self.cache.unpin(&[hash]);
        events.add(hash, Tier::Ssd, true);
        if self.paused.take().is_some() {
            tracing::info!("the KV pool's disk takes blocks again");
        }
        self.compact_if_long();
        true
    }

    /// Drops a block whose frame in `place` could not be read. True if it was still there.
    pub(super) fn drop_bad(&mut self, hash: BlockHash, place: FramePlace, events: &mut Events) -> bool {
        if self.place(hash) != Some(place) {
            return false;
        }
        self.release(hash);
        events.add(hash, Tier::Ssd, false);
        if let Err(error) = self.journal.freed(&self.frames.access, place.slot) {
            self.pause(&error);
        }
        self.compact_if_long();
        true
    }

    /// Why nothing is stored at present, if so.
    pub(super) fn paused(&self) -> Option<&str> {
        self.paused.as_deref()
    }

    /// All blocks that can be read, in order.
    pub(super) fn hashes(&self) -> Vec<BlockHash> {
        self.held.ids_where(|held| held.ready).into_iter().map(BlockHash).collect()
    }

    /// Rewrites the journal, in the order of the blocks' worth.
    pub(super) fn compact(&mut self, sync: bool) -> io::Result<()> {
        let block = |hash: BlockHash| {
            let FramePlace { slot, .. } = self.place(hash)?;
            Some(Stored { slot, hash })
        };
        let blocks: Vec<Stored> = self.cache.by_worth().filter_map(block).collect();
        self.journal.rewrite(&self.frames.access, &blocks, sync)
    }

    /// Makes everything that is stored durable.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.frames.access.run_long(|disk| match disk.len(FILE)? {
            Some(_) => disk.sync(FILE),
            None => Ok(()),
        })?;
        self.compact(true)
    }

    fn compact_if_long(&mut self) {
        if self.journal.is_long()
            && let Err(error) = self.compact(false)
        {
            self.pause(&error);
        }
    }

    fn release(&mut self, hash: BlockHash) {
        self.cache.remove(hash);
        self.free.extend(self.held.remove(hash.0).map(|held| held.place.slot));
    }

    fn fail(&mut self, hash: BlockHash, error: &io::Error) {
        self.release(hash);
        self.pause(error);
    }

    fn pause(&mut self, error: &io::Error) {
        if self.frames.access.out().is_some() {
            return;
        }
        if self.paused.is_none() {
            let advice = if journal::is_full(error) { "make room on it" } else { "check it" };
            tracing::warn!(%error, "the KV pool's disk takes no blocks ({advice}); stored blocks are still served");
            self.skipped = 0;
        }
        self.paused = Some(error.to_string());
    }
}
