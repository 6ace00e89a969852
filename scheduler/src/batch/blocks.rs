//! The KV blocks of one instance: who uses which, and what the unused ones still hold.
//!
//! A block is a page of the device's KV pools, in all layers at once. It is *free* (holds nothing of
//! use), *cached* (nobody uses it, but it holds the KV of a known prefix) or *in use*. The three
//! counts always add up to the total.

use crate::kv::hash::BlockHash;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// How many blocks are in which state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCounts {
    /// Hold nothing of use.
    pub free: usize,
    /// Unused, holding a known prefix.
    pub cached: usize,
    /// Used by at least one sequence.
    pub used: usize,
}

#[derive(Debug, Default)]
struct Block {
    users: u32,
    content: Option<Content>,
    /// Key in `idle` while cached.
    idle_since: u64,
}

#[derive(Debug)]
struct Content {
    hash: BlockHash,
    tokens: Box<[u32]>,
}

/// A prefix that was given up for other content. Its KV lies in its page until something is written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Its key.
    pub hash: BlockHash,
    /// The tokens of its last block.
    pub tokens: Box<[u32]>,
    /// Where it lay.
    pub page: u32,
}

/// Blocks with reference counts, a prefix index and least-recently-used eviction.
#[derive(Debug)]
pub struct BlockPool {
    block_tokens: u32,
    blocks: Vec<Block>,
    free: Vec<u32>,
    by_hash: HashMap<BlockHash, u32>,
    /// Cached blocks, least recently released first.
    idle: BTreeMap<u64, u32>,
    releases: u64,
}

impl BlockPool {
    /// `total` free blocks of `block_tokens` tokens.
    pub fn new(total: u32, block_tokens: u32) -> Self {
        assert!(block_tokens > 0, "a block holds at least one token");
        BlockPool {
            block_tokens,
            blocks: (0..total).map(|_| Block::default()).collect(),
            free: (0..total).rev().collect(),
            by_hash: HashMap::new(),
            idle: BTreeMap::new(),
            releases: 0,
        }
    }

