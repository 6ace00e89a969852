//! One request on two engines: what its body says to the one that computes the prompt, and to the one that
//! answers.
//!
//! The first one keeps the prompt's KV for the other one (vLLM with a connector such as NIXL, or this program
//! and vLLM with a connector of ours), and tells in its answer where it is. That goes to the second one
//! unchanged: addresses, ids and sizes in it are between engines. It is only checked to be complete, since
//! vLLM 0.32 dies of parameters that are not.

use crate::kind::EngineKind;
use crate::object::RawObject;
use mixfleet_hal::outside::{EngineFault, EngineFaultKind, EngineHandOff};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

/// Where vLLM's bodies and answers have it.
const PARAMETERS: &str = "kv_transfer_params";
/// Maximum length of the description of a KV location; a block of a prompt takes some 7 bytes of it.
const PARAMETERS_BYTES_MAX: usize = 4 << 20;

/// Which of the two forms it has.
#[derive(Deserialize)]
struct Form {
    do_remote_prefill: bool,
    remote_url: Option<IgnoredAny>,
}

/// Required fields for KV exchanged with this program, which checks everything it receives.
#[derive(Deserialize)]
struct ExchangeParameters {
    #[serde(rename = "remote_url")]
    _url: String,
    remote_num_tokens: u64,
}

/// Required fields for KV that vLLM engines pull from each other.
#[derive(Deserialize)]
struct PullParameters {
    /// By groups of layers.
    remote_block_ids: Vec<Vec<u64>>,
    #[serde(rename = "remote_engine_id")]
    _engine: String,
    #[serde(rename = "remote_request_id")]
    _request: String,
    #[serde(rename = "remote_host")]
    _host: String,
    #[serde(rename = "remote_port")]
    _port: IgnoredAny,
}

/// Fields that let two engines share a request only with these values: others ask for several answers, or for
/// what the prompt's computation tells.
const UNDIVIDED: [(&str, &[&str]); 7] = [
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("max_completion_tokens", &[]),
    ("max_tokens", &[]),
    ("n", &["1"]),
    ("prompt_logprobs", &[]),
    ("use_beam_search", &["false"]),
];

/// Fields that concern only the end of an answer: with them, the first token might end it, and of such
/// answers earlier versions of vLLM keep no KV for others.
const OF_THE_END: [&str; 4] = ["min_tokens", "stop", "stop_token_ids", "stream_options"];

/// Fields that decide what tokens a prompt has and whose they are: all others are for the engine that
/// answers, and may not be known where the prompt is computed.
pub(crate) const OF_THE_PROMPT: [&str; 12] = [
    "add_generation_prompt",
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "messages",
    "model",
    "prompt",
    "reasoning_effort",
    "tools",
];

/// Whether two engines can share a request.
///
/// # Errors
/// What rules it out.
pub(crate) fn check(object: &RawObject<'_>) -> Result<(), String> {
    for (name, values) in UNDIVIDED {
        let Some(text) = object.given(name) else { continue };
        let is_fine = match name {
            // one token is there when the prompt is
            "max_tokens" | "max_completion_tokens" => object.read::<f64>(name).is_some_and(|most| most > 1.0),
            _ => values.contains(&text),
        };
        if !is_fine {
            return Err(format!("two engines cannot share it: '{name}' is in the request"));
        }
    }
    one_prompt(object)
}

/// Whether it has one prompt at most.
///
/// # Errors
/// When it has several.
pub(crate) fn one_prompt(object: &RawObject<'_>) -> Result<(), String> {
    let prompts = object.given("prompt").unwrap_or("\"\"");
    if prompts.starts_with('[') && object.read::<Vec<u32>>("prompt").is_none() {
        return Err("two engines cannot share it: it has several prompts".into());
    }
    Ok(())
}

