//! How far the resources of each pool are used while there are requests, which tells what binds.
//!
//! Shares are sampled, and each sample counts by its length and the requests that were in the fleet: a share
//! is what the mean request found. The interval between samples grows with the run, so that a run of any
//! length takes few.

use super::World;
use super::timeline::Occupation;
use crate::trace::TIME_S_MAX;
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};

/// Seconds between the first samples.
const INTERVAL_S: f64 = 0.1;
/// Number of samples after which the interval is doubled.
const SAMPLES: u32 = 256;

/// Utilisation of the resources of a pool's instances, where 1 is all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolUse {
    /// Share of the time that computed prompts.
    pub prompts: f64,
    /// What decode steps take beyond one of a single sequence, over what the TBT objective leaves for it.
    pub decode_steps: f64,
    /// Time of a decode step of a single sequence over the TBT objective; 0 where nothing decodes.
    pub decode_least: f64,
    /// Share of KV memory that sequences hold.
    pub kv_memory: f64,
    /// Sequences that hold memory over the most that may.
    pub sequences: f64,
    /// Time that transfers ask of the network over the time that there is, in the busier direction.
    pub network: f64,
}

impl PoolUse {
    fn add(&mut self, other: &PoolUse, weight: f64) {
        self.prompts += weight * other.prompts;
        self.decode_steps += weight * other.decode_steps;
        self.decode_least += weight * other.decode_least;
        self.kv_memory += weight * other.kv_memory;
        self.sequences += weight * other.sequences;
        self.network += weight * other.network;
    }
}

/// Device and network time of a pool up to a sample.
#[derive(Clone, Copy, Debug, Default)]
struct SpentTime {
    prefill_s: f64,
    out_s: f64,
    in_s: f64,
}

pub(super) struct Occupancy {
    interval_s: f64,
    /// Number of samples with this interval.
    taken: u32,
    sampled_s: f64,
    /// Requests in the fleet at the last sample.
    requests: usize,
    weight: f64,
    sums: Vec<PoolUse>,
    spent: Vec<SpentTime>,
}

impl Occupancy {
    pub(super) fn new(pools: usize) -> Self {
        Occupancy {
            interval_s: INTERVAL_S,
            taken: 0,
            sampled_s: 0.0,
            requests: 0,
            weight: 0.0,
            sums: vec![PoolUse::default(); pools],
            spent: vec![SpentTime::default(); pools],
        }
    }

    /// The mean of a pool's samples.
    pub(super) fn used(&self, pool: usize) -> PoolUse {
        let mut mean = PoolUse::default();
        if self.weight > 0.0 {
            mean.add(&self.sums[pool], 1.0 / self.weight);
        }
        mean
    }

    /// Time of the next sample, if it is before `then_s`; a time without requests is left out.
    fn due(&mut self, then_s: f64, idle: bool) -> Option<f64> {
        if idle && self.requests == 0 {
            self.sampled_s = self.sampled_s.max(then_s);
        }
        let due_s = self.sampled_s + self.interval_s;
        (due_s < then_s).then_some(due_s)
    }

    fn count(&mut self) {
        self.taken += 1;
        if self.taken == SAMPLES {
            (self.taken, self.interval_s) = (0, 2.0 * self.interval_s);
        }
    }
}

/// What a decode step takes beyond the least one, over what the objective leaves for it; 1 if even the least
/// one is too long.
fn of_room(work: &Occupation, tbt_s: f64) -> f64 {
    let room_s = tbt_s - work.least_step_s;
    match work.phases.decoding {
        0 => 0.0,
        _ if room_s <= 0.0 => 1.0,
        _ => (work.step_s - work.least_step_s).max(0.0) / room_s,
    }
}

impl World<'_> {
    /// Takes the samples that are due before `then_s`.
    pub(super) fn watch_use(&mut self, then_s: f64) {
        // A run that goes on beyond that is refused, but only after it was moved there.
        let then_s = then_s.min(TIME_S_MAX);
        while let Some(due_s) = self.occupancy.due(then_s, self.flights.is_empty()) {
            self.sample_use(due_s);
            self.occupancy.count();
        }
    }

    fn sample_use(&mut self, time_s: f64) {
        let interval_s = time_s - self.occupancy.sampled_s;
        let requests = self.flights.len();
        let weight = interval_s * 0.5 * (requests + self.occupancy.requests) as f64;
        for pool in 0..to_u32(self.setup.pools.len()) {
            let used = self.use_of(pool, time_s, interval_s);
            self.occupancy.sums[pool as usize].add(&used, weight);
        }
        (self.occupancy.sampled_s, self.occupancy.requests) = (time_s, requests);
        self.occupancy.weight += weight;
    }

    fn use_of(&mut self, pool: u32, time_s: f64, interval_s: f64) -> PoolUse {
        let mut now = SpentTime { prefill_s: self.ledger.worked_s(pool).0, ..SpentTime::default() };
        let (mut instances, mut used) = (0u32, PoolUse::default());
        for (at, engine) in self.engines.iter().enumerate().filter(|(_, engine)| engine.pool() == pool) {
            let work = engine.occupation(time_s);
            let limits = &self.setup.instances[at].limits;
            let phases = work.phases;
            let holding = phases.receiving + phases.prefilling + phases.decoding + phases.handed_off;
            instances += 1;
            used.decode_steps += of_room(&work, self.setup.slo.tbt_s);
            used.decode_least += work.least_step_s / self.setup.slo.tbt_s;
            used.kv_memory += work.used_tokens as f64 / (limits.kv_tokens() as f64).max(1.0);
            used.sequences += holding as f64 / limits.sequences_max as f64;
            now.prefill_s += work.worked_s.0;
            let (out_s, in_s) = self.network.taken_s(at);
            now.out_s += out_s;
            now.in_s += in_s;
        }
        let instances = f64::from(instances.max(1));
        let before = std::mem::replace(&mut self.occupancy.spent[pool as usize], now);
        let of_interval = |now_s: f64, before_s: f64| (now_s - before_s) / (instances * interval_s);
        PoolUse {
            prompts: of_interval(now.prefill_s, before.prefill_s),
            decode_steps: used.decode_steps / instances,
            decode_least: used.decode_least / instances,
            kv_memory: used.kv_memory / instances,
            sequences: used.sequences / instances,
            network: of_interval(now.out_s, before.out_s).max(of_interval(now.in_s, before.in_s)),
        }
    }
}
