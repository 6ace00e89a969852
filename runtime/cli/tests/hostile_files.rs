//! Files that recurse, allocate, hang or write to the terminal are refused, and no process dies of them.

#![cfg(target_os = "linux")]

use crate::common::{fixture, mixfleet, scratch};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors",
];

/// A checkpoint of links to a fixture's files.
fn checkpoint(name: &str) -> PathBuf {
    let directory = scratch(name);
    for entry in fs::read_dir(fixture("llama-gqa-f32")).unwrap() {
        let file = entry.unwrap().path().canonicalize().unwrap();
        symlink(&file, directory.join(file.file_name().unwrap())).unwrap();
    }
    directory
}

fn replace(directory: &Path, name: &str, text: &str) {
    let file = directory.join(name);
    let _ = fs::remove_file(&file);
    fs::write(file, text).unwrap();
}

/// The exit code and all output of a command, which ends soon.
fn ended(words: &[&str]) -> (Option<i32>, String) {
    let mut command = mixfleet();
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(240) {
            child.kill().unwrap();
            panic!("{words:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

fn checked(directory: &Path) -> (Option<i32>, String) {
    ended(&["models", "--check", directory.to_str().unwrap()])
}

#[test]
fn a_template_that_dies_is_refused_by_its_name() {
    let directory = checkpoint("template-dies");
    let nests = "{% set ns = namespace(a=[]) %}{% for i in range(12000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}";
    for (template, told) in [
        (nests, "overflows the stack"),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "by its attributes only"),
    ] {
        replace(&directory, "chat_template.jinja", template);
        let (code, said) = checked(&directory);
        assert!(code.is_some_and(|code| code == 1 || code == 3) && said.contains(told), "{code:?}: {said}");
        let model = directory.to_str().unwrap();
        let (code, said) = ended(&["generate", "--model", model, "--prompt", "a", "--max-tokens", "1"]);
        assert!(matches!(code, Some(1 | 3)) && said.contains(told), "{code:?}: {said}");
        assert!(told.starts_with("by") || said.contains("chat_template.jinja: "), "{said}");
    }
}

#[test]
fn a_tokenizer_that_multiplies_text_is_refused() {
    let directory = checkpoint("tokenizer-multiplies");
    let file = fs::read(fixture("llama-gqa-f32").join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&file).unwrap();
    let twice = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"});
    for normalizer in [
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": "x".repeat(1 << 20)}),
        json!({"type": "Prepend", "prepend": "x".repeat(1 << 20)}),
        json!({"type": "Sequence", "normalizers": vec![twice; 16]}),
    ] {
        tokenizer["normalizer"] = normalizer;
        replace(&directory, "tokenizer.json", &tokenizer.to_string());
        let (code, said) = checked(&directory);
        // the last one takes all memory that the child may have before its growth is seen
        let is_refused = said.contains("may make text") || said.contains("takes more than");
        assert!(code == Some(1) && is_refused, "{code:?}: {said}");
    }
}

#[test]
fn what_is_no_regular_file_is_refused_in_place_of_any() {
    for name in FILES {
        for kind in ["fifo", "device", "directory", "loop"] {
            let directory = checkpoint("no-file");
            let file = directory.join(name);
            fs::remove_file(&file).ok();
            match kind {
                "fifo" => assert!(Command::new("mkfifo").arg(&file).status().unwrap().success()),
                "device" => symlink("/dev/zero", &file).unwrap(),
                "directory" => fs::create_dir(&file).unwrap(),
                _ => symlink(&file, &file).unwrap(),
            }
            let (code, said) = checked(&directory);
            assert!(code == Some(1) && said.contains(name), "{kind} {name}: {code:?}: {said}");
        }
    }
}

#[test]
fn no_command_waits_for_a_pipe_that_nobody_writes_to() {
    let fifo = scratch("pipe").join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let fifo = fifo.to_str().unwrap();
    for words in [
        vec!["serve", "--api-keys", fifo, "--listen", "127.0.0.1:0"],
        vec!["compare", "--model", "llama-3.1-8b", "--prices", fifo],
        vec!["simulate", "--fleet", fifo, "--closed-loop", "1"],
        vec!["profile", "check", fifo],
        vec!["replay", fifo],
        vec!["trace", "stats", fifo],
        vec!["generate", "--model", fifo, "--prompt", "a"],
    ] {
        let (code, said) = ended(&words);
        assert!(code != Some(0) && !said.is_empty(), "{words:?}: {code:?}: {said}");
    }
}

#[test]
fn deep_json_is_an_error_in_each_file() {
    let deep = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for name in FILES.iter().filter(|name| name.ends_with(".json")) {
        let directory = checkpoint("deep");
        replace(&directory, name, &deep);
        let (code, said) = checked(&directory);
        assert!(code == Some(1) && said.contains(name), "{name}: {code:?}: {said}");
    }
}

#[test]
fn names_from_files_do_not_control_the_terminal() {
    let name = "\x1b]0;owned\x07\u{9b}31m\u{202e}txt";
    let directory = checkpoint("escapes");
    replace(&directory, "config.json", &json!({"model_type": name}).to_string());
    let named = directory.with_file_name(name);
    let _ = fs::remove_dir_all(&named);
    fs::rename(&directory, &named).unwrap();
    let (code, said) = checked(&named);
    assert_eq!(code, Some(1), "{said}");
    let controls = ['\x1b', '\x07', '\u{9b}', '\u{202e}'];
    assert!(said.contains(r"\u001b]0;owned\u0007") && !said.contains(controls), "{said:?}");
}
