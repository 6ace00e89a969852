//! KV that a device's memory evicts, in the seeded environment: returning conversations are served from host
//! memory and from disk, with the tokens of the float64 forward pass, also if bytes are damaged.

use crate::fleet::{ReceivedAnswer, TestFleet, ask, greedy, pressure, prompt};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_scheduler::fleet::Role;
use std::sync::Arc;
use std::time::Duration;

/// Blocks that fit onto a disk with room for everything.
const PLENTY: u64 = 1 << 20;

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// Runs the prompts one after the other.
fn converse(fleet: &TestFleet, env: &SeededEnv, prompts: &[Vec<u32>]) -> Vec<ReceivedAnswer> {
    let handle = fleet.start(Arc::new(env.clone()));
    let prompts = prompts.to_vec();
    env.run(async move {
        let mut answers = Vec::new();
        for prompt in prompts {
            answers.push(ask(&handle, "turn".into(), prompt, 4, None).await);
        }
        answers
    })
}

/// Two conversations of 40 tokens in turn, with device memory for 7 blocks of 8.
fn two_in_turn(checkpoint: &Checkpoint) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let of = |seed| prompt(40, seed, &checkpoint.config);
    let prompts = vec![of(1), of(2), of(1), of(2), of(1)];
    let expected = prompts.iter().map(|prompt| greedy(checkpoint, prompt, 4)).collect();
    (prompts, expected)
}

fn assert_right(answers: &[ReceivedAnswer], expected: &[Vec<u32>]) {
    for (at, (answer, expected)) in answers.iter().zip(expected).enumerate() {
        assert_eq!((&answer.tokens, &answer.failure), (expected, &None), "turn {at}");
    }
}

fn cached(answers: &[ReceivedAnswer]) -> Vec<u32> {
    answers.iter().map(|answer| answer.cached_tokens).collect()
}

#[test]
fn a_conversation_that_returns_is_loaded_from_host_memory() {
    let checkpoint = checkpoint();
    let (prompts, expected) = two_in_turn(&checkpoint);
    let env = SeededEnv::new(1);
    let fleet = TestFleet::new(checkpoint.clone()).with(Role::Auto).blocks(7);
    let without = converse(&fleet, &env, &prompts);
    assert_right(&without, &expected);
    let fleet = TestFleet::new(checkpoint).with(Role::Auto).blocks(7).lower(16, None);
    let with = converse(&fleet, &env, &prompts);
    assert_right(&with, &expected);
    // Of 40 tokens, 4 blocks can be reused.
    assert_eq!(cached(&with), [0, 0, 32, 32, 32]);
    assert!(cached(&without).iter().sum::<u32>() < 32, "{:?}", cached(&without));
    assert!(fleet.tier_hits(0, "dram") >= 8, "{}", fleet.tier_hits(0, "dram"));
    assert_eq!(fleet.usage_of(0), 0.0);
}

/// A fleet of one device with memory for 7 blocks, host memory for 2 and a disk.
fn on_disk(checkpoint: &Checkpoint, disk: &SimDisk) -> TestFleet {
    TestFleet::new(checkpoint.clone()).with(Role::Auto).blocks(7).lower(2, Some((disk.clone(), PLENTY)))
}

#[test]
fn what_host_memory_gives_up_comes_from_the_disk_even_a_prefix_longer_than_host_memory() {
    let checkpoint = checkpoint();
    let (prompts, expected) = two_in_turn(&checkpoint);
    let fleet = on_disk(&checkpoint, &SimDisk::default());
    let answers = converse(&fleet, &SeededEnv::new(2), &prompts);
    assert_right(&answers, &expected);
    assert_eq!(cached(&answers), [0, 0, 32, 32, 32]);
    assert!(fleet.tier_hits(0, "ssd") >= 6, "{}", fleet.tier_hits(0, "ssd"));
}

#[test]
fn a_second_engine_serves_what_the_first_left_on_the_disk() {
    let checkpoint = checkpoint();
    let prompts: Vec<_> = (1..4).map(|seed| prompt(40, seed, &checkpoint.config)).collect();
    let disk = SimDisk::default();
    converse(&on_disk(&checkpoint, &disk), &SeededEnv::new(3), &prompts);
    let second = on_disk(&checkpoint, &disk.restart());
    let answers = converse(&second, &SeededEnv::new(4), &prompts[..1]);
    assert_right(&answers, &[greedy(&checkpoint, &prompts[0], 4)]);
    assert_eq!((cached(&answers), second.tier_hits(0, "ssd")), (vec![32], 4));
}

