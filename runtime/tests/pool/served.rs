//! Blocks are served only for the right tokens, and readers do not wait for each other.

use super::support::{
    BLOCK_BYTES, Follower, config, content, get, keep, lease, load, make_region, open, put, served, ssd,
    tier, tokens,
};
use mixfleet_hal::{Error, Result};
use mixfleet_runtime::pool::disk::{Disk, SimDisk};
use mixfleet_runtime::pool::{Kept, Pool, PoolConfig, Snapshot};
use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock};

#[test]
fn a_prompt_with_anothers_hash_gets_nothing_from_either_tier() {
    let pool = open(config(1, Some(ssd(SimDisk::default(), 4)))).expect("a new pool");
    put(&pool, 1);
    let stranger = tokens(99);
    let refused = |collisions| {
        assert!(get(&pool, BlockHash(1), &stranger).is_none());
        assert_eq!(pool.stats().collisions, collisions);
    };
    assert_eq!(tier(&pool, 1), Some(Tier::Dram));
    refused(1);
    assert_eq!(keep(&pool, BlockHash(1), &stranger, &content(99, BLOCK_BYTES)), Kept::Collision);
    refused(3);
    put(&pool, 2);
    assert_eq!(tier(&pool, 1), Some(Tier::Ssd));
    refused(4);
    // Storing does not check the disk: its copy of another prompt's block stays.
    assert_eq!(keep(&pool, BlockHash(1), &stranger, &content(99, BLOCK_BYTES)), Kept::Stored);
    assert!(!served(&pool, 1));
    put(&pool, 3);
    assert!(served(&pool, 1), "its own prompt still has it");
    assert_eq!(pool.stats().bad, 0);
}

#[test]
fn a_chain_ends_at_the_block_of_another_prompt() {
    let pool = open(config(8, None)).expect("a new pool");
    [1, 2, 3].iter().for_each(|&key| assert_eq!(put(&pool, key), Kept::Stored));
    let other = [tokens(1), tokens(50), tokens(3)].concat();
    assert_eq!(pool.lease(&[1, 2, 3].map(BlockHash), &other).len(), 1);
    assert_eq!(lease(&pool, &[1, 2, 3]).len(), 3);
    // A block cannot be compared without its tokens.
    assert_eq!(pool.lease(&[1, 2].map(BlockHash), &tokens(1)).len(), 1);
    assert_eq!(pool.lease(&[1, 2].map(BlockHash), &tokens(1)[..1]).len(), 0);
}

#[test]
fn what_is_given_up_is_taken_in_once_and_only_if_its_bytes_come() {
    let pool = open(config(1, None)).expect("a new pool");
    let mut asked = 0;
    let mut keep = |key: u64, fill: &dyn Fn(&mut [u8]) -> Result<()>| {
        pool.keep(BlockHash(key), &tokens(key), &mut |place| {
            asked += 1;
            fill(place)
        })
    };
    let bytes = |key| {
        move |place: &mut [u8]| {
            place.copy_from_slice(&content(key, BLOCK_BYTES));
            Ok(())
        }
    };
    let lost = keep(1, &|_| Err(Error::invalid("the device is gone"))).expect_err("no bytes");
    assert!(lost.detail.contains("gone"), "{lost}");
    assert!((tier(&pool, 1), pool.stats().dram_blocks) == (None, 0));
    assert_eq!(keep(1, &bytes(1)).expect("bytes"), Kept::Stored);
    assert_eq!(keep(1, &bytes(9)).expect("held"), Kept::Held);
    assert!(served(&pool, 1));
    let lease = lease(&pool, &[1]);
    assert_eq!(keep(2, &bytes(2)).expect("no error"), Kept::Full);
    drop(lease);
    assert_eq!(keep(2, &bytes(2)).expect("room"), Kept::Stored);
    assert_eq!((asked, served(&pool, 2), served(&pool, 1)), (3, true, false));
}

#[test]
fn blocks_without_their_tokens_and_beyond_the_lease_are_refused() {
    let pool = open(config(8, None)).expect("a new pool");
    let error = pool.keep(BlockHash(1), &[], &mut |_| panic!("asked for")).expect_err("no tokens");
    assert!(error.detail.contains("0 tokens"), "{error}");
    assert!(lease(&pool, &[1]).view(0, &mut |_| ()).is_err());
}

/// Flips a bit of a block in host memory.
fn rot(pool: &Pool, key: u64) {
    let content = content(key, BLOCK_BYTES);
    for region in pool.regions() {
        let flip = &mut |bytes: &mut [u8]| {
            let there = bytes.chunks_exact_mut(content.len()).filter(|block| *block == content);
            there.for_each(|block| block[5] ^= 4);
        };
        region.update(0, region.size_bytes(), flip).expect("in the region");
    }
}

#[test]
fn a_block_that_rots_in_host_memory_is_dropped_told_and_brought_from_the_disk() {
    let pool = open(config(3, Some(ssd(SimDisk::default(), 8)))).expect("a new pool");
    (1..5).for_each(|key| {
        put(&pool, key);
    });
    // It is in host memory again, and on the disk.
    assert!(served(&pool, 1));
    let mut follower = Follower::new(&pool.begin_to_follow());
    rot(&pool, 1);
    let [first, second] = [(); 2].map(|()| get(&pool, BlockHash(1), &tokens(1)).expect("no poison"));
    assert!(!first.view(0, &mut |_| panic!("shown")).expect("pinned"), "a rotten block is served");
    assert!(!second.view(0, &mut |_| panic!("shown")).expect("pinned"), "a rotten block is served");
    assert_eq!(pool.stats().bad, 1);
    assert_eq!(tier(&pool, 1), Some(Tier::Ssd));
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
    drop(first);
    drop(second);
    assert!(served(&pool, 1), "the disk has it whole");
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
}

