//! The transports of this host, each connected to itself, for tests and measurements.

use mixfleet_hal::Result;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::Transport;
use mixfleet_hwtests::validate::runner::LINKS;
use mixfleet_wire::{HostRegion, InProcessTransport, Security, Shm, Tcp, TcpConfig};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

/// The transport of this name, or why there is none.
pub(crate) fn open(name: &str) -> std::result::Result<Arc<dyn Transport>, String> {
    match name {
        "memory" => Ok(Arc::new(InProcessTransport::new())),
        "shm" => Shm::new().map(|shm| Arc::new(shm) as _).map_err(|error| error.to_string()),
        "tcp" => {
            Tcp::new(TcpConfig::loopback()).map(|tcp| Arc::new(tcp) as _).map_err(|error| error.to_string())
        }
        "verbs" => verbs_at(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Security::LoopbackOnly),
        other => Err(format!("there is no transport '{other}'")),
    }
}

/// RDMA with `address` for its peers to connect to.
#[cfg(all(feature = "verbs", target_os = "linux"))]
pub(crate) fn verbs_at(
    address: SocketAddr,
    security: Security,
) -> std::result::Result<Arc<dyn Transport>, String> {
    use mixfleet_wire::verbs::{Verbs, VerbsOptions};
    let opened = Verbs::open(VerbsOptions { listen: Some(address), security, ..VerbsOptions::default() });
    opened.map(|verbs| Arc::new(verbs) as _).map_err(|absent| absent.reason)
}

/// A NIC's name, and a transport that uses it alone.
pub(crate) type NicTransport = (String, Arc<dyn Transport>);

/// Each NIC by itself, looped back.
#[cfg(all(feature = "verbs", target_os = "linux"))]
pub(crate) fn nics() -> std::result::Result<Vec<NicTransport>, String> {
    use mixfleet_wire::verbs::{Verbs, VerbsOptions};
    let all = Verbs::open(VerbsOptions::default()).map_err(|absent| absent.reason)?;
    let one = |(name, _): (String, u32)| {
        let listen = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let options = VerbsOptions { devices: vec![name.clone()], listen, ..VerbsOptions::default() };
        Some((name, Arc::new(Verbs::open(options).ok()?) as _))
    };
    Ok(all.devices().into_iter().filter_map(one).collect())
}

/// Reports that this build has no RDMA.
#[cfg(not(all(feature = "verbs", target_os = "linux")))]
pub(crate) fn nics() -> std::result::Result<Vec<NicTransport>, String> {
    verbs_at(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Security::LoopbackOnly).map(|_| Vec::new())
}

/// Reports that this build has no RDMA.
#[cfg(not(all(feature = "verbs", target_os = "linux")))]
pub(crate) fn verbs_at(_: SocketAddr, _: Security) -> std::result::Result<Arc<dyn Transport>, String> {
    Err("this build cannot use RDMA: build with the feature verbs, on Linux".into())
}

/// Names of all transports, best first.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    LINKS.into_iter().filter(|name| *name != "copy")
}

/// Memory that all transports can access.
pub(crate) fn memory(bytes: u64) -> Result<Arc<dyn SharedMemory>> {
    Ok(Arc::new(HostRegion::new(to_usize(bytes))?))
}
