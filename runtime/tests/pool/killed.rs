//! A process that is killed while it stores blocks on a real disk, repeatedly in the same directory.
//!
//! `MIXFLEET_POOL_KILLS=100 cargo test -p mixfleet-runtime --test all killed` kills it 100 times; the default
//! is 20.

use super::support::{ScratchDirectory, content, get, keep, load, make_region, tokens};
use mixfleet_hal::random::{self, Stream};
use mixfleet_runtime::pool::disk::RealDisk;
use mixfleet_runtime::pool::{Pool, PoolConfig, SSD_TIMEOUT, SsdConfig};
use mixfleet_scheduler::kv::BlockHash;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

const BLOCK_BYTES: u64 = 64 << 10;
const KEYS: u64 = 600;
const CHILD: &str = "MIXFLEET_POOL_CHILD";
const SEED: &str = "MIXFLEET_POOL_SEED";

fn pool(directory: &Path) -> Pool {
    let disk = RealDisk::open(directory).expect("the directory is not in use");
    let ssd = SsdConfig {
        disk: std::sync::Arc::new(disk),
        bytes: 300 * (BLOCK_BYTES + 4096 + 128),
        wipe: false,
        timeout: SSD_TIMEOUT,
    };
    let config = PoolConfig {
        block_bytes: BLOCK_BYTES,
        block_tokens: 2,
        namespace: 1,
        dram_bytes: 4 * BLOCK_BYTES,
        ssd: Some(ssd),
    };
    Pool::new(config, &make_region).expect("a killed pool opens again")
}

/// Runs in the process that will be killed.
fn store_until_killed(directory: &str, seed: &str) {
    let pool = pool(Path::new(directory));
    let mut random = Stream::new(seed.parse().expect("a number"));
    // The parent kills this process.
    for step in 0u64.. {
        let key = random.below(KEYS);
        keep(&pool, BlockHash(key), &tokens(key), &content(key, BLOCK_BYTES));
        pool.take_events();
        if step % 16 == 15 {
            let mut pipe = std::io::stdout();
            writeln!(pipe, "stored").and_then(|()| pipe.flush()).expect("the parent reads");
        }
    }
}

#[test]
fn no_bad_block_is_served_after_kill_9() {
    // This program is started again below.
    if let (Ok(directory), Ok(seed)) = (std::env::var(CHILD), std::env::var(SEED)) {
        return store_until_killed(&directory, &seed);
    }
    let kills: u64 =
        std::env::var("MIXFLEET_POOL_KILLS").map_or(20, |kills| kills.parse().expect("a number"));
    let directory = ScratchDirectory::new("killed");
    let (mut whole, mut least) = (0, usize::MAX);
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().expect("this program has a file"))
            .args(["--exact", "--nocapture", "pool::killed::no_bad_block_is_served_after_kill_9"])
            .env(CHILD, &directory.0)
            .env(SEED, kill.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let wanted = 1 + random::bits(7, kill) % 20;
        let stored = (0..)
            .zip(lines.by_ref())
            .filter(|(_, line)| line.as_ref().is_ok_and(|line| line.contains("stored")));
        assert_eq!(stored.take(wanted as usize).count() as u64, wanted, "the child ended by itself");
        child.kill().expect("it runs");
        child.wait().expect("it ends");

        let pool = pool(&directory.0);
        let known = pool.snapshot().ssd;
        for &hash in &known {
            let lease =
                get(&pool, hash, &tokens(hash.0)).unwrap_or_else(|| panic!("kill {kill}: {hash:?} is bad"));
            assert_eq!(load(&lease, 0), Some(content(hash.0, BLOCK_BYTES)), "kill {kill}");
        }
        assert_eq!(pool.stats().bad, 0, "a killed process leaves no torn block in the journal");
        whole += known.len();
        least = least.min(known.len());
    }
    assert!(least > 0);
    eprintln!("{kills} kills; {whole} blocks served, all right; at least {least} after a kill");
}
