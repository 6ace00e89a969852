//! Passes a descriptor from one process to another: one line of text, secured like KV itself.

use crate::security::Security;
use crate::stream::SecureStream;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// Timeout for the handshake and for transferring the line.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time without any packets after which a peer's host counts as gone.
const SILENCE: Duration = Duration::from_secs(10);
/// Maximum length of the line, which holds a few descriptors.
const LINE_BYTES: u64 = 64 << 10;

/// Listens for peers that fetch the descriptor.
pub struct DescriptorListener {
    listener: TcpListener,
    security: Security,
}

/// A fetched line with its connection; dropping it tells the other end that the peer is gone.
pub struct FetchedDescriptor {
    /// The line that the other end sent.
    pub line: String,
    _link: BufReader<SecureStream>,
}

fn failed(what: &str, peer: SocketAddr, error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Closed, format!("{peer}: {what}: {error}"))
}

impl DescriptorListener {
    /// Listens on `address`.
    ///
    /// # Errors
    /// `Unsupported` if the line would leave this host unprotected, `Other` if the address cannot be bound.
    pub fn open(address: SocketAddr, security: Security) -> Result<Self> {
        security.check(&address)?;
        let listener = TcpListener::bind(address)
            .map_err(|error| Error::new(ErrorKind::Other, format!("cannot listen on {address}: {error}")))?;
        Ok(DescriptorListener { listener, security })
    }

    /// Returns the bound address, including the actual port.
    ///
    /// # Errors
    /// If the operating system does not report it.
    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|error| Error::new(ErrorKind::Other, error.to_string()))
    }

    /// Accepts one peer, sends it `line`, and returns once it disconnects.
    ///
    /// # Errors
    /// `Closed` if the peer is not admitted or disconnects early; the next one may succeed.
    pub fn send_once(&self, line: &str) -> Result<SocketAddr> {
        let accepted = self.listener.accept();
        let (socket, peer) = accepted.map_err(|error| Error::new(ErrorKind::Other, error.to_string()))?;
        let link = self.security.welcome(socket, SILENCE, Instant::now() + PATIENCE);
        let mut link = link.map_err(|error| failed("no connection", peer, error))?;
        let told = link.socket().set_write_timeout(Some(PATIENCE)).and_then(|()| writeln!(link, "{line}"));
        told.map_err(|error| failed("say how memory is reached", peer, error))?;
        let silent = link.socket().set_read_timeout(None);
        silent.map_err(|error| failed("set up", peer, error))?;
        // nothing is expected, and how the connection ends does not matter
        let _ = link.read(&mut [0]);
        Ok(peer)
    }
}

/// Fetches the line from `address`.
///
/// # Errors
/// `Unsupported` if the address is beyond this host and the connection is unprotected; `Closed` if no process
/// answers or the certificates do not match.
pub fn fetch_descriptor(address: SocketAddr, security: &Security) -> Result<FetchedDescriptor> {
    security.check(&address)?;
    let link = security.call(address, SILENCE, Instant::now() + PATIENCE);
    let link = link.map_err(|error| failed("no connection", address, error))?;
    let patient = link.socket().set_read_timeout(Some(PATIENCE));
    patient.map_err(|error| failed("set up", address, error))?;
    let (mut reader, mut line) = (BufReader::new(link), String::new());
    reader
        .by_ref()
        .take(LINE_BYTES)
        .read_line(&mut line)
        .map_err(|error| failed("no answer", address, error))?;
    if !line.ends_with('\n') {
        return Err(failed("no answer", address, "the connection ended, or another service listens there"));
    }
    Ok(FetchedDescriptor { line: line.trim_end().to_owned(), _link: reader })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn who_asks_is_told_and_who_told_knows_when_they_are_gone() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let lobby = DescriptorListener::open(address, Security::LoopbackOnly).unwrap();
        let address = lobby.address().unwrap();
        std::thread::scope(|scope| {
            let teller = scope.spawn(|| lobby.send_once("the way"));
            let told = fetch_descriptor(address, &Security::LoopbackOnly).unwrap();
            assert_eq!(told.line, "the way");
            assert!(!teller.is_finished());
            drop(told);
            assert!(teller.join().unwrap().unwrap().ip().is_loopback());
        });
    }

    #[test]
    fn nothing_is_told_beyond_the_host_in_the_clear() {
        let beyond = SocketAddr::from(([192, 0, 2, 1], 1));
        for error in [
            fetch_descriptor(beyond, &Security::LoopbackOnly).err().unwrap(),
            DescriptorListener::open(beyond, Security::LoopbackOnly).err().unwrap(),
        ] {
            assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
        }
    }
}
