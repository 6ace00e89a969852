//! The JSON documents of responses, whole and in chunks, with OpenAI's fields.

use serde::Serialize;
use serde_json::Value;

use super::answer::{Delta, TokenLogprobs, Usage};
use super::logprobs::{ChatLogprobs, PromptLogprobs, TextLogprobs};
use super::text::TextModel;
use super::tools::{CallPiece, ToolCall};
use crate::model::CallIds;
use crate::request::{FinishReason, ServiceTier};

/// One of the generation endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// The route `/v1/completions`.
    Completions,
    /// The route `/v1/chat/completions`.
    Chat,
    /// The route `/v1/responses`.
    Responses,
}

impl Endpoint {
    /// The endpoint's name in metrics and log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Endpoint::Completions => "completions",
            Endpoint::Chat => "chat_completions",
            Endpoint::Responses => "responses",
        }
    }

    /// The prefix of response ids.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Endpoint::Completions => "cmpl-",
            Endpoint::Chat => "chatcmpl-",
            Endpoint::Responses => "resp_",
        }
    }
}

/// Fields that all documents of one response share.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) endpoint: Endpoint,
    pub(crate) id: String,
    /// Seconds since 1970-01-01.
    pub(crate) created: u64,
    pub(crate) model: String,
    /// The tier that the request is served as; only if the client named one.
    pub(crate) tier: Option<ServiceTier>,
    /// The format of call ids that the model's template accepts.
    pub(crate) call_ids: CallIds,
    /// Number of calls in the conversation before.
    pub(crate) past_calls: usize,
    /// Location of the prompt's KV for another engine; only if the client asked for it.
    pub(crate) handed_over: Option<Value>,
    /// The prompts' tokens; only if the client asked for ids.
    pub(crate) prompts: Option<ReturnedPrompts>,
}

/// Tokens of prompts that responses repeat.
#[derive(Clone, Debug)]
pub(crate) struct ReturnedPrompts {
    pub(crate) ids: Vec<Vec<u32>>,
    pub(crate) choices_per_prompt: usize,
}

/// A complete choice.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) text: String,
    /// Reasoning of the model, where its format separates reasoning from the answer.
    pub(crate) thought: String,
    pub(crate) calls: Vec<ToolCall>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Ids of the answer's tokens, if they are returned.
    pub(crate) ids: Vec<u32>,
    /// Log-probabilities of the prompt, if they are requested.
    pub(crate) prompt: Option<Vec<TokenLogprobs>>,
    pub(crate) finish: Option<FinishReason>,
}

impl Head {
    /// The ids of a choice's prompt, if they are returned.
    fn prompt_ids(&self, choice: usize) -> Option<&[u32]> {
        let ReturnedPrompts { ids, choices_per_prompt } = self.prompts.as_ref()?;
        ids.get(choice / choices_per_prompt.max(&1)).map(Vec::as_slice)
    }

