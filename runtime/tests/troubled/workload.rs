//! The parameters of a history.

use super::disks::Disks;
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::fleet::registry::sim::SimFaults;
use serde::Deserialize;

/// A combination of faults.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(super) workers: usize,
    /// Number of KV nodes beside them.
    #[serde(default)]
    pub(super) kv_nodes: usize,
    pub(super) routers: usize,
    pub(super) requests: usize,
    #[serde(default)]
    pub(super) bit_flip: f64,
    #[serde(default)]
    pub(super) fail: f64,
    #[serde(default)]
    pub(super) drop: f64,
    #[serde(default)]
    pub(super) hang: f64,
    #[serde(default)]
    pub(super) kill_worker_every_s: f64,
    #[serde(default)]
    pub(super) kill_router_every_s: f64,
    #[serde(default)]
    pub(super) cut_every_s: f64,
    /// Mean time between cuts of connections between routers and workers.
    #[serde(default)]
    pub(super) cut_router_every_s: f64,
    /// Maximum delay of messages between workers.
    #[serde(default = "quick_ms")]
    pub(super) peer_delay_ms: u64,
    /// Number of blocks in a device's memory.
    #[serde(default = "ample_blocks")]
    pub(super) device_blocks: u32,
    /// Number of blocks in host memory below each device.
    #[serde(default)]
    pub(super) dram_blocks: u64,
    /// Commands that a device fails, or never ends: it is lost with its instance, and responds again later.
    #[serde(default)]
    pub(super) device_fail: f64,
    #[serde(default)]
    pub(super) device_hang: f64,
    /// The share of instances with several devices, among those that both prefill and decode; all instances
    /// if 1. Parts then compute.
    #[serde(default)]
    pub(super) groups: f64,
    /// Batches that a member of such an instance fails, or never ends.
    #[serde(default)]
    pub(super) member_fail: f64,
    #[serde(default)]
    pub(super) member_hang: f64,
    /// Mean time between losses of members.
    #[serde(default)]
    pub(super) lose_member_every_s: f64,
    /// Results of steps that are wrong, and parts that are slower than claimed.
    #[serde(default)]
    pub(super) lies: f64,
    #[serde(default)]
    pub(super) boasts: f64,
    /// Number of requests that stop every part that computes them, and of requests with invalid token ids.
    #[serde(default)]
    pub(super) poison: usize,
    /// Allocations of staging memory that fail.
    #[serde(default)]
    pub(super) regions_refused: f64,
    /// Threads that cannot be started.
    #[serde(default)]
    pub(super) threads_refused: f64,
    /// Trials of grammars whose child is killed.
    #[serde(default)]
    pub(super) trials_killed: f64,
    /// Whether hosts' clocks differ.
    #[serde(default)]
    pub(super) odd_clocks: bool,
    /// Maximum delay after which an end learns that the other was cut.
    #[serde(default)]
    pub(super) ends_late_ms: u64,
    #[serde(default)]
    pub(super) partition_every_s: f64,
    #[serde(default)]
    pub(super) registry_trouble_every_s: f64,
    /// Whether processes with other weights and of another release are members too.
    #[serde(default)]
    pub(super) strangers: bool,
    /// Maximum requests in progress of a router.
    #[serde(default = "ample_requests")]
    pub(super) requests_max: usize,
    /// Mean time until a client starts.
    #[serde(default = "some_time")]
    pub(super) come_within_s: f64,
    /// Disks below devices, with the probabilities of their faults.
    #[serde(default)]
    pub(super) disks: Option<Disks>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    workload: Vec<Workload>,
    with_groups: Vec<Workload>,
}

impl File {
    fn read() -> File {
        toml::from_str(include_str!("workloads.toml")).unwrap()
    }
}

fn ample_requests() -> usize {
    1024
}

fn some_time() -> f64 {
    0.5
}

/// The default number of blocks of a device's memory, which is ample.
fn ample_blocks() -> u32 {
    60
}

/// The default maximum delay of messages.
pub(super) fn quick_ms() -> u64 {
    2
}

impl Workload {
    /// Two routers whose hosts' clocks differ, without other faults.
    pub(crate) fn of_two_clocks() -> Workload {
        let text = "name = 'two clocks'\nworkers = 2\nrouters = 2\nrequests = 24\nodd_clocks = true";
        toml::from_str(text).expect("the rest has defaults")
    }

    /// Those of single devices.
    pub(crate) fn all() -> Vec<Workload> {
        File::read().workload
    }

    /// Those with instances over several devices.
    pub(crate) fn with_groups() -> Vec<Workload> {
        File::read().with_groups
    }

    pub(super) fn wires(&self, seed: u64) -> FaultPlan {
        let rates = [
            (Fault::BitFlip, self.bit_flip),
            (Fault::Fail, self.fail),
            (Fault::Drop, self.drop),
            (Fault::Hang, self.hang),
        ];
        let rule = |(fault, probability)| Rule { fault, probability, from: 0, until: None };
        FaultPlan { seed, rules: rates.map(rule).to_vec() }
    }

    /// Whether instances may be lost with their work, unreachable for longer than any timeout, or without
    /// staging memory: two such losses end a request.
    pub(super) fn may_fail(&self) -> bool {
        let lost = self.kill_worker_every_s
            + self.partition_every_s
            + self.lose_member_every_s
            + self.member_fail
            + self.member_hang;
        lost + self.device_fail + self.device_hang + self.lies + self.regions_refused > 0.0 || self.poison > 0
    }

    /// Whether far more requests come at once than all routers accept.
    pub(super) fn is_overload(&self) -> bool {
        self.requests > 4 * self.routers * self.requests_max
    }

    /// Time after which all components have noticed that there are no more faults.
    pub(super) fn rest_s(&self) -> u64 {
        let slow_to_know = self.registry_trouble_every_s > 0.0 || self.partition_every_s > 0.0;
        // a hanging step takes a minute, for every caller
        let hangs = if self.member_hang > 0.0 { 100 } else { 0 };
        hangs + if slow_to_know { 60 } else { 20 }
    }

    /// The faults of the registry itself.
    pub(super) fn registry(&self) -> SimFaults {
        if self.registry_trouble_every_s == 0.0 {
            return SimFaults::default();
        }
        SimFaults {
            latency_s_max: 0.05,
            lost_asks: 10,
            lost_answers: 10,
            failed_answers: 10,
            silent_watches: 50,
        }
    }
}
