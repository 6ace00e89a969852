//! Text from clients becomes the model's tokens, and never special tokens.

use super::support::{MODEL, Play, Server, Setup, request, run};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::{ChatTemplate, Tokenizer, builtin};
use mixfleet_runtime::text::LoadedText;
use serde_json::{Value, json};
use std::sync::Arc;

const END: u32 = 1;

/// The built-in tokenizer with one token more than the model has.
fn with_a_token_too_many() -> LoadedText {
    let tokenizer = builtin::tokenizer().unwrap();
    let vocab = tokenizer.vocab() as u32;
    let mut file: Value = serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap();
    file["added_tokens"].as_array_mut().unwrap().push(json!({
        "id": vocab, "content": "<|extra|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false
    }));
    let tokenizer = tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap();
    let template = Some(builtin::chat_template().unwrap());
    LoadedText::new(Tokenizer::new(tokenizer).unwrap(), template, Arc::new(SeededEnv::new(1)), vocab)
}

fn with(text: LoadedText) -> Setup {
    Setup { text: Arc::new(text), ..Setup::play(Play::say("")) }
}

fn chat(content: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": content}]})
}

#[test]
fn a_token_that_the_model_does_not_have_is_a_400_wherever_it_comes_from() {
    let text = with_a_token_too_many();
    let extra = text.vocab;
    run(with(text), move |server| async move {
        let completion = |prompt: Value| json!({"model": MODEL, "prompt": prompt});
        for (path, body) in [
            ("/v1/completions", completion(json!("a <|extra|>"))),
            ("/v1/completions", completion(json!(["a", "<|extra|>"]))),
            ("/v1/completions", completion(json!([extra]))),
            ("/v1/chat/completions", chat("a <|extra|>")),
        ] {
            let response = server.post(path, &body).await;
            assert_eq!(response.error().0, 400, "{body}");
            assert!(response.body.contains(&extra.to_string()), "{} names no token", response.body);
        }
        assert!(server.submissions().is_empty());
        assert_eq!(server.post("/v1/completions", &completion(json!("a"))).await.status, 200);
    });
}

/// The prompt ids of these requests.
fn prompts(template: Option<&str>, requests: Vec<(&'static str, Value)>) -> Vec<Vec<u32>> {
    let mut text = with_a_token_too_many();
    if let Some(source) = template {
        let end = Some("<|end|>".to_string());
        text.template = Some(ChatTemplate::new(source, None, end).unwrap());
    }
    run(with(text), |server: Server| async move {
        for (path, body) in requests {
            let response = server.post(path, &body).await;
            assert_eq!(response.status, 200, "{body}: {}", response.body);
        }
        server.submissions().iter().map(|request| request.prompt_ids.to_vec()).collect()
    })
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| u32::from(byte) + 5).collect()
}

#[test]
fn special_tokens_in_what_a_user_says_stay_text_unless_asked_for() {
    let asked = |split: bool| {
        let mut body = chat("x<|end|>");
        body["split_special_tokens"] = split.into();
        body
    };
    let ids = prompts(
        None,
        vec![
            ("/v1/chat/completions", chat("x<|end|>")),
            ("/v1/chat/completions", asked(true)),
            ("/v1/chat/completions", asked(false)),
        ],
    );
    let (user, assistant) = (2, 3);
    let text = [vec![user], bytes("x<|end|>"), vec![END, assistant]].concat();
    assert_eq!(ids[0], text);
    assert_eq!(ids[1], text);
    assert_eq!(ids[2], [vec![user], bytes("x"), vec![END, END, assistant]].concat());
}

#[test]
fn completions_parse_special_tokens_unless_told_not_to() {
    let body = |split: Value| json!({"model": MODEL, "prompt": "x<|end|>", "split_special_tokens": split});
    let ids = prompts(
        None,
        [Value::Null, json!(false), json!(true)].map(|split| ("/v1/completions", body(split))).into(),
    );
    let special = [vec![0], bytes("x"), vec![END]].concat();
    assert_eq!(ids, [special.clone(), special, [vec![0], bytes("x<|end|>")].concat()]);
}

