//! The calls between the marks of each style.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

use super::gemma_calls;
use super::python_calls;
use super::tool_schema::typed;
use super::tools::ToolCall;
use crate::model::ToolStyle;

/// The meaning of a text between marks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadCalls {
    Calls(Vec<ToolCall>),
    /// The beginning of calls, which may become complete.
    Incomplete,
    /// Not a call.
    Other,
}

impl ReadCalls {
    fn of(calls: Option<Vec<ToolCall>>) -> Self {
        calls.filter(|calls| !calls.is_empty()).map_or(ReadCalls::Other, ReadCalls::Calls)
    }
}

/// A function that may be called: its name, and the JSON schema of its arguments.
pub(super) type CalledFunction = (String, Value);

/// Reads the calls of functions in `text`.
pub(super) fn read(style: ToolStyle, text: &str, functions: &[CalledFunction]) -> ReadCalls {
    match style {
        ToolStyle::Tagged | ToolStyle::Bare { .. } | ToolStyle::Listed(_) => json_calls(text, functions),
        ToolStyle::Named => named_calls(text, functions),
        ToolStyle::NamedObjects => named_objects(text, functions),
        ToolStyle::Gemma => gemma_calls::read(text, functions),
        // parsed incrementally, in `harmony`
        ToolStyle::Harmony => ReadCalls::Other,
        ToolStyle::JsonInTag => match text.split_once('>') {
            Some((name, arguments)) if !arguments.trim().is_empty() => {
                object_call(name, arguments, functions)
            }
            _ => ReadCalls::Incomplete,
        },
        ToolStyle::Pythonic { .. } => ReadCalls::of(python_calls::calls(text, functions)),
        ToolStyle::KeysAndValues => keys_and_values(text, functions),
        ToolStyle::FunctionTags { .. } => {
            let tags = Tags { begin: "<function=", name_end: ">", end: "</function>" };
            let inner = Tags { begin: "<parameter=", name_end: ">", end: "</parameter>" };
            tagged(text, functions, &tags, &inner)
        }
        ToolStyle::Invoked => {
            let tags = Tags { begin: "<invoke name=\"", name_end: "\">", end: "</invoke>" };
            let inner = Tags { begin: "<parameter name=\"", name_end: "\">", end: "</parameter>" };
            tagged(text, functions, &tags, &inner)
        }
        ToolStyle::InvokedDsml { .. } => {
            let tags =
                Tags { begin: "<｜DSML｜invoke name=\"", name_end: "\">", end: "</｜DSML｜invoke>" };
            let inner =
                Tags { begin: "<｜DSML｜parameter name=\"", name_end: ">", end: "</｜DSML｜parameter>" };
            tagged(text, functions, &tags, &inner)
        }
        ToolStyle::DeepSeek { fenced } => deep_seek(text, fenced, functions),
        ToolStyle::Kimi => {
            let Some((id, arguments)) = text.split_once("<|tool_call_argument_begin|>") else {
                return ReadCalls::Incomplete;
            };
            let id = id.trim();
            let name = id.rsplit_once(':').map_or(id, |(name, _)| name);
            object_call(name.strip_prefix("functions.").unwrap_or(name), arguments, functions)
        }
    }
}

pub(super) fn known<'a>(name: &str, functions: &'a [CalledFunction]) -> Option<&'a CalledFunction> {
    functions.iter().find(|(known, _)| known == name)
}

/// A call as a model writes it. The arguments keep their text.
#[derive(Deserialize)]
struct CallText<'a> {
    #[serde(alias = "tool_name")]
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

/// One or more JSON objects with a name and arguments, or arrays of them.
fn json_calls(text: &str, functions: &[CalledFunction]) -> ReadCalls {
    let mut rest = text.trim_start();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<&RawValue>();
        let value = match values.next() {
            Some(Ok(value)) => value,
            Some(Err(error)) if error.is_eof() => return ReadCalls::Incomplete,
            _ => return ReadCalls::Other,
        };
        let several = match value.get().starts_with('[') {
            true => serde_json::from_str::<Vec<CallText<'_>>>(value.get()),
            false => serde_json::from_str::<CallText<'_>>(value.get()).map(|call| vec![call]),
        };
        let Ok(several) = several else { return ReadCalls::Other };
        for call in several {
            let Some(call) = json_call(&call, functions) else { return ReadCalls::Other };
            calls.push(call);
        }
        rest = rest[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix([';', ',']).unwrap_or(rest).trim_start();
    }
    ReadCalls::of(Some(calls))
}

