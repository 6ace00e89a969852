//! Enforces a key's limit on the length of answers, however the body asks for more.
//!
//! Engines take a length under several names, prefer one to the other, and add names with each version. So a
//! bounded body is rewritten: it has one length, under the name that every kind of engine takes, and of all
//! other fields those known not to request further tokens. Of two fields with one name the last one counts,
//! as with every supported engine, and names are unescaped.

use crate::object::RawObject;
use mixfleet_hal::outside::LENGTH_FIELDS;

/// Fields that a bounded body may have. Every other field is removed, since its effect is unknown.
const HARMLESS: [&str; 82] = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_prompt",
    "cache_salt",
    "chat_format",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "deadline",
    "deadline_s",
    "detokenize",
    "documents",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "dynatemp_range",
    "echo",
    "frequency_penalty",
    "grammar",
    "grammar_lazy",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "json_schema",
    "logit_bias",
    "logprobs",
    "messages",
    "metadata",
    "min_keep",
    "min_p",
    "mirostat",
    "mirostat_eta",
    "mirostat_tau",
    "mm_processor_kwargs",
    "model",
    "n",
    "n_probs",
    "nvext",
    "parallel_tool_calls",
    "parse_tool_calls",
    "post_sampling_probs",
    "presence_penalty",
    "priority",
    "prompt",
    "prompt_cache_key",
    "prompt_logprobs",
    "reasoning_effort",
    "reasoning_format",
    "repeat_last_n",
    "repeat_penalty",
    "repetition_penalty",
    "requests_left",
    "response_format",
    "safety_identifier",
    "samplers",
    "seed",
    "service_tier",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "split_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "structured_outputs",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_n_sigma",
    "top_p",
    "user",
];

/// Fields that request at least this many tokens; they are kept up to the bound.
const LEAST_FIELDS: [&str; 1] = ["min_tokens"];

