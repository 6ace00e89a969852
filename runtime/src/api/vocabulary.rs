//! Fields that limit the tokens of an answer, under vLLM's names: `allowed_token_ids` and `bad_words`.

use super::ServedModel;
use super::encode::{Encoder, Stopped};
use super::errors::ApiError;
use super::fields::{Fields, each, text, token_id, wrong_type};
use super::text::Marked;
use crate::request::AnswerVocabulary;

const ALLOWED: &str = "allowed_token_ids";
const BAD: &str = "bad_words";
const BAD_WORDS_MAX: usize = 128;
const BAD_WORD_BYTES_MAX: usize = 256;

/// The limits as the client sent them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct VocabularyLimits {
    allowed_ids: Vec<u32>,
    bad_words: Vec<String>,
}

impl VocabularyLimits {
    /// Reads both fields.
    pub(crate) fn parse(fields: &mut Fields<'_>, vocabulary_size: u32) -> Result<Self, ApiError> {
        let (mut allowed_ids, mut bad_words) = (Vec::new(), Vec::new());
        if let Some(raw) = fields.take(ALLOWED) {
            let take = |item| {
                allowed_ids.push(token_id(ALLOWED, item, vocabulary_size)?);
                Ok(())
            };
            each(raw, take).ok_or_else(|| wrong_type(ALLOWED, "an array", raw))??;
            if allowed_ids.is_empty() {
                return Err(ApiError::value(ALLOWED, format!("'{ALLOWED}' is empty: no token is left")));
            }
            allowed_ids.sort_unstable();
            allowed_ids.dedup();
        }
        if let Some(raw) = fields.take(BAD) {
            let take = |item| {
                if bad_words.len() == BAD_WORDS_MAX {
                    return Err(ApiError::value(BAD, format!("at most {BAD_WORDS_MAX} words are supported")));
                }
                let word = text(BAD, item)?.ok_or_else(|| wrong_type(BAD, "an array of strings", item))?;
                if word.trim_start().is_empty() || word.len() > BAD_WORD_BYTES_MAX {
                    let message = format!("'{BAD}': a word has 1 to {BAD_WORD_BYTES_MAX} bytes of text");
                    return Err(ApiError::value(BAD, message));
                }
                bad_words.push(word);
                Ok(())
            };
            each(raw, take).ok_or_else(|| wrong_type(BAD, "an array of strings", raw))??;
        }
        Ok(VocabularyLimits { allowed_ids, bad_words })
    }

    /// The field that limits the answer, if one does.
    pub(crate) fn field(&self) -> Option<&'static str> {
        let words = (!self.bad_words.is_empty()).then_some(BAD);
        if self.allowed_ids.is_empty() { words } else { Some(ALLOWED) }
    }

    /// The limits in tokens. A word is meant with and without a space before it, as in vLLM: with one only
    /// if that gives another first token and no further tokens.
    pub(crate) fn tokens(
        &self,
        model: &ServedModel,
        stopped: Stopped<'_>,
    ) -> Result<Option<AnswerVocabulary>, ApiError> {
        if self.field().is_none() {
            return Ok(None);
        }
        let encoder = Encoder { model, field: BAD, stopped };
        let mut bad_words: Vec<std::sync::Arc<[u32]>> = Vec::new();
        for word in &self.bad_words {
            let word = word.trim_start();
            let plain = encoder.encode(&Marked::plain(word.to_owned()), false)?;
            let spaced = encoder.encode(&Marked::plain(format!(" {word}")), false)?;
            if plain.is_empty() {
                return Err(ApiError::value(BAD, format!("'{BAD}': '{word}' has no tokens")));
            }
            let is_another = spaced.len() == plain.len() && spaced[0] != plain[0];
            bad_words.push(plain.into());
            if is_another {
                bad_words.push(spaced.into());
            }
        }
        Ok(Some(AnswerVocabulary { allowed_ids: self.allowed_ids.as_slice().into(), bad_words }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parse(body: Value) -> Result<VocabularyLimits, ApiError> {
        let body = body.to_string();
        VocabularyLimits::parse(&mut Fields::parse(body.as_bytes())?, 256)
    }

    #[test]
    fn limits_are_in_order_and_hostile_ones_refused() {
        assert_eq!(parse(json!({"allowed_token_ids": [9, 3, 9]})).unwrap().allowed_ids, [3, 9]);
        assert_eq!(parse(json!({"allowed_token_ids": null, "bad_words": []})).unwrap().field(), None);
        assert_eq!(parse(json!({"bad_words": ["a"]})).unwrap().field(), Some(BAD));
        for body in [
            json!({"allowed_token_ids": []}),
            json!({"allowed_token_ids": [256]}),
            json!({"allowed_token_ids": [-1]}),
            json!({"allowed_token_ids": ["1"]}),
            json!({"allowed_token_ids": {"1": 1}}),
            json!({"bad_words": "a"}),
            json!({"bad_words": [1]}),
            json!({"bad_words": [" "]}),
            json!({"bad_words": ["x".repeat(300)]}),
            json!({"bad_words": vec!["x"; 129]}),
        ] {
            assert!(parse(body.clone()).is_err(), "{body}");
        }
    }
}
