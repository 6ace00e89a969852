//! Mutual TLS: who has no certificate of the fleet's authority neither reads nor writes.

use crate::link::{Link, remaining};
use mixfleet_hal::{Error, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Plaintext that is encrypted before the socket takes it: some records, so that it is still in the cache.
const AHEAD_BYTES: usize = 256 * 1024;

/// A member's certificates, as text.
pub struct Pem<'a> {
    /// Of the authority that signed all members.
    pub authority: &'a str,
    /// Of this member, and those between it and the authority.
    pub certificates: &'a str,
    /// Of this member.
    pub key: &'a str,
    /// The DNS name in every member's certificate. One for the whole fleet: members come and go, and with
    /// them their addresses.
    pub fleet: &'a str,
}

/// What a member shows to others, and whom it believes.
#[derive(Clone)]
pub struct Identity {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    fleet: ServerName<'static>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({:?})", self.fleet)
    }
}

impl Identity {
    /// Reads a member's certificates.
    ///
    /// # Errors
    /// `Invalid` with what is wrong with them.
    pub fn new(pem: &Pem<'_>) -> Result<Self> {
        let bad = |what: &'static str| {
            move |error: &dyn std::fmt::Display| Error::invalid(format!("{what} for KV over TLS: {error}"))
        };
        let certificates = |text: &str| {
            CertificateDer::pem_slice_iter(text.as_bytes()).collect::<std::result::Result<Vec<_>, _>>()
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(pem.authority).map_err(|e| bad("the authority's certificate")(&e))? {
            roots.add(root).map_err(|e| bad("the authority's certificate")(&e))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(pem.certificates).map_err(|e| bad("this member's certificate")(&e))?;
        let key =
            || PrivateKeyDer::from_pem_slice(pem.key.as_bytes()).map_err(|e| bad("this member's key")(&e));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|e| bad("the authority's certificate")(&e))?;
        let failed = |error: rustls::Error| bad("this member's certificate and key")(&error);
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(failed)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key()?)
            .map_err(failed)?;
        // streams live long: nobody comes back with a ticket
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(failed)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key()?)
            .map_err(failed)?;
        client.resumption = rustls::client::Resumption::disabled();
        let fleet = ServerName::try_from(pem.fleet.to_owned()).map_err(|e| bad("the fleet's name")(&e))?;
        Ok(Identity { server: Arc::new(server), client: Arc::new(client), fleet })
    }

    /// The passive end of a handshake: when it returns, the peer has shown a certificate.
    pub(crate) fn accept(&self, socket: TcpStream, deadline: Instant) -> io::Result<Link> {
        let connection = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        shake(socket, connection.into(), deadline)
    }

    /// As [`accept`](Self::accept), but the handshake goes on as the link receives.
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    pub(crate) fn begin_accept(&self, socket: TcpStream) -> io::Result<Link> {
        let mut connection = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        connection.set_buffer_limit(Some(AHEAD_BYTES));
        Ok(Link::tls(socket, Session { connection: connection.into() }))
    }

    /// The active end of a handshake.
    pub(crate) fn connect(&self, socket: TcpStream, deadline: Instant) -> io::Result<Link> {
        let connection = ClientConnection::new(self.client.clone(), self.fleet.clone());
        shake(socket, connection.map_err(io::Error::other)?.into(), deadline)
    }
}

fn shake(socket: TcpStream, mut connection: Connection, deadline: Instant) -> io::Result<Link> {
    connection.set_buffer_limit(Some(AHEAD_BYTES));
    while connection.is_handshaking() {
        connection.complete_io(&mut Timed { socket: &socket, deadline })?;
    }
    Ok(Link::tls(socket, Session { connection }))
}

/// A blocking socket until `deadline`, however slowly the peer's bytes come.
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
pub(crate) struct Session {
    connection: Connection,
}

impl Session {
    /// Encrypts some of `parts`, and sends what the socket takes.
    pub(crate) fn send(&mut self, socket: &mut TcpStream, parts: &[libc::iovec]) -> io::Result<usize> {
        self.flush(socket)?;
        let mut taken = 0;
        for part in parts {
            // SAFETY: the part is valid as whoever made it said, and its owner does not write it meanwhile; if it
            // does, other plain bytes are encrypted.
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

    /// Sends what is encrypted.
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

    /// Copies what is decrypted to `parts`.
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
