//! Calls as Gemma 4 writes them: `call:name{key:<|"|>text<|"|>,count:1}`.

use serde_json::{Map, Value};

use super::tool_bodies::{CalledFunction, ReadCalls};
use super::tools::ToolCall;

/// Quotes around a text.
const QUOTE: &str = "<|\"|>";
/// Maximum nesting of a value.
const DEPTH_MAX: usize = 64;

/// Reads one call.
pub(super) fn read(text: &str, functions: &[CalledFunction]) -> ReadCalls {
    let mut cursor = GemmaCursor { rest: text.trim() };
    if !cursor.skip("call:") {
        return if "call:".starts_with(cursor.rest) { ReadCalls::Incomplete } else { ReadCalls::Other };
    }
    let name = cursor.word();
    let Some((name, _)) = functions.iter().find(|(known, _)| *known == name) else { return ReadCalls::Other };
    if cursor.rest.is_empty() {
        let arguments = "{}".to_owned();
        return ReadCalls::Calls(vec![ToolCall { name: name.clone(), arguments }]);
    }
    match cursor.value(0) {
        Ok(arguments @ Value::Object(_)) if cursor.rest.trim().is_empty() => {
            ReadCalls::Calls(vec![ToolCall { name: name.clone(), arguments: arguments.to_string() }])
        }
        Err(CutOrWrong::Cut) => ReadCalls::Incomplete,
        _ => ReadCalls::Other,
    }
}

/// The reason for a missing value.
enum CutOrWrong {
    Cut,
    Wrong,
}

struct GemmaCursor<'a> {
    rest: &'a str,
}

impl<'a> GemmaCursor<'a> {
    fn skip(&mut self, sign: &str) -> bool {
        let rest = self.rest.trim_start();
        match rest.strip_prefix(sign) {
            Some(behind) => {
                self.rest = behind;
                true
            }
            None => false,
        }
    }

    /// Characters of names, numbers and constants.
    fn word(&mut self) -> &'a str {
        let rest = self.rest.trim_start();
        let is_part = |letter: char| letter.is_alphanumeric() || "_.-+".contains(letter);
        let (word, behind) = rest.split_at(rest.find(|letter| !is_part(letter)).unwrap_or(rest.len()));
        self.rest = behind;
        word
    }

    /// A text in Gemma's or JSON's quotes.
    fn text(&mut self) -> Option<Result<String, CutOrWrong>> {
        if self.skip(QUOTE) {
            let Some((text, behind)) = self.rest.split_once(QUOTE) else { return Some(Err(CutOrWrong::Cut)) };
            self.rest = behind;
            return Some(Ok(text.to_owned()));
        }
        let rest = self.rest.trim_start();
        if !rest.starts_with('"') {
            return None;
        }
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<String>();
        let text = match values.next() {
            Some(Ok(text)) => text,
            Some(Err(error)) if !error.is_eof() => return Some(Err(CutOrWrong::Wrong)),
            _ => return Some(Err(CutOrWrong::Cut)),
        };
        self.rest = &rest[values.byte_offset()..];
        Some(Ok(text))
    }

    fn value(&mut self, depth: usize) -> Result<Value, CutOrWrong> {
        if depth > DEPTH_MAX {
            return Err(CutOrWrong::Wrong);
        }
        if let Some(text) = self.text() {
            return text.map(Value::from);
        }
        if self.skip("[") {
            let mut items = Vec::new();
            while !self.skip("]") {
                items.push(self.value(depth + 1)?);
                self.separator("]")?;
            }
            return Ok(Value::Array(items));
        }
        if self.skip("{") {
            let mut map = Map::new();
            while !self.skip("}") {
                let key = match self.text() {
                    Some(key) => key?,
                    None => self.word().to_owned(),
                };
                if !self.skip(":") {
                    return Err(self.cut_or_wrong());
                }
                map.insert(key, self.value(depth + 1)?);
                self.separator("}")?;
            }
            return Ok(Value::Object(map));
        }
        let word = self.word();
        match word {
            "" => Err(self.cut_or_wrong()),
            "None" | "none" => Ok(Value::Null),
            "True" => Ok(Value::Bool(true)),
            "False" => Ok(Value::Bool(false)),
            word => serde_json::from_str(word).map_err(|_| CutOrWrong::Wrong),
        }
    }

    /// Passes a comma, which may be missing before `close`.
    fn separator(&mut self, close: &str) -> Result<(), CutOrWrong> {
        match self.skip(",") || self.rest.trim_start().starts_with(close) {
            true => Ok(()),
            false => Err(self.cut_or_wrong()),
        }
    }

    fn cut_or_wrong(&self) -> CutOrWrong {
        if self.rest.trim().is_empty() { CutOrWrong::Cut } else { CutOrWrong::Wrong }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_read_with_their_types() {
        let functions = [("look".to_owned(), json!({}))];
        let called = |text: &str| match read(text, &functions) {
            ReadCalls::Calls(calls) => serde_json::from_str::<Value>(&calls[0].arguments).unwrap(),
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(called("call:look{}"), json!({}));
        let text = "call:look{city:<|\"|>Oslo, {it's}<|\"|>,days:3,deep:{<|\"|>a b<|\"|>:[true,-1.5,None]}}";
        assert_eq!(
            called(text),
            json!({"city": "Oslo, {it's}", "days": 3, "deep": {"a b": [true, -1.5, null]}})
        );
        assert_eq!(called("call:look{a: \"x\"}"), json!({"a": "x"}));
        for cut in ["ca", "call:look{", "call:look{city:<|\"|>Os", "call:look{a:[1", "call:look{a:1"] {
            assert_eq!(read(cut, &functions), ReadCalls::Incomplete, "{cut}");
        }
        for other in ["call:lock{}", "look{}", "call:look{a:x}", "call:look{} more"] {
            assert_eq!(read(other, &functions), ReadCalls::Other, "{other}");
        }
    }
}