/// A list of objects whose only key is the name of a function.
fn named_objects(text: &str, functions: &[CalledFunction]) -> ReadCalls {
    let list = match serde_json::from_str::<Vec<BTreeMap<String, &RawValue>>>(text) {
        Ok(list) => list,
        Err(error) if error.is_eof() => return ReadCalls::Incomplete,
        Err(_) => return ReadCalls::Other,
    };
    let calls = list.into_iter().map(|object| {
        let (name, arguments) = object.iter().next().filter(|_| object.len() == 1)?;
        let is_object = arguments.get().starts_with('{') && known(name, functions).is_some();
        is_object.then(|| ToolCall { name: name.clone(), arguments: arguments.get().to_owned() })
    });
    ReadCalls::of(calls.collect())
}

fn json_call(call: &CallText<'_>, functions: &[CalledFunction]) -> Option<ToolCall> {
    let (name, _) = known(&call.name, functions)?;
    let raw = call.arguments.or(call.parameters).map_or("{}", RawValue::get);
    let arguments = match raw.starts_with('"') {
        // some models write them as a string
        true => serde_json::from_str::<String>(raw).ok().filter(|text| object(text).is_ok())?,
        false => raw.to_owned(),
    };
    arguments.starts_with('{').then(|| ToolCall { name: name.clone(), arguments })
}

/// Checks that a text is a JSON object. Numbers may exceed every machine type.
fn object(text: &str) -> serde_json::Result<()> {
    serde_json::from_str::<BTreeMap<String, &RawValue>>(text).map(drop)
}

/// A call with a JSON object as its arguments.
fn object_call(name: &str, arguments: &str, functions: &[CalledFunction]) -> ReadCalls {
    let arguments = arguments.trim();
    let Some((name, _)) = known(name.trim(), functions) else { return ReadCalls::Other };
    match object(arguments) {
        Ok(()) => ReadCalls::Calls(vec![ToolCall { name: name.clone(), arguments: arguments.to_owned() }]),
        Err(error) if error.is_eof() && !arguments.is_empty() => ReadCalls::Incomplete,
        Err(_) if arguments.is_empty() => {
            ReadCalls::Calls(vec![ToolCall { name: name.clone(), arguments: "{}".into() }])
        }
        Err(_) => ReadCalls::Other,
    }
}

/// `name[ARGS]{..}`, several with `[TOOL_CALLS]` between them.
fn named_calls(text: &str, functions: &[CalledFunction]) -> ReadCalls {
    let mut rest = text.trim();
    if rest.starts_with('[') {
        return json_calls(text, functions);
    }
    let mut calls = Vec::new();
    loop {
        let Some((head, behind)) = rest.find('{').map(|at| rest.split_at(at)) else {
            return ReadCalls::Incomplete;
        };
        let name = head.trim().strip_suffix("[ARGS]").unwrap_or(head);
        let name = name.split_once("[CALL_ID]").map_or(name, |(name, _)| name);
        let end = match first_value(behind) {
            Ok(end) => end,
            Err(other) => return other,
        };
        match object_call(name, &behind[..end], functions) {
            ReadCalls::Calls(more) => calls.extend(more),
            other => return other,
        }
        rest = behind[end..].trim_start();
        if rest.is_empty() {
            return ReadCalls::of(Some(calls));
        }
        let Some(next) = rest.strip_prefix("[TOOL_CALLS]") else { return ReadCalls::Other };
        rest = next;
    }
}

/// Length of the JSON value at the beginning of `text`.
fn first_value(text: &str) -> Result<usize, ReadCalls> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    match values.next() {
        Some(Ok(_)) => Ok(values.byte_offset()),
        Some(Err(error)) if !error.is_eof() => Err(ReadCalls::Other),
        _ => Err(ReadCalls::Incomplete),
    }
}

/// Length of the JSON values at the beginning of `text`, with the signs between them.
pub(super) fn leading_values(text: &str) -> usize {
    let is_between = |sign: char| sign.is_whitespace() || matches!(sign, ';' | ',');
    let mut end = 0;
    loop {
        let rest = text[end..].trim_start_matches(is_between);
        let from = text.len() - rest.len();
        match first_value(rest) {
            Ok(length) if rest.starts_with(['{', '[']) => end = from + length,
            _ => return end,
        }
    }
}

fn deep_seek(text: &str, fenced: bool, functions: &[CalledFunction]) -> ReadCalls {
    let Some((head, rest)) = text.split_once("<｜tool▁sep｜>") else { return ReadCalls::Incomplete };
    // the older form: function, name, arguments in a block
    let fence = "```";
    let Some(start) = rest.find(fence).filter(|_| fenced || head.trim() == "function") else {
        return object_call(head, rest, functions);
    };
    let block = rest[start + fence.len()..].strip_prefix("json").unwrap_or(&rest[start + fence.len()..]);
    let Some(end) = block.rfind(fence) else { return ReadCalls::Incomplete };
    object_call(&rest[..start], &block[..end], functions)
}

