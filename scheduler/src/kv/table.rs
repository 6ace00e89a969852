//! Finds numbers by hash, in few bytes: an ordered open-addressing table in segments.
//!
//! An entry is 24 bits of the hash and a number; the caller stores what the number refers to (a block, a
//! set), and decides whether it is the one searched for. A segment is an array in the order of those bits,
//! with gaps: an entry is at its home (its share of the segment's range) or after it with no gap between. The
//! order ends a search for an absent entry as early as one for a present entry, and lets a segment grow by an
//! eighth in one pass over its memory. Segments are between 80 and 90 % full, so that an entry of 7 bytes
//! costs 7.8 to 8.8; a table that doubles costs up to twice that.

use super::BlockHash;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::mix;

/// Spreads keys over the whole range, even small consecutive numbers as in a trace.
pub(super) fn spread(key: BlockHash) -> u64 {
    mix(key.0)
}

/// From low to high: the number (4 bytes, 0 for a gap) and 24 bits of the hash.
#[derive(Clone, Copy, Default)]
struct Entry([u8; 7]);

impl Entry {
    fn new(place: u32, number: u32) -> Self {
        let [a, b, c, _] = place.to_le_bytes();
        let [d, e, f, g] = number.to_le_bytes();
        Entry([d, e, f, g, a, b, c])
    }
    fn number(self) -> u32 {
        let [a, b, c, d, ..] = self.0;
        u32::from_le_bytes([a, b, c, d])
    }
    fn place(self) -> u32 {
        let [.., a, b, c] = self.0;
        u32::from_le_bytes([a, b, c, 0])
    }
    fn is_gap(self) -> bool {
        self.number() == 0
    }
}

#[derive(Clone, Default)]
struct Segment {
    slots: Vec<Entry>,
    /// Number of slots that are homes; further slots take what the last entries spill.
    homes: u32,
    entries: u32,
}

/// A multimap from hashes to nonzero numbers, each of which occurs once.
#[derive(Clone)]
pub(super) struct Table {
    segments: Vec<Segment>,
    segment_bits: u32,
    entries: usize,
}

impl Table {
    /// An empty table of `2^segment_bits` segments: more segments shorten the longest pause of an insertion,
    /// and cost 32 bytes each.
    pub(super) fn new(segment_bits: u32) -> Self {
        Table { segments: vec![Segment::default(); 1 << segment_bits], segment_bits, entries: 0 }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries
    }

    /// The segment (from the hash's first bits) and the order in it (the 24 bits after them).
    fn locate(&self, hash: u64) -> (usize, u32) {
        ((hash >> 1 >> (63 - self.segment_bits)) as usize, (hash << self.segment_bits >> 40) as u32)
    }

    /// The number at `hash` for which `is_it` returns true.
    pub(super) fn get(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let (segment, place) = self.locate(hash);
        let segment = &self.segments[segment];
        segment.find(place, is_it).map(|slot| segment.slots[slot].number())
    }

    /// Reads the memory in which a search for `hash` begins. The result has no meaning.
    pub(super) fn touch(&self, hash: u64) -> u32 {
        let (segment, place) = self.locate(hash);
        let segment = &self.segments[segment];
        segment.slots.get(segment.home(place)).map_or(0, |entry| entry.number())
    }

    /// Adds `number` at `hash`; it must not be there yet.
    pub(super) fn insert(&mut self, hash: u64, number: u32) {
        let (segment, place) = self.locate(hash);
        self.segments[segment].insert(Entry::new(place, number));
        self.entries += 1;
    }

    /// Removes `number` at `hash`, where it must be.
    pub(super) fn remove(&mut self, hash: u64, number: u32) {
        let (segment, place) = self.locate(hash);
        let segment = &mut self.segments[segment];
        if let Some(slot) = segment.find(place, |other| other == number) {
            segment.remove(slot);
            self.entries -= 1;
        }
    }
}

impl Segment {
    fn home(&self, place: u32) -> usize {
        ((u64::from(place) * u64::from(self.homes)) >> 24) as usize
    }

