//! Limits of the resources that a process shares among its clients: memory of request bodies, threads and
//! connections.

use mixfleet_hal::cast::to_usize;
use mixfleet_scheduler::fleet::PartyId;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of request bodies in progress over all requests: about eight bodies of the largest size.
pub const BODY_BYTES_MAX: usize = 64 << 20;
/// Bytes of answers that wait for their clients to read them, over all requests.
pub const ANSWER_BYTES_MAX: usize = 128 << 20;
/// Minimum number of threads that parse, render and tokenise.
pub const WORK_THREADS_MIN: usize = 2;
/// Requests that may wait for one of those threads. It equals the number of requests that may be in progress,
/// since many small ones may arrive together.
pub const WORK_WAITING_MAX: usize = 512;

/// Descriptors that are never given to clients: KV regions, files of the disk tier, links, etcd, the log.
const DESCRIPTORS_KEPT: u64 = 256;
/// Connections of clients beyond which more descriptors do not raise the limit, since each connection also
/// has buffers.
const CONNECTIONS_MAX: u64 = 4096;
/// Additional connections that are reserved for monitoring.
const ASIDE_MAX: u64 = 32;

/// Number of threads that parse, render and tokenise on this machine: half its cores, so that the other half
/// serves.
pub fn work_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).max(WORK_THREADS_MIN)
}

/// A user of a shared budget.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Party {
    /// The tenant that owns an API key.
    Tenant(String),
    /// A client's address, where API keys do not tell clients apart.
    Address(IpAddr),
}

impl Party {
    /// Its number for the scheduler, the same in every process of a fleet.
    pub fn id(&self) -> PartyId {
        let name = match self {
            Party::Tenant(name) => format!("tenant {name}"),
            Party::Address(address) => format!("address {address}"),
        };
        let digest: [u8; 32] = Sha256::digest(name.as_bytes()).into();
        let first: [u8; 8] = std::array::from_fn(|at| digest[at]);
        PartyId(u64::from_le_bytes(first).max(1))
    }
}

/// The share of `of` that one party may hold at a time: half, so that another party always finds some left.
pub fn share(of: usize) -> usize {
    of.div_ceil(2)
}

/// A limit on the bytes held at a time by all holders together, half of it for one party. Clones share one
/// budget.
#[derive(Clone, Debug)]
pub struct ByteBudget {
    bytes_max: usize,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// Bytes held by each party; parties that hold nothing have no entry.
    of: HashMap<Party, usize>,
}

impl Held {
    fn give_back(&mut self, party: &Party, bytes: usize) {
        self.bytes -= bytes;
        if let Some(own) = self.of.get_mut(party) {
            *own -= bytes;
            if *own == 0 {
                self.of.remove(party);
            }
        }
    }
}

/// Why a budget gives no more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetError {
    /// All bytes of the budget are held.
    Budget,
    /// The party already holds its share.
    Share,
}

impl ByteBudget {
    /// A budget of `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        ByteBudget { bytes_max, held: Arc::default() }
    }

    /// A holder for `party` that holds nothing yet.
    pub fn holder(&self, party: Party) -> HeldBytes {
        HeldBytes { budget: self.clone(), party, bytes: 0 }
    }

    /// Free bytes.
    pub fn left(&self) -> usize {
        self.bytes_max - self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes held from a budget; they are returned on drop.
#[derive(Debug)]
pub struct HeldBytes {
    budget: ByteBudget,
    party: Party,
    bytes: usize,
}

impl HeldBytes {
    /// Holds `bytes` more bytes.
    ///
    /// # Errors
    /// When that many are not left, in all or for this party; nothing has changed then.
    pub fn grow(&mut self, bytes: usize) -> Result<(), BudgetError> {
        let bytes_max = self.budget.bytes_max;
        let mut held = self.budget.lock();
        let own = held.of.get(&self.party).copied().unwrap_or(0);
        if bytes > bytes_max - held.bytes {
            return Err(BudgetError::Budget);
        }
        if bytes > share(bytes_max).saturating_sub(own) {
            return Err(BudgetError::Share);
        }
        if bytes == 0 {
            return Ok(());
        }
        held.bytes += bytes;
        held.of.insert(self.party.clone(), own + bytes);
        self.bytes += bytes;
        Ok(())
    }

    /// Gives `bytes` of the held bytes back.
    pub fn shrink(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "{bytes} bytes cannot be given back of {} that are held", self.bytes);
        let mut held = self.budget.lock();
        held.give_back(&self.party, bytes);
        self.bytes -= bytes;
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.budget.lock().give_back(&self.party, self.bytes);
    }
}

/// Limits on clients' connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// Connections that may send any request.
    pub max: usize,
    /// Connections of these from one address.
    pub per_address_max: usize,
    /// Connections beyond `max`, which are answered only on `/live`, `/health` and `/metrics`, and with 503
    /// elsewhere. As many again may be closing.
    pub aside_max: usize,
}

impl Connections {
    /// The limits of a process that may open `descriptors` descriptors; of 1,024, for example, clients get
    /// three quarters of a thousand.
    pub fn within(descriptors: u64) -> Self {
        let clients = descriptors.saturating_sub(DESCRIPTORS_KEPT.min(descriptors / 2));
        let aside = ASIDE_MAX.min(clients / 8).max(1);
        let max = clients.saturating_sub(2 * aside).clamp(1, CONNECTIONS_MAX) as usize;
        Connections { max, per_address_max: share(max), aside_max: to_usize(aside) }
    }

    /// A few connections out of the descriptors kept back, for an address used only for monitoring.
    pub fn for_monitoring() -> Self {
        Connections { max: 32, per_address_max: 32, aside_max: 16 }
    }

    /// Connections that may be open at a time, including those that are closing.
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
        assert_eq!((one.grow(1), budget.left()), (Err(BudgetError::Budget), 0));
        drop(one);
        let mut third = budget.holder(tenant("c"));
        assert_eq!((third.grow(5), third.grow(usize::MAX)), (Ok(()), Err(BudgetError::Budget)));
        drop((other, third));
        assert_eq!(budget.left(), 10);
        assert!(budget.lock().of.is_empty(), "parties without bytes are not kept");
    }

    #[test]
    fn one_party_holds_half_of_a_budget_over_all_its_holders() {
        let budget = ByteBudget::new(10);
        let (mut first, mut second) = (budget.holder(tenant("a")), budget.holder(tenant("a")));
        assert_eq!(
            (first.grow(3), second.grow(2), second.grow(1)),
            (Ok(()), Ok(()), Err(BudgetError::Share))
        );
        let address = |last| Party::Address([10, 0, 0, last].into());
        let mut other = budget.holder(address(1));
        assert_eq!((other.grow(5), other.grow(0)), (Ok(()), Ok(())));
        drop(first);
        assert_eq!((second.grow(3), budget.holder(address(2)).grow(1)), (Ok(()), Err(BudgetError::Budget)));
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
