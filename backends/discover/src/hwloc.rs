//! Cross-checks the cores and caches of sysfs with hwloc.
//!
//! Only the traversal of normal depths of the crate `hwloc2` 2.2 is used. Its table of negative depths is
//! that of hwloc 1, so queries for NUMA nodes, bridges or PCI devices panic; those come from sysfs alone.

use crate::{CacheKind, Topology};
use hwloc2::ObjectType;
use mixfleet_hal::Absent;
use std::collections::BTreeMap;

/// Number of packages, cores, threads, and caches by level and size.
type TopologyCounts = BTreeMap<String, usize>;

/// Returns what hwloc and sysfs disagree about, one line each.
///
/// hwloc shows what this process may use and sysfs all that the machine has, so a control group or a set of
/// allowed CPUs makes them differ too.
pub(crate) fn disagreements(topology: &Topology) -> Result<Vec<String>, Absent> {
    let told = counts_of_hwloc()?;
    let read = counts_of(topology);
    let what: std::collections::BTreeSet<&String> = told.keys().chain(read.keys()).collect();
    let line = |what: &String| {
        let number = |counts: &TopologyCounts| counts.get(what).copied().unwrap_or(0);
        let (told, read) = (number(&told), number(&read));
        (told != read).then(|| format!("{what}: hwloc finds {told}, sysfs {read}"))
    };
    Ok(what.into_iter().filter_map(line).collect())
}

fn cache(level: u32, bytes: u64) -> String {
    format!("L{level} caches of {} KiB", bytes >> 10)
}

fn counts_of(topology: &Topology) -> TopologyCounts {
    let mut counts = TopologyCounts::new();
    counts.insert("packages".into(), topology.sockets.len());
    counts.insert("cores".into(), topology.sockets.iter().map(|socket| socket.cores.len()).sum());
    counts.insert("threads".into(), topology.sockets.iter().map(crate::Socket::threads).sum());
    for found in topology.caches.iter().filter(|cache| cache.kind != CacheKind::Instruction) {
        *counts.entry(cache(found.level, found.bytes.unwrap_or(0))).or_default() += 1;
    }
    counts
}

fn counts_of_hwloc() -> Result<TopologyCounts, Absent> {
    let hwloc = hwloc2::Topology::new().ok_or_else(|| Absent::new("hwloc cannot read this machine"))?;
    let mut counts = TopologyCounts::new();
    for depth in 0..hwloc.depth() {
        for object in hwloc.objects_at_depth(depth) {
            // not `==`, which calls into hwloc with the type
            let level = match object.object_type() {
                ObjectType::Package => Err("packages"),
                ObjectType::Core => Err("cores"),
                ObjectType::PU => Err("threads"),
                ObjectType::L1Cache => Ok(1),
                ObjectType::L2Cache => Ok(2),
                ObjectType::L3Cache => Ok(3),
                ObjectType::L4Cache => Ok(4),
                _ => continue,
            };
            let what = match level {
                Ok(level) => cache(level, object.cache_attributes().map_or(0, |cache| cache.size)),
                Err(name) => name.to_owned(),
            };
            *counts.entry(what).or_default() += 1;
        }
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuList, Socket, Tree};

    #[test]
    fn hwloc_sees_this_machine_and_another_one_differs() {
        let counts = counts_of_hwloc().expect("hwloc reads this machine");
        assert!(counts["threads"] >= 1 && counts["cores"] >= 1, "{counts:?}");
        let lines = disagreements(&Topology::read(&Tree::at("/"))).expect("hwloc reads this machine");
        eprintln!("on this machine: {lines:?}");
        let cores = vec![CpuList::new(vec![0]); counts["cores"] + 1];
        let other = Topology { sockets: vec![Socket { id: 0, cores }], ..Topology::default() };
        let lines = disagreements(&other).expect("hwloc reads this machine");
        assert!(lines.iter().any(|line| line.starts_with("cores: hwloc finds")), "{lines:?}");
    }
}
