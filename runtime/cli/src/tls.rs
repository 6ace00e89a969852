//! Certificates on the command line.

#[cfg(any(feature = "fleet", feature = "tls"))]
use anyhow::Context;
use anyhow::Result;
use clap::Args;
use mixfleet_wire::Security;
use std::path::{Path, PathBuf};

/// Options for authentication between processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct TlsArgs {
    /// Certificate of the authority that signed all members'
    #[arg(long, value_name = "PEM", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// This member's certificate
    #[arg(long, value_name = "PEM", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// This member's key
    #[arg(long, value_name = "PEM", requires = "tls_ca")]
    tls_key: Option<PathBuf>,
    /// Revoked certificates: a CRL of each authority
    #[arg(long, value_name = "PEM", requires = "tls_ca", hide = true)]
    tls_crl: Option<PathBuf>,
    /// DNS name in all members' certificates [default: mixfleet]
    #[arg(long, value_name = "DNS", default_value = "mixfleet", hide_default_value = true)]
    tls_name: String,
}

/// The content of the files.
#[cfg(feature = "fleet")]
pub(crate) struct Files {
    pub(crate) authority: String,
    pub(crate) certificates: String,
    pub(crate) key: String,
    pub(crate) name: String,
}

impl TlsArgs {
    /// Whether certificates are given.
    #[cfg(feature = "fleet")]
    pub(crate) fn are_given(&self) -> bool {
        self.tls_ca.is_some()
    }

    /// Reads the files; none if none are given.
    #[cfg(feature = "fleet")]
    pub(crate) fn read(&self) -> Result<Option<Files>> {
        let (Some(ca), Some(cert), Some(key)) = (&self.tls_ca, &self.tls_cert, &self.tls_key) else {
            return Ok(None);
        };
        let read = |flag: &str, file: &Path| {
            mixfleet_hal::files::read_text(file).with_context(|| format!("{flag} {}", file.display()))
        };
        let (authority, certificates) = (read("--tls-ca", ca)?, read("--tls-cert", cert)?);
        let (key, name) = (read("--tls-key", key)?, self.tls_name.clone());
        Ok(Some(Files { authority, certificates, key, name }))
    }

    /// The security of connections between processes.
    pub(crate) fn security(&self) -> Result<Security> {
        let (Some(ca), Some(cert), Some(key)) = (&self.tls_ca, &self.tls_cert, &self.tls_key) else {
            return Ok(Security::LoopbackOnly);
        };
        encrypted(ca, cert, key, self)
    }
}

#[cfg(feature = "tls")]
fn encrypted(ca: &Path, cert: &Path, key: &Path, args: &TlsArgs) -> Result<Security> {
    let files = mixfleet_wire::TlsFiles {
        authority: ca.into(),
        certificates: cert.into(),
        key: key.into(),
        revoked: args.tls_crl.clone(),
        fleet: args.tls_name.clone(),
    };
    let on_renewal = |renewed: Result<(), mixfleet_hal::Error>| match renewed {
        Ok(()) => tracing::info!("certificates were read anew"),
        Err(error) => tracing::warn!(%error, "certificates cannot be read anew: the old ones stay in use"),
    };
    let identity = mixfleet_wire::TlsIdentity::of_files(files, Box::new(on_renewal));
    Ok(Security::Tls(std::sync::Arc::new(identity.context("--tls-ca, --tls-cert, --tls-key, --tls-crl")?)))
}

#[cfg(not(feature = "tls"))]
fn encrypted(_: &Path, _: &Path, _: &Path, _: &TlsArgs) -> Result<Security> {
    anyhow::bail!("this build has no TLS: build with the feature tls")
}
