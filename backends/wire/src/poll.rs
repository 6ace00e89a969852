//! Waiting for sockets.

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// An entry that waits for something to read, or for the other end to go away.
pub(crate) fn readable(socket: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// Waits until something is true of one of `entries`, or `timeout` is over; none: for ever.
pub(crate) fn wait(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let timeout_ms = match (timeout, deadline) {
            (Some(Duration::ZERO), _) => 0,
            // rounded up: a wait must not end before its time and be called anew
            (_, Some(deadline)) => {
                let left = deadline.saturating_duration_since(Instant::now());
                left.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32
            }
            (_, None) => -1,
        };
        // SAFETY: the entries are a place of the length that is said.
        let status = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, timeout_ms) };
        if status >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
