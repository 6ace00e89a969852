//! Sessions over gRPC, between processes and hosts.
//!
//! Three calls of a worker process's service, each a stream both ways: `Router` (commands in, words out), `Peer`
//! (commands both ways), and `Probe`, which lends memory to measure a link with. Who calls stands in the call's
//! metadata; response headers mean that it is welcome, a status that it is not, and why.
//!
//! Messages are the types that the engine uses, as MessagePack with field names: there is no second definition
//! of them to keep in step. A session ends when either end drops it, when the connection breaks, and when the
//! peer answers no HTTP/2 ping.

mod carry;
mod client;
mod codec;
mod probe;
mod server;

pub use client::Remote;
pub use probe::{Measured, Ways};
pub use server::Door;

use super::session::Refusal;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

const ROUTER: &str = "/mixfleet.Fleet/Router";
const PEER: &str = "/mixfleet.Fleet/Peer";
const PROBE: &str = "/mixfleet.Fleet/Probe";

/// Metadata: who calls.
const GREETING: &str = "mixfleet-greeting-bin";

/// The longest message: all blocks that an instance holds, for a router that comes late; 18 bytes each.
const MESSAGE_BYTES_MAX: usize = 256 << 20;

/// What a stream may have under way: a long prompt, without waiting for the receiver's leave.
const WINDOW_BYTES: u32 = 4 << 20;

/// How the processes of a fleet reach each other.
#[derive(Clone, Debug)]
pub struct RpcConfig {
    /// A peer that says nothing for so long is gone.
    pub silence: Duration,
    /// None: in the clear, and between addresses of this host only.
    pub tls: Option<Pem>,
}

/// A member's certificates, as text.
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
    fn client(&self) -> ClientTlsConfig {
        self.client_of_any_host().domain_name(&self.name)
    }

    /// For a server whose certificate names its host, as etcd's does.
    pub(super) fn client_of_any_host(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.authority))
            .identity(Identity::from_pem(&self.certificates, &self.key))
    }

    fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new()
            .client_ca_root(Certificate::from_pem(&self.authority))
            .identity(Identity::from_pem(&self.certificates, &self.key))
    }
}

impl RpcConfig {
    /// Half of [`silence`](Self::silence) until a ping is sent, half for its answer.
    fn half(&self) -> Duration {
        self.silence / 2
    }

    /// What is in the clear does not leave this host.
    fn check(&self, address: &SocketAddr) -> Result<(), CallError> {
        if self.tls.is_some() || address.ip().is_loopback() {
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
    Refused(#[from] Refusal),
    /// It was not reached, or does not understand.
    #[error("{0}")]
    Failed(String),
}
