//! Accepted connections that have not sent a valid hello yet.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of pending streams; each has a thread.
pub(crate) const PENDING_MAX: usize = 64;

/// The pending streams, in order of arrival; clones share one set.
#[derive(Clone, Default)]
pub(crate) struct PendingStreams(Arc<Mutex<PendingSockets>>);

#[derive(Default)]
struct PendingSockets {
    came: u64,
    sockets: BTreeMap<u64, (IpAddr, OwnedFd)>,
}

/// A pending stream, until it is dropped.
pub struct PendingStream {
    streams: PendingStreams,
    number: u64,
}

impl PendingStreams {
    fn lock(&self) -> MutexGuard<'_, PendingSockets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a stream. If there are too many, evicts the one that has been pending longest among those of
    /// the address with the most: a legitimate newcomer sends its hello at once.
    pub(crate) fn enter(&self, from: IpAddr, socket: &impl AsFd) -> std::io::Result<PendingStream> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        let mut here = self.lock();
        if here.sockets.len() >= PENDING_MAX {
            let mut of_each = BTreeMap::<IpAddr, usize>::new();
            here.sockets.values().for_each(|(from, _)| *of_each.entry(*from).or_default() += 1);
            let most = of_each.into_iter().max_by_key(|(_, count)| *count).map(|(from, _)| from);
            let oldest =
                here.sockets.iter().find(|(_, (from, _))| Some(*from) == most).map(|(&number, _)| number);
            if let Some((_, socket)) = oldest.and_then(|number| here.sockets.remove(&number)) {
                // SAFETY: an open socket; whether it was connected still does not matter.
                let _status = unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
            }
        }
        here.came += 1;
        let number = here.came;
        here.sockets.insert(number, (from, socket));
        drop(here);
        Ok(PendingStream { streams: self.clone(), number })
    }
}

impl Drop for PendingStream {
    fn drop(&mut self) {
        self.streams.lock().sockets.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_oldest_of_the_address_with_most_makes_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let streams = PendingStreams::default();
        let address = |last: u8| IpAddr::from([192, 0, 2, last]);
        let enter = |from: u8| {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let _accepted = listener.accept().unwrap();
            streams.enter(address(from), &socket).unwrap()
        };
        let lonely = enter(1);
        let crowd: Vec<PendingStream> = (1..PENDING_MAX).map(|_| enter(2)).collect();
        let _newcomer = enter(3);
        let is_here = |stream: &PendingStream| streams.lock().sockets.contains_key(&stream.number);
        assert!(is_here(&lonely) && !is_here(&crowd[0]) && crowd[1..].iter().all(is_here));
        assert_eq!(streams.lock().sockets.len(), PENDING_MAX);
        drop(crowd);
        assert_eq!(streams.lock().sockets.len(), 2);
    }
}
