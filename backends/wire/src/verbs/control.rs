//! Carries connection requests and replies where no other channel does: one line of JSON each way on a TCP
//! connection that stays open as long as the RDMA connection. [`Security`] protects it, as for KV over TCP.

#[cfg(all(test, feature = "tls"))]
#[path = "../../tests/authority/mod.rs"]
mod authority;

use super::offer::{ConnectReply, ConnectRequest};
use super::owner::VerbsOwner;
use super::wait_readable;
use crate::security::Security;
use crate::service::ServiceThread;
use crate::stream::SecureStream;
use mixfleet_hal::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind::WouldBlock, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum length of a line; 16 NICs with 64 queue pairs and full address tables need less.
const LINE_BYTES: usize = 256 * 1024;
/// Timeout for a reply, and for the first line of a connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time without any packets after which a peer's host counts as gone.
const SILENCE: Duration = Duration::from_secs(10);
/// Maximum number of connections that have not sent their request; further ones are closed at once.
const PENDING_MAX: usize = 64;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ControlReply {
    Answer(ConnectReply),
    /// There is no such region.
    Closed(String),
    /// The request cannot be granted.
    Refused(String),
}

fn failed(what: &str, peer: SocketAddr, error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Closed, format!("RDMA control connection to {peer}: {what}: {error}"))
}

/// Sends `offer` to `peer`. The returned connection ends when the peer closes the RDMA connection.
pub(crate) fn ask(
    peer: SocketAddr,
    security: &Security,
    offer: &ConnectRequest,
) -> Result<(ConnectReply, SecureStream)> {
    let begin = Instant::now();
    security.check(&peer)?;
    let mut stream =
        security.call(peer, SILENCE, begin + PATIENCE).map_err(|e| failed("no connection", peer, e))?;
    let mut line = serde_json::to_vec(offer).map_err(|e| failed("offer", peer, e))?;
    line.push(b'\n');
    stream.socket().set_write_timeout(Some(PATIENCE)).map_err(|e| failed("set up", peer, e))?;
    stream.write_all(&line).map_err(|e| failed("send the offer", peer, e))?;
    stream.socket().set_nonblocking(true).map_err(|e| failed("set up", peer, e))?;
    let mut reply = Vec::new();
    while !reply.ends_with(b"\n") {
        let left = PATIENCE.checked_sub(begin.elapsed());
        let left =
            left.ok_or_else(|| failed("no answer", peer, format!("waited {} s", PATIENCE.as_secs())))?;
        wait_readable(&[stream.socket().as_raw_fd()], left);
        let read = read_some(&mut stream, &mut reply);
        // a refusal is followed by the end of the stream
        if !reply.ends_with(b"\n") {
            read.map_err(|e| failed("no answer", peer, e))?;
        }
    }
    match serde_json::from_slice(&reply).map_err(|e| failed("not an answer", peer, e))? {
        ControlReply::Answer(answer) => Ok((answer, stream)),
        ControlReply::Closed(why) => Err(Error::new(ErrorKind::Closed, format!("{peer} says: {why}"))),
        ControlReply::Refused(why) => Err(Error::unsupported(format!("{peer} says: {why}"))),
    }
}

