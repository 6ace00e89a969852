//! External engines behind `mixfleet serve`, as clients see them.

use crate::common;
use crate::common::server::Server;
use crate::fake::{FakeEngine, Mood};
use crate::publisher::Publisher;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Options of an engine with predicted times, which is therefore up at the first probe.
const UNMEASURED: &str = ",part=H100-SXM-80GB,shape=llama-3.1-8b";

/// A server in front of these engines, with options for each.
pub(crate) fn gateway(engines: &[(&FakeEngine, &str, &str)], more: &[&str]) -> Server {
    let written: Vec<String> = engines
        .iter()
        .map(|(fake, kind, words)| format!("--worker-engine={kind}:{}{words}", fake.url()))
        .collect();
    let words: Vec<&str> = written.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Server::with(&words)
}

fn chat(tokens: usize, stream: bool) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "count for me"}], "max_tokens": tokens, "stream": stream})
}

fn counted(tokens: usize) -> String {
    (0..tokens).map(|at| format!("w{at} ")).collect()
}

/// The data of all events of a stream.
fn events(body: &str) -> Vec<&str> {
    body.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
}

/// The text of a streamed answer, which is complete.
fn streamed_text(body: &str) -> String {
    let events = events(body);
    assert_eq!(events.last(), Some(&"[DONE]"), "{body}");
    let chunks = events[..events.len() - 1].iter().map(|data| serde_json::from_str::<Value>(data).unwrap());
    let mut text = String::new();
    for chunk in chunks {
        let choice = &chunk["choices"][0];
        text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
    }
    text
}

/// Decodes a chunked body.
fn unchunked(body: &str) -> String {
    let (mut text, mut rest) = (String::new(), body);
    while let Some((length, after)) = rest.split_once("\r\n") {
        let length = usize::from_str_radix(length.trim(), 16).unwrap();
        if length == 0 {
            break;
        }
        text += &after[..length];
        rest = &after[length + 2..];
    }
    text
}

fn stream(server: &Server, body: &Value) -> (u16, String) {
    let (status, text) = server.call("POST", "/v1/chat/completions", "", &body.to_string());
    (status, if status == 200 { unchunked(&text) } else { text })
}

/// Response bodies in one piece or several.
fn passed(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let (head, text) = server.exchange("POST", path, "", &body.to_string());
    let text = if head.contains("transfer-encoding: chunked") { unchunked(&text) } else { text };
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(&text).unwrap())
}

/// A stream whose events are read one by one.
fn open_stream(server: &Server, body: &Value) -> BufReader<std::net::TcpStream> {
    let (mut connection, body) = (server.connect(), body.to_string());
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    write!(connection, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    BufReader::new(connection)
}

fn read_until(reader: &mut impl BufRead, words: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(words) {
        assert!(reader.read_line(&mut seen).unwrap() > 0, "it ended without '{words}': {seen}");
    }
    seen
}

fn metric(server: &Server, name: &str) -> f64 {
    let (_, text) = server.call("GET", "/metrics", "", "");
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or(f64::NAN)
}

#[test]
fn bodies_pass_to_engines_and_placement_is_explained_in_dollars() {
    let (dear, cheap) = (FakeEngine::start("vllm", "m"), FakeEngine::start("llamacpp", "file.gguf"));
    let words = ["part=L4,shape=llama-3.1-8b,usd=90", "part=L4,shape=llama-3.1-8b,usd=0.1,model=file.gguf"];
    let [dear_words, cheap_words] = words.map(|words| format!(",{words}"));
    let server =
        gateway(&[(&dear, "vllm", &dear_words), (&cheap, "llamacpp", &cheap_words)], &["--name", "m"]);
    let (_, models) = server.call("GET", "/v1/models", "", "");
    assert!(models.contains("\"id\":\"m\""), "{models}");

    let mut body = chat(3, false);
    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    body["response_format"] = json!({"type": "json_object"});
    body["odd"] = json!([1.5, null]);
    let (head, text) = server.exchange("POST", "/v1/chat/completions", "", &body.to_string());
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], counted(3), "{text}");
    assert_eq!((&answer["model"], &answer["usage"]["total_tokens"]), (&json!("m"), &json!(6)));
    let came = cheap.asked().pop().expect("the cheap one is asked, since it is as fast");
    body["model"] = json!("file.gguf");
    assert_eq!(came.body, body);

    let id = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap();
    let (status, explanation) = server.call("GET", &format!("/debug/placement/{id}"), "", "");
    let explanation: Value = serde_json::from_str(&explanation).unwrap();
    assert_eq!((status, &explanation["score_unit"]), (200, &json!("usd")), "{explanation}");
    let outcomes: Vec<&Value> =
        explanation["candidates"].as_array().unwrap().iter().map(|c| &c["outcome"]["outcome"]).collect();
    assert!(
        outcomes.contains(&&json!("chosen")) && outcomes.contains(&&json!("higher_score")),
        "{explanation}"
    );
    assert_eq!(metric(&server, "mixfleet_instances "), 2.0);
    assert_eq!(metric(&server, "mixfleet_generation_tokens_total{class=\"default\"} "), 3.0);
}

