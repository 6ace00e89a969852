//! Closes connections whose client has stopped reading, and reports when all bytes were sent.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::admitted::AdmittedConnection;
use crate::env::{SharedEnv, Task};

/// A connection whose writes fail when none has made progress for `timeout`.
pub(super) struct StallGuard<C> {
    connection: C,
    env: SharedEnv,
    timeout: Duration,
    /// Set while a write is pending.
    alarm: Option<Task>,
    admitted: Arc<AdmittedConnection>,
}

impl<C> StallGuard<C> {
    pub(super) fn new(
        connection: C,
        env: SharedEnv,
        timeout: Duration,
        admitted: Arc<AdmittedConnection>,
    ) -> Self {
        StallGuard { connection, env, timeout, alarm: None, admitted }
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

impl<C: AsyncRead + Unpin> AsyncRead for StallGuard<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for StallGuard<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.connection).poll_write(context, bytes);
        self.watch(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.connection).poll_write_vectored(context, pieces);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.connection).poll_flush(context);
        if flushed.is_ready() {
            self.admitted.flushed();
        }
        self.watch(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(context)
    }
}
