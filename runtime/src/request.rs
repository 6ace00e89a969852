//! What the API submits to the engine, and what the engine reports back.

use crate::grammar::Grammar;
use crate::trace::TraceParent;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{PartyId, RejectReason};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::mpsc;

mod backlog;

pub use backlog::{AnswerBacklog, UpdateReceiver, UpdateSender, update_channel};
pub(crate) use backlog::{FREE_BYTES, logprobs_bytes};

/// Bits of a request's id that count the requests of its router.
const COUNT_BITS: u32 = 48;

/// A router's number in its fleet. Request ids begin with it, so that reports are returned to the right
/// router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RouterId(pub u16);

impl RouterId {
    /// The id of this router's first request.
    pub(crate) fn first_request(self) -> RequestId {
        u64::from(self.0) << COUNT_BITS
    }

    /// The router of a request.
    pub(crate) fn of(request: RequestId) -> Self {
        RouterId((request >> COUNT_BITS) as u16)
    }
}

/// One sequence to complete. A client's `n` choices are `n` requests, which share the prefix cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Chosen by the API and unique in this process; the key of `/debug/placement/{id}` and of the log.
    pub id: String,
    /// The prompt's token ids, at least one.
    pub prompt_ids: Arc<[u32]>,
    /// The rest of the prompt, where each of its tokens needs a log-probability: the first tokens of the
    /// output are these, whatever their logits and whether they end answers.
    #[serde(default)]
    pub forced_ids: Arc<[u32]>,
    /// Maximum number of tokens to generate, including `forced_ids`; prompt and output together fit the
    /// model's context.
    pub max_tokens: u32,
    /// Tokens that end the answer; empty with `ignore_eos`.
    pub eos_ids: Arc<[u32]>,
    /// What the answer must not do before it is long enough, if anything.
    #[serde(default)]
    pub minimum: Option<AnswerMinimum>,
    /// Which tokens the answer may have, if not all.
    #[serde(default)]
    pub vocabulary: Option<AnswerVocabulary>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Whether to report log-probabilities, and of how many best tokens besides the chosen one.
    pub logprobs: Option<u32>,
    /// What the answer must be, if anything; it ends with one of `eos_ids`.
    pub grammar: Option<Grammar>,
    /// Separates tenants in the prefix cache.
    pub cache_salt: Option<String>,
    /// The party whose share of the instances it uses.
    pub party: PartyId,
    /// What it says of itself.
    pub hints: Hints,
}

impl GenerateRequest {
    /// Number of tokens that the client gave: the prompt's, with those that are forced.
    pub fn given_tokens(&self) -> usize {
        self.prompt_ids.len() + self.forced_ids.len()
    }

    /// A request for exactly this many most likely tokens after a prompt.
    pub fn greedy(id: impl Into<String>, prompt_ids: impl Into<Arc<[u32]>>, max_tokens: u32) -> Self {
        GenerateRequest {
            id: id.into(),
            prompt_ids: prompt_ids.into(),
            forced_ids: Arc::new([]),
            max_tokens,
            eos_ids: Arc::new([]),
            minimum: None,
            vocabulary: None,
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            logprobs: None,
            grammar: None,
            cache_salt: None,
            party: PartyId::NONE,
            hints: Hints::default(),
        }
    }
}

/// A minimum length of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerMinimum {
    /// Tokens behind the prompt before which none of `masked_ids` is drawn.
    pub tokens: u32,
    /// The end tokens, in order.
    pub masked_ids: Arc<[u32]>,
}

/// The tokens that an answer may have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerVocabulary {
    /// The only tokens that are drawn, in order and once each; empty for all.
    pub allowed_ids: Arc<[u32]>,
    /// Sequences of tokens that the answer does not contain; none is empty.
    pub bad_words: Vec<Arc<[u32]>>,
}

/// What a request says of itself: how soon its answer is wanted, and how long that will be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hints {
    /// How soon the answer is wanted, by tier.
    pub tier: ServiceTier,
    /// Shift of its due time: earlier if positive, later if negative.
    pub head_start: Seconds,
    /// When the answer must be complete; of a flex request the engine's default without one.
    pub deadline: Option<Deadline>,
    /// Tokens that it will probably generate.
    pub output_tokens: Option<u32>,
    /// Whether the KV of its prompt is copied to host memory before its first token is reported, for an
    /// external engine that requested it.
    #[serde(default)]
    pub keeps_kv: bool,
    /// The parent span of the work for it.
    pub trace: Option<TraceParent>,
}

