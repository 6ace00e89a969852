//! RDMA devices and CPUs near the devices that a process serves.

use crate::network::RdmaDevice;
use crate::pci::{PciDevice, PciKind};
use crate::{CpuList, Distance, PciAddress, Topology};
use std::collections::BTreeSet;
use std::fmt;

/// A device that a process serves, by its place on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedDevice {
    /// Id of the device, such as `cuda:0`.
    pub id: String,
    /// Its PCI address; `None` for cores, simulated devices and devices of other machines.
    pub address: Option<PciAddress>,
}

/// The RDMA devices nearest to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NearestRdma {
    /// Id of the device.
    pub device: String,
    /// Names of RDMA devices at the least distance; empty if the topology does not tell.
    pub names: Vec<String>,
    /// Why these, or why none.
    pub reason: String,
}

/// The RDMA devices for the KV of a process. Displays as `cuda:0: mlx5_0 (same PCIe switch); cpu: no PCI
/// address`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaChoice {
    /// The choice for each device, in the order in which they were given.
    pub devices: Vec<NearestRdma>,
}

impl RdmaChoice {
    /// Returns the names of the RDMA devices to use, each once; empty if the topology tells of none, so that
    /// all remain.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.devices.iter().flat_map(|nearest| &nearest.names) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}

impl fmt::Display for RdmaChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, NearestRdma { device, names, reason }) in self.devices.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            match names.is_empty() {
                true => write!(f, "{separator}{device}: {reason}")?,
                false => write!(f, "{separator}{device}: {} ({reason})", names.join(", "))?,
            }
        }
        Ok(())
    }
}

/// The CPUs for threads that drive some devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadHome {
    /// The CPUs of the devices' NUMA nodes, as far as the process may use them.
    Nodes {
        /// Numbers of the nodes, ascending.
        nodes: Vec<u32>,
        /// CPUs of these nodes.
        cpus: CpuList,
    },
    /// Any CPU, with the reason.
    Anywhere(String),
}

impl Topology {
    /// Returns the RDMA devices for the KV of `devices`: for each the nearest ones with an active port, less
    /// those that are slower than an equally near one. A device without a known place adds none.
    pub fn rdma_near(&self, devices: &[ServedDevice]) -> RdmaChoice {
        let nics = self.rdma_nics();
        RdmaChoice { devices: devices.iter().map(|device| self.nearest_rdma(device, &nics)).collect() }
    }

    /// Returns the CPUs for threads that drive `devices`: all of the devices' NUMA nodes that are `allowed`.
    pub fn thread_home(&self, devices: &[ServedDevice], allowed: &CpuList) -> ThreadHome {
        // memory without CPUs (CXL, a GPU's) is a node too
        if self.nodes.iter().filter(|node| !node.cpus.is_empty()).count() < 2 {
            return ThreadHome::Anywhere("the machine has one NUMA node".into());
        }
        let node = |device: &ServedDevice| self.device(device.address?)?.node;
        let nodes: BTreeSet<u32> = devices.iter().filter_map(node).collect();
        if nodes.is_empty() {
            let ids: Vec<_> = devices.iter().map(|device| device.id.as_str()).collect();
            return ThreadHome::Anywhere(format!("the NUMA node of {} is unknown", ids.join(", ")));
        }
        let near = self.nodes.iter().filter(|node| nodes.contains(&node.id));
        let near = near.flat_map(|node| node.cpus.cpus().iter().copied());
        let cpus = CpuList::new(near.filter(|&cpu| allowed.contains(cpu)).collect());
        let nodes: Vec<u32> = nodes.into_iter().collect();
        if cpus.is_empty() {
            let numbers = node_numbers(&nodes);
            return ThreadHome::Anywhere(format!("the process may use no CPU of NUMA node {numbers}"));
        }
        if cpus == *allowed {
            let numbers = node_numbers(&nodes);
            return ThreadHome::Anywhere(format!("all CPUs of the process are of NUMA node {numbers}"));
        }
        ThreadHome::Nodes { nodes, cpus }
    }

    /// Returns the NICs with an active RDMA device; virtual functions only where there is nothing else, as in
    /// a virtual machine.
    fn rdma_nics(&self) -> Vec<&PciDevice> {
        let usable = |nic: &&PciDevice| self.rdma_of(nic).next().is_some();
        let nics: Vec<_> = self.of_kind(PciKind::Nic).filter(usable).collect();
        let physical: Vec<_> = nics.iter().copied().filter(|nic| !nic.virtual_function).collect();
        if physical.is_empty() { nics } else { physical }
    }

    /// Returns the RDMA devices of a NIC that have an active port.
    fn rdma_of(&self, nic: &PciDevice) -> impl Iterator<Item = &RdmaDevice> + use<'_> {
        let address = Some(nic.address);
        self.rdma.iter().filter(move |rdma| rdma.pci == address && rdma.is_active())
    }

    fn nearest_rdma(&self, served: &ServedDevice, nics: &[&PciDevice]) -> NearestRdma {
        let unknown = |reason: &str| NearestRdma {
            device: served.id.clone(),
            names: Vec::new(),
            reason: reason.to_owned(),
        };
        let Some(address) = served.address else { return unknown("no PCI address") };
        let Some(device) = self.device(address) else {
            return unknown(&format!("{address} is no device of this machine"));
        };
        let nearest = self.nearest_among(device, nics);
        let Some(first) = nearest.first() else { return unknown("no NIC with an active RDMA port") };
        let is_known = device.node.is_some() && first.node.is_some();
        if self.distance(device, first) == Distance::System && !is_known {
            return unknown("the distance to NICs is unknown");
        }
        let names = nearest.iter().flat_map(|nic| self.rdma_of(nic)).map(|rdma| rdma.name.clone());
        let (names, reason) = (names.collect(), self.nearness(device, first));
        NearestRdma { device: served.id.clone(), names, reason }
    }

    /// Describes where `nic` is from `device`.
    fn nearness(&self, device: &PciDevice, nic: &PciDevice) -> String {
        let node = |of: &PciDevice| of.node.map(|node| format!("NUMA node {node}"));
        match self.distance(device, nic) {
            Distance::Same => "the same device".into(),
            Distance::Switch => "same PCIe switch".into(),
            Distance::Switches => "several PCIe switches".into(),
            Distance::HostBridge => "same PCIe root complex".into(),
            Distance::Node => node(device).unwrap_or_else(|| "the only NUMA node".into()),
            Distance::System => {
                let (there, here) = (node(nic).unwrap_or_default(), node(device).unwrap_or_default());
                format!("{there}, the device is on {here}")
            }
        }
    }
}

fn node_numbers(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}
