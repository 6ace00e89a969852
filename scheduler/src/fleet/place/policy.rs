//! The policies by which a placement is picked.

use serde::{Deserialize, Serialize};

/// The rule that picks a placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Any instance, by a seeded generator.
    Random,
    /// Each instance in turn.
    RoundRobin,
    /// The shortest queue and the least busy decoder.
    LeastLoaded,
    /// The least predicted TTFT with each instance's own prefixes; nothing is pulled.
    CacheAware,
    /// Mooncake's Algorithm 1 (FAST'25, section 4.1), as printed.
    KvcacheCentric {
        /// A prefix is pulled if it is longer than the instance's own by more than this factor.
        threshold: f64,
    },
    /// The least cost in dollars (in seconds if prices are missing) among the placements that meet the
    /// objectives; the fastest of recomputing, pulling and pulling a part.
    #[default]
    PerDollar,
}
