//! The KV blocks of one instance: their users, and the content of unused ones.
//!
//! A block is a page of the device's KV pools, in all layers at once. It is *free* (holds nothing of use),
//! *cached* (unused, but it holds the KV of a known prefix) or *in use*. The three counts always add up to
//! the total.

use super::text::Text;
use crate::kv::{BlockCache, BlockHash, CachePolicy};
use serde::{Deserialize, Serialize};

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

/// Blocks with reference counts, a prefix index and eviction; `B` distinguishes the tokens of blocks with the
/// same key.
#[derive(Debug)]
pub struct BlockPool<B> {
    block_tokens: u32,
    /// The block cache, in which a block's slot is its page.
    cache: BlockCache,
    /// Tokens by page, which mean nothing for blocks without a key.
    tokens: Vec<B>,
}

impl<B: Default> BlockPool<B> {
    /// Creates `total` free blocks of `block_tokens` tokens.
    pub fn new(total: u32, block_tokens: u32, policy: CachePolicy) -> Self {
        assert!(block_tokens > 0, "a block holds at least one token");
        BlockPool { block_tokens, cache: BlockCache::new(total as usize, policy), tokens: Vec::new() }
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
        let mut hashes: Vec<BlockHash> = self.cache.iter().collect();
        hashes.sort_unstable();
        hashes
    }

    /// Blocks by state.
    pub fn counts(&self) -> BlockCounts {
        let (held, used) = (self.cache.len(), self.cache.pinned());
        BlockCounts { free: self.cache.capacity() - held, cached: held - used, used }
    }

    /// Number of blocks that `allocate` can still return.
    pub fn available(&self) -> usize {
        self.cache.capacity() - self.cache.pinned()
    }

    /// The pages that hold the longest known prefix of `text`, of at most `blocks` blocks.
    pub fn longest_prefix(&self, text: &mut impl Text<Block = B>, blocks: u32) -> Vec<u32> {
        let hits = (0..blocks).map_while(|block| {
            let page = self.cache.place(text.hash(block))?;
            text.has(block, &self.tokens[page as usize]).then_some(page)
        });
        hits.collect()
    }

    /// Number of `pages` that are cached now, so that acquiring them makes fewer blocks available.
    pub fn idle_among(&self, pages: &[u32]) -> usize {
        pages.iter().filter(|&&page| self.cache.pins_at(page) == 0).count()
    }

    /// Whether `page` would be available if its user released it.
    pub fn has_one_user(&self, page: u32) -> bool {
        self.cache.pins_at(page) == 1
    }

    /// Adds a user of a block that holds something.
    pub fn acquire(&mut self, page: u32) {
        self.cache.pin_at(page);
    }

    /// A block with one user and no content. If none is free, a cached block is evicted and pushed to
    /// `evicted`.
    pub fn allocate(&mut self, evicted: &mut Vec<Evicted<B>>) -> Option<u32> {
        let (page, given_up) = self.cache.take()?;
        if self.tokens.len() <= page as usize {
            self.tokens.resize_with(page as usize + 1, B::default);
        }
        let tokens = std::mem::take(&mut self.tokens[page as usize]);
        evicted.extend(given_up.map(|hash| Evicted { hash, tokens, page }));
        Some(page)
    }

    /// Declares that `page`, in use, now holds the KV of `tokens`, the block at `depth`, at the end of the
    /// prefix `hash`. False if another block already holds it; this block then stays private.
    pub fn publish(&mut self, page: u32, hash: BlockHash, depth: u32, tokens: impl FnOnce() -> B) -> bool {
        assert!(self.cache.pins_at(page) > 0, "only a user publishes");
        let new = self.cache.name(page, hash, depth);
        if new {
            self.tokens[page as usize] = tokens();
        }
        new
    }

    /// Removes a user. Without users a block is cached, if it holds something, or free.
    pub fn release(&mut self, page: u32) {
        self.cache.unpin_at(page);
    }
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
        pool.publish(page, hash, 0, || text.block(0))
    }

    #[test]
    fn the_least_recently_released_content_goes_first_and_used_blocks_never() {
        let mut pool = BlockPool::new(3, 2, CachePolicy::Lru);
        let mut evicted = Vec::new();
        let pages: Vec<u32> = (0..3).map(|_| pool.allocate(&mut evicted).unwrap()).collect();
        for (i, &page) in pages.iter().enumerate() {
            assert!(publish(&mut pool, page, &mut text(&[i as u32, 7])));
        }
        assert_eq!(pool.allocate(&mut evicted), None);
        pool.release(pages[1]);
        pool.release(pages[0]);
        assert_eq!(pool.allocate(&mut evicted), Some(pages[1]));
        let hash = text(&[1, 7]).hash(0);
        assert_eq!(evicted, [Evicted { hash, tokens: [1, 7].into(), page: pages[1] }]);
        assert_eq!(pool.counts(), BlockCounts { free: 0, cached: 1, used: 2 });
    }

    #[test]
    fn equal_hashes_of_unlike_tokens_do_not_hit() {
        let mut pool = BlockPool::new(2, 2, CachePolicy::Lru);
        let page = pool.allocate(&mut Vec::new()).unwrap();
        let hash = text(&[5, 9]).hash(0);
        pool.publish(page, hash, 0, || [5, 6].into());
        assert!(pool.longest_prefix(&mut text(&[5, 9, 7]), 1).is_empty());
        let page = pool.allocate(&mut Vec::new()).unwrap();
        assert!(publish(&mut pool, page, &mut text(&[5, 6])));
        assert_eq!(pool.longest_prefix(&mut text(&[5, 6, 7]), 1), [page]);
    }

    #[test]
    fn counts_add_up_under_random_use() {
        for seed in 0..150 {
            let mut rng = Stream::new(seed);
            let policy = [CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::LengthAware][seed as usize % 3];
            let mut pool = BlockPool::new(8, 2, policy);
            let mut held: Vec<u32> = Vec::new();
            let mut evicted = Vec::new();
            for _ in 0..400 {
                let mut drawn = text(&[rng.below(12) as u32, 3]);
                match rng.below(4) {
                    0 => held.extend(pool.allocate(&mut evicted)),
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
