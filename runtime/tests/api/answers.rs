//! Complete answers.

use super::support::{BOS, EOS, MODEL, Play, Setup, request, run};
use mixfleet_runtime::request::{Deadline, FinishReason, Hints, Sampling, ServiceTier};
use serde_json::json;

#[test]
fn a_completion_has_text_reason_and_usage() {
    let (response, submitted) = run(Setup::play(Play::say("héllo")), |server| async move {
        let response =
            server.post("/v1/completions", &json!({"model": MODEL, "prompt": "ab", "seed": 5})).await;
        (response, server.submissions())
    });
    assert_eq!(response.status, 200);
    assert_eq!(response.headers["content-type"], "application/json");
    let body = response.json();
    let id = body["id"].as_str().unwrap();
    assert!(id.starts_with("cmpl-") && response.headers["x-request-id"] == id);
    let expected = format!(
        "{{\"id\":\"{id}\",\"object\":\"text_completion\",\"created\":1767225600,\"model\":\"org/bytes\",\
         \"choices\":[{{\"index\":0,\"text\":\"héllo\",\"logprobs\":null,\"finish_reason\":\"stop\"}}],\
         \"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":7,\"total_tokens\":10,\
         \"prompt_tokens_details\":{{\"cached_tokens\":3}}}}}}"
    );
    assert_eq!(response.body, expected);
    let [request] = submitted.as_slice() else { panic!("one engine request") };
    assert_eq!(request.id, format!("{id}-0"));
    assert_eq!(request.prompt_ids.as_ref(), [BOS, 97, 98]);
    assert_eq!((request.max_tokens, request.eos_ids.as_ref()), (16, [EOS].as_slice()));
    assert_eq!(request.sampling, Sampling { seed: 5, ..Sampling::default() });
}

#[test]
fn a_chat_is_rendered_and_may_fill_the_context() {
    let messages = json!([
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
    ]);
    let body = json!({"model": MODEL, "messages": messages, "user": "u", "metadata": {}, "unheard_of": 1});
    let (response, submitted) = run(Setup::play(Play::say("yes")), |server| async move {
        (server.post("/v1/chat/completions", &body).await, server.submissions())
    });
    let body = response.json();
    let id = body["id"].as_str().unwrap();
    assert!(id.starts_with("chatcmpl-"));
    let expected = format!(
        "{{\"id\":\"{id}\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"org/bytes\",\
         \"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"yes\",\"refusal\":null}},\
         \"logprobs\":null,\"finish_reason\":\"stop\"}}],\
         \"usage\":{{\"prompt_tokens\":21,\"completion_tokens\":4,\"total_tokens\":25,\
         \"prompt_tokens_details\":{{\"cached_tokens\":3}}}}}}"
    );
    assert_eq!(response.body, expected);
    let prompt: Vec<u8> = submitted[0].prompt_ids.iter().map(|&id| id as u8).collect();
    assert_eq!(String::from_utf8(prompt).unwrap(), "system:be|user:x\ny|a:");
    assert_eq!(submitted[0].max_tokens, 64 - 21);
}

#[test]
fn the_models_own_length_counts_where_a_chat_gives_none() {
    for (asked, expected) in [(None, 7), (Some(9), 9)] {
        let body =
            json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": asked});
        let setup = Setup { answer_tokens: Some(7), ..Setup::play(Play::say("yes")) };
        let submitted = run(setup, |server| async move {
            server.post("/v1/chat/completions", &body).await;
            server.submissions()
        });
        assert_eq!(submitted[0].max_tokens, expected);
    }
}

#[test]
fn the_tier_comes_back_as_what_it_was_served_as() {
    for (asked, served, tier) in [
        (Some("flex"), Some("flex"), ServiceTier::Flex),
        (Some("auto"), Some("default"), ServiceTier::Default),
        (Some("priority"), Some("priority"), ServiceTier::Priority),
        (None, None, ServiceTier::Default),
    ] {
        let body = json!({"model": MODEL, "prompt": "ab", "service_tier": asked});
        let (response, submitted) = run(Setup::play(Play::say("ok")), |server| async move {
            (server.post("/v1/completions", &body).await, server.submissions())
        });
        assert_eq!(response.json().get("service_tier").and_then(|tier| tier.as_str()), served);
        assert_eq!(submitted[0].hints.tier, tier);
    }
}

#[test]
fn what_a_request_says_of_itself_reaches_the_engine() {
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "priority": -7, "deadline_s": 30,
        "requests_left": 3, "nvext": {"agent_hints": {"priority": 7, "osl": 12}}
    });
    let (status, submitted) = run(Setup::play(Play::say("ok")), |server| async move {
        (server.post("/v1/chat/completions", &body).await.status, server.submissions())
    });
    assert_eq!(status, 200);
    let Hints { tier, head_start, deadline, output_tokens, .. } = submitted[0].hints;
    assert_eq!((tier, head_start.0, output_tokens), (ServiceTier::Default, 7.0, Some(12)));
    let Some(Deadline { at, requests_left: 3 }) = deadline else { panic!("{deadline:?}") };
    assert!((30.0..31.0).contains(&at.0), "{at:?}");
}