#[test]
fn a_prompt_goes_to_the_engine_that_tells_that_it_has_its_beginning() {
    let (other, holder) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
    let publisher = Publisher::start();
    let tokens: Vec<u32> = (0..64).collect();
    let stored = json!({"type": "BlockStored", "block_hashes": [7, 8, 9, u64::MAX], "parent_block_hash": null,
        "token_ids": tokens, "block_size": 16, "medium": "GPU"});
    publisher.lose(&rmp_serde::to_vec(&json!([1.5, [stored], 0])).unwrap());
    // on a busy machine one that is measured could seem so slow that the other one is better without
    // the prefix
    let words = format!("{UNMEASURED},kv-events={},kv-replay={}", publisher.events, publisher.replay);
    let server =
        gateway(&[(&other, "vllm", UNMEASURED), (&holder, "vllm", &words)], &["--policy", "cache-aware"]);
    let until = Instant::now() + Duration::from_secs(30);
    let known = loop {
        let (_, text) = server.call("GET", "/debug/kv", "", "");
        let known: Value = serde_json::from_str(&text).unwrap();
        if known["data"][1]["keys"] == 4 {
            break known;
        }
        assert!(Instant::now() < until, "{known}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let blocks = json!([[0, 7], [0, 8], [0, 9], [0, u64::MAX]]);
    assert_eq!((&known["data"][1]["blocks"], &known["data"][0]["is_followed"]), (&blocks, &json!(false)));

    let prompt: Vec<u32> = (0..70).collect();
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 2});
    let (head, _) = server.exchange("POST", "/v1/completions", "", &body.to_string());
    let id = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap();
    let (_, explanation) = server.call("GET", &format!("/debug/placement/{id}"), "", "");
    let explanation: Value = serde_json::from_str(&explanation).unwrap();
    let candidates = explanation["candidates"].as_array().unwrap();
    let chosen = candidates.iter().find(|one| one["outcome"]["outcome"] == "chosen").unwrap();
    assert_eq!(chosen["terms"]["cached_tokens"], 64, "{explanation}");
    assert_eq!(chosen["decode_device"], format!("vllm:{}", holder.address));
}

#[test]
fn an_engine_that_fails_before_a_byte_is_replaced_and_nobody_notices() {
    let say = |text: &str| Mood::Say(text.into());
    let nonsense = [
        Mood::Status(500, "{}".into()),
        say("<html>"),
        Mood::WrongModel,
        Mood::CutAfter(0),
        Mood::EndAfter(0),
    ];
    for mood in nonsense {
        let (bad, good) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
        let engines = [(&bad, "vllm", ",usd=0.1"), (&good, "vllm", ",usd=9")];
        let server = gateway(&engines, &["--policy", "round-robin"]);
        bad.set(mood.clone());
        // an engine that cut a connection gets no request until it answers a probe
        for is_stream in [false, true] {
            let (before, until) = (bad.asked().len(), Instant::now() + Duration::from_secs(30));
            while bad.asked().len() == before {
                assert!(Instant::now() < until, "{mood:?}: it was never tried");
                let (status, text) = match is_stream {
                    false => {
                        let (status, answer) = server.post("/v1/chat/completions", &chat(4, false));
                        (status, answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned())
                    }
                    true => {
                        let (status, body) = stream(&server, &chat(4, true));
                        (status, streamed_text(&body))
                    }
                };
                assert_eq!((status, text), (200, counted(4)), "{mood:?}, streamed: {is_stream}");
            }
        }
    }
}

