//! What a history is made of.

use super::disks::Disks;
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_runtime::fleet::registry::sim::SimFaults;
use serde::Deserialize;

/// One kind of trouble.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(super) workers: usize,
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
    /// Cuts of connections between routers and workers only.
    #[serde(default)]
    pub(super) cut_router_every_s: f64,
    /// What messages between workers take at most.
    #[serde(default = "quick_ms")]
    pub(super) peer_delay_ms: u64,
    /// Blocks of a device's memory.
    #[serde(default = "ample_blocks")]
    pub(super) device_blocks: u32,
    /// Blocks of host memory below each device.
    #[serde(default)]
    pub(super) dram_blocks: u64,
    /// Commands that a device fails, or never ends: it is lost with its instance, and answers again.
    #[serde(default)]
    pub(super) device_fail: f64,
    #[serde(default)]
    pub(super) device_hang: f64,
    /// Results of steps that are nonsense, and parts that are slower than their makers say.
    #[serde(default)]
    pub(super) lies: f64,
    #[serde(default)]
    pub(super) boasts: f64,
    /// Requests that stop every part that computes them, and as many with ids of no token.
    #[serde(default)]
    pub(super) poison: usize,
    /// Staging memory that is asked for and not there.
    #[serde(default)]
    pub(super) regions_refused: f64,
    /// Threads that are asked for and not there.
    #[serde(default)]
    pub(super) threads_refused: f64,
    /// Every host's clock goes its own way.
    #[serde(default)]
    pub(super) odd_clocks: bool,
    /// When an end learns at most that the other was cut.
    #[serde(default)]
    pub(super) ends_late_ms: u64,
    #[serde(default)]
    pub(super) partition_every_s: f64,
    #[serde(default)]
    pub(super) registry_trouble_every_s: f64,
    /// Processes with other weights and of another release are members too.
    #[serde(default)]
    pub(super) strangers: bool,
    /// Requests that a router has in work.
    #[serde(default = "ample_requests")]
    pub(super) requests_max: usize,
    /// Mean time until a client comes.
    #[serde(default = "some_time")]
    pub(super) come_within_s: f64,
    /// Disks below devices, each as often as something breaks.
    #[serde(default)]
    pub(super) disks: Option<Disks>,
}

fn ample_requests() -> usize {
    1024
}

fn some_time() -> f64 {
    0.5
}

/// Memory of a device where nothing is said: nobody is short of it.
fn ample_blocks() -> u32 {
    60
}

/// What messages take at most where nothing is said.
pub(super) fn quick_ms() -> u64 {
    2
}

impl Workload {
    /// Two routers of hosts whose clocks differ, and nothing else that is wrong.
    pub(crate) fn of_two_clocks() -> Workload {
        let text = "name = 'two clocks'\nworkers = 2\nrouters = 2\nrequests = 24\nodd_clocks = true";
        toml::from_str(text).expect("the rest has defaults")
    }

    pub(crate) fn all() -> Vec<Workload> {
        #[derive(Deserialize)]
        struct File {
            workload: Vec<Workload>,
        }
        toml::from_str::<File>(include_str!("workloads.toml")).unwrap().workload
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

    /// Whether instances are lost with what they work on, or out of reach for longer than anybody waits, or
    /// nothing can be staged: two of them end a request.
    pub(super) fn may_fail(&self) -> bool {
        let lost = self.kill_worker_every_s + self.partition_every_s;
        lost + self.device_fail + self.device_hang + self.lies + self.regions_refused > 0.0 || self.poison > 0
    }

    /// Whether far more come at once than all routers may have in work.
    pub(super) fn is_overload(&self) -> bool {
        self.requests > 4 * self.routers * self.requests_max
    }

    /// After which all have noticed that nothing breaks any more.
    pub(super) fn rest_s(&self) -> u64 {
        let slow_to_know = self.registry_trouble_every_s > 0.0 || self.partition_every_s > 0.0;
        if slow_to_know { 60 } else { 20 }
    }

    /// What befalls the registry by itself.
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
