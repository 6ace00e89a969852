//! Requests that end engines, in a gateway with engines that do as a script says.

use super::tests::{Habit, asked, gateway, seeded, streamed, wanted};
use super::*;
use crate::env::Env;
use mixfleet_scheduler::quarantine::QUARANTINE;

const CUT: Habit = Habit::Faults(EngineFaultKind::Cut);
const WELL: Habit = Habit::Answers(2, 0.01);

/// A request for another prompt than others have.
fn of_prompt(prompt: &str, stream: bool) -> RelayRequest {
    let body = format!("{{\"prompt\":\"{prompt}\"}}");
    RelayRequest { body: Arc::new(body.into_bytes()), ..wanted(prompt, stream) }
}

#[test]
fn no_number_of_retries_ends_more_than_two_engines() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[CUT, CUT, CUT, CUT]).await;
        for stream in [true, false].repeat(10) {
            let Err(RelayError::Quarantined(why)) = relay(&gateway, of_prompt("poison", stream)).await else {
                panic!("not refused")
            };
            assert_eq!(why.engines, 2);
        }
        assert_eq!(asked(&engines).iter().sum::<usize>(), 2, "{:?}", asked(&engines));
        assert_eq!(gateway.metrics.requests_quarantined.get(), 20);
        engines.iter().for_each(|engine| *engine.habit.lock().unwrap() = WELL);
        env.sleep(Duration::from_secs(5)).await;
        assert!(relay(&gateway, of_prompt("other", true)).await.is_ok(), "other prompts are answered");
        env.sleep(Duration::from_secs_f64(QUARANTINE.0)).await;
        assert!(relay(&gateway, of_prompt("poison", true)).await.is_ok(), "it is tried again later");
    });
}

#[test]
fn a_failure_behind_which_the_engine_is_gone_is_an_end() {
    seeded(async |env| {
        let failed = Habit::Faults(EngineFaultKind::Failed);
        let (gateway, engines) = gateway(&env, &vec![failed; 4]).await;
        for engine in &engines {
            *engine.state.lock().unwrap() =
                Err(EngineFault::new(EngineFaultKind::Busy, "/health answers 503"));
        }
        let refused = relay(&gateway, of_prompt("poison", true)).await;
        assert!(matches!(refused, Err(RelayError::Quarantined(_))));
        assert_eq!(asked(&engines).iter().sum::<usize>(), 2);
    });
}

#[test]
fn an_answer_outlives_two_engines_and_a_third_end_quarantines() {
    seeded(async |env| {
        let stalls = Habit::StallsAfter(1);
        let (gateway, engines) = gateway(&env, &[stalls.clone(), stalls.clone(), WELL]).await;
        assert_eq!(streamed(&gateway, "a").await, ("xxxx".into(), None));
        assert!(gateway.quarantine().is_empty(), "its answer clears it");
        *engines[2].habit.lock().unwrap() = stalls;
        let (text, fault) = streamed(&gateway, "a").await;
        assert_eq!(text, "xxx");
        assert!(fault.unwrap().detail.contains("3 engines ended"));
    });
}

#[test]
fn suspects_are_tried_one_at_a_time_and_all_innocents_are_answered() {
    seeded(async |env| {
        let slow = Habit::Answers(2, 1.0);
        let (gateway, engines) = gateway(&env, &[CUT, slow.clone(), slow]).await;
        let began = env.now();
        let (one, other) = futures_util::future::join(
            relay(&gateway, of_prompt("one", true)),
            relay(&gateway, of_prompt("other", true)),
        )
        .await;
        assert!(one.is_ok() && other.is_ok());
        assert!((env.now() - began).0 < 5.0);
        drop((one, other));
        assert_eq!(asked(&engines)[0], 1, "an engine that broke once is suspended");
        assert!(
            gateway
                .quarantine()
                .engines_on_trial(mixfleet_scheduler::quarantine::TryPermit::Alone)
                .is_empty(),
            "no trial outlives its request"
        );
    });
}
