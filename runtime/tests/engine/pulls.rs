//! Prefixes that are pulled from one instance to another, in the seeded environment: under faults too,
//! answers have the tokens of the float64 forward pass and no block stays in use.

use crate::fleet::{Case, ReceivedAnswer, TestFleet, ask, greedy, prompt, request};
use mixfleet_hal::DType;
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::{Policy, Role};
use std::sync::Arc;
use std::time::Duration;

/// Length of an answer.
const ANSWER: usize = 20;
const TURNS: u64 = 3;

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// A conversation: prompts of 24, 47 and 70 tokens, each of which continues the previous one and its answer,
/// with the answers.
fn conversation(checkpoint: &Checkpoint, seed: u64) -> Vec<Case> {
    let mut said = Vec::new();
    let turn = |turn: u64| {
        said.extend(prompt(if turn == 0 { 24 } else { 3 }, seed * 100 + turn, &checkpoint.config));
        let (prompt, expected) = (said.clone(), greedy(checkpoint, &said, ANSWER));
        said.extend(&expected);
        Case { prompt, expected }
    };
    (0..TURNS).map(turn).collect()
}

pub(super) fn conversations(checkpoint: &Checkpoint, seeds: std::ops::Range<u64>) -> Arc<Vec<Vec<Case>>> {
    Arc::new(seeds.map(|seed| conversation(checkpoint, seed)).collect())
}

/// Runs all conversations at once and checks their answers; returns the cached tokens by conversation.
pub(super) fn converse(
    fleet: &TestFleet,
    env: &SeededEnv,
    conversations: &Arc<Vec<Vec<Case>>>,
) -> Vec<Vec<u32>> {
    let handle = fleet.start(Arc::new(env.clone()));
    let (conversations, world) = (conversations.clone(), env.clone());
    env.run(async move {
        let mut ends = Vec::new();
        for at in 0..conversations.len() {
            let (handle, conversations, env) = (handle.clone(), conversations.clone(), world.clone());
            let (sender, end) = tokio::sync::oneshot::channel();
            world.spawn(Box::pin(async move {
                let mut cached = Vec::new();
                for (turn, case) in conversations[at].iter().enumerate() {
                    let id = format!("{at}, turn {turn}");
                    let answer = ask(&handle, id, case.prompt.clone(), ANSWER as u32, None).await;
                    let ReceivedAnswer { tokens, failure, cached_tokens, .. } = answer;
                    assert_eq!(
                        (tokens, failure),
                        (case.expected.clone(), None),
                        "{env:?}: {at}, turn {turn}"
                    );
                    cached.push(cached_tokens);
                }
                let _ = sender.send(cached);
            }));
            ends.push(end);
        }
        let mut all = Vec::new();
        for end in ends {
            all.push(end.await.unwrap());
        }
        // This gives every worker time to notice.
        for _ in 0..20 {
            world.sleep(Duration::from_secs(1)).await;
        }
        all
    })
}

fn pair(checkpoint: &Checkpoint) -> TestFleet {
    TestFleet::new(checkpoint.clone()).with(Role::Prefill).with(Role::Decode)
}

#[test]
fn the_next_turn_begins_with_what_the_decoder_holds_of_the_last_answer() {
    let checkpoint = checkpoint();
    let fleet = pair(&checkpoint);
    let cached = converse(&fleet, &SeededEnv::new(1), &conversations(&checkpoint, 1..2));
    // In blocks of 8, the KV of all but the last token of an answer is held.
    assert_eq!(cached, [[0, 40, 64]]);
    assert_eq!(fleet.pulled(), (40 - 24) + (64 - 40));
}

/// KV that the decoder holds in blocks of 8 in f32 is pulled into blocks of 12 in bf16, and vice versa.
#[test]
fn a_prefix_is_pulled_between_unlike_pages_and_dtypes() {
    let checkpoint = checkpoint();
    let kinds = [(8, DType::F32), (12, DType::Bf16)];
    for [prefill, decode] in [kinds, [kinds[1], kinds[0]]] {
        let fleet = TestFleet::new(checkpoint.clone());
        let fleet = fleet.with_kv(Role::Prefill, prefill.0, prefill.1);
        let fleet = fleet.with_kv(Role::Decode, decode.0, decode.1);
        let handle_of = |env: &SeededEnv| fleet.start(Arc::new(env.clone()));
        let env = SeededEnv::new(3);
        let (handle, world, config) = (handle_of(&env), env.clone(), checkpoint.config.clone());
        let cached = env.run(async move {
            let first = prompt(24, 7, &config);
            let answer = ask(&handle, "first".into(), first.clone(), 60, None).await;
            assert_eq!((answer.tokens.len(), &answer.failure), (60, &None));
            let next = [first, answer.tokens, prompt(3, 8, &config)].concat();
            let answer = ask(&handle, "next".into(), next, ANSWER as u32, None).await;
            assert_eq!((answer.tokens.len(), &answer.failure), (ANSWER, &None));
            world.sleep(Duration::from_secs(20)).await;
            answer.cached_tokens
        });
        // Of the 83 tokens that have KV, whole blocks of both kinds are held.
        let held = (83 / decode.0 * decode.0) / prefill.0 * prefill.0;
        assert_eq!(cached, held, "{prefill:?} pulls from {decode:?}");
        assert_eq!(fleet.pulled(), u64::from(held - 24 / prefill.0 * prefill.0));
    }
}