/// Arguments of a call as JSON texts; the last of several values of a name counts.
#[derive(Default)]
struct ArgumentTexts(Vec<(String, String)>);

impl ArgumentTexts {
    fn insert(&mut self, key: &str, json: String) {
        self.0.retain(|(known, _)| known != key);
        self.0.push((key.to_owned(), json));
    }

    fn object(&self) -> String {
        let fields = self.0.iter().map(|(key, json)| format!("{}:{json}", Value::from(key.as_str())));
        format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
    }
}

/// GLM's calls: a name, then keys and values in turn.
fn keys_and_values(text: &str, functions: &[CalledFunction]) -> ReadCalls {
    let (name, mut rest) = text.split_at(text.find("<arg_key>").unwrap_or(text.len()));
    let Some((name, schema)) = known(name.trim(), functions) else { return ReadCalls::Other };
    let mut arguments = ArgumentTexts::default();
    while let Some(begun) = rest.trim_start().strip_prefix("<arg_key>") {
        let Some((key, behind)) = begun.split_once("</arg_key>") else { return ReadCalls::Incomplete };
        let Some(behind) = behind.trim_start().strip_prefix("<arg_value>") else {
            return ReadCalls::Incomplete;
        };
        let Some(end) = end_of_value(behind, "</arg_value>", &["<arg_key>"]) else {
            return ReadCalls::Incomplete;
        };
        let key = key.trim();
        arguments.insert(key, typed(schema, key, &behind[..end]));
        rest = &behind[end + "</arg_value>".len()..];
    }
    match rest.trim().is_empty() {
        true => ReadCalls::Calls(vec![ToolCall { name: name.clone(), arguments: arguments.object() }]),
        false => ReadCalls::Other,
    }
}

/// End of a value: the first closing tag that is followed by nothing or by one of `next`, since a value may
/// contain the closing tag.
fn end_of_value(text: &str, close: &str, next: &[&str]) -> Option<usize> {
    let mut first = None;
    for (at, _) in text.match_indices(close) {
        let behind = text[at + close.len()..].trim_start();
        if behind.is_empty() || next.iter().any(|next| behind.starts_with(next)) {
            return Some(at);
        }
        first = first.or(Some(at));
    }
    first
}

/// The parts of a tag.
struct Tags {
    begin: &'static str,
    /// Text that ends the name.
    name_end: &'static str,
    end: &'static str,
}

/// Functions and parameters as tags.
fn tagged(text: &str, functions: &[CalledFunction], tags: &Tags, inner: &Tags) -> ReadCalls {
    let (mut rest, mut calls) = (text.trim_start(), Vec::new());
    while let Some(begun) = rest.strip_prefix(tags.begin) {
        let Some((name, behind)) = begun.split_once(tags.name_end) else { return ReadCalls::Incomplete };
        let Some((name, schema)) = known(name.trim_matches(['"', ' ']), functions) else {
            return ReadCalls::Other;
        };
        let mut arguments = ArgumentTexts::default();
        rest = behind.trim_start();
        while let Some(begun) = rest.strip_prefix(inner.begin) {
            let Some((key, behind)) = begun.split_once(inner.name_end) else { return ReadCalls::Incomplete };
            let Some(end) = end_of_value(behind, inner.end, &[inner.begin, tags.end]) else {
                return ReadCalls::Incomplete;
            };
            // DeepSeek marks whether the value is a string
            let (key, is_text) = match key.split_once("\" string=\"") {
                Some((key, is_text)) => (key, Some(is_text.starts_with("true"))),
                None => (key.trim_matches('"'), None),
            };
            let value = &behind[..end];
            let value = match is_text {
                Some(false) if serde_json::from_str::<&RawValue>(value).is_ok() => value.trim().to_owned(),
                Some(_) => Value::from(value).to_string(),
                None => {
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    typed(schema, key, value.strip_suffix('\n').unwrap_or(value))
                }
            };
            arguments.insert(key, value);
            rest = behind[end + inner.end.len()..].trim_start();
        }
        let Some(behind) = rest.strip_prefix(tags.end) else {
            return if rest.is_empty() || tags.end.starts_with(rest) || rest.starts_with('<') {
                ReadCalls::Incomplete
            } else {
                ReadCalls::Other
            };
        };
        calls.push(ToolCall { name: name.clone(), arguments: arguments.object() });
        rest = behind.trim_start();
    }
    match rest.is_empty() {
        true if calls.is_empty() => ReadCalls::Incomplete,
        true => ReadCalls::Calls(calls),
        false if calls.is_empty() && tags.begin.starts_with(rest) => ReadCalls::Incomplete,
        false => ReadCalls::Other,
    }
}
