//! Several routers of the workers of one process, on simulated devices in virtual time: each counts the work
//! that the others gave to the devices.

use super::parts;
use crate::fleet::Log;
use mixfleet_hal::DType;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::events::EventLog;
use mixfleet_runtime::engine::{EngineConfig, EngineParts, HandOffLimits, Identity, Loaded};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv};
use mixfleet_runtime::fleet::{Hub, ModelIdentity, RouterId, WorkerProcess};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::random::tiny_variants;
use mixfleet_runtime::request::{EngineHandle, GenerateRequest, Hints, Sampling, Update};
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{InstanceId, PartyId, Role};
use std::sync::Arc;
use std::time::Duration;

const TTFT_S: f64 = 0.6;
const TBT_S: f64 = 0.03;

/// A device of the worker process, and its speed relative to the first.
fn loaded(
    at: u32,
    (role, speed): (Role, f64),
    checkpoint: &Checkpoint,
    env: &SeededEnv,
) -> (InstanceId, Loaded, CostModel) {
    let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(4e8 * speed)));
    let roof = DeviceProfile::roof(rates.to_vec(), BytesPerSecond(2e8 * speed), Bytes(1e9));
    let profile = DeviceProfile { launch: Seconds(2e-4), launch_per_command: Seconds(1e-6), ..roof };
    let loaded = parts::loaded(at, role, checkpoint, env, profile.clone());
    let cost = loaded.predicted_by(profile);
    (InstanceId(at), loaded, cost)
}

pub(super) fn workers(checkpoint: &Checkpoint, env: &SeededEnv, parts: &[(Role, f64)]) -> Hub {
    let shared: SharedEnv = Arc::new(env.clone());
    let instances = (0..).zip(parts).map(|(at, &part)| loaded(at, part, checkpoint, env)).collect();
    let process = WorkerProcess {
        env: shared,
        model: ModelIdentity { digest: "model".into(), tokenizer_digest: "tokenizer".into() },
        instances,
        links: parts::links(),
        hand_off: HandOffLimits { slot_bytes: 1 << 18, slots: 64, ..HandOffLimits::default() },
        metrics: Metrics::new(),
    };
    process.start().unwrap()
}

/// A router that uses the workers from now on.
pub(super) fn router(
    id: u16,
    checkpoint: &Checkpoint,
    env: &SeededEnv,
    hub: &Hub,
    limits: EngineConfig,
    log: Option<Log>,
) -> EngineHandle {
    let shared: SharedEnv = Arc::new(env.clone());
    let parts = EngineParts {
        env: Arc::new(env.clone()),
        config: Arc::new(checkpoint.config.clone()),
        identity: Identity::new("model".into(), "tokenizer".into(), [1, 2]),
        limits,
        events: log.map(|log| EventLog::start(&shared, Box::new(log)).0),
        placements: Arc::new(Placements::new(1)),
        metrics: Metrics::new(),
    };
    let (handle, router) = parts.start_router(RouterId(id), DType::Bf16);
    let session = hub.accept_router(&router.hello(), router.id()).unwrap();
    env.spawn(Box::pin(async move { router.add_worker(session).await }));
    handle
}

/// TTFT and mean TBT of each request; none if it was rejected.
type Fared = Vec<Option<(f64, f64)>>;

fn play(routers: u16, slo: bool, seed: u64, per_s: f64) -> Fared {
    let checkpoint = tiny_variants().remove(1).1.load().unwrap();
    let env = SeededEnv::with_blocking_workers(seed);
    let hub = workers(&checkpoint, &env, &[(Role::Auto, 1.0), (Role::Auto, 1.0), (Role::Auto, 0.5)]);
    let mut limits = EngineConfig::default();
    limits.fleet.ttft_slo = slo.then_some(Seconds(TTFT_S));
    limits.fleet.tbt_slo = slo.then_some(Seconds(TBT_S));
    let handles: Vec<EngineHandle> =
        (0..routers).map(|id| router(id, &checkpoint, &env, &hub, limits.clone(), None)).collect();
    let (world, vocabulary) = (env.clone(), u64::from(checkpoint.config.vocab));
    env.run(async move {
        world.sleep(Duration::from_secs(1)).await;
        let mut random = Stream::new(seed);
        let mut ends = Vec::new();
        for at in 0..300 {
            let gap_s = -(1.0 - random.next_unit()).ln() / per_s;
            world.sleep(Duration::from_secs_f64(gap_s)).await;
            let prompt: Vec<u32> =
                (0..20 + random.below(300)).map(|_| random.below(vocabulary) as u32).collect();
            let request = GenerateRequest {
                id: at.to_string(),
                prompt_ids: prompt.into(),
                max_tokens: 4 + random.below(60) as u32,
                eos_ids: Arc::new([]),
                sampling: Sampling { temperature: 0.0, ..Sampling::default() },
                logprobs: None,
                grammar: None,
                cache_salt: None,
                party: PartyId::NONE,
                hints: Hints::default(),
            };
            let (handle, env) = (handles[at % handles.len()].clone(), world.clone());
            let (sender, end) = tokio::sync::oneshot::channel();
            world.spawn(Box::pin(async move {
                let came = env.now();
                let Ok(mut updates) = handle.submit(request).await else {
                    let _ = sender.send(None);
                    return;
                };
                let mut tokens = Vec::new();
                while let Some(update) = updates.recv().await {
                    if let Update::Token { .. } = update {
                        tokens.push((env.now() - came).0);
                    }
                }
                let gaps = (tokens.len() - 1) as f64;
                let _ = sender.send(Some((tokens[0], (tokens[tokens.len() - 1] - tokens[0]) / gaps)));
            }));
            ends.push(end);
        }
        let mut fared = Vec::new();
        for end in ends {
            fared.push(end.await.unwrap());
        }
        drop(hub);
        fared
    })
}

fn kept(fared: &Fared) -> f64 {
    let good = fared.iter().flatten().filter(|(ttft_s, tbt_s)| *ttft_s <= TTFT_S && *tbt_s <= TBT_S);
    good.count() as f64 / fared.len() as f64
}

#[test]
fn the_same_arrivals_through_one_router_two_and_four_keep_as_many_promises() {
    for seed in [1, 2] {
        let kept = [1, 2, 4].map(|routers| kept(&play(routers, false, seed, 16.0)));
        println!("seed {seed}: one, two and four routers keep {kept:.4?}");
        let (least, most) = kept.iter().fold((1.0f64, 0.0f64), |(a, b), &x| (a.min(x), b.max(x)));
        assert!(most - least <= 0.02, "seed {seed}: {kept:?}");
    }
}

#[test]
fn with_objectives_no_router_admits_what_the_workers_cannot_do() {
    for routers in [1, 2, 4] {
        let fared = play(routers, true, 3, 40.0);
        let admitted: Vec<f64> = fared.iter().flatten().map(|(ttft_s, _)| *ttft_s).collect();
        let late = admitted.iter().filter(|ttft_s| **ttft_s > TTFT_S).count();
        let latest_s = admitted.iter().copied().fold(0.0, f64::max);
        println!(
            "{routers} routers: {} of 300 admitted, {late} late, the latest {latest_s:.3} s",
            admitted.len()
        );
        assert!(admitted.len() < 280, "{routers} routers: nothing was turned away");
        // One router's own predictions are off by as much.
        assert!(latest_s <= 1.1 * TTFT_S, "{routers} routers: {late} late, the latest {latest_s} s");
    }
}