/// Appends the bytes that have arrived on a non-blocking stream.
///
/// # Errors
/// If the stream has ended or failed, or the line is too long.
fn read_some(stream: &mut SecureStream, line: &mut Vec<u8>) -> io::Result<()> {
    let mut some = [0; 4096];
    loop {
        match stream.read(&mut some) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed it")),
            Ok(_) if line.len() > LINE_BYTES => return Err(io::Error::other("the line is too long")),
            Ok(count) => line.extend_from_slice(&some[..count]),
            Err(error) if error.kind() == WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Answers requests until it is dropped, on one thread for all peers.
pub(crate) struct ControlListener {
    pub(crate) address: SocketAddr,
    _thread: ServiceThread,
}

impl ControlListener {
    pub(crate) fn new(address: SocketAddr, security: Security, owner: Arc<VerbsOwner>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let serve = move |stopped: UnixStream| {
            let is_set = stopped.set_nonblocking(true);
            let server = Server { listener, stopped, security, owner, connections: Vec::new() };
            if is_set.is_ok() {
                server.run();
            }
        };
        Ok(ControlListener { address, _thread: ServiceThread::spawn("rdma-control", serve)? })
    }
}

struct Server {
    listener: TcpListener,
    stopped: UnixStream,
    security: Security,
    owner: Arc<VerbsOwner>,
    connections: Vec<ControlConnection>,
}

struct ControlConnection {
    stream: SecureStream,
    line: Vec<u8>,
    state: ControlState,
}

enum ControlState {
    /// Has not sent its request, which is due at this time.
    Pending(Instant),
    /// Has this RDMA connection.
    Open(u64),
    Ended,
}

impl Server {
    fn run(mut self) {
        loop {
            let fixed = [self.stopped.as_raw_fd(), self.listener.as_raw_fd()];
            let streams = self.connections.iter().map(|connection| connection.stream.socket().as_raw_fd());
            let fds: Vec<_> = fixed.into_iter().chain(streams).collect();
            wait_readable(&fds, self.longest_sleep());
            if !matches!(self.stopped.read(&mut [0]), Err(e) if e.kind() == WouldBlock) {
                return;
            }
            self.welcome();
            for connection in &mut self.connections {
                connection.serve(&self.owner);
            }
            self.connections.retain(|connection| !matches!(connection.state, ControlState::Ended));
        }
    }

    /// Returns the time until the first pending connection is due.
    fn longest_sleep(&self) -> Duration {
        let deadlines = self.connections.iter().filter_map(|connection| match connection.state {
            ControlState::Pending(deadline) => Some(deadline),
            _ => None,
        });
        let first = deadlines.min().map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // a millisecond more, so that it does not wake just before
        first.map_or(Duration::from_secs(60), |left| left + Duration::from_millis(1))
    }

    fn welcome(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let strangers =
                self.connections.iter().filter(|c| matches!(c.state, ControlState::Pending(_))).count();
            if strangers >= PENDING_MAX || stream.set_nonblocking(true).is_err() {
                continue;
            }
            if let Ok(stream) = self.security.begin_accept(stream) {
                let state = ControlState::Pending(Instant::now() + PATIENCE);
                self.connections.push(ControlConnection { stream, line: Vec::new(), state });
            }
        }
    }
}

impl ControlConnection {
    fn serve(&mut self, owner: &VerbsOwner) {
        let read = read_some(&mut self.stream, &mut self.line);
        // a handshake message or an alert, which fits the empty socket buffer
        let _ = self.stream.flush();
        match self.state {
            ControlState::Pending(_) if self.line.ends_with(b"\n") => {
                let (reply, state) = self.reply(owner);
                let text = serde_json::to_vec(&reply).unwrap_or_default();
                // fits the empty socket buffer; a peer that is gone shows at the next read
                let sent = self.stream.write_all(&[&text[..], b"\n"].concat());
                self.state = state;
                if let (Err(_), ControlState::Open(way)) = (sent, &self.state) {
                    owner.close(*way);
                    self.state = ControlState::Ended;
                }
            }
            ControlState::Pending(deadline) if read.is_err() || Instant::now() >= deadline => {
                self.state = ControlState::Ended;
            }
            ControlState::Open(way) if read.is_err() => {
                owner.close(way);
                self.state = ControlState::Ended;
            }
            ControlState::Open(_) => self.line.clear(),
            ControlState::Pending(_) | ControlState::Ended => {}
        }
    }

    fn reply(&self, owner: &VerbsOwner) -> (ControlReply, ControlState) {
        let accepted = serde_json::from_slice::<ConnectRequest>(&self.line)
            .map_err(|error| Error::invalid(format!("this is not an offer: {error}")))
            .and_then(|offer| {
                let control = self
                    .stream
                    .socket()
                    .try_clone()
                    .map_err(|e| Error::new(ErrorKind::Other, e.to_string()))?;
                owner.accept(&offer, Some(control))
            });
        match accepted {
            Ok((answer, way)) => (ControlReply::Answer(answer), ControlState::Open(way)),
            Err(error) if error.kind == ErrorKind::Closed => {
                (ControlReply::Closed(error.detail), ControlState::Ended)
            }
            Err(error) => (ControlReply::Refused(error.detail), ControlState::Ended),
        }
    }
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use super::authority::Authority;
    use super::*;
    use crate::tls::{TlsIdentity, TlsPem};
    use crate::verbs::offer::VERSION;
    use std::net::Ipv4Addr;

    const FLEET: &str = "mixfleet";

    /// Members of a new authority.
    fn fleet() -> Security {
        let authority = Authority::new();
        let (certificates, key) = authority.signs(&[FLEET]);
        let pem = TlsPem {
            authority: &authority.pem(),
            certificates: &certificates,
            key: &key,
            revoked: "",
            fleet: FLEET,
        };
        Security::Tls(Arc::new(TlsIdentity::new(&pem).unwrap()))
    }

    /// Returns the reply of an owner without regions to `asks`, a caller with its own security.
    fn answer(owner: &Security, asks: &Security) -> Error {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener =
            ControlListener::new(loopback, owner.clone(), Arc::new(VerbsOwner::new(vec![]))).unwrap();
        let offer = ConnectRequest { version: VERSION, key: "0".repeat(32), epoch: 3, rails: vec![] };
        ask(listener.address, asks, &offer).err().expect("there is no region")
    }

    #[test]
    fn members_reach_the_owner_and_nobody_else_does() {
        let (ours, others) = (fleet(), fleet());
        let told = "no region is registered under epoch 3";
        for (owner, asks, reached) in [
            (&ours, &ours, true),
            (&Security::LoopbackOnly, &Security::LoopbackOnly, true),
            (&ours, &others, false),
            (&ours, &Security::Insecure, false),
            (&Security::Insecure, &ours, false),
        ] {
            let error = answer(owner, asks);
            assert_eq!(error.kind, ErrorKind::Closed, "{error}");
            assert_eq!(error.detail.contains(told), reached, "{error}");
        }
    }

    #[test]
    fn keys_do_not_leave_the_host_in_the_clear() {
        let offer = ConnectRequest { version: VERSION, key: "0".repeat(32), epoch: 0, rails: vec![] };
        let beyond = SocketAddr::from(([192, 0, 2, 1], 1));
        let error = ask(beyond, &Security::LoopbackOnly, &offer).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
    }
}
