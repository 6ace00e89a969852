//! Submits a validated request to the engine and builds the response.

use axum::body::Bytes;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use std::sync::Arc;

use super::answer::{Answer, Choice, ChoiceSetup, TokenLogprobs, Usage};
use super::errors::ApiError;
use super::parameters::Parameters;
use super::prompt_report::{PromptReader, PromptWishes};
use super::responses::{self, ResponseFrame};
use super::responses_shapes::{ResponseHead, ResponseStream};
use super::shapes::{Collected, Endpoint, Head, ReturnedPrompts};
use super::sse::{self, Stream};
use super::tally::Tally;
use super::text::TextModel;
use super::tool_reader::ToolReader;
use super::tools::Tools;
use super::{Api, Seat, ServedModel};
use crate::budget::{BudgetError, HeldBytes};
use crate::model::{CallIds, ToolStyle};
use crate::request::{
    AnswerBacklog, AnswerMinimum, AnswerVocabulary, FREE_BYTES, GenerateRequest, Hints, UpdateReceiver,
};
use crate::trace::RequestTrace;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::Seconds;

/// Bytes of a token's id in a document.
const ID_BYTES: usize = 8;

/// A request whose fields are checked and whose prompts are tokenised.
pub(crate) struct Plan {
    pub(crate) endpoint: Endpoint,
    pub(crate) prompts: Vec<Vec<u32>>,
    /// The field that a prompt came from, for error messages.
    pub(crate) prompt_field: &'static str,
    /// The default for `max_tokens`; none means all that the context leaves.
    pub(crate) max_tokens_default: Option<u32>,
    pub(crate) logprobs: Option<u32>,
    /// What the answer reports about its prompt, and the prompts' texts, where the client sent texts to echo.
    pub(crate) prompt_wishes: PromptWishes,
    pub(crate) prompt_texts: Vec<Option<String>>,
    /// Tools that may be called, and the style of calls.
    pub(crate) tools: Option<(Tools, ToolStyle)>,
    /// Number of calls in the conversation so far.
    pub(crate) past_calls: usize,
    /// The reason why nothing is generated, though the prompt can be made.
    pub(crate) refused: Option<ApiError>,
    pub(crate) parameters: Parameters,
    /// The tokens that answers may have, if not all.
    pub(crate) vocabulary: Option<AnswerVocabulary>,
    /// The warning to the client about unknown fields.
    pub(crate) warning: Option<HeaderValue>,
    /// Whether the KV of the prompt is for another engine.
    pub(crate) keeps_kv: bool,
    /// Request fields that a response repeats; of `/v1/responses` alone.
    pub(crate) response: Option<ResponseFrame>,
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
        prompts: plan.parameters.returns_ids.then(|| ReturnedPrompts {
            ids: plan.prompts.clone(),
            choices_per_prompt: plan.parameters.choices as usize,
        }),
    };
    let (stream, warning) = (plan.parameters.stream, plan.warning.clone());
    let form = plan.form(head);
    let requests = requests(api, &model, &plan, &id, (&seat, Seconds(arrived_s), trace));
    let requests = requests.map_err(|error| match plan.endpoint {
        Endpoint::Responses => responses::own_names(error),
        _ => error,
    })?;
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
            match form {
                AnswerDocument::Response(head) => {
                    ResponseStream::new(answer, *head, model.text.clone()).response()
                }
                AnswerDocument::Choices { head, .. } => {
                    sse::response(Stream::new(answer, head, options, model.text.clone()))
                }
            }
        }
        None => {
            let answer = submit((&model, AnswerBacklog::unlimited()), &plan, requests, tally, seat).await?;
            collect(answer, &form, &model, held).await?
        }
    };
    let value = HeaderValue::from_str(&id).expect("ids are hexadecimal");
    response.headers_mut().insert("x-request-id", value);
    if let Some(warning) = warning {
        response.headers_mut().insert(header::WARNING, warning);
    }
    Ok(response)
}

/// The document type of an answer.
enum AnswerDocument {
    Choices { head: Head, with_logprobs: bool },
    Response(Box<ResponseHead>),
}

impl AnswerDocument {
    /// The document of a whole answer.
    fn whole(&self, choices: &[Collected], usage: Usage, model: &dyn TextModel) -> String {
        match self {
            AnswerDocument::Choices { head, with_logprobs } => {
                head.whole(choices, *with_logprobs, usage, model)
            }
            AnswerDocument::Response(head) => {
                choices.first().map_or_else(String::new, |choice| head.whole(choice, usage, model))
            }
        }
    }
}

