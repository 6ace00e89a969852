//! The TLS configurations that a member's certificates make for both ends of a connection.

use super::named::{NamedClients, NamedServers};
use super::{TlsEnd, TlsMemberKind, TlsPem};
use mixfleet_hal::{Error, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::sync::Arc;

/// The TLS configurations for each kind of handshake.
#[derive(Clone)]
pub(super) struct Configs {
    /// Admits workers, for KV.
    pub(super) server: Arc<ServerConfig>,
    /// Admits members of either kind, for HTTP/2.
    pub(super) control_server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
    pub(super) control_client: Arc<ClientConfig>,
    clients: Arc<dyn ClientCertVerifier>,
    servers: Arc<NamedServers>,
}

fn bad(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> Error {
    move |error| Error::invalid(format!("{what} for TLS: {error}"))
}

pub(super) fn name(text: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(text.to_owned()).map_err(|error| bad("the fleet's name")(&error))
}

pub(super) fn names(fleet: &str, kinds: &[TlsMemberKind]) -> Result<Vec<ServerName<'static>>> {
    let of = |kind: &TlsMemberKind| match kind {
        TlsMemberKind::Router => name(&format!("router.{fleet}")),
        TlsMemberKind::Worker => name(&format!("worker.{fleet}")),
    };
    std::iter::once(name(fleet)).chain(kinds.iter().map(of)).collect()
}

impl Configs {
    pub(super) fn new(pem: &TlsPem<'_>) -> Result<Self> {
        let certificates = |text: &str| {
            CertificateDer::pem_slice_iter(text.as_bytes()).collect::<std::result::Result<Vec<_>, _>>()
        };
        let of_authority = bad("the authority's certificate");
        let mut roots = RootCertStore::empty();
        for root in certificates(pem.authority).map_err(|e| of_authority(&e))? {
            roots.add(root).map_err(|e| of_authority(&e))?;
        }
        let roots = Arc::new(roots);
        let revoked: std::result::Result<Vec<_>, _> =
            CertificateRevocationListDer::pem_slice_iter(pem.revoked.as_bytes()).collect();
        let revoked = revoked.map_err(|e| bad("the list of revoked certificates")(&e))?;
        let chain = certificates(pem.certificates).map_err(|e| bad("this member's certificate")(&e))?;
        let key =
            || PrivateKeyDer::from_pem_slice(pem.key.as_bytes()).map_err(|e| bad("this member's key")(&e));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(revoked.clone())
            .build()
            .map_err(|e| of_authority(&e))?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(revoked)
            .build()
            .map_err(|e| of_authority(&e))?;
        let failed = |error: rustls::Error| bad("this member's certificate and key")(&error);
        let server = |kinds: &[TlsMemberKind]| -> Result<ServerConfig> {
            let clients = NamedClients { inner: clients.clone(), names: names(pem.fleet, kinds)? };
            let mut server = ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&rustls::version::TLS13])
                .map_err(failed)?
                .with_client_cert_verifier(Arc::new(clients))
                .with_single_cert(chain.clone(), key()?)
                .map_err(failed)?;
            // streams are long-lived, so session tickets are never used
            server.send_tls13_tickets = 0;
            Ok(server)
        };
        let servers =
            Arc::new(NamedServers { inner: servers, names: names(pem.fleet, &[TlsMemberKind::Worker])? });
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(failed)?
            .dangerous()
            .with_custom_certificate_verifier(servers.clone())
            .with_client_auth_cert(chain.clone(), key()?)
            .map_err(failed)?;
        client.resumption = rustls::client::Resumption::disabled();
        let mut control_server = server(&[TlsMemberKind::Router, TlsMemberKind::Worker])?;
        let mut control_client = client.clone();
        control_server.alpn_protocols = vec![b"h2".to_vec()];
        control_client.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Configs {
            server: Arc::new(server(&[TlsMemberKind::Worker])?),
            control_server: Arc::new(control_server),
            client: Arc::new(client),
            control_client: Arc::new(control_client),
            clients,
            servers,
        })
    }

    pub(super) fn believe(&self, shown: &[CertificateDer<'_>], end: TlsEnd, began: UnixTime) -> bool {
        let Some((member, authorities)) = shown.split_first() else { return false };
        match end {
            TlsEnd::Caller => self.clients.verify_client_cert(member, authorities, began).is_ok(),
            TlsEnd::Called => {
                let any = &self.servers.names[0];
                self.servers.verify_server_cert(member, authorities, any, &[], began).is_ok()
            }
        }
    }
}
