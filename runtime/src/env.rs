//! The world as the runtime sees it: time, spawning, network and randomness, injected.
//!
//! [`RealEnv`] is tokio and the operating system. [`SeededEnv`] is one thread, virtual time and one
//! seed: tasks take turns in an order that the seed decides, and time jumps to the next timer when
//! nothing can run. The engine's tests run in it; a failure is reproduced by its seed.

mod baton;
mod real;
mod seeded;

pub use real::RealEnv;
pub use seeded::SeededEnv;

use futures_util::future::BoxFuture;
use mixfleet_hal::units::Seconds;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// A task.
pub type Task = BoxFuture<'static, ()>;

/// A byte stream between two parties.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// Hands out incoming connections.
pub trait Listener: Send {
    /// The next connection and who it is from.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Box<dyn Connection>, SocketAddr)>>;
    /// Where it listens, with the port that was really bound.
    fn address(&self) -> String;
}

/// Time, spawning, network and randomness.
pub trait Env: Send + Sync {
    /// Time since the environment began. Never goes back.
    fn now(&self) -> Seconds;

    /// Seconds since 1970, for what people read.
    fn unix_time(&self) -> Seconds;

    /// Completes after `span`.
    fn sleep(&self, span: Duration) -> Task;

    /// Runs a task that never blocks.
    fn spawn(&self, task: Task);

    /// Runs a task that may block, on a thread of its own where there are threads.
    ///
    /// # Errors
    /// When the operating system has no thread left; the task is dropped then.
    fn spawn_worker(&self, name: &str, task: Task) -> io::Result<()>;

    /// Called by who may block: returns when `done` completes, or after `limit`, while others run. True if it completed.
    fn block_on(&self, done: BoxFuture<'_, ()>, limit: Duration) -> bool;

    /// 64 random bits.
    fn random(&self) -> u64;

    /// Listens on `address` (`host:port`).
    fn listen(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Listener>>>;
}

/// What it means for a device that no thread was to be had.
pub(crate) fn no_thread(error: io::Error) -> mixfleet_hal::Error {
    let detail = format!("no thread is left ({error}): raise the limit of threads, or run less beside this");
    mixfleet_hal::Error::new(mixfleet_hal::ErrorKind::OutOfMemory, detail)
}

/// The environment, shared.
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
