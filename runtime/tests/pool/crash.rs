//! The process dies, or the power fails, in the middle of any change of the disk.

use super::support::{config, open, put, served, ssd};
use mixfleet_runtime::pool::disk::{Crash, Disk, SimDisk};
use mixfleet_runtime::pool::{Pool, PoolConfig, SsdConfig};
use mixfleet_scheduler::kv::BlockHash;
use std::collections::BTreeSet;

const DRAM_BLOCKS: u64 = 2;
const SSD_BLOCKS: u64 = 5;
const KEYS: u64 = 12;

/// How much of the write arrives before the process dies: parts of a record (32 bytes), of a payload (32), of
/// a trailer (56), all.
const ARRIVES: [u64; 9] = [0, 1, 20, 31, 32, 47, 80, 87, u64::MAX];

/// Fills the disk several times over, hits it, and has the journal written anew.
fn work(pool: &Pool, mut alive: impl FnMut(&Pool) -> bool) {
    for round in 0..4u64 {
        for key in (0..KEYS).map(|key| (key * 5 + round) % KEYS) {
            if !alive(pool) {
                return;
            }
            if !served(pool, key) {
                put(pool, key);
            }
        }
    }
}

fn reopened(disk: SimDisk) -> (Pool, BTreeSet<u64>) {
    let pool =
        open(config(DRAM_BLOCKS, Some(ssd(disk, SSD_BLOCKS)))).expect("a pool that crashed opens again");
    let known = pool.snapshot().ssd.iter().map(|hash| hash.0).collect();
    (pool, known)
}

/// Blocks that are served after all; each is checked.
fn survivors(pool: &Pool, known: &BTreeSet<u64>) -> BTreeSet<u64> {
    // A block that is served takes no room on the disk from another: leases bring it to host memory, which
    // gives back what the disk has.
    known.iter().copied().filter(|&key| served(pool, key)).collect()
}

#[test]
fn a_process_that_dies_in_any_change_loses_no_more_than_the_block_at_hand() {
    let whole = SimDisk::default();
    let (pool, _) = reopened(whole.clone());
    work(&pool, |_| true);
    let stats = pool.stats();
    assert!(stats.demoted > 30 && stats.hits_ssd > 0, "the work is too little: {stats:?}");
    let changes = whole.changes();
    assert!(changes > 80, "{changes}");
    for change in 0..changes {
        for bytes in ARRIVES {
            let disk = SimDisk::default();
            disk.crash_at(Crash { change, bytes });
            let mut before = BTreeSet::new();
            if let Ok(pool) = open(config(DRAM_BLOCKS, Some(ssd(disk.clone(), SSD_BLOCKS)))) {
                work(&pool, |pool| {
                    if !disk.is_dead() {
                        before = pool.snapshot().ssd.into_iter().map(|hash| hash.0).collect();
                    }
                    !disk.is_dead()
                });
            }
            assert!(disk.is_dead());
            let (pool, known) = reopened(disk.restart());
            let served = survivors(&pool, &known);
            let place =
                format!("change {change}, {bytes} bytes: {before:?}, then {known:?}, served {served:?}");
            assert_eq!(served, known, "known blocks are whole: {place}");
            assert_eq!(pool.stats().bad, 0, "{place}");
            assert!(before.difference(&served).count() <= 1, "{place}");
        }
    }
}

#[test]
fn a_loss_of_power_costs_blocks_and_serves_no_wrong_one() {
    let (mut bad, mut kept, mut damaged) = (0, 0, 0);
    for seed in 0..400 {
        let disk = SimDisk::with_power_losses();
        let (pool, _) = reopened(disk.clone());
        let (mut step, end) = (0, 4 + seed % 44);
        work(&pool, |pool| {
            step += 1;
            if step == end / 2 {
                pool.sync().expect("a sound disk");
            }
            step < end
        });
        let (pool, known) = reopened(disk.lose_power(seed));
        kept += survivors(&pool, &known).len();
        let stats = pool.stats();
        bad += stats.bad;
        damaged += stats.journal_damaged;
        work(&pool, |_| true);
        assert!(pool.snapshot().ssd.len() as u64 <= SSD_BLOCKS);
    }
    assert!(bad > 50 && kept > 300 && damaged > 50, "the losses are too few: {bad}, {kept}, {damaged}");
}

