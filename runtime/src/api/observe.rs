//! Monitoring routes of a process: whether it is alive, whether it can serve, and its metrics.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::watch;

use super::server::{ServedRoutes, Shutdown, serve_routes};
use super::{Api, ApiError, Limits, Origins, Placements};
use crate::budget::Connections;
use crate::env::{Listener, SharedEnv};
use crate::metrics::{self, Metrics};

#[derive(Clone)]
struct Watched {
    metrics: Metrics,
    ready: watch::Receiver<bool>,
}

/// Answers `/live`, `/health` (200 once `ready`, while an instance is up) and `/metrics` of a process that
/// serves nothing else over HTTP.
pub async fn observe(
    listener: Box<dyn Listener>,
    env: SharedEnv,
    metrics: Metrics,
    ready: watch::Receiver<bool>,
    origins: Origins,
) {
    serve_until_exit(listener, env, routes(metrics.clone(), ready), origins, &metrics).await;
}

/// Answers the same routes and `/debug/placement` of a process that places requests and carries none.
pub async fn observe_placements(
    listener: Box<dyn Listener>,
    env: SharedEnv,
    metrics: Metrics,
    ready: watch::Receiver<bool>,
    origins: Origins,
    placements: Arc<Placements>,
) {
    let recent = async |State(placements): State<Arc<Placements>>| {
        document(StatusCode::OK, &json!({ "placements": placements.recent(|_| true) }))
    };
    let one = async |State(placements): State<Arc<Placements>>, Path(id): Path<String>| match placements
        .explain(&id, |_| true)
    {
        Some(explanation) => document(StatusCode::OK, &explanation),
        None => ApiError::not_found("there is no record of this placement").into_response(),
    };
    let routes = Router::new()
        .route("/debug/placement", get(recent))
        .route("/debug/placement/{id}", get(one))
        .with_state(placements)
        .merge(routes(metrics.clone(), ready));
    serve_until_exit(listener, env, routes, origins, &metrics).await;
}

fn routes(metrics: Metrics, ready: watch::Receiver<bool>) -> Router {
    Router::new()
        .route("/live", get(live))
        .route("/health", get(health))
        .route("/metrics", get(all))
        .with_state(Watched { metrics, ready })
}

/// Answers the same routes for a process whose API has another address, from that API's state.
pub async fn observe_api(listener: Box<dyn Listener>, env: SharedEnv, api: Arc<Api>, origins: Origins) {
    serve_until_exit(listener, env, api.monitoring_routes(), origins, &api.metrics).await;
}

/// Serves until the process ends, which may be in the middle of an answer.
async fn serve_until_exit(
    listener: Box<dyn Listener>,
    env: SharedEnv,
    routes: Router,
    origins: Origins,
    metrics: &Metrics,
) {
    let limits = Limits { connections: Connections::for_monitoring(), ..Limits::default() };
    let (_never, told) = watch::channel(Shutdown::No);
    let served = ServedRoutes { routes, limits: &limits, origins, env: &env, metrics };
    serve_routes(listener, served, told, || {}).await;
}

/// Whether a path needs no key: those for monitoring, and the page.
pub(super) fn is_open(path: &str) -> bool {
    matches!(path, "/" | "/openapi.json" | "/live" | "/health" | "/metrics")
}

/// Answers whether the process is alive, regardless of its other functions.
pub(super) async fn live() -> Response {
    document(StatusCode::OK, &json!({ "status": "ok" }))
}

async fn health(State(Watched { metrics, ready }): State<Watched>) -> Response {
    let (status, word) = match (*ready.borrow(), metrics.instances.get()) {
        (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "joining"),
        (true, 0) => (StatusCode::SERVICE_UNAVAILABLE, "no instance"),
        (true, _) => (StatusCode::OK, "ok"),
    };
    document(status, &json!({ "status": word }))
}

async fn all(State(Watched { metrics, .. }): State<Watched>) -> Response {
    exposition(&metrics)
}

/// All metrics, for Prometheus.
pub(super) fn exposition(metrics: &Metrics) -> Response {
    let headers = [(header::CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE))];
    (headers, metrics.encode()).into_response()
}

/// A response with a JSON document.
pub(super) fn document(status: StatusCode, value: &Value) -> Response {
    let headers = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (status, headers, value.to_string()).into_response()
}
