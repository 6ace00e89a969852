//! The passive end: a thread that accepts, a thread for each stream, and the fence around each region.

use super::TcpConfig;
use super::inbox::Inbox;
use super::parts::Parts;
use super::pending::{PendingStream, PendingStreams};
use super::protocol::{TcpHello, Welcome};
use super::serve::{send, serve};
use crate::answer::GrantStatus;
use crate::key::RegionKey;
use crate::pinned::PinnedRange;
use crate::region::range;
use crate::security::Security;
use crate::stream::{SecureStream, tune};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::RemoteAccess;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// For a TLS handshake and a hello: after that a stranger is gone.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// After an accept that failed: out of descriptors, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Memory that peers may reach.
pub(super) struct TcpRegion {
    /// Held until the last guest has left.
    place: Mutex<Option<PinnedRange>>,
    address: usize,
    bytes: u64,
    access: RemoteAccess,
    epoch: u64,
    guests: Mutex<RegionUsers>,
    left: Condvar,
}

#[derive(Default)]
struct RegionUsers {
    /// Nobody else gets in.
    revoked: bool,
    next: u64,
    sockets: BTreeMap<u64, TcpStream>,
}

/// A stream that may reach a region. The region's memory stays where it is until the last guest has left.
pub(super) struct RegionUser {
    region: Arc<TcpRegion>,
    number: u64,
}

impl RegionUser {
    pub(super) fn access(&self) -> RemoteAccess {
        self.region.access
    }

    /// Where a range lies; none if it leaves the region.
    pub(super) fn address(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let range = range(offset, bytes, self.region.bytes).ok()?;
        Some((self.region.address + range.start) as *mut u8)
    }
}

impl Drop for RegionUser {
    fn drop(&mut self) {
        self.region.guests().sockets.remove(&self.number);
        self.region.left.notify_all();
    }
}

impl TcpRegion {
    pub(super) fn new(memory: Arc<dyn SharedMemory>, access: RemoteAccess, epoch: u64) -> Result<Self> {
        let place = PinnedRange::new(memory)?;
        let (address, bytes) = (place.address(0, 0)? as usize, place.bytes());
        let (guests, left) = Default::default();
        Ok(TcpRegion { place: Mutex::new(Some(place)), address, bytes, access, epoch, guests, left })
    }

    fn guests(&self) -> MutexGuard<'_, RegionUsers> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a stream in; none after the fence.
    fn enter(self: Arc<Self>, socket: &TcpStream) -> Option<RegionUser> {
        let number = {
            let mut guests = self.guests();
            if guests.revoked {
                return None;
            }
            let number = guests.next;
            guests.next += 1;
            guests.sockets.insert(number, socket.try_clone().ok()?);
            number
        };
        Some(RegionUser { region: self, number })
    }

