//! Has a request answered by an engine.

use crate::body::{self, PreparedBody};
use crate::bound;
use crate::canary;
use crate::chunk::{self, Beginning, ModelNames};
use crate::continued;
use crate::hand_off;
use crate::http::{HttpEngine, causes, read, retry_after};
use crate::kind::EngineKind;
use crate::object::RawObject;
use crate::sse::{SseDecoder, SseEvent};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Response, StatusCode};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{
    BegunAnswer, CanaryTerms, DrawnToken, EngineAnswer, EngineCall, EngineChunk, EngineEndpoint, EngineFault,
    EngineFaultKind, EngineFuture, EngineKvFeed, EngineShare, EngineState, EngineStream, OutsideEngine,
    PassedAnswer, PassedBody, PassedPath,
};
use serde::Deserialize;
use std::collections::VecDeque;

/// Maximum size of a whole answer.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Maximum size of the document of an error.
const ERROR_BYTES_MAX: usize = 1 << 20;

impl OutsideEngine for HttpEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn probe(&self) -> EngineFuture<'_, Result<EngineState, EngineFault>> {
        Box::pin(self.look())
    }

    fn follow_kv(&self) -> EngineFuture<'_, Result<Box<dyn EngineKvFeed>, EngineFault>> {
        Box::pin(self.feed())
    }

    fn prompt_tokens<'a>(
        &'a self,
        call: &'a EngineCall,
    ) -> EngineFuture<'a, Result<Option<Vec<u32>>, EngineFault>> {
        Box::pin(self.read_prompt(call))
    }

    fn ask<'a>(&'a self, call: &'a EngineCall) -> EngineFuture<'a, Result<EngineAnswer, EngineFault>> {
        Box::pin(self.answer(call))
    }

    fn checks_kv(&self) -> bool {
        self.kind == EngineKind::Mixfleet
    }

    fn canary_body(
        &self,
        endpoint: EngineEndpoint,
        body: &[u8],
        terms: &CanaryTerms,
    ) -> Result<Vec<u8>, EngineFault> {
        canary::body(self.kind, endpoint, body, terms)
    }

    fn drawn_tokens(
        &self,
        endpoint: EngineEndpoint,
        document: &[u8],
    ) -> Result<Vec<DrawnToken>, EngineFault> {
        canary::drawn(endpoint, document)
    }

    fn pass<'a>(
        &'a self,
        path: PassedPath,
        body: &'a [u8],
    ) -> EngineFuture<'a, Result<PassedAnswer, EngineFault>> {
        Box::pin(self.pass_on(path, body))
    }
}

#[derive(Deserialize)]
pub(crate) struct Tokens {
    pub(crate) tokens: Vec<u32>,
}

/// An answer in one piece.
struct PassedDocument(Option<Vec<u8>>);

impl PassedBody for PassedDocument {
    fn next(&mut self) -> EngineFuture<'_, Option<Result<Vec<u8>, EngineFault>>> {
        let piece = self.0.take();
        Box::pin(async move { piece.map(Ok) })
    }
}

/// The unread rest of an answer.
struct PassedIncoming(Incoming);

impl PassedBody for PassedIncoming {
    fn next(&mut self) -> EngineFuture<'_, Option<Result<Vec<u8>, EngineFault>>> {
        Box::pin(async move {
            loop {
                match self.0.frame().await? {
                    Ok(frame) => {
                        let Ok(piece) = frame.into_data() else { continue };
                        return Some(Ok(piece.into()));
                    }
                    Err(error) => {
                        let detail = format!("its answer broke off: {}", causes(&error));
                        return Some(Err(EngineFault::new(EngineFaultKind::Cut, detail)));
                    }
                }
            }
        })
    }
}

impl HttpEngine {
    async fn pass_on(&self, path: PassedPath, body: &[u8]) -> Result<PassedAnswer, EngineFault> {
        if self.kind.hands_off()
            && let Some(message) = RawObject::parse(body).ok().and_then(|body| hand_off::refusal(&body))
        {
            let document = refusal(&message);
            return Ok(PassedAnswer {
                status: 400,
                content_type: Some("application/json".into()),
                length: Some(document.len() as u64),
                body: Box::new(PassedDocument(Some(document))),
            });
        }
        let body = match &self.model {
            None => body.to_vec(),
            Some(own) => {
                let mut object = RawObject::parse(body).map_err(|error| {
                    EngineFault::new(EngineFaultKind::Failed, format!("the body cannot be sent: {error}"))
                })?;
                object.set("model", own);
                object.write()
            }
        };
        let response = self.send(Method::POST, path.path(), body, None).await?;
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        Ok(PassedAnswer {
            status: response.status().as_u16(),
            content_type: content_type.map(str::to_owned),
            length: response.body().size_hint().exact(),
            body: Box::new(PassedIncoming(response.into_body())),
        })
    }

