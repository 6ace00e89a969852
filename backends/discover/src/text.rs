//! Prints a topology.

use crate::pci::{Bridge, PciDevice, PciKind, PcieLink};
use crate::{CacheKind, Distance, Matrix, NumaNode, PciAddress, RdmaDevice, Topology};
use mixfleet_hal::units::GIB;
use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};

/// Vendors of common server devices, by PCI id.
const VENDORS: [(u16, &str); 18] = [
    (0x10de, "NVIDIA"),
    (0x1002, "AMD"),
    (0x8086, "Intel"),
    (0x15b3, "Mellanox"),
    (0x14e4, "Broadcom"),
    (0x1000, "Broadcom"),
    (0x144d, "Samsung"),
    (0x1344, "Micron"),
    (0x1c5c, "SK hynix"),
    (0x1e0f, "Kioxia"),
    (0x1b96, "Western Digital"),
    (0x1d0f, "Amazon"),
    (0x1ae0, "Google"),
    (0x1414, "Microsoft"),
    (0x1af4, "virtio"),
    (0x1da3, "Habana"),
    (0x1e52, "Tenstorrent"),
    (0x1dd8, "Pensando"),
];

fn kind_name(kind: PciKind) -> &'static str {
    match kind {
        PciKind::Gpu => "GPU",
        PciKind::Nic => "NIC",
        PciKind::Nvme => "NVMe",
        PciKind::GpuSwitch => "GPU switch",
    }
}

fn gib(bytes: Option<u64>) -> String {
    bytes.map_or("memory unknown".into(), |bytes| format!("{:.1} GiB", bytes as f64 / GIB as f64))
}

