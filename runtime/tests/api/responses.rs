//! `/v1/responses`: conversations, documents and events.

use super::support::{EOS, MODEL, Play, Response, Setup, run};
use mixfleet_runtime::request::FinishReason;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

/// The response to a body with these fields, and the prompt as text.
fn asked(play: Play, more: Value) -> (Response, String) {
    let mut body = json!({"model": MODEL, "input": "hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    run(Setup::play(play), move |server| async move {
        let response = server.post(PATH, &body).await;
        let prompt = server.submissions().first().map(|request| {
            let bytes: Vec<u8> = request.prompt_ids.iter().map(|&id| id as u8).collect();
            String::from_utf8(bytes).unwrap()
        });
        (response, prompt.unwrap_or_default())
    })
}

/// The events of a stream, each with its name.
fn events(response: &Response) -> Vec<(String, Value)> {
    let blocks = response.body.split("\n\n").filter(|block| !block.is_empty());
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        assert_eq!(data["type"], *name);
        (name, data)
    };
    blocks.map(event).collect()
}

fn tool() -> Value {
    json!({"type": "function", "name": "look", "strict": null, "parameters":
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}})
}

const CALL: &str = "I look.<tool_call>\n{\"name\": \"look\", \"arguments\": {\"x\": 1}}\n</tool_call>";

