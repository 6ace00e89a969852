//! Server-sent events, byte by byte.

use super::support::{EOS, MODEL, Play, Response, Setup, run};
use mixfleet_runtime::request::FinishReason;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn stream(play: Play, path: &'static str, mut body: Value) -> Response {
    body["stream"] = true.into();
    let response = run(Setup::play(play), move |server| async move { server.post(path, &body).await });
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(response.headers["content-type"], "text/event-stream; charset=utf-8");
    assert!(!response.truncated);
    response
}

fn id(response: &Response) -> &str {
    &response.headers["x-request-id"]
}

#[test]
fn a_chat_stream_has_role_content_reason_usage_and_done() {
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": true}
    });
    let response = stream(Play::say("é!"), "/v1/chat/completions", body);
    let head = format!(
        "data: {{\"id\":\"{}\",\"object\":\"chat.completion.chunk\",\"created\":1767225600,\"model\":\"org/bytes\",",
        id(&response)
    );
    let choice = |delta: &str, reason: &str| {
        format!(
            "{head}\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{reason}}}],\
             \"usage\":null}}\n\n"
        )
    };
    let expected = [
        choice("{\"role\":\"assistant\",\"content\":\"\"}", "null"),
        choice("{\"content\":\"é\"}", "null"),
        choice("{\"content\":\"!\"}", "null"),
        choice("{}", "\"stop\""),
        format!(
            "{head}\"choices\":[],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":4,\"total_tokens\":13,\
             \"prompt_tokens_details\":{{\"cached_tokens\":3}}}}}}\n\n"
        ),
        "data: [DONE]\n\n".into(),
    ];
    assert_eq!(response.body, expected.concat());
}

#[test]
fn a_completion_stream_has_text_reason_and_done() {
    let play = Play::Reply(vec![97, 98], FinishReason::Length);
    let response = stream(play, "/v1/completions", json!({"model": MODEL, "prompt": "x"}));
    let head = format!(
        "data: {{\"id\":\"{}\",\"object\":\"text_completion\",\"created\":1767225600,\"model\":\"org/bytes\",",
        id(&response)
    );
    let choice = |text: &str, reason: &str| {
        format!(
            "{head}\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":{reason}}}]}}\n\n"
        )
    };
    let expected =
        [choice("a", "null"), choice("b", "null"), choice("", "\"length\""), "data: [DONE]\n\n".into()];
    assert_eq!(response.body, expected.concat());
}

#[test]
fn a_stop_string_never_shows_even_in_part() {
    let tokens = "tell EN not END more".bytes().map(u32::from).collect();
    let body = json!({"model": MODEL, "prompt": "x", "stop": "END", "max_tokens": 30});
    let response = stream(Play::Hang(tokens), "/v1/completions", body);
    let mut shown = String::new();
    for event in response.events() {
        if event == "[DONE]" {
            continue;
        }
        let chunk: Value = serde_json::from_str(event).unwrap();
        shown.push_str(chunk["choices"][0]["text"].as_str().unwrap());
        assert!("tell EN not ".starts_with(&shown), "{shown:?}");
    }
    assert_eq!(shown, "tell EN not ");
    let events = response.events();
    let closing: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(closing["choices"][0]["finish_reason"], "stop");
}

#[test]
fn what_was_held_back_is_shown_at_the_end() {
    let play =
        Play::Reply(b"so EN".iter().map(|&byte| byte.into()).chain([EOS]).collect(), FinishReason::Stop);
    let body = json!({"model": MODEL, "prompt": "x", "stop": "END"});
    let response = stream(play, "/v1/completions", body);
    let texts: String = response
        .events()
        .iter()
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_string))
        .collect();
    assert_eq!(texts, "so EN");
}

#[test]
fn several_choices_interleave_and_each_closes_once() {
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3, "logprobs": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}
    });
    let response = stream(Play::say("ok"), "/v1/chat/completions", body);
    let events = response.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, &"[DONE]");
    let mut seen: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut last_total = 0;
    for chunk in chunks {
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        let total = chunk["usage"]["completion_tokens"].as_u64().unwrap();
        assert!(total >= last_total);
        last_total = total;
        let Some(choice) = chunk["choices"].get(0) else { continue };
        let word = match (&choice["delta"], &choice["finish_reason"]) {
            (delta, Value::Null) if delta.get("role").is_some() => "role".to_string(),
            (delta, Value::Null) => {
                let entries = choice["logprobs"]["content"].as_array().unwrap();
                format!("{}+{}", delta["content"].as_str().unwrap(), entries.len())
            }
            (_, reason) => reason.to_string(),
        };
        seen.entry(choice["index"].as_u64().unwrap()).or_default().push(word);
    }
    assert_eq!(last_total, 9);
    let each = ["role", "o+1", "k+1", "+1", "\"stop\""];
    assert_eq!(seen.len(), 3);
    assert!(seen.values().all(|words| words == &each), "{seen:?}");
}

#[test]
fn an_error_on_the_way_is_an_event_and_the_end() {
    for play in [Play::Fail(vec![97], "the device is gone"), Play::HangUp(vec![97])] {
        let response = stream(play, "/v1/completions", json!({"model": MODEL, "prompt": "x"}));
        let events = response.events();
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        assert_eq!(last["error"]["type"], "server_error", "{last}");
        assert_eq!(events.len(), 2);
        assert!(!response.body.contains("[DONE]"));
    }
}
