//! Tokenizers of GGUF files against llama.cpp: with vocabularies of published models where they are
//! available, and rules by name.

use super::super::Tokenizer;
use super::pre;
use std::path::{Path, PathBuf};

/// The folder in the variable, or else this one below the repository; none, with a message, without it.
fn folder(variable: &str, usual: &str) -> Option<PathBuf> {
    let below = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(usual);
    let path = std::env::var_os(variable).map_or_else(below, PathBuf::from);
    if path.is_dir() {
        return Some(path);
    }
    eprintln!("SKIPPED: there is no {}; set {variable} (hwtests/ggml.sh does)", path.display());
    None
}

fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|file| file.to_string_lossy().ends_with(end)).collect();
    files.sort();
    files
}

const MODELS: &str = "target/ggml/llama_cpp_python-0.3.36/vendor/llama.cpp/models";

#[test]
fn published_vocabularies_give_the_ids_that_come_with_them() {
    let Some(folder) = folder("MIXFLEET_VOCABULARIES", MODELS) else { return };
    let (mut texts, mut encoders) = (0, 0);
    for file in files(&folder, ".gguf") {
        let beside = |end: &str| std::fs::read_to_string(format!("{}{end}", file.display())).ok();
        let tokenizer = match Tokenizer::open(&file) {
            Ok(tokenizer) => tokenizer,
            Err(error) if file.to_string_lossy().contains("bert") => {
                assert!(error.to_string().contains("encoder"), "{error}");
                encoders += 1;
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let (Some(input), Some(output)) = (beside(".inp"), beside(".out")) else { continue };
        for (text, line) in input.split("\n__ggml_vocab_test__\n").zip(output.lines()) {
            let ids: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode_chat(text).unwrap(), ids, "{}: {text:?}", file.display());
            texts += 1;
        }
    }
    assert!(texts > 500 && encoders == 2, "{texts} texts, {encoders} vocabularies of encoders");
}

#[test]
fn generated_texts_have_the_ids_of_llama_cpp_in_every_vocabulary() {
    let Some(folder) = folder("MIXFLEET_VOCABULARY_CASES", "target/ggml/vocabularies") else { return };
    let mut wrong = Vec::new();
    for file in files(&folder, ".json") {
        let cases: Vec<(String, Vec<u32>)> =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).expect("texts and ids");
        let tokenizer = Tokenizer::open(&file.with_extension("gguf")).unwrap();
        let other = |(text, ids): &&(String, Vec<u32>)| tokenizer.encode(text).unwrap() != *ids;
        let others: Vec<_> = cases.iter().filter(other).collect();
        if let Some((text, ids)) = others.first() {
            let (name, count) = (file.display(), others.len());
            let found = tokenizer.encode(text).unwrap();
            wrong.push(format!("{name}: {count} of {}, {text:?}: {found:?}, expected {ids:?}", cases.len()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_rules_of_every_name_are_expressions_that_divide_text() {
    let mut seen = Vec::new();
    for name in pre::names() {
        assert!(!seen.contains(&name), "{name} occurs twice");
        seen.push(name);
        for expression in pre::named(name).expect("rules").expressions {
            let pattern = tokenizers::pre_tokenizers::split::SplitPattern::Regex((*expression).to_owned());
            let isolated = tokenizers::SplitDelimiterBehavior::Isolated;
            let split = tokenizers::pre_tokenizers::split::Split::new(pattern, isolated, false);
            assert!(split.is_ok(), "{name}: {expression}");
        }
    }
    assert!(seen.len() > 85, "{}", seen.len());
    assert_eq!(pre::named("no-such-name"), None);
}
