//! Load for a gateway: fake engines, and clients that measure the gateway's overhead.
//!
//! ```text
//! gateway_load workers PORT [PORT...]                       fake engines at these ports of 127.0.0.1
//! gateway_load rate URL[,URL...] PER_S SECONDS BYTES TOKENS PACE_MS        new requests per second
//! gateway_load streams URL[,URL...] COUNT SECONDS BYTES TOKENS PACE_MS     concurrent streams
//! ```
//!
//! Bodies are chats of BYTES bytes. An answer streams TOKENS tokens, PACE_MS apart, each with the time at
//! which the engine wrote it, so that a client knows the latency of every token. A request is timed from when
//! it should have begun, so that a late generator does not improve the result. Results are one line of JSON.

use std::io::{Error, ErrorKind, Result, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Requests in progress beyond which a due one is not sent and counts as dropped.
const OPEN_MAX: usize = 2000;
/// Time after which a request counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);
const MODEL: &str = "m";

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let done = runtime.and_then(|runtime| runtime.block_on(run(&words)));
    if let Err(error) = done {
        let _ = writeln!(std::io::stderr(), "gateway_load: {error}");
        std::process::exit(1);
    }
}

async fn run(words: &[&str]) -> Result<()> {
    match words {
        ["workers", ports @ ..] if !ports.is_empty() => {
            for port in ports {
                let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await?;
                tokio::spawn(accept(listener));
            }
            std::future::pending().await
        }
        [kind @ ("rate" | "streams"), urls, many, seconds, bytes, tokens, pace] => {
            let load = Load {
                addresses: urls.split(',').map(|url| url.trim_start_matches("http://").to_owned()).collect(),
                many: number(many)?,
                time: Duration::from_secs_f64(number(seconds)?),
                body: Body::new(number::<usize>(bytes)?, number(tokens)?, number(pace)?),
                tokens: number(tokens)?,
            };
            let began = Instant::now();
            let seen = if *kind == "rate" { load.rate().await } else { load.streams().await };
            writeln!(std::io::stdout(), "{}", seen.report(began.elapsed()))
        }
        _ => Err(Error::other("see the head of gateway_load.rs for how to call it")),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| Error::new(ErrorKind::InvalidInput, format!("'{text}' is not a number")))
}

/// Nanoseconds since 1970, by the clock that engines and clients here share.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

// ---------------------------------------------------------------- engines

async fn accept(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            // a client that leaves is none of the engine's errors
            let _ = serve(stream).await;
        });
    }
}

