//! Sockets, cores, caches, NUMA nodes and memory.

use crate::CpuList;
use crate::tree::TreeReader;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A processor package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Socket {
    /// The kernel's number for it.
    pub id: u32,
    /// Its cores, each as the logical CPUs (threads) that share it.
    pub cores: Vec<CpuList>,
}

impl Socket {
    /// Returns the number of logical CPUs of all its cores.
    pub fn threads(&self) -> usize {
        self.cores.iter().map(CpuList::len).sum()
    }
}

/// Memory with the CPUs near it. Memory without CPUs (CXL, Grace's GPU memory) is a node too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// The kernel's number for it.
    pub id: u32,
    /// Logical CPUs of the node.
    pub cpus: CpuList,
    /// Size of its memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Relative latency to every node according to the firmware (ACPI SLIT), in the order of the nodes; 10 is
    /// local.
    pub distances: Vec<u32>,
}

/// The contents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Data only.
    Data,
    /// Instructions only.
    Instruction,
    /// Data and instructions.
    Unified,
}

/// A processor cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// Cache level; 1 is nearest to the core.
    pub level: u32,
    /// What the cache holds.
    pub kind: CacheKind,
    /// Size of the cache in bytes.
    pub bytes: Option<u64>,
    /// Length of a cache line in bytes.
    pub line_bytes: Option<u32>,
    /// Logical CPUs that share it.
    pub cpus: CpuList,
}

/// Huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Size of a page in bytes.
    pub page_bytes: u64,
    /// Number of pages reserved.
    pub total: u64,
    /// Number of reserved pages not in use.
    pub free: u64,
}

const CPU: &str = "sys/devices/system/cpu";
const NODE: &str = "sys/devices/system/node";
const HUGE: &str = "sys/kernel/mm/hugepages";

fn list(reader: &mut TreeReader, path: &str) -> Option<CpuList> {
    reader.value(path, |text| text.parse().ok())
}

/// Returns the online CPUs, ascending.
fn online(reader: &mut TreeReader) -> Vec<u32> {
    let present = || reader.tree.numbered(CPU, "cpu").into_iter().map(|(cpu, _)| cpu).collect();
    let all: Vec<u32> = present();
    match list(reader, &format!("{CPU}/online")) {
        Some(online) => all.into_iter().filter(|&cpu| online.contains(cpu)).collect(),
        None => all,
    }
}

/// Returns sockets by number, and caches by level.
pub(crate) fn read(reader: &mut TreeReader) -> (Vec<Socket>, Vec<Cache>) {
    let mut sockets: BTreeMap<u32, BTreeSet<CpuList>> = BTreeMap::new();
    let mut caches: BTreeMap<(u32, CacheKind, CpuList), Cache> = BTreeMap::new();
    for cpu in online(reader) {
        let at = format!("{CPU}/cpu{cpu}/topology");
        // -1 if the firmware does not number packages
        let package = reader.number::<i64>(&format!("{at}/physical_package_id"));
        let package = package.and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
        let threads = list(reader, &format!("{at}/core_cpus_list"))
            .or_else(|| list(reader, &format!("{at}/thread_siblings_list")))
            .filter(|threads| threads.contains(cpu))
            .unwrap_or_else(|| CpuList::new(vec![cpu]));
        sockets.entry(package).or_default().insert(threads);
        for (index, _) in reader.tree.numbered(&format!("{CPU}/cpu{cpu}/cache"), "index") {
            read_cache(reader, &format!("{CPU}/cpu{cpu}/cache/index{index}"), cpu, &mut caches);
        }
    }
    let socket = |(id, cores): (u32, BTreeSet<CpuList>)| Socket { id, cores: cores.into_iter().collect() };
    (sockets.into_iter().map(socket).collect(), caches.into_values().collect())
}

fn read_cache(
    reader: &mut TreeReader,
    at: &str,
    cpu: u32,
    caches: &mut BTreeMap<(u32, CacheKind, CpuList), Cache>,
) {
    let kind = reader.value(&format!("{at}/type"), |text| match text {
        "Data" => Some(CacheKind::Data),
        "Instruction" => Some(CacheKind::Instruction),
        "Unified" => Some(CacheKind::Unified),
        _ => None,
    });
    let (Some(level), Some(kind)) = (reader.number::<u32>(&format!("{at}/level")), kind) else { return };
    let cpus = list(reader, &format!("{at}/shared_cpu_list"));
    let cpus = cpus.filter(|cpus| cpus.contains(cpu)).unwrap_or_else(|| CpuList::new(vec![cpu]));
    let key = (level, kind, cpus);
    if caches.contains_key(&key) {
        return;
    }
    let bytes = reader.value(&format!("{at}/size"), |text| {
        text.trim_end_matches('K').parse::<u64>().ok()?.checked_mul(if text.ends_with('K') {
            1024
        } else {
            1
        })
    });
    let line_bytes = reader.number(&format!("{at}/coherency_line_size"));
    let cpus = key.2.clone();
    caches.insert(key, Cache { level, kind, bytes, line_bytes, cpus });
}

/// Returns NUMA nodes by number.
pub(crate) fn read_nodes(reader: &mut TreeReader) -> Vec<NumaNode> {
    let mut nodes = Vec::new();
    for (id, name) in reader.tree.numbered(NODE, "node") {
        let at = format!("{NODE}/{name}");
        let distances = reader.value(&format!("{at}/distance"), |text| {
            text.split_whitespace().map(|number| number.parse().ok()).collect::<Option<Vec<u32>>>()
        });
        nodes.push(NumaNode {
            id,
            cpus: list(reader, &format!("{at}/cpulist")).unwrap_or_default(),
            memory_bytes: reader.value(&format!("{at}/meminfo"), mem_total),
            distances: distances.unwrap_or_default(),
        });
    }
    nodes
}

/// Parses the bytes in `MemTotal: 16 kB`, with or without `Node 0` in front.
fn mem_total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.split_once("MemTotal:"))?.1;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the total memory in bytes.
pub(crate) fn memory(reader: &mut TreeReader) -> Option<u64> {
    reader.value("proc/meminfo", mem_total)
}

/// Returns the huge pages, by ascending page size.
pub(crate) fn huge_pages(reader: &mut TreeReader) -> Vec<HugePages> {
    let mut found = Vec::new();
    for name in reader.tree.list(HUGE) {
        let kib = name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB"));
        let Some(page_bytes) = kib.and_then(|kib| kib.parse::<u64>().ok()?.checked_mul(1024)) else {
            continue;
        };
        let at = format!("{HUGE}/{name}");
        let Some(total) = reader.number(&format!("{at}/nr_hugepages")) else { continue };
        let free = reader.number(&format!("{at}/free_hugepages")).unwrap_or(0);
        found.push(HugePages { page_bytes, total, free });
    }
    found.sort_by_key(|pool| pool.page_bytes);
    found
}

/// Returns the value of `key` in `/proc/cpuinfo`, for the first processor.
pub(crate) fn cpuinfo(reader: &TreeReader, key: &str) -> Option<String> {
    let info = reader.tree.text("proc/cpuinfo")?;
    let mut fields = info.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
}
