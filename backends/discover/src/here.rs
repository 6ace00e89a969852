//! This machine, read from sysfs and cross-checked with the libraries of this build.

use crate::{Topology, Tree};
use mixfleet_hal::Absent;

/// The devices found on this machine, and notes about the missing ones.
#[derive(Clone, Debug)]
pub struct DiscoveredMachine {
    /// The topology from sysfs, with a note wherever a library disagrees.
    pub topology: Topology,
    /// Libraries that could not be queried or found nothing, each with the reason.
    pub absent: Vec<(&'static str, Absent)>,
}

impl DiscoveredMachine {
    /// Reads this machine.
    pub fn read() -> DiscoveredMachine {
        DiscoveredMachine::through(&Tree::at("/"))
    }

    /// Reads this machine through a `tree` at `/`, which may record the files read.
    pub fn through(tree: &Tree) -> DiscoveredMachine {
        let mut topology = Topology::read(tree);
        let mut absent = Vec::new();
        match ask_hwloc(&topology) {
            Ok(lines) => topology.notes.extend(lines),
            Err(why) => absent.push(("hwloc", why)),
        }
        match ask_verbs(&topology) {
            Ok(lines) => topology.notes.extend(lines),
            Err(why) => absent.push(("verbs", why)),
        }
        DiscoveredMachine { topology, absent }
    }
}

#[cfg(feature = "hwloc")]
fn ask_hwloc(topology: &Topology) -> Result<Vec<String>, Absent> {
    crate::hwloc::disagreements(topology)
}

#[cfg(not(feature = "hwloc"))]
fn ask_hwloc(_: &Topology) -> Result<Vec<String>, Absent> {
    Err(Absent::new(
        "built without the feature `hwloc`: cores and caches are from sysfs alone; rebuild with \
         `--features hwloc`, which needs libhwloc (Debian: libhwloc-dev)",
    ))
}

#[cfg(feature = "verbs")]
fn ask_verbs(topology: &Topology) -> Result<Vec<String>, Absent> {
    crate::verbs::names().map(|names| crate::verbs::disagreements(topology, &names))
}

#[cfg(not(feature = "verbs"))]
fn ask_verbs(_: &Topology) -> Result<Vec<String>, Absent> {
    Err(Absent::new(
        "built without the feature `verbs`: RDMA devices are from sysfs alone; rebuild with `--features verbs`, \
         which needs libibverbs (Debian: libibverbs-dev libnl-3-dev libnl-route-3-dev cmake libclang-dev)",
    ))
}
