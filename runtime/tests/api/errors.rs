//! All rejections, in OpenAI's format.

use super::support::{MODEL, Play, Setup, request, run};
use mixfleet_runtime::request::Rejection;
use serde_json::{Value, json};

fn refused(path: &'static str, body: Value) -> (u16, String, Option<String>, String) {
    run(Setup::play(Play::say("no")), move |server| async move {
        let error = server.post(path, &body).await.error();
        assert!(server.submissions().is_empty(), "{body}");
        error
    })
}

fn completion(field: &str, value: Value) -> (u16, String, Option<String>, String) {
    let mut body = json!({"model": MODEL, "prompt": "ab"});
    body[field] = value;
    refused("/v1/completions", body)
}

fn chat(field: &str, value: Value) -> (u16, String, Option<String>, String) {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}]});
    body[field] = value;
    refused("/v1/chat/completions", body)
}

#[test]
fn wrong_types_and_values_name_their_field() {
    for (field, value, code) in [
        ("temperature", json!("hot"), "invalid_type"),
        ("temperature", json!(2.1), "invalid_value"),
        ("temperature", json!(-0.1), "invalid_value"),
        ("top_p", json!(1.5), "invalid_value"),
        ("top_k", json!(-2), "invalid_value"),
        ("top_k", json!(1.5), "invalid_type"),
        ("min_p", json!(2), "invalid_value"),
        ("repetition_penalty", json!(0), "invalid_value"),
        ("presence_penalty", json!(3), "invalid_value"),
        ("frequency_penalty", json!(-3), "invalid_value"),
        ("seed", json!("x"), "invalid_type"),
        ("seed", json!(1e300), "invalid_type"),
        ("n", json!(0), "invalid_value"),
        ("n", json!(129), "invalid_value"),
        ("max_tokens", json!(0), "invalid_value"),
        ("max_tokens", json!(-5), "invalid_value"),
        ("max_tokens", json!(5_000_000_000_u64), "invalid_value"),
        ("max_completion_tokens", json!([]), "invalid_type"),
        ("stop", json!(5), "invalid_type"),
        ("stop", json!([5]), "invalid_type"),
        ("stop", json!(""), "invalid_value"),
        ("stop", json!(vec!["a"; 17]), "invalid_value"),
        ("stop", json!("a".repeat(2000)), "invalid_value"),
        ("stop_token_ids", json!([258]), "invalid_value"),
        ("ignore_eos", json!(1), "invalid_type"),
        ("stream", json!("yes"), "invalid_type"),
        ("stream_options", json!({"include_usage": true}), "invalid_value"),
        ("cache_salt", json!(""), "invalid_value"),
        ("service_tier", json!("urgent"), "invalid_value"),
        ("service_tier", json!(1), "invalid_type"),
        ("priority", json!("high"), "invalid_type"),
        ("priority", json!(4000), "invalid_value"),
        ("deadline_s", json!(0), "invalid_value"),
        ("deadline", json!("tomorrow"), "invalid_type"),
        ("deadline", json!(1), "invalid_value"),
        ("requests_left", json!(2), "invalid_value"),
        ("nvext", json!([]), "invalid_type"),
        ("logit_bias", json!({"258": 1}), "invalid_value"),
        ("logit_bias", json!(7), "invalid_type"),
        ("guided_regex", json!(7), "invalid_type"),
        ("guided_choice", json!(["a", 7]), "invalid_type"),
        ("response_format", json!("text"), "invalid_type"),
        ("logprobs", json!(21), "invalid_value"),
        ("logprobs", json!(true), "invalid_type"),
        ("prompt", json!(5), "invalid_type"),
        ("prompt", json!([]), "invalid_value"),
        ("prompt", json!([[]]), "invalid_value"),
        ("prompt", json!(["a", 5]), "invalid_type"),
        ("prompt", json!([1, "a"]), "invalid_type"),
        ("prompt", json!([258]), "invalid_value"),
        ("prompt", json!([-1]), "invalid_value"),
        ("prompt", json!([[1], [1.5]]), "invalid_type"),
        ("prompt", Value::Null, "missing_parameter"),
        ("prompt", json!(vec!["a"; 129]), "invalid_value"),
        ("model", Value::Null, "missing_parameter"),
        ("model", json!(5), "invalid_type"),
    ] {
        let expected = (400, "invalid_request_error".into(), Some(field.into()), code.into());
        assert_eq!(completion(field, value.clone()), expected, "{field} = {value:.60}");
    }
}

#[test]
fn fields_that_would_change_the_output_are_refused() {
    for (field, value) in [
        ("suffix", json!("x")),
        ("best_of", json!(2)),
        ("guided_whitespace_pattern", json!("x")),
        ("use_beam_search", json!(true)),
        ("length_penalty", json!(0.5)),
    ] {
        let expected =
            (400, "invalid_request_error".into(), Some(field.into()), "unsupported_parameter".into());
        assert_eq!(completion(field, value), expected);
    }
    for (field, value) in [
        ("function_call", json!("auto")),
        ("echo", json!(true)),
        ("detokenize", json!(false)),
        ("functions", json!([{}])),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x"})),
        ("prediction", json!({"type": "content"})),
        ("web_search_options", json!({})),
        ("reasoning_effort", json!("low")),
        ("chat_template", json!("{{ x }}")),
        ("do_sample", json!(false)),
        ("max_output_tokens", json!(3)),
        ("prompt", json!("x")),
    ] {
        let expected =
            (400, "invalid_request_error".into(), Some(field.into()), "unsupported_parameter".into());
        assert_eq!(chat(field, value), expected);
    }
}

