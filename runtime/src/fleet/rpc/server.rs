//! The service of a worker process.

use super::super::hub::Hub;
use super::super::session::{Command, Hello, PeerMessage, Session, SessionRefusal};
use super::carry::{BACKLOG_BYTES_MAX, carry, outflow};
use super::codec::{Words, decode, encode, with_causes};
use super::connections::{ConnectionStatus, accept};
use super::probe::{PROBE_TIME, ProbeLinks, Probes};
use super::{
    COMMAND_BYTES_MAX, CallError, GREETING, Kind, PEER, PROBE, PROOF, ROUTER, RpcConfig, Trust, WINDOW_BYTES,
};
use crate::env::SharedEnv;
use crate::request::RouterId;
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
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::metadata::MetadataValue;
use tonic::server::Grpc;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

/// Maximum concurrent calls of one connection.
const STREAMS_MAX: u32 = 16;
/// Maximum size of a call's metadata, including the greeting of a peer with a hundred instances.
const METADATA_BYTES_MAX: u32 = 16 << 10;
/// Connections that may wait to be served after their handshake.
const CONNECTIONS_WAITING: usize = 64;

/// The listener for routers and peers.
pub struct FleetListener {
    listener: tokio::net::TcpListener,
    address: SocketAddr,
    config: RpcConfig,
}

impl FleetListener {
    /// Listens; connections wait until [`serve`](Self::serve).
    ///
    /// # Errors
    /// When the address cannot be listened on, or is not on this host and there are no certificates.
    pub fn open(address: SocketAddr, config: RpcConfig) -> Result<Self, CallError> {
        config.trust.check(&address)?;
        let failed = |error| CallError::Failed(format!("cannot listen on {address}: {error}"));
        let listener = std::net::TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(FleetListener { listener, address, config })
    }

    /// The address it listens on, with the port that was actually bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves routers and peers of `hub`.
    ///
    /// # Errors
    /// When it cannot continue.
    pub async fn serve(self, env: SharedEnv, hub: Hub, probe_links: ProbeLinks) -> Result<(), CallError> {
        let failed =
            |error: tonic::transport::Error| CallError::Failed(with_causes(&error, error.to_string()));
        let half = self.config.half();
        let server = Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .http2_max_header_list_size(METADATA_BYTES_MAX)
            .http2_keepalive_interval(Some(half))
            .http2_keepalive_timeout(Some(half))
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES);
        let (connections, incoming) = mpsc::channel(CONNECTIONS_WAITING);
        let RpcConfig { silence, trust } = self.config;
        env.spawn(Box::pin(accept(env.clone(), self.listener, trust.clone(), silence, connections)));
        let incoming = stream::unfold(incoming, |mut incoming| async move {
            let guest = incoming.recv().await?;
            Some((Ok::<_, Infallible>(guest), incoming))
        });
        let service =
            Service { env, hub, probe_links, trust, address: self.address, probes: Probes::default() };
        server.serve_with_incoming(service, incoming).await.map_err(failed)
    }
}

/// The stream of answers to a caller.
type Answers = BoxStream<'static, Result<Bytes, Status>>;

#[derive(Clone)]
struct Service {
    env: SharedEnv,
    hub: Hub,
    probe_links: ProbeLinks,
    trust: Trust,
    /// The address it listens on, which callers include in their proof.
    address: SocketAddr,
    probes: Probes,
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
                ROUTER => service.answer(ROUTER, Kind::Router, request, Service::router).await,
                PEER => service.answer(PEER, Kind::Worker, request, Service::peer).await,
                PROBE => service.answer(PROBE, Kind::Worker, request, Service::probe).await,
                path => Status::unimplemented(format!("{path}: there is no such call")).into_http(),
            })
        })
    }
}