    /// Closes every stream, and returns when none can write any more. A closed socket gives what had come
    /// already and then the end, so nobody is waited for longer than a copy takes.
    fn fence(&self) {
        let mut guests = self.guests();
        guests.revoked = true;
        for socket in guests.sockets.values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        while !guests.sockets.is_empty() {
            guests = self.left.wait(guests).unwrap_or_else(PoisonError::into_inner);
        }
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// What the threads share.
struct Shared {
    regions: Mutex<BTreeMap<RegionKey, Arc<TcpRegion>>>,
    strangers: PendingStreams,
    streams: AtomicUsize,
    streams_max: usize,
    silence: Duration,
    security: Security,
}

/// Counts a thread as long as it lives.
struct Count<'a>(&'a AtomicUsize);

impl<'a> Count<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Count(counter)
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The thread that accepts, and what it lets peers reach.
pub(super) struct TcpServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// Ends the thread when it closes.
    wake: Option<UnixStream>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TcpServer {
    pub(super) fn start(config: &TcpConfig) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::new(ErrorKind::Other, format!("listen on {} for KV: {error}", config.listen))
        };
        let listener = TcpListener::bind(config.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (wake, woken) = UnixStream::pair().map_err(failed)?;
        let shared = Arc::new(Shared {
            regions: Mutex::default(),
            strangers: PendingStreams::default(),
            streams: AtomicUsize::new(0),
            streams_max: config.streams_max,
            silence: config.silence,
            security: config.security.clone(),
        });
        let accepting = shared.clone();
        let thread = std::thread::Builder::new()
            .name("tcp-accept".into())
            .spawn(move || accept(&listener, &woken, &accepting))
            .map_err(failed)?;
        Ok(TcpServer { shared, address, wake: Some(wake), thread: Some(thread) })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets peers reach `region` from now on, and the same memory under no older key.
    pub(super) fn add(&self, key: RegionKey, region: TcpRegion) {
        let mut regions = self.shared.regions();
        regions.retain(|_, other| {
            let same = other.address == region.address;
            if same {
                other.fence();
            }
            !same
        });
        regions.insert(key, Arc::new(region));
    }

    pub(super) fn remove(&self, key: RegionKey, epoch: u64) -> Result<()> {
        let mut regions = self.shared.regions();
        if regions.get(&key).is_none_or(|region| region.epoch != epoch) {
            let detail = format!("no region is registered under this key and epoch {epoch}");
            return Err(Error::new(ErrorKind::Closed, detail));
        }
        let removed = regions.remove(&key);
        drop(regions);
        if let Some(region) = removed {
            region.fence();
        }
        Ok(())
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let regions = std::mem::take(&mut *self.shared.regions());
        regions.values().for_each(|region| region.fence());
    }
}

impl Shared {
    fn regions(&self) -> MutexGuard<'_, BTreeMap<RegionKey, Arc<TcpRegion>>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a stream to where it belongs. Nothing that it sends before its key has been found is used for
    /// anything else.
    fn receive(&self, socket: TcpStream, stranger: PendingStream) -> io::Result<()> {
        let deadline = Instant::now() + HELLO_TIMEOUT;
        tune(&socket, self.silence)?;
        socket.set_write_timeout(Some(HELLO_TIMEOUT))?;
        let mut link = self.security.accept(socket, deadline)?;
        let mut inbox = Inbox::new();
        let hello: [u8; TcpHello::BYTES] = inbox.take_by(&mut link, deadline)?;
        let Some(hello) = TcpHello::decode(&hello) else {
            return welcome(&mut link, GrantStatus::Version, 0);
        };
        let region = self.regions().get(&hello.key).filter(|region| region.epoch == hello.epoch).cloned();
        let guest = region.and_then(|region| region.enter(link.socket()));
        let Some(guest) = guest else {
            return welcome(&mut link, GrantStatus::Unknown, 0);
        };
        if self.streams.load(Ordering::Relaxed) >= self.streams_max {
            return welcome(&mut link, GrantStatus::Exhausted, 0);
        }
        let _stream = Count::new(&self.streams);
        drop(stranger);
        welcome(&mut link, GrantStatus::granted(guest.access()), guest.region.bytes)?;
        link.socket().set_read_timeout(None)?;
        link.socket().set_write_timeout(None)?;
        link.stay_awake();
        serve(&mut link, &mut inbox, &guest)
    }
}

fn welcome(link: &mut SecureStream, answer: GrantStatus, bytes: u64) -> io::Result<()> {
    let mut words = Welcome { answer: answer as u8, bytes }.encode();
    let mut parts = Parts::default();
    parts.push(words.as_mut_ptr(), words.len() as u64);
    send(link, &mut parts)
}

/// Gives every stream a thread, until `woken` closes.
fn accept(listener: &TcpListener, woken: &UnixStream, shared: &Arc<Shared>) {
    loop {
        let mut entries = [crate::poll::readable(woken), crate::poll::readable(listener)];
        if crate::poll::wait(&mut entries, None).is_err() || entries[0].revents != 0 {
            return;
        }
        match listener.accept() {
            Ok((socket, peer)) => {
                let Ok(stranger) = shared.strangers.enter(peer.ip(), &socket) else { continue };
                let shared = shared.clone();
                let receive = move || {
                    // the socket says the rest: how a peer went away is no news here
                    let _ = socket.set_nonblocking(false).and_then(|()| shared.receive(socket, stranger));
                };
                let _ = std::thread::Builder::new().name("tcp-stream".into()).spawn(receive);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }
}
