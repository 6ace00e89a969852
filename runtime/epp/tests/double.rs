//! A picker with endpoints that are only probed, and a proxy that speaks as a test says.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HeaderMutation, HttpBody, HttpHeaders, ImmediateResponse, ProcessingRequest, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value};
use mixfleet_epp::{
    EndpointPicker, EndpointPool, OpenPool, OpenedPool, PickerListeners, PickerSettings, serve,
};
use mixfleet_hal::outside::{
    EngineAnswer, EngineCall, EngineFault, EngineFaultKind, EngineFuture, EngineKvFeed, EngineModel,
    EngineState, OutsideEngine,
};
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::gateway::{EngineSpec, GatewayParts};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::picker::Picker;
use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, LinkCost, PrefillCoefficients};
use mixfleet_scheduler::fleet::{FleetConfig, Role};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// An endpoint that is up, and never asked: what passes comes from the test.
struct Probed(String);

impl OutsideEngine for Probed {
    fn name(&self) -> &str {
        &self.0
    }

    fn probe(&self) -> EngineFuture<'_, Result<EngineState, EngineFault>> {
        let models = vec![EngineModel { name: "m".into(), context: Some(100_000) }];
        Box::pin(async { Ok(EngineState { models, sequences_max: Some(64), ..EngineState::default() }) })
    }

    fn follow_kv(&self) -> EngineFuture<'_, Result<Box<dyn EngineKvFeed>, EngineFault>> {
        Box::pin(async { Err(EngineFault::new(EngineFaultKind::NotTaken, "nothing is told")) })
    }

    fn prompt_tokens<'a>(
        &'a self,
        _: &'a EngineCall,
    ) -> EngineFuture<'a, Result<Option<Vec<u32>>, EngineFault>> {
        Box::pin(async { Ok(None) })
    }

    fn ask<'a>(&'a self, _: &'a EngineCall) -> EngineFuture<'a, Result<EngineAnswer, EngineFault>> {
        Box::pin(async { Err(EngineFault::new(EngineFaultKind::Failed, "a picker asks nothing")) })
    }
}

/// The `at`th endpoint's address.
pub(crate) fn address(at: usize) -> String {
    format!("10.0.0.{}:8000", at + 1)
}

/// How a picker is set up.
pub(crate) struct PickerSetup {
    /// Seconds of any prompt on each endpoint.
    pub(crate) prompt_s: Vec<f64>,
    pub(crate) requests_max: usize,
    pub(crate) ttft_slo_s: Option<f64>,
    pub(crate) objectives: &'static str,
    /// How many of them, the first ones, compute prompts for the others.
    pub(crate) prefill: usize,
}

impl PickerSetup {
    pub(crate) fn of(prompt_s: &[f64]) -> Self {
        PickerSetup {
            prompt_s: prompt_s.to_vec(),
            requests_max: 64,
            ttft_slo_s: None,
            objectives: "{}",
            prefill: 0,
        }
    }
}

/// A picker that serves.
pub(crate) struct World {
    pub(crate) picker: EndpointPicker,
    pub(crate) metrics: Metrics,
    pub(crate) placements: Arc<Placements>,
    pub(crate) health: SocketAddr,
    pub(crate) processing: SocketAddr,
    pub(crate) env: SharedEnv,
    /// Endpoints that were opened for a source of pools, as engines, in order.
    opened: Arc<Mutex<Vec<String>>>,
}

impl World {
    /// Without a pool.
    pub(crate) async fn empty() -> World {
        let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
        let picker = EndpointPicker::new(env.clone(), PickerSettings { fallbacks: 2 });
        let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let listeners = PickerListeners { processing: bind().await, health: bind().await };
        let processing = listeners.processing.local_addr().expect("it is bound");
        let health = listeners.health.local_addr().expect("it is bound");
        tokio::spawn(serve(picker.clone(), listeners, std::future::pending()));
        let (metrics, placements) = (Metrics::new(), Arc::new(Placements::new(64)));
        World { picker, metrics, placements, health, processing, env, opened: Arc::default() }
    }

    /// With a pool of these endpoints.
    pub(crate) async fn new(setup: PickerSetup) -> World {
        let world = World::empty().await;
        world.take(setup).await;
        world
    }

