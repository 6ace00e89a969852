//! Submits a validated request to the engine and builds the response.

use axum::body::Bytes;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use std::sync::Arc;

use super::answer::{Answer, Choice, TokenLogprobs};
use super::errors::ApiError;
use super::parameters::Parameters;
use super::shapes::{Collected, Endpoint, Head};
use super::sse::{self, Stream};
use super::tally::Tally;
use super::tools::Tools;
use super::{Api, Seat, ServedModel};
use crate::budget::{BudgetError, HeldBytes};
use crate::model::{CallIds, ToolStyle};
use crate::request::{AnswerBacklog, FREE_BYTES, GenerateRequest, Hints};
use crate::trace::RequestTrace;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::Seconds;

/// A request whose fields are checked and whose prompts are tokenised.
pub(crate) struct Plan {
    pub(crate) endpoint: Endpoint,
    pub(crate) prompts: Vec<Vec<u32>>,
    /// The field that a prompt came from, for error messages.
    pub(crate) prompt_field: &'static str,
    /// The default for `max_tokens`; none means all that the context leaves.
    pub(crate) max_tokens_default: Option<u32>,
    pub(crate) logprobs: Option<u32>,
    /// Tools that may be called, and how the model does that.
    pub(crate) tools: Option<(Tools, ToolStyle)>,
    /// Number of calls in the conversation so far.
    pub(crate) past_calls: usize,
    /// Why nothing is generated, though the prompt can be made.
    pub(crate) refused: Option<ApiError>,
    pub(crate) parameters: Parameters,
    /// What the client is told of fields that nobody knows.
    pub(crate) warning: Option<HeaderValue>,
    /// Whether the KV of the prompt is for another engine.
    pub(crate) keeps_kv: bool,
}

/// Runs a plan. The response's headers, and a stream's first byte, are sent after the engine has accepted
/// every choice. `held` counts what of the answer waits for the client. `arrived_s` is the time of arrival by
/// the environment's clock, `trace` the request's own span.
pub(crate) async fn respond(
    api: &Api,
    model: Arc<ServedModel>,
    mut plan: Plan,
    (seat, held): (Seat, HeldBytes),
    (arrived_s, trace): (f64, Option<RequestTrace>),
) -> Result<Response, ApiError> {
    if let Some(refused) = plan.refused.take() {
        return Err(refused);
    }
    let id = format!("{}{}", plan.endpoint.id_prefix(), api.random_id());
    let head = Head {
        endpoint: plan.endpoint,
        id: id.clone(),
        created: to_u64(api.env.unix_time().0),
        model: model.name.clone(),
        tier: plan.parameters.asked.tier,
        call_ids: plan.tools.as_ref().map_or_else(CallIds::default, |(_, style)| style.ids()),
        past_calls: plan.past_calls,
        handed_over: plan.hand_over(&model)?,
    };
    let (stream, warning) = (plan.parameters.stream, plan.warning.clone());
    let with_logprobs = plan.logprobs.is_some();
    let requests = requests(api, &model, &plan, &id, (&seat, Seconds(arrived_s), trace))?;
    let tally = Tally::new(
        api.counted(),
        (plan.endpoint, plan.parameters.asked.tier.unwrap_or_default(), seat.tenant()),
        id.clone(),
        arrived_s,
        trace,
    );
    let mut response = match stream {
        Some(options) => {
            let backlog = AnswerBacklog::within(held);
            let mut answer = submit((&model, backlog), &plan, requests, tally, seat).await?;
            if model.engine.drops_late() {
                // the status says so then
                answer.begun().await.map_err(ApiError::failure)?;
            }
            sse::response(Stream::new(answer, head, options, model.text.clone()))
        }
        None => {
            let answer = submit((&model, AnswerBacklog::unlimited()), &plan, requests, tally, seat).await?;
            collect(answer, &head, with_logprobs, &model, held).await?
        }
    };
    let value = HeaderValue::from_str(&id).expect("ids are hexadecimal");
    response.headers_mut().insert("x-request-id", value);
    if let Some(warning) = warning {
        response.headers_mut().insert(header::WARNING, warning);
    }
    Ok(response)
}

