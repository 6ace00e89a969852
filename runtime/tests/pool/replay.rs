//! The blocks of a recorded conversation, through the real pool: the hit rates of the simulator.

use crate::support::{config, make_region, ssd};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{Pool, PoolConfig, Put};
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy};
use mixfleet_sim::trace::{ReadOptions, Trace};
use std::path::Path;

/// The chains of the trace; none, said loudly, where it is not there.
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

/// Blocks of one token and 8 bytes, both the key.
fn pool(dram_blocks: u64, ssd_blocks: u64, policy: CachePolicy) -> Pool {
    let tier = (ssd_blocks > 0).then(|| {
        let small = ssd(SimDisk::default(), 0);
        mixfleet_runtime::pool::SsdConfig { bytes: 48 + ssd_blocks * (8 + 52 + 128), ..small }
    });
    let dram_bytes = dram_blocks * 8;
    let config =
        PoolConfig { block_bytes: 8, block_tokens: 1, dram_bytes, policy, events_max: 0, ..config(0, tier) };
    Pool::new(config, &make_region).expect("a new pool")
}

/// Hit blocks of `chain`, all of which is held then as far as it fits.
fn play(pool: &Pool, chain: &[BlockHash]) -> usize {
    let tokens: Vec<u32> = chain.iter().map(|hash| hash.0 as u32).collect();
    let mut lease = pool.lease(chain, &tokens);
    let hits = lease.len();
    for (at, hash) in chain.iter().enumerate() {
        if at < hits {
            assert_eq!(lease.load(at).expect("pinned"), hash.0.to_le_bytes());
        } else if !matches!(
            lease.put(&hash.0.to_le_bytes()).expect("the right size"),
            Put::Stored | Put::Held
        ) {
            break;
        }
    }
    hits
}

#[test]
fn the_pool_hits_what_the_simulator_says() {
    let Some(chains) = chains() else { return };
    let references: usize = chains.iter().map(Vec::len).sum();
    // An independent replay of the trace, which orders the blocks of one request otherwise: hence the tolerance.
    let known = [(100_000, 0.3637), (50_000, 0.3546), (30_000, 0.3257), (10_000, 0.2112), (1_000, 0.0445)];
    for (blocks, rate) in known {
        let hits = play_both(&chains, blocks, CachePolicy::Lru) as f64 / references as f64;
        eprintln!("{hits:.4} of the blocks hit with {blocks} blocks");
        assert!((hits - rate).abs() < 0.0005, "{blocks} blocks: {hits}");
    }
    play_both(&chains, 10_000, CachePolicy::Lfu);
    play_both(&chains, 10_000, CachePolicy::LengthAware);
}

/// Hits of the pool, which for every request are those of the simulator's cache.
fn play_both(chains: &[Vec<BlockHash>], blocks: u64, policy: CachePolicy) -> usize {
    let (pool, mut cache) = (pool(blocks, 0, policy), BlockCache::new(blocks as usize, policy));
    let mut hits = 0;
    for chain in chains {
        let held = cache.longest_prefix(chain);
        assert_eq!(play(&pool, chain), held, "{policy:?}, {blocks} blocks");
        cache.insert(chain, &mut Vec::new());
        hits += held;
    }
    hits
}

#[test]
fn two_tiers_hit_what_two_caches_would() {
    let Some(chains) = chains() else { return };
    let (dram_blocks, ssd_blocks) = (2_000, 30_000);
    let pool = pool(dram_blocks, ssd_blocks, CachePolicy::Lru);
    let mut dram = BlockCache::new(dram_blocks as usize, CachePolicy::Lru);
    let mut ssd = BlockCache::new(ssd_blocks as usize, CachePolicy::Lru);
    let (mut hits, mut references) = (0, 0);
    for chain in &chains {
        let held = chain.iter().take_while(|&&key| dram.contains(key) || ssd.contains(key)).count();
        assert_eq!(play(&pool, chain), held);
        if chain[..held].iter().any(|&key| !dram.contains(key)) {
            ssd.touch(chain);
        }
        let mut evicted = Vec::new();
        dram.insert(chain, &mut evicted);
        evicted.iter().for_each(|&key| ssd.insert(&[key], &mut Vec::new()));
        hits += held;
        references += chain.len();
    }
    let stats = pool.stats();
    assert_eq!((stats.hits_dram + stats.hits_ssd) as usize, hits);
    assert!(stats.bad == 0 && stats.collisions == 0 && stats.lost == 0, "{stats:?}");
    eprintln!(
        "{:.4} of the blocks hit with {dram_blocks} + {ssd_blocks} blocks",
        hits as f64 / f64::from(references as u32)
    );
}
