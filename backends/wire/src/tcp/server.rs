//! The passive end: an accepting thread, a thread per stream, and a fence around each region.

use super::TcpConfig;
use super::inbox::ReceiveBuffer;
use super::protocol::{TcpHello, Welcome};
use super::serve::{say, serve};
use crate::answer::GrantStatus;
use crate::pending::{PendingStream, PendingStreams};
use crate::pinned::PinnedRange;
use crate::region::range;
use crate::regions::{FencedRegion, RegionTable};
use crate::security::Security;
use crate::service::ServiceThread;
use crate::stream::SecureStream;
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

/// Timeout for a TLS handshake and a hello, after which a pending stream is closed.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed accept, most likely for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Memory that peers may access.
pub(super) struct TcpRegion {
    /// Held until the last user's stream has ended.
    place: Mutex<Option<PinnedRange>>,
    address: usize,
    bytes: u64,
    access: RemoteAccess,
    users: Mutex<RegionUsers>,
    left: Condvar,
}

#[derive(Default)]
struct RegionUsers {
    /// Whether new streams are refused.
    revoked: bool,
    next: u64,
    sockets: BTreeMap<u64, TcpStream>,
}

/// A stream with access to a region, whose memory stays in place until its last user is gone.
pub(super) struct RegionUser {
    region: Arc<TcpRegion>,
    number: u64,
}

impl RegionUser {
    pub(super) fn access(&self) -> RemoteAccess {
        self.region.access
    }

    /// Returns the address of a range; `None` if it exceeds the region.
    pub(super) fn address(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let range = range(offset, bytes, self.region.bytes).ok()?;
        Some((self.region.address + range.start) as *mut u8)
    }
}

impl Drop for RegionUser {
    fn drop(&mut self) {
        self.region.users().sockets.remove(&self.number);
        self.region.left.notify_all();
    }
}

impl TcpRegion {
    pub(super) fn new(memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Self> {
        let place = PinnedRange::new(memory)?;
        let (address, bytes) = (place.address(0, 0)? as usize, place.bytes());
        let (users, left) = Default::default();
        Ok(TcpRegion { place: Mutex::new(Some(place)), address, bytes, access, users, left })
    }

    fn users(&self) -> MutexGuard<'_, RegionUsers> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a stream; `None` once the region is fenced.
    fn enter(self: Arc<Self>, socket: &TcpStream) -> Option<RegionUser> {
        let number = {
            let mut users = self.users();
            if users.revoked {
                return None;
            }
            let number = users.next;
            users.next += 1;
            users.sockets.insert(number, socket.try_clone().ok()?);
            number
        };
        Some(RegionUser { region: self, number })
    }
}

impl FencedRegion for TcpRegion {
    fn is_of(&self, memory: &Arc<dyn SharedMemory>) -> bool {
        memory.mapping().is_some_and(|mapping| mapping.address == self.address)
    }

    /// Closes every stream and returns when none can write any more. A closed socket still yields what it had
    /// received, and then the end, so this waits no longer than a copy takes.
    fn fence(&self) -> Result<()> {
        let mut users = self.users();
        users.revoked = true;
        for socket in users.sockets.values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        while !users.sockets.is_empty() {
            users = self.left.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }
}

/// State shared by the threads.
struct TcpServerState {
    regions: Arc<RegionTable<TcpRegion>>,
    pending: PendingStreams,
    streams: AtomicUsize,
    streams_max: usize,
    silence: Duration,
    security: Security,
}

/// Counts a thread for as long as it runs.
struct ThreadCount<'a>(&'a AtomicUsize);

impl<'a> ThreadCount<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        ThreadCount(counter)
    }
}

impl Drop for ThreadCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The accepting thread, and the regions that peers may access.
pub(super) struct TcpServer {
    pub(super) regions: Arc<RegionTable<TcpRegion>>,
    /// The bound address.
    pub(super) address: SocketAddr,
    thread: Option<ServiceThread>,
}

impl TcpServer {
    pub(super) fn start(config: &TcpConfig) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::new(ErrorKind::Other, format!("listen on {} for KV: {error}", config.listen))
        };
        let listener = TcpListener::bind(config.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let regions = Arc::new(RegionTable::new()?);
        let shared = Arc::new(TcpServerState {
            regions: regions.clone(),
            pending: PendingStreams::default(),
            streams: AtomicUsize::new(0),
            streams_max: config.streams_max,
            silence: config.silence,
            security: config.security.clone(),
        });
        let serve = move |woken: UnixStream| accept(&listener, &woken, &shared);
        let thread = ServiceThread::spawn("tcp-accept", serve).map_err(failed)?;
        Ok(TcpServer { regions, address, thread: Some(thread) })
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.thread = None;
        self.regions.end();
    }
}

impl TcpServerState {
    /// Attaches a stream to the region that it requests. Bytes sent before its key has been verified are used
    /// for nothing else.
    fn receive(&self, socket: TcpStream, pending_stream: PendingStream) -> io::Result<()> {
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let mut link = self.security.welcome(socket, self.silence, deadline)?;
        let mut inbox = ReceiveBuffer::new();
        let hello: [u8; TcpHello::BYTES] = inbox.take_by(&mut link, deadline)?;
        let Some(hello) = TcpHello::decode(&hello) else {
            return welcome(&mut link, GrantStatus::Version, 0);
        };
        let region = self.regions.find(hello.key, hello.epoch).ok();
        let user = region.and_then(|region| region.enter(link.socket()));
        let Some(user) = user else {
            return welcome(&mut link, GrantStatus::Unknown, 0);
        };
        if self.streams.load(Ordering::Relaxed) >= self.streams_max {
            return welcome(&mut link, GrantStatus::Exhausted, 0);
        }
        let _stream = ThreadCount::new(&self.streams);
        drop(pending_stream);
        welcome(&mut link, GrantStatus::granted(user.access()), user.region.bytes)?;
        link.socket().set_read_timeout(None)?;
        link.socket().set_write_timeout(None)?;
        link.stay_awake();
        serve(&mut link, &mut inbox, &user)
    }
}

fn welcome(link: &mut SecureStream, answer: GrantStatus, bytes: u64) -> io::Result<()> {
    say(link, &Welcome { answer: answer as u8, bytes }.encode())
}

/// Spawns a thread for every stream, until `woken` closes.
fn accept(listener: &TcpListener, woken: &UnixStream, shared: &Arc<TcpServerState>) {
    loop {
        let mut entries = [crate::poll::readable(woken), crate::poll::readable(listener)];
        if crate::poll::wait(&mut entries, None).is_err() || entries[0].revents != 0 {
            return;
        }
        match listener.accept() {
            Ok((socket, peer)) => {
                let Ok(pending_stream) = shared.pending.enter(peer.ip(), &socket) else { continue };
                let shared = shared.clone();
                let receive = move || {
                    // how a peer disconnected does not matter here
                    let _ =
                        socket.set_nonblocking(false).and_then(|()| shared.receive(socket, pending_stream));
                };
                let _ = std::thread::Builder::new().name("tcp-stream".into()).spawn(receive);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }
}