impl Hints {
    /// With what its tier adds.
    pub fn whole_head_start(&self) -> Seconds {
        let of_tier = if self.tier == ServiceTier::Priority { PRIORITY_HEAD_START } else { Seconds::ZERO };
        self.head_start + of_tier
    }
}

/// When an answer must be complete.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Deadline {
    /// On the environment's clock.
    pub at: Seconds,
    /// Requests of a chain that must all be complete by then: this one and its dependents.
    pub requests_left: u32,
}

/// Head start of requests of the tier `priority`.
const PRIORITY_HEAD_START: Seconds = Seconds(60.0);

/// How soon an answer is wanted, by OpenAI's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceTier {
    /// The fleet's TTFT and TBT objectives apply: the answer is read as it streams.
    #[default]
    Default,
    /// The answer must be complete by a deadline; until then other requests go first.
    Flex,
    /// As the fleet's objectives say, with a head start.
    Priority,
}

/// How a token is drawn from the logits. The default is OpenAI's: temperature 1 and no truncation or penalty.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Temperature; 0 means greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this; 1 = all.
    pub top_p: f32,
    /// Keep this many best tokens; 0 = all.
    pub top_k: u32,
    /// Keep tokens at least this likely relative to the best; 0 = all.
    pub min_p: f32,
    /// Divides (or multiplies, if negative) the logits of tokens seen in prompt or output; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens already generated.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of tokens already generated.
    pub frequency_penalty: f32,
    /// Added to the logits of some tokens, each named once; not together with a repetition penalty.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Key of the counter-based generator: token i is drawn with (seed, i).
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::default(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Whether every parameter is a finite number.
    pub(crate) fn is_finite(&self) -> bool {
        let Sampling {
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            ref logit_bias,
            ..
        } = *self;
        [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty]
            .iter()
            .chain(logit_bias.iter().map(|(_, bias)| bias))
            .all(|parameter| parameter.is_finite())
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token was drawn, or (set by the API) a stop string was found.
    Stop,
    /// `max_tokens` was reached.
    Length,
    /// Set by the API: it ended, and calls tools.
    ToolCalls,
}

/// Log-probabilities (natural log) at one output position, of the model's raw distribution
/// (before temperature, penalties and truncation).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// Log-probability of the chosen token.
    pub chosen: f32,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// What the engine reports about a request, in order: `Placed` (again after a replay, if the client keeps
/// up), `Started`, tokens, then `Finished` or `Failed`, after which the channel closes.
#[derive(Clone, Debug)]
pub enum Update {
    /// The request was placed on the instances of these device ids.
    Placed {
        /// Device id of the instance that processes the prompt.
        prefill: String,
        /// Device id of the instance that generates tokens.
        decode: String,
    },
    /// Its prompt is being computed. This is reported once, however often the request is placed.
    Started {
        /// Prompt tokens whose KV was reused instead of computed.
        cached_tokens: u32,
    },
    /// A token was generated. An end token is reported too, right before `Finished`.
    Token {
        /// The token's id.
        id: u32,
        /// Log-probabilities, if [`GenerateRequest::logprobs`] asked for them.
        logprobs: Option<Logprobs>,
    },
    /// The answer is complete.
    Finished {
        /// Why the answer ended.
        reason: FinishReason,
    },
    /// The answer cannot be completed.
    Failed(Failure),
}

/// Why an answer cannot be completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The cause.
    pub kind: FailureKind,
    /// A message for the client.
    pub message: String,
}

/// The cause of an incomplete answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The request itself: it must not be sent again unchanged.
    Request,
    /// A shared resource is used up: the request may be sent again later.
    Exhausted,
    /// It was given up before its first token, because too much work is ahead of it: it may be sent again
    /// later.
    TurnedAway,
    /// The engine.
    Engine,
}

impl Failure {
    /// A failure of the engine.
    pub fn engine(message: impl Into<String>) -> Self {
        Failure { kind: FailureKind::Engine, message: message.into() }
    }

    /// A request that is given up before its first token, because too much work is ahead of it.
    pub fn turned_away(message: impl Into<String>) -> Self {
        Failure { kind: FailureKind::TurnedAway, message: message.into() }
    }

    /// A failure because a shared resource is used up for now.
    pub fn exhausted(message: impl Into<String>) -> Self {
        Failure { kind: FailureKind::Exhausted, message: message.into() }
    }
}

