//! Fields that would change the output and are not supported: they are refused, never ignored.
//!
//! A field that is neither in this list nor read by a parser (`user`, `metadata`, `store`, tracing hints of
//! clients) is accepted: benchmark clients and gateways send many such fields, and none of them changes what
//! is generated.

use serde_json::Value;

use super::errors::ApiError;
use super::fields::{Fields, value};

/// The value with which an unsupported field has no effect.
enum Neutral {
    /// No value: the field always has an effect.
    None,
    /// `false`, 0, and empty strings, arrays and objects.
    Empty,
    /// The given number.
    Number(f64),
    /// The given string.
    Word(&'static str),
    /// `true`.
    True,
}

const NO_TOOLS: &str = "use 'tools'";
const NO_GRAMMAR: &str = "use 'response_format' or 'structured_outputs'";
const NO_MEDIA: &str = "the models served here read and write text only";
const NO_SEARCH: &str = "only plain sampling is implemented";
const TEMPLATE: &str = "pass it to the template with 'chat_template_kwargs' if the template knows it";
const UNREAD: &str = "the template of this model does not read it";
const NO_EXCHANGE: &str = "this server was started without --kv-exchange";
const NOT_YET: &str = "it is not implemented";

const REFUSED: &[(&str, Neutral, &str)] = &[
    ("functions", Neutral::Empty, NO_TOOLS),
    ("function_call", Neutral::Word("none"), NO_TOOLS),
    ("web_search_options", Neutral::None, NO_TOOLS),
    ("guided_decoding_backend", Neutral::None, NO_GRAMMAR),
    ("guided_whitespace_pattern", Neutral::None, NO_GRAMMAR),
    ("structural_tag", Neutral::None, NO_GRAMMAR),
    ("json_schema", Neutral::Empty, NO_GRAMMAR),
    ("regex", Neutral::Empty, NO_GRAMMAR),
    ("ebnf", Neutral::Empty, NO_GRAMMAR),
    ("grammar", Neutral::Empty, NO_GRAMMAR),
    ("audio", Neutral::Empty, NO_MEDIA),
    ("mm_processor_kwargs", Neutral::Empty, NO_MEDIA),
    ("media_io_kwargs", Neutral::Empty, NO_MEDIA),
    ("prompt_embeds", Neutral::Empty, NO_MEDIA),
    ("return_mm_kwargs", Neutral::Empty, NO_MEDIA),
    ("logits_processors", Neutral::Empty, NOT_YET),
    ("suffix", Neutral::Empty, NOT_YET),
    ("echo", Neutral::Empty, "it is for /v1/completions"),
    ("detokenize", Neutral::True, "answers are text"),
    ("return_hidden_states", Neutral::Empty, NOT_YET),
    ("prediction", Neutral::Empty, NOT_YET),
    ("lora", Neutral::Empty, NOT_YET),
    ("lora_name", Neutral::Empty, NOT_YET),
    ("lora_path", Neutral::Empty, NOT_YET),
    ("kv_transfer_params", Neutral::Empty, NO_EXCHANGE),
    ("ec_transfer_params", Neutral::Empty, NO_MEDIA),
    ("return_tokens_as_token_ids", Neutral::Empty, NOT_YET),
    ("return_token_offsets", Neutral::Empty, NOT_YET),
    ("return_prompt_text", Neutral::Empty, NOT_YET),
    ("return_weight_versions", Neutral::Empty, NOT_YET),
    ("routed_experts_prompt_start", Neutral::Empty, NOT_YET),
    ("logprob_token_ids", Neutral::Empty, NOT_YET),
    ("thinking_token_budget", Neutral::None, NOT_YET),
    ("include_reasoning", Neutral::True, NOT_YET),
    ("repetition_detection", Neutral::None, NOT_YET),
    ("stream_interval", Neutral::Number(1.0), NOT_YET),
    ("watermarking", Neutral::Empty, NOT_YET),
    ("vllm_xargs", Neutral::Empty, NOT_YET),
    ("use_beam_search", Neutral::Empty, NO_SEARCH),
    ("early_stopping", Neutral::Empty, NO_SEARCH),
    ("length_penalty", Neutral::Number(1.0), NO_SEARCH),
    ("no_repeat_ngram_size", Neutral::Number(0.0), NO_SEARCH),
    ("typical_p", Neutral::Number(1.0), NO_SEARCH),
    ("top_a", Neutral::Number(0.0), NO_SEARCH),
    ("tfs_z", Neutral::Number(1.0), NO_SEARCH),
    ("mirostat", Neutral::Number(0.0), NO_SEARCH),
    ("dynatemp_range", Neutral::Number(0.0), NO_SEARCH),
    ("xtc_probability", Neutral::Number(0.0), NO_SEARCH),
    ("dry_multiplier", Neutral::Number(0.0), NO_SEARCH),
    ("chat_template", Neutral::None, "the model's own template is used"),
    ("documents", Neutral::Empty, UNREAD),
    ("enable_thinking", Neutral::None, TEMPLATE),
    ("thinking", Neutral::None, TEMPLATE),
    ("reasoning", Neutral::None, TEMPLATE),
    ("reasoning_effort", Neutral::None, UNREAD),
    ("verbosity", Neutral::None, TEMPLATE),
];

/// Checks the fields that the parsers did not read: 400 for a field with an unsupported effect.
pub(crate) fn check(fields: &Fields<'_>) -> Result<(), ApiError> {
    // A value too large to parse counts as having an effect.
    let look = |name: &str, fine: &dyn Fn(&Value) -> bool| {
        fields.get(name).is_none_or(|raw| value(name, raw).is_ok_and(|value| fine(&value)))
    };
    for (name, neutral, hint) in REFUSED {
        if !look(name, &|value| is_neutral(value, neutral)) {
            return Err(ApiError::unsupported(name, hint));
        }
    }
    let text_only =
        |value: &Value| value.as_array().is_some_and(|list| list.iter().all(|mode| mode == "text"));
    if !look("modalities", &text_only) {
        return Err(ApiError::unsupported("modalities", NO_MEDIA));
    }
    for name in fields.unread() {
        if !REFUSED.iter().any(|(refused, ..)| refused == &name) {
            tracing::debug!(field = name.get(..64).unwrap_or(name), "request field without effect");
        }
    }
    Ok(())
}

fn is_neutral(value: &Value, neutral: &Neutral) -> bool {
    match neutral {
        Neutral::None => false,
        Neutral::Number(number) => value.as_f64() == Some(*number),
        Neutral::Word(word) => value.as_str() == Some(word),
        Neutral::True => value == &Value::Bool(true),
        Neutral::Empty => asks_for_nothing(value),
    }
}

/// `null`, `false`, 0, and empty strings, arrays and objects.
pub(super) fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
