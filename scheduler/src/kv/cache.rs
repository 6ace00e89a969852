//! A block cache of bounded size: the blocks that an instance, or a pool, holds.

use super::BlockHash;
use super::table::spread;
use hashbrown::HashTable;
use mixfleet_hal::cast::{low_u32, to_u32};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Which block is evicted first when room is needed. Blocks in use are never evicted. Under every policy a
/// block's prefix is worth at least as much as the block, so that it is never evicted before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// The least recently used block; within a chain, the deepest.
    #[default]
    Lru,
    /// The block used least often while it was cached; among equals, as [`CachePolicy::Lru`].
    Lfu,
    /// The block used least often while it was cached; among equals, the one deepest in its chain; among
    /// those, the least recently used. (Mooncake's `LengthAwareCache`, interpreted lexicographically.)
    LengthAware,
}

const NONE: u32 = u32::MAX;

/// Stands for the next block on the shelf of a pinned block that has a key.
const IN_USE: u32 = u32::MAX - 1;

/// Stands for the next block on the shelf of a pinned block that has no key.
const NAMELESS: u32 = u32::MAX - 2;

/// Stands for the previous block on the shelf of a free entry.
const FREE: u32 = u32::MAX - 3;

/// Memory for caches up to this size is reserved at once, so that growing copies nothing and leaves no gaps
/// in the memory of a program with many caches.
const RESERVED_BLOCKS_MAX: usize = 1 << 16;

/// A cached block takes 16 bytes plus the table's 6 to 12.
#[derive(Clone, Copy)]
struct Entry {
    /// The key in halves, to avoid padding.
    hash: [u32; 2],
    /// Neighbours on the shelf. Of a pinned block, which is on no shelf, `older` is the number of pins, and
    /// `newer` is `IN_USE` or `NAMELESS`; in the list of free entries, `older` is `FREE` and `newer` is the
    /// next one.
    older: u32,
    newer: u32,
}

/// What other policies than LRU count of a block.
#[derive(Clone, Copy)]
struct Count {
    uses: u32,
    depth: u32,
}

/// Blocks of equal worth, ordered by their last use.
#[derive(Clone, Copy)]
struct Shelf {
    oldest: u32,
    newest: u32,
}

/// A set of blocks up to a capacity that reports what it evicts. Every operation costs O(1) per block, plus
/// the search for a shelf: one for LRU, one per count for LFU, one per count and depth for LengthAware.
///
/// A chain is a prompt's block keys from the first on, so that a block's prefix outlives it.
#[derive(Clone)]
pub struct BlockCache {
    capacity: usize,
    policy: CachePolicy,
    /// Maps keys to entries.
    table: HashTable<u32>,
    entries: Vec<Entry>,
    /// Counts by entry; empty where the policy needs none.
    counts: Vec<Count>,
    free: u32,
    /// Shelves by worth: the victim is the oldest block of the first.
    shelves: BTreeMap<(u32, u32), Shelf>,
    /// Number of blocks without pins.
    idle: usize,
    /// Number of blocks without a key.
    nameless: usize,
    /// The entries of the current chain; kept to reuse its memory.
    chain: Vec<u32>,
}

impl std::fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockCache({:?}, {} of {} blocks)", self.policy, self.len(), self.capacity)
    }
}

impl BlockCache {
    /// An empty cache of `capacity_blocks`; 0 holds nothing, `usize::MAX` holds everything (up to 2^32 - 4
    /// blocks).
    pub fn new(capacity_blocks: usize, policy: CachePolicy) -> Self {
        BlockCache {
            capacity: capacity_blocks,
            policy,
            table: HashTable::new(),
            entries: Vec::new(),
            counts: Vec::new(),
            free: NONE,
            shelves: BTreeMap::new(),
            idle: 0,
            nameless: 0,
            chain: Vec::new(),
        }
    }

    /// Allocates a place for a block that has no key yet, pinned once. If none is free, the block of least
    /// worth is evicted, whose key is the second value. None if all blocks are pinned.
    ///
    /// Places are numbers below the capacity; a block keeps its place while it is cached.
    pub fn take(&mut self) -> Option<(u32, Option<BlockHash>)> {
        let given_up = if self.has_room() { None } else { Some(self.evict()?) };
        self.nameless += 1;
        Some((self.add(Entry { hash: [0; 2], older: 1, newer: NAMELESS }, 0), given_up))
    }

