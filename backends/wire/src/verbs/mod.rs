//! One-sided RDMA over reliable connected queue pairs: InfiniBand and RoCE.
//!
//! A region is registered on every NIC; an endpoint has some queue pairs on each NIC that both ends can use,
//! and distributes slices over them in turn. The ends exchange the values of [`offer`], which are carried
//! either by this transport ([`VerbsOptions::listen`]) or by the layer above, through [`Verbs::open_half`]
//! and [`Verbs::accept`].
//!
//! The NIC moves posted work in the background: `queue_pairs * depth` slices per NIC, 16 MiB by default. The
//! rest is posted when the user next writes, reads or waits.
//!
//! Fencing: each registration has keys of its own, which the NIC itself enforces and which end with it.
//! `deregister` first destroys all queue pairs that lead to the region, then its keys.

mod control;
mod device;
mod endpoint;
pub mod offer;
mod owner;
mod pipe;
mod queue;
mod status;

use crate::key::RegionKey;
use crate::pinned::PinnedRange;
use crate::poll;
use crate::security::Security;
use control::ControlListener;
use device::VerbsNic;
pub use endpoint::VerbsEndpoint;
use endpoint::{HalfRail, RdmaCarrier};
use ibverbs_sys::ibv_access_flags;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_hal::{Absent, Error, ErrorKind, Result};
use offer::{ConnectReply, ConnectRequest, RequestedRail};
use owner::VerbsOwner;
pub(crate) use pipe::VerbsPipe;
use queue::VerbsRegistration;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

const NAME: &str = "verbs";

/// Options for opening [`Verbs`].
#[derive(Clone, Debug)]
pub struct VerbsOptions {
    /// Names of the RDMA devices, nearest first; empty means all, in the order of libibverbs.
    pub devices: Vec<String>,
    /// Address on which to answer connection requests, where port 0 picks a free port; `None` if the layer
    /// above carries requests and replies.
    pub listen: Option<SocketAddr>,
    /// How this exchange, and with it the keys, is protected. RDMA traffic itself is never encrypted.
    pub security: Security,
    /// Number of queue pairs of an endpoint on each NIC.
    pub queue_pairs: usize,
    /// Maximum number of work requests in flight on each queue pair.
    pub depth: u32,
    /// Pieces longer than this are cut into slices, which the queue pairs take in turn.
    pub slice_bytes: u32,
    /// How long a waiter polls the NIC before it sleeps. Sleeping frees a core but costs a wake-up.
    pub spin: Duration,
}

impl Default for VerbsOptions {
    /// Selects all devices, no listener, keys that do not leave this host, 2 queue pairs of depth 128, slices
    /// of 64 KiB and 20 us of polling, which is about what a sleep and wake-up cost.
    fn default() -> Self {
        VerbsOptions {
            devices: Vec::new(),
            listen: None,
            security: Security::LoopbackOnly,
            queue_pairs: 2,
            depth: 128,
            slice_bytes: 64 * 1024,
            spin: Duration::from_micros(20),
        }
    }
}

/// The RDMA transport, using libibverbs.
pub struct Verbs {
    // stops first, since it answers on behalf of the owner
    listener: Option<ControlListener>,
    owner: Arc<VerbsOwner>,
    /// Memories that endpoints send from, by address and length; endpoints of one memory share its
    /// registrations.
    local: Mutex<BTreeMap<(usize, u64), Weak<Local>>>,
    options: VerbsOptions,
}

/// Local memory, with its registration on each NIC.
pub(crate) struct Local {
    registrations: Vec<Arc<VerbsRegistration>>,
    place: Arc<PinnedRange>,
}

/// The decoded address of a descriptor.
#[derive(Serialize, Deserialize)]
struct VerbsAddress {
    key: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    listen: Option<SocketAddr>,
}

/// Queue pairs of an active end that wait for the owner's reply to their request.
pub struct HalfOpen {
    halves: Vec<HalfRail>,
    local: Arc<Local>,
    offer: ConnectRequest,
    options: VerbsOptions,
}

