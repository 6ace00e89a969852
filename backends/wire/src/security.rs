//! Which peers may connect to each other over a socket, and how the connection is protected.

use crate::stream::{SecureStream, remaining, tune};
#[cfg(feature = "tls")]
use crate::tls::TlsIdentity;
use mixfleet_hal::{Error, Result};
use std::io;
use std::net::{SocketAddr, TcpStream};
#[cfg(feature = "tls")]
use std::sync::Arc;
use std::time::{Duration, Instant};

fn during(what: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn set_up(socket: TcpStream, silence: Duration, deadline: Instant) -> io::Result<TcpStream> {
    let set = || {
        tune(&socket, silence)?;
        socket.set_write_timeout(Some(remaining(deadline)?))
    };
    set().map_err(during("set up"))?;
    Ok(socket)
}

/// How bytes in transit, and access to the memory, are protected.
#[derive(Clone, Debug)]
pub enum Security {
    /// Unencrypted, restricted to loopback addresses.
    LoopbackOnly,
    /// Unencrypted, to any address. Anyone on the network can read the KV of all requests, and with it the
    /// keys that allow writing it. Intended for measurements on an isolated network.
    Insecure,
    /// TLS 1.3 with certificates of one authority at both ends.
    #[cfg(feature = "tls")]
    Tls(Arc<TlsIdentity>),
}

impl Security {
    /// Checks that bytes may go to or come from `address`.
    ///
    /// # Errors
    /// `Unsupported` if they would leave this host unprotected.
    pub(crate) fn check(&self, address: &SocketAddr) -> Result<()> {
        match self {
            Security::LoopbackOnly if !address.ip().is_loopback() => Err(Error::unsupported(format!(
                "{address} is not on this host, and KV goes between hosts only under TLS: give certificates"
            ))),
            _ => Ok(()),
        }
    }

    /// Connects to `address` and completes the handshake before `deadline`. A peer's host without any packets
    /// for `silence` counts as gone.
    pub(crate) fn call(
        &self,
        address: SocketAddr,
        silence: Duration,
        deadline: Instant,
    ) -> io::Result<SecureStream> {
        let socket = TcpStream::connect_timeout(&address, remaining(deadline)?).map_err(during("connect"))?;
        self.connect(set_up(socket, silence, deadline)?, deadline).map_err(during("the handshake"))
    }

    /// Completes the handshake with a peer that connected on `socket`, as [`call`](Self::call) does at the
    /// other end.
    pub(crate) fn welcome(
        &self,
        socket: TcpStream,
        silence: Duration,
        deadline: Instant,
    ) -> io::Result<SecureStream> {
        self.accept(set_up(socket, silence, deadline)?, deadline).map_err(during("the handshake"))
    }

    /// Runs the passive end of a handshake.
    fn accept(&self, socket: TcpStream, deadline: Instant) -> io::Result<SecureStream> {
        match self {
            #[cfg(feature = "tls")]
            Security::Tls(identity) => identity.accept(socket, deadline),
            _ => {
                let _ = deadline;
                Ok(SecureStream::plain(socket))
            }
        }
    }

    /// Runs the active end of a handshake.
    fn connect(&self, socket: TcpStream, deadline: Instant) -> io::Result<SecureStream> {
        match self {
            #[cfg(feature = "tls")]
            Security::Tls(identity) => identity.connect(socket, deadline),
            _ => {
                let _ = deadline;
                Ok(SecureStream::plain(socket))
            }
        }
    }

    /// Starts the passive end of a handshake, which continues as the stream receives; received data is
    /// visible only once it has succeeded. Flush after each `receive`.
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    pub(crate) fn begin_accept(&self, socket: TcpStream) -> io::Result<SecureStream> {
        match self {
            #[cfg(feature = "tls")]
            Security::Tls(identity) => identity.begin_accept(socket),
            _ => Ok(SecureStream::plain(socket)),
        }
    }
}
