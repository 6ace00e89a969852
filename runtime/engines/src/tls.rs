//! Connections to engines over https: TLS 1.3, with certificates verified by the system's authorities or by
//! those that the operator names.

use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, ClientConfig, Error, RootCertStore};
use std::sync::Arc;

pub(crate) type Connector = HttpsConnector<HttpConnector>;

/// Whether engines can be reached by https.
pub(crate) fn is_built() -> Result<(), String> {
    Ok(())
}

/// A connector to an engine, by https or not, whose certificate is verified by `authorities`, PEM; by default
/// by the system's.
///
/// # Errors
/// When there are no certificates of authorities.
pub(crate) fn connector(
    mut http: HttpConnector,
    is_https: bool,
    authorities: Option<&str>,
) -> Result<Connector, String> {
    http.enforce_http(false);
    // one that is reached by http needs none
    let roots = if is_https { roots(authorities)? } else { RootCertStore::empty() };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| format!("TLS cannot be set up: {error}"))?;
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let builder = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(config);
    Ok(if is_https { builder.https_only() } else { builder.https_or_http() }
        .enable_http1()
        .wrap_connector(http))
}

/// Trusted authorities for an engine's certificate.
fn roots(authorities: Option<&str>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    match authorities {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                let certificate = certificate.map_err(|error| format!("it is no PEM: {error:?}"))?;
                roots
                    .add(certificate)
                    .map_err(|error| format!("a certificate in it is none of an authority: {error}"))?;
            }
            if roots.is_empty() {
                return Err("it has no certificate (PEM begins with -----BEGIN CERTIFICATE-----)".into());
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
                return Err(format!(
                    "this system has no certificates of authorities{why}; install them (Debian: ca-certificates), or name one by ca=FILE"
                ));
            }
        }
    }
    Ok(roots)
}

/// What TLS found wrong with the connection to `host`, if it did.
pub(crate) fn words(error: &(dyn std::error::Error + 'static), host: &str) -> Option<String> {
    if let Some(found) = error.downcast_ref::<Error>() {
        return Some(wrong(found, host));
    }
    // the content of an I/O error is not its source
    let within = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
    match within {
        Some(within) => words(within, host),
        None => words(error.source()?, host),
    }
}

fn wrong(error: &Error, host: &str) -> String {
    match error {
        // an authority of the same name may have signed others
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "its certificate is not signed by a trusted authority; name the authority with ca=FILE".into()
        }
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => format!("its certificate is not for '{host}': reach it by a name that the certificate has"),
        Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "its certificate has expired".into()
        }
        Error::InvalidCertificate(why) => format!("its certificate is not valid: {why}"),
        Error::InvalidMessage(_) => "it does not speak TLS there; is it reached by http://?".into(),
        other => format!("TLS with it failed: {other}"),
    }
}
