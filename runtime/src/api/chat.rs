//! `/v1/chat/completions`: reads the conversation and renders it.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::ServedModel;
use super::encode::{Encoder, Stopped};
use super::errors::ApiError;
use super::fields::{Fields, each, text, wrong_type};
use super::format::AnswerForm;
use super::generate::Plan;
use super::interface;
use super::parameters::{self, Parameters};
use super::shapes::Endpoint;
use super::text::{Marked, mark};
use super::tools::{self, Tools};
use super::{hand_over, refused};
use crate::model::{ChatMessage, ToolStyle};

/// Maximum number of messages in a chat, and of parts in one message: a template's view of a message takes
/// 1.5 KB.
const MESSAGES_MAX: usize = 16 << 10;
/// Stands behind a message that the answer goes on with, so that its end is found in what a template makes
/// of it. Unicode assigns no meaning to it.
const END: char = '\u{FFFE}';

/// Reads a request, renders the chat template and tokenises the result.
pub(crate) fn plan(
    mut fields: Fields<'_>,
    model: &ServedModel,
    stopped: Stopped<'_>,
) -> Result<Plan, ApiError> {
    let encoder = Encoder { model, field: "messages", stopped };
    let mut messages = messages(&mut fields, &encoder)?;
    let logprobs = parameters::chat_logprobs(&mut fields)?;
    let mut parameters = Parameters::parse(&mut fields, &model.defaults, model.text.vocabulary_size())?;
    let goes_on = continued(&mut fields, &messages)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(!goes_on);
    if goes_on && add_generation_prompt {
        let message =
            "'continue_final_message' goes on with the last message, and so excludes 'add_generation_prompt'";
        return Err(ApiError::value("continue_final_message", message));
    }
    let mut arguments = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let tools = tools(&mut fields, &mut parameters, model)?;
    let keeps_kv = hand_over::parse(&mut fields, model)?;
    refused::check(&fields)?;
    let warning = interface::unknown_fields(&fields);
    parameters.check_format_ends(model)?;
    if let Some((tools, _)) = &tools {
        arguments.insert("tools".into(), tools.given.clone());
    }
    let failed = |error: String| encoder.failed(&error);
    let keeps_text = parameters.split_special_tokens.unwrap_or(true);
    let mark = match keeps_text {
        true => mark_client_text(&mut messages, &mut arguments, &encoder)?,
        false => None,
    };
    encoder.check_stopped()?;
    if let Some(last) = messages.last_mut().filter(|_| goes_on) {
        last.content.push(END);
    }
    let rendered = model.text.render_chat(&messages, add_generation_prompt, &arguments, keeps_text, stopped);
    let mut rendered = rendered.map_err(failed)?;
    if goes_on {
        let message = "the template of this model leaves the last message out";
        let end =
            rendered.text.rfind(END).ok_or_else(|| ApiError::value("continue_final_message", message))?;
        rendered.text.truncate(end);
        rendered.places.retain(|place| *place < end);
    }
    let prompt = match keeps_text {
        true => Marked::chat(rendered, mark).map_err(failed)?,
        false => Marked::plain(rendered.text),
    };
    drop((messages, arguments));
    let add_special = parameters.add_special_tokens.unwrap_or(false);
    Ok(Plan {
        endpoint: Endpoint::Chat,
        prompts: vec![encoder.encode(&prompt, add_special)?],
        prompt_field: "messages",
        max_tokens_default: None,
        logprobs,
        tools,
        parameters,
        warning,
        keeps_kv,
    })
}

/// Interrupts special tokens in what the client wrote; the mark used, if any.
fn mark_client_text(
    messages: &mut [ChatMessage],
    arguments: &mut Map<String, Value>,
    encoder: &Encoder<'_>,
) -> Result<Option<char>, ApiError> {
    let text = encoder.model.text.as_ref();
    let mut said = ClientText::of(messages, arguments);
    if said.keys.iter().any(|key| !text.special_places(key).is_empty()) {
        let message =
            "a key in 'messages', 'tools' or 'chat_template_kwargs' holds the text of a special token";
        return Err(ApiError::value("chat_template_kwargs", message));
    }
    mark(&mut said.strings, text).map_err(|error| encoder.failed(&error))
}