    /// Gives the block at `place`, `depth` blocks after its chain's first, a key. Returns false, and changes
    /// nothing, if it has one, or if another block has this one.
    pub fn name(&mut self, place: u32, key: BlockHash, depth: u32) -> bool {
        let entries = &self.entries;
        if entries[place as usize].newer != NAMELESS {
            return false;
        }
        let is_it = |&id: &u32| entries[id as usize].key() == key;
        let hash = |&id: &u32| entries[id as usize].spread();
        match self.table.entry(spread(key), is_it, hash) {
            hashbrown::hash_table::Entry::Occupied(_) => return false,
            hashbrown::hash_table::Entry::Vacant(vacant) => vacant.insert(place),
        };
        let entry = &mut self.entries[place as usize];
        (entry.hash, entry.newer) = (halves(key), IN_USE);
        if let Some(count) = self.counts.get_mut(place as usize) {
            count.depth = depth;
        }
        self.nameless -= 1;
        true
    }

    /// The place of the block `key`.
    pub fn place(&self, key: BlockHash) -> Option<u32> {
        self.entry(key)
    }

    /// Number of pins of the block at `place`.
    pub fn pins_at(&self, place: u32) -> u32 {
        self.entries[place as usize].pins()
    }

    /// Uses the block at `place`, and pins it once.
    pub fn pin_at(&mut self, place: u32) {
        self.hold(place);
        self.count_use(place);
    }

    /// Removes one pin of the block at `place`. Without pins it may be evicted, as if it had just been used;
    /// a block without a key is removed at once.
    ///
    /// # Panics
    /// When it is not pinned.
    pub fn unpin_at(&mut self, place: u32) {
        let entry = &mut self.entries[place as usize];
        assert!(entry.pins() > 0, "block {place} is released more often than taken");
        if entry.pins() > 1 || entry.newer != NAMELESS {
            return self.release(place);
        }
        self.nameless -= 1;
        self.set_free(place);
    }

