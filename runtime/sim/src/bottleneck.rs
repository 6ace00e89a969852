//! What binds a fleet: the resource that its requests used most of.

use crate::simulate::Results;
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
}

impl Bottleneck {
    /// The resource that a run used most of; `None` if it used nothing for a measurable time.
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
        most.filter(|(.., used)| *used > 0.0).map(|(pool, resource, used)| Bottleneck {
            pool: pool.name.clone(),
            resource,
            used,
            binds: used >= BINDS_MIN,
        })
    }

    /// In words.
    pub fn text(&self) -> String {
        let (percent, of) = (100.0 * self.used, self.resource.text());
        let binds = if self.binds { "" } else { "nothing binds; most used: " };
        format!("{binds}{of} of {}, {percent:.0} % used", self.pool)
    }
}
