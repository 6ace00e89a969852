//! KV of a prompt that one server computed, copied by hand to another one, as an external engine would.

use crate::common;
use crate::common::server::Server;
use serde_json::{Value, json};
use std::io::{Read, Write};

const NAME: &str = "llama-gqa-f32";
/// Tokens of a block of the CPU.
const BLOCK: usize = 32;

fn start(further: &[&str]) -> Server {
    let model = common::fixture(NAME);
    let own = ["--model", model.to_str().expect("a path in UTF-8"), "--device", "cpu", "--kv-memory", "0.01"];
    Server::with(&[&own[..], &["--activations", "f32", "--kv-dtype", "f32"], further].concat())
}

fn exchanging() -> Server {
    let mut server = start(&["--kv-dram", "0.01", "--kv-exchange", "http://10.0.0.3:8000"]);
    server.wait_for("may read and write KV");
    server
}

/// Sends bytes and reads until the server closes: status and body.
fn send(server: &Server, path: &str, kind: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let mut stream = server.connect();
    // answers in HTTP/1.0 are not in chunks
    let head = format!("POST {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: {kind}\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n", body.len()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a response");
    let status = String::from_utf8_lossy(&answer[..end]).split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_off(end + 4))
}

fn read(server: &Server, prompt: &[u32], first: usize) -> Vec<u8> {
    let asked = json!({"model": NAME, "prompt": prompt, "first": first}).to_string();
    let (status, frames) = send(server, "/v1/kv/read", "application/json", asked.as_bytes());
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&frames));
    frames
}

fn head(prompt: &[u32], salt: &str) -> Vec<u8> {
    let head = json!({"model": NAME, "prompt": prompt, "first": 0, "cache_salt": salt}).to_string();
    [&(head.len() as u64).to_le_bytes()[..], head.as_bytes()].concat()
}

/// Writes frames into the part of the cache with a salt: status and document.
fn write(server: &Server, prompt: &[u32], salt: &str, frames: &[u8]) -> (u16, Value) {
    let body = [&head(prompt, salt), frames].concat();
    let (status, answer) = send(server, "/v1/kv/write", "application/octet-stream", &body);
    (status, serde_json::from_slice(&answer).unwrap())
}

