//! Runs requests on devices: one coordinator, one worker per instance.
//!
//! ```text
//!   API --Submission--> coordinator --ToWorker--> worker (device A: prefill) --KV--> worker (device B: decode)
//!    ^-----Update-----------'  ^--------FromWorker-------'--------------------------------'
//! ```
//!
//! All choices are the scheduler's: the coordinator carries the fleet machine's, each worker its own
//! instance machine's.

pub mod calibrate;
mod check;
mod coordinator;
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
use coordinator::Coordinator;
use directory::Directory;
use events::{EventLog, LoggedFleet};
use instance::Surroundings;
use measure::measure_link;
use messages::{FromWorker, Report};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Result};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{Admission, FleetConfig, InstanceId, Policy, Rebalance};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The fleet's bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Requests in work.
    pub requests_max: usize,
    /// Requests predicted to get their first token later than this are turned away.
    pub ttft_slo: Option<Seconds>,
    /// Requests predicted to get their tokens slower than this are turned away.
    pub tbt_slo: Option<Seconds>,
    /// Answers of [`ServiceTier::Flex`](crate::request::ServiceTier) are complete so long after their request came, or it is turned away.
    pub flex_deadline: Seconds,
    /// How placements are picked.
    pub policy: Policy,
    /// Whether an instance may pull a prefix that another one holds, where that is expected to be faster than computing it.
    pub pull: bool,
    /// What is turned away on arrival.
    pub admission: Admission,
    /// Whether a request is given up after its prefill if its decode instance is too busy for the objective by then.
    pub drop_at_decode: bool,
    /// Dollars that a second of waiting is worth; by default a second of the average instance.
    pub wait_usd_per_s: Option<f64>,
    /// When instances change between prefill and decode; none: never.
    pub rebalance: Option<Rebalance>,
    /// Of policies that draw.
    pub seed: u64,
    /// For so long a request that lost its instance waits for another one, where one may come; then it fails.
    pub patience: Seconds,
    /// Staging of KV between instances.
    pub hand_off: HandOffLimits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            requests_max: 1024,
            ttft_slo: None,
            tbt_slo: None,
            flex_deadline: Seconds(600.0),
            policy: Policy::default(),
            pull: true,
            admission: Admission::default(),
            drop_at_decode: false,
            wait_usd_per_s: None,
            rebalance: None,
            seed: 0,
            patience: Seconds::ZERO,
            hand_off: HandOffLimits::default(),
        }
    }
}

/// What an engine is made of.
pub struct EngineParts {
    /// The world.
    pub env: SharedEnv,
    /// The model.
    pub config: Arc<ModelConfig>,
    /// Names the model in block hashes.
    pub identity: Identity,
    /// Instances with what steps take on them.
    pub instances: Vec<(Loaded, CostModel)>,
    /// The ways between instances.
    pub links: Links,
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
    /// Starts the workers and the coordinator; they end when the last handle and request are gone.
    ///
    /// # Errors
    /// When a device gives no queue or no staging memory.
    pub fn start(self) -> Result<EngineHandle> {
        let EngineParts { env, config, identity, instances, links, limits, .. } = self;
        let metrics = self.metrics;
        let (reports, incoming) = mailbox("reports", REPORTS_MAX);
        let widest = instances.iter().map(|(i, _)| i.kv()).max_by_key(|d| d.size_bytes());
        let directory = Directory::default();
        let surroundings = Surroundings {
            env: env.clone(),
            links,
            hand_off: limits.hand_off,
            directory: directory.clone(),
            reports,
            metrics: metrics.clone(),
        };
        let ids: Vec<InstanceId> = (0..instances.len() as u32).map(InstanceId).collect();
        for (&id, (loaded, cost)) in ids.iter().zip(instances) {
            loaded.start(id, cost, &surroundings)?;
        }
        join(&ids, &surroundings);
        let parts = CoordinatorParts {
            env,
            config: &config,
            identity,
            kv: widest.unwrap_or(DType::F32),
            first_request: 0,
            directory,
            reports: incoming,
            limits,
            events: self.events,
            placements: self.placements,
            metrics,
        };
        Ok(parts.start())
    }
}

/// What a coordinator is made of, wherever its instances are.
pub(crate) struct CoordinatorParts<'a> {
    pub(crate) env: SharedEnv,
    pub(crate) config: &'a ModelConfig,
    pub(crate) identity: Identity,
    /// The widest dtype of KV.
    pub(crate) kv: DType,
    /// Ids of requests count from here.
    pub(crate) first_request: RequestId,
    pub(crate) directory: Directory,
    pub(crate) reports: MessageReceiver<Report>,
    pub(crate) limits: EngineConfig,
    pub(crate) events: Option<EventLog>,
    pub(crate) placements: Arc<Placements>,
    pub(crate) metrics: Metrics,
}

impl CoordinatorParts<'_> {
    /// Starts it; it ends with the last handle and request.
    pub(crate) fn start(self) -> EngineHandle {
        let limits = self.limits;
        let fleet = FleetConfig {
            requests_max: limits.requests_max,
            ttft_slo: limits.ttft_slo,
            tbt_slo: limits.tbt_slo,
            policy: limits.policy,
            admission: limits.admission,
            seed: limits.seed,
            pull: limits.pull,
            drop_at_decode: limits.drop_at_decode,
            wait_usd_per_s: limits.wait_usd_per_s,
            rebalance: limits.rebalance,
            ..FleetConfig::new(self.config.kv_bytes_per_token(self.kv), self.config.layers)
        };
        let (handle, submissions) = EngineHandle::channel(limits.requests_max.max(1));
        let coordinator = Coordinator {
            env: self.env.clone(),
            fleet: LoggedFleet::new(fleet, self.events),
            instances: BTreeMap::new(),
            directory: self.directory,
            identity: self.identity,
            first_request: self.first_request,
            vocabulary: self.config.vocab,
            submissions,
            flex_deadline: limits.flex_deadline,
            patience: limits.patience,
            reports: self.reports,
            placements: self.placements,
            metrics: self.metrics,
        };
        self.env.spawn(Box::pin(coordinator.run()));
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
