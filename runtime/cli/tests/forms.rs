//! Answers that follow a grammar, from outside.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common::server::Server;
use mixfleet_hal::Backend;
use serde_json::{Value, json};

/// Devices to serve on: one of each kind that this machine has, and several that share the work.
fn devices() -> Vec<Vec<String>> {
    let mut all: Vec<Vec<String>> = vec![
        vec!["cpu".into()],
        vec!["cpu@0=prefill".into(), "cpu=decode".into()],
        vec!["tp:cpu@0,cpu".into()],
        vec!["pp:cpu@0,cpu".into()],
        vec!["attn:cpu@0,cpu".into()],
    ];
    match mixfleet_wgpu::WgpuBackend.probe() {
        Ok(_) => all.push(vec!["wgpu:0".into()]),
        Err(absent) => println!("SKIPPED: wgpu: {absent}"),
    }
    let others = crate::common::devices().into_iter().skip(1);
    all.extend(others.map(|device| vec![device.info().id.clone()]));
    all
}

fn started(devices: &[String]) -> Server {
    let arguments: Vec<&str> = devices.iter().flat_map(|device| ["--device", device]).collect();
    Server::start(&arguments)
}

fn asked(server: &Server, seed: u64, form: &Value) -> Value {
    let mut body = json!({"model": "mixfleet-random", "messages": [{"role": "user", "content": "a fleet"}],
        "max_tokens": 200, "temperature": 1.5, "seed": seed, "n": 2});
    body.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{form}: {answer}");
    answer
}

#[test]
fn answers_follow_their_grammar_on_every_kind_of_device() {
    let schema = json!({"type": "object", "properties": {"part": {"enum": ["H100", "RTX-4090"]}, "count":
        {"type": "integer", "minimum": 1, "maximum": 64}}, "required": ["part", "count"], "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false}});
    let json_schema = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "pool", "schema": schema}}});
    let choice = json!({"structured_outputs": {"choice": ["prefill", "decode", "both of them"]}});
    let regex = json!({"guided_regex": "[a-f]{8}(-[0-9]{4}){2}"});
    for devices in devices() {
        let server = started(&devices);
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..2 {
            for (form, fits) in [
                (
                    &json_schema,
                    &(|text: &str| {
                        let value: Value =
                            serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
                        let count = value["count"].as_u64().unwrap_or(0);
                        value.as_object().unwrap().len() == 2
                            && ["H100", "RTX-4090"].contains(&value["part"].as_str().unwrap())
                            && (1..=64).contains(&count)
                    }) as &dyn Fn(&str) -> bool,
                ),
                (&choice, &|text| ["prefill", "decode", "both of them"].contains(&text)),
                (&regex, &|text| {
                    let (letters, digits) = text.split_once('-').unwrap_or_default();
                    letters.len() == 8
                        && letters.bytes().all(|b| (b'a'..=b'f').contains(&b))
                        && digits.len() == 9
                        && digits.bytes().all(|b| b.is_ascii_digit() || b == b'-')
                }),
            ] {
                let answer = asked(&server, seed, form);
                for choice in answer["choices"].as_array().unwrap() {
                    let text = choice["message"]["content"].as_str().unwrap();
                    assert!(fits(text), "{devices:?}, seed {seed}, {form}: {text:?}");
                    assert_eq!(choice["finish_reason"], "stop", "{devices:?}, seed {seed}, {form}: {text:?}");
                    seen.insert(text.to_owned());
                }
            }
        }
        assert!(seen.len() > 6, "{devices:?}: the model chooses nothing: {seen:?}");
    }
}

#[test]
fn a_form_is_checked_before_work_and_goes_with_streams_and_other_fields() {
    let server = started(&["cpu".into()]);
    let refused = |form: Value| {
        let mut body = json!({"model": "mixfleet-random", "prompt": "a", "max_tokens": 8});
        body.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 400, "{form}: {answer}");
        answer["error"]["message"].as_str().unwrap().to_owned()
    };
    let wrong = refused(json!({"guided_regex": "(a"}));
    assert!(wrong.starts_with("'guided_regex': "), "{wrong}");
    let wrong = refused(json!({"guided_json": {"type": "elephant"}}));
    assert!(wrong.contains("elephant"), "{wrong}");
    let wrong = refused(json!({"guided_regex": "a", "ignore_eos": true}));
    assert!(wrong.contains("ignore_eos"), "{wrong}");

    let choice = json!({"guided_choice": ["yes", "no"], "stream": true});
    let mut body = json!({"model": "mixfleet-random", "prompt": "a", "max_tokens": 8});
    body.as_object_mut().unwrap().extend(choice.as_object().unwrap().clone());
    let (status, stream) =
        server.call("POST", "/v1/completions", "content-type: application/json\r\n", &body.to_string());
    assert_eq!(status, 200, "{stream}");
    let events = stream.lines().filter_map(|line| line.strip_prefix("data: {"));
    let text: String = events
        .map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap())
        .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    assert!(["yes", "no"].contains(&text.as_str()), "{stream}");

    // a bias decides among what the grammar allows, and without a grammar
    let first = |text: &str| {
        let (_, ids) = server.post(
            "/tokenize",
            &json!({"model": "mixfleet-random", "prompt": text, "add_special_tokens": false}),
        );
        ids["tokens"][0].as_u64().unwrap()
    };
    let biased = |text: &str, further: Value| {
        let mut body = json!({"model": "mixfleet-random", "prompt": "a", "max_tokens": 8, "temperature": 0,
            "logit_bias": {first(text).to_string(): 100}});
        body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    for text in ["yes", "no"] {
        assert_eq!(biased(text, json!({"guided_choice": ["yes", "no"]})), text);
    }
    assert_eq!(biased("!", json!({"max_tokens": 3})), "!!!");
}

