//! The documents and events of `/v1/responses`, with OpenAI's fields.

use axum::body::{Body, Bytes};
use axum::response::Response;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;

use super::answer::{Answer, Delta, TokenLogprobs, Usage};
use super::errors::ApiError;
use super::logprobs::ChatLogprobs;
use super::responses::ResponseFrame;
use super::shapes::{Collected, Head};
use super::sse::of_events;
use super::text::TextModel;
use super::tools::CallPiece;
use crate::request::{FinishReason, Sampling};

/// Status of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl ResponseStatus {
    fn name(self) -> &'static str {
        match self {
            ResponseStatus::InProgress => "in_progress",
            ResponseStatus::Completed => "completed",
            ResponseStatus::Incomplete => "incomplete",
            ResponseStatus::Failed => "failed",
        }
    }

    fn of(finish: Option<FinishReason>) -> Self {
        match finish {
            Some(FinishReason::Length) => ResponseStatus::Incomplete,
            _ => ResponseStatus::Completed,
        }
    }
}

/// Fields that all documents of one response share.
pub(crate) struct ResponseHead {
    pub(crate) head: Head,
    pub(crate) frame: ResponseFrame,
    pub(crate) sampling: Sampling,
    pub(crate) logprobs: Option<u32>,
}

impl ResponseHead {
    /// The document of a response that is not streamed.
    pub(crate) fn whole(&self, answer: &Collected, usage: Usage, model: &dyn TextModel) -> String {
        let mut output = Vec::new();
        if !answer.thought.is_empty() {
            output.push(self.thought(0, &answer.thought, "completed"));
        }
        if answer.calls.is_empty() || !answer.text.is_empty() {
            let status = ResponseStatus::of(answer.finish);
            output.push(self.message(output.len(), &answer.text, &answer.logprobs, status, model));
        }
        for (index, call) in answer.calls.iter().enumerate() {
            output.push(self.call(index, &call.name, &call.arguments, "completed"));
        }
        self.document(ResponseStatus::of(answer.finish), output, Some(usage), None).to_string()
    }

    fn document(
        &self,
        status: ResponseStatus,
        output: Vec<Value>,
        usage: Option<Usage>,
        error: Option<&str>,
    ) -> Value {
        let is_incomplete = status == ResponseStatus::Incomplete;
        let incomplete = is_incomplete.then(|| json!({"reason": "max_output_tokens"}));
        let completed = (status == ResponseStatus::Completed).then_some(self.head.created);
        let mut document = json!({
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": completed,
            "status": status.name(),
            "background": false,
            "error": error.map(|message| json!({"code": "server_error", "message": message})),
            "incomplete_details": incomplete,
            "instructions": null,
            "max_output_tokens": null,
            "max_tool_calls": null,
            "metadata": {},
            "model": self.head.model,
            "output": output,
            "parallel_tool_calls": true,
            "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null},
            "service_tier": self.head.tier.unwrap_or_default(),
            "store": false,
            "temperature": rounded(self.sampling.temperature),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": self.logprobs.unwrap_or(0),
            "top_p": rounded(self.sampling.top_p),
            "truncation": "disabled",
            "usage": usage.map(usage_body),
            "user": null,
        });
        for (name, json) in &self.frame.repeated {
            document[*name] = serde_json::from_str(json.get()).unwrap_or_default();
        }
        document
    }

    fn thought(&self, index: usize, text: &str, status: &str) -> Value {
        json!({
            "type": "reasoning",
            "id": self.item_id("rs", index),
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
            "status": status,
        })
    }

    fn message(
        &self,
        index: usize,
        text: &str,
        logprobs: &[TokenLogprobs],
        status: ResponseStatus,
        model: &dyn TextModel,
    ) -> Value {
        json!({
            "type": "message",
            "id": self.item_id("msg", index),
            "status": status.name(),
            "role": "assistant",
            "content": [self.part(text, logprobs, model)],
        })
    }

    fn part(&self, text: &str, logprobs: &[TokenLogprobs], model: &dyn TextModel) -> Value {
        json!({
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.entries(logprobs, model),
        })
    }

    fn entries(&self, logprobs: &[TokenLogprobs], model: &dyn TextModel) -> Value {
        match self.frame.logprobs {
            true => json!(ChatLogprobs::new(logprobs, model).into_content()),
            false => json!([]),
        }
    }

