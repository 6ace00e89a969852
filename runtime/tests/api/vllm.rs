//! The fields of vLLM's requests: each one has its effect, or is refused by name.

use super::support::{BOS, MODEL, Play, Response, Setup, run};
use mixfleet_runtime::request::{FinishReason, GenerateRequest};
use serde_json::{Value, json};

/// The fields of vLLM 0.33 beside OpenAI's, in chats and in completions, with a value that is not the
/// default, and whether they are refused.
const FIELDS: &[(&str, &str, Verdict)] = &[
    ("add_generation_prompt", "false", Verdict::Chat),
    ("add_special_tokens", "true", Verdict::Both),
    ("allowed_token_ids", "[97, 98]", Verdict::Both),
    ("bad_words", "[\"never\"]", Verdict::Both),
    ("cache_salt", "\"s\"", Verdict::Both),
    ("chat_template", "\"x\"", Verdict::Refused),
    ("chat_template_kwargs", "{\"a\": 1}", Verdict::Chat),
    ("continue_final_message", "true", Verdict::Chat),
    ("documents", "[{\"title\": \"t\"}]", Verdict::Chat),
    ("echo", "true", Verdict::Completions),
    ("ec_transfer_params", "{\"a\": 1}", Verdict::Refused),
    ("ignore_eos", "true", Verdict::Both),
    ("include_reasoning", "false", Verdict::Refused),
    ("include_stop_str_in_output", "true", Verdict::Both),
    ("kv_transfer_params", "{\"do_remote_decode\": true}", Verdict::Refused),
    ("length_penalty", "0.5", Verdict::Refused),
    ("logprob_token_ids", "[1]", Verdict::Refused),
    ("media_io_kwargs", "{\"video\": {}}", Verdict::Refused),
    ("min_p", "0.5", Verdict::Both),
    ("min_tokens", "1", Verdict::Both),
    ("mm_processor_kwargs", "{\"a\": 1}", Verdict::Refused),
    ("priority", "1", Verdict::Both),
    ("prompt_embeds", "\"AAAA\"", Verdict::Refused),
    ("prompt_logprobs", "1", Verdict::Both),
    ("reasoning_effort", "\"low\"", Verdict::Refused),
    ("repetition_detection", "{\"max_pattern_size\": 3}", Verdict::Refused),
    ("repetition_penalty", "1.5", Verdict::Both),
    ("return_mm_kwargs", "true", Verdict::Refused),
    ("return_prompt_text", "true", Verdict::Refused),
    ("return_token_ids", "true", Verdict::Both),
    ("return_token_offsets", "true", Verdict::Refused),
    ("return_tokens_as_token_ids", "true", Verdict::Refused),
    ("return_weight_versions", "true", Verdict::Refused),
    ("routed_experts_prompt_start", "2", Verdict::Refused),
    ("skip_special_tokens", "false", Verdict::Both),
    ("spaces_between_special_tokens", "false", Verdict::Both),
    ("stop_token_ids", "[97]", Verdict::Both),
    ("stream_interval", "4", Verdict::Refused),
    ("structural_tag", "\"t\"", Verdict::Refused),
    ("suffix", "\"s\"", Verdict::Refused),
    ("thinking_token_budget", "5", Verdict::Refused),
    ("top_k", "5", Verdict::Both),
    ("truncate_prompt_tokens", "2", Verdict::Both),
    ("truncation_side", "\"right\"", Verdict::Both),
    ("use_beam_search", "true", Verdict::Refused),
    ("vllm_xargs", "{\"a\": 1}", Verdict::Refused),
    ("watermarking", "true", Verdict::Refused),
];

#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Both,
    Chat,
    Completions,
    Refused,
}

/// An engine that draws what is forced, and then "ab" as often as there is room.
fn answers() -> Setup {
    Setup::script(|request| {
        let own = request.max_tokens as usize - request.forced_ids.len();
        let tokens = request.forced_ids.iter().copied().chain("ab".bytes().map(u32::from).cycle().take(own));
        Play::Reply(tokens.collect(), FinishReason::Length)
    })
}

fn asked(path: &'static str, body: Value) -> (Response, Vec<GenerateRequest>) {
    run(answers(), move |server| async move { (server.post(path, &body).await, server.submissions()) })
}