/// Why a client's request is refused, if it is: a client that names KV to take over could read other clients'
/// KV, and an invalid name ends the engine.
pub(crate) fn refusal(object: &RawObject<'_>) -> Option<String> {
    let is_there = object.get(PARAMETERS).is_some();
    is_there.then(|| format!("'{PARAMETERS}' is between engines, and not taken from clients"))
}

/// Rewrites the request so that an engine of that kind computes only its prompt, and keeps its KV.
pub(crate) fn of_prompt(kind: EngineKind, object: &mut RawObject<'_>) {
    if kind == EngineKind::Mixfleet {
        object.keep(&OF_THE_PROMPT);
    }
    object.set("stream", &false);
    object.set("max_tokens", &1);
    if object.given("max_completion_tokens").is_some() {
        object.set("max_completion_tokens", &1);
    }
    OF_THE_END.iter().for_each(|name| object.remove(name));
    object.set("ignore_eos", &true);
    object.set(PARAMETERS, &serde_json::json!({"do_remote_decode": true, "do_remote_prefill": false}));
}

/// Rewrites the request so that the KV of its prompt comes from where `hand_off` says.
///
/// # Errors
/// When that is not JSON.
pub(crate) fn of_answer(object: &mut RawObject<'_>, hand_off: &EngineHandOff) -> Result<(), String> {
    let raw: &RawValue = serde_json::from_str(&hand_off.0).map_err(|error| error.to_string())?;
    object.set(PARAMETERS, &raw);
    Ok(())
}

/// Where the KV of a prompt is, by the answer of the engine that computed it.
///
/// # Errors
/// When it does not say.
pub(crate) fn read(document: &[u8]) -> Result<EngineHandOff, EngineFault> {
    let not = |cause: String| EngineFault::new(EngineFaultKind::NotHandedOff, cause);
    let object =
        RawObject::parse(document).map_err(|error| not(format!("its answer is no object: {error}")))?;
    let given = object.given(PARAMETERS).ok_or_else(|| {
        not(format!(
            "its answer has no {PARAMETERS}: it was started without a connector for KV, or kept none"
        ))
    })?;
    if given.len() > PARAMETERS_BYTES_MAX {
        return Err(not(format!("{PARAMETERS} in its answer have more than {PARAMETERS_BYTES_MAX} bytes")));
    }
    match names_kv(given) {
        Ok(true) => Ok(EngineHandOff(given.into())),
        Ok(false) => Err(not(format!("{PARAMETERS} in its answer name no KV"))),
        Err(error) => Err(not(format!("{PARAMETERS} in its answer are not complete: {error}"))),
    }
}

