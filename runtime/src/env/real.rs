//! The environment of tokio and the operating system.

use super::{Connection, Env, Listener, Task};
use futures_util::future::BoxFuture;
use mixfleet_hal::units::Seconds;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant, SystemTime};
use tokio::net::TcpListener;
use tokio::runtime::Handle;

/// The real environment. It needs a running tokio runtime.
#[derive(Debug)]
pub struct RealEnv {
    start: Instant,
    handle: Handle,
}

impl RealEnv {
    /// An environment on the given tokio runtime.
    pub fn new(handle: Handle) -> Self {
        RealEnv { start: Instant::now(), handle }
    }

    /// An environment on a thread of its own, which ends with the process and whose tasks continue whatever
    /// other threads do.
    ///
    /// # Errors
    /// When the operating system has no thread or no descriptors for it.
    pub fn on_own_thread(name: &str) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let thread = std::thread::Builder::new().name(name.to_string());
        thread.spawn(move || runtime.block_on(std::future::pending::<()>()))?;
        Ok(RealEnv::new(handle))
    }
}

/// Wakes a parked thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl Env for RealEnv {
    fn now(&self) -> Seconds {
        Seconds(self.start.elapsed().as_secs_f64())
    }

    fn unix_time(&self) -> Seconds {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Seconds(since.map_or(0.0, |d| d.as_secs_f64()))
    }

    fn sleep(&self, span: Duration) -> Task {
        let _inside = self.handle.enter();
        Box::pin(tokio::time::sleep(span))
    }

    fn spawn(&self, task: Task) {
        self.handle.spawn(task);
    }

    fn spawn_worker(&self, name: &str, task: Task) -> io::Result<()> {
        let handle = self.handle.clone();
        let thread = std::thread::Builder::new().name(name.to_string());
        thread.spawn(move || handle.block_on(task)).map(drop)
    }

    fn block_on(&self, mut done: BoxFuture<'_, ()>, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            if done.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            std::thread::park_timeout(left);
        }
    }

    fn random(&self) -> u64 {
        // The standard library seeds `RandomState` from the operating system, once per thread, and
        // counts up from there; hashing spreads the count over 64 bits.
        RandomState::new().hash_one(self.start.elapsed())
    }

    fn listen(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Listener>>> {
        let address = address.to_string();
        // The caller may run elsewhere; the socket must belong to this environment's runtime.
        let bound = self.handle.spawn(async move { TcpListener::bind(&address).await });
        Box::pin(async move {
            let listener: Box<dyn Listener> = Box::new(bound.await.map_err(io::Error::other)??);
            Ok(listener)
        })
    }
}

impl Listener for TcpListener {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Box<dyn Connection>, SocketAddr)>> {
        Box::pin(async move {
            let (stream, peer) = TcpListener::accept(self).await?;
            // A token is one small write, which must not wait for the acknowledgement of the previous one. A
            // client that is already gone refuses the option, and is noticed later.
            let _ = stream.set_nodelay(true);
            let connection: Box<dyn Connection> = Box::new(stream);
            Ok((connection, peer))
        })
    }

    fn address(&self) -> String {
        self.local_addr().map_or_else(|error| error.to_string(), |a| a.to_string())
    }
}
