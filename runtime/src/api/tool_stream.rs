//! Calls whose arguments are streamed while they are generated. Styles whose arguments are not JSON return a
//! call once it is complete.

use super::tool_bodies::CalledFunction;
use crate::model::ToolStyle;

/// Position of a streamed answer within its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallPlace {
    /// Within the arguments of a call.
    Arguments(JsonScan),
    /// After the arguments of a call, before its closing mark.
    Behind,
    /// After the last call of a list, before its closing mark.
    Closing,
}

/// Finds the end of a JSON object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JsonScan {
    depth: usize,
    in_text: bool,
    escaped: bool,
}

impl JsonScan {
    /// Continues with `text`. Returns the position in it at which the object ends, if it does. `close` ends
    /// an incomplete object, unless it is within a string.
    pub(super) fn end(&mut self, text: &str, close: &str) -> Option<usize> {
        for (at, letter) in text.char_indices() {
            match letter {
                _ if self.escaped => self.escaped = false,
                '\\' if self.in_text => self.escaped = true,
                '"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                '{' | '[' => self.depth += 1,
                '}' | ']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ if !close.is_empty() && text[at..].starts_with(close) => return Some(at),
                _ => {}
            }
        }
        None
    }
}

/// The beginning of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BegunCall {
    pub(super) name: String,
    /// Position at which the arguments begin.
    pub(super) at: usize,
}

/// Returns the call at the beginning of `text`, which follows the opening mark; none before the arguments
/// have begun, or if the call must be read as a whole.
pub(super) fn begin(style: ToolStyle, text: &str, functions: &[CalledFunction]) -> Option<BegunCall> {
    let (name, at) = match style {
        ToolStyle::Tagged => json_head(text, 0)?,
        ToolStyle::Bare { .. } | ToolStyle::Listed(_) => {
            let start = text.len() - text.trim_start().len();
            json_head(text, start + usize::from(text[start..].starts_with('[')))?
        }
        ToolStyle::Named => {
            let at = text.find('{')?;
            let name = text[..at].trim();
            let name = name.strip_suffix("[ARGS]").unwrap_or(name);
            (name.split_once("[CALL_ID]").map_or(name, |(name, _)| name), at)
        }
        ToolStyle::DeepSeek { .. } => {
            let (head, rest) = text.split_once("<｜tool▁sep｜>")?;
            let at = text.len() - rest.len() + rest.find('{')?;
            let before = rest.split('{').next().unwrap_or_default().trim();
            match before.strip_suffix("```json") {
                Some(name) => (name, at),
                None if before.is_empty() => (head, at),
                None => return None,
            }
        }
        ToolStyle::JsonInTag => {
            let (name, rest) = text.split_once('>')?;
            let at = rest.find('{').filter(|at| rest[..*at].trim().is_empty())?;
            (name, text.len() - rest.len() + at)
        }
        ToolStyle::Kimi => {
            let (id, rest) = text.split_once("<|tool_call_argument_begin|>")?;
            let name = id.rsplit_once(':').map_or(id, |(name, _)| name).trim();
            let at = text.len() - rest.len() + rest.find('{').filter(|at| rest[..*at].trim().is_empty())?;
            (name.strip_prefix("functions.").unwrap_or(name), at)
        }
        _ => return None,
    };
    let name = name.trim();
    functions.iter().any(|(known, _)| known == name).then(|| BegunCall { name: name.to_owned(), at })
}

/// Returns the name in the object at `from`, which has a name and arguments, and the position of the
/// arguments.
fn json_head(text: &str, from: usize) -> Option<(&str, usize)> {
    let rest = after(&text[from..], "{")?;
    // Command R writes an id before the name
    let rest = match after(rest, "\"tool_call_id\"") {
        Some(rest) => after(after(after(rest, ":")?, "\"")?.split_once('"')?.1, ",")?,
        None => rest,
    };
    let named = after(rest, "\"name\"").or_else(|| after(rest, "\"tool_name\""))?;
    let rest = after(after(named, ":")?, "\"")?;
    let (name, rest) = rest.split_once('"')?;
    let rest = after(rest, ",")?;
    let rest = after(rest, "\"arguments\"").or_else(|| after(rest, "\"parameters\""))?;
    let rest = after(rest, ":")?.trim_start();
    (rest.starts_with('{') && !name.contains('\\')).then(|| (name, text.len() - rest.len()))
}

/// Returns the text after `sign`, which white space may precede.
fn after<'a>(text: &'a str, sign: &str) -> Option<&'a str> {
    text.trim_start().strip_prefix(sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_begins_once_its_arguments_do() {
        let functions = [("look".to_owned(), serde_json::json!({}))];
        let at = |style, text: &str| begin(style, text, &functions).map(|begun| begun.at);
        assert_eq!(at(ToolStyle::Tagged, "\n{\"name\": \"look\", \"arguments\": {"), Some(31));
        assert_eq!(at(ToolStyle::Tagged, "\n{\"name\": \"look\", \"arguments\": "), None);
        assert_eq!(at(ToolStyle::Tagged, "{\"name\": \"look\", \"arguments\": \"{"), None, "read as a whole");
        assert_eq!(at(ToolStyle::Tagged, "{\"name\": \"lock\", \"arguments\": {"), None, "no such tool");
        assert_eq!(at(ToolStyle::Named, "look[ARGS]{"), Some(10));
        assert_eq!(
            at(ToolStyle::DeepSeek { fenced: true }, "function<｜tool▁sep｜>look\n```json\n{"),
            Some(39)
        );
        assert_eq!(at(ToolStyle::Kimi, "functions.look:0<|tool_call_argument_begin|>{"), Some(44));
        assert_eq!(at(ToolStyle::Invoked, "<invoke name=\"look\">"), None);
    }

    #[test]
    fn arguments_end_where_their_object_does() {
        let mut scan = JsonScan::default();
        assert_eq!(scan.end("{\"a\": [1, \"}\\", "</x>"), None);
        assert_eq!(scan.end("\"}</x>\", {}", "</x>"), None);
        assert_eq!(scan.end("]} rest", "</x>"), Some(2));
        assert_eq!(JsonScan::default().end("{\"a\": 1</x>}", "</x>"), Some(7), "the mark ends it");
    }
}
