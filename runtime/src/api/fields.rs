//! Reads typed, range-checked fields out of a JSON object. Null is the same as absent.

use serde_json::{Map, Value};
use std::ops::RangeInclusive;

use super::errors::ApiError;

/// The fields of a request body that have not been read yet.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Parses a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::body(format!("the body is not valid JSON: {error}")))?;
        match value {
            Value::Object(map) => Ok(Self::new(map)),
            other => Err(ApiError::body(format!("the body must be a JSON object, not {}", kind(&other)))),
        }
    }

    /// The fields of an object.
    pub(crate) fn new(mut map: Map<String, Value>) -> Self {
        map.retain(|_, value| !value.is_null());
        Fields(map)
    }

    /// Removes and returns a field.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    /// A field's value, left in place.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// Names that nobody has read.
    pub(crate) fn unread(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// A number in `range`.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(name, "a number", &value))?;
        check_range(name, number, &range)?;
        Ok(Some(number))
    }

    /// An integer in `range`; 5.0 counts as 5.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let integer = integer_of(&value).ok_or_else(|| wrong_type(name, "an integer", &value))?;
        check_range(name, integer, &range)?;
        Ok(Some(integer))
    }

    /// 64 bits given as a signed or an unsigned integer.
    pub(crate) fn bits(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let bits = value.as_u64().or_else(|| integer_of(&value).map(|signed| signed as u64));
        bits.map(Some).ok_or_else(|| wrong_type(name, "a 64-bit integer", &value))
    }

    /// True or false.
    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| wrong_type(name, "true or false", &value))
    }

    /// A string.
    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", &other)),
        }
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong_type(name, "an object", &other)),
        }
    }

    /// An array.
    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong_type(name, "an array", &other)),
        }
    }
}

/// A token id.
pub(crate) fn token_id(name: &str, value: &Value, vocabulary_size: u32) -> Result<u32, ApiError> {
    let id = integer_of(value).ok_or_else(|| wrong_type(name, "a token id", value))?;
    match u32::try_from(id) {
        Ok(id) if id < vocabulary_size => Ok(id),
        _ => {
            let message = format!("'{name}': {id} is not a token; the vocabulary has {vocabulary_size}");
            Err(ApiError::value(name, message))
        }
    }
}

/// The error for a field of another type than `wanted`.
pub(crate) fn wrong_type(name: &str, wanted: &str, got: &Value) -> ApiError {
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
        // Above 2^53 a float no longer names one integer.
        (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i64)
    })
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
