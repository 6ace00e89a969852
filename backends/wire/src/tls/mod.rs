//! Mutual TLS: only holders of a certificate from the fleet's authority that carries the fleet's name may
//! read or write.

mod configs;
mod named;
mod session;

pub(crate) use session::TlsSession;

use crate::stream::SecureStream;
use configs::{Configs, name, names};
use mixfleet_hal::{Error, Result};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use session::shake;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Interval between checks of the certificate files.
const LOOK: Duration = Duration::from_secs(1);

/// A member's certificates, as PEM text.
#[derive(Clone, Copy)]
pub struct TlsPem<'a> {
    /// Certificates of the authority that signed all members.
    pub authority: &'a str,
    /// This member's certificate, and any intermediate ones up to the authority.
    pub certificates: &'a str,
    /// This member's private key.
    pub key: &'a str,
    /// Certificate revocation lists, one for each authority; empty if none are used.
    pub revoked: &'a str,
    /// The fleet's DNS name. A certificate with this name is valid for a member of any kind; one with
    /// `worker.` or `router.` in front is valid for that kind. The whole fleet shares one name because
    /// members, and with them addresses, come and go.
    pub fleet: &'a str,
}

/// A member's certificates, as files that are checked periodically and reloaded when they change.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// As for [`TlsPem::authority`].
    pub authority: PathBuf,
    /// As for [`TlsPem::certificates`].
    pub certificates: PathBuf,
    /// As for [`TlsPem::key`].
    pub key: PathBuf,
    /// As for [`TlsPem::revoked`].
    pub revoked: Option<PathBuf>,
    /// As for [`TlsPem::fleet`].
    pub fleet: String,
}

/// The kind of a fleet member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMemberKind {
    /// A router, which decides.
    Router,
    /// A worker, which has devices.
    Worker,
}

/// A callback for each time that the files were reloaded, or could not be.
pub type OnRenewal = dyn Fn(std::result::Result<(), Error>) + Send + Sync;

/// The identity that a member presents, and its trusted authorities.
pub struct TlsIdentity {
    files: Option<(TlsFiles, Box<OnRenewal>)>,
    fleet: String,
    current: Mutex<Current>,
}

struct Current {
    configs: Configs,
    /// Number of times the files have been reloaded.
    generation: u64,
    stamps: Vec<TlsFileStamp>,
    looked: Instant,
    /// Whether the unusable files have been reported.
    is_said: bool,
}

/// The end of a connection that presented certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsEnd {
    /// The client.
    Caller,
    /// The server.
    Called,
}

/// Tells whether the certificates presented at the start of a connection are still trusted, since a
/// revocation list may have arrived later.
pub struct RevocationWatch {
    identity: Arc<TlsIdentity>,
    shown: Vec<CertificateDer<'static>>,
    end: TlsEnd,
    /// Time of the handshake, against which expiry is checked: a certificate that expires while its
    /// connection is open is no reason to close it.
    began: UnixTime,
    /// Generation of the files that it was last checked against.
    generation: Option<u64>,
    is_believed: bool,
}

impl RevocationWatch {
    /// Whether the peer is trusted according to the current files, which are checked at most once a second.
    pub fn is_believed(&mut self) -> bool {
        if let Some((generation, configs)) = self.identity.newer(self.generation) {
            self.generation = Some(generation);
            self.is_believed = configs.believe(&self.shown, self.end, self.began);
        }
        self.is_believed
    }
}

/// A file's length, modification time and inode; a difference in any means that the file was replaced.
type TlsFileStamp = (u64, Option<SystemTime>, u64);

impl std::fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.fleet)
    }
}

impl TlsFiles {
    fn paths(&self) -> impl Iterator<Item = &Path> {
        let needed = [&self.authority, &self.certificates, &self.key];
        needed.into_iter().chain(self.revoked.as_ref()).map(PathBuf::as_path)
    }

    fn stamps(&self) -> Vec<TlsFileStamp> {
        let stamp = |path: &Path| {
            use std::os::unix::fs::MetadataExt;
            let meta = std::fs::metadata(path).ok();
            meta.map_or((0, None, 0), |meta| (meta.len(), meta.modified().ok(), meta.ino()))
        };
        self.paths().map(stamp).collect()
    }

    fn read(&self) -> Result<Configs> {
        let text = |path: &Path| {
            mixfleet_hal::files::read_text(path)
                .map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
        };
        let revoked = self.revoked.as_deref().map(text).transpose()?.unwrap_or_default();
        Configs::new(&TlsPem {
            authority: &text(&self.authority)?,
            certificates: &text(&self.certificates)?,
            key: &text(&self.key)?,
            revoked: &revoked,
            fleet: &self.fleet,
        })
    }
}

