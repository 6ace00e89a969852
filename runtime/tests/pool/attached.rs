//! A disk that comes to a pool in use.

use super::support::{Follower, config, open, put, served, ssd};
use mixfleet_runtime::pool::disk::{Disk, SimDisk};
use mixfleet_runtime::pool::{Pool, PoolError, SsdConfig};
use mixfleet_scheduler::kv::BlockHash;

/// A disk with the blocks 0 to 4 of a pool of namespace 5.
fn used_disk() -> SimDisk {
    let disk = SimDisk::default();
    let pool = open(config(1, Some(ssd(disk.clone(), 8)))).expect("a new pool");
    (0..6).for_each(|key| {
        put(&pool, key);
    });
    disk.restart()
}

fn on_disk(pool: &Pool) -> Vec<u64> {
    pool.snapshot().ssd.into_iter().map(|BlockHash(key)| key).collect()
}

#[test]
fn what_lies_on_it_is_told_and_served_and_what_was_in_host_memory_stays() {
    let pool = open(config(2, None)).expect("a new pool");
    (20..22).for_each(|key| {
        put(&pool, key);
    });
    let mut follower = Follower::new(&pool.begin_to_follow());
    assert!(!pool.has_disk() && !served(&pool, 3));
    pool.attach(ssd(used_disk(), 8), 5).expect("its own blocks");
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
    assert_eq!((pool.has_disk(), on_disk(&pool)), (true, vec![0, 1, 2, 3, 4]));
    assert!([20, 21, 3].iter().all(|&key| served(&pool, key)));
    assert_eq!(on_disk(&pool), [0, 1, 2, 3, 4, 20], "host memory gives up blocks to it");
}

#[test]
fn blocks_of_another_namespace_are_deleted_and_never_used() {
    let disk = used_disk();
    let pool = open(config(2, None)).expect("a new pool");
    let refused = pool.attach(ssd(disk.clone(), 8), 6).expect_err("they are not its own");
    assert!(matches!(refused, PoolError::Mismatch(_)), "{refused}");
    assert!(!pool.has_disk() && put(&pool, 3) == mixfleet_runtime::pool::Kept::Stored);
    pool.attach(SsdConfig { wipe: true, ..ssd(disk.clone(), 8) }, 6).expect("they may be deleted");
    assert_eq!((on_disk(&pool), served(&pool, 0)), (vec![], false));
    let before = open(config(2, Some(ssd(disk.restart(), 8)))).map(|pool| pool.stats().ssd_blocks);
    assert!(matches!(before, Err(PoolError::Mismatch(_))), "{before:?}");
}

#[test]
fn what_cannot_be_used_is_refused_before_it_is_known_whose_blocks_it_holds() {
    let pool = open(config(2, None)).expect("a new pool");
    let thesis = SimDisk::default();
    thesis.write_at("thesis.txt", 0, b"mine").expect("a sound disk");
    let error = pool.check(&ssd(thesis.clone(), 8)).expect_err("it is no pool's");
    assert!(matches!(error, PoolError::Foreign(_)) && thesis.names().expect("sound").len() == 1, "{error}");
    let error = pool.check(&ssd(SimDisk::default(), 0)).expect_err("no room");
    assert!(matches!(error, PoolError::TooSmall { tier: "ssd", .. }), "{error}");
    pool.check(&ssd(used_disk(), 8)).expect("a pool's");
}

#[test]
fn a_pool_has_one_disk() {
    let pool = open(config(2, Some(ssd(SimDisk::default(), 8)))).expect("a new pool");
    let error = pool.attach(ssd(SimDisk::default(), 8), 5).expect_err("it has one");
    assert!(matches!(error, PoolError::Attached), "{error}");
}