impl Service {
    /// Serves a call of a member of this kind; other callers get the reason of refusal.
    async fn answer<In: DeserializeOwned + Send + 'static>(
        self,
        path: &'static str,
        kind: Kind,
        request: http::Request<Body>,
        serve: fn(&Self, Request<Streaming<In>>) -> Result<Answers, Status>,
    ) -> http::Response<Body> {
        let service = tower::service_fn(move |call: Request<Streaming<In>>| {
            let answered = self.admit(path, kind, &call).and_then(|answer| {
                let mut response = Response::new(serve(&self, call)?);
                if let Some(answer) = answer {
                    response.metadata_mut().insert_bin(PROOF, MetadataValue::from_bytes(&answer));
                }
                Ok(response)
            });
            std::future::ready(answered)
        });
        let mut grpc = Grpc::new(Words::<In>::default()).max_decoding_message_size(COMMAND_BYTES_MAX);
        grpc.streaming(service, request).await
    }

    /// Checks that the caller is a member of this kind; returns the proof that this process is one too.
    fn admit<In>(&self, path: &str, kind: Kind, call: &Request<In>) -> Result<Option<Vec<u8>>, Status> {
        let status = call.extensions().get::<Arc<ConnectionStatus>>();
        let status = status.ok_or_else(|| Status::internal("a connection without a status"))?;
        let answer = match &self.trust {
            Trust::Tls(certificates) => {
                let certificate = status.certificate.as_ref();
                if !certificate.is_some_and(|certificate| certificates.is_of(certificate, kind)) {
                    return Err(Status::permission_denied(format!(
                        "the caller's certificate is not of a {}: its names do not say so",
                        format!("{kind:?}").to_lowercase()
                    )));
                }
                None
            }
            Trust::Token(token) => {
                let bytes = |name| call.metadata().get_bin(name).and_then(|value| value.to_bytes().ok());
                let (greeting, shown) =
                    (bytes(GREETING).unwrap_or_default(), bytes(PROOF).unwrap_or_default());
                let answer = token.admit(&shown, path, &self.address, &greeting);
                Some(answer.ok_or_else(|| {
                    Status::unauthenticated(
                        "the caller does not have this fleet's token: run all its processes as one user, or give them one --token-file",
                    )
                })?)
            }
        };
        if !status.welcome() {
            return Err(Status::resource_exhausted("as many members are connected as may be"));
        }
        Ok(answer)
    }

    fn router(&self, call: Request<Streaming<Command>>) -> Result<Answers, Status> {
        let (hello, router): (Hello, RouterId) = greeting(&call)?;
        let session = self.hub.accept_router(&hello, router)?;
        tracing::info!(router = router.0, "a router uses this process");
        Ok(self.begin(format!("router {}", router.0), session, call))
    }

    fn peer(&self, call: Request<Streaming<PeerMessage>>) -> Result<Answers, Status> {
        let (hello, instances, cost): (Hello, Vec<InstanceId>, LinkCost) = greeting(&call)?;
        let name =
            format!("process of instance {}", instances.iter().map(|id| id.0).min().unwrap_or_default());
        let session = self.hub.accept_peer(&hello, instances, cost)?;
        tracing::info!(peer = name, "a peer exchanges KV with this process");
        Ok(self.begin(name, session, call))
    }

    /// Provides memory until the caller ends the call, or its time is over.
    fn probe(&self, call: Request<Streaming<()>>) -> Result<Answers, Status> {
        let hello: Hello = greeting(&call)?;
        self.hub.check(&hello)?;
        let probe = self.probes.begin(hello.caller).ok_or(SessionRefusal::Busy)?;
        let lent =
            self.probe_links.lend(&self.env).map_err(|error| Status::unavailable(error.to_string()))?;
        let regions = encode(&lent.regions)?;
        let time_is_up = self.env.sleep(PROBE_TIME);
        let kept = stream::once(async move {
            let _kept = (lent, probe);
            time_is_up.await;
            Err(Status::deadline_exceeded("the link takes too long to measure"))
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

fn greeting<T: DeserializeOwned, In>(call: &Request<In>) -> Result<T, Status> {
    let bytes = call.metadata().get_bin(GREETING).and_then(|value| value.to_bytes().ok());
    decode(&bytes.ok_or_else(|| Status::invalid_argument("the caller sends no identity"))?)
}
