//! Calls to a worker process.

use super::super::session::{Command, Hello, RouterId, Session, Word};
use super::carry::{BACKLOG_BYTES_MAX, carry, outflow};
use super::codec::{Words, encode, with_causes};
use super::{CallError, GREETING, MESSAGE_BYTES_MAX, PEER, PROBE, ROUTER, RpcConfig, WINDOW_BYTES};
use crate::env::SharedEnv;
use axum::http::uri::PathAndQuery;
use bytes::Bytes;
use futures_util::{Stream, stream};
use mixfleet_hal::transport::Descriptor;
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::fleet::InstanceId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

/// A worker process that was reached.
pub struct Remote {
    channel: Channel,
    address: String,
    env: SharedEnv,
}

/// Memory that a worker process lends for measuring, until this is dropped.
pub(crate) struct Lent {
    pub(crate) regions: Vec<Descriptor>,
    _call: Streaming<Vec<Descriptor>>,
}

impl Remote {
    /// Connects to `address` (`host:port`).
    ///
    /// # Errors
    /// When nobody answers there, or certificates do not fit.
    pub async fn connect(env: &SharedEnv, address: &str, config: &RpcConfig) -> Result<Self, CallError> {
        let failed = |error: tonic::transport::Error| {
            CallError::Failed(with_causes(&error, format!("{address} is not reached")))
        };
        let addresses = tokio::net::lookup_host(address).await;
        let addresses = addresses.map_err(|error| CallError::Failed(format!("{address}: {error}")))?;
        for address in addresses {
            config.check(&address)?;
        }
        let scheme = if config.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(failed)?
            // Who was cut off is called again soon after the link is back.
            .connect_timeout(config.half())
            .tcp_nodelay(true)
            .http2_keep_alive_interval(config.half())
            .keep_alive_timeout(config.half())
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES);
        if let Some(pem) = &config.tls {
            endpoint = endpoint.tls_config(pem.client()).map_err(failed)?;
        }
        let channel = endpoint.connect().await.map_err(failed)?;
        Ok(Remote { channel, address: address.into(), env: env.clone() })
    }

    /// Begins to use its instances: for [`Router::attend`](crate::fleet::Router::attend).
    ///
    /// # Errors
    /// The process's refusal, or that it is not reached.
    pub async fn router(&self, hello: &Hello, router: RouterId) -> Result<Session<Command, Word>, CallError> {
        Ok(self.session(ROUTER, &(hello, router)).await?.0)
    }

    /// Begins to exchange KV with it, as a process with `instances`, at such a cost: for
    /// [`Hub::meet`](crate::fleet::Hub::meet). The second is told when the session is over.
    ///
    /// # Errors
    /// The process's refusal, or that it is not reached.
    pub async fn peer(
        &self,
        hello: &Hello,
        instances: &[InstanceId],
        cost: LinkCost,
    ) -> Result<(Session<Command, Command>, oneshot::Receiver<()>), CallError> {
        self.session(PEER, &(hello, instances, cost)).await
    }

    /// Borrows memory to measure the link with.
    pub(crate) async fn probe(&self, hello: &Hello) -> Result<Lent, CallError> {
        let mut call = self.call(PROBE, hello, stream::pending()).await?;
        let regions = call.message().await?;
        let regions = regions.ok_or_else(|| Status::internal("no memory was lent"))?;
        Ok(Lent { regions, _call: call })
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
    ) -> Result<Streaming<In>, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = Request::new(out);
        request.metadata_mut().insert_bin(GREETING, MetadataValue::from_bytes(&encode(greeting)?));
        let path = PathAndQuery::from_static(path);
        Ok(grpc.streaming(request, path, Words::<In>::default()).await?.into_inner())
    }
}
