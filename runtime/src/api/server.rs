//! The HTTP/1 server: connections in, [`Api`] behind, an orderly end.

use hyper::rt::{Sleep, Timer};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

use super::stall::StallGuard;
use super::{Api, Limits};
use crate::env::{Connection, Listener, SharedEnv, Task};

/// How far the end has come. A dropped sender counts as [`Shutdown::Stop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// Serve.
    No,
    /// Accept nothing more, finish the requests that are running.
    Drain,
    /// Cut what still runs.
    Stop,
}

/// After a failed accept (no file descriptors left, usually) before the next one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until told otherwise; returns when the last connection is closed.
pub async fn serve(listener: Box<dyn Listener>, api: Arc<Api>, shutdown: watch::Receiver<Shutdown>) {
    serve_routes(listener, api.router(), &api.limits, &api.env, shutdown, || api.drain()).await;
}

/// Serves any routes likewise; `drain` is called when nothing more is accepted.
pub(super) async fn serve_routes(
    mut listener: Box<dyn Listener>,
    routes: axum::Router,
    limits: &Limits,
    env: &SharedEnv,
    mut shutdown: watch::Receiver<Shutdown>,
    drain: impl FnOnce(),
) {
    let slots = Arc::new(Semaphore::new(limits.connections_max));
    let builder = builder(limits, env);
    let service = TowerToHyperService::new(routes);
    loop {
        // A full house leaves newcomers in the listener's backlog.
        let slot = tokio::select! { biased;
            () = at_least(&mut shutdown, Shutdown::Drain) => break,
            slot = slots.clone().acquire_owned() => slot.expect("the semaphore is never closed"),
        };
        let accepted = tokio::select! { biased;
            () = at_least(&mut shutdown, Shutdown::Drain) => break,
            accepted = listener.accept() => accepted,
        };
        let (io, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                env.sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let io = StallGuard::new(io, env.clone(), limits.write_stall_timeout);
        let connection = builder.serve_connection(TokioIo::new(io), service.clone());
        let shutdown = shutdown.clone();
        env.spawn(Box::pin(async move {
            let ended = drive(connection, shutdown).await;
            tracing::debug!(peer, ?ended, "connection closed");
            drop(slot);
        }));
    }
    drop(listener);
    drain();
    let all = u32::try_from(limits.connections_max).unwrap_or(u32::MAX);
    drop(slots.acquire_many(all).await);
}

fn builder(limits: &Limits, env: &SharedEnv) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(EnvTimer { env: env.clone(), origin: Instant::now(), began_s: env.now().0 })
        .header_read_timeout(limits.header_read_timeout)
        .max_headers(limits.headers_max)
        .max_header_size(limits.header_bytes_max);
    builder
}

async fn at_least(shutdown: &mut watch::Receiver<Shutdown>, stage: Shutdown) {
    // An error is a dropped sender.
    let _ = shutdown.wait_for(|now| *now >= stage).await;
}

type HttpConnection =
    http1::Connection<TokioIo<StallGuard<Box<dyn Connection>>>, TowerToHyperService<axum::Router>>;

async fn drive(connection: HttpConnection, mut shutdown: watch::Receiver<Shutdown>) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    let mut stop = shutdown.clone();
    tokio::select! { biased;
        () = at_least(&mut stop, Shutdown::Stop) => return Ok(()),
        () = at_least(&mut shutdown, Shutdown::Drain) => {}
        ended = connection.as_mut() => return ended,
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! { biased;
        () = at_least(&mut stop, Shutdown::Stop) => Ok(()),
        ended = connection => ended,
    }
}

/// hyper's timers from the environment's clock. hyper speaks in `Instant`s and uses differences only:
/// `origin` stands for the environment's time `began_s`.
struct EnvTimer {
    env: SharedEnv,
    origin: Instant,
    began_s: f64,
}

impl Timer for EnvTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(EnvSleep(Mutex::new(self.env.sleep(duration))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.sleep(deadline.saturating_duration_since(self.now()))
    }

    fn now(&self) -> Instant {
        self.origin + Duration::from_secs_f64((self.env.now().0 - self.began_s).max(0.0))
    }
}

/// The mutex is never locked; it makes the task `Sync`, which hyper asks for.
struct EnvSleep(Mutex<Task>);

impl Future for EnvSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.get_mut().expect("never locked, so never poisoned").as_mut().poll(context)
    }
}

impl Sleep for EnvSleep {}
