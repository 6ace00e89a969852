//! The fields that completions and chat completions share.

use mixfleet_hal::cast::{to_f32, to_u32};

use super::errors::ApiError;
use super::fields::{Fields, each, token_id, wrong_type};
use super::format::AnswerForm;
use super::hints::ParsedHints;
use super::text_rules::TextRules;
use super::vocabulary::VocabularyLimits;
use crate::request::Sampling;

/// Maximum of alternatives per position; OpenAI's limit for chat.
const LOGPROBS_MAX: i64 = 20;
const STOP_TOKENS_MAX: usize = 64;
const CACHE_SALT_BYTES_MAX: usize = 256;
/// Maximum number of tokens with a bias.
const BIASES_MAX: usize = 1024;
/// OpenAI's limit on choices per prompt.
const CHOICES_MAX: i64 = 128;

/// Generation parameters, independent of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parameters {
    /// Sampling parameters without the seed, which is drawn later if the client gave none.
    pub(crate) sampling: Sampling,
    pub(crate) seed: Option<u64>,
    /// Number of choices per prompt.
    pub(crate) choices: u32,
    /// How tokens become text.
    pub(crate) text: TextRules,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    /// The client's value; the default depends on the endpoint.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) add_special_tokens: Option<bool>,
    /// Whether the names of special tokens in the client's text are treated as text; the default depends on
    /// the endpoint.
    pub(crate) split_special_tokens: Option<bool>,
    /// Tokens of the prompt's end that are kept, or -1 for as many as leave room for the answer.
    pub(crate) kept_tokens: Option<i64>,
    /// Whether the prompt's beginning is kept instead of its end.
    pub(crate) keeps_start: bool,
    pub(crate) cache_salt: Option<String>,
    /// Limits of the answer's tokens.
    pub(crate) vocabulary: VocabularyLimits,
    /// Whether the ids of tokens are returned.
    pub(crate) returns_ids: bool,
    /// The constraint on the answer.
    pub(crate) format: Option<AnswerForm>,
    /// Hints of the request.
    pub(crate) asked: ParsedHints,
    /// Options of a stream; none for one document at the end.
    pub(crate) stream: Option<StreamOptions>,
}

/// What a stream contains besides text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
}

impl Parameters {
    /// Reads the shared fields. Values that the client leaves open come from `defaults`.
    pub(crate) fn parse(
        fields: &mut Fields<'_>,
        defaults: &Sampling,
        vocabulary_size: u32,
    ) -> Result<Self, ApiError> {
        let ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
        let choices = to_u32(fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1));
        check_best_of(fields, choices)?;
        let (text, format) = (TextRules::parse(fields)?, AnswerForm::parse(fields)?);
        Ok(Parameters {
            sampling: sampling(fields, defaults, vocabulary_size)?,
            seed: fields.bits("seed")?,
            choices,
            text,
            stop_token_ids: stop_token_ids(fields, vocabulary_size)?,
            ignore_eos,
            max_tokens: max_tokens(fields)?,
            add_special_tokens: fields.boolean("add_special_tokens")?,
            split_special_tokens: fields.boolean("split_special_tokens")?,
            kept_tokens: kept_tokens(fields)?,
            keeps_start: keeps_start(fields)?,
            cache_salt: cache_salt(fields)?,
            vocabulary: VocabularyLimits::parse(fields, vocabulary_size)?,
            returns_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
            format,
            asked: ParsedHints::parse(fields)?,
            stream: stream(fields)?,
        })
    }
}

fn sampling(
    fields: &mut Fields<'_>,
    defaults: &Sampling,
    vocabulary_size: u32,
) -> Result<Sampling, ApiError> {
    let mut number = |name: &str, low: f64, high: f64, default: f32| -> Result<f32, ApiError> {
        Ok(fields.number(name, low..=high)?.map_or(default, to_f32))
    };
    let temperature = number("temperature", 0.0, 2.0, defaults.temperature)?;
    // OpenAI accepts 0, which means the smallest set of at least one token.
    let top_p = number("top_p", 0.0, 1.0, defaults.top_p)?.max(f32::MIN_POSITIVE);
    let min_p = number("min_p", 0.0, 1.0, defaults.min_p)?;
    // The bounds keep logits finite.
    let repetition_penalty = number("repetition_penalty", 0.01, 100.0, defaults.repetition_penalty)?;
    let presence_penalty = number("presence_penalty", -2.0, 2.0, defaults.presence_penalty)?;
    let frequency_penalty = number("frequency_penalty", -2.0, 2.0, defaults.frequency_penalty)?;
    let top_k = match fields.integer("top_k", -1..=i64::from(u32::MAX))? {
        Some(-1) => 0,
        Some(count) => to_u32(count),
        None => defaults.top_k,
    };
    let logit_bias = logit_bias(fields, vocabulary_size)?;
    if !logit_bias.is_empty() && repetition_penalty != 1.0 {
        let hint = "it is not implemented beside a 'repetition_penalty' other than 1";
        return Err(ApiError::unsupported("logit_bias", hint));
    }
    Ok(Sampling {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias: logit_bias.into(),
        seed: 0,
    })
}

