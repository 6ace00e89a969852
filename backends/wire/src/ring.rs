//! Connections whose bytes lie in a ring at their receiver until they are read.

use crate::pipe::{LOOK, Pipe};
use crate::poll::{self, SPIN};
use mixfleet_hal::cast::to_usize;
use std::io::{self, ErrorKind as IoKind};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Bytes in flight in one direction at most: several pieces of data, which fit into a core's cache.
pub(crate) const RING_BYTES: usize = 512 << 10;
/// Room that a sender waits for once there is none.
const ROOM_BYTES: usize = RING_BYTES / 4;
/// How long a sender without room sleeps between two looks.
const FULL_PAUSE: Duration = Duration::from_micros(50);

/// The end of a pipe that writes into its peer's ring.
pub(crate) trait Ring: Pipe {
    /// Bytes that can be written now.
    fn room(&self) -> io::Result<usize>;

    /// The socket whose end is the connection's.
    fn fd(&self) -> RawFd;
}

/// As of [`Pipe::wait_to_send`].
pub(crate) fn wait_to_send(
    ring: &dyn Ring,
    meanwhile: &mut dyn FnMut() -> io::Result<bool>,
) -> io::Result<()> {
    if ring.has_bytes()? && meanwhile()? {
        return Ok(());
    }
    wait_for_room(ring, LOOK)
}

/// Waits at most `limit` until there is room, or something has arrived.
///
/// # Errors
/// `BrokenPipe` if there is no reader any more.
pub(crate) fn wait_for_room(ring: &dyn Ring, limit: Duration) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        let waited = begun.elapsed();
        if ring.room()? >= ROOM_BYTES || ring.has_bytes()? || waited >= limit {
            return Ok(());
        }
        if waited < SPIN {
            std::thread::yield_now();
            continue;
        }
        let mut entry = libc::pollfd { fd: ring.fd(), events: 0, revents: 0 };
        poll::wait(std::slice::from_mut(&mut entry), Some(Duration::ZERO))?;
        if entry.revents != 0 {
            return Err(IoKind::BrokenPipe.into());
        }
        std::thread::sleep(FULL_PAUSE);
    }
}

/// The bytes between two counters, one of which follows the peer's reports.
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
