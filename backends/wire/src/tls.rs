//! Mutual TLS: only holders of a certificate from the fleet's authority that carries the fleet's name may
//! read or write.

use crate::named::{NamedClients, NamedServers};
use crate::stream::{SecureStream, remaining};
use mixfleet_hal::{Error, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Plaintext encrypted ahead of the socket: a few records, so that it is still in the cache when sent.
const AHEAD_BYTES: usize = 256 * 1024;

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

/// The identity that a member presents, and whom it trusts.
pub struct TlsIdentity {
    files: Option<(TlsFiles, Box<OnRenewal>)>,
    fleet: String,
    current: Mutex<Current>,
}

struct Current {
    configs: Configs,
    /// Number of times the files have been reloaded.
    generation: u64,
    stamps: Vec<Stamp>,
    looked: Instant,
    /// Whether the unusable files have been reported.
    is_said: bool,
}

/// The TLS configurations for each kind of handshake.
#[derive(Clone)]
struct Configs {
    /// Admits workers, for KV.
    server: Arc<ServerConfig>,
    /// Admits members of either kind, for HTTP/2.
    control_server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    control_client: Arc<ClientConfig>,
    clients: Arc<dyn ClientCertVerifier>,
    servers: Arc<NamedServers>,
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
type Stamp = (u64, Option<SystemTime>, u64);

impl std::fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.fleet)
    }
}

fn bad(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> Error {
    move |error| Error::invalid(format!("{what} for TLS: {error}"))
}

fn name(text: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(text.to_owned()).map_err(|error| bad("the fleet's name")(&error))
}

fn names(fleet: &str, kinds: &[TlsMemberKind]) -> Result<Vec<ServerName<'static>>> {
    let of = |kind: &TlsMemberKind| match kind {
        TlsMemberKind::Router => name(&format!("router.{fleet}")),
        TlsMemberKind::Worker => name(&format!("worker.{fleet}")),
    };
    std::iter::once(name(fleet)).chain(kinds.iter().map(of)).collect()
}

