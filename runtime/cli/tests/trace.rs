//! `mixfleet trace` from outside.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

fn trace(arguments: &[&str]) -> Output {
    mixfleet().arg("trace").args(arguments).output().expect("the binary runs")
}

fn stats(file: &Path, arguments: &[&str]) -> Value {
    let file = file.to_str().expect("UTF-8");
    let output = trace(&[&["stats", "--json", file], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON on standard output")
}

fn generated(name: &str, arguments: &[&str]) -> PathBuf {
    let path = scratch(&format!("trace-{name}")).join(name);
    let out = path.to_str().expect("UTF-8");
    let output = trace(&[&["generate", "--requests", "2000", "--out", out], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

#[test]
fn a_generated_trace_has_the_statistics_that_were_asked_for() {
    let path = generated("t.jsonl.zst", &["--rate", "2", "--hit-target", "0.6", "--seed", "3"]);
    let document = stats(&path, &["--capacity", "100,1000000", "--prefill"]);
    assert_eq!(document["schema"], "mixfleet.trace-stats/1");
    assert_eq!((&document["format"], &document["requests"]), (&"mooncake".into(), &2000.into()));
    let token = |pointer: &str| document.pointer(pointer).and_then(Value::as_f64).expect(pointer);
    let infinite = token("/prefix_hit/infinite/token");
    assert!((infinite - 0.6).abs() < 0.002, "{infinite}");
    // A cache that holds all is an infinite one; a small one hits less.
    assert_eq!(token("/prefix_hit/lru/1000000/token"), infinite);
    assert_eq!(token("/prefix_hit/lfu/1000000/token"), infinite);
    assert!(token("/prefix_hit/lru/100/token") < infinite / 2.0);
    assert!(token("/prefill_s/infinite_cache") < token("/prefill_s/no_cache"));
    assert!((token("/requests_per_s") / 2.0 - 1.0).abs() < 0.2);
}

#[test]
fn one_seed_gives_one_file_under_any_name() {
    let plain = std::fs::read(generated("a.jsonl", &["--seed", "5"])).unwrap();
    assert_eq!(plain, std::fs::read(generated("b.jsonl", &["--seed", "5"])).unwrap());
    assert_ne!(plain, std::fs::read(generated("c.jsonl", &["--seed", "6"])).unwrap());
    let output = trace(&["generate", "--requests", "2000", "--seed", "5"]);
    assert_eq!(plain, output.stdout, "standard output");
    let gzip = stats(&generated("d.gz", &["--seed", "5"]), &[]);
    assert_eq!(gzip, stats(&generated("e.jsonl", &["--seed", "5"]), &[]));
}

#[test]
fn a_replay_can_be_cut_sped_up_and_jittered() {
    let path = scratch("trace-replay").join("t.jsonl");
    let line = |at: u32| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": 700, \"output_length\": 2, \"hash_ids\": [1, {at}]}}\n"
        )
    };
    std::fs::write(&path, [0, 0, 3000, 3000, 9000].map(line).concat()).unwrap();
    let duration = |arguments: &[&str]| stats(&path, arguments)["duration_s"].as_f64().expect("seconds");
    assert_eq!(duration(&[]), 9.0);
    assert_eq!(duration(&["--speedup", "3"]), 3.0);
    assert_eq!(duration(&["--limit", "3"]), 3.0);
    let jittered = duration(&["--jitter", "--seed", "1"]);
    assert!(jittered > 6.0 && jittered < 12.0 && jittered != 9.0, "{jittered}");
    assert_eq!(jittered, duration(&["--jitter=3", "--seed", "1"]));
    let hit = |arguments: &[&str]| stats(&path, arguments)["prefix_hit"]["infinite"]["token"].clone();
    assert_ne!(hit(&[]), hit(&["--rechain", "1024"]));
}

#[test]
fn mistakes_have_their_exit_codes_and_words() {
    let path = scratch("trace-mistakes").join("t.jsonl");
    let good = "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}\n";
    std::fs::write(&path, format!("{good}{good}{{\"timestamp\": 0}}\n")).unwrap();
    let path = path.to_str().expect("UTF-8");
    let cases: [(&[&str], i32, &str); 13] = [
        (&["stats", path], 3, "line 3: missing field `input_length`"),
        (&["stats", "no-such-file"], 3, "no-such-file"),
        (&["stats", path, "--speedup", "0"], 2, "above 0"),
        (&["stats", path, "--policy", "fifo"], 2, "known: lru, lfu, length-aware"),
        (&["stats", path, "--prefill=1"], 2, "expected two numbers"),
        (&["stats", path, "--speedup", "1e-300"], 2, "above 0"),
        (&["stats", path, "--jitter=inf"], 2, "a positive number of seconds"),
        (&["generate", "--rate=-1"], 2, "above 0"),
        (&["generate", "--rate", "1e-320"], 2, "above 0"),
        (&["generate", "--rate", "1e-8"], 2, "must lie between 1e-6 and 1e4"),
        (&["generate", "--rate", "1e-5", "--requests", "18446744073709551615"], 2, "the longest"),
        (&["generate", "--rate", "1000", "--hit-target", "0.9"], 2, "out of reach"),
        (&["generate", "--hit-target", "2"], 2, "between 0 and 1"),
    ];
    for (arguments, code, words) in cases {
        let output = trace(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{arguments:?}: {errors}");
    }
    // Parts that do not need the bad line are replayed.
    assert!(trace(&["stats", path, "--limit", "2"]).status.success());
}

#[test]
fn the_table_fits_a_terminal() {
    let path = generated("table.jsonl", &[]);
    let output = trace(&["stats", path.to_str().expect("UTF-8"), "--prefill"]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.contains("2000 requests in") && text.contains("mean prefill: "), "{text}");
    assert!(text.lines().skip(1).all(|line| line.len() <= 80), "{text}");
}
