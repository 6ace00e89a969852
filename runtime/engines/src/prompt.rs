//! The token ids of a request's prompt, as the engine itself reads it, and what it has cached.

use crate::ask::Tokens;
use crate::http::HttpEngine;
use crate::kind::EngineKind;
use crate::kv_follow::KvFeed;
use crate::kv_source::{self, KvEventsAt};
use crate::object::RawObject;
use hyper::{Method, StatusCode};
use mixfleet_hal::outside::{EngineCall, EngineEndpoint, EngineFault, EngineFaultKind, EngineKvFeed};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Fields that decide over a chat's tokens, as `/tokenize` knows them too.
const CHAT_FIELDS: [&str; 8] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
];
const COMPLETION_FIELDS: [&str; 2] = ["prompt", "add_special_tokens"];
/// Fields with which KV is not that of the tokens alone, or the tokens are not all of the prompt's.
const NOT_BY_TOKENS: [&str; 3] = ["cache_salt", "prompt_embeds", "truncate_prompt_tokens"];

/// Response of the engine's tokenizer paths; a list for completions.
#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct MessageContent<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
}

impl HttpEngine {
    /// Begins to follow its KV events.
    pub(crate) async fn feed(&self) -> Result<Box<dyn EngineKvFeed>, EngineFault> {
        let not = |cause: String| EngineFault::new(EngineFaultKind::Failed, cause);
        let sources = match (self.kind, &self.kv_events) {
            (EngineKind::LlamaCpp | EngineKind::Mixfleet, _) => {
                return Err(not(format!("{} does not report its cached blocks", self.kind)));
            }
            (EngineKind::Vllm, KvEventsAt::Off) => return Err(not("its KV events are off".into())),
            (EngineKind::Vllm, KvEventsAt::Given(sources)) => sources.clone(),
            (EngineKind::Vllm, KvEventsAt::Asked) => {
                let (status, document) = self.short(Method::GET, "/kv_event_sources", Vec::new()).await?;
                let told = match status {
                    StatusCode::OK => kv_source::told(&self.host(), &document),
                    _ => Err(format!("/kv_event_sources answers {}", status.as_u16())),
                };
                told.map_err(|cause| {
                    not(format!("{cause} (start vLLM with --kv-events-config, or write kv-events=tcp://..)"))
                })?
            }
        };
        Ok(Box::new(KvFeed::start(sources)))
    }

    /// The token ids of a prompt that is one text, or one chat of texts.
    pub(crate) async fn read_prompt(&self, call: &EngineCall) -> Result<Option<Vec<u32>>, EngineFault> {
        let wrong = |cause: &str| EngineFault::new(EngineFaultKind::Malformed, cause);
        if !self.kind.is_like_vllm() {
            return Err(wrong("token ids are not requested from it"));
        }
        let mut object = RawObject::parse(&call.body).map_err(|_| wrong("the body is no object"))?;
        if NOT_BY_TOKENS.iter().any(|name| object.given(name).is_some()) {
            return Ok(None);
        }
        let model = self.model.clone().or_else(|| object.read("model")).unwrap_or_default();
        if self.adapters.lock().unwrap_or_else(PoisonError::into_inner).contains(&model) {
            return Ok(None);
        }
        let fields = match call.endpoint {
            EngineEndpoint::Chat if is_text_alone(object.get("messages").unwrap_or_default()) => {
                &CHAT_FIELDS[..]
            }
            EngineEndpoint::Chat => return Ok(None),
            EngineEndpoint::Completions if object.get("prompt").is_some_and(|text| text.starts_with('"')) => {
                &COMPLETION_FIELDS[..]
            }
            // ids, or several prompts
            EngineEndpoint::Completions => return Ok(object.read("prompt")),
        };
        if let Some(model) = &self.model {
            object.set("model", model);
        }
        if !self.renders_not.load(Ordering::Relaxed) {
            let path = format!("{}/render", call.endpoint.path());
            let (status, document) = self.short(Method::POST, &path, object.write()).await?;
            match status {
                StatusCode::OK => return rendered(call.endpoint, &document).map_err(|cause| wrong(&cause)),
                // vLLM has them only with --enable-scale-out, and says 403 without
                StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                    self.renders_not.store(true, Ordering::Relaxed);
                }
                _ => return Err(wrong(&format!("{path} answers {}", status.as_u16()))),
            }
        }
        let mut asked = RawObject::default();
        for name in std::iter::once(&"model").chain(fields) {
            if let Some(value) =
                object.given(name).and_then(|text| RawValue::from_string(text.to_owned()).ok())
            {
                asked.set(name, &value);
            }
        }
        let (status, document) = self.short(Method::POST, "/tokenize", asked.write()).await?;
        let read = (status == StatusCode::OK).then(|| serde_json::from_slice(&document).ok()).flatten();
        let tokens = read.map(|Tokens { tokens }| Some(tokens));
        tokens.ok_or_else(|| wrong(&format!("/tokenize (status {}) gives no tokens", status.as_u16())))
    }
}

fn rendered(endpoint: EngineEndpoint, document: &[u8]) -> Result<Option<Vec<u32>>, String> {
    let read = match endpoint {
        EngineEndpoint::Chat => serde_json::from_slice(document).map(|one: Rendered| vec![one]),
        EngineEndpoint::Completions => serde_json::from_slice(document),
    };
    let mut all: Vec<Rendered> = read.map_err(|error| format!("it gives no token ids: {error}"))?;
    let one = all.pop().filter(|_| all.is_empty());
    Ok(one.map(|one| one.token_ids))
}

/// Whether messages contain text only, without images and similar parts.
fn is_text_alone(messages: &str) -> bool {
    let Ok(said) = serde_json::from_str::<Vec<MessageContent>>(messages) else { return false };
    said.iter().filter_map(|said| said.content).all(|content| {
        if !content.get().starts_with('[') {
            return true;
        }
        let parts: Vec<ContentPart> = serde_json::from_str(content.get()).unwrap_or_default();
        !parts.is_empty() && parts.iter().all(|part| part.kind == "text")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_no_text() {
        for text in [
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":[]}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#,
        ] {
            assert!(is_text_alone(text), "{text}");
        }
        for other in [
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{}}]}]"#,
            r#"[{"role":"user","content":[7]}]"#,
            "7",
            "",
        ] {
            assert!(!is_text_alone(other), "{other}");
        }
    }

    #[test]
    fn token_ids_are_read_of_one_prompt() {
        let one = br#"{"token_ids":[1,2],"odd":{}}"#;
        assert_eq!(rendered(EngineEndpoint::Chat, one), Ok(Some(vec![1, 2])));
        assert_eq!(rendered(EngineEndpoint::Completions, br#"[{"token_ids":[3]}]"#), Ok(Some(vec![3])));
        assert_eq!(
            rendered(EngineEndpoint::Completions, br#"[{"token_ids":[3]},{"token_ids":[4]}]"#),
            Ok(None)
        );
        assert!(rendered(EngineEndpoint::Chat, b"{}").is_err());
    }
}
