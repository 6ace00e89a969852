//! The HTTP/1 server: accepts connections, passes requests to [`Api`], and shuts down in order.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Request, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::rt::{Sleep, Timer};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use super::admitted::{AdmittedConnection, AdmittedConnections, ConnectionRank, Evicted};
use super::errors::ApiError;
use super::observe::is_open;
use super::routes::Holder;
use super::stall::StallGuard;
use super::{Api, Limits, Origins};
use crate::env::{Connection, Listener, SharedEnv, Task};
use crate::metrics::{Metrics, RefusedLabels};

/// The stage of shutdown. A dropped sender counts as [`Shutdown::Stop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// Serve.
    No,
    /// Accept no further connections, finish the running requests.
    Drain,
    /// Cut off requests that still run.
    Stop,
}

/// Pause after a failed accept, which usually means that no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Seconds after which clients whose connection was not admitted may try again.
const FULL_RETRY_AFTER_S: u64 = 1;

/// Serves until told to stop. It returns when the last connection is closed, which after [`Shutdown::Drain`]
/// takes at most [`Limits::drain_timeout`].
pub async fn serve(
    listener: Box<dyn Listener>,
    api: Arc<Api>,
    origins: Origins,
    shutdown: watch::Receiver<Shutdown>,
) {
    let served = ServedRoutes {
        routes: api.router(),
        limits: &api.limits,
        origins,
        env: &api.env,
        metrics: &api.metrics,
    };
    serve_routes(listener, served, shutdown, || api.drain()).await;
}

/// The routes, metrics and limits of a server.
pub(super) struct ServedRoutes<'a> {
    pub(super) routes: axum::Router,
    pub(super) limits: &'a Limits,
    pub(super) origins: Origins,
    pub(super) env: &'a SharedEnv,
    pub(super) metrics: &'a Metrics,
}

/// Serves any routes in the same way; `drain` is called when no more connections are accepted.
pub(super) async fn serve_routes(
    mut listener: Box<dyn Listener>,
    served: ServedRoutes<'_>,
    mut shutdown: watch::Receiver<Shutdown>,
    drain: impl FnOnce(),
) {
    let ServedRoutes { routes, limits, origins, env, metrics } = served;
    let open_max = u32::try_from(limits.connections.open_max()).unwrap_or(u32::MAX);
    let open = Arc::new(Semaphore::new(open_max as usize));
    let admitted = AdmittedConnections::new(limits.connections, metrics.connections_evicted.clone());
    let builder = builder(limits, env);
    let origins = Arc::new(origins);
    loop {
        // Room is made at once; this waits for the connections that must close and are still open.
        let permit = tokio::select! { biased;
            () = at_least(&mut shutdown, Shutdown::Drain) => break,
            permit = open.clone().acquire_owned() => permit.expect("the semaphore is never closed"),
        };
        let accepted = tokio::select! { biased;
            () = at_least(&mut shutdown, Shutdown::Drain) => break,
            accepted = listener.accept() => accepted,
        };
        let (io, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                admitted.make_room();
                env.sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (admitted, evicted) = admitted.admit(peer.ip());
        let admitted = Arc::new(admitted);
        let io = StallGuard::new(io, env.clone(), limits.write_stall_timeout, admitted.clone());
        let refused = metrics.http_refused.clone();
        let service = ConnectionRoutes {
            routes: routes.clone(),
            origins: origins.clone(),
            refused,
            admitted: admitted.clone(),
        };
        let stay = ConnectionTimeouts {
            env: env.clone(),
            first_request: env.sleep(limits.first_request_timeout),
            drain_timeout: limits.drain_timeout,
            evicted,
            shutdown: shutdown.clone(),
            admitted,
        };
        let connection = builder.serve_connection(TokioIo::new(io), service);
        env.spawn(Box::pin(async move {
            let ended = stay.drive(connection).await;
            tracing::debug!(%peer, ?ended, "connection closed");
            drop(permit);
        }));
    }
    drop(listener);
    drain();
    drop(open.acquire_many(open_max).await);
}

fn builder(limits: &Limits, env: &SharedEnv) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(EnvTimer { env: env.clone(), origin: Instant::now(), began_s: env.now().0 })
        // a client that sends nothing more may still wait for its answer: `StallGuard` finds out
        .half_close(true)
        .header_read_timeout(limits.header_read_timeout)
        .max_headers(limits.headers_max)
        .max_header_size(limits.header_bytes_max);
    builder
}

async fn at_least(shutdown: &mut watch::Receiver<Shutdown>, stage: Shutdown) {
    // An error means that the sender was dropped.
    let _ = shutdown.wait_for(|now| *now >= stage).await;
}

type HttpConnection = http1::Connection<TokioIo<StallGuard<Box<dyn Connection>>>, ConnectionRoutes>;

/// The lifetime of a connection.
struct ConnectionTimeouts {
    env: SharedEnv,
    first_request: Task,
    drain_timeout: Duration,
    evicted: Evicted,
    shutdown: watch::Receiver<Shutdown>,
    admitted: Arc<AdmittedConnection>,
}

