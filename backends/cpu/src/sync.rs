//! Waiting without a lock in the common case: spin for tens of microseconds, then park.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Number of pauses before a waiter parks. One pause takes 40-140 cycles, so this is 20-60 us: longer than
/// any imbalance between workers, and short enough to leave the core to other threads between batches.
const SPINS: u32 = 1500;

/// A 64-bit counter that can be waited on.
#[derive(Debug, Default)]
pub(crate) struct Epoch {
    value: AtomicU64,
    parked: AtomicUsize,
    mutex: Mutex<()>,
    wake: Condvar,
}

impl Epoch {
    /// Returns the current value, and sees everything written before the `advance` that set it.
    pub(crate) fn now(&self) -> u64 {
        self.value.load(Ordering::SeqCst)
    }

    /// Adds one and wakes all waiters. Only one thread may advance at a time.
    pub(crate) fn advance(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        // SeqCst on both sides: either this load sees the parked waiter, or the waiter's check under the lock
        // sees the new value
        if self.parked.load(Ordering::SeqCst) > 0 {
            drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Blocks until the value differs from `seen`.
    pub(crate) fn wait_past(&self, seen: u64) {
        for _ in 0..SPINS {
            if self.now() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.parked.fetch_add(1, Ordering::SeqCst);
        while self.now() == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.parked.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A barrier for a fixed number of threads.
#[derive(Debug)]
pub(crate) struct Barrier {
    threads: usize,
    arrived: AtomicUsize,
    epoch: Epoch,
}

impl Barrier {
    /// Creates a barrier for `threads` threads.
    pub(crate) fn new(threads: usize) -> Self {
        Barrier { threads, arrived: AtomicUsize::new(0), epoch: Epoch::default() }
    }

    /// Blocks until all threads have arrived. What each wrote before is visible to all afterwards.
    pub(crate) fn wait(&self) {
        if self.threads == 1 {
            return;
        }
        let seen = self.epoch.now();
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.epoch.advance();
        } else {
            self.epoch.wait_past(seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_passes_a_barrier_before_the_last_arrives() {
        const THREADS: usize = 4;
        let barrier = Barrier::new(THREADS);
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for round in 1..=200 {
                        count.fetch_add(1, Ordering::Relaxed);
                        barrier.wait();
                        assert_eq!(count.load(Ordering::Relaxed), round * THREADS);
                        barrier.wait();
                    }
                });
            }
        });
    }
}
