//! The passive end: one thread that hands out regions, and takes them back.

use super::control::CopyFlags;
use super::hello::{ShmHello, send_answer, user_of};
use super::socket_address;
use crate::answer::GrantStatus;
use crate::key::RegionKey;
use crate::poll;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::RemoteAccess;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Peers, and sockets that have not said what they want yet: each costs two descriptors here.
const PEERS_MAX: usize = 4096;
const STRANGERS_MAX: usize = 64;
/// For a hello: its sender has nothing to do before it.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// After an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// For a copy of one chunk, which takes a millisecond: whoever needs longer is stopped.
const COPY_TIMEOUT: Duration = Duration::from_millis(100);

/// Memory that peers may map.
pub(super) struct ShmRegion {
    memory: Arc<dyn SharedMemory>,
    access: RemoteAccess,
    epoch: u64,
    peers: Mutex<Peers>,
}

#[derive(Default)]
struct Peers {
    /// Nobody else gets the region.
    revoked: bool,
    list: Vec<Arc<Peer>>,
}

/// A process that has mapped a region.
struct Peer {
    socket: UnixStream,
    control: CopyFlags,
}

impl Peer {
    /// Whether its process has ended or closed the way; it writes nothing any more then, since a socket closes
    /// after the memory of a process that ends.
    fn is_gone(&self) -> bool {
        let mut entry = poll::readable(&self.socket);
        let asked = poll::wait(std::slice::from_mut(&mut entry), Some(Duration::ZERO));
        asked.is_ok() && entry.revents & libc::POLLHUP != 0
    }
}

impl ShmRegion {
    pub(super) fn new(memory: Arc<dyn SharedMemory>, access: RemoteAccess, epoch: u64) -> Self {
        ShmRegion { memory, access, epoch, peers: Mutex::default() }
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends every grant, and returns when no peer can write any more.
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

    /// Files for a new peer: the region's and its control page's.
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

/// Tells a peer why it gets nothing; it may have gone already.
fn refuse(socket: &UnixStream, answer: GrantStatus) -> GrantStatus {
    let _ = send_answer(socket, answer, &[]);
    answer
}

type Regions = Mutex<BTreeMap<RegionKey, Arc<ShmRegion>>>;

/// The thread, its socket's name, and what it hands out.
pub(super) struct ShmServer {
    name: String,
    regions: Arc<Regions>,
    /// Wakes the thread, and ends it when it closes.
    wake: Option<UnixStream>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn lock(regions: &Regions) -> MutexGuard<'_, BTreeMap<RegionKey, Arc<ShmRegion>>> {
    regions.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ShmServer {
    pub(super) fn start() -> Result<Self> {
        let failed = |error: io::Error| Error::new(ErrorKind::Other, format!("serve shared memory: {error}"));
        let name = format!("mixfleet-{}", RegionKey::random()?.to_hex());
        let listener = UnixListener::bind_addr(&socket_address(&name)?).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let (wake, woken) = UnixStream::pair().map_err(failed)?;
        let regions = Arc::new(Regions::default());
        let mut desk = Desk { listener, woken, regions: regions.clone(), strangers: Vec::new() };
        let thread =
            std::thread::Builder::new().name("shm".into()).spawn(move || desk.serve()).map_err(failed)?;
        Ok(ShmServer { name, regions, wake: Some(wake), thread: Some(thread) })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Hands `region` out from now on, and the same memory under no older key.
    pub(super) fn add(&self, key: RegionKey, region: ShmRegion) -> Result<()> {
        let mut regions = lock(&self.regions);
        let same =
            |other: &ShmRegion| std::ptr::addr_eq(Arc::as_ptr(&other.memory), Arc::as_ptr(&region.memory));
        let older = regions.iter().find(|(_, other)| same(other)).map(|(&key, other)| (key, other.clone()));
        if let Some((key, other)) = older {
            other.fence()?;
            regions.remove(&key);
        }
        regions.insert(key, Arc::new(region));
        Ok(())
    }

    /// Takes a region back.
    pub(super) fn remove(&self, key: RegionKey, epoch: u64) -> Result<()> {
        let mut regions = lock(&self.regions);
        let Some(region) = regions.get(&key).filter(|region| region.epoch == epoch) else {
            let detail = format!("no region is registered under this key and epoch {epoch}");
            return Err(Error::new(ErrorKind::Closed, detail));
        };
        region.fence()?;
        regions.remove(&key);
        Ok(())
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for region in lock(&self.regions).values() {
            // a peer that is stopped keeps the pages; who owns the memory was told to deregister it first
            let _ = region.fence();
        }
    }
}

/// What the thread works on.
struct Desk {
    listener: UnixListener,
    woken: UnixStream,
    regions: Arc<Regions>,
    strangers: Vec<Stranger>,
}

/// A socket of this user that has not said yet what it wants.
struct Stranger {
    socket: UnixStream,
    since: Instant,
    heard: Vec<u8>,
}

impl Desk {
    fn serve(&mut self) {
        loop {
            let peers = self.drop_gone_peers();
            let mut entries = vec![poll::readable(&self.woken), poll::readable(&self.listener)];
            entries.extend(self.strangers.iter().map(|stranger| poll::readable(&stranger.socket)));
            entries
                .extend(peers.iter().map(|peer| libc::pollfd { events: 0, ..poll::readable(&peer.socket) }));
            let timeout = (!self.strangers.is_empty()).then_some(HELLO_TIMEOUT);
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

    /// Peers that are still there, over all regions.
    fn drop_gone_peers(&self) -> Vec<Arc<Peer>> {
        let mut all = Vec::new();
        for region in lock(&self.regions).values() {
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
                // out of descriptors: whoever waits is there still when some have closed
                Err(_) => return std::thread::sleep(ACCEPT_PAUSE),
            };
            // SAFETY: asks for a number.
            let user = unsafe { libc::geteuid() };
            let ours = user_of(&socket).is_ok_and(|peer| peer == user);
            if !ours || self.strangers.len() >= STRANGERS_MAX || peers >= PEERS_MAX {
                refuse(&socket, if ours { GrantStatus::Exhausted } else { GrantStatus::Unknown });
            } else if socket.set_nonblocking(true).is_ok() {
                self.strangers.push(Stranger { socket, since: Instant::now(), heard: Vec::new() });
            }
        }
    }

    /// Answers those who have said all, and drops those who take too long.
    fn hear(&mut self) {
        for mut stranger in std::mem::take(&mut self.strangers) {
            let mut bytes = [0; ShmHello::BYTES];
            let room = ShmHello::BYTES - stranger.heard.len();
            match stranger.socket.read(&mut bytes[..room]) {
                Ok(0) => continue,
                Ok(read) => stranger.heard.extend(&bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => continue,
            }
            match <&[u8; ShmHello::BYTES]>::try_from(&stranger.heard[..]) {
                Ok(hello) => self.answer(stranger.socket, hello),
                Err(_) if stranger.since.elapsed() < HELLO_TIMEOUT => self.strangers.push(stranger),
                Err(_) => {}
            }
        }
    }

    fn answer(&self, socket: UnixStream, hello: &[u8; ShmHello::BYTES]) {
        let Some(hello) = ShmHello::decode(hello) else {
            refuse(&socket, GrantStatus::Version);
            return;
        };
        let region = lock(&self.regions).get(&hello.key).cloned();
        match region.filter(|region| region.epoch == hello.epoch) {
            // a refusal has been sent
            Some(region) => drop(region.grant(socket)),
            None => drop(refuse(&socket, GrantStatus::Unknown)),
        }
    }
}
