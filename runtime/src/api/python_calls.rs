//! Calls in Python's syntax, and its values.

use serde_json::{Map, Value};

use super::tool_bodies::{self, CalledFunction};
use super::tools::ToolCall;

/// Maximum nesting of a Python value.
const DEPTH_MAX: usize = 64;

/// Reads a call, or a list of calls, that is the whole text.
pub(super) fn calls(text: &str, functions: &[CalledFunction]) -> Option<Vec<ToolCall>> {
    PythonText { text, at: 0 }.calls(functions)
}

/// Reads a value that is the whole text.
pub(super) fn value(text: &str) -> Option<Value> {
    let mut python = PythonText { text, at: 0 };
    let value = python.value(0)?;
    python.rest().is_empty().then_some(value)
}

/// Python's syntax at a position of a text.
struct PythonText<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> PythonText<'a> {
    fn calls(&mut self, functions: &[CalledFunction]) -> Option<Vec<ToolCall>> {
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
        let (name, _) = tool_bodies::known(&name, functions)?;
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
            letter if letter.is_ascii_digit() || matches!(letter, '-' | '+' | '.') => self.number(),
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

    /// A number, which Python also writes as `.5`, `2.` and `1_000`.
    fn number(&mut self) -> Option<Value> {
        let rest = self.rest();
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || "+-._".contains(letter);
        let written = &rest[..rest.find(|letter| !is_part(letter)).unwrap_or(rest.len())];
        self.at += written.len();
        let digits = written.trim_start_matches('+').replace('_', "");
        serde_json::from_str(&digits).ok().or_else(|| {
            let is_float = digits.contains('.') && digits.contains(|letter: char| letter.is_ascii_digit());
            is_float.then(|| digits.parse::<f64>().ok()).flatten().map(Value::from)
        })
    }

    /// Adjacent strings are one.
    fn string(&mut self) -> Option<String> {
        let mut text = self.one_string()?;
        while self.rest().starts_with(['\'', '"']) {
            text += &self.one_string()?;
        }
        Some(text)
    }

    fn one_string(&mut self) -> Option<String> {
        let rest = self.rest();
        let close = ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| rest.starts_with(quote))?;
        let mut units: Vec<u16> = Vec::new();
        let mut letters = rest[close.len()..].char_indices();
        while let Some((at, letter)) = letters.next() {
            if rest[close.len() + at..].starts_with(close) {
                self.at += at + 2 * close.len();
                return String::from_utf16(&units).ok();
            }
            let mut add = |letter: char| units.extend(letter.encode_utf16(&mut [0; 2]).iter());
            if letter != '\\' {
                add(letter);
                continue;
            }
            let escape = letters.next()?.1;
            let digits = match escape {
                'x' => 2,
                'u' => 4,
                'U' => 8,
                _ => 0,
            };
            if digits > 0 {
                let code: String = letters.by_ref().take(digits).map(|(_, digit)| digit).collect();
                let code = u32::from_str_radix(&code, 16).ok()?;
                // halves of a surrogate pair come one by one
                match u16::try_from(code) {
                    Ok(unit) => units.push(unit),
                    Err(_) => add(char::from_u32(code)?),
                }
                continue;
            }
            match escape {
                'n' => add('\n'),
                't' => add('\t'),
                'r' => add('\r'),
                'b' => add('\u{8}'),
                'f' => add('\u{c}'),
                '0' => add('\0'),
                '\n' => {}
                letter @ ('\\' | '\'' | '"') => add(letter),
                letter => ['\\', letter].into_iter().for_each(add),
            }
        }
        None
    }
}
