//! A worker process and a malicious router: each of its messages affects at most the request it concerns.

use super::{Caller, Command, Hello, Hub, InstanceReport, ModelIdentity, RouterId, Session, WorkerProcess};
use crate::engine::messages::{FromWorker, HandOff, Job, Lacking, Landing, Order};
use crate::engine::{HandOffLimits, InstanceLimits, InstanceSpec, Links, Loaded};
use crate::env::{Env, SeededEnv};
use crate::metrics::Metrics;
use crate::model::Checkpoint;
use crate::model::variants::tiny_variants;
use crate::request::{GenerateRequest, Hints, Sampling};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Device};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_scheduler::batch::Urgency;
use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, LinkCost, PrefillCoefficients};
use mixfleet_scheduler::fleet::{InstanceId, PartyId, Role};
use mixfleet_scheduler::kv::hash::{Namespace, PrefixHasher};
use mixfleet_scheduler::transfer::PrefixSource;
use mixfleet_wire::{HostRegion, InProcessTransport};
use std::sync::Arc;
use std::time::Duration;

const OWN: InstanceId = InstanceId(3);
const ELSEWHERE: InstanceId = InstanceId(9);
const ROUTER: RouterId = RouterId(7);

fn model() -> ModelIdentity {
    ModelIdentity { digest: "model".into(), tokenizer_digest: "tokenizer".into() }
}

fn process(env: &SeededEnv, checkpoint: &Checkpoint, metrics: &Metrics) -> mixfleet_hal::Result<Hub> {
    let device: Arc<dyn Device> = Arc::new(ReferenceDevice::named("device"));
    let weights = checkpoint.place(&*device, &mut |_, _| {}).expect("room");
    let limits = InstanceLimits {
        activations: DType::F32,
        kv: DType::F32,
        kv_bytes: 512 * checkpoint.config.kv_bytes_per_token(DType::F32),
        step_tokens_max: 24,
        prefill_tokens_beside_decode_max: Some(12),
        sequences_max: 8,
        block_tokens: Some(8),
    };
    let spec = InstanceSpec { device, weights, role: Role::Auto, price: None, limits };
    let loaded = Loaded::new(&Arc::new(checkpoint.config.clone()), spec).expect("it fits");
    let cost = Coefficients {
        prefill_s: PrefillCoefficients { overhead: 1e-3, per_token: 1e-4, per_token_squared: 0.0 },
        decode_s: DecodeCoefficients { base: 1e-3, per_sequence: 1e-5, per_kv_token: 0.0 },
    };
    let region = |bytes: u64| Ok(Arc::new(HostRegion::new(bytes as usize)?) as Arc<dyn SharedMemory>);
    WorkerProcess {
        env: Arc::new(env.clone()),
        model: model(),
        instances: vec![(OWN, loaded, CostModel::Coefficients(cost))],
        links: Links { transports: vec![Arc::new(InProcessTransport::new())], make_region: Arc::new(region) },
        hand_off: HandOffLimits { slot_bytes: 2048, slots: 3, ..HandOffLimits::default() },
        metrics: metrics.clone(),
    }
    .start()
}

/// A malicious router, and the process that it calls.
struct Rogue {
    env: SeededEnv,
    hub: Hub,
    hello: Hello,
    session: Session<Command, InstanceReport>,
    vocab: u32,
}

