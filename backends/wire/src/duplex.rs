//! A protected connection of bytes, on which both ends send and receive at once.

use crate::address::LinkAddress;
use crate::pending::{PendingStream, PendingStreams};
use crate::pipe::{Pipe, SocketPipe};
use crate::poll::Patience;
use crate::security::Security;
#[cfg(target_os = "linux")]
use crate::shm::SharedPipe;
use crate::stream::{SecureStream, remaining};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::io::{self, ErrorKind as IoKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A connection whose ends have shown each other that they may talk, where certificates do that. One by a
/// socket file is between processes of one user.
///
/// Several threads may send, each all of its bytes, if they take turns; one thread at a time receives.
pub struct Duplex {
    pipe: Box<dyn Pipe>,
    /// Where the called end listens.
    address: LinkAddress,
    patience: Mutex<Patience>,
}

impl std::fmt::Debug for Duplex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Duplex({})", self.address)
    }
}

impl Duplex {
    /// Calls `address`. A peer's host that sends no packets for `silence` counts as gone.
    ///
    /// # Errors
    /// `Unsupported` if bytes would leave this host unprotected, `Closed` if no process answers, the peer's
    /// certificate is not of the fleet, or the peer runs as another user.
    pub fn call(
        address: &LinkAddress,
        security: &Security,
        silence: Duration,
        deadline: Instant,
    ) -> Result<Self> {
        let (pipe, address) = match address {
            LinkAddress::Tcp(port) => {
                security.check(port)?;
                (security.call(*port, silence, deadline).and_then(by_socket), address.clone())
            }
            LinkAddress::Rdma(port) => {
                security.check(port)?;
                let stream = security.call(*port, silence, deadline);
                (stream.and_then(|stream| by_rdma(stream, deadline)), address.clone())
            }
            LinkAddress::Unix(path) => {
                let socket = UnixStream::connect(path)
                    .map_err(|error| io::Error::new(error.kind(), format!("connect: {error}")));
                // as the listener calls it
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                (socket.and_then(|socket| by_pages(socket, Some(deadline))), LinkAddress::Unix(path))
            }
        };
        let pipe = pipe.map_err(|error| Error::new(ErrorKind::Closed, error.to_string()))?;
        Ok(Duplex { pipe, address, patience: Mutex::new(Patience::new()) })
    }

    /// Returns a name of the other end, for messages to people.
    pub fn peer(&self) -> String {
        match self.pipe.peer() {
            Some(Ok(peer)) => peer.to_string(),
            Some(Err(error)) => error.to_string(),
            None => self.address.to_string(),
        }
    }

    /// Returns the address at which the called end listens.
    pub fn address(&self) -> &LinkAddress {
        &self.address
    }