    fn call(&self, index: usize, name: &str, arguments: &str, status: &str) -> Value {
        json!({
            "type": "function_call",
            "id": self.item_id("fc", index),
            "call_id": self.head.call_id(0, index, name),
            "name": name,
            "arguments": arguments,
            "status": status,
        })
    }

    fn item_id(&self, kind: &str, index: usize) -> String {
        format!("{kind}_{}_{index}", self.head.id.trim_start_matches("resp_"))
    }
}

/// A number as the client wrote it.
fn rounded(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn usage_body(usage: Usage) -> Value {
    let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
    json!({
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens.unwrap_or(0)},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens.saturating_add(completion_tokens),
    })
}

/// An incomplete item of the output.
enum OpenItem {
    Thought { text: String },
    Message { text: String, logprobs: Vec<TokenLogprobs> },
    Call { index: usize, name: String, arguments: String },
}

/// A response that is being streamed. Dropping it cancels the answer.
pub(crate) struct ResponseStream {
    answer: Answer,
    head: ResponseHead,
    model: Arc<dyn TextModel>,
    sequence: u64,
    /// Complete items.
    output: Vec<Value>,
    open: Option<OpenItem>,
    /// Events to send next.
    events: String,
    begun: bool,
    ended: bool,
}

impl ResponseStream {
    pub(crate) fn new(answer: Answer, head: ResponseHead, model: Arc<dyn TextModel>) -> Self {
        let (output, events) = (Vec::new(), String::new());
        ResponseStream {
            answer,
            head,
            model,
            sequence: 0,
            output,
            open: None,
            events,
            begun: false,
            ended: false,
        }
    }

    /// The HTTP response whose body is the stream.
    pub(crate) fn response(self) -> Response {
        let events = futures_util::stream::unfold(self, async |mut stream| {
            let events = stream.next().await?;
            Some((Ok::<_, Infallible>(Bytes::from(events)), stream))
        });
        of_events(Body::from_stream(events))
    }

    /// The next events, or `None` after the last.
    async fn next(&mut self) -> Option<String> {
        while self.events.is_empty() {
            if self.ended {
                return None;
            }
            if !std::mem::replace(&mut self.begun, true) {
                for kind in ["response.created", "response.in_progress"] {
                    let response = self.document(ResponseStatus::InProgress, None);
                    self.add(kind, json!({ "response": response }));
                }
                break;
            }
            match self.answer.next().await {
                Some(Ok((_, delta))) => self.add_delta(delta),
                Some(Err(failure)) => {
                    let message = ApiError::failure(failure).message().to_owned();
                    let response = self.document(ResponseStatus::Failed, Some(&message));
                    self.end("response.failed", response);
                }
                None => self.ended = true,
            }
        }
        Some(std::mem::take(&mut self.events))
    }

    fn document(&self, status: ResponseStatus, error: Option<&str>) -> Value {
        let is_over = matches!(status, ResponseStatus::Completed | ResponseStatus::Incomplete);
        let usage = is_over.then(|| self.answer.usage());
        self.head.document(status, self.output.clone(), usage, error)
    }

    fn end(&mut self, kind: &str, response: Value) {
        self.add(kind, json!({ "response": response }));
        self.ended = true;
    }

    fn add(&mut self, kind: &str, mut data: Value) {
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        self.events.push_str(&format!("event: {kind}\ndata: {data}\n\n"));
    }

