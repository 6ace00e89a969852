use super::super::names;
use super::super::testing::{ReadFiles, fixtures_named, golden_at, ids};
use super::super::{ChatMessage, Checkpoint, Oracle, Tokenizer};
use super::*;
use mixfleet_hal::random::Stream;
use std::path::{Path, PathBuf};

fn files() -> Vec<PathBuf> {
    let directories = fixtures_named(&["llama-gguf"]);
    let kinds = ["q4_0", "q4_k", "q8_0"];
    directories.iter().flat_map(|d| kinds.map(|kind| d.join(format!("model-{kind}.gguf")))).collect()
}

/// The golden outputs of a file.
fn golden_of(file: &Path) -> serde_json::Value {
    let stem = file.file_stem().expect("a name").to_string_lossy().replace("model", "golden");
    golden_at(&file.with_file_name(format!("{stem}.json")))
}

#[test]
fn the_oracle_follows_the_golden_tokens_of_each_file() {
    for file in files() {
        let checkpoint = Checkpoint::open(&file, &ReadFiles).unwrap();
        let oracle = Oracle::new(&checkpoint);
        for case in golden_of(&file)["cases"].as_array().expect("cases") {
            let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
            let sequence = [prompt.clone(), greedy.clone()].concat();
            let logits = oracle.logits(&sequence[..sequence.len() - 1]);
            let vocab = checkpoint.config.vocab as usize;
            for (at, &token) in greedy.iter().enumerate() {
                let row = &logits[(prompt.len() - 1 + at) * vocab..][..vocab];
                let best = (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a token");
                assert_eq!(best, token as usize, "{} token {at}", file.display());
            }
        }
    }
}

#[test]
fn texts_and_chats_of_each_file_have_their_golden_tokens() {
    for file in files() {
        let golden = golden_of(&file);
        let tokenizer = Tokenizer::open(&file).unwrap();
        let template = super::super::ChatTemplate::open(&file).unwrap().expect("a template");
        for case in golden["cases"].as_array().expect("cases") {
            let text = case["text"].as_str().expect("text");
            assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["prompt_ids"]), "{text}");
        }
        let chat = &golden["chat"];
        let messages: Vec<ChatMessage> = serde_json::from_value(chat["messages"].clone()).unwrap();
        let rendered = template.render(&messages, true, &serde_json::Map::new(), 0).unwrap();
        assert_eq!(rendered, chat["rendered"].as_str().expect("text"));
        assert_eq!(tokenizer.encode_chat(&rendered).unwrap(), ids(&chat["ids"]));
    }
}

#[test]
fn damaged_headers_are_refused_or_read_and_nothing_panics() {
    for file in files() {
        let whole = std::fs::read(&file).unwrap();
        let header = GgufFile::parse(&file, &whole, whole.len() as u64).unwrap();
        let end = header.tensors_start();
        let (mut refused, mut random) = (0, Stream::new(7));
        for _ in 0..2000 {
            let mut bytes = whole[..end].to_vec();
            for _ in 0..=random.below(3) {
                let at = random.below(end as u64) as usize;
                bytes[at] = random.next_u64() as u8;
            }
            if random.below(4) == 0 {
                bytes.truncate(random.below(end as u64) as usize);
            }
            match GgufFile::parse(&file, &bytes, whole.len() as u64) {
                Ok(gguf) => {
                    let _ = (config(&gguf, Some(&whole)), tokenizer(&gguf).is_ok(), template(&gguf).is_ok());
                }
                Err(error) => {
                    assert!(error.to_string().contains("gguf"), "{error}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 500, "{refused} of 2000 refused");
        let error = GgufFile::parse(&file, &whole, whole.len() as u64 - 1).unwrap_err().to_string();
        assert!(error.contains("truncated"), "{error}");
    }
}

/// A header with two keys and a tensor, up to its end.
fn small_header() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let tokens = [words(&[9, 8, 3, 0]), text("a"), text("b"), text("c")].concat();
    let tensor = [words(&[2, 32, 0, 2, 0]), words(&[0, 0, 0])].concat();
    [
        b"GGUF".to_vec(),
        words(&[3, 1, 0, 2, 0]),
        [text("general.architecture"), words(&[8]), text("llama")].concat(),
        [text("tokenizer.ggml.tokens"), tokens].concat(),
        [text("output.weight"), tensor].concat(),
    ]
    .concat()
}

#[test]
fn a_file_that_is_cut_is_said_to_be_truncated_with_its_bytes_and_what_was_being_read() {
    let mut whole = small_header();
    let header = whole.len();
    whole.resize(header.next_multiple_of(32) + 2 * 32 * 4, 0);
    let file = Path::new("models/cut.gguf");
    let parse = |bytes: &[u8]| GgufFile::parse(file, bytes, bytes.len() as u64);
    assert_eq!(parse(&whole).unwrap().tensors["output.weight"].range.len(), 256);
    let mut parts = Vec::new();
    for length in 0..whole.len() {
        let error = parse(&whole[..length]).unwrap_err().to_string();
        let rest = error.strip_prefix("models/cut.gguf: ").unwrap_or_else(|| panic!("{error}"));
        assert!(rest.contains("truncated"), "{error}");
        let bytes =
            if length < header { format!("the file has {length} bytes") } else { format!("of {length}:") };
        assert!(rest.contains(&bytes), "{error}");
        parts.push(rest.split(':').next().unwrap_or_default().to_owned());
    }
    parts.dedup();
    let expected = [
        "the beginning",
        "key 1 of 2",
        "the value of key 'general.architecture'",
        "key 2 of 2",
        "the value of key 'tokenizer.ggml.tokens'",
        "tensor 1 of 1",
        "tensor 'output.weight'",
    ];
    assert_eq!(parts, expected);
}

/// Files written by hwtests/ggml.sh, each with the values that the `gguf` package reads.
#[test]
fn every_ggml_type_is_read_as_the_gguf_package_reads_it() {
    let below = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/ggml/types");
    let folder = std::env::var_os("MIXFLEET_GGML_TYPES").map_or_else(below, PathBuf::from);
    if !folder.is_dir() {
        eprintln!("SKIPPED: there is no {}; hwtests/ggml.sh writes it", folder.display());
        return;
    }
    for kind in kinds::GgmlKind::all() {
        let checkpoint = Checkpoint::open(&folder.join(format!("{}.gguf", kind.name())), &ReadFiles).unwrap();
        for (name, _) in names::shapes(&checkpoint.config).iter().filter(|(_, shape)| shape.len() == 2) {
            let module = name.strip_suffix(".weight").expect("a matrix");
            let file = folder.join(format!("{}.{module}.f32", kind.name()));
            let expected = std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            let found = checkpoint.values(name).expect("weights");
            assert_eq!(found.len() * 4, expected.len(), "{name}");
            for (at, (found, expected)) in found.iter().zip(expected.as_chunks::<4>().0).enumerate() {
                let (found, expected) = (*found as f32, f32::from_le_bytes(*expected));
                assert!(found == expected, "{} {name} {at}: {found}, expected {expected}", kind.name());
            }
        }
    }
}
