//! Ownership of the pool's directory.

use super::support::{BLOCK_BYTES, ScratchDirectory, config, open, put, served, ssd, tier as tier_of};
use mixfleet_runtime::pool::disk::{Disk, RealDisk, SimDisk};
use mixfleet_runtime::pool::{PoolConfig, PoolError, SsdConfig};

fn refused(config: PoolConfig) -> PoolError {
    open(config).map(|pool| format!("{pool:?}")).expect_err("it must be refused")
}

#[test]
fn a_real_directory_keeps_blocks_and_has_one_owner() {
    let directory = ScratchDirectory::new("owner");
    let disk = || RealDisk::open(&directory.0);
    let pool = open(config(1, Some(ssd(disk().expect("a new directory"), 8)))).expect("a new pool");
    (0..6).for_each(|key| {
        put(&pool, key);
    });
    let error = disk().expect_err("the directory is in use");
    assert!(matches!(error, PoolError::InUse(_)) && error.to_string().contains("in use"), "{error}");
    drop(pool);
    let pool = open(config(1, Some(ssd(disk().expect("it is free again"), 8)))).expect("the same pool");
    assert_eq!((0..6).filter(|&key| served(&pool, key)).count(), 5, "all but the one in host memory");
}

#[test]
fn other_pools_blocks_are_refused_or_wiped_if_the_caller_says_so() {
    let disk = SimDisk::default();
    let tier = |wipe| Some(SsdConfig { wipe, ..ssd(disk.clone(), 8) });
    let pool = open(config(1, tier(false))).expect("a new pool");
    (0..6).for_each(|key| {
        put(&pool, key);
    });
    drop(pool);
    let others = [
        (PoolConfig { namespace: 6, ..config(1, tier(false)) }, "another model"),
        (PoolConfig { block_tokens: 3, ..config(1, tier(false)) }, "2 tokens a block, this pool 3"),
        (PoolConfig { block_bytes: 16, ..config(1, tier(false)) }, "32 bytes a block, this pool 16"),
    ];
    for (config, why) in others {
        let error = refused(config);
        assert!(matches!(error, PoolError::Mismatch(_)) && error.to_string().contains(why), "{error}");
    }
    let pool = open(config(1, tier(false))).expect("still the first one's");
    assert!(served(&pool, 0));
    drop(pool);
    let pool = open(PoolConfig { namespace: 6, ..config(1, tier(true)) }).expect("it may be wiped");
    assert_eq!((pool.stats().ssd_blocks, tier_of(&pool, 0)), (0, None));
    assert!(matches!(refused(config(1, tier(false))), PoolError::Mismatch(_)), "it is the second one's now");
}

#[test]
fn another_version_or_a_damaged_description_is_refused_and_may_be_wiped() {
    for (byte, why) in [(0, "damaged"), (16, "version"), (21, "damaged"), (47, "damaged")] {
        let disk = SimDisk::default();
        drop(open(config(1, Some(ssd(disk.clone(), 8)))).expect("a new pool"));
        disk.rot("meta", byte * 8 + 3);
        let error = refused(config(1, Some(ssd(disk.clone(), 8))));
        assert!(error.to_string().contains(why), "{error}");
        open(config(1, Some(SsdConfig { wipe: true, ..ssd(disk.clone(), 8) }))).expect("it may be wiped");
    }
}

#[test]
fn what_is_not_a_pool_is_never_wiped() {
    for (file, bytes) in
        [("thesis.txt", "mine"), ("meta", "not a pool's"), ("blocks", "mine"), ("journal", "mine")]
    {
        let disk = SimDisk::default();
        disk.write_at(file, 0, bytes.as_bytes()).expect("a sound disk");
        let error = refused(config(1, Some(SsdConfig { wipe: true, ..ssd(disk.clone(), 8) })));
        assert!(matches!(error, PoolError::Foreign(_)) && error.to_string().contains(file), "{error}");
        assert_eq!(
            (disk.names().expect("sound"), disk.used_bytes()),
            (vec![file.into()], bytes.len() as u64)
        );
    }
}

#[test]
fn a_smaller_pool_keeps_what_fits_and_gives_the_rest_back() {
    let disk = SimDisk::default();
    let pool = open(config(1, Some(ssd(disk.clone(), 20)))).expect("a new pool");
    (0..21).for_each(|key| {
        put(&pool, key);
    });
    assert_eq!(pool.stats().ssd_blocks, 20);
    drop(pool);
    let pool = open(config(1, Some(ssd(disk.clone(), 6)))).expect("the same pool");
    assert_eq!((pool.stats().ssd_blocks, (0..21).filter(|&key| served(&pool, key)).count()), (6, 6));
    assert!(disk.used_bytes() <= 48 + 6 * (88 + 128), "{}", disk.used_bytes());
}

#[test]
fn tiers_that_hold_nothing_are_refused() {
    let error = refused(PoolConfig { dram_bytes: BLOCK_BYTES - 1, ..config(1, None) });
    assert!(matches!(error, PoolError::TooSmall { tier: "dram", needed: 32, .. }), "{error}");
    let error = refused(config(1, Some(ssd(SimDisk::default(), 0))));
    assert!(matches!(error, PoolError::TooSmall { tier: "ssd", .. }), "{error}");
    assert!(matches!(refused(PoolConfig { block_tokens: 0, ..config(1, None) }), PoolError::Hal(_)));
}
