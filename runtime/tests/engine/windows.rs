//! Models whose layers have windows, in contexts well over them: what is out of a window is given back, and
//! the tokens are those of the float64 forward pass.

use super::divided::unlike;
use crate::fleet::{Case, TestFleet, ask, greedy, prompt};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::random::tiny_variants;
use mixfleet_scheduler::fleet::Role;
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
        let question = prompt(45, 11, &checkpoint.config);
        let answer = greedy(&checkpoint, &question, 40);
        let more = [&question[..], &answer[..30], &prompt(7, 12, &checkpoint.config)].concat();
        let expected = [answer, greedy(&checkpoint, &more, 8)];
        env.run(async move {
            // again, what was computed before it was left by all windows; then with most of the answer
            for (prompt, at, cached) in [(&question, 0, 0), (&question, 0, 40), (&more, 1, 72)] {
                let count = expected[at].len() as u32;
                let id = format!("{}-{cached}", prompt.len());
                let answer = ask(&handle, id, prompt.clone(), count, None).await;
                assert_eq!(answer.tokens, expected[at], "{name}");
                assert_eq!(answer.cached_tokens, cached, "{name}");
            }
        });
    }
}
