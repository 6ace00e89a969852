//! All blocks that some instance holds, each with the set of its holders, stored so that a chain's blocks are
//! adjacent.
//!
//! A lookup tries the positions next to the previous block, and uses the hash table only where the chain
//! continues elsewhere: two cache misses for each such position, and one for five adjacent blocks. So that
//! misses overlap, memory of adjacent blocks is read ahead, and of a long chain that continues elsewhere some
//! later keys are looked up at once. To keep chains together, new blocks fill a chunk in order, a chunk is
//! refilled only when an eighth of it is free, and long chains leave short holes to short ones.

use super::BlockHash;
use super::sets::EMPTY;
use super::table::{Table, spread};
use mixfleet_hal::cast::{low_u32, to_u32};

/// Bits of the number of table segments: with 10 M blocks a segment has 2,400, and rebuilding it takes
/// microseconds.
const SEGMENT_BITS: u32 = 12;
/// Positions per chunk. With 384 KiB allocators map each chunk separately, so that chunks, which stay, and
/// table segments, which come and go, do not fragment each other's memory.
const CHUNK_BLOCKS: u32 = 1 << 15;
const CHUNK: usize = CHUNK_BLOCKS as usize;
/// Positions per piece, which [`Blocks::update_piece`] processes in microseconds.
const PIECE: usize = 1 << 10;
/// Free positions from which a chunk is refilled.
const CHUNK_FREE: u32 = CHUNK_BLOCKS / 8;
/// Free positions in a row that a chain of at least as many new blocks looks for.
const FIT: usize = 48;
/// Blocks looked up in the table together, so that their cache misses overlap.
const AHEAD: usize = 8;
/// Positions after a block that are searched for the next block.
const BESIDE: usize = 3;

/// Blocks of a run whose memory is read at once, ahead of comparing them.
const STRIP: usize = 64;
/// For a long chain stored in pieces, every n-th key is looked up ahead of the others: pieces are mostly
/// longer than that, so that the next piece is found beside its sample.
const SAMPLE_STEP: usize = 32;
const SAMPLES: usize = 8;

/// Stands for no position.
const NONE: u32 = u32::MAX;

/// The key's low and high half (8-byte alignment would take 16 bytes) and the set; EMPTY marks a free
/// position.
type Block = [u32; 3];

fn key(&[low, high, _]: &Block) -> BlockHash {
    BlockHash(u64::from(high) << 32 | u64::from(low))
}

fn set(&[_, _, set]: &Block) -> u32 {
    set
}

fn is(block: &Block, searched: BlockHash) -> bool {
    key(block) == searched && set(block) != EMPTY
}

/// The first of `want` free positions in a row, from `from` on; a run that begins at `from` itself may be
/// shorter, since it continues the chain there.
fn hole(blocks: &[Block], from: usize, want: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += blocks[at..].iter().position(|block| set(block) == EMPTY)?;
        let free = blocks[at..].iter().take(want).take_while(|block| set(block) == EMPTY).count();
        if free == want || at <= from + 1 {
            return Some(at);
        }
        at += free;
    }
}

/// Reads the memory of the first strip of `run`, one element in each cache line.
fn touch_strip(run: &[Block]) {
    let strip = &run[..run.len().min(STRIP)];
    // Keeps the compiler from removing the reads, which only make cache misses overlap.
    std::hint::black_box(
        strip.iter().step_by(64 / size_of::<Block>()).fold(0, |sum, block| sum ^ set(block)),
    );
}

/// Where some keys of a chain are: each of [`SAMPLE_STEP`] from `first` on.
struct Samples {
    first: usize,
    places: [u32; SAMPLES],
}

impl Default for Samples {
    fn default() -> Self {
        Samples { first: 0, places: [NONE; SAMPLES] }
    }
}

impl Samples {
    /// The position of key `at` if it is before the next sample as in the chain.
    fn before(&self, blocks: &Blocks, keys: &[BlockHash], at: usize) -> Option<u32> {
        let number = (at - self.first).div_ceil(SAMPLE_STEP);
        let place = *self.places.get(number).filter(|place| **place != NONE)?;
        let back = self.first + number * SAMPLE_STEP - at;
        let start = (place as usize % CHUNK).checked_sub(back)?;
        let is_it = is(&blocks.chunks[place as usize / CHUNK].blocks[start], keys[at]);
        is_it.then(|| place - to_u32(back))
    }

