//! External engines with roles behind `mixfleet serve`: one computes prompts, another one answers.

use crate::common::server::Server;
use crate::engines::gateway;
use crate::fake::{FakeEngine, Mood};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A real vLLM 0.32.0's description of a prompt's KV.
const PROMPT: &str = include_str!("../../engines/tests/data/vllm-0.32.0/prompt.json");
const WORDS: &str = ",part=H100-SXM-80GB,shape=llama-3.1-8b,usd=2";

pub(crate) fn parameters() -> Value {
    serde_json::from_str::<Value>(PROMPT).unwrap()["kv_transfer_params"].clone()
}

/// An engine for prompts and one for answers, and a server in front of them.
fn pair(more: &str) -> (FakeEngine, FakeEngine, Server) {
    let (first, second) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
    for engine in [&first, &second] {
        *engine.shared.hands_over.lock().unwrap() = parameters();
    }
    let [prefill, decode] = ["prefill", "decode"].map(|role| format!("={role}{WORDS}{more}"));
    // these tell no log-probabilities, and share requests unproven
    let server = gateway(&[(&first, "vllm", &prefill), (&second, "vllm", &decode)], &["--kv-canary=off"]);
    (first, second, server)
}

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "count for me"}], "max_tokens": 4})
}

/// Sends a request, expects the whole answer, and returns the explanation of its last placement.
fn answered(server: &Server, body: &Value) -> Value {
    let (head, text) = server.exchange("POST", "/v1/chat/completions", "", &body.to_string());
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "w0 w1 w2 w3 ", "{head}{text}");
    let id = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap();
    let (_, explanation) = server.call("GET", &format!("/debug/placement/{id}"), "", "");
    serde_json::from_str(&explanation).unwrap()
}

/// For each request that came, whether it was for a prompt, with others' KV, or neither.
fn kinds(engine: &FakeEngine) -> String {
    let kind = |body: &Value| match &body["kv_transfer_params"] {
        Value::Null => 'w',
        parameters if parameters["do_remote_decode"] == true => 'p',
        _ => 'a',
    };
    engine.asked().iter().map(|came| kind(&came.body)).collect()
}

#[test]
fn a_prompt_is_computed_by_one_engine_and_answered_by_another_one() {
    let (first, second, server) = pair(",nic-gb-per-s=50");
    let told = answered(&server, &chat());
    let chosen =
        told["candidates"].as_array().unwrap().iter().find(|one| one["outcome"]["outcome"] == "chosen");
    let chosen = chosen.unwrap_or_else(|| panic!("{told}"));
    assert_eq!(chosen["prefill_device"], format!("vllm:{}", first.address));
    assert_eq!(chosen["decode_device"], format!("vllm:{}", second.address));
    assert!(told["cost_usd"].as_f64().unwrap() > 0.0, "{told}");
    assert_eq!((kinds(&first), kinds(&second)), ("p".to_owned(), "a".to_owned()));
    assert_eq!(second.asked()[0].body["kv_transfer_params"], parameters());
    let line = format!(
        "mixfleet_hand_offs_total{{from=\"vllm:{}\",to=\"vllm:{}\"}} 1",
        first.address, second.address
    );
    let (_, metrics) = server.call("GET", "/metrics", "", "");
    assert!(metrics.contains(&line), "{metrics}");

    // several answers to one prompt are no request for two engines
    let mut two = chat();
    two["n"] = json!(2);
    let (_, text) = server.call("POST", "/v1/chat/completions", "", &two.to_string());
    assert!(!kinds(&first).contains("pp") && (kinds(&first) + &kinds(&second)).contains('w'), "{text}");
    // and what a client says of KV is between engines
    let mut own = chat();
    own["kv_transfer_params"] = parameters();
    let (status, text) = server.call("POST", "/v1/chat/completions", "", &own.to_string());
    assert!(status == 400 && text.contains("kv_transfer_params"), "{status} {text}");
}

#[test]
fn whatever_becomes_of_a_hand_off_there_is_a_whole_answer() {
    let refusal = Mood::Status(400, json!({"error": {"message": "unknown engine"}}).to_string());
    for taking in [Mood::Status(500, "{}".into()), refusal, Mood::Say("nonsense".into())] {
        let (first, second, server) = pair("");
        *second.shared.taking.lock().unwrap() = taking.clone();
        let told = answered(&server, &chat());
        assert!(told["undivided"].as_str().unwrap().contains("not taken over"), "{taking:?}: {told}");
        assert_eq!((kinds(&first), kinds(&second)), ("p".to_owned(), "aw".to_owned()), "{taking:?}");
    }
    for wrong in [json!({"do_remote_prefill": true}), json!("x")] {
        let (first, second, server) = pair("");
        *first.shared.hands_over.lock().unwrap() = wrong.clone();
        let told = answered(&server, &chat());
        assert!(told["undivided"].as_str().unwrap().contains("not handed over"), "{told}");
        assert!(!kinds(&second).contains('a'), "{wrong} does not go to another engine");
    }
    // the engine for prompts dies before it answers, and is dead
    let (first, second, server) = pair("");
    first.set(Mood::CutAfter(0));
    answered(&server, &chat());
    assert_eq!((kinds(&first), kinds(&second)), ("p".to_owned(), "w".to_owned()));
    first.die();
    answered(&server, &chat());
    assert!(!kinds(&second).contains('a'));
    // the decode engine dies of one: the other one does all of it
    let (first, second, server) = pair("");
    *second.shared.taking.lock().unwrap() = Mood::CutAfter(0);
    second.set(Mood::CutAfter(0));
    answered(&server, &chat());
    assert_eq!(kinds(&first), "pw");
}

#[test]
fn a_client_that_leaves_ends_the_prompt_too() {
    let (first, second, server) = pair("");
    first.set(Mood::StallAfter(0));
    let mut connection = server.connect();
    let body = chat().to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    std::io::Write::write_all(
        &mut connection,
        format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes(),
    )
    .unwrap();
    let begun = Instant::now();
    let wait = |holds: &dyn Fn() -> bool, what: &str| {
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait(&|| kinds(&first) == "p", "the prefill request arrives");
    drop(connection);
    wait(&|| first.shared.left.load(Ordering::SeqCst) == 1, "its engine still computes the prompt");
    assert!(second.asked().is_empty());
}
