//! The engine in the seeded environment, on the reference device: whole requests against the float64
//! forward pass, under split placement, memory pressure, faults and clients that leave.

use crate::fleet::{TestFleet, ask, greedy, pressure, prompt, request};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::{styled_variants, tiny_variants};
use mixfleet_runtime::request::{FinishReason, Update};
use mixfleet_scheduler::fleet::Role;

#[test]
fn one_instance_draws_the_oracles_tokens_for_every_family() {
    for (name, checkpoint) in tiny_variants().into_iter().chain(styled_variants()) {
        let checkpoint = checkpoint.load().unwrap();
        let env = SeededEnv::new(1);
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Auto);
        for length in [1, 7, 8, 9, 40] {
            let prompt = prompt(length, u64::from(length), &checkpoint.config);
            let expected = greedy(&checkpoint, &prompt, 12);
            let answer = fleet.run_one(&env, prompt, 12);
            assert_eq!(answer.tokens, expected, "{name}, prompt of {length}");
            assert_eq!(answer.finish, Some(FinishReason::Length));
        }
    }
}

#[test]
fn a_split_request_draws_the_same_tokens_as_on_one_device() {
    for (name, checkpoint) in tiny_variants().into_iter().chain(styled_variants()) {
        let checkpoint = checkpoint.load().unwrap();
        let env = SeededEnv::new(2);
        // Different block sizes require that pages are converted.
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Prefill).with_blocks(Role::Decode, 5);
        for length in [1, 8, 33] {
            let prompt = prompt(length, 90 + u64::from(length), &checkpoint.config);
            let expected = greedy(&checkpoint, &prompt, 10);
            let answer = fleet.run_one(&env, prompt, 10);
            assert_eq!(answer.tokens, expected, "{name}, prompt of {length}");
            assert_eq!(answer.placed, [("device0".to_string(), "device1".to_string())]);
        }
    }
}

#[test]
fn many_requests_share_too_little_memory_and_all_end_right() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for seed in 0..6 {
        let env = SeededEnv::new(seed);
        let roles = if seed % 2 == 0 { vec![Role::Auto] } else { vec![Role::Auto, Role::Auto] };
        let fleet = roles.into_iter().fold(TestFleet::new(checkpoint.clone()), TestFleet::with).blocks(14);
        let usage = fleet.run_many(&env, pressure(&checkpoint, seed, 14));
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
    }
}

#[test]
fn instances_that_hand_off_to_each_other_under_pressure_never_block() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for seed in 100..103 {
        let env = SeededEnv::new(seed);
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Auto).with(Role::Auto).blocks(10);
        let usage = fleet.run_many(&env, pressure(&checkpoint, seed, 20));
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
    }
}

#[test]
fn logits_that_are_no_numbers_fail_the_request_and_nothing_else() {
    let (_, random) = tiny_variants().remove(0);
    let mut tensors = random.tensors().unwrap();
    let norm = tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
    norm.bytes = norm.bytes.chunks(4).flat_map(|_| f32::NAN.to_le_bytes()).collect();
    norm.dtype = mixfleet_hal::DType::F32;
    let broken = Checkpoint::from_parts(random.model_config().unwrap(), tensors).unwrap();
    let env = SeededEnv::new(7);
    let prompt = prompt(9, 1, &broken.config);
    let answer = TestFleet::new(broken).with(Role::Auto).run_one(&env, prompt, 4);
    assert!(answer.tokens.is_empty(), "{answer:?}");
    assert!(answer.failure.is_some_and(|message| message.contains("number")), "no failure was reported");
}

#[test]
fn corrupt_lost_failed_and_hung_transfers_never_change_an_answer() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for (seed, fault) in (20..).zip([Fault::BitFlip, Fault::Drop, Fault::Fail, Fault::Hang]) {
        for probability in [0.2, 1.0] {
            // The first 20 writes measure the two links.
            let rule = Rule { fault, probability, from: 20, until: None };
            let env = SeededEnv::new(seed);
            let fleet = TestFleet::new(checkpoint.clone())
                .with(Role::Prefill)
                .with(Role::Decode)
                .faults(FaultPlan { seed, rules: vec![rule] });
            let usage = fleet.run_many(&env, pressure(&checkpoint, seed, 6));
            assert_eq!(usage, 0.0, "{fault:?} at {probability}: blocks are still in use");
            let (retries, recomputes) = fleet.transfer_troubles();
            assert!(retries > 0, "{fault:?} at {probability} struck nothing");
            assert!(probability < 1.0 || recomputes > 0, "{fault:?} was never given up");
        }
    }
}

