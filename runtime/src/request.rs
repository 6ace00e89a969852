//! What the API asks of the engine, and what comes back.

use mixfleet_scheduler::batch::RequestId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Bits of a request's id that are the router's own count.
const COUNT_BITS: u32 = 48;

/// A router among those of a fleet. Ids of requests begin with it, so that every report finds its way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RouterId(pub u16);

impl RouterId {
    /// The id of this router's first request.
    pub(crate) fn first_request(self) -> RequestId {
        u64::from(self.0) << COUNT_BITS
    }

    /// Whose request this is.
    pub(crate) fn of(request: RequestId) -> Self {
        RouterId((request >> COUNT_BITS) as u16)
    }
}

/// One sequence to complete. (A client's `n` choices are n of these; they share the prefix cache.)
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Chosen by the API, unique in this process; keys `/debug/placement/{id}` and the log.
    pub id: String,
    /// The prompt, at least one token.
    pub prompt_ids: Arc<[u32]>,
    /// Tokens to generate at most; prompt and output together fit the model's context.
    pub max_tokens: u32,
    /// Tokens that end the answer; empty with `ignore_eos`.
    pub eos_ids: Arc<[u32]>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// With log-probabilities: of the chosen token and this many best others.
    pub logprobs: Option<u32>,
    /// Separates tenants in the prefix cache.
    pub cache_salt: Option<String>,
    /// How soon the answer is wanted.
    pub tier: ServiceTier,
}

/// How soon an answer is wanted, by OpenAI's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceTier {
    /// As the fleet's objectives say: someone reads along.
    #[default]
    Default,
    /// Complete by a deadline; until then others go first.
    Flex,
}

/// How a token is drawn from the logits. `Default` is OpenAI's default: temperature 1, nothing else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 = greedy.
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
            seed: 0,
        }
    }
}

impl Sampling {
    /// Every parameter is a number, and none is infinite.
    pub(crate) fn is_finite(&self) -> bool {
        let Sampling {
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            ..
        } = *self;
        [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty]
            .iter()
            .all(|parameter| parameter.is_finite())
    }

    /// The token is the one with the largest logit, whatever came before.
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature <= 0.0
            && self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token, or (set by the API) a stop string.
    Stop,
    /// `max_tokens` reached.
    Length,
}

/// Log-probabilities (natural log) at one output position, of the model's raw distribution
/// (before temperature, penalties and truncation).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The best tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// What the engine says about a request, in order: `Placed` (again after a replay, to a client that keeps up), `Started`, tokens,
/// then `Finished` or `Failed`, after which the channel closes.
#[derive(Clone, Debug)]
pub enum Update {
    /// Device ids of the instances that will work on it.
    Placed {
        /// Where the prompt is processed.
        prefill: String,
        /// Where tokens are generated.
        decode: String,
    },
    /// Its prompt is being computed. Once, however often it is placed.
    Started {
        /// Prompt tokens whose KV was reused instead of computed.
        cached_tokens: u32,
    },
    /// A generated token. An end token is reported too, right before `Finished`.
    Token {
        /// Its id.
        id: u32,
        /// With `GenerateRequest::logprobs`.
        logprobs: Option<Logprobs>,
    },
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
    },
    /// It cannot be completed.
    Failed(Failure),
}

/// Why an answer cannot be completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Whose fault it is.
    pub kind: FailureKind,
    /// For the client.
    pub message: String,
}

/// Whose fault it is that an answer is not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The request's own: it must not be sent again as it is.
    Request,
    /// Something that requests share is used up: it may be sent again later.
    Exhausted,
    /// The engine's.
    Engine,
}

impl Failure {
    /// The engine could not do it.
    pub fn engine(message: impl Into<String>) -> Self {
        Failure { kind: FailureKind::Engine, message: message.into() }
    }

    /// What it needs is used up for now.
    pub fn exhausted(message: impl Into<String>) -> Self {
        Failure { kind: FailureKind::Exhausted, message: message.into() }
    }
}

/// Why a request was turned away before any work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// Too much work is queued, or what is predicted breaks the SLO or the deadline: 429.
    #[error("{reason}")]
    Overloaded {
        /// In words, with the numbers.
        reason: String,
        /// When a retry may succeed, in whole seconds, at least 1.
        retry_after_s: u64,
    },
    /// It can never fit: 400.
    #[error("{0}")]
    TooLarge(String),
    /// The engine is draining or not ready: 503.
    #[error("{0}")]
    Unavailable(String),
}

/// Updates of a request beside its tokens that are told once: where it is, that it began, and how it ended.
pub const UPDATES_BESIDE_TOKENS: usize = 3;

/// A submission on its way to the engine.
#[derive(Debug)]
pub struct Submission {
    /// What to do.
    pub request: GenerateRequest,
    /// Where updates go. The engine cancels the request when the receiver is gone.
    pub updates: mpsc::Sender<Update>,
    /// Told once: accepted, or why not.
    pub admitted: tokio::sync::oneshot::Sender<Result<(), Rejection>>,
}

/// The API's way to the engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    submissions: mpsc::Sender<Submission>,
}

impl EngineHandle {
    /// A handle and the end that the engine reads. `bound` submissions may wait to be looked at.
    pub fn channel(bound: usize) -> (Self, mpsc::Receiver<Submission>) {
        let (submissions, receiver) = mpsc::channel(bound);
        (EngineHandle { submissions }, receiver)
    }

    /// Submits a request. Dropping the receiver cancels it. The channel of updates has room for all
    /// tokens and [`UPDATES_BESIDE_TOKENS`], so that the engine never waits for a client.
    ///
    /// # Errors
    /// A [`Rejection`], before any work was done.
    pub async fn submit(&self, request: GenerateRequest) -> Result<mpsc::Receiver<Update>, Rejection> {
        let (updates, receiver) = mpsc::channel(request.max_tokens as usize + UPDATES_BESIDE_TOKENS);
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