impl HalfOpen {
    /// Returns the request to send to the owner of the region.
    pub fn offer(&self) -> &ConnectRequest {
        &self.offer
    }

    /// Connects the queue pairs to the owner's.
    ///
    /// # Errors
    /// `Invalid` if the reply does not match the request, `Other` if there is no path.
    pub fn join(self, answer: &ConnectReply) -> Result<VerbsEndpoint> {
        RdmaCarrier::join(self.halves, self.local, answer, &self.options)
    }
}

/// A peer's accepted connection to a region. It closes on drop, or with the region.
pub struct Accepted {
    owner: Arc<VerbsOwner>,
    way: u64,
}

impl Drop for Accepted {
    fn drop(&mut self) {
        self.owner.close(self.way);
    }
}

impl Verbs {
    /// Opens the devices.
    ///
    /// # Errors
    /// Why no device is usable, or why requests cannot be answered.
    pub fn open(options: VerbsOptions) -> std::result::Result<Self, Absent> {
        let range = |value: u64, most: u64| (1..=most).contains(&value);
        let VerbsOptions { queue_pairs, depth, slice_bytes, .. } = options;
        if !range(queue_pairs as u64, 64)
            || !range(depth.into(), 16_384)
            || !range(slice_bytes.into(), 1 << 30)
        {
            return Err(Absent::new(format!(
                "RDMA with {queue_pairs} queue pairs (1 to 64) of depth {depth} (1 to 16384) and slices of \
                 {slice_bytes} bytes (1 to 1 GiB) cannot be"
            )));
        }
        let (nics, reasons) = VerbsNic::open_all(&options.devices);
        if nics.is_empty() {
            return Err(Absent::new(format!("no RDMA device can be used: {}", reasons.join("; "))));
        }
        let owner = Arc::new(VerbsOwner::new(nics.into_iter().map(Arc::new).collect()));
        let listen = |address| {
            options.security.check(&address).map_err(|error| Absent::new(format!("RDMA: {error}")))?;
            ControlListener::new(address, options.security.clone(), owner.clone())
                .map_err(|error| Absent::new(format!("RDMA: cannot listen on {address}: {error}")))
        };
        let listener = options.listen.map(listen).transpose()?;
        Ok(Verbs { listener, owner, local: Mutex::default(), options })
    }

    /// Returns the devices in use, nearest first, each with its name and packet payload in bytes.
    pub fn devices(&self) -> Vec<(String, u32)> {
        self.owner.nics.iter().map(|nic| (nic.name.clone(), nic.port.mtu_bytes)).collect()
    }

