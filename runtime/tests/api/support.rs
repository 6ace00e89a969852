//! A scripted engine, a byte-level model and a small HTTP client.

use futures_util::FutureExt;
use mixfleet_runtime::api::{
    Access, Api, Limits, Marked, Origins, Placements, ServedModel, Shutdown, TextDecoder, TextModel, serve,
};
use mixfleet_runtime::env::{Connection, Env, SeededEnv};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::{ChatMessage, RenderedChat};
use mixfleet_runtime::request::{
    EngineHandle, Failure, FinishReason, GenerateRequest, Logprobs, Rejection, Sampling, Submission, Update,
    UpdateSender,
};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc, watch};

/// Ids below this are bytes.
pub(crate) const EOS: u32 = 256;
pub(crate) const BOS: u32 = 257;
pub(crate) const VOCABULARY: u32 = 258;
/// The text of the end token.
pub(crate) const SPECIAL: &str = "<e>";
pub(crate) const CONTEXT: u32 = 64;
pub(crate) const MODEL: &str = "org/bytes";
pub(crate) const ADDRESS: &str = "api:80";

/// A model whose tokens are bytes, and the end token.
struct ByteModel;

impl TextModel for ByteModel {
    fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, String> {
        let Marked { text, mark, .. } = prompt;
        let mut ids: Vec<u32> = add_special.then_some(BOS).into_iter().collect();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix(SPECIAL) {
                ids.push(EOS);
                rest = after;
                continue;
            }
            let at = rest.char_indices().nth(1).map_or(rest.len(), |(at, _)| at);
            if rest.chars().next() != *mark {
                ids.extend(rest[..at].bytes().map(u32::from));
            }
            rest = &rest[at..];
        }
        Ok(ids)
    }

    fn special_places(&self, text: &str) -> Vec<usize> {
        text.match_indices(SPECIAL).map(|(at, _)| at + 1).collect()
    }

    fn token_bytes_max(&self) -> Option<usize> {
        Some(SPECIAL.len())
    }

    fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Value>,
        _: bool,
        _: &dyn Fn() -> bool,
    ) -> Result<RenderedChat, String> {
        if arguments.contains_key("refuse") {
            return Err("the template refuses".into());
        }
        let line = |message: &ChatMessage| format!("{}:{}|", message.role, message.content);
        let mut text: String = messages.iter().map(line).collect();
        if let Some(documents) = arguments.get("documents").and_then(Value::as_array) {
            text.push_str(&format!("{} documents|", documents.len()));
        }
        if add_generation_prompt {
            text.push_str("a:");
        }
        Ok(RenderedChat { text, places: Vec::new() })
    }

    fn tool_style(&self) -> Option<mixfleet_runtime::model::ToolStyle> {
        Some(mixfleet_runtime::model::ToolStyle::Tagged)
    }

    fn reads_argument(&self, name: &str) -> bool {
        name == "documents"
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        Box::new(ByteDecoder(Vec::new()))
    }

    fn check_grammar(
        &self,
        _: &mixfleet_runtime::grammar::Grammar,
        _: mixfleet_runtime::grammar::GrammarClient<'_>,
    ) -> Result<(), mixfleet_runtime::grammar::GrammarError> {
        Err(mixfleet_runtime::grammar::GrammarError::Refused("there is no grammar of bytes".into()))
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        u8::try_from(id).map_or_else(|_| format!("<{id}>").into_bytes(), |byte| vec![byte])
    }

    fn vocabulary_size(&self) -> u32 {
        VOCABULARY
    }
}

struct ByteDecoder(Vec<u8>);

impl TextDecoder for ByteDecoder {
    fn push(&mut self, id: u32) -> Result<String, String> {
        self.0.extend(u8::try_from(id).ok());
        match std::str::from_utf8(&self.0) {
            Ok(text) => {
                let text = text.to_string();
                self.0.clear();
                Ok(text)
            }
            Err(error) if error.error_len().is_none() => Ok(String::new()),
            Err(_) => self.finish(),
        }
    }

