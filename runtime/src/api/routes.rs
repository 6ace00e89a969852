//! Which address does what.

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use std::sync::Arc;

use super::errors::ApiError;
use super::fields::Fields;
use super::observe::{document, exposition, live};
use super::shapes::Endpoint;
use super::{Api, Phase, ServedModel, body, chat, completions, generate};
use crate::metrics::HttpLabels;

const REQUEST_ID: &str = "x-request-id";
const REQUEST_ID_BYTES_MAX: usize = 128;

impl Api {
    /// The service. `/live`, `/health` and `/metrics` are open, everything else needs the API key if one is set.
    pub fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/live", get(live))
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .route("/v1/models", get(models))
            .route("/v1/models/{*name}", get(model))
            .route("/v1/completions", post(complete))
            .route("/v1/chat/completions", post(chat_complete))
            .route("/debug/placement", get(placements))
            .route("/debug/placement/{id}", get(placement))
            .fallback(async || ApiError::not_found("there is nothing at this address"))
            .method_not_allowed_fallback(async || ApiError::method())
            .layer(middleware::from_fn_with_state(self.clone(), around))
            .with_state(self.clone())
    }
}

/// What every request passes: the key, the request id, the count of responses.
async fn around(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let own_id = request.headers().get(REQUEST_ID).filter(|id| is_sane(id)).cloned();
    let open = matches!(request.uri().path(), "/live" | "/health" | "/metrics");
    let admitted = open || api.key.as_ref().is_none_or(|key| key.admits(request.headers()));
    let mut response = match admitted {
        true => next.run(request).await,
        false => ApiError::unauthorized().into_response(),
    };
    let headers = response.headers_mut();
    if let Some(id) = own_id {
        headers.insert(REQUEST_ID, id);
    } else if !headers.contains_key(REQUEST_ID)
        && let Ok(id) = HeaderValue::from_str(&format!("req-{}", api.random_id()))
    {
        headers.insert(REQUEST_ID, id);
    }
    let labels =
        HttpLabels { route: route.unwrap_or_else(|| "other".into()), status: response.status().as_u16() };
    api.metrics.http_responses.get_or_create(&labels).inc();
    response
}

/// Printable ASCII of a bearable length: it goes into the client's logs as it came.
fn is_sane(id: &HeaderValue) -> bool {
    (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

async fn health(State(api): State<Arc<Api>>) -> Response {
    let (status, word) = match api.phase() {
        Phase::Ready(_) if api.metrics.instances.get() == 0 => {
            (StatusCode::SERVICE_UNAVAILABLE, "no instance")
        }
        Phase::Ready(_) => (StatusCode::OK, "ok"),
        Phase::Loading => (StatusCode::SERVICE_UNAVAILABLE, "loading"),
        Phase::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    document(status, &json!({ "status": word }))
}

async fn metrics(State(api): State<Arc<Api>>) -> Response {
    exposition(&api.metrics)
}

async fn models(State(api): State<Arc<Api>>) -> Result<Response, ApiError> {
    let list = json!({ "object": "list", "data": [describe(&*api.model()?)] });
    Ok(document(StatusCode::OK, &list))
}

async fn model(State(api): State<Arc<Api>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    let model = api.model()?;
    check_name(&name, &model)?;
    Ok(document(StatusCode::OK, &describe(&model)))
}

fn describe(model: &ServedModel) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mixfleet",
        "max_model_len": model.context,
    })
}

async fn placements(State(api): State<Arc<Api>>) -> Response {
    document(StatusCode::OK, &json!({ "object": "list", "data": api.placements.recent() }))
}

async fn placement(State(api): State<Arc<Api>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let gone = || ApiError::not_found("no placement of that request is remembered");
    Ok(document(StatusCode::OK, &api.placements.explain(&id).ok_or_else(gone)?))
}

async fn complete(State(api): State<Arc<Api>>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    answer(&api, Endpoint::Completions, &headers, body).await
}

async fn chat_complete(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    answer(&api, Endpoint::Chat, &headers, body).await
}

async fn answer(
    api: &Api,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let arrived_s = api.env.now().0;
    let model = api.model()?;
    let permit = api.requests.clone().try_acquire_owned().map_err(|_| {
        let message = format!("{} requests are being answered already", api.limits.requests_max);
        ApiError::overloaded(message, 1)
    })?;
    let body = body::read_json(api, headers, body).await?;
    let mut fields = Fields::parse(&body)?;
    drop(body);
    let name = fields.string("model")?;
    let missing = || ApiError::field("model", "missing_parameter", "'model' is missing");
    check_name(&name.ok_or_else(missing)?, &model)?;
    let plan = match endpoint {
        Endpoint::Completions => completions::plan(fields, &model, &api.env, api.limits.choices_max).await?,
        Endpoint::Chat => chat::plan(fields, &model, &api.env).await?,
    };
    generate::respond(api, model, plan, permit, arrived_s).await
}

fn check_name(wanted: &str, model: &ServedModel) -> Result<(), ApiError> {
    if wanted == model.name {
        return Ok(());
    }
    let wanted: String = wanted.chars().take(128).collect();
    Err(ApiError::unknown_model(&wanted, &model.name))
}