/// Why a request was turned away before any work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// Too much work is queued, or the prediction violates the SLO or the deadline: status 429.
    #[error("{reason}")]
    Overloaded {
        /// The reason in words, with the numbers.
        reason: String,
        /// Whole seconds after which a retry may succeed, at least 1.
        retry_after_s: u64,
    },
    /// The request can never fit: status 400.
    #[error("{0}")]
    TooLarge(String),
    /// The engine is draining or not ready: status 503.
    #[error("{0}")]
    Unavailable(String),
    /// Instances were lost with it: status 500.
    #[error("{0}")]
    Quarantined(String),
}

impl Rejection {
    /// A rejection for a reason of the fleet machine's.
    pub(crate) fn new(reason: &RejectReason, retry_after: Option<Seconds>) -> Self {
        let overloaded = |seconds: f64| Rejection::Overloaded {
            reason: reason.to_string(),
            retry_after_s: to_u64(seconds.ceil().clamp(1.0, 3600.0)),
        };
        match reason {
            RejectReason::TooLarge { .. } => Rejection::TooLarge(reason.to_string()),
            RejectReason::QueueFull { .. }
            | RejectReason::Share { .. }
            | RejectReason::TtftSlo { .. }
            | RejectReason::TbtSlo { .. } => overloaded(retry_after.map_or(1.0, |after| after.0)),
            // A retry gets the same time again, and by then some of the work ahead is done.
            RejectReason::Deadline { ends_s, deadline_s } => overloaded(ends_s - deadline_s),
            _ => Rejection::Unavailable(reason.to_string()),
        }
    }

    /// The same, which says why nothing takes requests, if that is so.
    pub(crate) fn explained(self, why: Option<String>) -> Self {
        match (self, why) {
            (Rejection::Unavailable(_), Some(why)) => Rejection::Unavailable(why),
            (rejection, _) => rejection,
        }
    }
}

/// Updates of a request that are sent once each, besides its tokens: its placement, its start and its end.
pub const UPDATES_BESIDE_TOKENS: usize = 3;

/// A request submitted to the engine, with the channels for the answer.
#[derive(Debug)]
pub struct Submission {
    /// The request.
    pub request: GenerateRequest,
    /// Channel for updates. The engine cancels the request when the receiver is gone.
    pub updates: UpdateSender,
    /// Receives one message: accepted, or why not.
    pub admitted: tokio::sync::oneshot::Sender<Result<(), Rejection>>,
}

/// The API's end of the queue of submissions to the engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    submissions: mpsc::Sender<Submission>,
    drops_late: bool,
}

impl EngineHandle {
    /// Creates a handle and the engine's end of its queue, in which `bound` submissions may wait.
    pub fn channel(bound: usize) -> (Self, mpsc::Receiver<Submission>) {
        let (submissions, receiver) = mpsc::channel(bound);
        (EngineHandle { submissions, drops_late: false }, receiver)
    }

    /// The same, of an engine that may give a request up once its prompt is computed.
    pub fn that_drops_late(self, drops_late: bool) -> Self {
        EngineHandle { drops_late, ..self }
    }

    /// Whether an accepted request may be given up after its prompt was computed, because its decode instance
    /// is too busy by then.
    pub fn drops_late(&self) -> bool {
        self.drops_late
    }

    /// Submits a request. Dropping the returned receiver cancels it. The channel of updates has room for all
    /// tokens and [`UPDATES_BESIDE_TOKENS`], so that the engine never waits for a client.
    ///
    /// # Errors
    /// A [`Rejection`], before any work was done.
    pub async fn submit(&self, request: GenerateRequest) -> Result<UpdateReceiver, Rejection> {
        self.submit_within(request, AnswerBacklog::unlimited()).await
    }

    /// Submits a request whose client may let updates wait, which count in `backlog`.
    ///
    /// # Errors
    /// A [`Rejection`], before any work was done.
    pub async fn submit_within(
        &self,
        request: GenerateRequest,
        backlog: Arc<AnswerBacklog>,
    ) -> Result<UpdateReceiver, Rejection> {
        let (updates, receiver) =
            update_channel(request.max_tokens as usize + UPDATES_BESIDE_TOKENS, backlog);
        let (admitted, verdict) = tokio::sync::oneshot::channel();
        let gone = || Rejection::Unavailable("the engine has stopped".into());
        let submission = Submission { request, updates, admitted };
        self.submissions.try_send(submission).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Rejection::Overloaded { reason: "the submission queue is full".into(), retry_after_s: 1 }
            }
            mpsc::error::TrySendError::Closed(_) => gone(),
        })?;
        verdict.await.map_err(|_| gone())??;
        Ok(receiver)
    }
}
