//! Promises of the command line to its users.

use crate::common::server::Server;
use crate::common::{fixture, mixfleet, scratch};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The end of a command, with what it was given on standard input.
fn ended(words: &[&str], input: &str) -> (Option<i32>, String, String) {
    let mut command = mixfleet();
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // a command that does not read may have ended already
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    in_text(&child.wait_with_output().unwrap())
}

fn in_text(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Asserts that a command reports its mistake in one line that contains these texts.
fn refused(words: &[&str], told: &str) {
    let (code, out, said) = ended(words, "");
    assert_eq!((code, out.as_str()), (Some(2), ""), "{words:?}: {said}");
    assert!(said.contains(told), "{words:?}: {said}");
}

/// The only folder in a folder.
fn only_entry(folder: &Path) -> PathBuf {
    let entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [one] = &entries[..] else { panic!("{entries:?}") };
    one.clone()
}

#[test]
fn a_device_that_is_not_there_is_one_line_and_leaves_nothing() {
    let data = scratch("manners-no-device");
    for device in ["nope", "cpu@999"] {
        for command in ["validate", "profile"] {
            let output = mixfleet().env("XDG_DATA_HOME", &data).args([command, "--device", device]).output();
            let (code, _, said) = in_text(&output.unwrap());
            assert_eq!((code, said.lines().count()), (Some(2), 1), "{command} {device}: {said}");
            assert!(said.contains(device), "{said}");
        }
    }
    assert_eq!(std::fs::read_dir(data).unwrap().count(), 0);
}

#[test]
fn a_report_without_a_folder_is_kept_and_its_place_told() {
    let data = scratch("manners-default-folder");
    let output = mixfleet()
        .env("XDG_DATA_HOME", &data)
        .args(["validate", "--device", "cpu", "--only", "l1.fill"])
        .output();
    let (code, out, said) = in_text(&output.unwrap());
    assert_eq!(code, Some(0), "{said}");
    let folder = only_entry(&data.join("mixfleet/reports"));
    assert!(said.starts_with(&format!("the report goes to {}", folder.display())), "{said}");
    let page = folder.join("report.html");
    assert!(out.contains(&page.display().to_string()) && page.is_file(), "{out}");
}

#[test]
fn an_interrupted_validation_ends_its_children_and_goes_on_later() {
    let data = scratch("manners-interrupted");
    // what children inherit and other tests' children do not have
    let mark = format!("MIXFLEET_TEST_MARK={}", data.display());
    let (name, value) = mark.split_once('=').unwrap();
    let words = ["validate", "--device", "cpu", "--only", "l1.gemm,l1.attn_prefill"];
    let mut command = mixfleet();
    command
        .env(name, value)
        .env("XDG_DATA_HOME", &data)
        .args(words)
        .stderr(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut seen = String::new();
    while !seen.contains("validate: l1.gemm") {
        assert!(said.read_line(&mut seen).unwrap() > 0, "it ended: {seen}");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    said.read_to_string(&mut seen).unwrap();
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3), "{seen}");
    let folder = only_entry(&data.join("mixfleet/reports"));
    assert!(seen.contains(&format!("continue it with --resume --out {}", folder.display())), "{seen}");
    assert!(out.contains("INCOMPLETE") && folder.join("report.html").is_file(), "{out}");
    let of_ours = |entry: std::io::Result<std::fs::DirEntry>| {
        let variables = std::fs::read(entry.ok()?.path().join("environ")).ok()?;
        variables.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()).then_some(())
    };
    let left = std::fs::read_dir("/proc").map_or(0, |all| all.filter_map(of_ours).count());
    assert_eq!(left, 0, "a child lives on");
    let resumed = mixfleet().args(words).arg("--resume").arg("--out").arg(&folder).output().unwrap();
    let (code, out, said) = in_text(&resumed);
    assert!(code == Some(0) && out.contains("PARTIAL"), "{out}{said}");
}