/// Whether the answer goes on with the last message.
///
/// # Errors
/// When that message is not the beginning of an answer.
fn continued(fields: &mut Fields<'_>, messages: &[ChatMessage]) -> Result<bool, ApiError> {
    if !fields.boolean("continue_final_message")?.unwrap_or(false) {
        return Ok(false);
    }
    let is_answer = |last: &ChatMessage| {
        last.role == "assistant" && !last.content.trim().is_empty() && !last.extra.contains_key("tool_calls")
    };
    let message =
        "'continue_final_message' needs a last message of the assistant, with text and without calls";
    match messages.last().is_some_and(is_answer) {
        true => Ok(true),
        false => Err(ApiError::value("continue_final_message", message)),
    }
}

/// Reads the tools that may be called. Those that must be called decide the form of the answer.
fn tools(
    fields: &mut Fields<'_>,
    parameters: &mut Parameters,
    model: &ServedModel,
) -> Result<Option<(Tools, ToolStyle)>, ApiError> {
    let Some(tools) = Tools::parse(fields)? else { return Ok(None) };
    let hint = "the template of this model knows no tools, or not how they are called";
    let style = model.text.tool_style().ok_or_else(|| ApiError::unsupported("tools", hint))?;
    if parameters.format.is_some() {
        let hint = "a form of the answer beside 'tools' is not implemented";
        return Err(ApiError::unsupported("response_format", hint));
    }
    parameters.format = tools.grammar(style).map(|grammar| AnswerForm::new("tools", grammar));
    Ok(Some((tools, style)))
}

/// All text that the client wrote and that a template can print. Roles are a few fixed words; names of
/// variables are not printed.
#[derive(Default)]
struct ClientText<'a> {
    strings: Vec<&'a mut String>,
    keys: Vec<&'a String>,
}

impl<'a> ClientText<'a> {
    fn of(messages: &'a mut [ChatMessage], arguments: &'a mut Map<String, Value>) -> Self {
        let mut said = ClientText::default();
        for message in messages {
            said.strings.push(&mut message.content);
            message.extra.values_mut().for_each(|value| said.add(value));
        }
        arguments.values_mut().for_each(|value| said.add(value));
        said
    }