async fn serve(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut held = Vec::new();
    while let Some(head) = read_head(&mut stream, &mut held).await? {
        let body = read_body(&mut stream, &mut held, &head).await?;
        match head.split(' ').nth(1).unwrap_or_default() {
            "/v1/chat/completions" => generate(&mut stream, &body).await?,
            "/v1/models" => {
                let list = format!(
                    r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","max_model_len":1000000}}]}}"#
                );
                document(&mut stream, &list).await?;
            }
            "/metrics" => {
                let text = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n";
                document(&mut stream, text).await?;
            }
            "/version" => document(&mut stream, r#"{"version":"0"}"#).await?,
            // what other gateways ask for
            _ => {
                document(&mut stream, &format!(r#"{{"model_path":"{MODEL}","model_id":"{MODEL}"}}"#)).await?
            }
        }
    }
    Ok(())
}

async fn document(stream: &mut TcpStream, body: &str) -> Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length:";
    stream.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).await
}

/// The head of the next message, or `None` if there is none. The bytes after it stay in `held`.
async fn read_head(stream: &mut TcpStream, held: &mut Vec<u8>) -> Result<Option<String>> {
    loop {
        if let Some(end) = find(held, b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&held[..end]).into_owned();
            held.drain(..end + 4);
            return Ok(Some(head));
        }
        if stream.read_buf(held).await? == 0 {
            return Ok(None);
        }
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

async fn read_body(stream: &mut TcpStream, held: &mut Vec<u8>, head: &str) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    if header(head, "transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        let mut decoder = Chunked::default();
        while !decoder.push(held, &mut body)? {
            if stream.read_buf(held).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        return Ok(body);
    }
    let length = header(head, "content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    held.reserve(length);
    while held.len() < length {
        if stream.read_buf(held).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    let rest = held.split_off(length);
    Ok(std::mem::replace(held, rest))
}

/// Streams an answer as the beginning of the prompt describes it: gateways may rewrite all other fields.
async fn generate(stream: &mut TcpStream, body: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(body);
    let field = |name: &str| -> Option<f64> {
        let from = text.find(&format!("{name}="))? + name.len() + 1;
        let rest = &text[from..];
        rest[..rest.find(' ')?].parse().ok()
    };
    let (tokens, pace) = (field("tokens").unwrap_or(1.0), field("pace_ms").unwrap_or(0.0));
    let lengths = text.contains("\"include_usage\":true");
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let mut due = tokio::time::Instant::now();
    let mut left = tokens;
    while left >= 1.0 {
        left -= 1.0;
        if pace > 0.0 {
            due += Duration::from_secs_f64(pace / 1e3);
            tokio::time::sleep_until(due).await;
        }
        let end = if left < 1.0 { "\"length\"" } else { "null" };
        let choice = format!(
            r#"[{{"index":0,"delta":{{"content":"T{} "}},"logprobs":null,"finish_reason":{end}}}]"#,
            now_ns()
        );
        send(stream, &chunk(&choice, "")).await?;
    }
    if lengths {
        let usage = format!(
            r#","usage":{{"prompt_tokens":{},"completion_tokens":{tokens},"total_tokens":0}}"#,
            body.len() / 4
        );
        send(stream, &chunk("[]", &usage)).await?;
    }
    send(stream, "[DONE]").await?;
    stream.write_all(b"0\r\n\r\n").await
}

fn chunk(choices: &str, more: &str) -> String {
    format!(
        r#"{{"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"{MODEL}","choices":{choices}{more}}}"#
    )
}

async fn send(stream: &mut TcpStream, data: &str) -> Result<()> {
    let event = format!("data: {data}\n\n");
    stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// Decodes a chunked body.
#[derive(Default)]
struct Chunked {
    left: usize,
    is_within: bool,
}

impl Chunked {
    /// Takes what of `held` is complete; true at the end of the body.
    fn push(&mut self, held: &mut Vec<u8>, body: &mut Vec<u8>) -> Result<bool> {
        let mut done = 0;
        let over = loop {
            let rest = &held[done..];
            if self.is_within {
                let part = rest.len().min(self.left);
                body.extend_from_slice(&rest[..part]);
                (done, self.left) = (done + part, self.left - part);
                if self.left > 0 || rest.len() < part + 2 {
                    break false;
                }
                (done, self.is_within) = (done + 2, false);
                continue;
            }
            let Some(end) = find(&rest[..rest.len().min(64)], b"\r\n") else { break false };
            let line = String::from_utf8_lossy(&rest[..end]).into_owned();
            let length = line.split(';').next().unwrap_or_default().trim();
            self.left = usize::from_str_radix(length, 16).map_err(Error::other)?;
            if self.left == 0 {
                if rest.len() < end + 4 {
                    break false;
                }
                done += end + 4;
                break true;
            }
            (done, self.is_within) = (done + end + 2, true);
        };
        held.drain(..done);
        Ok(over)
    }
}

// ---------------------------------------------------------------- clients

struct Load {
    addresses: Vec<String>,
    many: f64,
    time: Duration,
    body: Body,
    tokens: usize,
}

/// A request's body: a number that is its own stands first in the prompt.
#[derive(Clone)]
struct Body {
    before: Arc<str>,
    after: Arc<str>,
}

impl Body {
    fn new(bytes: usize, tokens: usize, pace_ms: f64) -> Self {
        let before = r#"{"model":"m","messages":[{"role":"user","content":""#;
        let before = format!("{before}tokens={tokens} pace_ms={pace_ms} ");
        let end = format!(r#""}}],"stream":true,"max_tokens":{tokens}}}"#);
        let words = "The quick brown fox jumps over the lazy dog, says \\\"no\\\", and goes on.\\n";
        let fill = bytes.saturating_sub(before.len() + end.len() + 20);
        let mut after = words.repeat(fill / words.len());
        after.push_str(&end);
        Body { before: before.into(), after: after.into() }
    }
}

/// Counts and times of all requests.
#[derive(Default)]
struct Seen {
    asked: AtomicUsize,
    dropped: AtomicUsize,
    whole: AtomicUsize,
    failed: Mutex<Vec<String>>,
    first_ms: Mutex<Vec<f64>>,
    way_ms: Mutex<Vec<f64>>,
}

impl Load {
    async fn rate(self) -> Arc<Seen> {
        let (seen, load, open) = (Arc::new(Seen::default()), Arc::new(self), Arc::new(AtomicUsize::new(0)));
        let began = tokio::time::Instant::now();
        let mut all = tokio::task::JoinSet::new();
        for at in 0.. {
            let due = began + Duration::from_secs_f64(f64::from(at) / load.many);
            if due >= began + load.time {
                break;
            }
            tokio::time::sleep_until(due).await;
            seen.asked.fetch_add(1, Ordering::Relaxed);
            if open.load(Ordering::Relaxed) >= OPEN_MAX {
                seen.dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            open.fetch_add(1, Ordering::Relaxed);
            let (load, seen, open) = (load.clone(), seen.clone(), open.clone());
            all.spawn(async move {
                load.one(at as usize, due, &seen).await;
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
        all.join_all().await;
        seen
    }

    async fn streams(self) -> Arc<Seen> {
        let (seen, load) = (Arc::new(Seen::default()), Arc::new(self));
        let until = tokio::time::Instant::now() + load.time;
        let mut all = tokio::task::JoinSet::new();
        let mut of = 0;
        while f64::from(of) < load.many {
            let (load, seen, lane) = (load.clone(), seen.clone(), of as usize);
            all.spawn(async move {
                while tokio::time::Instant::now() < until {
                    seen.asked.fetch_add(1, Ordering::Relaxed);
                    load.one(lane, tokio::time::Instant::now(), &seen).await;
                }
            });
            of += 1;
        }
        all.join_all().await;
        seen
    }

    async fn one(&self, at: usize, due: tokio::time::Instant, seen: &Seen) {
        let address = &self.addresses[at % self.addresses.len()];
        let mut times = Times { due, first_ms: None, way_ms: Vec::with_capacity(self.tokens) };
        let asked = tokio::time::timeout(PATIENCE, self.ask(at, address, &mut times)).await;
        let fault = match asked {
            Ok(Ok(())) if times.way_ms.len() == self.tokens => None,
            Ok(Ok(())) => Some("tokens are missing".to_owned()),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("nothing for {} s", PATIENCE.as_secs())),
        };
        if let Some(fault) = fault {
            return locked(&seen.failed).push(fault);
        }
        seen.whole.fetch_add(1, Ordering::Relaxed);
        locked(&seen.first_ms).extend(times.first_ms);
        locked(&seen.way_ms).append(&mut times.way_ms);
    }

    async fn ask(&self, at: usize, address: &str, times: &mut Times) -> Result<()> {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let Body { before, after } = &self.body;
        let own = format!("{at:08x}{:012x}", now_ns() & 0xffff_ffff_ffff);
        let length = before.len() + own.len() + after.len();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\nconnection: close\r\n\r\n{before}{own}"
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(after.as_bytes()).await?;
        let mut held = Vec::with_capacity(16 << 10);
        let head = read_head(&mut stream, &mut held).await?.ok_or(ErrorKind::UnexpectedEof)?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if status != "200" {
            return Err(Error::other(format!("status {status}")));
        }
        let is_chunked = header(&head, "transfer-encoding").is_some();
        let (mut text, mut decoder, mut seen) = (Vec::new(), Chunked::default(), 0);
        loop {
            if is_chunked {
                decoder.push(&mut held, &mut text)?;
            } else {
                text.append(&mut held);
            }
            seen = times.take(&text, seen);
            if find(&text[seen..], b"[DONE]").is_some() {
                return Ok(());
            }
            if stream.read_buf(&mut held).await? == 0 {
                return Err(Error::other("it ended without [DONE]"));
            }
        }
    }
}

struct Times {
    due: tokio::time::Instant,
    first_ms: Option<f64>,
    way_ms: Vec<f64>,
}

impl Times {
    /// Takes the tokens from `from` on; where the next one begins.
    fn take(&mut self, text: &[u8], mut from: usize) -> usize {
        while let Some(begin) = find(&text[from..], b"\"T") {
            let begin = from + begin + 2;
            let Some(end) = text[begin..].iter().position(|byte| *byte == b' ') else { return begin - 2 };
            let written: u64 = std::str::from_utf8(&text[begin..begin + end])
                .ok()
                .and_then(|text| text.parse().ok())
                .unwrap_or(0);
            self.first_ms.get_or_insert(self.due.elapsed().as_secs_f64() * 1e3);
            self.way_ms.push(Duration::from_nanos(now_ns().saturating_sub(written)).as_secs_f64() * 1e3);
            from = begin + end;
        }
        from
    }
}

fn locked<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Seen {
    fn report(&self, took: Duration) -> serde_json::Value {
        let count = |of: &AtomicUsize| of.load(Ordering::Relaxed);
        let failed = locked(&self.failed);
        serde_json::json!({
            "asked": count(&self.asked),
            "dropped": count(&self.dropped),
            "whole": count(&self.whole),
            "failed": failed.len(),
            "first_fault": failed.first(),
            "whole_per_s": count(&self.whole) as f64 / took.as_secs_f64(),
            "tokens": locked(&self.way_ms).len(),
            "ttft_ms": quantiles(&locked(&self.first_ms)),
            "token_way_ms": quantiles(&locked(&self.way_ms)),
        })
    }
}

fn quantiles(values: &[f64]) -> serde_json::Value {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at =
        |per_mille: usize| sorted.get((sorted.len() * per_mille / 1000).min(sorted.len().saturating_sub(1)));
    serde_json::json!({"p50": at(500), "p90": at(900), "p99": at(990), "max": at(1000)})
}
