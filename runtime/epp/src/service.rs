//! The gRPC services: external processing, and health.

use crate::exchange::Exchange;
use crate::pool::EndpointPool;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_util::Stream;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::picker::{PickRefusal, Picker};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

/// Bytes of all bodies that wait for a destination; further ones get 429.
const HELD_BYTES_MAX: usize = 1 << 30;
/// Maximum size of a message: a proxy sends a body in pieces far below it.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Interval between two looks at readiness.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The health services of the protocol: that of the process, and those that follow readiness.
const LIVENESS: &str = "liveness";
const READINESS: [&str; 2] = ["readiness", "envoy.service.ext_proc.v3.ExternalProcessor"];

/// What an operator chooses.
#[derive(Clone, Copy, Debug)]
pub struct PickerSettings {
    /// Endpoints that are named behind the destination at most.
    pub fallbacks: usize,
}

/// A pool whose endpoints get requests.
pub(crate) struct PoolInForce {
    pub(crate) picker: Picker,
    /// By the position of an engine, as proxies write them.
    pub(crate) addresses: Vec<String>,
    pub(crate) positions: HashMap<String, usize>,
    pub(crate) objectives: BTreeMap<String, i32>,
}

impl PoolInForce {
    pub(crate) fn new(picker: Picker, pool: &EndpointPool) -> Self {
        let addresses: Vec<String> = pool.endpoints.iter().map(|one| one.address.to_string()).collect();
        let positions = addresses.iter().cloned().zip(0..).collect();
        PoolInForce { picker, addresses, positions, objectives: pool.objectives.clone() }
    }

    /// The positions of all endpoints but those of a list, which has addresses with or without a port.
    pub(crate) fn all_but(&self, listed: &[String]) -> Vec<usize> {
        let host = |address: &str| address.rsplit_once(':').map(|(host, _)| host.to_owned());
        let is_listed = |address: &String| {
            listed.iter().any(|one| one == address || Some(one.as_str()) == host(address).as_deref())
        };
        let addresses = self.addresses.iter().enumerate();
        addresses.filter(|(_, address)| !is_listed(address)).map(|(at, _)| at).collect()
    }
}

/// What all requests share.
pub(crate) struct PickerState {
    env: SharedEnv,
    pub(crate) settings: PickerSettings,
    pool: RwLock<Option<Arc<PoolInForce>>>,
    /// Bytes of bodies that wait for a destination.
    held_bytes: AtomicUsize,
}

impl PickerState {
    pub(crate) fn pool(&self) -> Option<Arc<PoolInForce>> {
        self.pool.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn random_id(&self) -> String {
        format!("pick-{:016x}{:016x}", self.env.random(), self.env.random())
    }

    /// Takes bytes of a body that waits.
    ///
    /// # Errors
    /// The refusal of the request, if too many wait.
    pub(crate) fn hold(&self, bytes: usize) -> Result<(), PickRefusal> {
        let held = self.held_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        if held <= HELD_BYTES_MAX {
            return Ok(());
        }
        self.release(bytes);
        Err(PickRefusal::overloaded("too many bytes of requests wait for a destination"))
    }

    pub(crate) fn release(&self, bytes: usize) {
        let before = self.held_bytes.fetch_sub(bytes, Ordering::AcqRel);
        assert!(before >= bytes, "{bytes} bytes are released, and {before} were held");
    }
}

/// The endpoint picker; clones are the same one.
#[derive(Clone)]
pub struct EndpointPicker(pub(crate) Arc<PickerState>);

impl EndpointPicker {
    /// A picker without a pool, which refuses all requests until it has one.
    pub fn new(env: SharedEnv, settings: PickerSettings) -> Self {
        let (pool, held_bytes) = (RwLock::default(), AtomicUsize::new(0));
        EndpointPicker(Arc::new(PickerState { env, settings, pool, held_bytes }))
    }

    /// Has the endpoints of a pool, which `picker` has as engines in the same order, get all further requests.
    pub fn take_pool(&self, picker: Picker, pool: &EndpointPool) {
        let taken = Arc::new(PoolInForce::new(picker, pool));
        *self.0.pool.write().unwrap_or_else(PoisonError::into_inner) = Some(taken);
    }

    /// Whether there is a pool.
    pub fn is_synced(&self) -> bool {
        self.0.pool().is_some()
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
    /// The next answer, or none once the proxy is done.
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
            // a proxy that resets its stream has lost its client, and hears nothing any more
            let Ok(Some(message)) = message else { return None };
            match self.exchange.step(message).await {
                Ok(answers) => self.answers.extend(answers),
                Err(status) => {
                    self.is_over = true;
                    tracing::warn!(status = status.message(), "a proxy is not answered");
                    return Some(Err(status));
                }
            }
        }
    }
}

/// Where a picker listens.
pub struct PickerListeners {
    /// For proxies.
    pub processing: TcpListener,
    /// For health checks alone.
    pub health: TcpListener,
}

/// Answers proxies and health checks until `told`; what is in work then goes on.
///
/// # Errors
/// Why it cannot serve.
pub async fn serve(
    picker: EndpointPicker,
    listeners: PickerListeners,
    told: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let (reporter, health) = health_reporter();
    let incoming = |listener| TcpIncoming::from(listener).with_nodelay(Some(true));
    let processor = ExternalProcessorServer::new(picker.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    // proxies check the health of the port that they use
    let processing = Server::builder()
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
        let status = if picker.is_synced() { ServingStatus::Serving } else { ServingStatus::NotServing };
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