/// Three conversations that one engine leaves on a disk, and the disk.
fn left_on_disk(checkpoint: &Checkpoint) -> (Vec<Vec<u32>>, SimDisk) {
    let prompts: Vec<_> = (1..4).map(|seed| prompt(40, seed, &checkpoint.config)).collect();
    let disk = SimDisk::default();
    converse(&on_disk(checkpoint, &disk), &SeededEnv::new(3), &prompts);
    (prompts, disk.restart())
}

/// Runs the first conversation now, a second one, and the first one again once the namespace of the blocks on
/// the disk is known.
fn ask_until_known(checkpoint: &Checkpoint, namespace: u64) -> (Vec<u32>, u64, Vec<Vec<u32>>) {
    let (prompts, disk) = left_on_disk(checkpoint);
    let (tell, told) = tokio::sync::oneshot::channel();
    let fleet = on_disk(checkpoint, &disk).disk_known(Box::pin(async move { told.await.ok() }));
    let env = SeededEnv::new(9);
    let handle = fleet.start(Arc::new(env.clone()));
    let asked = [&prompts[0], &prompts[1], &prompts[0]].map(Clone::clone);
    let world = env.clone();
    let answers = env.run(async move {
        let [first, second, again] = asked;
        let mut answers = Vec::new();
        for prompt in [first, second] {
            answers.push(ask(&handle, "before".into(), prompt, 4, None).await);
        }
        tell.send(namespace).unwrap();
        world.sleep(Duration::from_secs(1)).await;
        answers.push(ask(&handle, "after".into(), again, 4, None).await);
        answers
    });
    let tokens = answers.iter().map(|answer| answer.tokens.clone()).collect();
    (cached(&answers), fleet.tier_hits(0, "ssd"), tokens)
}

#[test]
fn an_engine_serves_without_its_disk_until_the_model_is_known_and_with_it_from_then_on() {
    let checkpoint = checkpoint();
    let (cached, hits, tokens) = ask_until_known(&checkpoint, 7);
    assert_eq!(cached, [0, 0, 32]);
    assert!(hits >= 2, "{hits} of 4 blocks came from the disk, which host memory has no room for");
    let expected = [1, 2, 1].map(|seed| greedy(&checkpoint, &prompt(40, seed, &checkpoint.config), 4));
    assert_eq!(tokens, expected);
}

#[test]
fn blocks_of_another_model_are_refused_when_the_model_becomes_known() {
    let checkpoint = checkpoint();
    let (cached, hits, tokens) = ask_until_known(&checkpoint, 8);
    assert_eq!((&cached[..2], hits), (&[0, 0][..], 0));
    assert_eq!(tokens[2], greedy(&checkpoint, &prompt(40, 1, &checkpoint.config), 4));
}

#[test]
fn blocks_that_rot_in_host_memory_are_computed_again() {
    let checkpoint = checkpoint();
    let (prompts, expected) = two_in_turn(&checkpoint);
    let fleet = TestFleet::new(checkpoint).with(Role::Auto).blocks(7).lower(16, None);
    fleet.rot(true);
    let answers = converse(&fleet, &SeededEnv::new(1), &prompts);
    assert_right(&answers, &expected);
    assert!(fleet.bad_blocks(0) > 0, "nothing rotted");
}

#[test]
fn a_disk_that_hangs_is_left_out_and_no_answer_waits_for_it() {
    let checkpoint = checkpoint();
    let (prompts, expected) = two_in_turn(&checkpoint);
    for seed in 0..6 {
        let env = SeededEnv::with_blocking_workers(seed);
        let disk = SimDisk::default();
        let world = env.clone();
        disk.takes(Duration::from_millis(1), Duration::from_secs(600), move |span| {
            world.block_until(world.now() + Seconds(span.as_secs_f64()));
        });
        let fleet = on_disk(&checkpoint, &disk);
        disk.set_plan(FaultPlan::exactly(Fault::Hang, 10 + seed * 2, u64::MAX));
        assert_right(&converse(&fleet, &env, &prompts), &expected);
        assert_eq!(fleet.outages(0), 1, "{env:?}: it is used again");
        // Five answers take this long, and the disk's second.
        assert!(env.now().0 < 5.0, "{env:?}: {:?}", env.now());
    }
}

