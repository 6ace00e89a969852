//! Decisions of the fleet machine other than placements, carried out by routers and workers.

use super::routers::{router, workers};
use crate::fleet::{Log, request};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::{FailureKind, Update};
use mixfleet_scheduler::fleet::{Action, Admission, Event, InstanceId, Rebalance, Role};
use std::collections::BTreeMap;
use std::time::Duration;

/// The events and actions of a log.
fn steps(log: &Log) -> Vec<(Event, Vec<Action>)> {
    let text = log.text();
    let steps = text.lines().skip(1).map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let told = steps.filter(|step| step.get("event").is_some());
    let read = |step: serde_json::Value| {
        let event = serde_json::from_value(step["event"].clone()).unwrap();
        (event, serde_json::from_value(step["actions"].clone()).unwrap())
    };
    told.map(read).collect()
}

#[test]
fn a_role_that_one_router_changes_is_known_to_all_and_what_was_begun_is_finished() {
    let checkpoint = tiny_variants().remove(1).1.load().unwrap();
    let env = SeededEnv::with_blocking_workers(5);
    let hub = workers(&checkpoint, &env, &[(Role::Prefill, 1.0), (Role::Decode, 1.0), (Role::Decode, 1.0)]);
    let mut limits = EngineConfig::default();
    limits.fleet.rebalance = Some(Rebalance { hold: Seconds(5.0), ..Rebalance::new(vec![0]) });
    let logs = [Log::default(), Log::default()];
    let handles: Vec<_> = (0..)
        .zip(&logs)
        .map(|(id, log)| router(id, &checkpoint, &env, &hub, limits.clone(), Some(log.clone())))
        .collect();
    let (world, vocabulary) = (env.clone(), u64::from(checkpoint.config.vocab));
    let (finished, roles) = env.run(async move {
        world.sleep(Duration::from_secs(1)).await;
        let mut random = Stream::new(5);
        let mut ends = Vec::new();
        // Prompts are long and answers short, and all use the first router.
        for at in 0..160 {
            world.sleep(Duration::from_millis(100)).await;
            let prompt = (0..300).map(|_| random.below(vocabulary) as u32).collect();
            let mut updates = handles[0].submit(request(at.to_string(), prompt, 3, None)).await.unwrap();
            let (sender, end) = tokio::sync::oneshot::channel();
            world.spawn(Box::pin(async move {
                let mut finished = false;
                while let Some(update) = updates.recv().await {
                    finished |= matches!(update, Update::Finished { .. });
                }
                let _ = sender.send(finished);
            }));
            ends.push(end);
        }
        let mut finished = 0;
        for end in ends {
            finished += u32::from(end.await.unwrap());
        }
        let roles: BTreeMap<InstanceId, Role> =
            hub.states().borrow().iter().map(|(&id, state)| (id, state.role)).collect();
        (finished, roles)
    });
    let [first, second] = logs.map(|log| steps(&log));
    let changed = first.iter().flat_map(|(_, actions)| actions).find_map(|action| match action {
        Action::SetRole { instance, role } => Some((*instance, *role)),
        _ => None,
    });
    let (instance, role) = changed.expect("prompts for more than one device change a role");
    assert_eq!((role, roles.get(&instance)), (Role::Prefill, Some(&Role::Prefill)));
    let heard = second.iter().any(|(event, _)| match event {
        Event::InstanceUp(spec) => (spec.id, spec.role) == (instance, role),
        _ => false,
    });
    assert!(heard, "the second router does not know that {instance} computes prompts now");
    let prefills_there =
        |action: &Action| matches!(action, Action::Place { prefill, .. } if *prefill == instance);
    assert!(first.iter().flat_map(|(_, actions)| actions).any(prefills_there));
    assert_eq!(finished, 160);
}

#[test]
fn a_request_whose_decode_device_is_too_busy_once_its_prompt_is_done_is_given_up_with_the_reason() {
    let checkpoint = tiny_variants().remove(1).1.load().unwrap();
    for drop_at_decode in [true, false] {
        let env = SeededEnv::with_blocking_workers(6);
        let hub = workers(&checkpoint, &env, &[(Role::Auto, 1.0)]);
        let mut limits = EngineConfig::default();
        // No step is as fast.
        limits.fleet.tbt_slo = Some(Seconds(1e-6));
        (limits.fleet.admission, limits.fleet.drop_at_decode) = (Admission::None, drop_at_decode);
        let handle = router(0, &checkpoint, &env, &hub, limits, None);
        let world = env.clone();
        let failure = env.run(async move {
            world.sleep(Duration::from_secs(1)).await;
            let mut updates = handle.submit(request("one".into(), vec![1, 2, 3, 4], 5, None)).await.unwrap();
            let (mut failure, mut tokens) = (None, 0);
            while let Some(update) = updates.recv().await {
                match update {
                    Update::Failed(why) => failure = Some(why),
                    Update::Token { .. } => tokens += 1,
                    _ => {}
                }
            }
            drop(hub);
            (failure, tokens)
        });
        let (failure, tokens) = failure;
        match failure {
            Some(failure) if drop_at_decode => {
                assert_eq!((failure.kind, tokens), (FailureKind::TurnedAway, 0));
                assert!(failure.message.contains("too busy"), "{failure}");
            }
            other => assert!(other.is_none() && !drop_at_decode, "{other:?}"),
        }
    }
}