#[test]
fn a_response_has_its_output_and_repeats_its_request() {
    let more = json!({"instructions": "be", "max_output_tokens": 9, "metadata": {"a": "b"}, "temperature": 0.7,
        "store": false, "previous_response_id": null, "truncation": "disabled", "include": []});
    let (response, prompt) = asked(Play::say("yes"), more);
    assert_eq!(prompt, "system:be|user:hi|a:");
    let body = response.json();
    let id = body["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("resp_") && response.headers["x-request-id"] == id);
    assert_eq!(
        (&body["object"], &body["status"], &body["store"]),
        (&json!("response"), &json!("completed"), &json!(false))
    );
    let item = &body["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        item["content"],
        json!([{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}])
    );
    let usage = json!({"input_tokens": 20, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 24});
    assert_eq!(body["usage"], usage);
    assert_eq!((&body["instructions"], &body["max_output_tokens"]), (&json!("be"), &json!(9)));
    assert_eq!((&body["metadata"], &body["temperature"]), (&json!({"a": "b"}), &json!(0.7)));
    let cut = asked(Play::Reply(vec![97], FinishReason::Length), json!({"max_output_tokens": 1})).0.json();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[test]
fn items_become_the_messages_of_a_chat() {
    let input = json!([
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{\"x\": 1}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"role": "user", "content": "y"},
    ]);
    let (response, prompt) = asked(Play::say("ok"), json!({"input": input, "max_output_tokens": 9}));
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(prompt, "system:be|user:x|assistant:so|tool:2|user:y|a:");
}

#[test]
fn calls_are_items_of_their_own() {
    let (response, _) = asked(Play::say(CALL), json!({"tools": [tool()], "tool_choice": "auto"}));
    let output = response.json()["output"].clone();
    assert_eq!(output[0]["content"][0]["text"], "I look.");
    assert_eq!((&output[1]["type"], &output[1]["name"]), (&json!("function_call"), &json!("look")));
    assert_eq!(output[1]["arguments"], "{\"x\": 1}");
    assert!(output[1]["call_id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(response.json()["tools"], json!([tool()]));
}

#[test]
fn a_stream_tells_each_item_from_its_beginning_to_its_end() {
    let (response, _) = asked(Play::say(CALL), json!({"tools": [tool()], "stream": true}));
    assert_eq!(response.headers["content-type"], "text/event-stream; charset=utf-8");
    let events = events(&response);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert!(events.iter().enumerate().all(|(at, (_, data))| data["sequence_number"] == at));
    let joined = |kind: &str| -> String {
        events
            .iter()
            .filter(|(name, _)| name == kind)
            .filter_map(|(_, data)| data["delta"].as_str())
            .collect()
    };
    assert_eq!(joined("response.output_text.delta"), "I look.");
    assert_eq!(joined("response.function_call_arguments.delta"), "{\"x\": 1}");
    let deltas = events.iter().filter(|(name, _)| name.ends_with("arguments.delta")).count();
    assert!(deltas > 2, "{deltas} pieces");
    let (_, last) = events.last().unwrap();
    let done: Vec<&Value> = events
        .iter()
        .filter(|(name, _)| name.ends_with("item.done"))
        .map(|(_, data)| &data["item"])
        .collect();
    assert_eq!(last["response"]["output"], json!(done));
    assert_eq!(last["response"]["usage"]["output_tokens"], CALL.len() + 1);
}

#[test]
fn a_stream_says_how_it_ends() {
    let end = |play, more| events(&asked(play, more).0).pop().unwrap();
    let stream = || json!({"stream": true, "max_output_tokens": 1});
    let (name, data) = end(Play::Reply(vec![97], FinishReason::Length), stream());
    assert_eq!((name.as_str(), &data["response"]["status"]), ("response.incomplete", &json!("incomplete")));
    let (name, data) = end(Play::Fail(vec![97], "it broke"), stream());
    assert_eq!(
        (name.as_str(), &data["response"]["error"]["message"]),
        ("response.failed", &json!("it broke"))
    );
    // an answer without a text is an empty message
    let (_, data) = end(Play::Reply(vec![EOS], FinishReason::Stop), stream());
    assert_eq!(data["response"]["output"][0]["content"][0]["text"], "");
}

#[test]
fn log_probabilities_are_part_of_the_text() {
    let more = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1});
    let body = asked(Play::say("y"), more).0.json();
    let entry = &body["output"][0]["content"][0]["logprobs"][0];
    assert_eq!(
        (&entry["token"], &entry["logprob"], &entry["bytes"]),
        (&json!("y"), &json!(-0.5), &json!([121]))
    );
    assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 1);
    assert_eq!(body["top_logprobs"], 1);
}

#[test]
fn what_needs_a_store_or_is_unknown_is_refused_by_its_name() {
    for (field, more) in [
        ("previous_response_id", json!({"previous_response_id": "resp_1"})),
        ("conversation", json!({"conversation": "conv_1"})),
        ("store", json!({"store": true})),
        ("background", json!({"background": true})),
        ("truncation", json!({"truncation": "auto"})),
        ("prompt", json!({"prompt": {"id": "p"}})),
        ("include", json!({"include": ["file_search_call.results"]})),
        ("top_logprobs", json!({"top_logprobs": 2})),
        ("tools[0].type", json!({"tools": [{"type": "web_search"}]})),
        ("tool_choice", json!({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "tools": []}})),
        ("reasoning.summary", json!({"reasoning": {"summary": "auto"}})),
        ("reasoning.effort", json!({"reasoning": {"effort": "low"}})),
        ("text.format.type", json!({"text": {"format": {"type": "xml"}}})),
        ("text.format.schema", json!({"text": {"format": {"type": "json_schema", "name": "x"}}})),
        ("max_output_tokens", json!({"max_output_tokens": "x"})),
        ("max_tokens", json!({"max_tokens": 3})),
        ("input", json!({"max_output_tokens": 99})),
        ("input", json!({"input": null})),
        ("input", json!({"input": []})),
        ("input", json!({"input": 1})),
        ("input[0].role", json!({"input": [{"content": "x"}]})),
        (
            "input[1].type",
            json!({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "a"}]}),
        ),
        ("input[0].content", json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})),
        ("input[0].call_id", json!({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]})),
        ("input[0].encrypted_content", json!({"input": [{"type": "reasoning", "encrypted_content": "x"}]})),
    ] {
        let (response, prompt) = asked(Play::say("no"), more.clone());
        assert_eq!((response.error().2.as_deref(), prompt.as_str()), (Some(field), ""), "{more}");
    }
}