    /// The ids of an answer's tokens, if they are returned.
    fn returned<'a>(&self, ids: &'a [u32]) -> Option<&'a [u32]> {
        self.prompts.is_some().then_some(ids)
    }

    /// The document of a response that is not streamed.
    pub(crate) fn whole(
        &self,
        choices: &[Collected],
        with_logprobs: bool,
        usage: Usage,
        model: &dyn TextModel,
    ) -> String {
        let usage = Some(Some(usage.into()));
        let prompt = |choice: &Collected| Some(PromptLogprobs::new(choice.prompt.as_ref()?, model));
        match self.endpoint {
            Endpoint::Completions => {
                let choices = choices.iter().enumerate().map(|(index, choice)| TextChoice {
                    index,
                    text: &choice.text,
                    logprobs: with_logprobs.then(|| TextLogprobs::new(&choice.logprobs, model)),
                    finish_reason: choice.finish,
                    prompt_logprobs: prompt(choice),
                    token_ids: self.returned(&choice.ids),
                    prompt_token_ids: self.prompt_ids(index),
                });
                self.document("text_completion", choices.collect(), usage, OfPrompt::default())
            }
            Endpoint::Chat | Endpoint::Responses => {
                let prompt = choices.first().and_then(prompt);
                let choices = choices.iter().enumerate().map(|(index, choice)| ChatChoice {
                    index,
                    message: ChatMessage {
                        role: "assistant",
                        content: (choice.calls.is_empty() || !choice.text.is_empty())
                            .then_some(&*choice.text),
                        refusal: None,
                        reasoning_content: Some(&*choice.thought).filter(|thought| !thought.is_empty()),
                        tool_calls: self.calls(index, &choice.calls),
                    },
                    logprobs: with_logprobs.then(|| ChatLogprobs::new(&choice.logprobs, model)),
                    finish_reason: choice.finish,
                    token_ids: self.returned(&choice.ids),
                });
                let ids = self.prompt_ids(0);
                self.document("chat.completion", choices.collect(), usage, OfPrompt { logprobs: prompt, ids })
            }
        }
    }

    /// The chunk that opens a choice of a chat; completions have none.
    pub(crate) fn opening(&self, index: usize, usage: Option<Option<Usage>>) -> Option<String> {
        let delta = ChatDelta { role: Some("assistant"), content: Some(""), ..ChatDelta::default() };
        let choice = ChatChunkChoice { index, delta, ..ChatChunkChoice::default() };
        (self.endpoint != Endpoint::Completions).then(|| {
            let of_prompt = OfPrompt { ids: self.prompt_ids(index), ..OfPrompt::default() };
            let usage = usage.map(|usage| usage.map(UsageBody::from));
            self.document("chat.completion.chunk", vec![choice], usage, of_prompt)
        })
    }

    /// A chunk with text, log-probabilities or ids; `is_first` says that it is the choice's first one.
    pub(crate) fn content(
        &self,
        index: usize,
        delta: &Delta,
        usage: Option<Option<Usage>>,
        model: &dyn TextModel,
        is_first: bool,
    ) -> String {
        let entries = delta.logprobs.as_slice();
        let token_ids = self.returned(&delta.ids);
        match self.endpoint {
            Endpoint::Completions => {
                let logprobs = (!entries.is_empty()).then(|| TextLogprobs::new(entries, model));
                let prompt_token_ids = self.prompt_ids(index).filter(|_| is_first);
                let text = &*delta.text;
                let choice = TextChoice {
                    index,
                    text,
                    logprobs,
                    token_ids,
                    prompt_token_ids,
                    ..TextChoice::default()
                };
                self.chunk(vec![choice], usage)
            }
            Endpoint::Chat | Endpoint::Responses => {
                let logprobs = (!entries.is_empty()).then(|| ChatLogprobs::new(entries, model));
                let delta = ChatDelta { content: Some(&delta.text), ..ChatDelta::default() };
                let choice = ChatChunkChoice { index, delta, logprobs, token_ids, finish_reason: None };
                self.chunk(vec![choice], usage)
            }
        }
    }

    /// A chunk with reasoning.
    pub(crate) fn thought(&self, index: usize, thought: &str, usage: Option<Option<Usage>>) -> String {
        let delta = ChatDelta { reasoning_content: Some(thought), ..ChatDelta::default() };
        self.chunk(vec![ChatChunkChoice { index, delta, ..ChatChunkChoice::default() }], usage)
    }

    /// A chunk with part of a call.
    pub(crate) fn called(&self, index: usize, piece: &CallPiece, usage: Option<Option<Usage>>) -> String {
        let body = CallBody {
            index: piece.index,
            id: piece.name.as_ref().map(|name| self.call_id(index, piece.index, name)),
            kind: piece.name.as_ref().map(|_| "function"),
            function: FunctionBody { name: piece.name.as_deref(), arguments: &piece.arguments },
        };
        let delta = ChatDelta { tool_calls: vec![body], ..ChatDelta::default() };
        self.chunk(vec![ChatChunkChoice { index, delta, ..ChatChunkChoice::default() }], usage)
    }

    /// The calls of a choice.
    fn calls<'a>(&self, choice: usize, calls: &'a [ToolCall]) -> Vec<CallBody<'a>> {
        let bodies = calls.iter().enumerate().map(|(index, call)| CallBody {
            index,
            id: Some(self.call_id(choice, index, &call.name)),
            kind: Some("function"),
            function: FunctionBody { name: Some(&call.name), arguments: &call.arguments },
        });
        bodies.collect()
    }

    /// The id of a call, in the format that the model's template accepts in later turns.
    pub(crate) fn call_id(&self, choice: usize, index: usize, name: &str) -> String {
        let of_response = self.id.trim_start_matches(self.endpoint.id_prefix());
        let whole = format!("call_{of_response}_{choice}_{index}");
        match self.call_ids {
            CallIds::Any => whole,
            CallIds::Kimi => format!("functions.{name}:{}", self.past_calls + index),
            CallIds::Nine => {
                const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
                let mut hash = twox_hash::XxHash3_64::oneshot(whole.as_bytes());
                let mut letter = || {
                    let letter = LETTERS[(hash % 62) as usize];
                    hash /= 62;
                    char::from(letter)
                };
                (0..9).map(|_| letter()).collect()
            }
        }
    }

    /// The chunk that closes a choice.
    pub(crate) fn closing(&self, index: usize, reason: FinishReason, usage: Option<Option<Usage>>) -> String {
        let finish_reason = Some(reason);
        match self.endpoint {
            Endpoint::Completions => {
                self.chunk(vec![TextChoice { index, finish_reason, ..TextChoice::default() }], usage)
            }
            Endpoint::Chat | Endpoint::Responses => {
                let choice = ChatChunkChoice { index, finish_reason, ..ChatChunkChoice::default() };
                self.chunk(vec![choice], usage)
            }
        }
    }

    /// The last chunk, without choices.
    pub(crate) fn usage(&self, usage: Usage) -> String {
        self.chunk(Vec::<ChatChunkChoice<'_>>::new(), Some(Some(usage)))
    }

    fn chunk<C: Serialize>(&self, choices: Vec<C>, usage: Option<Option<Usage>>) -> String {
        let object = match self.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat | Endpoint::Responses => "chat.completion.chunk",
        };
        self.document(object, choices, usage.map(|usage| usage.map(UsageBody::from)), OfPrompt::default())
    }

    fn document<C: Serialize>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Option<UsageBody>>,
        OfPrompt { logprobs: prompt_logprobs, ids: prompt_token_ids }: OfPrompt<'_>,
    ) -> String {
        let Head { id, created, model, tier, handed_over, .. } = self;
        let (created, service_tier, kv_transfer_params) = (*created, *tier, handed_over.as_ref());
        let document = Document {
            id,
            object,
            created,
            model,
            service_tier,
            choices,
            usage,
            prompt_logprobs,
            prompt_token_ids,
            kv_transfer_params,
        };
        serde_json::to_string(&document).expect("strings and finite numbers serialise")
    }
}

/// What the document of a chat has of its prompt.
#[derive(Default)]
struct OfPrompt<'a> {
    logprobs: Option<PromptLogprobs>,
    ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Document<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<ServiceTier>,
    choices: Vec<C>,
    /// With `include_usage`, null in every chunk but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    /// Position in a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a Value>,
}

#[derive(Default, Serialize)]
struct TextChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: usize,
    message: ChatMessage<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody<'a>>,
}

#[derive(Serialize)]
struct CallBody<'a> {
    index: usize,
    /// Set where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionBody<'a>,
}

#[derive(Serialize)]
struct FunctionBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(Default, Serialize)]
struct ChatChunkChoice<'a> {
    index: usize,
    delta: ChatDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody<'a>>,
}

#[derive(Serialize)]
struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        UsageBody {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: cached_tokens.map(|cached_tokens| PromptTokensDetails { cached_tokens }),
        }
    }
}
