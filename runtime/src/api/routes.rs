//! Maps URLs to handlers.

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use super::auth::Tenant;
use super::encode::Stopped;
use super::errors::ApiError;
use super::fields::Fields;
use super::generate::Plan;
use super::observe::{document, exposition, is_open, live};
use super::shapes::Endpoint;
use super::work::NEVER_IN_PLACE;
use super::{
    Api, Phase, Seat, ServedModel, Serving, body, chat, completions, generate, interface, kv, page, pass,
    relay, responses,
};
use crate::budget::Party;
use crate::grammar::{GrammarClient, owner};
use crate::metrics::HttpLabels;
use mixfleet_hal::outside::PassedPath;

const REQUEST_ID: &str = "x-request-id";
const REQUEST_ID_BYTES_MAX: usize = 128;

impl Api {
    /// The service. `/`, `/openapi.json`, `/live`, `/health` and `/metrics` are open; everything else
    /// requires the API key if one is set.
    pub fn router(self: &Arc<Self>) -> Router {
        open()
            .route("/", get(page::page))
            .route("/v1/models", get(models))
            .route("/v1/models/{*name}", get(model))
            .route("/v1/completions", post_prompt(Endpoint::Completions))
            .route("/v1/chat/completions", post_prompt(Endpoint::Chat))
            .route("/v1/embeddings", post_passed(PassedPath::Embeddings))
            .route("/v1/responses", post(respond))
            .route("/v1/kv", get(kv::describe))
            .route("/v1/kv/read", post(kv::read))
            .route("/v1/kv/write", post(kv::write))
            .route("/tokenize", post(tokenize))
            .route("/version", get(version))
            .route("/openapi.json", get(interface::interface))
            .route("/usage", get(accounts))
            .route("/debug/placement", get(placements))
            .route("/debug/placement/{id}", get(placement))
            .route("/debug/kv", get(caches))
            .route("/debug/states", get(states))
            .fallback(async || ApiError::not_found("there is nothing at this address"))
            .method_not_allowed_fallback(async || ApiError::method())
            .layer(middleware::from_fn_with_state(self.clone(), around))
            .with_state(self.clone())
    }

    /// The routes for monitoring.
    pub(super) fn monitoring_routes(self: &Arc<Self>) -> Router {
        let nothing = async || ApiError::not_found("only /live, /health and /metrics are answered here");
        open().fallback(nothing).with_state(self.clone())
    }
}

fn open() -> Router<Arc<Api>> {
    Router::new().route("/live", get(live)).route("/health", get(health)).route("/metrics", get(metrics))
}

/// The holder of the connection that a request came over.
#[derive(Clone, Copy)]
pub(super) struct Holder(pub(super) IpAddr);

/// A request's tenant, and the party it is accounted to.
#[derive(Clone)]
pub(super) struct TenantCaller {
    pub(super) tenant: Arc<Tenant>,
    pub(super) party: Party,
}