    pub(crate) async fn take(&self, setup: PickerSetup) {
        let PickerSetup { prompt_s, requests_max, ttft_slo_s, objectives, prefill } = setup;
        let entry = |at: usize| format!("{{name: e{at}, address: 10.0.0.{}, port: '8000'}}", at + 1);
        let entries: Vec<String> = (0..prompt_s.len()).map(entry).collect();
        let text = format!("endpoints: [{}]\nobjectives: {objectives}\n", entries.join(", "));
        let pool = EndpointPool::read(&text).expect("a pool");
        let ttft_slo = ttft_slo_s.map(mixfleet_hal::units::Seconds);
        let parts = self.parts(FleetConfig { requests_max, ttft_slo, ..EngineConfig::default().fleet });
        let endpoint = |(at, s): (usize, &f64)| {
            let role = if at < prefill { Role::Prefill } else { Role::Auto };
            EngineSpec { role, takes_kv: prefill > 0, ..spec(format!("e{at}"), *s) }
        };
        let gateway = parts.start(prompt_s.iter().enumerate().map(endpoint).collect()).await;
        let picker = Picker::new(gateway, self.env.clone(), self.metrics.clone(), self.placements.clone());
        self.picker.take_pool(picker, &pool);
    }

    fn parts(&self, fleet: FleetConfig) -> GatewayParts {
        parts(&self.env, &self.placements, &self.metrics, fleet)
    }

    /// Opens the endpoints of a source of pools as ones that are only probed.
    pub(crate) fn opener(&self) -> OpenPool {
        let (env, placements) = (self.env.clone(), self.placements.clone());
        let (metrics, opened) = (self.metrics.clone(), self.opened.clone());
        Arc::new(move |pool| {
            let engines = pool.endpoints.iter().map(|one| spec(one.address.to_string(), 0.1)).collect();
            let names = pool.endpoints.iter().map(|one| one.engine.clone());
            opened.lock().expect("no panic before").extend(names);
            let parts = parts(&env, &placements, &metrics, EngineConfig::default().fleet);
            Ok(OpenedPool { parts, engines })
        })
    }

    /// The endpoints that were opened for a source of pools.
    pub(crate) fn opened(&self) -> Vec<String> {
        self.opened.lock().expect("no panic before").clone()
    }

    /// A connection to the picker.
    pub(crate) async fn proxy(&self) -> Proxy {
        let url = format!("http://{}", self.processing);
        Proxy(ExternalProcessorClient::connect(url).await.expect("it listens"))
    }

    /// Whether the metrics have this line.
    pub(crate) fn counts(&self, line: &str) -> bool {
        self.metrics.encode().lines().any(|one| one == line)
    }
}

fn parts(
    env: &SharedEnv,
    placements: &Arc<Placements>,
    metrics: &Metrics,
    fleet: FleetConfig,
) -> GatewayParts {
    GatewayParts {
        env: env.clone(),
        name: None,
        limits: EngineConfig { fleet, ..EngineConfig::default() },
        events: None,
        placements: placements.clone(),
        metrics: metrics.clone(),
        canaries: None,
    }
}

fn spec(name: String, prompt_s: f64) -> EngineSpec {
    let cost = CostModel::Coefficients(Coefficients {
        prefill_s: PrefillCoefficients { overhead: prompt_s, per_token: 1e-6, per_token_squared: 0.0 },
        decode_s: DecodeCoefficients { base: 0.01, per_sequence: 0.001, per_kv_token: 0.0 },
    });
    EngineSpec {
        engine: Arc::new(Probed(name)),
        model: None,
        price: None,
        cost: Some(cost),
        role: Role::Auto,
        takes_kv: false,
        nic: LinkCost::default(),
        kv_bytes_per_token: Some(1000),
    }
}

/// A connection of a proxy.
pub(crate) struct Proxy(ExternalProcessorClient<Channel>);

/// A request that passes through a proxy.
pub(crate) struct Passing {
    to: mpsc::UnboundedSender<ProcessingRequest>,
    from: Streaming<ProcessingResponse>,
}

impl Proxy {
    pub(crate) async fn begin(&mut self) -> Passing {
        let (to, receiver) = mpsc::unbounded_channel();
        let sent = futures_util::stream::unfold(receiver, async |mut receiver| {
            let message = receiver.recv().await?;
            Some((message, receiver))
        });
        let from = self.0.process(sent).await.expect("a stream").into_inner();
        Passing { to, from }
    }