    /// Samples the keys from `at` on, and returns the position of that one.
    fn take(&mut self, blocks: &Blocks, keys: &[BlockHash], at: usize) -> Option<u32> {
        let sampled = || keys[at..].iter().step_by(SAMPLE_STEP).take(SAMPLES);
        let touched = sampled().fold(0, |sum, &key| sum ^ blocks.table.touch(spread(key)));
        std::hint::black_box(touched);
        *self = Samples { first: at, ..Samples::default() };
        for (place, &key) in self.places.iter_mut().zip(sampled()) {
            // a chain ends where a key is absent
            let Some(found) = blocks.find(key) else { break };
            *place = found;
        }
        Some(self.places[0]).filter(|place| *place != NONE)
    }
}

#[derive(Clone)]
struct Chunk {
    blocks: Box<[Block]>,
    free: u32,
    /// Whether it is queued to be refilled.
    waits: bool,
}

/// Blocks and their sets, by key.
#[derive(Clone)]
pub(super) struct Blocks {
    /// Maps keys to positions + 1.
    table: Table,
    chunks: Vec<Chunk>,
    /// The position from which the next free one is searched, within its chunk.
    fill: u32,
    refill: Vec<u32>,
}

impl Default for Blocks {
    fn default() -> Self {
        Blocks { table: Table::new(SEGMENT_BITS), chunks: Vec::new(), fill: 0, refill: Vec::new() }
    }
}

impl Blocks {
    /// Number of blocks that have a set.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Number of pieces, for [`Blocks::update_piece`].
    pub(super) fn pieces(&self) -> usize {
        self.chunks.len() * (CHUNK / PIECE)
    }

    fn at(&self, place: u32) -> Block {
        self.chunks[place as usize / CHUNK].blocks[place as usize % CHUNK]
    }

    fn has(&self, place: u32, key: BlockHash) -> bool {
        is(&self.at(place), key)
    }

    /// The position of `key` if it is adjacent to `near`: after it in a chain, or before it when a chain is
    /// processed from its end.
    fn beside(&self, near: u32, key: BlockHash) -> Option<u32> {
        let chunk = &self.chunks.get(near as usize / CHUNK)?.blocks[..];
        let at = near as usize % CHUNK;
        let after = &chunk[at + 1..CHUNK.min(at + 1 + BESIDE)];
        if let Some(step) = after.iter().position(|block| is(block, key)) {
            return Some(near + 1 + to_u32(step));
        }
        (at > 0 && is(&chunk[at - 1], key)).then(|| near - 1)
    }

    fn find(&self, key: BlockHash) -> Option<u32> {
        self.table.get(spread(key), |place| self.has(place - 1, key)).map(|place| place - 1)
    }

