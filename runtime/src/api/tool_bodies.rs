//! The calls between the marks of each style.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

use super::gemma_calls;
use super::tool_schema::typed;
use super::tools::ToolCall;
use crate::model::ToolStyle;

/// Maximum nesting of a Python value.
const DEPTH_MAX: usize = 64;

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
        ToolStyle::Pythonic { .. } => ReadCalls::of(PythonText { text, at: 0 }.calls(functions)),
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

fn known<'a>(name: &str, functions: &'a [CalledFunction]) -> Option<&'a CalledFunction> {
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
    if text.trim_start().starts_with('[') {
        return json_calls(text, functions);
    }
    let mut calls = Vec::new();
    for part in text.split("[TOOL_CALLS]") {
        let Some((name, arguments)) =
            part.split_once("[ARGS]").or_else(|| part.find('{').map(|at| part.split_at(at)))
        else {
            return ReadCalls::Incomplete;
        };
        if arguments.trim().is_empty() {
            return ReadCalls::Incomplete;
        }
        let name = name.split_once("[CALL_ID]").map_or(name, |(name, _)| name);
        match object_call(name, arguments, functions) {
            ReadCalls::Calls(more) => calls.extend(more),
            other => return other,
        }
    }
    ReadCalls::of(Some(calls))
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

/// GLM's calls: a name, then keys and values in turn.
fn keys_and_values(text: &str, functions: &[CalledFunction]) -> ReadCalls {
    let (name, mut rest) = text.split_at(text.find("<arg_key>").unwrap_or(text.len()));
    let Some((name, schema)) = known(name.trim(), functions) else { return ReadCalls::Other };
    let mut arguments = Map::new();
    while let Some(begun) = rest.trim_start().strip_prefix("<arg_key>") {
        let Some((key, behind)) = begun.split_once("</arg_key>") else { return ReadCalls::Incomplete };
        let Some(behind) = behind.trim_start().strip_prefix("<arg_value>") else {
            return ReadCalls::Incomplete;
        };
        let Some(end) = end_of_value(behind, "</arg_value>", &["<arg_key>"]) else {
            return ReadCalls::Incomplete;
        };
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(schema, key, &behind[..end]));
        rest = &behind[end + "</arg_value>".len()..];
    }
    match rest.trim().is_empty() {
        true => ReadCalls::Calls(vec![ToolCall {
            name: name.clone(),
            arguments: Value::Object(arguments).to_string(),
        }]),
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
        let mut arguments = Map::new();
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
                Some(true) => Value::from(value),
                Some(false) => serde_json::from_str(value).unwrap_or_else(|_| Value::from(value)),
                None => {
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    typed(schema, key, value.strip_suffix('\n').unwrap_or(value))
                }
            };
            arguments.insert(key.to_owned(), value);
            rest = behind[end + inner.end.len()..].trim_start();
        }
        let Some(behind) = rest.strip_prefix(tags.end) else {
            return if rest.is_empty() || tags.end.starts_with(rest) || rest.starts_with('<') {
                ReadCalls::Incomplete
            } else {
                ReadCalls::Other
            };
        };
        calls.push(ToolCall { name: name.clone(), arguments: Value::Object(arguments).to_string() });
        rest = behind.trim_start();
    }
    match rest.is_empty() {
        true if calls.is_empty() => ReadCalls::Incomplete,
        true => ReadCalls::Calls(calls),
        false if calls.is_empty() && tags.begin.starts_with(rest) => ReadCalls::Incomplete,
        false => ReadCalls::Other,
    }
}

/// Calls in Python's syntax.
struct PythonText<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> PythonText<'a> {
    fn calls(mut self, functions: &[CalledFunction]) -> Option<Vec<ToolCall>> {
        let mut calls = Vec::new();
        let is_list = self.skip('[');
        loop {
            if is_list && self.skip(']') {
                break;
            }
            calls.push(self.call(functions)?);
            self.skip(',');
            if !is_list && self.rest().is_empty() {
                break;
            }
        }
        self.rest().is_empty().then_some(calls)
    }

    fn rest(&mut self) -> &'a str {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        &self.text[self.at..]
    }

    fn skip(&mut self, sign: char) -> bool {
        let found = self.rest().starts_with(sign);
        self.at += if found { sign.len_utf8() } else { 0 };
        found
    }

    fn name(&mut self) -> Option<String> {
        let is_part = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '.' | '-');
        let rest = self.rest();
        let name = rest[..rest.find(|letter| !is_part(letter)).unwrap_or(rest.len())].to_owned();
        self.at += name.len();
        Some(name).filter(|name| !name.is_empty())
    }

    fn call(&mut self, functions: &[CalledFunction]) -> Option<ToolCall> {
        let name = self.name()?;
        let (name, _) = known(&name, functions)?;
        if !self.skip('(') {
            return None;
        }
        let mut arguments = Map::new();
        while !self.skip(')') {
            let key = self.name()?;
            if !self.skip('=') {
                return None;
            }
            arguments.insert(key, self.value(0)?);
            if !self.skip(',') && !self.rest().starts_with(')') {
                return None;
            }
        }
        Some(ToolCall { name: name.clone(), arguments: Value::Object(arguments).to_string() })
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        match self.rest().chars().next()? {
            '\'' | '"' => self.string().map(Value::from),
            '[' => self.list(']', depth),
            '(' => self.list(')', depth),
            '{' => {
                self.skip('{');
                let mut map = Map::new();
                while !self.skip('}') {
                    let key = self.string()?;
                    if !self.skip(':') {
                        return None;
                    }
                    map.insert(key, self.value(depth + 1)?);
                    if !self.skip(',') && !self.rest().starts_with('}') {
                        return None;
                    }
                }
                Some(Value::Object(map))
            }
            letter if letter.is_ascii_digit() || letter == '-' || letter == '+' => {
                let rest = self.rest();
                let is_part = |letter: char| letter.is_ascii_alphanumeric() || "+-._".contains(letter);
                let number = rest[..rest.find(|letter| !is_part(letter)).unwrap_or(rest.len())].to_owned();
                self.at += number.len();
                serde_json::from_str(number.trim_start_matches('+')).ok()
            }
            _ => match self.name()?.as_str() {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn list(&mut self, close: char, depth: usize) -> Option<Value> {
        self.at += 1;
        let mut items = Vec::new();
        while !self.skip(close) {
            items.push(self.value(depth + 1)?);
            if !self.skip(',') && !self.rest().starts_with(close) {
                return None;
            }
        }
        Some(Value::Array(items))
    }

    fn string(&mut self) -> Option<String> {
        let rest = self.rest();
        let quote = rest.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
        let mut text = String::new();
        let mut letters = rest.char_indices().skip(1);
        while let Some((at, letter)) = letters.next() {
            match letter {
                _ if letter == quote => {
                    self.at += at + 1;
                    return Some(text);
                }
                '\\' => match letters.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'u' => {
                        let digits: String = letters.by_ref().take(4).map(|(_, digit)| digit).collect();
                        text.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                    }
                    letter @ ('\\' | '\'' | '"') => text.push(letter),
                    letter => text.extend(['\\', letter]),
                },
                _ => text.push(letter),
            }
        }
        None
    }
}
