//! A whole fleet under one seed: routers, worker processes on simulated parts, the network between them, the
//! registry, and faults in all of them. Simulated parts answer with hashes of every KV byte that they read,
//! so a right answer was not computed from KV that is stale, foreign or damaged.
//!
//! `MIXFLEET_CHAOS_SEEDS=from..until` runs other seeds than those of CI; a failure names its seed.

use crate::troubled;
use crate::troubled::{
    Census, EFFECTS, FAULTS, GROUP_EFFECTS, Kind, MEMBER_FAULTS, ModelLayers, Totals, Workload,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The seeds of every change, besides further ones that have found something. `hwtests/nightly.sh` runs
/// 20,000.
const SEEDS: std::ops::Range<u64> = 0..200;
const ONCE_FAILED: [u64; 3] = [245, 1254, 102_877];
/// Those with instances over several devices.
const SEEDS_WITH_GROUPS: std::ops::Range<u64> = 0..24;
const ONCE_FAILED_WITH_GROUPS: [u64; 1] = [92];

/// The seeds that the environment wants, or else these.
fn seeds(usual: impl Iterator<Item = u64>) -> Vec<u64> {
    let Ok(wanted) = std::env::var("MIXFLEET_CHAOS_SEEDS") else { return usual.collect() };
    let bounds = wanted.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    bounds.unwrap_or_else(|| panic!("MIXFLEET_CHAOS_SEEDS={wanted}: expected FROM..UNTIL")).collect()
}

/// The kinds of processes by the model that they serve.
type KindsOfModels = [Vec<Kind>; 2];

/// Configurations of a model whose layers are alike, and of one with windows.
fn of_models(kinds: fn(ModelLayers) -> Vec<Kind>) -> KindsOfModels {
    [ModelLayers::Alike, ModelLayers::Windowed].map(kinds)
}

/// Runs a seed's history: in one round of three through the workloads, layers of the model have windows. A
/// failure prints how to reproduce it, and ends the others.
fn run(seed: u64, workloads: &[Workload], kinds: &KindsOfModels, next: &AtomicUsize) -> Census {
    let count = workloads.len() as u64;
    let (workload, kinds) = (&workloads[(seed % count) as usize], &kinds[usize::from(seed / count % 3 == 1)]);
    catch_unwind(AssertUnwindSafe(|| troubled::run(workload, kinds, seed))).unwrap_or_else(|panic| {
        next.store(usize::MAX / 2, Ordering::Relaxed);
        let (name, end) = (&workload.name, seed + 1);
        eprintln!("seed {seed} ({name}): run it again with MIXFLEET_CHAOS_SEEDS={seed}..{end}");
        resume_unwind(panic)
    })
}

/// Runs the histories of these seeds, and prints what happened in them.
fn run_all(workloads: &[Workload], kinds: &KindsOfModels, seeds: &[u64]) -> Totals {
    let (next, totals) = (AtomicUsize::new(0), Mutex::new(Totals::default()));
    // Each thread runs one history at a time: one for each core.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let census = run(seed, workloads, kinds, &next);
                    totals.lock().unwrap().add(&census);
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap();
    eprintln!("{totals}");
    totals
}

#[test]
fn every_request_ends_once_and_right_whatever_breaks() {
    let seeds = seeds(SEEDS.chain(ONCE_FAILED));
    let totals = run_all(&Workload::all(), &of_models(troubled::kinds), &seeds);
    // A share of few histories is less certain.
    let histories_per_fault = match seeds.len() {
        1000.. => 20,
        200.. => 50,
        _ => return,
    };
    let rare = totals.rare(&FAULTS, &EFFECTS, histories_per_fault);
    assert!(rare.is_empty(), "too seldom to show anything: {rare:?}");
}

#[test]
fn members_that_die_or_hang_or_are_cut_off_change_no_answer() {
    let seeds = seeds(SEEDS_WITH_GROUPS.chain(ONCE_FAILED_WITH_GROUPS));
    let totals = run_all(&Workload::with_groups(), &of_models(troubled::kinds_that_compute), &seeds);
    if seeds.len() >= 24 {
        let rare = totals.rare(&MEMBER_FAULTS, &GROUP_EFFECTS, 12);
        assert!(rare.is_empty(), "too seldom to show anything: {rare:?}");
    }
}

#[test]
fn one_seed_gives_one_history() {
    let kinds = of_models(troubled::kinds);
    // the last one has all faults of the others
    let (with_groups, all_faults) = (of_models(troubled::kinds_that_compute), Workload::with_groups().pop());
    let all = Workload::all().into_iter().map(|workload| (workload, &kinds));
    let all = all.chain(all_faults.map(|workload| (workload, &with_groups)));
    for ((workload, kinds), seed) in all.zip(11..) {
        let kinds = &kinds[(seed % 2) as usize];
        let [first, second] = [(); 2].map(|()| troubled::run(&workload, kinds, seed));
        assert_eq!(first, second, "{} with seed {seed}", workload.name);
    }
}

#[test]
fn routers_whose_clocks_are_hours_apart_take_turns_at_an_instance() {
    let kinds = troubled::kinds(ModelLayers::Alike);
    let workload = Workload::of_two_clocks();
    for seed in 0..10 {
        let turns = troubled::turns(&workload, &kinds, seed);
        let first: u64 = turns[..turns.len() / 2].iter().sum();
        // Half of the first half is each one's share.
        assert!((3..=9).contains(&first), "seed {seed}: {turns:?}");
    }
}