    /// Calls `visit` with the set of each of `keys` in turn, and how many in a row have it, until it returns
    /// false or a key is absent. A set may come twice in a row.
    pub(super) fn walk(&self, keys: &[BlockHash], mut visit: impl FnMut(u32, u32) -> bool) {
        let (mut near, mut stray, mut touched, mut i) = (NONE, 0, 0, 0);
        let mut samples = Samples::default();
        while let Some(&key) = keys.get(i) {
            let place = self.beside(near, key).or_else(|| samples.before(self, keys, i)).or_else(|| {
                if i > 0 && keys.len() - i > SAMPLE_STEP {
                    return samples.take(self, keys, i);
                }
                // Where one block was not adjacent to the previous, the next ones rarely are.
                if stray > 0 && i <= stray + 2 && i >= touched {
                    touched = keys.len().min(i + AHEAD);
                    self.touch(&keys[i..touched]);
                }
                stray = i;
                self.find(key)
            });
            let Some(place) = place else { return };
            let chunk = &self.chunks[place as usize / CHUNK].blocks[place as usize % CHUNK..];
            let run = &chunk[..chunk.len().min(keys.len() - i)];
            let first = i;
            touch_strip(run);
            // The run that begins here. Where its next block is depends on nothing that was read, so that
            // cache misses overlap.
            'run: for (at, strip) in run.chunks(STRIP).enumerate() {
                touch_strip(&run[run.len().min((at + 1) * STRIP)..]);
                let end = first + at * STRIP + strip.len();
                let mut strip = strip;
                while i < end {
                    let of_all = set(&strip[0]);
                    let alike = |pair: &(&Block, &BlockHash)| is(pair.0, *pair.1) && set(pair.0) == of_all;
                    let count = strip.iter().zip(&keys[i..end]).take_while(alike).count();
                    if count == 0 {
                        break 'run;
                    }
                    if !visit(of_all, to_u32(count)) {
                        return;
                    }
                    strip = &strip[count..];
                    i += count;
                }
            }
            near = place + to_u32(i - first) - 1;
        }
    }

    /// Reads the memory that searches for `keys` start with, without waiting for one read before the next.
    fn touch(&self, keys: &[BlockHash]) {
        let first = keys.iter().fold(0, |sum, &key| sum ^ self.table.touch(spread(key)));
        // Keeps the compiler from removing the reads, which only make cache misses overlap.
        std::hint::black_box(first);
    }

    /// Replaces the set of each of `keys` by the result of `change`; EMPTY stands for absence on both sides.
    /// `removes` means that most will be absent afterwards.
    pub(super) fn update(&mut self, keys: &[BlockHash], removes: bool, mut change: impl FnMut(u32) -> u32) {
        let (mut near, mut left) = (NONE, keys.len());
        for keys in keys.chunks(AHEAD) {
            // The table is queried only for blocks that are not adjacent, and updated for added and removed
            // ones.
            if removes || self.beside(near, keys[0]).is_none() {
                self.touch(keys);
            }
            for &key in keys {
                near = self.update_one(key, near, left, &mut change);
                left -= 1;
            }
        }
    }

    /// Updates `key`, which may be adjacent to `near` and is the first of `left`; returns its position.
    fn update_one(
        &mut self,
        key: BlockHash,
        near: u32,
        left: usize,
        mut change: impl FnMut(u32) -> u32,
    ) -> u32 {
        match self.beside(near, key).or_else(|| self.find(key)) {
            Some(place) => {
                let set = change(set(&self.at(place)));
                self.set_at(place, set);
                place
            }
            None => match change(EMPTY) {
                EMPTY => near,
                set => self.insert(key, set, left),
            },
        }
    }

    /// Calls `visit` with each block and its set.
    pub(super) fn each(&self, mut visit: impl FnMut(BlockHash, u32)) {
        let blocks = self.chunks.iter().flat_map(|chunk| chunk.blocks.iter());
        blocks.filter(|block| set(block) != EMPTY).for_each(|block| visit(key(block), set(block)));
    }

    /// Replaces the set of each block in one piece by the result of `change`.
    pub(super) fn update_piece(&mut self, piece: usize, mut change: impl FnMut(u32) -> u32) {
        for place in to_u32(piece * PIECE)..to_u32((piece + 1) * PIECE) {
            let set = set(&self.at(place));
            if set != EMPTY {
                let set = change(set);
                self.set_at(place, set);
            }
        }
    }

    fn set_at(&mut self, place: u32, set: u32) {
        let number = place as usize / CHUNK;
        let chunk = &mut self.chunks[number];
        let block = &mut chunk.blocks[place as usize % CHUNK];
        block[2] = set;
        if set == EMPTY {
            let hash = spread(key(block));
            chunk.free += 1;
            if chunk.free >= CHUNK_FREE && !chunk.waits && number != self.fill as usize / CHUNK {
                chunk.waits = true;
                self.refill.push(to_u32(number));
            }
            self.table.remove(hash, place + 1);
        }
    }

    fn insert(&mut self, key: BlockHash, set: u32, left: usize) -> u32 {
        let place = self.next_free(left.min(FIT));
        let chunk = &mut self.chunks[place as usize / CHUNK];
        chunk.free -= 1;
        chunk.blocks[place as usize % CHUNK] = [low_u32(key.0), (key.0 >> 32) as u32, set];
        self.table.insert(spread(key), place + 1);
        self.fill = place;
        place
    }

    /// The first free position from `fill` on in its chunk with `want` in a row, or the first one of another
    /// chunk; any free position if none has that many.
    fn next_free(&mut self, want: usize) -> u32 {
        let mut from = self.fill as usize % CHUNK;
        let mut number = self.fill as usize / CHUNK;
        let mut chosen = false;
        loop {
            let free = self.chunks.get(number).filter(|chunk| chunk.free > 0);
            let at = free.and_then(|chunk| {
                let fits = hole(&chunk.blocks, from, want);
                if chosen { fits.or_else(|| hole(&chunk.blocks, from, 1)) } else { fits }
            });
            if let Some(at) = at {
                return to_u32(number * CHUNK + at);
            }
            chosen = true;
            from = 0;
            let left = number;
            number = match self.refill.pop() {
                Some(again) => {
                    self.chunks[again as usize].waits = false;
                    again as usize
                }
                None => {
                    let blocks = vec![[0; 3]; CHUNK].into();
                    self.chunks.push(Chunk { blocks, free: CHUNK_BLOCKS, waits: false });
                    self.chunks.len() - 1
                }
            };
            self.fill = to_u32(number * CHUNK);
            // Positions freed behind the fill position.
            if let Some(chunk) = self.chunks.get_mut(left)
                && chunk.free >= CHUNK_FREE
                && !chunk.waits
                && left != number
            {
                chunk.waits = true;
                self.refill.push(to_u32(left));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn they_agree_with_a_map(
            // Runs of 80,000 keys: several chunks, filled and freed in all orders.
            writes in proptest::collection::vec((0u64..80_000, 1u64..9_000, any::<bool>(), 0u32..3), 0..60),
            purged in 1u32..3,
        ) {
            let mut blocks = Blocks::default();
            let mut map = BTreeMap::new();
            for &(from, len, backward, set) in &writes {
                let mut keys: Vec<u64> = (from..from + len).collect();
                if backward {
                    keys.reverse();
                }
                let hashes: Vec<BlockHash> = keys.iter().map(|&key| BlockHash(key)).collect();
                let mut before = Vec::new();
                blocks.update(&hashes, set == EMPTY, |old| { before.push(old); set });
                let naive: Vec<u32> = keys.iter().map(|key| map.get(key).copied().unwrap_or(EMPTY)).collect();
                prop_assert_eq!(before, naive);
                for key in keys {
                    if set == EMPTY { map.remove(&key); } else { map.insert(key, set); }
                }
                prop_assert_eq!(blocks.len(), map.len());
            }
            let walk = |blocks: &Blocks, from: u64| {
                let keys: Vec<BlockHash> = (from..90_000).map(BlockHash).collect();
                let mut sets = Vec::new();
                blocks.walk(&keys, |set, count| { sets.extend((0..count).map(|_| set)); true });
                sets
            };
            for from in (0..90_000).step_by(2_797) {
                let naive: Vec<u32> = (from..90_000).map_while(|key| map.get(&key).copied()).collect();
                prop_assert_eq!(walk(&blocks, from), naive);
            }
            for piece in 0..blocks.pieces() {
                blocks.update_piece(piece, |set| if set == purged { EMPTY } else { set });
            }
            map.retain(|_, set| *set != purged);
            prop_assert_eq!(blocks.len(), map.len());
            let free: u32 = blocks.chunks.iter().map(|chunk| chunk.free).sum();
            prop_assert_eq!(blocks.chunks.len() * CHUNK - free as usize, map.len());
        }
    }

    #[test]
    fn places_are_used_again() {
        let mut blocks = Blocks::default();
        let store = |blocks: &mut Blocks, keys: std::ops::Range<u64>, set: u32| {
            blocks.update(&keys.map(BlockHash).collect::<Vec<_>>(), set == EMPTY, |_| set);
        };
        for round in 0..40u64 {
            store(&mut blocks, round * 10_000..round * 10_000 + 10_000, 1);
            if round >= 10 {
                store(&mut blocks, (round - 10) * 10_000..(round - 10) * 10_000 + 10_000, EMPTY);
            }
        }
        assert_eq!(blocks.len(), 100_000);
        assert!(blocks.chunks.len() * CHUNK < 100_000 * 8 / 7 + 2 * CHUNK, "{} chunks", blocks.chunks.len());
    }
}