    async fn answer(&self, call: &EngineCall) -> Result<EngineAnswer, EngineFault> {
        if let Some(message) = self.client_fault(call) {
            return Ok(EngineAnswer::Refused { status: 400, body: refusal(&message) });
        }
        let (prepared, begun) = self.prepare(call).await?;
        let PreparedBody { body, client_model, engine_model, usage_asked } = prepared;
        let trace = call.trace.as_deref();
        let response = self.send(Method::POST, call.endpoint.path(), body, trace).await?;
        let is_continued = call.begun.is_some();
        if response.status() != StatusCode::OK {
            return refused(response, is_continued).await;
        }
        let mut accepted = if self.kind.names_itself() { self.listed() } else { Vec::new() };
        accepted.push(engine_model);
        let is_stream = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let is_stream = is_stream.is_some_and(|kind| kind.starts_with("text/event-stream"));
        match (call.stream && call.share != EngineShare::Prompt, is_stream) {
            (true, true) => Ok(EngineAnswer::Stream(Box::new(HttpStream {
                body: response.into_body(),
                decoder: SseDecoder::default(),
                events: VecDeque::new(),
                accepted,
                client_model,
                usage_asked,
                begun,
                ended_choice: false,
                over: false,
            }))),
            (false, false) => {
                let text = read(response.into_body(), ANSWER_BYTES_MAX).await?;
                let names = ModelNames { accepted: &accepted, client: &client_model };
                let answer = chunk::whole(text, &names)?;
                if call.share != EngineShare::Prompt {
                    return Ok(EngineAnswer::Whole(answer));
                }
                let hand_off = hand_off::read(&answer.body)?;
                Ok(EngineAnswer::HandedOff { hand_off, usage: answer.usage })
            }
            (asked, _) => {
                let (asked, got) =
                    if asked { ("a stream", "one document") } else { ("one document", "a stream") };
                let detail = format!("the request names model {asked}, the answer {got}");
                Err(EngineFault::new(EngineFaultKind::Malformed, detail))
            }
        }
    }

    /// What a client must not ask for, if its body does.
    fn client_fault(&self, call: &EngineCall) -> Option<String> {
        if !self.kind.hands_off() && call.tokens_max.is_none() {
            return None;
        }
        let mut object = RawObject::parse(&call.body).ok()?;
        let named = self.kind.hands_off().then(|| hand_off::refusal(&object)).flatten();
        named.or_else(|| bound::hold(&mut object, call.tokens_max?).err())
    }

    /// The body for this engine, and the beginning of the answer with its tokens.
    async fn prepare(
        &self,
        call: &EngineCall,
    ) -> Result<(PreparedBody, Option<(BegunAnswer, u32)>), EngineFault> {
        let wrong = |cause: String| {
            EngineFault::new(EngineFaultKind::Failed, format!("the body cannot be sent: {cause}"))
        };
        let mut object = RawObject::parse(&call.body).map_err(|error| wrong(error.to_string()))?;
        if let Some(most) = call.tokens_max {
            bound::hold(&mut object, most).map_err(wrong)?;
        }
        if call.share != EngineShare::Whole {
            let not = |cause: String| EngineFault::new(EngineFaultKind::NotTaken, cause);
            if !self.kind.hands_off() {
                return Err(not(format!("{} hands no KV over", self.kind)));
            }
            hand_off::check(&object).map_err(not)?;
        }
        let own_model = self.model.as_deref();
        let mut begun = call.begun.clone().map(|begun| (begun, 0));
        if let Some((begun, tokens)) = begun.as_mut().filter(|(begun, _)| !begun.text.is_empty()) {
            let not = |cause: String| EngineFault::new(EngineFaultKind::NotContinued, cause);
            continued::check(call.endpoint, &object, &begun.text).map_err(not)?;
            let model: String = object.read("model").unwrap_or_default();
            let ids = self.tokens(own_model.unwrap_or(&model), &begun.text).await?;
            continued::rewrite(self.kind, call.endpoint, &mut object, &begun.text, &ids).map_err(not)?;
            *tokens = to_u32(ids.len());
        }
        let mut stream = call.stream;
        match &call.share {
            EngineShare::Whole => {}
            EngineShare::Prompt => {
                hand_off::of_prompt(self.kind, &mut object);
                stream = false;
            }
            EngineShare::Answer(hand_off) => hand_off::of_answer(&mut object, hand_off).map_err(wrong)?,
        }
        let is_continued = begun.as_ref().is_some_and(|(begun, _)| !begun.text.is_empty());
        let is_as_it_was = !is_continued && call.share == EngineShare::Whole && call.tokens_max.is_none();
        let original = is_as_it_was.then_some(call.body.as_slice());
        let prepared = body::prepare(object, original, stream, own_model).map_err(wrong)?;
        Ok((prepared, begun))
    }

