//! What a connection of bytes in both directions goes over.

use crate::poll::{self, Waitable};
use crate::stream::SecureStream;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How long a sender whose peer takes nothing waits before it looks again whether something came.
pub(crate) const LOOK: Duration = Duration::from_millis(10);

/// One end of such a connection.
pub(crate) trait Pipe: Send + Sync {
    /// Writes some bytes of `parts`, or buffered ones if `parts` is empty, and returns how many.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room.
    fn send(&self, parts: &[&[u8]]) -> io::Result<usize>;

    /// Reads some bytes into `place`, and returns how many; zero means that the peer has ended.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived yet.
    fn receive(&self, place: &mut [u8]) -> io::Result<usize>;

    /// Whether bytes have arrived, or what ends the connection.
    fn has_bytes(&self) -> io::Result<bool>;

    /// Sleeps until bytes have arrived, the peer has ended or the time is over; says whether it may be one of
    /// the first two.
    fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool>;

    /// Waits a little until bytes can be sent, or received by `meanwhile`, which then returns true.
    fn wait_to_send(&self, meanwhile: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<()>;

    /// The address of the other end, where it has one of its own.
    fn peer(&self) -> Option<io::Result<SocketAddr>> {
        None
    }

    /// Ends the direction in which this end sends.
    fn end_sending(&self);

    /// Ends the connection.
    fn close(&self);
}

/// Waits for bytes or for the peer's end.
impl Waitable for &dyn Pipe {
    fn look(&mut self) -> io::Result<bool> {
        self.has_bytes()
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        Pipe::sleep(*self, timeout)
    }
}

/// A socket, with or without TLS.
pub(crate) struct SocketPipe {
    socket: TcpStream,
    stream: Mutex<SecureStream>,
}

impl SocketPipe {
    pub(crate) fn new(stream: SecureStream) -> io::Result<Self> {
        let socket = stream.socket().try_clone()?;
        socket.set_nonblocking(true)?;
        Ok(SocketPipe { socket, stream: Mutex::new(stream) })
    }

    fn with<T>(&self, work: impl FnOnce(&mut SecureStream) -> io::Result<T>) -> io::Result<T> {
        work(&mut self.stream.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for `events`, and returns those that came.
    fn poll(&self, events: libc::c_short, timeout: Option<Duration>) -> io::Result<libc::c_short> {
        let mut entry = libc::pollfd { fd: self.socket.as_raw_fd(), events, revents: 0 };
        poll::wait(std::slice::from_mut(&mut entry), timeout)?;
        Ok(entry.revents)
    }
}

impl Pipe for SocketPipe {
    fn send(&self, parts: &[&[u8]]) -> io::Result<usize> {
        let one =
            |part: &&[u8]| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
        let parts: Vec<libc::iovec> = parts.iter().map(one).collect();
        self.with(|stream| if parts.is_empty() { stream.flush().map(|()| 0) } else { stream.send(&parts) })
    }

    fn receive(&self, place: &mut [u8]) -> io::Result<usize> {
        let part = libc::iovec { iov_base: place.as_mut_ptr().cast(), iov_len: place.len() };
        self.with(|stream| stream.receive(&[part]))
    }

    fn has_bytes(&self) -> io::Result<bool> {
        Pipe::sleep(self, Some(Duration::ZERO))
    }

    fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        Ok(self.poll(libc::POLLIN, timeout)? != 0)
    }

    fn wait_to_send(&self, meanwhile: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<()> {
        let came = self.poll(libc::POLLOUT | libc::POLLIN, Some(LOOK))?;
        let can_send = came & !libc::POLLIN != 0;
        if can_send || came == 0 || meanwhile()? {
            return Ok(());
        }
        self.poll(libc::POLLOUT, Some(LOOK)).map(drop)
    }

    fn peer(&self) -> Option<io::Result<SocketAddr>> {
        Some(self.socket.peer_addr())
    }

    fn end_sending(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
