//! The gRPC services: external processing, and health.

use crate::exchange::Exchange;
use crate::pool::EndpointPool;
use crate::state::{PickerSettings, PickerState, PoolInForce};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_util::Stream;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::picker::Picker;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

/// Maximum size of a message: a proxy sends a body in pieces far below it.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Bytes of a request that a proxy may send ahead, and of all requests of one of its connections. A proxy
/// sends all bodies on one connection, so that HTTP/2's default of 64 KiB would stall them.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// Maximum size of a frame.
const FRAME_BYTES_MAX: u32 = 1 << 20;
/// Poll interval of readiness.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Names of the health services: the process, and those that follow readiness.
const LIVENESS: &str = "liveness";
const READINESS: [&str; 2] = ["readiness", "envoy.service.ext_proc.v3.ExternalProcessor"];

/// The endpoint picker; clones share their state.
#[derive(Clone)]
pub struct EndpointPicker(pub(crate) Arc<PickerState>);

impl EndpointPicker {
    /// Creates a picker without a pool, which refuses all requests until it has one.
    pub fn new(env: SharedEnv, settings: PickerSettings) -> Self {
        EndpointPicker(Arc::new(PickerState::new(env, settings)))
    }

    /// Applies a pool to further requests; `picker` has its endpoints as engines, in the same order.
    pub fn take_pool(&self, picker: Picker, pool: &EndpointPool) {
        self.0.take_pool(PoolInForce::new(picker, pool));
    }

    /// Ends requests to the endpoints outside of `pool`.
    pub(crate) fn narrow(&self, pool: &EndpointPool) {
        self.0.narrow(pool);
    }

    /// Whether proxies should send requests: a pool is present, and no other picker has the lease.
    pub fn is_ready(&self) -> bool {
        self.0.is_ready()
    }
}

/// The state of a stream of messages.
struct ProxySession {
    inbound: Streaming<ProcessingRequest>,
    exchange: Exchange,
    answers: VecDeque<ProcessingResponse>,
    is_over: bool,
}

impl ProxySession {
    /// The next response, or none once the proxy is done.
    async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return Some(Ok(answer));
            }
            if self.is_over {
                return None;
            }
            let due = self.exchange.prompt_due();
            let message = tokio::select! {
                biased;
                message = self.inbound.message() => message,
                () = tokio::time::sleep(due.unwrap_or_default()), if due.is_some() => {
                    self.exchange.guess_first_token();
                    self.inbound.message().await
                }
            };
            // a proxy that resets its stream has lost its client, and receives no further response
            let Ok(Some(message)) = message else { return None };
            match self.exchange.step(message).await {
                Ok(answers) => self.answers.extend(answers),
                Err(status) => {
                    self.is_over = true;
                    tracing::warn!(status = status.message(), "a proxy stream is refused");
                    return Some(Err(status));
                }
            }
        }
    }
}

/// Listening addresses of a picker.
pub struct PickerListeners {
    /// The address for proxies.
    pub processing: TcpListener,
    /// The address for health checks alone.
    pub health: TcpListener,
}

/// Serves proxies and health checks until `told`; requests in progress then continue.
///
/// # Errors
/// The reason why it cannot serve.
pub async fn serve(
    picker: EndpointPicker,
    listeners: PickerListeners,
    told: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let (reporter, health) = health_reporter();
    let incoming = |listener| TcpIncoming::from(listener).with_nodelay(Some(true));
    let processor = ExternalProcessorServer::new(picker.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    // proxies check health on the port that they use
    let processing = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES_MAX)
        .add_service(processor)
        .add_service(health.clone())
        .serve_with_incoming_shutdown(incoming(listeners.processing), told);
    let checks = Server::builder().add_service(health).serve_with_incoming(incoming(listeners.health));
    tokio::select! {
        served = processing => served,
        served = checks => served,
        () = report_health(reporter, picker) => Ok(()),
    }
}

async fn report_health(reporter: HealthReporter, picker: EndpointPicker) {
    reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
    loop {
        let status = if picker.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in READINESS {
            reporter.set_service_status(service, status).await;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[tonic::async_trait]
impl ExternalProcessor for EndpointPicker {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let session = ProxySession {
            inbound: request.into_inner(),
            exchange: Exchange::new(self.0.clone()),
            answers: VecDeque::new(),
            is_over: false,
        };
        let answers = futures_util::stream::unfold(session, async |mut session| {
            let answer = session.next().await?;
            Some((answer, session))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}
