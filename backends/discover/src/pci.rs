//! PCI devices, their links, and the bridges above them.

use crate::tree::TreeReader;
use mixfleet_hal::cast::to_u8;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// A PCI address, such as `0000:01:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// PCI segment; above 0xffff for Intel VMD.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number on the bus, 0 to 31.
    pub device: u8,
    /// Function of the device, 0 to 7.
    pub function: u8,
}

impl FromStr for PciAddress {
    type Err = String;

    /// Parses `0000:01:00.0`, an address without a domain (`01:00.0`), or one with a long domain (NVML's
    /// `00000000:01:00.0`).
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no PCI address such as 0000:01:00.0");
        let (place, function) = text.trim().rsplit_once('.').ok_or_else(wrong)?;
        let mut parts = place.rsplit(':');
        let mut hex = |default: Option<u32>, max: u32| {
            let Some(part) = parts.next() else { return default.ok_or_else(wrong) };
            let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
            let number = u32::from_str_radix(part, 16).ok().filter(|&n| digits && n <= max);
            number.ok_or_else(wrong)
        };
        let (device, bus, domain) = (hex(None, 31)?, hex(None, 255)?, hex(Some(0), u32::MAX)?);
        let function = function.parse::<u8>().ok().filter(|f| *f < 8 && function.len() == 1);
        if parts.next().is_some() {
            return Err(wrong());
        }
        let function = function.ok_or_else(wrong)?;
        Ok(PciAddress { domain, bus: to_u8(bus), device: to_u8(device), function })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{}", self.domain, self.bus, self.device, self.function)
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// A PCI Express link. Unknown numbers are absent; a virtual machine shows no link at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PcieLink {
    /// Current gigatransfers per second per lane, which idle parts lower to save power.
    pub gt_per_s: Option<f64>,
    /// Current number of lanes.
    pub lanes: Option<u32>,
    /// Maximum gigatransfers per second per lane.
    pub gt_per_s_max: Option<f64>,
    /// Maximum number of lanes.
    pub lanes_max: Option<u32>,
}

impl PcieLink {
    /// Returns the current bytes per second per direction, after line coding and before packet headers.
    pub fn bytes_per_second(&self) -> Option<f64> {
        Some(lane_bytes_per_second(self.gt_per_s?) * f64::from(self.lanes?))
    }

    /// Whether it runs on fewer lanes than the maximum.
    pub fn is_narrow(&self) -> bool {
        self.lanes.zip(self.lanes_max).is_some_and(|(now, max)| now < max)
    }

    /// Whether its lanes run slower than the maximum.
    pub fn is_slow(&self) -> bool {
        self.gt_per_s.zip(self.gt_per_s_max).is_some_and(|(now, max)| now < max)
    }
}

/// Line coding of the PCI Express base specification: 8b/10b up to 5 GT/s, 128b/130b up to 32, then 242 of a
/// flit's 256 bytes.
fn lane_bytes_per_second(gt_per_s: f64) -> f64 {
    let coding = match gt_per_s {
        slow if slow <= 5.0 => 0.8,
        fast if fast < 64.0 => 128.0 / 130.0,
        _ => 242.0 / 256.0,
    };
    gt_per_s * 1e9 / 8.0 * coding
}

/// The function of a PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PciKind {
    /// Compute devices: display and 3D controllers, processing accelerators.
    Gpu,
    /// Network devices: Ethernet and InfiniBand.
    Nic,
    /// Storage devices.
    Nvme,
    /// A switch between GPUs that is not a PCI bridge (NVSwitch).
    GpuSwitch,
}

/// A PCI device of interest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PciDevice {
    /// Address of the device.
    pub address: PciAddress,
    /// Function of the device.
    pub kind: PciKind,
    /// Class, subclass and interface, as in the PCI code assignments.
    pub class: u32,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Name according to its driver.
    pub name: Option<String>,
    /// Unique id, if the driver reports one.
    pub uuid: Option<String>,
    /// The kernel driver in charge.
    pub driver: Option<String>,
    /// NUMA node; absent if the firmware reports none (most virtual machines).
    pub node: Option<u32>,
    /// PCI Express link of the device.
    pub link: Option<PcieLink>,
    /// The host bridge, such as `pci0000:00`.
    pub host_bridge: String,
    /// Bridges from the root port down to the device, excluding it.
    pub path: Vec<PciAddress>,
    /// Whether it is a virtual function of another device.
    pub virtual_function: bool,
}

