//! What is served to whom, and who waits for whom.

use crate::support::{
    BLOCK_BYTES, Follower, config, content, lease, make_region, open, put, served, ssd, tokens,
};
use mixfleet_hal::{Error, Result};
use mixfleet_runtime::pool::disk::{Disk, SimDisk};
use mixfleet_runtime::pool::{Pool, PoolConfig, Put, Snapshot};
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::index::Change;
use mixfleet_scheduler::kv::{Applied, BlockHash, PrefixIndex, Tier};
use std::io;
use std::sync::{Arc, Barrier, Mutex};

#[test]
fn a_prompt_with_anothers_hash_gets_nothing_from_either_tier() {
    let pool = open(config(1, Some(ssd(SimDisk::default(), 4)))).expect("a new pool");
    put(&pool, 1);
    let stranger = tokens(99);
    for (where_it_is, collisions) in [(Tier::Dram, 1), (Tier::Ssd, 4)] {
        assert_eq!(pool.contains(BlockHash(1)), Some(where_it_is));
        assert!(pool.get(BlockHash(1), &stranger).is_none());
        assert_eq!(pool.stats().collisions, collisions);
        let put_there = pool.put(BlockHash(1), &stranger, &content(99, BLOCK_BYTES)).expect("the right size");
        assert_eq!(put_there, Put::Collision);
        assert!(pool.contains(BlockHash(1)) == Some(where_it_is));
        if where_it_is == Tier::Dram {
            assert_eq!(pool.stats().collisions, 2);
            put(&pool, 2);
            assert!(pool.get(BlockHash(1), &stranger).is_none());
        }
    }
    assert!(served(&pool, 1), "its own prompt still has it");
    assert_eq!(pool.stats().bad, 0);
}

#[test]
fn a_chain_ends_at_the_block_of_another_prompt() {
    let pool = open(config(8, None)).expect("a new pool");
    let mut first = lease(&pool, &[1, 2, 3]);
    for key in [1, 2, 3] {
        assert_eq!(first.put(&content(key, BLOCK_BYTES)).expect("the right size"), Put::Stored);
    }
    drop(first);
    let other = [tokens(1), tokens(50), tokens(3)].concat();
    let mut other = pool.lease(&[1, 2, 3].map(BlockHash), &other);
    assert_eq!(other.len(), 1);
    assert_eq!(other.put(&content(50, BLOCK_BYTES)).expect("the right size"), Put::Collision);
    drop(other);
    assert_eq!(lease(&pool, &[1, 2, 3]).len(), 3);
    // Without its tokens a block cannot be compared.
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
    assert!((pool.contains(BlockHash(1)), pool.stats().dram_blocks) == (None, 0));
    assert_eq!(keep(1, &bytes(1)).expect("bytes"), Put::Stored);
    assert_eq!(keep(1, &bytes(9)).expect("held"), Put::Held);
    assert!(served(&pool, 1));
    let lease = lease(&pool, &[1]);
    assert_eq!(keep(2, &bytes(2)).expect("no error"), Put::Full);
    drop(lease);
    assert_eq!(keep(2, &bytes(2)).expect("room"), Put::Stored);
    assert_eq!((asked, served(&pool, 2), served(&pool, 1)), (3, true, false));
}

#[test]
fn blocks_of_the_wrong_size_and_beyond_the_chain_are_refused() {
    let pool = open(config(8, None)).expect("a new pool");
    let error = pool.put(BlockHash(1), &tokens(1), &[0; 31]).expect_err("too short");
    assert!(error.detail.contains("31") && error.detail.contains("32"), "{error}");
    let error = pool.put(BlockHash(1), &[], &[0; 32]).expect_err("no tokens");
    assert!(error.detail.contains("no block"), "{error}");
    assert!(lease(&pool, &[1]).view(0, &mut |_| ()).is_err());
}

#[test]
fn a_lease_says_where_its_blocks_lie() {
    let pool = open(config(8, None)).expect("a new pool");
    put(&pool, 1);
    put(&pool, 2);
    for key in [1, 2] {
        let lease = lease(&pool, &[key]);
        let (region, offset) = lease.place(0).expect("pinned");
        let mut there = vec![0; BLOCK_BYTES as usize];
        pool.regions()[region].load(offset, &mut there).expect("in the region");
        assert_eq!(there, content(key, BLOCK_BYTES));
        assert_eq!(lease.digest(0).expect("pinned"), xxhash_rust::xxh3::xxh3_64(&there));
    }
}

