//! RDMA devices and CPUs near served devices, on recorded machines.

use crate::common::{BRIDGE, GPU, Machine, NIC, Part, gpu_address, hgx};
use crate::record;
use mixfleet_discover::{CpuList, PciDevice, ServedDevice, ThreadHome, Topology, Tree};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// What a recording of the machine says, after it was written to a file and read again.
fn recorded(machine: &Machine) -> Topology {
    let (live, recording) = record(machine);
    let document = serde_json::to_string(&recording).unwrap();
    let tree = Tree::recorded(serde_json::from_str(&document).unwrap()).unwrap();
    let topology = Topology::read(&tree);
    assert_eq!(topology, live);
    topology
}

fn gpu(id: &str, address: &str) -> ServedDevice {
    ServedDevice { id: id.into(), address: Some(address.parse().unwrap()) }
}

fn unplaced(id: &str) -> ServedDevice {
    ServedDevice { id: id.into(), address: None }
}

fn cpus(text: &str) -> CpuList {
    text.parse().unwrap()
}

/// Every CPU of the machine.
fn all_cpus(topology: &Topology) -> CpuList {
    CpuList::new(topology.nodes.iter().flat_map(|node| node.cpus.cpus().to_vec()).collect())
}

fn numa_home(node: u32, list: &str) -> ThreadHome {
    ThreadHome::Nodes { nodes: vec![node], cpus: cpus(list) }
}

fn anywhere(reason: &str) -> ThreadHome {
    ThreadHome::Anywhere(reason.into())
}

/// Two sockets of four cores; each has a host bridge with a GPU and another one with a NIC.
fn two_sockets() -> Machine {
    let mut machine = Machine::default();
    machine.cores(2, 4);
    machine.part("pci0000:10/0000:10:01.0", 0, BRIDGE);
    machine.part("pci0000:10/0000:10:01.0/0000:11:00.0", 0, GPU);
    machine.roce("pci0000:20/0000:20:01.0/0000:21:00.0", 0, NIC, 0);
    machine.part("pci0000:80/0000:80:01.0", 1, BRIDGE);
    machine.part("pci0000:80/0000:80:01.0/0000:81:00.0", 1, GPU);
    machine.roce("pci0000:90/0000:90:01.0/0000:91:00.0", 1, NIC, 1);
    machine
}

/// For any recording, choices name devices that it has.
pub(crate) fn is_within_the_machine(topology: &Topology) -> Result<(), TestCaseError> {
    let served = |at: &PciDevice| ServedDevice { id: at.address.to_string(), address: Some(at.address) };
    let devices: Vec<_> = topology.pci.iter().map(served).collect();
    let names = topology.rdma_near(&devices).names();
    prop_assert!(names.iter().all(|name| topology.rdma.iter().any(|rdma| rdma.name == *name)));
    let allowed = cpus("1-20");
    for device in devices {
        if let ThreadHome::Nodes { cpus, .. } = topology.thread_home(&[device], &allowed) {
            prop_assert!(!cpus.is_empty() && cpus.cpus().iter().all(|&cpu| allowed.contains(cpu)));
        }
    }
    Ok(())
}

#[test]
fn each_socket_uses_the_nic_of_its_own() {
    let topology = recorded(&two_sockets());
    // GPU and NIC share no host bridge on this machine, so that only the node number ties them together.
    for (address, nic, node) in [("0000:11:00.0", "mlx5_0", 0), ("0000:81:00.0", "mlx5_1", 1)] {
        let choice = topology.rdma_near(&[gpu("cuda:0", address)]);
        assert_eq!(choice.names(), [nic]);
        assert_eq!(choice.to_string(), format!("cuda:0: {nic} (NUMA node {node})"));
    }
    let both = [gpu("cuda:0", "0000:11:00.0"), gpu("cuda:1", "0000:81:00.0")];
    assert_eq!(topology.rdma_near(&both).names(), ["mlx5_0", "mlx5_1"]);
}