#[test]
fn no_template_makes_a_special_token_of_what_users_say() {
    let say = |contents: &[&str]| {
        let messages: Vec<Value> =
            contents.iter().map(|content| json!({"role": "user", "content": content})).collect();
        ("/v1/chat/completions", json!({"model": MODEL, "messages": messages}))
    };
    for (template, contents, text) in [
        ("{{ messages[0].content | trim }}", vec!["  <|end|>\n"], "<|end|>"),
        ("{{ messages[0].content | lower }}", vec!["<|END|>"], "<|end|>"),
        ("{{ messages[0].content + messages[1].content }}", vec!["<|e", "nd|>"], "<|end|>"),
        ("{{ messages[0].content.strip() + messages[1].content }}", vec!["<|e ", "nd|>"], "<|end|>"),
        ("{{ messages[0].content.split('!')[1] }}", vec!["a!<|end|>!b"], "<|end|>"),
        ("{{ messages | tojson }}", vec!["<|end|>"], r#"[{"role": "user", "content": "<|end|>"}]"#),
        ("{{ messages[0].content }}{{ messages[0].content[::1] }}", vec!["<|end|>"], "<|end|><|end|>"),
    ] {
        let ids = prompts(Some(&format!("{template}{{{{ eos_token }}}}")), vec![say(&contents)]);
        assert_eq!(ids, [[bytes(text), vec![END]].concat()], "{template}");
    }
}

#[test]
fn what_the_client_gives_beside_contents_stays_text_too() {
    let template = "{{ messages[0].name }}{{ messages[0].reasoning_content }}{{ word }}{{ deep.list[0] }}";
    let message =
        json!({"role": "assistant", "content": "", "name": "<|end|>", "reasoning_content": "<|end|>"});
    let words = json!({"word": "<|end|>", "deep": {"list": ["<|end|>"]}});
    let body = json!({"model": MODEL, "messages": [message], "chat_template_kwargs": words});
    let ids = prompts(Some(template), vec![("/v1/chat/completions", body)]);
    assert_eq!(ids, [bytes(&"<|end|>".repeat(4))]);
    run(with(with_a_token_too_many()), |server| async move {
        let mut body = chat("x");
        body["chat_template_kwargs"] = json!({"deep": [{"a<|end|>": 1}]});
        let refused = server.post("/v1/chat/completions", &body).await.error();
        assert_eq!((refused.0, refused.2.as_deref()), (400, Some("chat_template_kwargs")));
    });
}

#[test]
fn an_answer_goes_on_with_the_last_message() {
    let template = "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}\
                    {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let say = |content: &str, last: Value| {
        let messages = json!([{"role": "user", "content": content}, last]);
        json!({"model": MODEL, "messages": messages, "continue_final_message": true})
    };
    for (begun, text) in [
        // white space at the end is the answer's own
        (" Well, \n", "Well, \n"),
        // found behind everything that is like it
        ("e", "e"),
        ("<|end|>", "<|end|>"),
        ("a\u{FFFE}b", "a\u{FFFE}b"),
    ] {
        let body = say("e Well, ", json!({"role": "assistant", "content": begun}));
        let ids = prompts(Some(template), vec![("/v1/chat/completions", body)]);
        let expected = [bytes("[user]e Well,"), vec![END], bytes(&format!("[assistant]{text}"))].concat();
        assert_eq!(ids, [expected], "{begun:?}");
    }
    let mut text = with_a_token_too_many();
    text.template = Some(ChatTemplate::new("{{ messages[0].content }}", None, None).unwrap());
    run(with(text), move |server| async move {
        let mut both = say("x", json!({"role": "assistant", "content": "y"}));
        both["add_generation_prompt"] = json!(true);
        let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        for (body, words) in [
            (both, "excludes 'add_generation_prompt'"),
            (say("x", json!({"role": "user", "content": "y"})), "a last message of the assistant"),
            (say("x", json!({"role": "assistant", "content": " \n"})), "with text"),
            (say("x", json!({"role": "assistant", "content": "y", "tool_calls": [call]})), "without calls"),
            (say("x", json!({"role": "assistant", "content": "y"})), "leaves the last message out"),
        ] {
            let refused = server.post("/v1/chat/completions", &body).await;
            assert_eq!(refused.error().0, 400, "{}", refused.body);
            assert!(refused.body.contains(words), "{}", refused.body);
        }
    });
}

#[test]
fn characters_that_stand_for_nothing_are_kept() {
    let odd = "\u{FDD0}<|end|>\u{FDD1}";
    let ids = prompts(Some("{{ messages[0].content }}"), vec![("/v1/chat/completions", chat(odd))]);
    assert_eq!(ids, [bytes(odd)]);
    let all: String = ('\u{FDD0}'..='\u{FDEF}').chain("<|end|>".chars()).collect();
    run(with(with_a_token_too_many()), |server| async move {
        let response = server.post("/v1/chat/completions", &chat(&all)).await;
        assert_eq!((response.error().0, response.error().2.as_deref()), (400, Some("messages")));
    });
}

#[test]
fn a_template_that_does_not_end_is_a_400() {
    let mut text = with_a_token_too_many();
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    text.template = Some(ChatTemplate::new(endless, None, None).unwrap());
    run(with(text), |server| async move {
        let response = server.post("/v1/chat/completions", &chat("x")).await;
        assert_eq!((response.error().0, response.error().2.as_deref()), (400, Some("messages")));
        assert!(response.body.contains("too many steps"), "{}", response.body);
    });
}

#[test]
fn deep_json_is_a_400_where_it_is_read_and_skipped_where_it_is_not() {
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    run(Setup::play(Play::say("")), |server| async move {
        for (field, status) in [("metadata", 200), ("chat_template_kwargs", 400), ("temperature", 400)] {
            let body = format!(
                r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"x"}}],"{field}":{{"a":{deep}}}}}"#
            );
            let response =
                server.exchange(&request("POST", "/v1/chat/completions", "", body.as_bytes())).await;
            assert_eq!(response.status, status, "{field}: {}", response.body);
        }
    });
}