#[test]
fn a_block_that_rots_in_host_memory_alone_is_gone_and_its_room_is_used_again() {
    let pool = open(config(2, None)).expect("a new pool");
    for _ in 0..5 {
        put(&pool, 1);
        put(&pool, 2);
        rot(&pool, 1);
        let lease = get(&pool, BlockHash(1), &tokens(1)).expect("no poison");
        assert!(load(&lease, 0).is_none());
        drop(lease);
        assert!(get(&pool, BlockHash(1), &tokens(1)).is_none());
        assert!(served(&pool, 2));
    }
    assert_eq!(pool.stats().bad, 5);
}

type Read<'a> = dyn FnMut() -> io::Result<usize> + 'a;
type Around = dyn Fn(&mut Read) -> io::Result<usize> + Send + Sync;

/// A disk that reads blocks by a function, which may do other things before and after.
struct AroundReads(SimDisk, Box<Around>);

impl Disk for AroundReads {
    fn names(&self) -> io::Result<Vec<String>> {
        self.0.names()
    }
    fn len(&self, file: &str) -> io::Result<Option<u64>> {
        self.0.len(file)
    }
    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> io::Result<usize> {
        let mut read = || self.0.read_at(file, offset, data);
        if file == "blocks" { self.1(&mut read) } else { read() }
    }
    fn write_at(&self, file: &str, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(file, offset, data)
    }
    fn cut(&self, file: &str, bytes: u64) -> io::Result<()> {
        self.0.cut(file, bytes)
    }
    fn sync(&self, file: &str) -> io::Result<()> {
        self.0.sync(file)
    }
    fn sync_names(&self) -> io::Result<()> {
        self.0.sync_names()
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }
    fn remove(&self, file: &str) -> io::Result<()> {
        self.0.remove(file)
    }
}

#[test]
fn reads_overlap() {
    let both = Barrier::new(2);
    let in_pairs = move |read: &mut Read| {
        both.wait();
        read()
    };
    let disk = AroundReads(SimDisk::default(), Box::new(in_pairs));
    let pool = open(config(4, Some(ssd(disk, 8)))).expect("a new pool");
    (0..8).for_each(|key| {
        put(&pool, key);
    });
    std::thread::scope(|scope| {
        let readers = [0, 1].map(|key| {
            scope.spawn({
                let pool = &pool;
                move || served(pool, key)
            })
        });
        assert!(readers.into_iter().all(|reader| reader.join().expect("it ends")));
    });
}

#[test]
fn a_block_that_moves_back_into_its_slot_during_a_read_is_not_taken_for_a_bad_one() {
    let shared: Arc<OnceLock<Pool>> = Arc::default();
    let away_and_back = {
        let shared = shared.clone();
        let first = AtomicBool::new(true);
        move |read: &mut Read| {
            let pool = shared.get().expect("it is open by now");
            if !first.swap(false, Ordering::Relaxed) {
                return read();
            }
            put(pool, 3);
            // The one slot of the disk holds block 2 now.
            let bytes = read();
            put(pool, 1);
            put(pool, 4);
            bytes
        }
    };
    let disk = AroundReads(SimDisk::default(), Box::new(away_and_back));
    let pool = shared.get_or_init(|| open(config(1, Some(ssd(disk, 1)))).expect("a new pool"));
    put(pool, 1);
    put(pool, 2);
    assert!(get(pool, BlockHash(1), &tokens(1)).is_none(), "block 2 was read");
    assert_eq!((pool.stats().bad, tier(pool, 1)), (0, Some(Tier::Ssd)));
    assert!(served(pool, 1));
}

#[test]
fn many_threads_get_right_blocks_and_true_events() {
    let pool = open(config(6, Some(ssd(SimDisk::default(), 20)))).expect("a new pool");
    let follower = Mutex::new(Follower::new(&Snapshot::default()));
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (pool, follower) = (&pool, &follower);
            scope.spawn(move || {
                for step in 0..2000 {
                    let start = mixfleet_hal::random::bits(seed, step) % 12 * 4;
                    let chain = [start, start + 1, start + 2];
                    let lease = lease(pool, &chain);
                    chain[lease.len()..].iter().for_each(|&key| _ = put(pool, key));
                    super::support::check(&lease, &chain);
                    drop(lease);
                    let mut follower = follower.lock().expect("no holder panics");
                    follower.follow(&pool.take_events());
                }
            });
        }
    });
    let mut follower = follower.into_inner().expect("no holder panicked");
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
    let stats = pool.stats();
    assert!(stats.bad == 0 && stats.hits_ssd > 0 && stats.hits_dram > 0, "{stats:?}");
}

#[test]
fn refused_memory_is_an_error() {
    let refuse = |bytes| Err(mixfleet_hal::Error::invalid(format!("no {bytes} bytes")));
    assert!(Pool::new(config(8, None), &refuse).is_err());
    let counted = Arc::new(Mutex::new(Vec::new()));
    let seen = counted.clone();
    let count = move |bytes| {
        seen.lock().expect("no holder panics").push(bytes);
        make_region(bytes)
    };
    let big = PoolConfig { block_bytes: 100 << 20, dram_bytes: 500 << 20, ..config(1, None) };
    drop(Pool::new(big, &count).expect("it is only mapped"));
    assert_eq!(*counted.lock().expect("no holder panics"), [200 << 20, 200 << 20, 100 << 20]);
}