/// Rewrites a body so that no engine gives an answer of more than `most` tokens. The length is the least one
/// that the body names.
///
/// # Errors
/// Which length is no number of tokens.
pub(crate) fn hold(object: &mut RawObject<'_>, most: u32) -> Result<(), String> {
    let mut length = most;
    for name in LENGTH_FIELDS.iter().chain(&LEAST_FIELDS) {
        if object.given(name).is_none() {
            continue;
        }
        let wanted: f64 = object.read(name).ok_or_else(|| format!("'{name}' is not a number"))?;
        let is_least = LEAST_FIELDS.contains(name);
        if is_least && !(0.0..=f64::from(most)).contains(&wanted) {
            return Err(format!("'{name}' is {wanted}; this key is given {most} at most"));
        }
        if !is_least && (1.0..f64::from(length)).contains(&wanted) {
            length = mixfleet_hal::cast::to_u32(mixfleet_hal::cast::to_u64(wanted));
        }
    }
    object.retain(|name| HARMLESS.contains(&name) || LEAST_FIELDS.contains(&name));
    object.set("max_tokens", &length);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    const MOST: u32 = 16;

    /// What an engine reads of a bounded body, or why there is none.
    fn held(body: &str) -> Result<Value, String> {
        let mut object = RawObject::parse(body.as_bytes()).map_err(|error| error.to_string())?;
        hold(&mut object, MOST)?;
        let text = object.write();
        let reread = RawObject::parse(&text).unwrap();
        assert_eq!(reread.names().count(), object.names().count(), "a name is there twice");
        Ok(serde_json::from_slice(&text).unwrap())
    }

    /// Longest answer that any kind of engine gives to a body, whichever field it prefers.
    fn longest(body: &Value) -> f64 {
        let fields = body.as_object().unwrap();
        let lengths = fields.iter().filter(|(name, _)| LENGTH_FIELDS.contains(&name.as_str()));
        lengths.map(|(_, value)| value.as_f64().unwrap()).fold(0.0, f64::max)
    }

    #[test]
    fn a_length_in_every_spelling_is_held() {
        for body in [
            r#"{"model":"m"}"#,
            r#"{"max_tokens":4,"max_completion_tokens":99}"#,
            r#"{"max_tokens":99,"max_completion_tokens":4}"#,
            r#"{"n_predict":-1}"#,
            r#"{"n_predict":99,"max_tokens":4}"#,
            r#"{"max_tokens":4,"max_tokens":99}"#,
            r#"{"max_tokens":99,"max\u005ftokens":4}"#,
            r#"{"max\u005ftokens":99}"#,
            r#"{"max_tokens":1e9}"#,
            r#"{"max_tokens":null}"#,
            r#"{"max_tokens":4,"extra_body":{"max_tokens":99},"sampling_params":{"n_predict":99}}"#,
            r#"{"max_new_tokens":99,"max_output_tokens":99,"num_predict":99,"max_length":99}"#,
            r#"{"max_tokens":0,"n_predict":-2}"#,
        ] {
            let held = held(body).unwrap();
            assert!(longest(&held) <= f64::from(MOST) && held["max_tokens"].as_u64() >= Some(1), "{held}");
            let names: Vec<&String> = held.as_object().unwrap().keys().collect();
            assert!(
                names.iter().all(|name| HARMLESS.contains(&name.as_str()) || *name == "max_tokens"),
                "{names:?}"
            );
        }
    }

    #[test]
    fn the_least_length_that_is_named_counts() {
        assert_eq!(held(r#"{"max_tokens":9,"max_completion_tokens":5.0}"#).unwrap()["max_tokens"], 5);
        assert_eq!(held(r#"{"n_predict":7}"#).unwrap()["max_tokens"], 7);
        assert_eq!(held("{}").unwrap()["max_tokens"], MOST);
    }

    #[test]
    fn a_length_that_is_no_number_or_a_least_beyond_the_bound_is_refused() {
        for body in
            [r#"{"max_tokens":"99"}"#, r#"{"n_predict":[1]}"#, r#"{"min_tokens":17}"#, r#"{"min_tokens":-1}"#]
        {
            assert!(held(body).is_err(), "{body}");
        }
        assert_eq!(held(r#"{"min_tokens":16}"#).unwrap()["min_tokens"], 16);
    }

    #[test]
    fn what_multiplies_work_or_is_unknown_is_left_out_and_the_rest_stays() {
        let body = r#"{"model":"m","messages":[ {"x":1.50} ],"best_of":9,"use_beam_search":true,"n_cmpl":9,"vllm_xargs":{},"odd":1,"top_k":3,"ignore_eos":true,"samplers":["top_k"]}"#;
        let mut object = RawObject::parse(body.as_bytes()).unwrap();
        hold(&mut object, MOST).unwrap();
        let expected = r#"{"model":"m","messages":[ {"x":1.50} ],"top_k":3,"ignore_eos":true,"samplers":["top_k"],"max_tokens":16}"#;
        assert_eq!(String::from_utf8(object.write()).unwrap(), expected);
    }

    /// A name with some of its letters as escapes.
    fn spelled(name: &str, escapes: u32) -> String {
        let letter = |(at, letter): (usize, char)| match escapes >> (at % 32) & 1 {
            1 => format!("\\u{:04x}", letter as u32),
            _ => letter.to_string(),
        };
        name.chars().enumerate().map(letter).collect()
    }

    proptest! {
        #[test]
        fn no_spelling_passes_the_bound(
            fields in proptest::collection::vec(
                (0..LENGTH_FIELDS.len() + 3, any::<u32>(), prop_oneof![
                    (-3_i64..40).prop_map(|n| n.to_string()),
                    (0.0_f64..1e12).prop_map(|n| n.to_string()),
                    any::<u64>().prop_map(|n| n.to_string()),
                    Just("null".to_owned()),
                    Just("1E5".to_owned()),
                    Just("\"77\"".to_owned()),
                    Just("{\"max_tokens\":77}".to_owned()),
                ]),
                0..8,
            )
        ) {
            let others = ["extra_body", "Max_Tokens", "best_of"];
            let field = |(at, escapes, value): &(usize, u32, String)| {
                let name = LENGTH_FIELDS.get(*at).unwrap_or_else(|| &others[*at - LENGTH_FIELDS.len()]);
                format!("\"{}\":{value}", spelled(name, *escapes))
            };
            let body = format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(","));
            if let Ok(held) = held(&body) {
                prop_assert!(longest(&held) <= f64::from(MOST), "{}", held);
                prop_assert!(held.as_object().unwrap().len() == 1, "{}", held);
            }
        }
    }
}
