//! The server as its users meet it: the binary, sockets and signals.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common;
use crate::common::server::Server;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

fn completion(prompt: &str, max_tokens: u32) -> Value {
    json!({"model": "mixfleet-random", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[test]
fn a_split_server_answers_as_one_device_does_and_explains_itself() {
    if cores() == 1 {
        println!("SKIPPED: one core only: all devices are the same core");
        return;
    }
    let one = Server::start(&["--device", "cpu"]);
    let request = completion(&"a mixed fleet ".repeat(20), 24);
    let (status, expected) = one.post("/v1/completions", &request);
    assert_eq!(status, 200, "{expected}");
    answers_split(&["--device", "cpu@0=prefill", "--device", "cpu@1=decode"], &request, &expected);
    let several = ["--device", "tp:cpu@0,cpu@1=prefill", "--device", "cpu=decode", "--kv-dram", "0.05"];
    answers_split(&several, &request, &expected);
}

/// Threads are bound to NUMA nodes by this name (`runtime/cli/src/affinity.rs`).
#[cfg(target_os = "linux")]
#[test]
fn the_thread_of_an_instance_bears_its_name() {
    let server = Server::start(&["--device", "cpu"]);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    let names: Vec<String> = tasks.filter_map(name).collect();
    assert!(names.iter().any(|name| name.trim_end() == "worker cpu"), "{names:?}");
}

/// Starts a server whose KV goes from device to device, and holds its answer to an expected one.
fn answers_split(split: &[&str], request: &Value, expected: &Value) {
    let two = Server::start(split);
    let (_, got) = two.post("/v1/completions", request);
    assert_eq!(got["choices"][0]["text"], expected["choices"][0]["text"], "{split:?}");
    assert_eq!(got["usage"]["completion_tokens"], 24);

    let id = got["id"].as_str().unwrap();
    let (status, explanation) = two.call("GET", &format!("/debug/placement/{id}"), "", "");
    assert_eq!(status, 200);
    let explanation: Value = serde_json::from_str(&explanation).unwrap();
    let candidate = &explanation["candidates"][0];
    assert!(candidate["terms"]["ttft_s"].as_f64().unwrap() > 0.0, "{explanation}");
    let (_, metrics) = two.call("GET", "/metrics", "", "");
    let bytes = metrics.lines().find_map(|l| l.strip_prefix("mixfleet_kv_transfer_bytes_total ")).unwrap();
    assert!(bytes.parse::<u64>().unwrap() > 0, "{split:?}: no KV crossed");
}

#[test]
fn kv_memory_that_binds_is_a_term_of_the_placement_under_kv_weight() {
    let memory = |weight: &str, prompt: &str| {
        // room for about 350 tokens
        let server = Server::with(&["--device", "cpu", "--kv-memory", "0.001", "--kv-weight", weight]);
        let (status, got) = server.post("/v1/completions", &completion(prompt, 24));
        assert_eq!(status, 200, "{got}");
        let (_, explanation) =
            server.call("GET", &format!("/debug/placement/{}", got["id"].as_str().unwrap()), "", "");
        let explanation: Value = serde_json::from_str(&explanation).unwrap();
        explanation["candidates"][0]["terms"]["memory"].as_f64().unwrap_or_else(|| panic!("{explanation}"))
    };
    let (short, long) = ("a fleet", "a mixed fleet ".repeat(18));
    assert_eq!((memory("0", &long), memory("1", short)), (0.0, 0.0), "off, or most of it is free");
    assert!(memory("1", &long) > 0.0);
}

#[test]
fn the_first_signal_drains_and_the_second_one_cuts() {
    let mut server = Server::start(&[]);
    let body = completion("drain", 400).to_string();
    let mut stream = server.connect();
    let length = body.len();
    write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    // The request is in progress once the server has logged its placement.
    loop {
        let line = server.log_line();
        assert!(!line.is_empty(), "the server ended");
        if line.contains("placed") {
            break;
        }
    }
    server.signal();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("\"finish_reason\":\"length\""), "{answer}");
    let (status, log) = server.wait();
    assert!(status.success(), "{status}: {log}");

    let server = Server::start(&[]);
    let mut stream = server.connect();
    let endless = json!({"model": "mixfleet-random", "prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}).to_string();
    let length = endless.len();
    write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{endless}").unwrap();
    let mut first = [0; 16];
    stream.read_exact(&mut first).unwrap();
    server.signal();
    server.signal();
    let (status, log) = server.wait();
    assert!(status.success(), "{status}: {log}");
}

#[test]
fn a_servers_event_log_replays_and_explains() {
    let directory = common::scratch("events");
    let log = directory.join("events.jsonl");
    let path = log.to_str().unwrap();
    let server =
        Server::start(&["--device", "cpu", "--policy", "cache-aware", "--tbt-slo", "100", "--events", path]);
    for prompt in ["a fleet", "a fleet of parts", "another"] {
        assert_eq!(server.post("/v1/completions", &completion(&prompt.repeat(9), 5)).0, 200);
    }
    let mut patient = completion("take your time", 5);
    patient["service_tier"] = json!("flex");
    let (status, answer) = server.post("/v1/completions", &patient);
    assert_eq!((status, &answer["service_tier"]), (200, &json!("flex")), "{answer}");
    server.signal();
    let (status, said) = server.wait();
    assert!(status.success(), "{status}: {said}");

    let replay = |arguments: &[&str]| {
        let output = common::mixfleet().arg("replay").args(arguments).output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, document, said) = replay(&[path, "--json"]);
    assert_eq!(code, Some(0), "{document} {said}");
    let document: Value = serde_json::from_str(&document).unwrap();
    assert_eq!(document["schema"], "mixfleet.replay/1");
    assert_eq!((&document["arrivals"], &document["differing"]), (&json!(4), &json!(0)));
    assert_eq!(document["whole"], true);
    let (_, text, _) = replay(&[path, "--request", "1"]);
    assert!(
        text.contains("byte by byte") && text.contains("request 1\n  prefill cpu, decode cpu: ttft"),
        "{text}"
    );

    let lines = std::fs::read_to_string(&log).unwrap();
    assert!(lines.contains("\"class\":1,\"objective\":{\"objective\":\"deadline\",\"at\":"), "no deadline");
    std::fs::write(&log, lines.replacen("\"prefill\":0", "\"prefill\":7", 1)).unwrap();
    let (code, text, said) = replay(&[path]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("\"prefill\":7") && said.contains("1 of"), "{text} {said}");
    std::fs::write(&log, lines.replacen("{\"now\"", "{\"then\"", 1)).unwrap();
    let (code, _, said) = replay(&[path]);
    assert!(code == Some(3) && said.contains("line 2"), "{code:?} {said}");
    let (code, _, said) = replay(&["no/such/log"]);
    assert!(code == Some(3) && said.contains("no/such/log"), "{code:?} {said}");
}

#[test]
fn a_flex_request_without_a_chance_is_turned_away_and_others_are_not() {
    let server = Server::start(&["--device", "cpu", "--flex-deadline-s", "1e-6"]);
    let mut request = completion("in no time", 40);
    assert_eq!(server.post("/v1/completions", &request).0, 200);
    request["service_tier"] = json!("flex");
    let (head, body) = server.exchange("POST", "/v1/completions", "", &request.to_string());
    assert!(head.starts_with("HTTP/1.1 429"), "{head}");
    let retry = head.lines().find_map(|line| line.strip_prefix("retry-after: "));
    assert!(retry.is_some_and(|seconds| seconds.parse::<u64>().is_ok_and(|s| s >= 1)), "{head}");
    let body: Value = serde_json::from_str(&body).unwrap();
    let (kind, message) = (&body["error"]["type"], body["error"]["message"].as_str().unwrap());
    assert_eq!(kind, "rate_limit_error");
    assert!(message.starts_with("the best placement completes the answer in"), "{message}");
    request["service_tier"] = json!("priority");
    let (status, answer) = server.post("/v1/completions", &request);
    assert_eq!((status, &answer["service_tier"]), (200, &json!("priority")), "{answer}");
    request["deadline_s"] = json!(0.001);
    assert_eq!(server.post("/v1/completions", &request).0, 429);
    request["deadline_s"] = json!(600);
    assert_eq!(server.post("/v1/completions", &request).0, 200);
}

#[test]
fn a_hundred_clients_that_hang_up_leave_no_page_in_use() {
    let server = Server::start(&["--sequences", "8"]);
    let body = json!({"model": "mixfleet-random", "prompt": "hang up", "max_tokens": 3000, "ignore_eos": true, "stream": true}).to_string();
    let length = body.len();
    let streams: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = server.connect();
            write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
            stream
        })
        .collect();
    let mut first = [0; 16];
    (&streams[0]).read_exact(&mut first).unwrap();
    drop(streams);
    let gauge = |name: &str| {
        let (_, metrics) = server.call("GET", "/metrics", "", "");
        let line = metrics.lines().find(|l| l.starts_with(name)).map(str::to_string);
        line.and_then(|l| l.rsplit(' ').next().unwrap().parse::<f64>().ok())
    };
    let empty = (0..600).any(|_| {
        let counts =
            ["mixfleet_requests_running{", "mixfleet_requests_waiting{", "mixfleet_kv_cache_usage_ratios{"]
                .map(gauge);
        counts.iter().all(|count| *count == Some(0.0)) || {
            std::thread::park_timeout(std::time::Duration::from_millis(50));
            false
        }
    });
    assert!(empty, "requests or pages remain");
    assert_eq!(server.post("/v1/completions", &completion("still there", 3)).0, 200);
}

#[test]
fn mistakes_are_named_and_have_their_exit_codes() {
    let fails = |arguments: &[&str], code: i32, words: &[&str]| {
        let output = common::mixfleet().args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{arguments:?}: '{word}' is not in: {text}");
        }
    };
    fails(&["serve", "--listen", "0.0.0.0:0"], 2, &["--api-key"]);
    fails(&["serve", "--api-keys", "no/such/file"], 2, &["--api-keys", "no/such/file"]);
    fails(&["serve", "--api-keys", "Cargo.toml"], 2, &["--api-keys", "unknown field"]);
    fails(&["serve", "--api-keys", "f", "--api-key", "k"], 2, &["--api-keys", "cannot be used with"]);
    fails(&["serve", "--listen", "nonsense"], 2, &["HOST:PORT"]);
    fails(&["serve", "--device", "cpu=both"], 2, &["prefill, decode, auto"]);
    fails(&["serve", "--listen", "127.0.0.1:0", "--device", "tpu"], 2, &["tpu", "mixfleet devices"]);
    fails(&["serve", "--listen", "127.0.0.1:0", "--device", "cpu=prefill"], 2, &["no device does decode"]);
    fails(&["serve", "--listen", "127.0.0.1:0", "--usd-per-hour", "tpu=1"], 2, &["tpu"]);
    fails(&["serve", "--tbt-slo=-1"], 2, &["--tbt-slo"]);
    fails(&["serve", "--flex-deadline-s", "0"], 2, &["--flex-deadline-s", "positive"]);
    fails(&["serve", "--threshold", "nan"], 2, &["--threshold"]);
    fails(&["serve", "--listen", "127.0.0.1:0", "--events", "no/such/dir/log"], 3, &["no/such/dir/log"]);
    fails(&["serve", "--requests", "0"], 2, &["--requests"]);
    fails(&["generate", "--prompt", "x", "--temperature", "nan"], 2, &["--temperature"]);
    fails(&["serve", "--listen", "127.0.0.1:0", "--device", "cpu@9999"], 2, &["9999"]);
    fails(&["generate", "--model", "no/such/dir", "--prompt", "x"], 3, &["no/such/dir"]);
    fails(&["generate", "--prompt-ids", "99999"], 2, &["99999", "vocabulary"]);
    fails(&["generate", "--prompt", "x", "--max-tokens", "1000000"], 2, &["context"]);
    fails(&["generate"], 2, &["--prompt"]);
    fails(&["serve", "--activations", "int3"], 2, &["f32, bf16, f16"]);
}

#[test]
fn devices_lists_what_is_here_and_why_the_rest_is_not() {
    let output = common::mixfleet().args(["devices", "--json"]).output().unwrap();
    assert!(output.status.success());
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["schema"], "mixfleet.devices/1");
    assert_eq!(document["devices"][0]["id"], "cpu");
    let (found, absent) = (document["devices"].as_array().unwrap(), document["absent"].as_array().unwrap());
    for what in ["cuda", "opencl", "sim", "wgpu"] {
        let reason = absent.iter().find(|a| a["what"] == what).and_then(|a| a["reason"].as_str());
        let shown = found.iter().any(|device| device["backend"] == what);
        assert!(shown || reason.is_some_and(|reason| !reason.is_empty()), "{what} is not mentioned");
    }
}

#[test]
fn help_fits_a_screen() {
    for arguments in [&["--help"][..], &["serve", "-h"], &["generate", "-h"], &["devices", "-h"]] {
        let output = common::mixfleet().args(arguments).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.lines().count() <= 50, "{arguments:?}: {} lines", text.lines().count());
    }
}
