//! Whatever comes in, what goes out is an answer or a 4xx in OpenAI's shape, and nothing panics.

use crate::support::{ADDRESS, MODEL, Play, Response, Setup, request, run};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "echo",
    "stream",
    "stream_options",
    "user",
    "cache_salt",
    "best_of",
    "suffix",
    "tools",
    "tool_choice",
    "response_format",
    "logit_bias",
    "modalities",
    "min_tokens",
    "stop_token_ids",
    "chat_template_kwargs",
    "add_generation_prompt",
    "add_special_tokens",
    "unheard_of",
];

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..70).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0.0..2.0f64).prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
        prop::sample::select(vec!["text", "user", "assistant", "none", "type", MODEL]).prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let key =
            prop::sample::select(vec!["role", "content", "type", "text", "include_usage", "tool_calls", "x"]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4).prop_map(|entries| {
                let entries = entries.into_iter().map(|(key, value)| (key.to_string(), value));
                Value::Object(entries.collect::<Map<_, _>>())
            }),
        ]
    })
}

fn any_request() -> impl Strategy<Value = Value> {
    let field = prop::sample::select(FIELDS);
    prop::collection::vec((field, any_value()), 0..5).prop_map(|changes| {
        let mut body = json!({"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "x"}]});
        for (field, value) in changes {
            body[field] = value;
        }
        body
    })
}

fn check(response: &Response, sent: &str) {
    match response.status {
        200 => assert!(!response.body.is_empty()),
        400..=499 => drop(response.error()),
        other => panic!("status {other} for {sent}: {}", response.body),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn any_json_request_gets_an_answer_or_an_error(body in any_request(), chat in any::<bool>()) {
        run(Setup::play(Play::say("ok")), move |server| async move {
            let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
            check(&server.post(path, &body).await, &body.to_string());
        });
    }

    #[test]
    fn any_bytes_as_a_body_get_an_error(body in prop::collection::vec(any::<u8>(), 0..200)) {
        run(Setup::play(Play::say("ok")), move |server| async move {
            let response = server.exchange(&request("POST", "/v1/completions", "", &body)).await;
            assert!((400..500).contains(&response.status));
            response.error();
        });
    }

    #[test]
    fn any_bytes_on_a_connection_are_survived(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "(GET|POST|PUT) /[a-z0-9/%.]{0,20} HTTP/1.[01]\r\n([a-z-]{1,12}: .{0,8}\r\n){0,4}\r\n.{0,20}"
                .prop_map(String::into_bytes),
        ],
    ) {
        run(Setup::play(Play::say("ok")), move |server| async move {
            let mut connection = server.env.connect(ADDRESS).unwrap();
            connection.write_all(&bytes).await.unwrap();
            connection.shutdown().await.unwrap();
            let mut answer = Vec::new();
            connection.read_to_end(&mut answer).await.unwrap();
            assert_eq!(server.get("/health").await.status, 200);
        });
    }
}