fn chunks(path: &'static str, body: Value) -> Vec<Value> {
    let response = asked(path, body).0;
    let events = response.events().into_iter().filter(|event| *event != "[DONE]");
    events.map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// A request with one more field.
fn with(path: &str, field: &str, value: &str) -> Value {
    let mut body = json!({"model": MODEL, "max_tokens": 2});
    match path {
        "/v1/completions" => body["prompt"] = json!("hello"),
        _ => {
            body["messages"] =
                json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
        }
    }
    if field == "continue_final_message" {
        body["add_generation_prompt"] = json!(false);
    }
    body[field] = serde_json::from_str(value).unwrap();
    body
}

#[test]
fn each_field_has_its_effect_or_is_refused_by_name() {
    for (path, own) in [("/v1/completions", Verdict::Completions), ("/v1/chat/completions", Verdict::Chat)] {
        for &(field, value, verdict) in FIELDS {
            let (response, _) = asked(path, with(path, field, value));
            let is_served = verdict == Verdict::Both || verdict == own;
            // fields of chats alone have no meaning for completions
            if verdict == Verdict::Chat && own != verdict {
                continue;
            }
            match is_served {
                true => assert_eq!(response.status, 200, "{path} {field}: {:?}", response.json()),
                false => assert_eq!(response.error().2.as_deref(), Some(field), "{path} {field}"),
            }
        }
    }
}

#[test]
fn limits_of_the_vocabulary_reach_the_engine() {
    let path = "/v1/completions";
    let (_, submitted) = asked(path, with(path, "allowed_token_ids", "[98, 97, 97]"));
    let vocabulary = submitted[0].vocabulary.clone().unwrap();
    assert_eq!((&*vocabulary.allowed_ids, vocabulary.bad_words.len()), (&[97, 98][..], 0));
    let (_, submitted) = asked(path, with(path, "bad_words", r#"[" no"]"#));
    let vocabulary = submitted[0].vocabulary.clone().unwrap();
    // a byte more with a space: the word alone completes it anyway
    assert_eq!((vocabulary.bad_words.len(), &*vocabulary.bad_words[0]), (1, &[110, 111][..]));
    for (field, value) in [("allowed_token_ids", "[97]"), ("bad_words", "[\"a\"]")] {
        let mut body = with(path, field, value);
        body["structured_outputs"] = json!({"choice": ["a"]});
        assert_eq!(asked(path, body).0.error().2.as_deref(), Some(field));
    }
    let (_, submitted) = asked(path, with(path, "top_k", "1"));
    assert_eq!(submitted[0].vocabulary, None);
}

#[test]
fn prompts_are_cut_at_the_side_that_is_named() {
    for (side, kept) in [("left", [108, 111]), ("right", [BOS, 104])] {
        let mut body = with("/v1/completions", "truncation_side", &format!("{side:?}"));
        body["truncate_prompt_tokens"] = json!(2);
        assert_eq!(*asked("/v1/completions", body).1[0].prompt_ids, kept);
    }
    let refused = asked("/v1/completions", with("/v1/completions", "truncation_side", "\"up\"")).0;
    assert_eq!(refused.error().2.as_deref(), Some("truncation_side"));
}

#[test]
fn ids_of_tokens_are_returned_where_vllm_returns_them() {
    let mut body = with("/v1/completions", "return_token_ids", "true");
    (body["prompt"], body["n"]) = (json!([[104, 105], [106]]), json!(2));
    let answer = asked("/v1/completions", body.clone()).0.json();
    for choice in answer["choices"].as_array().unwrap() {
        let index = choice["index"].as_u64().unwrap();
        let prompt = if index < 2 { json!([104, 105]) } else { json!([106]) };
        assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&prompt, &json!([97, 98])));
    }
    body["stream"] = json!(true);
    let streamed = chunks("/v1/completions", body);
    let (mut ids, mut prompts) = (0, 0);
    for chunk in &streamed {
        let choice = &chunk["choices"][0];
        ids += choice["token_ids"].as_array().map_or(0, Vec::len);
        prompts += choice["prompt_token_ids"].as_array().map_or(0, Vec::len);
    }
    assert_eq!((ids, prompts), (8, 2 * 2 + 2), "{streamed:?}");
    let mut chat = with("/v1/chat/completions", "return_token_ids", "true");
    let answer = asked("/v1/chat/completions", chat.clone()).0.json();
    assert_eq!(answer["choices"][0]["token_ids"], json!([97, 98]));
    let prompt = answer["prompt_token_ids"].clone();
    assert!(prompt.as_array().unwrap().len() > 4, "{answer}");
    chat["stream"] = json!(true);
    let streamed = chunks("/v1/chat/completions", chat);
    assert_eq!(streamed[0]["prompt_token_ids"], prompt, "{streamed:?}");
    let ids: Vec<&Value> =
        streamed.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().collect();
    assert_eq!(ids, [97, 98]);
    let plain = asked("/v1/completions", with("/v1/completions", "top_k", "1")).0.json();
    assert_eq!((plain["choices"][0].get("token_ids"), plain.get("prompt_token_ids")), (None, None));
}
