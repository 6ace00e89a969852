//! Requests shared by two engines, and their outcome when one of the two fails.

use super::tests::{Habit, Scripted, ShareHabit, asked, gateway_with, seeded, streamed, told, wanted};
use super::*;
use crate::env::{Env, SeededEnv};
use mixfleet_hal::outside::{EngineShare, EngineState};

/// Engines with these roles, which answer with two tokens.
async fn roles(env: &Arc<SeededEnv>, roles: &[Role]) -> (Arc<Gateway>, Vec<Arc<Scripted>>) {
    let habits = vec![Habit::Answers(2, 0.01); roles.len()];
    gateway_with(env, &habits, |at, engine| *engine.role.lock().unwrap() = roles[at]).await
}

/// Requests to each engine: `w`hole requests, `p`rompts and `a`nswers.
fn shares(engines: &[Arc<Scripted>]) -> Vec<String> {
    let letter = |share: &EngineShare| match share {
        EngineShare::Whole => 'w',
        EngineShare::Prompt => 'p',
        EngineShare::Answer(_) => 'a',
    };
    engines
        .iter()
        .map(|engine| engine.shares.lock().unwrap().drain(..).map(|s| letter(&s)).collect())
        .collect()
}

/// Nothing is left of any request.
fn assert_idle(gateway: &Gateway) {
    let state = gateway.lock();
    assert_eq!(state.seats.iter().map(|seat| seat.own + seat.decoding).sum::<u32>(), 0);
    assert_eq!(state.front.machine().requests(), 0);
}

fn explained(gateway: &Gateway, id: &str) -> serde_json::Value {
    gateway.placements.explain(id, |_| true).unwrap()
}

fn counted(gateway: &Gateway, line: &str) -> bool {
    gateway.metrics.encode().lines().any(|other| other == line)
}

#[test]
fn one_engine_computes_the_prompt_and_another_one_answers() {
    seeded(async |env| {
        let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Decode]).await;
        *engines[0].sharing.lock().unwrap() = ShareHabit::Well(0.5);
        let began = env.now();
        assert_eq!(streamed(&gateway, "a").await, ("xx".to_owned(), None));
        assert!((env.now() - began).0 > 0.5);
        let [first, second] = [0, 1].map(|at: usize| engines[at].shares.lock().unwrap().clone());
        assert_eq!(first, [EngineShare::Prompt]);
        let [EngineShare::Answer(hand_off)] = &second[..] else { panic!("{second:?}") };
        assert_eq!(&*hand_off.0, r#"{"of":"e0"}"#, "it passes unchanged");
        let told = explained(&gateway, "a");
        let chosen = &told["candidates"][0];
        assert_eq!((&chosen["prefill_device"], &chosen["decode_device"]), (&"e0".into(), &"e1".into()));
        assert!(
            chosen["terms"]["transfer_s"].as_f64().unwrap() > 0.0 && told["undivided"].is_null(),
            "{told}"
        );
        let Ok(RelayOpening::Whole(answer)) = relay(&gateway, wanted("b", false)).await else {
            panic!("not whole")
        };
        assert_eq!(answer.usage.unwrap().completion_tokens, 2);
        assert_eq!(shares(&engines), ["pp", "aa"]);
        assert!(counted(&gateway, "mixfleet_hand_offs_total{from=\"e0\",to=\"e1\"} 2"));
        assert_idle(&gateway);
    });
}

