//! What an answer tells of its prompt, and which of its tokens become text.

use super::support::{BOS, EOS, MODEL, Play, Response, Setup, run};
use mixfleet_runtime::request::{FinishReason, GenerateRequest};
use serde_json::{Value, json};

/// An engine that draws what is forced, and then this text and an end.
fn forced_then(text: &'static str) -> Setup {
    Setup::script(move |request| {
        let more = text.bytes().map(u32::from).chain([EOS]);
        let own = request.max_tokens as usize - request.forced_ids.len();
        let tokens = request.forced_ids.iter().copied().chain(more.take(own));
        Play::Reply(tokens.collect(), FinishReason::Stop)
    })
}

fn asked(setup: Setup, body: Value) -> (Response, Vec<GenerateRequest>) {
    run(
        setup,
        move |server| async move { (server.post("/v1/completions", &body).await, server.submissions()) },
    )
}

#[test]
fn an_echo_has_values_for_all_tokens_but_the_first() {
    let body = json!({"model": MODEL, "prompt": "hé", "max_tokens": 2, "echo": true, "logprobs": 1});
    let (response, submitted) = asked(forced_then("yes"), body);
    let choice = &response.json()["choices"][0];
    assert_eq!(choice["text"], "héye");
    let told = &choice["logprobs"];
    assert_eq!(told["tokens"], json!(["<257>", "h", "\u{FFFD}", "\u{FFFD}", "y", "e"]));
    assert_eq!(told["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.5, -0.5]));
    assert_eq!(told["text_offset"], json!([0, 0, 1, 1, 2, 3]));
    assert_eq!((&told["top_logprobs"][0], &told["top_logprobs"][1]), (&Value::Null, &json!({"h": -0.5})));
    assert_eq!(choice.get("prompt_logprobs"), None);
    let [request] = submitted.as_slice() else { panic!("one request") };
    assert_eq!((&*request.prompt_ids, &*request.forced_ids), (&[BOS][..], &[104, 0xc3, 0xa9][..]));
    assert_eq!((request.max_tokens, request.logprobs), (3 + 2, Some(1)));
    let usage = response.json()["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(4), &json!(2)));
}

#[test]
fn nothing_is_generated_where_only_the_prompt_is_wanted() {
    let body = json!({"model": MODEL, "prompt": [104, 105], "max_tokens": 0, "echo": true, "logprobs": 0});
    let (response, submitted) = asked(forced_then("yes"), body);
    let choice = &response.json()["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("hi"), &json!("length")));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.5]));
    assert_eq!((submitted[0].max_tokens, submitted[0].forced_ids.len()), (1, 1));
    // one token is drawn where no token of the prompt is, and is not reported
    for prompt in [json!("h"), json!([104])] {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 0, "echo": true});
        let (response, submitted) = asked(forced_then("yes"), body);
        assert_eq!(response.json()["choices"][0]["text"], "h");
        assert_eq!(response.json()["usage"]["completion_tokens"], 0);
        assert_eq!((submitted[0].max_tokens, submitted[0].logprobs), (1, None));
    }
    let refused = asked(forced_then("no"), json!({"model": MODEL, "prompt": "h", "max_tokens": 0})).0;
    assert_eq!(refused.error().2.as_deref(), Some("max_tokens"));
}

#[test]
fn values_of_the_prompt_have_a_field_of_their_own() {
    let body = json!({"model": MODEL, "prompt": [104, 105], "max_tokens": 1, "prompt_logprobs": 2});
    let choice = asked(forced_then("y"), body).0.json()["choices"][0].clone();
    assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("y"), &Value::Null));
    let own = json!({"logprob": -0.5, "rank": 1, "decoded_token": "i"});
    let other = json!({"logprob": -9999.0, "rank": 2, "decoded_token": "~"});
    assert_eq!(choice["prompt_logprobs"], json!([null, {"105": own, "126": other}]));
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
        "prompt_logprobs": 0});
    let answer = run(forced_then("y"), move |server| async move {
        server.post("/v1/chat/completions", &chat).await.json()
    });
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), "user:x|a:".len());
    assert_eq!(answer["choices"][0]["message"]["content"], "y");
    let streamed = json!({"model": MODEL, "prompt": "h", "prompt_logprobs": 1, "stream": true});
    assert_eq!(asked(forced_then("y"), streamed).0.error().2.as_deref(), Some("prompt_logprobs"));
}

