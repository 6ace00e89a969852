//! At the end of a process, blocks that are only in host memory are written to the disk.

use super::support::{Follower, config, open, put, served, ssd};
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{Pool, WrittenBack};
use mixfleet_scheduler::kv::BlockHash;

fn fill(pool: &Pool, keys: std::ops::RangeInclusive<u64>) {
    for key in keys {
        put(pool, key);
    }
}

fn on_disk(pool: &Pool) -> Vec<u64> {
    pool.snapshot().ssd.into_iter().map(|BlockHash(key)| key).collect()
}

#[test]
fn all_of_host_memory_is_there_for_the_next_process() {
    let disk = SimDisk::default();
    let pool = open(config(4, Some(ssd(disk.clone(), 8)))).unwrap();
    let mut follower = Follower::new(&pool.snapshot());
    fill(&pool, 1..=5);
    assert_eq!(on_disk(&pool), [1]);
    assert_eq!(pool.write_back(&mut || true), WrittenBack { blocks: 4, of: 4 });
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
    // Blocks that are there are not written again.
    assert_eq!(pool.write_back(&mut || true), WrittenBack { blocks: 4, of: 4 });
    assert_eq!(pool.stats().demoted, 5);
    pool.sync().unwrap();
    let next = open(config(4, Some(ssd(disk.restart(), 8)))).unwrap();
    assert_eq!(on_disk(&next), [1, 2, 3, 4, 5]);
    assert!((1..=5).all(|key| served(&next, key)));
}

#[test]
fn a_small_disk_gets_what_was_used_last_and_gives_it_up_last() {
    let disk = SimDisk::default();
    let pool = open(config(4, Some(ssd(disk.clone(), 2)))).unwrap();
    fill(&pool, 1..=6);
    assert_eq!(on_disk(&pool), [1, 2]);
    assert!(served(&pool, 3));
    assert_eq!(pool.write_back(&mut || true), WrittenBack { blocks: 2, of: 2 });
    assert_eq!(on_disk(&pool), [3, 6]);
    pool.sync().unwrap();
    let next = open(config(1, Some(ssd(disk.restart(), 2)))).unwrap();
    fill(&next, 7..=8);
    assert_eq!(on_disk(&next), [3, 7]);
}

#[test]
fn what_is_on_the_disk_already_does_not_go_for_what_comes() {
    let pool = open(config(4, Some(ssd(SimDisk::default(), 3)))).unwrap();
    fill(&pool, 1..=5);
    // Both 1, on the disk, and 2, for which it leaves host memory again, are in both places or on the disk
    // then.
    assert!(served(&pool, 1));
    assert_eq!(on_disk(&pool), [1, 2]);
    assert_eq!(pool.write_back(&mut || true), WrittenBack { blocks: 3, of: 3 });
    assert_eq!(on_disk(&pool), [1, 4, 5]);
}

#[test]
fn where_time_is_short_what_was_used_last_is_there() {
    let pool = open(config(4, Some(ssd(SimDisk::default(), 8)))).unwrap();
    fill(&pool, 1..=4);
    let mut left = 2;
    let mut go_on = || {
        left -= 1;
        left >= 0
    };
    assert_eq!(pool.write_back(&mut go_on), WrittenBack { blocks: 2, of: 4 });
    assert_eq!(on_disk(&pool), [3, 4]);
}

#[test]
fn what_is_pinned_stays_and_a_disk_that_fails_gets_nothing() {
    let pool = open(config(4, Some(ssd(SimDisk::default(), 8)))).unwrap();
    fill(&pool, 1..=2);
    let lease = super::support::lease(&pool, &[2]);
    assert_eq!(pool.write_back(&mut || true), WrittenBack { blocks: 1, of: 1 });
    drop(lease);

    let disk = SimDisk::default();
    let pool = open(config(4, Some(ssd(disk.clone(), 8)))).unwrap();
    disk.set_plan(FaultPlan::at_rate(Fault::Fail, 1.0, 1));
    fill(&pool, 1..=3);
    assert_eq!(pool.write_back(&mut || true), WrittenBack { blocks: 0, of: 3 });
    assert!((1..=3).all(|key| served(&pool, key)));

    let without = open(config(4, None)).unwrap();
    fill(&without, 1..=3);
    assert_eq!(without.write_back(&mut || true), WrittenBack::default());
}
