//! Joins a fleet as the flags say.

use super::JoinArgs;
use crate::failure::UsageError;
use crate::tls::Files;
use crate::token;
use anyhow::{Context, Result};
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::fleet::registry::{Registry, RegistryConfig};
use mixfleet_runtime::fleet::rpc::{Certificates, End, Kind, Pem, RpcConfig, Trust, Watch};
use mixfleet_wire::{Security, TlsIdentity};
use rustls::pki_types::{CertificateDer, ServerName};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// The end of an error message that names the missing flags.
const NEEDS_TLS: &str = "is not on this host, and members talk between hosts only under TLS: give --tls-ca, --tls-cert and --tls-key";

/// How this process joins a fleet.
pub(super) struct Join {
    pub(super) rpc: RpcConfig,
    /// Security of KV connections.
    pub(super) security: Security,
    pub(super) registry: Registry,
}

impl JoinArgs {
    /// The time-to-live of a lease.
    pub(super) fn lease(&self) -> Duration {
        Duration::from_secs(self.lease_s)
    }

    /// Reads the certificates or the token, without waiting for etcd.
    pub(super) async fn open(&self, env: &SharedEnv) -> Result<Join> {
        let registry = self.registry(env).await?;
        let security = self.tls.security()?;
        let trust = match &security {
            Security::Tls(identity) => Trust::Tls(Arc::new(KvCertificates(identity.clone()))),
            _ => Trust::Token(token::load(self.token_file.as_deref())?),
        };
        Ok(Join { rpc: RpcConfig { silence: self.lease(), trust }, security, registry })
    }

    /// Opens the registry of members, without waiting for etcd.
    pub(super) async fn registry(&self, env: &SharedEnv) -> Result<Registry> {
        let tls = self.pem()?;
        for url in &self.etcd {
            self.check_url(url)?;
        }
        let config =
            RegistryConfig { urls: self.etcd.clone(), fleet: self.fleet.clone(), lease: self.lease(), tls };
        Registry::new(env, &config).await.context("--etcd")
    }

    fn pem(&self) -> Result<Option<Pem>> {
        let files = self.tls.read()?;
        Ok(files.map(|Files { authority, certificates, key, name }| Pem {
            authority,
            certificates,
            key,
            name,
        }))
    }

    /// Checks that etcd is local or under TLS: it holds the secret of block hashes, and write access makes a
    /// process a member.
    fn check_url(&self, url: &str) -> Result<()> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let host = rest.trim_end_matches('/');
        match scheme {
            "https" if self.tls.are_given() => Ok(()),
            "https" => {
                Err(UsageError(format!("--etcd {url}: give --tls-ca, --tls-cert and --tls-key")).into())
            }
            "http" => {
                let addresses = host.to_socket_addrs().map_err(|error| {
                    UsageError(format!(
                        "--etcd {url}: {error}; expected http://HOST:PORT or https://HOST:PORT"
                    ))
                })?;
                match addresses.into_iter().find(|address| !address.ip().is_loopback()) {
                    None => Ok(()),
                    Some(_) => Err(UsageError(format!(
                        "--etcd {url}: beyond this host etcd is reached over https, with --tls-ca, --tls-cert and --tls-key"
                    ))
                    .into()),
                }
            }
            _ => {
                Err(UsageError(format!("--etcd {url}: expected http://HOST:PORT or https://HOST:PORT"))
                    .into())
            }
        }
    }

    /// Parses the address of a flag, and checks that this process may listen on it.
    pub(super) fn listen(&self, flag: &str, text: &str) -> Result<SocketAddr> {
        let mut found = text
            .to_socket_addrs()
            .map_err(|error| UsageError(format!("{flag} {text}: {error}; expected HOST:PORT")))?;
        let address = found.next().ok_or_else(|| UsageError(format!("{flag} {text}: no such address")))?;
        if address.ip().is_unspecified() {
            let message = "is every address of this host: give the one by which members reach it";
            return Err(UsageError(format!("{flag} {text} {message}")).into());
        }
        if !address.ip().is_loopback() && !self.tls.are_given() {
            return Err(UsageError(format!("{flag} {text} {NEEDS_TLS}")).into());
        }
        Ok(address)
    }
}

/// The certificates, which KV connections use too.
#[derive(Debug)]
struct KvCertificates(Arc<TlsIdentity>);

impl Certificates for KvCertificates {
    fn server(&self) -> Arc<rustls::ServerConfig> {
        self.0.control_server()
    }

    fn client(&self) -> Arc<rustls::ClientConfig> {
        self.0.control_client()
    }

    fn name(&self) -> ServerName<'static> {
        self.0.server_name()
    }

    fn is_of(&self, certificate: &CertificateDer<'_>, kind: Kind) -> bool {
        let kind = match kind {
            Kind::Router => mixfleet_wire::TlsMemberKind::Router,
            Kind::Worker => mixfleet_wire::TlsMemberKind::Worker,
        };
        self.0.is_of(certificate, kind)
    }

    fn watch(&self, shown: &[CertificateDer<'_>], end: End) -> Watch {
        let end = match end {
            End::Caller => mixfleet_wire::TlsEnd::Caller,
            End::Called => mixfleet_wire::TlsEnd::Called,
        };
        let mut watch = self.0.watch(shown, end);
        Box::new(move || watch.is_believed())
    }
}
