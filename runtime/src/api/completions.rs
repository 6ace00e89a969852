//! `/v1/completions`: reads the prompts.

use serde_json::Value;

use super::errors::ApiError;
use super::fields::{Fields, token_id, wrong_type};
use super::generate::Plan;
use super::parameters::{self, Parameters};
use super::refused;
use super::shapes::Endpoint;
use super::{ServedModel, work};
use crate::env::SharedEnv;
use std::sync::Arc;

/// OpenAI's default.
const MAX_TOKENS: u32 = 16;

const PROMPT: &str = "a string, an array of strings, an array of token ids or an array of such arrays";

enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// Bytes to be tokenised.
    fn bytes(&self) -> usize {
        match self {
            Prompt::Text(text) => text.len(),
            Prompt::Ids(_) => 0,
        }
    }
}

/// Reads a request and tokenises its prompts.
pub(crate) async fn plan(
    mut fields: Fields,
    model: &Arc<ServedModel>,
    env: &SharedEnv,
    prompts_max: usize,
) -> Result<Plan, ApiError> {
    let vocabulary_size = model.text.vocabulary_size();
    let prompts = prompts(&mut fields, vocabulary_size, prompts_max)?;
    let logprobs = parameters::completion_logprobs(&mut fields)?;
    let parameters = Parameters::parse(&mut fields, &model.defaults, vocabulary_size)?;
    refused::check(&fields)?;
    let add_special = parameters.add_special_tokens.unwrap_or(true);
    let text = model.text.clone();
    let encode = move |prompt| match prompt {
        Prompt::Ids(ids) => Ok(ids),
        Prompt::Text(prompt) => text.encode(&prompt, add_special),
    };
    let bytes = prompts.iter().map(Prompt::bytes).sum();
    let prompts =
        work::run(env, bytes, move || prompts.into_iter().map(encode).collect::<Result<Vec<_>, _>>())
            .await?
            .map_err(|message| {
                ApiError::value("prompt", format!("the prompt cannot be tokenised: {message}"))
            })?;
    Ok(Plan {
        endpoint: Endpoint::Completions,
        prompts,
        prompt_field: "prompt",
        max_tokens_default: Some(MAX_TOKENS),
        logprobs,
        parameters,
    })
}

fn prompts(fields: &mut Fields, vocabulary_size: u32, prompts_max: usize) -> Result<Vec<Prompt>, ApiError> {
    let items = match fields.take("prompt") {
        None => return Err(ApiError::field("prompt", "missing_parameter", "'prompt' is missing")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type("prompt", PROMPT, &other)),
    };
    if matches!(items.first(), Some(Value::Number(_))) {
        return Ok(vec![Prompt::Ids(ids(&items, vocabulary_size)?)]);
    }
    if items.is_empty() || items.len() > prompts_max {
        let message = format!("'prompt' holds 1 to {prompts_max} prompts, not {}", items.len());
        return Err(ApiError::value("prompt", message));
    }
    let prompt = |item| match item {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(items) => Ok(Prompt::Ids(ids(&items, vocabulary_size)?)),
        other => Err(wrong_type("prompt", PROMPT, &other)),
    };
    items.into_iter().map(prompt).collect()
}

fn ids(items: &[Value], vocabulary_size: u32) -> Result<Vec<u32>, ApiError> {
    items.iter().map(|item| token_id("prompt", item, vocabulary_size)).collect()
}