#[test]
fn a_reader_that_leaves_ends_a_command_quietly() {
    for words in [&["parts"][..], &["models"], &["explain"], &["compare", "--help"]] {
        let mut command = mixfleet();
        let mut child = command.args(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let (code, _, said) = in_text(&child.wait_with_output().unwrap());
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
    }
    // standard error may be the one that is closed
    let line = "\"$0\" validate --device cpu --only l1.fill 2>&1 >/dev/null | head -n 1";
    let mut shell = Command::new("sh");
    mixfleet().get_envs().filter_map(|(name, value)| Some((name, value?))).for_each(|(name, value)| {
        shell.env(name, value);
    });
    let (code, out, said) =
        in_text(&shell.args(["-c", line]).arg(mixfleet().get_program()).output().unwrap());
    assert!(code == Some(0) && out.starts_with("the report goes to") && said.is_empty(), "{out}{said}");
}

#[test]
fn libraries_do_not_write_to_the_terminal() {
    let (code, _, said) = in_text(&mixfleet().env_remove("XDG_RUNTIME_DIR").arg("devices").output().unwrap());
    assert_eq!((code, said.as_str()), (Some(0), ""));
}

#[test]
fn devices_are_watched_as_often_as_asked() {
    let words = ["devices", "--watch", "--device", "cpu", "--every", "0.05", "--count", "2"];
    let (code, out, said) = ended(&words, "");
    assert_eq!((code, out.matches("memory GiB").count()), (Some(0), 2), "{out}{said}");
    assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");
    let (code, out, said) = ended(&[&words[..], &["--json"]].concat(), "");
    assert_eq!((code, out.lines().count()), (Some(0), 2), "{out}{said}");
    for line in out.lines() {
        let devices = &serde_json::from_str::<Value>(line).unwrap()["devices"];
        assert_eq!(devices[0]["id"], "cpu", "{line}");
        let (all, used) = (&devices[0]["memory_bytes"], &devices[0]["memory_used_bytes"]);
        assert!(used.as_f64().unwrap() > 0.0 && used.as_f64() < all.as_f64(), "{line}");
    }
    refused(&["devices", "--every", "1"], "--watch");
    refused(&["devices", "--watch", "--device", "nope:0"], "nope:0");
}

#[test]
fn the_faults_of_the_manual_are_found() {
    let page = include_str!("../../../docs/how-to/validate-your-part.md");
    let plan = page.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = scratch("manners-faults");
    let written = folder.join("plan.json");
    std::fs::write(&written, plan).unwrap();
    let device =
        page.split("--device 'sim:rtx-4090").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
    let device = format!("sim:rtx-4090{}", device.replace("plan.json", written.to_str().unwrap()));
    let report = folder.join("report");
    let words = ["validate", "--only", "l1.gemm", "--device", &device, "--out", report.to_str().unwrap()];
    let (code, out, said) = ended(&words, "");
    assert_eq!(code, Some(1), "{out}{said}");
    assert!(out.contains("FAIL"), "{out}");
}

#[test]
fn mistakes_are_told_with_what_to_do() {
    refused(&["generate", "--model", "Qwen/Qwen3-0.6B", "--prompt", "x"], "hf download Qwen/Qwen3-0.6B");
    let file = fixture("llama-gqa-f32").join("model.safetensors");
    let file = file.to_str().unwrap();
    refused(&["generate", "--model", file, "--prompt", "x"], "name the directory that it is in");
    refused(&["profile", "--links", "--device", "cpu"], "cannot be used with");
    refused(&["profile", "--links", "--html", "x.html"], "cannot be used with");
    refused(&["devices", "--backend", "loops.so"], "goes before the command");
    refused(&["explain", "tfft"], "near it: ttft");
    refused(&["validate", "--device", "cpu", "--only", "l1.gem"], "near it: l1.gemm");
    refused(&["profile", "--device", "cpu", "--only", "lunch"], "near it: launch");
    refused(&["serve", "--devise", "cpu"], "a similar argument exists: '--device'");
    refused(&["parts", "no such part"], "no part has 'no such part'");
    let fleet = scratch("manners-fleet").join("FLEET.toml");
    std::fs::write(&fleet, "[pool]\nname = 'a'\n").unwrap();
    let (_, _, said) = ended(&["simulate", "--fleet", fleet.to_str().unwrap(), "--trace", "x"], "");
    assert!(said.contains("FLEET.toml") && said.contains("[[like this]]"), "{said}");
}

#[test]
fn a_checkpoint_is_looked_at_before_it_is_loaded() {
    let served = fixture("llama-gqa-f32");
    let served = served.to_str().unwrap();
    let (code, out, said) = ended(&["models", "--check", served], "");
    assert_eq!((code, out.contains("NOT SUPPORTED")), (Some(0), false), "{out}{said}");
    let (_, out, _) = ended(&["models", "--check", served, "--json"], "");
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&document["served"], document["parts"].as_array().unwrap().is_empty()),
        (&json!(true), false)
    );
    let folder = scratch("manners-check");
    std::fs::write(folder.join("config.json"), r#"{"model_type": "gpt5"}"#).unwrap();
    let (code, out, said) = ended(&["models", "--check", folder.to_str().unwrap()], "");
    assert_eq!(code, Some(1), "{out}{said}");
    assert!(out.contains("'gpt5' is not supported") && said.contains("would not be served"), "{out}{said}");
    refused(&["models", "--check", "/no/such/checkpoint"], "cannot read /no/such/checkpoint");
    refused(&["models", "--check", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B");
}

#[test]
fn words_and_parts_are_found_by_name() {
    for (word, told) in
        [("ttft", "first token"), ("tbt", "Time between"), ("goodput", "objectives"), ("ridge", "arithmetic")]
    {
        let (code, out, _) = ended(&["explain", word], "");
        assert!(code == Some(0) && out.contains(told), "{word}: {out}");
    }
    let (_, out, _) = ended(&["parts", "rtx-40"], "");
    let rows: Vec<&str> = out.lines().filter(|line| line.starts_with("RTX-")).collect();
    assert!(!rows.is_empty() && rows.iter().all(|row| row.starts_with("RTX-40")), "{out}");
    let (_, all, _) = ended(&["parts"], "");
    assert!(all.lines().count() > out.lines().count() + 20, "{all}");
}

#[test]
fn what_comes_on_standard_input_is_read() {
    let trace = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 2]}\n\
                 {\"timestamp\": 9, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 3]}\n";
    let (code, out, said) = ended(&["trace", "stats", "-"], trace);
    assert!(code == Some(0) && out.starts_with("standard input (mooncake): 2 requests"), "{out}{said}");
    let (code, out, said) =
        ended(&["generate", "--device", "cpu", "--max-tokens", "4", "--prompt", "-"], "hello");
    assert_eq!(code, Some(0), "{said}");
    let direct = ended(&["generate", "--device", "cpu", "--max-tokens", "4", "--prompt", "hello"], "").1;
    assert!(
        out == direct && said.contains("4 tokens") && said.contains("tokens/s"),
        "{out:?} {direct:?} {said}"
    );
}

#[test]
fn a_conversation_goes_on_until_its_end_or_a_new_one() {
    let words = ["chat", "--device", "cpu", "--max-tokens", "8", "--temperature", "0"];
    let (code, out, said) = ended(&words, "hello\n\nagain\n/new\nhello\n");
    assert_eq!(code, Some(0), "{said}");
    let again = ended(&words, "hello\n").1;
    assert!(
        !again.trim().is_empty() && out.starts_with(&again) && out.ends_with(&again),
        "{out:?} {again:?}"
    );
    assert!(out.len() > 2 * again.len(), "the second answer is missing: {out:?}");
    let (code, _, said) = ended(&words, "a <|end|> of my own\n");
    assert!(code == Some(0) || said.contains("special token"), "{said}");
    let (code, _, said) = ended(&words, &format!("{}\n", "long ".repeat(5000)));
    assert!(code == Some(3) && said.contains("context"), "{said}");
}

#[test]
fn a_model_is_measured_here_and_at_a_server_alike() {
    let server = Server::start(&["--device", "cpu"]);
    let url = format!("http://{}", server.address);
    let page = scratch("manners-bench").join("bench.html");
    let small = ["--prompt-tokens", "32", "--answer-tokens", "8", "--repeat", "2", "--json"];
    let words =
        [&["bench", "--device", "cpu", "--against", &url, "--html", page.to_str().unwrap()], &small[..]];
    let (code, out, said) = ended(&words.concat(), "");
    assert_eq!(code, Some(0), "{said}");
    let document: Value = serde_json::from_str(&out).unwrap();
    let tests: Vec<String> = document["tests"]
        .as_array()
        .unwrap()
        .iter()
        .map(|test| test["test"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(tests, ["pp32", "pp32", "tg8", "tg8"], "{out}");
    let is_rate = |value: &Value| value.as_f64().is_some_and(|rate| rate > 0.0);
    assert!(
        document["tests"]
            .as_array()
            .unwrap()
            .iter()
            .all(|test| { is_rate(&test["tokens_per_s"]) && test["samples"].as_array().unwrap().len() == 2 })
    );
    assert!(std::fs::read_to_string(page).unwrap().contains("tg8"));

    let load = ["bench", "--against", &url, "--clients", "2", "--requests", "5", "--ttft-slo", "1e-9"];
    let (code, out, said) = ended(&[&load[..], &small].concat(), "");
    assert_eq!(code, Some(0), "{said}");
    let document: Value = serde_json::from_str(&out).unwrap();
    let load = &document["loads"][0];
    assert_eq!(
        (&load["answered"], &load["within"], &load["ttft_s"]["count"]),
        (&json!(5), &json!(0), &json!(5))
    );
    assert_eq!(load["tbt_s"]["count"], 5 * 7, "{out}");

    let file = scratch("manners-bench-trace").join("trace.jsonl");
    let line = |at: u32, last: u32| {
        json!({"timestamp": at, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, last]})
            .to_string()
    };
    std::fs::write(&file, [line(0, 3), line(20, 4)].join("\n")).unwrap();
    let (code, out, said) =
        ended(&["bench", "--device", "cpu", "--trace", file.to_str().unwrap(), "--json"], "");
    assert_eq!(code, Some(0), "{said}");
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&document["loads"][0]["answered"], &document["loads"][0]["failures"]),
        (&json!(2), &json!([]))
    );
    refused(&["bench", "--clients", "2", "--trace", "x"], "cannot be used with");
}

#[test]
fn a_version_says_what_was_built() {
    let (code, out, _) = ended(&["--version"], "");
    assert_eq!(code, Some(0));
    for words in ["mixfleet ", "commit: ", "features: ", "build: "] {
        assert!(out.contains(words), "{out}");
    }
    assert_eq!(out.contains("opencl"), cfg!(feature = "opencl"), "{out}");
    assert_eq!(ended(&["-V"], "").1.lines().count(), 1);
}

#[test]
fn shells_and_man_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = ended(&["completions", shell], "");
        assert!(code == Some(0) && out.contains("validate") && out.contains("self-test"), "{shell}: {out}");
    }
    let folder = scratch("manners-man").join("man1");
    let (code, _, said) = ended(&["man", folder.to_str().unwrap()], "");
    assert_eq!(code, Some(0), "{said}");
    for page in ["mixfleet.1", "mixfleet-serve.1", "mixfleet-trace-stats.1"] {
        let text = std::fs::read_to_string(folder.join(page)).unwrap();
        assert!(text.contains(".TH") && text.contains("SYNOPSIS"), "{page}: {text}");
    }
}