#[test]
fn an_engine_that_fails_again_and_again_rests_and_that_is_shown() {
    let (bad, good) = (FakeEngine::start("vllm", "m"), FakeEngine::start("llamacpp", "m"));
    let words = format!("{UNMEASURED},usd=1");
    let engines = [(&bad, "vllm", &*words), (&good, "llamacpp", &*words)];
    let mut server = gateway(&engines, &["--policy", "round-robin"]);
    bad.set(Mood::Status(500, "{}".into()));
    let rests = format!("mixfleet_engine_resting{{device=\"vllm:{}\"}} ", bad.address);
    let (mut last, mut asked) = (String::new(), 0);
    while metric(&server, &rests) != 1.0 {
        asked += 1;
        assert!(asked <= 20, "every other request goes to it, and three failures are enough");
        let (head, answer) = server.exchange("POST", "/v1/chat/completions", "", &chat(2, false).to_string());
        assert!(answer.contains(&counted(2)), "{answer}");
        last = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap().to_owned();
    }
    server.wait_for("suspended after repeated failures");
    let (_, explanation) = server.call("GET", &format!("/debug/placement/{last}"), "", "");
    let explanation: Value = serde_json::from_str(&explanation).unwrap();
    assert_eq!(explanation["failed"], json!([format!("vllm:{}", bad.address)]), "{explanation}");
    let cost = explanation["cost_usd"].as_f64().unwrap();
    assert!(cost > 0.0 && cost < 0.1, "{explanation}");
    bad.set(Mood::Well);
    let until = Instant::now() + Duration::from_secs(60);
    while metric(&server, &rests) != 0.0 {
        assert!(Instant::now() < until, "it rests for a second, and no request has tried it since");
        assert_eq!(server.post("/v1/chat/completions", &chat(2, false)).0, 200);
        // the log is not read until then, and a full pipe would block the server
        std::thread::sleep(Duration::from_millis(50));
    }
    server.wait_for("answers again");
}

#[test]
fn embeddings_and_responses_pass_untouched_to_engines_that_take_them() {
    let (without, with) = (FakeEngine::start("vllm", "m"), FakeEngine::start("llamacpp", "file.gguf"));
    let engines = [(&without, "vllm", ",usd=1"), (&with, "llamacpp", ",usd=1,model=file.gguf")];
    let mut server = gateway(&engines, &["--name", "m", "--policy", "round-robin"]);
    without.set(Mood::Status(404, json!({"detail": "Not Found"}).to_string()));
    let document = json!({"data": [{"embedding": [0.5, 1.0]}], "odd": 1});
    with.set(Mood::Status(200, document.to_string()));
    let mut body = json!({"model": "m", "input": ["a", {"deep": [1.5]}], "odd": null});
    for path in ["/v1/embeddings", "/v1/responses"] {
        for _ in 0..2 {
            let (status, answer) = passed(&server, path, &body);
            assert_eq!((status, answer), (200, document.clone()), "{path}");
        }
    }
    body["model"] = json!("file.gguf");
    let came = with
        .shared
        .came
        .lock()
        .unwrap()
        .iter()
        .filter(|came| came.path.ends_with("embeddings"))
        .cloned()
        .collect::<Vec<_>>();
    assert!(
        came.len() == 2 && came.iter().all(|came| came.body == body),
        "only the model's name is another one"
    );
    // an engine's own refusal is the client's to see
    with.set(Mood::Status(400, json!({"error": {"message": "no such input"}}).to_string()));
    body["model"] = json!("m");
    let (status, answer) = passed(&server, "/v1/embeddings", &body);
    assert_eq!((status, &answer["error"]["message"]), (400, &json!("no such input")));
    with.set(Mood::Status(501, "{}".into()));
    let (status, answer) = passed(&server, "/v1/responses", &body);
    assert_eq!(status, 404);
    assert!(
        answer["error"]["message"].as_str().unwrap().contains("no engine here answers /v1/responses"),
        "{answer}"
    );
    body["model"] = json!("x");
    assert_eq!(passed(&server, "/v1/embeddings", &body).0, 404);
    server.wait_for("request passed on");

    let own = Server::start(&[]);
    let (status, answer) = own.post("/v1/embeddings", &body);
    assert!(status == 404 && answer.to_string().contains("--worker-engine"), "{answer}");
    let (status, version) = own.call("GET", "/version", "", "");
    assert_eq!((status, version), (200, json!({"version": env!("CARGO_PKG_VERSION")}).to_string()));
}

