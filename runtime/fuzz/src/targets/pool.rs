//! What a pool of KV finds on its disk.

use super::refused;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::random;
use mixfleet_runtime::pool::disk::{Disk, SimDisk};
use mixfleet_runtime::pool::{Pool, PoolConfig, SSD_TIMEOUT, SsdConfig};
use mixfleet_scheduler::kv::{BlockHash, CachePolicy};
use mixfleet_wire::HostRegion;
use std::sync::{Arc, LazyLock};

const BLOCK_BYTES: u64 = 32;
const BLOCK_TOKENS: u32 = 2;
const KEYS: std::ops::Range<u64> = 1..7;
const FILES: [&str; 4] = ["meta", "journal", "blocks", "journal.new"];

fn open(disk: SimDisk) -> Result<Pool, mixfleet_runtime::pool::PoolError> {
    let ssd = SsdConfig { disk: Arc::new(disk), bytes: 4096, wipe: false, timeout: SSD_TIMEOUT };
    let config = PoolConfig {
        block_bytes: BLOCK_BYTES,
        block_tokens: BLOCK_TOKENS,
        namespace: 5,
        dram_bytes: 2 * BLOCK_BYTES,
        ssd: Some(ssd),
        policy: CachePolicy::Lru,
        events_max: 1 << 10,
    };
    let region = |bytes: u64| -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
        Ok(Arc::new(HostRegion::new(bytes as usize)?))
    };
    Pool::new(config, &region)
}

fn tokens(key: u64) -> Vec<u32> {
    (0..u64::from(BLOCK_TOKENS)).map(|at| random::bits(key, at) as u32).collect()
}

fn content(key: u64) -> Vec<u8> {
    (0..BLOCK_BYTES / 8).flat_map(|at| random::bits(!key, at).to_le_bytes()).collect()
}

/// The disk of a pool that holds the blocks of all keys.
static DISK: LazyLock<SimDisk> = LazyLock::new(|| {
    let disk = SimDisk::default();
    let pool = open(disk.clone()).expect("an empty disk");
    for key in KEYS {
        pool.put(BlockHash(key), &tokens(key), &content(key)).expect("a block of the right size");
    }
    pool.write_back(&mut || true);
    pool.sync().expect("a sound disk");
    drop(pool);
    assert_eq!(FILES.iter().filter(|file| disk.len(file).is_ok_and(|bytes| bytes > Some(0))).count(), 3);
    let pool = open(disk.restart()).expect("its own disk");
    assert!(KEYS.filter(|key| pool.get(BlockHash(*key), &tokens(*key)).is_some()).count() >= 4);
    disk
});

/// Changes files as the input says: which one, how, where (2 bytes), how many bytes, and these.
fn change(disk: &SimDisk, mut script: &[u8]) -> std::io::Result<()> {
    while let Some((head, rest)) = script.split_first_chunk::<5>() {
        let [file, how, low, high, bytes] = *head;
        let (data, rest) = rest.split_at(rest.len().min(bytes.into()));
        script = rest;
        let file = FILES[usize::from(file) % FILES.len()];
        let at = u64::from(u16::from_le_bytes([low, high])) % (disk.len(file)?.unwrap_or(0) + 1);
        match how % 3 {
            0 => disk.write_at(file, at, data)?,
            1 => disk.cut(file, at)?,
            _ => {
                disk.cut(file, 0)?;
                disk.write_at(file, 0, data)?;
            }
        }
    }
    Ok(())
}

/// What is served is what was stored, whatever became of the files; and the pool goes on.
pub(super) fn files(bytes: &[u8]) -> bool {
    let disk = DISK.restart();
    change(&disk, bytes).expect("a disk in memory");
    let pool = match open(disk) {
        Ok(pool) => pool,
        Err(error) => return refused(&error),
    };
    for key in KEYS {
        if let Some(lease) = pool.get(BlockHash(key), &tokens(key)) {
            assert_eq!(lease.load(0).expect("it is pinned"), content(key), "block {key}");
        }
        assert!(pool.get(BlockHash(key), &tokens(key + 1)).is_none(), "block {key} for another prompt");
    }
    let next = KEYS.end;
    pool.put(BlockHash(next), &tokens(next), &content(next)).expect("a block of the right size");
    let lease = pool.get(BlockHash(next), &tokens(next)).expect("it was just put");
    assert_eq!(lease.load(0).expect("it is pinned"), content(next));
    drop(lease);
    pool.write_back(&mut || true);
    true
}
