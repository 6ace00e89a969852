//! Engines that fail again and again, seen from the requests.

use super::breaker::{FAILURES_MAX, PAUSE_FIRST};
use super::tests::{Habit, asked, gateway, seeded, streamed};
use super::*;
use crate::env::Env;
use crate::metrics::DeviceLabels;

const BROKEN: Habit = Habit::Faults(EngineFaultKind::Failed);
/// It takes the predicted time.
const WELL: Habit = Habit::Answers(2, 0.02);

fn device(name: &str) -> DeviceLabels {
    DeviceLabels { device: name.into() }
}

fn pause(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[test]
fn an_engine_that_fails_rests_and_one_request_tries_it_after_each_pause() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[BROKEN, WELL]).await;
        for _ in 0..10 {
            assert_eq!(streamed(&gateway, "a").await, ("xx".into(), None), "no request is lost");
        }
        assert_eq!(asked(&engines), [FAILURES_MAX as usize, 10], "of equals the first one is tried first");
        let shown = gateway.placements.explain("a", |_| true).unwrap();
        assert_eq!(
            (&shown["resting"][0]["engine"], &shown["resting"][0]["failures"]),
            (&"e0".into(), &3.into())
        );
        assert_eq!(gateway.metrics.engine_resting.get_or_create(&device("e0")).get(), 1);
        assert_eq!(gateway.metrics.serves.get(), 1);

        env.sleep(pause(PAUSE_FIRST.0)).await;
        let together = futures_util::future::join_all((0..6).map(|_| streamed(&gateway, "b"))).await;
        assert!(together.iter().all(|answer| *answer == ("xx".to_owned(), None)), "{together:?}");
        assert_eq!(asked(&engines), [4, 16], "one request tried it, and the other engine answered");
        env.sleep(pause(PAUSE_FIRST.0 * 1.5)).await;
        assert_eq!(streamed(&gateway, "c").await.1, None);
        assert_eq!(asked(&engines)[0], 4, "the second pause is longer");

        *engines[0].habit.lock().unwrap() = WELL;
        env.sleep(pause(PAUSE_FIRST.0)).await;
        for _ in 0..2 {
            assert_eq!(streamed(&gateway, "d").await.1, None);
        }
        assert_eq!(asked(&engines), [6, 17], "it answered the first and gets the next");
        let metrics = &gateway.metrics;
        assert_eq!(metrics.engine_resting.get_or_create(&device("e0")).get(), 0);
        assert_eq!(metrics.engine_rests.get_or_create(&device("e0")).get(), 2);
        assert!(metrics.encode().contains("mixfleet_engine_faults_total{device=\"e0\",kind=\"failed\"} 4"));
        assert_eq!(gateway.lock().front.machine().requests(), 0);
    });
}

#[test]
fn an_engine_alone_is_asked_for_each_request_and_its_error_told() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[BROKEN]).await;
        for _ in 0..5 {
            let fault = streamed(&gateway, "a").await.1.unwrap();
            assert_eq!((fault.kind, fault.detail.as_str()), (EngineFaultKind::Failed, "as the script says"));
        }
        assert_eq!(asked(&engines), [5]);
        *engines[0].habit.lock().unwrap() = WELL;
        assert_eq!(streamed(&gateway, "b").await, ("xx".into(), None));
        assert!(gateway.resting_engines().is_empty());
    });
}

#[test]
fn a_request_finds_the_one_engine_that_answers_and_a_bad_request_rests_none() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[BROKEN, BROKEN, BROKEN, BROKEN, WELL]).await;
        for _ in 0..5 {
            assert_eq!(streamed(&gateway, "a").await, ("xx".into(), None));
        }
        assert_eq!(asked(&engines), [3, 3, 3, 3, 5]);
        *engines[4].habit.lock().unwrap() = BROKEN;
        for _ in 0..4 {
            let fault = streamed(&gateway, "b").await.1.unwrap();
            assert_eq!(fault.kind, EngineFaultKind::Failed);
        }
        assert_eq!(asked(&engines), [7, 7, 7, 7, 9], "suspended engines get requests if there are no others");
        assert_eq!(gateway.resting_engines().len(), 4, "the last one has not been shown to be at fault");
        *engines[2].habit.lock().unwrap() = WELL;
        for _ in 0..2 {
            assert_eq!(streamed(&gateway, "c").await, ("xx".into(), None));
        }
        assert_eq!(asked(&engines)[2], 9, "it answers and does not rest any more");
    });
}

#[test]
fn an_engine_that_breaks_off_answers_rests_although_it_begins_them() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[Habit::StallsAfter(1), WELL]).await;
        for _ in 0..6 {
            assert_eq!(streamed(&gateway, "a").await, ("xxx".into(), None));
            if gateway.resting_engines().len() == 1 {
                break;
            }
        }
        assert_eq!((asked(&engines)[0], gateway.resting_engines().len()), (3, 1));
        assert_eq!(streamed(&gateway, "b").await, ("xx".into(), None));
        env.sleep(pause(PAUSE_FIRST.0)).await;
        assert_eq!(streamed(&gateway, "c").await, ("xxx".into(), None), "it began, and failed again");
        assert_eq!((asked(&engines)[0], gateway.resting_engines().len()), (4, 1));
        assert_eq!(gateway.metrics.engine_rests.get_or_create(&device("e0")).get(), 2);
    });
}

#[test]
fn a_client_that_leaves_while_it_tries_an_engine_decides_nothing() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[BROKEN, WELL]).await;
        for _ in 0..3 {
            assert_eq!(streamed(&gateway, "a").await.1, None);
        }
        *engines[0].habit.lock().unwrap() = Habit::Answers(2, 1.0);
        env.sleep(pause(PAUSE_FIRST.0)).await;
        let left = tokio::select! {
            biased;
            _ = streamed(&gateway, "b") => false,
            () = env.sleep(pause(0.5)) => true,
        };
        assert!(left && gateway.resting_engines().len() == 1);
        assert_eq!(streamed(&gateway, "c").await, ("xx".into(), None));
        assert_eq!((asked(&engines)[0], gateway.resting_engines().len()), (5, 0), "the next one tried it");
    });
}
