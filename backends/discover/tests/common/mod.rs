//! Writes sysfs trees of machines that are not available for tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that goes when it is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("mixfleet-discover-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a writable temporary directory");
        Scratch(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The files and links of a machine.
#[derive(Default)]
pub(crate) struct Machine {
    files: BTreeMap<String, String>,
    links: BTreeMap<String, String>,
}

/// Speed and lanes of a link.
pub(crate) type Pace = (&'static str, u32);

/// A PCI device to be written: numbers as sysfs shows them.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) class: &'static str,
    pub(crate) vendor: &'static str,
    pub(crate) device: &'static str,
    pub(crate) driver: &'static str,
    /// Now and at most; none writes no link files.
    pub(crate) link: Option<(Pace, Pace)>,
}

const GEN5: Option<(Pace, Pace)> = Some((("32.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16)));

pub(crate) const BRIDGE: Part =
    Part { class: "0x060400", vendor: "0x1000", device: "0xc030", driver: "pcieport", link: GEN5 };
pub(crate) const GPU: Part =
    Part { class: "0x030200", vendor: "0x10de", device: "0x2330", driver: "nvidia", link: GEN5 };
pub(crate) const NIC: Part =
    Part { class: "0x020000", vendor: "0x15b3", device: "0x1021", driver: "mlx5_core", link: GEN5 };
pub(crate) const NVME: Part = Part {
    class: "0x010802",
    vendor: "0x144d",
    device: "0xa80a",
    driver: "nvme",
    link: Some((("16.0 GT/s PCIe", 4), ("16.0 GT/s PCIe", 4))),
};
pub(crate) const NVSWITCH: Part =
    Part { class: "0x068000", vendor: "0x10de", device: "0x22a3", driver: "nvidia-nvswitch", link: GEN5 };
pub(crate) const SCREEN: Part =
    Part { class: "0x030000", vendor: "0x1a03", device: "0x2000", driver: "ast", link: None };

impl Machine {
    pub(crate) fn file(&mut self, path: impl Into<String>, text: impl Into<String>) -> &mut Self {
        self.files.insert(path.into(), text.into());
        self
    }

    pub(crate) fn link(&mut self, path: impl Into<String>, target: impl Into<String>) -> &mut Self {
        self.links.insert(path.into(), target.into());
        self
    }

    /// Writes the tree into a new directory.
    pub(crate) fn write(&self) -> Scratch {
        let scratch = Scratch::new();
        let place = |path: &str| {
            let path = scratch.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a path inside")).expect("a writable directory");
            path
        };
        for (path, text) in &self.files {
            std::fs::write(place(path), format!("{text}\n")).expect("a writable file");
        }
        for (path, target) in &self.links {
            std::os::unix::fs::symlink(target, place(path)).expect("a new link");
        }
        scratch
    }

    /// `sockets` packages of `cores` cores of two threads, a NUMA node each, numbered as Linux does on
    /// servers: first threads of all cores, then the second ones.
    pub(crate) fn cores(&mut self, sockets: u32, cores: u32) -> &mut Self {
        let all = sockets * cores;
        let cpu = "sys/devices/system/cpu";
        self.file(format!("{cpu}/online"), format!("0-{}", 2 * all - 1));
        for thread in 0..2 * all {
            let (core, at) = (thread % all, format!("{cpu}/cpu{thread}"));
            let socket = core / cores;
            let siblings = format!("{core},{}", core + all);
            let (first, last) = (socket * cores, (socket + 1) * cores - 1);
            let package = format!("{first}-{last},{}-{}", first + all, last + all);
            self.file(format!("{at}/topology/physical_package_id"), socket.to_string());
            self.file(format!("{at}/topology/core_cpus_list"), &siblings);
            let caches = [
                (1, "Data", "48K", &siblings),
                (2, "Unified", "2048K", &siblings),
                (3, "Unified", "107520K", &package),
            ];
            for (index, (level, kind, size, shared)) in caches.into_iter().enumerate() {
                let at = format!("{at}/cache/index{index}");
                self.file(format!("{at}/level"), level.to_string());
                self.file(format!("{at}/type"), kind);
                self.file(format!("{at}/size"), size);
                self.file(format!("{at}/coherency_line_size"), "64");
                self.file(format!("{at}/shared_cpu_list"), shared);
            }
            let node = format!("sys/devices/system/node/node{socket}");
            let distances: Vec<_> = (0..sockets).map(|to| if to == socket { "10" } else { "21" }).collect();
            self.file(format!("{node}/cpulist"), &package);
            self.file(format!("{node}/distance"), distances.join(" "));
            self.file(format!("{node}/meminfo"), format!("Node {socket} MemTotal:       1056964608 kB"));
        }
        self.file("proc/cpuinfo", "processor\t: 0\nmodel name\t: Testium Platinum 9000\nmicrocode\t: 0x2b\n");
        self.file("proc/meminfo", format!("MemTotal:       {} kB", u64::from(sockets) * 1_056_964_608))
    }

    /// A PCI device at the end of `path`: `pci0000:15/0000:15:01.0/0000:16:00.0`.
    pub(crate) fn part(&mut self, path: &str, node: i32, part: Part) -> &mut Self {
        let address = path.rsplit('/').next().expect("a path").to_owned();
        let at = format!("sys/devices/{path}");
        self.link(format!("sys/bus/pci/devices/{address}"), format!("../../../devices/{path}"));
        self.link(format!("{at}/driver"), format!("../../bus/pci/drivers/{}", part.driver));
        self.file(format!("{at}/class"), part.class);
        self.file(format!("{at}/vendor"), part.vendor);
        self.file(format!("{at}/device"), part.device);
        self.file(format!("{at}/numa_node"), node.to_string());
        if let Some(((speed, lanes), (speed_max, lanes_max))) = part.link {
            self.file(format!("{at}/current_link_speed"), speed);
            self.file(format!("{at}/current_link_width"), lanes.to_string());
            self.file(format!("{at}/max_link_speed"), speed_max);
            self.file(format!("{at}/max_link_width"), lanes_max.to_string());
        }
        self
    }

    /// The NIC at the end of `path`, with an interface and a RoCE device of this number.
    pub(crate) fn roce(&mut self, path: &str, node: i32, part: Part, number: u32) -> &mut Self {
        self.part(path, node, part);
        let (net, rdma) = (format!("eth{number}"), format!("mlx5_{number}"));
        let at = format!("sys/devices/{path}/net/{net}");
        self.link(format!("sys/class/net/{net}"), format!("../../devices/{path}/net/{net}"));
        self.file(format!("{at}/operstate"), "up").file(format!("{at}/speed"), "400000");
        self.file(format!("{at}/mtu"), "9000");
        let at = format!("sys/devices/{path}/infiniband/{rdma}");
        self.link(format!("sys/class/infiniband/{rdma}"), format!("../../devices/{path}/infiniband/{rdma}"));
        self.file(format!("{at}/fw_ver"), "28.39.1002").file(format!("{at}/board_id"), "MT_0000000838");
        let port = format!("{at}/ports/1");
        self.file(format!("{port}/state"), "4: ACTIVE").file(format!("{port}/link_layer"), "Ethernet");
        self.file(format!("{port}/rate"), "400 Gb/sec (4X NDR)");
        for index in 0..16 {
            let (gid, kind) = match index {
                0 => (format!("fe80:0000:0000:0000:0a00:27ff:fe00:{number:04x}"), "IB/RoCE v1"),
                1 => (format!("fe80:0000:0000:0000:0a00:27ff:fe00:{number:04x}"), "RoCE v2"),
                2 => (format!("0000:0000:0000:0000:0000:ffff:0a09:{number:04x}"), "IB/RoCE v1"),
                3 => (format!("0000:0000:0000:0000:0000:ffff:0a09:{number:04x}"), "RoCE v2"),
                _ => ("0000:0000:0000:0000:0000:0000:0000:0000".to_owned(), ""),
            };
            self.file(format!("{port}/gids/{index}"), gid);
            if !kind.is_empty() {
                self.file(format!("{port}/gid_attrs/types/{index}"), kind);
                self.file(format!("{port}/gid_attrs/ndevs/{index}"), &net);
            }
        }
        self
    }
}

/// Buses of the host bridges over the four PCIe switches; the first two on socket 0.
pub(crate) const SWITCHES: [u32; 4] = [0x15, 0x4a, 0x95, 0xca];

/// Addresses of the GPUs, in order: the first and the third device below each switch.
pub(crate) fn gpu_address(number: u32) -> String {
    format!("0000:{:02x}:00.0", SWITCHES[number as usize / 2] + 3 + 2 * (number % 2))
}

/// Addresses of the NICs, in order: the second and the fourth device below each switch.
pub(crate) fn nic_address(number: u32) -> String {
    format!("0000:{:02x}:00.0", SWITCHES[number as usize / 2] + 4 + 2 * (number % 2))
}

/// Two sockets, four PCIe switches; below each, two GPUs, two NICs and an NVMe drive; four NVSwitches and
/// a management screen aside. GPU 5 has lost half of its lanes, NIC 7's port is in a slower slot.
pub(crate) fn hgx() -> Machine {
    let mut machine = Machine::default();
    machine.cores(2, 8);
    for (number, bus) in SWITCHES.into_iter().enumerate() {
        let (number, node) = (number as u32, (number / 2) as i32);
        let root = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0");
        let upper = format!("{root}/0000:{:02x}:00.0", bus + 1);
        machine.part(&root, node, BRIDGE).part(&upper, node, BRIDGE);
        for slot in 0..5 {
            let lower = format!("{upper}/0000:{:02x}:{slot:02x}.0", bus + 2);
            let below = format!("{lower}/0000:{:02x}:00.0", bus + 3 + slot);
            let which = 2 * number + slot / 2;
            let mut port = BRIDGE;
            match slot {
                4 => machine.part(&below, node, NVME),
                _ if slot % 2 == 0 => {
                    let narrow = Some((("32.0 GT/s PCIe", 8), ("32.0 GT/s PCIe", 16)));
                    machine.part(&below, node, Part { link: if which == 5 { narrow } else { GEN5 }, ..GPU });
                    let uuid = format!("GPU-00000000-0000-0000-0000-00000000000{which:x}");
                    let told = format!("Model: \t\t Test GPU\nIRQ:   \t\t 10\nGPU UUID: \t {uuid}\n");
                    let address = gpu_address(which);
                    machine.file(format!("proc/driver/nvidia/gpus/{address}/information"), told)
                }
                _ => {
                    if which == 7 {
                        port.link = Some((("16.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16)));
                    }
                    machine.roce(&below, node, NIC, which)
                }
            };
            machine.part(&lower, node, port);
        }
    }
    for number in 0..4 {
        let port = format!("pci0000:e0/0000:e0:{:02x}.0", number + 1);
        machine.part(&port, 1, BRIDGE);
        machine.part(&format!("{port}/0000:{:02x}:00.0", 0xe1 + number), 1, NVSWITCH);
    }
    machine.part("pci0000:00/0000:00:1c.0", 0, BRIDGE);
    machine.part("pci0000:00/0000:00:1c.0/0000:01:00.0", 0, SCREEN);
    machine.link("sys/class/net/lo", "../../devices/virtual/net/lo");
    machine.file("sys/devices/virtual/net/lo/operstate", "unknown");
    machine.file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "1024");
    machine.file("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1000");
    machine
}
