//! Movement of blocks: into host memory, from there to the disk, and back.

use super::check::{FrameRefusal, check_tokens};
use super::dram::Held;
use super::ssd::{CheckedFrame, FramePlace, FrameRead, Frames, ReadError, SlotDecision};
use super::{Shared, State, WrittenBack};
use mixfleet_hal::Result;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use twox_hash::XxHash3_64;

/// A block of a prompt.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) hash: BlockHash,
    pub(super) tokens: &'a [u32],
}

/// The result of bringing a block to host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It was loaded, and is pinned once.
    Stored,
    /// It was there already, and is pinned once.
    Held,
    /// All of host memory is pinned.
    Full,
    /// Another caller is loading it.
    Busy,
    /// Another prompt's block has this hash.
    Collision,
    /// It is not on the disk, or cannot be read there.
    Missing,
}

/// A block that is being read from the disk.
pub(super) struct Promotion {
    place: FramePlace,
    frames: Arc<Frames>,
    read: FrameRead,
}

/// The result of [`Pool::keep`](super::Pool::keep).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The block is stored.
    Stored,
    /// The block was there already.
    Held,
    /// The block is not stored: all of host memory is pinned by leases.
    Full,
    /// The block is not stored: another caller is storing it.
    Busy,
    /// The block is not stored: another prompt's block has its hash.
    Collision,
}

impl From<Arrival> for Kept {
    fn from(arrival: Arrival) -> Self {
        match arrival {
            Arrival::Stored => Kept::Stored,
            Arrival::Held => Kept::Held,
            Arrival::Full => Kept::Full,
            Arrival::Collision => Kept::Collision,
            Arrival::Busy | Arrival::Missing => Kept::Busy,
        }
    }
}

enum Room {
    Slot(u32),
    None(Arrival),
}

impl State {
    /// Pins a block that is in host memory. None if it is not.
    pub(super) fn pin(&mut self, wanted: Wanted) -> Option<Arrival> {
        let Some(held) = self.dram.get(wanted.hash) else {
            return self.dram.has_slot(wanted.hash).then_some(Arrival::Busy);
        };
        if check_tokens(&held.tokens, wanted.tokens).is_err() {
            self.counts.collisions += 1;
            return Some(Arrival::Collision);
        }
        self.dram.pin(wanted.hash);
        Some(Arrival::Held)
    }

    /// Records the result of a write to the file `frames`. True if the block is stored there.
    fn finish(&mut self, frames: &Arc<Frames>, hash: BlockHash, written: io::Result<()>) -> bool {
        // The disk may have been replaced in between.
        let its = self.ssd.as_mut().filter(|ssd| Arc::ptr_eq(&ssd.frames, frames));
        its.is_some_and(|ssd| ssd.finish(hash, written, &mut self.events))
    }
}

impl Shared {
    /// Stores what `fill` puts into a slot as this block. `fill` returns the XXH3-64 of its bytes.
    fn store(&self, wanted: Wanted, fill: &mut dyn FnMut(&mut [u8]) -> Result<u64>) -> Result<Arrival> {
        let slot = match self.make_room(wanted)? {
            Room::Slot(slot) => slot,
            Room::None(why) => return Ok(why),
        };
        let mut digest = Ok(0);
        let updated = self.slab.update(slot, &mut |place| digest = fill(place));
        let mut state = self.state();
        let digest = match updated.and(digest) {
            Ok(digest) => digest,
            Err(error) => {
                state.dram.cancel(wanted.hash);
                return Err(error);
            }
        };
        state.dram.arrived(wanted.hash, digest);
        state.events.add(wanted.hash, Tier::Dram, true);
        Ok(Arrival::Stored)
    }

