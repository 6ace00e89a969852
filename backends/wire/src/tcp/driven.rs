//! A way that moves by itself.
//!
//! A thread waits for the way's streams and moves what they take and bring. The user moves under the same lock
//! what goes at once, so that a short batch is on its way before anybody is woken; waiting for a batch is then
//! waiting for the thread's word.

use super::protocol::Verb;
use super::way::Way;
use crate::poll;
use mixfleet_hal::transport::{Endpoint, Piece, TransferId};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The user's end.
pub(super) struct Driven {
    shared: Arc<Shared>,
    /// A byte makes the thread look at the streams anew; closing it ends the thread.
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    over: Condvar,
}

struct State {
    way: Way,
    /// What the user waits for.
    awaited: Option<TransferId>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driven {
    /// Lets `way` move by itself until the returned end is dropped.
    ///
    /// # Errors
    /// `OutOfMemory` when there is no thread or descriptor left for it.
    pub(super) fn start(way: Way) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::new(ErrorKind::OutOfMemory, format!("a thread for a way over TCP: {error}"))
        };
        let (wake, woken) = UnixStream::pair().map_err(failed)?;
        wake.set_nonblocking(true).map_err(failed)?;
        let state = Mutex::new(State { way, awaited: None });
        let shared = Arc::new(Shared { state, over: Condvar::new() });
        let driven = shared.clone();
        let thread = std::thread::Builder::new()
            .name("tcp-way".into())
            .spawn(move || drive(&driven, woken))
            .map_err(failed)?;
        Ok(Driven { shared, wake: Some(wake), thread: Some(thread) })
    }

    fn begin(&mut self, pieces: &[Piece], verb: Verb) -> Result<TransferId> {
        let mut state = self.shared.lock();
        let begun = state.way.begin(pieces, verb);
        let unwatched = state.way.is_unwatched();
        drop(state);
        self.wake_if(unwatched);
        begun
    }

    /// Wakes the thread. Where no byte fits, it has enough to wake by.
    fn wake_if(&self, needed: bool) {
        if let (true, Some(mut wake)) = (needed, self.wake.as_ref()) {
            let _ = wake.write(&[0]);
        }
    }
}

/// Moves what the streams take and bring, until the way breaks or the other end of `woken` closes.
fn drive(shared: &Shared, mut woken: UnixStream) {
    loop {
        let mut entries = vec![poll::readable(&woken)];
        {
            let mut state = shared.lock();
            if state.way.is_broken() {
                return shared.over.notify_all();
            }
            entries.extend(state.way.watched());
        }
        // A way that breaks here closes its sockets: then the numbers say nothing, and the next look ends it.
        let polled = poll::wait(&mut entries, None);
        if entries[0].revents != 0 && !matches!(woken.read(&mut [0; 64]), Ok(1..)) {
            return;
        }
        let mut state = shared.lock();
        // what breaks it is kept there for the user
        let _ = match polled {
            Ok(()) => state.way.moved(&entries[1..]),
            Err(error) => Err(state.way.broke(&error)),
        };
        if state.awaited.is_some_and(|transfer| state.way.is_over(transfer)) {
            shared.over.notify_all();
        }
    }
}

impl Endpoint for Driven {
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.begin(pieces, Verb::Write)
    }

    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.begin(pieces, Verb::Read)
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        // a time too long to be counted is for ever
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.lock();
        // what breaks it shows in the outcome
        let _ = state.way.look();
        self.wake_if(state.way.is_unwatched());
        state.awaited = Some(transfer);
        let outcome = loop {
            if let Some(outcome) = state.way.take_outcome(transfer) {
                break outcome;
            }
            let left = deadline.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
            if timeout.is_zero() || left.is_zero() {
                let detail = format!("transfer {} is under way after {timeout:?}", transfer.0);
                break Err(Error::new(ErrorKind::Timeout, detail));
            }
            state = self.shared.over.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.awaited = None;
        outcome
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        self.shared.lock().way.give_up(transfer)
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
