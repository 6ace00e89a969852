//! The OpenAI-compatible HTTP interface.
//!
//! A request passes [`Api::router`]: the key is checked, the body is read within its limits, every field is
//! checked (nothing that would change the output is ignored), the prompt is tokenised and one
//! [`GenerateRequest`](crate::request::GenerateRequest) per choice is submitted. Tokens are returned as text,
//! held back while a character or a stop string may still be completed, as one document or as server-sent
//! events. When the client leaves, hyper drops the response and with it the receivers of the engine's
//! updates, which is how the engine learns of it.
//!
//! Absent: scheduling, knowledge of devices, access to the model except through [`TextModel`], clocks,
//! sockets, threads or randomness that the environment did not provide.

mod admitted;
mod answer;
mod auth;
mod body;
mod chat;
mod completions;
mod encode;
mod errors;
mod fields;
mod format;
mod gemma_calls;
mod generate;
mod hand_over;
mod harmony;
mod hints;
mod interface;
mod json;
mod keys;
mod kv;
mod logprobs;
mod observe;
mod origins;
mod page;
mod parameters;
mod pass;
mod prompt_report;
mod python_calls;
mod refused;
mod relay;
mod responses;
mod responses_shapes;
mod routes;
mod server;
mod shapes;
mod sse;
mod stall;
mod stop;
mod tally;
mod text;
mod text_rules;
mod tool_bodies;
mod tool_grammar;
mod tool_reader;
mod tool_schema;
mod tool_stream;
mod tools;
mod usage;
mod vocabulary;
mod work;

use axum::http::HeaderMap;
use mixfleet_scheduler::fleet::PartyId;
use mixfleet_scheduler::places::PartyCounts;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use auth::Access;
pub use keys::KeysFile;
pub use observe::{observe, observe_api, observe_placements};
pub use origins::Origins;
pub use server::{Shutdown, serve};
pub use text::{Marked, TextDecoder, TextModel};

pub use crate::placements::Placements;

use crate::budget::{self, ByteBudget, Connections, Party};
use crate::env::SharedEnv;
use crate::gateway::Gateway;
use crate::grammar::COMPILING_MAX;
use crate::kv_exchange::KvExchange;
use crate::metrics::Metrics;
use crate::request::{EngineHandle, Sampling};
use crate::trace::{self, RequestTrace};
pub(crate) use auth::Tenant;
pub(crate) use errors::ApiError;
pub(crate) use relay::outline;
pub(crate) use shapes::Endpoint;
pub(crate) use tally::Tally;
use work::WorkPool;

/// Value of `retry-after` in seconds while the model loads or the process ends.
const RETRY_AFTER_S: u64 = 5;

/// Limits on what clients can make the server hold.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum size of a body; larger ones get 413.
    pub body_bytes_max: usize,
    /// Bytes of bodies over all requests, from arrival until they are tokenised; beyond that 429. Half of
    /// them is the limit of one tenant, or of one address where tenants have no keys of their own.
    pub bodies_bytes_max: usize,
    /// Bytes of answers that wait for their clients, over all requests; half of them is the limit of one
    /// tenant or address, as above. Streams beyond that end, whole answers get 429.
    pub answers_bytes_max: usize,
    /// Number of threads that parse, render and tokenise.
    pub readers_max: usize,
    /// Requests that may wait for one of these threads, half of them of one party; parties take turns.
    /// Further requests get 429.
    pub readers_waiting_max: usize,
    /// Time for reading a body; a slower one gets 408.
    pub body_read_timeout: Duration,
    /// Size of request line and headers; beyond that 431.
    pub header_bytes_max: usize,
    /// Number of header fields; beyond that 431.
    pub headers_max: usize,
    /// Time from a connection's start to the end of its first request's headers.
    pub first_request_timeout: Duration,
    /// Time from a response to the end of the next request's headers.
    pub header_read_timeout: Duration,
    /// Time after which a connection is closed whose client accepts no byte of a pending response.
    pub write_stall_timeout: Duration,
    /// Limits on open connections. Beyond them, idle connections are closed or new ones are answered 503.
    pub connections: Connections,
    /// Time from [`Shutdown::Drain`] until requests that still run are cut off.
    pub drain_timeout: Duration,
    /// Generation requests read, queued or answered at a time; further ones get 429.
    pub requests_max: usize,
    /// Maximum of prompts times `n` in one request.
    pub choices_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body_bytes_max: 8 << 20,
            bodies_bytes_max: budget::BODY_BYTES_MAX,
            answers_bytes_max: budget::ANSWER_BYTES_MAX,
            readers_max: budget::WORK_THREADS_MIN,
            readers_waiting_max: budget::WORK_WAITING_MAX,
            body_read_timeout: Duration::from_secs(60),
            header_bytes_max: 32 << 10,
            headers_max: 100,
            first_request_timeout: Duration::from_secs(10),
            header_read_timeout: Duration::from_secs(60),
            write_stall_timeout: Duration::from_secs(60),
            connections: Connections::within(1024),
            drain_timeout: Duration::from_secs(30),
            requests_max: 512,
            choices_max: 128,
        }
    }
}

