//! Chooses the external engine for a request that a proxy carries, and learns from the answer as it passes.
//!
//! The engines are those of a [`Gateway`]: the same fleet machine places, explains and corrects, and nothing
//! of a request or an answer is changed.
//!
//! Absent: the protocol by which the proxy asks, addresses of engines, the bytes that it carries.

use crate::api::{ApiError, Endpoint, Placements, Tally, Tenant, outline};
use crate::budget::Party;
use crate::env::SharedEnv;
use crate::gateway::{Gateway, PickedPassage, RelayError, RelayRequest, pick};
use crate::metrics::{Metrics, PickLabels, ServedLabels};
use crate::request::{Hints, Rejection};
use mixfleet_hal::outside::{EngineChunk, EngineEndpoint, EngineFault, EngineFaultKind, EngineUsage};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::PartyId;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Longest predicted wait of a request of negative priority: a longer one is refused.
pub const SHED_WAIT: Seconds = Seconds(1.0);

/// Places the requests of proxies.
pub struct Picker {
    gateway: Arc<Gateway>,
    env: SharedEnv,
    metrics: Metrics,
    placements: Arc<Placements>,
}

/// A request that a proxy carries.
#[derive(Clone, Debug, Default)]
pub struct PickQuery {
    /// The key of `/debug/placement/{id}` and of the log.
    pub id: String,
    /// Its path, without a query.
    pub path: String,
    /// Its body.
    pub body: Arc<Vec<u8>>,
    /// Engines that it must not go to, by position.
    pub left_out: Vec<usize>,
    /// Its priority: it goes this many seconds ahead of others. One below 0 is refused first.
    pub priority: i32,
    /// Who shares the engines equally with others; none if it is not known.
    pub fairness_id: Option<String>,
}

/// Why a request has no destination, as the client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickRefusal {
    /// The status.
    pub status: u16,
    /// Whole seconds after which a retry may succeed.
    pub retry_after_s: Option<u64>,
    /// A word for it.
    pub code: &'static str,
    /// The document, JSON.
    pub body: String,
}

/// A request with a destination. Dropping it before its answer is done cancels it here.
pub struct Picked {
    passage: PickedPassage,
    tally: Option<Tally>,
    metrics: Metrics,
    gateway: Arc<Gateway>,
    stream: bool,
}

impl From<ApiError> for PickRefusal {
    fn from(error: ApiError) -> Self {
        PickRefusal {
            status: error.status.as_u16(),
            retry_after_s: error.retry_after_s(),
            code: error.code(),
            body: error.to_json(),
        }
    }
}

impl PickRefusal {
    /// A refusal because nothing is ready to answer.
    pub fn unavailable(message: impl Into<String>) -> Self {
        ApiError::unavailable("no_endpoint", message, 1).into()
    }

    /// A refusal because too much waits.
    pub fn overloaded(message: impl Into<String>) -> Self {
        ApiError::overloaded(message, 1).into()
    }

    /// A refusal of a body of more bytes than are kept.
    pub fn too_large(bytes_max: usize) -> Self {
        ApiError::body_too_large(bytes_max).into()
    }
}

/// The endpoint of a path, if its bodies are read.
fn endpoint(path: &str) -> Option<Endpoint> {
    match path {
        "/v1/chat/completions" => Some(Endpoint::Chat),
        "/v1/completions" => Some(Endpoint::Completions),
        _ => None,
    }
}

impl Picker {
    /// A picker among the engines of a gateway.
    pub fn new(gateway: Arc<Gateway>, env: SharedEnv, metrics: Metrics, placements: Arc<Placements>) -> Self {
        Picker { gateway, env, metrics, placements }
    }

    /// Whether an engine is up and gets requests.
    pub fn is_ready(&self) -> bool {
        self.gateway.is_ready()
    }

    /// Places a request.
    ///
    /// # Errors
    /// Why it has no destination.
    pub async fn pick(&self, query: PickQuery) -> Result<Picked, PickRefusal> {
        let began = self.env.now();
        let read = endpoint(&query.path);
        let (wanted, is_read) = self.wanted(&query, read, began);
        let stream = wanted.stream;
        let mut tally = read.filter(|_| is_read).map(|endpoint| {
            let tenant = Tenant::anyone(Arc::default());
            let counted = (self.metrics.clone(), self.env.clone(), self.placements.clone());
            let mut tally =
                Tally::new(counted, (endpoint, wanted.hints.tier, &tenant), query.id.clone(), began.0, None);
            tally.accepted(std::iter::empty(), 1);
            tally.prompt_begins(self.gateway.assumed_prompt_tokens(&wanted));
            tally
        });
        let placed = pick(&self.gateway, wanted, &query.left_out).await;
        self.metrics.pick_s.observe((self.env.now() - began).0);
        let (outcome, refused) = match placed {
            Ok(passage) if query.priority < 0 && passage.waits.0 > SHED_WAIT.0 => {
                let waits_s = passage.waits.0;
                let message = format!("its priority is below 0, and it would wait for {waits_s:.1} s");
                let retry_after_s = mixfleet_hal::cast::to_u64(waits_s.ceil());
                ("shed", ApiError::overloaded(message, retry_after_s))
            }
            Ok(passage) => {
                self.count("placed");
                let (metrics, gateway) = (self.metrics.clone(), self.gateway.clone());
                return Ok(Picked { passage, tally, metrics, gateway, stream });
            }
            Err(RelayError::Rejected(rejection)) => (outcome(&rejection), rejection.into()),
            Err(RelayError::Failed(fault)) => ("refused", ApiError::engine(fault.detail)),
            Err(RelayError::Quarantined(why)) => ("refused", ApiError::quarantined(why.to_string())),
        };
        if let Some(tally) = &mut tally {
            tally.rejected();
        }
        self.count(outcome);
        let refusal = PickRefusal::from(refused);
        tracing::info!(id = query.id, outcome, status = refusal.status, "a request has no destination");
        Err(refusal)
    }