/// The engine requests: all choices of the first prompt, then of the second, and so on.
fn requests(
    api: &Api,
    model: &ServedModel,
    plan: &Plan,
    id: &str,
    (seat, arrived, trace): (&Seat, Seconds, Option<RequestTrace>),
) -> Result<Vec<GenerateRequest>, ApiError> {
    let (tenant, party) = (seat.tenant(), seat.party());
    let parameters = &plan.parameters;
    let count = plan.prompts.len() * parameters.choices as usize;
    if count > api.limits.choices_max {
        let message = format!("prompts times 'n' is {count}; at most {} are taken", api.limits.choices_max);
        return Err(ApiError::value("n", message));
    }
    let seed = parameters.seed.unwrap_or_else(|| api.env.random());
    let hints = parameters.asked.hints(arrived, api.env.unix_time())?;
    let hints = Hints { trace: trace.map(|trace| trace.own), keeps_kv: plan.keeps_kv, ..hints };
    let end_ids = end_ids(model, parameters);
    let cache_salt = tenant.salted(parameters.cache_salt.as_deref());
    let mut requests = Vec::with_capacity(count);
    for prompt in &plan.prompts {
        let max_tokens = max_tokens(plan, prompt.len(), model.context, tenant.max_tokens)?;
        let prompt_ids: Arc<[u32]> = prompt.as_slice().into();
        for choice in 0..parameters.choices {
            let mut sampling = parameters.sampling.clone();
            sampling.seed = seed.wrapping_add(choice.into());
            requests.push(GenerateRequest {
                id: format!("{id}-{}", requests.len()),
                prompt_ids: prompt_ids.clone(),
                max_tokens,
                eos_ids: end_ids.clone(),
                sampling,
                logprobs: plan.logprobs,
                grammar: parameters.format.as_ref().map(|format| format.grammar.clone()),
                cache_salt: cache_salt.clone(),
                party,
                hints,
            });
        }
    }
    if !tenant.name.is_empty() {
        requests.iter().for_each(|request| api.placements.claim(&request.id, &tenant.name));
    }
    Ok(requests)
}

impl Parameters {
    /// Refuses a form if no token ends answers.
    pub(crate) fn check_format_ends(&self, model: &ServedModel) -> Result<(), ApiError> {
        let ends = !end_ids(model, self).is_empty();
        self.format.as_ref().map_or(Ok(()), |format| format.check_end(ends))
    }
}

fn end_ids(model: &ServedModel, parameters: &Parameters) -> Arc<[u32]> {
    let eos_ids: &[u32] = if parameters.ignore_eos { &[] } else { &model.eos_ids };
    eos_ids.iter().chain(&parameters.stop_token_ids).copied().collect()
}

/// Tokens that may be generated after a prompt of `prompt_tokens` tokens, by a tenant with the limit
/// `granted`.
fn max_tokens(
    plan: &Plan,
    prompt_tokens: usize,
    context: u32,
    granted: Option<u32>,
) -> Result<u32, ApiError> {
    let field = plan.prompt_field;
    if prompt_tokens == 0 {
        return Err(ApiError::value(field, format!("'{field}' is empty: there is nothing to continue")));
    }
    let left = to_u32((context as usize).saturating_sub(prompt_tokens));
    let wanted = plan.parameters.max_tokens;
    if left == 0 || wanted.is_some_and(|wanted| wanted > left) {
        let wanted = wanted.map_or(String::new(), |wanted| format!(" and {wanted} to generate"));
        let message = format!(
            "the model's context holds {context} tokens; the request has {prompt_tokens} in the prompt{wanted}"
        );
        return Err(ApiError::context_length(field, message));
    }
    let granted = granted.unwrap_or(u32::MAX);
    if let Some(wanted) = wanted.filter(|wanted| *wanted > granted) {
        let message = format!("'max_tokens' is {wanted}; this key is given {granted} at most");
        return Err(ApiError::value("max_tokens", message));
    }
    Ok(wanted.or(plan.max_tokens_default).unwrap_or(left).min(left).min(granted))
}

