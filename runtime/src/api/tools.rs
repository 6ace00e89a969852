//! Tools that a model may call: what of a request concerns them, and the calls in what the model writes.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::errors::ApiError;
use super::fields::{Fields, wrong_type};
use super::stop::overlap;
use crate::grammar::Grammar;
use crate::model::ToolStyle;

/// Maximum number of tools; OpenAI's.
const TOOLS_MAX: usize = 128;
/// Maximum length of all tools, and of all calls in earlier messages: parsed they take up to 30 times as
/// much memory.
const TOOLS_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a tool's name; OpenAI's.
const NAME_BYTES_MAX: usize = 64;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// Whether tools must be called.
#[derive(Clone, Debug, PartialEq)]
enum ToolChoice {
    /// The model decides.
    Auto,
    /// At least one must be.
    Required,
    /// This one must be.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tools {
    /// The client's array, for the template.
    pub(crate) given: Value,
    /// Each function's name and the JSON schema of its arguments.
    functions: Vec<(String, Value)>,
    choice: ToolChoice,
    /// Whether an answer may have several calls.
    parallel: bool,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`; none if no tool may be called.
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Option<Self>, ApiError> {
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let choice = fields.take("tool_choice").map(choice).transpose()?;
        let Some(raw) = fields.take("tools") else {
            return match choice {
                None | Some(None | Some(ToolChoice::Auto)) => Ok(None),
                Some(_) => Err(ApiError::value(
                    "tool_choice",
                    "'tool_choice' asks for tools, and there are no 'tools'",
                )),
            };
        };
        if raw.get().len() > TOOLS_BYTES_MAX {
            let message = format!("'tools' is larger than {TOOLS_BYTES_MAX} bytes");
            return Err(ApiError::value("tools", message));
        }
        let given: Value = serde_json::from_str(raw.get())
            .map_err(|error| ApiError::value("tools", format!("'tools' cannot be read: {error}")))?;
        let tools = given.as_array().ok_or_else(|| wrong_type("tools", "an array", raw))?;
        if tools.len() > TOOLS_MAX {
            let message = format!("'tools' has {} tools; at most {TOOLS_MAX} are taken", tools.len());
            return Err(ApiError::value("tools", message));
        }
        let functions: Vec<_> =
            tools.iter().enumerate().map(|(at, tool)| function(at, tool)).collect::<Result<_, _>>()?;
        let choice = choice.unwrap_or(Some(ToolChoice::Auto));
        let Some(choice) = choice.filter(|_| !functions.is_empty()) else { return Ok(None) };
        if let ToolChoice::Named(name) = &choice
            && !functions.iter().any(|(known, _)| known == name)
        {
            let message = format!("'tool_choice' names {name:?}, which is none of the 'tools'");
            return Err(ApiError::value("tool_choice", message));
        }
        Ok(Some(Tools { given, functions, choice, parallel }))
    }

    /// What an answer must be so that it calls what it must; none if it need not call anything.
    pub(crate) fn grammar(&self, style: ToolStyle) -> Option<Grammar> {
        let named = |name: &str| matches!(&self.choice, ToolChoice::Named(wanted) if wanted == name);
        let may = |name: &str| self.choice == ToolChoice::Required || named(name);
        let called: Vec<_> = self.functions.iter().filter(|(name, _)| may(name)).collect();
        if called.is_empty() {
            return None;
        }
        let arguments = style.arguments();
        let call = |(name, schema): &&(String, Value)| {
            json!({"type": "object", "properties": {"name": {"const": name}, arguments: schema},
                "required": ["name", arguments], "additionalProperties": false})
        };
        let names: Vec<String> = (0..called.len()).map(|at| format!("call_{at}")).collect();
        let rules: String =
            called.iter().zip(&names).map(|(tool, name)| format!("{name}: %json {}\n", call(tool))).collect();
        let any = names.join(" | ");
        let several = self.parallel && self.choice == ToolChoice::Required;
        let start = match (style, several) {
            (ToolStyle::Tagged, true) => "call (\"\\n\" call)*",
            (ToolStyle::Bare { .. }, true) => "call (\";\" call)*",
            (_, false) => "call",
        };
        let call = match style {
            ToolStyle::Tagged => format!("\"{CALL}\\n\" any \"\\n{CALL_END}\""),
            ToolStyle::Bare { .. } => "any".into(),
        };
        Some(Grammar::Lark(format!("start: {start}\ncall: {call}\nany: {any}\n{rules}").into()))
    }

    /// Reads the calls of one answer.
    pub(crate) fn reader(&self, style: ToolStyle) -> ToolReader {
        let known = self.functions.iter().map(|(name, _)| name.clone()).collect();
        ToolReader {
            style,
            known,
            parallel: self.parallel,
            held: String::new(),
            blank: String::new(),
            calls: 0,
            any_text: false,
        }
    }
}

fn choice(raw: &RawValue) -> Result<Option<ToolChoice>, ApiError> {
    let value = super::fields::value("tool_choice", raw)?;
    match (value.as_str(), value["function"]["name"].as_str()) {
        (Some("none"), _) => Ok(None),
        (Some("auto"), _) => Ok(Some(ToolChoice::Auto)),
        (Some("required"), _) => Ok(Some(ToolChoice::Required)),
        (None, Some(name)) if value["type"] == "function" => Ok(Some(ToolChoice::Named(name.into()))),
        _ => {
            let message = "'tool_choice' is \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": \
                           {\"name\": ..}}";
            Err(ApiError::value("tool_choice", message))
        }
    }
}

/// The name of a tool and the schema of its arguments.
fn function(at: usize, tool: &Value) -> Result<(String, Value), ApiError> {
    let wrong = |what: &str| ApiError::value(format!("tools[{at}]"), format!("'tools[{at}]' {what}"));
    if tool["type"] != "function" {
        return Err(wrong("is no tool of the type \"function\", the only type there is"));
    }
    let function = &tool["function"];
    let name = function["name"].as_str().ok_or_else(|| wrong("has no 'function.name', a string"))?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
        let what =
            format!("has a name that is not of 1 to {NAME_BYTES_MAX} letters, digits, '_', '-' and '.'");
        return Err(wrong(&what));
    }
    let schema = match &function["parameters"] {
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        schema @ Value::Object(_) => schema.clone(),
        _ => return Err(wrong("has 'function.parameters' that are no JSON schema")),
    };
    Ok((name.to_owned(), schema))
}

/// Reads the calls of an earlier message, for the template: their arguments, JSON in a string, as JSON.
/// `bytes` counts those of all messages.
pub(super) fn past_calls(name: &str, raw: &RawValue, bytes: &mut usize) -> Result<Vec<Value>, ApiError> {
    let wrong = |what: String| ApiError::value(name, format!("'{name}': {what}"));
    *bytes += raw.get().len();
    if *bytes > TOOLS_BYTES_MAX {
        return Err(wrong(format!("the calls of all messages are larger than {TOOLS_BYTES_MAX} bytes")));
    }
    let mut calls: Vec<Value> = match serde_json::from_str(raw.get()) {
        Ok(Value::Array(calls)) => calls,
        Ok(_) => return Err(wrong_type(name, "an array", raw)),
        Err(error) => return Err(wrong(error.to_string())),
    };
    if calls.len() > TOOLS_MAX {
        return Err(wrong(format!("{} calls; at most {TOOLS_MAX} are taken", calls.len())));
    }
    for call in &mut calls {
        if !call["function"]["name"].is_string() {
            return Err(wrong("a call has no 'function.name', a string".into()));
        }
        let arguments = &mut call["function"]["arguments"];
        if let Some(text) = arguments.as_str() {
            let read = serde_json::from_str(text);
            *arguments = read.map_err(|error| wrong(format!("arguments are not JSON: {error}")))?;
        }
    }
    Ok(calls)
}

/// A call of a tool, as a client gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ToolCall {
    pub(crate) name: String,
    /// JSON.
    pub(crate) arguments: String,
}

/// What a piece of an answer turns out to be.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ToolPieces {
    /// Text that belongs to no call.
    pub(crate) text: String,
    pub(crate) calls: Vec<ToolCall>,
    /// Whether the answer ends here, since it may have no further call.
    pub(crate) ended: bool,
}

/// Finds the calls in the text of an answer. What only looks like a call stays text.
#[derive(Debug)]
pub(crate) struct ToolReader {
    style: ToolStyle,
    known: Vec<String>,
    parallel: bool,
    /// Text that may be a call, or the beginning of one.
    held: String,
    /// White space that may be followed by a call.
    blank: String,
    calls: usize,
    any_text: bool,
}

impl ToolReader {
    /// Number of calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, piece: &str) -> ToolPieces {
        self.held.push_str(piece);
        let mut pieces = ToolPieces::default();
        match self.style {
            ToolStyle::Tagged => self.read_tagged(&mut pieces),
            // such an answer is all calls or all text, which its first character tells
            ToolStyle::Bare { .. } => {
                let begins_call =
                    self.held.trim_start().chars().next().is_none_or(|first| "{[".contains(first));
                if self.any_text || !begins_call {
                    self.any_text = true;
                    pieces.text = std::mem::take(&mut self.held);
                }
            }
        }
        pieces
    }

    fn read_tagged(&mut self, pieces: &mut ToolPieces) {
        loop {
            let Some(start) = self.held.find(CALL) else {
                let held = overlap(&self.held, CALL);
                let rest = self.held.split_off(self.held.len() - held);
                let text = std::mem::replace(&mut self.held, rest);
                self.add_text(&text, pieces);
                return;
            };
            let Some(length) = self.held[start..].find(CALL_END) else {
                let rest = self.held.split_off(start);
                let text = std::mem::replace(&mut self.held, rest);
                self.add_text(&text, pieces);
                return;
            };
            let end = start + length + CALL_END.len();
            let before = self.held[..start].to_owned();
            self.add_text(&before, pieces);
            let inner = &self.held[start + CALL.len()..start + length];
            match self.call(inner) {
                Some(call) => {
                    self.blank.clear();
                    self.calls += 1;
                    pieces.calls.push(call);
                }
                None => {
                    let text = self.held[start..end].to_owned();
                    self.add_text(&text, pieces);
                }
            }
            self.held.drain(..end);
            if !self.parallel && self.calls > 0 {
                self.held.clear();
                pieces.ended = true;
                return;
            }
        }
    }

    /// White space before and between calls is no text, which only what follows tells.
    fn add_text(&mut self, text: &str, pieces: &mut ToolPieces) {
        self.blank.push_str(text);
        if !text.trim().is_empty() || self.any_text && self.calls == 0 {
            self.any_text = true;
            pieces.text.push_str(&std::mem::take(&mut self.blank));
        }
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self) -> ToolPieces {
        let held = std::mem::take(&mut self.held);
        if let ToolStyle::Bare { .. } = self.style
            && let Some(calls) = self.bare(&held)
        {
            self.calls += calls.len();
            return ToolPieces { calls, ..ToolPieces::default() };
        }
        let mut pieces = ToolPieces::default();
        self.add_text(&held, &mut pieces);
        if self.calls == 0 {
            pieces.text.push_str(&std::mem::take(&mut self.blank));
        }
        pieces
    }

    /// The calls of an answer that is nothing else: an array of them, or one behind the other.
    fn bare(&self, text: &str) -> Option<Vec<ToolCall>> {
        let text = text.trim();
        if text.is_empty() {
            return None;
        }
        if let Ok(several) = serde_json::from_str::<Vec<CallText<'_>>>(text) {
            let calls = several.iter().map(|call| self.call_of(call)).collect::<Option<Vec<_>>>();
            return calls.filter(|calls| !calls.is_empty());
        }
        let mut calls = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<CallText<'_>>();
            calls.push(self.call_of(&values.next()?.ok()?)?);
            rest = rest[values.byte_offset()..].trim_start().trim_start_matches(';').trim_start();
        }
        calls.truncate(if self.parallel { calls.len() } else { 1 });
        Some(calls)
    }

    fn call(&self, text: &str) -> Option<ToolCall> {
        self.call_of(&serde_json::from_str(text.trim()).ok()?)
    }

    fn call_of(&self, call: &CallText<'_>) -> Option<ToolCall> {
        let name = self.known.iter().find(|known| **known == call.name)?.clone();
        let arguments = call.arguments.or(call.parameters).map_or("{}", RawValue::get);
        arguments.starts_with('{').then(|| ToolCall { name, arguments: arguments.to_owned() })
    }
}

/// A call as a model writes it. Its arguments stay as they are written.
#[derive(Deserialize)]
struct CallText<'a> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;
