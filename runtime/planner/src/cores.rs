//! Work on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the result of `of` for each number below `count`, each computed by the next free core.
pub(crate) fn on_all_cores<T: Send>(count: usize, of: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return found;
            }
            found.push((at, of(at)));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(count);
    let mut all: Vec<(usize, T)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a plan panics on no input")).collect()
    });
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, found)| found).collect()
}