async fn submit(
    (model, backlog): (&ServedModel, Arc<AnswerBacklog>),
    plan: &Plan,
    requests: Vec<GenerateRequest>,
    mut tally: Tally,
    seat: Seat,
) -> Result<Answer, ApiError> {
    let parameters = &plan.parameters;
    let end_ids = end_ids(model, parameters);
    // If one choice is rejected, the receivers of the others are dropped, which cancels them.
    let submitted = requests.into_iter().map(|request| model.engine.submit_within(request, backlog.clone()));
    let receivers = match try_join_all(submitted).await {
        Ok(receivers) => receivers,
        Err(rejection) => {
            tally.rejected();
            return Err(rejection.into());
        }
    };
    let lengths = || plan.prompts.iter().map(|prompt| to_u32(prompt.len()));
    tally.accepted(lengths(), receivers.len());
    let choice = |updates| {
        let decoder = match &plan.tools {
            Some((_, style)) => model.text.decoder_showing(style.shown()),
            None => model.text.decoder(),
        };
        let tools = plan.tools.as_ref().map(|(tools, style)| tools.reader(*style));
        let (stops, with_logprobs) = (parameters.stops.clone(), plan.logprobs.is_some());
        (Choice::new(decoder, stops, tools, end_ids.clone(), with_logprobs), updates)
    };
    let running = receivers.into_iter().map(choice).collect();
    Ok(Answer::new(running, lengths().sum(), parameters.choices as usize, tally, seat))
}

async fn collect(
    mut answer: Answer,
    head: &Head,
    with_logprobs: bool,
    model: &ServedModel,
    mut held: HeldBytes,
) -> Result<Response, ApiError> {
    let mut free = FREE_BYTES;
    let mut grow = |held: &mut HeldBytes, bytes: usize| {
        let counted = bytes.saturating_sub(free);
        free -= bytes - counted;
        held.grow(counted).map_err(too_long_an_answer)
    };
    let mut choices: Vec<Collected> = (0..answer.len()).map(|_| Collected::default()).collect();
    while let Some(step) = answer.next().await {
        let (index, delta) = step.map_err(ApiError::failure)?;
        let logprobs_bytes = delta.logprobs.as_ref().map_or(0, TokenLogprobs::bytes);
        grow(&mut held, delta.text.len() + logprobs_bytes)?;
        let choice = &mut choices[index];
        choice.text.push_str(&delta.text);
        choice.calls.extend(delta.calls);
        choice.logprobs.extend(delta.logprobs);
        choice.finish = delta.finish;
    }
    let mut document = head.whole(&choices, with_logprobs, answer.usage(), model.text.as_ref());
    drop(choices);
    held.shrink(held.bytes());
    document.shrink_to_fit();
    held.grow(document.len().saturating_sub(FREE_BYTES)).map_err(too_long_an_answer)?;
    let json = HeaderValue::from_static("application/json");
    let body = Bytes::from_owner(HeldDocument { document, _held: held });
    Ok(([(header::CONTENT_TYPE, json)], body).into_response())
}

/// A document that waits for its client, and what it holds of the budget of answers until it is sent.
struct HeldDocument {
    document: String,
    _held: HeldBytes,
}

impl AsRef<[u8]> for HeldDocument {
    fn as_ref(&self) -> &[u8] {
        self.document.as_bytes()
    }
}

fn too_long_an_answer(spent: BudgetError) -> ApiError {
    let whose = match spent {
        BudgetError::Budget => "the answers",
        BudgetError::Share => "the answers to this key or address",
    };
    ApiError::overloaded(format!("{whose} that wait are too long together; use 'stream'"), 1)
}
