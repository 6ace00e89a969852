//! A coordinator whose instances live in other processes.

use super::hub::relay;
use super::session::{Command, Hello, Model, RouterId, Session, Word};
use crate::api::Placements;
use crate::engine::directory::Directory;
use crate::engine::events::EventLog;
use crate::engine::messages::{FromWorker, Report};
use crate::engine::{CoordinatorParts, EngineConfig, Held, Identity};
use crate::env::SharedEnv;
use crate::metrics::Metrics;
use crate::model::ModelConfig;
use crate::request::EngineHandle;
use mixfleet_hal::{DType, Error, ErrorKind};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What a router is made of.
pub struct RouterParts {
    /// The world.
    pub env: SharedEnv,
    /// The model that all members serve.
    pub config: Arc<ModelConfig>,
    /// Names it in block hashes. Routers that share caches share its secret.
    pub identity: Identity,
    /// The router's own id.
    pub id: RouterId,
    /// The widest dtype of KV in the fleet, for what transfers cost.
    pub kv: DType,
    /// The fleet's bounds.
    pub limits: EngineConfig,
    /// Where all that the fleet's machine is told and answers goes, if it is wanted.
    pub events: Option<EventLog>,
    /// Where decisions are kept for people.
    pub placements: Arc<Placements>,
    /// Where everyone counts.
    pub metrics: Metrics,
}

/// A running router, as its connections reach it.
#[derive(Clone)]
pub struct Router {
    env: SharedEnv,
    id: RouterId,
    hello: Hello,
    directory: Directory,
    reports: mpsc::UnboundedSender<Report>,
}

impl RouterParts {
    /// Starts the coordinator; it turns requests away until the first worker is attended.
    pub fn start(self) -> (EngineHandle, Router) {
        let RouterParts { env, config, identity, id, kv, limits, events, placements, metrics } = self;
        let model = Model {
            digest: identity.model_digest.clone(),
            tokenizer_digest: identity.tokenizer_digest.clone(),
        };
        let (directory, (reports, incoming)) = (Directory::default(), mpsc::unbounded_channel());
        let hello = Hello::new(model);
        let router = Router { env: env.clone(), id, hello, directory: directory.clone(), reports };
        let first_request = id.first_request();
        let parts = CoordinatorParts {
            env,
            config: &config,
            identity,
            kv,
            first_request,
            directory,
            reports: incoming,
            limits,
            events,
            placements,
            metrics,
        };
        (parts.start(), router)
    }
}

impl Router {
    /// Its id.
    pub fn id(&self) -> RouterId {
        self.id
    }

    /// What it says when it calls a worker process.
    pub fn hello(&self) -> Hello {
        self.hello.clone()
    }

    /// What it thinks that instances hold: for checks. Nothing once it has ended.
    pub async fn held(&self) -> Held {
        let (answer, mut answers) = mpsc::unbounded_channel();
        let nobody = InstanceId(u32::MAX);
        let _ = self.reports.send((nobody, FromWorker::Inspect(answer)));
        answers.recv().await.unwrap_or_default()
    }

    /// Uses the instances of a worker process until the session ends; then they are lost.
    pub async fn attend(&self, session: Session<Command, Word>) {
        let Session { out, mut incoming } = session;
        let mut instances = BTreeSet::new();
        while let Some(Word { instance, message }) = incoming.recv().await {
            if matches!(&message, FromWorker::Up { .. }) && instances.insert(instance) {
                let (inbox, messages) = mpsc::unbounded_channel();
                self.directory.enter(instance, inbox);
                self.env.spawn(Box::pin(relay(instance, messages, out.clone())));
            }
            // A process speaks for the instances that it has announced, and for no others.
            if instances.contains(&instance) && self.reports.send((instance, message)).is_err() {
                return;
            }
        }
        for instance in instances {
            self.directory.leave(instance);
            let error = Error::new(ErrorKind::Closed, "the connection to its process ended");
            let _ = self.reports.send((instance, FromWorker::Down(error)));
        }
    }
}
