//! Ctrl-C and similar signals: the first one asks the work to end, the second one ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets `cancelled` at the first interrupt, and says `what` is stopping.
pub(crate) fn cancel_on_interrupt(cancelled: Arc<AtomicBool>, what: &'static str) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    // caught from now on, and not from when the thread runs
    let caught = {
        let _within = runtime.enter();
        EndSignals::new()
    };
    let Ok(mut signals) = caught else { return };
    std::thread::spawn(move || {
        runtime.block_on(async {
            loop {
                signals.next().await;
                if cancelled.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
                eprintln!("\n{what}; press Ctrl-C again to stop at once");
            }
        });
    });
}

/// Waits for Ctrl-C at a terminal; for ever otherwise, as a signal then ends the process.
pub(crate) async fn interrupted(may_be: bool) {
    if !may_be || tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// An interrupt, a hang-up of the terminal, or a request to terminate.
#[cfg(unix)]
struct EndSignals([tokio::signal::unix::Signal; 3]);

#[cfg(unix)]
impl EndSignals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let [interrupt, hangup, terminate] =
            [SignalKind::interrupt(), SignalKind::hangup(), SignalKind::terminate()].map(signal);
        Ok(EndSignals([interrupt?, hangup?, terminate?]))
    }

    async fn next(&mut self) {
        let EndSignals([interrupt, hangup, terminate]) = self;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
            _ = terminate.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct EndSignals;

#[cfg(not(unix))]
impl EndSignals {
    fn new() -> std::io::Result<Self> {
        Ok(EndSignals)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
