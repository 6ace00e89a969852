//! `/v1/responses`: converts a request to a chat.
//!
//! Nothing is stored: fields that need a stored response are refused.

use serde_json::value::RawValue;
use std::fmt::Write;

use super::ServedModel;
use super::chat;
use super::encode::Stopped;
use super::errors::ApiError;
use super::fields::{Fields, each, text, value, wrong_type};
use super::generate::Plan;
use super::shapes::Endpoint;

/// Maximum number of items of a conversation.
const ITEMS_MAX: usize = 16 << 10;
const STORE: &str = "nothing is stored here: send the whole conversation as 'input'";
const NOT_YET: &str = "it is not implemented";

/// Refused fields, each with a hint for the client.
const REFUSED: &[(&str, &str)] = &[
    ("previous_response_id", STORE),
    ("conversation", STORE),
    ("context_management", STORE),
    ("prompt", "there are no stored prompts; send 'instructions' and 'input'"),
    ("messages", "send 'input'"),
    ("n", "a response is one answer"),
    ("max_tokens", "send 'max_output_tokens'"),
    ("max_completion_tokens", "send 'max_output_tokens'"),
    ("response_format", "send 'text.format'"),
    ("reasoning_effort", "send 'reasoning.effort'"),
    ("logprobs", "send 'include' with \"message.output_text.logprobs\""),
    ("prompt_logprobs", NOT_YET),
    ("return_token_ids", NOT_YET),
];

/// Chat fields, each with the client's field that it was converted from.
const RENAMED: [(&str, &str); 7] = [
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
];

/// Request fields that the response repeats.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponseFrame {
    /// Name and JSON of each field.
    pub(crate) repeated: Vec<(&'static str, Box<RawValue>)>,
    /// Whether log-probabilities of the text are returned.
    pub(crate) logprobs: bool,
}

/// Fields that a response repeats unchanged.
const REPEATED: [&str; 12] = [
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "text",
    "tool_choice",
    "tools",
    "user",
];

/// Reads a request, renders the chat template and tokenises the result.
pub(crate) fn plan(
    mut fields: Fields<'_>,
    model: &ServedModel,
    stopped: Stopped<'_>,
) -> Result<Plan, ApiError> {
    let repeated = REPEATED.iter().filter_map(|name| Some((*name, fields.get(name)?.to_owned())));
    let repeated = repeated.collect();
    let mut chat = ChatBody::default();
    let logprobs = read(&mut fields, &mut chat)?;
    let body = chat.finish();
    let fields = Fields::parse(body.as_bytes())?;
    let plan = chat::plan(fields, model, stopped).map_err(own_names)?;
    let response = Some(ResponseFrame { repeated, logprobs });
    Ok(Plan { endpoint: Endpoint::Responses, prompt_field: "input", response, ..plan })
}

/// Translates an error about a chat field to the field that the client sent.
pub(crate) fn own_names(error: ApiError) -> ApiError {
    error.renamed(&RENAMED)
}

/// The body of the chat.
#[derive(Default)]
struct ChatBody(String);

impl ChatBody {
    fn field(&mut self, name: &str, json: &str) {
        let comma = if self.0.is_empty() { '{' } else { ',' };
        let name = serde_json::Value::from(name);
        let _ = write!(self.0, "{comma}{name}:{json}");
    }

    fn finish(self) -> String {
        self.0 + "}"
    }
}

