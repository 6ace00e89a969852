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
                    // Of its own process.
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
    use crate::api::Placements;
    use crate::engine::messages::Order;
    use crate::engine::{EngineConfig, Identity};
    use crate::env::{Env, Listener, SeededEnv, Task};
    use crate::metrics::Metrics;
    use crate::model::random::tiny_variants;
    use crate::request::{FinishReason, GenerateRequest, Hints, Sampling, Update};
    use futures_util::future::BoxFuture;
    use mixfleet_hal::units::Seconds;
    use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, PrefillCoefficients};
    use mixfleet_scheduler::fleet::{Instance, InstanceId, Role};
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

    fn up() -> FromWorker {
        let prefill_s = PrefillCoefficients { overhead: 1e-3, per_token: 1e-4, per_token_squared: 0.0 };
        let decode_s = DecodeCoefficients { base: 1e-3, per_sequence: 1e-5, per_kv_token: 0.0 };
        let instance = Instance {
            id: InstanceId(0),
            device: "device".into(),
            role: Role::Auto,
            pool: 0,
            cost: CostModel::Coefficients(Coefficients { prefill_s, decode_s }).into(),
            price: None,
            nic: None,
            kv_capacity_tokens: 10_000,
            kv_block_tokens: 8,
            kv_dtype: DType::F32,
            prefill_tokens_beside_decode_max: Some(16),
            step_tokens_max: 16,
        };
        FromWorker::Up { instance: Box::new(instance), kv: DType::F32, silence_max: Seconds(60.0) }
    }

    fn request() -> GenerateRequest {
        GenerateRequest {
            id: "request".into(),
            prompt_ids: vec![1, 2, 3].into(),
            max_tokens: 1,
            eos_ids: [].into(),
            sampling: Sampling::default(),
            logprobs: None,
            cache_salt: None,
            hints: Hints::default(),
        }
    }

    /// A router in `env`, and the worker's end of its session with an instance that is up.
    fn attended(env: &SharedEnv, metrics: &Metrics) -> (EngineHandle, Session<InstanceReport, Command>) {
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
        worker.out.send(InstanceReport { instance: InstanceId(0), message: up() }).unwrap();
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
            let (engine, mut worker) = attended(&started, &Metrics::new());
            env.sleep(Duration::from_secs_f64(1000.0 - started_s)).await;
            let _updates = engine.submit(request()).await.unwrap();
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
            let (engine, mut worker) = attended(&shared, &metrics);
            env.sleep(Duration::from_secs(1)).await;
            let began = env.now();
            let mut updates = engine.submit(request()).await.unwrap();
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
            let (engine, mut worker) = attended(&shared, &Metrics::new());
            env.sleep(Duration::from_secs(1)).await;
            let mut updates = engine.submit(request()).await.unwrap();
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

    #[test]
    fn routers_that_were_started_apart_tell_instances_one_time() {
        // An f64 of seconds since 1970 resolves 2^-22 s.
        assert!((due(0.0) - due(900.0)).abs() < 1e-6, "{} and {}", due(0.0), due(900.0));
    }
}