#[test]
fn an_engine_that_fails_a_prompt_is_replaced_and_without_another_one_who_answers_computes_it() {
    use EngineFaultKind::{Busy, Cut, Failed, Malformed, Unreachable};
    for kind in [Unreachable, Busy, Failed, Malformed, Cut] {
        seeded(async move |env| {
            let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Prefill, Role::Decode]).await;
            *engines[0].sharing.lock().unwrap() = ShareHabit::Faults(kind);
            assert_eq!(streamed(&gateway, "a").await.1, None);
            assert_eq!(shares(&engines), ["p", "p", "a"], "{kind:?}");
            assert_eq!(explained(&gateway, "a")["failed"], serde_json::json!(["e0"]));
            *engines[1].sharing.lock().unwrap() = ShareHabit::Faults(kind);
            if kind == Cut {
                // two engines broke off before any token: it may be the cause
                let refused = relay(&gateway, wanted("b", true)).await;
                assert!(matches!(refused, Err(RelayError::Quarantined(_))));
                return;
            }
            assert_eq!(streamed(&gateway, "b").await.1, None);
            let [first, second, last] = &shares(&engines)[..] else { panic!("three engines") };
            assert!(first.len() <= 1 && second == "p" && last == "w", "{first} {second} {last}");
            assert!(explained(&gateway, "b")["undivided"].as_str().unwrap().contains("roles"));
            assert_idle(&gateway);
        });
    }
}

#[test]
fn what_is_not_handed_over_or_not_taken_over_is_computed_by_one_engine() {
    use EngineFaultKind::{Failed, Malformed, NotHandedOff, NotTaken};
    let faults = |kind| ShareHabit::Faults(kind);
    for (prompt, answer, expected, failures) in [
        (faults(NotTaken), ShareHabit::Well(0.0), ["p", "w"], None),
        (faults(NotHandedOff), ShareHabit::Well(0.0), ["p", "w"], Some("not_handed_over")),
        (ShareHabit::Well(0.0), faults(Failed), ["p", "aw"], Some("not_taken_over")),
        (ShareHabit::Well(0.0), faults(Malformed), ["p", "aw"], Some("not_taken_over")),
        (ShareHabit::Well(0.0), ShareHabit::Refuses, ["p", "aw"], Some("not_taken_over")),
    ] {
        seeded(async move |env| {
            for stream in [true, false] {
                let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Decode]).await;
                *engines[0].sharing.lock().unwrap() = prompt.clone();
                *engines[1].sharing.lock().unwrap() = answer.clone();
                if stream {
                    assert_eq!(streamed(&gateway, "a").await, ("xx".to_owned(), None));
                } else {
                    let opening = relay(&gateway, wanted("a", false)).await;
                    assert!(matches!(opening, Ok(RelayOpening::Whole(_))));
                }
                let mut shares = shares(&engines);
                // any engine may compute all of it: the first of equals does, unless it had the KV
                if expected[1] == "w" {
                    shares =
                        vec![shares[0].replace('w', ""), "w".repeat(shares.concat().matches('w').count())];
                }
                assert_eq!(shares, expected);
                let count =
                    failures.map(|cause| format!("mixfleet_hand_off_failures_total{{cause=\"{cause}\"}} 1"));
                assert!(count.is_none_or(|line| counted(&gateway, &line)), "{}", gateway.metrics.encode());
                assert!(explained(&gateway, "a")["undivided"].is_string());
                assert_idle(&gateway);
            }
        });
    }
}

#[test]
fn a_pull_that_hangs_ends_in_time_and_sooner_where_the_engine_with_the_kv_is_lost() {
    for (is_lost, stream, bound) in
        [(false, true, 125.0), (false, false, 130.0), (true, true, 30.0), (true, false, 40.0)]
    {
        seeded(async move |env| {
            let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Decode]).await;
            *engines[1].sharing.lock().unwrap() = ShareHabit::Hangs;
            if is_lost {
                *engines[0].state.lock().unwrap() =
                    Err(EngineFault::new(EngineFaultKind::Unreachable, "gone"));
            }
            let began = env.now();
            if stream {
                assert_eq!(streamed(&gateway, "a").await, ("xx".to_owned(), None));
            } else {
                assert!(matches!(relay(&gateway, wanted("a", false)).await, Ok(RelayOpening::Whole(_))));
            }
            let took = (env.now() - began).0;
            assert!(took > 20.0 && took < bound, "{is_lost} {stream}: {took}");
            assert_eq!(shares(&engines), ["p", "aw"]);
            assert_eq!(engines[1].prompts.load(std::sync::atomic::Ordering::Relaxed), 0);
            assert_idle(&gateway);
        });
    }
}

