//! Who may talk to whom over a socket.

use crate::stream::SecureStream;
#[cfg(feature = "tls")]
use crate::tls::TlsIdentity;
use mixfleet_hal::{Error, Result};
use std::io;
use std::net::{SocketAddr, TcpStream};
#[cfg(feature = "tls")]
use std::sync::Arc;
use std::time::Instant;

/// What protects the bytes on their way, and the memory from others.
#[derive(Clone, Debug)]
pub enum Security {
    /// In the clear, between addresses that do not leave this host.
    LoopbackOnly,
    /// In the clear, to any address: whoever is on the network reads the KV of all requests, and with it the
    /// keys that let it write. For measurements on a network of one's own.
    Insecure,
    /// Under TLS 1.3, both ends with certificates of one authority.
    #[cfg(feature = "tls")]
    Tls(Arc<TlsIdentity>),
}

impl Security {
    /// Whether bytes may go to or come from `address`.
    ///
    /// # Errors
    /// `Unsupported` when they would leave this host unprotected.
    pub(crate) fn check(&self, address: &SocketAddr) -> Result<()> {
        match self {
            Security::LoopbackOnly if !address.ip().is_loopback() => Err(Error::unsupported(format!(
                "{address} is not on this host, and KV goes between hosts only under TLS: give certificates"
            ))),
            _ => Ok(()),
        }
    }

    /// The passive end of a handshake.
    pub(crate) fn accept(&self, socket: TcpStream, deadline: Instant) -> io::Result<SecureStream> {
        match self {
            #[cfg(feature = "tls")]
            Security::Tls(identity) => identity.accept(socket, deadline),
            _ => {
                let _ = deadline;
                Ok(SecureStream::plain(socket))
            }
        }
    }

    /// The active end of a handshake.
    pub(crate) fn connect(&self, socket: TcpStream, deadline: Instant) -> io::Result<SecureStream> {
        match self {
            #[cfg(feature = "tls")]
            Security::Tls(identity) => identity.connect(socket, deadline),
            _ => {
                let _ = deadline;
                Ok(SecureStream::plain(socket))
            }
        }
    }

    /// The passive end of a handshake that has only begun: it goes on as the link receives, and what came is only
    /// seen when it has ended well. Flush after each `receive`.
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    pub(crate) fn begin_accept(&self, socket: TcpStream) -> io::Result<SecureStream> {
        match self {
            #[cfg(feature = "tls")]
            Security::Tls(identity) => identity.begin_accept(socket),
            _ => Ok(SecureStream::plain(socket)),
        }
    }
}