/// Reads `logit_bias`: an object from token ids, as strings, to the biases of their logits.
fn logit_bias(fields: &mut Fields<'_>, vocabulary_size: u32) -> Result<Vec<(u32, f32)>, ApiError> {
    const FIELD: &str = "logit_bias";
    let biases = fields.object(FIELD)?.unwrap_or_default();
    if biases.len() > BIASES_MAX {
        let message = format!("'{FIELD}' has {} tokens; at most {BIASES_MAX} are taken", biases.len());
        return Err(ApiError::value(FIELD, message));
    }
    let read = |(id, bias): (&String, &serde_json::Value)| {
        let id: String = id.chars().take(32).collect();
        let token = id.parse().ok().filter(|id| *id < vocabulary_size).ok_or_else(|| {
            ApiError::value(FIELD, format!("'{FIELD}': {id:?} is not a token id below {vocabulary_size}"))
        })?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(|| {
            ApiError::value(
                FIELD,
                format!("'{FIELD}': the bias of token {token} must be a number from -100 to 100"),
            )
        })?;
        Ok((token, to_f32(bias)))
    };
    let mut biases: Vec<(u32, f32)> = biases.iter().map(read).collect::<Result<_, ApiError>>()?;
    biases.sort_by_key(|(token, _)| *token);
    if let Some(twice) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(ApiError::value(FIELD, format!("'{FIELD}' names token {} twice", twice[0].0)));
    }
    Ok(biases)
}

/// Reads the number of alternatives per position of a completion.
pub(crate) fn completion_logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, ApiError> {
    Ok(fields.integer("logprobs", 0..=LOGPROBS_MAX)?.map(to_u32))
}

/// Reads the number of alternatives per position of a chat.
pub(crate) fn chat_logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=LOGPROBS_MAX)?;
    match (wanted, top) {
        (true, top) => Ok(Some(to_u32(top.unwrap_or(0)))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::value("top_logprobs", "'top_logprobs' needs 'logprobs': true")),
    }
}

fn stop_token_ids(fields: &mut Fields<'_>, vocabulary_size: u32) -> Result<Vec<u32>, ApiError> {
    let Some(raw) = fields.take("stop_token_ids") else { return Ok(Vec::new()) };
    let mut ids = Vec::new();
    let take = |item| {
        if ids.len() == STOP_TOKENS_MAX {
            let message = format!("at most {STOP_TOKENS_MAX} stop tokens are supported");
            return Err(ApiError::value("stop_token_ids", message));
        }
        ids.push(token_id("stop_token_ids", item, vocabulary_size)?);
        Ok(())
    };
    each(raw, take).ok_or_else(|| wrong_type("stop_token_ids", "an array", raw))??;
    Ok(ids)
}

/// Checks `best_of`: only as many answers as choices are supported.
fn check_best_of(fields: &mut Fields<'_>, choices: u32) -> Result<(), ApiError> {
    match fields.integer("best_of", 1..=CHOICES_MAX)? {
        Some(best_of) if best_of > i64::from(choices) => Err(ApiError::unsupported(
            "best_of",
            "request as many choices with 'n' and 'logprobs', and choose",
        )),
        Some(best_of) if best_of < i64::from(choices) => {
            let message = format!("'best_of' is {best_of}, less than 'n', which is {choices}");
            Err(ApiError::value("best_of", message))
        }
        _ => Ok(()),
    }
}

/// Reads the bound of the answer. 0 is for requests that only return their prompt.
fn max_tokens(fields: &mut Fields<'_>) -> Result<Option<u32>, ApiError> {
    let range = 0..=i64::from(u32::MAX);
    let old = fields.integer("max_tokens", range.clone())?;
    let new = fields.integer("max_completion_tokens", range)?;
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        let message = format!("'max_tokens' is {old} but 'max_completion_tokens' is {new}");
        return Err(ApiError::value("max_completion_tokens", message));
    }
    Ok(new.or(old).map(to_u32))
}

/// Reads `truncate_prompt_tokens`.
fn kept_tokens(fields: &mut Fields<'_>) -> Result<Option<i64>, ApiError> {
    const FIELD: &str = "truncate_prompt_tokens";
    match fields.integer(FIELD, -1..=i64::from(u32::MAX))? {
        Some(0) => Err(ApiError::value(FIELD, format!("'{FIELD}' is 1 or more, or -1"))),
        kept => Ok(kept),
    }
}