#[test]
fn choices_of_several_prompts_keep_their_places() {
    let setup =
        Setup::script(|request| Play::say(&format!("{}/{}", request.prompt_ids[0], request.sampling.seed)));
    let body = json!({"model": MODEL, "prompt": [[10, 11], [20]], "n": 2, "seed": -1, "max_tokens": 9});
    let (response, submitted) =
        run(
            setup,
            |server| async move { (server.post("/v1/completions", &body).await, server.submissions()) },
        );
    let body = response.json();
    let choices = body["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    let last = u64::MAX;
    assert_eq!(texts, [format!("10/{last}"), "10/0".into(), format!("20/{last}"), "20/0".into()]);
    assert!(choices.iter().enumerate().all(|(index, choice)| choice["index"] == index));
    let usage = &body["usage"];
    assert_eq!(usage["prompt_tokens"], 3, "a prompt counts once");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 6);
    let mut ids: Vec<_> = submitted.iter().map(|request| request.id.clone()).collect();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

#[test]
fn several_text_prompts_are_several_requests() {
    let setup = Setup::script(|request| Play::say(&format!("{}", request.prompt_ids.len())));
    let body = json!({"model": MODEL, "prompt": ["a", "bcd"], "add_special_tokens": false});
    let response = run(setup, |server| async move { server.post("/v1/completions", &body).await });
    let body = response.json();
    assert_eq!((&body["choices"][0]["text"], &body["choices"][1]["text"]), (&json!("1"), &json!("3")));
}

#[test]
fn without_a_seed_each_request_gets_another() {
    let submitted = run(Setup::play(Play::say("")), |server| async move {
        for _ in 0..2 {
            server.post("/v1/completions", &json!({"model": MODEL, "prompt": "a"})).await;
        }
        server.submissions()
    });
    assert_ne!(submitted[0].sampling.seed, submitted[1].sampling.seed);
    assert_ne!(submitted[0].id, submitted[1].id);
}

#[test]
fn a_stop_string_cuts_the_answer_and_cancels_the_request() {
    let tokens = "one END two".bytes().map(u32::from).collect();
    let body = json!({"model": MODEL, "prompt": "a", "stop": ["zzz", "END"], "max_tokens": 40});
    let (response, cancelled) = run(Setup::play(Play::Hang(tokens)), |server| async move {
        let response = server.post("/v1/completions", &body).await;
        server.until("cancelled", || server.cancellations() == 1).await;
        (response.json(), server.cancellations())
    });
    assert_eq!(response["choices"][0]["text"], "one ");
    assert_eq!(response["choices"][0]["finish_reason"], "stop");
    assert_eq!(response["usage"]["completion_tokens"], 7);
    assert_eq!(response["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(cancelled, 1);
}

#[test]
fn ignore_eos_and_stop_tokens_decide_what_ends_an_answer() {
    let tokens = vec![97, EOS, 98, 99];
    let setup = Setup::play(Play::Reply(tokens, FinishReason::Length));
    let body = json!({
        "model": MODEL, "prompt": "a", "ignore_eos": true, "stop_token_ids": [99], "cache_salt": "tenant"
    });
    let (response, submitted) =
        run(
            setup,
            |server| async move { (server.post("/v1/completions", &body).await, server.submissions()) },
        );
    let choice = &response.json()["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("ab"), &json!("length")));
    assert_eq!(submitted[0].eos_ids.as_ref(), [99]);
    assert_eq!(submitted[0].cache_salt.as_deref(), Some("tenant"));
}

#[test]
fn an_unfinished_character_is_replaced_at_the_end() {
    let setup = Setup::play(Play::Reply(vec![0xc3, 0xa9, 0xe2, 0x82], FinishReason::Length));
    let body = json!({"model": MODEL, "prompt": "a"});
    let response = run(setup, |server| async move { server.post("/v1/completions", &body).await });
    assert_eq!(response.json()["choices"][0]["text"], "é\u{fffd}");
}

#[test]
fn completion_logprobs_have_one_entry_per_token() {
    let body = json!({"model": MODEL, "prompt": "a", "logprobs": 2});
    let response =
        run(
            Setup::play(Play::say("é!")),
            |server| async move { server.post("/v1/completions", &body).await },
        );
    let logprobs = &response.json()["choices"][0]["logprobs"];
    let expected = json!({
        "tokens": ["\u{fffd}", "\u{fffd}", "!", "<256>"],
        "token_logprobs": [-0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [
            {"\u{fffd}": -0.5, "~": -9999.0}, {"\u{fffd}": -0.5, "~": -9999.0},
            {"!": -0.5, "~": -9999.0}, {"<256>": -0.5, "~": -9999.0}
        ],
        "text_offset": [0, 0, 1, 2],
    });
    assert_eq!(logprobs, &expected);
}

#[test]
fn chat_logprobs_have_bytes() {
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 1
    });
    let response =
        run(Setup::play(Play::Reply(vec![0xc3, 0xa9], FinishReason::Length)), |server| async move {
            server.post("/v1/chat/completions", &body).await
        });
    let logprobs = &response.json()["choices"][0]["logprobs"];
    let entry = |byte: u8| {
        let token = json!({"token": "\u{fffd}", "logprob": -0.5, "bytes": [byte]});
        let mut whole = token.clone();
        whole["top_logprobs"] = json!([token]);
        whole
    };
    assert_eq!(logprobs, &json!({"content": [entry(0xc3), entry(0xa9)], "refusal": null}));
}

#[test]
fn a_hidden_end_token_has_no_bytes() {
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": true
    });
    let response =
        run(
            Setup::play(Play::say("y")),
            |server| async move { server.post("/v1/chat/completions", &body).await },
        );
    let content = &response.json()["choices"][0]["logprobs"]["content"];
    assert_eq!((&content[0]["bytes"], &content[1]["bytes"]), (&json!([121]), &json!([])));
    assert_eq!(content[1]["token"], "<256>");
}

#[test]
fn models_are_listed_and_found_by_name() {
    run(Setup::play(Play::say("")), |server| async move {
        let list = server.get("/v1/models").await.json();
        assert_eq!(list["data"][0]["id"], MODEL);
        assert_eq!(list["object"], "list");
        for path in ["/v1/models/org/bytes", "/v1/models/org%2Fbytes"] {
            let model = server.get(path).await;
            assert_eq!((model.status, &model.json()), (200, &list["data"][0]), "{path}");
        }
        assert_eq!(server.get("/v1/models/other").await.error().0, 404);
    });
}

#[test]
fn placements_are_shown_by_response_id() {
    run(Setup::play(Play::say("")), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a"});
        let id = server.post("/v1/completions", &body).await.json()["id"].as_str().unwrap().to_string();
        server.placements.record(&format!("{id}-0"), json!({"chosen": "cpu@0"}));
        for id in [id.clone(), format!("{id}-0")] {
            let explanation = server.get(&format!("/debug/placement/{id}")).await;
            assert_eq!(explanation.json(), json!({"chosen": "cpu@0"}));
        }
        assert_eq!(server.get("/debug/placement/absent").await.error().0, 404);
        let list = server.get("/debug/placement").await.json();
        assert_eq!(list["data"], json!([format!("{id}-0")]));
    });
}