    fn find(&self, place: u32, is_it: impl Fn(u32) -> bool) -> Option<usize> {
        let home = self.home(place);
        let run =
            self.slots.get(home..)?.iter().take_while(|entry| !entry.is_gap() && entry.place() <= place);
        run.enumerate()
            .find(|(_, entry)| entry.place() == place && is_it(entry.number()))
            .map(|(after, _)| home + after)
    }

    fn insert(&mut self, new: Entry) {
        if (u64::from(self.entries) + 1) * 10 > u64::from(self.homes) * 9 {
            self.rebuild();
        }
        let home = self.home(new.place());
        let before = |entry: &&Entry| !entry.is_gap() && entry.place() <= new.place();
        let slot = home + self.slots[home..].iter().take_while(before).count();
        match self.slots[slot..].iter().position(|entry| entry.is_gap()) {
            Some(run) => {
                self.slots.copy_within(slot..slot + run, slot + 1);
                self.slots[slot] = new;
            }
            None => {
                self.slots.reserve_exact(1);
                self.slots.insert(slot, new);
            }
        }
        self.entries += 1;
    }

    fn remove(&mut self, slot: usize) {
        let mut end = slot + 1;
        while self.slots.get(end).is_some_and(|entry| !entry.is_gap() && self.home(entry.place()) < end) {
            end += 1;
        }
        self.slots.copy_within(slot + 1..end, slot);
        self.slots[end - 1] = Entry::default();
        self.entries -= 1;
        if self.homes > 16 && u64::from(self.entries) * 2 < u64::from(self.homes) {
            self.rebuild();
        }
    }

    /// Spreads the entries over a number of homes that makes it 80 % full.
    fn rebuild(&mut self) {
        let old = std::mem::take(&mut self.slots);
        self.homes = to_u32((u64::from(self.entries) * 5 / 4 + 2).min(u64::from(u32::MAX)));
        // Usual overflow of the last entries; more than that reallocates.
        self.slots.reserve_exact(self.homes as usize + 8);
        self.slots.resize(self.homes as usize, Entry::default());
        let mut next = 0;
        for entry in old.into_iter().filter(|entry| !entry.is_gap()) {
            let slot = self.home(entry.place()).max(next);
            if slot >= self.slots.len() {
                self.slots.push(entry);
            } else {
                self.slots[slot] = entry;
            }
            next = slot + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_agrees_with_a_set_of_pairs(
            // Raw keys all hash to the first position of the first segment, so both kinds of crowding occur.
            // A number occurs at one hash only.
            writes in proptest::collection::vec((any::<bool>(), 0u32..60, any::<bool>(), 1u32..4), 0..600),
            segment_bits in 0u32..4,
        ) {
            let mut table = Table::new(segment_bits);
            let mut pairs = BTreeSet::new();
            let hash_and_number = |key: u32, raw: bool, number: u32| {
                let hash = if raw { u64::from(key) } else { spread(BlockHash(key.into())) };
                (hash, key * 8 + u32::from(raw) * 4 + number)
            };
            for &(add, key, raw, number) in &writes {
                let (hash, number) = hash_and_number(key, raw, number);
                if !add {
                    table.remove(hash, number);
                    pairs.remove(&(hash, number));
                } else if pairs.insert((hash, number)) {
                    table.insert(hash, number);
                }
                prop_assert_eq!(table.len(), pairs.len());
            }
            for &(_, key, raw, number) in &writes {
                let (hash, number) = hash_and_number(key, raw, number);
                let found = table.get(hash, |other| other == number);
                prop_assert_eq!(found, pairs.contains(&(hash, number)).then_some(number));
            }
        }
    }

    #[test]
    fn an_entry_costs_at_most_nine_bytes() {
        let mut table = Table::new(0);
        for key in 0..50_000 {
            table.insert(spread(BlockHash(key)), 1);
            if key > 1_000 {
                let bytes = table.segments[0].slots.capacity() * size_of::<Entry>();
                assert!(bytes <= 9 * table.len(), "{bytes} for {}", table.len());
            }
        }
    }
}
