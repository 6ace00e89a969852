//! Sessions over gRPC, between processes and hosts.
//!
//! Three calls of a worker process's service, each a stream both ways: `Router` (commands in, words out), `Peer`
//! (commands both ways), and `Probe`, which lends memory to measure a link with. Who calls stands in the call's
//! metadata; response headers mean that it is welcome, a status that it is not, and why. What proves it is a certificate of
//! the right kind, or between processes of one host a token; nothing that a stranger sends is read before.
//!
//! Messages are the types that the engine uses, as MessagePack with field names: there is no second definition
//! of them to keep in step. A session ends when either end drops it, when the connection breaks, and when the
//! peer answers no HTTP/2 ping.

mod carry;
mod client;
mod codec;
mod guests;
mod probe;
mod server;
mod token;

pub use client::Remote;
pub use probe::{Measured, Ways};
pub use server::Door;
pub use token::Token;

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

/// Metadata: who calls.
const GREETING: &str = "mixfleet-greeting-bin";

/// Metadata, where there are no certificates: that the caller knows the token, and then that the process does.
const PROOF: &str = "mixfleet-proof-bin";

/// What a worker process takes in one message: a prompt of three million tokens.
const COMMAND_BYTES_MAX: usize = 16 << 20;

/// The longest message to a router: all blocks that an instance holds, for a router that comes late; 18 bytes each.
const MESSAGE_BYTES_MAX: usize = 256 << 20;

/// What a stream may have under way: a long prompt, without waiting for the receiver's leave.
const WINDOW_BYTES: u32 = 4 << 20;

/// How the processes of a fleet reach each other.
#[derive(Clone, Debug)]
pub struct RpcConfig {
    /// A peer that says nothing for so long is gone.
    pub silence: Duration,
    /// How they know each other.
    pub trust: Trust,
}

/// How the processes of a fleet know each other.
#[derive(Clone, Debug)]
pub enum Trust {
    /// In the clear, between addresses of this host only: all have the token.
    Token(Token),
    /// By certificates.
    Tls(Arc<dyn Certificates>),
}

/// A member's certificates, and whom it believes. Asked anew for each connection: they may have been renewed.
pub trait Certificates: fmt::Debug + Send + Sync {
    /// For who is called: TLS 1.3, with callers' certificates, for HTTP/2.
    fn server(&self) -> Arc<rustls::ServerConfig>;
    /// For who calls, likewise.
    fn client(&self) -> Arc<rustls::ClientConfig>;
    /// Whom a caller asks for.
    fn name(&self) -> ServerName<'static>;
    /// Whether a certificate that was accepted is of such a member.
    fn is_of(&self, certificate: &CertificateDer<'_>, kind: Kind) -> bool;
    /// Watches over who has shown these certificates, its own first, and was accepted.
    fn watch(&self, shown: &[CertificateDer<'_>], end: End) -> Watch;
}

/// Says whether the other end of a connection is believed still: its certificate may have been taken back since.
pub type Watch = Box<dyn FnMut() -> bool + Send + Sync>;

/// Which end of a connection showed its certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The one that called.
    Caller,
    /// The one that was called.
    Called,
}

/// What a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It decides.
    Router,
    /// It has devices.
    Worker,
}

/// A member's certificates, as text: for etcd.
#[derive(Clone)]
pub struct Pem {
    /// Of the authority that signed all members.
    pub authority: String,
    /// Of this member, and those between it and the authority.
    pub certificates: String,
    /// Of this member.
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
    /// For a server whose certificate names its host, as etcd's does.
    pub(super) fn client_of_any_host(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.authority))
            .identity(Identity::from_pem(&self.certificates, &self.key))
    }
}

impl RpcConfig {
    /// Half of [`silence`](Self::silence) until a ping is sent, half for its answer.
    fn half(&self) -> Duration {
        self.silence / 2
    }
}

impl Trust {
    /// What is in the clear does not leave this host.
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
    /// The other end does not want one.
    #[error(transparent)]
    Refused(#[from] SessionRefusal),
    /// It was not reached, or does not understand.
    #[error("{0}")]
    Failed(String),
}