/// A fixture whose template has tools as Hermes and Qwen write them.
fn with_tools(name: &str) -> std::path::PathBuf {
    let (from, to) = (crate::common::fixture("qwen3-qknorm-tied-bf16"), crate::common::scratch(name));
    for file in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    let template = "{%- if tools %}tools: {{ tools | tojson }} as <tool_call>{%- endif %}\
        {%- for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} calls {{ c.function.name }} \
        with {{ c.function.arguments.city }}{% endfor %}\n{% endfor %}";
    std::fs::write(to.join("chat_template.jinja"), template).unwrap();
    to
}

#[test]
fn tools_that_must_be_called_are_called_and_what_came_of_it_goes_back() {
    let model = with_tools("tools");
    let server = Server::start(&["--model", model.to_str().unwrap(), "--name", "m"]);
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": false}}});
    let ask = |further: Value| {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "how is it?"}], "max_tokens": 150,
            "tools": [tool], "temperature": 1});
        body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    let mut called = 0;
    for seed in 0..12 {
        let (status, answer) =
            ask(json!({"tool_choice": "required", "parallel_tool_calls": false, "seed": seed}));
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "length" {
            continue; // white space within JSON has no bound
        }
        called += 1;
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(choice["message"]["content"], Value::Null, "{answer}");
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(
            (&call["type"], &call["function"]["name"]),
            (&json!("function"), &json!("weather")),
            "{answer}"
        );
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Oslo", "Rome"].contains(&arguments["city"].as_str().unwrap()), "{answer}");
        // what the tool said goes back with the call, as clients send it
        let messages = json!([{"role": "user", "content": "how is it?"}, choice["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]);
        let (status, after) = ask(json!({"messages": messages, "max_tokens": 4}));
        assert_eq!(status, 200, "{after}");
    }
    assert!(called > 2, "{called} of 12 answers called the tool");
    streamed_calls_are_whole_ones_in_pieces(&server, &tool);
    let (status, plain) = ask(json!({"tool_choice": "none", "max_tokens": 4}));
    assert_eq!((status, &plain["choices"][0]["message"]["tool_calls"]), (200, &Value::Null), "{plain}");
    let (status, wrong) = ask(json!({"tool_choice": "required", "response_format": {"type": "json_object"}}));
    assert_eq!((status, &wrong["error"]["param"]), (400, &json!("response_format")), "{wrong}");

    let builtin = started(&["cpu".into()]);
    let body =
        json!({"model": "mixfleet-random", "messages": [{"role": "user", "content": "a"}], "tools": [tool]});
    let (status, refused) = builtin.post("/v1/chat/completions", &body);
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("tools")), "{refused}");
}

/// The same calls in a stream: the name first, and then the arguments as they are written.
fn streamed_calls_are_whole_ones_in_pieces(server: &Server, tool: &Value) {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "how is it?"}], "max_tokens": 150,
        "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false});
    for seed in 0..4 {
        body["seed"] = json!(seed);
        body["stream"] = json!(false);
        let (_, whole) = server.post("/v1/chat/completions", &body);
        if whole["choices"][0]["finish_reason"] == "length" {
            continue;
        }
        body["stream"] = json!(true);
        let (status, stream) = server.call(
            "POST",
            "/v1/chat/completions",
            "content-type: application/json\r\n",
            &body.to_string(),
        );
        assert_eq!(status, 200, "{stream}");
        let chunks = stream.lines().filter_map(|line| line.strip_prefix("data: ")?.parse::<Value>().ok());
        let pieces: Vec<Value> = chunks
            .map(|chunk| chunk["choices"][0]["delta"]["tool_calls"][0].clone())
            .filter(|it| !it.is_null())
            .collect();
        let first = &pieces[0];
        assert_eq!(
            (&first["index"], &first["type"], &first["function"]["name"]),
            (&json!(0), &json!("function"), &json!("weather"))
        );
        assert!(first["id"].is_string() && pieces.len() > 2, "{stream}");
        assert!(
            pieces[1..]
                .iter()
                .all(|piece| piece.get("id").is_none() && piece["function"].get("name").is_none())
        );
        let arguments: String =
            pieces.iter().filter_map(|piece| piece["function"]["arguments"].as_str()).collect();
        assert_eq!(
            whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], arguments,
            "{stream}"
        );
    }
}

#[test]
fn a_device_that_draws_what_it_likes_gives_an_error_and_no_other_answer() {
    let server = started(&["sim:H100-SXM-80GB".into()]);
    let body =
        json!({"model": "mixfleet-random", "prompt": "a", "max_tokens": 8, "guided_choice": ["yes", "no"]});
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 500, "{answer}");
    let said = answer["error"]["message"].as_str().unwrap();
    assert!(said.contains("grammar"), "{said}");
}
