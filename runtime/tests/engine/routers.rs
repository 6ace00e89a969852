//! Several routers of the workers of one process, on simulated devices in virtual time: each counts the work
//! that the others gave to the devices.

use super::parts;
use crate::fleet::wayward::Wayward;
use crate::fleet::{Log, ask};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, Device, Error, ErrorKind};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Loaded,
};
use mixfleet_runtime::env::{Env, SeededEnv, SharedEnv};
use mixfleet_runtime::events::EventLog;
use mixfleet_runtime::fleet::{Hub, ModelIdentity, RouterId, WorkerProcess};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::{EngineHandle, GenerateRequest, Rejection, Update};
use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, PrefillCoefficients};
use mixfleet_scheduler::fleet::{InstanceId, Role};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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

/// A router that uses the workers from now on, and calls again when a session ends.
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
    let mut session = hub.accept_router(&router.hello(), router.id()).unwrap();
    let (hub, world) = (hub.clone(), env.clone());
    env.spawn(Box::pin(async move {
        loop {
            router.add_worker(session).await;
            world.sleep(Duration::from_millis(100)).await;
            let Ok(next) = hub.accept_router(&router.hello(), router.id()) else { return };
            session = next;
        }
    }));
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
            let request = parts::greedy(at.to_string(), prompt.into(), 4 + random.below(60) as u32);
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

/// A device that is lost whenever it gets `token`, and counts that.
fn deadly(
    at: u32,
    token: u32,
    checkpoint: &Checkpoint,
    deaths: &Arc<AtomicU32>,
) -> (InstanceId, Loaded, CostModel) {
    let deaths = deaths.clone();
    let device = Wayward::new(&format!("device{at}")).writing(move |_, data| {
        if !data.chunks_exact(4).any(|word| word == token.to_le_bytes()) {
            return Ok(());
        }
        deaths.fetch_add(1, Ordering::Relaxed);
        Err(Error::new(ErrorKind::DeviceLost, "poisoned"))
    });
    let device: Arc<dyn Device> = Arc::new(device);
    let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
    let config = Arc::new(checkpoint.config.clone());
    let limits = InstanceLimits {
        activations: DType::F32,
        kv: DType::F32,
        kv_bytes: 512 * config.kv_bytes_per_token(DType::F32),
        step_tokens_max: 24,
        prefill_tokens_beside_decode_max: Some(12),
        sequences_max: 8,
        block_tokens: Some(8),
    };
    let spec = InstanceSpec { device, weights, role: Role::Auto, price: None, limits };
    let cost = CostModel::Coefficients(Coefficients {
        prefill_s: PrefillCoefficients { overhead: 1e-3, per_token: 1e-4, per_token_squared: 0.0 },
        decode_s: DecodeCoefficients { base: 1e-3, per_sequence: 1e-5, per_kv_token: 0.0 },
    });
    (InstanceId(at), Loaded::new(&config, spec).unwrap(), cost)
}

#[test]
fn what_took_two_instances_from_one_router_is_refused_by_all() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let token = checkpoint.config.vocab - 1;
    let (env, deaths) = (SeededEnv::new(4), Arc::new(AtomicU32::new(0)));
    let process = WorkerProcess {
        env: Arc::new(env.clone()),
        model: ModelIdentity { digest: "model".into(), tokenizer_digest: "tokenizer".into() },
        instances: (0..4).map(|at| deadly(at, token, &checkpoint, &deaths)).collect(),
        links: parts::links(),
        hand_off: HandOffLimits::default(),
        metrics: Metrics::new(),
    };
    let hub = process.start().unwrap();
    let routers = [1, 2].map(|id| router(id, &checkpoint, &env, &hub, EngineConfig::default(), None));
    let world = env.clone();
    env.run(async move {
        world.sleep(Duration::from_secs(1)).await;
        let [one, other] = &routers;
        let expect_refused = async |router: &EngineHandle| {
            let again = GenerateRequest::greedy("again", vec![1, 2, token], 4);
            let refused = router.submit(again).await.unwrap_err();
            assert!(matches!(refused, Rejection::Quarantined(_)), "{refused}");
            let sound = ask(router, "sound".into(), vec![1, 2, 3], 4, None).await;
            assert_eq!((sound.tokens.len(), sound.failure), (4, None));
        };
        let first = ask(one, "poisoned".into(), vec![1, 2, token], 4, None).await;
        assert!(first.failure.unwrap().contains("instances were lost"));
        world.sleep(Duration::from_millis(200)).await;
        expect_refused(one).await;
        expect_refused(other).await;
        let late = router(3, &checkpoint, &world, &hub, EngineConfig::default(), None);
        world.sleep(Duration::from_secs(1)).await;
        // the instances were opened again in between
        for router in [one, other, &late] {
            expect_refused(router).await;
        }
    });
    assert_eq!(deaths.load(Ordering::Relaxed), 2);
}
