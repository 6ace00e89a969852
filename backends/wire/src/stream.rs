//! A TCP stream, in the clear or under TLS.

use mixfleet_hal::cast::{to_i32, to_u32, to_usize};
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::poll::{self, Patience};
#[cfg(feature = "tls")]
use crate::tls::TlsSession;

/// A socket with an optional TLS session; it blocks or not, as the socket does.
pub(crate) struct SecureStream {
    socket: TcpStream,
    patience: Option<Patience>,
    #[cfg(feature = "tls")]
    session: Option<Box<TlsSession>>,
}

impl SecureStream {
    /// Wraps a socket without encryption.
    pub(crate) fn plain(socket: TcpStream) -> Self {
        SecureStream {
            socket,
            patience: None,
            #[cfg(feature = "tls")]
            session: None,
        }
    }

    /// Wraps a socket with a TLS session.
    #[cfg(feature = "tls")]
    pub(crate) fn tls(socket: TcpStream, session: TlsSession) -> Self {
        SecureStream { socket, patience: None, session: Some(Box::new(session)) }
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Lets reads spin briefly when the next data is likely to come at once. For blocking sockets.
    pub(crate) fn stay_awake(&mut self) {
        self.patience = Some(Patience::new());
    }

    /// Sends some bytes of `parts` and returns how many.
    ///
    /// # Errors
    /// `WouldBlock` if nothing can be sent now.
    pub(crate) fn send(&mut self, parts: &[libc::iovec]) -> io::Result<usize> {
        #[cfg(feature = "tls")]
        if let Some(session) = &mut self.session {
            return session.send(&mut self.socket, parts);
        }
        // SAFETY: all zero is an empty message.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_ptr().cast_mut();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: the parts are valid as their creator guarantees; the kernel only reads them.
        counted(|| unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, NO_SIGNAL) })
    }

    /// Receives into `parts`, in order; zero bytes mean that the peer has closed.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived yet.
    pub(crate) fn receive(&mut self, parts: &[libc::iovec]) -> io::Result<usize> {
        let mut awaited = SocketWait { socket: &self.socket, patience: self.patience.as_mut() };
        #[cfg(feature = "tls")]
        if let Some(session) = &mut self.session {
            return session.receive(&mut awaited, parts);
        }
        awaited.wait()?;
        // SAFETY: as in `send`; the kernel writes plain bytes there.
        counted(|| unsafe { libc::readv(self.socket.as_raw_fd(), parts.as_ptr(), to_i32(parts.len())) })
    }

    /// Sends buffered encrypted bytes.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        #[cfg(feature = "tls")]
        if let Some(session) = &mut self.session {
            return session.flush(&mut self.socket);
        }
        Ok(())
    }
}

/// A socket that is about to be read.
struct SocketWait<'a> {
    socket: &'a TcpStream,
    patience: Option<&'a mut Patience>,
}

impl SocketWait<'_> {
    fn wait(&mut self) -> io::Result<()> {
        match &mut self.patience {
            Some(patience) => patience.wait(&mut [poll::readable(self.socket)], None),
            None => Ok(()),
        }
    }
}

#[cfg(feature = "tls")]
impl io::Read for SocketWait<'_> {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        self.wait()?;
        self.socket.read(place)
    }
}

impl io::Read for SecureStream {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        self.receive(&[libc::iovec { iov_base: place.as_mut_ptr().cast(), iov_len: place.len() }])
    }
}

impl io::Write for SecureStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let base = bytes.as_ptr().cast_mut().cast();
        self.send(&[libc::iovec { iov_base: base, iov_len: bytes.len() }])
    }

    fn flush(&mut self) -> io::Result<()> {
        SecureStream::flush(self)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const NO_SIGNAL: i32 = libc::MSG_NOSIGNAL;
/// Elsewhere Rust's runtime ignores the signal for the whole process.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const NO_SIGNAL: i32 = 0;

fn counted(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match call() {
            count if count >= 0 => return Ok(to_usize(count)),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Disables Nagle's algorithm, and drops a peer whose host has been silent for `silence`.
pub(crate) fn tune(socket: &TcpStream, silence: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    set_option(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    #[cfg(target_os = "linux")]
    {
        const PROBES: i32 = 3;
        let quarter = (silence.as_secs() / 4).clamp(1, 1 << 14) as i32;
        let silence_ms = silence.as_millis().clamp(1, 1 << 30) as i32;
        set_option(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, quarter)?;
        set_option(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, quarter)?;
        set_option(socket, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, PROBES)?;
        set_option(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, silence_ms)?;
        if socket.local_addr()?.ip() == socket.peer_addr()?.ip() {
            unpaced(socket);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = silence;
    Ok(())
}

/// Chooses a congestion control that sends as much as the window allows. BBR, the default on many hosts,
/// paces by timers, which only delays two processes on one host: iperf3 lost a third to it
/// (docs/results/wire.md). If it cannot be chosen, the host's default stays.
#[cfg(target_os = "linux")]
fn unpaced(socket: &TcpStream) {
    // available in every kernel, to every user
    const NAME: &[u8] = b"reno";
    let length = to_u32(NAME.len());
    // SAFETY: an open socket, and a place of the given length.
    let _status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            NAME.as_ptr().cast(),
            length,
        )
    };
}

fn set_option(socket: &TcpStream, level: i32, name: i32, value: i32) -> io::Result<()> {
    let length = to_u32(size_of::<i32>());
    // SAFETY: an open socket, and a place of the given length.
    let status =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length) };
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the time left until `deadline`, at least the minimum that a socket timeout accepts.
pub(crate) fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_paced_on_one_host() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tune(&socket, Duration::from_secs(10)).unwrap();
        let mut name = [0u8; 16];
        let mut length = name.len() as libc::socklen_t;
        // SAFETY: an open socket, and a place of the given length.
        let status = unsafe {
            let place = name.as_mut_ptr().cast();
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_CONGESTION,
                place,
                &raw mut length,
            )
        };
        assert_eq!((status, &name[..5]), (0, &b"reno\0"[..]));
    }
}
