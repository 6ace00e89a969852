//! `/v1/chat/completions`: reads the conversation and renders it.

use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::ops::ControlFlow;

use super::ServedModel;
use super::encode::{Encoder, Stopped};
use super::errors::ApiError;
use super::fields::{Fields, each, text, value, wrong_type};
use super::format::AnswerForm;
use super::generate::Plan;
use super::interface;
use super::json;
use super::parameters::{self, Parameters};
use super::prompt_report::PromptWishes;
use super::shapes::Endpoint;
use super::text::{Marked, mark};
use super::tools::{self, Tools};
use super::{hand_over, refused};
use crate::model::{ChatMessage, ToolStyle};

/// Maximum number of messages in a chat, and of parts in one message: a template's view of a message takes
/// 1.5 KB.
const MESSAGES_MAX: usize = 16 << 10;
/// OpenAI's values of `reasoning_effort`.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
/// Fields of requests that `chat_template_kwargs` cannot hold.
const OWN_FIELDS: [&str; 6] =
    ["messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"];
/// Stands behind a message that the answer continues, so that the end of the message is found in the rendered
/// text. Unicode assigns no meaning to it.
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
            "'continue_final_message' continues the last message, and so excludes 'add_generation_prompt'";
        return Err(ApiError::value("continue_final_message", message));
    }
    let mut arguments = template_arguments(&mut fields)?;
    let given = Tools::parse(&mut fields)?;
    if let Some(tools) = &given {
        arguments.insert("tools".into(), tools.given.clone());
    }
    let (tools, refused) = callable(given, &mut parameters, model)?;
    for name in ["reasoning_effort", "documents"] {
        template_argument(name, &mut fields, model, &mut arguments)?;
    }
    let wishes = PromptWishes::parse(&mut fields, false, logprobs, parameters.stream.is_some())?;
    let keeps_kv = hand_over::parse(&mut fields, model)?;
    refused::check(&fields)?;
    let warning = interface::unknown_fields(&fields);
    parameters.check_format_ends(model)?;
    let past_calls = messages.iter().filter_map(|message| message.extra.get("tool_calls")?.as_array());
    let past_calls = past_calls.map(Vec::len).sum();
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
    let prompt = parameters.truncated(encoder.encode(&prompt, add_special)?, model.context);
    Ok(Plan {
        endpoint: Endpoint::Chat,
        prompts: vec![prompt],
        prompt_field: "messages",
        max_tokens_default: None,
        logprobs,
        prompt_wishes: wishes,
        prompt_texts: Vec::new(),
        tools,
        past_calls,
        refused,
        vocabulary: parameters.vocabulary.tokens(model, stopped)?,
        parameters,
        warning,
        keeps_kv,
        response: None,
    })
}

/// Reads `chat_template_kwargs`. What the request's own fields say cannot be overwritten there.
fn template_arguments(fields: &mut Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    const FIELD: &str = "chat_template_kwargs";
    let arguments = fields.object(FIELD)?.unwrap_or_default();
    match OWN_FIELDS.into_iter().find(|name| arguments.contains_key(*name)) {
        Some(name) => {
            let hint = format!("send '{name}' as a field of the request");
            Err(ApiError::unsupported(&format!("{FIELD}.{name}"), &hint))
        }
        None => Ok(arguments),
    }
}

/// Passes a field to the template under its own name, if the template reads it. Otherwise the field stays
/// unread, and is refused.
fn template_argument(
    name: &str,
    fields: &mut Fields<'_>,
    model: &ServedModel,
    arguments: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    if fields.get(name).is_none() || !model.text.reads_argument(name) {
        return Ok(());
    }
    let Some(raw) = fields.take(name) else { return Ok(()) };
    let given = value(name, raw)?;
    let is_effort = |given: &Value| given.as_str().is_some_and(|effort| EFFORTS.contains(&effort));
    if name == "reasoning_effort" && !is_effort(&given) {
        return Err(ApiError::value(name, format!("'{name}' is one of {}", EFFORTS.join(", "))));
    }
    match arguments.insert(name.into(), given) {
        Some(other) if other != arguments[name] => {
            let message = format!("'{name}' and 'chat_template_kwargs.{name}' differ");
            Err(ApiError::value(name, message))
        }
        _ => Ok(()),
    }
}

/// Interrupts special tokens in the client's text, and returns the mark used, if any.
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

/// Whether the answer continues the last message.
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

/// Tools that an answer may call, with the style of the calls.
type CallableTools = Option<(Tools, ToolStyle)>;

/// Returns the tools that may be called, or the error if the style of calls is unknown. Forced calls
/// constrain the answer.
fn callable(
    tools: Option<Tools>,
    parameters: &mut Parameters,
    model: &ServedModel,
) -> Result<(CallableTools, Option<ApiError>), ApiError> {
    let Some(tools) = tools else { return Ok((None, None)) };
    let Some(style) = model.text.tool_style() else {
        let hint = match model.text.reads_argument("tools") {
            true => "the template of this model writes calls in a style that is not implemented",
            false => "the template of this model has no tools",
        };
        return Ok((None, Some(ApiError::unsupported("tools", hint))));
    };
    if parameters.format.is_some() {
        let hint = "a form of the answer beside 'tools' is not implemented";
        return Err(ApiError::unsupported("response_format", hint));
    }
    if tools.is_auto() && !parameters.may_have_form(model) {
        return Ok((Some((tools, style)), None));
    }
    let is_special = |mark: &str| !model.text.special_places(mark).is_empty();
    parameters.format = tools.grammar(style, &is_special).map(|grammar| AnswerForm::new("tools", grammar));
    Ok((Some((tools, style)), None))
}

