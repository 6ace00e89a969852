//! An engine that is none: it counts words, and can die, stall, lie and cut.
//!
//! Its answers are the texts `w0 w1 w2 ...`, one per token, and continue after those that end the prompt.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to the next answers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Mood {
    /// They are complete.
    Well,
    /// This status with this body.
    Status(u16, String),
    /// The connection is reset after this many tokens.
    CutAfter(usize),
    /// The stream ends normally after this many tokens, without its final event.
    EndAfter(usize),
    /// Nothing comes after this many tokens, until the test is over.
    StallAfter(usize),
    /// This text as a whole answer or as the data of an event.
    Say(String),
    /// Another model's name in the answer.
    WrongModel,
    /// An error in the stream after this many tokens.
    ErrorAfter(usize),
}

/// A request that came.
#[derive(Clone, Debug)]
pub(crate) struct Came {
    pub(crate) path: String,
    pub(crate) headers: String,
    pub(crate) body: Value,
}

pub(crate) struct FakeState {
    kind: &'static str,
    model: String,
    pub(crate) mood: Mutex<Mood>,
    pub(crate) came: Mutex<Vec<Came>>,
    /// Requests whose client left before the end.
    pub(crate) left: AtomicUsize,
    /// Whether new connections are closed at once and open ones broken.
    pub(crate) dead: Mutex<bool>,
    /// What `/metrics` tells of the queue.
    pub(crate) queue: Mutex<(u32, u32)>,
    /// Time before each word.
    pub(crate) pace: Mutex<Duration>,
    /// The model that its own is an adapter of.
    pub(crate) parent: Mutex<Value>,
    /// Where it says that it keeps a prompt's KV for others; null if it keeps none.
    pub(crate) hands_over: Mutex<Value>,
    /// What happens to answers that begin with others' KV.
    pub(crate) taking: Mutex<Mood>,
    open: Mutex<Vec<TcpStream>>,
}

pub(crate) struct FakeEngine {
    pub(crate) address: String,
    pub(crate) shared: Arc<FakeState>,
}

impl FakeEngine {
    pub(crate) fn start(kind: &'static str, model: &str) -> Self {
        FakeEngine::at(kind, model, "127.0.0.1:0")
    }

    /// One at this address of this machine.
    pub(crate) fn at(kind: &'static str, model: &str, at: &str) -> Self {
        let listener = TcpListener::bind(at).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(FakeState {
            kind,
            model: model.into(),
            mood: Mutex::new(Mood::Well),
            came: Mutex::default(),
            left: AtomicUsize::new(0),
            dead: Mutex::new(false),
            queue: Mutex::new((0, 0)),
            pace: Mutex::new(Duration::ZERO),
            parent: Mutex::default(),
            hands_over: Mutex::default(),
            taking: Mutex::new(Mood::Well),
            open: Mutex::default(),
        });
        let of_thread = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, shared) = (stream.unwrap(), of_thread.clone());
                if *shared.dead.lock().unwrap() {
                    continue;
                }
                shared.open.lock().unwrap().push(stream.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = serve(&shared, stream.try_clone().unwrap());
                    // another handle on it is kept for `die`
                    let _ = stream.shutdown(Shutdown::Both);
                });
            }
        });
        FakeEngine { address, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set(&self, mood: Mood) {
        *self.shared.mood.lock().unwrap() = mood;
    }

    /// Breaks all connections; new ones are closed at once.
    pub(crate) fn die(&self) {
        *self.shared.dead.lock().unwrap() = true;
        self.shared.open.lock().unwrap().drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    pub(crate) fn live(&self) {
        *self.shared.dead.lock().unwrap() = false;
    }

    /// The generation requests that came, in order.
    pub(crate) fn asked(&self) -> Vec<Came> {
        let came = self.shared.came.lock().unwrap();
        came.iter().filter(|came| came.path.ends_with("completions")).cloned().collect()
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.die();
    }
}

fn serve(shared: &FakeState, mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
        });
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let came = Came { path: path.clone(), headers: head, body: body.clone() };
        shared.came.lock().unwrap().push(came);
        match path.as_str() {
            "/health" => document(&mut stream, 200, "{}")?,
            "/kv_event_sources" => document(&mut stream, 404, "{}")?,
            path if path.ends_with("/render") => document(&mut stream, 403, "{}")?,
            "/version" => document(&mut stream, 200, r#"{"version":"0.32.0"}"#)?,
            "/v1/models" => {
                let parent = shared.parent.lock().unwrap().clone();
                let model = json!({"id": shared.model, "max_model_len": 4096, "meta": {"n_ctx": 512}, "parent": parent});
                document(&mut stream, 200, &json!({"object": "list", "data": [model]}).to_string())?;
            }
            "/props" => {
                let facts = json!({"default_generation_settings": {"n_ctx": 512}, "total_slots": 4, "build_info": "b1"});
                document(&mut stream, 200, &facts.to_string())?;
            }
            "/metrics" => document(&mut stream, 200, &metrics(shared))?,
            "/tokenize" => {
                let text = body["content"].as_str().or(body["prompt"].as_str()).unwrap_or_default();
                let tokens: Vec<usize> = (0..words(text)).collect();
                document(&mut stream, 200, &json!({"tokens": tokens, "count": tokens.len()}).to_string())?;
            }
            _ if !generate(shared, &mut stream, &path, &body)? => return Ok(()),
            _ => {}
        }
    }
}

