//! Ctrl-C: the first one asks the work to end, the second one ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets `cancelled` at the first interrupt, and says `what` is stopping.
pub(crate) fn cancel_on_interrupt(cancelled: Arc<AtomicBool>, what: &'static str) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
        runtime.block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if cancelled.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
                eprintln!("\n{what}; press Ctrl-C again to stop at once");
            }
        });
    });
}
