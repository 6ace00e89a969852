//! Calls to a worker process.

use super::super::session::{Command, Hello, InstanceReport, PeerMessage, Session};
use super::carry::{BACKLOG_BYTES_MAX, carry, outflow};
use super::codec::{Words, encode, with_causes};
use super::connections::Wire;
use super::{
    CallError, GREETING, MESSAGE_BYTES_MAX, PEER, PROBE, PROOF, ROUTER, RpcConfig, Trust, WINDOW_BYTES,
};
use crate::env::SharedEnv;
use crate::request::RouterId;
use axum::http::Uri;
use axum::http::uri::PathAndQuery;
use bytes::Bytes;
use futures_util::{Stream, stream};
use hyper_util::rt::TokioIo;
use mixfleet_hal::transport::Descriptor;
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::fleet::InstanceId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

/// A connected worker process.
pub struct Remote {
    channel: Channel,
    address: String,
    /// The address that was reached.
    peer: SocketAddr,
    config: RpcConfig,
    env: SharedEnv,
}

/// The result, if it comes within `span`: a process may accept a call and never answer.
async fn in_time<T>(
    env: &SharedEnv,
    span: Duration,
    address: &str,
    work: impl Future<Output = T>,
) -> Result<T, CallError> {
    tokio::select! {
        done = work => Ok(done),
        () = env.sleep(span) => {
            let seconds = span.as_secs_f64();
            Err(CallError::Failed(format!("{address} does not answer within {seconds} s")))
        }
    }
}

/// Memory that a worker process provides for measurements until this is dropped.
pub(crate) struct LentRegions {
    pub(crate) regions: Vec<Descriptor>,
    _call: Streaming<Vec<Descriptor>>,
}

impl Remote {
    /// Connects to `address` (`host:port`).
    ///
    /// # Errors
    /// When nothing answers there, or certificates do not fit.
    pub async fn connect(env: &SharedEnv, address: &str, config: &RpcConfig) -> Result<Self, CallError> {
        let failed = |error: tonic::transport::Error| {
            CallError::Failed(with_causes(&error, format!("{address} is not reached")))
        };
        // A process that was cut off is called again soon after the link is back.
        let dialed = in_time(env, config.half(), address, Wire::dial(address, &config.trust)).await?;
        let (wire, peer) = dialed?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(failed)?
            .http2_keep_alive_interval(config.half())
            .keep_alive_timeout(config.half())
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES);
        // A single connection, since another one might reach another process.
        let mut once = Some(TokioIo::new(wire));
        let connector = tower::service_fn(move |_: Uri| {
            std::future::ready(once.take().ok_or(io::Error::from(io::ErrorKind::NotConnected)))
        });
        let channel = endpoint.connect_with_connector(connector).await.map_err(failed)?;
        let (address, config) = (address.into(), config.clone());
        Ok(Remote { channel, address, peer, config, env: env.clone() })
    }

    /// Opens a session to use its instances, for [`Router::add_worker`](crate::fleet::Router::add_worker).
    ///
    /// # Errors
    /// The process's refusal, or that it cannot be reached.
    pub async fn router(
        &self,
        hello: &Hello,
        router: RouterId,
    ) -> Result<Session<Command, InstanceReport>, CallError> {
        Ok(self.session(ROUTER, &(hello, router)).await?.0)
    }

    /// Opens a session to exchange KV with it, as a process with `instances`, over a link of this cost, for
    /// [`Hub::add_peer`](crate::fleet::Hub::add_peer). The receiver completes when the session is over.
    ///
    /// # Errors
    /// The process's refusal, or that it cannot be reached.
    pub async fn peer(
        &self,
        hello: &Hello,
        instances: &[InstanceId],
        cost: LinkCost,
    ) -> Result<(Session<PeerMessage, PeerMessage>, oneshot::Receiver<()>), CallError> {
        self.session(PEER, &(hello, instances, cost)).await
    }

    /// Gets memory from the process to measure the link.
    pub(crate) async fn probe(&self, hello: &Hello) -> Result<LentRegions, CallError> {
        let mut call = self.call(PROBE, hello, stream::pending()).await?;
        let regions = in_time(&self.env, self.config.silence, &self.address, call.message()).await??;
        let regions = regions.ok_or_else(|| Status::internal("no memory was registered"))?;
        Ok(LentRegions { regions, _call: call })
    }

    async fn session<Out, In>(
        &self,
        path: &'static str,
        greeting: &impl Serialize,
    ) -> Result<(Session<Out, In>, oneshot::Receiver<()>), CallError>
    where
        Out: Serialize + Send + 'static,
        In: DeserializeOwned + Send + Sync + 'static,
    {
        let (outlet, outflow) = outflow(BACKLOG_BYTES_MAX);
        let incoming = self.call(path, greeting, outflow).await?;
        let (theirs, ours) = Session::pair();
        let (over, ended) = oneshot::channel();
        let carried = carry(self.address.clone(), ours, outlet, incoming);
        self.env.spawn(Box::pin(async move {
            carried.await;
            let _ = over.send(());
        }));
        Ok((theirs, ended))
    }

    async fn call<In: DeserializeOwned + Send + Sync + 'static>(
        &self,
        path: &'static str,
        greeting: &impl Serialize,
        out: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Streaming<In>, CallError> {
        let greeted = self.greet(path, greeting, out);
        in_time(&self.env, self.config.silence, &self.address, greeted).await?
    }

    async fn greet<In: DeserializeOwned + Send + Sync + 'static>(
        &self,
        path: &'static str,
        greeting: &impl Serialize,
        out: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Streaming<In>, CallError> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = Request::new(out);
        let greeting = encode(greeting)?;
        request.metadata_mut().insert_bin(GREETING, MetadataValue::from_bytes(&greeting));
        let proof = match &self.config.trust {
            Trust::Tls(_) => None,
            Trust::Token(token) => {
                let proof = token.prove(path, &self.peer, &greeting);
                let proof = proof.ok_or_else(|| Status::internal("there is no randomness for a call"))?;
                request.metadata_mut().insert_bin(PROOF, MetadataValue::from_bytes(&proof.shown));
                Some((token, proof))
            }
        };
        let uri = PathAndQuery::from_static(path);
        let response = grpc.streaming(request, uri, Words::<In>::default()).await?;
        if let Some((token, proof)) = proof {
            let answer = response.metadata().get_bin(PROOF).and_then(|value| value.to_bytes().ok());
            if !answer.is_some_and(|answer| token.is_answered(&proof, &answer)) {
                let address = &self.address;
                return Err(CallError::Failed(format!(
                    "the process at {address} does not have this fleet's token: it is not a member"
                )));
            }
        }
        Ok(response.into_inner())
    }
}
