//! Models whose layers have windows, in contexts well over them: keys outside windows are freed, and the
//! tokens are those of the float64 forward pass.

use super::divided::unlike;
use crate::fleet::{Case, TestFleet, ask, greedy, prompt};
use mixfleet_hal::DType;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role;
use mixfleet_wire::{Tcp, TcpConfig};
use std::sync::Arc;

/// Windows of 5 to 9 tokens, in blocks of 8: of all layers, of some, and of most.
const WINDOWED: [&str; 4] = ["mistral-window", "qwen2-window", "gpt-oss", "qwen3-layer-types"];

fn windowed() -> impl Iterator<Item = (&'static str, Checkpoint)> {
    let known = tiny_variants().into_iter().filter(|(name, _)| WINDOWED.contains(name));
    known.map(|(name, checkpoint)| (name, checkpoint.load().unwrap()))
}

fn cases(checkpoint: &Checkpoint, lengths: &[(u32, usize)]) -> Vec<Case> {
    let case = |&(length, count): &(u32, usize)| {
        let prompt = prompt(length, 7 + u64::from(length), &checkpoint.config);
        Case { expected: greedy(checkpoint, &prompt, count), prompt }
    };
    lengths.iter().map(case).collect()
}

/// A question of 45 tokens, and one of 82 that goes on behind most of its answer.
fn two_turns(checkpoint: &Checkpoint) -> [Case; 2] {
    let question = prompt(45, 11, &checkpoint.config);
    let question = Case { expected: greedy(checkpoint, &question, 40), prompt: question };
    let more = prompt(7, 12, &checkpoint.config);
    let prompt = [&question.prompt[..], &question.expected[..30], &more].concat();
    let expected = greedy(checkpoint, &prompt, 8);
    [question, Case { prompt, expected }]
}

#[test]
fn parts_of_layers_are_as_many_as_windows_need() {
    let parts = windowed().map(|(name, checkpoint)| {
        let pages = checkpoint.config.in_window_pages().pages;
        assert!(pages.parts.lets_go(), "{name}");
        pages.parts.count()
    });
    assert_eq!(parts.collect::<Vec<_>>(), [1, 3, 3, 3]);
}

#[test]
fn long_answers_share_memory_that_their_whole_contexts_would_overflow() {
    for (seed, (name, checkpoint)) in (0..).zip(windowed()) {
        let cases = cases(&checkpoint, &[(30, 60), (50, 40), (61, 30), (9, 70), (40, 50), (3, 60)]);
        let fleet = || TestFleet::new(checkpoint.clone()).blocks(24);
        let mut members = unlike(2);
        let fleets = [
            fleet().with(Role::Auto),
            fleet().with(Role::Prefill).with(Role::Decode),
            fleet().with_stages(members.remove(0), members, &[2]),
        ];
        for (at, fleet) in fleets.into_iter().enumerate() {
            let usage = fleet.run_many(&SeededEnv::new(seed), cases.clone());
            assert_eq!((usage, fleet.panics()), (0.0, 0), "{name} on fleet {at}: pages are still in use");
        }
    }
}

#[test]
fn the_end_of_a_prompt_and_of_an_answer_can_be_reused() {
    for (name, checkpoint) in windowed() {
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Auto).blocks(64);
        let env = SeededEnv::new(3);
        let handle = fleet.start(Arc::new(env.clone()));
        let turns = two_turns(&checkpoint);
        env.run(async move {
            // again, after all windows have passed the earlier tokens; then with most of the answer
            for (at, cached) in [(0, 0), (0, 40), (1, 72)] {
                let Case { prompt, expected } = turns[at].clone();
                let (id, count) = (format!("{at}-{cached}"), expected.len() as u32);
                let answer = ask(&handle, id, prompt, count, None).await;
                assert_eq!(answer.tokens, expected, "{name}");
                assert_eq!(answer.cached_tokens, cached, "{name}");
            }
        });
    }
}

/// Bytes of a prompt of `tokens` tokens, the first `from` of which are there, to a receiver that keeps its
/// windows in blocks of this many tokens.
fn sent(checkpoint: &Checkpoint, (from, tokens): (u64, u64), block_tokens: u32) -> u64 {
    let pages = checkpoint.config.clone().in_window_pages().pages;
    let sent = pages.parts.tokens_sent(&(from..tokens), tokens, block_tokens);
    (sent * checkpoint.config.kv_bytes_per_token(DType::F32) as f64).round() as u64
}

const LENGTHS: [(u32, usize); 5] = [(30, 20), (61, 12), (9, 10), (50, 12), (3, 6)];