#[test]
fn blocks_that_rot_are_computed_again() {
    let checkpoint = checkpoint();
    let (prompts, expected) = two_in_turn(&checkpoint);
    for probability in [0.5, 1.0] {
        let rule = Rule { fault: Fault::BitFlip, probability, from: 0, until: None };
        let disk = SimDisk::new(FaultPlan { seed: 5, rules: vec![rule] });
        let fleet = on_disk(&checkpoint, &disk);
        let answers = converse(&fleet, &SeededEnv::new(5), &prompts);
        assert_right(&answers, &expected);
        assert!(fleet.bad_blocks(0) > 0, "nothing rotted");
        assert!(probability < 1.0 || fleet.tier_hits(0, "ssd") == 0, "a rotten block was served");
    }
}

#[test]
fn a_disk_that_fails_lies_or_is_full_changes_no_answer() {
    let checkpoint = checkpoint();
    let (prompts, expected) = two_in_turn(&checkpoint);
    for fault in [Fault::Fail, Fault::Drop] {
        let rule = Rule { fault, probability: 0.3, from: 4, until: None };
        let disk = SimDisk::new(FaultPlan { seed: 6, rules: vec![rule] });
        assert_right(&converse(&on_disk(&checkpoint, &disk), &SeededEnv::new(6), &prompts), &expected);
    }
    let disk = SimDisk::default();
    disk.set_room(Some(4096));
    let fleet = on_disk(&checkpoint, &disk);
    assert_right(&converse(&fleet, &SeededEnv::new(7), &prompts), &expected);
    assert_eq!(fleet.tier_hits(0, "ssd"), 0, "a block of 4 KiB lies on a disk of 4 KiB");
}

#[test]
fn under_pressure_everyone_ends_right_and_nothing_leaks_beside_hand_offs_too() {
    let checkpoint = checkpoint();
    let (mut dram, mut ssd) = (0, 0);
    for (seed, roles) in (10..).zip([
        vec![Role::Auto],
        vec![Role::Auto, Role::Auto],
        vec![Role::Prefill, Role::Decode],
        vec![Role::Prefill, Role::Decode],
    ]) {
        let env = SeededEnv::new(seed);
        let count = roles.len();
        let fleet = roles.into_iter().fold(TestFleet::new(checkpoint.clone()), TestFleet::with);
        let fleet = fleet.blocks(10).lower(6, Some((SimDisk::default(), PLENTY)));
        let usage = fleet.run_many(&env, pressure(&checkpoint, seed, 16));
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
        dram += (0..count).map(|instance| fleet.tier_hits(instance, "dram")).sum::<u64>();
        ssd += fleet.tier_hits(0, "ssd");
    }
    assert!(dram > 0 && ssd > 0, "{dram} blocks from host memory, {ssd} from disk");
}

#[test]
fn a_lost_device_and_clients_that_leave_leave_nothing_behind() {
    let checkpoint = checkpoint();
    for (seed, from) in (40..).zip([60, 300]) {
        let fleet = TestFleet::new(checkpoint.clone())
            .with_faults(Role::Auto, FaultPlan::exactly(Fault::Fail, from, u64::MAX))
            .with(Role::Auto)
            .blocks(10)
            .lower(6, Some((SimDisk::default(), PLENTY)));
        fleet.run_many(&SeededEnv::new(seed), pressure(&checkpoint, seed, 8));
        assert_eq!(fleet.usage_of(1), 0.0, "seed {seed}: blocks are still in use");
    }
    let fleet = TestFleet::new(checkpoint).with(Role::Prefill).with(Role::Decode).blocks(40);
    let fleet = fleet.lower(6, Some((SimDisk::default(), PLENTY)));
    let usage = fleet.run_leavers(&SeededEnv::new(60), 60, 40);
    assert_eq!(usage, 0.0, "blocks are still in use");
}