impl ConnectionTimeouts {
    /// Serves the connection until it ends or must close.
    async fn drive(mut self, connection: HttpConnection) -> hyper::Result<()> {
        let mut connection = pin!(connection);
        let mut stop = self.shutdown.clone();
        let mut new = true;
        loop {
            tokio::select! { biased;
                () = at_least(&mut stop, Shutdown::Stop) => return Ok(()),
                () = at_least(&mut self.shutdown, Shutdown::Drain) => break,
                _ = &mut self.evicted => return Ok(()),
                ended = connection.as_mut() => return ended,
                () = &mut self.first_request, if new => {
                    if self.admitted.rank() == Some(ConnectionRank::Silent) {
                        return Ok(());
                    }
                    new = false;
                }
            }
        }
        if matches!(self.admitted.rank(), None | Some(ConnectionRank::Silent | ConnectionRank::Resting)) {
            return Ok(());
        }
        connection.as_mut().graceful_shutdown();
        tokio::select! { biased;
            () = at_least(&mut stop, Shutdown::Stop) => Ok(()),
            () = self.env.sleep(self.drain_timeout) => Ok(()),
            ended = connection => ended,
        }
    }
}

/// The routes as one connection sees them.
struct ConnectionRoutes {
    routes: axum::Router,
    origins: Arc<Origins>,
    refused: Family<RefusedLabels, Counter>,
    admitted: Arc<AdmittedConnection>,
}

impl hyper::service::Service<Request<Incoming>> for ConnectionRoutes {
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let open = is_open(request.uri().path());
        let admitted = self.admitted.clone();
        admitted.set(if open { ConnectionRank::Open } else { ConnectionRank::Working });
        admitted.asked(request.version());
        let mut request = request.map(|body| RequestBody::new(body, admitted.clone()));
        let (routes, origins, refused) = (self.routes.clone(), self.origins.clone(), self.refused.clone());
        request.extensions_mut().insert(Holder(admitted.holder()));
        Box::pin(async move {
            let origin = request.headers().get(header::ORIGIN).cloned();
            let refuse = |error: ApiError| {
                refused.get_or_create(&RefusedLabels { code: error.code() }).inc();
                error.into_response()
            };
            let mut response = match origins.check(&request) {
                Err(foreign) => refuse(foreign),
                Ok(Some(preflight)) => preflight,
                Ok(None) if admitted.is_aside() && !open => refuse(too_many_connections()),
                Ok(None) => routes.oneshot(request).await?,
            };
            origins.share(origin.as_ref(), response.headers_mut());
            if admitted.is_aside() {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if response.status().is_client_error() {
                admitted.set(ConnectionRank::Open);
            }
            admitted.begun();
            let probe = if is_event_stream(&response) { StreamProbe::Possible } else { StreamProbe::Sent };
            Ok(response.map(|body| Body::new(Answer { body, admitted, probe })))
        })
    }
}

fn too_many_connections() -> ApiError {
    let message = "all connections that this server or your address may have are active";
    ApiError::unavailable("connections_exhausted", message, FULL_RETRY_AFTER_S)
}

fn is_event_stream(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// A comment in a stream of events, which clients ignore.
const EVENT_COMMENT: Bytes = Bytes::from_static(b":\n\n");

/// Whether a comment may be sent in a stream of events to find out whether a half-closed client has left.
#[derive(Clone, Copy, PartialEq)]
enum StreamProbe {
    /// It may be: nothing has been sent, or whole events.
    Possible,
    /// Not within an event.
    WithinEvent,
    /// It has been sent, or this is no stream of events.
    Sent,
}

/// A request's body, which reports that it was read to its end.
struct RequestBody {
    body: Incoming,
    admitted: Arc<AdmittedConnection>,
}

impl RequestBody {
    fn new(body: Incoming, admitted: Arc<AdmittedConnection>) -> Self {
        if body.is_end_stream() {
            admitted.body_read();
        }
        RequestBody { body, admitted }
    }
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        // a body of a known length ends with its last frame, one of chunks with none
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.admitted.body_read();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response's body, which reports its end.
struct Answer {
    body: Body,
    admitted: Arc<AdmittedConnection>,
    probe: StreamProbe,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_pending() && self.probe == StreamProbe::Possible && self.admitted.is_half_closed() {
            self.probe = StreamProbe::Sent;
            return Poll::Ready(Some(Ok(Frame::data(EVENT_COMMENT))));
        }
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
            && self.probe != StreamProbe::Sent
        {
            let is_whole = data.ends_with(b"\n\n");
            self.probe = if is_whole { StreamProbe::Possible } else { StreamProbe::WithinEvent };
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.admitted.answered();
    }
}

/// hyper's timers on the environment's clock. hyper computes with `Instant`s and uses only differences:
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

/// The mutex is never locked; it makes the task `Sync`, which hyper requires.
struct EnvSleep(Mutex<Task>);

impl Future for EnvSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.get_mut().expect("never locked, so never poisoned").as_mut().poll(context)
    }
}

impl Sleep for EnvSleep {}