    /// The tokens of a text, by the engine's tokenizer.
    async fn tokens(&self, model: &str, text: &str) -> Result<Vec<u32>, EngineFault> {
        let body = match self.kind {
            EngineKind::LlamaCpp => serde_json::json!({"content": text, "add_special": false}),
            EngineKind::Mixfleet | EngineKind::Vllm => {
                serde_json::json!({"model": model, "prompt": text, "add_special_tokens": false})
            }
        };
        let (status, document) = self.short(Method::POST, "/tokenize", body.to_string().into_bytes()).await?;
        let read = (status == StatusCode::OK).then(|| serde_json::from_slice(&document).ok()).flatten();
        read.map(|Tokens { tokens }| tokens).ok_or_else(|| {
            let detail = format!("/tokenize (status {}) gives no tokens of the text so far", status.as_u16());
            EngineFault::new(EngineFaultKind::Malformed, detail)
        })
    }
}

/// The document of a refusal.
fn refusal(message: &str) -> Vec<u8> {
    let error = serde_json::json!({
        "message": message, "type": "invalid_request_error", "param": null, "code": "refused_by_engine"
    });
    serde_json::json!({ "error": error }).to_string().into_bytes()
}

/// What an answer with another status than 200 says.
async fn refused(response: Response<Incoming>, is_continued: bool) -> Result<EngineAnswer, EngineFault> {
    let (status, after) = (response.status(), retry_after(&response));
    let body = read(response.into_body(), ERROR_BYTES_MAX).await?;
    let words = chunk::error_text(&body);
    let fault = |kind| EngineFault {
        retry_after: after,
        ..EngineFault::new(kind, format!("status {}: {words}", status.as_u16()))
    };
    let status = status.as_u16();
    match status {
        429 | 503 => Err(fault(EngineFaultKind::Busy)),
        // these concern how this engine is set up, and another one may be set up otherwise
        401 | 403 | 404 | 405 | 408 => Err(fault(EngineFaultKind::Failed)),
        400..=499 if is_continued => Err(fault(EngineFaultKind::NotContinued)),
        400..=499 if RawObject::parse(&body).is_ok() => Ok(EngineAnswer::Refused { status, body }),
        400..=499 => Ok(EngineAnswer::Refused { status, body: refusal(&words) }),
        // another mixfleet reports that the request ends engines: no other engine gets it
        500..=599 if chunk::error_code(&body).as_deref() == Some("request_quarantined") => {
            Ok(EngineAnswer::Refused { status, body })
        }
        500..=599 => Err(fault(EngineFaultKind::Failed)),
        _ => Err(fault(EngineFaultKind::Malformed)),
    }
}

/// An answer that comes as server-sent events.
struct HttpStream {
    body: Incoming,
    decoder: SseDecoder,
    events: VecDeque<SseEvent>,
    accepted: Vec<String>,
    client_model: String,
    usage_asked: bool,
    begun: Option<(BegunAnswer, u32)>,
    /// Whether a choice ended.
    ended_choice: bool,
    /// Whether nothing more comes.
    over: bool,
}

impl EngineStream for HttpStream {
    fn next(&mut self) -> EngineFuture<'_, Option<Result<EngineChunk, EngineFault>>> {
        Box::pin(async move {
            if self.over {
                return None;
            }
            let next = self.read_next().await;
            self.over = !matches!(next, Some(Ok(_)));
            next
        })
    }
}

impl HttpStream {
    async fn read_next(&mut self) -> Option<Result<EngineChunk, EngineFault>> {
        loop {
            match self.events.pop_front() {
                Some(SseEvent::Data(data)) if data == b"[DONE]" => return self.done().map(Err),
                Some(SseEvent::Data(data)) => return Some(self.chunk(data)),
                Some(SseEvent::Error(data)) => {
                    return Some(Err(EngineFault::new(EngineFaultKind::Failed, chunk::error_text(&data))));
                }
                None => {}
            }
            let cut = |detail: String| Some(Err(EngineFault::new(EngineFaultKind::Cut, detail)));
            match self.body.frame().await {
                None if self.decoder.is_within() => return cut("its answer ended within an event".into()),
                None => return cut("its answer ended before it was complete".into()),
                Some(Err(error)) => return cut(format!("its answer broke off: {}", causes(&error))),
                Some(Ok(frame)) => {
                    let Some(piece) = frame.data_ref() else { continue };
                    let mut events = Vec::new();
                    if self.decoder.push(piece, &mut events).is_err() {
                        let detail = "an event of its answer is too long";
                        return Some(Err(EngineFault::new(EngineFaultKind::Malformed, detail)));
                    }
                    self.events.extend(events);
                }
            }
        }
    }

    fn chunk(&mut self, data: Vec<u8>) -> Result<EngineChunk, EngineFault> {
        let names = ModelNames { accepted: &self.accepted, client: &self.client_model };
        let beginning = self.begun.as_ref().map(|(begun, tokens)| Beginning {
            id: &begun.id,
            created: &begun.created,
            tokens: *tokens,
        });
        let read = chunk::chunk(data, &names, self.usage_asked, beginning.as_ref())?;
        self.ended_choice |= read.ends_choice;
        Ok(read)
    }

    /// Nothing comes any more: a fault if no choice has ended.
    fn done(&self) -> Option<EngineFault> {
        if !self.ended_choice {
            let detail = "the answer ended before any of its choices";
            return Some(EngineFault::new(EngineFaultKind::Malformed, detail));
        }
        None
    }
}
