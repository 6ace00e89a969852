use super::super::testing::{fixtures, golden, ids};
use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::collections::HashMap;

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> (String, Vec<String>) {
    let mut stream = tokenizer.stream();
    let mut parts: Vec<String> = ids.iter().map(|id| stream.push(*id).expect("decodes")).collect();
    parts.push(stream.finish().expect("decodes"));
    (parts.concat(), parts)
}

/// A sentencepiece-style tokenizer with byte fallback, as in Llama 2 and Mistral.
fn sentencepiece() -> Tokenizer {
    let words = ["<s>", "▁", "▁Hello", "▁world", "lo", ",", "▁▁"].map(String::from);
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let vocab: HashMap<String, u32> = words.into_iter().chain(bytes).zip(0..).collect();
    let json = json!({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
    });
    let inner = tokenizers::Tokenizer::from_bytes(json.to_string()).expect("a tokenizer");
    Tokenizer::new(inner).expect("a tokenizer")
}

#[test]
fn fixtures_encode_as_transformers_does() {
    for fixture in fixtures() {
        let tokenizer = Tokenizer::open(&fixture).expect("a tokenizer");
        let golden = golden(&fixture);
        for case in golden["cases"].as_array().expect("cases") {
            let encoded = tokenizer.encode(case["text"].as_str().expect("text")).expect("encodes");
            assert_eq!(encoded, ids(&case["prompt_ids"])[1..], "the golden ids have a bos in front");
        }
        let rendered = golden["chat"]["rendered"].as_str().expect("text");
        assert_eq!(tokenizer.encode_chat(rendered).expect("encodes"), ids(&golden["chat"]["ids"]));
        assert_eq!(tokenizer.decode(&[99_999, u32::MAX]).expect("decodes"), "");
        assert_eq!(tokenizer.token_text(99_999), "");
        assert_eq!(tokenizer.token_text(1), "<|end|>");
    }
}

#[test]
fn a_character_is_emitted_whole_and_once() {
    let tokenizer = super::super::builtin::tokenizer().expect("a tokenizer");
    let text = "naïve 角色 🚀!";
    let ids = tokenizer.encode_chat(text).expect("encodes");
    assert_eq!(ids.len(), text.len(), "one token per byte");
    let (whole, parts) = streamed(&tokenizer, &ids);
    assert_eq!(whole, text);
    assert!(parts.iter().all(|part| part.chars().count() <= 1), "{parts:?}");
    assert_eq!(streamed(&tokenizer, &ids[..ids.len() - 2]).0, "naïve 角色 \u{FFFD}");
}

#[test]
fn sentencepiece_spaces_and_bytes_come_out_as_in_one_piece() {
    let tokenizer = sentencepiece();
    let id = |token: &str| tokenizer.token_to_id(token).expect("in the vocabulary");
    let hello = [
        id("<s>"),
        id("▁Hello"),
        id(","),
        id("▁world"),
        id("<0xE8>"),
        id("<0xA7>"),
        id("<0x92>"),
        id("▁world"),
    ];
    let (whole, parts) = streamed(&tokenizer, &hello);
    assert_eq!(whole, "Hello, world角 world");
    assert_eq!(parts[..4], ["", "Hello", ",", " world"].map(String::from));
    assert_eq!(streamed(&tokenizer, &[id("▁"), id("▁Hello")]).0, tokenizer.decode(&[1, 2]).expect("decodes"));
}

#[test]
fn token_bytes_are_what_the_text_is_made_of() {
    let bytes = |tokenizer: &Tokenizer, ids: &[u32]| -> Vec<u8> {
        ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect()
    };
    let text = "naïve\n 角色 🚀!";
    let tokenizer = super::super::builtin::tokenizer().expect("a tokenizer");
    assert_eq!(bytes(&tokenizer, &tokenizer.encode_chat(text).expect("encodes")), text.as_bytes());
    assert_eq!(tokenizer.token_bytes(1), b"<|end|>");
    for fixture in fixtures() {
        let tokenizer = Tokenizer::open(&fixture).expect("a tokenizer");
        assert_eq!(bytes(&tokenizer, &tokenizer.encode_chat(text).expect("encodes")), text.as_bytes());
    }
    let tokenizer = sentencepiece();
    let hello = tokenizer.token_to_id("▁Hello").expect("in the vocabulary");
    assert_eq!(tokenizer.token_text(hello), " Hello");
    assert_eq!(tokenizer.token_bytes(tokenizer.token_to_id("<0xE8>").expect("in the vocabulary")), [0xE8]);
}

#[test]
fn a_missing_or_damaged_file_is_named() {
    let directory = super::super::testing::scratch("tokenizer");
    assert!(Tokenizer::open(&directory).unwrap_err().to_string().contains("tokenizer.json"));
    let good = super::super::builtin::tokenizer().expect("a tokenizer").to_json().expect("JSON");
    let mut odd: serde_json::Value = serde_json::from_str(&good).expect("JSON");
    odd["decoder"] = json!(5);
    for damaged in ["", "{}", &good[..good.len() / 2], &odd.to_string()] {
        std::fs::write(directory.join("tokenizer.json"), damaged).expect("a file");
        assert!(
            Tokenizer::open(&directory).unwrap_err().to_string().contains("tokenizer.json: not a tokenizer")
        );
    }
}