/// Reads all fields; returns whether log-probabilities are requested.
fn read(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<bool, ApiError> {
    for (name, hint) in REFUSED {
        if fields.take(name).is_some() {
            return Err(ApiError::unsupported(name, hint));
        }
    }
    if fields.boolean("store")?.unwrap_or(false) {
        return Err(ApiError::unsupported("store", STORE));
    }
    if fields.boolean("background")?.unwrap_or(false) {
        return Err(ApiError::unsupported("background", STORE));
    }
    if fields.string("truncation")?.is_some_and(|kind| kind != "disabled") {
        return Err(ApiError::unsupported("truncation", "send an input that fits"));
    }
    // without effect: it limits built-in tools, which do not exist here
    fields.integer("max_tool_calls", 0..=i64::from(u32::MAX))?;
    if let Some(mut options) = fields.fields("stream_options")? {
        options.boolean("include_obfuscation")?;
        if let Some(name) = options.unread().next() {
            let name: String = name.chars().take(64).collect();
            return Err(ApiError::unsupported(&format!("stream_options.{name}"), NOT_YET));
        }
    }
    let instructions = fields.take("instructions");
    let messages = conversation(fields, instructions)?;
    chat.field("messages", &messages);
    if let Some(raw) = fields.take("max_output_tokens") {
        chat.field("max_completion_tokens", raw.get());
    }
    form(fields, chat)?;
    effort(fields, chat)?;
    tools(fields, chat)?;
    let logprobs = included(fields)?;
    if logprobs {
        chat.field("logprobs", "true");
    }
    let top = fields.get("top_logprobs").map(|raw| value("top_logprobs", raw)).transpose()?;
    if top.is_some_and(|top| top != 0) && !logprobs {
        let message = "'top_logprobs' needs 'include': [\"message.output_text.logprobs\"]";
        return Err(ApiError::value("top_logprobs", message));
    }
    let others: Vec<String> = fields.unread().map(str::to_owned).collect();
    for name in others {
        if let Some(raw) = fields.take(&name) {
            chat.field(&name, raw.get());
        }
    }
    Ok(logprobs)
}

/// Reads `text`: the constraint on the answer.
fn form(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(mut inner) = fields.fields("text")? else { return Ok(()) };
    if let Some(raw) = inner.take("verbosity") {
        chat.field("verbosity", raw.get());
    }
    if let Some(format) = inner.take("format") {
        let mut parts =
            Fields::within(format)?.ok_or_else(|| wrong_type("text.format", "an object", format))?;
        let is_schema = parts.string("type")?.as_deref() == Some("json_schema");
        if is_schema && parts.get("schema").is_none() {
            let message = "'text.format.schema' is missing";
            return Err(ApiError::field("text.format.schema", "missing_parameter", message));
        }
        chat.field("response_format", format.get());
    }
    refuse_rest("text", &inner)
}

/// Reads `reasoning`.
fn effort(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(mut inner) = fields.fields("reasoning")? else { return Ok(()) };
    if let Some(raw) = inner.take("effort") {
        chat.field("reasoning_effort", raw.get());
    }
    refuse_rest("reasoning", &inner)
}

/// Reads `tools` and `tool_choice`.
fn tools(fields: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), ApiError> {
    if let Some(raw) = fields.take("tools") {
        let mut list = String::new();
        let mut count = 0;
        let take = |item: &RawValue| {
            let name = format!("tools[{count}]");
            let mut tool = Fields::within(item)?.ok_or_else(|| wrong_type(&name, "an object", item))?;
            if tool.string("type")?.as_deref() != Some("function") {
                let hint = "only tools of the type \"function\" are";
                return Err(ApiError::unsupported(&format!("{name}.type"), hint));
            }
            let mut function = ChatBody::default();
            for field in ["name", "description", "parameters", "strict"] {
                tool.take(field).into_iter().for_each(|raw| function.field(field, raw.get()));
            }
            if function.0.is_empty() {
                return Err(ApiError::value(name, "a function needs a 'name'"));
            }
            refuse_rest(&name, &tool)?;
            let comma = if count == 0 { "" } else { "," };
            let _ = write!(list, "{comma}{{\"type\":\"function\",\"function\":{}}}", function.finish());
            count += 1;
            Ok(())
        };
        each(raw, take).ok_or_else(|| wrong_type("tools", "an array", raw))??;
        chat.field("tools", &format!("[{list}]"));
    }
    let Some(raw) = fields.take("tool_choice") else { return Ok(()) };
    match Fields::within(raw)? {
        None => chat.field("tool_choice", raw.get()),
        Some(mut choice) => {
            let name = choice.take("name");
            let kind = choice.string("type")?;
            let (Some("function"), Some(name)) = (kind.as_deref(), name) else {
                let hint = "it is \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"name\": ..}";
                return Err(ApiError::unsupported("tool_choice", hint));
            };
            chat.field(
                "tool_choice",
                &format!("{{\"type\":\"function\",\"function\":{{\"name\":{}}}}}", name.get()),
            );
        }
    }
    Ok(())
}

/// Reads `include`; returns whether it names log-probabilities.
fn included(fields: &mut Fields<'_>) -> Result<bool, ApiError> {
    let Some(raw) = fields.take("include") else { return Ok(false) };
    let mut logprobs = false;
    let take = |item: &RawValue| match text("include", item)?.as_deref() {
        Some("message.output_text.logprobs") => {
            logprobs = true;
            Ok(())
        }
        // accepted, since responses here have no items with this field
        Some("reasoning.encrypted_content") => Ok(()),
        _ => Err(ApiError::unsupported("include", "only \"message.output_text.logprobs\" is")),
    };
    each(raw, take).ok_or_else(|| wrong_type("include", "an array", raw))??;
    Ok(logprobs)
}

/// Refuses fields of `place` that were not read.
fn refuse_rest(place: &str, rest: &Fields<'_>) -> Result<(), ApiError> {
    match rest.unread().next() {
        None => Ok(()),
        Some(name) => {
            let name: String = name.chars().take(64).collect();
            Err(ApiError::unsupported(&format!("{place}.{name}"), NOT_YET))
        }
    }
}

/// A chat message whose parts are JSON.
#[derive(Default)]
struct ChatItem<'a> {
    role: &'static str,
    content: Option<&'a RawValue>,
    calls: Vec<String>,
    answers: Option<&'a RawValue>,
    reasoning: Option<String>,
}

