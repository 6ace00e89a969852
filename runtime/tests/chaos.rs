//! A whole fleet under one seed: routers, worker processes on simulated parts, the network between them,
//! and everything that happens to them. Simulated parts answer with hashes of every KV byte that they
//! read, so an answer that is right was never computed from KV that is stale, foreign or damaged.
//!
//! `MIXFLEET_CHAOS_SEEDS=from..until` runs other seeds than those of CI; a failure names its own.

mod fleet;
mod troubled;

use std::panic::{AssertUnwindSafe, catch_unwind};
use troubled::Workload;

/// Seeds of CI, and further ones that have found something.
const SEEDS: std::ops::Range<u64> = 0..1000;
const ONCE_FAILED: [u64; 1] = [1254];

fn seeds() -> Vec<u64> {
    let Ok(wanted) = std::env::var("MIXFLEET_CHAOS_SEEDS") else { return SEEDS.chain(ONCE_FAILED).collect() };
    let bounds = wanted.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    bounds.unwrap_or_else(|| panic!("MIXFLEET_CHAOS_SEEDS={wanted}: expected FROM..UNTIL")).collect()
}

#[test]
fn every_request_ends_once_and_right_whatever_breaks() {
    let workloads = Workload::all();
    let talks = troubled::talks(&troubled::checkpoint(), 40);
    let mut totals = troubled::Outcome::default();
    let seeds = seeds();
    for &seed in &seeds {
        let workload = &workloads[(seed % workloads.len() as u64) as usize];
        let ran = catch_unwind(AssertUnwindSafe(|| troubled::run(workload, &talks, seed)));
        match ran {
            Ok(outcome) => totals.add(&outcome),
            Err(panic) => {
                eprintln!(
                    "seed {seed} ({}): run it again with MIXFLEET_CHAOS_SEEDS={seed}..{}",
                    workload.name,
                    seed + 1
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
    eprintln!("{} seeds: {totals:?}", seeds.len());
    assert!(totals.right > 0, "nothing was answered: {totals:?}");
    if seeds.len() >= SEEDS.count() {
        assert!(totals.worker_deaths > 0 && totals.cuts > 0, "nothing broke: {totals:?}");
        let from_below = totals.dram_hits > 0 && totals.ssd_hits > 0 && totals.bad_blocks > 0;
        assert!(totals.pulled_tokens > 0, "no prefix was pulled: {totals:?}");
        assert!(from_below, "no block came from below: {totals:?}");
        let scarce = totals.device_failures > 0 && totals.regions_refused > 0;
        assert!(scarce, "no device failed, or there was always memory: {totals:?}");
        let disks = totals.slow_disks > 0 && totals.hung_disks > 0 && totals.disk_outages > 0;
        assert!(disks && totals.rotten_in_dram > 0, "no disk was late, or nothing rotted: {totals:?}");
    }
}

#[test]
fn one_seed_gives_one_history() {
    let workloads = Workload::all();
    let talks = troubled::talks(&troubled::checkpoint(), 40);
    for (workload, seed) in workloads.iter().zip(11..) {
        let [first, second] = [(); 2].map(|()| troubled::run(workload, &talks, seed));
        assert_eq!(first, second, "{} with seed {seed}", workload.name);
    }
}
