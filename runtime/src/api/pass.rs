//! Addresses whose bodies and answers pass between client and engine unchanged.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::sync::{Arc, OnceLock};

use super::encode::Stopped;
use super::errors::ApiError;
use super::fields::Fields;
use super::hints::ParsedHints;
use super::routes::{TenantCaller, check_name};
use super::{Api, Serving, body, relay};
use crate::gateway::{RelayError, RelayRequest, pass};
use crate::metrics::{RequestLabels, RequestOutcome};
use mixfleet_hal::outside::{EngineEndpoint, EngineFaultKind, PassedPath};
use mixfleet_hal::units::Seconds;

/// Answers by an engine that takes such requests.
#[expect(clippy::too_many_lines, reason = "the steps of one request, in order")]
pub(super) async fn answer(
    api: &Api,
    TenantCaller { tenant, party }: TenantCaller,
    path: PassedPath,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let arrived_s = api.env.now().0;
    let gateway = match api.serving()? {
        Serving::Engines(gateway) => gateway,
        Serving::Model(_) => {
            let why = match path {
                PassedPath::Embeddings => "this model generates text and has no embeddings; ",
                PassedPath::Responses => "",
            };
            let path = path.path();
            let message = format!("{why}{path} is answered only by external engines (--worker-engine)");
            return Err(ApiError::not_found(message));
        }
    };
    let seat = api.seat(tenant, &party)?;
    relay::check_shown(seat.tenant())?;
    if matches!(path, PassedPath::Responses) && seat.tenant().max_tokens.is_some() {
        let message = "this key's answers have a longest length, which is not kept at /v1/responses: \
                       ask /v1/chat/completions";
        return Err(ApiError::field("max_output_tokens", "length_not_bounded", message));
    }
    let (text, held) = body::read_json(api, party.clone(), headers, body).await?;
    let (read, name) = (text.clone(), gateway.name().to_owned());
    let checked = move |_: Stopped<'_>| check(&read, &name);
    let (checked, (seat, held)) = api.readers.run(held.bytes(), party, (seat, held), checked).await?;
    let hints = checked?;
    let id = format!("{}-{}", path.name(), api.random_id());
    if !seat.tenant().name.is_empty() {
        api.placements.claim(&id, &seat.tenant().name);
    }
    let wanted = RelayRequest {
        id: id.clone(),
        // not a field of the body: it is sent to `path`
        endpoint: EngineEndpoint::Completions,
        prompt_bytes: text.len(),
        body: Arc::new(text.into()),
        stream: false,
        prompt_ids: None,
        chains: Vec::new(),
        choices: 1,
        max_tokens: Some(1),
        granted_tokens: None,
        party: seat.party(),
        hints: hints.hints(Seconds(arrived_s), api.env.unix_time())?,
        digest: OnceLock::new(),
    };
    let passed = pass(&gateway, path, &wanted).await;
    let outcome = match &passed {
        Ok(passed) if passed.answer.status < 400 => RequestOutcome::Success,
        Ok(_) | Err(RelayError::Rejected(_)) => RequestOutcome::Rejected,
        Err(RelayError::Failed(_) | RelayError::Quarantined(_)) => RequestOutcome::Failed,
    };
    let labels = RequestLabels { endpoint: path.name(), outcome };
    api.metrics.requests.get_or_create(&labels).inc();
    let (outcome, took_s) = (outcome.name(), api.env.now().0 - arrived_s);
    tracing::info!(%id, endpoint = path.name(), outcome, took_s, "request passed on");
    let passed = match passed {
        Ok(passed) => passed,
        Err(RelayError::Rejected(rejection)) => return Err(rejection.into()),
        Err(RelayError::Failed(fault)) if fault.kind == EngineFaultKind::NotTaken => {
            return Err(ApiError::not_found(fault.detail));
        }
        Err(RelayError::Failed(fault)) => return Err(relay::failed(&fault)),
        Err(RelayError::Quarantined(why)) => return Err(ApiError::quarantined(why.to_string())),
    };
    let status = StatusCode::from_u16(passed.answer.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let kind = passed.answer.content_type.as_deref().and_then(|kind| HeaderValue::from_str(kind).ok());
    let kind = kind.unwrap_or(HeaderValue::from_static("application/octet-stream"));
    let length = passed.answer.length;
    let pieces = futures_util::stream::unfold(Some((passed, seat, held)), async |state| {
        let mut state = state?;
        let piece = state.0.answer.body.next().await?;
        let is_good = piece.is_ok();
        Some((piece.map(Bytes::from), is_good.then_some(state)))
    });
    let mut response = (status, [(header::CONTENT_TYPE, kind)], Body::from_stream(pieces)).into_response();
    let value = HeaderValue::from_str(&id).expect("ids are hexadecimal");
    response.headers_mut().insert("x-request-id", value);
    if let Some(length) = length {
        response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    }
    Ok(response)
}

/// Checks the fields that placement needs.
fn check(body: &[u8], name: &str) -> Result<ParsedHints, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.string("model")?;
    let missing = || ApiError::field("model", "missing_parameter", "'model' is missing");
    check_name(&model.ok_or_else(missing)?, name)?;
    ParsedHints::parse(&mut fields)
}
