//! What a process has, and how it is shared out: the one place that knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Bytes that may be held at a time, by all holders together. Clones are one budget.
#[derive(Clone, Debug)]
pub struct ByteBudget {
    left: Arc<AtomicUsize>,
}

impl ByteBudget {
    /// A budget of so many bytes.
    pub fn new(bytes: usize) -> Self {
        ByteBudget { left: Arc::new(AtomicUsize::new(bytes)) }
    }

    /// A holder of nothing yet.
    pub fn holder(&self) -> HeldBytes {
        HeldBytes { budget: self.clone(), bytes: 0 }
    }

    /// Bytes that nobody holds.
    pub fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }
}

/// A share of a budget; it goes back when this is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    budget: ByteBudget,
    bytes: usize,
}

impl HeldBytes {
    /// Holds so many bytes more. False, and nothing changed, where the budget has less left.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let taken = |left: usize| left.checked_sub(bytes);
        let grown = self.budget.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).is_ok();
        self.bytes += if grown { bytes } else { 0 };
        grown
    }

    /// What is held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.bytes, Ordering::AcqRel);
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
        Connections { max, per_address_max: max.div_ceil(2), aside_max: aside as usize }
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

    #[test]
    fn bytes_are_held_by_one_and_come_back() {
        let budget = ByteBudget::new(10);
        let (mut one, mut other) = (budget.holder(), budget.holder());
        assert!(one.grow(6) && other.grow(3) && one.grow(1));
        assert!(!other.grow(1) && budget.left() == 0);
        drop(one);
        assert!(other.grow(7) && !other.grow(usize::MAX));
        drop(other);
        assert_eq!(budget.left(), 10);
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