    /// Sends a request in one piece, and waits for what is said of its headers.
    pub(crate) async fn asked(
        &mut self,
        headers: &[(&str, &str)],
        metadata: Option<Metadata>,
    ) -> (Passing, Response) {
        let mut passing = self.begin().await;
        passing.send(Request::RequestHeaders(message_headers(headers, false)), metadata);
        passing.send(Request::RequestBody(piece(BODY.as_bytes(), true)), None);
        let answer = passing.answer().await;
        (passing, answer)
    }
}

impl Passing {
    pub(crate) fn send(&self, request: Request, metadata_context: Option<Metadata>) {
        let request = Some(request);
        let _ = self.to.send(ProcessingRequest { request, metadata_context, ..ProcessingRequest::default() });
    }

    pub(crate) fn send_whole(&self, message: ProcessingRequest) {
        let _ = self.to.send(message);
    }

    pub(crate) async fn message(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        self.from.message().await
    }

    pub(crate) async fn answer(&mut self) -> Response {
        self.message().await.expect("no fault").expect("an answer").response.expect("of a kind")
    }

    /// The next piece of a body that is passed on.
    pub(crate) async fn passed(&mut self) -> (Vec<u8>, bool) {
        let common = match self.answer().await {
            Response::RequestBody(body) | Response::ResponseBody(body) => body.response,
            other => panic!("not a piece of a body: {other:?}"),
        };
        match common.and_then(|common| common.body_mutation).and_then(|mutation| mutation.mutation) {
            Some(Mutation::StreamedResponse(piece)) => (piece.body, piece.end_of_stream),
            other => panic!("not streamed: {other:?}"),
        }
    }
}

/// A body that is placed.
pub(crate) const BODY: &str = r#"{"model":"m","prompt":"hello","max_tokens":8,"stream":true}"#;
/// The headers that it comes with.
pub(crate) const HEADERS: [(&str, &str); 3] =
    [(":method", "POST"), (":path", "/v1/completions"), ("x-request-id", "r1")];

pub(crate) fn message_headers(headers: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).into(),
        raw_value: (*value).into(),
        ..HeaderValue::default()
    };
    let headers = Some(HeaderMap { headers: headers.iter().map(header).collect() });
    HttpHeaders { headers, end_of_stream, ..HttpHeaders::default() }
}

pub(crate) fn piece(body: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody { body: body.to_vec(), end_of_stream, ..HttpBody::default() }
}

fn metadata(namespace: &str, key: &str, kind: Kind) -> Metadata {
    let fields = [(key.to_owned(), Value { kind: Some(kind) })].into();
    Metadata { filter_metadata: [(namespace.to_owned(), Struct { fields })].into(), ..Metadata::default() }
}

/// The hint that only these endpoints may be picked.
pub(crate) fn subset(addresses: &[&str]) -> Metadata {
    let text = |address: &&str| Value { kind: Some(Kind::StringValue((*address).into())) };
    let list = ListValue { values: addresses.iter().map(text).collect() };
    metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", Kind::ListValue(list))
}

/// The report that this endpoint served.
pub(crate) fn served(address: &str) -> Metadata {
    let kind = Kind::StringValue(address.into());
    metadata("envoy.lb", "x-gateway-destination-endpoint-served", kind)
}

fn mutation(answer: &Response) -> &HeaderMutation {
    let Response::RequestHeaders(headers) = answer else { panic!("no destination: {answer:?}") };
    headers.response.as_ref().unwrap().header_mutation.as_ref().unwrap()
}

/// A header that an answer to request headers sets.
pub(crate) fn set_header(answer: &Response, name: &str) -> Option<String> {
    let header = mutation(answer).set_headers.iter().filter_map(|option| option.header.as_ref());
    let mut named = header.filter(|header| header.key == name);
    Some(String::from_utf8(named.next()?.raw_value.clone()).unwrap())
}

/// The headers that an answer to request headers removes.
pub(crate) fn removed(answer: &Response) -> Vec<String> {
    mutation(answer).remove_headers.clone()
}

/// The destinations that an answer to request headers sets.
pub(crate) fn destinations(answer: &Response) -> String {
    set_header(answer, "x-gateway-destination-endpoint").expect("a destination")
}

/// What a request was answered in place of an endpoint.
pub(crate) fn refusal(answer: Response) -> ImmediateResponse {
    match answer {
        Response::ImmediateResponse(refusal) => refusal,
        other => panic!("it is placed: {other:?}"),
    }
}
