//! What the KV pool does on this machine, each figure beside the plain operation in the same run.
//!
//! `cargo run --release -p mixfleet-runtime --example pool -- DIRECTORY`: about 3 GB are written there.
#![allow(clippy::print_stdout)]

use mixfleet_hal::Result;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_runtime::pool::disk::RealDisk;
use mixfleet_runtime::pool::{Pool, PoolConfig, PoolError, SSD_TIMEOUT, SsdConfig};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_wire::HostRegion;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const TOKENS: u32 = 16;
const ROUNDS: usize = 3;
/// Written and read in a round.
const ROUND_BYTES: u64 = 512 << 20;

fn make_region(bytes: u64) -> Result<Arc<dyn SharedMemory>> {
    Ok(Arc::new(HostRegion::new(bytes as usize)?))
}

fn pool(
    directory: Option<&Path>,
    block_bytes: u64,
    dram: u64,
    ssd: u64,
) -> std::result::Result<Pool, PoolError> {
    let open = |path| -> std::result::Result<SsdConfig, PoolError> {
        let bytes = ssd * (block_bytes + 4096 + 512) + 4096;
        Ok(SsdConfig { disk: Arc::new(RealDisk::open(path)?), bytes, wipe: true, timeout: SSD_TIMEOUT })
    };
    let config = PoolConfig {
        block_bytes,
        block_tokens: TOKENS,
        namespace: 1,
        dram_bytes: dram * block_bytes,
        ssd: directory.map(open).transpose()?,
    };
    Pool::new(config, &make_region)
}

fn tokens(key: u64) -> [u32; TOKENS as usize] {
    [key as u32; TOKENS as usize]
}

fn keep(pool: &Pool, key: u64, bytes: &[u8]) {
    let _ = pool.keep(BlockHash(key), &tokens(key), &mut |place| {
        place.copy_from_slice(bytes);
        Ok(())
    });
}

/// GB/s of the best round: the machine's noise only ever takes.
fn best(mut round: impl FnMut() -> u64) -> f64 {
    let rates = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        round() as f64 / start.elapsed().as_secs_f64() / 1e9
    });
    rates.fold(0.0, f64::max)
}

fn host_memory(block_bytes: u64) -> std::result::Result<(), PoolError> {
    let blocks = ROUND_BYTES / block_bytes;
    let source: Vec<u8> = (0..block_bytes).map(|i| i as u8).collect();
    let mut arena = vec![1u8; ROUND_BYTES as usize];
    let copy = best(|| {
        arena
            .chunks_exact_mut(source.len())
            .for_each(|place| place.copy_from_slice(std::hint::black_box(&source)));
        std::hint::black_box(&mut arena);
        ROUND_BYTES
    });
    let mut target = source.clone();
    let back = best(|| {
        arena.chunks_exact(source.len()).for_each(|block| {
            target.copy_from_slice(block);
            std::hint::black_box(&mut target);
        });
        ROUND_BYTES
    });
    let hash = best(|| {
        arena
            .chunks_exact(source.len())
            .map(|block| twox_hash::XxHash3_64::oneshot(block) | 1)
            .map(|_| block_bytes)
            .sum()
    });
    drop(arena);
    let pool = pool(None, block_bytes, blocks, 0)?;
    let mut next = 0;
    // The first rounds touch fresh pages; the later ones evict.
    let put = best(|| {
        for key in next..next + blocks {
            keep(&pool, key, &source);
        }
        pool.take_events();
        next += blocks;
        ROUND_BYTES
    });
    let get = best(|| {
        for key in next - blocks..next {
            let lease = pool.lease(&[BlockHash(key)], &tokens(key));
            assert_eq!(lease.len(), 1, "host memory holds the last round");
            let _ = lease.view(0, &mut |payload| target.copy_from_slice(payload));
            std::hint::black_box(&mut target);
        }
        ROUND_BYTES
    });
    println!(
        "DRAM, blocks of {} KiB: copy in {copy:.2} GB/s, copy out {back:.2}, XXH3-64 {hash:.2}; keep {put:.2}, lease {get:.2}",
        block_bytes >> 10
    );
    Ok(())
}

fn disk(directory: &Path, block_bytes: u64) -> std::result::Result<(), PoolError> {
    let blocks = ROUND_BYTES / block_bytes;
    let source: Vec<u8> = (0..block_bytes).map(|i| i as u8).collect();
    let mut target = source.clone();
    let plain = directory.with_extension("plain");
    let io = |source| PoolError::Io { doing: format!("use {}", plain.display()), source };
    // Written over, as the pool's slots are; the first round makes the file.
    let mut file =
        File::options().create(true).truncate(true).write(true).read(true).open(&plain).map_err(io)?;
    let write = best(|| {
        let _ = std::io::Seek::rewind(&mut file);
        (0..blocks).map(|_| file.write_all(&source).map_or(0, |()| block_bytes)).sum()
    });
    let read = best(|| {
        let _ = std::io::Seek::rewind(&mut file);
        (0..blocks).map(|_| file.read_exact(&mut target).map_or(0, |()| block_bytes)).sum()
    });
    let _ = std::fs::remove_file(&plain);
    let pool = pool(Some(directory), block_bytes, 1, blocks)?;
    let mut next = 0;
    let put = best(|| {
        for key in next..next + blocks {
            keep(&pool, key, &source);
        }
        pool.take_events();
        next += blocks;
        ROUND_BYTES
    });
    let get = best(|| {
        let mut bytes = 0;
        for key in next - blocks..next - 1 {
            let lease = pool.lease(&[BlockHash(key)], &tokens(key));
            assert_eq!(lease.len(), 1, "the disk holds the last round");
            let _ = lease.view(0, &mut |payload| target.copy_from_slice(payload));
            bytes += block_bytes;
        }
        bytes
    });
    let stats = pool.stats();
    println!(
        "disk, blocks of {} KiB, through the page cache: plain write {write:.2} GB/s, read {read:.2}; keep {put:.2}, lease {get:.2} ({} bad, {} lost)",
        block_bytes >> 10,
        stats.bad,
        stats.lost
    );
    Ok(())
}

fn reopen(directory: &Path) -> std::result::Result<(), PoolError> {
    const BLOCKS: u64 = 100_000;
    let source = vec![7u8; 4096];
    let first = pool(Some(directory), 4096, 1, BLOCKS)?;
    for key in 0..=BLOCKS {
        keep(&first, key, &source);
    }
    drop(first);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let again = pool(Some(directory), 4096, 1, BLOCKS)?;
        println!(
            "reopen of {} blocks of 4 KiB: {:.3} s",
            again.stats().ssd_blocks,
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn main() -> std::result::Result<(), PoolError> {
    let Some(directory) = std::env::args().nth(1) else {
        eprintln!("name an empty directory on the disk to be measured");
        std::process::exit(2);
    };
    let directory = Path::new(&directory);
    for block_bytes in [64 << 10, 2 << 20] {
        host_memory(block_bytes)?;
        disk(directory, block_bytes)?;
    }
    reopen(directory)
}
