//! Parsers of the files of a KV pool on a disk.

use super::refused;
use mixfleet_hal::cast::{low_u32, to_usize};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::random;
use mixfleet_runtime::pool::disk::{Disk, SimDisk};
use mixfleet_runtime::pool::{Pool, PoolConfig, SSD_TIMEOUT, SsdConfig};
use mixfleet_scheduler::kv::BlockHash;
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
    };
    let region = |bytes: u64| -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
        Ok(Arc::new(HostRegion::new(to_usize(bytes))?))
    };
    Pool::new(config, &region)
}

fn tokens(key: u64) -> Vec<u32> {
    (0..u64::from(BLOCK_TOKENS)).map(|at| low_u32(random::bits(key, at))).collect()
}

fn content(key: u64) -> Vec<u8> {
    (0..BLOCK_BYTES / 8).flat_map(|at| random::bits(!key, at).to_le_bytes()).collect()
}

fn keep(pool: &Pool, key: u64) {
    let kept = pool.keep(BlockHash(key), &tokens(key), &mut |place| {
        place.copy_from_slice(&content(key));
        Ok(())
    });
    kept.expect("a block of the right size");
}

/// The bytes that a prompt with `tokens` gets for the block `key`.
fn served(pool: &Pool, key: u64, tokens: &[u32]) -> Option<Vec<u8>> {
    let (lease, mut bytes) = (pool.lease(&[BlockHash(key)], tokens), Vec::new());
    lease.view(0, &mut |payload| bytes.extend_from_slice(payload)).is_ok_and(|intact| intact).then_some(bytes)
}

/// The disk of a pool that holds the blocks of all keys.
static DISK: LazyLock<SimDisk> = LazyLock::new(|| {
    let disk = SimDisk::default();
    let pool = open(disk.clone()).expect("an empty disk");
    for key in KEYS {
        keep(&pool, key);
    }
    pool.write_back(&mut || true);
    pool.sync().expect("a sound disk");
    drop(pool);
    assert_eq!(FILES.iter().filter(|file| disk.len(file).is_ok_and(|bytes| bytes > Some(0))).count(), 3);
    let pool = open(disk.restart()).expect("its own disk");
    assert!(KEYS.filter(|key| served(&pool, *key, &tokens(*key)).is_some()).count() >= 4);
    disk
});

/// Changes files as the input says: which file, how, where (2 bytes), how many bytes, and the new bytes.
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

/// Checks that only stored bytes are served, whatever the files contain, and that the pool keeps working.
pub(super) fn files(bytes: &[u8]) -> bool {
    let disk = DISK.restart();
    change(&disk, bytes).expect("a disk in memory");
    let pool = match open(disk) {
        Ok(pool) => pool,
        Err(error) => return refused(&error),
    };
    for key in KEYS {
        if let Some(bytes) = served(&pool, key, &tokens(key)) {
            assert_eq!(bytes, content(key), "block {key}");
        }
        assert!(served(&pool, key, &tokens(key + 1)).is_none(), "block {key} for another prompt");
    }
    let next = KEYS.end;
    keep(&pool, next);
    assert_eq!(served(&pool, next, &tokens(next)), Some(content(next)));
    pool.write_back(&mut || true);
    true
}
