//! Limits on open connections, and which connection is closed when there are too many.
//!
//! Opening a connection requires no key, so a connection ranks by what it has done. Over the limit, idle
//! closed first, then those whose answer needs no key, then those that are idle between two requests, the
//! oldest first. A connection with a request in progress is never closed. An address over its share loses one
//! of its own connections. If none can be closed, a new connection overflows: only monitoring routes are
//! answered on it.

use axum::http::Version;
use prometheus_client::metrics::counter::Counter;
use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

use crate::budget::Connections;

/// What a connection has done so far; the lowest rank is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ConnectionRank {
    /// No request sent so far.
    Silent,
    /// The response needs no key, or is an error.
    Open,
    /// Idle after a response.
    Resting,
    /// A request is in progress.
    Working,
}

/// The connections that a listener has admitted.
#[derive(Debug)]
pub(super) struct AdmittedConnections {
    bounds: Connections,
    evictions: Counter,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Numbers arrivals and changes of rank in order.
    clock: u64,
    known: HashMap<u64, Known>,
    /// Connections other than overflow ones, by rank and by the time at which they reached it.
    order: BTreeSet<(ConnectionRank, u64, u64)>,
    held: HashMap<IpAddr, usize>,
    aside: BTreeSet<u64>,
}

#[derive(Debug)]
struct Known {
    holder: IpAddr,
    rank: ConnectionRank,
    since: u64,
    aside: bool,
    /// Dropped to tell the connection to close.
    _stay: oneshot::Sender<()>,
}

/// An admitted connection; its place is free when this is dropped.
#[derive(Debug)]
pub(super) struct AdmittedConnection {
    admitted: Arc<AdmittedConnections>,
    number: u64,
    holder: IpAddr,
    aside: bool,
    /// Whether the response is complete, except for bytes that the connection still buffers.
    answered: AtomicBool,
    /// Whether a request was read with all of its body, and its response is not complete.
    due: AtomicBool,
    /// Whether an interim response may be sent: no byte of the response to an HTTP/1.1 request has been sent.
    interim: AtomicBool,
    /// Whether the client has closed its sending side while a response was due.
    half_closed: AtomicBool,
}

/// Completes when the connection must close to make room.
pub(super) type Evicted = oneshot::Receiver<()>;

impl AdmittedConnections {
    /// A limit of `bounds`; `evictions` counts the connections that were closed for it.
    pub(super) fn new(bounds: Connections, evictions: Counter) -> Arc<Self> {
        Arc::new(AdmittedConnections { bounds, evictions, state: Mutex::default() })
    }

    /// Admits a new connection, and closes another one if there is no free place.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> (AdmittedConnection, Evicted) {
        let holder = holder(address);
        let mut state = self.lock();
        let own = state.held.get(&holder).copied().unwrap_or(0);
        let aside = if own >= self.bounds.per_address_max {
            !self.evict(&mut state, Some(holder))
        } else {
            state.order.len() >= self.bounds.max && !self.evict(&mut state, None)
        };
        if aside
            && state.aside.len() >= self.bounds.aside_max
            && let Some(oldest) = state.aside.first().copied()
        {
            state.remove(oldest);
            self.evictions.inc();
        }
        let number = state.tick();
        let (stay, evicted) = oneshot::channel();
        let taken = Known { holder, rank: ConnectionRank::Silent, since: number, aside, _stay: stay };
        state.add(number, taken);
        drop(state);
        (
            AdmittedConnection {
                admitted: self.clone(),
                number,
                holder,
                aside,
                answered: AtomicBool::new(false),
                due: AtomicBool::new(false),
                interim: AtomicBool::new(false),
                half_closed: AtomicBool::new(false),
            },
            evicted,
        )
    }

    /// Closes one connection that may be closed, if there is one.
    pub(super) fn make_room(&self) {
        self.evict(&mut self.lock(), None);
    }

    /// Closes the lowest-ranked connection without a request in progress, of one holder or of all.
    fn evict(&self, state: &mut State, of: Option<IpAddr>) -> bool {
        let Some(number) = state.lowest_ranked(of) else { return false };
        state.remove(number);
        self.evictions.inc();
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn add(&mut self, number: u64, taken: Known) {
        if taken.aside {
            self.aside.insert(number);
        } else {
            self.order.insert((taken.rank, taken.since, number));
            *self.held.entry(taken.holder).or_default() += 1;
        }
        self.known.insert(number, taken);
    }

    fn remove(&mut self, number: u64) {
        let Some(taken) = self.known.remove(&number) else { return };
        if taken.aside {
            self.aside.remove(&number);
            return;
        }
        self.order.remove(&(taken.rank, taken.since, number));
        if let Some(held) = self.held.get_mut(&taken.holder) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&taken.holder);
            }
        }
    }

    /// The lowest-ranked connection without a request in progress, of one holder or of all.
    fn lowest_ranked(&self, of: Option<IpAddr>) -> Option<u64> {
        let candidates = self.order.range(..(ConnectionRank::Working, 0, 0));
        let mut theirs =
            candidates.filter(|(_, _, number)| of.is_none_or(|holder| self.known[number].holder == holder));
        theirs.next().map(|(_, _, number)| *number)
    }

    fn change(&mut self, number: u64, rank: ConnectionRank) {
        if let Some(taken) = self.known.remove(&number) {
            if !taken.aside {
                self.order.remove(&(taken.rank, taken.since, number));
                let since = self.tick();
                self.order.insert((rank, since, number));
                self.known.insert(number, Known { rank, since, ..taken });
            } else {
                self.known.insert(number, Known { rank, ..taken });
            }
        }
    }
}

impl AdmittedConnection {
    /// Whether only monitoring routes are answered on this connection.
    pub(super) fn is_aside(&self) -> bool {
        self.aside
    }