    /// Tokens in a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks that `tokens` tokens fill or begin.
    pub fn blocks_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.block_tokens) as usize
    }

    /// The prefixes that blocks hold, in order.
    pub fn hashes(&self) -> Vec<BlockHash> {
        let mut hashes: Vec<BlockHash> = self.by_hash.keys().copied().collect();
        hashes.sort_unstable();
        hashes
    }

    /// The state of the pool.
    pub fn counts(&self) -> BlockCounts {
        let (free, cached) = (self.free.len(), self.idle.len());
        BlockCounts { free, cached, used: self.blocks.len() - free - cached }
    }

    /// Blocks that `allocate` can still hand out.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// The blocks that hold the longest known prefix of `tokens`, given the hash chain of its full
    /// blocks. Prompts choose what is hashed, so a hit counts only if the tokens are equal too.
    pub fn longest_prefix(&self, chain: &[BlockHash], tokens: &[u32]) -> Vec<u32> {
        let blocks = tokens.chunks_exact(self.block_tokens as usize);
        let hits = chain.iter().zip(blocks).map_while(|(hash, tokens)| {
            let page = *self.by_hash.get(hash)?;
            let content = self.blocks[page as usize].content.as_ref()?;
            (*content.tokens == *tokens).then_some(page)
        });
        hits.collect()
    }

    /// How many of `pages` are cached now, so that acquiring them makes fewer blocks available.
    pub fn idle_among(&self, pages: &[u32]) -> usize {
        pages.iter().filter(|&&page| self.blocks[page as usize].users == 0).count()
    }

    /// Whether `page` would be available if its user released it.
    pub fn has_one_user(&self, page: u32) -> bool {
        self.blocks[page as usize].users == 1
    }

    /// One more user of a block that holds something.
    pub fn acquire(&mut self, page: u32) {
        let block = &mut self.blocks[page as usize];
        if block.users == 0 {
            let was_idle = self.idle.remove(&block.idle_since);
            assert_eq!(was_idle, Some(page), "an unused block with content is idle");
        }
        block.users += 1;
    }

    /// A block with one user and no content. A cached block is given up if none is free; it is then pushed
    /// to `evicted`.
    pub fn allocate(&mut self, evicted: &mut Vec<Evicted>) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let (_, page) = self.idle.pop_first()?;
                let content = self.blocks[page as usize].content.take();
                let Content { hash, tokens } = content.expect("an idle block has content");
                self.by_hash.remove(&hash);
                evicted.push(Evicted { hash, tokens, page });
                page
            }
        };
        let block = &mut self.blocks[page as usize];
        assert_eq!(block.users, 0, "a block handed out is in use");
        block.users = 1;
        Some(page)
    }

    /// Declares that `page`, in use, now holds the KV of `tokens` at the end of the prefix `hash`.
    /// False if another block already holds it: then this one stays private.
    pub fn publish(&mut self, page: u32, hash: BlockHash, tokens: &[u32]) -> bool {
        assert_eq!(tokens.len(), self.block_tokens as usize, "only full blocks are published");
        assert!(self.blocks[page as usize].users > 0, "only a user publishes");
        let block = &mut self.blocks[page as usize];
        if self.by_hash.contains_key(&hash) || block.content.is_some() {
            return false;
        }
        block.content = Some(Content { hash, tokens: tokens.into() });
        self.by_hash.insert(hash, page);
        true
    }

    /// One user less. The last one leaves the block cached, if it holds something, or free.
    pub fn release(&mut self, page: u32) {
        let block = &mut self.blocks[page as usize];
        assert!(block.users > 0, "block {page} is released more often than acquired");
        block.users -= 1;
        if block.users > 0 {
            return;
        }
        if block.content.is_some() {
            block.idle_since = self.releases;
            self.idle.insert(self.releases, page);
            self.releases += 1;
        } else {
            self.free.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::random::Stream;

    fn hash(n: u64) -> BlockHash {
        BlockHash(n)
    }

    #[test]
    fn the_least_recently_released_content_goes_first_and_used_blocks_never() {
        let mut pool = BlockPool::new(3, 2);
        let mut evicted = Vec::new();
        let pages: Vec<u32> = (0..3).map(|_| pool.allocate(&mut evicted).unwrap()).collect();
        for (i, &page) in pages.iter().enumerate() {
            assert!(pool.publish(page, hash(i as u64), &[i as u32, 7]));
        }
        assert_eq!(pool.allocate(&mut evicted), None);
        pool.release(pages[1]);
        pool.release(pages[0]);
        assert_eq!(pool.allocate(&mut evicted), Some(pages[1]));
        assert_eq!(evicted, [Evicted { hash: hash(1), tokens: [1, 7].into(), page: pages[1] }]);
        assert_eq!(pool.counts(), BlockCounts { free: 0, cached: 1, used: 2 });
    }

    #[test]
    fn equal_hashes_of_unlike_tokens_do_not_hit() {
        let mut pool = BlockPool::new(2, 2);
        let page = pool.allocate(&mut Vec::new()).unwrap();
        pool.publish(page, hash(1), &[5, 6]);
        assert_eq!(pool.longest_prefix(&[hash(1)], &[5, 6, 7]), [page]);
        assert!(pool.longest_prefix(&[hash(1)], &[5, 9, 7]).is_empty());
    }

    #[test]
    fn counts_add_up_under_random_use() {
        for seed in 0..50 {
            let mut rng = Stream::new(seed);
            let mut pool = BlockPool::new(8, 1);
            let mut held: Vec<u32> = Vec::new();
            let mut evicted = Vec::new();
            for _ in 0..400 {
                match rng.below(4) {
                    0 => held.extend(pool.allocate(&mut evicted)),
                    1 if !held.is_empty() => {
                        let at = rng.below(held.len() as u64) as usize;
                        pool.release(held.swap_remove(at));
                    }
                    2 if !held.is_empty() => {
                        let page = held[rng.below(held.len() as u64) as usize];
                        let id = rng.below(12);
                        pool.publish(page, hash(id), &[id as u32]);
                    }
                    _ => {
                        let id = rng.below(12);
                        for page in pool.longest_prefix(&[hash(id)], &[id as u32]) {
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
        }
    }
}
