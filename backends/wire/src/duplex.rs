//! A protected connection of bytes, on which both ends send and receive at once.

use crate::pending::{PendingStream, PendingStreams};
use crate::poll::{self, Patience};
use crate::security::Security;
use crate::stream::SecureStream;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::io::{self, ErrorKind as IoKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a sender whose peer takes nothing waits before it looks again whether something came.
const LOOK: Duration = Duration::from_millis(10);

/// A connection whose ends have shown each other that they may talk, where certificates do that.
///
/// Several threads may send, each all of its bytes, if they take turns; one thread at a time receives.
pub struct Duplex {
    socket: TcpStream,
    stream: Mutex<SecureStream>,
    patience: Mutex<Patience>,
}

impl std::fmt::Debug for Duplex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Duplex({:?})", self.socket.peer_addr())
    }
}

impl Duplex {
    /// Calls `address`. A peer's host that sends no packets for `silence` counts as gone.
    ///
    /// # Errors
    /// `Unsupported` if bytes would leave this host unprotected, `Closed` if nobody answers or the peer's
    /// certificate is not of the fleet.
    pub fn call(
        address: SocketAddr,
        security: &Security,
        silence: Duration,
        deadline: Instant,
    ) -> Result<Self> {
        security.check(&address)?;
        let stream = security.call(address, silence, deadline);
        stream.and_then(Duplex::of).map_err(|error| Error::new(ErrorKind::Closed, error.to_string()))
    }

    fn of(stream: SecureStream) -> io::Result<Self> {
        let socket = stream.socket().try_clone()?;
        socket.set_nonblocking(true)?;
        Ok(Duplex { socket, stream: Mutex::new(stream), patience: Mutex::new(Patience::new()) })
    }

