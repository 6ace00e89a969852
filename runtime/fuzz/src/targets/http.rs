//! Parsers of clients' input: connections, URLs and bodies; and of the file of their keys.

use super::refused;
use mixfleet_hal::cast::to_u32;
use mixfleet_runtime::api::{
    Access, Api, Limits, Marked, Origins, Placements, ServedModel, Shutdown, TextDecoder, TextModel, serve,
};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::kv_exchange::KvExchange;
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::{
    ChatMessage, ChatTemplate, ControlText, Conversation, RenderedChat, TokenStream, Tokenizer, builtin,
};
use mixfleet_runtime::request::{
    EngineHandle, FinishReason, GenerateRequest, Logprobs, Sampling, Submission, Update,
};
use mixfleet_runtime::trace::TraceParent;
use serde_json::{Map, Value};
use std::sync::{Arc, LazyLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, watch};

const CONTEXT: u32 = 256;
const ADDRESS: &str = "api:80";
pub(super) const MODEL: &str = "m";

/// The built-in model, which needs no checkpoint.
struct Text {
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

static TEXT: LazyLock<Arc<Text>> = LazyLock::new(|| {
    let tokenizer = builtin::tokenizer().expect("a constant");
    Arc::new(Text { tokenizer, template: builtin::chat_template().expect("a constant") })
});

impl TextModel for Text {
    fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, String> {
        let Marked { text, mark, .. } = prompt;
        let ids = match mark {
            Some(mark) => self.tokenizer.encode_marked(text, *mark, add_special),
            None if add_special => self.tokenizer.encode(text),
            None => self.tokenizer.encode_chat(text),
        };
        ids.map_err(|error| error.to_string())
    }

    fn special_places(&self, text: &str) -> Vec<usize> {
        self.tokenizer.special_places(text)
    }

    fn token_bytes_max(&self) -> Option<usize> {
        self.tokenizer.token_bytes_max()
    }

    fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Value>,
        _: bool,
        stopped: &dyn Fn() -> bool,
    ) -> Result<RenderedChat, String> {
        let chat = Conversation { messages, add_generation_prompt, arguments, now_s: 0 };
        let control = ControlText::new(&self.template, &self.tokenizer).map_err(|error| error.to_string())?;
        control.render(&self.template, &chat, stopped).map_err(|error| error.to_string())
    }

    fn tool_style(&self) -> Option<mixfleet_runtime::model::ToolStyle> {
        None
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        Box::new(Decoder(Some(self.tokenizer.stream())))
    }

    fn check_grammar(
        &self,
        _: &mixfleet_runtime::grammar::Grammar,
        _: mixfleet_runtime::grammar::GrammarClient<'_>,
    ) -> Result<(), mixfleet_runtime::grammar::GrammarError> {
        Err(mixfleet_runtime::grammar::GrammarError::Refused("there is no grammar of bytes".into()))
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(id)
    }

    fn vocabulary_size(&self) -> u32 {
        to_u32(self.tokenizer.vocab())
    }
}

struct Decoder(Option<TokenStream>);

impl TextDecoder for Decoder {
    fn push(&mut self, id: u32) -> Result<String, String> {
        let pushed = self.0.as_mut().map(|stream| stream.push(id)).transpose();
        pushed.map(Option::unwrap_or_default).map_err(|error| error.to_string())
    }

    fn finish(&mut self) -> Result<String, String> {
        let finished = self.0.take().map(TokenStream::finish).transpose();
        finished.map(Option::unwrap_or_default).map_err(|error| error.to_string())
    }
}

/// Checks the properties of a request that the engine relies on.
fn check(request: &GenerateRequest) {
    let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = request.sampling;
    let Sampling { presence_penalty, frequency_penalty, .. } = request.sampling;
    let numbers = [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty];
    assert!(numbers.iter().all(|number| number.is_finite()), "{:?}", request.sampling);
    assert!(temperature >= 0.0 && repetition_penalty > 0.0, "{:?}", request.sampling);
    let vocabulary = TEXT.vocabulary_size();
    assert!(!request.prompt_ids.is_empty() && request.prompt_ids.iter().all(|id| *id < vocabulary));
    assert!(request.max_tokens > 0 && to_u32(request.prompt_ids.len()) + request.max_tokens <= CONTEXT);
    assert!(request.logprobs.is_none_or(|top| top <= 20));
}

async fn answer(mut submissions: mpsc::Receiver<Submission>) {
    while let Some(Submission { request, updates, admitted }) = submissions.recv().await {
        check(&request);
        let _ = admitted.send(Ok(()));
        let _ = updates.send(Update::Started { cached_tokens: 3 }).await;
        let ids = request.prompt_ids.iter().rev().chain(&[1]).take(request.max_tokens.min(6) as usize);
        for &id in ids {
            let top = |count| (0..count).map(|other| (other, -0.5)).collect();
            let logprobs = request.logprobs.map(|count| Logprobs { chosen: -0.5, top: top(count) });
            let _ = updates.send(Update::Token { id, logprobs }).await;
        }
        let _ = updates.send(Update::Finished { reason: FinishReason::Length }).await;
    }
}

/// The answer of a new server on a connection that receives `bytes` and is then closed if it `ends`.
/// Afterwards the server must still be alive.
fn exchange(bytes: &[u8], ends: bool) -> Vec<u8> {
    exchange_with(bytes, ends, None)
}

