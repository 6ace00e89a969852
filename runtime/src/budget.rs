//! What a process has, and how it is shared out: the one place that knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of request bodies in work, over all requests: some eight of the largest.
pub const BODY_BYTES_MAX: usize = 64 << 20;
/// Threads that parse, render and tokenise, at least.
pub const WORK_THREADS_MIN: usize = 2;
/// Requests that wait for one of those threads.
pub const WORK_WAITING_MAX: usize = 64;

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
}
