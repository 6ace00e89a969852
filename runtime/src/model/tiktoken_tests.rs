use super::super::Tokenizer;
use super::super::byte_level::symbol_bytes;
use super::super::testing::{Scratch, fixtures, scratch};
use super::*;
use mixfleet_hal::random::Stream;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

/// Names as in Kimi's files: some ids have none, and one is not a special token.
fn names(first: usize) -> Value {
    let token =
        |content: &str, special: bool| json!({"content": content, "special": special, "lstrip": false});
    json!({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {
        first.to_string(): token("[BOS]", true), (first + 2).to_string(): token("<|im_end|>", true),
        (first + 5).to_string(): token("<think>", false)}})
}

fn lines(tokens: &[Vec<u8>]) -> String {
    tokens.iter().enumerate().map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token))).collect()
}

fn written(name: &str, model: &str, config: &Value) -> Scratch {
    let directory = scratch(&format!("tiktoken-{name}"));
    std::fs::write(directory.join(FILE), model).expect("a file");
    std::fs::write(directory.join(CONFIG_FILE), config.to_string()).expect("a file");
    directory
}

fn opened(name: &str, tokens: &[Vec<u8>]) -> Tokenizer {
    Tokenizer::open(&written(name, &lines(tokens), &names(tokens.len()))).expect("a tokenizer")
}

/// All bytes, in their own order, and `joined` tokens each of which joins two others.
fn joined(seed: u64, joined: usize) -> Vec<Vec<u8>> {
    let mut random = Stream::new(seed);
    let mut tokens: Vec<Vec<u8>> =
        (0..=255).map(|byte: u8| vec![byte.wrapping_mul(167).wrapping_add(11)]).collect();
    // more often from the letters of the texts below
    let common: Vec<usize> =
        (0..256).filter(|rank| b"abcn \xC3\xA9\xE8\xA7".contains(&tokens[*rank][0])).collect();
    while tokens.len() < 256 + joined {
        let mut one = || match random.below(3) {
            0 => common[random.below(common.len() as u64) as usize],
            _ => random.below(tokens.len() as u64) as usize,
        };
        let (left, right) = (one(), one());
        let token = [tokens[left].as_slice(), &tokens[right]].concat();
        if token.len() <= 12 && !tokens.contains(&token) {
            tokens.push(token);
        }
    }
    tokens
}

/// The tokens of a fixture that are not special, in the order of its ids.
fn of_fixture(directory: &Path) -> Vec<Vec<u8>> {
    let text = std::fs::read(directory.join("tokenizer.json")).expect("a tokenizer");
    let json: Value = serde_json::from_slice(&text).expect("JSON");
    let vocab = json["model"]["vocab"].as_object().expect("a vocabulary");
    let mut tokens: Vec<(&Value, &String)> = vocab.iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable_by_key(|(id, _)| id.as_u64());
    let ordinary = tokens.iter().filter(|(_, token)| !token.starts_with("<|"));
    ordinary.map(|(_, token)| token.chars().flat_map(symbol_bytes).collect()).collect()
}

fn words(text: &str) -> Vec<String> {
    let pattern = SplitPattern::Regex(PATTERN.into());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).expect("an expression");
    let mut pieces = PreTokenizedString::from(text);
    split.pre_tokenize(&mut pieces).expect("splits");
    let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
    pieces.into_iter().map(|(piece, ..)| piece.to_owned()).filter(|piece| !piece.is_empty()).collect()
}

