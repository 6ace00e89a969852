//! The filter `tojson`: Python's `json.dumps` as transformers calls it.

use super::arguments::{Given, bind, text_or, truth};
use super::text::float;
use super::{NESTING_MAX, TEXT_BYTES_MAX, pairs, work, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use std::fmt::Write;

/// Maximum width of an indentation; Python has none.
const INDENT_MAX: usize = 100;

pub(super) fn tojson(value: &Value, given: Given) -> Result<String, Error> {
    let given = given.into_values();
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ensure_ascii, indent, separators, sort_keys] = bind("tojson", &given, names)?;
    let indent = indentation(indent)?;
    let default = if indent.is_some() { "," } else { ", " };
    let (between, behind) = separators_of(separators, default)?;
    let mut writer = JsonWriter {
        out: String::new(),
        ensure_ascii: truth(&ensure_ascii, false),
        sort_keys: truth(&sort_keys, false),
        indent,
        between,
        behind,
    };
    writer.value(value, 0)?;
    work(writer.out.len() / 16)?;
    Ok(writer.out)
}

/// The indentation of each level; none for one line.
fn indentation(indent: Option<Value>) -> Result<Option<String>, Error> {
    let Some(indent) = indent.filter(|indent| !indent.is_none()) else { return Ok(None) };
    let text = match (indent.as_str(), i64::try_from(indent.clone())) {
        (Some(text), _) => text.to_owned(),
        (None, Ok(width)) => " ".repeat(usize::try_from(width.max(0)).unwrap_or(0).min(INDENT_MAX + 1)),
        (None, Err(_)) => return Err(wrong("tojson: 'indent' is a number or a text")),
    };
    match text.len() > INDENT_MAX {
        true => Err(wrong(format!("tojson: 'indent' is more than {INDENT_MAX}"))),
        false => Ok(Some(text)),
    }
}

fn separators_of(separators: Option<Value>, default: &str) -> Result<(String, String), Error> {
    let Some(separators) = separators.filter(|separators| !separators.is_none()) else {
        return Ok((default.into(), ": ".into()));
    };
    match &super::items(&separators)?[..] {
        [between, behind] => {
            let (between, behind) = (Some(between.clone()), Some(behind.clone()));
            Ok((text_or("tojson", &between, "")?.into(), text_or("tojson", &behind, "")?.into()))
        }
        _ => Err(wrong("tojson: 'separators' are two texts")),
    }
}

struct JsonWriter {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    between: String,
    behind: String,
}

impl JsonWriter {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if self.out.len() > TEXT_BYTES_MAX || depth > NESTING_MAX {
            return Err(wrong(format!(
                "tojson: the value is longer than {TEXT_BYTES_MAX} bytes, or too deep"
            )));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => match pairs(value) {
                Some(pairs) => self.map(pairs, depth)?,
                None => return Err(unwritable(value)),
            },
            _ => return Err(unwritable(value)),
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut count = 0;
        for item in value.try_iter()?.checked() {
            self.begin_item(count, depth + 1);
            self.value(&item?, depth + 1)?;
            count += 1;
        }
        self.end_items(count, depth);
        self.out.push(']');
        Ok(())
    }

    fn map(&mut self, mut pairs: Vec<(Value, Value)>, depth: usize) -> Result<(), Error> {
        if self.sort_keys {
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.out.push('{');
        let count = pairs.len();
        for (at, (key, item)) in pairs.iter().enumerate() {
            self.begin_item(at, depth + 1);
            match key.kind() {
                ValueKind::String => self.text(key.as_str().unwrap_or_default()),
                ValueKind::None => self.out.push_str("\"null\""),
                ValueKind::Bool => self.out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" }),
                ValueKind::Number => {
                    let number = number(key);
                    self.out.extend(["\"", &number, "\""]);
                }
                _ => return Err(unwritable(key)),
            }
            self.out.push_str(&self.behind);
            self.value(item, depth + 1)?;
        }
        self.end_items(count, depth);
        self.out.push('}');
        Ok(())
    }

    fn begin_item(&mut self, at: usize, depth: usize) {
        if at > 0 {
            self.out.push_str(&self.between);
        }
        self.line(depth);
    }

    fn end_items(&mut self, count: usize, depth: usize) {
        if count > 0 {
            self.line(depth);
        }
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..'\u{20}' => {
                    let _ = write!(self.out, "\\u{:04x}", u32::from(letter));
                }
                _ if self.ensure_ascii && letter > '\u{7e}' => {
                    let mut halves = [0; 2];
                    for half in letter.encode_utf16(&mut halves) {
                        let _ = write!(self.out, "\\u{half:04x}");
                    }
                }
                _ => self.out.push(letter),
            }
        }
        self.out.push('"');
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => match number {
            _ if number.is_nan() => "NaN".into(),
            f64::INFINITY => "Infinity".into(),
            f64::NEG_INFINITY => "-Infinity".into(),
            _ => float(number),
        },
        _ => value.to_string(),
    }
}

fn unwritable(value: &Value) -> Error {
    wrong(format!("tojson: a value of the kind {} cannot be written as JSON", value.kind()))
}
