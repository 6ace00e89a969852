//! What a process has, and how it is shared out: the one place that knows.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of request bodies in work, over all requests: some eight of the largest.
pub const BODY_BYTES_MAX: usize = 64 << 20;
/// Threads that parse, render and tokenise, at least.
pub const WORK_THREADS_MIN: usize = 2;
/// Requests that wait for one of those threads: as many as may be in work, for many of some kilobytes may come at once.
pub const WORK_WAITING_MAX: usize = 512;

/// Descriptors that are never given to clients: regions of KV, files of the disk tier, links, etcd, the log.
const DESCRIPTORS_KEPT: u64 = 256;
/// Connections of clients beyond which more descriptors are no reason to hold more: each has buffers too.
const CONNECTIONS_MAX: u64 = 4096;
/// Connections beside the others, for those who watch.
const ASIDE_MAX: u64 = 32;

/// Threads that parse, render and tokenise on this machine: half its cores, the others serve.
pub fn work_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).max(WORK_THREADS_MIN)
}

/// Who uses what all share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Party {
    /// Whoever has this tenant's key.
    Tenant(String),
    /// Where keys tell nobody apart: whoever asks from this address.
    Address(IpAddr),
}

/// What one party may have of so much at a time: half, so that another one always finds something.
pub fn share(of: usize) -> usize {
    of.div_ceil(2)
}

/// Bytes that may be held at a time, by all holders together; half of them by one party. Clones are one budget.
#[derive(Clone, Debug)]
pub struct ByteBudget {
    bytes_max: usize,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// Those who hold nothing are not here.
    of: HashMap<Party, usize>,
}

/// Why no more bytes are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spent {
    /// All are held.
    Budget,
    /// The party has its share.
    Share,
}

impl ByteBudget {
    /// A budget of so many bytes.
    pub fn new(bytes_max: usize) -> Self {
        ByteBudget { bytes_max, held: Arc::default() }
    }

    /// A holder of nothing yet, on a party's account.
    pub fn holder(&self, party: Party) -> HeldBytes {
        HeldBytes { budget: self.clone(), party, bytes: 0 }
    }

    /// Bytes that nobody holds.
    pub fn left(&self) -> usize {
        self.bytes_max - self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a budget; it goes back when this is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    budget: ByteBudget,
    party: Party,
    bytes: usize,
}

impl HeldBytes {
    /// Holds so many bytes more.
    ///
    /// # Errors
    /// When there are not so many left, for all or for this party; then nothing has changed.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Spent> {
        let bytes_max = self.budget.bytes_max;
        let mut held = self.budget.lock();
        let own = held.of.get(&self.party).copied().unwrap_or(0);
        if bytes > bytes_max - held.bytes {
            return Err(Spent::Budget);
        }
        if bytes > share(bytes_max).saturating_sub(own) {
            return Err(Spent::Share);
        }
        held.bytes += bytes;
        held.of.insert(self.party.clone(), own + bytes);
        self.bytes += bytes;
        Ok(())
    }

    /// What is held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        let mut held = self.budget.lock();
        held.bytes -= self.bytes;
        if let Some(own) = held.of.get_mut(&self.party) {
            *own -= self.bytes;
            if *own == 0 {
                held.of.remove(&self.party);
            }
        }
    }
}

/// How many connections clients may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// Those that may ask for anything.
    pub max: usize,
    /// Of these, from one address.
    pub per_address_max: usize,
    /// Beside these: they are answered `/live`, `/health` and `/metrics`, and 503 for anything else. As many again may be
    /// on their way out.
    pub aside_max: usize,
}

impl Connections {
    /// What a process that may open so many descriptors can give to clients: three quarters of a thousand, for example, of 1,024.
    pub fn within(descriptors: u64) -> Self {
        let clients = descriptors.saturating_sub(DESCRIPTORS_KEPT.min(descriptors / 2));
        let aside = ASIDE_MAX.min(clients / 8).max(1);
        let max = clients.saturating_sub(2 * aside).clamp(1, CONNECTIONS_MAX) as usize;
        Connections { max, per_address_max: share(max), aside_max: aside as usize }
    }

    /// A few, of those that are kept back: for an address that only those who watch are told.
    pub fn to_watch() -> Self {
        Connections { max: 32, per_address_max: 32, aside_max: 16 }
    }

    /// Connections that are open at a time, with those on their way out.
    pub(crate) fn open_max(self) -> usize {
        self.max.saturating_add(2 * self.aside_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Party {
        Party::Tenant(name.into())
    }

    #[test]
    fn bytes_are_held_by_one_and_come_back() {
        let budget = ByteBudget::new(10);
        let (mut one, mut other) = (budget.holder(tenant("a")), budget.holder(tenant("b")));
        assert_eq!((one.grow(4), other.grow(5), one.grow(1)), (Ok(()), Ok(()), Ok(())));
        assert_eq!((one.grow(1), budget.left()), (Err(Spent::Budget), 0));
        drop(one);
        let mut third = budget.holder(tenant("c"));
        assert_eq!((third.grow(5), third.grow(usize::MAX)), (Ok(()), Err(Spent::Budget)));
        drop((other, third));
        assert_eq!(budget.left(), 10);
        assert!(budget.lock().of.is_empty(), "nothing is kept of who holds nothing");
    }

    #[test]
    fn one_party_holds_half_of_a_budget_over_all_its_holders() {
        let budget = ByteBudget::new(10);
        let (mut first, mut second) = (budget.holder(tenant("a")), budget.holder(tenant("a")));
        assert_eq!((first.grow(3), second.grow(2), second.grow(1)), (Ok(()), Ok(()), Err(Spent::Share)));
        let address = |last| Party::Address([10, 0, 0, last].into());
        let mut other = budget.holder(address(1));
        assert_eq!((other.grow(5), other.grow(0)), (Ok(()), Ok(())));
        drop(first);
        assert_eq!((second.grow(3), budget.holder(address(2)).grow(1)), (Ok(()), Err(Spent::Budget)));
    }

    #[test]
    fn clients_never_get_the_descriptors_that_the_engine_needs() {
        for descriptors in [0, 1, 16, 64, 256, 1024, 4096, 20_000, 1 << 20, u64::MAX] {
            let connections = Connections::within(descriptors);
            let kept = descriptors.saturating_sub(connections.open_max() as u64);
            assert!(
                kept >= DESCRIPTORS_KEPT.min(descriptors / 2).min(descriptors.saturating_sub(3)),
                "{descriptors}"
            );
            assert!(connections.per_address_max < connections.max || connections.max == 1, "{descriptors}");
            assert!(connections.max >= 1 && connections.aside_max >= 1, "{descriptors}");
        }
        assert_eq!(Connections::within(1024).max, 704);
        assert_eq!(Connections::within(1 << 20).max, 4096);
    }
}
