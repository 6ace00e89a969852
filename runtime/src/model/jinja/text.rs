//! Values as text: Python's `str` and `repr`.

use super::{NESTING_MAX, TEXT_BYTES_MAX, pairs, work, wrong};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use std::fmt::Write;

/// Calls `take` with Python's `str` of a value.
pub(super) fn with_text<T>(value: &Value, take: impl FnOnce(&str) -> Result<T, Error>) -> Result<T, Error> {
    match value.as_str() {
        Some(text) => take(text),
        None => take(&text(value)?),
    }
}

/// Python's `str`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Undefined => Ok(String::new()),
        _ => {
            let mut out = String::new();
            write_repr(value, &mut out, 0)?;
            work(out.len() / 16)?;
            Ok(out)
        }
    }
}

/// Python's `repr`.
fn write_repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    if out.len() > TEXT_BYTES_MAX || depth > NESTING_MAX {
        return Err(wrong(format!(
            "a value that is printed is longer than {TEXT_BYTES_MAX} bytes, or too deep"
        )));
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => write_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number => write_number(value, out),
        ValueKind::Map if pairs(value).is_some() => {
            out.push('{');
            for (at, (key, item)) in pairs(value).into_iter().flatten().enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                write_repr(&key, out, depth + 1)?;
                out.push_str(": ");
                write_repr(&item, out, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.is_tuple();
            out.push(if is_tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()?.checked() {
                out.push_str(if count == 0 { "" } else { ", " });
                write_repr(&item?, out, depth + 1)?;
                count += 1;
            }
            out.push_str(if is_tuple && count == 1 { "," } else { "" });
            out.push(if is_tuple { ')' } else { ']' });
        }
        ValueKind::Invalid => return Err(wrong("a value cannot be read")),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn write_number(value: &Value, out: &mut String) {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => out.push_str(&float(number)),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// Python's `repr` of a float: the shortest digits, with an exponent where the number is very large or
/// small.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    format!("{number:?}")
}

fn write_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if letter == quote => out.extend(['\\', letter]),
            _ if is_printable(letter) => out.push(letter),
            _ => {
                let code = u32::from(letter);
                let _ = match code {
                    0..0x100 => write!(out, "\\x{code:02x}"),
                    0x100..0x10000 => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Whether Python writes a character unescaped. Unlike Python, private and unassigned characters are, since
/// stand-ins for special tokens are private characters.
pub(super) fn is_printable(letter: char) -> bool {
    let is_format = matches!(letter,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}'..='\u{891}' | '\u{8e2}'
        | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0001}' | '\u{e0020}'..='\u{e007f}');
    let is_space = letter != ' ' && is_space(letter);
    !(letter.is_control() || is_format || is_space)
}

/// Python's `str.isspace`.
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}