/// Whether there is KV to be had.
fn names_kv(given: &str) -> serde_json::Result<bool> {
    let Form { do_remote_prefill, remote_url } = serde_json::from_str(given)?;
    let is_there = match remote_url {
        Some(_) => serde_json::from_str::<ExchangeParameters>(given)?.remote_num_tokens > 0,
        None => {
            let blocks = serde_json::from_str::<PullParameters>(given)?.remote_block_ids;
            !blocks.iter().all(Vec::is_empty)
        }
    };
    Ok(do_remote_prefill && is_there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> RawObject<'_> {
        RawObject::parse(text.as_bytes()).unwrap()
    }

    fn text(object: &RawObject<'_>) -> String {
        String::from_utf8(object.write()).unwrap()
    }

    #[test]
    fn what_two_engines_cannot_share_is_named() {
        for fine in [
            r#"{"messages":[]}"#,
            r#"{"prompt":"a","n":1,"best_of":null,"max_tokens":2}"#,
            r#"{"prompt":[1,2],"echo":false,"tools":[{}],"odd":7}"#,
            r#"{"prompt":["a"]}"#,
        ] {
            assert_eq!(check(&object(fine)).is_ok(), !fine.contains("[\"a"), "{fine}");
        }
        for (name, body) in [
            ("n", r#"{"n":2}"#),
            ("best_of", r#"{"best_of":3}"#),
            ("echo", r#"{"echo":true}"#),
            ("prompt_logprobs", r#"{"prompt_logprobs":0}"#),
            ("max_tokens", r#"{"max_tokens":1}"#),
            ("max_completion_tokens", r#"{"max_completion_tokens":"x"}"#),
            ("several prompts", r#"{"prompt":[[1],[2]]}"#),
        ] {
            let refused = check(&object(body)).unwrap_err();
            assert!(refused.contains(name), "{body}: {refused}");
        }
    }

    #[test]
    fn only_the_prompt_is_asked_for_and_where_it_is_passes_unread() {
        let body = r#"{"model":"m","prompt":"a","max_completion_tokens":9,"stop":["x"],"min_tokens":4,"stream":true,"stream_options":{"include_usage":true},"odd":1.50}"#;
        let mut first = object(body);
        of_prompt(EngineKind::Vllm, &mut first);
        let expected = r#"{"model":"m","prompt":"a","max_completion_tokens":1,"stream":false,"odd":1.50,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#;
        assert_eq!(text(&first), expected);
        let told = TOLD.replace("1.0,", "5601, ");
        let given = told.split_once("params\": ").unwrap().1.strip_suffix('}').unwrap();
        let hand_off = read(told.as_bytes()).unwrap();
        let mut second = object(r#"{"prompt":"a"}"#);
        of_answer(&mut second, &hand_off).unwrap();
        assert_eq!(text(&second), format!(r#"{{"prompt":"a","kv_transfer_params":{given}}}"#));
    }

    const TOLD: &str = r#"{"choices":[],"kv_transfer_params": {"do_remote_prefill":true, "remote_block_ids":[[1, 2]],"remote_engine_id":"e", "remote_request_id":"r","remote_host":"h","remote_port":1.0,"more":[null]}}"#;

    #[test]
    fn of_another_kind_only_what_makes_a_prompt_is_asked() {
        let mut first =
            object(r#"{"model":"m","top_k":-1,"messages":[],"tools":[1],"min_tokens":3,"odd":1}"#);
        of_prompt(EngineKind::Mixfleet, &mut first);
        let expected = r#"{"model":"m","messages":[],"tools":[1],"stream":false,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#;
        assert_eq!(text(&first), expected);
    }

    #[test]
    fn kv_in_an_exchange_is_named_by_its_address_and_length() {
        let told = r#"{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_url":"http://h:1","remote_num_tokens":64}}"#;
        assert!(read(told.as_bytes()).is_ok());
        for (good, bad) in [("64", "0"), ("64", "-1"), ("\"http://h:1\"", "7"), ("true", "false")] {
            assert!(read(told.replacen(good, bad, 1).as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_an_engine_would_die_of_is_not_handed_over() {
        assert!(read(TOLD.as_bytes()).is_ok());
        for (good, bad) in [
            ("[[1, 2]]", "[[]]"),
            ("[[1, 2]]", "[]"),
            ("[[1, 2]]", "\"x\""),
            ("[[1, 2]]", "null"),
            ("true", "false"),
            ("\"e\"", "7"),
            ("\"remote_request_id\":\"r\",", ""),
            ("\"remote_host\":\"h\",", ""),
            ("\"remote_port\":1.0,", ""),
            ("kv_transfer_params", "other"),
            ("}}", "}"),
        ] {
            let wrong = TOLD.replacen(good, bad, 1);
            assert_ne!(wrong, TOLD);
            let fault = read(wrong.as_bytes()).unwrap_err();
            assert_eq!(fault.kind, EngineFaultKind::NotHandedOff, "{wrong}");
        }
        for wrong in ["{}", "[]", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":[7]}"#, "x"] {
            assert_eq!(read(wrong.as_bytes()).unwrap_err().kind, EngineFaultKind::NotHandedOff, "{wrong}");
        }
        let asks = |body: &str| refusal(&object(body)).is_some();
        assert!(asks(r#"{"kv_transfer_params":{"do_remote_prefill":true}}"#) && !asks(r#"{"prompt":"a"}"#));
    }
}
