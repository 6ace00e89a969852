//! Certificates for the members of a fleet.

#[path = "../../../../backends/wire/tests/authority/mod.rs"]
mod issuer;

use issuer::Authority;
use std::path::Path;

/// Writes a new authority's certificate and a member's to `directory`, under names with `whose`; the flags
/// that name them.
pub(crate) fn member(directory: &Path, whose: &str) -> Vec<String> {
    let authority = Authority::new();
    let (certificate, key) = authority.signs(&["mixfleet"]);
    let files = [
        ("--tls-ca", "ca", authority.pem()),
        ("--tls-cert", "member", certificate),
        ("--tls-key", "key", key),
    ];
    let write = |(flag, name, pem): (&str, &str, String)| {
        let path = directory.join(format!("{whose}-{name}.pem"));
        std::fs::write(&path, pem).unwrap();
        [flag.to_owned(), path.to_string_lossy().into_owned()]
    };
    files.into_iter().flat_map(write).collect()
}