    fn finish(&mut self) -> Result<String, String> {
        Ok(String::from_utf8_lossy(&std::mem::take(&mut self.0)).into_owned())
    }
}

/// The engine's behaviour for a request.
#[derive(Clone)]
pub(crate) enum Play {
    /// It sends these tokens, then the end.
    Reply(Vec<u32>, FinishReason),
    /// It sends these tokens, then this error.
    Fail(Vec<u32>, &'static str),
    /// It gives the request up for this reason, with its prompt computed and before a token.
    GiveUp(&'static str),
    /// It sends these tokens, then closes the channel.
    HangUp(Vec<u32>),
    /// It sends these tokens, then nothing until the client disconnects.
    Hang(Vec<u32>),
    /// It sends these tokens, then the end once a permit is there.
    Gate(Vec<u32>, Arc<Semaphore>),
    /// It sends a token every virtual millisecond until the client disconnects.
    Endless(u32),
    /// It rejects the request.
    Reject(Rejection),
}

impl Play {
    /// Sends the bytes of `text`, then an end token.
    pub(crate) fn say(text: &str) -> Self {
        Play::Reply(text.bytes().map(u32::from).chain([EOS]).collect(), FinishReason::Stop)
    }
}

type Script = Arc<dyn Fn(&GenerateRequest) -> Play + Send + Sync>;

/// The configuration of a test's server.
pub(crate) struct Setup {
    pub(crate) script: Script,
    pub(crate) limits: Limits,
    pub(crate) api_key: Option<String>,
    /// The tenants, instead of one key.
    pub(crate) access: Option<Access>,
    /// The text model, instead of bytes.
    pub(crate) text: Arc<dyn TextModel>,
    pub(crate) context: u32,
    /// Maximum length of answers to requests without one.
    pub(crate) answer_tokens: Option<u32>,
    pub(crate) loading: bool,
    /// Whether the engine says that it may give up accepted requests.
    pub(crate) drops_late: bool,
    pub(crate) origins: Origins,
}

impl Setup {
    pub(crate) fn script(script: impl Fn(&GenerateRequest) -> Play + Send + Sync + 'static) -> Self {
        Setup {
            script: Arc::new(script),
            limits: Limits::default(),
            api_key: None,
            access: None,
            text: Arc::new(ByteModel),
            context: CONTEXT,
            answer_tokens: None,
            loading: false,
            drops_late: false,
            origins: Origins::default(),
        }
    }

    pub(crate) fn play(play: Play) -> Self {
        Self::script(move |_| play.clone())
    }

    pub(crate) fn with_limits(self, change: impl FnOnce(&mut Limits)) -> Self {
        let mut limits = self.limits.clone();
        change(&mut limits);
        Setup { limits, ..self }
    }
}

/// The server under test, with records of its engine.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) env: SeededEnv,
    pub(crate) api: Arc<Api>,
    pub(crate) metrics: Metrics,
    pub(crate) placements: Arc<Placements>,
    pub(crate) shutdown: watch::Sender<Shutdown>,
    pub(crate) engine: EngineHandle,
    pub(crate) text: Arc<dyn TextModel>,
    pub(crate) context: u32,
    pub(crate) answer_tokens: Option<u32>,
    pub(crate) submitted: Arc<Mutex<Vec<GenerateRequest>>>,
    /// Ids of requests whose receiver was dropped before the end.
    pub(crate) cancelled: Arc<Mutex<Vec<String>>>,
    /// Set when `serve` has returned.
    pub(crate) ended: Arc<Semaphore>,
}

/// Runs a test against a fresh server.
pub(crate) fn run<T, F>(setup: Setup, test: impl FnOnce(Server) -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let env = SeededEnv::new(1);
    let (engine, submissions) = EngineHandle::channel(1024);
    let engine = engine.that_drops_late(setup.drops_late);
    let metrics = Metrics::new();
    metrics.serves.set(1);
    let placements = Arc::new(Placements::new(4));
    let access = setup.access.unwrap_or_else(|| Access::from(setup.api_key));
    let api = Api::new(Arc::new(env.clone()), metrics.clone(), placements.clone(), setup.limits, access);
    let (shutdown, watching) = watch::channel(Shutdown::No);
    let server = Server {
        env: env.clone(),
        api: api.clone(),
        metrics,
        placements,
        shutdown,
        engine,
        text: setup.text,
        context: setup.context,
        answer_tokens: setup.answer_tokens,
        submitted: Arc::default(),
        cancelled: Arc::default(),
        ended: Arc::new(Semaphore::new(0)),
    };
    if !setup.loading {
        server.make_ready();
    }
    env.spawn(Box::pin(play(server.clone(), setup.script, submissions)));
    env.clone().run(async move {
        let listener = env.listen(ADDRESS).await.unwrap();
        let ended = server.ended.clone();
        env.spawn(Box::pin(
            serve(listener, api, setup.origins, watching).map(move |()| ended.add_permits(1)),
        ));
        test(server).await
    })
}

async fn play(server: Server, script: Script, mut submissions: mpsc::Receiver<Submission>) {
    while let Some(Submission { request, updates, admitted }) = submissions.recv().await {
        server.submitted.lock().unwrap().push(request.clone());
        let play = script(&request);
        if let Play::Reject(rejection) = play {
            admitted.send(Err(rejection)).ok();
            continue;
        }
        if admitted.send(Ok(())).is_ok() {
            let server = server.clone();
            server.env.clone().spawn(Box::pin(async move {
                if generate(&server, &request, play, &updates).await.is_none() {
                    server.cancelled.lock().unwrap().push(request.id);
                }
            }));
        }
    }
}

/// `None` when the receiver was dropped before the end.
async fn generate(
    server: &Server,
    request: &GenerateRequest,
    play: Play,
    updates: &UpdateSender,
) -> Option<()> {
    updates.send(Update::Started { cached_tokens: 3 }).await.ok()?;
    let (tokens, end) = match play {
        Play::Reply(tokens, reason) => (tokens, Some(Update::Finished { reason })),
        Play::Fail(tokens, message) => (tokens, Some(Update::Failed(Failure::engine(message)))),
        Play::GiveUp(message) => (Vec::new(), Some(Update::Failed(Failure::turned_away(message)))),
        Play::HangUp(tokens) => (tokens, None),
        Play::Gate(tokens, gate) => {
            send(server, request, updates, &tokens).await?;
            gate.acquire().await.unwrap().forget();
            (Vec::new(), Some(Update::Finished { reason: FinishReason::Length }))
        }
        Play::Hang(tokens) => {
            send(server, request, updates, &tokens).await?;
            updates.closed().await;
            return None;
        }
        Play::Endless(token) => loop {
            send(server, request, updates, &[token]).await?;
        },
        Play::Reject(_) => unreachable!("rejected before"),
    };
    send(server, request, updates, &tokens).await?;
    match end {
        Some(end) => updates.send(end).await.ok(),
        None => Some(()),
    }
}

async fn send(
    server: &Server,
    request: &GenerateRequest,
    updates: &UpdateSender,
    tokens: &[u32],
) -> Option<()> {
    for &id in tokens {
        server.env.sleep(Duration::from_millis(1)).await;
        let top = |count| vec![(id, -0.5), (u32::from(b'~'), f32::NEG_INFINITY)].into_iter().take(count);
        let logprobs =
            request.logprobs.map(|count| Logprobs { chosen: -0.5, top: top(count as usize).collect() });
        updates.send(Update::Token { id, logprobs }).await.ok()?;
    }
    Some(())
}

impl Server {
    pub(crate) fn make_ready(&self) {
        self.api.ready(ServedModel {
            name: MODEL.into(),
            created: 7,
            engine: self.engine.clone(),
            text: self.text.clone(),
            context: self.context,
            eos_ids: [EOS].into(),
            defaults: Sampling::default(),
            answer_tokens: self.answer_tokens,
            exchange: None,
        });
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.exchange(&request("GET", path, "", b"")).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.exchange(&request("POST", path, "", body.to_string().as_bytes())).await
    }

