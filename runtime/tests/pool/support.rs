//! Small blocks whose content follows from their key.

use mixfleet_hal::Result;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::random;
use mixfleet_runtime::pool::disk::Disk;
use mixfleet_runtime::pool::{
    Kept, Lease, Pool, PoolConfig, PoolError, PoolEvent, SSD_TIMEOUT, Snapshot, SsdConfig,
};
use mixfleet_scheduler::kv::{BlockHash, Tier};
use mixfleet_wire::HostRegion;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) const BLOCK_BYTES: u64 = 32;
pub(crate) const BLOCK_TOKENS: u32 = 2;
/// The frame of such a block (32 + 48 + 4 per token) and its records (4 of 32), and the file with the
/// directory's owner.
const SLOT_BYTES: u64 = 88 + 128;
const META_BYTES: u64 = 48;

pub(crate) fn make_region(bytes: u64) -> Result<Arc<dyn SharedMemory>> {
    Ok(Arc::new(HostRegion::new(bytes as usize)?))
}

/// A pool's disk with room for this many small blocks.
pub(crate) fn ssd(disk: impl Disk + 'static, blocks: u64) -> SsdConfig {
    SsdConfig {
        disk: Arc::new(disk),
        bytes: META_BYTES + blocks * SLOT_BYTES,
        wipe: false,
        timeout: SSD_TIMEOUT,
    }
}

pub(crate) fn config(dram_blocks: u64, ssd: Option<SsdConfig>) -> PoolConfig {
    PoolConfig {
        block_bytes: BLOCK_BYTES,
        block_tokens: BLOCK_TOKENS,
        namespace: 5,
        dram_bytes: dram_blocks * BLOCK_BYTES,
        ssd,
    }
}

pub(crate) fn open(config: PoolConfig) -> std::result::Result<Pool, PoolError> {
    Pool::new(config, &make_region)
}

/// The token ids of the block with this key.
pub(crate) fn tokens(key: u64) -> Vec<u32> {
    (0..u64::from(BLOCK_TOKENS)).map(|i| random::bits(key, i) as u32).collect()
}

/// The KV of the block with this key.
pub(crate) fn content(key: u64, bytes: u64) -> Vec<u8> {
    (0..bytes.div_ceil(8)).flat_map(|i| random::bits(!key, i).to_le_bytes()).take(bytes as usize).collect()
}

/// Stores a block in the pool.
pub(crate) fn keep(pool: &Pool, hash: BlockHash, tokens: &[u32], bytes: &[u8]) -> Kept {
    let kept = pool.keep(hash, tokens, &mut |place| {
        place.copy_from_slice(bytes);
        Ok(())
    });
    kept.expect("a block of the right size")
}

pub(crate) fn put(pool: &Pool, key: u64) -> Kept {
    keep(pool, BlockHash(key), &tokens(key), &content(key, BLOCK_BYTES))
}

/// A lease on one block that stands for itself; none if it cannot be served.
pub(crate) fn get(pool: &Pool, hash: BlockHash, tokens: &[u32]) -> Option<Lease> {
    Some(pool.lease(&[hash], tokens)).filter(|lease| lease.len() == 1)
}

/// The bytes of a pinned block; none if they differ from the stored ones.
pub(crate) fn load(lease: &Lease, block: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    lease.view(block, &mut |payload| bytes.extend_from_slice(payload)).expect("it is pinned").then_some(bytes)
}

/// The fastest tier that holds a block.
pub(crate) fn tier(pool: &Pool, key: u64) -> Option<Tier> {
    let Snapshot { dram, ssd } = pool.snapshot();
    let mut tiers = [(Tier::Dram, dram), (Tier::Ssd, ssd)].into_iter();
    tiers.find(|(_, held)| held.contains(&BlockHash(key))).map(|(tier, _)| tier)
}

/// Whether the block is served; if it is, its content must be right.
pub(crate) fn served(pool: &Pool, key: u64) -> bool {
    let Some(lease) = get(pool, BlockHash(key), &tokens(key)) else { return false };
    assert_eq!(load(&lease, 0), Some(content(key, BLOCK_BYTES)), "block {key}");
    true
}

/// A lease on a chain of such blocks, whose content must be right.
pub(crate) fn lease(pool: &Pool, chain: &[u64]) -> Lease {
    let hashes: Vec<BlockHash> = chain.iter().map(|&key| BlockHash(key)).collect();
    let all: Vec<u32> = chain.iter().flat_map(|&key| tokens(key)).collect();
    let lease = pool.lease(&hashes, &all);
    check(&lease, chain);
    lease
}

pub(crate) fn check(lease: &Lease, chain: &[u64]) {
    for (at, &key) in chain[..lease.len()].iter().enumerate() {
        assert_eq!(load(lease, at), Some(content(key, BLOCK_BYTES)), "block {key}");
    }
}

/// The pool's content by its events.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    held: BTreeSet<(Tier, BlockHash)>,
}

impl Follower {
    pub(crate) fn new(start: &Snapshot) -> Self {
        Follower { held: set(start) }
    }

    /// Applies events: no block may be stored twice, or evicted without having been stored.
    pub(crate) fn follow(&mut self, events: &[PoolEvent]) {
        for &PoolEvent { hash, tier, stored } in events {
            let news = if stored { self.held.insert((tier, hash)) } else { self.held.remove(&(tier, hash)) };
            assert!(news, "told what was known: {hash:?} in {tier:?}, stored: {stored}");
        }
    }

    pub(crate) fn assert_agrees(&self, truth: &Snapshot) {
        assert_eq!(self.held, set(truth));
    }
}

fn set(snapshot: &Snapshot) -> BTreeSet<(Tier, BlockHash)> {
    let dram = snapshot.dram.iter().map(|&hash| (Tier::Dram, hash));
    dram.chain(snapshot.ssd.iter().map(|&hash| (Tier::Ssd, hash))).collect()
}

/// A new, empty directory that is deleted when this is dropped.
pub(crate) struct ScratchDirectory(pub(crate) PathBuf);

impl ScratchDirectory {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("pool-{name}-{}", std::process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("the target directory is writable");
        ScratchDirectory(path)
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