#[test]
fn a_sane_request_id_is_echoed() {
    run(Setup::play(Play::say("")), |server| async move {
        let with = |id: &str| request("GET", "/health", &format!("x-request-id: {id}\r\n"), b"");
        assert_eq!(server.exchange(&with("abc-1")).await.headers["x-request-id"], "abc-1");
        for odd in ["a b".to_string(), "x".repeat(200)] {
            let echoed = &server.exchange(&with(&odd)).await.headers["x-request-id"];
            assert!(echoed.starts_with("req-"), "{echoed}");
        }
    });
}

#[test]
fn metrics_count_what_clients_saw() {
    let text = run(Setup::play(Play::say("four")), |server| async move {
        server.post("/v1/completions", &json!({"model": MODEL, "prompt": "ab"})).await;
        server.post("/v1/completions", &json!({"model": MODEL})).await;
        let response = server.get("/metrics").await;
        assert!(response.headers["content-type"].starts_with("application/openmetrics-text"));
        response.body
    });
    for line in [
        "mixfleet_requests_total{endpoint=\"completions\",outcome=\"success\"} 1",
        "mixfleet_http_responses_total{route=\"/v1/completions\",status=\"200\"} 1",
        "mixfleet_http_responses_total{route=\"/v1/completions\",status=\"400\"} 1",
        "mixfleet_prompt_tokens_total{class=\"default\"} 3",
        "mixfleet_generation_tokens_total{class=\"default\"} 5",
        "mixfleet_cached_tokens_total 3",
        "vllm:prompt_tokens_total{model_name=\"org/bytes\",class=\"default\"} 3",
        "vllm:time_to_first_token_seconds_count{model_name=\"org/bytes\"} 1",
        "vllm:request_success_total{model_name=\"org/bytes\",finished_reason=\"length\"} 0",
        "mixfleet_time_to_first_token_seconds_count 1",
        "mixfleet_time_to_first_token_seconds_bucket{le=\"0.001\"} 1",
        "mixfleet_inter_token_latency_seconds_count 4",
        "mixfleet_e2e_request_latency_seconds_count 1",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
    }
}
