//! Limits on connections to a worker process, and on their silence.

use super::{CallError, Certificates, End, Trust, Watch};
use crate::env::{SharedEnv, Task};
use futures_util::FutureExt;
use rustls::pki_types::CertificateDer;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tonic::transport::server::Connected;

/// Maximum connections of members: several for each of a thousand members.
const MEMBERS_MAX: usize = 4096;
/// Maximum connections without an accepted call.
const UNPROVEN_MAX: usize = 64;
/// Timeout of a handshake and the first accepted call.
const GREETING_MAX: Duration = Duration::from_secs(10);
/// Pause after a failed accept, which usually means that no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A connection in plain text or under TLS.
pub(super) enum Wire {
    Plain(TcpStream),
    Tls(Box<Watched>),
}

/// A connection under TLS that ends when the other end's certificate is revoked. Pings ensure that it is
/// read.
pub(super) struct Watched {
    stream: TlsStream<TcpStream>,
    is_believed: Watch,
}

impl Watched {
    fn new(stream: TlsStream<TcpStream>, certificates: &dyn Certificates, end: End) -> Box<Self> {
        let is_believed = certificates.watch(stream.get_ref().1.peer_certificates().unwrap_or_default(), end);
        Box::new(Watched { stream, is_believed })
    }

    fn poll_read(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        if (self.is_believed)() {
            return Poll::Ready(read);
        }
        tracing::warn!("the certificate of a member was revoked: its connection ends");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::PermissionDenied, "the certificate was revoked")))
    }
}

impl Wire {
    /// Connects to `address`, and returns the peer's address too.
    pub(super) async fn dial(address: &str, trust: &Trust) -> Result<(Self, SocketAddr), CallError> {
        let failed = |error: io::Error| CallError::Failed(format!("{address} is not reached: {error}"));
        for address in tokio::net::lookup_host(address).await.map_err(failed)? {
            trust.check(&address)?;
        }
        let socket = TcpStream::connect(address).await.map_err(failed)?;
        socket.set_nodelay(true).map_err(failed)?;
        let peer = socket.peer_addr().map_err(failed)?;
        Ok(match trust {
            Trust::Token(_) => (Wire::Plain(socket), peer),
            Trust::Tls(certificates) => {
                let connector = TlsConnector::from(certificates.client());
                let stream = connector.connect(certificates.name(), socket).await.map_err(failed)?;
                (Wire::Tls(Watched::new(stream.into(), &**certificates, End::Called)), peer)
            }
        })
    }

    async fn accept(socket: TcpStream, trust: &Trust) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        Ok(match trust {
            Trust::Token(_) => Wire::Plain(socket),
            Trust::Tls(certificates) => {
                let stream = TlsAcceptor::from(certificates.server()).accept(socket).await?;
                Wire::Tls(Watched::new(stream.into(), &**certificates, End::Caller))
            }
        })
    }

    fn certificate(&self) -> Option<CertificateDer<'static>> {
        match self {
            Wire::Plain(_) => None,
            Wire::Tls(watched) => {
                Some(watched.stream.get_ref().1.peer_certificates()?.first()?.clone().into_owned())
            }
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Wire::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Wire::Tls(watched) => watched.poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Wire::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Wire::Tls(watched) => Pin::new(&mut watched.stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Wire::Plain(stream) => Pin::new(stream).poll_flush(context),
            Wire::Tls(watched) => Pin::new(&mut watched.stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Wire::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Wire::Tls(watched) => Pin::new(&mut watched.stream).poll_shutdown(context),
        }
    }
}

#[derive(Default)]
struct OpenConnections {
    came: u64,
    members: usize,
    /// Dropping a sender ends its connection.
    unproven: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
}

type SharedConnections = Arc<Mutex<OpenConnections>>;

fn lock(open: &SharedConnections) -> MutexGuard<'_, OpenConnections> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The standing of a connection.
pub(super) struct ConnectionStatus {
    open: SharedConnections,
    number: u64,
    is_member: AtomicBool,
    pub(super) certificate: Option<CertificateDer<'static>>,
}

impl ConnectionStatus {
    /// Records an accepted call, so that the connection may stay. False if the limit of members is reached.
    pub(super) fn welcome(&self) -> bool {
        let mut open = lock(&self.open);
        if self.is_member.load(Ordering::Relaxed) {
            return true;
        }
        if open.members >= MEMBERS_MAX {
            return false;
        }
        self.is_member.store(true, Ordering::Relaxed);
        open.members += 1;
        open.unproven.remove(&self.number);
        true
    }
}