#[test]
fn what_passes_untouched_keeps_no_bound_and_hides_nothing_so_keys_that_need_it_are_refused() {
    let fake = FakeEngine::start("vllm", "m");
    let keys = common::scratch("engines-keys").join("keys.toml");
    let tenants = "[[tenant]]\nname = 'bounded'\nkey = 'a-key'\nmax_tokens = 8\n\
                   [[tenant]]\nname = 'blind'\nkey = 'b-key'\nhide_cached_tokens = true\n";
    std::fs::write(&keys, tenants).unwrap();
    let server = gateway(&[(&fake, "vllm", UNMEASURED)], &["--api-keys", keys.to_str().unwrap()]);
    let body = json!({"model": "m", "input": "x"}).to_string();
    let asked =
        |key: &str, path: &str| server.call("POST", path, &format!("authorization: Bearer {key}\r\n"), &body);
    let (status, answer) = asked("a-key", "/v1/responses");
    assert!(status == 400 && answer.contains("ask /v1/chat/completions"), "{answer}");
    assert_eq!(asked("a-key", "/v1/embeddings").0, 200);
    for path in ["/v1/responses", "/v1/embeddings"] {
        let (status, answer) = asked("b-key", path);
        assert!(status == 503 && answer.contains("may not see cached tokens"), "{answer}");
    }
}

#[test]
fn an_engine_that_dies_in_mid_stream_is_continued_by_another() {
    let (first, second) = (FakeEngine::start("vllm", "m"), FakeEngine::start("llamacpp", "m"));
    let server = gateway(&[(&first, "vllm", ""), (&second, "llamacpp", "")], &["--policy", "round-robin"]);
    let mut body = chat(6, true);
    body["stream_options"] = json!({"include_usage": true});
    for mood in [Mood::CutAfter(3), Mood::EndAfter(2), Mood::ErrorAfter(1)] {
        for fake in [&first, &second] {
            [&first, &second].into_iter().for_each(|fake| fake.set(Mood::Well));
            fake.set(mood.clone());
            // in turn, so that one of the two begins at it
            for _ in 0..2 {
                let (status, answer) = stream(&server, &body);
                assert_eq!((status, streamed_text(&answer)), (200, counted(6)), "{mood:?}: {answer}");
                let chunks: Vec<Value> =
                    events(&answer).iter().filter_map(|d| serde_json::from_str(d).ok()).collect();
                assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]), "{answer}");
                let usage = &chunks.last().unwrap()["usage"];
                assert_eq!(
                    (&usage["prompt_tokens"], &usage["completion_tokens"]),
                    (&json!(3), &json!(6)),
                    "{answer}"
                );
            }
        }
    }
    [&first, &second].into_iter().for_each(|fake| fake.set(Mood::CutAfter(2)));
    let mut seeded = chat(6, true);
    seeded["seed"] = json!(3);
    let (status, answer) = stream(&server, &seeded);
    let last = *events(&answer).last().unwrap();
    assert_eq!(status, 200);
    assert!(last.contains("engine_failed") && last.contains("'seed'"), "{answer}");
    assert!(!answer.contains("[DONE]"), "an answer that is not complete does not look so: {answer}");
}

