//! Closes connections whose client has stopped reading or has left, and reports when all bytes were sent.
//!
//! A client that closes its sending side may still wait for its answer, or may have left: both send the same
//! segment. Only a client that has left answers a further segment with a reset, so such a client is sent what
//! HTTP lets clients ignore: an interim response here, or a comment between the events of a stream
//! (`server.rs`).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::admitted::AdmittedConnection;
use crate::env::{SharedEnv, Task};

/// The interim response that every client of HTTP/1.1 knows.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// First poll interval while a half-closed connection may be reset; it doubles up to [`RESET_POLL_MAX`].
const RESET_POLL: Duration = Duration::from_millis(10);
/// Longest poll interval while a half-closed connection may be reset.
const RESET_POLL_MAX: Duration = Duration::from_secs(1);

/// A connection whose writes fail when none has made progress for `timeout`, and whose flushes fail once the
/// client that waits for an answer has left.
pub(super) struct StallGuard<C> {
    connection: C,
    env: SharedEnv,
    timeout: Duration,
    /// Set while a write is pending.
    alarm: Option<Task>,
    /// A byte of the next request, read while an answer was due.
    ahead: Option<u8>,
    /// Bytes of an interim response that are still to be sent.
    interim: &'static [u8],
    /// Set while the connection is half-closed: when it is polled again, and after how long.
    next_poll: Option<(Task, Duration)>,
    admitted: Arc<AdmittedConnection>,
}

impl<C> StallGuard<C> {
    pub(super) fn new(
        connection: C,
        env: SharedEnv,
        timeout: Duration,
        admitted: Arc<AdmittedConnection>,
    ) -> Self {
        StallGuard {
            connection,
            env,
            timeout,
            alarm: None,
            ahead: None,
            interim: &[],
            next_poll: None,
            admitted,
        }
    }

    /// Passes on a write's result, unless the write has been pending too long.
    fn watch<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.alarm = None;
            return written;
        }
        let (env, timeout) = (&self.env, self.timeout);
        let alarm = self.alarm.get_or_insert_with(|| env.sleep(timeout));
        alarm.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> StallGuard<C> {
    /// Fails if the client that waits for an answer has left. Called while nothing else is being written.
    fn watch_client(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.ahead.is_some() || !self.admitted.is_due() {
            return Ok(());
        }
        loop {
            let mut byte = [0];
            let mut buffer = ReadBuf::new(&mut byte);
            let Poll::Ready(read) = Pin::new(&mut self.connection).poll_read(context, &mut buffer) else {
                return Ok(());
            };
            read?;
            if let [byte] = buffer.filled() {
                self.ahead = Some(*byte);
                return Ok(());
            }
            self.admitted.half_closed();
            if self.admitted.take_interim() {
                self.interim = INTERIM;
            }
            if let Poll::Ready(sent) = self.send_interim(context) {
                sent?;
                // reads of a reset connection still return end of stream; only writes fail
                if let Poll::Ready(written) = Pin::new(&mut self.connection).poll_write(context, &[]) {
                    written?;
                }
            }
            let env = &self.env;
            let (next, after) = self.next_poll.get_or_insert_with(|| (env.sleep(RESET_POLL), RESET_POLL));
            if next.as_mut().poll(context).is_pending() {
                return Ok(());
            }
            let after = (*after * 2).min(RESET_POLL_MAX);
            self.next_poll = Some((self.env.sleep(after), after));
        }
    }

    /// Sends the rest of an interim response.
    fn send_interim(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.interim.is_empty() {
            let written = ready!(Pin::new(&mut self.connection).poll_write(context, self.interim))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.interim = &self.interim[written..];
        }
        Poll::Ready(Ok(()))
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for StallGuard<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(byte) = self.ahead.take()
        {
            buffer.put_slice(&[byte]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> AsyncWrite for StallGuard<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = match self.send_interim(context) {
            Poll::Ready(Ok(())) => Pin::new(&mut self.connection).poll_write(context, bytes),
            sent => sent.map_ok(|()| 0),
        };
        self.watch(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = match self.send_interim(context) {
            Poll::Ready(Ok(())) => Pin::new(&mut self.connection).poll_write_vectored(context, pieces),
            sent => sent.map_ok(|()| 0),
        };
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.connection).poll_flush(context);
        if flushed.is_ready() {
            self.admitted.flushed();
            self.watch_client(context)?;
        }
        self.watch(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(context)
    }
}
