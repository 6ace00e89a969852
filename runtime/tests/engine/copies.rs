//! Prefixes that many requests share, in the seeded environment. They are copied to further instances before
//! a request has to compute them there, and every answer has the tokens of the float64 forward pass.

use crate::fleet::{Case, ReceivedAnswer, TestFleet, ask, greedy, prompt};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role;
use std::sync::Arc;
use std::time::Duration;

const ANSWER: usize = 6;
/// A system prompt of 15 blocks.
const SHARED: u32 = 120;

/// Questions after one system prompt, with their answers.
fn questions(checkpoint: &Checkpoint, count: u64) -> Arc<Vec<Case>> {
    let shared = prompt(SHARED, 1, &checkpoint.config);
    let question = |at: u64| {
        let prompt = [&shared[..], &prompt(5, 100 + at, &checkpoint.config)].concat();
        Case { expected: greedy(checkpoint, &prompt, ANSWER), prompt }
    };
    Arc::new((0..count).map(question).collect())
}

/// Sends one request, and after its answer the others together; checks every answer.
fn ask_all(fleet: &TestFleet, env: &SeededEnv, questions: &Arc<Vec<Case>>) {
    let handle = fleet.start(Arc::new(env.clone()));
    let (questions, world) = (questions.clone(), env.clone());
    env.run(async move {
        let mut ends = Vec::new();
        for at in 0..questions.len() {
            let (handle, questions, env) = (handle.clone(), questions.clone(), world.clone());
            let (sender, end) = tokio::sync::oneshot::channel();
            world.spawn(Box::pin(async move {
                let case = &questions[at];
                let answer = ask(&handle, format!("{at}"), case.prompt.clone(), ANSWER as u32, None).await;
                let ReceivedAnswer { tokens, failure, .. } = answer;
                assert_eq!((tokens, failure), (case.expected.clone(), None), "{env:?}: question {at}");
                let _ = sender.send(());
            }));
            if at == 0 {
                end.await.unwrap();
            } else {
                ends.push(end);
            }
        }
        for end in ends {
            end.await.unwrap();
        }
        // This gives every worker time to notice.
        world.sleep(Duration::from_secs(20)).await;
    });
    assert_eq!((fleet.usage_of(0), fleet.usage_of(1)), (0.0, 0.0), "{env:?}: blocks are still in use");
}

fn pair(checkpoint: &Checkpoint) -> TestFleet {
    TestFleet::new(checkpoint.clone()).with(Role::Auto).with(Role::Auto)
}

#[test]
fn a_hot_prefix_is_copied_to_an_instance_that_nobody_asked_for_it() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let questions = questions(&checkpoint, 12);
    let fleet = pair(&checkpoint).copies(1e9);
    ask_all(&fleet, &SeededEnv::new(1), &questions);
    assert_eq!(fleet.pulled(), u64::from(SHARED), "no request pulls anything, and one copy is enough");
}

#[test]
fn copies_that_break_on_their_way_are_dropped_and_every_request_is_answered() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let questions = questions(&checkpoint, 12);
    for (seed, fault) in (1..).zip([Fault::BitFlip, Fault::Fail, Fault::Drop, Fault::Hang]) {
        // The first writes measure the links.
        let rules = vec![Rule { fault, probability: 0.7, from: 20, until: None }];
        let fleet = pair(&checkpoint).copies(1e9).faults(FaultPlan { seed, rules });
        let fleet = fleet.hand_off_timeout(Duration::from_millis(50));
        ask_all(&fleet, &SeededEnv::new(seed), &questions);
        let (retries, recomputes) = fleet.transfer_troubles();
        assert!(retries + recomputes > 0, "{fault:?}: nothing broke");
    }
}
