//! The blocks of a recorded conversation in the real pool, with the hit rates of the simulator.

use super::support::{config, keep, load, make_region, ssd};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{Pool, PoolConfig};
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy};
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Preset};
use mixfleet_sim::trace::{ReadOptions, Trace};
use std::collections::BTreeSet;
use std::path::Path;

/// The chains of the trace; none, with a message, if it is absent.
fn chains() -> Option<Vec<Vec<BlockHash>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../shared/data/traces/mooncake-conversation.jsonl.zst");
    if !path.exists() {
        eprintln!("SKIPPED: ../shared/data/traces/mooncake-conversation.jsonl.zst is not there");
        return None;
    }
    let trace = Trace::open(&path, ReadOptions::default()).expect("a trace");
    Some(trace.map(|request| request.expect("a sound line").chain).collect())
}

/// The chains of a generated conversation, which every clone has.
fn generated_chains() -> Vec<Vec<BlockHash>> {
    let options = GenerateOptions { requests: 1_500, rate: 3.4, seed: 16, arrivals: Arrivals::Poisson };
    let made = Generator::new(Preset::Conversation.model(), options).expect("a generator");
    made.map(|request| request.chain).collect()
}

/// A pool with blocks of one token and 8 bytes, both equal to the key.
fn pool(dram_blocks: u64, ssd_blocks: u64) -> Pool {
    let tier = (ssd_blocks > 0).then(|| {
        let small = ssd(SimDisk::default(), 0);
        mixfleet_runtime::pool::SsdConfig { bytes: 48 + ssd_blocks * (8 + 52 + 128), ..small }
    });
    let dram_bytes = dram_blocks * 8;
    let config = PoolConfig { block_bytes: 8, block_tokens: 1, dram_bytes, ..config(0, tier) };
    Pool::new(config, &make_region).expect("a new pool")
}

/// Number of hits of `chain`; a device then evicts the rest, deepest blocks first.
fn play(pool: &Pool, chain: &[BlockHash]) -> usize {
    let tokens: Vec<u32> = chain.iter().map(|hash| hash.0 as u32).collect();
    let lease = pool.lease(chain, &tokens);
    for (at, hash) in chain[..lease.len()].iter().enumerate() {
        assert_eq!(load(&lease, at), Some(hash.0.to_le_bytes().to_vec()));
    }
    for (hash, token) in chain.iter().zip(&tokens).skip(lease.len()).rev() {
        keep(pool, *hash, &[*token], &hash.0.to_le_bytes());
    }
    pool.take_events();
    lease.len()
}

/// The simulator's caches for the same blocks.
struct Caches {
    dram: BlockCache,
    ssd: BlockCache,
}

impl Caches {
    fn new(dram_blocks: u64, ssd_blocks: u64) -> Self {
        let cache = |blocks| BlockCache::new(blocks as usize, CachePolicy::Lru);
        Caches { dram: cache(dram_blocks), ssd: cache(ssd_blocks) }
    }

    /// Stores and pins a block in host memory, which may evict one to the disk.
    fn take(&mut self, key: BlockHash) -> bool {
        let mut evicted = Vec::new();
        let fits = self.dram.insert_pinned(key, 0, &mut evicted);
        evicted.iter().for_each(|&victim| self.ssd.insert(&[victim], &mut Vec::new()));
        fits
    }

    fn play(&mut self, chain: &[BlockHash]) -> usize {
        let present: BTreeSet<BlockHash> =
            chain.iter().copied().filter(|&key| self.dram.contains(key)).collect();
        let known = chain.iter().take_while(|key| present.contains(key) || self.ssd.contains(**key)).count();
        present.iter().for_each(|&key| _ = self.dram.pin(&[key]));
        if chain[..known].iter().any(|key| !present.contains(key)) {
            self.ssd.touch(chain);
        }
        let comes = |key: &&BlockHash| present.contains(key) || self.ssd.contains(**key) && self.take(**key);
        let held = chain[..known].iter().take_while(comes).count();
        for &key in chain[held..].iter().rev() {
            if self.take(key) {
                self.dram.unpin(&[key]);
            }
        }
        let pinned = (0..).zip(chain).filter(|(at, key)| *at < held || present.contains(key));
        let pinned: Vec<BlockHash> = pinned.map(|(_, &key)| key).collect();
        self.dram.unpin(&pinned);
        held
    }
}

/// Runs the trace on both, which must hit the same blocks of every request. Returns the share of hits.
fn play_both(chains: &[Vec<BlockHash>], dram_blocks: u64, ssd_blocks: u64) -> f64 {
    let (pool, mut caches) = (pool(dram_blocks, ssd_blocks), Caches::new(dram_blocks, ssd_blocks));
    let (mut hits, mut references) = (0, 0);
    for chain in chains {
        let held = play(&pool, chain);
        assert_eq!(held, caches.play(chain), "{dram_blocks} and {ssd_blocks} blocks");
        hits += held;
        references += chain.len();
    }
    let stats = pool.stats();
    assert_eq!((stats.hits_dram + stats.hits_ssd) as usize, hits);
    assert!(stats.bad == 0 && stats.collisions == 0 && stats.lost == 0, "{stats:?}");
    let rate = hits as f64 / f64::from(references as u32);
    eprintln!("{rate:.4} of the blocks hit with {dram_blocks} + {ssd_blocks} blocks");
    rate
}

#[test]
fn host_memory_hits_what_the_simulator_says() {
    let Some(chains) = chains() else { return };
    // An independent replay of the trace orders the blocks of a request differently, hence the tolerance.
    let known = [(100_000, 0.3637), (50_000, 0.3546), (30_000, 0.3257), (10_000, 0.2112), (1_000, 0.0445)];
    for (blocks, rate) in known {
        let is = play_both(&chains, blocks, 0);
        assert!((is - rate).abs() < 0.0005, "{blocks} blocks: {is}");
    }
}

#[test]
fn two_tiers_hit_what_two_caches_would() {
    let Some(chains) = chains() else { return };
    play_both(&chains, 2_000, 30_000);
}

#[test]
fn a_generated_conversation_hits_in_the_pool_what_it_hits_in_the_simulators_caches() {
    let chains = generated_chains();
    let rates = [(200, 0), (2_000, 0), (200, 4_000)].map(|(dram, ssd)| play_both(&chains, dram, ssd));
    assert!(rates[0] < rates[1] && rates[0] < rates[2], "{rates:?}");
}
