//! Transports that move KV between memories.
//!
//! [`InProcessTransport`] connects two ends in one process, [`Shm`] two processes on one host, [`Tcp`] any
//! two hosts on a network, and `verbs` (a feature) hosts with RDMA. `one_sided` has what they share: each
//! adds what moves its bytes. [`Duplex`] is a protected connection for other messages than KV. For tests,
//! `FaultyTransport` injects the faults of a [`FaultPlan`](mixfleet_hal::fault::FaultPlan): corruption, loss
//! and silence.
//!
//! Bytes move while the active end writes, reads or waits. A transfer that has begun continues while the
//! active end does something else over TCP, where each connection has a thread for that, and over RDMA, where
//! the NIC moves what has been posted to it.
//!
//! Absent by design: verification of received bytes (the layer above hashes its blocks), retries, and the
//! choice of a transport.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![allow(unsafe_code)]

#[cfg(unix)]
mod address;
mod answer;
#[cfg(unix)]
pub mod bootstrap;
#[cfg(unix)]
mod duplex;
#[cfg(any(test, feature = "testing"))]
mod faulty;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzed;
mod key;
mod memory;
mod one_sided;
#[cfg(any(test, feature = "testing"))]
mod padded;
#[cfg(unix)]
mod pending;
#[cfg(unix)]
mod pinned;
#[cfg(unix)]
mod pipe;
#[cfg(unix)]
mod poll;
mod region;
#[cfg(unix)]
mod regions;
#[cfg(target_os = "linux")]
mod ring;
#[cfg(unix)]
mod security;
#[cfg(unix)]
mod service;
#[cfg(target_os = "linux")]
mod shm;
#[cfg(unix)]
mod stream;
#[cfg(unix)]
mod tcp;
#[cfg(all(feature = "tls", unix))]
mod tls;
#[cfg(all(feature = "verbs", target_os = "linux"))]
pub mod verbs;

#[cfg(unix)]
pub use address::LinkAddress;
#[cfg(unix)]
pub use duplex::{Duplex, DuplexCaller, DuplexListener};
#[cfg(any(test, feature = "testing"))]
pub use faulty::FaultyTransport;
pub use memory::InProcessTransport;
pub use one_sided::OneSided;
#[cfg(unix)]
pub use pending::PendingStream;
pub use region::HostRegion;
#[cfg(unix)]
pub use security::Security;
#[cfg(target_os = "linux")]
pub use shm::Shm;
#[cfg(unix)]
pub use tcp::{Tcp, TcpConfig};
#[cfg(all(feature = "tls", unix))]
pub use tls::{OnRenewal, RevocationWatch, TlsEnd, TlsFiles, TlsIdentity, TlsMemberKind, TlsPem};