#[test]
fn the_other_sockets_nic_is_better_than_none() {
    let mut machine = two_sockets();
    let port = "sys/devices/pci0000:20/0000:20:01.0/0000:21:00.0/infiniband/mlx5_0/ports/1";
    machine.file(format!("{port}/state"), "1: DOWN");
    let choice = recorded(&machine).rdma_near(&[gpu("cuda:0", "0000:11:00.0")]);
    assert_eq!(choice.to_string(), "cuda:0: mlx5_1 (NUMA node 1, the device is on NUMA node 0)");
}

#[test]
fn gpus_use_the_nics_below_their_switch() {
    let topology = recorded(&hgx());
    // Below each switch of this machine are two GPUs and the NICs of the same numbers, all of 400 Gbit/s.
    for number in 0..8 {
        let choice = topology.rdma_near(&[gpu("cuda:0", &gpu_address(number))]);
        let first = number / 2 * 2;
        let (one, other) = (format!("mlx5_{first}"), format!("mlx5_{}", first + 1));
        assert_eq!(choice.names(), [one.clone(), other.clone()]);
        assert_eq!(choice.to_string(), format!("cuda:0: {one}, {other} (same PCIe switch)"));
    }
    let several = [0, 1, 5].map(|number| gpu(&format!("cuda:{number}"), &gpu_address(number)));
    assert_eq!(topology.rdma_near(&several).names(), ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"]);
}

#[test]
fn nics_whose_ports_are_down_are_passed_over() {
    let mut machine = hgx();
    // The NICs below the first GPU's switch: the second switch of its node is next (`NODE` of `topo -m`).
    for (lower, bus, number) in [("0000:17:01.0", 0x19, 0), ("0000:17:03.0", 0x1b, 1)] {
        let nic = format!("sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/{lower}/0000:{bus:02x}:00.0");
        machine.file(format!("{nic}/infiniband/mlx5_{number}/ports/1/state"), "1: DOWN");
    }
    let choice = recorded(&machine).rdma_near(&[gpu("cuda:0", &gpu_address(0))]);
    assert_eq!(choice.to_string(), "cuda:0: mlx5_2, mlx5_3 (NUMA node 0)");
}

#[test]
fn a_device_without_a_place_follows_the_others() {
    let topology = recorded(&two_sockets());
    let mixed = topology.rdma_near(&[unplaced("cpu"), gpu("cuda:1", "0000:81:00.0")]);
    assert_eq!(mixed.names(), ["mlx5_1"]);
    assert_eq!(mixed.to_string(), "cpu: no PCI address; cuda:1: mlx5_1 (NUMA node 1)");
    // No device has a place: no NIC is named, so that all remain.
    assert_eq!(topology.rdma_near(&[unplaced("cpu")]).names(), [""; 0]);
    assert_eq!(topology.rdma_near(&[]).names(), [""; 0]);
    let elsewhere = topology.rdma_near(&[gpu("cuda:0", "0000:ee:00.0")]);
    assert_eq!(elsewhere.to_string(), "cuda:0: 0000:ee:00.0 is no device of this machine");
}

#[test]
fn machines_without_rdma_nics_name_none() {
    // A NIC without RDMA, and RDMA in software, which has no PCI device behind it.
    let mut machine = Machine::default();
    machine.cores(1, 2).part("pci0000:00/0000:00:05.0", -1, Part { link: None, ..GPU });
    machine.part("pci0000:00/0000:00:03.0", -1, NIC);
    let rxe = "sys/devices/virtual/infiniband/rxe0";
    machine.link("sys/class/infiniband/rxe0", "../../devices/virtual/infiniband/rxe0");
    machine.file(format!("{rxe}/ports/1/state"), "4: ACTIVE");
    let topology = recorded(&machine);
    assert_eq!(topology.rdma.len(), 1);
    let choice = topology.rdma_near(&[gpu("wgpu:0", "0000:00:05.0")]);
    assert_eq!(choice.names(), [""; 0]);
    assert_eq!(choice.to_string(), "wgpu:0: no NIC with an active RDMA port");
}

#[test]
fn an_unknown_distance_is_no_nearness() {
    let mut machine = two_sockets();
    // The firmware does not tell the GPU's node, and no bridge above it has a NIC.
    machine.file("sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/numa_node", "-1");
    let topology = recorded(&machine);
    let device = gpu("cuda:0", "0000:11:00.0");
    let choice = topology.rdma_near(std::slice::from_ref(&device));
    assert_eq!(choice.to_string(), "cuda:0: the distance to NICs is unknown");
    assert_eq!(choice.names(), [""; 0]);
    let home = topology.thread_home(&[device], &all_cpus(&topology));
    assert_eq!(home, anywhere("the NUMA node of cuda:0 is unknown"));
}

#[test]
fn virtual_functions_serve_where_nothing_else_does() {
    let mut machine = Machine::default();
    machine.cores(1, 2).part("pci0000:00/0000:00:01.0/0000:01:00.0", 0, GPU);
    machine.roce("pci0000:00/0000:00:02.0/0000:02:00.1", 0, NIC, 1);
    machine.link("sys/devices/pci0000:00/0000:00:02.0/0000:02:00.1/physfn", "../0000:02:00.0");
    let device = [gpu("cuda:0", "0000:01:00.0")];
    let names = |machine: &Machine| recorded(machine).rdma_near(&device).names();
    assert_eq!(names(&machine), ["mlx5_1"]);
    machine.roce("pci0000:00/0000:00:02.0/0000:02:00.0", 0, NIC, 0);
    assert_eq!(names(&machine), ["mlx5_0"]);
}

#[test]
fn threads_stay_on_the_node_of_their_device() {
    let topology = recorded(&two_sockets());
    // Linux numbers the first threads of all eight cores, then the second ones; each node lists four of both.
    assert_eq!(topology.nodes[1].cpus, cpus("4-7,12-15"));
    let (all, gpus) = (cpus("0-15"), [gpu("cuda:0", "0000:11:00.0"), gpu("cuda:1", "0000:81:00.0")]);
    assert_eq!(topology.thread_home(&gpus[..1], &all), numa_home(0, "0-3,8-11"));
    assert_eq!(topology.thread_home(&gpus[1..], &all), numa_home(1, "4-7,12-15"));
    let with_cores = [unplaced("cpu"), gpus[1].clone()];
    assert_eq!(topology.thread_home(&with_cores, &all), numa_home(1, "4-7,12-15"));
    assert_eq!(topology.thread_home(&gpus, &all), anywhere("all CPUs of the process are of NUMA node 0, 1"));
    let cores = [unplaced("cpu")];
    assert_eq!(topology.thread_home(&cores, &all), anywhere("the NUMA node of cpu is unknown"));
}

#[test]
fn a_mask_from_outside_is_never_widened() {
    let topology = recorded(&two_sockets());
    let device = [gpu("cuda:1", "0000:81:00.0")];
    assert_eq!(topology.thread_home(&device, &cpus("2-5,13")), numa_home(1, "4-5,13"));
    let none = topology.thread_home(&device, &cpus("0-3"));
    assert_eq!(none, anywhere("the process may use no CPU of NUMA node 1"));
    let whole = topology.thread_home(&device, &cpus("5,12"));
    assert_eq!(whole, anywhere("all CPUs of the process are of NUMA node 1"));
}

#[test]
fn machines_with_one_node_bind_no_threads() {
    let mut machine = Machine::default();
    machine.cores(1, 4).part("pci0000:00/0000:00:01.0/0000:01:00.0", 0, GPU);
    // Memory without CPUs is a node, but no place for threads.
    let memory = "sys/devices/system/node/node1";
    machine.file(format!("{memory}/cpulist"), "").file(format!("{memory}/distance"), "20 10");
    let topology = recorded(&machine);
    assert_eq!(topology.nodes.len(), 2);
    let home = topology.thread_home(&[gpu("cuda:0", "0000:01:00.0")], &all_cpus(&topology));
    assert_eq!(home, anywhere("the machine has one NUMA node"));
}
