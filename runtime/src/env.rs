//! The outside world that the runtime depends on, injected: time, spawning, network and randomness.
//!
//! [`RealEnv`] is tokio and the operating system. `SeededEnv` (the feature `testing`) is one thread, virtual
//! time and one seed: the seed decides the order in which tasks run, and time jumps to the next timer when
//! nothing can run. The engine's tests run in it, so that a failure is reproduced by its seed.

#[cfg(any(test, feature = "testing"))]
mod baton;
mod real;
#[cfg(any(test, feature = "testing"))]
mod seeded;

pub use real::RealEnv;
#[cfg(any(test, feature = "testing"))]
pub use seeded::SeededEnv;

use futures_util::future::BoxFuture;
use mixfleet_hal::units::Seconds;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Stack of worker threads; the system commits only the used part. Grammars are compiled on them, and their
/// rules may nest deeply.
pub const WORKER_STACK_BYTES: usize = 64 << 20;

/// A future that the environment runs.
pub type Task = BoxFuture<'static, ()>;

/// A byte stream between two parties.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// A source of incoming connections.
pub trait Listener: Send {
    /// Waits for the next connection, and returns it with the peer's address.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Box<dyn Connection>, SocketAddr)>>;
    /// The address it listens on, with the port that was actually bound.
    fn address(&self) -> String;
}

/// Time, spawning, network and randomness.
pub trait Env: Send + Sync {
    /// Time since the environment began. It never goes back.
    fn now(&self) -> Seconds;

    /// Seconds since 1970, for timestamps that people read.
    fn unix_time(&self) -> Seconds;

    /// Completes after `span`.
    fn sleep(&self, span: Duration) -> Task;

    /// Runs a task that never blocks.
    fn spawn(&self, task: Task);

    /// Runs a task that may block, on a separate thread if the environment has threads.
    ///
    /// # Errors
    /// When the operating system has no thread left; the task is dropped then.
    fn spawn_worker(&self, name: &str, task: Task) -> io::Result<()>;

    /// Blocks the calling thread until `done` completes or `limit` has passed, while other tasks run. True if
    /// `done` completed.
    fn block_on(&self, done: BoxFuture<'_, ()>, limit: Duration) -> bool;

    /// Returns 64 random bits.
    fn random(&self) -> u64;

    /// Listens on `address` (`host:port`).
    fn listen(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Listener>>>;
}

/// The device error that reports a failure to start a thread.
pub(crate) fn no_thread(error: io::Error) -> mixfleet_hal::Error {
    let detail = format!("no thread is left ({error}): raise the limit of threads, or run less beside this");
    mixfleet_hal::Error::new(mixfleet_hal::ErrorKind::OutOfMemory, detail)
}

/// A shared environment.
pub type SharedEnv = Arc<dyn Env>;

/// Lets every other task run once.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}