#[test]
fn what_the_holder_gave_up_to_its_lower_tiers_is_pulled_too() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 1..4);
    let run = |fleet: TestFleet| {
        converse(&fleet, &SeededEnv::new(2), &talks);
        assert_eq!((fleet.usage_of(0), fleet.usage_of(1)), (0.0, 0.0), "blocks are still in use");
        fleet.pulled()
    };
    let without = run(pair(&checkpoint).blocks(13));
    let with = run(pair(&checkpoint).blocks(13).lower(32, None));
    assert!(with > without, "{with} tokens with lower tiers, {without} without");
}

#[test]
fn what_rots_in_the_holders_host_memory_is_not_pulled_but_computed() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 1..4);
    let fleet = pair(&checkpoint).blocks(13).lower(32, None);
    fleet.rot(true);
    // This compares each answer.
    converse(&fleet, &SeededEnv::new(2), &talks);
    assert_eq!((fleet.usage_of(0), fleet.usage_of(1)), (0.0, 0.0), "blocks are still in use");
    assert!(fleet.bad_blocks(0) + fleet.bad_blocks(1) > 0, "nothing rotted");
}

#[test]
fn pieces_that_break_are_sent_again_or_computed() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 10..12);
    let (mut retries, mut recomputes, mut pulled) = (0, 0, 0);
    for (seed, fault) in (10..).zip([Fault::BitFlip, Fault::Fail, Fault::Drop, Fault::Hang]) {
        for probability in [0.2, 0.7] {
            // The first writes measure the links.
            let rules = vec![Rule { fault, probability, from: 20, until: None }];
            let fleet = pair(&checkpoint).faults(FaultPlan { seed, rules });
            let fleet = fleet.hand_off_timeout(Duration::from_millis(50));
            converse(&fleet, &SeededEnv::new(seed), &talks);
            assert_eq!(
                (fleet.usage_of(0), fleet.usage_of(1)),
                (0.0, 0.0),
                "seed {seed}: blocks are still in use"
            );
            let troubles = fleet.transfer_troubles();
            (retries, recomputes) = (retries + troubles.0, recomputes + troubles.1);
            pulled += fleet.pulled();
        }
    }
    assert!(
        retries > 0 && recomputes > 0 && pulled > 0,
        "{retries} retries, {recomputes} recomputes, {pulled} pulled"
    );
}

#[test]
fn under_pressure_everyone_ends_right_and_nothing_leaks() {
    let checkpoint = checkpoint();
    let policies = [Policy::KvcacheCentric { threshold: 1.0 }, Policy::PerDollar];
    let talks = conversations(&checkpoint, 1..7);
    for (seed, policy) in (20..28).zip(policies.into_iter().cycle()) {
        let roles = match seed % 4 {
            0 | 1 => vec![Role::Prefill, Role::Decode, Role::Auto],
            _ => vec![Role::Prefill, Role::Prefill, Role::Decode],
        };
        let fleet =
            roles.into_iter().fold(TestFleet::new(checkpoint.clone()), TestFleet::with).policy(policy);
        let fleet = if seed < 24 { fleet.blocks(20) } else { fleet.blocks(14).lower(8, None) };
        converse(&fleet, &SeededEnv::new(seed), &talks);
        let usage: Vec<f64> = (0..3).map(|member| fleet.usage_of(member)).collect();
        assert_eq!(usage, [0.0; 3], "seed {seed}: blocks are still in use");
        assert!(fleet.pulled() > 0, "seed {seed}: nothing was pulled");
    }
}

#[test]
fn clients_that_leave_while_a_prefix_travels_leave_nothing_behind() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 1..5);
    for seed in 40..44 {
        let env = SeededEnv::new(seed);
        // Pieces wait for an end that comes late.
        let plan = FaultPlan {
            seed,
            rules: vec![Rule { fault: Fault::Hang, probability: 0.5, from: 20, until: None }],
        };
        let fleet = pair(&checkpoint).faults(plan).hand_off_timeout(Duration::from_millis(20));
        let handle = fleet.start(Arc::new(env.clone()));
        let (talks, world) = (talks.clone(), env.clone());
        env.run(async move {
            for (at, talk) in talks.iter().enumerate() {
                for (turn, case) in talk.iter().enumerate() {
                    let id = format!("{at}, turn {turn}");
                    if turn + 1 < talk.len() {
                        let answer = ask(&handle, id, case.prompt.clone(), ANSWER as u32, None).await;
                        assert_eq!(answer.tokens, case.expected, "{world:?}");
                        continue;
                    }
                    let left =
                        handle.submit(request(id, case.prompt.clone(), ANSWER as u32, None)).await.unwrap();
                    world.sleep(Duration::from_millis(world.random() % 30)).await;
                    drop(left);
                }
            }
            for _ in 0..20 {
                world.sleep(Duration::from_secs(1)).await;
            }
        });
        assert_eq!(
            (fleet.usage_of(0), fleet.usage_of(1)),
            (0.0, 0.0),
            "seed {seed}: blocks are still in use"
        );
    }
}

#[test]
fn a_holder_that_is_lost_keeps_nobody_waiting() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 1..5);
    for from in [150, 300, 600, 1200] {
        let plan = FaultPlan::exactly(Fault::Fail, from, u64::MAX);
        let fleet = TestFleet::new(checkpoint.clone())
            .with(Role::Prefill)
            .with_faults(Role::Decode, plan)
            .with(Role::Auto)
            .blocks(20);
        converse(&fleet, &SeededEnv::new(from), &talks);
        assert_eq!(
            (fleet.usage_of(0), fleet.usage_of(2)),
            (0.0, 0.0),
            "from {from}: blocks are still in use"
        );
    }
}