    /// Creates queue pairs for a connection between `local` and a peer's region.
    ///
    /// # Errors
    /// `Unsupported` if `local` has no address, `OutOfMemory` if it cannot be pinned.
    pub fn open_half(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<HalfOpen> {
        let address = address(region)?;
        let local = self.local(local)?;
        let VerbsOptions { queue_pairs, depth, .. } = self.options;
        let make = |(nic, registration): (&Arc<VerbsNic>, &Arc<VerbsRegistration>)| {
            HalfRail::new(nic, registration.clone(), queue_pairs, depth.min(nic.depth_max))
        };
        let halves: Vec<HalfRail> =
            self.owner.nics.iter().zip(&local.registrations).map(make).collect::<Result<_>>()?;
        let rails = self.owner.nics.iter().zip(&halves);
        let rails = rails.map(|(nic, half)| RequestedRail { port: nic.port.clone(), queues: half.queues() });
        let rails = rails.collect();
        let offer = ConnectRequest { version: offer::VERSION, key: address.key, epoch: region.epoch, rails };
        Ok(HalfOpen { halves, local, offer, options: self.options.clone() })
    }

    /// Accepts a peer's request by creating the queue pairs of this end.
    ///
    /// # Errors
    /// `Closed` if there is no such region, `Unsupported` if the ends have no kind of address in common.
    pub fn accept(&self, offer: &ConnectRequest) -> Result<(ConnectReply, Accepted)> {
        let (answer, way) = self.owner.accept(offer, None)?;
        Ok((answer, Accepted { owner: self.owner.clone(), way }))
    }

    /// Connects like [`Transport::connect`], but returns the full RDMA endpoint.
    ///
    /// # Errors
    /// As for [`Transport::connect`].
    pub fn connect_verbs(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<VerbsEndpoint> {
        let peer = address(region)?.listen.ok_or_else(|| {
            Error::unsupported(
                "the region's owner does not listen; exchange request and reply over another channel",
            )
        })?;
        let half = self.open_half(local, region)?;
        let (answer, control) = control::ask(peer, &self.options.security, half.offer())?;
        let mut endpoint = half.join(&answer)?;
        endpoint.carrier.watch(control)?;
        Ok(endpoint)
    }

    /// Returns the next notice sent with [`VerbsEndpoint::write_with_immediate`], whose data has landed;
    /// `None` if none arrives within `timeout`.
    ///
    /// # Errors
    /// `Closed` if the region is not registered under this epoch.
    pub fn notice(&self, region: &Descriptor, timeout: Duration) -> Result<Option<u32>> {
        /// Maximum time until a deregistered region or a new peer is noticed.
        const LONGEST_SLEEP: Duration = Duration::from_millis(50);
        let key = key(region)?;
        let begin = Instant::now();
        loop {
            if let Some(notice) = self.owner.notice(key, region.epoch)? {
                return Ok(Some(notice));
            }
            let Some(left) = timeout.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            let (inbox, fds) = self.owner.arm(key, region.epoch)?;
            if let Some(notice) = self.owner.notice(key, region.epoch)? {
                return Ok(Some(notice));
            }
            wait_readable(&fds, left.min(LONGEST_SLEEP));
            inbox.iter().for_each(|channel| channel.drain());
        }
    }

    /// Returns `memory` with its registrations, which are created unless another endpoint has them.
    fn local(&self, memory: Arc<dyn SharedMemory>) -> Result<Arc<Local>> {
        let place = Arc::new(PinnedRange::new(memory)?);
        let key = (place.address(0, 0)? as usize, place.bytes());
        let mut cache = self.local.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|_, local| local.strong_count() > 0);
        if let Some(found) = cache.get(&key).and_then(Weak::upgrade) {
            return Ok(found);
        }
        let on = |nic| VerbsRegistration::new(nic, &place, ibv_access_flags(0)).map(Arc::new);
        let registrations = self.owner.nics.iter().map(on).collect::<Result<_>>()?;
        let local = Arc::new(Local { registrations, place });
        cache.insert(key, Arc::downgrade(&local));
        Ok(local)
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        self.listener.take();
        self.owner.regions.end();
    }
}

fn address(region: &Descriptor) -> Result<VerbsAddress> {
    let found = if region.transport == NAME { serde_json::from_str(&region.address).ok() } else { None };
    found.ok_or_else(|| {
        let transport = &region.transport;
        Error::new(
            ErrorKind::Closed,
            format!("a descriptor of '{transport}' does not lead to a region over RDMA"),
        )
    })
}

fn key(region: &Descriptor) -> Result<RegionKey> {
    RegionKey::from_hex(&address(region)?.key)
        .ok_or_else(|| Error::new(ErrorKind::Closed, "the descriptor's key is not 32 hexadecimal digits"))
}

impl Transport for Verbs {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Memory that is already registered gets a new epoch, so that holders of an older descriptor lose
    /// access.
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let bytes = memory.size_bytes();
        let (key, epoch) = self.owner.register(memory, access)?;
        let listen = self.listener.as_ref().map(|listener| listener.address);
        let address = serde_json::to_string(&VerbsAddress { key: key.to_hex(), listen })
            .map_err(|error| Error::new(ErrorKind::Other, format!("an address without text: {error}")))?;
        Ok(Descriptor { transport: NAME.into(), address, epoch, bytes })
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.owner.regions.remove(key(region)?, region.epoch)
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        Ok(Box::new(self.connect_verbs(local, region)?))
    }
}