/// The messages of a conversation, as JSON.
fn conversation(fields: &mut Fields<'_>, instructions: Option<&RawValue>) -> Result<String, ApiError> {
    let Some(raw) = fields.take("input") else {
        return Err(ApiError::field("input", "missing_parameter", "'input' is missing"));
    };
    let mut items: Vec<ChatItem<'_>> = Vec::new();
    let told = |role, content| ChatItem { role, content: Some(content), ..ChatItem::default() };
    if let Some(raw) = instructions {
        text("instructions", raw)?.ok_or_else(|| wrong_type("instructions", "a string", raw))?;
        items.push(told("system", raw));
    }
    let (mut count, mut reasoning) = (0, None);
    let take = |item| {
        if count == ITEMS_MAX {
            return Err(ApiError::value("input", format!("'input' holds more than {ITEMS_MAX} items")));
        }
        let place = format!("input[{count}]");
        count += 1;
        add_item(&place, item, &mut items, &mut reasoning)
    };
    match each(raw, take) {
        Some(read) => read?,
        None => {
            text("input", raw)?.ok_or_else(|| wrong_type("input", "a string or an array of items", raw))?;
            items.push(told("user", raw));
        }
    }
    let messages: Vec<String> = items.iter().map(message).collect();
    Ok(format!("[{}]", messages.join(",")))
}

fn message(item: &ChatItem<'_>) -> String {
    let mut body = ChatBody::default();
    body.field("role", &format!("\"{}\"", item.role));
    item.reasoning
        .iter()
        .for_each(|said| body.field("reasoning_content", &serde_json::json!(said).to_string()));
    item.content.iter().for_each(|content| body.field("content", content.get()));
    if !item.calls.is_empty() {
        body.field("tool_calls", &format!("[{}]", item.calls.join(",")));
    }
    item.answers.iter().for_each(|id| body.field("tool_call_id", id.get()));
    body.finish()
}