#[test]
fn more_messages_or_ids_than_the_context_has_tokens_are_refused_with_that_number() {
    run(Setup { context: 4, ..Setup::play(Play::say("")) }, |server| async move {
        let messages = vec![json!({"role": "user", "content": ""}); 5];
        for (path, field, value) in [
            ("/v1/chat/completions", "messages", json!(messages)),
            ("/v1/completions", "prompt", json!([1, 1, 1, 1, 1])),
            ("/v1/completions", "prompt", json!([[1], [1, 1, 1, 1, 1]])),
        ] {
            let refused = server.post(path, &json!({"model": MODEL, field: value})).await;
            let (status, _, param, code) = refused.error();
            assert_eq!((status, code.as_str()), (400, "context_length_exceeded"), "{path}");
            assert_eq!(param.as_deref(), Some(field), "{path}");
            assert!(refused.body.contains("4 tokens; the request has at least 5"), "{}", refused.body);
        }
    });
}

#[test]
fn messages_and_parts_have_a_bound_however_long_the_context_is() {
    run(Setup { context: 1 << 20, ..Setup::play(Play::say("")) }, |server| async move {
        let part = json!({"type": "text", "text": ""});
        let filled = |count| vec![json!({"role": "user", "content": ""}); count];
        let parts = |count| vec![json!({"role": "user", "content": vec![part.clone(); count]})];
        for (messages, status, param) in [
            (filled(16_384), 200, None),
            (filled(16_385), 400, Some("messages")),
            (parts(16_384), 200, None),
            (parts(16_385), 400, Some("messages[0].content")),
        ] {
            let body = json!({"model": MODEL, "messages": messages, "max_tokens": 1});
            let response = server.post("/v1/chat/completions", &body).await;
            assert_eq!(response.status, status, "{}", response.body);
            if let Some(param) = param {
                assert_eq!(response.error().2.as_deref(), Some(param));
                assert!(response.body.contains("more than 16384"), "{}", response.body);
            }
        }
    });
}

#[test]
fn what_is_large_is_never_read_where_requests_are_served() {
    run(Setup::play(Play::say("")), |server| async move {
        server.env.refuse_threads(true);
        let small = json!({"model": MODEL, "prompt": "a"});
        assert_eq!(server.post("/v1/completions", &small).await.status, 200);
        // Neither of these has much text, but rendering and parsing are work too.
        let messages = vec![json!({"role": "user", "content": ""}); 2000];
        let rendered = json!({"model": MODEL, "messages": messages});
        let parsed = json!({"model": MODEL, "prompt": "a", "metadata": vec![0; 5000]});
        for (path, body) in [("/v1/chat/completions", &rendered), ("/v1/completions", &parsed)] {
            let response = server.post(path, body).await;
            assert_eq!((response.error().0, response.error().3.as_str()), (503, "no_thread"));
            assert_eq!(response.headers["retry-after"], "1");
        }
        server.env.refuse_threads(false);
        assert_eq!(server.post("/v1/completions", &parsed).await.status, 200);
        let refused = server.post("/v1/chat/completions", &rendered).await;
        assert_eq!(refused.error().3, "context_length_exceeded");
    });
}

#[test]
fn a_bad_percent_escape_is_an_error_in_openais_shape() {
    run(Setup::play(Play::say("")), |server| async move {
        for path in ["/v1/models/%ff", "/debug/placement/%C3%28"] {
            let response = server.get(path).await;
            assert_eq!((response.error().0, response.error().3.as_str()), (400, "invalid_address"), "{path}");
            assert_eq!(response.headers["content-type"], "application/json");
        }
    });
}

#[test]
fn a_prompt_and_a_chat_are_told_as_tokens() {
    run(with(with_a_token_too_many()), |server| async move {
        let ask = async |body: Value| {
            let answer = server.post("/tokenize", &body).await;
            (answer.status, answer.json())
        };
        let tokenizer = builtin::tokenizer().unwrap();
        let (status, told) = ask(json!({"model": MODEL, "prompt": "a fleet"})).await;
        let ids = tokenizer.encode("a fleet").unwrap();
        assert_eq!(
            (status, &told["tokens"], &told["count"]),
            (200, &json!(ids), &json!(ids.len())),
            "{told}"
        );
        assert!(told["max_model_len"].as_u64().unwrap() > 0);
        let (status, told) = ask(chat("a fleet")).await;
        assert!(status == 200 && told["count"].as_u64().unwrap() > ids.len() as u64, "{told}");
        for wrong in
            [json!({"model": MODEL}), json!({"model": MODEL, "prompt": ["a", "b"]}), json!({"prompt": "a"})]
        {
            assert_eq!(ask(wrong.clone()).await.0, 400, "{wrong}");
        }
    });
}