/// The same of a server that exchanges KV.
pub(super) fn exchange_with(bytes: &[u8], ends: bool, kv: Option<Arc<KvExchange>>) -> Vec<u8> {
    let env = SeededEnv::new(1);
    let (engine, submissions) = EngineHandle::channel(1024);
    let metrics = Metrics::new();
    metrics.serves.set(1);
    let placements = Arc::new(Placements::new(4));
    let api = Api::new(Arc::new(env.clone()), metrics, placements, Limits::default(), None);
    api.ready(ServedModel {
        name: MODEL.into(),
        created: 7,
        engine,
        text: TEXT.clone(),
        context: CONTEXT,
        eos_ids: [1].into(),
        defaults: Sampling::default(),
        answer_tokens: None,
        exchange: kv,
    });
    env.spawn(Box::pin(answer(submissions)));
    let (bytes, world) = (bytes.to_vec(), env.clone());
    let answer = env.run(async move {
        let (_shutdown, watching) = watch::channel(Shutdown::No);
        let listener = world.listen(ADDRESS).await.expect("the address is free");
        world.spawn(Box::pin(serve(listener, api, Origins::default(), watching)));
        let say = async |bytes: &[u8], ends: bool| {
            let mut connection = world.connect(ADDRESS).expect("it listens");
            // It may have closed before it read everything.
            let _ = connection.write_all(bytes).await;
            if ends {
                let _ = connection.shutdown().await;
            }
            let mut answer = Vec::new();
            let _ = connection.read_to_end(&mut answer).await;
            answer
        };
        let answer = say(&bytes, ends).await;
        let alive = say(b"GET /health HTTP/1.1\r\nhost: api\r\nconnection: close\r\n\r\n", false).await;
        assert!(alive.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&alive));
        answer
    });
    env.end();
    answer
}

/// Status and body of the only answer.
pub(super) fn split(answer: &[u8]) -> (u16, String) {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status: {head}")), body.to_string())
}

/// Checks that the response is an answer, or an error in OpenAI's shape with a client error status.
pub(super) fn check_answer(answer: &[u8]) -> u16 {
    let (status, body) = split(answer);
    match status {
        200 => assert!(!body.is_empty()),
        400..=499 => {
            let json: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
            let error = json["error"].as_object().unwrap_or_else(|| panic!("no error in {body}"));
            assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
            assert!(error.contains_key("code") && error.contains_key("param"), "{body}");
        }
        other => panic!("status {other}: {body}"),
    }
    status
}

fn post(path: &str, body: &[u8]) -> bool {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: api\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    check_answer(&exchange(&[head.as_bytes(), body].concat(), false)) == 200
}

pub(super) fn completion_body(bytes: &[u8]) -> bool {
    post("/v1/completions", bytes)
}

pub(super) fn chat_body(bytes: &[u8]) -> bool {
    post("/v1/chat/completions", bytes)
}

/// Requests a path, if it can be part of a request line.
pub(super) fn address(bytes: &[u8]) -> bool {
    let address: Vec<u8> = bytes.iter().copied().filter(u8::is_ascii_graphic).collect();
    let request = [b"GET /", &address[..], b" HTTP/1.1\r\nhost: api\r\nconnection: close\r\n\r\n"].concat();
    let answer = exchange(&request, false);
    // A path that is not a valid URI is refused without a document when the request line is parsed.
    match split(&answer) {
        (400 | 414, body) if body.is_empty() => false,
        _ => check_answer(&answer) == 200,
    }
}

/// Sends bytes on a connection. Half of the connections are closed after them; the others stay open until
/// their timeout.
pub(super) fn connection(bytes: &[u8]) -> bool {
    let answer = exchange(bytes, bytes.len().is_multiple_of(2));
    // a half-closed client that waits is sent one
    let answer = answer.strip_prefix(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{}", String::from_utf8_lossy(answer));
    assert!(!answer.starts_with(b"HTTP/1.1 500 "), "{}", String::from_utf8_lossy(answer));
    answer.starts_with(b"HTTP/1.1 200 ")
}

/// Checks that errors about a file of keys do not contain the keys.
pub(super) fn api_keys(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    match Access::tenants(&text) {
        Ok(access) => {
            let again = access.replace(&text).expect("an accepted list is accepted again");
            assert!(again > 0);
            access.replace("").expect_err("no tenants");
            assert_eq!(access.replace(&text), Ok(again));
            true
        }
        Err(error) => {
            let table = text.parse::<toml::Table>().unwrap_or_default();
            let tenants = table.get("tenant").and_then(toml::Value::as_array);
            let keys = tenants
                .into_iter()
                .flatten()
                .flat_map(|tenant| [tenant.get("key"), tenant.get("key_sha256")]);
            // A short key, or one that is also a name, may occur in the message for another reason.
            let secret = |key: &&str| key.len() > 7 && text.matches(key).count() == 1;
            for key in keys.flatten().filter_map(toml::Value::as_str).filter(secret) {
                assert!(!error.contains(key), "{error}");
            }
            refused(&error)
        }
    }
}

/// The value of a `traceparent` header. A parsed value is written unchanged, except for fields of later
/// versions.
pub(super) fn trace_parent(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let Some(parent) = TraceParent::read(text) else { return false };
    let written = parent.to_string();
    assert_eq!(TraceParent::read(&written), Some(parent), "{text}");
    assert_eq!(written[2..53], text[2..53], "the ids and the separators are those of {text}");
    true
}
