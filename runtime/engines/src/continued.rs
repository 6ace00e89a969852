//! Has an engine continue an answer that another one began: the text so far becomes the end of the prompt.
//!
//! An answer is continued only if that gives a sample of the same distribution: each token must depend on the
//! tokens before it, and on no state of the first engine. Unknown fields might violate this, so they rule it
//! out.

use crate::kind::EngineKind;
use crate::object::RawObject;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::outside::EngineEndpoint;
use serde_json::Value;
use serde_json::value::RawValue;

/// Fields that do not depend on where the answer begins, at any value.
const STATELESS: [&str; 27] = [
    "add_special_tokens",
    "allowed_token_ids",
    "cache_prompt",
    "cache_salt",
    "chat_template_kwargs",
    "ignore_eos",
    "logit_bias",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "model",
    "priority",
    "prompt",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
];

/// Fields that ask for nothing at these values.
const NEUTRAL: [(&str, &[&str]); 12] = [
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("include_reasoning", &["true"]),
    ("logprobs", &["false"]),
    ("n", &["1"]),
    ("parallel_tool_calls", &["true", "false"]),
    ("presence_penalty", &["0", "0.0"]),
    ("repeat_penalty", &["1", "1.0"]),
    ("repetition_penalty", &["1", "1.0"]),
    ("tool_choice", &["\"none\""]),
    ("tools", &["[]"]),
];

/// Whether an answer may be continued.
///
/// # Errors
/// What rules it out.
pub(crate) fn check(endpoint: EngineEndpoint, object: &RawObject<'_>, begun: &str) -> Result<(), String> {
    let ruled_out = |name: &str| Err(format!("'{name}' is in the request"));
    for name in object.names().filter(|name| object.given(name).is_some()) {
        let text = object.given(name).unwrap_or_default();
        let neutral = NEUTRAL.iter().find(|(known, _)| *known == name);
        let is_fine = match name {
            "seed" => object.read::<f64>("temperature") == Some(0.0),
            "response_format" => {
                object.read::<Value>(name).is_some_and(|format| format == serde_json::json!({"type": "text"}))
            }
            _ => STATELESS.contains(&name) || neutral.is_some_and(|(_, values)| values.contains(&text)),
        };
        if !is_fine {
            return ruled_out(name);
        }
    }
    if begun.contains('\u{FFFD}') {
        return Err("the text so far has bytes that are no characters".into());
    }
    let is_possible = match endpoint {
        EngineEndpoint::Chat => last_role(object).is_some_and(|role| role != "assistant"),
        EngineEndpoint::Completions => {
            let prompt = object.given("prompt").unwrap_or_default();
            prompt.starts_with('"') || object.read::<Vec<u32>>("prompt").is_some_and(|ids| !ids.is_empty())
        }
    };
    match (is_possible, endpoint) {
        (true, _) => Ok(()),
        (false, EngineEndpoint::Chat) => Err("its last message is the assistant's own".into()),
        (false, EngineEndpoint::Completions) => Err("it has several prompts".into()),
    }
}

fn last_role(object: &RawObject<'_>) -> Option<String> {
    let messages: Vec<&RawValue> = serde_json::from_str(object.given("messages")?).ok()?;
    RawObject::parse(messages.last()?.get().as_bytes()).ok()?.read("role")
}

/// Rewrites the request so that its answer is the rest behind `text`, whose tokens are `ids`.
///
/// # Errors
/// Why nothing can be left to generate.
pub(crate) fn rewrite(
    kind: EngineKind,
    endpoint: EngineEndpoint,
    object: &mut RawObject<'_>,
    text: &str,
    ids: &[u32],
) -> Result<(), String> {
    for name in ["max_tokens", "max_completion_tokens"] {
        let Some(most) = object.read::<f64>(name) else { continue };
        let left = to_u64(most).saturating_sub(ids.len() as u64);
        if left == 0 {
            return Err("all of its tokens may be there already".into());
        }
        object.set(name, &left);
    }
    match endpoint {
        EngineEndpoint::Chat => {
            let messages = object.given("messages").unwrap_or_default().trim_end();
            let before = messages.strip_suffix(']').unwrap_or_default().to_owned();
            let text = Value::from(text);
            let raw = format!("{before},{{\"role\":\"assistant\",\"content\":{text}}}]");
            object.set("messages", &raw_value(raw)?);
            if kind.is_like_vllm() {
                object.set("add_generation_prompt", &false);
                object.set("continue_final_message", &true);
            }
        }
        EngineEndpoint::Completions => match object.read::<String>("prompt") {
            Some(prompt) => object.set("prompt", &(prompt + text)),
            None => {
                let mut prompt = object.read::<Vec<u32>>("prompt").unwrap_or_default();
                prompt.extend_from_slice(ids);
                object.set("prompt", &prompt);
            }
        },
    }
    Ok(())
}

