//! Server-sent events: `data: <json>` and a blank line each, `data: [DONE]` last.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use std::convert::Infallible;
use std::sync::Arc;

use super::answer::{Answer, Delta, Usage};
use super::errors::ApiError;
use super::parameters::StreamOptions;
use super::shapes::Head;
use super::text::TextModel;

/// A response that is being streamed. Dropping it, as hyper does when the client leaves, cancels the answer.
pub(crate) struct Stream {
    answer: Answer,
    head: Head,
    options: StreamOptions,
    model: Arc<dyn TextModel>,
    /// Whether the first chunk of each choice was sent.
    opened: Vec<bool>,
    ended: bool,
}

impl Stream {
    pub(crate) fn new(answer: Answer, head: Head, options: StreamOptions, model: Arc<dyn TextModel>) -> Self {
        let opened = vec![false; answer.len()];
        Stream { answer, head, options, model, opened, ended: false }
    }

    /// The next events, or `None` after the last.
    async fn next(&mut self) -> Option<String> {
        let mut events = String::new();
        while events.is_empty() {
            if self.ended {
                return None;
            }
            match self.answer.next().await {
                Some(Ok((index, delta))) => self.add_delta(index, &delta, &mut events),
                Some(Err(failure)) => {
                    self.ended = true;
                    add(&ApiError::failure(failure).to_json(), &mut events);
                }
                None => {
                    self.ended = true;
                    if self.options.include_usage {
                        add(&self.head.usage(self.answer.usage()), &mut events);
                    }
                    add("[DONE]", &mut events);
                }
            }
        }
        Some(events)
    }

    fn add_delta(&mut self, index: usize, delta: &Delta, events: &mut String) {
        let usage = self.usage();
        let generated = self.answer.generated(index) > 0;
        // The role is sent with the first token, since clients take the first chunk's time as TTFT.
        let opens = generated || delta.finish.is_some();
        let is_first = opens && !std::mem::replace(&mut self.opened[index], true);
        if is_first && let Some(opening) = self.head.opening(index, usage) {
            add(&opening, events);
        }
        if !delta.thought.is_empty() {
            add(&self.head.thought(index, &delta.thought, usage), events);
        }
        if !delta.text.is_empty() || !delta.logprobs.is_empty() || !delta.ids.is_empty() {
            add(&self.head.content(index, delta, usage, self.model.as_ref(), is_first), events);
        }
        for piece in &delta.calls {
            add(&self.head.called(index, piece, usage), events);
        }
        if let Some(reason) = delta.finish {
            add(&self.head.closing(index, reason, usage), events);
        }
    }

    fn usage(&self) -> Option<Option<Usage>> {
        let StreamOptions { include_usage, continuous_usage } = self.options;
        include_usage.then(|| continuous_usage.then(|| self.answer.usage()))
    }
}

fn add(data: &str, events: &mut String) {
    events.push_str("data: ");
    events.push_str(data);
    events.push_str("\n\n");
}

/// The HTTP response whose body is the stream.
pub(crate) fn response(stream: Stream) -> Response {
    let events = futures_util::stream::unfold(stream, async |mut stream| {
        let events = stream.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(events)), stream))
    });
    of_events(Body::from_stream(events))
}

/// The HTTP response whose body is a stream of events.
pub(super) fn of_events(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Without this, nginx buffers the stream before passing it on.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}