    /// Returns the address of the other end.
    ///
    /// # Errors
    /// When the connection has ended.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// Returns the address of this end.
    ///
    /// # Errors
    /// When the connection has ended.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn stream(&self) -> MutexGuard<'_, SecureStream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends all of `parts`, in their order. While the peer takes nothing and has sent something, calls
    /// `meanwhile`, which may receive it and then returns true, so that two ends that both send do not wait
    /// for each other.
    ///
    /// # Errors
    /// `TimedOut` once the peer has taken nothing for `idle`, and those of the connection.
    pub fn send(
        &self,
        parts: &[&[u8]],
        idle: Duration,
        meanwhile: &mut dyn FnMut() -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut left: Vec<&[u8]> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
        let mut moved = Instant::now();
        loop {
            let outcome = {
                let mut stream = self.stream();
                match left.is_empty() {
                    true => stream.flush().map(|()| 0),
                    false => stream.send(&vectors(&left)),
                }
            };
            match outcome {
                Ok(_) if left.is_empty() => return Ok(()),
                Ok(sent) => {
                    advance(&mut left, sent);
                    moved = Instant::now();
                }
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    if moved.elapsed() >= idle {
                        return Err(io::Error::new(IoKind::TimedOut, "the peer takes no bytes"));
                    }
                    self.wait_to_send(meanwhile)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits a little until bytes can be sent, or received by `meanwhile`.
    fn wait_to_send(&self, meanwhile: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<()> {
        let fd = self.socket.as_raw_fd();
        let mut entries = [libc::pollfd { fd, events: libc::POLLOUT | libc::POLLIN, revents: 0 }];
        poll::wait(&mut entries, Some(LOOK))?;
        let can_send = entries[0].revents & !libc::POLLIN != 0;
        if can_send || entries[0].revents == 0 || meanwhile()? {
            return Ok(());
        }
        let mut entries = [libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }];
        poll::wait(&mut entries, Some(LOOK))
    }

    /// Receives at least one byte into `place`, and returns how many; `None` once `deadline` has passed. A
    /// deadline in the past takes what has arrived.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the connection, and those of the connection.
    pub fn receive(&self, place: &mut [u8], deadline: Option<Instant>) -> io::Result<Option<usize>> {
        let part = libc::iovec { iov_base: place.as_mut_ptr().cast(), iov_len: place.len() };
        loop {
            match self.stream().receive(&[part]) {
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
            patience.wait(&mut [poll::readable(&self.socket)], left)?;
        }
    }

    /// Ends the direction in which this end sends. What the peer still sends is received.
    pub fn end_sending(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Ends the connection in both directions.
    pub fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn vectors(parts: &[&[u8]]) -> Vec<libc::iovec> {
    let one = |part: &&[u8]| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    parts.iter().map(one).collect()
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
    listener: TcpListener,
    address: SocketAddr,
    security: Security,
    silence: Duration,
    pending: PendingStreams,
}

/// A connection that was accepted and has shown nothing yet.
pub struct DuplexCaller {
    socket: TcpStream,
    pending: PendingStream,
    security: Security,
    silence: Duration,
}

impl DuplexListener {
    /// Listens at `address`; port 0 picks a free port.
    ///
    /// # Errors
    /// `Unsupported` if bytes would leave this host unprotected, `Other` if the address cannot be bound.
    pub fn bind(address: SocketAddr, security: Security, silence: Duration) -> Result<Self> {
        security.check(&address)?;
        let failed = |error: io::Error| Error::new(ErrorKind::Other, format!("listen on {address}: {error}"));
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(DuplexListener { listener, address, security, silence, pending: PendingStreams::default() })
    }

    /// Returns the bound address, including the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next caller. If many have shown nothing yet, the oldest of the address with the most of
    /// them is dropped.
    ///
    /// # Errors
    /// For lack of descriptors; later callers may be accepted.
    pub fn accept(&self) -> io::Result<DuplexCaller> {
        let (socket, peer) = self.listener.accept()?;
        let pending = self.pending.enter(peer.ip(), &socket)?;
        Ok(DuplexCaller { socket, pending, security: self.security.clone(), silence: self.silence })
    }
}

impl DuplexCaller {
    /// Completes the handshake. The caller counts as one that has shown nothing until the guard is dropped.
    ///
    /// # Errors
    /// Those of the handshake, and when `deadline` has passed.
    pub fn welcome(self, deadline: Instant) -> io::Result<(Duplex, PendingStream)> {
        let DuplexCaller { socket, pending, security, silence } = self;
        let stream = security.welcome(socket, silence, deadline)?;
        Ok((Duplex::of(stream)?, pending))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const IDLE: Duration = Duration::from_secs(30);

    fn pair() -> (Duplex, Duplex) {
        let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = DuplexListener::bind(here, Security::LoopbackOnly, IDLE).unwrap();
        let deadline = Instant::now() + IDLE;
        let calling = Duplex::call(listener.address(), &Security::LoopbackOnly, IDLE, deadline).unwrap();
        let (called, _) = listener.accept().unwrap().welcome(deadline).unwrap();
        (calling, called)
    }

    fn take(from: &Duplex, bytes: usize) -> Vec<u8> {
        let (mut all, mut part) = (Vec::new(), vec![0; 64 << 10]);
        while all.len() < bytes {
            let came = from.receive(&mut part, Some(Instant::now() + IDLE)).unwrap().expect("in time");
            all.extend_from_slice(&part[..came]);
        }
        all
    }

    #[test]
    fn parts_arrive_in_order_and_a_deadline_ends_a_wait() {
        let (a, b) = pair();
        a.send(&[b"one ", b"", b"two"], IDLE, &mut || Ok(false)).unwrap();
        assert_eq!(take(&b, 7), b"one two");
        assert_eq!(b.receive(&mut [0; 8], Some(Instant::now())).unwrap(), None);
        a.close();
        let error = b.receive(&mut [0; 8], None).unwrap_err();
        assert_eq!(error.kind(), IoKind::UnexpectedEof);
    }

    #[test]
    fn two_ends_that_both_send_more_than_sockets_hold_do_not_wait_for_each_other() {
        let (a, b) = pair();
        let much: Vec<u8> = (0..64u32 << 20).map(|i| (i % 251) as u8).collect();
        let mut came = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                b.send(&[&much], IDLE, &mut || Ok(false)).unwrap();
                assert_eq!(take(&b, much.len()), much);
            });
            let mut part = vec![0; 1 << 20];
            let mut drain = || {
                let received = a.receive(&mut part, Some(Instant::now()))?;
                came.extend_from_slice(&part[..received.unwrap_or(0)]);
                Ok(received.is_some())
            };
            a.send(&[&much], IDLE, &mut drain).unwrap();
            let rest = take(&a, much.len() - came.len());
            came.extend(rest);
        });
        assert!(came == much);
    }

    #[test]
    fn nothing_leaves_this_host_unprotected() {
        let there = SocketAddr::from(([192, 0, 2, 1], 1));
        let deadline = Instant::now() + IDLE;
        let error = Duplex::call(there, &Security::LoopbackOnly, IDLE, deadline).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(DuplexListener::bind(there, Security::LoopbackOnly, IDLE).is_err());
    }
}
