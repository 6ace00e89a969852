//! Certificate verification by name: the authority's signature alone does not say what a certificate is for.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use std::sync::Arc;

/// Whether the certificate carries one of these names.
pub(super) fn has_one(certificate: &CertificateDer<'_>, names: &[ServerName<'static>]) -> bool {
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return false };
    names.iter().any(|name| verify_server_name(&parsed, name).is_ok())
}

/// Delegates to the inner verifier the check that the peer holds the key of its certificate.
macro_rules! signatures_of_inner {
    ($this:ident) => {
        fn verify_tls12_signature(
            &$this,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            $this.inner.verify_tls12_signature(message, certificate, signed)
        }

        fn verify_tls13_signature(
            &$this,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            $this.inner.verify_tls13_signature(message, certificate, signed)
        }

        fn supported_verify_schemes(&$this) -> Vec<SignatureScheme> {
            $this.inner.supported_verify_schemes()
        }
    };
}

/// Admits clients whose certificate the authority signed for one of the names.
#[derive(Debug)]
pub(super) struct NamedClients {
    pub(super) inner: Arc<dyn ClientCertVerifier>,
    pub(super) names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for NamedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        if has_one(end_entity, &self.names) {
            Ok(verified)
        } else {
            Err(CertificateError::NotValidForName.into())
        }
    }

    signatures_of_inner!(self);
}

/// Trusts servers whose certificate the authority signed for one of the names, whichever name was requested.
#[derive(Debug)]
pub(super) struct NamedServers {
    pub(super) inner: Arc<WebPkiServerVerifier>,
    pub(super) names: Vec<ServerName<'static>>,
}

impl ServerCertVerifier for NamedServers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let mut outcome = Err(CertificateError::NotValidForName.into());
        for name in &self.names {
            outcome = self.inner.verify_server_cert(end_entity, intermediates, name, ocsp, now);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    signatures_of_inner!(self);
}
