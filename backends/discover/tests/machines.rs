//! Machines as they are read: a server with eight GPUs, and odd ones.

mod affinity;
mod common;

use common::{BRIDGE, GPU, Machine, NIC, NVME, Part, gpu_address, hgx, nic_address};
use mixfleet_discover::{Distance, HostConditions, PciKind, Recording, Topology, Tree};
use proptest::prelude::*;
use std::sync::LazyLock;

fn read(machine: &Machine) -> Topology {
    Topology::read(&Tree::at(machine.write().path()))
}

/// The topology and its recording.
fn record(machine: &Machine) -> (Topology, Recording) {
    let scratch = machine.write();
    let tree = Tree::at(scratch.path()).keeping();
    (Topology::read(&tree), tree.kept())
}

#[test]
fn a_server_with_eight_gpus_is_read_whole() {
    let topology = read(&hgx());
    assert_eq!(topology.notes, [""; 0]);
    assert_eq!(topology.cpu_model.as_deref(), Some("Testium Platinum 9000"));
    let shape: Vec<_> = topology.sockets.iter().map(|s| (s.id, s.cores.len(), s.threads())).collect();
    assert_eq!(shape, [(0, 8, 16), (1, 8, 16)]);
    assert_eq!(topology.sockets[1].cores[0].to_string(), "8,24");
    assert_eq!(topology.nodes[1].cpus.to_string(), "8-15,24-31");
    assert_eq!(topology.nodes[1].distances, [21, 10]);
    assert_eq!(topology.nodes[0].memory_bytes, Some(1_056_964_608 * 1024));
    assert_eq!(topology.caches.len(), 16 + 16 + 2);
    assert_eq!(topology.caches.last().and_then(|cache| cache.bytes), Some(105 << 20));
    let count = |kind| topology.of_kind(kind).count();
    let kinds = [PciKind::Gpu, PciKind::Nic, PciKind::Nvme, PciKind::GpuSwitch].map(count);
    assert_eq!(kinds, [8, 8, 4, 4], "the management screen is no GPU");
    assert_eq!(topology.nets.len(), 8, "the loopback is no hardware");
    assert_eq!(topology.huge_pages[0].free, 1000);

    let gpu = topology.of_kind(PciKind::Gpu).next().unwrap();
    assert_eq!(gpu.name.as_deref(), Some("Test GPU"));
    assert_eq!(gpu.driver.as_deref(), Some("nvidia"));
    assert_eq!(gpu.uuid.as_deref(), Some("GPU-00000000-0000-0000-0000-000000000000"));
    let path: Vec<_> = gpu.path.iter().map(ToString::to_string).collect();
    assert_eq!(path, ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"]);

    let port = &topology.rdma[3].ports[0];
    assert_eq!((port.state.as_deref(), port.link_layer.as_deref()), (Some("ACTIVE"), Some("Ethernet")));
    assert_eq!(port.gbit_per_s, Some(400.0));
    assert_eq!(port.gids.len(), 4);
    assert_eq!(port.gids[3].kind.as_deref(), Some("RoCE v2"));
    assert_eq!(port.gids[3].net.as_deref(), Some("eth3"));
}

#[test]
fn distances_are_those_of_the_wiring() {
    let topology = read(&hgx());
    let terms = |kind| {
        let rows = topology.matrix(kind).distances;
        rows[0].iter().map(|distance| distance.term()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(terms(PciKind::Gpu), "X PIX NODE NODE SYS SYS SYS SYS");
    assert_eq!(terms(PciKind::Nic), "PIX PIX NODE NODE SYS SYS SYS SYS");
    let pairs = topology.nic_of_gpus();
    let pairs: Vec<_> = pairs.iter().map(|(gpu, nic)| (gpu.to_string(), nic.to_string())).collect();
    let expected: Vec<_> = (0..8).map(|number| (gpu_address(number), nic_address(number))).collect();
    assert_eq!(pairs, expected);
}

#[test]
fn every_class_of_distance_is_told_apart() {
    let mut machine = Machine::default();
    machine.cores(2, 1);
    let root = "pci0000:10/0000:10:01.0";
    let upper = format!("{root}/0000:11:00.0");
    let lower = |slot: u32| format!("{upper}/0000:12:{slot:02x}.0");
    let second = format!("{}/0000:20:00.0/0000:21:00.0", lower(1));
    machine.part(&format!("{}/0000:13:00.0", lower(0)), 0, GPU);
    machine.part(&format!("{}/0000:14:00.0", lower(2)), 0, NIC);
    machine.part(&format!("{second}/0000:22:00.0"), 0, NIC);
    machine.part("pci0000:10/0000:10:02.0/0000:30:00.0", 0, NIC);
    machine.part("pci0000:40/0000:40:01.0/0000:41:00.0", 0, NIC);
    machine.part("pci0000:80/0000:80:01.0/0000:81:00.0", 1, NIC);
    machine.part("pci0000:90/0000:90:01.0/0000:91:00.0", -1, NIC);
    let topology = read(&machine);
    use Distance::{HostBridge, Node, Switch, Switches, System};
    let classes = &topology.matrix(PciKind::Nic).distances[0];
    assert_eq!(classes[..], [Switch, Switches, HostBridge, Node, System, System]);
    assert!(classes.is_sorted());
}

#[test]
fn two_ports_of_a_card_and_a_gpu_beside_them_are_told_apart() {
    let mut machine = Machine::default();
    machine.cores(1, 1);
    machine.part("pci0000:00/0000:00:01.0/0000:01:00.0", 0, GPU);
    machine.part("pci0000:00/0000:00:02.0/0000:02:00.0", 0, GPU);
    machine.roce("pci0000:00/0000:00:02.0/0000:02:00.1", 0, NIC, 1);
    let topology = read(&machine);
    let classes = topology.matrix(PciKind::Nic).distances;
    assert_eq!(classes, [[Distance::HostBridge], [Distance::Switch]]);
}

#[test]
fn a_slow_port_is_not_chosen_among_equals() {
    let mut machine = Machine::default();
    machine.cores(1, 1);
    machine.part("pci0000:00/0000:00:01.0/0000:01:00.0", 0, GPU);
    machine.roce("pci0000:00/0000:00:02.0/0000:02:00.0", 0, NIC, 0);
    machine.roce("pci0000:00/0000:00:03.0/0000:03:00.0", 0, NIC, 1);
    let port = "sys/devices/pci0000:00/0000:00:02.0/0000:02:00.0";
    machine.file(format!("{port}/infiniband/mlx5_0/ports/1/rate"), "25 Gb/sec (1X EDR)");
    machine.file(format!("{port}/net/eth0/speed"), "25000");
    let topology = read(&machine);
    let gpu = topology.of_kind(PciKind::Gpu).next().unwrap();
    let nearest: Vec<_> = topology.nearest_nics(gpu).iter().map(|nic| topology.name_of(nic)).collect();
    assert_eq!(nearest, ["mlx5_1"]);
}

#[test]
fn links_below_what_the_part_allows_are_flagged() {
    let topology = read(&hgx());
    let narrow: Vec<_> =
        topology.pci.iter().filter(|d| d.link.is_some_and(|link| link.is_narrow())).collect();
    assert_eq!(narrow.len(), 1);
    assert_eq!(narrow[0].address.to_string(), gpu_address(5));
    let words = narrow[0].link.unwrap().words();
    assert!(words.contains("x8 of x16: the link is narrower than the part allows"), "{words}");
    let behind: Vec<_> = topology.pci.iter().filter(|d| topology.bottleneck(d).is_some()).collect();
    assert_eq!(behind.iter().map(|d| d.address.to_string()).collect::<Vec<_>>(), [nic_address(7)]);
}

#[test]
fn the_text_shows_the_tree_and_the_distances() {
    let text = read(&hgx()).to_string();
    for line in [
        "Testium Platinum 9000: 2 sockets, 16 cores, 32 threads, 2016.0 GiB",
        "socket 0: 8 cores; L1 48 KiB x 8, L2 2 MiB x 8, L3 105 MiB",
        "  node 1: CPUs 8-15,24-31, 1008.0 GiB, distances 21 10",
        "    pci0000:15",
        "      0000:15:01.0 port 63.0 GB/s",
        "            0000:18:00.0 GPU: Test GPU 10de:2330, driver nvidia",
        "              mlx5_0 port 1: Ethernet, ACTIVE, 400 Gbit/s, RoCE v2 from GID 1 on",
        "0000:18:00.0      PIX    PIX   NODE   NODE    SYS    SYS    SYS    SYS",
        "0000:18:00.0 is nearest to mlx5_0",
    ] {
        assert!(text.lines().any(|l| l == line), "no line '{line}' in\n{text}");
    }
}

#[test]
fn a_recording_answers_as_the_machine_did() {
    let scratch = hgx().write();
    let tree = Tree::at(scratch.path()).keeping();
    let (topology, conditions) = (Topology::read(&tree), HostConditions::read(&tree));
    let document = serde_json::to_string(&tree.kept()).unwrap();
    drop(scratch);
    let replay = Tree::recorded(serde_json::from_str(&document).unwrap()).unwrap().keeping();
    assert_eq!(Topology::read(&replay), topology);
    assert_eq!(HostConditions::read(&replay), conditions);
    assert_eq!(serde_json::to_string(&replay.kept()).unwrap(), document, "a recording of a recording is it");
    let back: Topology = serde_json::from_str(&serde_json::to_string(&topology).unwrap()).unwrap();
    assert_eq!(back, topology);
}

#[test]
fn a_virtual_machine_without_numa_or_links_is_read() {
    let mut machine = Machine::default();
    machine.cores(1, 1);
    let virtio =
        Part { class: "0x020000", vendor: "0x1af4", device: "0x1041", driver: "virtio-pci", link: None };
    machine.part("pci0000:00/0000:00:03.0", -1, virtio);
    machine.part("pci0000:00/0000:00:05.0", -1, Part { link: None, ..GPU });
    machine.link("sys/class/net/eth0", "../../devices/pci0000:00/0000:00:03.0/virtio2/net/eth0");
    machine.file("sys/devices/pci0000:00/0000:00:03.0/virtio2/net/eth0/speed", "-1");
    let topology = read(&machine);
    assert_eq!(topology.notes, [""; 0]);
    let gpu = topology.of_kind(PciKind::Gpu).next().unwrap();
    assert_eq!((gpu.node, gpu.link, gpu.path.len()), (None, None, 0));
    assert_eq!(topology.matrix(PciKind::Nic).distances, [[Distance::HostBridge]]);
    assert_eq!(topology.nets[0].mbit_per_s, None);
    let text = topology.to_string();
    assert!(text.contains("without a NUMA node from the firmware"), "{text}");
}

#[test]
fn odd_machines_are_read_as_far_as_they_go() {
    let nothing = read(&Machine::default());
    assert!(nothing.sockets.is_empty() && nothing.pci.is_empty());
    assert!(nothing.notes[0].contains("is /sys mounted?"), "{:?}", nothing.notes);

    // one core, no topology, no caches, no nodes
    let mut bare = Machine::default();
    bare.file("sys/devices/system/cpu/cpu0/uevent", "");
    let bare = read(&bare);
    assert_eq!((bare.sockets.len(), bare.sockets[0].threads()), (1, 1));

    // firmware that numbers no packages
    let mut arm = Machine::default();
    arm.cores(1, 2);
    for cpu in 0..4 {
        arm.file(format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"), "-1");
    }
    assert_eq!(read(&arm).sockets.len(), 1);

    // a CPU that is switched off
    let mut off = Machine::default();
    off.cores(1, 2).file("sys/devices/system/cpu/online", "0,2");
    assert_eq!(read(&off).sockets[0].cores.len(), 1);

    let mut links = Machine::default();
    let down = Some((("Unknown", 0), ("16.0 GT/s PCIe", 255)));
    links.cores(1, 1).part("pci0000:00/0000:00:01.0", 0, Part { link: down, ..NVME });
    let link = read(&links).pci[0].link.unwrap();
    assert_eq!(
        (link.gt_per_s, link.lanes, link.gt_per_s_max, link.lanes_max),
        (None, None, Some(16.0), None)
    );
}

#[test]
fn what_makes_no_sense_is_noted() {
    let mut machine = Machine::default();
    machine.cores(1, 1).part("pci0000:00/0000:00:01.0", 0, GPU).part("pci0000:00/0000:00:02.0", 0, BRIDGE);
    let at = "sys/devices/pci0000:00/0000:00:01.0";
    machine.file(format!("{at}/current_link_speed"), "fast");
    machine.file(format!("{at}/numa_node"), "\u{7}node");
    machine.file("sys/devices/system/cpu/cpu0/cache/index0/size", "99999999999999999999K");
    machine.file("sys/devices/system/node/node0/distance", "10 x");
    machine.link("sys/bus/pci/devices/strange", "nowhere");
    let topology = read(&machine);
    let text = topology.to_string();
    for part in [
        "current_link_speed holds 'fast'",
        "numa_node holds '\\u{7}node'",
        "size holds",
        "distance holds",
        "'strange'",
    ] {
        assert!(topology.notes.iter().any(|note| note.contains(part)), "{part}: {:?}", topology.notes);
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn this_machine_is_read() {
    let topology = Topology::read(&Tree::at("/"));
    if !std::path::Path::new("/sys/devices/system/cpu/cpu0").exists() {
        eprintln!("SKIPPED: no /sys/devices/system/cpu on this machine");
        return;
    }
    let threads: usize = topology.sockets.iter().map(|socket| socket.threads()).sum();
    let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
    assert!(threads >= usable, "{threads} threads found, {usable} usable\n{topology}");
    assert!(topology.memory_bytes.is_some_and(|bytes| bytes > 1 << 20));
}

/// Each damage: where, with what, and how.
fn damaged(mut recording: Recording, damage: Vec<(u16, String, u8)>) -> Recording {
    for (place, text, how) in damage {
        let place = usize::from(place);
        let map = if how % 2 == 0 { &mut recording.files } else { &mut recording.links };
        let nth = |n: usize| n % map.len().max(1);
        let Some(key) = map.keys().nth(nth(place)).cloned() else { continue };
        let other = map.values().nth(nth(place / 7)).cloned().unwrap_or_default();
        match how {
            0 | 1 => drop(map.insert(key, text)),
            2 | 3 => drop(map.remove(&key)),
            _ => {
                map.insert(key, other);
                let lists = recording.lists.len();
                if let Some(list) = recording.lists.values_mut().nth(place % lists) {
                    list.push(text);
                }
            }
        }
    }
    recording
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any tree, reading and showing it ends without a panic, and distances are symmetric.
    #[test]
    fn a_damaged_tree_never_panics(damage in prop::collection::vec((any::<u16>(), ".{0,24}", 0u8..6), 1..60)) {
        static WHOLE: LazyLock<Recording> = LazyLock::new(|| record(&hgx()).1);
        let tree = Tree::recorded(damaged(WHOLE.clone(), damage)).unwrap();
        let topology = Topology::read(&tree);
        let conditions = HostConditions::read(&tree);
        prop_assert!(!topology.to_string().is_empty() && !conditions.pairs().is_empty());
        for a in &topology.pci {
            for b in &topology.pci {
                prop_assert_eq!(topology.distance(a, b), topology.distance(b, a));
            }
        }
        affinity::is_within_the_machine(&topology)?;
    }
}