/// A model that is ready to answer.
pub struct ServedModel {
    /// Name of the model in the API.
    pub name: String,
    /// Seconds since 1970-01-01, for `/v1/models`.
    pub created: u64,
    /// The engine that executes the requests.
    pub engine: EngineHandle,
    /// The model's tokenizer and chat template.
    pub text: Arc<dyn TextModel>,
    /// Maximum number of tokens of prompt and answer together.
    pub context: u32,
    /// Tokens that end an answer.
    pub eos_ids: Arc<[u32]>,
    /// Sampling parameters where the request gives none; the seed is not used.
    pub defaults: Sampling,
    /// Maximum number of tokens of an answer where the request gives none; none: what the context leaves.
    pub answer_tokens: Option<u32>,
    /// Storage in which external engines read and write KV, if they may.
    pub exchange: Option<Arc<KvExchange>>,
}

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ServedModel").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The source of answers.
#[derive(Clone, Debug)]
pub enum Serving {
    /// A model on devices of this fleet.
    Model(Arc<ServedModel>),
    /// External engines.
    Engines(Arc<Gateway>),
}

impl From<ServedModel> for Serving {
    fn from(model: ServedModel) -> Self {
        Serving::Model(Arc::new(model))
    }
}

impl From<Arc<Gateway>> for Serving {
    fn from(gateway: Arc<Gateway>) -> Self {
        Serving::Engines(gateway)
    }
}

impl Serving {
    /// The model's name for clients, its start time, and its context length.
    fn described(&self) -> (&str, u64, u32) {
        match self {
            Serving::Model(model) => (&model.name, model.created, model.context),
            Serving::Engines(gateway) => (gateway.name(), gateway.created(), gateway.context()),
        }
    }
}