impl Plan {
    /// The constraint on the answer.
    fn form(&mut self, head: Head) -> AnswerDocument {
        match self.response.take() {
            Some(frame) => {
                let (sampling, logprobs) = (self.parameters.sampling.clone(), self.logprobs);
                AnswerDocument::Response(Box::new(ResponseHead { head, frame, sampling, logprobs }))
            }
            None => AnswerDocument::Choices { head, with_logprobs: self.logprobs.is_some() },
        }
    }
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
    let tops = plan.prompt_wishes.tops();
    let logprobs = plan.logprobs.max(tops);
    let mut requests = Vec::with_capacity(count);
    for prompt in &plan.prompts {
        let own_tokens = max_tokens(plan, prompt.len(), model, tenant.max_tokens)?;
        let minimum = minimum(model, parameters, own_tokens)?;
        let (given, forced) = prompt.split_at(if tops.is_some() { 1 } else { prompt.len() });
        let (prompt_ids, forced_ids): (Arc<[u32]>, Arc<[u32]>) = (given.into(), forced.into());
        let max_tokens = (to_u32(forced.len()) + own_tokens).max(1);
        for choice in 0..parameters.choices {
            let mut sampling = parameters.sampling.clone();
            sampling.seed = seed.wrapping_add(choice.into());
            requests.push(GenerateRequest {
                id: format!("{id}-{}", requests.len()),
                prompt_ids: prompt_ids.clone(),
                forced_ids: forced_ids.clone(),
                max_tokens,
                eos_ids: end_ids.clone(),
                minimum: minimum.clone(),
                vocabulary: plan.vocabulary.clone(),
                sampling,
                logprobs,
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
    /// Whether answers end once they are complete by their grammar.
    pub(crate) fn may_have_form(&self, model: &ServedModel) -> bool {
        self.text.min_tokens == 0 && self.vocabulary.field().is_none() && !end_ids(model, self).is_empty()
    }

    /// Refuses a constraint if no token ends answers, or if answers must not end when they are complete.
    pub(crate) fn check_format_ends(&self, model: &ServedModel) -> Result<(), ApiError> {
        let Some(format) = &self.format else { return Ok(()) };
        if self.text.min_tokens > 0 {
            let hint = "a constrained answer ends once it is complete";
            return Err(ApiError::unsupported("min_tokens", hint));
        }
        if let Some(field) = self.vocabulary.field() {
            return Err(ApiError::unsupported(field, "the tokens of a constrained answer follow its form"));
        }
        format.check_end(!end_ids(model, self).is_empty())
    }
}

fn end_ids(model: &ServedModel, parameters: &Parameters) -> Arc<[u32]> {
    let eos_ids: &[u32] = if parameters.ignore_eos { &[] } else { &model.eos_ids };
    eos_ids.iter().chain(&parameters.stop_token_ids).copied().collect()
}

/// Tokens that must not be drawn before an answer of at most `max_tokens` is long enough.
fn minimum(
    model: &ServedModel,
    parameters: &Parameters,
    max_tokens: u32,
) -> Result<Option<AnswerMinimum>, ApiError> {
    let tokens = parameters.text.min_tokens;
    if tokens > max_tokens {
        let message = format!("'min_tokens' is {tokens}; this answer has {max_tokens} tokens at most");
        return Err(ApiError::value("min_tokens", message));
    }
    let ends = model.eos_ids.iter().chain(&parameters.stop_token_ids).copied();
    let mut ids: Vec<u32> = ends.filter(|id| *id < model.text.vocabulary_size()).collect();
    ids.sort_unstable();
    ids.dedup();
    let masks = tokens > 0 && !ids.is_empty();
    Ok(masks.then(|| AnswerMinimum { tokens, masked_ids: ids.into() }))
}

/// Tokens that may be generated after a prompt of `prompt_tokens` tokens, by a tenant with the limit
/// `granted`.
fn max_tokens(
    plan: &Plan,
    prompt_tokens: usize,
    model: &ServedModel,
    granted: Option<u32>,
) -> Result<u32, ApiError> {
    let (field, context) = (plan.prompt_field, model.context);
    if prompt_tokens == 0 {
        return Err(ApiError::value(field, format!("'{field}' is empty: there is nothing to continue")));
    }
    let left = to_u32((context as usize).saturating_sub(prompt_tokens));
    let wanted = plan.parameters.max_tokens;
    let wishes = plan.prompt_wishes;
    if wanted == Some(0) {
        if !wishes.tells_prompt() {
            let message = "'max_tokens' is 0, which needs 'echo' or 'prompt_logprobs'";
            return Err(ApiError::value("max_tokens", message));
        }
        // the engine draws one token, which is discarded, unless the prompt's own are drawn
        if left > 0 || wishes.tops().is_some() && prompt_tokens > 1 && prompt_tokens <= context as usize {
            return Ok(0);
        }
    }
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
    let default = plan.max_tokens_default.or(model.answer_tokens);
    Ok(wanted.or(default).unwrap_or(left).min(left).min(granted))
}

async fn submit(
    (model, backlog): (&ServedModel, Arc<AnswerBacklog>),
    plan: &Plan,
    requests: Vec<GenerateRequest>,
    mut tally: Tally,
    seat: Seat,
) -> Result<Answer, ApiError> {
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
    let choices = plan.parameters.choices as usize;
    let running = receivers.into_iter().enumerate().map(|(at, updates)| {
        let setup = choice_setup(model, plan, at / choices)?;
        Ok((Choice::new(setup), updates))
    });
    let running: Vec<(Choice, UpdateReceiver)> = running.collect::<Result<_, ApiError>>()?;
    Ok(Answer::new(running, lengths().sum(), choices, tally, seat))
}

/// Settings by which a choice of prompt number `prompt` is read.
fn choice_setup(model: &ServedModel, plan: &Plan, prompt: usize) -> Result<ChoiceSetup, ApiError> {
    let (parameters, text) = (&plan.parameters, model.text.as_ref());
    let streams = parameters.stream.is_some();
    // answers of gpt-oss are parsed as harmony, with tools and without
    let harmony = Some(ToolStyle::Harmony).filter(|style| text.tool_style() == Some(*style));
    let harmony =
        harmony.filter(|_| plan.endpoint != Endpoint::Completions && !parameters.text.shows_specials);
    let style = plan.tools.as_ref().map(|(_, style)| *style).or(harmony);
    let decoder = match style {
        _ if parameters.text.shows_specials => text.decoder_with_specials(),
        Some(style) => text.decoder_showing(style.shown()),
        None => text.decoder(),
    };
    let tools = plan.tools.as_ref().map(|(tools, style)| tools.reader(*style, streams));
    let tools = tools.or_else(|| harmony.map(|style| ToolReader::new(style, Vec::new(), true, streams)));
    let reader = || {
        let (ids, written) = (plan.prompts[prompt].as_slice().into(), plan.prompt_texts.get(prompt));
        let written = written.and_then(Option::as_deref);
        PromptReader::new(plan.prompt_wishes, ids, written, text).map_err(ApiError::server)
    };
    Ok(ChoiceSetup {
        decoder,
        rules: parameters.text.clone(),
        tools,
        end_ids: end_ids(model, parameters),
        logprobs: plan.logprobs,
        prompt: plan.prompt_wishes.tells_prompt().then(reader).transpose()?,
        returns_ids: parameters.returns_ids,
        is_empty: parameters.max_tokens == Some(0),
    })
}

async fn collect(
    mut answer: Answer,
    form: &AnswerDocument,
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
        let told = delta.logprobs.iter().chain(delta.prompt.iter().flatten());
        let logprobs_bytes: usize = told.map(TokenLogprobs::bytes).sum();
        let ids_bytes = delta.ids.len() * ID_BYTES;
        grow(&mut held, delta.text.len() + delta.thought.len() + logprobs_bytes + ids_bytes)?;
        let choice = &mut choices[index];
        choice.text.push_str(&delta.text);
        choice.thought.push_str(&delta.thought);
        delta.calls.into_iter().for_each(|piece| piece.add_to(&mut choice.calls));
        choice.logprobs.extend(delta.logprobs);
        choice.ids.extend(delta.ids);
        choice.prompt = delta.prompt.or(choice.prompt.take());
        choice.finish = delta.finish;
    }
    let mut document = form.whole(&choices, answer.usage(), model.text.as_ref());
    drop(choices);
    held.shrink(held.bytes());
    document.shrink_to_fit();
    held.grow(document.len().saturating_sub(FREE_BYTES)).map_err(too_long_an_answer)?;
    let json = HeaderValue::from_static("application/json");
    let body = Bytes::from_owner(HeldDocument { document, _held: held });
    Ok(([(header::CONTENT_TYPE, json)], body).into_response())
}

/// A document that waits for its client, and its share of the budget of answers until it is sent.
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
    ApiError::overloaded(format!("{whose} that wait to be sent are too large together; use 'stream'"), 1)
}
