//! Counts of instances, repaired by simulation.

use crate::common::{at_random, fleet_from};
use mixfleet_hal::random::Stream;
use mixfleet_planner::growth::FleetGrowth;
use mixfleet_planner::repair::{FleetTrial, RepairLimits, Repaired, TrialLoad};
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::Choices;
use mixfleet_sim::trace::{Request, SteadyLoad};
use std::cell::Cell;

const CHOICES: Choices = Choices { policy: Policy::LeastLoaded, admission: Admission::Prediction, seed: 0 };

/// Prompts of 1,000 tokens take 0.1 s, and a step 20 ms and 0.2 ms for each of up to 40 sequences.
fn fleet(prefill: u32, decode: u32) -> FleetFile {
    let calibration = "calibration = { prefill_s = { overhead = 0.0, per_token = 1e-4, per_token_squared = 0.0 }, \
                       decode_s = { base = 0.02, per_sequence = 2e-4, per_kv_token = 0.0 } }";
    fleet_from(&format!(
        "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 1.0\ntbt_s = 0.03\n\
         [[pool]]\nname = \"p\"\nrole = \"prefill\"\ncount = {prefill}\nusd_per_hour = 2.0\n\
         cache_tokens = 1_000_000\n{calibration}\n\
         [[pool]]\nname = \"d\"\nrole = \"decode\"\ncount = {decode}\nusd_per_hour = 1.0\n\
         cache_tokens = 1_000_000\nmax_sequences = 40\n{calibration}\n"
    ))
}

fn load() -> Vec<Request> {
    let load = SteadyLoad { rate: 30.0, requests: 1200, prompt_tokens: 1000, output_tokens: 200, seed: 3 };
    load.requests().collect()
}

fn trials(requests: &[Request]) -> TrialLoad<'_> {
    TrialLoad { requests, block_tokens: None, speedup: 1.0, share: 0.99, choices: CHOICES }
}

fn repaired(file: &FleetFile, fits: &dyn Fn(&[u32]) -> bool) -> (Repaired, u32) {
    let (requests, runs) = (load(), Cell::new(0));
    let told = |_: &[u32], _: &FleetTrial| runs.set(runs.get() + 1);
    let rent = |counts: &[u32]| counts.iter().map(|count| f64::from(*count)).sum();
    let limits = RepairLimits { fits, rent: &rent, go_on: &|| true, exchanges: true, told: &told };
    (trials(&requests).repair(file, &limits).unwrap().unwrap(), runs.get())
}

#[test]
fn from_too_few_and_from_too_many_no_single_instance_can_be_spared() {
    for start in [fleet(1, 1), fleet(20, 30)] {
        let (found, runs) = repaired(&start, &|_| true);
        assert!(found.trial.held && found.least && found.trial.attained >= 0.99, "{:?}", found.counts);
        // 3 s of prompts arrive each second, and 30 x 200 x at least 0.2 ms of steps
        assert!(found.counts[0] >= 3 && found.counts[1] >= 2, "{:?}", found.counts);
        for (pool, less) in found.less.iter().enumerate() {
            assert!(!less.as_ref().expect("a run").held);
            let (requests, mut fewer) = (load(), found.counts.clone());
            fewer[pool] -= 1;
            let whole = trials(&requests).trial(&start, &fewer, true, &|| true).unwrap().unwrap();
            assert!(!whole.held && whole.attained <= less.as_ref().unwrap().attained, "{fewer:?}");
        }
        assert_eq!(repaired(&start, &|_| true).0.counts, found.counts);
        assert!(runs < 40, "{runs}");
    }
}

