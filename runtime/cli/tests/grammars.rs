//! Trials of grammars in child processes: for any grammar, the trial ends by itself.

use crate::common::mixfleet;
use mixfleet_hal::random::Stream;
use serde_json::{Value, json};
use std::io::Write;
use std::process::{ExitStatus, Stdio};

/// Runs the trial of a grammar, and returns its exit and its message. The tests' time limit ends a trial that
/// hangs.
fn tried(grammar: &Value) -> (ExitStatus, Vec<u8>) {
    let question = json!({"grammar": grammar, "vocab": 1000, "specials": [[0, [60, 124, 62]]]}).to_string();
    let mut command = mixfleet();
    command.arg("grammar-trial").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    // a child that ends early closes its input
    let _ = child.stdin.take().unwrap().write_all(question.as_bytes());
    let output = child.wait_with_output().unwrap();
    (output.status, output.stdout)
}

/// A deep, wide or doubled grammar of some size.
fn generated(seed: u64) -> Value {
    let mut stream = Stream::new(seed);
    let mut below = |most: u64| stream.below(most) as usize;
    let size = 1 << below(14);
    let leaf = ["/[a-z]+[0-9]?/", "\"a\"", "/(a|b|cd)*(.|\\n){3,9}/", "<|>"][below(4)];
    let name = ["r", "T"][below(2)];
    let rules = |body: &dyn Fn(usize) -> String| {
        let lines: String = (0..size).map(|at| format!("{name}{at}: {}\n", body(at + 1))).collect();
        json!({"lark": format!("start: {name}0\n{lines}{name}{size}: {leaf}\n")})
    };
    let definitions = |body: &dyn Fn(usize) -> Value| {
        let mut all: serde_json::Map<_, _> = (0..size).map(|at| (format!("d{at}"), body(at + 1))).collect();
        all.insert(format!("d{size}"), json!({"type": "string"}));
        json!({"json_schema": json!({"$ref": "#/$defs/d0", "$defs": all}).to_string()})
    };
    let to = |at: usize| json!({"$ref": format!("#/$defs/d{at}")});
    match below(8) {
        0 => rules(&|next| format!("\"x\" {name}{next}")),
        1 => rules(&|next| format!("{name}{next} {name}{next}")),
        2 => rules(&|next| format!("({name}{next} | \"y\"){{1,9}}")),
        3 => definitions(&|next| json!({"type": "object", "properties": {"x": to(next)}})),
        4 => definitions(&|next| json!({"allOf": [to(next), to(next)]})),
        5 => definitions(&|next| json!({"anyOf": [to(next), {"type": "array", "items": to(next)}]})),
        6 => {
            let names = (0..size).map(|at| (format!("p{at}"), json!({"type": "integer", "minimum": at})));
            let properties: serde_json::Map<_, _> = names.collect();
            json!({"json_schema": json!({"type": "object", "properties": properties}).to_string()})
        }
        _ => json!({"regex": format!("{}a{}", "(".repeat(size), "b?){1,3}".repeat(size))}),
    }
}

#[test]
fn every_trial_of_a_generated_grammar_ends() {
    let seeds = std::env::var("MIXFLEET_GRAMMAR_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(48);
    let (mut compiled, mut refused) = (0, 0);
    for seed in 0..seeds {
        let (status, said) = tried(&generated(seed));
        let verdict: Option<Value> = serde_json::from_slice(&said).ok();
        match status.code() {
            Some(0) if verdict.as_ref().is_some_and(|verdict| verdict["Compiles"]["bytes"].is_u64()) => {
                compiled += 1;
            }
            Some(0) => {
                assert!(verdict.is_some_and(|verdict| verdict["Refused"].is_string()), "seed {seed}");
                refused += 1;
            }
            // it took too much time or memory, or a signal ended it
            Some(40 | 41) | None => refused += 1,
            Some(code) => panic!("seed {seed}: exit code {code}: {}", String::from_utf8_lossy(&said)),
        }
    }
    assert!(compiled > 0 && refused > 0, "{compiled} compiled, {refused} refused");
}
