//! Buffers what a stream received ahead of demand: at most a few headers, never bulk payload.

use super::parts::IovecQueue;
use crate::stream::{SecureStream, remaining};
use mixfleet_hal::cast::to_usize;
use std::io;
use std::time::Instant;

/// Bytes received beyond those requested: a header and a few ranges. More would be copied twice.
const SPARE_BYTES: usize = 256;

/// A small receive buffer in front of a stream.
pub(super) struct ReceiveBuffer {
    buffer: Vec<u8>,
    from: usize,
    to: usize,
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the peer has closed")
}

impl ReceiveBuffer {
    pub(super) fn new() -> Self {
        ReceiveBuffer { buffer: vec![0; SPARE_BYTES], from: 0, to: 0 }
    }

    /// Returns the free space of the buffer.
    fn room(&mut self) -> libc::iovec {
        let room = &mut self.buffer[self.to..];
        libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }
    }

    /// Takes the next `N` bytes.
    ///
    /// # Errors
    /// `WouldBlock` if they have not all arrived yet, keeping those that have; `UnexpectedEof` if they never
    /// will.
    pub(super) fn take<const N: usize>(&mut self, link: &mut SecureStream) -> io::Result<[u8; N]> {
        Ok(self.fill(link, N, None)?.try_into().expect("as many bytes as were requested"))
    }

    /// Takes the next `N` bytes from a blocking stream, or fails at `deadline`, however slowly the bytes
    /// trickle in.
    pub(super) fn take_by<const N: usize>(
        &mut self,
        link: &mut SecureStream,
        deadline: Instant,
    ) -> io::Result<[u8; N]> {
        Ok(self.fill(link, N, Some(deadline))?.try_into().expect("as many bytes as were requested"))
    }

    /// Takes the next `bytes` bytes, like [`take`](Self::take).
    pub(super) fn fill(
        &mut self,
        link: &mut SecureStream,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> io::Result<&[u8]> {
        if self.from + bytes > self.buffer.len() {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            let longer = self.buffer.len().max(bytes);
            self.buffer.resize(longer, 0);
        }
        while self.to - self.from < bytes {
            if let Some(deadline) = deadline {
                link.socket().set_read_timeout(Some(remaining(deadline)?))?;
            }
            let room = self.room();
            match link.receive(&[room])? {
                0 => return Err(ended()),
                received => self.to += received,
            }
        }
        let at = self.from;
        self.from += bytes;
        Ok(&self.buffer[at..at + bytes])
    }

    /// Receives `parts` until none is left, keeping the bytes after them.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub(super) fn receive(&mut self, link: &mut SecureStream, parts: &mut IovecQueue) -> io::Result<()> {
        while self.from < self.to
            && let Some((address, bytes)) = parts.first()
        {
            let bytes = bytes.min(self.to - self.from);
            // SAFETY: the part is valid as its creator guarantees, and is not in the buffer.
            unsafe { std::ptr::copy_nonoverlapping(self.buffer[self.from..].as_ptr(), address, bytes) };
            self.from += bytes;
            parts.advance(bytes);
        }
        if parts.bytes() == 0 {
            return Ok(());
        }
        // nothing is left here, so the whole buffer is free
        (self.from, self.to) = (0, 0);
        while parts.bytes() > 0 {
            let room = self.room();
            let received = parts.with(Some(room), |parts| link.receive(parts))?;
            if received == 0 {
                return Err(ended());
            }
            let wanted = received.min(to_usize(parts.bytes()));
            parts.advance(wanted);
            self.to = received - wanted;
        }
        Ok(())
    }
}
