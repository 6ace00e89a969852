//! Chooses the external engine for a request that a proxy relays, and learns from the relayed answer.
//!
//! The engines are those of a [`Gateway`]: the same fleet machine places, explains and corrects. Requests and
//! answers are not changed.
//!
//! Absent: the proxy's protocol, addresses of engines, the relayed bytes.

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

/// Maximum predicted wait of a request with a negative priority, which is refused if it would wait longer.
pub const SHED_WAIT: Seconds = Seconds(1.0);

/// Places the requests of proxies.
pub struct Picker {
    gateway: Arc<Gateway>,
    env: SharedEnv,
    metrics: Metrics,
    placements: Arc<Placements>,
}

/// A request that a proxy relays.
#[derive(Clone, Debug, Default)]
pub struct PickQuery {
    /// The id for `/debug/placement/{id}` and the log.
    pub id: String,
    /// Path without the query.
    pub path: String,
    /// The body.
    pub body: Arc<Vec<u8>>,
    /// Excluded engines, by position.
    pub left_out: Vec<usize>,
    /// Head start in the order of requests, in seconds. Below 0, the request is refused if it would wait for
    /// more than [`SHED_WAIT`].
    pub priority: i32,
    /// The party that shares the engines equally with others; none if unknown.
    pub fairness_id: Option<String>,
}

/// A refusal of a request, in the client's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickRefusal {
    /// The status code.
    pub status: u16,
    /// Whole seconds after which a retry may succeed.
    pub retry_after_s: Option<u64>,
    /// The error's code.
    pub code: &'static str,
    /// The JSON document.
    pub body: String,
}

/// A request with a destination. Dropping it before the end of the answer cancels the placement.
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
    /// A refusal because no engine is ready.
    pub fn unavailable(message: impl Into<String>) -> Self {
        ApiError::unavailable("no_endpoint", message, 1).into()
    }

    /// A refusal because of overload.
    pub fn overloaded(message: impl Into<String>) -> Self {
        ApiError::overloaded(message, 1).into()
    }

    /// A refusal of a body beyond the maximum size.
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
    /// Creates a picker among the engines of a gateway.
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
    /// The refusal, if there is no destination.
    pub async fn pick(&self, query: PickQuery) -> Result<Picked, PickRefusal> {
        let began = self.env.now();
        let read = endpoint(&query.path);
        let (wanted, is_read) = self.wanted(&query, read, began);
        let stream = wanted.stream;
        self.metrics.pick_prompt_tokens.inc_by(self.gateway.assumed_prompt_tokens(&wanted).into());
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

    /// Returns the request for placement, and whether the body was parsed. An invalid body is placed by its
    /// length, and the engine reports the error.
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

/// Returns the label of a rejection in metrics.
fn outcome(rejection: &Rejection) -> &'static str {
    match rejection {
        Rejection::Overloaded { .. } => "overloaded",
        Rejection::Unavailable(_) => "unavailable",
        Rejection::TooLarge(_) | Rejection::Quarantined(_) => "refused",
    }
}

impl Picked {
    /// The destination, then the runners-up, best first, by position.
    pub fn destinations(&self) -> Vec<usize> {
        self.passage.at().into_iter().chain(self.passage.runners_up.iter().copied()).collect()
    }

    /// The position of the engine that computes the prompt, if it is not the destination.
    pub fn prompt_at(&self) -> Option<usize> {
        self.passage.prompt_at()
    }

    /// Predicted time to the first token.
    pub fn ttft(&self) -> Seconds {
        self.passage.ttft()
    }

    /// Whether the client requested a stream.
    pub fn stream(&self) -> bool {
        self.stream
    }

    /// Whether the body was parsed, so that the answer can be read.
    pub fn is_read(&self) -> bool {
        self.tally.is_some()
    }

    /// Records which engine answers: the one that the proxy reports, or else the destination.
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

    /// Time until the prompt of an unstreamed answer is assumed to be computed.
    pub fn prompt_due(&self) -> Duration {
        self.passage.prompt_due()
    }

    /// Records that the prompt is assumed to be computed.
    pub fn guess_first_token(&mut self) {
        self.passage.guess_first_token();
    }

    /// Handles a relayed chunk of a stream.
    pub fn chunk(&mut self, chunk: &EngineChunk) {
        if chunk.has_token()
            && let Some(tally) = &mut self.tally
        {
            tally.token(0);
        }
        self.passage.chunk(chunk);
    }

    /// Handles the end of a complete answer, with its lengths if they are known.
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

    /// Handles the end of an unread answer, from which nothing is learned.
    pub fn passed(mut self) {
        if let Some(tally) = &mut self.tally {
            tally.succeeded();
        }
    }

    /// Handles the status of a failed answer. 429, and 500 and above, are failures of the engine.
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

    /// Handles an engine's failure.
    pub fn failed(&mut self, fault: &EngineFault) {
        if self.passage.at().is_some() {
            self.passage.failed(fault);
        }
        if let Some(tally) = &mut self.tally {
            tally.failed_because(&fault.detail);
        }
    }
}
