//! The hardware of a machine.

use crate::cores::{self, Cache, HugePages, NumaNode, Socket};
use crate::network::{self, NetDevice, RdmaDevice};
use crate::pci::{self, Bridge, PciDevice, PciKind, PcieLink};
use crate::tree::TreeReader;
use crate::{PciAddress, Tree};
use serde::{Deserialize, Serialize};

/// The hardware of a machine, as its kernel reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Topology {
    /// The processor's name.
    pub cpu_model: Option<String>,
    /// Total memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Processor packages, by number.
    pub sockets: Vec<Socket>,
    /// NUMA nodes, by number.
    pub nodes: Vec<NumaNode>,
    /// Caches, by level.
    pub caches: Vec<Cache>,
    /// Huge pages, by page size.
    pub huge_pages: Vec<HugePages>,
    /// PCI devices of interest, by address.
    pub pci: Vec<PciDevice>,
    /// Bridges above the devices, by address.
    pub bridges: Vec<Bridge>,
    /// Network interfaces with hardware behind them.
    pub nets: Vec<NetDevice>,
    /// RDMA devices.
    pub rdma: Vec<RdmaDevice>,
    /// Odd or implausible findings.
    pub notes: Vec<String>,
}

impl Topology {
    /// Reads a machine. Missing values stay empty, and implausible ones become notes.
    pub fn read(tree: &Tree) -> Topology {
        let mut reader = TreeReader { tree, notes: Vec::new() };
        let (sockets, caches) = cores::read(&mut reader);
        let (mut pci, bridges) = pci::read(&mut reader);
        network::name_drives(&reader, &mut pci);
        let mut topology = Topology {
            cpu_model: cores::cpuinfo(&reader, "model name"),
            memory_bytes: cores::memory(&mut reader),
            sockets,
            nodes: cores::read_nodes(&mut reader),
            caches,
            huge_pages: cores::huge_pages(&mut reader),
            pci,
            bridges,
            nets: network::interfaces(&mut reader),
            rdma: network::rdma(&mut reader),
            notes: Vec::new(),
        };
        topology.notes = reader.notes;
        if topology.sockets.is_empty() {
            topology.notes.push("no CPUs under /sys/devices/system/cpu: is /sys mounted?".into());
        }
        topology
    }

    /// Returns the devices of `kind`, by address.
    pub fn of_kind(&self, kind: PciKind) -> impl Iterator<Item = &PciDevice> {
        self.pci.iter().filter(move |device| device.kind == kind)
    }

    /// Returns the device at `address`.
    pub fn device(&self, address: PciAddress) -> Option<&PciDevice> {
        self.pci.iter().find(|device| device.address == address)
    }

    /// Returns a device's common name: its RDMA, network or driver name, or else its address.
    pub fn name_of(&self, device: &PciDevice) -> String {
        let here = Some(device.address);
        let rdma = self.rdma.iter().find(|rdma| rdma.pci == here).map(|rdma| &rdma.name);
        let net = || self.nets.iter().find(|net| net.pci == here).map(|net| &net.name);
        rdma.or_else(net).cloned().unwrap_or_else(|| device.address.to_string())
    }

    /// Returns the highest rate of a NIC's ports in Gbit/s.
    pub fn gbit_per_s(&self, device: &PciDevice) -> Option<f64> {
        let here = Some(device.address);
        let ports = self.rdma.iter().filter(|rdma| rdma.pci == here).flat_map(|rdma| &rdma.ports);
        let nets = self.nets.iter().filter(|net| net.pci == here);
        let rates = ports.filter_map(|port| port.gbit_per_s);
        rates.chain(nets.filter_map(|net| net.mbit_per_s.map(|mbit| mbit as f64 / 1e3))).reduce(f64::max)
    }

    /// Returns the bridge above `device` whose link is slower than the device's own, if any.
    pub fn bottleneck(&self, device: &PciDevice) -> Option<(&Bridge, PcieLink)> {
        let own = device.link?.bytes_per_second()?;
        let above = self.bridges.iter().filter(|bridge| device.path.contains(&bridge.address));
        let linked =
            above.filter_map(|bridge| Some((bridge, bridge.link?, bridge.link?.bytes_per_second()?)));
        let slower = linked.filter(|(_, _, rate)| *rate < own);
        slower.min_by(|a, b| a.2.total_cmp(&b.2)).map(|(bridge, link, _)| (bridge, link))
    }
}
