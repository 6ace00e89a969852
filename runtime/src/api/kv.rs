//! `/v1/kv`: KV of prompts as frames, for external engines.
//!
//! A read is answered by frames of consecutive blocks as they are requested, up to the first block that is
//! not in host memory. The body of a write is the length of its head in bytes (8, little endian), the head,
//! which has the fields of a read, and frames of consecutive blocks. One frame of a body is in memory at a
//! time.

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};
use mixfleet_hal::cast::{to_i64, to_usize};
use serde_json::{Value, json};
use std::pin::pin;
use std::sync::Arc;

use super::auth::Tenant;
use super::body::{self, too_many_bytes};
use super::encode::Stopped;
use super::errors::ApiError;
use super::fields::{Fields, each, token_id, wrong_type};
use super::observe::document;
use super::parameters::cache_salt;
use super::routes::{TenantCaller, check_name};
use super::{Api, RETRY_AFTER_S, ServedModel, Serving};
use crate::budget::{HeldBytes, Party};
use crate::kv_exchange::{ExchangePrompt, KvExchange, KvRefusal};

/// Bytes of frames that are made at a time, or one frame.
const READ_BYTES: usize = 4 << 20;
/// Bytes before the head of a write.
const LENGTH_BYTES: usize = 8;
/// Bytes of a refused body that are read and discarded, so that the sender can read the error.
const DISCARD_BYTES_MAX: usize = 64 << 20;
const MEDIA_TYPE: &str = "application/octet-stream";

/// The blocks of a prompt that are read or written, from `first` on.
struct KvRange {
    prompt: ExchangePrompt,
    first: usize,
}

impl KvRange {
    fn parse(
        body: &[u8],
        (model, exchange): (&ServedModel, &KvExchange),
        tenant: &Tenant,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let missing = |name: &'static str| {
            move || ApiError::field(name, "missing_parameter", format!("'{name}' is missing"))
        };
        check_name(&fields.string("model")?.ok_or_else(missing("model"))?, &model.name)?;
        let raw = fields.take("prompt").ok_or_else(missing("prompt"))?;
        let mut tokens = Vec::new();
        let take = |item| {
            if tokens.len() == model.context as usize {
                let message = format!("the model's context holds {} tokens", model.context);
                return Err(ApiError::context_length("prompt", message));
            }
            tokens.push(token_id("prompt", item, model.text.vocabulary_size())?);
            Ok(())
        };
        each(raw, take).ok_or_else(|| wrong_type("prompt", "an array of token ids", raw))??;
        let first = fields.integer("first", 0..=to_i64(model.context))?.unwrap_or(0);
        let salt = tenant.salted(cache_salt(&mut fields)?.as_deref());
        let prompt = exchange.prompt(tokens, salt).ok_or_else(not_yet)?;
        Ok(KvRange { prompt, first: usize::try_from(first).unwrap_or(0) })
    }
}

fn exchange(api: &Api) -> Result<(Arc<ServedModel>, Arc<KvExchange>), ApiError> {
    let off = || ApiError::not_found("KV is not exchanged here: start mixfleet serve with --kv-exchange");
    let Serving::Model(model) = api.serving()? else { return Err(off()) };
    let exchange = model.exchange.clone().ok_or_else(off)?;
    Ok((model, exchange))
}

fn not_yet() -> ApiError {
    ApiError::unavailable("weights_unknown", "the digest of the weights is not known yet", RETRY_AFTER_S)
}

/// The layout that another engine needs to know.
pub(super) async fn describe(State(api): State<Arc<Api>>) -> Result<Response, ApiError> {
    let (model, exchange) = exchange(&api)?;
    let mut told = exchange.described().ok_or_else(not_yet)?;
    told["model"] = Value::from(&*model.name);
    Ok(document(StatusCode::OK, &told))
}

/// Frames of a prompt.
pub(super) async fn read(
    State(api): State<Arc<Api>>,
    Extension(TenantCaller { tenant, party }): Extension<TenantCaller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (model, exchange) = exchange(&api)?;
    if tenant.hide_cached_tokens {
        return Err(ApiError::not_found("this key may not see cached tokens"));
    }
    let seat = api.seat(tenant.clone(), &party)?;
    let (text, held) = body::read_json(&api, party.clone(), &headers, body).await?;
    let with = exchange.clone();
    let parse = move |_: Stopped<'_>| KvRange::parse(&text, (&model, &with), &tenant);
    let (range, held) = api.readers.run(held.bytes(), party.clone(), held, parse).await?;
    let reading = (Arc::new(range?), 0, (exchange, api, party), (seat, held));
    let frames = stream::unfold(Some(reading), async |reading| {
        let (range, blocks, around, guards) = reading?;
        let (exchange, api, party) = &around;
        let (asked, with) = (range.clone(), exchange.clone());
        let make =
            move |_: Stopped<'_>| with.frames(&asked.prompt, asked.first.saturating_add(blocks), READ_BYTES);
        // a thread of its own, since a lower tier may have to be read
        let made = api.readers.run(usize::MAX, party.clone(), (), make).await;
        let (frames, ()) = match made {
            Ok(made) if made.0.is_empty() => return None,
            Ok(made) => made,
            Err(error) => return Some((Err(std::io::Error::other(error.to_json())), None)),
        };
        let blocks = blocks + frames.len() / exchange.frame_bytes().unwrap_or(usize::MAX);
        Some((Ok(Bytes::from(frames)), Some((range, blocks, around, guards))))
    });
    let kind = HeaderValue::from_static(MEDIA_TYPE);
    Ok(([(header::CONTENT_TYPE, kind)], Body::from_stream(frames)).into_response())
}

