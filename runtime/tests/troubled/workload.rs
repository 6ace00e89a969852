//! What a history is made of, and what came of it.

use super::disks::Disks;
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
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
    device_fail: f64,
    #[serde(default)]
    device_hang: f64,
    /// Staging memory that is asked for and not there.
    #[serde(default)]
    pub(super) regions_refused: f64,
    /// Disks below devices, each as often as something breaks.
    #[serde(default)]
    pub(super) disks: Option<Disks>,
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
}

impl Workload {
    /// What strikes the commands of one device.
    pub(super) fn commands(&self, seed: u64) -> FaultPlan {
        let rates = [(Fault::Fail, self.device_fail), (Fault::Hang, self.device_hang)];
        let rule = |(fault, probability)| Rule { fault, probability, from: 0, until: None };
        FaultPlan { seed, rules: rates.map(rule).to_vec() }
    }
}

/// What happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) right: u64,
    pub(crate) errors: u64,
    pub(crate) refused: u64,
    pub(crate) asked_again: u64,
    pub(crate) worker_deaths: u64,
    pub(crate) router_deaths: u64,
    pub(crate) cuts: u64,
    pub(crate) retries: u64,
    pub(crate) recomputes: u64,
    pub(crate) fences: u64,
    pub(crate) pulled_tokens: u64,
    pub(crate) dram_hits: u64,
    pub(crate) ssd_hits: u64,
    pub(crate) bad_blocks: u64,
    pub(crate) rotten_in_dram: u64,
    pub(crate) slow_disks: u64,
    pub(crate) hung_disks: u64,
    pub(crate) disk_outages: u64,
    pub(crate) device_failures: u64,
    pub(crate) regions_refused: u64,
    /// When the answers were complete, all together: two histories that agree in this are one.
    pub(crate) answered_ns: u64,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Outcome) {
        self.right += other.right;
        self.errors += other.errors;
        self.refused += other.refused;
        self.asked_again += other.asked_again;
        self.worker_deaths += other.worker_deaths;
        self.router_deaths += other.router_deaths;
        self.cuts += other.cuts;
        self.retries += other.retries;
        self.recomputes += other.recomputes;
        self.fences += other.fences;
        self.pulled_tokens += other.pulled_tokens;
        self.dram_hits += other.dram_hits;
        self.ssd_hits += other.ssd_hits;
        self.bad_blocks += other.bad_blocks;
        self.rotten_in_dram += other.rotten_in_dram;
        self.slow_disks += other.slow_disks;
        self.hung_disks += other.hung_disks;
        self.disk_outages += other.disk_outages;
        self.device_failures += other.device_failures;
        self.regions_refused += other.regions_refused;
        self.answered_ns += other.answered_ns;
    }
}