impl Configs {
    fn new(pem: &TlsPem<'_>) -> Result<Self> {
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

    fn believe(&self, shown: &[CertificateDer<'_>], end: TlsEnd, began: UnixTime) -> bool {
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

impl TlsFiles {
    fn paths(&self) -> impl Iterator<Item = &Path> {
        let needed = [&self.authority, &self.certificates, &self.key];
        needed.into_iter().chain(self.revoked.as_ref()).map(PathBuf::as_path)
    }

    fn stamps(&self) -> Vec<Stamp> {
        let stamp = |path: &Path| {
            use std::os::unix::fs::MetadataExt;
            let meta = std::fs::metadata(path).ok();
            meta.map_or((0, None, 0), |meta| (meta.len(), meta.modified().ok(), meta.ino()))
        };
        self.paths().map(stamp).collect()
    }

    fn read(&self) -> Result<Configs> {
        let text = |path: &Path| {
            std::fs::read_to_string(path)
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
    /// `Invalid` with what is wrong with them.
    pub fn new(pem: &TlsPem<'_>) -> Result<Self> {
        let current = Current::new(Configs::new(pem)?, Vec::new());
        Ok(TlsIdentity { files: None, fleet: pem.fleet.into(), current: Mutex::new(current) })
    }

    /// Creates an identity from files; later connections use newer contents if they are valid.
    ///
    /// # Errors
    /// `Invalid` with what is wrong with them now.
    pub fn of_files(files: TlsFiles, on_renewal: Box<OnRenewal>) -> Result<Self> {
        // stamps first, so that anything written meanwhile is read again
        let stamps = files.stamps();
        let current = Mutex::new(Current::new(files.read()?, stamps));
        Ok(TlsIdentity { fleet: files.fleet.clone(), files: Some((files, on_renewal)), current })
    }

    fn configs(&self) -> Configs {
        self.current().configs.clone()
    }

    /// Returns what was loaded since the given generation.
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
        names(&self.fleet, &[kind]).is_ok_and(|names| crate::named::has_one(certificate, &names))
    }

    /// Runs the passive end of a handshake; once it returns, the peer has presented a valid certificate.
    pub(crate) fn accept(self: &Arc<Self>, socket: TcpStream, deadline: Instant) -> io::Result<SecureStream> {
        let connection = ServerConnection::new(self.configs().server).map_err(io::Error::other)?;
        shake(self, socket, connection.into(), deadline)
    }

    /// Starts [`accept`](Self::accept) without blocking; the handshake continues as the stream receives.
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    pub(crate) fn begin_accept(self: &Arc<Self>, socket: TcpStream) -> io::Result<SecureStream> {
        let mut connection = ServerConnection::new(self.configs().server).map_err(io::Error::other)?;
        connection.set_buffer_limit(Some(AHEAD_BYTES));
        Ok(SecureStream::tls(socket, TlsSession::new(connection.into(), self)))
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
    fn new(configs: Configs, stamps: Vec<Stamp>) -> Self {
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

fn shake(
    identity: &Arc<TlsIdentity>,
    socket: TcpStream,
    mut connection: Connection,
    deadline: Instant,
) -> io::Result<SecureStream> {
    connection.set_buffer_limit(Some(AHEAD_BYTES));
    while connection.is_handshaking() {
        connection.complete_io(&mut Timed { socket: &socket, deadline })?;
    }
    Ok(SecureStream::tls(socket, TlsSession::new(connection, identity)))
}

/// A blocking socket with a total deadline, however slowly the peer's bytes trickle in.
struct Timed<'a> {
    socket: &'a TcpStream,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(remaining(self.deadline)?))?;
        self.socket.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(remaining(self.deadline)?))?;
        self.socket.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state of an encrypted stream.
pub(crate) struct TlsSession {
    connection: Connection,
    identity: Arc<TlsIdentity>,
    /// Watches the peer's certificates, once it has presented them.
    watch: Option<RevocationWatch>,
}

impl TlsSession {
    fn new(connection: Connection, identity: &Arc<TlsIdentity>) -> Self {
        TlsSession { connection, identity: identity.clone(), watch: None }
    }

    /// Fails if the peer's certificate was revoked.
    fn check(&mut self) -> io::Result<()> {
        if self.watch.is_none() && !self.connection.is_handshaking() {
            let shown = self.connection.peer_certificates().unwrap_or_default();
            let end = match &self.connection {
                Connection::Client(_) => TlsEnd::Called,
                Connection::Server(_) => TlsEnd::Caller,
            };
            self.watch = Some(self.identity.watch(shown, end));
        }
        match self.watch.as_mut().is_none_or(RevocationWatch::is_believed) {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the other end's certificate was taken back",
            )),
        }
    }

    /// Encrypts some of `parts` and sends what the socket accepts.
    pub(crate) fn send(&mut self, socket: &mut TcpStream, parts: &[libc::iovec]) -> io::Result<usize> {
        self.check()?;
        self.flush(socket)?;
        let mut taken = 0;
        for part in parts {
            // SAFETY: the part is valid as whoever made it said, and its owner does not write it meanwhile;
            // if it does, other plain bytes are encrypted.
            let bytes = unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) };
            let written = self.connection.writer().write(bytes)?;
            taken += written;
            if written < bytes.len() {
                break;
            }
        }
        match self.flush(socket) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Sends buffered encrypted data.
    pub(crate) fn flush(&mut self, socket: &mut TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(socket)?;
        }
        Ok(())
    }

    /// Decrypts into `parts`.
    pub(crate) fn receive(&mut self, socket: &mut impl Read, parts: &[libc::iovec]) -> io::Result<usize> {
        loop {
            let taken = self.take(parts)?;
            if taken > 0 {
                self.check()?;
                return Ok(taken);
            }
            if self.connection.read_tls(socket)? == 0 {
                return Ok(0);
            }
            let state = self.connection.process_new_packets().map_err(io::Error::other)?;
            if state.peer_has_closed() && state.plaintext_bytes_to_read() == 0 {
                return Ok(0);
            }
        }
    }

    /// Copies decrypted data to `parts`.
    fn take(&mut self, parts: &[libc::iovec]) -> io::Result<usize> {
        let mut taken = 0;
        for part in parts {
            let mut filled = 0;
            while filled < part.iov_len {
                let mut reader = self.connection.reader();
                let chunk = match reader.fill_buf() {
                    Ok(chunk) if !chunk.is_empty() => chunk,
                    Ok(_) => return Ok(taken),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(taken),
                    Err(error) => return Err(error),
                };
                let bytes = chunk.len().min(part.iov_len - filled);
                // SAFETY: the part is valid as whoever made it said, and not in the session's own buffer.
                unsafe {
                    let place = part.iov_base.cast::<u8>().add(filled);
                    std::ptr::copy_nonoverlapping(chunk.as_ptr(), place, bytes);
                }
                reader.consume(bytes);
                filled += bytes;
                taken += bytes;
            }
        }
        Ok(taken)
    }
}
