//! Members of an instance as separate processes: the client's view of a lost one, and access control.

use crate::common::members::MemberProcess;
use crate::common::server::Server;
use crate::common::{self, Generate, fixture, generate, golden, ids, mixfleet, scratch};
use crate::fleet::authority;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::time::{Duration, Instant};

/// Only ends a test that fails.
const LONG: Duration = Duration::from_secs(60);

const TOKENS: usize = 48;

/// A server of the fixture on two devices, and a case.
fn served(device: &str) -> (Server, Value) {
    let model = fixture("llama-gqa-f32");
    let case = golden(&model)["cases"][0].clone();
    let arguments = ["--device", device, "--activations", "f32", "--kv-dtype", "f32"];
    let model = ["--model", model.to_str().unwrap()];
    (Server::start(&[&arguments[..], &model[..]].concat()), case)
}

fn body(case: &Value, stream: bool) -> Value {
    let prompt = &case["prompt_ids"];
    json!({
        "model": "llama-gqa-f32", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream,
        "ignore_eos": true,
    })
}

/// The answer, asked for until there is one.
fn answer(server: &Server, case: &Value) -> String {
    let deadline = Instant::now() + LONG;
    loop {
        let (status, answer) = server.post("/v1/completions", &body(case, false));
        if status == 200 {
            return answer["choices"][0]["text"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < deadline, "{status} {answer}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Begins an answer, does `harm` after its first words, and returns its text and whether it ended well.
fn interrupted(server: &Server, case: &Value, harm: impl FnOnce()) -> (String, bool) {
    let mut socket = server.connect();
    socket.set_read_timeout(Some(2 * LONG)).unwrap();
    let body = body(case, true).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    let length = body.len();
    write!(socket, "{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    let (mut text, mut harm, mut is_done) = (String::new(), Some(harm), false);
    for line in BufReader::new(&socket).lines().map_while(Result::ok) {
        let Some((_, data)) = line.split_once("data: ") else { continue };
        is_done |= data == "[DONE]";
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        is_done &= event.get("error").is_none();
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        if event.get("error").is_some() {
            return (text, false);
        }
        if let (false, Some(harm)) = (text.is_empty(), harm.take()) {
            harm();
        }
    }
    (text, is_done)
}

#[test]
fn a_member_that_is_killed_costs_no_wrong_word_and_serves_again_once_it_is_back() {
    let data = scratch("killed");
    let mut groups = vec![("127.0.0.1:0".to_owned(), "attn"), ("127.0.0.1:0".to_owned(), "tp")];
    if cfg!(target_os = "linux") {
        groups.push((format!("unix:{}", data.join("member").display()), "attn"));
    }
    for (address, kind) in groups {
        let mut member = MemberProcess::start("cpu@1", &["--listen", &address]);
        let (port, selector) = (member.selector.replace("remote:", ""), member.selector.clone());
        let group = format!("{kind}:cpu@0,{selector}");
        let (server, case) = served(&group);
        let expected = answer(&server, &case);
        let (text, is_whole) = interrupted(&server, &case, || {
            member.kill();
            member = MemberProcess::start("cpu@1", &["--listen", &port]);
        });
        assert!(expected.starts_with(&text), "{group}: {text:?} is not how {expected:?} begins");
        assert!(!is_whole || text == expected, "{group}: {text:?} instead of {expected:?}");
        assert_eq!(answer(&server, &case), expected, "{group}: after it was back");

        // while it is away, there is no answer and the server lives; then it answers
        member.kill();
        let (status, error) = server.post("/v1/completions", &body(&case, false));
        assert!(status >= 500 || error["choices"][0]["text"] == *expected, "{group}: {status} {error}");
        member = MemberProcess::start("cpu@1", &["--listen", &port]);
        assert_eq!(answer(&server, &case), expected, "{group}: after it was away");
    }
    std::fs::remove_dir_all(data).unwrap();
}

#[test]
fn a_member_with_another_token_or_other_certificates_is_not_used() {
    let data = scratch("members");
    let token = data.join("token").to_str().unwrap().to_owned();
    let member = MemberProcess::start("cpu@1", &["--token-file", &token]);
    let device = format!("attn:cpu@0,{}", member.selector);
    let refused = |device: &str, flags: &[String]| {
        let output = mixfleet()
            .args(["generate", "--prompt-ids", "1", "--max-tokens", "1", "--device", device])
            .args(flags)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{device} {flags:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = refused(&device, &[]);
    assert!(said.contains("does not have this process's token"), "{said}");

    let (own, other) = (authority::member(&data, "own"), authority::member(&data, "other"));
    let flags: Vec<&str> = own.iter().map(String::as_str).collect();
    let secured = MemberProcess::start("cpu@1", &flags);
    let secured_device = format!("attn:cpu@0,{}", secured.selector);
    refused(&secured_device, &other);
    refused(&secured_device, &[]);
    refused(&device, &own);
    let model = fixture("llama-gqa-f32");
    let case = golden(&model)["cases"][0].clone();
    for (device, further) in [(device, vec!["--token-file", &token]), (secured_device, flags)] {
        let request = Generate {
            model: &model,
            prompt_ids: &ids(&case["prompt_ids"]),
            max_tokens: 48,
            prefill: &device,
            decode: &device,
            further: &further,
        };
        assert_eq!(ids(&generate(&request)["ids"]), ids(&case["greedy_ids"]), "{device}");
    }
    std::fs::remove_dir_all(data).unwrap();
}

#[test]
fn what_no_member_can_be_is_refused_in_words() {
    let says = |args: &[&str], words: &str| {
        let output = mixfleet().args(args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(words), "{args:?}: {said}");
    };
    says(&["member", "--device", "cpu@0", "--listen", "192.0.2.1:7001"], "is not on this host");
    says(&["member", "--device", "cpu@0", "--listen", "0.0.0.0:7001"], "every address");
    says(&["member", "--device", "cpu@0", "--listen", "unix:"], "a path is missing");
    let file = format!("unix:{}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
    says(&["member", "--device", "cpu@0", "--listen", &file], "is not a socket: give another path");
    // a port is not said to be ready for RDMA where there is none
    if !std::path::Path::new("/sys/class/infiniband").exists() {
        says(&["member", "--device", "cpu@0", "--listen", "rdma:127.0.0.1:0"], "RDMA");
    }
    says(&["member", "--device", "gpu9"], "unknown device");
    let generate = ["generate", "--prompt-ids", "1", "--device"];
    let nowhere = ["attn:cpu@0,remote:unix:/nowhere/member"];
    says(&[&generate[..], &nowhere].concat(), "remote:unix:/nowhere/member: connect");
    says(&[&generate[..], &["attn:cpu@0,remote:127.0.0.1:1"]].concat(), "remote:127.0.0.1:1: connect");
    says(
        &[&generate[..], &["tp:cpu@0,remote:nowhere"]].concat(),
        "expected HOST:PORT, rdma:HOST:PORT or unix:PATH",
    );
    says(&[&generate[..], &["tp:remote:127.0.0.1:1,remote:127.0.0.1:1"]].concat(), "named twice");
}

#[test]
fn a_device_of_another_process_serves_alone_too() {
    let member = MemberProcess::start("cpu", &[]);
    let model = fixture("llama-gqa-f32");
    let case = golden(&model)["cases"][1].clone();
    let request = Generate {
        model: &model,
        prompt_ids: &ids(&case["prompt_ids"]),
        max_tokens: 48,
        prefill: &member.selector,
        decode: "cpu@0",
        further: &[],
    };
    assert_eq!(ids(&common::generate(&request)["ids"]), ids(&case["greedy_ids"]));
}
