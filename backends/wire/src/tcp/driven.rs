//! A connection that makes progress in the background.
//!
//! The user's own calls move what can be moved at once, and everything while the user waits, so that no other
//! thread has to be woken for that. While the user does something else with bytes left to move, a thread
//! waits for the streams and moves the rest.

use super::connection::{TcpConnection, has_closed};
use crate::one_sided::{Direction, OneSided, in_flight};
use crate::poll::{self, Patience};
use crate::service::ServiceThread;
use mixfleet_hal::transport::{Endpoint, Piece, TransferId};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The user's end of a background-driven connection.
pub(super) struct Driven {
    shared: Arc<Mutex<TcpDriverState>>,
    /// Re-examines the streams when it is woken.
    thread: ServiceThread,
    patience: Patience,
}

struct TcpDriverState {
    way: OneSided<TcpConnection>,
    /// The user is waiting for the streams. The thread moves nothing then, since what it took would not wake
    /// the user.
    user_waits: bool,
}

fn lock(shared: &Mutex<TcpDriverState>) -> MutexGuard<'_, TcpDriverState> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driven {
    /// Drives the connection in the background until the returned end is dropped.
    ///
    /// # Errors
    /// `OutOfMemory` if no thread or descriptor is left for it.
    pub(super) fn start(way: OneSided<TcpConnection>) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::new(ErrorKind::OutOfMemory, format!("a thread for a TCP connection: {error}"))
        };
        let shared = Arc::new(Mutex::new(TcpDriverState { way, user_waits: false }));
        let driven = shared.clone();
        let thread =
            ServiceThread::spawn("tcp-connection", move |woken| drive(&driven, woken)).map_err(failed)?;
        Ok(Driven { shared, thread, patience: Patience::new() })
    }

    fn begin(&mut self, pieces: &[Piece], direction: Direction) -> Result<TransferId> {
        let mut state = lock(&self.shared);
        let begun = state.way.start(pieces, direction);
        self.leave(state);
        begun
    }

    /// Hands the remaining work to the thread.
    fn leave(&self, state: MutexGuard<'_, TcpDriverState>) {
        let needed = state.way.carrier.is_unwatched();
        drop(state);
        if needed {
            self.thread.wake();
        }
    }
}

/// Moves bytes while the user does something else, until the connection breaks or the other end of `woken`
/// closes.
fn drive(shared: &Mutex<TcpDriverState>, mut woken: UnixStream) {
    loop {
        let mut entries = vec![poll::readable(&woken)];
        {
            let mut state = lock(shared);
            if state.way.is_broken() {
                return;
            }
            let user_waits = state.user_waits;
            entries.extend(state.way.carrier.watched(!user_waits));
        }
        // a connection that breaks here closes its sockets; the stale descriptors are harmless, as the next
        // check ends the loop
        let polled = poll::wait(&mut entries, None);
        if entries[0].revents != 0 && !matches!(woken.read(&mut [0; 64]), Ok(1..)) {
            return;
        }
        let mut state = lock(shared);
        if !state.user_waits {
            state.moved(polled, &entries[1..]);
        }
    }
}

impl TcpDriverState {
    /// Handles the events in `entries`, and keeps any error for the user.
    fn moved(&mut self, polled: io::Result<()>, entries: &[libc::pollfd]) {
        let _ = self.way.drive(|way, batches| match polled {
            Ok(()) => way.moved(entries, batches),
            Err(error) => Err(has_closed(&error)),
        });
    }
}

impl Endpoint for Driven {
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.begin(pieces, Direction::Write)
    }

    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.begin(pieces, Direction::Read)
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        // a timeout too long to add means forever
        let deadline = Instant::now().checked_add(timeout);
        let mut state = lock(&self.shared);
        state.way.progress();
        let outcome = loop {
            if let Some(outcome) = state.way.take_outcome(transfer) {
                break outcome;
            }
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if timeout.is_zero() || left.is_some_and(|left| left.is_zero()) {
                break Err(in_flight(transfer, timeout));
            }
            let mut entries = state.way.carrier.entries();
            state.user_waits = true;
            drop(state);
            let polled = self.patience.wait(&mut entries, left);
            state = lock(&self.shared);
            state.user_waits = false;
            state.moved(polled, &entries);
        };
        self.leave(state);
        outcome
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        lock(&self.shared).way.abandon(transfer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Tcp, TcpAddress, TcpConfig, connection::TcpConnection};
    use super::*;
    use crate::HostRegion;
    use mixfleet_hal::memory::SharedMemory;
    use mixfleet_hal::transport::{RemoteAccess, Transport};

    const LONG: Duration = Duration::from_secs(60);
    const BYTES: u64 = 8 << 20;

    fn filled(byte: u8) -> Arc<HostRegion> {
        let region = HostRegion::new(BYTES as usize).unwrap();
        region.store(0, &vec![byte; BYTES as usize]).unwrap();
        Arc::new(region)
    }

    fn way(here: &Arc<HostRegion>, there: &Arc<HostRegion>) -> (Tcp, Driven) {
        let tcp = Tcp::new(TcpConfig::loopback()).unwrap();
        let region = tcp.register(there.clone(), RemoteAccess::ReadWrite).unwrap();
        let address = TcpAddress::decode(&region).unwrap();
        let way = TcpConnection::open(here.clone(), &tcp.config, &address, &region).unwrap();
        (tcp, Driven::start(way).unwrap())
    }

    fn first(bytes: u64) -> [Piece; 1] {
        [Piece { local: 0, remote: 0, bytes }]
    }

    #[test]
    fn a_short_batch_needs_nobody_else() {
        let (here, there) = (filled(1), filled(2));
        let (_tcp, mut way) = way(&here, &there);
        for read in [false, true] {
            let transfer = if read { way.read(&first(1000)) } else { way.write(&first(1000)) }.unwrap();
            assert!(!lock(&way.shared).way.carrier.is_unwatched());
            way.wait(transfer, LONG).unwrap();
        }
    }

    #[test]
    fn a_long_read_comes_while_the_user_does_something_else() {
        let (here, there) = (filled(1), filled(2));
        let (_tcp, mut way) = way(&here, &there);
        let transfer = way.read(&first(BYTES)).unwrap();
        let begun = Instant::now();
        let mut half = vec![0; BYTES as usize / 2];
        while half.iter().any(|&byte| byte != 2) {
            assert!(begun.elapsed() < LONG, "a transfer that has begun does not proceed by itself");
            std::thread::yield_now();
            here.load(0, &mut half).unwrap();
        }
        way.wait(transfer, LONG).unwrap();
    }
}
