//! Fleet membership: records in etcd, each under a lease that its process keeps alive.
//!
//! ```text
//!   mixfleet/<fleet>/charter            what all members have in common; made by the first
//!   mixfleet/<fleet>/next/instance      counters, so that an id is never given twice
//!   mixfleet/<fleet>/next/router
//!   mixfleet/<fleet>/members/<name>     a member; removed with its lease
//! ```
//!
//! The registry says which members to call, not which are alive: a working session is kept even if its record
//! is gone. While etcd cannot be reached the last known members stay in place, and new processes wait to
//! join.
//!
//! [`Registry`] reads and writes the records, [`Membership`] maintains one; both use etcd through a few
//! operations with deadlines. `sim` is a store with the same operations that injects faults, in a seeded
//! environment.

#[cfg(feature = "fleet")]
mod etcd;
mod keep;
#[cfg(test)]
mod keep_tests;
#[cfg_attr(
    not(any(test, feature = "fleet", feature = "testing")),
    expect(dead_code, reason = "no store is built")
)]
mod records;
#[cfg(any(test, feature = "testing"))]
pub mod sim;
#[cfg_attr(
    not(any(test, feature = "fleet", feature = "testing")),
    expect(dead_code, reason = "no store is built")
)]
mod store;

#[cfg(feature = "fleet")]
pub use etcd::RegistryConfig;
pub use keep::Membership;
pub use records::Registry;

use super::session::{ModelIdentity, PROTOCOL, SessionRefusal, check};
use crate::request::RouterId;
use mixfleet_scheduler::fleet::{InstanceId, Role};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The first version of a member's record.
const SCHEMA: &str = "mixfleet.member/1";

/// All members, by their names.
pub type Members = Arc<BTreeMap<String, Member>>;

/// What all members of a fleet have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charter {
    /// The protocol version.
    pub protocol: u32,
    /// The model that they serve.
    pub model: ModelIdentity,
    /// Secret of the block hashes, so that routers know each other's caches.
    pub secret: [u8; 16],
}

impl Charter {
    /// Checks that a process that serves `model` may join.
    pub(crate) fn check(&self, model: &ModelIdentity) -> Result<(), SessionRefusal> {
        check(self.protocol, &self.model, model)
    }
}

/// A process of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The record's version, `mixfleet.member/1`.
    pub schema: String,
    /// The version of mixfleet.
    pub version: String,
    /// The protocol version.
    pub protocol: u32,
    /// The model that it serves.
    pub model: ModelIdentity,
    /// Its address: for members if it is a worker process, for clients if it is a router.
    pub address: String,
    /// What the process does.
    pub seat: Seat,
    /// Measured links, by the names of the members that it called.
    #[serde(default)]
    pub links: BTreeMap<String, LinkState>,
}

/// What a member does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Seat {
    /// It places requests.
    Router {
        /// The router's id.
        id: RouterId,
    },
    /// It has devices.
    Worker {
        /// One instance per device, by ascending ids.
        instances: Vec<InstanceRecord>,
        /// Its transports for KV, best first.
        transports: Vec<String>,
        /// Transports that exist and are not offered, with the reason.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        not_offered: Vec<String>,
    },
}

/// An instance of a worker process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// The instance's id.
    pub id: InstanceId,
    /// The device's selector in its process.
    pub device: String,
    /// The instance's role.
    pub role: Role,
    /// Rent in USD per hour, if known.
    pub usd_per_hour: Option<f64>,
    /// Tokens that its KV memory holds.
    pub kv_capacity_tokens: u64,
    /// Whether its steps take much more or less than its declared part would take.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub degraded: bool,
}

/// What changes of an instance while it is up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceState {
    /// Its role.
    pub role: Role,
    /// Whether it is degraded ([`InstanceRecord::degraded`]).
    pub degraded: bool,
}

/// A link as measured when two processes connected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum LinkState {
    /// KV uses this link.
    Up {
        /// The best transport that works.
        transport: String,
        /// Latency of a write of 4 KiB.
        latency_s: f64,
        /// Bandwidth of long writes.
        bytes_per_s: f64,
        /// For RDMA: the NIC, the kind of address and the MTU.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        details: String,
        /// Errors of better transports.
        broken: Vec<String>,
    },
    /// No transport works, or the member cannot be reached.
    Down {
        /// The errors of the transports.
        reason: String,
    },
}