impl TlsIdentity {
    /// Creates an identity from fixed certificates.
    ///
    /// # Errors
    /// `Invalid` with the fault of the files.
    pub fn new(pem: &TlsPem<'_>) -> Result<Self> {
        let current = Current::new(Configs::new(pem)?, Vec::new());
        Ok(TlsIdentity { files: None, fleet: pem.fleet.into(), current: Mutex::new(current) })
    }

    /// Creates an identity from files; later connections use newer contents if they are valid.
    ///
    /// # Errors
    /// `Invalid` with the fault of the present files.
    pub fn of_files(files: TlsFiles, on_renewal: Box<OnRenewal>) -> Result<Self> {
        // stamps are taken first, so that a change during the read leads to another read
        let stamps = files.stamps();
        let current = Mutex::new(Current::new(files.read()?, stamps));
        Ok(TlsIdentity { fleet: files.fleet.clone(), files: Some((files, on_renewal)), current })
    }

    fn configs(&self) -> Configs {
        self.current().configs.clone()
    }

    /// Returns the certificates loaded since the given generation.
    fn newer(&self, than: Option<u64>) -> Option<(u64, Configs)> {
        let current = self.current();
        (Some(current.generation) != than).then(|| (current.generation, current.configs.clone()))
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((files, on_renewal)) = &self.files
            && current.looked.elapsed() >= LOOK
        {
            current.look(files, on_renewal);
        }
        current
    }

    /// Creates a watch over a peer that presented these certificates, its own first, and was admitted.
    pub fn watch(self: &Arc<Self>, shown: &[CertificateDer<'_>], end: TlsEnd) -> RevocationWatch {
        let shown = shown.iter().map(|certificate| certificate.clone().into_owned()).collect();
        let (identity, began) = (self.clone(), UnixTime::now());
        RevocationWatch { identity, shown, end, began, generation: None, is_believed: true }
    }

    /// Returns the configuration for accepting calls of routers and workers over HTTP/2.
    pub fn control_server(&self) -> Arc<ServerConfig> {
        self.configs().control_server
    }

    /// Returns the configuration for calling a worker over HTTP/2.
    pub fn control_client(&self) -> Arc<ClientConfig> {
        self.configs().control_client
    }

    /// Returns the fleet's name, which certificates are checked against.
    pub fn server_name(&self) -> ServerName<'static> {
        name(&self.fleet).expect("it was one when the configs were made")
    }

    /// Whether an admitted certificate is valid for a member of this kind.
    pub fn is_of(&self, certificate: &CertificateDer<'_>, kind: TlsMemberKind) -> bool {
        names(&self.fleet, &[kind]).is_ok_and(|names| named::has_one(certificate, &names))
    }

    /// Runs the passive end of a handshake; once it returns, the peer has presented a valid certificate.
    pub(crate) fn accept(self: &Arc<Self>, socket: TcpStream, deadline: Instant) -> io::Result<SecureStream> {
        let connection = ServerConnection::new(self.configs().server).map_err(io::Error::other)?;
        shake(self, socket, connection.into(), deadline)
    }

    /// Starts [`accept`](Self::accept) without blocking; the handshake continues as the stream receives.
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    pub(crate) fn begin_accept(self: &Arc<Self>, socket: TcpStream) -> io::Result<SecureStream> {
        let connection = ServerConnection::new(self.configs().server).map_err(io::Error::other)?;
        Ok(SecureStream::tls(socket, TlsSession::begun(connection.into(), self)))
    }

    /// Runs the active end of a handshake.
    pub(crate) fn connect(
        self: &Arc<Self>,
        socket: TcpStream,
        deadline: Instant,
    ) -> io::Result<SecureStream> {
        let connection = ClientConnection::new(self.configs().client, self.server_name());
        shake(self, socket, connection.map_err(io::Error::other)?.into(), deadline)
    }
}

impl Current {
    fn new(configs: Configs, stamps: Vec<TlsFileStamp>) -> Self {
        Current { configs, generation: 0, stamps, looked: Instant::now(), is_said: false }
    }

    /// Reloads the files if they have changed. Unusable ones are tried again, since they may be half written.
    fn look(&mut self, files: &TlsFiles, on_renewal: &OnRenewal) {
        self.looked = Instant::now();
        let stamps = files.stamps();
        if stamps == self.stamps {
            return;
        }
        match files.read() {
            Ok(configs) => {
                (self.configs, self.stamps, self.is_said) = (configs, stamps, false);
                self.generation += 1;
                on_renewal(Ok(()));
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_said, true) {
                    on_renewal(Err(error));
                }
            }
        }
    }
}
