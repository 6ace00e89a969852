//! Host memory and disks for KV that a plan may choose, of instances or of KV nodes.

use super::args::PlanArgs;
use mixfleet_hal::units::{Bytes, GIB, UsdPerHour};
use mixfleet_scheduler::plan::tiers::PlannedTiers;

/// Every size of host memory, alone and with every size of disk: of each instance, and of every number of
/// nodes.
pub(super) fn choices(args: &PlanArgs) -> Vec<PlannedTiers> {
    let ssd = || [0].into_iter().chain(args.ssd.iter().copied());
    let pairs = || args.dram.iter().flat_map(|dram| ssd().map(move |ssd| (*dram, ssd)));
    let nodes = [0].into_iter().chain(args.kv_nodes.iter().copied());
    let bytes = |gib: u32| Bytes(f64::from(gib) * GIB as f64);
    let rent = |gib: u32, usd: Option<f64>| UsdPerHour(f64::from(gib) * usd.unwrap_or(0.0));
    let with = |nodes: u32| {
        pairs().map(move |(dram, ssd)| PlannedTiers {
            dram: bytes(dram),
            ssd: bytes(ssd),
            usd_per_hour: rent(dram, args.dram_usd) + rent(ssd, args.ssd_usd),
            nodes,
        })
    };
    nodes.flat_map(with).collect()
}

/// Tiers in words, as in `, 64 GiB of DRAM each` or `, 2 KV nodes of 64 GiB of DRAM`; nothing if there are
/// none.
pub(super) fn words(tiers: &PlannedTiers) -> String {
    let of = |bytes: Bytes, what: &str| {
        (bytes.0 > 0.0).then(|| format!("{:.0} GiB of {what}", bytes.0 / GIB as f64))
    };
    let all: Vec<String> = [of(tiers.dram, "DRAM"), of(tiers.ssd, "SSD")].into_iter().flatten().collect();
    match (all.join(" and "), tiers.nodes) {
        (each, _) if each.is_empty() => each,
        (each, 0) => format!(", {each} each"),
        (each, 1) => format!(", a KV node of {each}"),
        (each, nodes) => format!(", {nodes} KV nodes of {each}"),
    }
}
