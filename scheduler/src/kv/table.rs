//! Block keys to numbers, in few bytes: an ordered open-addressing table in segments.
//!
//! A segment is an array sorted by mixed key, with gaps: a key stands at its home (its share of the
//! segment's range) or behind it with no gap between. Sorted order ends a search for an absent key as early as
//! one for a present key, and lets a segment grow by a third in one pass over memory. Segments are between 75 and 85 %
//! full, so that an entry of 12 bytes costs 14 to 16; a table that doubles costs up to twice that. A lookup
//! misses the processor's cache once.

use super::BlockHash;

/// Keys whose first cache lines are asked for together: their misses overlap.
const AHEAD: usize = 16;

/// One entry: the mixed key in two halves (8-byte alignment would make it 16 bytes) and the value; 0 is a gap.
#[derive(Clone, Copy, Default)]
struct Slot {
    high: u32,
    low: u32,
    value: u32,
}

impl Slot {
    fn new(key: u64, value: u32) -> Self {
        Slot { high: (key >> 32) as u32, low: key as u32, value }
    }
    fn key(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }
}

#[derive(Clone, Default)]
struct Segment {
    slots: Vec<Slot>,
    /// Positions that are somebody's home; slots beyond them take what the last runs spill.
    homes: u32,
    entries: u32,
}

/// A map from block keys to non-zero numbers.
#[derive(Clone)]
pub(super) struct Table {
    segments: Vec<Segment>,
    segment_bits: u32,
    entries: usize,
}