/// Wraps every request: checks the key, sets the request id, counts the response.
async fn around(State(api): State<Arc<Api>>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let own_id = request.headers().get(REQUEST_ID).filter(|id| is_sane(id)).cloned();
    let open = is_open(request.uri().path());
    let tenant = api.access.tenant(request.headers());
    let address = request.extensions().get().map_or(Ipv4Addr::UNSPECIFIED.into(), |Holder(address)| *address);
    let mut response = match tenant {
        None if !open => ApiError::unauthorized().into_response(),
        None => next.run(request).await,
        Some(tenant) => {
            request.extensions_mut().insert(TenantCaller { party: tenant.party(address), tenant });
            next.run(request).await
        }
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

/// Whether a client's request id is printable ASCII of limited length: it is copied into logs unchanged.
fn is_sane(id: &HeaderValue) -> bool {
    (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

async fn health(State(api): State<Arc<Api>>) -> Response {
    let (status, word) = match api.phase() {
        Phase::Ready(_) if api.metrics.serves.get() == 0 => {
            let cause = api.metrics.none_serves().unwrap_or("no pair of instances can serve");
            (StatusCode::SERVICE_UNAVAILABLE, cause)
        }
        Phase::Ready(_) => (StatusCode::OK, "ok"),
        Phase::Loading(_) => {
            (StatusCode::SERVICE_UNAVAILABLE, api.metrics.none_serves().unwrap_or("loading"))
        }
        Phase::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    document(status, &json!({ "status": word }))
}

async fn metrics(State(api): State<Arc<Api>>) -> Response {
    api.metrics.settle(api.env.now());
    exposition(&api.metrics)
}

async fn models(State(api): State<Arc<Api>>) -> Result<Response, ApiError> {
    let list = json!({ "object": "list", "data": [describe(&api.serving()?)] });
    Ok(document(StatusCode::OK, &list))
}

async fn model(State(api): State<Arc<Api>>, name: Segment) -> Result<Response, ApiError> {
    let serving = api.serving()?;
    check_name(&one(name)?, serving.described().0)?;
    Ok(document(StatusCode::OK, &describe(&serving)))
}

/// A path segment that holds a name.
type Segment = Result<Path<String>, PathRejection>;

fn one(segment: Segment) -> Result<String, ApiError> {
    let wrong = |rejection: PathRejection| ApiError::address(rejection.body_text());
    segment.map(|Path(name)| name).map_err(wrong)
}

fn describe(serving: &Serving) -> Value {
    let (name, created, context) = serving.described();
    json!({
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mixfleet",
        "max_model_len": context,
    })
}

/// The accounts that a tenant may see: its own, or all.
async fn accounts(State(api): State<Arc<Api>>, Extension(caller): Extension<TenantCaller>) -> Response {
    let shown = api.access.seen_by(&caller.tenant);
    let data: Vec<_> = shown.iter().map(|tenant| tenant.account.document(&tenant.name)).collect();
    document(StatusCode::OK, &json!({ "object": "list", "data": data }))
}

async fn placements(State(api): State<Arc<Api>>, Extension(caller): Extension<TenantCaller>) -> Response {
    let ids = api.placements.recent(|owner| caller.tenant.may_see(owner));
    document(StatusCode::OK, &json!({ "object": "list", "data": ids }))
}

async fn placement(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<TenantCaller>,
    id: Segment,
) -> Result<Response, ApiError> {
    let gone = || ApiError::not_found("there is no record of a placement of this request");
    let explanation = api.placements.explain(&one(id)?, |owner| caller.tenant.may_see(owner));
    Ok(document(StatusCode::OK, &explanation.ok_or_else(gone)?))
}

/// States of instances and engines, with reasons, for keys that see everything.
async fn states(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<TenantCaller>,
) -> Result<Response, ApiError> {
    if !caller.tenant.may_see(None) {
        return Err(ApiError::not_found("this key does not see states"));
    }
    let data = api.metrics.states(api.env.now());
    Ok(document(StatusCode::OK, &json!({ "object": "list", "data": data })))
}

/// State of the engines' caches, for keys that see everything.
async fn caches(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<TenantCaller>,
) -> Result<Response, ApiError> {
    match api.serving()? {
        Serving::Engines(gateway) if caller.tenant.may_see(None) => {
            Ok(document(StatusCode::OK, &json!({ "object": "list", "data": gateway.caches() })))
        }
        _ => Err(ApiError::not_found("this server shows no engine's cache")),
    }
}

/// The handler of an endpoint that a model or an engine answers.
fn post_prompt(endpoint: Endpoint) -> MethodRouter<Arc<Api>> {
    post(
        move |State(api): State<Arc<Api>>,
              Extension(caller): Extension<TenantCaller>,
              headers: HeaderMap,
              body: Body| async move { answer(&api, caller, endpoint, &headers, body).await },
    )
}

/// The handler of an endpoint that only external engines answer.
fn post_passed(path: PassedPath) -> MethodRouter<Arc<Api>> {
    post(
        move |State(api): State<Arc<Api>>,
              Extension(caller): Extension<TenantCaller>,
              headers: HeaderMap,
              body: Body| async move { pass::answer(&api, caller, path, &headers, body).await },
    )
}

/// Answers by the model here, or passes the request on to an engine.
async fn respond(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<TenantCaller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    match api.serving()? {
        Serving::Model(_) => answer(&api, caller, Endpoint::Responses, &headers, body).await,
        Serving::Engines(_) => pass::answer(&api, caller, PassedPath::Responses, &headers, body).await,
    }
}

async fn version() -> Response {
    document(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn answer(
    api: &Api,
    caller: TenantCaller,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let arrived_s = api.env.now().0;
    let model = match api.serving()? {
        Serving::Model(model) => model,
        Serving::Engines(gateway) => {
            return relay::answer(api, gateway, caller, endpoint, headers, body).await;
        }
    };
    let held = api.answers.holder(caller.party.clone());
    let (plan, seat) =
        planned(api, caller, (&model, Some(endpoint), api.limits.choices_max), headers, body).await?;
    generate::respond(api, model, plan, (seat, held), (arrived_s, api.trace(headers))).await
}

/// The ids of one prompt, or of the messages of a chat, whose body is checked as if it generated.
async fn tokenize(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<TenantCaller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let Serving::Model(model) = api.serving()? else {
        return Err(ApiError::not_found("external engines tokenise at their own addresses"));
    };
    let (plan, _seat) = planned(&api, caller, (&model, None, 1), &headers, body).await?;
    let tokens = plan.prompts.into_iter().next().unwrap_or_default();
    let told = json!({ "count": tokens.len(), "max_model_len": model.context, "tokens": tokens });
    Ok(document(StatusCode::OK, &told))
}

/// Reads and tokenises a body of at most `prompts_max` prompts on a parsing thread, for an endpoint or as if
/// for one.
async fn planned(
    api: &Api,
    caller: TenantCaller,
    (model, endpoint, prompts_max): (&Arc<ServedModel>, Option<Endpoint>, usize),
    headers: &HeaderMap,
    body: Body,
) -> Result<(Plan, Seat), ApiError> {
    let TenantCaller { tenant, party } = caller;
    let seat = api.seat(tenant, &party)?;
    let (body, held) = body::read_json(api, party.clone(), headers, body).await?;
    let served = model.clone();
    let read = move |stopped: Stopped<'_>| {
        let endpoint = match endpoint {
            Some(endpoint) => endpoint,
            None if Fields::parse(&body)?.get("messages").is_some() => Endpoint::Chat,
            None => Endpoint::Completions,
        };
        plan(&body, endpoint, &served, prompts_max, stopped)
    };
    let bytes = held.bytes();
    let (plan, (seat, held)) = api.readers.run(bytes, party.clone(), (seat, held), read).await?;
    drop(held);
    let mut plan = plan?;
    let seat = check_grammar(api, model, &mut plan, party, seat).await?;
    Ok((plan, seat))
}

/// Compiles the grammar of a plan's answers on a thread that serves no clients. Optional grammars are dropped
/// if they cannot be compiled.
async fn check_grammar(
    api: &Api,
    model: &Arc<ServedModel>,
    plan: &mut Plan,
    party: Party,
    seat: Seat,
) -> Result<Seat, ApiError> {
    let Some(format) = plan.parameters.format.clone() else { return Ok(seat) };
    let (model, owner, is_optional) = (model.clone(), owner(seat.party()), format.is_optional());
    let check =
        move |stopped: Stopped<'_>| format.check_grammar(&model, GrammarClient { party: &owner, stopped });
    let (checked, seat) = api.compilers.run(NEVER_IN_PLACE, party, seat, check).await?;
    if is_optional && checked.is_err() {
        plan.parameters.format = None;
        return Ok(seat);
    }
    checked.map(|()| seat)
}

/// Reads a body and tokenises it.
fn plan(
    body: &[u8],
    endpoint: Endpoint,
    model: &ServedModel,
    choices_max: usize,
    stopped: Stopped<'_>,
) -> Result<Plan, ApiError> {
    let mut fields = Fields::parse(body)?;
    let name = fields.string("model")?;
    let missing = || ApiError::field("model", "missing_parameter", "'model' is missing");
    check_name(&name.ok_or_else(missing)?, &model.name)?;
    match endpoint {
        Endpoint::Completions => completions::plan(fields, model, choices_max, stopped),
        Endpoint::Chat => chat::plan(fields, model, stopped),
        Endpoint::Responses => responses::plan(fields, model, stopped),
    }
}

pub(super) fn check_name(wanted: &str, served: &str) -> Result<(), ApiError> {
    if wanted == served {
        return Ok(());
    }
    let wanted: String = wanted.chars().take(128).collect();
    Err(ApiError::unknown_model(&wanted, served))
}