/// A bridge above a device of interest: a root port, or a port of a switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bridge {
    /// Address of the bridge.
    pub address: PciAddress,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// The link below it or, for the upper port of a switch, the link above.
    pub link: Option<PcieLink>,
}

/// Vendors of display controllers that do not compute: management processors and virtual screens (ASPEED,
/// Matrox, Cirrus, QEMU, Red Hat, VMware, virtio).
const SCREENS_ONLY: [u16; 7] = [0x1a03, 0x102b, 0x1013, 0x1234, 0x1b36, 0x15ad, 0x1af4];
const NVIDIA: u16 = 0x10de;

fn kind(class: u32, vendor: u16) -> Option<PciKind> {
    match class >> 8 {
        0x0300 | 0x0302 | 0x0380 if !SCREENS_ONLY.contains(&vendor) => Some(PciKind::Gpu),
        0x0b40 | 0x1200 => Some(PciKind::Gpu),
        0x0200 | 0x0207 | 0x0280 => Some(PciKind::Nic),
        0x0108 => Some(PciKind::Nvme),
        0x0680 if vendor == NVIDIA => Some(PciKind::GpuSwitch),
        _ => None,
    }
}

/// Returns the PCI addresses in a link target such as
/// `../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0/net/eth0`, from the root port down, and the host
/// bridge above them.
pub(crate) fn path_of(target: &str) -> Option<(String, Vec<PciAddress>)> {
    let host_bridge = target.split('/').find(|part| part.starts_with("pci") && part.contains(':'))?;
    // no chain of bridges is longer than the buses of a domain
    let path = target.split('/').filter_map(|part| part.parse().ok()).take(256).collect();
    Some((host_bridge.to_owned(), path))
}

/// Returns the device that a class entry (`sys/class/net/eth0`) belongs to.
pub(crate) fn owner_of(target: &str) -> Option<PciAddress> {
    path_of(target)?.1.pop()
}

const DEVICES: &str = "sys/bus/pci/devices";

/// Returns the devices of interest and the bridges above them, by ascending address.
pub(crate) fn read(reader: &mut TreeReader) -> (Vec<PciDevice>, Vec<Bridge>) {
    let mut devices = Vec::new();
    let mut bridges = BTreeMap::new();
    for name in reader.tree.list(DEVICES) {
        let Ok(address) = name.parse::<PciAddress>() else {
            reader.note(DEVICES, &name);
            continue;
        };
        let Some(device) = read_device(reader, address, &name) else { continue };
        for &above in &device.path {
            bridges.entry(above).or_insert_with(|| read_bridge(reader, above));
        }
        devices.push(device);
    }
    devices.sort_by_key(|device| device.address);
    (devices, bridges.into_values().collect())
}

fn read_device(reader: &mut TreeReader, address: PciAddress, name: &str) -> Option<PciDevice> {
    let at = |file: &str| format!("{DEVICES}/{name}/{file}");
    let class = reader.hex(&at("class"))?;
    let vendor = reader.id(&at("vendor"))?;
    let kind = kind(class, vendor)?;
    let device = reader.id(&at("device"))?;
    let target = reader.tree.link(&format!("{DEVICES}/{name}")).unwrap_or_default();
    let (host_bridge, mut path) = path_of(&target).unwrap_or_else(|| {
        let root = format!("pci{:04x}:{:02x}", address.domain, address.bus);
        (root, vec![address])
    });
    path.retain(|&above| above != address);
    let driver = reader.tree.link(&at("driver"));
    let last = |target: String| target.rsplit('/').next().map(str::to_owned);
    let (name, uuid) = names(reader, address, &at(""));
    Some(PciDevice {
        address,
        kind,
        class,
        vendor,
        device,
        name,
        uuid,
        driver: driver.and_then(last),
        node: reader.number::<i64>(&at("numa_node")).and_then(|node| u32::try_from(node).ok()),
        link: read_link(reader, &at("")),
        host_bridge,
        path,
        virtual_function: reader.tree.link(&at("physfn")).is_some(),
    })
}

