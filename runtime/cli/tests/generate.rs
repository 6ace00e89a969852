//! `mixfleet generate`: many copies of a prompt, many runs in a process, models of random weights.

use crate::common::{fixture, mixfleet, scratch};
use serde_json::{Value, json};
use std::process::Output;

fn generate(arguments: &[&str]) -> Output {
    mixfleet().args(["generate", "--device", "cpu", "--kv-memory", "0.02"]).args(arguments).output().unwrap()
}

fn document(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_first_of_a_batch_answers_as_one_alone() {
    let arguments =
        ["--prompt", "Once", "--max-tokens", "12", "--ignore-eos", "--temperature", "1", "--json"];
    let alone = document(&generate(&arguments));
    let batch = document(&generate(&[&arguments[..], &["--batch", "3"]].concat()));
    assert_eq!((&batch["ids"], &batch["text"]), (&alone["ids"], &alone["text"]));
    assert_eq!((&alone["batch"], &batch["batch"]), (&json!(1), &json!(3)));
    assert_eq!(alone["tokens_measured"], 11);
    assert!(alone["tokens_per_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn each_line_of_a_file_is_a_run_that_fails_alone() {
    let file = scratch("generate-each").join("runs");
    let model = fixture("llama-gqa-f32").display().to_string();
    let run = |ids: &str, more: &[&str]| {
        let words =
            ["--prompt-ids", ids, "--max-tokens", "3", "--ignore-eos", "--device", "cpu", "--kv-memory"];
        let words: Vec<&str> = words.iter().copied().chain(["0.02"]).chain(more.iter().copied()).collect();
        json!(words).to_string()
    };
    let lines = [
        run("5,6,7", &[]),
        run("999999", &[]),
        String::new(),
        run("5,6,7", &["--model", &model, "--batch", "2"]),
        run("5,6,7", &["--model", &model]),
        run("5,6,7", &[]),
        // another engine, which cannot be made
        run("5,6,7", &["--attn-split", "head"]),
    ];
    std::fs::write(&file, lines.join("\n")).unwrap();
    let output = mixfleet().args(["generate", "--each"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("2 of 6 runs failed"), "{said}");
    let text = String::from_utf8_lossy(&output.stdout);
    let documents: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(documents.len(), 6, "{text}");
    assert_eq!(documents[0]["ids"].as_array().unwrap().len(), 3);
    assert!(documents[1]["error"].as_str().unwrap().contains("not below the model's vocabulary"), "{text}");
    assert_eq!(documents[2]["ids"], documents[3]["ids"]);
    assert_eq!(documents[0]["ids"], documents[4]["ids"]);
    assert!(documents[5]["error"].as_str().unwrap().contains("'attn:DEV,DEV'"), "{text}");
}

#[test]
fn a_file_of_runs_is_checked_before_the_first() {
    let file = scratch("generate-checked").join("runs");
    let good = r#"["--prompt-ids", "5", "--max-tokens", "1"]"#;
    for (bad, why) in [
        ("--prompt x", "expected a JSON array of arguments"),
        (r#"["--prompt-ids", "5", "--frobnicate"]"#, "--frobnicate"),
        (r#"["--each", "runs"]"#, "cannot have --each"),
    ] {
        std::fs::write(&file, format!("{good}\n{bad}\n")).unwrap();
        let output = mixfleet().args(["generate", "--each"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{bad}: {said}");
        assert!(said.contains("line 2: ") && said.contains(why), "{bad}: {said}");
        assert!(output.stdout.is_empty(), "{bad}");
    }
    let output = mixfleet().args(["generate", "--each", "x", "--prompt", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_model_of_a_known_shape_runs_with_weights_that_the_device_copies() {
    let model = ["--model", "random:qwen2.5-0.5b", "--prompt-ids", "5,6,70000", "--max-tokens", "3"];
    let answer = document(&generate(&[&model[..], &["--ignore-eos", "--json", "--chunk", "16"]].concat()));
    let ids: Vec<u64> = answer["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert!(ids.len() == 3 && ids.iter().all(|&id| id < 151_936), "{answer}");
    for (name, code, why) in [
        ("random:llama-8b", 2, "closest: "),
        ("random:mixtral-8x7b", 3, "experts, latent attention and linear attention are not supported"),
        ("random:gpt-oss-20b", 3, "not supported"),
    ] {
        let output = generate(&["--model", name, "--prompt-ids", "5"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && said.contains(why), "{name}: {said}");
    }
}
