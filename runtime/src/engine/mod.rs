//! The engine, which runs requests on devices: one coordinator, one worker per instance.
//!
//! ```text
//!   API --Submission--> coordinator --Order--> worker (device A: prefill) --KV--> worker (device B: decode)
//!    ^-----Update-----------'  ^-------FromWorker-----'-------------------------------'
//! ```
//!
//! All choices are the scheduler's: the coordinator carries out the fleet machine's, each worker those of its
//! instance machine.

mod answers;
pub mod calibrate;
mod check;
mod compiled;
mod coordinator;
mod copies;
mod courier;
mod coverage;
pub(crate) mod directory;
mod draw;
mod fault;
mod health;
mod identity;
mod inbox;
pub(crate) mod instance;
mod landings;
mod leaving;
mod lend;
mod loading;
mod losses;
pub(crate) mod measure;
mod members;
pub(crate) mod messages;
mod pages;
mod pinning;
mod receiver;
mod recordings;
mod renew;
mod sender;
mod shaping;
mod spans;
pub mod speed;
mod step;
mod support;
mod suspects;
mod tiers;
mod transfers;
mod warm;
mod watch;
mod worker;

pub use courier::{HandOffLimits, Links};
pub use identity::Identity;
pub use instance::{InstanceLimits, InstanceSpec, Loaded, MemberSpec};
pub use messages::Held;
pub use pages::Pages;
pub use sender::wire_dtype;
pub use tiers::LowerTiers;

use crate::env::SharedEnv;
use crate::events::{EventLog, LoggedFleet};
use crate::front::Front;
use crate::mailbox::{MessageReceiver, REPORTS_MAX, mailbox};
use crate::metrics::Metrics;
use crate::model::ModelConfig;
use crate::placements::Placements;
use crate::request::EngineHandle;
use coordinator::{CLIENTS_LEAVING_MAX, Coordinator};
use directory::Directory;
use instance::Surroundings;
use measure::measure_link;
use messages::{FromWorker, Report};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{FleetConfig, InstanceId};
use mixfleet_scheduler::quarantine::Quarantine;
use mixfleet_scheduler::transfer::KvTransfers;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::mpsc;
use watch::KvLinks;

/// Limits of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Configuration of the fleet machine. The model's values are set when the engine starts.
    pub fleet: FleetConfig,
    /// Time in which answers of [`ServiceTier::Flex`](crate::request::ServiceTier) must be complete; a
    /// request that cannot be is rejected.
    pub flex_deadline: Seconds,
    /// Time that a request that lost its instance waits for another one, if one may come, before it fails.
    pub patience: Seconds,
    /// Limits of KV staging between instances.
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

/// The parts of an engine or a router, without its instances.
pub struct EngineParts {
    /// The environment.
    pub env: SharedEnv,
    /// The model.
    pub config: Arc<ModelConfig>,
    /// The model's identity in block hashes. Routers that share caches share its secret.
    pub identity: Identity,
    /// Limits of the fleet.
    pub limits: EngineConfig,
    /// The log of the fleet machine's events and actions, if wanted.
    pub events: Option<EventLog>,
    /// Where decisions are kept for display.
    pub placements: Arc<Placements>,
    /// The process's metrics.
    pub metrics: Metrics,
}

impl EngineParts {
    /// Starts a worker for each of `instances`, given with its cost model, and the coordinator; they end when
    /// the last handle and request are gone.
    ///
    /// # Errors
    /// When a device gives no queue or no staging memory, or is lost.
    pub fn start(self, instances: Vec<(Loaded, CostModel)>, links: Links) -> Result<EngineHandle> {
        let (reports, incoming) = mailbox("reports", REPORTS_MAX);
        let widest = instances.iter().map(|(i, _)| i.kv_dtype()).max_by_key(|d| d.size_bytes());
        let surroundings = Surroundings {
            env: self.env.clone(),
            links,
            hand_off: self.limits.hand_off,
            directory: Directory::default(),
            reports,
            metrics: self.metrics.clone(),
        };
        let ids: Vec<InstanceId> = (0..).map(InstanceId).take(instances.len()).collect();
        for (&id, (loaded, cost)) in ids.iter().zip(instances) {
            loaded.start(id, cost, &surroundings)?;
        }
        join(&ids, &surroundings);
        Ok(self.coordinate(widest.unwrap_or(DType::F32), 0, surroundings.directory, incoming))
    }

    /// Starts a coordinator of the instances in `directory`, whose widest KV dtype is `kv`. Request ids count
    /// from `first_request`. It ends with the last handle and request.
    pub(crate) fn coordinate(
        self,
        kv: DType,
        first_request: RequestId,
        directory: Directory,
        reports: MessageReceiver<Report>,
    ) -> EngineHandle {
        let EngineParts { env, config, identity, limits, events, placements, metrics } = self;
        let (handle, submissions) = EngineHandle::channel(limits.fleet.requests_max.max(1));
        let handle = handle.that_drops_late(limits.fleet.drop_at_decode);
        let (kv_bytes_per_token, layers) = (config.kv_bytes_per_token(kv), config.layers);
        let fleet = FleetConfig { kv_bytes_per_token, layers, ..limits.fleet };
        let (leave, left) = mpsc::channel(CLIENTS_LEAVING_MAX);
        let (tick, ticks) = mpsc::channel(1);
        let fleet = LoggedFleet::new(fleet, events, metrics.clone());
        let front = Front::new(env.clone(), fleet, limits.flex_deadline, first_request);
        let mut coordinator = Coordinator {
            front,
            instances: BTreeMap::new(),
            directory,
            identity,
            vocabulary: config.vocab,
            submissions,
            patience: limits.patience,
            reports,
            placements,
            metrics,
            requests: BTreeMap::new(),
            transfers: KvTransfers::default(),
            copies: BTreeMap::new(),
            unplaced: BTreeMap::new(),
            quarantine: Quarantine::default(),
            rumours: VecDeque::new(),
            held: VecDeque::new(),
            links: KvLinks::default(),
            // It is read once, so that setting the wall clock later does not reorder requests.
            began: env.unix_time() - env.now(),
            left,
            leave,
            watching: false,
            tick,
            ticks,
            env: env.clone(),
        };
        // Instances of this process are up when the engine is, so that no client is told in between that none
        // serves.
        while let Ok((instance, message)) = coordinator.reports.try_recv() {
            coordinator.report(instance, message);
        }
        env.spawn(Box::pin(coordinator.serve()));
        handle
    }
}

/// Reports the links between the instances of this process, which are all alike.
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