#[test]
fn the_stage_that_is_short_grows_alone_and_what_does_not_help_ends() {
    let requests = load();
    let rent = |counts: &[u32]| counts.iter().map(|count| f64::from(*count)).sum();
    for (short, [prefill, decode]) in [[1, 30], [10, 1]].into_iter().enumerate() {
        let file = fleet(prefill, decode);
        let mut growth = FleetGrowth::of(&file);
        let missed = trials(&requests).trial(&file, growth.counts(), false, &|| true).unwrap().unwrap();
        assert!(!missed.held);
        assert!(!growth.clone().grow(&missed.results, &|_| false, &rent), "there are no more");
        assert!(growth.grow(&missed.results, &|_| true, &rent));
        let first = [prefill, decode];
        assert!(growth.counts()[short] > first[short] && growth.counts()[1 - short] == first[1 - short]);
        // a run that gets no further than the one before it makes all pools grow
        assert!(growth.grow(&missed.results, &|_| true, &rent));
        assert!(growth.counts()[1 - short] > first[1 - short], "{:?}", growth.counts());
        let rounds = (0..100).take_while(|_| growth.grow(&missed.results, &|_| true, &rent)).count();
        let times = rent(growth.counts()) / rent(&first);
        assert!((2.3..4.0).contains(&times), "{rounds} rounds to {times} times as many");
    }
}

#[test]
fn a_repair_keeps_to_what_there_is_and_says_how_far_that_gets() {
    let fits = |counts: &[u32]| counts[0] <= 2;
    let (found, _) = repaired(&fleet(1, 1), &fits);
    assert!(!found.trial.held && !found.least && found.counts[0] == 2, "{:?}", found.counts);
    assert_eq!(found.trial.results.requests, 1200, "the last run goes to the end");
    assert!(found.trial.attained < 0.99 && found.trial.attained > 0.2, "{}", found.trial.attained);
}

#[test]
fn a_repair_that_is_stopped_keeps_the_best_so_far() {
    let requests = load();
    let stopped_after = |runs: u32| {
        let left = Cell::new(runs);
        let told = |_: &[u32], _: &FleetTrial| left.set(left.get() - 1);
        let go_on = || left.get() > 0;
        let limits =
            RepairLimits { fits: &|_| true, rent: &|_| 0.0, go_on: &go_on, exchanges: true, told: &told };
        trials(&requests).repair(&fleet(20, 30), &limits).unwrap()
    };
    assert!(stopped_after(0).is_none());
    let one = stopped_after(1).unwrap();
    assert!(one.trial.held && !one.least && one.counts == [20, 30]);
    let three = stopped_after(3).unwrap();
    assert!(three.trial.held && !three.least && three.counts[0] < 20, "{:?}", three.counts);
}

#[test]
fn instances_are_exchanged_for_those_of_another_pool_where_that_costs_less() {
    // as fast, at 2 USD and at 1; one expensive and ten cheap ones carry the load
    let pool = |name: &str, usd: f64, count: u32, sequences: u32| {
        format!(
            "[[pool]]\nname = \"{name}\"\nrole = \"auto\"\ncount = {count}\nusd_per_hour = {usd}\n\
             cache_tokens = 1_000_000\nmax_sequences = {sequences}\ncalibration = {{ prefill_s = {{ overhead = 0.0, \
             per_token = 1e-5, per_token_squared = 0.0 }}, decode_s = {{ base = 0.02, per_sequence = 1e-5, \
             per_kv_token = 0.0 }} }}\n"
        )
    };
    let head =
        "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 1.0\ntbt_s = 0.05\n";
    let rents = [2.0, 1.0];
    let rent = |counts: &[u32]| counts.iter().zip(rents).map(|(count, usd)| f64::from(*count) * usd).sum();
    let requests = load();
    let limits =
        RepairLimits { fits: &|_| true, rent: &rent, go_on: &|| true, exchanges: true, told: &|_, _| () };
    let found = |counts: [u32; 2], sequences: [u32; 2]| {
        let pools = [0, 1].map(|at| pool(["dear", "cheap"][at], rents[at], counts[at], sequences[at]));
        let file = fleet_from(&format!("{head}{}", pools.concat()));
        trials(&requests).repair(&file, &limits).unwrap().unwrap().counts
    };
    // equal but for their rent: nothing of the dear ones stays
    let [dear, cheap] = found([4, 1], [40, 40])[..] else { panic!("two pools") };
    assert!(dear == 0 && (3..=6).contains(&cheap), "{dear} dear and {cheap} cheap");
    // four times as many sequences at twice the rent: seven cheap ones would hold too, and none of them could
    // be spared
    let [dear, cheap] = found([1, 8], [80, 20])[..] else { panic!("two pools") };
    assert!(dear >= 1 && 2 * dear + cheap < 7, "{dear} dear and {cheap} cheap");
}