    fn count(&self, outcome: &'static str) {
        self.metrics.picks.get_or_create(&PickLabels { outcome }).inc();
    }

    /// What is to be placed, and whether its body was read. An invalid body is reported by the engine: it is
    /// placed by its length then.
    fn wanted(&self, query: &PickQuery, read: Option<Endpoint>, now: Seconds) -> (RelayRequest, bool) {
        let outlined = read.map(|endpoint| outline(&query.body, endpoint, None));
        let outlined = outlined.and_then(|outlined| {
            let hints = outlined.and_then(|outline| {
                let hints = outline.hints.hints(now, self.env.unix_time())?;
                Ok((outline, hints))
            });
            let unread =
                |error: ApiError| tracing::debug!(id = query.id, code = error.code(), "body not read");
            hints.map_err(unread).ok()
        });
        let party = query.fairness_id.as_ref().map(|name| Party::Tenant(name.clone()).id());
        let base = RelayRequest {
            id: query.id.clone(),
            endpoint: match read {
                Some(Endpoint::Chat | Endpoint::Responses) => EngineEndpoint::Chat,
                Some(Endpoint::Completions) | None => EngineEndpoint::Completions,
            },
            body: Arc::default(),
            stream: false,
            prompt_bytes: query.body.len(),
            prompt_ids: None,
            chains: Vec::new(),
            choices: 1,
            max_tokens: Some(1),
            granted_tokens: None,
            party: party.unwrap_or(PartyId::NONE),
            hints: Hints { head_start: Seconds(query.priority.into()), ..Hints::default() },
            digest: OnceLock::new(),
        };
        let Some((outline, hints)) = outlined else { return (base, false) };
        let wanted = RelayRequest {
            body: query.body.clone(),
            stream: outline.stream,
            prompt_bytes: outline.prompt_bytes,
            prompt_ids: outline.prompt_ids,
            choices: outline.choices,
            max_tokens: outline.max_tokens,
            hints: Hints { head_start: hints.head_start + base.hints.head_start, ..hints },
            ..base
        };
        (wanted, true)
    }
}

/// The outcome of a rejection in metrics.
fn outcome(rejection: &Rejection) -> &'static str {
    match rejection {
        Rejection::Overloaded { .. } => "overloaded",
        Rejection::Unavailable(_) => "unavailable",
        Rejection::TooLarge(_) | Rejection::Quarantined(_) => "refused",
    }
}

impl Picked {
    /// The destination, then the engines that could take its place, best first, by position.
    pub fn destinations(&self) -> Vec<usize> {
        self.passage.at().into_iter().chain(self.passage.runners_up.iter().copied()).collect()
    }

    /// Predicted time to the first token.
    pub fn ttft(&self) -> Seconds {
        self.passage.ttft()
    }

    /// Whether its client asked for a stream.
    pub fn stream(&self) -> bool {
        self.stream
    }

    /// Whether its body was read, so that its answer can be.
    pub fn is_read(&self) -> bool {
        self.tally.is_some()
    }

    /// Takes which engine the proxy says that answers, or the destination if it does not say.
    pub fn served_by(&mut self, at: Option<usize>) {
        let choice = match at {
            Some(at) if self.passage.served_by(at) => "fallback",
            _ => "first",
        };
        if let Some(at) = self.passage.at() {
            let device = self.gateway.engine_name(at).to_owned();
            self.metrics.picks_served.get_or_create(&ServedLabels { device, choice }).inc();
        }
    }

    /// Time until the prompt of a whole answer is taken to be computed.
    pub fn prompt_due(&self) -> Duration {
        self.passage.prompt_due()
    }

    /// Takes the prompt to be computed.
    pub fn guess_first_token(&mut self) {
        self.passage.guess_first_token();
    }

    /// Takes a chunk of a stream that passes.
    pub fn chunk(&mut self, chunk: &EngineChunk) {
        if chunk.has_token()
            && let Some(tally) = &mut self.tally
        {
            tally.token(0);
        }
        self.passage.chunk(chunk);
    }

    /// Takes the end of a complete answer, with its lengths if they are known.
    pub fn done(&mut self, usage: Option<EngineUsage>) {
        if self.passage.at().is_none() {
            return;
        }
        self.passage.done(usage);
        if let Some(tally) = &mut self.tally {
            tally.told(self.passage.usage().unwrap_or_default());
            tally.succeeded();
        }
    }

    /// Takes the end of an answer that passed unread. Nothing is learned of it.
    pub fn passed(mut self) {
        if let Some(tally) = &mut self.tally {
            tally.succeeded();
        }
    }

    /// Takes the status of an answer that is none: from 500 on, and 429, it is the engine's failure.
    pub fn answered_with(&mut self, status: u16) {
        let kind = match status {
            429 | 503 => EngineFaultKind::Busy,
            500.. => EngineFaultKind::Failed,
            _ => {
                if let Some(tally) = &mut self.tally {
                    tally.rejected();
                }
                return;
            }
        };
        self.failed(&EngineFault::new(kind, format!("status {status}")));
    }

    /// Takes an engine's failure.
    pub fn failed(&mut self, fault: &EngineFault) {
        if self.passage.at().is_some() {
            self.passage.failed(fault);
        }
        if let Some(tally) = &mut self.tally {
            tally.failed_because(&fault.detail);
        }
    }
}