/// Byte pair encoding as tiktoken defines it.
fn by_rank(tokens: &[Vec<u8>], text: &str) -> Vec<u32> {
    let ranks: HashMap<&[u8], u32> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    let of_word = |word: String| {
        if let Some(rank) = ranks.get(word.as_bytes()) {
            return vec![*rank];
        }
        let mut parts: Vec<Vec<u8>> = word.bytes().map(|byte| vec![byte]).collect();
        let rank_at =
            |parts: &[Vec<u8>], at: usize| ranks.get(parts[at..=at + 1].concat().as_slice()).copied();
        while let Some((_, at)) = (0..parts.len() - 1).filter_map(|at| Some((rank_at(&parts, at)?, at))).min()
        {
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        parts.iter().map(|part| ranks[part.as_slice()]).collect()
    };
    words(text).into_iter().flat_map(of_word).collect()
}

#[test]
fn text_is_divided_as_kimi_divides_it() {
    for (text, expected) in [
        ("中文English混合", &["中文", "English", "混合"][..]),
        ("北京市 Pascal", &["北京市", " Pascal"]),
        ("camelCase HTTPServer I'LL we've", &["camel", "Case", " HTTPServer", " I'LL", " we've"]),
        ("12345 3.14", &["123", "45", " ", "3", ".", "14"]),
        ("a  b\n\n  c \t\n", &["a", " ", " b", "\n\n", " ", " c", " \t\n"]),
        ("=> f(x);\nこんにちは、世界  ", &["=>", " f", "(x", ");\n", "こんにちは", "、", "世界", "  "]),
    ] {
        assert_eq!(words(text), expected, "{text}");
    }
}

#[test]
fn special_tokens_follow_the_last_rank() {
    let tokens = joined(1, 300);
    let tokenizer = opened("specials", &tokens);
    let first = to_u32(tokens.len());
    assert_eq!(tokenizer.vocab(), tokens.len() + 256);
    for (id, name, special) in [
        (first, "[BOS]", true),
        (first + 1, &format!("<|reserved_token_{}|>", first + 1), true),
        (first + 2, "<|im_end|>", true),
        (first + 5, "<think>", false),
        (first + 255, &format!("<|reserved_token_{}|>", first + 255), true),
    ] {
        assert_eq!((tokenizer.token_to_id(name), tokenizer.is_special(id)), (Some(id), special), "{name}");
        assert_eq!(tokenizer.encode(name).expect("encodes"), [id]);
        assert_eq!(tokenizer.decode(&[id]).expect("decodes"), if special { "" } else { name });
    }
    let chat = tokenizer.encode_chat("[BOS]角 ab<|im_end|>").expect("encodes");
    assert_eq!((chat[0], chat[chat.len() - 1]), (first, first + 2));
    assert_eq!(chat[1..chat.len() - 1], by_rank(&tokens, "角 ab"));
    let longest = tokens.iter().map(Vec::len).max();
    assert!(tokenizer.token_bytes_max() >= longest);
    let again = tokenizers::Tokenizer::from_bytes(tokenizer.to_json().expect("JSON")).expect("a tokenizer");
    assert_eq!(
        Tokenizer::new(again).expect("a tokenizer").encode("[BOS]角 ab<|im_end|>").expect("encodes"),
        chat
    );
}

#[test]
fn a_fixtures_tokens_give_what_their_ranks_say() {
    for fixture in fixtures() {
        let tokens = of_fixture(&fixture);
        let tokenizer = opened("fixture", &tokens);
        for text in
            ["The scheduler asks, for every request,", "价格决定角色: 0123 naïve 🚀", "def place(a, b):\n  x"]
        {
            let ids = tokenizer.encode(text).expect("encodes");
            assert_eq!(ids, by_rank(&tokens, text), "{text}");
            assert!(ids.len() < text.len(), "{ids:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_text_encodes_by_rank_and_comes_back(seed in 0u64..4, text in "[abcn éè角\u{4e00}-\u{4e20}0-9A-C'\n\t.]{0,60}|\\PC{0,40}") {
        let tokens = joined(seed, 400);
        let tokenizer = opened(&format!("random-{seed}"), &tokens);
        let ids = tokenizer.encode(&text).expect("encodes");
        prop_assert_eq!(&ids, &by_rank(&tokens, &text));
        prop_assert_eq!(tokenizer.decode(&ids).expect("decodes"), text);
    }
}

#[test]
fn a_damaged_file_is_named_with_the_line() {
    let tokens = joined(2, 3);
    let good = lines(&tokens);
    let third = STANDARD.encode(&tokens[2]);
    let line = |new: &str| good.replacen(&format!("{third} 2\n"), new, 1);
    for (model, expected) in [
        (line("!!!! 2\n"), "tiktoken.model: line 3: its token is not valid base64"),
        (line("YQ= 2\n"), "line 3: its token is not valid base64"),
        (line("YR== 2\n"), "line 3: its token is not valid base64"),
        (line(" 2\n"), "line 3: expected a token in base64 and its rank"),
        (line(&format!("{third} 2 2\n")), "line 3: expected a token"),
        (line(&format!("{third}\n")), "line 3: expected a token"),
        (line(&format!("{third} -2\n")), "line 3: its rank is not a whole number"),
        (line(&format!("{third} 99999999999\n")), "line 3: its rank is not a whole number"),
        (line(&format!("{third} 1\n")), "line 3: rank 1 occurs twice"),
        (line(&format!("{third} 2\n{third} 259\n")), "line 4: its token also has the rank 2"),
        (line(""), "byte 0x59 has no token"),
        (line(&format!("{third} 300\n")), "259 tokens up to rank 300, expected every rank from 0 on"),
        (line(&format!("{third} 2\n==== 259\n")), "line 4: its token is not valid base64"),
        (line(&format!("{third} 2\n{} 259\n", "A".repeat(4000))), "line 4: a token of 3000 bytes"),
        (String::new(), "byte 0x00 has no token"),
        ("\0\u{1}\u{2}".into(), "line 1: expected a token"),
    ] {
        let directory = written("damaged", &model, &names(tokens.len()));
        let error = Tokenizer::open(&directory).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
    let blank = written("blank", &format!("\r\n{}", good.replace('\n', "\r\n\n")), &names(tokens.len()));
    assert_eq!(Tokenizer::open(&blank).expect("a tokenizer").vocab(), 259 + 256);
}

#[test]
fn damaged_names_are_named_with_the_field() {
    let tokens = joined(2, 3);
    let with =
        |id: &str, token: Value| json!({"added_tokens_decoder": {"259": {"content": "[BOS]"}, id: token}});
    for (config, expected) in [
        (json!([]), "tokenizer_config.json: not a JSON object"),
        (
            json!({"tokenizer_class": "QWenTokenizer"}),
            "field 'tokenizer_class': 'QWenTokenizer' with tiktoken.model",
        ),
        (json!({"added_tokens_decoder": 1}), "field 'added_tokens_decoder'"),
        (with("258", json!({"content": "x"})), "'added_tokens_decoder.258': expected an id from 259 on"),
        (with("4000000000", json!({"content": "x"})), "'added_tokens_decoder.4000000000': expected an id"),
        (with("x", json!({"content": "x"})), "'added_tokens_decoder.x': expected an id"),
        (
            with("260", json!({"content": ""})),
            "'added_tokens_decoder.260': its 'content' is missing or empty",
        ),
        (with("260", json!(1)), "'added_tokens_decoder.260': its 'content' is missing"),
        (
            with("261", json!({"content": "[BOS]"})),
            "'added_tokens_decoder.261': '[BOS]' is also the name of token 259",
        ),
        (with("261", json!({"content": "A"})), "'added_tokens_decoder.261': 'A' is also the name of token"),
    ] {
        let directory = written("names", &lines(&tokens), &config);
        let error = Tokenizer::open(&directory).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
    let directory = written("no-config", &lines(&tokens), &json!({}));
    assert_eq!(Tokenizer::open(&directory).expect("a tokenizer").vocab(), 259 + 256);
    std::fs::remove_file(directory.join(CONFIG_FILE)).expect("it was there");
    assert!(Tokenizer::open(&directory).unwrap_err().to_string().contains("tokenizer_config.json"));
    std::fs::write(directory.join("tokenizer.json"), "{}").expect("a file");
    let error = Tokenizer::open(&directory).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: not a tokenizer"), "it comes first: {error}");
}
