//! Typed access to a JSON object of a checkpoint, with errors that name the file and the field.

use super::error::{Error, Result};
use mixfleet_hal::files;
use serde_json::{Map, Value};
use std::path::Path;

/// Maximum size of a JSON file in bytes: real configurations and shard indices stay below 1 MB.
const JSON_BYTES_MAX: u64 = 64 << 20;

/// A JSON object and the file it came from. A field that is `null` counts as absent.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) file: &'a Path,
    pub(super) object: &'a Map<String, Value>,
    /// Prefix of field names in messages, such as `rope_scaling.`
    pub(super) prefix: &'a str,
}

/// Refuses a path that exists and is not a regular file: opening a FIFO would wait for a writer.
pub(super) fn check_regular(file: &Path) -> Result<()> {
    match std::fs::metadata(file) {
        Ok(found) => files::check_regular(found.file_type()).map_err(|cause| Error::read(file, cause)),
        Err(_) => Ok(()),
    }
}

/// Reads the JSON object in `file`.
pub(super) fn read_object(file: &Path) -> Result<Map<String, Value>> {
    let text = files::read(file, JSON_BYTES_MAX).map_err(|e| Error::read(file, e))?;
    let parsed = serde_json::from_slice(&text).or_else(|error| match without_python_numbers(&text) {
        Some(other) => serde_json::from_slice(&other),
        None => Err(error),
    });
    parsed.map_err(|e| Error::file(file, format!("not a JSON object: {e}")))
}

/// The JSON text with Python's nonstandard numbers (`Infinity`, `-Infinity` and `NaN`) as strings, which no
/// field accepts as numbers; none without such numbers.
fn without_python_numbers(text: &[u8]) -> Option<Vec<u8>> {
    const NUMBERS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let (mut out, mut at, mut in_string, mut found) = (Vec::with_capacity(text.len()), 0, false, false);
    while let Some(byte) = text.get(at) {
        let number = NUMBERS.iter().find(|number| !in_string && text[at..].starts_with(number));
        if let Some(number) = number {
            out.push(b'"');
            out.extend_from_slice(number);
            out.push(b'"');
            (at, found) = (at + number.len(), true);
            continue;
        }
        let taken = if in_string && *byte == b'\\' { 2 } else { 1 };
        in_string ^= *byte == b'"';
        out.extend_from_slice(&text[at..(at + taken).min(text.len())]);
        at += taken;
    }
    found.then_some(out)
}

/// Reads the JSON object in `file`; `None` if the file does not exist.
pub(super) fn read_object_if_present(file: &Path) -> Result<Option<Map<String, Value>>> {
    match read_object(file) {
        Err(Error::Read { cause, .. }) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'a Path, object: &'a Map<String, Value>) -> Self {
        Fields { file, object, prefix: "" }
    }

    pub(super) fn error(&self, field: &str, problem: impl Into<String>) -> Error {
        let field = format!("{}{field}", self.prefix);
        Error::Field { file: self.file.to_owned(), field, problem: problem.into() }
    }

    fn wrong(&self, field: &str, value: &Value, expected: &str) -> Error {
        let mut shown = value.to_string();
        if shown.len() > 60 {
            shown = format!("{}...", shown.chars().take(60).collect::<String>());
        }
        self.error(field, format!("{shown}, expected {expected}"))
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field exists, even as `null`.
    pub(super) fn has(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    /// Reads a whole number in `1..=max`.
    pub(super) fn count(&self, field: &str, max: u32) -> Result<Option<u32>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=max).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(field, value, &format!("a whole number from 1 to {max}"))),
        }
    }

    pub(super) fn count_required(&self, field: &str, max: u32) -> Result<u32> {
        self.count(field, max)?
            .ok_or_else(|| self.error(field, format!("missing, expected a whole number from 1 to {max}")))
    }

    /// Reads a finite number above zero.
    pub(super) fn positive(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(field, value, "a finite number above 0")),
        }
    }

    pub(super) fn positive_required(&self, field: &str) -> Result<f64> {
        self.positive(field)?.ok_or_else(|| self.error(field, "missing, expected a finite number above 0"))
    }

    pub(super) fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(value) => Err(self.wrong(field, value, "true or false")),
        }
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(value) => Err(self.wrong(field, value, "a string")),
        }
    }

    pub(super) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let list = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.wrong(field, value, "a list of strings"))
    }

    /// Reads a token id, or a list of them.
    pub(super) fn token_ids(&self, field: &str) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match value {
            Value::Array(list) => list.iter().map(one).collect::<Option<Vec<u32>>>(),
            single => one(single).map(|id| vec![id]),
        };
        ids.map(Some).ok_or_else(|| self.wrong(field, value, "a token id or a list of token ids"))
    }

    /// Reads a list of whole numbers.
    pub(super) fn numbers(&self, field: &str) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let one = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let list = value.as_array().and_then(|list| list.iter().map(one).collect());
        list.map(Some).ok_or_else(|| self.wrong(field, value, "a list of whole numbers"))
    }

    pub(super) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(value) => Err(self.wrong(field, value, "an object")),
        }
    }
}
