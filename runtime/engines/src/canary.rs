//! A request as a canary: what its body says, and the log-probabilities in its answer.

use crate::hand_off::{self, OF_THE_PROMPT};
use crate::kind::EngineKind;
use crate::object::RawObject;
use mixfleet_hal::outside::{
    CanaryTerms, DrawnToken, EngineEndpoint, EngineFault, EngineFaultKind, RankedToken,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// vLLM's priority of a canary; requests without one have 0, and smaller ones go first.
const BEHIND_OTHERS: i32 = 1000;

#[derive(Deserialize)]
struct CanaryAnswer {
    choices: Vec<AnsweredChoice>,
}

#[derive(Deserialize)]
struct AnsweredChoice {
    logprobs: Option<ChoiceLogprobs>,
}

/// Chats have the first field, completions the other two.
#[derive(Deserialize)]
struct ChoiceLogprobs {
    content: Option<Vec<CanaryToken>>,
    tokens: Option<Vec<String>>,
    top_logprobs: Option<Vec<Option<CompletionTop>>>,
}

/// Log-probabilities by token; none where JSON cannot say it.
type CompletionTop = BTreeMap<String, Option<f64>>;

#[derive(Deserialize)]
struct CanaryToken {
    token: String,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Deserialize)]
struct ChatAlternative {
    token: String,
    logprob: Option<f64>,
}

/// The body of a canary: the fields of the prompt are kept, and all others are ours.
///
/// # Errors
/// Why the request is no canary.
pub(crate) fn body(
    kind: EngineKind,
    endpoint: EngineEndpoint,
    body: &[u8],
    terms: &CanaryTerms,
) -> Result<Vec<u8>, EngineFault> {
    let not = |cause: String| EngineFault::new(EngineFaultKind::NotTaken, cause);
    if !kind.is_like_vllm() {
        return Err(not(format!("{kind} takes no canaries")));
    }
    let mut object = RawObject::parse(body).map_err(|error| not(error.to_string()))?;
    hand_off::one_prompt(&object).map_err(not)?;
    object.keep(&OF_THE_PROMPT);
    object.set("stream", &false);
    object.set("max_tokens", &terms.tokens);
    object.set("temperature", &0);
    object.set("ignore_eos", &true);
    object.set("cache_salt", &terms.salt);
    match endpoint {
        EngineEndpoint::Chat => {
            object.set("logprobs", &true);
            object.set("top_logprobs", &terms.ranked);
        }
        EngineEndpoint::Completions => object.set("logprobs", &terms.ranked),
    }
    // texts of tokens can be alike
    object.set("return_tokens_as_token_ids", &true);
    if terms.is_low_priority {
        object.set("priority", &BEHIND_OTHERS);
    }
    Ok(object.write())
}

/// The tokens of an answer with what else was likely.
///
/// # Errors
/// When it does not tell.
pub(crate) fn drawn(endpoint: EngineEndpoint, document: &[u8]) -> Result<Vec<DrawnToken>, EngineFault> {
    let not = |cause: &str| EngineFault::new(EngineFaultKind::Malformed, cause);
    let answer: CanaryAnswer = serde_json::from_slice(document)
        .map_err(|error| not(&format!("an answer's log-probabilities cannot be read: {error}")))?;
    let logprobs = answer.choices.into_iter().next().and_then(|choice| choice.logprobs);
    let logprobs = logprobs.ok_or_else(|| not("its answer has no log-probabilities"))?;
    let drawn: Option<Vec<DrawnToken>> = match endpoint {
        EngineEndpoint::Chat => logprobs.content.map(|tokens| tokens.into_iter().map(chat).collect()),
        EngineEndpoint::Completions => logprobs.tokens.zip(logprobs.top_logprobs).map(completion),
    };
    let drawn = drawn.filter(|drawn| !drawn.is_empty() && drawn.iter().all(|at| !at.ranked.is_empty()));
    drawn.ok_or_else(|| not("its answer does not list likely tokens"))
}

fn chat(token: CanaryToken) -> DrawnToken {
    let ranked = token.top_logprobs.into_iter().map(|other| ranked(other.token, other.logprob));
    DrawnToken { token: token.token, ranked: ranked.collect() }
}