/// Spreads keys over the whole range, whatever they are (a trace's are small numbers), and is a bijection, so
/// that equal mixed keys are equal keys. The constants are those of SplitMix64.
fn mix(key: BlockHash) -> u64 {
    let key = (key.0 ^ key.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let key = (key ^ key >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ key >> 31
}

impl Table {
    /// An empty table of `2^segment_bits` segments: more segments make the longest pause of an insertion
    /// shorter, and cost 32 bytes each.
    pub(super) fn new(segment_bits: u32) -> Self {
        Table { segments: vec![Segment::default(); 1 << segment_bits], segment_bits, entries: 0 }
    }

    /// Keys held.
    pub(super) fn len(&self) -> usize {
        self.entries
    }

    /// Segments, for [`Table::retain`].
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// (segment, key within it): the segment's bits leave at the top, so that the rest orders its entries.
    fn locate(&self, key: u64) -> (usize, u64) {
        ((key >> 1 >> (63 - self.segment_bits)) as usize, key << self.segment_bits)
    }

    /// The value at `key`.
    pub(super) fn get(&self, key: BlockHash) -> Option<u32> {
        let (segment, key) = self.locate(mix(key));
        let segment = &self.segments[segment];
        segment.find(key).ok().map(|place| segment.slots[place].value)
    }

    /// Calls `visit` with the value of each of `keys` in turn, until it returns false or a key is absent.
    pub(super) fn walk(&self, keys: &[BlockHash], mut visit: impl FnMut(u32) -> bool) {
        for keys in keys.chunks(AHEAD) {
            let mut places = [(0, 0); AHEAD];
            let mut touched = 0;
            for (place, &key) in places.iter_mut().zip(keys) {
                *place = self.locate(mix(key));
                let segment = &self.segments[place.0];
                touched ^= segment.slots.get(segment.home(place.1)).map_or(0, |slot| slot.value);
            }
            // Keeps the reads above, whose only purpose is to have their misses overlap.
            std::hint::black_box(touched);
            for &(segment, key) in &places[..keys.len()] {
                let segment = &self.segments[segment];
                let Ok(place) = segment.find(key) else { return };
                if !visit(segment.slots[place].value) {
                    return;
                }
            }
        }
    }

    /// Sets the value at `key` to what `change` makes of it; 0 stands for absence on both sides.
    pub(super) fn update(&mut self, key: BlockHash, change: impl FnOnce(u32) -> u32) {
        let (segment, key) = self.locate(mix(key));
        let segment = &mut self.segments[segment];
        match segment.find(key) {
            Ok(place) => match change(segment.slots[place].value) {
                0 => {
                    segment.remove(place);
                    self.entries -= 1;
                }
                value => segment.slots[place].value = value,
            },
            Err(place) => {
                let value = change(0);
                if value != 0 {
                    segment.insert(place, Slot::new(key, value));
                    self.entries += 1;
                }
            }
        }
    }

    /// Sets each value in one segment to what `change` makes of it; 0 removes the entry.
    pub(super) fn retain(&mut self, segment: usize, mut change: impl FnMut(u32) -> u32) {
        let segment = &mut self.segments[segment];
        let before = segment.entries;
        for slot in segment.slots.iter_mut().filter(|slot| slot.value != 0) {
            slot.value = change(slot.value);
            segment.entries -= u32::from(slot.value == 0);
        }
        if segment.entries != before {
            self.entries -= (before - segment.entries) as usize;
            segment.rebuild();
        }
    }
}

impl Segment {
    fn home(&self, key: u64) -> usize {
        (((key >> 32) * u64::from(self.homes)) >> 32) as usize
    }

    /// Where `key` stands, or where it would be inserted.
    fn find(&self, key: u64) -> Result<usize, usize> {
        let mut place = self.home(key);
        while let Some(slot) = self.slots.get(place) {
            if slot.value == 0 || slot.key() > key {
                return Err(place);
            }
            if slot.key() == key {
                return Ok(place);
            }
            place += 1;
        }
        Err(place)
    }

    fn insert(&mut self, mut place: usize, slot: Slot) {
        if (u64::from(self.entries) + 1) * 20 > u64::from(self.homes) * 17 {
            self.rebuild();
            place = self.find(slot.key()).unwrap_or_else(|place| place);
        }
        let after = self.slots[place..].iter().position(|slot| slot.value == 0);
        match after {
            Some(after) => self.slots.copy_within(place..place + after, place + 1),
            None => {
                self.slots.reserve_exact(1);
                self.slots.insert(place, slot);
            }
        }
        self.slots[place] = slot;
        self.entries += 1;
    }

    fn remove(&mut self, place: usize) {
        let mut end = place + 1;
        while end < self.slots.len() && self.slots[end].value != 0 && self.home(self.slots[end].key()) < end {
            end += 1;
        }
        self.slots.copy_within(place + 1..end, place);
        self.slots[end - 1] = Slot::default();
        self.entries -= 1;
        if self.homes > 16 && u64::from(self.entries) * 2 < u64::from(self.homes) {
            self.rebuild();
        }
    }

    /// Spreads the entries over as many homes as make it three quarters full.
    fn rebuild(&mut self) {
        let entries: usize = self.entries as usize;
        let old = std::mem::take(&mut self.slots);
        self.homes = (entries as u64 * 4 / 3 + 4).min(u64::from(u32::MAX)) as u32;
        // What the last run spills is a few slots; a push beyond that reallocates once.
        self.slots.reserve_exact(self.homes as usize + 8);
        self.slots.resize(self.homes as usize, Slot::default());
        let mut next = 0;
        for slot in old.into_iter().filter(|slot| slot.value != 0) {
            let place = self.home(slot.key()).max(next);
            if place >= self.slots.len() {
                self.slots.push(slot);
            } else {
                self.slots[place] = slot;
            }
            next = place + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn it_agrees_with_a_map(
            // Values of 0 remove; both clustered and spread keys.
            writes in proptest::collection::vec((0u64..200, any::<bool>(), 0u32..3), 0..600),
            purged in 0u32..3,
            segment_bits in 0u32..4,
        ) {
            let mut table = Table::new(segment_bits);
            let mut map = BTreeMap::new();
            for &(key, spread, value) in &writes {
                let key = BlockHash(if spread { key.wrapping_mul(0x9e37_79b9_7f4a_7c15) } else { key });
                let mut before = None;
                table.update(key, |old| { before = Some(old); value });
                prop_assert_eq!(before, Some(map.get(&key).copied().unwrap_or(0)));
                if value == 0 { map.remove(&key); } else { map.insert(key, value); }
                prop_assert_eq!(table.len(), map.len());
            }
            for segment in 0..table.segments() {
                table.retain(segment, |value| if value == purged { 0 } else { value });
            }
            map.retain(|_, value| *value != purged);
            prop_assert_eq!(table.len(), map.len());
            for &(key, ..) in &writes {
                prop_assert_eq!(table.get(BlockHash(key)), map.get(&BlockHash(key)).copied());
            }
            let keys: Vec<BlockHash> = (0..40).map(BlockHash).collect();
            let mut walked = Vec::new();
            table.walk(&keys, |value| { walked.push(value); true });
            let naive: Vec<u32> = keys.iter().map_while(|key| map.get(key).copied()).collect();
            prop_assert_eq!(walked, naive);
        }
    }

    #[test]
    fn segments_stay_within_sixteen_bytes_an_entry() {
        let mut table = Table::new(0);
        for key in 0..50_000u64 {
            table.update(BlockHash(key), |_| 1);
            if key > 1_000 {
                let bytes = table.segments[0].slots.capacity() * size_of::<Slot>();
                assert!(bytes as f64 <= 16.5 * table.len() as f64, "{bytes} for {}", table.len());
            }
        }
    }
}
