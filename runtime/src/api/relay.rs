//! Requests that external engines answer: reads the fields that placement needs, and relays the rest.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::value::RawValue;
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use super::auth::Tenant;
use super::encode::Stopped;
use super::errors::ApiError;
use super::fields::Fields;
use super::hints::ParsedHints;
use super::json::{self, kind};
use super::routes::{TenantCaller, check_name};
use super::shapes::Endpoint;
use super::sse;
use super::tally::Tally;
use super::{Api, Seat, body};
use crate::budget::HeldBytes;
use crate::gateway::{Gateway, Passage, RelayError, RelayOpening, RelayRequest, relay};
use crate::request::{FinishReason, Hints};
use mixfleet_hal::cast::{to_i64, to_u32};
use mixfleet_hal::outside::{
    CHOICES_FIELDS, EngineChunk, EngineEndpoint, EngineFault, EngineFaultKind, LENGTH_FIELDS,
};
use mixfleet_hal::units::Seconds;

/// The two of [`LENGTH_FIELDS`] that OpenAI defines.
const OPENAI_LENGTHS: [&str; 2] = ["max_completion_tokens", "max_tokens"];

/// The parsed fields of a body.
pub(crate) struct Outline {
    pub(crate) stream: bool,
    pub(crate) choices: u32,
    pub(crate) max_tokens: Option<u32>,
    /// The longest answer that the body requests under any name, with that name.
    longest: Option<NamedLength>,
    pub(crate) prompt_bytes: usize,
    pub(crate) prompt_ids: Option<u32>,
    pub(crate) hints: ParsedHints,
}

/// Refuses tenants that may not see cached tokens, since engines report them in answers.
pub(super) fn check_shown(tenant: &Tenant) -> Result<(), ApiError> {
    if !tenant.hide_cached_tokens {
        return Ok(());
    }
    let message = "this key may not see cached tokens, and the engines report them in their answers";
    Err(ApiError::unavailable("cached_tokens_not_hidden", message, 3600))
}

/// Answers a request by an engine.
#[expect(clippy::too_many_lines, reason = "the steps of one request, in order")]
pub(super) async fn answer(
    api: &Api,
    gateway: Arc<Gateway>,
    TenantCaller { tenant, party }: TenantCaller,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let arrived_s = api.env.now().0;
    let seat = api.seat(tenant, &party)?;
    check_shown(seat.tenant())?;
    let (text, held) = body::read_json(api, party.clone(), headers, body).await?;
    let (read, name) = (text.clone(), gateway.name().to_owned());
    let outlined = move |_: Stopped<'_>| outline(&read, endpoint, Some(&name));
    let (outline, (seat, held)) = api.readers.run(held.bytes(), party, (seat, held), outlined).await?;
    let (outline, tenant) = (outline?, seat.tenant());
    check_limits(api, &outline, tenant)?;
    let trace = api.trace(headers);
    let hints = outline.hints.hints(Seconds(arrived_s), api.env.unix_time())?;
    let id = format!("{}{}", endpoint.id_prefix(), api.random_id());
    if !tenant.name.is_empty() {
        api.placements.claim(&id, &tenant.name);
    }
    let wanted = RelayRequest {
        id: id.clone(),
        endpoint: match endpoint {
            Endpoint::Chat | Endpoint::Responses => EngineEndpoint::Chat,
            Endpoint::Completions => EngineEndpoint::Completions,
        },
        body: Arc::new(text.into()),
        stream: outline.stream,
        prompt_bytes: outline.prompt_bytes,
        prompt_ids: outline.prompt_ids,
        chains: Vec::new(),
        choices: outline.choices,
        max_tokens: outline.max_tokens,
        granted_tokens: tenant.max_tokens,
        party: seat.party(),
        hints: Hints { trace: trace.map(|trace| trace.own), ..hints },
        digest: OnceLock::new(),
    };
    gateway.note_digest(&wanted);
    let mut tally =
        Tally::new(api.counted(), (endpoint, wanted.hints.tier, tenant), id.clone(), arrived_s, trace);
    tally.accepted(std::iter::empty(), 1);
    tally.prompt_begins(gateway.assumed_prompt_tokens(&wanted));
    let mut response = match relay(&gateway, wanted).await {
        Ok(RelayOpening::Whole(answer)) => {
            tally.told(answer.usage.unwrap_or_default());
            tally.finished(FinishReason::Length, answer.at_limit);
            tally.finished(FinishReason::Stop, answer.choices.saturating_sub(answer.at_limit));
            tally.succeeded();
            json_response(StatusCode::OK, answer.body)
        }
        Ok(RelayOpening::Refused(status, document)) => {
            tally.rejected();
            json_response(StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST), document)
        }
        Ok(RelayOpening::Stream(passage, first)) => {
            let relayed =
                RelayedStream { passage, first: Some(first), tally, ended: false, _held: (seat, held) };
            relayed.response()
        }
        Err(RelayError::Rejected(rejection)) => {
            tally.rejected();
            return Err(rejection.into());
        }
        Err(RelayError::Failed(fault)) => {
            tally.failed_because(&fault.detail);
            return Err(failed(&fault));
        }
        Err(RelayError::Quarantined(why)) => {
            tally.failed_because(&why.to_string());
            return Err(ApiError::quarantined(why.to_string()));
        }
    };
    let value = HeaderValue::from_str(&id).expect("ids are hexadecimal");
    response.headers_mut().insert("x-request-id", value);
    Ok(response)
}