#[test]
fn a_stream_begins_with_the_prompt_that_is_echoed() {
    let body =
        json!({"model": MODEL, "prompt": "hi", "max_tokens": 3, "echo": true, "logprobs": 0, "stream": true});
    let (response, _) = asked(forced_then("yes"), body);
    let chunks: Vec<Value> =
        response.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "hiyes");
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["token_logprobs"], json!([null, -0.5, -0.5]));
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["text_offset"], json!([2]));
}

#[test]
fn a_minimum_masks_ends_and_stop_strings() {
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 9, "min_tokens": 3, "stop": "ab", "stop_token_ids": [7]});
    let (response, submitted) = asked(Setup::play(Play::say("abcabd")), body);
    let choice = &response.json()["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abc"), &json!("stop")));
    let minimum = submitted[0].minimum.as_ref().unwrap();
    assert_eq!((minimum.tokens, &*minimum.masked_ids), (3, &[7, EOS][..]));
    for (field, more) in [
        ("min_tokens", json!({"min_tokens": 10, "max_tokens": 9})),
        ("min_tokens", json!({"min_tokens": 1, "guided_regex": "a"})),
        ("best_of", json!({"best_of": 2})),
        ("best_of", json!({"best_of": 1, "n": 2})),
        (
            "spaces_between_special_tokens",
            json!({"skip_special_tokens": false, "spaces_between_special_tokens": false}),
        ),
        ("truncate_prompt_tokens", json!({"truncate_prompt_tokens": 0})),
        ("detokenize", json!({"detokenize": false})),
    ] {
        let mut body = json!({"model": MODEL, "prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(asked(Setup::play(Play::say("no")), body).0.error().2.as_deref(), Some(field));
    }
}

#[test]
fn a_stop_is_told_and_a_prompt_is_cut_where_that_is_asked_for() {
    let text = |more: Value| {
        let mut body = json!({"model": MODEL, "prompt": "wxyz", "n": 1, "best_of": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (response, submitted) = asked(Setup::play(Play::say("a.b")), body);
        (response.json()["choices"][0]["text"].as_str().unwrap().to_owned(), submitted[0].prompt_ids.to_vec())
    };
    assert_eq!(text(json!({"stop": "."})).0, "a");
    assert_eq!(text(json!({"stop": ".", "include_stop_str_in_output": true})).0, "a.");
    assert_eq!(text(json!({"truncate_prompt_tokens": 2})).1, [121, 122]);
    assert_eq!(text(json!({"truncate_prompt_tokens": -1})).1, [BOS, 119, 120, 121, 122]);
    assert_eq!(text(json!({"truncate_prompt_tokens": 2, "echo": true})).0, "yza.b");
}

#[test]
fn what_a_template_reads_is_given_to_it_and_the_rest_refused() {
    let ask = |more: Value| {
        let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        run(Setup::play(Play::say("ok")), move |server| async move {
            let response = server.post("/v1/chat/completions", &body).await;
            (response, server.submissions())
        })
    };
    let (response, submitted) = ask(json!({"documents": [{"text": "a"}, {"text": "b"}]}));
    assert_eq!(response.status, 200);
    let prompt: Vec<u8> = submitted[0].prompt_ids.iter().map(|&id| id as u8).collect();
    assert_eq!(String::from_utf8(prompt).unwrap(), "user:x|2 documents|a:");
    let both = json!({"documents": [{"text": "a"}], "chat_template_kwargs": {"documents": []}});
    for (field, more) in [("documents", both), ("reasoning_effort", json!({"reasoning_effort": "low"}))] {
        assert_eq!(ask(more).0.error().2.as_deref(), Some(field));
    }
}