#[test]
fn a_lost_instance_loses_no_request() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for (seed, from) in (40..).zip([5, 23, 60, 140, 300]) {
        let env = SeededEnv::new(seed);
        let fleet = TestFleet::new(checkpoint.clone())
            .with_faults(Role::Auto, FaultPlan::exactly(Fault::Fail, from, u64::MAX))
            .with(Role::Auto);
        fleet.run_many(&env, pressure(&checkpoint, seed, 8));
    }
}

#[test]
fn clients_that_leave_leave_nothing_behind() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for seed in 60..64 {
        let env = SeededEnv::new(seed);
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Prefill).with(Role::Decode).blocks(40);
        let usage = fleet.run_leavers(&env, seed, 100);
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
    }
}

#[test]
fn a_repeated_prompt_is_reused_but_not_across_tenants() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let env = SeededEnv::new(80);
    for roles in [vec![Role::Auto], vec![Role::Prefill, Role::Decode]] {
        let fleet = roles.into_iter().fold(TestFleet::new(checkpoint.clone()), TestFleet::with);
        let prompt = prompt(30, 5, &checkpoint.config);
        let salts = [None, None, Some("a"), Some("a"), Some("b")];
        let cached = fleet.run_in_turn(&env, &prompt, &salts);
        // Blocks of 8 tokens; the last token is always computed.
        assert_eq!(cached, [0, 24, 0, 24, 0]);
    }
}

/// Number of steps between the last arrival and its first token, by the log: each gives a decoding sequence
/// one token.
fn steps_to_the_last_ones_first_token(log: &str) -> usize {
    let events = log.lines().skip(1).map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let events: Vec<_> = events.map(|line| line["event"].clone()).collect();
    let arrived = events.iter().rposition(|event| event["event"] == "arrived").unwrap();
    let request = &events[arrived]["request"];
    let until = |event: &&serde_json::Value| event["event"] != "prefill_done" || event["request"] != *request;
    let mut tokens = std::collections::BTreeMap::new();
    for event in events[arrived..].iter().take_while(until).filter(|e| e["event"] == "decode_step") {
        *tokens.entry(event["requests"].to_string()).or_insert(0) += 1;
    }
    tokens.into_values().max().unwrap_or(0)
}

#[test]
fn an_urgent_request_waits_for_no_flex_answer_and_for_no_flex_prompt() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let of = |length, seed| prompt(length, seed, &checkpoint.config);
    // There are more answers than slots; or an answer, and a prompt of 13 steps beside it.
    for flex in [vec![(30, 40); 12], vec![(30, 40), (150, 2)]] {
        let env = SeededEnv::new(3);
        let (fleet, log) = TestFleet::new(checkpoint.clone()).with(Role::Auto).logged();
        let handle = fleet.start(std::sync::Arc::new(env.clone()));
        let flex: Vec<_> = (0..).zip(flex).map(|(seed, (length, count))| (of(length, seed), count)).collect();
        let urgent = of(40, 99);
        let answer = env.run(async move {
            let mut others = Vec::new();
            for (prompt, count) in flex {
                others.push(handle.submit(request("flex".into(), prompt, count, None)).await.unwrap());
            }
            for _ in 0..5 {
                while !matches!(others[0].recv().await, Some(Update::Token { .. })) {}
            }
            let answer = ask(&handle, "urgent".into(), urgent, 3, None).await;
            for mut updates in others {
                while !matches!(updates.recv().await.unwrap(), Update::Finished { .. }) {}
            }
            answer
        });
        assert_eq!(answer.tokens, greedy(&checkpoint, &of(40, 99), 3));
        // It has 40 tokens beside others, 12 per step, after the step in progress.
        let steps = steps_to_the_last_ones_first_token(&log.text());
        assert!((1..=5).contains(&steps), "{steps} steps");
    }
}
