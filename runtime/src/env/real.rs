//! The environment of tokio and the operating system.

use super::{Connection, Env, Listener, Task, WORKER_STACK_BYTES};
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
    /// Every worker holds one.
    workers: Arc<()>,
}

impl RealEnv {
    /// An environment on the given tokio runtime.
    pub fn new(handle: Handle) -> Self {
        RealEnv { start: Instant::now(), handle, workers: Arc::default() }
    }

    /// Completes once every worker has ended and given back what it held. A process that ends before uses
    /// drivers that are being unloaded.
    pub async fn workers_ended(&self) {
        while Arc::strong_count(&self.workers) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// An environment on a separate thread, which ends with the process and whose tasks continue regardless
    /// of other threads.
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
        let (handle, alive) = (self.handle.clone(), self.workers.clone());
        let thread = std::thread::Builder::new().name(name.to_string()).stack_size(WORKER_STACK_BYTES);
        let body = move || {
            handle.block_on(task);
            drop(alive);
        };
        thread.spawn(body).map(drop)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_have_ended_once_they_gave_back_what_they_held() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let env = RealEnv::new(runtime.handle().clone());
        let (open, gate) = tokio::sync::oneshot::channel::<()>();
        let held = Arc::new(());
        let own = held.clone();
        let work = async move {
            let _ = gate.await;
            drop(own);
        };
        env.spawn_worker("a worker", Box::pin(work)).expect("a thread");
        runtime.block_on(async {
            let mut ended = Box::pin(env.workers_ended());
            let early = tokio::time::timeout(Duration::from_millis(20), &mut ended).await;
            assert!(early.is_err(), "it still waits");
            open.send(()).expect("a worker");
            ended.await;
        });
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
