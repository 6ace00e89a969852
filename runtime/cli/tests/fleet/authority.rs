//! Certificates for the members of a fleet.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::Path;

/// Writes a new authority's certificate and a member's to `directory`, under names with `whose`; the flags
/// that name them.
pub(crate) fn member(directory: &Path, whose: &str) -> Vec<String> {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(vec!["mixfleet".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    let files = [
        ("--tls-ca", "ca", authority.as_ref().pem()),
        ("--tls-cert", "member", certificate.pem()),
        ("--tls-key", "key", key.serialize_pem()),
    ];
    let write = |(flag, name, pem): (&str, &str, String)| {
        let path = directory.join(format!("{whose}-{name}.pem"));
        std::fs::write(&path, pem).unwrap();
        [flag.to_owned(), path.to_string_lossy().into_owned()]
    };
    files.into_iter().flat_map(write).collect()
}