    /// The holder of the connection.
    pub(super) fn holder(&self) -> IpAddr {
        self.holder
    }

    /// Sets the connection's rank.
    pub(super) fn set(&self, rank: ConnectionRank) {
        self.answered.store(false, Ordering::Relaxed);
        self.admitted.lock().change(self.number, rank);
    }

    /// Records that a request begins, which may have an interim response if it is HTTP/1.1.
    pub(super) fn asked(&self, version: Version) {
        self.interim.store(version >= Version::HTTP_11, Ordering::Relaxed);
    }

    /// Records that the request's body was read to its end.
    pub(super) fn body_read(&self) {
        self.due.store(true, Ordering::Relaxed);
    }

    /// Records that the response begins.
    pub(super) fn begun(&self) {
        self.interim.store(false, Ordering::Relaxed);
    }

    /// Records that the response is complete.
    pub(super) fn answered(&self) {
        self.due.store(false, Ordering::Relaxed);
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Whether a response is due: bytes that the client sends now belong to another request.
    pub(super) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Whether an interim response may be sent now; true only once.
    pub(super) fn take_interim(&self) -> bool {
        self.interim.swap(false, Ordering::Relaxed)
    }

    /// Records that the client has closed its sending side.
    pub(super) fn half_closed(&self) {
        self.half_closed.store(true, Ordering::Relaxed);
    }

    /// Whether the client has closed its sending side while a response was due.
    pub(super) fn is_half_closed(&self) -> bool {
        self.half_closed.load(Ordering::Relaxed)
    }

    /// Records that all buffered bytes were sent to the client.
    pub(super) fn flushed(&self) {
        if self.answered.load(Ordering::Relaxed) {
            self.set(ConnectionRank::Resting);
        }
    }

    /// The rank of the connection; none once it must close.
    pub(super) fn rank(&self) -> Option<ConnectionRank> {
        self.admitted.lock().known.get(&self.number).map(|known| known.rank)
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        self.admitted.lock().remove(self.number);
    }
}

/// The holder that an address is accounted to. An IPv6 network is one holder, since one client controls all
/// addresses of a network.
fn holder(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(max: usize, per_address_max: usize, aside_max: usize) -> Arc<AdmittedConnections> {
        AdmittedConnections::new(Connections { max, per_address_max, aside_max }, Counter::default())
    }

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn is_gone((guest, evicted): &mut (AdmittedConnection, Evicted)) -> bool {
        let told = evicted.try_recv() == Err(oneshot::error::TryRecvError::Closed);
        assert_eq!(told, guest.rank().is_none());
        told
    }

    #[test]
    fn the_one_worth_least_makes_room_and_of_equals_the_oldest() {
        let admitted = admitted(4, 4, 1);
        let mut all: Vec<_> = (0..4).map(|last| admitted.admit(ip(last))).collect();
        all[0].0.set(ConnectionRank::Resting);
        all[1].0.set(ConnectionRank::Open);
        for (newcomer, goes) in [2, 3, 4, 5].into_iter().enumerate() {
            let taken = admitted.admit(ip(100 + newcomer as u8));
            assert!(!taken.0.is_aside());
            all.push(taken);
            assert!(is_gone(&mut all[goes]), "{goes}");
        }
        assert!(!is_gone(&mut all[0]) && !is_gone(&mut all[1]));
        all[6].0.set(ConnectionRank::Working);
        all[7].0.set(ConnectionRank::Working);
        for goes in [1, 0] {
            let taken = admitted.admit(ip(50));
            taken.0.set(ConnectionRank::Working);
            all.push(taken);
            assert!(is_gone(&mut all[goes]), "{goes}");
        }
        // All are at work: the next ones are set aside, and the oldest of those is closed for the next.
        let mut aside = admitted.admit(ip(60));
        assert!(aside.0.is_aside() && !is_gone(&mut aside));
        let mut next = admitted.admit(ip(61));
        assert!(next.0.is_aside() && is_gone(&mut aside) && !is_gone(&mut next));
        assert_eq!(admitted.evictions.get(), 7, "each of them is counted");
        drop(all.pop());
        assert!(!admitted.admit(ip(62)).0.is_aside(), "a place that was left is free");
    }

    #[test]
    fn an_address_beyond_its_share_pays_itself() {
        let admitted = admitted(6, 3, 2);
        let mut other = admitted.admit(ip(1));
        let mut greedy: Vec<_> = (0..3).map(|_| admitted.admit(ip(2))).collect();
        greedy[0].0.set(ConnectionRank::Working);
        let fourth = admitted.admit(ip(2));
        assert!(!fourth.0.is_aside() && is_gone(&mut greedy[1]), "its own oldest goes");
        fourth.0.set(ConnectionRank::Working);
        greedy[2].0.set(ConnectionRank::Working);
        assert!(admitted.admit(ip(2)).0.is_aside(), "beside guests that are free");
        assert!(!is_gone(&mut other) && !admitted.admit(ip(3)).0.is_aside());
    }

    #[test]
    fn a_network_of_ipv6_is_one_holder() {
        let of = |text: &str| holder(text.parse().unwrap());
        assert_eq!(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::2"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("::1"), of("::2"));
    }

    #[test]
    fn nothing_is_kept_of_who_left() {
        let admitted = admitted(3, 2, 1);
        for round in 0..40 {
            let all: Vec<_> = (0..7).map(|n| admitted.admit(ip(n * round % 5))).collect();
            all.iter().step_by(2).for_each(|(guest, _)| guest.set(ConnectionRank::Working));
        }
        let state = admitted.lock();
        assert!(
            state.known.is_empty()
                && state.order.is_empty()
                && state.held.is_empty()
                && state.aside.is_empty()
        );
    }
}
