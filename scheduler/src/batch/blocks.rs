//! The KV blocks of one instance: their users, and the content of unused ones.
//!
//! A block is a page of the device's KV pools, in all layers at once, or one for each part of the layers
//! (`parts.rs`). A page is *free* (holds nothing of use), *cached* (unused, but it holds the KV of a known
//! prefix) or *in use*. The three counts always add up to the total.

use super::text::Text;
use crate::kv::parts::{NO_PAGE, PageParts, first_kept};
use crate::kv::{BlockCache, BlockHash, CachePolicy};
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Number of blocks in each state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCounts {
    /// Blocks without useful content.
    pub free: usize,
    /// Unused blocks that hold a known prefix.
    pub cached: usize,
    /// Blocks used by at least one sequence.
    pub used: usize,
}

/// An evicted prefix. Its KV is in its page until something is written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted<B> {
    /// The block's key.
    pub hash: BlockHash,
    /// The tokens of the block.
    pub tokens: B,
    /// The page that holds it.
    pub page: u32,
}

/// Among how many devices the blocks of an instance are divided: page `p` is on device `p % count`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageDevices {
    /// Number of devices.
    pub count: u32,
    /// Whether the pages of a sequence should be on one device. If not, the devices take turns.
    pub together: bool,
    /// Blocks of each device; as many on each as on the others if none.
    pub rooms: Option<Arc<[u32]>>,
}

impl PageDevices {
    /// All blocks are on all devices that have any.
    pub const ONE: PageDevices = PageDevices { count: 1, together: true, rooms: None };

    /// Blocks of a device, of `total` on all.
    pub fn room(&self, device: u32, total: u32) -> u32 {
        match &self.rooms {
            Some(rooms) => rooms.get(device as usize).copied().unwrap_or(0),
            None => total / self.count + u32::from(device < total % self.count),
        }
    }

    /// Blocks on all devices, `total` if each has as many as the others.
    pub fn all(&self, total: u32) -> u32 {
        (0..self.count).map(|device| self.room(device, total)).sum()
    }
}

/// Blocks with reference counts, a prefix index and eviction; `B` distinguishes the tokens of blocks with the
/// same key.
#[derive(Debug)]
pub struct BlockPool<B> {
    block_tokens: u32,
    parts: PageParts,
    /// Whether the pages of a sequence should be in one cache.
    together: bool,
    /// A block cache per device. A block's page is its slot times their number, plus its cache's.
    caches: Vec<BlockCache>,
    /// Tokens by page, and the part of the layers that they are in, which mean nothing for pages without a
    /// key.
    tokens: Vec<(u32, B)>,
}

/// The key of a block's page of one part of the layers; that of the first one is the block's.
fn key_of(hash: BlockHash, part: u32) -> BlockHash {
    const APART: u64 = 0x9e37_79b9_7f4a_7c15;
    BlockHash(hash.0.wrapping_add(APART.wrapping_mul(u64::from(part))))
}

impl<B: Default> BlockPool<B> {
    /// Creates `total` free blocks of `block_tokens` tokens.
    pub fn new(total: u32, block_tokens: u32, policy: CachePolicy) -> Self {
        BlockPool::divided((total, PageParts::ONE), block_tokens, policy, &PageDevices::ONE)
    }

    /// The same, with a page for each part of the layers, or divided among devices.
    pub fn divided(
        (total, parts): (u32, PageParts),
        block_tokens: u32,
        policy: CachePolicy,
        devices: &PageDevices,
    ) -> Self {
        assert!(block_tokens > 0, "a block holds at least one token");
        assert!(
            devices.count == 1 || parts == PageParts::ONE,
            "a page of parts of the layers is not divided"
        );
        let room = |device| devices.room(device, total) as usize * parts.count() as usize;
        let caches = (0..devices.count).map(|device| BlockCache::new(room(device), policy)).collect();
        BlockPool { block_tokens, parts, together: devices.together, caches, tokens: Vec::new() }
    }

    /// The parts of the layers that a block has a page of.
    pub fn parts(&self) -> &PageParts {
        &self.parts
    }

