//! The passive end: one thread that grants and revokes regions.

use super::control::CopyFlags;
use super::hello::{ShmHello, send_answer, user_of};
use super::socket_address;
use crate::answer::GrantStatus;
use crate::key::RegionKey;
use crate::poll;
use crate::regions::{FencedRegion, RegionTable};
use crate::service::ServiceThread;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::RemoteAccess;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Limit on peers and pending sockets together; each takes two descriptors here.
const PEERS_MAX: usize = 4096;
const PENDING_MAX: usize = 64;
/// Timeout for a hello, which its sender has ready at once.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Timeout for the copy of one chunk, which takes a millisecond; a peer that takes longer is stopped.
const COPY_TIMEOUT: Duration = Duration::from_millis(100);

/// Memory that peers may map.
pub(super) struct ShmRegion {
    memory: Arc<dyn SharedMemory>,
    access: RemoteAccess,
    peers: Mutex<Peers>,
}

#[derive(Default)]
struct Peers {
    /// Whether further grants are refused.
    revoked: bool,
    list: Vec<Arc<Peer>>,
}

/// A process that has mapped a region.
struct Peer {
    socket: UnixStream,
    control: CopyFlags,
}

impl Peer {
    /// Whether its process has ended or disconnected; either way it writes nothing any more, because a
    /// process's sockets close after its memory is gone.
    fn is_gone(&self) -> bool {
        let mut entry = poll::readable(&self.socket);
        let asked = poll::wait(std::slice::from_mut(&mut entry), Some(Duration::ZERO));
        asked.is_ok() && entry.revents & libc::POLLHUP != 0
    }
}

impl ShmRegion {
    pub(super) fn new(memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Self {
        ShmRegion { memory, access, peers: Mutex::default() }
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the files for a new peer: the region and its control page.
    fn grant(&self, socket: UnixStream) -> std::result::Result<(), GrantStatus> {
        let mut peers = self.peers();
        if peers.revoked {
            return Err(refuse(&socket, GrantStatus::Unknown));
        }
        let exhausted = |_| GrantStatus::Exhausted;
        let given = CopyFlags::new().map_err(exhausted).and_then(|(control, control_file)| {
            let file = self.memory.mapping().and_then(|mapping| mapping.fd).ok_or(GrantStatus::Exhausted)?;
            Ok((file, control, control_file))
        });
        let (file, control, control_file) = given.map_err(|answer| refuse(&socket, answer))?;
        let send = |answer, file| send_answer(&socket, answer, &[file, control_file.as_raw_fd()]);
        let sent = match self.access {
            RemoteAccess::Write => send(GrantStatus::Write, file),
            RemoteAccess::ReadWrite => send(GrantStatus::ReadWrite, file),
            RemoteAccess::Read => File::open(format!("/proc/self/fd/{file}"))
                .and_then(|readable| send(GrantStatus::Read, readable.as_raw_fd())),
        };
        if sent.is_err() {
            return Err(refuse(&socket, GrantStatus::Exhausted));
        }
        peers.list.push(Arc::new(Peer { socket, control }));
        Ok(())
    }
}

impl FencedRegion for ShmRegion {
    fn is_of(&self, memory: &Arc<dyn SharedMemory>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.memory), Arc::as_ptr(memory))
    }

    /// Revokes every grant, and returns when no peer can write any more.
    fn fence(&self) -> Result<()> {
        let mut peers = self.peers();
        peers.revoked = true;
        peers.list.iter().for_each(|peer| peer.control.revoke());
        let start = Instant::now();
        let mut stuck = peers.list.clone();
        loop {
            stuck.retain(|peer| peer.control.is_copying() && !peer.is_gone());
            if stuck.is_empty() || start.elapsed() > COPY_TIMEOUT {
                break;
            }
            std::thread::yield_now();
        }
        if !stuck.is_empty() && self.access.may_write() {
            crate::pinned::renew(&*self.memory).map_err(|error| {
                let detail = format!(
                    "a peer is stopped in the middle of a copy, and its pages cannot be replaced ({error}): \
                     leave this memory unused, end that process, or try again"
                );
                Error::new(ErrorKind::Timeout, detail)
            })?;
        }
        peers.list.clear();
        Ok(())
    }
}

/// Tells a peer why it was refused; it may have disconnected already.
fn refuse(socket: &UnixStream, answer: GrantStatus) -> GrantStatus {
    let _ = send_answer(socket, answer, &[]);
    answer
}