fn raw_value(text: String) -> Result<Box<RawValue>, String> {
    RawValue::from_string(text).map_err(|error| format!("'messages' cannot be extended: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineEndpoint::{Chat, Completions};

    fn object(text: &str) -> RawObject<'_> {
        RawObject::parse(text.as_bytes()).unwrap()
    }

    fn chat(more: &str) -> String {
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"stream":true{more}}}"#)
    }

    #[test]
    fn what_depends_on_more_than_the_tokens_before_rules_it_out() {
        for fine in [
            "",
            r#","temperature":0.7,"top_p":0.9"#,
            r#","seed":7,"temperature":0"#,
            r#","seed":null"#,
            r#","n":1"#,
            r#","presence_penalty":0"#,
            r#","response_format":{"type":"text"}"#,
            r#","tools":[]"#,
            r#","logit_bias":{"3":-100}"#,
            r#","stop":["x"]"#,
        ] {
            assert_eq!(check(Chat, &object(&chat(fine)), "so far"), Ok(()), "{fine}");
        }
        for (name, more) in [
            ("seed", r#","seed":7"#),
            ("seed", r#","seed":7,"temperature":0.1"#),
            ("n", r#","n":2"#),
            ("presence_penalty", r#","presence_penalty":0.5"#),
            ("response_format", r#","response_format":{"type":"json_object"}"#),
            ("tools", r#","tools":[{"type":"function"}]"#),
            ("logprobs", r#","logprobs":true"#),
            ("mirostat", r#","mirostat":2"#),
            ("never_seen", r#","never_seen":1"#),
        ] {
            let refused = check(Chat, &object(&chat(more)), "so far").unwrap_err();
            assert!(refused.contains(&format!("'{name}'")), "{more}: {refused}");
        }
        assert!(check(Chat, &object(&chat("")), "a\u{FFFD}").is_err());
        let own = r#"{"messages":[{"role":"user"},{"role":"assistant","content":"x"}]}"#;
        assert!(check(Chat, &object(own), "").unwrap_err().contains("assistant"));
        for (prompt, fine) in
            [(r#""a""#, true), ("[1,2]", true), (r#"["a"]"#, false), ("[[1]]", false), ("[]", false)]
        {
            let body = format!(r#"{{"prompt":{prompt}}}"#);
            assert_eq!(check(Completions, &object(&body), "").is_ok(), fine, "{prompt}");
        }
    }

    #[test]
    fn the_text_so_far_becomes_the_end_of_the_prompt() {
        let written = |kind, endpoint, body: &str| {
            let mut object = object(body);
            rewrite(kind, endpoint, &mut object, "so \"far", &[5, 6])
                .map(|()| String::from_utf8(object.write()).unwrap())
        };
        let body = chat(r#","max_tokens":5.0"#);
        let expected = r#"{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"so \"far"}],"stream":true,"max_tokens":3"#;
        assert_eq!(written(EngineKind::LlamaCpp, Chat, &body).unwrap(), format!("{expected}}}"));
        let flags = r#","add_generation_prompt":false,"continue_final_message":true}"#;
        assert_eq!(written(EngineKind::Vllm, Chat, &body).unwrap(), format!("{expected}{flags}"));
        let completion = |prompt: &str| {
            written(EngineKind::Vllm, Completions, &format!(r#"{{"prompt":{prompt}}}"#)).unwrap()
        };
        assert_eq!(completion(r#""a ""#), r#"{"prompt":"a so \"far"}"#);
        assert_eq!(completion("[1, 2]"), r#"{"prompt":[1,2,5,6]}"#);
        assert!(written(EngineKind::Vllm, Completions, r#"{"prompt":"a","max_tokens":2}"#).is_err());
    }
}
