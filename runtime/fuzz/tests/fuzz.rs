//! Runs every parser of outside bytes on the inputs of its corpus and a bounded number of mutations of them.
//!
//! `MIXFLEET_FUZZ_CASES` sets the number of mutations, in place of each target's own, and
//! `MIXFLEET_FUZZ_SEED` selects them.

#![allow(clippy::print_stdout, reason = "the numbers")]

use mixfleet_fuzz::{TARGETS, campaign, target};

/// Default seed of the mutations.
const SEED: u64 = 20_261_122;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn run(name: &str) {
    let target = target(name).expect("it is in the table");
    let corpus = campaign::corpus(name).expect("its corpus can be read");
    let cases = number("MIXFLEET_FUZZ_CASES").unwrap_or(target.cases);
    let inputs = corpus.len() as u64 + cases;
    let taken = campaign::run(target, corpus, cases, number("MIXFLEET_FUZZ_SEED").unwrap_or(SEED));
    println!("{name}: {inputs} inputs, {taken} accepted");
}

/// Defines a test for each target, so that a failure shows the target's name.
macro_rules! tests {
    ($($name:ident)*) => {
        const TESTED: &[&str] = &[$(stringify!($name)),*];
        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*
    };
}

tests! {
    api_keys certificates chat_body chat_template completion_body config_json descriptor device_profile
    engine_profile event_log fleet_file gguf http_address http_connection kv_write part_file pool_files
    registry_record remote_device rpc_message safetensors safetensors_index tcp_stream tokenizer_config tokenizer_json trace
    traceparent wire_words
}

#[test]
fn every_target_has_a_test_and_a_corpus_and_every_corpus_a_target() {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, TESTED);
    let directory = campaign::corpus_directory("");
    let mut corpora: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    corpora.sort();
    assert_eq!(corpora, names);
    for name in names {
        assert!(!campaign::corpus(name).unwrap().is_empty(), "{name} has no inputs");
    }
}
