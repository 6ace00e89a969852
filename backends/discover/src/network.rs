//! Network interfaces, RDMA devices, and the names of NVMe drives.

use crate::PciAddress;
use crate::pci::{PciDevice, owner_of};
use crate::tree::TreeReader;
use serde::{Deserialize, Serialize};

/// A network interface with hardware behind it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetDevice {
    /// Name of the interface, such as `eth0`.
    pub name: String,
    /// The PCI device behind it.
    pub pci: Option<PciAddress>,
    /// State as the kernel reports it: `up`, `down`.
    pub state: Option<String>,
    /// Link speed in Mbit/s; absent while down, and on most virtual interfaces.
    pub mbit_per_s: Option<u64>,
    /// MTU in bytes.
    pub mtu_bytes: Option<u32>,
}

/// A device for remote direct memory access.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// Name of the device, such as `mlx5_0`.
    pub name: String,
    /// The PCI device behind it; `None` for a software device (rxe, siw).
    pub pci: Option<PciAddress>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// The vendor's name for the board.
    pub board: Option<String>,
    /// Ports in ascending order.
    pub ports: Vec<RdmaPort>,
}

impl RdmaDevice {
    /// Whether one of its ports is active.
    pub(crate) fn is_active(&self) -> bool {
        self.ports.iter().any(|port| port.state.as_deref() == Some("ACTIVE"))
    }
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RdmaPort {
    /// Port number, counted from 1.
    pub number: u32,
    /// State, such as `ACTIVE` or `DOWN`.
    pub state: Option<String>,
    /// Link layer: `InfiniBand` or `Ethernet` (RoCE).
    pub link_layer: Option<String>,
    /// Rate in Gbit/s.
    pub gbit_per_s: Option<f64>,
    /// Addresses of the port.
    pub gids: Vec<GidEntry>,
}

/// An entry of a port's address table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidEntry {
    /// Index in the port's table, which queue pairs refer to.
    pub index: u32,
    /// The address, `fe80:0000:...`; for RoCE over IPv4 it ends with the IPv4 address.
    pub gid: String,
    /// Kind of the address: `IB/RoCE v1` or `RoCE v2`.
    pub kind: Option<String>,
    /// The network interface that it belongs to.
    pub net: Option<String>,
}

const NET: &str = "sys/class/net";
const RDMA: &str = "sys/class/infiniband";
const NVME: &str = "sys/class/nvme";

/// Length of a run of empty entries that ends a table; mlx5 tables have 256 entries, filled from the start.
const EMPTY_GIDS_MAX: u32 = 8;

/// Returns the interfaces with hardware behind them, by name.
pub(crate) fn interfaces(reader: &mut TreeReader) -> Vec<NetDevice> {
    let mut found = Vec::new();
    for name in reader.tree.list(NET) {
        let at = format!("{NET}/{name}");
        let Some(target) = reader.tree.link(&at).filter(|target| !target.contains("/virtual/")) else {
            continue;
        };
        found.push(NetDevice {
            pci: owner_of(&target),
            state: reader.tree.text(&format!("{at}/operstate")),
            // -1 means unknown
            mbit_per_s: reader.number::<i64>(&format!("{at}/speed")).and_then(|mbit| mbit.try_into().ok()),
            mtu_bytes: reader.number(&format!("{at}/mtu")),
            name,
        });
    }
    found
}

/// Returns the RDMA devices, by name.
pub(crate) fn rdma(reader: &mut TreeReader) -> Vec<RdmaDevice> {
    let mut found = Vec::new();
    for name in reader.tree.list(RDMA) {
        let at = format!("{RDMA}/{name}");
        let ports = reader.tree.numbered(&format!("{at}/ports"), "");
        found.push(RdmaDevice {
            pci: reader.tree.link(&at).and_then(|target| owner_of(&target)),
            firmware: reader.tree.text(&format!("{at}/fw_ver")),
            board: reader.tree.text(&format!("{at}/board_id")),
            ports: ports
                .into_iter()
                .map(|(n, port)| read_port(reader, n, &format!("{at}/ports/{port}")))
                .collect(),
            name,
        });
    }
    found
}

fn read_port(reader: &mut TreeReader, number: u32, at: &str) -> RdmaPort {
    // "4: ACTIVE"
    let state = reader.tree.text(&format!("{at}/state"));
    let state = state.map(|text| text.rsplit(':').next().unwrap_or_default().trim().to_owned());
    // "400 Gb/sec (4X NDR)"
    let rate =
        |text: &str| text.split_whitespace().next()?.parse::<f64>().ok().filter(|rate| rate.is_finite());
    RdmaPort {
        number,
        state,
        link_layer: reader.tree.text(&format!("{at}/link_layer")),
        gbit_per_s: reader.value(&format!("{at}/rate"), rate),
        gids: read_gids(reader, at),
    }
}

fn read_gids(reader: &TreeReader, at: &str) -> Vec<GidEntry> {
    let mut found = Vec::new();
    let mut empty = 0;
    for (index, _) in reader.tree.numbered(&format!("{at}/gids"), "") {
        let gid = reader.tree.text(&format!("{at}/gids/{index}"));
        let Some(gid) = gid.filter(|gid| gid.chars().any(|c| c != '0' && c != ':')) else {
            empty += 1;
            if empty == EMPTY_GIDS_MAX {
                break;
            }
            continue;
        };
        empty = 0;
        let attribute = |which: &str| reader.tree.text(&format!("{at}/gid_attrs/{which}/{index}"));
        found.push(GidEntry { index, gid, kind: attribute("types"), net: attribute("ndevs") });
    }
    found
}

/// Gives NVMe drives the names that they report.
pub(crate) fn name_drives(reader: &TreeReader, devices: &mut [PciDevice]) {
    for name in reader.tree.list(NVME) {
        let at = format!("{NVME}/{name}");
        let owner = reader.tree.link(&at).and_then(|target| owner_of(&target));
        if let Some(device) = devices.iter_mut().find(|device| Some(device.address) == owner) {
            device.name = reader.tree.text(&format!("{at}/model")).or(device.name.take());
        }
    }
}