pub(super) fn failed(fault: &EngineFault) -> ApiError {
    match fault.kind {
        EngineFaultKind::Busy => {
            let after = fault.retry_after.map_or(1, |after| after.as_secs());
            ApiError::overloaded(format!("the engine is busy: {fault}"), after)
        }
        _ => ApiError::engine(format!("no engine gave an answer; the last one: {fault}")),
    }
}

fn json_response(status: StatusCode, document: Vec<u8>) -> Response {
    (status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], document).into_response()
}

/// Reads the fields that placement needs. `model` defaults to this name, if there is only one.
pub(crate) fn outline(body: &[u8], endpoint: Endpoint, name: Option<&str>) -> Result<Outline, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.string("model")?;
    let missing = || ApiError::field("model", "missing_parameter", "'model' is missing");
    let model = model.ok_or_else(missing)?;
    name.map_or(Ok(()), |name| check_name(&model, name))?;
    let field = match endpoint {
        Endpoint::Chat | Endpoint::Responses => "messages",
        Endpoint::Completions => "prompt",
    };
    let missing = || ApiError::field(field, "missing_parameter", format!("'{field}' is missing"));
    let prompt = fields.take(field).ok_or_else(missing)?;
    let Lengths { first: max_tokens, longest } = Lengths::parse(&mut fields)?;
    Ok(Outline {
        stream: fields.boolean("stream")?.unwrap_or(false),
        choices: choices(&mut fields)?,
        max_tokens,
        longest,
        prompt_bytes: prompt.get().len(),
        prompt_ids: match endpoint {
            Endpoint::Chat | Endpoint::Responses => None,
            Endpoint::Completions => ids(prompt)?,
        },
        hints: ParsedHints::parse(&mut fields)?,
    })
}

/// The lengths that a body requests under any name.
struct Lengths {
    /// The length that placement assumes.
    first: Option<u32>,
    longest: Option<NamedLength>,
}

/// A length and the field that requests it.
#[derive(Clone, Copy)]
struct NamedLength {
    field: &'static str,
    tokens: i64,
}

impl Lengths {
    fn parse(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let (mut first, mut longest) = (None, None::<NamedLength>);
        for field in LENGTH_FIELDS {
            // llama.cpp's has values for no bound: -1 and -2
            let least = if OPENAI_LENGTHS.contains(&field) { 1 } else { -2 };
            let Some(wanted) = fields.integer(field, least..=to_i64(u32::MAX))? else { continue };
            let tokens = if wanted < 0 { to_i64(u32::MAX) } else { wanted };
            first = first.or(Some(to_u32(tokens)));
            if longest.is_none_or(|longest| tokens > longest.tokens) {
                longest = Some(NamedLength { field, tokens });
            }
        }
        Ok(Lengths { first, longest })
    }
}

/// The number of answers that are computed.
fn choices(fields: &mut Fields<'_>) -> Result<u32, ApiError> {
    let mut most = 1;
    for name in CHOICES_FIELDS {
        most = most.max(to_u32(fields.integer(name, 1..=128)?.unwrap_or(1)));
    }
    Ok(most)
}

