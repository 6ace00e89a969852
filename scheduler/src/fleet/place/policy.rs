//! The policies by which a placement is picked.

use serde::{Deserialize, Serialize};

/// How a placement is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Any instance, by a seeded generator.
    Random,
    /// One after the other.
    RoundRobin,
    /// The shortest queue, the least busy decoder.
    LeastLoaded,
    /// The least predicted TTFT with what each instance holds itself; nothing is pulled from others.
    CacheAware,
    /// Mooncake's Algorithm 1 (FAST'25, section 4.1), as printed.
    KvcacheCentric {
        /// A prefix elsewhere is pulled if it is longer than the own one by more than this factor.
        threshold: f64,
    },
    /// The least cost in dollars (in seconds where prices are missing) among the placements within the
    /// objectives; of recomputing, pulling and pulling a part, whatever ends first.
    #[default]
    PerDollar,
}