fn metrics(shared: &FakeState) -> String {
    let (running, waiting) = *shared.queue.lock().unwrap();
    let has_connector = !shared.hands_over.lock().unwrap().is_null();
    let nixl = if has_connector { "vllm:nixl_xfer_time_seconds_count{engine=\"0\"} 0.0\n" } else { "" };
    match shared.kind {
        "vllm" => {
            nixl.to_owned()
                + &format!(
                    "vllm:num_requests_running{{engine=\"0\"}} {running}.0\nvllm:num_requests_waiting{{engine=\"0\"}} {waiting}.0\n\
             vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.25\n\
             vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"1000\"}} 1.0\n"
                )
        }
        "mixfleet" => format!(
            "vllm:num_requests_running{{device=\"cpu\"}} {running}\nvllm:num_requests_waiting{{device=\"cpu\"}} {waiting}\n\
             mixfleet_kv_capacity_tokens{{device=\"cpu\"}} 4000\nmixfleet_kv_capacity_tokens{{device=\"cuda:0\"}} 96\n\
             mixfleet_kv_block_tokens{{device=\"cpu\"}} 16\n"
        ),
        _ => format!("llamacpp:requests_processing {running}\nllamacpp:requests_deferred {waiting}\n"),
    }
}

fn document(stream: &mut TcpStream, status: u16, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes())
}

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// The text that the answer follows, and the tokens of the prompt.
fn before(body: &Value) -> (String, usize) {
    if let Some(messages) = body["messages"].as_array() {
        let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
        let all: usize = messages.iter().map(|message| words(&text(message))).sum();
        let last = messages.last().filter(|message| message["role"] == "assistant").map(text);
        return (last.unwrap_or_default(), all);
    }
    let prompt = body["prompt"].as_str().unwrap_or_default();
    let answer: Vec<&str> = prompt.split_whitespace().filter(|word| word.starts_with('w')).collect();
    (answer.join(" "), words(prompt) + body["prompt"].as_array().map_or(0, Vec::len))
}