#[test]
fn an_engine_that_had_the_kv_is_asked_before_there_is_no_answer() {
    seeded(async |env| {
        let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Decode]).await;
        *engines[1].sharing.lock().unwrap() = ShareHabit::Faults(EngineFaultKind::Failed);
        *engines[1].habit.lock().unwrap() = Habit::Faults(EngineFaultKind::Failed);
        assert_eq!(streamed(&gateway, "a").await, ("xx".to_owned(), None));
        assert_eq!(shares(&engines), ["pw", "aw"]);
        assert_idle(&gateway);
    });
}

#[test]
fn an_answer_that_breaks_goes_on_divided_and_prompts_and_answers_end_with_their_client() {
    seeded(async |env| {
        let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Decode, Role::Decode]).await;
        *engines[1].habit.lock().unwrap() = Habit::StallsAfter(3);
        assert_eq!(streamed(&gateway, "a").await, ("xxxxx".to_owned(), None));
        assert_eq!(shares(&engines), ["pp", "a", "a"]);
        assert_idle(&gateway);
        *engines[0].sharing.lock().unwrap() = ShareHabit::Well(10.0);
        let left = tokio::select! {
            biased;
            _ = relay(&gateway, wanted("b", true)) => false,
            prompts = async {
                env.sleep(Duration::from_secs(5)).await;
                engines[0].prompts.load(std::sync::atomic::Ordering::Relaxed)
            } => prompts == 1,
        };
        assert!(left && engines[0].prompts.load(std::sync::atomic::Ordering::Relaxed) == 0);
        assert_idle(&gateway);
    });
}

#[test]
fn engines_at_which_hand_offs_fail_have_no_part_in_any_for_a_while() {
    seeded(async |env| {
        let (gateway, engines) = roles(&env, &[Role::Prefill, Role::Decode]).await;
        *engines[1].sharing.lock().unwrap() = ShareHabit::Faults(EngineFaultKind::Failed);
        for _ in 0..3 {
            assert_eq!(streamed(&gateway, "a").await.1, None);
        }
        assert_eq!(shares(&engines), ["ppp", "awawaw"]);
        for _ in 0..3 {
            assert_eq!(streamed(&gateway, "b").await.1, None);
        }
        assert!(!shares(&engines).concat().contains('p'), "hand-offs rest");
        assert!(gateway.lock().seats.iter().all(|seat| !seat.breaker.is_open()), "and the engines do not");
        *engines[1].sharing.lock().unwrap() = ShareHabit::Well(0.0);
        env.sleep(Duration::from_secs(5)).await;
        assert_eq!(streamed(&gateway, "c").await.1, None);
        assert_eq!(shares(&engines), ["p", "a"]);
        assert_idle(&gateway);
    });
}

#[test]
fn engines_without_a_role_share_requests_only_if_they_show_that_they_can() {
    seeded(async |env| {
        // a prompt here stops eight answers there, so that the machine would divide
        let habits = vec![Habit::Answers(200, 0.01); 2];
        for can in [false, true] {
            let (gateway, engines) = gateway_with(&env, &habits, |_, engine| {
                *engine.state.lock().unwrap() = Ok(EngineState { hands_off: can, ..told() });
            })
            .await;
            assert!(gateway.lock().front.machine().instances().all(|one| one.nic.is_some() == can));
            assert_eq!(streamed(&gateway, "a").await.1, None);
            assert_eq!(asked(&engines).iter().sum::<usize>(), 1, "alone, one engine is better");
            assert_idle(&gateway);
        }
    });
}