    /// The cache and the slot of a page.
    fn slot(&self, page: u32) -> (usize, u32) {
        match to_u32(self.caches.len()) {
            1 => (0, page),
            count => ((page % count) as usize, page / count),
        }
    }

    /// The page of a slot.
    fn page(&self, cache: usize, slot: u32) -> u32 {
        slot * to_u32(self.caches.len()) + to_u32(cache)
    }

    /// The page of the block `key`.
    fn page_of(&self, key: BlockHash) -> Option<u32> {
        let mut places = self.caches.iter().enumerate();
        places.find_map(|(cache, blocks)| Some(self.page(cache, blocks.place(key)?)))
    }

    /// Number of users of a page.
    fn users(&self, page: u32) -> u32 {
        let (cache, slot) = self.slot(page);
        self.caches[cache].pins_at(slot)
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Number of blocks for `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.block_tokens) as usize
    }

    /// The prefixes in the blocks, in order.
    pub fn hashes(&self) -> Vec<BlockHash> {
        let keys = self.caches.iter().flat_map(BlockCache::iter);
        let mut hashes: Vec<BlockHash> = match self.parts.count() {
            1 => keys.collect(),
            _ => keys.filter(|&key| self.page_of(key).is_some_and(|page| self.is_first(page))).collect(),
        };
        hashes.sort_unstable();
        hashes
    }

    /// Whether a page with a key is that of the first part of the layers.
    fn is_first(&self, page: u32) -> bool {
        self.tokens[page as usize].0 == 0
    }

    /// Blocks by state; a page of a part of the layers counts as that part of a block.
    pub fn counts(&self) -> BlockCounts {
        let sum = |of: fn(&BlockCache) -> usize| self.caches.iter().map(of).sum::<usize>();
        let (held, used, parts) =
            (sum(BlockCache::len), sum(BlockCache::pinned), self.parts.count() as usize);
        let (cached, used) = ((held - used) / parts, used.div_ceil(parts));
        BlockCounts { free: sum(BlockCache::capacity) / parts - cached - used, cached, used }
    }

    /// Number of pages in use.
    pub fn pages_used(&self) -> usize {
        self.caches.iter().map(BlockCache::pinned).sum()
    }

    /// Number of pages that `allocate` can still return.
    pub fn available(&self) -> usize {
        self.caches.iter().map(available).sum()
    }

    /// The page that holds a block of `text` in a part of the layers.
    fn find(&self, text: &mut impl Text<Block = B>, block: u32, part: u32) -> Option<u32> {
        let page = self.page_of(key_of(text.hash(block), part))?;
        let (its, tokens) = &self.tokens[page as usize];
        (*its == part && text.has(block, tokens)).then_some(page)
    }

    /// The pages that hold the longest known prefix of `text`, of at most `blocks` blocks, complete in all
    /// layers: those of each part of a block, block by block.
    pub fn whole_prefix(&self, text: &mut impl Text<Block = B>, blocks: u32) -> Vec<u32> {
        let mut hits = Vec::new();
        for block in 0..blocks {
            let before = hits.len();
            hits.extend((0..self.parts.count()).map_while(|part| self.find(text, block, part)));
            if hits.len() - before < self.parts.count() as usize {
                hits.truncate(before);
                break;
            }
        }
        hits
    }

    /// The pages that hold the longest known prefix of `text`, of at most `blocks` blocks, as far as a later
    /// token reads it: layers with a window need no more than that, and have [`NO_PAGE`] before.
    pub fn longest_prefix(&self, text: &mut impl Text<Block = B>, blocks: u32) -> Vec<u32> {
        if !self.parts.lets_go() {
            return self.whole_prefix(text, blocks);
        }
        let windows = || (0..).zip(self.parts.windows().iter().copied());
        let full = |block: &u32| {
            let mut parts = windows().filter(|(_, window)| window.is_none());
            parts.all(|(part, _)| self.find(text, *block, part).is_some())
        };
        let mut length = to_u32((0..blocks).take_while(full).count());
        let kept = |window, length: u32| {
            let computed = u64::from(length) * u64::from(self.block_tokens);
            to_u32(first_kept(window, computed, self.block_tokens))
        };
        // the last block that is missed is where the prefix ends at most
        while let Some(missed) = windows()
            .filter(|(_, window)| window.is_some())
            .filter_map(|(part, window)| {
                (kept(window, length)..length).rev().find(|&block| self.find(text, block, part).is_none())
            })
            .min()
        {
            length = missed;
        }
        let mut hits = Vec::new();
        for block in 0..length {
            for (part, window) in windows() {
                let page = if block < kept(window, length) { None } else { self.find(text, block, part) };
                hits.push(page.unwrap_or(NO_PAGE));
            }
        }
        hits
    }

    /// Number of `pages` that are cached now, so that acquiring them makes fewer pages available.
    pub fn idle_among(&self, pages: &[u32]) -> usize {
        pages.iter().filter(|&&page| page != NO_PAGE && self.users(page) == 0).count()
    }

    /// Whether `page` would be available if its user released it.
    pub fn has_one_user(&self, page: u32) -> bool {
        page != NO_PAGE && self.users(page) == 1
    }

    /// Adds a user of a page that holds something.
    pub fn acquire(&mut self, page: u32) {
        if page != NO_PAGE {
            let (cache, slot) = self.slot(page);
            self.caches[cache].pin_at(slot);
        }
    }

    /// The device that the next page of a sequence with these pages should be on.
    fn device_for(&self, pages: &[u32]) -> usize {
        let count = self.caches.len();
        let last = pages.last().map(|&page| self.slot(page).0);
        let wanted = last.map(|last| if self.together { last } else { (last + 1) % count });
        let has_room = |device: &usize| available(&self.caches[*device]) > 0;
        // in proportion to its own room, so that devices of unlike room have work in that proportion
        let share = |device: usize, of: usize| available(&self.caches[device]) * self.caches[of].capacity();
        let roomy = |best, device| if share(device, best) > share(best, device) { device } else { best };
        wanted.filter(has_room).unwrap_or_else(|| (1..count).fold(0, roomy))
    }

    /// A block with one user and no content, for a sequence that has `pages`. If none is free on its device,
    /// a cached block is evicted and pushed to `evicted`.
    pub fn allocate(&mut self, pages: &[u32], evicted: &mut Vec<Evicted<B>>) -> Option<u32> {
        let device = if self.caches.len() == 1 { 0 } else { self.device_for(pages) };
        let (slot, given_up) = self.caches[device].take()?;
        let page = self.page(device, slot);
        if self.tokens.len() <= page as usize {
            self.tokens.resize_with(page as usize + 1, Default::default);
        }
        let (part, tokens) = std::mem::take(&mut self.tokens[page as usize]);
        // a prefix is known by the pages of the first part of the layers
        let known = given_up.filter(|_| part == 0);
        evicted.extend(known.map(|hash| Evicted { hash, tokens, page }));
        Some(page)
    }

    /// Allocates a page of each part of the layers, for the next block of a sequence; false if there are too
    /// few.
    pub fn extend(&mut self, pages: &mut Vec<u32>, evicted: &mut Vec<Evicted<B>>) -> bool {
        let enough = self.available() >= self.parts.count() as usize;
        for _ in 0..if enough { self.parts.count() } else { 0 } {
            pages.push(self.allocate(pages, evicted).expect("counted before"));
        }
        enough
    }

    /// Declares that the pages of a block, in use, now hold the KV of `tokens`, the block at `depth`, at the
    /// end of the prefix `hash`. False if another block already holds it; this block then stays private.
    pub fn publish_block(
        &mut self,
        pages: &[u32],
        hash: BlockHash,
        depth: u32,
        tokens: impl Fn() -> B,
    ) -> bool {
        let mut new = false;
        for (part, &page) in (0..).zip(pages) {
            let known = page == NO_PAGE || !self.publish(page, (hash, part), depth, &tokens);
            new |= part == 0 && !known;
        }
        new
    }

    /// The same of its page of one part of the layers.
    fn publish(
        &mut self,
        page: u32,
        (hash, part): (BlockHash, u32),
        depth: u32,
        tokens: impl FnOnce() -> B,
    ) -> bool {
        assert!(self.users(page) > 0, "only a user publishes");
        let hash = key_of(hash, part);
        let (cache, slot) = self.slot(page);
        let is_elsewhere =
            |(other, blocks): (usize, &BlockCache)| other != cache && blocks.place(hash).is_some();
        if self.caches.len() > 1 && self.caches.iter().enumerate().any(is_elsewhere) {
            return false;
        }
        let new = self.caches[cache].name(slot, hash, depth);
        if new {
            self.tokens[page as usize] = (part, tokens());
        }
        new
    }

    /// Removes a user. Without users a page is cached, if it holds something, or free.
    pub fn release(&mut self, page: u32) {
        if page != NO_PAGE {
            let (cache, slot) = self.slot(page);
            self.caches[cache].unpin_at(slot);
        }
    }
}

/// Number of blocks that can be taken.
fn available(cache: &BlockCache) -> usize {
    cache.capacity() - cache.pinned()
}

#[cfg(test)]
mod tests {
    use super::super::text::TokenIds;
    use super::*;
    use crate::kv::hash::{Namespace, PrefixHasher};
    use mixfleet_hal::DType;
    use mixfleet_hal::random::Stream;

    /// `tokens` in blocks of 2.
    fn text(tokens: &[u32]) -> TokenIds {
        let namespace = Namespace {
            model_digest: "m".into(),
            tokenizer_digest: "t".into(),
            kv_dtype: DType::F32,
            cache_salt: None,
        };
        TokenIds::new(tokens.to_vec(), PrefixHasher::new(b"secret", &namespace), 2)
    }

    /// Publishes the first block of `text`.
    fn publish(pool: &mut BlockPool<Box<[u32]>>, page: u32, text: &mut TokenIds) -> bool {
        let hash = text.hash(0);
        pool.publish_block(&[page], hash, 0, || text.block(0))
    }

    #[test]
    fn the_least_recently_released_content_goes_first_and_used_blocks_never() {
        let mut pool = BlockPool::new(3, 2, CachePolicy::Lru);
        let mut evicted = Vec::new();
        let pages: Vec<u32> = (0..3).map(|_| pool.allocate(&[], &mut evicted).unwrap()).collect();
        for (i, &page) in pages.iter().enumerate() {
            assert!(publish(&mut pool, page, &mut text(&[i as u32, 7])));
        }
        assert_eq!(pool.allocate(&[], &mut evicted), None);
        pool.release(pages[1]);
        pool.release(pages[0]);
        assert_eq!(pool.allocate(&[], &mut evicted), Some(pages[1]));
        let hash = text(&[1, 7]).hash(0);
        assert_eq!(evicted, [Evicted { hash, tokens: [1, 7].into(), page: pages[1] }]);
        assert_eq!(pool.counts(), BlockCounts { free: 0, cached: 1, used: 2 });
    }

    #[test]
    fn equal_hashes_of_unlike_tokens_do_not_hit() {
        let mut pool = BlockPool::new(2, 2, CachePolicy::Lru);
        let page = pool.allocate(&[], &mut Vec::new()).unwrap();
        let hash = text(&[5, 9]).hash(0);
        pool.publish_block(&[page], hash, 0, || [5, 6].into());
        assert!(pool.longest_prefix(&mut text(&[5, 9, 7]), 1).is_empty());
        let page = pool.allocate(&[], &mut Vec::new()).unwrap();
        assert!(publish(&mut pool, page, &mut text(&[5, 6])));
        assert_eq!(pool.longest_prefix(&mut text(&[5, 6, 7]), 1), [page]);
    }

    #[test]
    fn pages_of_a_sequence_stay_on_a_device_or_take_turns_and_go_elsewhere_once_it_is_full() {
        let of = |together| {
            let devices = PageDevices { count: 3, together, rooms: None };
            let mut pool =
                BlockPool::<Box<[u32]>>::divided((9, PageParts::ONE), 2, CachePolicy::Lru, &devices);
            let mut sequences = [Vec::new(), Vec::new()];
            for at in 0..9 {
                let pages = &mut sequences[usize::from(at >= 5)];
                let page = pool.allocate(pages, &mut Vec::new()).unwrap();
                pages.push(page);
            }
            assert_eq!((pool.available(), pool.allocate(&[], &mut Vec::new())), (0, None));
            let mut all = sequences.concat();
            all.sort_unstable();
            assert_eq!(all, Vec::from_iter(0..9));
            sequences.map(|pages| pages.iter().map(|page| page % 3).collect::<Vec<u32>>())
        };
        assert_eq!(of(true), [vec![0, 0, 0, 1, 1], vec![2, 2, 2, 1]]);
        assert_eq!(of(false), [vec![0, 1, 2, 0, 1], vec![2, 0, 1, 2]]);
    }

    #[test]
    fn sequences_go_to_devices_in_proportion_to_their_room() {
        let devices = PageDevices { count: 2, together: true, rooms: Some([6, 2].into()) };
        let mut pool = BlockPool::<Box<[u32]>>::divided((8, PageParts::ONE), 2, CachePolicy::Lru, &devices);
        let pages: Vec<u32> = (0..8).map(|_| pool.allocate(&[], &mut Vec::new()).unwrap()).collect();
        assert_eq!(pages, [0, 1, 2, 4, 6, 3, 8, 10]);
        assert_eq!((pool.allocate(&[], &mut Vec::new()), pool.counts().used), (None, 8));
    }

    #[test]
    fn a_prefix_is_found_on_whichever_device_it_is_and_is_kept_once() {
        let devices = PageDevices { count: 2, together: true, rooms: None };
        let mut pool = BlockPool::divided((4, PageParts::ONE), 2, CachePolicy::Lru, &devices);
        let one = pool.allocate(&[], &mut Vec::new()).unwrap();
        let other = pool.allocate(&[], &mut Vec::new()).unwrap();
        assert_ne!(one % 2, other % 2);
        assert!(publish(&mut pool, other, &mut text(&[1, 7])));
        assert!(!publish(&mut pool, one, &mut text(&[1, 7])));
        assert_eq!(pool.longest_prefix(&mut text(&[1, 7, 0]), 1), [other]);
    }

    #[test]
    fn counts_add_up_under_random_use() {
        for seed in 0..150 {
            let mut rng = Stream::new(seed);
            let policy = [CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::LengthAware][seed as usize % 3];
            let count = 1 + (seed / 3 % 3) as u32;
            let unlike: [&[u32]; 3] = [&[8], &[1, 7], &[4, 1, 3]];
            let rooms = (seed % 5 == 0).then(|| unlike[count as usize - 1].into());
            let devices = PageDevices { count, together: seed % 2 == 0, rooms };
            let mut pool = BlockPool::divided((8, PageParts::ONE), 2, policy, &devices);
            let mut held: Vec<u32> = Vec::new();
            let mut evicted = Vec::new();
            for _ in 0..400 {
                let mut drawn = text(&[rng.below(12) as u32, 3]);
                match rng.below(4) {
                    0 => {
                        let page = pool.allocate(&held, &mut evicted);
                        held.extend(page);
                    }
                    1 if !held.is_empty() => {
                        let at = rng.below(held.len() as u64) as usize;
                        pool.release(held.swap_remove(at));
                    }
                    2 if !held.is_empty() => {
                        let page = held[rng.below(held.len() as u64) as usize];
                        publish(&mut pool, page, &mut drawn);
                    }
                    _ => {
                        for page in pool.longest_prefix(&mut drawn, 1) {
                            pool.acquire(page);
                            held.push(page);
                        }
                    }
                }
                let counts = pool.counts();
                let mut distinct = held.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!(counts.used, distinct.len(), "seed {seed}");
                assert_eq!(counts.free + counts.cached + counts.used, 8, "seed {seed}");
                assert_eq!(pool.available(), counts.free + counts.cached);
            }
            assert!(!evicted.is_empty(), "seed {seed}");
        }
    }
}