/// Parses `bytes` as a request and as a reply.
///
/// # Panics
/// If a message differs after a round trip, if a path exceeds what both ends support, or if an owner without
/// regions accepts a request.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_words(bytes: &[u8]) {
    if let Ok(offer) = serde_json::from_slice::<ConnectRequest>(bytes) {
        let text = serde_json::to_vec(&offer).unwrap_or_default();
        assert!(serde_json::from_slice::<ConnectRequest>(&text).is_ok_and(|again| again == offer));
        let ports = || offer.rails.iter().take(8).map(|rail| &rail.port);
        for (active, owner) in ports().flat_map(|active| ports().map(move |owner| (active, owner))) {
            let path = offer::Path::between(active, owner);
            assert!(
                path.is_none_or(|path| path.active.kind == path.owner.kind && path.reads <= active.reads_out)
            );
        }
        assert!(VerbsOwner::new(Vec::new()).accept(&offer, None).is_err());
    }
    if let Ok(answer) = serde_json::from_slice::<ConnectReply>(bytes) {
        let text = serde_json::to_vec(&answer).unwrap_or_default();
        assert!(serde_json::from_slice::<ConnectReply>(&text).is_ok_and(|again| again == answer));
    }
}

/// Sleeps until one of `fds` is readable or closed, or until `longest` has passed. Callers loop, so a failure
/// just counts as an early return.
fn wait_readable(fds: &[RawFd], longest: Duration) {
    let mut entries: Vec<libc::pollfd> = fds.iter().map(poll::readable).collect();
    let _ = poll::wait(&mut entries, Some(longest));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_has_a_reason() {
        let names = VerbsOptions { devices: vec!["no-such-nic0".into()], ..VerbsOptions::default() };
        let reason = Verbs::open(names).err().unwrap().reason;
        assert!(reason.starts_with("no RDMA device can be used: "), "{reason}");
        assert!(reason.contains("no-such-nic0") || reason.contains("libibverbs"), "{reason}");
    }

    #[test]
    fn options_out_of_range_are_refused() {
        let default = VerbsOptions::default;
        for options in [
            VerbsOptions { queue_pairs: 0, ..default() },
            VerbsOptions { depth: 0, ..default() },
            VerbsOptions { slice_bytes: 0, ..default() },
            VerbsOptions { slice_bytes: u32::MAX, ..default() },
        ] {
            assert!(Verbs::open(options).err().unwrap().reason.contains("cannot be"));
        }
    }

    #[test]
    fn descriptors_of_others_are_refused() {
        let region = |transport: &str, address: &str| Descriptor {
            transport: transport.into(),
            address: address.into(),
            epoch: 0,
            bytes: 1,
        };
        for descriptor in [
            region("tcp", r#"{"key":"00112233445566778899aabbccddeeff"}"#),
            region(NAME, "7"),
            region(NAME, r#"{"key":"short"}"#),
        ] {
            assert_eq!(key(&descriptor).err().unwrap().kind, ErrorKind::Closed);
        }
        assert!(key(&region(NAME, r#"{"key":"00112233445566778899aabbccddeeff"}"#)).is_ok());
    }

    #[test]
    fn a_wait_ends_with_its_time_and_with_what_it_waits_for() {
        use std::os::fd::AsRawFd;
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let begin = Instant::now();
        wait_readable(&[here.as_raw_fd()], Duration::from_millis(1));
        assert!(begin.elapsed() >= Duration::from_millis(1));
        drop(there);
        wait_readable(&[here.as_raw_fd()], Duration::from_secs(3600));
    }
}
