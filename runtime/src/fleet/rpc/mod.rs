//! Sessions over gRPC, between processes and hosts.
//!
//! A worker process's service has three calls, each a stream in both directions: `Router` (commands in,
//! reports out), `Peer` (commands in both directions), and `Probe`, which provides memory to measure a link.
//! The call's metadata identifies the caller; response headers mean that it is accepted, a status that it is
//! not, and why. The proof is a certificate of the right kind, or a token between processes of one host;
//! nothing from an unknown caller is read before that.
//!
//! Messages are the engine's own types, as MessagePack with field names, so there is no second definition to
//! keep in sync. A session ends when either end drops it, when the connection breaks, and when the peer
//! answers no HTTP/2 ping.

mod carry;
mod client;
mod codec;
mod connections;
mod probe;
mod server;
mod token;

pub use client::Remote;
pub use probe::{Measured, ProbeLinks};
pub use server::FleetListener;
pub use token::{Proof, Token};

use super::session::SessionRefusal;
use rustls::pki_types::{CertificateDer, ServerName};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

const ROUTER: &str = "/mixfleet.Fleet/Router";
const PEER: &str = "/mixfleet.Fleet/Peer";
const PROBE: &str = "/mixfleet.Fleet/Probe";

/// Metadata key of the caller's greeting.
const GREETING: &str = "mixfleet-greeting-bin";

/// Metadata key of the proof, without certificates, that the caller and then the process know the token.
const PROOF: &str = "mixfleet-proof-bin";

/// Maximum size of a message to a worker process: a prompt of three million tokens.
const COMMAND_BYTES_MAX: usize = 16 << 20;

/// Maximum size of a message to a router: all blocks that an instance holds, at 18 bytes each, for a router
/// that connects later.
const MESSAGE_BYTES_MAX: usize = 256 << 20;

/// Window of a stream: a long prompt, without waiting for the receiver.
const WINDOW_BYTES: u32 = 4 << 20;

/// How the processes of a fleet connect.
#[derive(Clone, Debug)]
pub struct RpcConfig {
    /// Silence after which a peer counts as gone.
    pub silence: Duration,
    /// How they authenticate each other.
    pub trust: Trust,
}

/// How the processes of a fleet authenticate each other.
#[derive(Clone, Debug)]
pub enum Trust {
    /// Plain text between addresses of this host only, with a shared token.
    Token(Token),
    /// Certificates.
    Tls(Arc<dyn Certificates>),
}

/// A member's certificate, and its trusted authorities. Read for each connection, since they may have been
/// renewed.
pub trait Certificates: fmt::Debug + Send + Sync {
    /// Configuration of the called end: TLS 1.3 for HTTP/2, with callers' certificates.
    fn server(&self) -> Arc<rustls::ServerConfig>;
    /// Configuration of the calling end.
    fn client(&self) -> Arc<rustls::ClientConfig>;
    /// The name that a caller expects in the certificate.
    fn name(&self) -> ServerName<'static>;
    /// Whether an accepted certificate is of such a member.
    fn is_of(&self, certificate: &CertificateDer<'_>, kind: Kind) -> bool;
    /// A function that checks whether these accepted certificates, the peer's own first, are still trusted.
    fn watch(&self, shown: &[CertificateDer<'_>], end: End) -> Watch;
}

/// Tells whether the other end of a connection is still trusted: its certificate may have been revoked.
pub type Watch = Box<dyn FnMut() -> bool + Send + Sync>;

/// The end of a connection that presented certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The calling end.
    Caller,
    /// The called end.
    Called,
}

/// The kind of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A process that places requests.
    Router,
    /// A process with devices.
    Worker,
}

/// A member's certificates as text, for etcd.
#[derive(Clone)]
pub struct Pem {
    /// Certificate of the authority that signed all members'.
    pub authority: String,
    /// Certificate of this member, and those between it and the authority.
    pub certificates: String,
    /// Key of this member.
    pub key: String,
    /// The DNS name in every member's certificate.
    pub name: String,
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pem({})", self.name)
    }
}

impl Pem {
    /// The TLS configuration for a server whose certificate names its host, as etcd's does.
    pub(super) fn client_of_any_host(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.authority))
            .identity(Identity::from_pem(&self.certificates, &self.key))
    }
}

impl RpcConfig {
    /// Half of [`silence`](Self::silence): a ping is sent after it, and its answer may take as long.
    fn half(&self) -> Duration {
        self.silence / 2
    }
}

impl Trust {
    /// Checks that plain text does not leave this host.
    fn check(&self, address: &SocketAddr) -> Result<(), CallError> {
        if matches!(self, Trust::Tls(_)) || address.ip().is_loopback() {
            return Ok(());
        }
        Err(CallError::Failed(format!(
            "{address} is not on this host, and members talk between hosts only under TLS: give certificates"
        )))
    }
}

/// Why there is no session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The other end refused the session.
    #[error(transparent)]
    Refused(#[from] SessionRefusal),
    /// The other end was not reached, or does not speak the protocol.
    #[error("{0}")]
    Failed(String),
}