    fn add_delta(&mut self, delta: Delta) {
        let Delta { text, thought, calls, logprobs, finish, .. } = delta;
        if !thought.is_empty() {
            self.add_thought(&thought);
        }
        if !text.is_empty() || !logprobs.is_empty() && matches!(self.open, Some(OpenItem::Message { .. })) {
            self.add_text(&text, logprobs);
        }
        for piece in calls {
            self.add_call(piece);
        }
        let Some(finish) = finish else { return };
        if self.output.is_empty() && self.open.is_none() {
            self.open_message();
        }
        let status = ResponseStatus::of(Some(finish));
        self.close(status);
        let kind = match status {
            ResponseStatus::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        let response = self.document(status, None);
        self.end(kind, response);
    }

    fn open_message(&mut self) {
        let index = self.output.len();
        let mut item = self.head.message(index, "", &[], ResponseStatus::InProgress, &*self.model);
        item["content"] = json!([]);
        let id = item["id"].clone();
        self.add("response.output_item.added", json!({"output_index": index, "item": item}));
        let part = self.head.part("", &[], &*self.model);
        let place = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
        self.add("response.content_part.added", place);
        self.open = Some(OpenItem::Message { text: String::new(), logprobs: Vec::new() });
    }

    fn add_thought(&mut self, more: &str) {
        if !matches!(self.open, Some(OpenItem::Thought { .. })) {
            self.close(ResponseStatus::Completed);
            let index = self.output.len();
            let mut item = self.head.thought(index, "", "in_progress");
            item["content"] = json!([]);
            self.add("response.output_item.added", json!({"output_index": index, "item": item}));
            self.open = Some(OpenItem::Thought { text: String::new() });
        }
        let index = self.output.len();
        let data = json!({
            "item_id": self.head.item_id("rs", index),
            "output_index": index,
            "content_index": 0,
            "delta": more,
        });
        self.add("response.reasoning_text.delta", data);
        if let Some(OpenItem::Thought { text }) = &mut self.open {
            text.push_str(more);
        }
    }

    fn add_text(&mut self, more: &str, entries: Vec<TokenLogprobs>) {
        if !matches!(self.open, Some(OpenItem::Message { .. })) {
            self.close(ResponseStatus::Completed);
            self.open_message();
        }
        let shown = self.head.entries(&entries, &*self.model);
        let data = json!({
            "item_id": self.head.item_id("msg", self.output.len()),
            "output_index": self.output.len(),
            "content_index": 0,
            "delta": more,
            "logprobs": shown,
        });
        self.add("response.output_text.delta", data);
        if let Some(OpenItem::Message { text, logprobs }) = &mut self.open {
            text.push_str(more);
            logprobs.extend(entries);
        }
    }

    fn add_call(&mut self, piece: CallPiece) {
        let CallPiece { index, name, arguments: more } = piece;
        if let Some(name) = name {
            self.close(ResponseStatus::Completed);
            let item = self.head.call(index, &name, "", "in_progress");
            let data = json!({"output_index": self.output.len(), "item": item});
            self.add("response.output_item.added", data);
            self.open = Some(OpenItem::Call { index, name, arguments: String::new() });
        }
        if more.is_empty() {
            return;
        }
        let data = json!({
            "item_id": self.head.item_id("fc", index),
            "output_index": self.output.len(),
            "delta": more,
        });
        self.add("response.function_call_arguments.delta", data);
        if let Some(OpenItem::Call { arguments, .. }) = &mut self.open {
            arguments.push_str(&more);
        }
    }

    /// Completes the open item, if there is one.
    fn close(&mut self, status: ResponseStatus) {
        let index = self.output.len();
        let item = match self.open.take() {
            None => return,
            Some(OpenItem::Thought { text }) => {
                let item = self.head.thought(index, &text, status.name());
                let done = json!({
                    "item_id": item["id"],
                    "output_index": index,
                    "content_index": 0,
                    "text": text,
                });
                self.add("response.reasoning_text.done", done);
                item
            }
            Some(OpenItem::Message { text, logprobs }) => {
                let item = self.head.message(index, &text, &logprobs, status, &*self.model);
                let entries = self.head.entries(&logprobs, &*self.model);
                let place = |more: Value| {
                    let mut place = json!({"item_id": item["id"], "output_index": index, "content_index": 0});
                    place.as_object_mut().into_iter().for_each(|place| {
                        place.extend(more.as_object().cloned().unwrap_or_default());
                    });
                    place
                };
                let (done, part) = (
                    place(json!({"text": text, "logprobs": entries})),
                    place(json!({"part": item["content"][0]})),
                );
                self.add("response.output_text.done", done);
                self.add("response.content_part.done", part);
                item
            }
            Some(OpenItem::Call { index: call, name, arguments }) => {
                let item = self.head.call(call, &name, &arguments, status.name());
                let done = json!({
                    "item_id": item["id"],
                    "output_index": index,
                    "name": name,
                    "arguments": arguments,
                });
                self.add("response.function_call_arguments.done", done);
                item
            }
        };
        self.add("response.output_item.done", json!({"output_index": index, "item": item}));
        self.output.push(item);
    }
}
