//! Tools that a model may call: the request fields about tools, and the calls in the answer.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::errors::ApiError;
use super::fields::{Fields, wrong_type};
use super::python_calls;
use super::tool_bodies::CalledFunction;
use super::tool_grammar;
use super::tool_reader::ToolReader;
use super::tool_schema::of_objects;
use crate::grammar::{Grammar, without_annotations};
use crate::model::ToolStyle;

/// Maximum number of tools; OpenAI's.
const TOOLS_MAX: usize = 128;
/// Maximum length of all tools, and of all calls in earlier messages: parsed they take up to 30 times as
/// much memory.
const TOOLS_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a tool's name; OpenAI's.
const NAME_BYTES_MAX: usize = 64;
/// Maximum number of positions at which truncated arguments are tried to be closed.
const ENDS_MAX: usize = 16;

/// Whether tools must be called.
#[derive(Clone, Debug, PartialEq)]
enum ToolChoice {
    /// The model decides.
    Auto,
    /// At least one call is required.
    Required,
    /// A call of this function is required.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tools {
    /// The client's array, for the template.
    pub(crate) given: Value,
    /// Each function's name and the JSON schema of its arguments.
    functions: Vec<CalledFunction>,
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
                Some(_) => Err(ApiError::value("tool_choice", "'tool_choice' needs 'tools'")),
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
        let Some(choice) = choice.unwrap_or(Some(ToolChoice::Auto)) else { return Ok(None) };
        if functions.is_empty() {
            return match choice {
                ToolChoice::Auto => Ok(None),
                _ => Err(ApiError::value("tool_choice", "'tool_choice' needs 'tools'")),
            };
        }
        if let ToolChoice::Named(name) = &choice
            && !functions.iter().any(|(known, _)| known == name)
        {
            let message = format!("'tool_choice' names {name:?}, which is not in 'tools'");
            return Err(ApiError::value("tool_choice", message));
        }
        Ok(Some(Tools { given, functions, choice, parallel }))
    }

    /// Returns the grammar of an answer with forced calls, or of a call that has begun, if the style has one.
    /// `is_special` says whether a mark is a token of its own.
    pub(crate) fn grammar(&self, style: ToolStyle, is_special: &dyn Fn(&str) -> bool) -> Option<Grammar> {
        let named = |name: &str| matches!(&self.choice, ToolChoice::Named(wanted) if wanted == name);
        let may = |name: &str| self.choice == ToolChoice::Required || named(name);
        if self.choice == ToolChoice::Auto {
            let called: Vec<&CalledFunction> = self.functions.iter().collect();
            return tool_grammar::begun_calls(style, &called, self.parallel, is_special);
        }
        let called: Vec<&CalledFunction> = self.functions.iter().filter(|(name, _)| may(name)).collect();
        // an end token follows each call of gpt-oss
        let several = self.parallel && self.choice == ToolChoice::Required && style != ToolStyle::Harmony;
        Some(Grammar::Lark(tool_grammar::calls(style, &called, several, is_special).into()))
    }

    /// Whether the model decides.
    pub(crate) fn is_auto(&self) -> bool {
        self.choice == ToolChoice::Auto
    }

    /// Creates the reader for the calls of one answer; in pieces where it is streamed.
    pub(crate) fn reader(&self, style: ToolStyle, streams: bool) -> ToolReader {
        ToolReader::new(style, self.functions.clone(), self.parallel, streams)
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
        return Err(wrong("is not a tool of the type \"function\", the only type there is"));
    }
    let function = &tool["function"];
    let name = function["name"].as_str().ok_or_else(|| wrong("has no 'function.name', a string"))?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
        let what = format!("needs a name of 1 to {NAME_BYTES_MAX} letters, digits, '_', '-' and '.'");
        return Err(wrong(&what));
    }
    let schema = match &function["parameters"] {
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        schema @ Value::Object(_) => schema.clone(),
        _ => return Err(wrong("has 'function.parameters' that are not a JSON schema")),
    };
    let schema = of_objects(&schema).ok_or_else(|| wrong("has 'function.parameters' that no object fits"))?;
    Ok((name.to_owned(), without_annotations(schema)))
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
        *arguments = past_arguments(arguments.take());
    }
    Ok(calls)
}

/// The arguments of a past call as a template sees them: truncated ones are completed, and empty ones are an
/// empty object.
fn past_arguments(given: Value) -> Value {
    let empty = || Value::Object(serde_json::Map::new());
    match given {
        Value::Null => empty(),
        Value::String(text) if text.trim().is_empty() => empty(),
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Null) => empty(),
            Ok(arguments) => arguments,
            Err(_) => leading(&text).or_else(|| completed(&text)).unwrap_or_else(empty),
        },
        arguments => arguments,
    }
}

/// An object that other text follows, or one in Python's syntax.
fn leading(text: &str) -> Option<Value> {
    let first = serde_json::Deserializer::from_str(text).into_iter::<Value>().next();
    first.and_then(Result::ok).or_else(|| python_calls::value(text)).filter(Value::is_object)
}

/// A truncated object, with every complete part.
fn completed(text: &str) -> Option<Value> {
    let (mut open, mut in_text, mut escaped) = (Vec::new(), false, false);
    // positions at which the text could be closed, and the closing text
    let mut ends: Vec<(usize, String)> = Vec::new();
    let closing = |open: &[char]| open.iter().rev().collect::<String>();
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' if in_text => escaped = true,
            '"' => in_text = !in_text,
            _ if in_text => {}
            '{' => open.push('}'),
            '[' => open.push(']'),
            '}' | ']' => drop(open.pop()),
            ',' => ends.push((at, closing(&open))),
            _ => {}
        }
        if ends.len() > ENDS_MAX {
            ends.remove(0);
        }
        if matches!(letter, '{' | '[') && !in_text {
            ends.push((at + 1, closing(&open)));
        }
    }
    let whole = text.trim_end_matches(if escaped { '\\' } else { '\0' });
    ends.push((whole.len(), format!("{}{}", if in_text { "\"" } else { "" }, closing(&open))));
    let closed = |(end, closing): &(usize, String)| {
        let value = serde_json::from_str::<Value>(&format!("{}{closing}", &whole[..*end])).ok()?;
        value.is_object().then_some(value)
    };
    ends.iter().rev().find_map(closed)
}

/// A call of a tool, as a client gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ToolCall {
    pub(crate) name: String,
    /// JSON.
    pub(crate) arguments: String,
}

/// A part of a call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallPiece {
    /// The call's number in its answer.
    pub(crate) index: usize,
    /// The name of the function, in the first part of a call.
    pub(crate) name: Option<String>,
    /// Further JSON of the arguments.
    pub(crate) arguments: String,
}

impl CallPiece {
    /// Adds a piece to the calls of its answer so far.
    pub(crate) fn add_to(self, calls: &mut Vec<ToolCall>) {
        match self.name {
            Some(name) => calls.push(ToolCall { name, arguments: self.arguments }),
            None => calls.get_mut(self.index).into_iter().for_each(|call| call.arguments += &self.arguments),
        }
    }
}

/// The meaning of a piece of an answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ToolPieces {
    /// Text outside of calls.
    pub(crate) text: String,
    /// Reasoning of the model, where its format separates reasoning from the answer.
    pub(crate) thought: String,
    pub(crate) calls: Vec<CallPiece>,
    /// Whether the answer ends here, since no further call is allowed.
    pub(crate) ended: bool,
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "published_tests.rs"]
mod published_tests;