fn read_bridge(reader: &mut TreeReader, address: PciAddress) -> Bridge {
    let at = |file: &str| format!("{DEVICES}/{address}/{file}");
    Bridge {
        address,
        vendor: reader.id(&at("vendor")).unwrap_or(0),
        device: reader.id(&at("device")).unwrap_or(0),
        link: read_link(reader, &at("")),
    }
}

/// Returns name and unique id as NVIDIA's and AMD's drivers report them.
fn names(reader: &TreeReader, address: PciAddress, at: &str) -> (Option<String>, Option<String>) {
    let told = reader.tree.text(&format!("proc/driver/nvidia/gpus/{address}/information"));
    let field = |key: &str| {
        let line = told.as_ref()?.lines().find_map(|line| line.strip_prefix(key))?;
        Some(line.trim().to_owned()).filter(|value| !value.is_empty())
    };
    let file = |name: &str| reader.tree.text(&format!("{at}{name}")).filter(|text| !text.is_empty());
    let uuid = field("GPU UUID:").filter(|uuid| !uuid.contains('?')); // all '?' until the part is first used
    (field("Model:").or_else(|| file("product_name")), uuid.or_else(|| file("unique_id")))
}

fn read_link(reader: &mut TreeReader, at: &str) -> Option<PcieLink> {
    let speed = |text: &str| match text.split_whitespace().next() {
        Some("Unknown") => Some(None),
        Some(number) => number.parse::<f64>().ok().filter(|gt| *gt > 0.0 && *gt < 1e4).map(Some),
        None => None,
    };
    // 0 and 255 mean that the link is down or the part has none
    let lanes =
        |text: &str| text.trim().parse::<u32>().ok().map(|n| Some(n).filter(|n| (1..=32).contains(n)));
    let link = PcieLink {
        gt_per_s: reader.value(&format!("{at}current_link_speed"), speed).flatten(),
        lanes: reader.value(&format!("{at}current_link_width"), lanes).flatten(),
        gt_per_s_max: reader.value(&format!("{at}max_link_speed"), speed).flatten(),
        lanes_max: reader.value(&format!("{at}max_link_width"), lanes).flatten(),
    };
    (link != PcieLink::default()).then_some(link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_read_in_the_forms_that_drivers_use() {
        let expected = PciAddress { domain: 0, bus: 0x9d, device: 0, function: 0 };
        for text in ["0000:9d:00.0", "9d:00.0", "00000000:9D:00.0", "0000:9d:00.0\n"] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for bad in
            ["", "0000:9d:00", "9d.0", "0000:9d:20.0", "0000:9d:00.8", "1:0000:9d:00.0", "0000:+d:00.0"]
        {
            assert!(bad.parse::<PciAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_path_is_read_from_the_root_port_down() {
        let target =
            "../../../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0/nvme/nvme0";
        let (host_bridge, path) = path_of(target).unwrap();
        assert_eq!(host_bridge, "pci0000:00");
        let path: Vec<String> = path.iter().map(PciAddress::to_string).collect();
        assert_eq!(path, ["0000:00:0e.0", "10000:e0:06.0", "10000:e1:00.0"]);
        assert_eq!(path_of("../../devices/virtual/net/lo"), None);
    }

    #[test]
    fn rates_of_links_are_those_of_the_specification() {
        let rate = |gt, lanes| {
            let link = PcieLink { gt_per_s: Some(gt), lanes: Some(lanes), ..PcieLink::default() };
            (link.bytes_per_second().unwrap() / 1e7).round() / 1e2
        };
        // GB/s per direction, as in the PCI-SIG's tables
        assert_eq!(
            [rate(2.5, 1), rate(8.0, 16), rate(16.0, 16), rate(32.0, 16)],
            [0.25, 15.75, 31.51, 63.02]
        );
        assert_eq!(PcieLink::default().bytes_per_second(), None);
    }

    proptest! {
        #[test]
        fn text_and_address_are_inverse(domain in 0u32..0x2_0000, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }
    }
}