    /// Sends bytes over a fresh connection and reads the response to the end.
    pub(crate) async fn exchange(&self, bytes: &[u8]) -> Response {
        let mut connection = self.env.connect(ADDRESS).unwrap();
        connection.write_all(bytes).await.unwrap();
        Response::read(&mut connection).await
    }

    /// Opens a connection with a request in progress, read up to its first `data:`.
    pub(crate) async fn open_stream(&self, path: &str, body: &Value) -> Box<dyn Connection> {
        let mut connection = self.env.connect(ADDRESS).unwrap();
        connection.write_all(&request("POST", path, "", body.to_string().as_bytes())).await.unwrap();
        let mut seen = Vec::new();
        while !seen.windows(5).any(|window| window == b"data:") {
            assert_ne!(connection.read_buf(&mut seen).await.unwrap(), 0, "closed before the first event");
        }
        connection
    }

    /// Waits (in virtual time) until `condition` holds.
    pub(crate) async fn until(&self, what: &str, condition: impl Fn() -> bool) {
        for _ in 0..1000 {
            if condition() {
                return;
            }
            self.env.sleep(Duration::from_millis(1)).await;
        }
        panic!("not within a virtual second: {what}");
    }

    pub(crate) fn submissions(&self) -> Vec<GenerateRequest> {
        self.submitted.lock().unwrap().clone()
    }