    fn add(&mut self, value: &'a mut Value) {
        match value {
            Value::String(text) => self.strings.push(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.add(item)),
            Value::Object(map) => {
                for (key, item) in map {
                    self.keys.push(key);
                    self.add(item);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Reads the messages, but no more than can be used: a template makes at least one token of each.
fn messages(fields: &mut Fields<'_>, encoder: &Encoder<'_>) -> Result<Vec<ChatMessage>, ApiError> {
    let Some(raw) = fields.take("messages") else {
        return Err(ApiError::field("messages", "missing_parameter", "'messages' is missing"));
    };
    let context = encoder.model.context as usize;
    let (mut messages, mut call_bytes) = (Vec::new(), 0);
    let take = |item| {
        if messages.len() == context {
            return Err(encoder.too_long(context + 1));
        }
        if messages.len() == MESSAGES_MAX {
            return Err(ApiError::value("messages", format!("'messages' holds more than {MESSAGES_MAX}")));
        }
        messages.push(message(messages.len(), item, &mut call_bytes)?);
        Ok(())
    };
    each(raw, take).ok_or_else(|| wrong_type("messages", "an array", raw))??;
    if messages.is_empty() {
        return Err(ApiError::value("messages", "'messages' is empty"));
    }
    Ok(messages)
}

/// Converts a message for the template: a known role, and its content as one string.
fn message(index: usize, raw: &RawValue, call_bytes: &mut usize) -> Result<ChatMessage, ApiError> {
    let name = |field: &str| format!("messages[{index}]{field}");
    let mut fields = Fields::within(raw)?.ok_or_else(|| wrong_type(&name(""), "an object", raw))?;
    let unsupported =
        |field: &str| ApiError::unsupported(&name(&format!(".{field}")), "messages carry text only");
    for field in ["function_call", "audio", "refusal"] {
        let empty = |raw: &RawValue| matches!(raw.get(), "[]" | "\"\"");
        if fields.take(field).is_some_and(|raw| !empty(raw)) {
            return Err(unsupported(field));
        }
    }
    let role =
        match fields.take("role").map(|raw| text(&name(".role"), raw)).transpose()?.flatten().as_deref() {
            Some(role @ ("system" | "user" | "assistant" | "tool")) => role.to_string(),
            // OpenAI's later name for the same role; templates know only the older one.
            Some("developer") => "system".into(),
            Some(other) => {
                let other: String = other.chars().take(32).collect();
                let message =
                    format!("role {other:?} is not one of system, developer, user, assistant, tool");
                return Err(ApiError::value(name(".role"), message));
            }
            None => {
                return Err(ApiError::field(name(".role"), "missing_parameter", "a message needs a 'role'"));
            }
        };
    let calls = fields.take("tool_calls").map(|raw| tools::past_calls(&name(".tool_calls"), raw, call_bytes));
    let calls = calls.transpose()?;
    let calls = calls.filter(|calls| !calls.is_empty());
    let said = match (fields.take("content"), &calls) {
        (None, Some(_)) => String::new(),
        (raw, _) => content(&name(".content"), raw)?,
    };
    let mut message = ChatMessage::new(role, said);
    if let Some(calls) = calls {
        message.extra.insert("tool_calls".into(), calls.into());
    }
    for field in ["name", "reasoning_content", "tool_call_id"] {
        let Some(raw) = fields.take(field) else { continue };
        let value = text(&name(&format!(".{field}")), raw)?;
        let value = value.ok_or_else(|| wrong_type(&name(&format!(".{field}")), "a string", raw))?;
        message.extra.insert(field.into(), value.into());
    }
    match fields.unread().next() {
        Some(field) => Err(unsupported(&field.chars().take(64).collect::<String>())),
        None => Ok(message),
    }
}

/// Reads message content: a string, or the text parts of an array joined by newlines.
fn content(name: &str, raw: Option<&RawValue>) -> Result<String, ApiError> {
    let wanted = "a string or an array of text parts";
    let Some(raw) = raw else {
        return Err(ApiError::field(name, "missing_parameter", "a message needs a 'content'"));
    };
    if let Some(text) = text(name, raw)? {
        return Ok(text);
    }
    let (mut joined, mut parts) = (String::new(), 0);
    let take = |part| {
        if parts == MESSAGES_MAX {
            return Err(ApiError::value(name, format!("{name} holds more than {MESSAGES_MAX} parts")));
        }
        if parts > 0 {
            joined.push('\n');
        }
        parts += 1;
        joined.push_str(&text_part(name, wanted, part)?);
        Ok(())
    };
    each(raw, take).ok_or_else(|| wrong_type(name, wanted, raw))??;
    Ok(joined)
}

fn text_part(name: &str, wanted: &str, raw: &RawValue) -> Result<String, ApiError> {
    if let Some(text) = text(name, raw)? {
        return Ok(text);
    }
    let mut fields = Fields::within(raw)?.ok_or_else(|| wrong_type(name, wanted, raw))?;
    let mut field = |key: &str| fields.take(key).map(|raw| text(name, raw)).transpose().map(Option::flatten);
    match (field("type")?.as_deref(), field("text")?) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(ApiError::value(name, format!("{name}: a text part without 'text'"))),
        (Some(other), _) => {
            let kind: String = other.chars().take(32).collect();
            Err(ApiError::unsupported(name, &format!("the model reads text, not {kind:?} parts")))
        }
        (None, _) => Err(ApiError::value(name, format!("{name}: a part without 'type'"))),
    }
}