fn count(number: usize, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

impl PcieLink {
    /// Formats the link as `x16 at 32 GT/s (63.0 GB/s each way)`, with any shortfall.
    pub fn words(&self) -> String {
        let lanes = self.lanes.map_or("x?".into(), |lanes| format!("x{lanes}"));
        let speed = self.gt_per_s.map_or("? GT/s".into(), |gt| format!("{gt} GT/s"));
        let rate = self.bytes_per_second();
        let rate = rate.map_or(String::new(), |rate| format!(" ({:.1} GB/s each way)", rate / 1e9));
        let mut words = format!("{lanes} at {speed}{rate}");
        for flag in self.shortfalls() {
            words += &format!("; {flag}");
        }
        words
    }

    /// Describes in what the link falls short of the maximum.
    pub fn shortfalls(&self) -> Vec<String> {
        let mut flags = Vec::new();
        if let (true, Some(now), Some(max)) = (self.is_narrow(), self.lanes, self.lanes_max) {
            flags.push(format!("x{now} of x{max}: the link is narrower than the part allows"));
        }
        if let (true, Some(now), Some(max)) = (self.is_slow(), self.gt_per_s, self.gt_per_s_max) {
            flags.push(format!("{now} of {max} GT/s: slower than the part allows, or idle to save power"));
        }
        flags
    }
}

impl Topology {
    /// Returns a device's names and numbers: `NVIDIA H100 10de:2330, nvidia`.
    pub fn title(&self, device: &PciDevice) -> String {
        let vendor = VENDORS.iter().find(|(id, _)| *id == device.vendor).map_or("", |(_, name)| name);
        let name = device.name.as_deref().unwrap_or(vendor);
        let ids = format!("{:04x}:{:04x}", device.vendor, device.device);
        let driver = device.driver.as_ref().map(|driver| format!(", driver {driver}")).unwrap_or_default();
        let function = if device.virtual_function { ", a virtual function" } else { "" };
        let space = if name.is_empty() { "" } else { " " };
        format!("{name}{space}{ids}{driver}{function}")
    }

    fn write_head(&self, f: &mut Formatter) -> fmt::Result {
        let cores: usize = self.sockets.iter().map(|socket| socket.cores.len()).sum();
        let threads: usize = self.sockets.iter().map(crate::Socket::threads).sum();
        writeln!(
            f,
            "{}: {}, {}, {}, {}",
            self.cpu_model.as_deref().unwrap_or("machine"),
            count(self.sockets.len(), "socket"),
            count(cores, "core"),
            count(threads, "thread"),
            gib(self.memory_bytes)
        )?;
        for pool in self.huge_pages.iter().filter(|pool| pool.total > 0) {
            let page = pool.page_bytes >> 20;
            writeln!(f, "huge pages of {page} MiB: {}, {} free", pool.total, pool.free)?;
        }
        Ok(())
    }

    /// Formats the caches that serve `cpus`: `L1 data 32 KiB x 2, L3 32 MiB`.
    fn caches_of(&self, cpus: &BTreeSet<u32>) -> String {
        let mut parts: Vec<(String, usize)> = Vec::new();
        for cache in &self.caches {
            let near = cache.cpus.cpus().iter().any(|cpu| cpus.contains(cpu));
            if cache.kind == CacheKind::Instruction || !near {
                continue;
            }
            let size = match cache.bytes {
                Some(bytes) if bytes >= 1 << 20 => format!(" {} MiB", bytes as f64 / f64::from(1 << 20)),
                Some(bytes) => format!(" {} KiB", bytes >> 10),
                None => String::new(),
            };
            let name = format!("L{}{size}", cache.level);
            match parts.iter_mut().find(|(known, _)| *known == name) {
                Some((_, number)) => *number += 1,
                None => parts.push((name, 1)),
            }
        }
        let text = |(name, n): &(String, usize)| if *n == 1 { name.clone() } else { format!("{name} x {n}") };
        parts.iter().map(text).collect::<Vec<_>>().join(", ")
    }

    fn write_node(&self, f: &mut Formatter, node: &NumaNode, indent: &str) -> fmt::Result {
        let cpus = if node.cpus.is_empty() { "no CPUs".into() } else { format!("CPUs {}", node.cpus) };
        write!(f, "{indent}node {}: {cpus}, {}", node.id, gib(node.memory_bytes))?;
        if node.distances.len() > 1 {
            let distances: Vec<_> = node.distances.iter().map(u32::to_string).collect();
            write!(f, ", distances {}", distances.join(" "))?;
        }
        writeln!(f)?;
        let here: Vec<&PciDevice> = self.pci.iter().filter(|device| device.node == Some(node.id)).collect();
        self.write_devices(f, &here, &format!("{indent}  "))
    }

    /// Prints devices below their host bridges and bridges.
    fn write_devices(&self, f: &mut Formatter, devices: &[&PciDevice], indent: &str) -> fmt::Result {
        let hosts: BTreeSet<&str> = devices.iter().map(|device| device.host_bridge.as_str()).collect();
        for host in hosts {
            writeln!(f, "{indent}{host}")?;
            let mut below: Vec<_> = devices.iter().filter(|device| device.host_bridge == host).collect();
            below.sort_by_key(|device| whole_path(device));
            let mut shown: Vec<PciAddress> = Vec::new();
            for device in below {
                let common = shown.iter().zip(&device.path).take_while(|(a, b)| a == b).count();
                shown.truncate(common);
                for &address in &device.path[common..] {
                    let depth = indent.len() + 2 + 2 * shown.len();
                    self.write_bridge(f, address, shown.len(), depth)?;
                    shown.push(address);
                }
                self.write_device(f, device, indent.len() + 2 + 2 * shown.len())?;
            }
        }
        Ok(())
    }

    fn write_bridge(
        &self,
        f: &mut Formatter,
        address: PciAddress,
        level: usize,
        depth: usize,
    ) -> fmt::Result {
        let what = if level == 0 { "port" } else { "switch port" };
        let bridge: Option<&Bridge> = self.bridges.iter().find(|bridge| bridge.address == address);
        let rate = bridge.and_then(|bridge| bridge.link).and_then(|link| link.bytes_per_second());
        let rate = rate.map_or(String::new(), |rate| format!(" {:.1} GB/s", rate / 1e9));
        writeln!(f, "{:depth$}{address} {what}{rate}", "")
    }

    fn write_device(&self, f: &mut Formatter, device: &PciDevice, depth: usize) -> fmt::Result {
        let kind = kind_name(device.kind);
        let name = self.name_of(device);
        let name = if name == device.address.to_string() { String::new() } else { format!(" {name}") };
        writeln!(f, "{:depth$}{} {kind}{name}: {}", "", device.address, self.title(device))?;
        let inner = depth + 2;
        if let Some(link) = device.link {
            writeln!(f, "{:inner$}link {}", "", link.words())?;
        }
        if let Some((bridge, link)) = self.bottleneck(device) {
            writeln!(f, "{:inner$}behind a slower link at {}: {}", "", bridge.address, link.words())?;
        }
        for net in self.nets.iter().filter(|net| net.pci == Some(device.address)) {
            let speed =
                net.mbit_per_s.map_or(String::new(), |mbit| format!(", {} Gbit/s", mbit as f64 / 1e3));
            let state = net.state.as_deref().unwrap_or("state unknown");
            writeln!(f, "{:inner$}{} {state}{speed}", "", net.name)?;
        }
        for rdma in self.rdma.iter().filter(|rdma| rdma.pci == Some(device.address)) {
            write_rdma(f, rdma, inner)?;
        }
        Ok(())
    }

    fn write_matrix(&self, f: &mut Formatter, title: &str, matrix: &Matrix) -> fmt::Result {
        let name = |address: &PciAddress| self.device(*address).map(|d| self.name_of(d)).unwrap_or_default();
        let columns: Vec<String> = matrix.columns.iter().map(name).collect();
        write!(f, "\n{title:<14}")?;
        for column in &columns {
            write!(f, " {column:>6}")?;
        }
        writeln!(f)?;
        for (row, distances) in matrix.rows.iter().zip(&matrix.distances) {
            write!(f, "{:<14}", name(row))?;
            for (column, distance) in columns.iter().zip(distances) {
                write!(f, " {:>1$}", distance.term(), column.len().max(6))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }

    fn write_matrices(&self, f: &mut Formatter) -> fmt::Result {
        let (gpus, nics) = (self.matrix(PciKind::Gpu), self.matrix(PciKind::Nic));
        let to_gpus = gpus.rows.len() > 1;
        let to_nics = !nics.rows.is_empty() && !nics.columns.is_empty();
        if to_gpus {
            self.write_matrix(f, "GPU x GPU", &gpus)?;
        }
        if to_nics {
            self.write_matrix(f, "GPU x NIC", &nics)?;
            writeln!(f)?;
            for (gpu, nic) in self.nic_of_gpus() {
                let nic = self.device(nic).map(|nic| self.name_of(nic)).unwrap_or_default();
                writeln!(f, "{gpu} is nearest to {nic}")?;
            }
        }
        if to_gpus || to_nics {
            use Distance::{HostBridge, Node, Switch, Switches, System};
            let classes = [Switch, Switches, HostBridge, Node, System];
            let legend = classes.map(|class| format!("{} {}", class.term(), class.words()));
            writeln!(f, "\nthe path crosses: {}", legend.join("; "))?;
        }
        Ok(())
    }
}

fn whole_path(device: &PciDevice) -> Vec<PciAddress> {
    device.path.iter().copied().chain([device.address]).collect()
}

fn write_rdma(f: &mut Formatter, rdma: &RdmaDevice, depth: usize) -> fmt::Result {
    for port in &rdma.ports {
        let layer = port.link_layer.as_deref().unwrap_or("link layer unknown");
        let state = port.state.as_deref().unwrap_or("state unknown");
        let rate = port.gbit_per_s.map_or(String::new(), |rate| format!(", {rate} Gbit/s"));
        write!(f, "{:depth$}{} port {}: {layer}, {state}{rate}", "", rdma.name, port.number)?;
        let v2 = port.gids.iter().find(|gid| gid.kind.as_deref() == Some("RoCE v2"));
        match v2 {
            Some(gid) => writeln!(f, ", RoCE v2 from GID {} on", gid.index)?,
            None => writeln!(f)?,
        }
    }
    Ok(())
}

impl Display for Topology {
    /// Prints sockets, their NUMA nodes and the PCI paths from each, then the distances of GPUs, and notes.
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        self.write_head(f)?;
        let mut written = BTreeSet::new();
        for socket in &self.sockets {
            let cpus: BTreeSet<u32> = socket.cores.iter().flat_map(|core| core.cpus()).copied().collect();
            let caches = self.caches_of(&cpus);
            let caches = if caches.is_empty() { caches } else { format!("; {caches}") };
            writeln!(f, "socket {}: {}{caches}", socket.id, count(socket.cores.len(), "core"))?;
            for node in self.nodes.iter().filter(|node| node.cpus.cpus().iter().any(|cpu| cpus.contains(cpu)))
            {
                if written.insert(node.id) {
                    self.write_node(f, node, "  ")?;
                }
            }
        }
        for node in self.nodes.iter().filter(|node| !written.contains(&node.id)) {
            self.write_node(f, node, "")?;
        }
        let placed = |device: &&PciDevice| self.nodes.iter().any(|node| Some(node.id) == device.node);
        let homeless: Vec<&PciDevice> = self.pci.iter().filter(|device| !placed(device)).collect();
        if !homeless.is_empty() {
            writeln!(f, "PCI devices without a NUMA node from the firmware")?;
            self.write_devices(f, &homeless, "  ")?;
        }
        for net in self.nets.iter().filter(|net| net.pci.is_none_or(|at| self.device(at).is_none())) {
            writeln!(f, "network {}: {}", net.name, net.state.as_deref().unwrap_or("state unknown"))?;
        }
        for rdma in self.rdma.iter().filter(|rdma| rdma.pci.is_none_or(|at| self.device(at).is_none())) {
            writeln!(f, "RDMA {}", rdma.name)?;
            write_rdma(f, rdma, 2)?;
        }
        self.write_matrices(f)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}