    /// Number of leading blocks of `chain` that are cached.
    pub fn longest_prefix(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|&&key| self.contains(key)).count()
    }

    /// Uses those blocks of `chain` that are cached.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        self.start_use(chain);
        self.end_use();
    }

    /// Uses `chain`, and caches it as far as there is room: cached blocks count as used, the others are added
    /// from the front, and evicted ones are appended to `evicted`. No block of `chain` itself is evicted for
    /// it.
    pub fn insert(&mut self, chain: &[BlockHash], evicted: &mut Vec<BlockHash>) {
        self.start_use(chain);
        for (depth, &key) in chain.iter().enumerate() {
            // Looked up again, since a malformed chain may contain a key twice.
            if self.chain[depth] != NONE || self.contains(key) {
                continue;
            }
            if !self.make_room(evicted) {
                break;
            }
            self.chain[depth] = self.create(key, to_u32(depth));
        }
        self.end_use();
    }

    /// Pins the leading blocks of `chain` that are cached, which keeps them from being evicted, and returns
    /// their number: exactly those must be unpinned. Pins are counted.
    pub fn pin(&mut self, chain: &[BlockHash]) -> usize {
        let pinned = self.longest_prefix(chain);
        for &key in &chain[..pinned] {
            if let Some(id) = self.entry(key) {
                self.hold(id);
            }
        }
        pinned
    }

    /// Removes one pin of each block of `chain`. A block without pins may be evicted, as if it had just been
    /// used.
    pub fn unpin(&mut self, chain: &[BlockHash]) {
        for &key in chain.iter().rev() {
            if let Some(id) = self.entry(key)
                && self.entries[id as usize].pins() > 0
            {
                self.release(id);
            }
        }
    }

    /// Uses `key`, the block at `depth` of its chain, and pins it once; it is added if it is not cached, and
    /// evicted blocks are appended to `evicted`. Returns false, and changes nothing, if there is no room. A
    /// chain pinned this way from the front and then [unpinned](Self::unpin) has the same effect as
    /// [`insert`](Self::insert).
    pub fn insert_pinned(&mut self, key: BlockHash, depth: u32, evicted: &mut Vec<BlockHash>) -> bool {
        if let Some(id) = self.entry(key) {
            self.hold(id);
            self.count_use(id);
            return true;
        }
        let room = self.make_room(evicted);
        if room {
            self.create(key, depth);
        }
        room
    }

    /// Removes `key` whether it is pinned or not, since its bytes are lost. False if it was not cached.
    pub fn remove(&mut self, key: BlockHash) -> bool {
        let Some(id) = self.entry(key) else { return false };
        if self.entries[id as usize].pins() == 0 {
            self.take_off(id);
        }
        self.forget(id);
        true
    }

    /// The blocks that are not pinned, in the order in which they would be evicted.
    pub fn by_worth(&self) -> impl Iterator<Item = BlockHash> {
        let next = |&id: &u32| Some(self.entries[id as usize].newer).filter(|&newer| newer != NONE);
        let shelf = move |shelf: &Shelf| std::iter::successors(Some(shelf.oldest), next);
        self.shelves.values().flat_map(shelf).map(|id| self.entries[id as usize].key())
    }

    /// Number of cached blocks.
    pub fn len(&self) -> usize {
        self.table.len() + self.nameless
    }

    /// Whether no block is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Maximum number of cached blocks.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of pinned blocks, which cannot be evicted.
    pub fn pinned(&self) -> usize {
        self.len() - self.idle
    }

    /// Number of pins of a block; 0 if it is not cached.
    pub fn pins(&self, key: BlockHash) -> u32 {
        self.entry(key).map_or(0, |id| self.entries[id as usize].pins())
    }

    /// Changes the capacity; evicted blocks are appended to `evicted`. Pinned blocks stay even if they exceed
    /// it.
    #[cfg(test)]
    pub(crate) fn set_capacity(&mut self, capacity_blocks: usize, evicted: &mut Vec<BlockHash>) {
        self.capacity = capacity_blocks;
        while self.len() > capacity_blocks && self.idle > 0 {
            evicted.extend(self.evict());
        }
    }

    /// Whether this block is cached.
    pub fn contains(&self, key: BlockHash) -> bool {
        self.entry(key).is_some()
    }

    /// The cached blocks, in an arbitrary order that depends only on the history.
    pub fn iter(&self) -> impl Iterator<Item = BlockHash> {
        let named = |entry: &&Entry| entry.older != FREE && entry.newer != NAMELESS;
        self.entries.iter().filter(named).map(|entry| entry.key())
    }

    fn entry(&self, key: BlockHash) -> Option<u32> {
        self.table.find(spread(key), |&id| self.entries[id as usize].key() == key).copied()
    }

    /// Counts a use of the cached blocks of `chain`, takes them off their shelves and records their entries.
    fn start_use(&mut self, chain: &[BlockHash]) {
        self.chain.clear();
        for &key in chain {
            let id = self.entry(key).unwrap_or(NONE);
            self.chain.push(id);
            if id != NONE {
                self.hold(id);
                self.count_use(id);
            }
        }
    }

    /// Puts the recorded entries back on their shelves, the deepest first, so that it is the oldest.
    fn end_use(&mut self) {
        while let Some(id) = self.chain.pop() {
            if id != NONE {
                self.release(id);
            }
        }
    }

    fn has_room(&self) -> bool {
        self.len() < self.capacity.min(FREE as usize)
    }

    fn make_room(&mut self, evicted: &mut Vec<BlockHash>) -> bool {
        if self.has_room() {
            return true;
        }
        let given_up = self.evict();
        evicted.extend(given_up);
        given_up.is_some()
    }

    /// Evicts the block of least worth. None if all are pinned.
    fn evict(&mut self) -> Option<BlockHash> {
        let victim = self.shelves.first_key_value().map(|(_, shelf)| shelf.oldest)?;
        self.take_off(victim);
        Some(self.forget(victim))
    }

    /// Frees an entry that is on no shelf.
    fn forget(&mut self, id: u32) -> BlockHash {
        let key = self.entries[id as usize].key();
        if let Ok(entry) = self.table.find_entry(spread(key), |&other| other == id) {
            entry.remove();
        }
        self.set_free(id);
        key
    }

    fn set_free(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        (entry.older, entry.newer) = (FREE, self.free);
        self.free = id;
    }

    /// Creates an entry with a key, used and pinned once.
    fn create(&mut self, key: BlockHash, depth: u32) -> u32 {
        let id = self.add(Entry { hash: halves(key), older: 1, newer: IN_USE }, depth);
        self.table.insert_unique(spread(key), id, |&id| self.entries[id as usize].spread());
        id
    }

    /// Adds `entry`, used once.
    fn add(&mut self, entry: Entry, depth: u32) -> u32 {
        let id = if self.free == NONE { to_u32(self.entries.len()) } else { self.free };
        match self.entries.get_mut(id as usize) {
            Some(free) => self.free = std::mem::replace(free, entry).newer,
            None => {
                self.reserve();
                self.entries.push(entry);
            }
        }
        if self.policy != CachePolicy::Lru {
            let count = Count { uses: 1, depth };
            match self.counts.get_mut(id as usize) {
                Some(free) => *free = count,
                None => self.counts.push(count),
            }
        }
        id
    }

    fn reserve(&mut self) {
        let len = self.entries.len();
        if len < self.entries.capacity() {
            return;
        }
        let more = self.capacity - len;
        if more > RESERVED_BLOCKS_MAX {
            return self.entries.reserve_exact(8 + len / 8);
        }
        self.entries.reserve_exact(more);
        self.table.reserve(more, |&id| self.entries[id as usize].spread());
    }

    fn count_use(&mut self, id: u32) {
        if let Some(Count { uses, .. }) = self.counts.get_mut(id as usize) {
            *uses = uses.saturating_add(1);
        }
    }

    fn worth(&self, id: u32) -> (u32, u32) {
        match (self.policy, self.counts.get(id as usize)) {
            (CachePolicy::Lfu, Some(count)) => (count.uses, 0),
            (CachePolicy::LengthAware, Some(count)) => (count.uses, u32::MAX - count.depth),
            _ => (0, 0),
        }
    }

    fn hold(&mut self, id: u32) {
        if self.entries[id as usize].pins() == 0 {
            self.take_off(id);
            let entry = &mut self.entries[id as usize];
            (entry.older, entry.newer) = (0, IN_USE);
        }
        self.entries[id as usize].older += 1;
    }

    fn release(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        debug_assert!(entry.pins() > 0, "block {id} is released more often than taken");
        if entry.older > 1 {
            entry.older -= 1;
            return;
        }
        self.idle += 1;
        let shelf = self.shelves.entry(self.worth(id)).or_insert(Shelf { oldest: id, newest: NONE });
        let before = std::mem::replace(&mut shelf.newest, id);
        let entry = &mut self.entries[id as usize];
        (entry.older, entry.newer) = (before, NONE);
        if before != NONE {
            self.entries[before as usize].newer = id;
        }
    }

    fn take_off(&mut self, id: u32) {
        self.idle -= 1;
        let entry = self.entries[id as usize];
        let worth = self.worth(id);
        if entry.older == NONE && entry.newer == NONE {
            self.shelves.remove(&worth);
            return;
        }
        if entry.older != NONE {
            self.entries[entry.older as usize].newer = entry.newer;
        }
        if entry.newer != NONE {
            self.entries[entry.newer as usize].older = entry.older;
        }
        if (entry.older == NONE || entry.newer == NONE)
            && let Some(shelf) = self.shelves.get_mut(&worth)
        {
            if entry.older == NONE {
                shelf.oldest = entry.newer;
            } else {
                shelf.newest = entry.older;
            }
        }
    }
}

fn halves(key: BlockHash) -> [u32; 2] {
    [(key.0 >> 32) as u32, low_u32(key.0)]
}

impl Entry {
    fn key(&self) -> BlockHash {
        BlockHash(u64::from(self.hash[0]) << 32 | u64::from(self.hash[1]))
    }

    /// Users.
    fn pins(&self) -> u32 {
        if self.newer == IN_USE || self.newer == NAMELESS { self.older } else { 0 }
    }

    fn spread(&self) -> u64 {
        spread(self.key())
    }
}

#[cfg(test)]
mod tests;
