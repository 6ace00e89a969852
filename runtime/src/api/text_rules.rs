//! Rules that turn an answer's tokens into text: stop strings, special tokens, and the minimum length before
//! either ends the answer.

use super::errors::ApiError;
use super::fields::{Fields, each, text, wrong_type};
use mixfleet_hal::cast::to_u32;
use serde_json::value::RawValue;

/// OpenAI accepts 4 stop strings; some clients send more.
const STOPS_MAX: usize = 16;
/// Maximum length of a stop string: matching holds back up to one stop string of text.
const STOP_BYTES_MAX: usize = 1024;

/// How the tokens of an answer become text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TextRules {
    pub(crate) stops: Vec<String>,
    /// Whether the stop string or end token that ended the answer is part of the text.
    pub(crate) includes_stop: bool,
    /// Whether special tokens are shown.
    pub(crate) shows_specials: bool,
    /// Number of tokens within which stop strings are not matched.
    pub(crate) min_tokens: u32,
}

impl TextRules {
    /// Reads the fields that concern text, under vLLM's names.
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let stops = stops(fields)?;
        let shows_specials = !fields.boolean("skip_special_tokens")?.unwrap_or(true);
        let spaces = fields.boolean("spaces_between_special_tokens")?.unwrap_or(true);
        if shows_specials && !spaces {
            let hint = "beside 'skip_special_tokens': false, the tokenizer's own spaces stay";
            return Err(ApiError::unsupported("spaces_between_special_tokens", hint));
        }
        Ok(TextRules {
            stops,
            includes_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
            shows_specials,
            min_tokens: to_u32(fields.integer("min_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(0)),
        })
    }
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let Some(raw) = fields.take("stop") else { return Ok(Vec::new()) };
    let mut stops = Vec::new();
    let take = |item| {
        if stops.len() == STOPS_MAX {
            return Err(ApiError::value("stop", format!("at most {STOPS_MAX} stop strings are supported")));
        }
        stops.push(stop(item)?);
        Ok(())
    };
    match each(raw, take) {
        None => Ok(vec![stop(raw)?]),
        Some(read) => read.map(|()| stops),
    }
}

fn stop(raw: &RawValue) -> Result<String, ApiError> {
    let Some(text) = text("stop", raw)? else {
        return Err(wrong_type("stop", "a string or an array of strings", raw));
    };
    if text.is_empty() || text.len() > STOP_BYTES_MAX {
        let message = format!("a stop string has 1 to {STOP_BYTES_MAX} bytes, not {}", text.len());
        return Err(ApiError::value("stop", message));
    }
    Ok(text)
}
