//! Distances between PCI devices, and which NIC serves which GPU.

use crate::pci::{PciDevice, PciKind};
use crate::{PciAddress, Topology};
use mixfleet_hal::cast::to_u64;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the path between two devices crosses, nearest first. The classes are those of `nvidia-smi topo`;
/// [`Distance::term`] returns its terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// The same device.
    Same,
    /// At most one PCI switch.
    Switch,
    /// Several PCI switches, but no host bridge.
    Switches,
    /// The host bridge above both.
    HostBridge,
    /// Two host bridges of one NUMA node.
    Node,
    /// The link between NUMA nodes, or unknown.
    System,
}

impl Distance {
    /// Returns the term used by `nvidia-smi topo`.
    pub const fn term(self) -> &'static str {
        match self {
            Distance::Same => "X",
            Distance::Switch => "PIX",
            Distance::Switches => "PXB",
            Distance::HostBridge => "PHB",
            Distance::Node => "NODE",
            Distance::System => "SYS",
        }
    }

    /// Describes the distance in words.
    pub const fn words(self) -> &'static str {
        match self {
            Distance::Same => "the same device",
            Distance::Switch => "at most one PCI switch",
            Distance::Switches => "several PCI switches",
            Distance::HostBridge => "one host bridge",
            Distance::Node => "two host bridges of a NUMA node",
            Distance::System => "across NUMA nodes, or unknown",
        }
    }
}

/// Distances between two lists of devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matrix {
    /// Devices of the rows.
    pub rows: Vec<PciAddress>,
    /// Devices of the columns.
    pub columns: Vec<PciAddress>,
    /// Distances, indexed as `[row][column]`.
    pub distances: Vec<Vec<Distance>>,
}

impl Topology {
    /// Returns the distance between two devices.
    pub fn distance(&self, a: &PciDevice, b: &PciDevice) -> Distance {
        if a.address == b.address {
            return Distance::Same;
        }
        if a.host_bridge == b.host_bridge {
            let common = a.path.iter().zip(&b.path).take_while(|(a, b)| a == b).count();
            // below a switch's upper port each device has a lower port of its own
            return match a.path.len().max(b.path.len()) - common {
                _ if common == 0 => Distance::HostBridge,
                0 | 1 => Distance::Switch,
                _ => Distance::Switches,
            };
        }
        match (a.node, b.node) {
            (Some(a), Some(b)) if a == b => Distance::Node,
            (None, _) | (_, None) if self.nodes.len() <= 1 && self.sockets.len() <= 1 => Distance::Node,
            _ => Distance::System,
        }
    }

    /// Returns the distances from every GPU to every GPU or NIC, physical ones only.
    pub fn matrix(&self, to: PciKind) -> Matrix {
        let of = |kind| self.of_kind(kind).filter(|device| !device.virtual_function).collect::<Vec<_>>();
        let (rows, columns) = (of(PciKind::Gpu), of(to));
        let row = |a: &&PciDevice| columns.iter().map(|b| self.distance(a, b)).collect();
        Matrix {
            distances: rows.iter().map(row).collect(),
            rows: rows.iter().map(|device| device.address).collect(),
            columns: columns.iter().map(|device| device.address).collect(),
        }
    }

    /// Returns the firmware's relative latency between two devices' nodes; 10 is local.
    fn node_distance(&self, a: &PciDevice, b: &PciDevice) -> u32 {
        let position = |node: Option<u32>| self.nodes.iter().position(|n| Some(n.id) == node);
        let known = position(a.node).zip(position(b.node));
        known.and_then(|(a, b)| self.nodes[a].distances.get(b).copied()).unwrap_or(u32::MAX)
    }

    /// Returns the NICs nearest to `device`: all at the least distance, then with the fastest port.
    pub fn nearest_nics(&self, device: &PciDevice) -> Vec<&PciDevice> {
        let nics: Vec<_> = self.of_kind(PciKind::Nic).filter(|nic| !nic.virtual_function).collect();
        self.nearest_among(device, &nics)
    }

    /// Returns the `nics` nearest to `device`, like [`nearest_nics`](Self::nearest_nics).
    pub(crate) fn nearest_among<'a>(&self, device: &PciDevice, nics: &[&'a PciDevice]) -> Vec<&'a PciDevice> {
        let rank = |nic: &PciDevice| {
            let mbit = self.gbit_per_s(nic).map_or(0, |gbit| to_u64(gbit * 1e3));
            (self.distance(device, nic), self.node_distance(device, nic), u64::MAX - mbit)
        };
        let best = nics.iter().map(|nic| rank(nic)).min();
        nics.iter().copied().filter(|nic| Some(rank(nic)) == best).collect()
    }

    /// Assigns a NIC to every GPU: a nearest one, shared as evenly as possible. By ascending address, so that
    /// a machine with a NIC per GPU pairs them in order.
    pub fn nic_of_gpus(&self) -> BTreeMap<PciAddress, PciAddress> {
        let mut users: BTreeMap<PciAddress, u32> = BTreeMap::new();
        let mut pairs = BTreeMap::new();
        for gpu in self.of_kind(PciKind::Gpu) {
            let nearest = self.nearest_nics(gpu);
            let free = nearest.iter().min_by_key(|nic| (users.get(&nic.address).copied(), nic.address));
            let Some(nic) = free else { continue };
            *users.entry(nic.address).or_default() += 1;
            pairs.insert(gpu.address, nic.address);
        }
        pairs
    }
}