#[test]
fn a_hand_off_sends_what_its_receiver_will_keep_and_all_to_one_that_keeps_all() {
    for (seed, (name, checkpoint)) in (0..).zip(windowed()) {
        let fleet = || TestFleet::new(checkpoint.clone());
        let decoder = (Role::Decode, 8, DType::F32);
        let (halves, stages) = (|| checkpoint.config.divided(2).unwrap(), [vec![1.0], vec![1.0]]);
        let fleets = [
            (fleet().with(Role::Prefill).with(Role::Decode), Some(8)),
            (fleet().with(Role::Prefill).with_blocks(Role::Decode, 16), Some(16)),
            (
                fleet()
                    .with_partition((Role::Prefill, 8, DType::F32), unlike(2), halves())
                    .with(Role::Decode),
                Some(8),
            ),
            (fleet().with(Role::Prefill).with_partition(decoder, unlike(2), halves()), Some(8)),
            (
                fleet()
                    .with(Role::Prefill)
                    .with(Role::Decode)
                    .transport(Arc::new(Tcp::new(TcpConfig::loopback()).unwrap())),
                Some(8),
            ),
            (
                fleet().with(Role::Prefill).with_partition(
                    decoder,
                    unlike(2),
                    checkpoint.config.in_stages(&stages).unwrap(),
                ),
                None,
            ),
        ];
        for (at, (fleet, keeps_windows)) in fleets.into_iter().enumerate() {
            let cases = cases(&checkpoint, &LENGTHS);
            let lengths = || cases.iter().map(|case| case.prompt.len() as u32);
            let token_bytes = checkpoint.config.kv_bytes_per_token(DType::F32);
            let expected: u64 = match keeps_windows {
                Some(block) => {
                    let shape = checkpoint.config.cost_shape(DType::F32, DType::F32, block);
                    let of_shape: u64 = lengths().map(|tokens| shape.sent_bytes(tokens)).sum();
                    let own: u64 = lengths().map(|n| sent(&checkpoint, (0, n.into()), block)).sum();
                    assert_eq!(own, of_shape, "{name}: the fleet's view and the plan's");
                    of_shape
                }
                None => lengths().map(|tokens| u64::from(tokens) * token_bytes).sum(),
            };
            let usage = fleet.run_many(&SeededEnv::new(seed), cases.clone());
            assert_eq!((usage, fleet.panics()), (0.0, 0), "{name} on fleet {at}");
            assert_eq!(fleet.transfer_troubles(), (0, 0), "{name} on fleet {at}");
            assert_eq!(fleet.sent_bytes(), expected, "{name} on fleet {at}");
        }
    }
}

#[test]
fn damaged_pieces_of_windows_are_sent_again_and_given_up_ones_computed() {
    let (mut again, mut computed) = (0, 0);
    for (seed, (name, checkpoint)) in (0..).zip(windowed()) {
        for rate in [0.1, 0.5] {
            let fleet = TestFleet::new(checkpoint.clone())
                .with(Role::Prefill)
                .with(Role::Decode)
                .faults(FaultPlan::at_rate(Fault::BitFlip, rate, seed));
            let usage = fleet.run_many(&SeededEnv::new(seed), cases(&checkpoint, &LENGTHS));
            assert_eq!((usage, fleet.panics()), (0.0, 0), "{name} at {rate}");
            let (retries, recomputed) = fleet.transfer_troubles();
            (again, computed) = (again + retries, computed + recomputed);
        }
    }
    assert!(again > 50 && computed > 4, "{again} pieces again, {computed} prompts");
}

#[test]
fn a_receiver_that_has_a_prefix_is_sent_what_it_lacks_of_its_windows() {
    for (name, checkpoint) in windowed() {
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Prefill).with(Role::Decode);
        let env = SeededEnv::new(3);
        let handle = fleet.start(Arc::new(env.clone()));
        let turns = two_turns(&checkpoint);
        env.run(async move {
            for Case { prompt, expected } in turns {
                let (id, count) = (format!("{}", prompt.len()), expected.len() as u32);
                assert_eq!(ask(&handle, id, prompt, count, None).await.tokens, expected, "{name}");
            }
        });
        // nine blocks of the answer are there; the first device's pull covers all layers
        let pulled = fleet.pulled() * checkpoint.config.kv_bytes_per_token(DType::F32);
        let handed_off = sent(&checkpoint, (0, 45), 8) + sent(&checkpoint, (72, 82), 8);
        assert_eq!(fleet.sent_bytes(), handed_off + pulled, "{name}");
    }
}