/// Number of ids of a prompt that is an array of them.
fn ids(prompt: &RawValue) -> Result<Option<u32>, ApiError> {
    if kind(prompt) != "an array" {
        return Ok(None);
    }
    let mut count = Some(0_u32);
    let walked = json::elements(prompt.get(), |element| {
        count = count.filter(|_| kind(element) == "a number").map(|count| count.saturating_add(1));
        if count.is_some() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    walked.map_err(|error| ApiError::body(format!("the prompt is not valid JSON: {error}")))?;
    Ok(count.filter(|count| *count > 0))
}

fn check_limits(api: &Api, outline: &Outline, tenant: &Tenant) -> Result<(), ApiError> {
    if outline.choices as usize > api.limits.choices_max {
        let most = api.limits.choices_max;
        return Err(ApiError::value("n", format!("'n' is {}; at most {most} are taken", outline.choices)));
    }
    let granted = tenant.max_tokens.unwrap_or(u32::MAX);
    match outline.longest.filter(|longest| longest.tokens > to_i64(granted)) {
        Some(NamedLength { field, tokens }) => {
            let message = format!("'{field}' is {tokens}; this key is given {granted} at most");
            Err(ApiError::value(field, message))
        }
        None => Ok(()),
    }
}

/// A stream in flight from an engine to the client. Dropping it cancels the request.
struct RelayedStream {
    passage: Box<Passage>,
    first: Option<EngineChunk>,
    tally: Tally,
    ended: bool,
    /// The request's place and the memory of its body, which may be sent again.
    _held: (Seat, HeldBytes),
}

impl RelayedStream {
    fn response(self) -> Response {
        let events = futures_util::stream::unfold(self, async |mut stream| {
            let event = stream.next().await?;
            Some((Ok::<_, Infallible>(Bytes::from(event)), stream))
        });
        sse::of_events(Body::from_stream(events))
    }

    /// The next event, or `None` after the last.
    async fn next(&mut self) -> Option<Vec<u8>> {
        if self.ended {
            return None;
        }
        let next = match self.first.take() {
            Some(chunk) => Some(Ok(chunk)),
            None => self.passage.next().await,
        };
        match next {
            Some(Ok(chunk)) => {
                if chunk.has_token() {
                    self.tally.token(0);
                }
                if chunk.ends_choice {
                    let reason = if chunk.at_limit { FinishReason::Length } else { FinishReason::Stop };
                    self.tally.finished(reason, 1);
                }
                Some(event(&chunk.data.unwrap_or_default()))
            }
            Some(Err(fault)) => {
                self.ended = true;
                self.tally.failed_because(&fault.detail);
                Some(event(ApiError::engine(fault.detail).to_json().as_bytes()))
            }
            None => {
                self.ended = true;
                self.tally.told(self.passage.usage().unwrap_or_default());
                self.tally.succeeded();
                Some(event(b"[DONE]"))
            }
        }
    }
}

/// An event with this data; each line has a field of its own.
fn event(data: &[u8]) -> Vec<u8> {
    let mut event = Vec::with_capacity(data.len() + 8);
    for line in data.split(|byte| *byte == b'\n') {
        event.extend_from_slice(b"data: ");
        event.extend_from_slice(line);
        event.push(b'\n');
    }
    event.push(b'\n');
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outlined(body: &str) -> Result<Outline, ApiError> {
        outline(body.as_bytes(), Endpoint::Completions, Some("m"))
    }

    #[test]
    fn of_a_body_only_what_placement_needs_is_read() {
        let body = r#"{"model":"m","prompt":[1,2,3],"stream":true,"max_tokens":9,"tools":[],"odd":{"a":1},"logit_bias":7}"#;
        let outline = outlined(body).unwrap();
        assert_eq!((outline.stream, outline.choices, outline.max_tokens), (true, 1, Some(9)));
        assert_eq!((outline.prompt_ids, outline.prompt_bytes), (Some(3), 7));
        assert_eq!(outlined(r#"{"model":"m","prompt":["a","b"]}"#).unwrap().prompt_ids, None);
        assert_eq!(outlined(r#"{"model":"m","prompt":"abc"}"#).unwrap().prompt_bytes, 5);
        for wrong in [
            r#"{"model":"x","prompt":"a"}"#,
            r#"{"prompt":"a"}"#,
            r#"{"model":"m"}"#,
            r#"{"model":"m","prompt":"a","max_tokens":0}"#,
            r#"{"model":"m","prompt":"a","stream":"yes"}"#,
            "[]",
        ] {
            assert!(outlined(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_longest_answer_counts_whatever_it_is_called() {
        for (body, longest) in [
            (r#"{"model":"m","prompt":"a","max_tokens":9,"max_completion_tokens":4}"#, ("max_tokens", 9)),
            (r#"{"model":"m","prompt":"a","max_tokens":4,"n_predict":9}"#, ("n_predict", 9)),
            (r#"{"model":"m","prompt":"a","n_predict":-1}"#, ("n_predict", to_i64(u32::MAX))),
            (r#"{"model":"m","prompt":"a","max\u005ftokens":9.0,"max_new_tokens":null}"#, ("max_tokens", 9)),
        ] {
            let found = outlined(body).unwrap().longest.unwrap();
            assert_eq!((found.field, found.tokens), longest, "{body}");
        }
        assert_eq!(outlined(r#"{"model":"m","prompt":"a","n":2,"best_of":7}"#).unwrap().choices, 7);
        assert!(outlined(r#"{"model":"m","prompt":"a","max_tokens":"9"}"#).is_err());
    }

    #[test]
    fn an_event_has_all_lines_of_its_data() {
        assert_eq!(event(b"{}"), b"data: {}\n\n");
        assert_eq!(event(b"{\n}"), b"data: {\ndata: }\n\n");
    }
}
