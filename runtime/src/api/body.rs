//! Reads a request body within its limits.

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use std::pin::pin;

use super::Api;
use super::errors::ApiError;
use crate::budget::{BudgetError, HeldBytes, Party};

/// Bytes that are reserved at once for a body that announces them.
const ANNOUNCED_BYTES_MAX: usize = 1 << 20;
/// Bytes of an oversized body that are read and discarded, as a multiple of the limit: a client that is still
/// sending when the connection closes would lose the error that explains it.
const DISCARD_FACTOR: usize = 4;

/// Reads the JSON body of a request, with its share of the memory for all bodies.
pub(crate) async fn read_json(
    api: &Api,
    party: Party,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Bytes, HeldBytes), ApiError> {
    check_media_type(headers)?;
    let limit_bytes = api.limits.body_bytes_max;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let too_large = announced.is_some_and(|bytes: u64| bytes > limit_bytes as u64);
    if too_large && headers.contains_key(header::EXPECT) {
        return Err(ApiError::body_too_large(limit_bytes));
    }
    let room = announced.and_then(|bytes| bytes.try_into().ok()).unwrap_or(0).min(ANNOUNCED_BYTES_MAX);
    let room = Vec::with_capacity(room.min(limit_bytes));
    let read = pin!(read(body.into_data_stream(), limit_bytes, room, api.bodies.holder(party)));
    match select(read, api.env.sleep(api.limits.body_read_timeout)).await {
        Either::Left((result, _)) => result,
        Either::Right(_) => Err(ApiError::slow_body()),
    }
}

async fn read(
    mut stream: BodyDataStream,
    limit_bytes: usize,
    mut collected: Vec<u8>,
    mut held: HeldBytes,
) -> Result<(Bytes, HeldBytes), ApiError> {
    let mut total_bytes = 0;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|error| ApiError::body(format!("the body broke off: {error}")))?;
        total_bytes += piece.len();
        if total_bytes <= limit_bytes {
            held.grow(piece.len()).map_err(too_many_bytes)?;
            collected.extend_from_slice(&piece);
        } else {
            collected = Vec::new();
        }
        if total_bytes > limit_bytes.saturating_mul(DISCARD_FACTOR) {
            break;
        }
    }
    if total_bytes > limit_bytes {
        return Err(ApiError::body_too_large(limit_bytes));
    }
    Ok((collected.into(), held))
}

pub(super) fn too_many_bytes(spent: BudgetError) -> ApiError {
    let whose = match spent {
        BudgetError::Budget => "the requests in progress",
        BudgetError::Share => "the requests in progress of this key or address",
    };
    ApiError::overloaded(format!("the bodies of {whose} are too large together"), 1)
}

fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return Err(ApiError::media_type("compressed bodies are not supported"));
    }
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = value.to_str().ok().and_then(|text| text.split(';').next()).map(str::trim);
    if essence.is_some_and(|essence| essence.eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    Err(ApiError::media_type("send the body as 'Content-Type: application/json'"))
}