/// Answers; false if the connection is over.
#[expect(clippy::too_many_lines, reason = "one arm for each habit of an engine")]
fn generate(shared: &FakeState, stream: &mut TcpStream, path: &str, body: &Value) -> std::io::Result<bool> {
    let parameters = &body["kv_transfer_params"];
    let mood = if parameters["do_remote_prefill"] == true { &shared.taking } else { &shared.mood };
    let mood = mood.lock().unwrap().clone();
    let (is_chat, is_stream) = (path.contains("chat"), body["stream"] == true);
    let model = match (&mood, shared.kind) {
        (Mood::WrongModel, _) => "another".into(),
        (_, "vllm") => body["model"].clone(),
        _ => Value::from(shared.model.as_str()),
    };
    let (text, prompt_tokens) = before(body);
    let first = words(&text);
    let most = body["max_tokens"].as_u64().or(body["max_completion_tokens"].as_u64()).unwrap_or(8) as usize;
    let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": most, "total_tokens": prompt_tokens + most});
    let stop_at = match mood {
        Mood::Status(status, text) => {
            document(stream, status, &text)?;
            return Ok(true);
        }
        Mood::Say(text) if !is_stream => {
            document(stream, 200, &text)?;
            return Ok(true);
        }
        Mood::CutAfter(words) | Mood::EndAfter(words) | Mood::StallAfter(words) | Mood::ErrorAfter(words) => {
            words
        }
        _ => usize::MAX,
    };
    let choice = |text: String, finish: Value, whole: bool| match (is_chat, whole) {
        (true, true) => {
            json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish})
        }
        (true, false) => json!({"index": 0, "delta": {"content": text}, "finish_reason": finish}),
        (false, _) => json!({"index": 0, "text": text, "finish_reason": finish}),
    };
    let pace = *shared.pace.lock().unwrap();
    if !is_stream {
        if stop_at < most {
            stall(shared, stream, matches!(mood, Mood::StallAfter(_)));
            return Ok(false);
        }
        std::thread::sleep(pace * most as u32);
        let text: String = (first..first + most).map(|at| format!("w{at} ")).collect();
        let choices = [choice(text, "length".into(), true)];
        let mut answer =
            json!({"id": "a", "created": 5, "model": model, "choices": choices, "usage": usage, "odd": 1.50});
        if parameters["do_remote_decode"] == true {
            answer["kv_transfer_params"] = shared.hands_over.lock().unwrap().clone();
        }
        document(stream, 200, &answer.to_string())?;
        return Ok(true);
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    let id = format!("id-{}", shared.model);
    let mut send = |data: &str| {
        let event = format!("data: {data}\n\n");
        let sent = stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes());
        if sent.is_err() {
            shared.left.fetch_add(1, Ordering::SeqCst);
        }
        sent
    };
    let chunk =
        |choices: Value| json!({"id": id, "created": 5, "model": model, "choices": choices}).to_string();
    if let Mood::Say(text) = &mood {
        send(text)?;
        return Ok(false);
    }
    if is_chat {
        send(&chunk(
            json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]),
        ))?;
    }
    for at in 0..most {
        if at == stop_at {
            match mood {
                Mood::EndAfter(_) => stream.write_all(b"0\r\n\r\n")?,
                Mood::ErrorAfter(_) => send(r#"{"error":{"message":"out of luck","code":500}}"#)?,
                _ => stall(shared, stream, matches!(mood, Mood::StallAfter(_))),
            }
            return Ok(false);
        }
        std::thread::sleep(pace);
        send(&chunk(json!([choice(format!("w{} ", first + at), Value::Null, false)])))?;
    }
    send(&chunk(json!([choice(String::new(), "length".into(), false)])))?;
    if body["stream_options"]["include_usage"] == true {
        let last = json!({"id": id, "created": 5, "model": model, "choices": [], "usage": usage});
        send(&last.to_string())?;
    }
    send("[DONE]")?;
    stream.write_all(b"0\r\n\r\n")?;
    Ok(true)
}

/// Says nothing until the client has left, or breaks the connection.
fn stall(shared: &FakeState, stream: &mut TcpStream, wait: bool) {
    if wait && matches!(stream.read(&mut [0]), Ok(0) | Err(_)) {
        shared.left.fetch_add(1, Ordering::SeqCst);
    }
    let _ = stream.shutdown(Shutdown::Both);
}