fn completion(columns: (Vec<String>, Vec<Option<CompletionTop>>)) -> Vec<DrawnToken> {
    let (tokens, tops) = columns;
    let drawn = |token: String, top: Option<CompletionTop>| {
        let likely = top.unwrap_or_default().into_iter();
        DrawnToken { token, ranked: likely.map(|other| ranked(other.0, other.1)).collect() }
    };
    tokens.into_iter().zip(tops).map(|both| drawn(both.0, both.1)).collect()
}

/// What JSON cannot say, which is null, is impossible.
fn ranked(token: String, logprob: Option<f64>) -> RankedToken {
    RankedToken { token, logprob: logprob.unwrap_or(f64::NEG_INFINITY) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(is_low_priority: bool) -> CanaryTerms {
        CanaryTerms { salt: "s".into(), tokens: 4, ranked: 5, is_low_priority }
    }

    #[test]
    fn a_canary_has_the_prompt_and_nothing_else_of_the_request() {
        let text = r#"{"model":"m","messages":[{"role":"user"}],"tools":[1],"n":3,"stream":true,"stop":["x"],"temperature":1.5,"cache_salt":"own","response_format":{"type":"json_object"}}"#;
        let written = body(EngineKind::Vllm, EngineEndpoint::Chat, text.as_bytes(), &terms(true)).unwrap();
        let expected = r#"{"model":"m","messages":[{"role":"user"}],"tools":[1],"cache_salt":"s","stream":false,"max_tokens":4,"temperature":0,"ignore_eos":true,"logprobs":true,"top_logprobs":5,"return_tokens_as_token_ids":true,"priority":1000}"#;
        assert_eq!(String::from_utf8(written).unwrap(), expected);
        let written = body(
            EngineKind::Vllm,
            EngineEndpoint::Completions,
            br#"{"model":"m","prompt":[1,2]}"#,
            &terms(false),
        );
        let expected = r#"{"model":"m","prompt":[1,2],"stream":false,"max_tokens":4,"temperature":0,"ignore_eos":true,"cache_salt":"s","logprobs":5,"return_tokens_as_token_ids":true}"#;
        assert_eq!(String::from_utf8(written.unwrap()).unwrap(), expected);
    }

    #[test]
    fn what_has_no_single_prompt_is_no_canary() {
        for (kind, text) in [
            (EngineKind::Vllm, r#"{"model":"m","prompt":["a","b"]}"#),
            (EngineKind::Vllm, "[]"),
            (EngineKind::LlamaCpp, r#"{"model":"m","prompt":"a"}"#),
        ] {
            let refused = body(kind, EngineEndpoint::Completions, text.as_bytes(), &terms(true));
            assert_eq!(refused.unwrap_err().kind, EngineFaultKind::NotTaken, "{text}");
        }
    }

    #[test]
    fn likely_tokens_are_read_of_both_forms() {
        let chat = r#"{"choices":[{"logprobs":{"content":[{"token":"token_id:7","logprob":-0.5,"top_logprobs":[{"token":"token_id:7","logprob":-0.5},{"token":"token_id:9","logprob":null}]}]}}]}"#;
        let completion = r#"{"choices":[{"logprobs":{"tokens":["token_id:7"],"token_logprobs":[-0.5],"top_logprobs":[{"token_id:7":-0.5,"token_id:9":null}]}}]}"#;
        let one = drawn(EngineEndpoint::Chat, chat.as_bytes()).unwrap();
        assert_eq!(one, drawn(EngineEndpoint::Completions, completion.as_bytes()).unwrap());
        assert_eq!((one[0].token.as_str(), one[0].ranked[0].logprob), ("token_id:7", -0.5));
        assert_eq!(one[0].ranked[1].logprob, f64::NEG_INFINITY);
    }

    #[test]
    fn answers_without_likely_tokens_are_a_fault() {
        for text in [
            "{}",
            r#"{"choices":[]}"#,
            r#"{"choices":[{"logprobs":null}]}"#,
            r#"{"choices":[{"logprobs":{"content":[]}}]}"#,
            r#"{"choices":[{"logprobs":{"content":[{"token":"a","top_logprobs":[]}]}}]}"#,
            r#"{"choices":[{"logprobs":{"content":[{"token":"a","top_logprobs":[{"token":"a","logprob":"x"}]}]}}]}"#,
        ] {
            let fault = drawn(EngineEndpoint::Chat, text.as_bytes()).unwrap_err();
            assert_eq!(fault.kind, EngineFaultKind::Malformed, "{text}");
        }
    }
}
