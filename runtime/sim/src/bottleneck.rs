//! What binds a fleet: the resource that its requests used most of.

use crate::simulate::{Misses, PoolResult, Results};
use serde::Serialize;

/// Utilisation below which a resource does not bind: misses are then not due to waiting.
pub const BINDS_MIN: f64 = 0.5;

/// What instances can have too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Compute time, mostly for prompts.
    Prompts,
    /// Compute time, mostly for decode steps within the TBT objective.
    DecodeSteps,
    /// Memory for KV.
    KvMemory,
    /// The number of sequences that may run.
    Sequences,
    /// The network's bandwidth.
    Network,
}

impl Resource {
    /// The resource in words.
    pub const fn text(self) -> &'static str {
        match self {
            Resource::Prompts => "prompts",
            Resource::DecodeSteps => "decode steps",
            Resource::KvMemory => "KV memory",
            Resource::Sequences => "sequences at a time",
            Resource::Network => "network",
        }
    }
}

/// The most used resource of a pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bottleneck {
    /// Name of the pool.
    pub pool: String,
    /// The resource.
    pub resource: Resource,
    /// Utilisation, where 1 is all of it; demand for the network may exceed 1.
    pub used: f64,
    /// Whether that is enough to make requests wait.
    pub binds: bool,
    /// The objective that most requests missed, if any did.
    pub missed: Option<MissedObjective>,
}

/// An objective that requests missed, and where.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MissedObjective {
    /// `TTFT`, `TBT` or `deadline`.
    pub objective: &'static str,
    /// Requests that were late by it, or rejected for it.
    pub count: u64,
    /// Requests of the run.
    pub of: u64,
    /// The pool that did most of the work that the objective times.
    pub pool: String,
    /// Whether this pool's bottleneck makes requests wait.
    pub waits: bool,
}

impl MissedObjective {
    fn of(results: &Results, most: &PoolResult, binds: bool) -> Option<Self> {
        type Work = fn(&PoolResult) -> f64;
        let Misses { ttft, tbt, deadline } = results.missed_by;
        let rejected = |reason: &str| results.rejected.get(reason).copied().unwrap_or(0);
        let all: [(&'static str, u64, Work); 3] = [
            ("TTFT", ttft + rejected("ttft_slo"), |pool| pool.prefill_device_s),
            ("TBT", tbt + rejected("tbt_slo"), |pool| pool.decode_device_s),
            ("deadline", deadline + rejected("deadline"), |pool| {
                pool.prefill_device_s + pool.decode_device_s
            }),
        ];
        // Among equals the first counts.
        let missed = all.into_iter().reduce(|most, other| if other.1 > most.1 { other } else { most });
        let (objective, count, work) = missed.filter(|(_, count, _)| *count > 0)?;
        let pool = results.pools.iter().rev().max_by(|a, b| work(a).total_cmp(&work(b)))?;
        let waits = binds && pool.name == most.name;
        Some(MissedObjective { objective, count, of: results.requests, pool: pool.name.clone(), waits })
    }

    /// In words, with what would mend it.
    pub fn text(&self) -> String {
        let MissedObjective { objective, count, of, pool, waits } = self;
        let remedy = match (waits, *objective) {
            (true, _) => format!("requests wait for {pool}: add instances to it"),
            (false, "TBT") => format!(
                "steps of {pool} are too long: a faster part, more devices per instance, or fewer prompt tokens per step"
            ),
            (false, _) => format!(
                "{pool} is idle at times: add instances if requests come in bursts; else one request alone takes too long, \
                 which a faster part or more devices per instance mend"
            ),
        };
        format!("{objective} missed by {count} of {of} requests; {remedy}")
    }
}

impl Bottleneck {
    /// The resource that a run used most of; `None` if it used nothing for a measurable time
    /// and no request missed an objective.
    ///
    /// An instance that does both has for its prompts the time left by the fewest decode steps; the prompts'
    /// share of it, plus the time of steps beyond the fewest, is its utilisation.
    pub fn of(results: &Results) -> Option<Self> {
        let resources = results.pools.iter().flat_map(|pool| {
            let used = pool.used;
            let left = (1.0 - used.decode_least).max(used.prompts);
            let prompts = if left > 0.0 { used.prompts / left } else { 0.0 };
            let time = prompts + used.decode_steps;
            let of_time = if prompts > used.decode_steps { Resource::Prompts } else { Resource::DecodeSteps };
            let all = [
                (of_time, time),
                (Resource::KvMemory, used.kv_memory),
                (Resource::Sequences, used.sequences),
                (Resource::Network, used.network),
            ];
            all.map(|(resource, used)| (pool, resource, used))
        });
        // Among equals the first counts.
        let most = resources.reduce(|most, other| if other.2 > most.2 { other } else { most });
        most.and_then(|(pool, resource, used)| {
            let binds = used >= BINDS_MIN;
            let missed = MissedObjective::of(results, pool, binds);
            let tells = used > 0.0 || missed.is_some();
            tells.then(|| Bottleneck { pool: pool.name.clone(), resource, used, binds, missed })
        })
    }

    /// In words.
    pub fn text(&self) -> String {
        if self.used <= 0.0 {
            return "no pool did any work".to_owned();
        }
        let (percent, of) = (100.0 * self.used, self.resource.text());
        let binds = match (self.binds, &self.missed) {
            (true, _) => "",
            (false, None) => "nothing binds; most used: ",
            (false, Some(_)) => "most used: ",
        };
        format!("{binds}{of} of {}, {percent:.0} % used", self.pool)
    }
}