impl Rogue {
    fn job(&self, number: u64) -> Job {
        let namespace = Namespace {
            model_digest: "model".into(),
            tokenizer_digest: "tokenizer".into(),
            kv_dtype: DType::F32,
            cache_salt: None,
        };
        let wanted = GenerateRequest {
            id: format!("{number}"),
            forced_ids: [].into(),
            minimum: None,
            vocabulary: None,
            prompt_ids: [1, 2, 3].into(),
            max_tokens: 2,
            eos_ids: [].into(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            logprobs: None,
            grammar: None,
            cache_salt: None,
            party: PartyId::NONE,
            hints: Hints::default(),
        };
        Job {
            request: ROUTER.first_request() + number,
            urgency: Urgency::due_at(Seconds(1.0)),
            ready: Seconds(1.0),
            attempt: 1,
            wanted: Arc::new(wanted),
            generated: Vec::new(),
            hasher: PrefixHasher::new(&[1, 2], &namespace),
        }
    }

    fn wanting(&self, number: u64, change: impl FnOnce(&mut GenerateRequest)) -> Job {
        let mut job = self.job(number);
        change(Arc::make_mut(&mut job.wanted));
        job
    }

    fn hand_off(&self, to: InstanceId) -> HandOff {
        let landing = Landing { regions: Vec::new(), slots: 3, slot_bytes: 2048 };
        HandOff { attempt: 1, lacking: Lacking::all(0), to, landing, wire: DType::F32 }
    }

    fn say(&self, order: Order) {
        self.session.out.send(Command { instance: OWN, order }).expect("the session is open");
    }

    fn add(&self, job: Job) {
        self.say(Order::Add { job, hand_off: None, pull: None });
    }

    /// What the instance reports about these requests within a virtual second: tokens drawn, and failures.
    async fn heard(&mut self) -> (Vec<u64>, Vec<(u64, String)>) {
        self.env.sleep(Duration::from_secs(1)).await;
        let (mut drawn, mut failed) = (Vec::new(), Vec::new());
        while let Ok(InstanceReport { message, .. }) = self.session.incoming.try_recv() {
            match message {
                FromWorker::Drawn { request, .. } => drawn.push(request - ROUTER.first_request()),
                FromWorker::RequestFailed { request, failure, .. } => {
                    failed.push((request - ROUTER.first_request(), failure.to_string()));
                }
                FromWorker::Down(error) => panic!("the instance is down: {error}"),
                _ => {}
            }
        }
        (drawn, failed)
    }

    /// Checks that the instance works: one request gets both of its tokens.
    async fn is_served(&mut self, number: u64) {
        self.add(self.job(number));
        assert_eq!(self.heard().await, (vec![number, number], vec![]));
    }

    /// Checks that a job is refused with a reason, and that the instance keeps working.
    async fn is_refused(&mut self, order: Order, why: &str) {
        self.say(order);
        let (drawn, failed) = self.heard().await;
        assert!(drawn.is_empty(), "{why}: {drawn:?}");
        assert!(failed.len() == 1 && failed[0].1.contains(why), "{why}: {failed:?}");
        self.is_served(1000 + failed[0].0).await;
    }
}

fn with_a_rogue<F>(test: impl FnOnce(Rogue) -> F + Send + 'static)
where
    F: Future<Output = ()> + Send + 'static,
{
    let (env, checkpoint, metrics) =
        (SeededEnv::new(1), tiny_variants().remove(0).1.load().expect("good"), Metrics::new());
    let counted = metrics.clone();
    let world = env.clone();
    env.run(async move {
        let hub = process(&world, &checkpoint, &metrics).expect("it starts");
        let hello = Hello::new(model(), Caller::new(&world));
        let session = hub.accept_router(&hello, ROUTER).expect("it is let in");
        let mut rogue = Rogue { env: world, hub, hello, session, vocab: checkpoint.config.vocab };
        rogue.is_served(0).await;
        test(rogue).await;
    });
    assert_eq!(counted.worker_panics.get(), 0);
}

#[test]
fn an_empty_prompt_ends_at_the_worker() {
    with_a_rogue(async |mut rogue| {
        let job = rogue.wanting(1, |wanted| wanted.prompt_ids = [].into());
        rogue.is_refused(Order::Add { job, hand_off: None, pull: None }, "no tokens").await;
    });
}

#[test]
fn an_id_out_of_range_ends_its_request_at_the_worker() {
    with_a_rogue(async |mut rogue| {
        let vocab = rogue.vocab;
        let job = rogue.wanting(1, |wanted| wanted.prompt_ids = [1, vocab].into());
        rogue.is_refused(Order::Add { job, hand_off: None, pull: None }, "embedding").await;
        let job = Job { generated: vec![u32::MAX], ..rogue.job(2) };
        rogue.is_refused(Order::Reserve { job, sender: ELSEWHERE }, "embedding").await;
    });
}

#[test]
fn a_repeated_request_id_is_refused_and_the_first_request_goes_on() {
    with_a_rogue(async |mut rogue| {
        rogue.add(rogue.job(1));
        rogue.add(rogue.job(1));
        rogue.say(Order::Reserve { job: rogue.job(1), sender: ELSEWHERE });
        let (drawn, failed) = rogue.heard().await;
        assert_eq!(drawn, [1, 1]);
        assert!(failed.iter().all(|(request, _)| *request == 1), "{failed:?}");
        rogue.is_served(2).await;
    });
}

#[test]
fn a_hand_off_that_names_no_memory_ends_its_request_at_the_worker() {
    with_a_rogue(async |mut rogue| {
        let to = rogue.hand_off(ELSEWHERE);
        let add = Order::Add { job: rogue.job(1), hand_off: Some(to), pull: None };
        rogue.is_refused(add, "names no memory").await;
        let to = rogue.hand_off(OWN);
        let add = Order::Add { job: rogue.job(2), hand_off: Some(to), pull: None };
        rogue.is_refused(add, "sent to where it is").await;
        let pull = Some(PrefixSource { holder: OWN, until: 8 });
        let add = Order::Add { job: rogue.job(3), hand_off: None, pull };
        rogue.is_refused(add, "come from where it is wanted").await;
    });
}

#[test]
fn numbers_that_are_none_end_their_request_at_the_worker() {
    with_a_rogue(async |mut rogue| {
        let add = |job| Order::Add { job, hand_off: None, pull: None };
        let job = Job { urgency: Urgency::due_at(Seconds(f64::NAN)), ..rogue.job(1) };
        rogue.is_refused(add(job), "due is not a number").await;
        let urgency = Urgency { tbt_slo: Some(Seconds(f64::NAN)), ..Urgency::due_at(Seconds(1.0)) };
        let job = Job { urgency, ..rogue.job(1) };
        rogue.is_refused(add(job), "between tokens is not a number").await;
        let job = rogue.wanting(2, |wanted| wanted.sampling.top_p = f32::INFINITY);
        rogue.is_refused(add(job), "sampling is not a number").await;
        let job = rogue.wanting(3, |wanted| wanted.max_tokens = u32::MAX);
        rogue.is_refused(add(job), "the context is").await;
        let job = rogue.wanting(4, |wanted| wanted.logprobs = Some(u32::MAX));
        rogue.is_refused(add(job), "than supported").await;
    });
}

#[test]
fn no_other_routers_requests_are_abandoned_or_cancelled() {
    with_a_rogue(async |mut rogue| {
        rogue.add(rogue.job(1));
        rogue.say(Order::Cancel { request: RouterId(0).first_request() });
        assert_eq!(rogue.heard().await, (vec![1, 1], vec![]));
        rogue.is_served(2).await;
    });
}

#[test]
fn the_end_of_a_routers_old_session_leaves_its_new_one() {
    with_a_rogue(async |mut rogue| {
        let again = rogue.hub.accept_router(&rogue.hello, ROUTER).expect("the same process calls again");
        let old = std::mem::replace(&mut rogue.session, again);
        rogue.is_served(1).await;
        drop(old);
        rogue.heard().await;
        rogue.is_served(2).await;
    });
}

#[test]
fn the_end_of_a_peers_old_session_leaves_its_new_one() {
    with_a_rogue(async |mut rogue| {
        let hello = Hello::new(model(), Caller::new(&rogue.env));
        let call = |hub: &Hub| hub.accept_peer(&hello, vec![ELSEWHERE], LinkCost::default());
        let old = call(&rogue.hub).expect("it is let in");
        let _new = call(&rogue.hub).expect("the same process calls again");
        rogue.env.sleep(Duration::from_secs(1)).await;
        drop(old);
        rogue.env.sleep(Duration::from_secs(1)).await;
        let mut joined = Vec::new();
        while let Ok(InstanceReport { message, .. }) = rogue.session.incoming.try_recv() {
            match message {
                FromWorker::Link { to: ELSEWHERE, .. } => joined.push(true),
                FromWorker::LinkDown { to: ELSEWHERE } => joined.push(false),
                _ => {}
            }
        }
        // The second call ends what the first one began.
        assert_eq!(joined, [true, false, true]);
    });
}

#[test]
fn without_a_thread_a_process_does_not_start_and_does_not_panic() {
    let (env, checkpoint) = (SeededEnv::new(1), tiny_variants().remove(0).1.load().expect("good"));
    let world = env.clone();
    env.run(async move {
        world.refuse_threads(true);
        let refused = process(&world, &checkpoint, &Metrics::new()).expect_err("no thread");
        assert!(refused.to_string().contains("thread"), "{refused}");
        world.refuse_threads(false);
        assert!(process(&world, &checkpoint, &Metrics::new()).is_ok());
    });
}
