//! The hardware of a machine, and its current state.
//!
//! [`Topology`] has sockets, cores, caches, NUMA nodes, PCI devices with their links and paths, network and
//! RDMA devices; [`Topology::distance`] says how far a GPU is from a NIC. [`Topology::rdma_near`] and
//! [`Topology::thread_home`] say which RDMA devices and CPUs are near the devices that a process serves.
//! [`same_part`] tells which devices of different backends are one part. [`HostConditions`] affect
//! measurements. All are pure functions of a [`Tree`], live or recorded.
//!
//! Absent by design: any measurement, any opening of a device, any panic over a file's content.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod affinity;
mod conditions;
mod cores;
mod cpulist;
mod distance;
mod here;
#[cfg(feature = "hwloc")]
mod hwloc;
mod network;
mod pci;
mod same;
mod text;
mod topology;
mod tree;
#[cfg(feature = "verbs")]
mod verbs;

pub use affinity::{NearestRdma, RdmaChoice, ServedDevice, ThreadHome};
pub use conditions::{HostConditions, conditions};
pub use cores::{Cache, CacheKind, HugePages, NumaNode, Socket};
pub use cpulist::CpuList;
pub use distance::{Distance, Matrix};
pub use here::DiscoveredMachine;
pub use network::{GidEntry, NetDevice, RdmaDevice, RdmaPort};
pub use pci::{Bridge, PciAddress, PciDevice, PciKind, PcieLink};
pub use same::{SamePart, pci_of, same_part};
pub use topology::Topology;
pub use tree::{RECORDING_SCHEMA, Recording, Tree};
