//! Requests that a proxy carries, in the seeded environment.

use super::tests::{Habit, gateway, gateway_with, seeded, told, wanted};
use super::*;
use crate::env::Env;
use mixfleet_hal::outside::{EngineChunk, EngineState};

fn token() -> EngineChunk {
    EngineChunk { text: "x".into(), ..EngineChunk::default() }
}

/// Has a stream of this many tokens pass, each after this time.
async fn passed(gateway: &Arc<Gateway>, tokens: u32, pace_s: f64) {
    let mut picked = pick(gateway, wanted("a", true), &[]).await.unwrap_or_else(|why| panic!("{why:?}"));
    for _ in 0..tokens {
        gateway.env.sleep(Duration::from_secs_f64(pace_s)).await;
        picked.chunk(&token());
    }
    picked.done(Some(EngineUsage { prompt_tokens: 10, completion_tokens: tokens, cached_tokens: None }));
}

fn own(gateway: &Gateway) -> Vec<u32> {
    gateway.lock().seats.iter().map(|seat| seat.own).collect()
}

#[test]
fn what_passes_corrects_predictions_as_what_is_relayed() {
    seeded(async |env| {
        let (gateway, _) = gateway(&env, &[Habit::Answers(1, 0.1)]).await;
        for _ in 0..3 {
            passed(&gateway, 30, 0.1).await;
        }
        let learned = gateway.lock().front.machine().learned(InstanceId(0)).expect("it is up");
        assert!((4.0..6.0).contains(&learned.prefill[0]), "100 ms and not 20: {learned:?}");
        assert!((8.0..10.0).contains(&learned.step[0]), "100 ms and not 11: {learned:?}");
        assert_eq!((own(&gateway), gateway.lock().front.machine().requests()), (vec![0], 0));
    });
}

#[test]
fn runners_up_come_by_score_and_not_from_what_is_left_out() {
    seeded(async |env| {
        let habits = vec![Habit::Answers(1, 0.1); 4];
        let (gateway, engines) = gateway_with(&env, &habits, |at, engine| {
            // a prompt of another costs the same everywhere, so that load alone makes the order
            let running = Some([20, 0, 10, 30][at]);
            *engine.state.lock().unwrap() = Ok(EngineState { running, ..told() });
        })
        .await;
        env.sleep(Duration::from_secs(5)).await;
        let order = async |left_out: &[usize]| {
            let Ok(picked) = pick(&gateway, wanted("a", true), left_out).await else { panic!("no place") };
            picked.at().into_iter().chain(picked.runners_up.iter().copied()).collect::<Vec<_>>()
        };
        assert_eq!(order(&[]).await, [1, 2, 0, 3]);
        assert_eq!(order(&[1, 3]).await, [2, 0]);
        assert_eq!((own(&gateway), engines.len()), (vec![0; 4], 4), "one that is dropped leaves");
    });
}

#[test]
fn a_fallback_that_served_takes_the_place_over() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &vec![Habit::Answers(1, 0.1); 2]).await;
        *engines[0].state.lock().unwrap() = Err(EngineFault::new(EngineFaultKind::Unreachable, "gone"));
        let Ok(mut picked) = pick(&gateway, wanted("a", true), &[]).await else { panic!("no place") };
        assert_eq!((picked.at(), &picked.runners_up[..]), (Some(0), &[1][..]));
        assert!(!picked.served_by(0) && !picked.served_by(7), "the chosen engine, and no engine");
        assert!(picked.served_by(1));
        assert_eq!((picked.at(), own(&gateway)), (Some(1), vec![0, 1]));
        let explanation = gateway.placements.explain("a", |_| true).unwrap();
        assert_eq!(explanation["failed"], serde_json::json!(["e0"]));
        picked.chunk(&token());
        picked.done(None);
        assert_eq!(own(&gateway), [0, 0]);
        env.sleep(Duration::from_secs(3)).await;
        assert_eq!(gateway.metrics.instances.get(), 1, "the other one was probed");
    });
}
