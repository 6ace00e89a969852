//! Both ends anywhere that a network joins.
//!
//! A way is several streams. The user cuts batches into frames and sends each on the stream that has room,
//! straight from its memory; the owner has a thread for each stream, which receives straight into the region
//! and answers when a frame has landed. [`protocol`] is what they say.
//!
//! Bytes move whatever the user does meanwhile: each open way has a thread for when the user is not waiting
//! ([`driven`]). One thread for all ways would be fewer, but one core would then encrypt for all peers, and the
//! owner has a thread for each stream anyway. Whoever wants more than one core to send to a peer opens several ways.

mod driven;
mod flow;
#[cfg(test)]
mod hostile;
mod inbox;
mod parts;
mod pending;
mod protocol;
mod serve;
mod server;
mod stream;

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
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const NAME: &str = "tcp";

/// How a process reaches others over TCP, and is reached.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where peers are accepted; port 0 takes any free one.
    pub listen: SocketAddr,
    /// How peers reach this process, the best way first; empty: as it listens.
    pub advertise: Vec<SocketAddr>,
    /// Streams of a way that this end opens.
    pub streams: u16,
    /// Longest frame. Longer pieces are cut, and go on several streams at once.
    pub frame_bytes_max: u64,
    /// What one stream may have under way. More only leaves the caches before it is received, and slows both
    /// ends; a long fat network needs bandwidth times delay, over all streams.
    pub window_bytes: u64,
    /// For one stream to open, its handshake included.
    pub connect_timeout: Duration,
    /// After which a peer's host that says nothing counts as gone, or a peer that takes nothing.
    pub silence: Duration,
    /// Streams that this end serves, of all peers together. Each has a thread.
    pub streams_max: usize,
    /// Who may talk to whom.
    pub security: Security,
}

impl TcpConfig {
    /// For peers on this host.
    pub fn loopback() -> Self {
        TcpConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Security::LoopbackOnly)
    }

    /// With the streams and the length of frames that were fastest where they were measured (docs/results/wire.md).
    pub fn new(listen: SocketAddr, security: Security) -> Self {
        // Between processes of one host a second stream only takes a core from the others; but who decrypts needs two.
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

/// Joins ends over TCP.
///
/// [`deregister`](Transport::deregister) closes every stream to the region and returns when the last of them
/// has stopped to write.
pub struct Tcp {
    config: TcpConfig,
    addresses: Vec<SocketAddr>,
    desk: TcpServer,
    next_epoch: AtomicU64,
}

impl Tcp {
    /// Listens for peers.
    ///
    /// # Errors
    /// `Invalid` for a config that cannot be, `Unsupported` for one that is not safe, `Other` when the
    /// address cannot be listened on.
    pub fn new(config: TcpConfig) -> Result<Self> {
        if config.streams == 0 || config.frame_bytes_max == 0 {
            return Err(Error::invalid("a way needs at least one stream and frames of at least one byte"));
        }
        if config.listen.ip().is_unspecified() && config.advertise.is_empty() {
            return Err(Error::invalid(format!(
                "peers cannot reach this process as {}: say which addresses they shall use",
                config.listen
            )));
        }
        config.security.check(&config.listen)?;
        let epoch =
            u64::from_le_bytes(RegionKey::random()?.0[..8].try_into().expect("eight of sixteen bytes"));
        let desk = TcpServer::start(&config)?;
        let mut addresses = config.advertise.clone();
        if addresses.is_empty() {
            addresses.push(desk.address());
        }
        Ok(Tcp { config, addresses, desk, next_epoch: AtomicU64::new(epoch) })
    }

    /// Where it listens: the port is known, whatever the config said.
    pub fn listens_on(&self) -> SocketAddr {
        self.desk.address()
    }
}

/// Where a region is: `key@address,address`.
struct Address {
    key: RegionKey,
    sockets: Vec<SocketAddr>,
}

impl Address {
    fn encode(&self) -> String {
        let sockets: Vec<String> = self.sockets.iter().map(SocketAddr::to_string).collect();
        format!("{}@{}", self.key.to_hex(), sockets.join(","))
    }

    fn decode(descriptor: &Descriptor) -> Result<Self> {
        let parse = || {
            let (key, sockets) = descriptor.address.split_once('@')?;
            let sockets = sockets.split(',').map(|socket| socket.parse().ok()).collect::<Option<_>>()?;
            Some(Address { key: RegionKey::from_hex(key)?, sockets })
        };
        parse().filter(|_| descriptor.transport == NAME).ok_or_else(|| {
            Error::new(ErrorKind::Closed, format!("{descriptor:?} is not reached over TCP, or is damaged"))
        })
    }
}

/// What a user says first on a stream to `region`.
pub(crate) fn greeting(region: &Descriptor) -> Option<Vec<u8>> {
    let key = Address::decode(region).ok()?.key;
    Some(protocol::TcpHello { key, epoch: region.epoch, stream: 0 }.encode().to_vec())
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Memory that is registered already is deregistered first.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let bytes = memory.size_bytes();
        let key = RegionKey::random()?;
        let epoch = self.next_epoch.fetch_add(1, Ordering::Relaxed);
        self.desk.add(key, TcpRegion::new(memory, access, epoch)?);
        let address = Address { key, sockets: self.addresses.clone() };
        Ok(Descriptor { transport: NAME.into(), address: address.encode(), epoch, bytes })
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.desk.remove(Address::decode(region)?.key, region.epoch)
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let address = Address::decode(region)?;
        Ok(Box::new(Driven::start(flow::TcpFlow::open(local, &self.config, &address, region)?)?))
    }
}
