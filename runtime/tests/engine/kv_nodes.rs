//! KV nodes in the seeded environment: they take KV computed by others, lend it after its device has evicted
//! it, and every answer has the tokens of the float64 forward pass, even if nodes fail.

use crate::fleet::{Case, ReceivedAnswer, TestFleet, ask, greedy, prompt};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role;
use std::sync::Arc;
use std::time::Duration;

const ANSWER: usize = 6;
const TURNS: usize = 3;

type Talk = Vec<Case>;

/// Conversations whose prompts grow by 20 tokens and the last answer in each turn.
fn talks(checkpoint: &Checkpoint, count: u64) -> Arc<Vec<Talk>> {
    let talk = |seed: u64| {
        let mut said = Vec::new();
        let turn = |turn: usize| {
            said.extend(prompt(20, seed * 100 + turn as u64, &checkpoint.config));
            let (prompt, expected) = (said.clone(), greedy(checkpoint, &said, ANSWER));
            said.extend(&expected);
            Case { prompt, expected }
        };
        (0..TURNS).map(turn).collect()
    };
    Arc::new((0..count).map(talk).collect())
}

/// Runs the first turns of all talks one after the other, then their second ones, and so on: by then the
/// device has evicted the turn before. Checks every answer, and returns the cached tokens.
fn converse(fleet: &TestFleet, env: &SeededEnv, talks: &Arc<Vec<Talk>>) -> u32 {
    let handle = fleet.start(Arc::new(env.clone()));
    let (talks, world) = (talks.clone(), env.clone());
    env.run(async move {
        let mut cached = 0;
        for turn in 0..TURNS {
            for (at, talk) in talks.iter().enumerate() {
                let case = &talk[turn];
                let id = format!("{at}, turn {turn}");
                let answer = ask(&handle, id.clone(), case.prompt.clone(), ANSWER as u32, None).await;
                let ReceivedAnswer { tokens, failure, cached_tokens, .. } = answer;
                assert_eq!((tokens, failure), (case.expected.clone(), None), "{world:?}: {id}");
                cached += cached_tokens;
                world.sleep(Duration::from_millis(20)).await;
            }
        }
        // This gives every worker time to notice.
        world.sleep(Duration::from_secs(20)).await;
        cached
    })
}

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// A device for two conversations.
fn small(checkpoint: &Checkpoint) -> TestFleet {
    TestFleet::new(checkpoint.clone()).with(Role::Auto).blocks(24)
}

#[test]
fn a_node_lends_what_the_device_gave_up_and_answers_are_the_same() {
    let checkpoint = checkpoint();
    let talks = talks(&checkpoint, 6);
    let without = converse(&small(&checkpoint), &SeededEnv::new(1), &talks);
    let fleet = small(&checkpoint).with(Role::Kv);
    let with = converse(&fleet, &SeededEnv::new(1), &talks);
    // 25 and 51 tokens of the turn before have KV, in blocks of 8; the device evicted almost all of them
    assert_eq!((without, with), (64, 6 * (24 + 48)));
    assert_eq!((fleet.usage_of(0), fleet.usage_of(1)), (0.0, 0.0), "blocks are still in use");
}

#[test]
fn prompts_and_answers_of_two_instances_are_kept_too() {
    let checkpoint = checkpoint();
    let talks = talks(&checkpoint, 6);
    let pair = || TestFleet::new(checkpoint.clone()).with(Role::Prefill).with(Role::Decode).blocks(24);
    let without = converse(&pair(), &SeededEnv::new(2), &talks);
    let fleet = pair().with(Role::Kv);
    let with = converse(&fleet, &SeededEnv::new(2), &talks);
    assert!(with > without && with == 6 * (24 + 48), "{with} cached with a node, {without} without");
    let usage: Vec<f64> = (0..3).map(|member| fleet.usage_of(member)).collect();
    assert_eq!(usage, [0.0; 3], "blocks are still in use");
}

#[test]
fn a_node_that_is_lost_costs_hits_and_nothing_else() {
    let checkpoint = checkpoint();
    let talks = talks(&checkpoint, 6);
    let mut hits = Vec::new();
    for from in [0, 30, 90, 200, u64::MAX] {
        let plan = FaultPlan::exactly(Fault::Fail, from, u64::MAX);
        let fleet = small(&checkpoint).with_faults(Role::Kv, plan);
        hits.push(converse(&fleet, &SeededEnv::new(from), &talks));
        assert_eq!(fleet.usage_of(0), 0.0, "from {from}: blocks are still in use");
    }
    assert!(hits[0] == 64 && hits[4] == 6 * (24 + 48) && hits.is_sorted(), "{hits:?}");
}

#[test]
fn pieces_that_break_on_their_way_to_a_node_and_back_are_sent_again_or_computed() {
    let checkpoint = checkpoint();
    let talks = talks(&checkpoint, 6);
    for (seed, fault) in (1..).zip([Fault::BitFlip, Fault::Fail, Fault::Drop, Fault::Hang]) {
        // The first writes measure the links.
        let rules = vec![Rule { fault, probability: 0.5, from: 20, until: None }];
        let fleet = small(&checkpoint).with(Role::Kv).faults(FaultPlan { seed, rules });
        let fleet = fleet.hand_off_timeout(Duration::from_millis(50));
        converse(&fleet, &SeededEnv::new(seed), &talks);
        let (retries, recomputes) = fleet.transfer_troubles();
        assert!(retries + recomputes > 0, "{fault:?}: nothing broke");
        assert_eq!((fleet.usage_of(0), fleet.usage_of(1)), (0.0, 0.0), "{fault:?}: blocks are still in use");
    }
}