impl Drop for ConnectionStatus {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.unproven.remove(&self.number);
        open.members -= usize::from(self.is_member.load(Ordering::Relaxed));
    }
}

/// Admits a connection. If there are too many unknown ones, the oldest one from the address with the most is
/// closed.
fn enter(open: &SharedConnections, from: IpAddr) -> (ConnectionStatus, oneshot::Receiver<()>) {
    let (stays, leaves) = oneshot::channel();
    let mut here = lock(open);
    if here.unproven.len() >= UNPROVEN_MAX {
        let mut of_each = BTreeMap::<IpAddr, usize>::new();
        here.unproven.values().for_each(|(from, _)| *of_each.entry(*from).or_default() += 1);
        let most = of_each.into_iter().max_by_key(|(_, count)| *count).map(|(from, _)| from);
        let oldest = here.unproven.iter().find(|(_, (from, _))| Some(*from) == most).map(|(&n, _)| n);
        oldest.map(|number| here.unproven.remove(&number));
    }
    here.came += 1;
    let number = here.came;
    here.unproven.insert(number, (from, stays));
    drop(here);
    let is_member = AtomicBool::new(false);
    (ConnectionStatus { open: open.clone(), number, is_member, certificate: None }, leaves)
}

/// An accepted connection.
pub(super) struct FleetConnection {
    wire: Wire,
    status: Arc<ConnectionStatus>,
    leaves: oneshot::Receiver<()>,
    deadline: Task,
}

impl Connected for FleetConnection {
    type ConnectInfo = Arc<ConnectionStatus>;

    fn connect_info(&self) -> Arc<ConnectionStatus> {
        self.status.clone()
    }
}

impl AsyncRead for FleetConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let is_unproven = !this.status.is_member.load(Ordering::Relaxed);
        if is_unproven
            && (this.leaves.poll_unpin(context).is_ready() || this.deadline.poll_unpin(context).is_ready())
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut this.wire).poll_read(context, buffer)
    }
}

impl AsyncWrite for FleetConnection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().wire).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().wire).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().wire).poll_shutdown(context)
    }
}

/// Accepts connections until the receiver is gone.
pub(super) async fn accept(
    env: SharedEnv,
    listener: TcpListener,
    trust: Trust,
    silence: Duration,
    connections: mpsc::Sender<FleetConnection>,
) {
    let (open, patience) = (SharedConnections::default(), silence.min(GREETING_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = connections.closed() => return,
        };
        let Ok((socket, peer)) = accepted else {
            env.sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let (status, mut leaves) = enter(&open, peer.ip());
        let (trust, connections, mut deadline) = (trust.clone(), connections.clone(), env.sleep(patience));
        env.spawn(Box::pin(async move {
            let mut status = status;
            let shaken = tokio::select! {
                shaken = Wire::accept(socket, &trust) => shaken,
                _ = &mut leaves => return,
                () = &mut deadline => return,
            };
            match shaken {
                Ok(wire) => {
                    status.certificate = wire.certificate();
                    let status = Arc::new(status);
                    let _ = connections.send(FleetConnection { wire, status, leaves, deadline }).await;
                }
                Err(error) => tracing::debug!(%peer, %error, "a connection was refused"),
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_make_room_and_members_stay() {
        let open = SharedConnections::default();
        let from = |last: u8| IpAddr::from([192, 0, 2, last]);
        let (lonely, mut lonely_leaves) = enter(&open, from(1));
        let (member, mut member_leaves) = enter(&open, from(2));
        assert!(member.welcome() && member.welcome());
        let mut loud: Vec<_> = (0..UNPROVEN_MAX).map(|_| enter(&open, from(2))).collect();
        let gone = |leaves: &mut oneshot::Receiver<()>| {
            matches!(leaves.try_recv(), Err(oneshot::error::TryRecvError::Closed))
        };
        assert!(!gone(&mut lonely_leaves) && gone(&mut loud[0].1) && !gone(&mut loud[1].1));
        // A member's connection is not closed for others.
        assert!(gone(&mut member_leaves) && member.is_member.load(Ordering::Relaxed));
        drop((lonely, member, loud));
        let left = lock(&open);
        assert_eq!((left.members, left.unproven.len()), (0, 0));
    }
}