#[test]
fn what_was_synced_survives_a_loss_of_power_that_takes_all_else() {
    let disk = SimDisk::default();
    let (pool, _) = reopened(disk.clone());
    (0..6).for_each(|key| assert_eq!(put(&pool, key), mixfleet_runtime::pool::Kept::Stored));
    pool.sync().expect("a sound disk");
    let safe: BTreeSet<u64> = pool.snapshot().ssd.iter().map(|hash| hash.0).collect();
    let (pool, known) = reopened(disk.lose_power(0));
    assert_eq!((safe.len(), &safe), (4, &known));
    assert_eq!(survivors(&pool, &known), safe);
}

#[test]
fn what_was_synced_survives_though_nothing_later_does_in_a_directory_that_is_not_new() {
    // A journal that is written anew has the name of the old one only once the directory is safe too.
    for seed in 0..40 {
        let disk = SimDisk::with_power_losses();
        let (pool, _) = reopened(disk.clone());
        (0..6).for_each(|key| assert_eq!(put(&pool, key), mixfleet_runtime::pool::Kept::Stored));
        pool.sync().expect("a sound disk");
        (10..16).for_each(|key| assert_eq!(put(&pool, key), mixfleet_runtime::pool::Kept::Stored));
        pool.sync().expect("a sound disk");
        let safe: BTreeSet<u64> = pool.snapshot().ssd.iter().map(|hash| hash.0).collect();
        let (pool, known) = reopened(disk.lose_power(seed));
        assert_eq!(known, safe, "seed {seed}");
        assert_eq!(survivors(&pool, &known), safe, "seed {seed}");
    }
}

#[test]
fn a_new_pool_is_one_after_any_loss_of_power() {
    let disk = SimDisk::default();
    drop(reopened(disk.clone()));
    let names = disk.lose_power(0).names().expect("it lives");
    assert!(names.contains(&"meta".to_string()), "the power loss took whose directory it is: {names:?}");
}

#[test]
fn blocks_that_were_deleted_for_another_model_are_gone_after_any_loss_of_power() {
    let disk = SimDisk::default();
    let (pool, _) = reopened(disk.clone());
    (0..6).for_each(|key| assert_eq!(put(&pool, key), mixfleet_runtime::pool::Kept::Stored));
    pool.sync().expect("a sound disk");
    drop(pool);
    let other = SsdConfig { wipe: true, ..ssd(disk.clone(), SSD_BLOCKS) };
    drop(open(PoolConfig { namespace: 6, ..config(DRAM_BLOCKS, Some(other)) }).expect("they may be deleted"));
    let left = disk.lose_power(0);
    assert_eq!(left.len("blocks").expect("it lives").unwrap_or(0), 0, "the other model's blocks are back");
}

#[test]
fn the_order_of_eviction_survives_a_sync() {
    let disk = SimDisk::default();
    let (pool, _) = reopened(disk.clone());
    // 0..4 sink in this order; then 0 and 1 are used again, for which 4 and 5 sink, and 2 goes for 5.
    (0..6).for_each(|key| {
        put(&pool, key);
    });
    assert!(served(&pool, 0) && served(&pool, 1));
    pool.sync().expect("a sound disk");
    let (pool, known) = reopened(disk.restart());
    assert_eq!(known, BTreeSet::from([0, 1, 3, 4, 5]));
    // One more sinks, for which 3 goes: by the order of storing it would be 0.
    (20..23).for_each(|key| {
        put(&pool, key);
    });
    assert_eq!(pool.snapshot().ssd, [0, 1, 4, 5, 20].map(BlockHash));
}

#[test]
fn rot_of_any_file_is_found() {
    for seed in 0..300u64 {
        let disk = SimDisk::default();
        let (pool, _) = reopened(disk.clone());
        work(&pool, |_| true);
        drop(pool);
        for (at, file) in ["blocks", "journal"].iter().enumerate() {
            let bits = disk.len(file).expect("it lives").expect("it was written") * 8;
            (0..4).for_each(|n| disk.rot(file, mixfleet_hal::random::bits(seed, n * 2 + at as u64) % bits));
        }
        let (pool, known) = reopened(disk.restart());
        let whole = survivors(&pool, &known);
        assert_eq!(pool.stats().bad as usize, known.len() - whole.len());
    }
}