/// All text of the client that a template can print. Roles are a few fixed words; names of variables are not
/// printed.
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

/// Reads the messages, at most as many as fit: a template makes at least one token of each.
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

/// Names under which clients send the reasoning that preceded an answer.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Fields of messages that servers send, that clients send back, and that no template prints.
const ECHOED: [&str; 3] = ["annotations", "reasoning_details", "provider_specific_fields"];

/// Converts a message for the template: a known role, and its content as one string.
fn message(index: usize, raw: &RawValue, call_bytes: &mut usize) -> Result<ChatMessage, ApiError> {
    let name = |field: &str| format!("messages[{index}]{field}");
    let mut fields = Fields::within(raw)?.ok_or_else(|| wrong_type(&name(""), "an object", raw))?;
    let unsupported =
        |field: &str| ApiError::unsupported(&name(&format!(".{field}")), "messages carry text only");
    let role = role(&name(".role"), fields.take("role"))?;
    let calls = fields.take("tool_calls").map(|raw| tools::past_calls(&name(".tool_calls"), raw, call_bytes));
    let calls = calls.transpose()?;
    let calls = calls.filter(|calls| !calls.is_empty());
    let refusal = fields.take("refusal").map(|raw| text(&name(".refusal"), raw)).transpose()?.flatten();
    let refusal = refusal.filter(|refusal| !refusal.is_empty());
    let given = fields.take("content");
    let said = match (given, refusal) {
        (None, Some(refusal)) => refusal,
        (Some(_), Some(_)) => return Err(unsupported("refusal")),
        (None, None) if calls.is_some() || role == "assistant" => String::new(),
        (raw, None) => content(&name(".content"), raw)?,
    };
    let mut message = ChatMessage::new(role, said);
    if let Some(calls) = calls {
        message.extra.insert("tool_calls".into(), calls.into());
    }
    for field in ["name", "tool_call_id"].into_iter().chain(REASONING) {
        let Some(raw) = fields.take(field) else { continue };
        let value = text(&name(&format!(".{field}")), raw)?;
        let value = value.ok_or_else(|| wrong_type(&name(&format!(".{field}")), "a string", raw))?;
        message.extra.insert(field.into(), value.into());
    }
    let is_empty = |raw: &RawValue| matches!(raw.get(), "[]" | "\"\"" | "{}");
    let unread: Vec<String> = fields.unread().map(str::to_owned).collect();
    for field in unread {
        let is_annotation = ECHOED.contains(&field.as_str());
        if fields.take(&field).is_some_and(|raw| !is_annotation && !is_empty(raw)) {
            return Err(unsupported(&field.chars().take(64).collect::<String>()));
        }
    }
    Ok(with_order(message, raw, given.is_some()))
}

fn role(name: &str, raw: Option<&RawValue>) -> Result<&'static str, ApiError> {
    match raw.map(|raw| text(name, raw)).transpose()?.flatten().as_deref() {
        // OpenAI's later name for the same role; templates know only the older one.
        Some("system" | "developer") => Ok("system"),
        Some("user") => Ok("user"),
        Some("assistant") => Ok("assistant"),
        Some("tool") => Ok("tool"),
        Some(other) => {
            let other: String = other.chars().take(32).collect();
            let message = format!("role {other:?} is not one of system, developer, user, assistant, tool");
            Err(ApiError::value(name, message))
        }
        None => Err(ApiError::field(name, "missing_parameter", "a message needs a 'role'")),
    }
}

/// The message as transformers passes it to templates: fields in the client's order, null fields left out,
/// and the reasoning under two names.
fn with_order(mut message: ChatMessage, raw: &RawValue, has_content: bool) -> ChatMessage {
    let mut order: Vec<String> = Vec::new();
    let walked = json::entries(raw.get(), |name, _| {
        let is_shown = match &*name {
            "role" => true,
            "content" => has_content,
            name => message.extra.contains_key(name),
        };
        if is_shown && !order.iter().any(|known| *known == name) {
            order.push(name.into_owned());
        }
        ControlFlow::Continue(())
    });
    if walked.is_err() {
        return message;
    }
    if !has_content && !message.content.is_empty() {
        order.push("content".into());
    }
    let thought = REASONING.iter().find_map(|name| message.extra.get(*name)).cloned();
    if let Some(thought) = thought {
        order.retain(|name| name != "thinking");
        order.insert(0, "thinking".into());
        message.extra.entry("thinking").or_insert_with(|| thought.clone());
        if !order.iter().any(|name| name == REASONING[0]) {
            order.push(REASONING[0].into());
        }
        message.extra.insert(REASONING[0].into(), thought);
    }
    message.ordered(order)
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
        (Some("text" | "input_text" | "output_text"), Some(text)) => Ok(text),
        (Some("refusal"), _) => field("refusal")?.ok_or_else(|| wrong_type(name, wanted, raw)),
        (Some("text"), None) => Err(ApiError::value(name, format!("{name}: a text part without 'text'"))),
        (Some(other), _) => {
            let kind: String = other.chars().take(32).collect();
            Err(ApiError::unsupported(name, &format!("the model reads text, not {kind:?} parts")))
        }
        (None, _) => Err(ApiError::value(name, format!("{name}: a part without 'type'"))),
    }
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
