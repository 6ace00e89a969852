//! This machine: sysfs, and the libraries of this build as witnesses.

use crate::{Topology, Tree};
use mixfleet_hal::Absent;

/// What was found of this machine, and what was not and why.
#[derive(Clone, Debug)]
pub struct Here {
    /// From sysfs; where a library of this build disagrees, there is a note.
    pub topology: Topology,
    /// Libraries that could not be asked, or found nothing: name and reason.
    pub absent: Vec<(&'static str, Absent)>,
}

impl Here {
    /// Reads this machine.
    pub fn read() -> Here {
        Here::through(&Tree::at("/"))
    }

    /// The same through a `tree` at `/`, which may keep what it reads.
    pub fn through(tree: &Tree) -> Here {
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
        Here { topology, absent }
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