#[test]
fn tokens_of_the_configuration_alone_are_added() {
    let directory = super::super::testing::scratch("tokenizer-added");
    let good = super::super::builtin::tokenizer().expect("a tokenizer").to_json().expect("JSON");
    std::fs::write(directory.join("tokenizer.json"), good).expect("a file");
    let open = |id: u32| {
        let added = json!({"1": {"content": "<|end|>", "special": true},
            id.to_string(): {"content": "<tool_call>", "special": false}});
        let config = json!({"added_tokens_decoder": added});
        std::fs::write(directory.join("tokenizer_config.json"), config.to_string()).expect("a file");
        Tokenizer::open(&directory)
    };
    let tokenizer = open(261).expect("a tokenizer");
    assert_eq!(tokenizer.encode_chat("<tool_call><|end|>").expect("encodes"), [261, 1]);
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(261));
    let error = open(300).unwrap_err().to_string();
    assert!(error.contains("added_tokens_decoder.300") && error.contains("261"), "{error}");
}

#[test]
fn special_tokens_are_those_of_all_files() {
    let directory = super::super::testing::scratch("tokenizer-specials");
    let write = |name: &str, value: serde_json::Value| {
        std::fs::write(directory.join(name), value.to_string()).expect("a file");
    };
    let good = super::super::builtin::tokenizer().expect("a tokenizer").to_json().expect("JSON");
    std::fs::write(directory.join("tokenizer.json"), good).expect("a file");
    let encoded = |text: &str| {
        let tokenizer = Tokenizer::open(&directory).expect("a tokenizer");
        let ids = tokenizer.encode_chat(text).expect("encodes");
        let last = ids.last().copied().unwrap_or_default();
        (ids.len(), last, tokenizer.is_special(last))
    };
    let end = json!({"content": "<|end|>", "lstrip": true, "special": true});
    write("tokenizer_config.json", json!({"added_tokens_decoder": {"1": end}}));
    assert_eq!(encoded("a  <|end|>"), (2, 1, true), "the configuration's flags count");
    for config in [
        json!({"pad_token": "<new>"}),
        json!({"pad_token": {"content": "<new>"}}),
        json!({"additional_special_tokens": ["<new>"]}),
        json!({"extra_special_tokens": {"image_token": "<new>"}}),
    ] {
        write("tokenizer_config.json", config);
        assert_eq!(encoded("a<new>"), (2, 261, true));
    }
    write("tokenizer_config.json", json!({}));
    assert_eq!(encoded("a<new>").0, 6);
    write("special_tokens_map.json", json!({"additional_special_tokens": ["<new>"]}));
    assert_eq!(encoded("a<new>"), (2, 261, true));
    write("added_tokens.json", json!({"<other>": 261, "<new>": 262}));
    assert_eq!(encoded("a<other>"), (2, 261, false));
    assert_eq!(encoded("a<new>"), (2, 262, true));
    write("tokenizer_config.json", json!({"added_tokens_decoder": {}}));
    assert_eq!(encoded("a<new>").0, 6, "the configuration's list replaces both files");
    write("tokenizer_config.json", json!({}));
    write("added_tokens.json", json!({"<other>": 500}));
    let error = Tokenizer::open(&directory).unwrap_err().to_string();
    assert!(error.contains("added_tokens.json") && error.contains("<other>"), "{error}");
    write("tokenizer_config.json", json!({"split_special_tokens": true}));
    let error = Tokenizer::open(&directory).unwrap_err().to_string();
    assert!(error.contains("split_special_tokens"), "{error}");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    std::fs::write(directory.join("tokenizer.json"), pointer).expect("a file");
    let error = Tokenizer::open(&directory).unwrap_err().to_string();
    assert!(error.contains("Git LFS"), "{error}");
}

#[test]
fn truncation_of_the_file_is_not_obeyed() {
    let json = super::super::builtin::tokenizer().expect("a tokenizer").to_json().expect("JSON");
    let mut inner = tokenizers::Tokenizer::from_bytes(json).expect("a tokenizer");
    let truncation = tokenizers::TruncationParams { max_length: 3, ..Default::default() };
    inner.with_truncation(Some(truncation)).expect("truncation");
    let tokenizer = Tokenizer::new(inner).expect("a tokenizer");
    assert_eq!(tokenizer.encode_chat("a long prompt").expect("encodes").len(), 13);
}

