//! The TCP transport, between any two hosts on a network.
//!
//! A connection consists of several streams. The user cuts batches into frames and sends each on a stream
//! that has room, straight from its memory. The owner has a thread per stream, which receives straight into
//! the region and acknowledges each frame once it has landed. [`protocol`] defines the messages.
//!
//! Bytes move in the background: each open connection has a thread that takes over when the user is not
//! waiting ([`driven`]). A single thread for all connections would need fewer, but one core would then
//! encrypt for all peers, and the owner has a thread per stream anyway. To send to one peer with more than
//! one core, open several connections.

mod connection;
mod driven;
#[cfg(test)]
mod hostile;
mod inbox;
mod parts;
mod protocol;
mod serve;
mod server;
mod stream;

#[cfg(any(test, feature = "testing"))]
pub(crate) use protocol::check_words;

use crate::key::RegionKey;
use crate::security::Security;
use driven::Driven;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use server::{TcpRegion, TcpServer};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "tcp";

/// How a process connects to others over TCP, and accepts them.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Address to listen on; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Addresses under which peers reach this process, best first; empty means the listening address.
    pub advertise: Vec<SocketAddr>,
    /// Number of streams in a connection that this end opens.
    pub streams: u16,
    /// Maximum length of a frame. Longer pieces are split and sent on several streams at once.
    pub frame_bytes_max: u64,
    /// Maximum bytes in flight per stream. More would only be evicted from the caches before it is received,
    /// and slow both ends; a long fat network needs the bandwidth-delay product, over all streams.
    pub window_bytes: u64,
    /// Timeout for opening one stream, including its handshake.
    pub connect_timeout: Duration,
    /// Time after which a peer's host that sends no packets, or a peer that accepts no data, counts as gone.
    pub silence: Duration,
    /// Maximum number of streams served, over all peers; each has a thread.
    pub streams_max: usize,
    /// Who may connect, and how connections are protected.
    pub security: Security,
}

impl TcpConfig {
    /// Returns the configuration for peers on this host.
    pub fn loopback() -> Self {
        TcpConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Security::LoopbackOnly)
    }

    /// Returns a configuration with the stream count and frame length that measured fastest
    /// (docs/results/wire.md).
    pub fn new(listen: SocketAddr, security: Security) -> Self {
        // on one host a second stream only takes a core from the others, but decryption needs two
        let streams = if matches!(security, Security::LoopbackOnly) { 1 } else { 2 };
        TcpConfig {
            listen,
            advertise: Vec::new(),
            streams,
            frame_bytes_max: 1 << 20,
            window_bytes: 2 << 20,
            connect_timeout: Duration::from_secs(5),
            silence: Duration::from_secs(10),
            streams_max: 1024,
            security,
        }
    }
}

/// Connects ends over TCP.
///
/// [`deregister`](Transport::deregister) closes every stream to the region and returns once the last of them
/// has stopped writing.
pub struct Tcp {
    config: TcpConfig,
    addresses: Vec<SocketAddr>,
    server: TcpServer,
}

impl Tcp {
    /// Starts listening for peers.
    ///
    /// # Errors
    /// `Invalid` for an inconsistent configuration, `Unsupported` for an unsafe one, `Other` if the address
    /// cannot be bound.
    pub fn new(config: TcpConfig) -> Result<Self> {
        if config.streams == 0 || config.frame_bytes_max == 0 {
            return Err(Error::invalid(
                "a connection needs at least one stream and frames of at least one byte",
            ));
        }
        if config.listen.ip().is_unspecified() && config.advertise.is_empty() {
            return Err(Error::invalid(format!(
                "peers cannot reach this process as {}: name the addresses that they should use",
                config.listen
            )));
        }
        config.security.check(&config.listen)?;
        let server = TcpServer::start(&config)?;
        let mut addresses = config.advertise.clone();
        if addresses.is_empty() {
            addresses.push(server.address);
        }
        Ok(Tcp { config, addresses, server })
    }

    /// Returns the bound address, including the actual port.
    pub fn listens_on(&self) -> SocketAddr {
        self.server.address
    }
}

/// Address of a region, written as `key@address,address`.
struct TcpAddress {
    key: RegionKey,
    sockets: Vec<SocketAddr>,
}

impl TcpAddress {
    /// Returns the first message of stream number `stream` to the region.
    fn hello(&self, region: &Descriptor, stream: u16) -> protocol::TcpHello {
        protocol::TcpHello { key: self.key, epoch: region.epoch, stream }
    }

    fn encode(&self) -> String {
        let sockets: Vec<String> = self.sockets.iter().map(SocketAddr::to_string).collect();
        format!("{}@{}", self.key.to_hex(), sockets.join(","))
    }

    fn decode(descriptor: &Descriptor) -> Result<Self> {
        let parse = || {
            let (key, sockets) = descriptor.address.split_once('@')?;
            let sockets = sockets.split(',').map(|socket| socket.parse().ok()).collect::<Option<_>>()?;
            Some(TcpAddress { key: RegionKey::from_hex(key)?, sockets })
        };
        parse().filter(|_| descriptor.transport == NAME).ok_or_else(|| {
            Error::new(ErrorKind::Closed, format!("{descriptor:?} is not reached over TCP, or is damaged"))
        })
    }
}

/// Returns the first message of a stream to `region`.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn greeting(region: &Descriptor) -> Option<Vec<u8>> {
    Some(TcpAddress::decode(region).ok()?.hello(region, 0).encode().to_vec())
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Memory that is already registered is deregistered first.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let bytes = memory.size_bytes();
        let region = || TcpRegion::new(memory.clone(), access);
        let (key, epoch) = self.server.regions.add(&memory, region)?;
        let address = TcpAddress { key, sockets: self.addresses.clone() };
        Ok(Descriptor { transport: NAME.into(), address: address.encode(), epoch, bytes })
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.server.regions.remove(TcpAddress::decode(region)?.key, region.epoch)
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let address = TcpAddress::decode(region)?;
        Ok(Box::new(Driven::start(connection::TcpConnection::open(local, &self.config, &address, region)?)?))
    }
}
