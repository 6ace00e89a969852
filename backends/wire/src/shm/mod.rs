//! The shared-memory transport between processes of one user on one host.
//!
//! The owner passes its anonymous file over a Unix socket; the user maps it, and a write is a copy on the
//! user's own thread. The socket's name is abstract, so it is visible in one network namespace only and
//! disappears with the process.
//!
//! Trust: access requires the descriptor's key and the same user. Such a process could trace the owner
//! anyway, so this guards against mistakes, crashes and processes that are stopped at any instruction, not
//! against malice.

mod control;
mod hello;
mod mapping;
mod pipe;
mod server;

#[cfg(any(test, feature = "testing"))]
pub(crate) use hello::check_words;
pub(crate) use pipe::SharedPipe;

use crate::key::RegionKey;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use server::{ShmRegion, ShmServer};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;

const NAME: &str = "shm";

/// Connects processes on one host through shared pages. A batch is copied on the caller's thread and is
/// complete when `write` or `read` returns.
///
/// [`deregister`](Transport::deregister) returns immediately unless a peer is in the middle of a copy. A peer
/// that stays stopped there for 100 ms loses the pages: the memory gets new ones ([`SharedMemory::renew`]),
/// and the peer's later writes land in the old pages, which are never read. If the memory cannot be renewed,
/// `deregister` returns `Timeout` and may be called again; the memory must not be reused until it succeeds.
pub struct Shm {
    server: ShmServer,
    host: String,
}

impl Shm {
    /// Starts the thread that serves regions.
    ///
    /// # Errors
    /// `Unsupported` if the system lacks a required feature; `Other` for any other failure.
    pub fn new() -> Result<Self> {
        Ok(Shm { server: ShmServer::start()?, host: host()? })
    }
}

/// Returns an id of this host that is unique and lasts until the next boot.
fn host() -> Result<String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(PATH)
        .map_err(|error| Error::unsupported(format!("no name for this host: {PATH}: {error}")))?;
    Ok(text.trim().to_owned())
}

/// Address of a region, written as `host/socket/key`.
struct ShmAddress {
    host: String,
    socket: String,
    key: RegionKey,
}

impl ShmAddress {
    fn encode(&self) -> String {
        format!("{}/{}/{}", self.host, self.socket, self.key.to_hex())
    }

    fn decode(descriptor: &Descriptor) -> Result<Self> {
        let foreign = || {
            let detail = format!("{descriptor:?} is not a region of shared memory, or is damaged");
            Error::new(ErrorKind::Closed, detail)
        };
        let parts: Vec<&str> = descriptor.address.split('/').collect();
        match parts[..] {
            [host, socket, key] if descriptor.transport == NAME => {
                let key = RegionKey::from_hex(key).ok_or_else(foreign)?;
                Ok(ShmAddress { host: host.into(), socket: socket.into(), key })
            }
            _ => Err(foreign()),
        }
    }
}

fn socket_address(name: &str) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(name.as_bytes())
        .map_err(|error| Error::new(ErrorKind::Closed, format!("socket '{name}': {error}")))
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Memory that is already registered is deregistered first.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let bytes = memory.size_bytes();
        let file = memory.mapping().and_then(|mapping| mapping.fd);
        let file = file.ok_or_else(|| Error::unsupported("memory without a file cannot be shared"))?;
        if !hello::is_sealed(file, bytes).unwrap_or(false) {
            return Err(Error::unsupported(
                "memory whose file can be cut is not shared: seal its length (F_SEAL_SHRINK)",
            ));
        }
        let region = || Ok(ShmRegion::new(memory.clone(), access));
        let (key, epoch) = self.server.regions.add(&memory, region)?;
        let address = ShmAddress { host: self.host.clone(), socket: self.server.name.clone(), key };
        Ok(Descriptor { transport: NAME.into(), address: address.encode(), epoch, bytes })
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.server.regions.remove(ShmAddress::decode(region)?.key, region.epoch)
    }

    /// Returns `Unsupported` for a region on another host.
    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let address = ShmAddress::decode(region)?;
        if address.host != self.host {
            return Err(Error::unsupported(
                "the region is on another host, or this host has rebooted; use another transport",
            ));
        }
        Ok(Box::new(mapping::ShmMapping::open(local, &address, region)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostRegion;

    #[test]
    fn another_host_is_told_from_a_region_that_is_gone() {
        let (shm, memory) = (Shm::new().unwrap(), Arc::new(HostRegion::new(8).unwrap()));
        let good = shm.register(memory.clone(), RemoteAccess::Write).unwrap();
        let address = ShmAddress::decode(&good).unwrap();
        let with = |address: ShmAddress| Descriptor { address: address.encode(), ..good.clone() };
        let kind = |descriptor| shm.connect(memory.clone(), &descriptor).err().unwrap().kind;
        let elsewhere =
            with(ShmAddress { host: "another".into(), socket: address.socket.clone(), key: address.key });
        assert_eq!(kind(elsewhere), ErrorKind::Unsupported);
        let (host, key) = (address.host.clone(), RegionKey([7; 16]));
        assert_eq!(kind(with(ShmAddress { host, socket: address.socket.clone(), key })), ErrorKind::Closed);
        let (host, socket) = (address.host, "mixfleet-nobody".into());
        assert_eq!(kind(with(ShmAddress { host, socket, key: address.key })), ErrorKind::Closed);
    }

    #[test]
    fn memory_without_a_file_is_refused() {
        struct Bare;
        impl SharedMemory for Bare {
            fn size_bytes(&self) -> u64 {
                1
            }
            fn view(&self, _: u64, _: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
                look(&[0]);
                Ok(())
            }
            fn update(&self, _: u64, _: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
                change(&mut [0]);
                Ok(())
            }
            fn mapping(&self) -> Option<mixfleet_hal::memory::Mapping> {
                None
            }
        }
        let refused = Shm::new().unwrap().register(Arc::new(Bare), RemoteAccess::Write);
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Unsupported);
    }
}
