//! Disks that are full, fail, return wrong data or decay while the pool is in use.

use super::support::{Follower, config, open, put, served, ssd};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{Pool, PoolStats, Snapshot};

const DRAM_BLOCKS: u64 = 2;
const SSD_BLOCKS: u64 = 40;

fn pool(disk: &SimDisk) -> Pool {
    open(config(DRAM_BLOCKS, Some(ssd(disk.clone(), SSD_BLOCKS)))).expect("a new pool")
}

fn fill(pool: &Pool, keys: std::ops::Range<u64>) {
    keys.for_each(|key| {
        put(pool, key);
    });
}

#[test]
fn a_full_disk_takes_nothing_serves_what_it_has_and_recovers() {
    let disk = SimDisk::default();
    let pool = pool(&disk);
    fill(&pool, 0..10);
    disk.set_room(Some(disk.used_bytes() + 100));
    fill(&pool, 100..150);
    let PoolStats { ssd_paused, lost, ssd_blocks, .. } = pool.stats();
    assert!(
        ssd_paused.is_some() && lost > 40 && (8..10).contains(&ssd_blocks),
        "{ssd_paused:?} {lost} {ssd_blocks}"
    );
    assert_eq!((0..8).filter(|&key| served(&pool, key)).count(), 8);
    disk.set_room(None);
    fill(&pool, 200..300);
    let stats = pool.stats();
    assert_eq!((stats.ssd_paused, stats.bad), (None, 0));
    assert!(stats.ssd_blocks > 20, "it takes blocks again: {}", stats.ssd_blocks);
}

#[test]
fn a_disk_that_cannot_be_written_is_tried_seldom() {
    let disk = SimDisk::default();
    let pool = pool(&disk);
    fill(&pool, 0..10);
    disk.set_plan(FaultPlan::at_rate(Fault::Fail, 1.0, 1));
    let before = disk.operations();
    fill(&pool, 100..740);
    let tried = disk.operations() - before;
    assert!((5..25).contains(&tried), "{tried} tries for 640 blocks");
    disk.set_plan(FaultPlan::default());
    assert_eq!((0..8).filter(|&key| served(&pool, key)).count(), 8);
}

#[test]
fn a_block_that_cannot_be_read_is_dropped_and_told() {
    let disk = SimDisk::default();
    let pool = pool(&disk);
    fill(&pool, 0..10);
    let mut follower = Follower::new(&Snapshot::default());
    disk.set_plan(FaultPlan::exactly(Fault::Fail, disk.operations(), disk.operations() + 1));
    assert!(!served(&pool, 3));
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
    assert_eq!(pool.stats().bad, 1);
    put(&pool, 3);
    assert!(served(&pool, 3) && served(&pool, 4));
}

#[test]
fn every_block_served_is_right_whatever_the_disk_does() {
    let mut bad = 0;
    let mut hits = 0;
    for seed in 0..60 {
        let faults = [Fault::BitFlip, Fault::Drop, Fault::Fail, Fault::Stale, Fault::Hang];
        let rule = |fault| Rule { fault, probability: 0.02, from: 1, until: None };
        let disk = SimDisk::default();
        let pool = pool(&disk);
        disk.set_plan(FaultPlan { seed, rules: faults.map(rule).to_vec() });
        let mut follower = Follower::new(&Snapshot::default());
        for step in 0..300 {
            let key = mixfleet_hal::random::bits(seed, step) % 60;
            if !served(&pool, key) {
                put(&pool, key);
            }
            follower.follow(&pool.take_events());
            follower.assert_agrees(&pool.snapshot());
        }
        bad += pool.stats().bad;
        hits += pool.stats().hits_ssd;
        // A journal returned wrong data: wrongly named blocks are dropped when they are requested.
        disk.set_plan(FaultPlan::default());
        let again = open(config(DRAM_BLOCKS, Some(ssd(disk.restart(), SSD_BLOCKS)))).expect("it opens");
        (0..60).for_each(|key| {
            served(&again, key);
        });
    }
    assert!(bad > 100 && hits > 2000, "too few faults to tell: {bad} bad, {hits} hits");
}