/// A fleet with a pool for each of `roles`, as fast, dear and many as `random` says.
fn drawn(random: &mut Stream, roles: &[&str]) -> FleetFile {
    let mut text = String::from(
        "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 1.0\ntbt_s = 0.05\n",
    );
    for (at, role) in roles.iter().enumerate() {
        let mut between = |least: f64, most: f64| least + (most - least) * random.next_unit();
        let (per_token, base, per_sequence) =
            (between(3e-5, 3e-4), between(0.004, 0.02), between(5e-5, 4e-4));
        let (count, rent, sequences) =
            (between(1.0, 12.0) as u32, between(0.5, 4.0), between(8.0, 80.0) as u32);
        text += &format!(
            "[[pool]]\nname = \"p{at}\"\nrole = \"{role}\"\ncount = {count}\nusd_per_hour = {rent:.3}\n\
             cache_tokens = 400_000\nmax_sequences = {sequences}\ncalibration = {{ \
             prefill_s = {{ overhead = 0.0, per_token = {per_token:.7}, per_token_squared = 0.0 }}, decode_s = \
             {{ base = {base:.6}, per_sequence = {per_sequence:.7}, per_kv_token = 0.0 }} }}\n"
        );
    }
    fleet_from(&text)
}

#[test]
fn whatever_the_pools_and_the_load_a_repaired_fleet_misses_with_one_less_or_a_cheaper_one() {
    let all: [&[&str]; 4] =
        [&["auto"], &["prefill", "decode"], &["auto", "auto"], &["prefill", "prefill", "decode", "auto"]];
    let (mut random, mut less, mut exchanged, mut unlike_held) = (Stream::new(19), 0, 0, 0);
    for case in 0..16 {
        let (file, rate) = (drawn(&mut random, all[case % all.len()]), 4.0 + 26.0 * random.next_unit());
        let tokens = |random: &mut Stream| (100 + random.below(2500), 2 + random.below(300));
        let requests = at_random(case as u64, 400.0 / rate, rate, tokens);
        let rent = |counts: &[u32]| {
            let each = file.pools.iter().zip(counts);
            each.map(|(pool, count)| pool.usd_per_hour.unwrap() * f64::from(*count)).sum()
        };
        let limits =
            RepairLimits { fits: &|_| true, rent: &rent, go_on: &|| true, exchanges: true, told: &|_, _| () };
        let found = trials(&requests).repair(&file, &limits).unwrap().unwrap();
        assert_eq!(found.trial.held, found.least, "case {case}: {:?}", found.counts);
        for pool in (0..found.counts.len()).filter(|&pool| found.least && found.less[pool].is_some()) {
            let mut fewer = found.counts.clone();
            fewer[pool] -= 1;
            let whole = trials(&requests).trial(&file, &fewer, true, &|| true).unwrap().unwrap();
            assert!(!whole.held, "case {case}: {:?} hold too, not only {:?}", fewer, found.counts);
            less += 1;
        }
        let pools = found.counts.len();
        for (from, to) in (0..pools * pools).map(|at| (at / pools, at % pools)) {
            let mut other = found.counts.clone();
            let (Some(fewer), true) = (other[from].checked_sub(1), from != to && found.least) else {
                continue;
            };
            other[from] = fewer;
            other[to] += 1;
            if rent(&other) >= rent(&found.counts) {
                continue;
            }
            let whole = trials(&requests).trial(&file, &other, true, &|| true).unwrap();
            let held = whole.is_some_and(|whole| whole.held);
            // only pools that do the same are exchanged
            let does = |pool: usize| (file.pools[pool].role.prefills(), file.pools[pool].role.decodes());
            if does(from) == does(to) {
                assert!(!held, "case {case}: {other:?}, not {:?}", found.counts);
            }
            unlike_held += u32::from(held);
            exchanged += 1;
        }
    }
    assert!(less >= 20, "{less} instances were taken away");
    assert!(exchanged >= 10, "{exchanged} instances were exchanged");
    assert!(unlike_held <= 1, "{unlike_held} exchanges of pools that do not do the same would have held");
}