/// Reads `truncation_side`: the side of the prompt that `truncate_prompt_tokens` cuts off.
fn keeps_start(fields: &mut Fields<'_>) -> Result<bool, ApiError> {
    const FIELD: &str = "truncation_side";
    match fields.string(FIELD)?.as_deref() {
        None | Some("left") => Ok(false),
        Some("right") => Ok(true),
        Some(_) => Err(ApiError::value(FIELD, format!("'{FIELD}' is 'left' or 'right'"))),
    }
}

impl Parameters {
    /// Returns the part of a prompt that is kept in a context of `context` tokens.
    pub(crate) fn truncated(&self, mut prompt: Vec<u32>, context: u32) -> Vec<u32> {
        let room = context.saturating_sub(self.max_tokens.unwrap_or(1).max(1));
        let kept = match self.kept_tokens {
            None => return prompt,
            Some(kept) => usize::try_from(kept).unwrap_or(room as usize),
        };
        match self.keeps_start {
            true => prompt.truncate(kept),
            false => drop(prompt.drain(..prompt.len().saturating_sub(kept))),
        }
        prompt
    }
}

pub(crate) fn cache_salt(fields: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    let salt = fields.string("cache_salt")?;
    if salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > CACHE_SALT_BYTES_MAX) {
        let message = format!("'cache_salt' has 1 to {CACHE_SALT_BYTES_MAX} bytes");
        return Err(ApiError::value("cache_salt", message));
    }
    Ok(salt)
}

fn stream(fields: &mut Fields<'_>) -> Result<Option<StreamOptions>, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let options = fields.fields("stream_options")?;
    if !stream {
        return match options {
            Some(_) => Err(ApiError::value("stream_options", "'stream_options' needs 'stream': true")),
            None => Ok(None),
        };
    }
    let mut options = options.unwrap_or_default();
    let continuous_usage = options.boolean("continuous_usage_stats")?.unwrap_or(false);
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    Ok(Some(StreamOptions { include_usage, continuous_usage: include_usage && continuous_usage }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parse(body: Value) -> Result<Parameters, ApiError> {
        let body = body.to_string();
        let mut fields = Fields::parse(body.as_bytes())?;
        Parameters::parse(&mut fields, &Sampling::default(), 256)
    }

    #[test]
    fn defaults_are_openais() {
        let parameters = parse(json!({})).unwrap();
        assert_eq!(parameters.sampling, Sampling::default());
        assert_eq!((parameters.choices, parameters.seed, parameters.max_tokens), (1, None, None));
        assert_eq!(parameters, parse(json!({"temperature": null, "stop": null, "n": null})).unwrap());
    }

    #[test]
    fn every_sampling_field_arrives() {
        let parameters = parse(json!({
            "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
            "presence_penalty": -1, "frequency_penalty": 2.0, "seed": -1, "n": 3.0, "stop": "x",
            "max_completion_tokens": 9, "max_tokens": 9
        }))
        .unwrap();
        let expected = Sampling {
            temperature: 0.5,
            top_p: 0.25,
            top_k: 7,
            min_p: 0.125,
            repetition_penalty: 1.5,
            presence_penalty: -1.0,
            frequency_penalty: 2.0,
            logit_bias: Default::default(),
            seed: 0,
        };
        assert_eq!(parameters.sampling, expected);
        assert_eq!(parameters.seed, Some(u64::MAX));
        assert_eq!((parameters.choices, parameters.max_tokens), (3, Some(9)));
        assert_eq!(parse(json!({"top_k": -1})).unwrap().sampling.top_k, 0);
        assert!(parse(json!({"top_p": 0})).unwrap().sampling.top_p > 0.0);
    }

    #[test]
    fn a_bias_of_logits_names_tokens_once_and_stands_alone() {
        let parameters = parse(json!({"logit_bias": {"200": -100, "3": 0.5}})).unwrap();
        assert_eq!(*parameters.sampling.logit_bias, [(3, 0.5), (200, -100.0)]);
        assert!(parse(json!({"logit_bias": {}, "repetition_penalty": 1.1})).is_ok());
        for body in [
            json!({"logit_bias": {"256": 1}}),
            json!({"logit_bias": {"x": 1}}),
            json!({"logit_bias": {"1": 101}}),
            json!({"logit_bias": {"1": "1"}}),
            json!({"logit_bias": {"1": 1, "01": 1}}),
            json!({"logit_bias": [1]}),
            json!({"logit_bias": {"1": 1}, "repetition_penalty": 1.1}),
        ] {
            assert!(parse(body.clone()).is_err(), "{body}");
        }
    }
}
