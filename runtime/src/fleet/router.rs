//! A coordinator whose instances are in other processes.

use super::rights::relay;
use super::session::{Caller, Command, Hello, InstanceReport, ModelIdentity, Session};
use crate::engine::directory::{Directory, Inboxes};
use crate::engine::messages::{FromWorker, Report, ToWorker};
use crate::engine::{EngineParts, Held};
use crate::env::SharedEnv;
use crate::mailbox::{INBOX_MAX, MessageSender, REPORTS_MAX, mailbox};
use crate::request::EngineHandle;
use crate::request::RouterId;
use mixfleet_hal::{DType, Error, ErrorKind};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeSet;
use tokio::sync::mpsc;

/// A handle on a running router for its connections.
#[derive(Clone)]
pub struct Router {
    env: SharedEnv,
    id: RouterId,
    hello: Hello,
    directory: Directory,
    reports: MessageSender<Report>,
}

impl EngineParts {
    /// Starts a router with its own `id`; the widest KV in its fleet is of dtype `kv`. It turns requests away
    /// until the first worker is attended.
    pub fn start_router(self, id: RouterId, kv: DType) -> (EngineHandle, Router) {
        let model = ModelIdentity {
            digest: self.identity.model_digest.clone(),
            tokenizer_digest: self.identity.tokenizer_digest.clone(),
        };
        let (directory, (reports, incoming)) = (Directory::default(), mailbox("reports", REPORTS_MAX));
        let hello = Hello::new(model, Caller::new(&*self.env));
        let router = Router { env: self.env.clone(), id, hello, directory: directory.clone(), reports };
        (self.coordinate(kv, id.first_request(), directory, incoming), router)
    }
}

impl Router {
    /// The router's id.
    pub fn id(&self) -> RouterId {
        self.id
    }

    /// The greeting with which it calls a worker process.
    pub fn hello(&self) -> Hello {
        Hello { clock: Some(self.env.unix_time()), ..self.hello.clone() }
    }

    /// The blocks that its index attributes to instances, for checks. Empty once it has ended.
    pub async fn held(&self) -> Held {
        let (answer, mut answers) = mpsc::channel(1);
        let nobody = InstanceId(u32::MAX);
        let _ = self.reports.send((nobody, FromWorker::Inspect(answer)));
        answers.recv().await.unwrap_or_default()
    }