    /// Sends all of `parts`, in order. While the peer takes nothing but has sent something, calls
    /// `meanwhile`, which may receive it and then returns true, so that two ends that both send do not
    /// deadlock.
    ///
    /// # Errors
    /// `TimedOut` once the peer has taken nothing for `idle`, and the errors of the connection.
    pub fn send(
        &self,
        parts: &[&[u8]],
        idle: Duration,
        meanwhile: &mut dyn FnMut() -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut left: Vec<&[u8]> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
        let mut moved = Instant::now();
        loop {
            match self.pipe.send(&left) {
                Ok(_) if left.is_empty() => return Ok(()),
                Ok(sent) => {
                    advance(&mut left, sent);
                    moved = Instant::now();
                }
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    if moved.elapsed() >= idle {
                        return Err(io::Error::new(IoKind::TimedOut, "the peer takes no bytes"));
                    }
                    self.pipe.wait_to_send(meanwhile)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives at least one byte into `place`, and returns how many; `None` once `deadline` has passed. A
    /// deadline in the past takes only bytes that have arrived.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the connection, and the errors of the connection.
    pub fn receive(&self, place: &mut [u8], deadline: Option<Instant>) -> io::Result<Option<usize>> {
        loop {
            match self.pipe.receive(place) {
                Ok(0) => return Err(io::Error::new(IoKind::UnexpectedEof, "the peer has closed")),
                Ok(received) => return Ok(Some(received)),
                Err(error) if error.kind() == IoKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            let mut patience = self.patience.lock().unwrap_or_else(PoisonError::into_inner);
            patience.wait_for(&mut &*self.pipe, left)?;
        }
    }

    /// Ends the direction in which this end sends. What the peer still sends is received.
    pub fn end_sending(&self) {
        self.pipe.end_sending();
    }

    /// Ends the connection in both directions.
    pub fn close(&self) {
        self.pipe.close();
    }
}

fn by_socket(stream: SecureStream) -> io::Result<Box<dyn Pipe>> {
    Ok(Box::new(SocketPipe::new(stream)?))
}

/// The calling end, which waits until its deadline, or the called one.
#[cfg(target_os = "linux")]
fn by_pages(socket: UnixStream, calls_until: Option<Instant>) -> io::Result<Box<dyn Pipe>> {
    Ok(Box::new(match calls_until {
        Some(deadline) => SharedPipe::call(socket, deadline)?,
        None => SharedPipe::welcome(socket)?,
    }))
}

#[cfg(not(target_os = "linux"))]
fn by_pages(_: UnixStream, _: Option<Instant>) -> io::Result<Box<dyn Pipe>> {
    Err(IoKind::Unsupported.into())
}

#[cfg(all(feature = "verbs", target_os = "linux"))]
fn by_rdma(stream: SecureStream, deadline: Instant) -> io::Result<Box<dyn Pipe>> {
    Ok(Box::new(crate::verbs::VerbsPipe::meet(stream, deadline)?))
}

#[cfg(all(feature = "verbs", target_os = "linux"))]
fn check_rdma() -> io::Result<()> {
    crate::verbs::VerbsPipe::check()
}

#[cfg(not(all(feature = "verbs", target_os = "linux")))]
fn by_rdma(_: SecureStream, _: Instant) -> io::Result<Box<dyn Pipe>> {
    check_rdma().and(Err(IoKind::Unsupported.into()))
}

#[cfg(not(all(feature = "verbs", target_os = "linux")))]
fn check_rdma() -> io::Result<()> {
    let detail = "this build has no RDMA: build with the feature verbs";
    Err(io::Error::new(IoKind::Unsupported, detail))
}

/// Leaves out the first `sent` bytes.
fn advance(left: &mut Vec<&[u8]>, mut sent: usize) {
    while let Some(first) = left.first_mut() {
        if sent < first.len() {
            *first = &first[sent..];
            return;
        }
        sent -= first.len();
        left.remove(0);
    }
}

/// Waits for callers of [`Duplex`].
pub struct DuplexListener {
    listener: DuplexSocket,
    address: LinkAddress,
    security: Security,
    silence: Duration,
    pending: PendingStreams,
}

enum DuplexSocket {
    /// With whether the ends agree on RDMA.
    Port(TcpListener, bool),
    Unix(UnixListener),
}

/// A connection that was accepted and has shown nothing yet.
pub struct DuplexCaller {
    socket: CallerSocket,
    address: LinkAddress,
    pending: PendingStream,
    security: Security,
    silence: Duration,
}

enum CallerSocket {
    /// With whether the ends agree on RDMA.
    Port(TcpStream, bool),
    Unix(UnixStream),
}

impl DuplexListener {
    /// Listens at `address`; port 0 picks a free port. A socket file whose process has ended is replaced.
    ///
    /// # Errors
    /// `Unsupported` if bytes would leave this host unprotected, `Other` if the address cannot be bound.
    pub fn bind(address: &LinkAddress, security: Security, silence: Duration) -> Result<Self> {
        let failed = |error: io::Error| Error::new(ErrorKind::Other, format!("listen on {address}: {error}"));
        let (listener, address) = match address {
            LinkAddress::Tcp(port) | LinkAddress::Rdma(port) => {
                security.check(port)?;
                let listener = TcpListener::bind(port).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?;
                let is_rdma = matches!(address, LinkAddress::Rdma(_));
                if is_rdma {
                    check_rdma().map_err(failed)?;
                }
                (DuplexSocket::Port(listener, is_rdma), at_port(port, is_rdma))
            }
            LinkAddress::Unix(path) => {
                let listener = bind_file(path).map_err(failed)?;
                let address = LinkAddress::Unix(path.canonicalize().map_err(failed)?);
                (DuplexSocket::Unix(listener), address)
            }
        };
        Ok(DuplexListener { listener, address, security, silence, pending: PendingStreams::default() })
    }

    /// Returns the bound address, including the actual port, or the whole path.
    pub fn address(&self) -> &LinkAddress {
        &self.address
    }

    /// Waits for the next caller. If too many callers have not identified themselves yet, the oldest one of
    /// the address with the most is dropped.
    ///
    /// # Errors
    /// For lack of descriptors; later callers may be accepted.
    pub fn accept(&self) -> io::Result<DuplexCaller> {
        let (socket, pending) = match &self.listener {
            DuplexSocket::Port(listener, is_rdma) => {
                let (socket, peer) = listener.accept()?;
                let pending = self.pending.enter(peer.ip(), &socket)?;
                (CallerSocket::Port(socket, *is_rdma), pending)
            }
            DuplexSocket::Unix(listener) => {
                let (socket, _) = listener.accept()?;
                let pending = self.pending.enter(Ipv4Addr::LOCALHOST.into(), &socket)?;
                (CallerSocket::Unix(socket), pending)
            }
        };
        let (address, security) = (self.address.clone(), self.security.clone());
        Ok(DuplexCaller { socket, address, pending, security, silence: self.silence })
    }
}

fn at_port(port: SocketAddr, is_rdma: bool) -> LinkAddress {
    if is_rdma { LinkAddress::Rdma(port) } else { LinkAddress::Tcp(port) }
}

/// Listens at a path that only this user may connect to.
fn bind_file(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    if let Ok(about) = std::fs::symlink_metadata(path) {
        if !about.file_type().is_socket() {
            return Err(io::Error::new(
                IoKind::AlreadyExists,
                "the path exists and is not a socket: give another path",
            ));
        }
        match UnixStream::connect(path) {
            Ok(_) => return Err(io::Error::new(IoKind::AddrInUse, "another process listens there")),
            Err(error) if error.kind() == IoKind::ConnectionRefused => std::fs::remove_file(path)?,
            Err(_) => {}
        }
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

impl DuplexCaller {
    /// Completes the handshake. The caller counts as one that has shown nothing until the guard is dropped.
    ///
    /// # Errors
    /// The errors of the handshake, and when `deadline` has passed.
    pub fn welcome(self, deadline: Instant) -> io::Result<(Duplex, PendingStream)> {
        let DuplexCaller { socket, address, pending, security, silence } = self;
        let (pipe, address) = match socket {
            CallerSocket::Port(socket, is_rdma) => {
                let here = at_port(socket.local_addr()?, is_rdma);
                let stream = security.welcome(socket, silence, deadline)?;
                (if is_rdma { by_rdma(stream, deadline)? } else { by_socket(stream)? }, here)
            }
            CallerSocket::Unix(socket) => {
                remaining(deadline)?;
                (by_pages(socket, None)?, address)
            }
        };
        Ok((Duplex { pipe, address, patience: Mutex::new(Patience::new()) }, pending))
    }
}

#[cfg(test)]
#[path = "../tests/ends/mod.rs"]
mod ends;

#[cfg(test)]
mod tests {
    use super::ends::{both_send, take};
    use super::*;

    const IDLE: Duration = Duration::from_secs(30);

    fn port() -> LinkAddress {
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()
    }

    /// A path that no other test has.
    fn file(name: &str) -> LinkAddress {
        LinkAddress::Unix(std::env::temp_dir().join(format!("mixfleet-duplex-{}-{name}", std::process::id())))
    }

    fn pair(address: &LinkAddress) -> (Duplex, Duplex) {
        let listener = DuplexListener::bind(address, Security::LoopbackOnly, IDLE).unwrap();
        let deadline = Instant::now() + IDLE;
        let calling = std::thread::scope(|scope| {
            let address = listener.address();
            let call =
                scope.spawn(|| Duplex::call(address, &Security::LoopbackOnly, IDLE, deadline).unwrap());
            let (called, _) = listener.accept().unwrap().welcome(deadline).unwrap();
            (call.join().unwrap(), called)
        });
        if let LinkAddress::Unix(path) = address {
            std::fs::remove_file(path).unwrap();
        }
        calling
    }

    /// Connected ends of each kind.
    fn pairs(name: &str) -> Vec<(Duplex, Duplex)> {
        let addresses = if cfg!(target_os = "linux") { vec![port(), file(name)] } else { vec![port()] };
        addresses.iter().map(pair).collect()
    }

    #[test]
    fn parts_arrive_in_order_and_a_deadline_ends_a_wait() {
        for (a, b) in pairs("order") {
            a.send(&[b"one ", b"", b"two"], IDLE, &mut || Ok(false)).unwrap();
            assert_eq!(take(&b, 7), b"one two");
            assert_eq!(b.receive(&mut [0; 8], Some(Instant::now())).unwrap(), None);
            let soon = Instant::now() + Duration::from_millis(5);
            assert_eq!(b.receive(&mut [0; 8], Some(soon)).unwrap(), None);
            a.close();
            let error = b.receive(&mut [0; 8], None).unwrap_err();
            assert_eq!(error.kind(), IoKind::UnexpectedEof, "{a:?}");
        }
    }

    #[test]
    fn two_ends_that_both_send_more_than_there_is_room_for_do_not_wait_for_each_other() {
        for (a, b) in pairs("much") {
            both_send(&a, &b, 64 << 20);
        }
    }

    #[test]
    fn nothing_leaves_this_host_unprotected() {
        let there = SocketAddr::from(([192, 0, 2, 1], 1)).into();
        let deadline = Instant::now() + IDLE;
        let error = Duplex::call(&there, &Security::LoopbackOnly, IDLE, deadline).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(DuplexListener::bind(&there, Security::LoopbackOnly, IDLE).is_err());
    }

    #[test]
    fn a_socket_file_is_this_users_alone_and_outlives_its_process_at_nobodys_cost() {
        use std::os::unix::fs::PermissionsExt;
        let address = file("stale");
        let LinkAddress::Unix(path) = &address else { unreachable!() };
        let bind = || DuplexListener::bind(&address, Security::LoopbackOnly, IDLE);
        let first = bind().unwrap();
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(bind().err().unwrap().to_string().contains("another process listens there"));
        drop(first);
        drop(bind().unwrap());
        std::fs::remove_file(path).unwrap();
        // a file that is no socket stays
        std::fs::write(path, "text").unwrap();
        assert!(bind().err().unwrap().to_string().contains("is not a socket"));
        assert_eq!(std::fs::read(path).unwrap(), b"text");
        std::fs::remove_file(path).unwrap();
    }
}
