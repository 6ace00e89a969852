//! External engines (vLLM, llama.cpp) that speak the OpenAI API, as the runtime drives them.
//!
//! An external engine gets the client's own body, and its answer is passed on unchanged. The runtime reads
//! only what it needs: whether the answer is an error, where it ends, and its length.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// What an engine will say, awaited by any executor.
pub type EngineFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Names under which engines take the maximum length of an answer: OpenAI's two, llama.cpp's, and what other
/// servers call it. Which one counts where a body has several depends on the engine and its version.
pub const LENGTH_FIELDS: [&str; 7] = [
    "max_completion_tokens",
    "max_tokens",
    "n_predict",
    "max_output_tokens",
    "max_new_tokens",
    "max_length",
    "num_predict",
];

/// Names under which engines take the number of answers that a request is computed for.
pub const CHOICES_FIELDS: [&str; 3] = ["n", "best_of", "n_cmpl"];

/// The two addresses of OpenAI's interface that generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineEndpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl EngineEndpoint {
    /// The path of the address.
    pub fn path(self) -> &'static str {
        match self {
            EngineEndpoint::Chat => "/v1/chat/completions",
            EngineEndpoint::Completions => "/v1/completions",
        }
    }
}

/// Addresses whose requests and answers are passed on unread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PassedPath {
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/responses`.
    Responses,
}

impl PassedPath {
    /// The path of the address.
    pub fn path(self) -> &'static str {
        match self {
            PassedPath::Embeddings => "/v1/embeddings",
            PassedPath::Responses => "/v1/responses",
        }
    }

    /// Its name in metrics and ids.
    pub fn name(self) -> &'static str {
        match self {
            PassedPath::Embeddings => "embeddings",
            PassedPath::Responses => "responses",
        }
    }
}

/// An external engine's response to a request that is passed on unread, with any status.
pub struct PassedAnswer {
    /// The status.
    pub status: u16,
    /// What kind of document it is, in the engine's words.
    pub content_type: Option<String>,
    /// Bytes of the whole answer, if its head says so.
    pub length: Option<u64>,
    /// Its bytes. Dropping it ends it at the engine.
    pub body: Box<dyn PassedBody>,
}

/// The bytes of an answer, in the pieces in which they come.
pub trait PassedBody: Send {
    /// The next piece, or `None` behind the last.
    ///
    /// # Errors
    /// Why there is no further piece, and the answer is not complete.
    fn next(&mut self) -> EngineFuture<'_, Option<Result<Vec<u8>, EngineFault>>>;
}

/// A request to an engine.
#[derive(Clone, Debug)]
pub struct EngineCall {
    /// Where it goes.
    pub endpoint: EngineEndpoint,
    /// The client's body, a JSON object.
    pub body: Arc<Vec<u8>>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// The part of the answer that the client has already, if another engine began it.
    pub begun: Option<BegunAnswer>,
    /// Maximum number of tokens to generate, regardless of the body ([`LENGTH_FIELDS`]).
    pub tokens_max: Option<u32>,
    /// The span that the answer is part of, as W3C's `traceparent` has it.
    pub trace: Option<String>,
    /// The phases of the request that this engine runs.
    pub share: EngineShare,
}

/// What of a request an engine does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EngineShare {
    /// All phases.
    #[default]
    Whole,
    /// It computes the prompt, keeps its KV for another engine, and answers with a [`EngineHandOff`].
    Prompt,
    /// It answers, with the KV of the prompt from where this says.
    Answer(EngineHandOff),
}

/// Where an engine keeps a prompt's KV for another one: JSON that only engines read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineHandOff(pub Arc<str>);

/// The beginning of a streamed answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BegunAnswer {
    /// Its text.
    pub text: String,
    /// The `id` of its chunks, as JSON.
    pub id: String,
    /// The `created` of its chunks, as JSON.
    pub created: String,
}

/// What an engine answers to a call.
pub enum EngineAnswer {
    /// A complete answer, in one document.
    Whole(WholeAnswer),
    /// An answer that is being streamed. Dropping it ends it at the engine.
    Stream(Box<dyn EngineStream>),
    /// The prompt is computed ([`EngineShare::Prompt`]).
    HandedOff {
        /// What the engine that answers needs.
        hand_off: EngineHandOff,
        /// Lengths, if the engine reported them.
        usage: Option<EngineUsage>,
    },
    /// The engine says that the request is at fault: a status from 400 to 499, and its document.
    Refused {
        /// The status.
        status: u16,
        /// The document, JSON.
        body: Vec<u8>,
    },
}

/// An answer in one document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeAnswer {
    /// The document, as the client gets it.
    pub body: Vec<u8>,
    /// Lengths, if the engine reported them.
    pub usage: Option<EngineUsage>,
    /// Number of its choices.
    pub choices: u32,
    /// Choices that ended because they reached their token limit.
    pub at_limit: u32,
}

/// An answer that comes in chunks.
pub trait EngineStream: Send {
    /// The next chunk, or `None` behind the last one of a complete answer.
    ///
    /// # Errors
    /// Why there is no further chunk, and the answer is not complete.
    fn next(&mut self) -> EngineFuture<'_, Option<Result<EngineChunk, EngineFault>>>;
}

/// One chunk of a streamed answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineChunk {
    /// The chunk as the client gets it, JSON; none if the client did not ask for what it says.
    pub data: Option<Vec<u8>>,
    /// What it adds to the text of the first choice.
    pub text: String,
    /// Whether it adds to the answer in another way too, which the text does not say.
    pub adds_other: bool,
    /// Whether it ends a choice.
    pub ends_choice: bool,
    /// Whether that choice reached its bound of tokens.
    pub at_limit: bool,
    /// Lengths, if it tells them.
    pub usage: Option<EngineUsage>,
    /// The `id` of the answer, as JSON; empty if the chunk has none.
    pub id: String,
    /// The `created` of the answer, as JSON; empty if the chunk has none.
    pub created: String,
}

impl EngineChunk {
    /// Whether a token came with this event.
    pub fn has_token(&self) -> bool {
        self.adds_other || !self.text.is_empty()
    }
}

/// Lengths of a request and its answer, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer, all choices together.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was reused, if the engine reports them.
    pub cached_tokens: Option<u32>,
}

/// How a request is repeated as a canary: a short copy, sampled greedily, that shares no cached KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CanaryTerms {
    /// Salt of its prefix cache.
    pub salt: String,
    /// Tokens of its answer.
    pub tokens: u32,
    /// Most likely tokens listed for each position.
    pub ranked: u32,
    /// Whether the engine should serve other requests first.
    pub is_low_priority: bool,
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawnToken {
    /// Its text, or its id where the engine tells ids.
    pub token: String,
    /// The most likely tokens at its place.
    pub ranked: Vec<RankedToken>,
}

/// A token that might have been drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct RankedToken {
    /// Its text, or its id where the engine tells ids.
    pub token: String,
    /// The logarithm of its probability.
    pub logprob: f64,
}

/// Why an engine gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineFaultKind {
    /// It cannot be reached.
    Unreachable,
    /// There is none.
    Vacant,
    /// It has too much to do, or is not ready.
    Busy,
    /// It says that it failed.
    Failed,
    /// The response is not an answer to the request.
    Malformed,
    /// Its connection broke, or the answer ended before it was complete.
    Cut,
    /// An answer that another engine began cannot be continued by any.
    NotContinued,
    /// It does not take requests of this kind.
    NotTaken,
    /// It computed a prompt, and does not hand its KV over.
    NotHandedOff,
}

impl EngineFaultKind {
    /// The kind's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            EngineFaultKind::Unreachable => "unreachable",
            EngineFaultKind::Vacant => "vacant",
            EngineFaultKind::Busy => "busy",
            EngineFaultKind::Failed => "failed",
            EngineFaultKind::Malformed => "malformed",
            EngineFaultKind::Cut => "cut",
            EngineFaultKind::NotContinued => "not_continued",
            EngineFaultKind::NotTaken => "not_taken",
            EngineFaultKind::NotHandedOff => "not_handed_off",
        }
    }
}

/// Why an engine gives no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct EngineFault {
    /// The cause.
    pub kind: EngineFaultKind,
    /// The cause, for clients and operators; no address and no key.
    pub detail: String,
    /// When it may be asked again, if the engine says so.
    pub retry_after: Option<Duration>,
}

impl EngineFault {
    /// A fault of this kind.
    pub fn new(kind: EngineFaultKind, detail: impl Into<String>) -> Self {
        EngineFault { kind, detail: detail.into(), retry_after: None }
    }
}

/// What an engine tells of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineState {
    /// Its version, in its own words.
    pub version: Option<String>,
    /// The models that it serves, by the names used in requests.
    pub models: Vec<EngineModel>,
    /// Tokens that fit into its KV memory.
    pub kv_tokens: Option<u64>,
    /// Tokens of a KV block.
    pub block_tokens: Option<u32>,
    /// The dtype of its KV, in its own words.
    pub kv_dtype: Option<String>,
    /// Sequences that it runs at a time.
    pub sequences_max: Option<u32>,
    /// Requests that it runs now.
    pub running: Option<u32>,
    /// Requests that wait there now.
    pub waiting: Option<u32>,
    /// Share of its KV memory that is in use, from 0 to 1.
    pub kv_usage: Option<f64>,
    /// Whether it shows that it can hand KV over to another engine, and take it over.
    pub hands_off: bool,
    /// Whether it will end, and takes no further requests.
    pub leaving: bool,
    /// Facts that the engine does not report, and the consequence of each, one sentence each.
    pub missing: Vec<String>,
}

/// A model that an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineModel {
    /// Its name there.
    pub name: String,
    /// Tokens of prompt and answer together, if the engine reports them.
    pub context: Option<u32>,
}

/// A change of what a part of an engine has in its KV cache, for instance that of one data-parallel rank.
/// Only blocks on the device count whose KV follows from the model and the tokens alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineKvChange {
    /// Blocks are there, one behind the other. A block that was stored several times is there until it was
    /// removed as often.
    Stored {
        /// The part.
        part: u32,
        /// The block before the first one; none at the beginning of a prompt. Where it is not known to be
        /// there, nothing is known of these.
        parent: Option<EngineBlock>,
        /// The blocks.
        blocks: Vec<EngineBlock>,
        /// Their tokens, `block_tokens` for each block.
        tokens: Vec<u32>,
        /// Tokens of a block, at least 1.
        block_tokens: u32,
    },
    /// Blocks are gone.
    Removed {
        /// The part.
        part: u32,
        /// The blocks.
        blocks: Vec<EngineBlock>,
    },
    /// All blocks are gone.
    Cleared {
        /// The part.
        part: u32,
    },
    /// Changes were missed: the cache's content is no longer known.
    Lost {
        /// The part.
        part: u32,
        /// What happened.
        cause: String,
    },
}

/// A name that an engine gives to a KV block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineBlock(pub u64);

/// Follows what an engine has cached. Dropping it ends that.
pub trait EngineKvFeed: Send {
    /// The next changes, in order. Connections that break are opened again, so that this ends only when
    /// there is a change.
    fn next(&mut self) -> EngineFuture<'_, Vec<EngineKvChange>>;
}

/// An external engine.
pub trait OutsideEngine: Send + Sync {
    /// Kind and address for display, without keys; unique in a fleet.
    fn name(&self) -> &str;

    /// Requests its health, then the facts that it reports about itself.
    ///
    /// # Errors
    /// Why it cannot serve now.
    fn probe(&self) -> EngineFuture<'_, Result<EngineState, EngineFault>>;

    /// Begins to follow what its KV cache holds.
    ///
    /// # Errors
    /// Why it does not tell.
    fn follow_kv(&self) -> EngineFuture<'_, Result<Box<dyn EngineKvFeed>, EngineFault>>;

    /// The token ids of a request's prompt, by the engine's own tokenizer and template; none if the prompt
    /// holds other content, such as images, whose blocks must not be reused by token ids.
    ///
    /// # Errors
    /// Why it gives none.
    fn prompt_tokens<'a>(
        &'a self,
        call: &'a EngineCall,
    ) -> EngineFuture<'a, Result<Option<Vec<u32>>, EngineFault>>;

    /// Has a request answered, or its share of one done. Dropping the future, or the stream in its answer,
    /// cancels the request. A request that two engines cannot share is a fault of the kind
    /// [`EngineFaultKind::NotTaken`], which costs nothing.
    ///
    /// # Errors
    /// Why there is no answer; nothing has been passed on then.
    fn ask<'a>(&'a self, call: &'a EngineCall) -> EngineFuture<'a, Result<EngineAnswer, EngineFault>>;

    /// Whether all KV that it sends or takes is checked by digest, so that none is used damaged.
    fn checks_kv(&self) -> bool {
        false
    }

    /// The body of a canary request.
    ///
    /// # Errors
    /// Why it cannot be asked so; by default it cannot.
    fn canary_body(
        &self,
        endpoint: EngineEndpoint,
        body: &[u8],
        terms: &CanaryTerms,
    ) -> Result<Vec<u8>, EngineFault> {
        let _ = (endpoint, body, terms);
        Err(EngineFault::new(EngineFaultKind::NotTaken, "it tells no log-probabilities"))
    }

    /// The tokens of a canary's answer, a whole one.
    ///
    /// # Errors
    /// Why they are not known.
    fn drawn_tokens(
        &self,
        endpoint: EngineEndpoint,
        document: &[u8],
    ) -> Result<Vec<DrawnToken>, EngineFault> {
        let _ = (endpoint, document);
        Err(EngineFault::new(EngineFaultKind::NotTaken, "it tells no log-probabilities"))
    }

    /// Passes a body on, in which at most the model's name is replaced, and the answer back as it is.
    /// Dropping the future, or the answer's body, cancels the request.
    ///
    /// # Errors
    /// Why there is no answer. By default no such request is taken.
    fn pass<'a>(
        &'a self,
        path: PassedPath,
        body: &'a [u8],
    ) -> EngineFuture<'a, Result<PassedAnswer, EngineFault>> {
        let _ = body;
        let detail = format!("it does not take {}", path.path());
        Box::pin(async { Err(EngineFault::new(EngineFaultKind::NotTaken, detail)) })
    }
}