    /// Uses the instances of a worker process until the session ends; then they are lost.
    pub async fn add_worker(&self, session: Session<Command, InstanceReport>) {
        let Session { out, mut incoming } = session;
        let mut instances = BTreeSet::new();
        while let Some(InstanceReport { instance, message }) = incoming.recv().await {
            self.reports.room().await;
            if matches!(&message, FromWorker::Up { .. }) && instances.insert(instance) {
                let (orders, messages) = mailbox("relay", INBOX_MAX);
                self.directory.enter(instance, Inboxes { orders: Some(orders), words: None });
                let command = move |message| match message {
                    ToWorker::Order(order) => Some(Command { instance, order }),
                    // The one of its own process.
                    ToWorker::Abandon { .. } | ToWorker::Inspect(_) => None,
                };
                self.env.spawn(Box::pin(relay(messages, out.clone(), command)));
            }
            // A process may report only on the instances that it has announced.
            if instances.contains(&instance) && self.reports.send((instance, message)).is_err() {
                return;
            }
        }
        for instance in instances {
            self.directory.leave(instance);
            let error = Error::new(ErrorKind::Closed, "the connection to its process ended");
            let _ = self.reports.send((instance, FromWorker::Unreachable(error)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::messages::{Job, Lacking, Landing, Order};
    use crate::engine::{EngineConfig, Identity};
    use crate::env::{Env, Listener, SeededEnv, Task};
    use crate::metrics::Metrics;
    use crate::model::variants::tiny_variants;
    use crate::placements::Placements;
    use crate::request::{FinishReason, GenerateRequest, Hints, Sampling, Update};
    use futures_util::future::BoxFuture;
    use mixfleet_hal::units::Seconds;
    use mixfleet_scheduler::cost::{
        Coefficients, CostModel, DecodeCoefficients, KvCopyCost, LinkCost, PrefillCoefficients,
    };
    use mixfleet_scheduler::fleet::{Instance, InstanceId, PartyId, Role};
    use std::sync::Arc;
    use std::time::Duration;

    /// A process that was started this many seconds after the environment.
    struct Started(SeededEnv, Seconds);

    impl Env for Started {
        fn now(&self) -> Seconds {
            self.0.now() - self.1
        }
        fn unix_time(&self) -> Seconds {
            self.0.unix_time()
        }
        fn sleep(&self, span: Duration) -> Task {
            self.0.sleep(span)
        }
        fn spawn(&self, task: Task) {
            self.0.spawn(task);
        }
        fn spawn_worker(&self, name: &str, task: Task) -> std::io::Result<()> {
            self.0.spawn_worker(name, task)
        }
        fn block_on(&self, done: BoxFuture<'_, ()>, limit: Duration) -> bool {
            self.0.block_on(done, limit)
        }
        fn random(&self) -> u64 {
            self.0.random()
        }
        fn listen(&self, address: &str) -> BoxFuture<'static, std::io::Result<Box<dyn Listener>>> {
            self.0.listen(address)
        }
    }

    fn up(id: InstanceId, role: Role) -> FromWorker {
        let prefill_s = PrefillCoefficients { overhead: 1e-3, per_token: 1e-4, per_token_squared: 0.0 };
        let decode_s = DecodeCoefficients { base: 1e-3, per_sequence: 1e-5, per_kv_token: 0.0 };
        let instance = Instance {
            id,
            device: "device".into(),
            role,
            pool: 0,
            cost: CostModel::Coefficients(Coefficients { prefill_s, decode_s }).into(),
            price: None,
            nic: None,
            kv_capacity_tokens: 10_000,
            kv_block_tokens: 8,
            kv_dtype: DType::F32,
            prefill_tokens_beside_decode_max: Some(16),
            step_tokens_max: 16,
            kv_copies: KvCopyCost::default(),
            kv_parts: mixfleet_scheduler::batch::PageParts::ONE,
        };
        FromWorker::Up {
            instance: Box::new(instance),
            kv: DType::F32,
            codes: true,
            silence_max: Seconds(60.0),
        }
    }

    fn request(max_tokens: u32) -> GenerateRequest {
        GenerateRequest {
            id: "request".into(),
            forced_ids: [].into(),
            minimum: None,
            vocabulary: None,
            prompt_ids: vec![1, 2, 3].into(),
            max_tokens,
            eos_ids: [].into(),
            sampling: Sampling::default(),
            logprobs: None,
            grammar: None,
            cache_salt: None,
            party: PartyId::NONE,
            hints: Hints::default(),
        }
    }

    /// A router in `env`, and the worker's end of its session with instances of these roles, numbered from 0,
    /// which are up and linked.
    fn attended<const N: usize>(
        env: &SharedEnv,
        metrics: &Metrics,
        roles: [Role; N],
    ) -> (EngineHandle, Session<InstanceReport, Command>) {
        let parts = EngineParts {
            env: env.clone(),
            config: Arc::new(tiny_variants().remove(0).1.load().unwrap().config),
            identity: Identity::new("model".into(), "tokenizer".into(), [0; 2]),
            limits: EngineConfig::default(),
            events: None,
            placements: Arc::new(Placements::new(1)),
            metrics: metrics.clone(),
        };
        let (engine, router) = parts.start_router(RouterId(0), DType::F32);
        let (session, worker) = Session::pair();
        env.spawn(Box::pin(async move { router.add_worker(session).await }));
        let ids = (0..).map(InstanceId).take(N);
        let cost = LinkCost { latency: Seconds(1e-4), seconds_per_byte: 1e-9, usd_per_byte: 0.0 };
        let links = ids.clone().flat_map(|id| ids.clone().map(move |to| (id, FromWorker::Link { to, cost })));
        let ups = ids.clone().zip(roles).map(|(id, role)| (id, up(id, role)));
        for (instance, message) in ups.chain(links.filter(|_| N > 1)) {
            worker.out.send(InstanceReport { instance, message }).unwrap();
        }
        (engine, worker)
    }

    /// The due time that an instance gets for a request that arrives at 1000 s at a router started at
    /// `started_s`.
    fn due(started_s: f64) -> f64 {
        let world = SeededEnv::new(1);
        let env = world.clone();
        world.run(async move {
            env.sleep(Duration::from_secs_f64(started_s)).await;
            let started: SharedEnv = Arc::new(Started(env.clone(), Seconds(started_s)));
            let (engine, mut worker) = attended(&started, &Metrics::new(), [Role::Auto]);
            env.sleep(Duration::from_secs_f64(1000.0 - started_s)).await;
            let _updates = engine.submit(request(1)).await.unwrap();
            loop {
                let Command { order, .. } = worker.incoming.recv().await.unwrap();
                if let Order::Add { job, .. } = order {
                    return job.urgency.due.0;
                }
            }
        })
    }

    /// A worker accepts work and reports nothing about it, while its session continues.
    #[test]
    fn an_instance_that_says_nothing_of_its_work_is_lost_and_nobody_waits_for_ever() {
        let world = SeededEnv::new(4);
        let env = world.clone();
        let (failure, waited_s, silent) = world.run(async move {
            let metrics = Metrics::new();
            let shared: SharedEnv = Arc::new(env.clone());
            let (engine, mut worker) = attended(&shared, &metrics, [Role::Auto]);
            env.sleep(Duration::from_secs(1)).await;
            let began = env.now();
            let mut updates = engine.submit(request(1)).await.unwrap();
            let failure = loop {
                if let Some(Update::Failed(failure)) = updates.recv().await {
                    break failure;
                }
            };
            let Some(Command { order: Order::Add { .. }, .. }) = worker.incoming.recv().await else {
                panic!("it was given nothing")
            };
            (failure, (env.now() - began).0, metrics.instances_silent.get())
        });
        assert!(failure.message.contains("no other place"), "{failure}");
        assert!((60.0..90.0).contains(&waited_s) && silent == 1, "{waited_s} s");
    }

    #[test]
    fn a_worker_that_draws_more_than_was_asked_for_is_stopped_and_the_answer_ends() {
        let world = SeededEnv::new(4);
        let env = world.clone();
        world.run(async move {
            let shared: SharedEnv = Arc::new(env.clone());
            let (engine, mut worker) = attended(&shared, &Metrics::new(), [Role::Auto]);
            env.sleep(Duration::from_secs(1)).await;
            let mut updates = engine.submit(request(1)).await.unwrap();
            let Some(Command { order: Order::Add { job, .. }, .. }) = worker.incoming.recv().await else {
                panic!("it was given nothing")
            };
            for index in 0..10 {
                let (request, attempt) = (job.request, job.attempt);
                let message =
                    FromWorker::Drawn { request, attempt, index, token: 1, logprobs: None, finish: None };
                worker.out.send(InstanceReport { instance: InstanceId(0), message }).unwrap();
            }
            let mut told = Vec::new();
            while let Some(update) = updates.recv().await {
                told.push(update);
            }
            let [Update::Placed { .. }, Update::Token { id: 1, .. }, end] = &told[..] else {
                panic!("{told:?}")
            };
            assert!(matches!(end, Update::Finished { reason: FinishReason::Length }), "{end:?}");
            let next = worker.incoming.recv().await.map(|command| command.order);
            assert!(matches!(next, Some(Order::Cancel { request }) if request == job.request));
        });
    }

    fn drawn(job: &Job, instance: u32, index: u32) -> InstanceReport {
        let (request, attempt, token) = (job.request, job.attempt, 100 + index);
        let finish = (index + 1 == job.wanted.max_tokens).then_some(FinishReason::Length);
        let message = FromWorker::Drawn { request, attempt, index, token, logprobs: None, finish };
        InstanceReport { instance: InstanceId(instance), message }
    }

    #[test]
    fn tokens_that_overtake_the_first_one_wait_for_it() {
        let world = SeededEnv::new(4);
        let env = world.clone();
        world.run(async move {
            let metrics = Metrics::new();
            let shared: SharedEnv = Arc::new(env.clone());
            let (engine, mut worker) = attended(&shared, &metrics, [Role::Prefill, Role::Decode]);
            env.sleep(Duration::from_secs(1)).await;
            let mut updates = engine.submit(request(3)).await.unwrap();
            let Some(Command { order: Order::Reserve { job, .. }, .. }) = worker.incoming.recv().await else {
                panic!("its decode instance was not asked first")
            };
            let (request, attempt) = (job.request, job.attempt);
            let landing = Landing { regions: Vec::new(), slots: 1, slot_bytes: 1 };
            let message = FromWorker::Reserved { request, attempt, lacking: Lacking::all(0), landing };
            worker.out.send(InstanceReport { instance: InstanceId(1), message }).unwrap();
            for (instance, index) in [(1, 1), (1, 2), (0, 0)] {
                env.sleep(Duration::from_secs(1)).await;
                worker.out.send(drawn(&job, instance, index)).unwrap();
            }
            let mut tokens = Vec::new();
            loop {
                match updates.recv().await {
                    Some(Update::Token { id, .. }) => tokens.push(id),
                    Some(Update::Finished { reason }) => break assert_eq!(reason, FinishReason::Length),
                    Some(Update::Placed { .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(tokens, [100, 101, 102]);
        });
    }

    #[test]
    fn an_instance_that_draws_a_token_again_or_leaves_one_out_is_lost() {
        for indices in [[0, 0], [0, 2]] {
            let world = SeededEnv::new(4);
            let env = world.clone();
            world.run(async move {
                let metrics = Metrics::new();
                let shared: SharedEnv = Arc::new(env.clone());
                let (engine, mut worker) = attended(&shared, &metrics, [Role::Auto]);
                env.sleep(Duration::from_secs(1)).await;
                let _updates = engine.submit(request(4)).await.unwrap();
                let Some(Command { order: Order::Add { job, .. }, .. }) = worker.incoming.recv().await else {
                    panic!("it was given nothing")
                };
                assert_eq!(metrics.instances.get(), 1);
                for index in indices {
                    worker.out.send(drawn(&job, 0, index)).unwrap();
                }
                env.sleep(Duration::from_secs(1)).await;
                assert_eq!(metrics.instances.get(), 0, "{indices:?}");
            });
        }
    }

    #[test]
    fn routers_that_were_started_apart_tell_instances_one_time() {
        // An f64 of seconds since 1970 resolves 2^-22 s.
        assert!((due(0.0) - due(900.0)).abs() < 1e-6, "{} and {}", due(0.0), due(900.0));
    }
}