/// The text of the answer, and the tokens of its prompt that were not computed.
fn ask(server: &Server, prompt: &[u32], salt: &str) -> (String, u64) {
    let (status, answer) = server.post(
        "/v1/completions",
        &json!({"model": NAME, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": true,
            "cache_salt": salt, "kv_transfer_params": {"do_remote_prefill": true}}),
    );
    assert_eq!(status, 200, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (answer["choices"][0]["text"].as_str().expect("text").to_owned(), cached.expect("a number"))
}

fn refused(server: &Server) -> u64 {
    let (_, metrics) = server.call("GET", "/metrics", "", "");
    let wanted = "mixfleet_kv_exchange_blocks_total{direction=\"in\",outcome=\"refused\"}";
    let line = metrics.lines().find(|line| line.starts_with(wanted));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[test]
fn golden_answers_begin_with_kv_that_another_process_computed_and_damage_is_noticed() {
    let model = common::fixture(NAME);
    let case = &common::golden(&model)["cases"][5];
    let prompt = common::ids(&case["prompt_ids"]);
    let alone = common::generate(&common::Generate {
        model: &model,
        prompt_ids: &prompt,
        max_tokens: 48,
        prefill: "cpu",
        decode: "cpu",
        further: &[],
    });
    assert_eq!(common::ids(&alone["ids"]), common::ids(&case["greedy_ids"]));
    let expected = alone["text"].as_str().expect("text");
    let whole = (prompt.len() - 1) / BLOCK * BLOCK;

    let first = exchanging();
    let (_, described) = first.call("GET", "/v1/kv", "", "");
    let described: Value = serde_json::from_str(&described).unwrap();
    let frame = described["frame_bytes"].as_u64().expect("a number") as usize;
    assert_eq!((&described["dtype"], &described["block_tokens"]), (&json!("f32"), &json!(BLOCK)));
    assert!(read(&first, &prompt, 0).is_empty(), "nothing was computed");
    let (status, told) = first.post(
        "/v1/completions",
        &json!({"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}}),
    );
    assert_eq!(status, 200, "{told}");
    let expected_params = json!({"do_remote_prefill": true, "do_remote_decode": false,
        "remote_url": "http://10.0.0.3:8000", "remote_num_tokens": prompt.len() / BLOCK * BLOCK});
    assert_eq!(told["kv_transfer_params"], expected_params);
    let frames = read(&first, &prompt, 0);
    assert_eq!(frames.len(), prompt.len() / BLOCK * frame);
    assert_eq!(read(&first, &prompt, 2), frames[2 * frame..]);
    drop(first);

    let second = exchanging();
    assert_eq!(write(&second, &prompt, "a", &frames), (200, json!({"blocks": prompt.len() / BLOCK})));
    assert_eq!(ask(&second, &prompt, "a"), (expected.to_owned(), whole as u64));
    assert!(read(&second, &prompt, 0).is_empty(), "they are in another part of the cache");
    // one bit of the third block
    let mut flipped = frames.clone();
    flipped[2 * frame + 77] ^= 4;
    let (status, said) = write(&second, &prompt, "b", &flipped);
    let message = said["error"]["message"].as_str().unwrap_or_default();
    assert_eq!((status, &said["error"]["code"], refused(&second)), (400, &json!("kv_refused"), 1), "{said}");
    assert!(
        message.contains("block 2") && message.contains("checksum") && message.contains("2 earlier"),
        "{said}"
    );
    assert_eq!(ask(&second, &prompt, "b"), (expected.to_owned(), 2 * BLOCK as u64));
    // its end is missing
    let (status, said) = write(&second, &prompt, "c", &frames[..3 * frame - 1]);
    assert_eq!(status, 400, "{said}");
    assert_eq!(ask(&second, &prompt, "c"), (expected.to_owned(), 2 * BLOCK as u64));
    // of another prompt
    let mut another = prompt.clone();
    another[0] = (another[0] + 1) % 512;
    assert_eq!(write(&second, &another, "d", &frames).0, 400);
    assert_eq!(write(&second, &prompt, "d", &[&frames[..], &frames].concat()).0, 400, "more than it has");
    assert_eq!(ask(&second, &another, "d").1, 0);
}

#[test]
fn what_no_other_engine_would_send_is_refused_with_the_reason() {
    let server = exchanging();
    let post = |path: &str, kind: &str, body: &[u8]| {
        let (status, answer) = send(&server, path, kind, body);
        let document: Value = serde_json::from_slice(&answer).unwrap_or_default();
        (status, document["error"]["code"].as_str().unwrap_or_default().to_owned())
    };
    let write = |body: &[u8]| post("/v1/kv/write", "application/octet-stream", body);
    assert_eq!(write(&[]), (400, "invalid_body".into()));
    assert_eq!(write(&u64::MAX.to_le_bytes()), (413, "body_too_large".into()));
    assert_eq!(write(&[&9u64.to_le_bytes()[..], b"{}"].concat()), (400, "invalid_body".into()), "cut");
    assert_eq!(write(&[&2u64.to_le_bytes()[..], b"{}"].concat()), (400, "missing_parameter".into()));
    assert_eq!(post("/v1/kv/write", "application/json", b"{}").0, 415);
    for (body, code) in [
        (json!({"model": NAME}), "missing_parameter"),
        (json!({"model": "other", "prompt": [1]}), "model_not_found"),
        (json!({"model": NAME, "prompt": "text"}), "invalid_type"),
        (json!({"model": NAME, "prompt": [1, 512]}), "invalid_value"),
        (json!({"model": NAME, "prompt": [1], "first": -1}), "invalid_value"),
        (json!({"model": NAME, "prompt": vec![1; 1 << 16]}), "context_length_exceeded"),
    ] {
        let said = post("/v1/kv/read", "application/json", body.to_string().as_bytes());
        assert_eq!(said.1, code, "{:.80}", body.to_string());
    }
    let params = |more: Value| {
        let mut body =
            json!({"model": NAME, "prompt": [1, 2], "kv_transfer_params": {"do_remote_decode": true}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, said) = server.post("/v1/completions", &body);
        (status, said["error"]["param"].as_str().unwrap_or_default().to_owned())
    };
    for more in [
        json!({"stream": true}),
        json!({"n": 2}),
        json!({"prompt": [[1], [2]]}),
        json!({"kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": true}}),
        json!({"kv_transfer_params": {"do_remote_decode": 1}}),
    ] {
        assert_eq!(params(more.clone()), (400, "kv_transfer_params".into()), "{more}");
    }

    let without = start(&[]);
    assert_eq!(without.call("GET", "/v1/kv", "", "").0, 404);
    assert_eq!(send(&without, "/v1/kv/read", "application/json", b"{}").0, 404);
    let asked = json!({"model": NAME, "prompt": [1, 2], "kv_transfer_params": {"do_remote_decode": true}});
    let (status, said) = without.post("/v1/completions", &asked);
    assert!(status == 400 && said.to_string().contains("--kv-exchange"), "{said}");
    let closed = start(&["--kv-dram", "0.01", "--kv-exchange", "http://a:1", "--api-key", "secret"]);
    assert_eq!(send(&closed, "/v1/kv/read", "application/json", b"{}").0, 401);
    assert_eq!(send(&closed, "/v1/kv/write", "application/octet-stream", b"").0, 401);
}

#[test]
fn an_exchange_without_host_memory_or_an_address_is_a_usage_error() {
    for (arguments, said) in [
        (&["--kv-exchange", "http://a:1"][..], "--kv-dram"),
        (&["--kv-dram", "1", "--kv-exchange", "a:1"], "expected http://HOST:PORT"),
        (&["--kv-dram", "1", "--kv-exchange", "http://a:1/v1"], "expected http://HOST:PORT"),
    ] {
        let output =
            common::mixfleet().args(["serve", "--listen", "127.0.0.1:0"]).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && errors.contains(said), "{arguments:?}: {errors}");
    }
}
