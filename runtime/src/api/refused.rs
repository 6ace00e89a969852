//! Fields that would change the output and are not supported: they are refused, never ignored.
//!
//! A field that is neither in these lists nor read by a parser (`user`, `metadata`, `store`, tracing hints of
//! clients) is accepted: benchmark clients and gateways send many such fields, and none of them changes what
//! is generated. The lists hold the fields of OpenAI, vLLM, SGLang, llama.cpp, Ollama, transformers and
//! text-generation-inference that do.

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
    ("verbosity", Neutral::Word("medium"), TEMPLATE),
];

/// Fields with which other interfaces name something that has another name here, or no equivalent; the value
/// without effect, and a hint.
const ELSEWHERE: &[(&[&str], Neutral, &str)] = &[
    (&["n_predict", "num_predict"], Neutral::Number(-1.0), "use 'max_tokens'"),
    (&["max_new_tokens", "max_output_tokens", "max_gen_len"], Neutral::None, "use 'max_tokens'"),
    (&["min_new_tokens", "min_length"], Neutral::Empty, "use 'min_tokens'"),
    (&["do_sample"], Neutral::True, "use 'temperature': 0 for greedy answers"),
    (&["repeat_penalty", "rep_pen"], Neutral::Number(1.0), "use 'repetition_penalty'"),
    (&["random_seed", "sampler_seed"], Neutral::None, "use 'seed'"),
    (&["stop_sequences", "stop_strings"], Neutral::Empty, "use 'stop'"),
    (&["eos_token_id", "end_id"], Neutral::None, "use 'stop_token_ids'"),
    (&["ban_eos_token"], Neutral::Empty, "use 'ignore_eos'"),
    (&["bad_words_ids", "custom_token_bans", "suppress_tokens"], Neutral::Empty, "use 'logit_bias'"),
    (&["sequence_bias"], Neutral::Empty, "use 'logit_bias'"),
    (&["n_cmpl", "num_return_sequences"], Neutral::Number(1.0), "use 'n'"),
    (&["n_probs", "top_logprobs", "top_n_tokens"], Neutral::Empty, "use 'logprobs'"),
    (&["return_full_text"], Neutral::Empty, "use 'echo'"),
    (&["truncate"], Neutral::Empty, "use 'truncate_prompt_tokens'"),
    (&["messages", "tools"], Neutral::Empty, "it is for /v1/chat/completions"),
    (&["prompt", "input", "inputs", "input_ids"], Neutral::Empty, "use 'messages'"),
    (&["system", "instructions"], Neutral::Empty, "send a message of the role \"system\""),
    (
        &["extra_body", "options", "parameters", "sampling_params"],
        Neutral::Empty,
        "send its fields in the body",
    ),
    (&["format", "guided_decoding", "grammar_string", "text"], Neutral::Empty, NO_GRAMMAR),
    (&["num_beams", "beam_width", "guidance_scale"], Neutral::Number(1.0), NO_SEARCH),
    (&["encoder_repetition_penalty"], Neutral::Number(1.0), NO_SEARCH),
    (&["top_n_sigma", "nsigma"], Neutral::Number(-1.0), NO_SEARCH),
    (&["samplers", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"], Neutral::Empty, NO_SEARCH),
    (&["smoothing_factor", "dynamic_temperature", "negative_prompt"], Neutral::Empty, NO_SEARCH),
    (&["encoder_no_repeat_ngram_size", "custom_logit_processor"], Neutral::Empty, NO_SEARCH),
    (&["custom_params"], Neutral::Empty, NO_SEARCH),
    (&["images", "image_data"], Neutral::Empty, NO_MEDIA),
    (&["think", "thinking_budget", "reasoning_budget", "safe_prompt"], Neutral::None, TEMPLATE),
    (&["separate_reasoning", "parse_tool_calls"], Neutral::True, NOT_YET),
    (&["stop_regex", "no_stop_trim", "lora_request", "adapter_id"], Neutral::Empty, NOT_YET),
    (&["raw", "template", "tool_prompt", "t_max_predict_ms"], Neutral::Empty, NOT_YET),
    (&["transforms", "plugins", "enable_search"], Neutral::Empty, NOT_YET),
];

/// Checks the fields that the parsers did not read: 400 for a field with an unsupported effect.
pub(crate) fn check(fields: &Fields<'_>) -> Result<(), ApiError> {
    // A value too large to parse counts as having an effect.
    let look = |name: &str, fine: &dyn Fn(&Value) -> bool| {
        fields.get(name).is_none_or(|raw| value(name, raw).is_ok_and(|value| fine(&value)))
    };
    let elsewhere = ELSEWHERE
        .iter()
        .flat_map(|(names, neutral, hint)| names.iter().map(move |name| (name, neutral, hint)));
    let all = REFUSED.iter().map(|(name, neutral, hint)| (name, neutral, hint)).chain(elsewhere);
    for (name, neutral, hint) in all {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_other_interfaces_are_refused_by_name() {
        let of = |body: &str| check(&Fields::parse(body.as_bytes()).unwrap());
        for (names, ..) in ELSEWHERE {
            for name in *names {
                assert!(!REFUSED.iter().any(|(other, ..)| other == name), "{name} is in both lists");
                let error = of(&format!("{{\"{name}\": 7}}")).unwrap_err().to_json();
                assert!(error.contains(&format!("'{name}' is not supported")), "{error}");
            }
        }
        let neutral = r#"{"n_predict": -1, "do_sample": true, "guidance_scale": 1, "options": {}, "num_beams": 1,
            "stop_sequences": [], "top_logprobs": 0, "user": "u", "keep_alive": "5m"}"#;
        assert!(of(neutral).is_ok());
    }
}