impl Member {
    /// A member of this version.
    pub fn new(model: ModelIdentity, address: String, seat: Seat) -> Self {
        let version = env!("CARGO_PKG_VERSION").into();
        Member {
            schema: SCHEMA.into(),
            version,
            protocol: PROTOCOL,
            model,
            address,
            seat,
            links: BTreeMap::new(),
        }
    }

    /// The unique name of the member in the registry.
    pub fn name(&self) -> String {
        match &self.seat {
            Seat::Router { id } => format!("router-{}", id.0),
            Seat::Worker { .. } => format!("worker-{}", self.first_instance().map_or(0, |id| id.0)),
        }
    }

    /// Sets the states of the named instances. False if it changes nothing.
    pub fn set_states(&mut self, states: &BTreeMap<InstanceId, InstanceState>) -> bool {
        let Seat::Worker { instances, .. } = &mut self.seat else { return false };
        let mut is_changed = false;
        for instance in instances {
            if let Some(&InstanceState { role, degraded }) = states.get(&instance.id) {
                is_changed |= std::mem::replace(&mut instance.role, role) != role;
                is_changed |= std::mem::replace(&mut instance.degraded, degraded) != degraded;
            }
        }
        is_changed
    }

    /// Whether the members have an id in common.
    fn shares_an_id_with(&self, other: &Member) -> bool {
        other.instances().any(|theirs| self.instances().any(|instance| instance.id == theirs.id))
    }

    /// The smallest id of its instances; none for a router.
    pub fn first_instance(&self) -> Option<InstanceId> {
        self.instances().map(|instance| instance.id).min()
    }

    /// Its instances; a router has none.
    pub fn instances(&self) -> impl Iterator<Item = &InstanceRecord> {
        match &self.seat {
            Seat::Router { .. } => [].iter(),
            Seat::Worker { instances, .. } => instances.iter(),
        }
    }
}

/// Why a registry operation failed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The fleet serves something else.
    #[error("{0}; fleets that serve different models have different names (--fleet)")]
    Refused(#[from] SessionRefusal),
    /// etcd was not reached, or failed.
    #[error("etcd: {0}")]
    Etcd(String),
    /// The lease ended before it was kept alive.
    #[error("the lease in etcd ended")]
    LeaseEnded,
    /// Another process has the same id: etcd lost its data, and gave it again.
    #[error(
        "another process is in the fleet as '{0}': etcd has lost its data; start this one again, for a new id"
    )]
    Taken(String),
    /// A key of the registry has foreign content.
    #[error("etcd holds something else under '{key}': {reason}; give the fleet another name")]
    Foreign {
        /// The key.
        key: String,
        /// The fault of its content.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_members_record_is_json_that_comes_back() {
        let model = ModelIdentity { digest: "d".into(), tokenizer_digest: "t".into() };
        let instance = |id| InstanceRecord {
            id: InstanceId(id),
            device: "cpu".into(),
            role: Role::Auto,
            usd_per_hour: None,
            kv_capacity_tokens: 64,
            degraded: false,
        };
        let seat = Seat::Worker {
            instances: vec![instance(7), instance(5)],
            transports: vec!["shm".into()],
            not_offered: vec!["verbs: why".into()],
        };
        let mut worker = Member::new(model.clone(), "127.0.0.1:1".into(), seat);
        let state = |role, degraded| InstanceState { role, degraded };
        let states =
            [(InstanceId(5), state(Role::Decode, true)), (InstanceId(6), state(Role::Prefill, false))].into();
        assert!(worker.set_states(&states) && !worker.set_states(&states));
        let states: Vec<_> =
            worker.instances().map(|instance| state(instance.role, instance.degraded)).collect();
        assert_eq!(states, [state(Role::Auto, false), state(Role::Decode, true)]);
        let up = LinkState::Up {
            transport: "tcp".into(),
            latency_s: 1e-4,
            bytes_per_s: 1e9,
            details: "d".into(),
            broken: vec![],
        };
        worker.links.insert("worker-1".into(), up);
        let router = Member::new(model, "127.0.0.1:2".into(), Seat::Router { id: RouterId(9) });
        assert_eq!((worker.name().as_str(), router.name().as_str()), ("worker-5", "router-9"));
        for member in [worker, router] {
            let text = serde_json::to_string(&member).unwrap();
            assert_eq!(serde_json::from_str::<Member>(&text).unwrap(), member);
        }
    }
}
