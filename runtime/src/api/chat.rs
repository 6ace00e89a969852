//! `/v1/chat/completions`: reads the conversation and renders it.

use serde_json::{Map, Value, json};
use std::sync::Arc;

use super::errors::ApiError;
use super::fields::{Fields, wrong_type};
use super::generate::Plan;
use super::parameters::{self, Parameters};
use super::refused;
use super::shapes::Endpoint;
use super::{ServedModel, work};
use crate::env::SharedEnv;

/// Reads a request, renders the chat template and tokenises the result.
pub(crate) async fn plan(
    mut fields: Fields,
    model: &Arc<ServedModel>,
    env: &SharedEnv,
) -> Result<Plan, ApiError> {
    let messages = messages(&mut fields)?;
    let logprobs = parameters::chat_logprobs(&mut fields)?;
    let parameters = Parameters::parse(&mut fields, &model.defaults, model.text.vocabulary_size())?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let arguments = fields.object("chat_template_kwargs")?.unwrap_or_default();
    refused::check(&fields)?;
    let add_special = parameters.add_special_tokens.unwrap_or(false);
    let text = model.text.clone();
    let length = |message: &Value| message["content"].as_str().map_or(0, str::len);
    let bytes = messages.iter().map(length).sum();
    let render_and_encode = move || {
        let rendered = text.render_chat(&messages, add_generation_prompt, &arguments)?;
        text.encode(&rendered, add_special)
    };
    let prompt = work::run(env, bytes, render_and_encode).await?.map_err(|message| {
        ApiError::value("messages", format!("the chat cannot be turned into a prompt: {message}"))
    })?;
    Ok(Plan {
        endpoint: Endpoint::Chat,
        prompts: vec![prompt],
        prompt_field: "messages",
        max_tokens_default: None,
        logprobs,
        parameters,
    })
}

fn messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let Some(items) = fields.array("messages")? else {
        return Err(ApiError::field("messages", "missing_parameter", "'messages' is missing"));
    };
    if items.is_empty() {
        return Err(ApiError::value("messages", "'messages' is empty"));
    }
    items.into_iter().enumerate().map(|(index, item)| message(index, item)).collect()
}

/// The message as the template sees it: known role, content as one string, other fields untouched.
fn message(index: usize, item: Value) -> Result<Value, ApiError> {
    let name = |field: &str| format!("messages[{index}]{field}");
    let Value::Object(mut map) = item else {
        return Err(wrong_type(&name(""), "an object", &item));
    };
    map.retain(|_, value| !value.is_null());
    for field in ["tool_calls", "function_call", "tool_call_id", "audio", "refusal"] {
        let empty = |value: &Value| *value == json!([]) || *value == json!("");
        if map.remove(field).is_some_and(|value| !empty(&value)) {
            return Err(ApiError::unsupported(&name(&format!(".{field}")), "messages carry text only"));
        }
    }
    let role = match map.get("role").and_then(Value::as_str) {
        Some(role @ ("system" | "user" | "assistant")) => role.to_string(),
        // OpenAI's later name of the same thing; templates know only the older one.
        Some("developer") => "system".into(),
        Some(other) => {
            let message = format!("role {other:?} is not one of system, developer, user, assistant");
            return Err(ApiError::value(name(".role"), message));
        }
        None => return Err(ApiError::field(name(".role"), "missing_parameter", "a message needs a 'role'")),
    };
    let content = content(&name(".content"), map.remove("content"))?;
    map.insert("role".into(), role.into());
    map.insert("content".into(), content.into());
    Ok(Value::Object(map))
}

/// A string, or the text parts of an array joined by newlines.
fn content(name: &str, value: Option<Value>) -> Result<String, ApiError> {
    let wanted = "a string or an array of text parts";
    match value {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let texts: Result<Vec<String>, ApiError> =
                parts.into_iter().map(|part| text_part(name, wanted, part)).collect();
            Ok(texts?.join("\n"))
        }
        Some(other) => Err(wrong_type(name, wanted, &other)),
        None => Err(ApiError::field(name, "missing_parameter", "a message needs a 'content'")),
    }
}

fn text_part(name: &str, wanted: &str, part: Value) -> Result<String, ApiError> {
    let field =
        |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_str).map(str::to_string);
    match part {
        Value::String(text) => Ok(text),
        Value::Object(map) => match (field(&map, "type").as_deref(), field(&map, "text")) {
            (Some("text"), Some(text)) => Ok(text),
            (Some("text"), None) => Err(ApiError::value(name, format!("{name}: a text part without 'text'"))),
            (Some(other), _) => {
                let kind: String = other.chars().take(32).collect();
                Err(ApiError::unsupported(name, &format!("the model reads text, not {kind:?} parts")))
            }
            (None, _) => Err(ApiError::value(name, format!("{name}: a part without 'type'"))),
        },
        other => Err(wrong_type(name, wanted, &other)),
    }
}
