//! Runs requests on devices: one coordinator, one worker per instance.
//!
//! ```text
//!   API --Submission--> coordinator --Order--> worker (device A: prefill) --KV--> worker (device B: decode)
//!    ^-----Update-----------'  ^-------FromWorker-----'-------------------------------'
//! ```
//!
//! All choices are the scheduler's: the coordinator carries the fleet machine's, each worker its own
//! instance machine's.

pub mod calibrate;
mod check;
mod coordinator;
mod copies;
mod courier;
mod coverage;
pub(crate) mod directory;
pub mod events;
mod fault;
mod handoff;
mod health;
mod identity;
mod incoming;
pub(crate) mod instance;
mod lend;
mod losses;
pub(crate) mod measure;
pub(crate) mod messages;
mod pages;
mod pinning;
mod renew;
mod tiers;
mod told;
mod transfers;
mod watch;
mod worker;

pub use courier::{HandOffLimits, Links};
pub use handoff::wire_dtype;
pub use identity::Identity;
pub use instance::{InstanceLimits, InstanceSpec, Loaded};
pub use messages::Held;
pub use tiers::LowerTiers;

use crate::api::Placements;
use crate::env::SharedEnv;
use crate::mailbox::{MessageReceiver, REPORTS_MAX, mailbox};
use crate::metrics::Metrics;
use crate::model::ModelConfig;
use crate::request::EngineHandle;
use coordinator::{Coordinator, LEAVING_MAX};
use directory::Directory;
use events::{EventLog, LoggedFleet};
use instance::Surroundings;
use measure::measure_link;
use messages::{FromWorker, Report};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{FleetConfig, InstanceId};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;
use watch::Ways;

/// The fleet's bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// What the fleet's machine is told. What it says of the model is set when the engine starts.
    pub fleet: FleetConfig,
    /// Answers of [`ServiceTier::Flex`](crate::request::ServiceTier) are complete so long after their request
    /// came, or it is turned away.
    pub flex_deadline: Seconds,
    /// For so long a request that lost its instance waits for another one, where one may come; then it fails.
    pub patience: Seconds,
    /// Staging of KV between instances.
    pub hand_off: HandOffLimits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            fleet: FleetConfig { requests_max: 1024, pull: true, ..FleetConfig::new(0, 0) },
            flex_deadline: Seconds(600.0),
            patience: Seconds::ZERO,
            hand_off: HandOffLimits::default(),
        }
    }
}

/// What engines and routers are made of, beside their instances.
pub struct EngineParts {
    /// The world.
    pub env: SharedEnv,
    /// The model.
    pub config: Arc<ModelConfig>,
    /// Names it in block hashes. Routers that share caches share its secret.
    pub identity: Identity,
    /// The fleet's bounds.
    pub limits: EngineConfig,
    /// Where all that the fleet's machine is told and answers goes, if it is wanted.
    pub events: Option<EventLog>,
    /// Where decisions are kept for people.
    pub placements: Arc<Placements>,
    /// Where everyone counts.
    pub metrics: Metrics,
}

impl EngineParts {
    /// Starts a worker on each of `instances`, given with what steps take there, and the coordinator; they
    /// end when the last handle and request are gone.
    ///
    /// # Errors
    /// When a device gives no queue or no staging memory.
    pub fn start(self, instances: Vec<(Loaded, CostModel)>, links: Links) -> Result<EngineHandle> {
        let (reports, incoming) = mailbox("reports", REPORTS_MAX);
        let widest = instances.iter().map(|(i, _)| i.kv()).max_by_key(|d| d.size_bytes());
        let surroundings = Surroundings {
            env: self.env.clone(),
            links,
            hand_off: self.limits.hand_off,
            directory: Directory::default(),
            reports,
            metrics: self.metrics.clone(),
        };
        let ids: Vec<InstanceId> = (0..instances.len() as u32).map(InstanceId).collect();
        for (&id, (loaded, cost)) in ids.iter().zip(instances) {
            loaded.start(id, cost, &surroundings)?;
        }
        join(&ids, &surroundings);
        Ok(self.coordinate(widest.unwrap_or(DType::F32), 0, surroundings.directory, incoming))
    }

    /// Starts a coordinator of instances that are reached by `directory`, the widest KV of which is `kv`. Ids
    /// of requests count from `first_request`. It ends with the last handle and request.
    pub(crate) fn coordinate(
        self,
        kv: DType,
        first_request: RequestId,
        directory: Directory,
        reports: MessageReceiver<Report>,
    ) -> EngineHandle {
        let EngineParts { env, config, identity, limits, events, placements, metrics } = self;
        let (handle, submissions) = EngineHandle::channel(limits.fleet.requests_max.max(1));
        let (kv_bytes_per_token, layers) = (config.kv_bytes_per_token(kv), config.layers);
        let fleet = FleetConfig { kv_bytes_per_token, layers, ..limits.fleet };
        let (leave, left) = mpsc::channel(LEAVING_MAX);
        let (tick, ticks) = mpsc::channel(1);
        let coordinator = Coordinator {
            fleet: LoggedFleet::new(fleet, events),
            instances: BTreeMap::new(),
            directory,
            identity,
            vocabulary: config.vocab,
            submissions,
            flex_deadline: limits.flex_deadline,
            patience: limits.patience,
            reports,
            placements,
            metrics,
            requests: BTreeMap::new(),
            copies: BTreeMap::new(),
            homeless: BTreeMap::new(),
            ways: Ways::default(),
            next: first_request,
            // Read once: a wall clock that is set later reorders nothing.
            began: env.unix_time() - env.now(),
            left,
            leave,
            watching: false,
            tick,
            ticks,
            env: env.clone(),
        };
        env.spawn(Box::pin(coordinator.serve()));
        handle
    }
}

/// Reports the ways between instances of this process, which are all alike.
pub(crate) fn join(ids: &[InstanceId], surroundings: &Surroundings) {
    let Surroundings { env, links, hand_off, reports, .. } = surroundings;
    if ids.len() < 2 {
        return;
    }
    match measure_link(env, links, *hand_off) {
        Ok(cost) => {
            for (from, to) in ids.iter().flat_map(|from| ids.iter().map(move |to| (*from, *to))) {
                if from != to {
                    let _ = reports.send((from, FromWorker::Link { to, cost }));
                }
            }
        }
        Err(error) => tracing::warn!(%error, "no KV can go from one device to another"),
    }
}
