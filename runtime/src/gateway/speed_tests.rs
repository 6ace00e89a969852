//! What a gateway learns of its engines' speed while answers come.

use super::tests::{Habit, asked, gateway, parts, seeded, spec, streamed, wanted};
use super::*;
use crate::env::{Env, SeededEnv};
use mixfleet_scheduler::cost::{Coefficients, DecodeCoefficients, PrefillCoefficients, SizedCorrections};

fn learned(gateway: &Gateway, at: u32) -> SizedCorrections {
    gateway.lock().front.machine().learned(InstanceId(at)).expect("it is up")
}

/// Reads this many chunks of a stream, and leaves it.
async fn read(gateway: &Arc<Gateway>, chunks: usize) -> SizedCorrections {
    let Ok(RelayOpening::Stream(mut passage, _)) = relay(gateway, wanted("a", true)).await else {
        panic!("it streams")
    };
    for _ in 1..chunks {
        passage.next().await.expect("it goes on").expect("without a fault");
    }
    learned(gateway, 0)
}

#[test]
fn first_tokens_correct_prompts_before_an_answer_ends() {
    seeded(async |env| {
        let (gateway, _) = gateway(&env, &[Habit::Answers(100, 0.1)]).await;
        let mut corrections = learned(&gateway, 0);
        for _ in 0..3 {
            corrections = read(&gateway, 1).await;
        }
        assert!(
            (4.5..5.5).contains(&corrections.prefill[0]),
            "10 tokens take 100 ms and were predicted to take 20: {corrections:?}"
        );
        assert_eq!(corrections.step, [1.0; 3]);
    });
}

#[test]
fn tokens_correct_steps_before_their_answer_ends() {
    seeded(async |env| {
        let (gateway, _) = gateway(&env, &[Habit::Answers(100, 0.1)]).await;
        let corrections = read(&gateway, 25).await;
        assert!(
            (8.5..9.5).contains(&corrections.step[0]),
            "a step takes 100 ms and was predicted to take 11: {corrections:?}"
        );
    });
}

#[test]
fn the_end_of_an_answer_adds_nothing_to_what_was_learned() {
    seeded(async |env| {
        let (gateway, _) = gateway(&env, &[Habit::Answers(30, 0.1)]).await;
        let before = read(&gateway, 25).await;
        assert_eq!(streamed(&gateway, "b").await.1, None);
        assert_eq!(gateway.lock().seats[0].tokens_per_chunk, Some(1.0));
        let after = learned(&gateway, 0);
        assert_eq!(after.step, before.step);
    });
}

/// The requests that a slow engine gets, declared to be fast, beside a fast one that is declared to be slow.
#[test]
fn an_engine_that_is_slower_than_declared_gets_few_requests() {
    let to_slow = seeded(async |env: Arc<SeededEnv>| {
        let (_, engines) = gateway(&env, &[Habit::Answers(40, 0.1), Habit::Answers(40, 0.01)]).await;
        let before = asked(&engines);
        let declared = |factor: f64| {
            CostModel::Coefficients(Coefficients {
                prefill_s: PrefillCoefficients {
                    overhead: 0.005 * factor,
                    per_token: 1e-4 * factor,
                    per_token_squared: 0.0,
                },
                decode_s: DecodeCoefficients {
                    base: 0.0025 * factor,
                    per_sequence: 1e-5 * factor,
                    per_kv_token: 0.0,
                },
            })
        };
        let specs = engines.iter().zip([1.0, 10.0]).map(|(engine, factor)| {
            let engine: Arc<dyn OutsideEngine> = engine.clone();
            EngineSpec { cost: Some(declared(factor)), ..spec(engine, Role::Auto) }
        });
        let gateway = parts(&env, None).start(specs.collect()).await;
        let mut answers = Vec::new();
        for _ in 0..56 {
            let (told, answer) = tokio::sync::oneshot::channel();
            let gateway = gateway.clone();
            env.spawn(Box::pin(async move { _ = told.send(streamed(&gateway, "a").await.1) }));
            answers.push(answer);
            env.sleep(Duration::from_millis(150)).await;
        }
        for answer in answers {
            assert_eq!(answer.await.expect("it ends"), None);
        }
        let after = asked(&engines);
        assert_eq!(after[0] + after[1] - before[0] - before[1], 56);
        after[0] - before[0]
    });
    eprintln!("{to_slow} of 56 requests went to the slow engine");
    assert!(to_slow <= 12, "{to_slow}");
}
