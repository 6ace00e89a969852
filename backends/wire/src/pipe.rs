//! Connections whose bytes lie in a ring at their receiver until they are read.

use crate::poll::{self, SPIN, Waitable};
use mixfleet_hal::cast::to_usize;
use std::io::{self, ErrorKind as IoKind};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Bytes that may be on their way in one direction: several pieces of data, which a core's cache holds.
pub(crate) const RING_BYTES: usize = 512 << 10;
/// Room that a sender waits for once there is none.
const ROOM_BYTES: usize = RING_BYTES / 4;
/// How long a sender without room sleeps between two looks.
const NAP: Duration = Duration::from_micros(50);

/// One end of such a connection.
pub(crate) trait Pipe: Send + Sync {
    /// Writes some bytes of `parts`, and returns how many.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room.
    fn send(&self, parts: &[&[u8]]) -> io::Result<usize>;

    /// Reads some bytes into `place`, and returns how many; zero means that the peer has ended.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived yet.
    fn receive(&self, place: &mut [u8]) -> io::Result<usize>;

    /// Whether bytes have arrived, or counters that end the connection.
    fn has_bytes(&self) -> io::Result<bool>;

    /// Bytes that can be written now.
    fn room(&self) -> io::Result<usize>;

    /// Sleeps until bytes have arrived, the peer has ended or the time is over; says whether it may be one of
    /// the first two.
    fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool>;

    /// The socket whose end is the connection's.
    fn fd(&self) -> RawFd;

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

/// Waits at most `limit` until there is room, or something has arrived.
///
/// # Errors
/// `BrokenPipe` if nobody reads any more.
pub(crate) fn wait_for_room(pipe: &dyn Pipe, limit: Duration) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        let waited = begun.elapsed();
        if pipe.room()? >= ROOM_BYTES || pipe.has_bytes()? || waited >= limit {
            return Ok(());
        }
        if waited < SPIN {
            std::thread::yield_now();
            continue;
        }
        let mut entry = libc::pollfd { fd: pipe.fd(), events: 0, revents: 0 };
        poll::wait(std::slice::from_mut(&mut entry), Some(Duration::ZERO))?;
        if entry.revents != 0 {
            return Err(IoKind::BrokenPipe.into());
        }
        std::thread::sleep(NAP);
    }
}

/// The bytes between two counters, one of which follows what the peer says.
pub(crate) fn between(written: u64, read: u64) -> io::Result<usize> {
    let bytes = to_usize(written.wrapping_sub(read));
    if bytes > RING_BYTES {
        let detail = format!("{bytes} bytes in a ring of {RING_BYTES}");
        return Err(io::Error::new(IoKind::InvalidData, detail));
    }
    Ok(bytes)
}

/// Calls `each` with the parts of `bytes` bytes that begin with a ring's `number`th one: one or two, each by
/// its place in the ring, its place in the whole, and its length.
pub(crate) fn parts(number: u64, bytes: usize, mut each: impl FnMut(usize, usize, usize)) {
    let at = to_usize(number % RING_BYTES as u64);
    let first = bytes.min(RING_BYTES - at);
    each(at, 0, first);
    if first < bytes {
        each(0, first, bytes - first);
    }
}