/// The thread, the name of its socket, and the regions it serves.
pub(super) struct ShmServer {
    pub(super) name: String,
    pub(super) regions: Arc<RegionTable<ShmRegion>>,
    thread: Option<ServiceThread>,
}

impl ShmServer {
    pub(super) fn start() -> Result<Self> {
        let failed = |error: io::Error| Error::new(ErrorKind::Other, format!("serve shared memory: {error}"));
        let name = format!("mixfleet-{}", RegionKey::random()?.to_hex());
        let listener = UnixListener::bind_addr(&socket_address(&name)?).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let regions = Arc::new(RegionTable::new()?);
        let served = regions.clone();
        let serve =
            move |woken| ServerThread { listener, woken, regions: served, pending: Vec::new() }.serve();
        let thread = ServiceThread::spawn("shm", serve).map_err(failed)?;
        Ok(ShmServer { name, regions, thread: Some(thread) })
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.thread = None;
        self.regions.end();
    }
}

/// State of the server thread.
struct ServerThread {
    listener: UnixListener,
    woken: UnixStream,
    regions: Arc<RegionTable<ShmRegion>>,
    pending: Vec<PendingSocket>,
}

/// A connected socket that has not sent its hello yet.
struct PendingSocket {
    socket: UnixStream,
    since: Instant,
    heard: Vec<u8>,
}

impl ServerThread {
    fn serve(&mut self) {
        loop {
            let peers = self.drop_gone_peers();
            let mut entries = vec![poll::readable(&self.woken), poll::readable(&self.listener)];
            entries.extend(self.pending.iter().map(|peer| poll::readable(&peer.socket)));
            entries
                .extend(peers.iter().map(|peer| libc::pollfd { events: 0, ..poll::readable(&peer.socket) }));
            let timeout = (!self.pending.is_empty()).then_some(HELLO_TIMEOUT);
            let woken = poll::wait(&mut entries, timeout);
            if woken.is_err() || entries[0].revents != 0 {
                return;
            }
            if entries[1].revents != 0 {
                self.accept(peers.len());
            }
            self.hear();
        }
    }

    /// Drops peers that are gone, over all regions, and returns the others.
    fn drop_gone_peers(&self) -> Vec<Arc<Peer>> {
        let mut all = Vec::new();
        for region in self.regions.all() {
            let mut peers = region.peers();
            peers.list.retain(|peer| !peer.is_gone());
            all.extend(peers.list.iter().cloned());
        }
        all
    }

    fn accept(&mut self, peers: usize) {
        loop {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // out of descriptors: pending peers can be accepted once some have closed
                Err(_) => return std::thread::sleep(ACCEPT_PAUSE),
            };
            // SAFETY: only returns a number.
            let user = unsafe { libc::geteuid() };
            let ours = user_of(&socket).is_ok_and(|peer| peer == user);
            if !ours || self.pending.len() >= PENDING_MAX || peers >= PEERS_MAX {
                refuse(&socket, if ours { GrantStatus::Exhausted } else { GrantStatus::Unknown });
            } else if socket.set_nonblocking(true).is_ok() {
                self.pending.push(PendingSocket { socket, since: Instant::now(), heard: Vec::new() });
            }
        }
    }

    /// Answers sockets that have sent their hello, and drops those that time out.
    fn hear(&mut self) {
        for mut peer in std::mem::take(&mut self.pending) {
            let mut bytes = [0; ShmHello::BYTES];
            let room = ShmHello::BYTES - peer.heard.len();
            match peer.socket.read(&mut bytes[..room]) {
                Ok(0) => continue,
                Ok(read) => peer.heard.extend(&bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => continue,
            }
            match <&[u8; ShmHello::BYTES]>::try_from(&peer.heard[..]) {
                Ok(hello) => self.answer(peer.socket, hello),
                Err(_) if peer.since.elapsed() < HELLO_TIMEOUT => self.pending.push(peer),
                Err(_) => {}
            }
        }
    }

    fn answer(&self, socket: UnixStream, hello: &[u8; ShmHello::BYTES]) {
        let Some(hello) = ShmHello::decode(hello) else {
            refuse(&socket, GrantStatus::Version);
            return;
        };
        match self.regions.find(hello.key, hello.epoch) {
            // a refusal was sent
            Ok(region) => drop(region.grant(socket)),
            Err(_) => drop(refuse(&socket, GrantStatus::Unknown)),
        }
    }
}