#[derive(Clone)]
enum Phase {
    /// What is waited for, in words.
    Loading(&'static str),
    Ready(Serving),
    Draining,
}

/// The state behind the routes. It starts in the loading state: `/v1` answers 503 until [`Api::ready`].
pub struct Api {
    env: SharedEnv,
    metrics: Metrics,
    placements: Arc<Placements>,
    limits: Limits,
    access: Access,
    phase: Mutex<Phase>,
    requests: Arc<Mutex<RequestsInWork>>,
    bodies: ByteBudget,
    answers: ByteBudget,
    readers: WorkPool,
    /// Compiles grammars of answers.
    compilers: WorkPool,
}

/// A request's place among those in progress, per tenant and in total.
struct Seat {
    tenant: Arc<Tenant>,
    party: PartyId,
    _tenants: auth::Seat,
    _place: RequestPlace,
}

/// The requests in progress.
#[derive(Default)]
struct RequestsInWork {
    count: usize,
    of: PartyCounts,
}

/// A party's place among the requests in progress, free again when this is dropped.
struct RequestPlace {
    requests: Arc<Mutex<RequestsInWork>>,
    party: PartyId,
}

impl RequestPlace {
    /// Takes one of `most` places, or returns why none is free.
    fn take(requests: &Arc<Mutex<RequestsInWork>>, party: PartyId, most: usize) -> Result<Self, String> {
        let mut state = requests.lock().unwrap_or_else(PoisonError::into_inner);
        if state.count >= most {
            return Err(format!("{most} requests are being answered already"));
        }
        if state.of.leaves_the_rest(party, state.count, most) {
            let own = state.of.requests(party);
            return Err(format!(
                "{own} of {most} requests being answered are this client's; the other places are for other clients"
            ));
        }
        state.count += 1;
        state.of.enter(party);
        Ok(RequestPlace { requests: requests.clone(), party })
    }
}

impl Drop for RequestPlace {
    fn drop(&mut self) {
        let mut state = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        state.count -= 1;
        state.of.leave(self.party);
    }
}

impl Seat {
    fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The party whose share the work uses.
    fn party(&self) -> PartyId {
        self.party
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Api").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Api {
    /// An interface without a model yet. With keys, all routes but `/`, `/live`, `/health` and `/metrics`
    /// require one.
    pub fn new(
        env: SharedEnv,
        metrics: Metrics,
        placements: Arc<Placements>,
        limits: Limits,
        access: impl Into<Access>,
    ) -> Arc<Self> {
        Arc::new(Api {
            requests: Arc::default(),
            bodies: ByteBudget::new(limits.bodies_bytes_max),
            readers: WorkPool::new(env.clone(), "reader", limits.readers_max, limits.readers_waiting_max),
            compilers: WorkPool::new(env.clone(), "compiler", COMPILING_MAX, limits.readers_waiting_max),
            answers: ByteBudget::new(limits.answers_bytes_max),
            access: access.into(),
            phase: Mutex::new(Phase::Loading("the model is still loading")),
            env,
            metrics,
            placements,
            limits,
        })
    }

    /// Says what requests wait for until [`Api::ready`], if it is not a model of this process.
    pub fn waits_for(&self, what: &'static str) {
        let mut phase = self.lock();
        if matches!(*phase, Phase::Loading(_)) {
            *phase = Phase::Loading(what);
        }
    }

    /// Starts to answer with `serving`; without effect once draining.
    pub fn ready(&self, serving: impl Into<Serving>) {
        let serving = serving.into();
        self.metrics.name_model(serving.described().0);
        let mut phase = self.lock();
        if !matches!(*phase, Phase::Draining) {
            *phase = Phase::Ready(serving);
        }
    }

    /// Rejects new requests with 503, while running requests continue. [`serve`] calls it at the start of
    /// draining.
    pub fn drain(&self) {
        *self.lock() = Phase::Draining;
        self.metrics.drain_states(self.env.now());
    }

    fn phase(&self) -> Phase {
        self.lock().clone()
    }

    fn serving(&self) -> Result<Serving, ApiError> {
        match self.phase() {
            Phase::Ready(serving) => Ok(serving),
            Phase::Loading(what) => {
                let message = self.metrics.why_none_serves(self.env.now()).unwrap_or_else(|| what.into());
                Err(ApiError::unavailable("loading", message, RETRY_AFTER_S))
            }
            Phase::Draining => {
                Err(ApiError::unavailable("draining", "this server is shutting down", RETRY_AFTER_S))
            }
        }
    }

    /// Takes a place for a request of `tenant`, which is accounted to `party`.
    fn seat(&self, tenant: Arc<Tenant>, party: &Party) -> Result<Seat, ApiError> {
        let (party, most) = (party.id(), self.limits.requests_max);
        let full = |message| ApiError::overloaded(message, 1);
        let place = RequestPlace::take(&self.requests, party, most).map_err(full)?;
        Ok(Seat { _tenants: tenant.seat()?, tenant, party, _place: place })
    }

    /// The counters of a request.
    fn counted(&self) -> (Metrics, SharedEnv, Arc<Placements>) {
        (self.metrics.clone(), self.env.clone(), self.placements.clone())
    }

    /// Begins the span of a request with these headers.
    fn trace(&self, headers: &HeaderMap) -> Option<RequestTrace> {
        let header = headers.get(trace::TRACEPARENT).and_then(|value| value.to_str().ok());
        self.metrics.traces.begin(&*self.env, header)
    }

    /// 128 random bits in hexadecimal.
    fn random_id(&self) -> String {
        format!("{:016x}{:016x}", self.env.random(), self.env.random())
    }

    fn lock(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
