//! The engine on simulated parts that only take time: their tokens are hashes of all KV that was read, so
//! equal tokens mean that no stale, missing or foreign KV was used.

use crate::fleet::{Case, TestFleet, prompt};
use mixfleet_hal::Device;
use mixfleet_hal::catalog::part;
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_hal::random::Stream;
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::{FaultyDevice, TimeOnlyDevice, VirtualClock};
use std::sync::Arc;

/// A part of the catalog as the fleet's device number `member`.
fn simulated(id: &str, member: usize) -> Arc<dyn Device> {
    let profile = part(id).unwrap().profile();
    Arc::new(
        TimeOnlyDevice::new(&format!("device{member}"), profile, Arc::new(VirtualClock::default())).unwrap(),
    )
}

/// A fleet of prefill on one part and decode on another.
fn split(checkpoint: &Checkpoint) -> TestFleet {
    TestFleet::new(checkpoint.clone())
        .with_device(Role::Prefill, simulated("H100-SXM-80GB", 0))
        .with_device(Role::Decode, simulated("RTX-4090", 1))
}

/// The tokens that one simulated device draws, with nothing else to do.
fn alone(checkpoint: &Checkpoint, prompt: &[u32], count: u32) -> Vec<u32> {
    let fleet = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, simulated("L4", 0));
    fleet.run_one(&SeededEnv::new(1), prompt.to_vec(), count).tokens
}

/// Requests of mixed lengths, some with common prefixes, and their expected answers.
fn cases(checkpoint: &Checkpoint, seed: u64, count: usize) -> Vec<Case> {
    let mut rng = Stream::new(seed);
    let family = prompt(40, 2000, &checkpoint.config);
    let case = |_| {
        let mut prompt = family[..rng.below(30) as usize].to_vec();
        let own = 1 + rng.below(12);
        prompt.extend((0..own).map(|_| rng.below(u64::from(checkpoint.config.vocab)) as u32));
        let expected = alone(checkpoint, &prompt, 1 + rng.below(24) as u32);
        Case { prompt, expected }
    };
    (0..count).map(case).collect()
}

fn tiny() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

#[test]
fn prefill_on_one_part_and_decode_on_another_give_the_tokens_of_one() {
    for (name, checkpoint) in tiny_variants() {
        let checkpoint = checkpoint.load().unwrap();
        for length in [1, 8, 33] {
            let prompt = prompt(length, 70 + u64::from(length), &checkpoint.config);
            let answer = split(&checkpoint).run_one(&SeededEnv::new(3), prompt.clone(), 12);
            assert_eq!(answer.tokens, alone(&checkpoint, &prompt, 12), "{name}, prompt of {length}");
            assert_eq!(answer.placed, [("device0".to_owned(), "device1".to_owned())]);
        }
    }
}

#[test]
fn chunks_batches_preemption_and_prefix_reuse_change_no_token() {
    let checkpoint = tiny();
    for seed in 0..6 {
        let fleet = match seed % 3 {
            0 => TestFleet::new(checkpoint.clone()).with_device(Role::Auto, simulated("L40S", 0)),
            1 => TestFleet::new(checkpoint.clone())
                .with_device(Role::Auto, simulated("L40S", 0))
                .with_device(Role::Auto, simulated("RTX-4090", 1)),
            _ => split(&checkpoint),
        };
        let usage = fleet.blocks(14).run_many(&SeededEnv::new(seed), cases(&checkpoint, seed, 14));
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
    }
}

#[test]
fn kv_that_is_lost_or_damaged_on_the_way_never_changes_a_token() {
    let checkpoint = tiny();
    for (seed, fault) in (20..).zip([Fault::BitFlip, Fault::Drop, Fault::Fail, Fault::Hang]) {
        for probability in [0.3, 1.0] {
            // the first 20 writes measure the two links
            let rule = Rule { fault, probability, from: 20, until: None };
            let fleet = split(&checkpoint).faults(FaultPlan { seed, rules: vec![rule] });
            fleet.run_many(&SeededEnv::new(seed), cases(&checkpoint, seed, 6));
            let (retries, recomputes) = fleet.transfer_troubles();
            assert!(retries > 0, "{fault:?} at {probability} struck nothing");
            assert!(probability < 1.0 || recomputes > 0, "{fault:?} was never given up");
        }
    }
}

#[test]
fn a_lost_part_loses_no_request() {
    let checkpoint = tiny();
    for (seed, from) in (40..).zip([5, 60, 300]) {
        let plan = FaultPlan::exactly(Fault::Fail, from, u64::MAX);
        let fleet = TestFleet::new(checkpoint.clone())
            .with_device(Role::Auto, Arc::new(FaultyDevice::new(simulated("A10G", 0), plan)))
            .with_device(Role::Auto, simulated("A10G", 1));
        fleet.run_many(&SeededEnv::new(seed), cases(&checkpoint, seed, 8));
    }
}

/// The tests above would pass on a device whose answers do not depend on its KV. Here the KV is damaged on
/// the device itself, where the engine cannot detect it: the tokens must differ.
#[test]
fn kv_that_is_damaged_or_stale_on_a_device_shows_in_the_tokens() {
    let checkpoint = tiny();
    let prompt = prompt(33, 9, &checkpoint.config);
    let expected = alone(&checkpoint, &prompt, 12);
    for fault in [Fault::BitFlip, Fault::Drop] {
        let plan =
            FaultPlan { seed: 5, rules: vec![Rule { fault, probability: 0.05, from: 0, until: None }] };
        let device = Arc::new(FaultyDevice::new(simulated("A10G", 0), plan));
        let fleet = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, device.clone());
        let answer = fleet.run_one(&SeededEnv::new(1), prompt.clone(), 12);
        assert!(device.struck() > 0);
        assert_ne!(answer.tokens, expected, "{fault:?}");
    }
}