#[test]
fn own_devices_stand_beside_engines_of_others_and_go_on_with_their_answers() {
    const TOKENS: u64 = 300;
    let own = || Server::start(&["--name", "m", "--device", "cpu"]);
    let [mut first, second] = [own(), own()];
    let words = |server: &Server| format!("--worker-engine=mixfleet:http://{}{UNMEASURED}", server.address);
    let server = Server::with(&[&words(&first), &words(&second)]);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "count"}], "max_tokens": TOKENS,
        "temperature": 0, "stream": true, "ignore_eos": true, "stream_options": {"include_usage": true}});
    let (status, whole) = stream(&server, &body);
    assert_eq!(status, 200, "{whole}");
    // of equals the first one answers
    let mut reader = open_stream(&server, &body);
    let begun = read_until(&mut reader, "content");
    first.child.kill().unwrap();
    let cut = begun + &read_until(&mut reader, "[DONE]");
    let usage = |answer: &str| {
        let last =
            events(answer).iter().rev().find_map(|data| serde_json::from_str::<Value>(data).ok()).unwrap();
        last["usage"].clone()
    };
    let told = |answer: &str| usage(answer)["completion_tokens"].as_u64();
    assert_eq!((told(&whole), told(&cut)), (Some(TOKENS), Some(TOKENS)), "{cut}");
    let (whole, cut) = (streamed_text(&whole), streamed_text(&cut));
    // the text of random weights has near ties, and holds no special tokens, so that it may differ later
    let alike = whole.chars().zip(cut.chars()).take_while(|(a, b)| a == b).count();
    assert!(alike >= 5, "{cut:?} begins otherwise than {whole:?}");
    assert_eq!(metric(&server, "mixfleet_instances "), 1.0);
}

#[test]
fn where_no_engine_answers_the_client_is_told_so() {
    let only = FakeEngine::start("vllm", "m");
    let mut server = gateway(&[(&only, "vllm", "")], &[]);
    only.set(Mood::Status(500, json!({"error": {"message": "cuda is gone"}}).to_string()));
    for stream in [false, true] {
        let (status, answer) = server.post("/v1/chat/completions", &chat(4, stream));
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 502 && message.contains("cuda is gone"), "{answer}");
    }
    only.set(Mood::Status(429, "{}".into()));
    assert_eq!(server.post("/v1/chat/completions", &chat(4, false)).0, 429);
    only.set(Mood::Status(400, json!({"error": {"message": "too long", "code": 400}}).to_string()));
    let (status, answer) = server.post("/v1/chat/completions", &chat(4, false));
    assert_eq!((status, &answer["error"]["message"]), (400, &json!("too long")));
    let other = json!({"model": "x", "messages": []});
    assert_eq!(server.post("/v1/chat/completions", &other).0, 404);

    only.die();
    server.wait_for("engine lost");
    let (status, answer) = server.post("/v1/chat/completions", &chat(4, false));
    let message = answer["error"]["message"].as_str().unwrap();
    let parts = ["no engine answers: ", &format!("vllm:{} is down for ", only.address), "--worker-engine"];
    assert!(status == 503 && parts.iter().all(|part| message.contains(part)), "{answer}");
    let (status, health) = server.call("GET", "/health", "", "");
    assert_eq!((status, health.as_str()), (503, "{\"status\":\"no engine answers\"}"));
    only.set(Mood::Well);
    only.live();
    server.seen.clear();
    server.wait_for("engine up");
    assert_eq!(server.post("/v1/chat/completions", &chat(4, false)).0, 200);
}

/// The state of an engine and its reason, as `/debug/states` has them.
fn state_of(server: &Server, device: &str) -> (String, String) {
    let (_, text) = server.call("GET", "/debug/states", "", "");
    let listed: Value = serde_json::from_str(&text).unwrap();
    let shown = listed["data"].as_array().unwrap().iter().find(|shown| shown["device"] == device).unwrap();
    assert_eq!(shown["kind"], "engine");
    let word = |name: &str| shown[name].as_str().unwrap().to_owned();
    (word("state"), word("reason"))
}