#[test]
fn neutral_values_of_refused_fields_pass() {
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x", "name": "me", "tool_calls": []}],
        "tools": [], "tool_choice": "none", "functions": null, "response_format": {"type": "text"},
        "logit_bias": {}, "modalities": ["text"], "best_of": 1, "echo": false, "suffix": "",
        "use_beam_search": false, "length_penalty": 1.0, "min_tokens": 0, "skip_special_tokens": true,
        "stream": false, "top_logprobs": 0, "service_tier": "auto", "store": false, "user": "u",
        "parallel_tool_calls": true, "chat_template_kwargs": {"x": 1}, "add_generation_prompt": true
    });
    let status = run(Setup::play(Play::say("ok")), |server| async move {
        server.post("/v1/chat/completions", &body).await.status
    });
    assert_eq!(status, 200);
}

#[test]
fn chats_that_are_no_chats_are_refused() {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    for (messages, param) in [
        (Value::Null, "messages"),
        (json!([]), "messages"),
        (json!("hi"), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!([{"role": "function", "content": "x"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (user(json!(5)), "messages[0].content"),
        (user(json!([{"type": "image_url", "image_url": {"url": "x"}}])), "messages[0].content"),
        (user(json!([{"type": "text"}])), "messages[0].content"),
        (json!([{"role": "assistant", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls"),
    ] {
        let (status, _, got, _) = chat("messages", messages.clone());
        assert_eq!((status, got.as_deref()), (400, Some(param)), "{messages}");
    }
    let error = chat("chat_template_kwargs", json!({"refuse": true}));
    assert_eq!((error.0, error.2.as_deref()), (400, Some("messages")));
    let error = chat("chat_template_kwargs", json!({"tools": []}));
    assert_eq!((error.0, error.2.as_deref()), (400, Some("chat_template_kwargs.tools")));
    assert_eq!(chat("top_logprobs", json!(2)).2.as_deref(), Some("top_logprobs"));
    assert_eq!(chat("logprobs", json!(2)).3, "invalid_type");
}

#[test]
fn what_exceeds_the_context_is_refused() {
    for (field, value) in [("max_tokens", json!(62)), ("prompt", json!("x".repeat(63)))] {
        let error = completion(field, value);
        assert_eq!(
            (error.0, error.2.as_deref(), error.3.as_str()),
            (400, Some("prompt"), "context_length_exceeded")
        );
    }
    let long = json!([{"role": "user", "content": "x".repeat(64)}]);
    let error = chat("messages", long);
    assert_eq!((error.2.as_deref(), error.3.as_str()), (Some("messages"), "context_length_exceeded"));
    let submitted = run(Setup::play(Play::say("ok")), |server| async move {
        let body = json!({"model": MODEL, "prompt": "x".repeat(62)});
        assert_eq!(server.post("/v1/completions", &body).await.status, 200);
        server.submissions()
    });
    assert_eq!(submitted[0].max_tokens, 1, "the default shrinks to the remaining tokens");
}

#[test]
fn unknown_models_addresses_and_methods() {
    let error = completion("model", json!("gpt-x"));
    assert_eq!((error.0, error.2.as_deref(), error.3.as_str()), (404, Some("model"), "model_not_found"));
    run(Setup::play(Play::say("")), |server| async move {
        assert_eq!(server.get("/v1/nothing").await.error().0, 404);
        let embeddings = json!({"model": MODEL, "input": "a"});
        let error = server.post("/v1/embeddings", &embeddings).await.error();
        assert_eq!((error.0, error.3.as_str()), (404, "not_found"), "{}", error.1);
        let wrong_method = server.get("/v1/completions").await;
        assert_eq!(wrong_method.error().0, 405);
        assert_eq!(wrong_method.headers["allow"], "POST");
    });
}

#[test]
fn bodies_that_are_no_json_objects() {
    run(Setup::play(Play::say("")), |server| async move {
        for body in ["", "{", "[]", "5", "{\"model\": \"\u{0}\"}", "{\"a\":1e999}", &"[".repeat(10_000)] {
            let response = server.exchange(&request("POST", "/v1/completions", "", body.as_bytes())).await;
            assert_eq!(response.error().0, 400, "{body:.20}");
        }
        for header in ["content-type: text/plain\r\n", "content-encoding: gzip\r\n"] {
            let response = server.exchange(&request("POST", "/v1/completions", header, b"{}")).await;
            assert_eq!(response.error().0, 415, "{header}");
        }
        let typed = "content-type: application/json; charset=utf-8\r\n";
        let body = json!({"model": MODEL, "prompt": "a"}).to_string();
        let response = server.exchange(&request("POST", "/v1/completions", typed, body.as_bytes())).await;
        assert_eq!(response.status, 200);
    });
}

#[test]
fn the_engines_rejections_become_statuses() {
    let overloaded = Rejection::Overloaded { reason: "queue of 9".into(), retry_after_s: 4 };
    for (rejection, status, retry_after) in [
        (overloaded, 429, Some("4")),
        (Rejection::TooLarge("never fits".into()), 400, None),
        (Rejection::Unavailable("not now".into()), 503, Some("1")),
    ] {
        for stream in [false, true] {
            let play = Play::Reject(rejection.clone());
            let body = json!({"model": MODEL, "prompt": "a", "stream": stream});
            let response = run(Setup::play(play), |server| async move {
                let response = server.post("/v1/completions", &body).await;
                let rejected = "mixfleet_requests_total{endpoint=\"completions\",outcome=\"rejected\"} 1";
                assert!(server.metrics.encode().contains(rejected));
                response
            });
            assert_eq!(response.error().0, status);
            assert_eq!(response.headers.get("retry-after").map(String::as_str), retry_after);
        }
    }
}

#[test]
fn one_rejected_choice_cancels_the_others() {
    let setup = Setup::script(|request| match request.sampling.seed {
        2 => Play::Reject(Rejection::Overloaded { reason: "full".into(), retry_after_s: 1 }),
        _ => Play::Hang(vec![]),
    });
    run(setup, |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "n": 3, "seed": 0});
        assert_eq!(server.post("/v1/completions", &body).await.status, 429);
        server.until("two cancelled", || server.cancellations() == 2).await;
    });
}

#[test]
fn what_is_given_up_before_its_first_token_is_turned_away() {
    for stream in [false, true] {
        let setup =
            Setup { drops_late: true, ..Setup::play(Play::GiveUp("its decode instance is too busy")) };
        let body = json!({"model": MODEL, "prompt": "a", "stream": stream, "n": 2});
        let response = run(setup, |server| async move {
            let response = server.post("/v1/completions", &body).await;
            let rejected = "mixfleet_requests_total{endpoint=\"completions\",outcome=\"rejected\"} 1";
            assert!(server.metrics.encode().contains(rejected));
            response
        });
        assert_eq!((response.error().0, &*response.headers["retry-after"]), (429, "1"));
        assert!(response.body.contains("too busy"), "{}", response.body);
    }
    // an answer that begins is streamed as ever
    for drops_late in [false, true] {
        let setup = Setup { drops_late, ..Setup::play(Play::say("hello")) };
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let streamed = run(setup, |server| async move { server.post("/v1/completions", &body).await });
        assert!(streamed.body.contains("\"o\"") && streamed.body.ends_with("data: [DONE]\n\n"));
    }
}

#[test]
fn a_failure_in_the_engine_is_a_500() {
    for play in [Play::Fail(vec![97], "the device is gone"), Play::HangUp(vec![97])] {
        let body = json!({"model": MODEL, "prompt": "a", "n": 2});
        let response =
            run(Setup::play(play), |server| async move { server.post("/v1/completions", &body).await });
        let (status, kind, _, _) = response.error();
        assert_eq!((status, kind.as_str()), (500, "server_error"));
    }
}

#[test]
fn the_key_guards_all_but_health_metrics_and_the_page() {
    let setup = Setup { api_key: Some("k3y".into()), ..Setup::play(Play::say("")) };
    run(setup, |server| async move {
        for path in ["/v1/models", "/debug/placement", "/debug/placement/x", "/nowhere"] {
            let response = server.get(path).await;
            assert_eq!((response.status, response.error().3.as_str()), (401, "invalid_api_key"), "{path}");
            assert_eq!(response.headers["www-authenticate"], "Bearer");
        }
        for path in ["/health", "/metrics", "/"] {
            assert_eq!(server.get(path).await.status, 200, "{path}");
        }
        let with = |key: &str| request("GET", "/v1/models", &format!("authorization: Bearer {key}\r\n"), b"");
        assert_eq!(server.exchange(&with("k3y")).await.status, 200);
        assert_eq!(server.exchange(&with("k3x")).await.status, 401);
    });
}

#[test]
fn a_field_that_is_hardly_meant_so_is_told_in_a_header() {
    run(Setup::play(Play::say("x")), |server| async move {
        let told = async |path: &'static str, mut body: Value, more: &str| {
            body["model"] = json!(MODEL);
            body[more] = json!(3);
            let response = server.post(path, &body).await;
            assert_eq!(response.status, 200, "{}", response.body);
            response.headers.get("warning").cloned()
        };
        let chat = json!({"messages": [{"role": "user", "content": "x"}]});
        let warned = told("/v1/completions", json!({"prompt": "ab"}), "max_token").await;
        assert_eq!(
            warned.as_deref(),
            Some("299 mixfleet \"'max_token' has no effect; did you mean 'max_tokens'?\"")
        );
        assert!(
            told("/v1/chat/completions", chat.clone(), "temprature").await.unwrap().contains("'temperature'")
        );
        assert_eq!(told("/v1/chat/completions", chat, "max_tokens").await, None);
    });
}