/// Changes a bit of a block in host memory.
fn rot(pool: &Pool, key: u64) {
    let (region, offset) = lease(pool, &[key]).place(0).expect("pinned");
    pool.regions()[region].update(offset, BLOCK_BYTES, &mut |bytes| bytes[5] ^= 4).expect("in the region");
}

#[test]
fn a_block_that_rots_in_host_memory_is_dropped_told_and_brought_from_the_disk() {
    let pool = open(config(3, Some(ssd(SimDisk::default(), 8)))).expect("a new pool");
    (1..5).for_each(|key| {
        put(&pool, key);
    });
    // Back in host memory, and on the disk.
    assert!(served(&pool, 1));
    let mut follower = Follower::new(&pool.begin_to_follow());
    rot(&pool, 1);
    let [first, second] = [(); 2].map(|()| pool.get(BlockHash(1), &tokens(1)).expect("nobody knows"));
    assert!(!first.view(0, &mut |_| panic!("shown")).expect("pinned"), "a rotten block is served");
    assert!(!second.view(0, &mut |_| panic!("shown")).expect("pinned"), "a rotten block is served");
    assert_eq!(pool.stats().bad, 1);
    assert_eq!(pool.contains(BlockHash(1)), Some(Tier::Ssd));
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
        let lease = pool.get(BlockHash(1), &tokens(1)).expect("nobody knows");
        assert!(lease.load(0).is_err());
        drop(lease);
        assert!(pool.get(BlockHash(1), &tokens(1)).is_none());
        assert!(served(&pool, 2));
    }
    assert_eq!(pool.stats().bad, 5);
}

#[test]
fn the_index_follows_by_events_and_after_a_gap_by_a_snapshot() {
    let small = PoolConfig { events_max: 4, ..config(2, Some(ssd(SimDisk::default(), 4))) };
    let pool = open(small).expect("a new pool");
    let (mut index, who) = (PrefixIndex::default(), InstanceId(3));
    let resync = |index: &mut PrefixIndex| {
        let Snapshot { sequence, dram, ssd } = pool.snapshot();
        index.resync(who, sequence, &[(Tier::Dram, &dram), (Tier::Ssd, &ssd)])
    };
    assert_eq!(resync(&mut index), Applied::Done);
    let mut gaps = 0;
    for keys in [vec![1, 2], vec![3], vec![4, 5, 6, 7], vec![8]] {
        keys.into_iter().for_each(|key| {
            put(&pool, key);
        });
        let mut gap = false;
        for event in pool.take_events() {
            let hashes = [event.hash];
            let change = match event.stored {
                true => Change::Store(event.tier, &hashes),
                false => Change::Evict(event.tier, &hashes),
            };
            gap |= index.apply(who, event.sequence, change) != Applied::Done;
        }
        if gap {
            gaps += 1;
            assert_eq!(resync(&mut index), Applied::Done);
        }
        for key in 1..9 {
            let known = !index.longest_prefixes(&[BlockHash(key)]).is_empty();
            assert_eq!(known, pool.contains(BlockHash(key)).is_some(), "block {key}");
        }
    }
    assert!(gaps > 0);
}

/// Two reads must be under way at once, or neither ends.
struct Meeting(SimDisk, Barrier);

impl Disk for Meeting {
    fn names(&self) -> io::Result<Vec<String>> {
        self.0.names()
    }
    fn len(&self, file: &str) -> io::Result<Option<u64>> {
        self.0.len(file)
    }
    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> io::Result<usize> {
        if file == "blocks" {
            self.1.wait();
        }
        self.0.read_at(file, offset, data)
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
    let disk = Meeting(SimDisk::default(), Barrier::new(2));
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
                    let mut lease = lease(pool, &chain);
                    while lease.len() < 3 {
                        let put =
                            lease.put(&content(chain[lease.len()], BLOCK_BYTES)).expect("the right size");
                        if !matches!(put, Put::Stored | Put::Held) {
                            break;
                        }
                    }
                    crate::support::check(&lease, &chain);
                    drop(lease);
                    let mut follower = follower.lock().expect("nobody panics with it");
                    follower.follow(&pool.take_events());
                }
            });
        }
    });
    let mut follower = follower.into_inner().expect("nobody panicked");
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
        seen.lock().expect("nobody panics").push(bytes);
        make_region(bytes)
    };
    let big = PoolConfig { block_bytes: 100 << 20, dram_bytes: 500 << 20, ..config(1, None) };
    drop(Pool::new(big, &count).expect("it is only mapped"));
    assert_eq!(*counted.lock().expect("nobody panics"), [200 << 20, 200 << 20, 100 << 20]);
}
