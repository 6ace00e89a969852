//! Reads typed, range-checked fields from a JSON object. Null is the same as absent. Each field is parsed
//! when it is read; fields that are not read stay text.

use mixfleet_hal::cast::to_i64;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, RangeInclusive};

use super::errors::ApiError;
use super::json::{self, is_null, kind};

/// Maximum number of fields of an object; fewer than a hundred are known.
const FIELDS_MAX: usize = 512;
/// Maximum length of a field that is parsed as a whole: parsed, it takes up to 30 times as much memory.
const VALUE_BYTES_MAX: usize = 256 << 10;

/// The fields of an object that have not been read yet.
#[derive(Debug, Default)]
pub(crate) struct Fields<'a>(BTreeMap<Cow<'a, str>, &'a RawValue>);

impl<'a> Fields<'a> {
    /// Finds the fields of a request body.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = json::text(body).map_err(not_json)?;
        let other = match text.trim_start().as_bytes().first() {
            Some(b'[') => "an array",
            Some(b'"') => "a string",
            Some(b'0'..=b'9' | b'-') => "a number",
            _ => return Self::of(text).map_err(not_json)?,
        };
        Err(ApiError::body(format!("the body must be a JSON object, not {other}")))
    }

    /// Finds the fields of an object. The outer error concerns the JSON text, the inner one the number of
    /// fields.
    fn of(text: &'a str) -> serde_json::Result<Result<Self, ApiError>> {
        let mut fields = BTreeMap::new();
        let mut too_many = false;
        json::entries(text, |name, value| {
            match is_null(value) {
                true => drop(fields.remove(&name)),
                false => drop(fields.insert(name, value)),
            }
            too_many = fields.len() > FIELDS_MAX;
            if too_many { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let message = || ApiError::body(format!("an object has more than {FIELDS_MAX} fields"));
        Ok(if too_many { Err(message()) } else { Ok(Fields(fields)) })
    }

    /// The fields of a value, or `None` if it is not an object.
    pub(crate) fn within(raw: &'a RawValue) -> Result<Option<Self>, ApiError> {
        if kind(raw) != "an object" {
            return Ok(None);
        }
        Self::of(raw.get()).map_err(not_json)?.map(Some)
    }

    /// Removes a field and returns its text.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        self.0.remove(name)
    }

    /// A field's text, left in place.
    pub(crate) fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.0.get(name).copied()
    }

    /// Names of the fields that have not been read.
    pub(crate) fn unread(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(Cow::as_ref)
    }

    /// Reads a number in `range`.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let number = value(name, raw)?.as_f64().ok_or_else(|| wrong_type(name, "a number", raw))?;
        check_range(name, number, &range)?;
        Ok(Some(number))
    }

    /// Reads an integer in `range`; 5.0 counts as 5.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let integer = integer_of(&value(name, raw)?).ok_or_else(|| wrong_type(name, "an integer", raw))?;
        check_range(name, integer, &range)?;
        Ok(Some(integer))
    }

    /// Reads 64 bits, given as a signed or an unsigned integer.
    pub(crate) fn bits(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let value = value(name, raw)?;
        let bits = value.as_u64().or_else(|| integer_of(&value).map(i64::cast_unsigned));
        bits.map(Some).ok_or_else(|| wrong_type(name, "a 64-bit integer", raw))
    }

    /// Reads a boolean.
    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        value(name, raw)?.as_bool().map(Some).ok_or_else(|| wrong_type(name, "true or false", raw))
    }

    /// Reads a string.
    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        match value(name, raw)? {
            Value::String(text) => Ok(Some(text)),
            _ => Err(wrong_type(name, "a string", raw)),
        }
    }

    /// Reads an object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        match value(name, raw)? {
            Value::Object(map) => Ok(Some(map)),
            _ => Err(wrong_type(name, "an object", raw)),
        }
    }

    /// Reads an object of which only some fields are parsed.
    pub(crate) fn fields(&mut self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        Fields::within(raw)?.map(Some).ok_or_else(|| wrong_type(name, "an object", raw))
    }
}

/// Parses a value of bounded size.
pub(crate) fn value(name: &str, raw: &RawValue) -> Result<Value, ApiError> {
    if raw.get().len() > VALUE_BYTES_MAX {
        let message = format!("'{name}' is larger than {VALUE_BYTES_MAX} bytes");
        return Err(ApiError::value(name, message));
    }
    serde_json::from_str(raw.get()).map_err(|error| malformed(name, &error))
}

/// Parses a string of any size; `None` if the value is not a string.
pub(crate) fn text(name: &str, raw: &RawValue) -> Result<Option<String>, ApiError> {
    let is_text = raw.get().starts_with('"');
    is_text.then(|| serde_json::from_str(raw.get()).map_err(|error| malformed(name, &error))).transpose()
}

fn not_json(error: serde_json::Error) -> ApiError {
    ApiError::body(format!("the body is not valid JSON: {error}"))
}

/// The error for JSON that turns out to be invalid only when it is parsed: a lone surrogate, or a number out
/// of range.
fn malformed(name: &str, error: &serde_json::Error) -> ApiError {
    ApiError::value(name, format!("'{name}' is not valid JSON: {error}"))
}

/// Parses a token id.
pub(crate) fn token_id(name: &str, raw: &RawValue, vocabulary_size: u32) -> Result<u32, ApiError> {
    let id = match kind(raw) {
        "a number" => integer_of(&value(name, raw)?),
        _ => None,
    };
    let id = id.ok_or_else(|| wrong_type(name, "a token id", raw))?;
    match u32::try_from(id) {
        Ok(id) if id < vocabulary_size => Ok(id),
        _ => {
            let message = format!("'{name}': {id} is not a token; the vocabulary has {vocabulary_size}");
            Err(ApiError::value(name, message))
        }
    }
}

/// Calls `each` with every element of an array, up to its first error. `None` if the value is not an array.
pub(crate) fn each<'a>(
    raw: &'a RawValue,
    mut each: impl FnMut(&'a RawValue) -> Result<(), ApiError>,
) -> Option<Result<(), ApiError>> {
    if kind(raw) != "an array" {
        return None;
    }
    let mut result = Ok(());
    let walked = json::elements(raw.get(), |element| {
        result = each(element);
        if result.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    Some(result.and(walked.map_err(not_json)))
}

/// The error for a field whose type is not `wanted`.
pub(crate) fn wrong_type(name: &str, wanted: &str, got: &RawValue) -> ApiError {
    let message = format!("'{name}' must be {wanted}, not {}", kind(got));
    ApiError::field(name, "invalid_type", message)
}

fn check_range<T: PartialOrd + std::fmt::Display>(
    name: &str,
    value: T,
    range: &RangeInclusive<T>,
) -> Result<(), ApiError> {
    if range.contains(&value) {
        return Ok(());
    }
    let message = format!("'{name}' must be from {} to {}, not {value}", range.start(), range.end());
    Err(ApiError::value(name, message))
}

fn integer_of(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        // Above 2^53 a float no longer identifies one integer.
        (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(to_i64(number))
    })
}