    /// Stores an evicted block if it is not here, and pins nothing.
    pub(super) fn keep(&self, wanted: Wanted, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Kept> {
        let arrival = self.store(wanted, &mut |place| {
            fill(place)?;
            Ok(XxHash3_64::oneshot(place))
        })?;
        if matches!(arrival, Arrival::Stored | Arrival::Held) {
            self.state().dram.unpin(&[wanted.hash]);
        }
        Ok(arrival.into())
    }

    /// Drops a block of host memory whose bytes differ from the stored ones: it is no longer served, and is
    /// removed with its last pin.
    pub(super) fn drop_corrupt(&self, hash: BlockHash, slot: u32) {
        let State { dram, events, counts, .. } = &mut *self.state();
        if dram.mark_bad(hash, slot) {
            events.add(hash, Tier::Dram, false);
            counts.bad += 1;
            tracing::warn!(
                hash = hash.0,
                slot,
                "a KV block in host memory is bad, and dropped: check the memory"
            );
        }
    }

    /// Loads a block from the disk.
    pub(super) fn promote(&self, wanted: Wanted) -> Result<Arrival> {
        let there =
            self.state().ssd.as_ref().and_then(|ssd| Some((ssd.place(wanted.hash)?, ssd.frames.clone())));
        let Some((place, frames)) = there.filter(|(_, frames)| frames.access.has_time()) else {
            return Ok(Arrival::Missing);
        };
        let read = frames.read(place.slot, wanted.hash, wanted.tokens);
        self.promoted(wanted, place, &frames, read)
    }

    /// Begins to load a block from the disk. None if the disk does not have it, or its queue is full.
    pub(super) fn begin_promotion(&self, hash: BlockHash) -> Option<Promotion> {
        let there = self.state().ssd.as_ref().and_then(|ssd| Some((ssd.place(hash)?, ssd.frames.clone())));
        let (place, frames) = there?;
        let read = frames.begin_read(place.slot)?;
        Some(Promotion { place, frames, read })
    }

    /// The result of such a load, and the time that the disk took for it; none if it is not done within
    /// `wait`.
    pub(super) fn end_promotion(
        &self,
        wanted: Wanted,
        Promotion { place, frames, read }: &mut Promotion,
        wait: Duration,
    ) -> Option<(Result<Arrival>, Seconds)> {
        let (read, time) = frames.end_read(read, wanted.hash, wanted.tokens, wait)?;
        Some((self.promoted(wanted, *place, frames, read), time))
    }

    /// Stores a block read from the disk in host memory.
    fn promoted(
        &self,
        wanted: Wanted,
        place: FramePlace,
        frames: &Frames,
        read: std::result::Result<CheckedFrame, ReadError>,
    ) -> Result<Arrival> {
        match read {
            Ok((frame, digest)) => {
                let arrival = self.store(wanted, &mut |place| {
                    place.copy_from_slice(&frame[..self.layout.block_bytes]);
                    Ok(digest)
                });
                frames.give_back(frame);
                arrival
            }
            Err(ReadError::Refused(FrameRefusal::OtherTokens)) => {
                self.state().counts.collisions += 1;
                Ok(Arrival::Collision)
            }
            // it was not read: the disk is out, or was
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => Ok(Arrival::Missing),
            Err(error) => {
                self.drop_bad(wanted.hash, place, &error);
                Ok(Arrival::Missing)
            }
        }
    }

    fn drop_bad(&self, hash: BlockHash, place: FramePlace, error: &ReadError) {
        let State { ssd, events, counts, .. } = &mut *self.state();
        // If the slot was rewritten in between, the frame is merely gone.
        if ssd.as_mut().is_some_and(|ssd| ssd.drop_bad(hash, place, events)) {
            counts.bad += 1;
            tracing::warn!(hash = hash.0, slot = place.slot, %error, "a KV block on the disk is bad, and dropped");
        }
    }

    /// Assigns a slot of host memory to a new block. The block in it is copied to the disk first.
    fn make_room(&self, wanted: Wanted) -> Result<Room> {
        let mut state = self.state();
        if let Some(there) = state.pin(wanted) {
            return Ok(Room::None(there));
        }
        let Some(admitted) = state.dram.admit(wanted.hash, wanted.tokens) else {
            return Ok(Room::None(Arrival::Full));
        };
        let Some((victim, held)) = admitted.leaves else { return Ok(Room::Slot(admitted.slot)) };
        let State { ssd, events, .. } = &mut *state;
        // Reported now, since another caller may store the block here again while the copy is written.
        events.add(victim, Tier::Dram, false);
        let begun = ssd.as_mut().map(|ssd| (ssd.begin(victim, events), ssd.frames.clone()));
        let mut kept = matches!(begun, Some((SlotDecision::Known, _)));
        if let Some((SlotDecision::Write(slot), frames)) = begun {
            drop(state);
            let written = self.write_frame(&frames, slot, victim, &held);
            state = self.state();
            kept = state.finish(&frames, victim, written);
            state.counts.demoted += u64::from(kept);
        }
        let lost = !kept && state.ssd.is_some();
        state.counts.lost += u64::from(lost);
        Ok(Room::Slot(admitted.slot))
    }

    /// Writes a block of host memory to a slot of the disk. The host slot must not change during the write.
    fn write_frame(&self, frames: &Frames, slot: u32, hash: BlockHash, held: &Held) -> io::Result<()> {
        let mut frame = frames.buffer();
        frame.clear();
        frame.reserve(self.layout.frame_bytes());
        let copied = self.slab.view(held.slot, &mut |payload| frame.extend_from_slice(payload));
        frames.add_trailer(&mut frame, hash, &held.tokens, held.digest);
        copied.map_err(io::Error::other)?;
        frames.write(slot, frame)
    }

    /// Copies the blocks that are in host memory alone to the disk, the one to be evicted last first, while
    /// `go_on` returns true.
    pub(super) fn write_back(&self, go_on: &mut dyn FnMut() -> bool) -> WrittenBack {
        let worth: Vec<BlockHash> = {
            let State { dram, ssd, .. } = &mut *self.state();
            let Some(ssd) = ssd else { return WrittenBack::default() };
            let mut worth: Vec<BlockHash> =
                dram.cache.by_worth().filter(|&hash| dram.get(hash).is_some()).collect();
            let kept = worth.split_off(worth.len().saturating_sub(ssd.cache.capacity()));
            // Blocks that are there already must not be evicted for new ones.
            kept.iter().for_each(|&hash| ssd.cache.touch(&[hash]));
            kept
        };
        for &hash in worth.iter().rev().take_while(|_| go_on()) {
            self.copy_down(hash);
        }
        let State { ssd, .. } = &mut *self.state();
        let Some(ssd) = ssd else { return WrittenBack::default() };
        // The block that came first is to be evicted last.
        worth.iter().for_each(|&hash| ssd.cache.touch(&[hash]));
        let there = worth.iter().filter(|&&hash| ssd.place(hash).is_some());
        WrittenBack { blocks: there.count() as u64, of: worth.len() as u64 }
    }

    /// Copies a block of host memory to the disk, unless the disk holds it.
    fn copy_down(&self, hash: BlockHash) {
        let mut state = self.state();
        let State { dram, ssd: Some(ssd), events, .. } = &mut *state else { return };
        // No step waits for this copy, so it may use a whole turn's time.
        ssd.frames.access.begin_turn();
        let Some(held) = dram.get(hash).cloned() else { return };
        let SlotDecision::Write(slot) = ssd.begin(hash, events) else { return };
        dram.cache.pin(&[hash]);
        let frames = ssd.frames.clone();
        drop(state);
        let written = self.write_frame(&frames, slot, hash, &held);
        let mut state = self.state();
        state.dram.unpin(&[hash]);
        let kept = state.finish(&frames, hash, written);
        state.counts.demoted += u64::from(kept);
    }
}