/// Truncates runs of bytes that are longer than a stream holds back, which may decode differently; they do
/// not occur in text.
fn with_short_byte_runs(ids: Vec<u32>) -> Vec<u32> {
    ids.chunks(HELD_TOKENS_MAX / 2).flat_map(|chunk| chunk.iter().copied().chain([3])).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn increments_are_the_whole_text_with_bytes(ids in prop::collection::vec(0u32..270, 0..80)) {
        let tokenizer = super::super::builtin::tokenizer().expect("a tokenizer");
        prop_assert_eq!(streamed(&tokenizer, &ids).0, tokenizer.decode(&ids).expect("decodes"));
    }

    #[test]
    fn increments_are_the_whole_text_with_byte_fallback(ids in prop::collection::vec(0u32..270, 0..80)) {
        let tokenizer = sentencepiece();
        let ids = with_short_byte_runs(ids);
        prop_assert_eq!(streamed(&tokenizer, &ids).0, tokenizer.decode(&ids).expect("decodes"));
    }

    #[test]
    fn increments_are_the_whole_text_with_sentencepiece_words(ids in prop::collection::vec(0u32..9, 0..40)) {
        let tokenizer = sentencepiece();
        prop_assert_eq!(streamed(&tokenizer, &ids).0, tokenizer.decode(&ids).expect("decodes"));
    }
}

#[test]
fn increments_are_the_whole_text_on_the_fixtures() {
    for fixture in fixtures() {
        let tokenizer = Tokenizer::open(&fixture).expect("a tokenizer");
        let mut random = mixfleet_hal::random::Stream::new(7);
        for _ in 0..300 {
            let length = random.below(60) as usize;
            let ids: Vec<u32> = (0..length).map(|_| random.below(520) as u32).collect();
            assert_eq!(streamed(&tokenizer, &ids).0, tokenizer.decode(&ids).expect("decodes"), "{ids:?}");
        }
    }
}

#[test]
fn a_mark_keeps_special_tokens_text_and_changes_nothing_else() {
    const MARK: char = '\u{FDD0}';
    let builtin = super::super::builtin::tokenizer().expect("a tokenizer");
    let mut tokenizers = vec![builtin, sentencepiece()];
    tokenizers.extend(fixtures().iter().map(|fixture| Tokenizer::open(fixture).expect("a tokenizer")));
    for tokenizer in tokenizers {
        let added = tokenizer.inner.get_added_vocabulary().get_added_tokens_decoder();
        let special: Vec<u32> = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        for id in &special {
            let name = tokenizer.id_to_token(*id).expect("a name");
            let text = format!("Hello, {name} world");
            let encoded = tokenizer.encode_chat(&text).expect("encodes");
            assert!(encoded.contains(id), "{name} is special without a mark");
            let mut marked = text.clone();
            for place in tokenizer.special_places(&text).into_iter().rev() {
                marked.insert(place, MARK);
            }
            let plain = tokenizer.encode_marked(&marked, MARK, false).expect("encodes");
            assert!(!plain.iter().any(|id| special.contains(id)), "{name}: {plain:?}");
            assert_eq!(tokenizer.decode(&plain).expect("decodes"), text);
        }
        // Where a mark separates nothing the tokens are the same, at any position.
        let text = "Hello, world of 1 and 角";
        let encoded = tokenizer.encode(text).expect("encodes");
        for (at, _) in text.char_indices() {
            let mut marked = text.to_string();
            marked.insert(at, MARK);
            assert_eq!(tokenizer.encode_marked(&marked, MARK, true).expect("encodes"), encoded, "{marked}");
        }
    }
}

#[test]
fn no_token_stands_for_more_bytes_than_are_told() {
    let builtin = super::super::builtin::tokenizer().expect("a tokenizer");
    assert_eq!(builtin.token_bytes_max(), Some("<|assistant|>".len()));
    assert_eq!(sentencepiece().token_bytes_max(), Some("▁Hello".len()));
    for fixture in fixtures() {
        let tokenizer = Tokenizer::open(&fixture).expect("a tokenizer");
        let Some(bytes_max) = tokenizer.token_bytes_max() else { continue };
        for case in golden(&fixture)["cases"].as_array().expect("cases") {
            let text = case["text"].as_str().expect("text");
            let tokens = tokenizer.encode(text).expect("encodes").len();
            assert!(tokens * bytes_max >= text.len(), "{text}: {tokens} tokens of {bytes_max} bytes at most");
        }
    }
    // Unknown words may have any length, so there is no bound.
    let words = json!({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}});
    let inner = tokenizers::Tokenizer::from_bytes(words.to_string()).expect("a tokenizer");
    assert_eq!(Tokenizer::new(inner).expect("a tokenizer").token_bytes_max(), None);
}

#[test]
fn special_tokens_show_where_they_are_asked_for() {
    let tokenizer = super::super::builtin::tokenizer().expect("a tokenizer");
    let ids = tokenizer.encode_chat("<|user|>h\u{e9}<|end|>").expect("encodes");
    let text = |mut stream: TokenStream| {
        let shown: String = ids.iter().map(|id| stream.push(*id).expect("decodes")).collect();
        shown + &stream.finish().expect("decodes")
    };
    assert_eq!(text(tokenizer.stream()), "h\u{e9}");
    assert_eq!(text(tokenizer.stream_with_specials()), "<|user|>h\u{e9}<|end|>");
}