/// Stores frames of a prompt in host memory.
pub(super) async fn write(
    State(api): State<Arc<Api>>,
    Extension(TenantCaller { tenant, party }): Extension<TenantCaller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (model, exchange) = exchange(&api)?;
    let essence = headers.get(header::CONTENT_TYPE).is_some_and(|value| value == MEDIA_TYPE);
    if !essence || headers.contains_key(header::CONTENT_ENCODING) {
        return Err(ApiError::media_type("send frames as 'Content-Type: application/octet-stream'"));
    }
    let _seat = api.seat(tenant.clone(), &party)?;
    let held = api.bodies.holder(party.clone());
    let mut writing = Writing { api: &api, party, held, stream: body.into_data_stream(), bytes: Vec::new() };
    let taken = writing.take((model, exchange), &tenant).await;
    if taken.is_err() {
        writing.discard().await;
    }
    Ok(document(StatusCode::OK, &json!({ "blocks": taken? })))
}

/// A write whose body is being read.
struct Writing<'a> {
    api: &'a Arc<Api>,
    party: Party,
    held: HeldBytes,
    stream: BodyDataStream,
    /// Bytes that were read and not parsed.
    bytes: Vec<u8>,
}

impl Writing<'_> {
    /// Stores all frames, and returns their number.
    async fn take(
        &mut self,
        (model, exchange): (Arc<ServedModel>, Arc<KvExchange>),
        tenant: &Arc<Tenant>,
    ) -> Result<usize, ApiError> {
        let limit_bytes = self.api.limits.body_bytes_max;
        let length = self.next(LENGTH_BYTES).await?.ok_or_else(|| ApiError::body("the body is empty"))?;
        let length = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
        if length > limit_bytes as u64 {
            return Err(ApiError::body_too_large(limit_bytes));
        }
        let head = self.next(to_usize(length)).await?.unwrap_or_default();
        let (with, tenant) = (exchange.clone(), tenant.clone());
        let parse = move |_: Stopped<'_>| KvRange::parse(&head, (&model, &with), &tenant);
        let (range, ()) = self.api.readers.run(to_usize(length), self.party.clone(), (), parse).await?;
        let range = Arc::new(range?);
        let frame_bytes = exchange.frame_bytes().ok_or_else(not_yet)?;
        let mut at = range.first;
        let taken = loop {
            match self.next(frame_bytes).await {
                Ok(Some(frame)) => match self.take_frame(&exchange, (&range, at), frame).await {
                    Ok(()) => at += 1,
                    Err(error) => break Err(error),
                },
                Ok(None) => break Ok(at - range.first),
                Err(error) => break Err(error),
            }
        };
        // the frames before a refused one are valid
        let settle = move |_: Stopped<'_>| exchange.settle(&range.prompt, at);
        self.api.readers.run(usize::MAX, self.party.clone(), (), settle).await?;
        taken
    }

    async fn take_frame(
        &mut self,
        exchange: &Arc<KvExchange>,
        (range, at): (&Arc<KvRange>, usize),
        frame: Vec<u8>,
    ) -> Result<(), ApiError> {
        let (with, its) = (exchange.clone(), range.clone());
        let take = move |_: Stopped<'_>| with.take(&its.prompt, at, &frame);
        // a thread of its own, since blocks evicted from host memory may have to be written to a disk
        let (taken, ()) = self.api.readers.run(usize::MAX, self.party.clone(), (), take).await?;
        let Err(refusal) = taken else { return Ok(()) };
        let message =
            format!("block {at} of the prompt: {refusal}; {} earlier ones were stored", at - range.first);
        Err(match refusal {
            KvRefusal::Full | KvRefusal::Failed(_) => ApiError::overloaded(message, 1),
            _ => ApiError::field("frames", "kv_refused", message),
        })
    }

    /// The next `count` bytes of the body; none at its end.
    async fn next(&mut self, count: usize) -> Result<Option<Vec<u8>>, ApiError> {
        let missing = count.saturating_sub(self.held.bytes());
        self.held.grow(missing).map_err(too_many_bytes)?;
        let limit = self.api.env.sleep(self.api.limits.body_read_timeout);
        let filled = {
            let filling = pin!(self.fill(count));
            match select(filling, limit).await {
                Either::Left((filled, _)) => filled,
                Either::Right(_) => Err(ApiError::slow_body()),
            }
        };
        filled?;
        if self.bytes.is_empty() && count > 0 {
            return Ok(None);
        }
        if self.bytes.len() < count {
            let message = format!("the body ends {} bytes into a piece of {count}", self.bytes.len());
            return Err(ApiError::body(message));
        }
        let rest = self.bytes.split_off(count);
        Ok(Some(std::mem::replace(&mut self.bytes, rest)))
    }

    async fn fill(&mut self, count: usize) -> Result<(), ApiError> {
        while self.bytes.len() < count
            && let Some(piece) = self.stream.next().await
        {
            let piece = piece.map_err(|error| ApiError::body(format!("the body broke off: {error}")))?;
            self.bytes.extend_from_slice(&piece);
        }
        Ok(())
    }

    /// Reads and discards the rest, within limits.
    async fn discard(&mut self) {
        let stream = &mut self.stream;
        let discard = pin!(async move {
            let mut bytes = 0;
            while let Some(Ok(piece)) = stream.next().await
                && bytes < DISCARD_BYTES_MAX
            {
                bytes += piece.len();
            }
        });
        let _ = select(discard, self.api.env.sleep(self.api.limits.body_read_timeout)).await;
    }
}
