//! A whole fleet under one seed: routers, worker processes on simulated parts, the network between them, the
//! registry, and faults in all of them. Simulated parts answer with hashes of every KV byte that they read,
//! so a right answer was not computed from KV that is stale, foreign or damaged.
//!
//! `MIXFLEET_CHAOS_SEEDS=from..until` runs other seeds than those of CI; a failure names its seed.

use crate::troubled;
use crate::troubled::{Census, Kind, Totals, Workload};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The seeds of every change, besides further ones that have found something. `hwtests/nightly.sh` runs
/// 20,000.
const SEEDS: std::ops::Range<u64> = 0..200;
const ONCE_FAILED: [u64; 1] = [1254];

fn seeds() -> Vec<u64> {
    let Ok(wanted) = std::env::var("MIXFLEET_CHAOS_SEEDS") else { return SEEDS.chain(ONCE_FAILED).collect() };
    let bounds = wanted.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    bounds.unwrap_or_else(|| panic!("MIXFLEET_CHAOS_SEEDS={wanted}: expected FROM..UNTIL")).collect()
}

/// Runs a seed's history. A failure prints how to reproduce it, and ends the others.
fn run(seed: u64, workloads: &[Workload], kinds: &[Kind], next: &AtomicUsize) -> Census {
    let workload = &workloads[(seed % workloads.len() as u64) as usize];
    catch_unwind(AssertUnwindSafe(|| troubled::run(workload, kinds, seed))).unwrap_or_else(|panic| {
        next.store(usize::MAX / 2, Ordering::Relaxed);
        let (name, end) = (&workload.name, seed + 1);
        eprintln!("seed {seed} ({name}): run it again with MIXFLEET_CHAOS_SEEDS={seed}..{end}");
        resume_unwind(panic)
    })
}

#[test]
fn every_request_ends_once_and_right_whatever_breaks() {
    let (workloads, kinds, seeds) = (Workload::all(), troubled::kinds(), seeds());
    let (next, totals) = (AtomicUsize::new(0), Mutex::new(Totals::default()));
    // Each thread runs one history at a time: one for each core.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let census = run(seed, &workloads, &kinds, &next);
                    totals.lock().unwrap().add(&census);
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap();
    eprintln!("{totals}");
    // A share of few histories is less certain.
    let histories_per_fault = match seeds.len() {
        1000.. => 20,
        200.. => 50,
        _ => return,
    };
    let rare = totals.rare(histories_per_fault);
    assert!(rare.is_empty(), "too seldom to show anything: {rare:?}");
}

#[test]
fn one_seed_gives_one_history() {
    let kinds = troubled::kinds();
    for (workload, seed) in Workload::all().iter().zip(11..) {
        let [first, second] = [(); 2].map(|()| troubled::run(workload, &kinds, seed));
        assert_eq!(first, second, "{} with seed {seed}", workload.name);
    }
}

#[test]
fn routers_whose_clocks_are_hours_apart_take_turns_at_an_instance() {
    let kinds = troubled::kinds();
    let workload = Workload::of_two_clocks();
    for seed in 0..10 {
        let turns = troubled::turns(&workload, &kinds, seed);
        let first: u64 = turns[..turns.len() / 2].iter().sum();
        // Half of the first half is each one's share.
        assert!((3..=9).contains(&first), "seed {seed}: {turns:?}");
    }
}