    pub(crate) fn cancellations(&self) -> usize {
        self.cancelled.lock().unwrap().len()
    }
}

/// An HTTP request after which the connection closes. `headers` are whole lines.
pub(crate) fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: api\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// A parsed response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: String,
    /// Whether the connection closed before the end of a chunked body.
    pub(crate) truncated: bool,
}

impl Response {
    pub(crate) async fn read(connection: &mut Box<dyn Connection>) -> Self {
        let mut bytes = Vec::new();
        connection.read_to_end(&mut bytes).await.unwrap();
        Self::parse(&bytes)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response in {text:?}"));
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let header = |line: &str| {
            let (name, value) = line.split_once(": ").unwrap();
            (name.to_ascii_lowercase(), value.to_string())
        };
        let headers: HashMap<_, _> = lines.map(header).collect();
        let chunked = headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked");
        let (body, truncated) = if chunked { unchunk(body) } else { (body.to_string(), false) };
        Response { status, headers, body, truncated }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The data of each event.
    pub(crate) fn events(&self) -> Vec<&str> {
        let blocks = self.body.strip_suffix("\n\n").expect("events end with a blank line").split("\n\n");
        blocks.map(|block| block.strip_prefix("data: ").expect("only data lines")).collect()
    }

    /// Checks OpenAI's error shape and returns (status, type, param, code).
    pub(crate) fn error(&self) -> (u16, String, Option<String>, String) {
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("no error in {json}"));
        assert!(!error["message"].as_str().unwrap().is_empty());
        assert_eq!((json.as_object().unwrap().len(), error.len()), (1, 4), "{json}");
        let text = |key: &str| error[key].as_str().map(str::to_string);
        (self.status, text("type").unwrap(), text("param"), text("code").unwrap())
    }
}

fn unchunk(mut body: &str) -> (String, bool) {
    let mut whole = String::new();
    loop {
        let Some((length, rest)) = body.split_once("\r\n") else { return (whole, true) };
        let length = usize::from_str_radix(length, 16).unwrap();
        if length == 0 {
            return (whole, false);
        }
        whole.push_str(&rest[..length]);
        body = rest[length..].strip_prefix("\r\n").expect("a chunk ends with a line break");
    }
}
