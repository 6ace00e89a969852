//! An encrypted stream: its handshake, and the bytes in both directions.

use super::{RevocationWatch, TlsEnd, TlsIdentity};
use crate::stream::{SecureStream, remaining};
use rustls::Connection;
use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Plaintext encrypted ahead of the socket: a few records, so that it is still in the cache when sent.
const AHEAD_BYTES: usize = 256 * 1024;

/// Runs a handshake to its end, until `deadline` at most.
pub(super) fn shake(
    identity: &Arc<TlsIdentity>,
    socket: TcpStream,
    mut connection: Connection,
    deadline: Instant,
) -> io::Result<SecureStream> {
    connection.set_buffer_limit(Some(AHEAD_BYTES));
    while connection.is_handshaking() {
        connection.complete_io(&mut DeadlineSocket { socket: &socket, deadline })?;
    }
    Ok(SecureStream::tls(socket, TlsSession::new(connection, identity)))
}

/// A blocking socket with a total deadline, however slowly the peer's bytes trickle in.
struct DeadlineSocket<'a> {
    socket: &'a TcpStream,
    deadline: Instant,
}

impl Read for DeadlineSocket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(remaining(self.deadline)?))?;
        self.socket.read(buffer)
    }
}

impl Write for DeadlineSocket<'_> {
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

    /// Creates a session whose handshake continues as it receives.
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    pub(super) fn begun(mut connection: Connection, identity: &Arc<TlsIdentity>) -> Self {
        connection.set_buffer_limit(Some(AHEAD_BYTES));
        TlsSession::new(connection, identity)
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
                "the other end's certificate was revoked",
            )),
        }
    }

    /// Encrypts some of `parts` and sends what the socket accepts.
    pub(crate) fn send(&mut self, socket: &mut TcpStream, parts: &[libc::iovec]) -> io::Result<usize> {
        self.check()?;
        self.flush(socket)?;
        let mut taken = 0;
        for part in parts {
            // SAFETY: the part is valid as its creator guarantees, and its owner does not write it during the
            // call; if it does, other plain bytes are encrypted.
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
                // SAFETY: the part is valid as its creator guarantees, and not in the session's own buffer.
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
