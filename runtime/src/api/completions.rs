//! `/v1/completions`: reads the prompts.

use serde_json::value::RawValue;

use super::ServedModel;
use super::encode::{Encoder, Stopped};
use super::errors::ApiError;
use super::fields::{Fields, each, text, token_id, wrong_type};
use super::generate::Plan;
use super::interface;
use super::json::kind;
use super::parameters::{self, Parameters};
use super::prompt_report::PromptWishes;
use super::shapes::Endpoint;
use super::text::{Marked, mark};
use super::{hand_over, refused};

/// OpenAI's default for `max_tokens`.
const MAX_TOKENS: u32 = 16;

const PROMPT: &str = "a string, an array of strings, an array of token ids or an array of such arrays";

enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Reads a request and tokenises its prompts.
pub(crate) fn plan(
    mut fields: Fields<'_>,
    model: &ServedModel,
    prompts_max: usize,
    stopped: Stopped<'_>,
) -> Result<Plan, ApiError> {
    let vocabulary_size = model.text.vocabulary_size();
    let encoder = Encoder { model, field: "prompt", stopped };
    let prompts = prompts(&mut fields, &encoder, prompts_max)?;
    let logprobs = parameters::completion_logprobs(&mut fields)?;
    let parameters = Parameters::parse(&mut fields, &model.defaults, vocabulary_size)?;
    let wishes = PromptWishes::parse(&mut fields, true, logprobs, parameters.stream.is_some())?;
    let keeps_kv = hand_over::parse(&mut fields, model)?;
    refused::check(&fields)?;
    let warning = interface::unknown_fields(&fields);
    parameters.check_format_ends(model)?;
    let add_special = parameters.add_special_tokens.unwrap_or(true);
    let split = parameters.split_special_tokens.unwrap_or(false);
    let encode = |prompt| match prompt {
        Prompt::Ids(ids) => Ok((ids, None)),
        Prompt::Text(mut text) => {
            let written = wishes.echo.then(|| text.clone());
            let prompt = match split {
                true => {
                    let mark = mark(&mut [&mut text], model.text.as_ref());
                    Marked::strict(text, mark.map_err(|error| encoder.failed(&error))?)
                }
                false => Marked::plain(text),
            };
            Ok((encoder.encode(&prompt, add_special)?, written))
        }
    };
    let encoded = prompts.into_iter().map(encode).collect::<Result<Vec<_>, ApiError>>()?;
    let (mut prompts, mut prompt_texts) = (Vec::new(), Vec::new());
    for (ids, written) in encoded {
        let whole = ids.len();
        let kept = parameters.truncated(ids, model.context);
        prompt_texts.push(written.filter(|_| kept.len() == whole));
        prompts.push(kept);
    }
    Ok(Plan {
        endpoint: Endpoint::Completions,
        prompts,
        prompt_field: "prompt",
        max_tokens_default: Some(MAX_TOKENS),
        logprobs,
        prompt_wishes: wishes,
        prompt_texts,
        tools: None,
        past_calls: 0,
        refused: None,
        vocabulary: parameters.vocabulary.tokens(model, stopped)?,
        parameters,
        warning,
        keeps_kv,
        response: None,
    })
}

fn prompts(
    fields: &mut Fields<'_>,
    encoder: &Encoder<'_>,
    prompts_max: usize,
) -> Result<Vec<Prompt>, ApiError> {
    let Some(raw) = fields.take("prompt") else {
        return Err(ApiError::field("prompt", "missing_parameter", "'prompt' is missing"));
    };
    let few =
        |count| ApiError::value("prompt", format!("'prompt' holds 1 to {prompts_max} prompts, not {count}"));
    let (mut prompts, mut single) = (Vec::new(), Vec::new());
    let take = |item: &RawValue| {
        // The first element decides whether the array is one prompt of ids.
        if !single.is_empty() || (prompts.is_empty() && kind(item) == "a number") {
            return take_id(&mut single, item, encoder);
        }
        if prompts.len() == prompts_max {
            return Err(few("more"));
        }
        prompts.push(prompt(item, encoder)?);
        Ok(())
    };
    match each(raw, take) {
        None => return Ok(vec![prompt(raw, encoder)?]),
        Some(read) => read?,
    }
    match (single.is_empty(), prompts.is_empty()) {
        (false, _) => Ok(vec![Prompt::Ids(single)]),
        (true, false) => Ok(prompts),
        (true, true) => Err(few("none")),
    }
}

/// Reads a prompt: a string or an array of token ids.
fn prompt(raw: &RawValue, encoder: &Encoder<'_>) -> Result<Prompt, ApiError> {
    if let Some(text) = text("prompt", raw)? {
        return Ok(Prompt::Text(text));
    }
    let mut ids = Vec::new();
    each(raw, |item| take_id(&mut ids, item, encoder)).ok_or_else(|| wrong_type("prompt", PROMPT, raw))??;
    Ok(Prompt::Ids(ids))
}

/// Appends one id to a prompt, unless the prompt already fills the context.
fn take_id(ids: &mut Vec<u32>, item: &RawValue, encoder: &Encoder<'_>) -> Result<(), ApiError> {
    let context = encoder.model.context as usize;
    if ids.len() == context {
        return Err(encoder.too_long(context + 1));
    }
    ids.push(token_id("prompt", item, encoder.model.text.vocabulary_size())?);
    Ok(())
}