/// Adds an item of a conversation. A call is added to the assistant's message before it, and reasoning to the
/// message after it.
fn add_item<'a>(
    place: &str,
    raw: &'a RawValue,
    items: &mut Vec<ChatItem<'a>>,
    reasoning: &mut Option<String>,
) -> Result<(), ApiError> {
    let mut fields = Fields::within(raw)?.ok_or_else(|| wrong_type(place, "an object", raw))?;
    let kind = fields.string("type").map_err(|error| error.within(place))?;
    for name in ["id", "status"] {
        fields.take(name);
    }
    let missing = |name: &str| {
        let message = format!("'{place}.{name}' is missing");
        ApiError::field(format!("{place}.{name}"), "missing_parameter", message)
    };
    match kind.as_deref() {
        None | Some("message") => {
            let role = fields.string("role").map_err(|error| error.within(place))?;
            let role = match role.as_deref() {
                Some("system" | "developer") => "system",
                Some("user") => "user",
                Some("assistant") => "assistant",
                Some(_) => {
                    let message = "a role is one of system, developer, user and assistant";
                    return Err(ApiError::value(format!("{place}.role"), message));
                }
                None => return Err(missing("role")),
            };
            let content = Some(fields.take("content").ok_or_else(|| missing("content"))?);
            let reasoning = reasoning.take_if(|_| role == "assistant");
            // Codex sends this; it has no effect
            fields.take("phase");
            items.push(ChatItem { role, content, reasoning, ..ChatItem::default() });
        }
        Some("function_call") => {
            let mut part = |name: &str| fields.take(name).ok_or_else(|| missing(name));
            let (call_id, name, arguments) = (part("call_id")?, part("name")?, part("arguments")?);
            let (call_id, name, arguments) = (call_id.get(), name.get(), arguments.get());
            let call = format!(
                "{{\"id\":{call_id},\"type\":\"function\",\"function\":{{\"name\":{name},\"arguments\":{arguments}}}}}"
            );
            if items.last().is_none_or(|last| last.role != "assistant") || reasoning.is_some() {
                let reasoning = reasoning.take();
                items.push(ChatItem { role: "assistant", reasoning, ..ChatItem::default() });
            }
            items.last_mut().into_iter().for_each(|last| last.calls.push(call.clone()));
        }
        Some("function_call_output") => {
            let mut part = |name: &str| fields.take(name).ok_or_else(|| missing(name));
            let (answers, content) = (Some(part("call_id")?), Some(part("output")?));
            items.push(ChatItem { role: "tool", content, answers, ..ChatItem::default() });
        }
        Some("reasoning") => {
            // a summary is not the model's own reasoning
            fields.take("summary");
            if let Some(parts) = fields.take("content") {
                *reasoning = Some(thought(place, parts)?);
            }
        }
        Some(other) => {
            let other: String = other.chars().take(32).collect();
            return Err(ApiError::unsupported(
                &format!("{place}.type"),
                &format!("{other:?} is not a supported item"),
            ));
        }
    }
    refuse_rest(place, &fields)
}

/// Returns the text of a reasoning item.
fn thought(place: &str, raw: &RawValue) -> Result<String, ApiError> {
    let place = format!("{place}.content");
    let mut said = String::new();
    let take = |part: &RawValue| {
        let mut fields =
            Fields::within(part)?.ok_or_else(|| wrong_type(&place, "an array of parts", part))?;
        match (fields.string("type")?.as_deref(), fields.take("text")) {
            (Some("reasoning_text"), Some(raw)) => {
                let part = text(&place, raw)?.ok_or_else(|| wrong_type(&place, "text", raw))?;
                said.push_str(&part);
                Ok(())
            }
            _ => Err(ApiError::value(&*place, format!("'{place}' has parts that are no \"reasoning_text\""))),
        }
    };
    each(raw, take).ok_or_else(|| wrong_type(&place, "an array", raw))??;
    Ok(said)
}
