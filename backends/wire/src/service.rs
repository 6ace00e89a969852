//! Threads that serve until their owner is dropped.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

/// A thread that ends when this is dropped.
pub(crate) struct ServiceThread {
    /// A byte wakes the thread; closing it ends the thread.
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceThread {
    /// Starts a thread that serves until its stream closes.
    pub(crate) fn spawn(name: &str, serve: impl FnOnce(UnixStream) + Send + 'static) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || serve(woken))?;
        Ok(ServiceThread { wake: Some(wake), thread: Some(thread) })
    }

    /// Wakes the thread. A full pipe is fine, since the thread is about to wake anyway.
    pub(crate) fn wake(&self) {
        if let Some(mut wake) = self.wake.as_ref() {
            let _ = wake.write(&[0]);
        }
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            // it returns nothing, and a panic has already been printed
            let _ = thread.join();
        }
    }
}
