//! Log-probabilities of prompts, and least lengths of answers, from outside.

use crate::common::server::Server;
use crate::common::{fixture, golden, ids};
use mixfleet_runtime::model::{Checkpoint, Oracle};
use serde_json::{Value, json};

/// Natural logarithms of the softmax.
fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let best = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - best).exp()).sum();
    logits.iter().map(|logit| logit - best - sum.ln()).collect()
}

fn numbers(value: &Value) -> Vec<Option<f64>> {
    value.as_array().unwrap().iter().map(Value::as_f64).collect()
}

fn completion(server: &Server, body: &Value) -> Value {
    let mut whole = json!({"model": "m", "temperature": 0});
    whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let (status, answer) = server.post("/v1/completions", &whole);
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

#[test]
fn log_probabilities_of_a_prompt_are_the_references() {
    let model = fixture("llama-gqa-f32");
    let golden = golden(&model);
    let oracle = Oracle::new(&Checkpoint::open(&model, &mixfleet_cpu::host::Mapper).unwrap());
    for devices in [&["cpu"][..], &["cpu@0=prefill", "cpu=decode"], &["pp:cpu@0,cpu"]] {
        let mut arguments = vec!["--model", model.to_str().unwrap(), "--name", "m"];
        devices.iter().for_each(|device| arguments.extend(["--device", device]));
        let server = Server::start(&arguments);
        let case = &golden["cases"][0];
        let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
        let whole = [&prompt[..], &greedy[..12]].concat();
        // as the lm-eval package asks
        let ask = json!({"prompt": [whole, prompt], "max_tokens": 1, "logprobs": 1, "echo": true, "seed": 7});
        let answer = completion(&server, &ask);
        let told = &answer["choices"][0]["logprobs"];
        let values = numbers(&told["token_logprobs"]);
        assert_eq!((values.len(), values[0]), (whole.len() + 1, None), "{devices:?}");
        let vocab = oracle.last_logits(&whole[..1]).len();
        let logits = oracle.logits(&whole);
        for (at, row) in logits.chunks(vocab).enumerate() {
            let next = whole.get(at + 1).copied().unwrap_or(greedy[12]);
            let wanted = log_softmax(row)[next as usize];
            let got = values[at + 1].unwrap();
            assert!((got - wanted).abs() < 1e-3, "{devices:?}, {at}: {got}, not {wanted}");
        }
        // every greedy token is the best one where it stands
        for at in prompt.len()..whole.len() {
            let top = told["top_logprobs"][at].as_object().unwrap();
            assert_eq!(top.len(), 1, "{devices:?}: {top:?}");
        }
        assert_eq!(told["top_logprobs"][0], Value::Null);
        let (text, offsets) = (answer["choices"][0]["text"].as_str().unwrap(), &told["text_offset"]);
        assert_eq!(offsets[0], 0, "{devices:?}");
        assert_eq!(offsets.as_array().unwrap().len(), values.len());
        assert!(text.chars().count() as u64 >= offsets[whole.len()].as_u64().unwrap());
        let usage = &answer["usage"];
        assert_eq!(usage["prompt_tokens"], whole.len() + prompt.len(), "{devices:?}");
        assert_eq!(usage["completion_tokens"], 2, "the prompt's own are none: {devices:?}");
        // transformers' logits behind the whole prompt
        let first: Vec<f64> =
            case["first_logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let told = &answer["choices"][1]["logprobs"]["token_logprobs"];
        let got = numbers(told).last().copied().flatten().unwrap();
        assert!((got - log_softmax(&first)[greedy[0] as usize]).abs() < 1e-3, "{devices:?}: {got}");
        nothing_generated(&server, &whole, &values);
    }
}

/// The same prompt without an answer, and with the prompt's values in a field of their own.
fn nothing_generated(server: &Server, whole: &[u32], values: &[Option<f64>]) {
    let ask = json!({"prompt": whole, "max_tokens": 0, "logprobs": 3, "echo": true, "prompt_logprobs": 2});
    let answer = completion(server, &ask);
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &answer["usage"]["completion_tokens"]),
        (&json!("length"), &json!(0))
    );
    let again = numbers(&choice["logprobs"]["token_logprobs"]);
    assert_eq!(again.len(), whole.len());
    let close = |(a, b): (&Option<f64>, &Option<f64>)| a.zip(*b).is_none_or(|(a, b)| (a - b).abs() < 1e-4);
    assert!(again.iter().zip(values).all(close), "{again:?}, not {values:?}");
    let told = choice["prompt_logprobs"].as_array().unwrap();
    assert_eq!((told.len(), &told[0]), (whole.len(), &Value::Null));
    for (at, entry) in told.iter().enumerate().skip(1) {
        let own = &entry[whole[at].to_string()];
        assert!((own["logprob"].as_f64().unwrap() - values[at].unwrap()).abs() < 1e-4, "{at}: {entry}");
        assert!((2..=3).contains(&entry.as_object().unwrap().len()), "{entry}");
        assert!(own["rank"].is_null() || own["rank"].as_u64().unwrap() <= 2, "{entry}");
    }
    // an echo alone needs no log-probabilities
    let answer = completion(server, &json!({"prompt": "The fleet", "max_tokens": 0, "echo": true}));
    assert_eq!(answer["choices"][0]["text"], "The fleet");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn an_answer_is_the_same_whether_its_prompt_is_told_or_not() {
    let server = Server::start(&["--name", "m", "--device", "cpu"]);
    let ask = |more: Value| {
        let mut body = json!({"prompt": "A fleet of", "max_tokens": 12, "temperature": 1.2, "seed": 5,
            "frequency_penalty": 0.5, "repetition_penalty": 1.2, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        completion(&server, &body)["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let plain = ask(json!({}));
    assert_eq!(ask(json!({"echo": true})), format!("A fleet of{plain}"));
    assert_eq!(ask(json!({"echo": true, "logprobs": 0})), format!("A fleet of{plain}"));
    assert_eq!(ask(json!({"prompt_logprobs": 5})), plain);
}

#[test]
fn no_end_comes_before_the_minimum() {
    let server = Server::start(&["--name", "m", "--device", "cpu"]);
    // the answer's own second token ends it, until it may not
    let ids = |more: Value| {
        let mut body = json!({"prompt": "A fleet of", "max_tokens": 8, "temperature": 0, "logprobs": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = completion(&server, &body);
        let count = answer["usage"]["completion_tokens"].as_u64().unwrap();
        (count, answer["choices"][0]["finish_reason"].as_str().unwrap().to_owned(), answer)
    };
    let (_, _, answer) = ids(json!({"ignore_eos": true}));
    let tokens = answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    let second = tokens[1].as_str().unwrap();
    let (_, known) =
        server.post("/tokenize", &json!({"model": "m", "prompt": second, "add_special_tokens": false}));
    let stop = known["tokens"][0].clone();
    assert_eq!(ids(json!({"stop_token_ids": [stop]})).0, 2);
    for minimum in 2..8 {
        let (count, reason, answer) = ids(json!({"stop_token_ids": [stop], "min_tokens": minimum}));
        assert!(count > minimum && (count == 8 || reason == "stop"), "{minimum}: {answer}");
    }
    let body = json!({"model": "m", "prompt": "a", "max_tokens": 4, "min_tokens": 5});
    let (status, refused) = server.post("/v1/completions", &body);
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("min_tokens")), "{refused}");
}