#[test]
fn a_killed_engine_is_down_on_every_view_and_back_when_it_answers() {
    let (dead, other) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
    let mut server = gateway(&[(&dead, "vllm", UNMEASURED), (&other, "vllm", UNMEASURED)], &[]);
    let name = format!("vllm:{}", dead.address);
    let up = format!("mixfleet_engine_up{{device=\"{name}\"}} ");
    let down = format!("mixfleet_device_state{{device=\"{name}\",state=\"down\"}} ");
    assert_eq!(state_of(&server, &name), ("healthy".into(), String::new()));
    assert_eq!((metric(&server, &up), metric(&server, &down)), (1.0, 0.0));

    dead.die();
    server.wait_for("to=\"down\"");
    let line = server.seen.lines().last().unwrap();
    assert!(line.contains(&name) && line.contains("state changed") && line.contains("reason="), "{line}");
    let (state, reason) = state_of(&server, &name);
    assert!(state == "down" && !reason.is_empty(), "{state}: {reason}");
    assert_eq!((metric(&server, &up), metric(&server, &down)), (0.0, 1.0));
    let alive = format!("mixfleet_engine_up{{device=\"vllm:{}\"}} ", other.address);
    assert_eq!(metric(&server, &alive), 1.0);
    assert_eq!(server.call("GET", "/health", "", "").0, 200, "the other one answers");

    dead.live();
    server.seen.clear();
    server.wait_for("to=\"healthy\"");
    assert_eq!(state_of(&server, &name), ("healthy".into(), String::new()));
    assert_eq!((metric(&server, &up), metric(&server, &down)), (1.0, 0.0));
}

#[test]
fn before_any_engine_answers_the_503_says_which_and_why() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Server::loading(&[&format!("--worker-engine=vllm:http://{address}")]);
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let (status, answer) = server.post("/v1/chat/completions", &chat(4, false));
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!(status, 503, "{answer}");
        if message.contains(&format!("vllm:{address} is down for ")) && message.contains("--worker-engine") {
            break;
        }
        assert!(Instant::now() < until, "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (status, health) = server.call("GET", "/health", "", "");
    assert_eq!((status, health.as_str()), (503, "{\"status\":\"no engine answers\"}"));
}

#[test]
fn an_engine_that_is_slow_to_be_measured_holds_up_no_other() {
    let (quick, slow) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
    *slow.shared.pace.lock().unwrap() = Duration::from_secs(2);
    let [quick_url, slow_url] = [&quick, &slow].map(|engine| format!("vllm:{}", engine.url()));
    let server = Server::with(&["--worker-engine", &quick_url, "--worker-engine", &slow_url]);
    let is_up =
        |engine: &FakeEngine| server.seen.contains(&format!("engine up engine=\"vllm:{}", engine.address));
    assert!(is_up(&quick) && !is_up(&slow), "{}", server.seen);
    let (status, answer) = passed(&server, "/v1/chat/completions", &chat(3, false));
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_client_that_leaves_cancels_its_request_at_the_engine() {
    let only = FakeEngine::start("vllm", "m");
    let server = gateway(&[(&only, "vllm", "")], &[]);
    only.set(Mood::StallAfter(2));
    let mut reader = open_stream(&server, &chat(9, true));
    read_until(&mut reader, "w1 ");
    assert_eq!(only.shared.left.load(Ordering::SeqCst), 0);
    drop(reader);
    let begun = Instant::now();
    while only.shared.left.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the engine still answers a client that has left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn options_of_devices_are_refused_beside_engines() {
    let engine = "--worker-engine=vllm:http://127.0.0.1:1";
    for (more, expected) in [
        (&["--device", "cpu"][..], "--device"),
        (&["--model", "x"], "--model"),
        (&["--hide-cached-tokens"], "--hide-cached-tokens"),
        (&["--worker-engine", "llamacpp:http://h=decode"], "hands no KV"),
    ] {
        let output = common::mixfleet().args(["serve", engine]).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected), "{more:?}: {said}");
    }
}
