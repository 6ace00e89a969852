//! The service of a worker process.

use super::super::hub::Hub;
use super::super::session::{Command, Hello, RouterId, Session};
use super::carry::{BACKLOG_BYTES_MAX, carry, outflow};
use super::codec::{Words, decode, encode, with_causes};
use super::probe::Ways;
use super::{CallError, GREETING, MESSAGE_BYTES_MAX, PEER, PROBE, ROUTER, RpcConfig, WINDOW_BYTES};
use crate::env::SharedEnv;
use axum::http;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt};
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::fleet::InstanceId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// Where routers and peers come in.
pub struct Door {
    incoming: TcpIncoming,
    address: SocketAddr,
    config: RpcConfig,
}

impl Door {
    /// Listens; who comes waits until [`serve`](Self::serve).
    ///
    /// # Errors
    /// When the address cannot be listened on, or is beyond this host and there are no certificates.
    pub fn open(address: SocketAddr, config: RpcConfig) -> Result<Self, CallError> {
        config.check(&address)?;
        let failed = |error| CallError::Failed(format!("cannot listen on {address}: {error}"));
        let incoming = TcpIncoming::bind(address).map_err(failed)?.with_nodelay(Some(true));
        let address = incoming.local_addr().map_err(failed)?;
        Ok(Door { incoming, address, config })
    }

    /// Where it listens, with the port that was really bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets routers and peers to `hub`.
    ///
    /// # Errors
    /// When certificates do not fit.
    pub async fn serve(self, env: SharedEnv, hub: Hub, ways: Ways) -> Result<(), CallError> {
        let failed =
            |error: tonic::transport::Error| CallError::Failed(with_causes(&error, error.to_string()));
        let half = self.config.half();
        let mut server = Server::builder()
            .http2_keepalive_interval(Some(half))
            .http2_keepalive_timeout(Some(half))
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES);
        if let Some(pem) = &self.config.tls {
            server = server.tls_config(pem.server().timeout(self.config.silence)).map_err(failed)?;
        }
        let service = Service { env, hub, ways };
        server.serve_with_incoming(service, self.incoming).await.map_err(failed)
    }
}

/// What goes back to a caller.
type Answers = BoxStream<'static, Result<Bytes, Status>>;

#[derive(Clone)]
struct Service {
    env: SharedEnv,
    hub: Hub,
    ways: Ways,
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                ROUTER => answer(request, move |call| service.router(call)).await,
                PEER => answer(request, move |call| service.peer(call)).await,
                PROBE => answer(request, move |call| service.probe(call)).await,
                path => Status::unimplemented(format!("{path}: there is no such call")).into_http(),
            })
        })
    }
}

impl Service {
    fn router(&self, call: Request<Streaming<Command>>) -> Result<Answers, Status> {
        let (hello, router): (Hello, RouterId) = greeting(&call)?;
        let session = self.hub.accept_router(&hello, router)?;
        tracing::info!(router = router.0, "a router uses this process");
        Ok(self.begin(format!("router {}", router.0), session, call))
    }

    fn peer(&self, call: Request<Streaming<Command>>) -> Result<Answers, Status> {
        let (hello, instances, cost): (Hello, Vec<InstanceId>, LinkCost) = greeting(&call)?;
        let name =
            format!("process of instance {}", instances.iter().map(|id| id.0).min().unwrap_or_default());
        let session = self.hub.accept_peer(&hello, instances, cost)?;
        tracing::info!(peer = name, "a peer exchanges KV with this process");
        Ok(self.begin(name, session, call))
    }

    /// Lends memory until the caller ends the call.
    fn probe(&self, call: Request<Streaming<()>>) -> Result<Answers, Status> {
        self.hub.check(&greeting(&call)?)?;
        let lent = self.ways.lend(&self.env).map_err(|error| Status::unavailable(error.to_string()))?;
        let regions = encode(&lent.regions)?;
        let kept = stream::once(async move {
            let _lent = lent;
            std::future::pending().await
        });
        Ok(stream::iter([Ok(regions)]).chain(kept).boxed())
    }

    fn begin<Out: Serialize + Send + 'static, In: Send + 'static>(
        &self,
        peer: String,
        session: Session<In, Out>,
        call: Request<Streaming<In>>,
    ) -> Answers {
        let (outlet, outflow) = outflow(BACKLOG_BYTES_MAX);
        self.env.spawn(Box::pin(carry(peer, session, outlet, call.into_inner())));
        outflow.map(Ok).boxed()
    }
}

async fn answer<In: DeserializeOwned + Send + 'static>(
    request: http::Request<Body>,
    mut serve: impl FnMut(Request<Streaming<In>>) -> Result<Answers, Status> + Send,
) -> http::Response<Body> {
    let service = tower::service_fn(move |call| std::future::ready(serve(call).map(Response::new)));
    let mut grpc = Grpc::new(Words::<In>::default()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    grpc.streaming(service, request).await
}

fn greeting<T: DeserializeOwned, In>(call: &Request<In>) -> Result<T, Status> {
    let bytes = call.metadata().get_bin(GREETING).and_then(|value| value.to_bytes().ok());
    decode(&bytes.ok_or_else(|| Status::invalid_argument("the caller does not say who it is"))?)
}
