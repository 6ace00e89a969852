//! What users of other programs are used to: short names, units, completions, manual pages, plain messages.

use crate::common::server::Server;
use crate::common::{mixfleet, scratch};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

fn ended(words: &[&str]) -> (Option<i32>, String, String) {
    let output = mixfleet().args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn beginnings_of_parts_and_repositories_of_models_are_names() {
    let (code, out, said) =
        ended(&["compare", "--model", "meta-llama/Llama-3.1-8B-Instruct", "h100-sxm", "l40s"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("H100-SXM-80GB") && out.contains("L40S"), "{out}");
    for (words, told) in [
        (&["compare", "--model", "llama-3.1-8b", "h100"][..], "'h100' may be any of H100-"),
        (&["fit", "--device", "h100"], "'h100' may be any of H100-"),
        (&["fit", "--device", "l40s", "qwen3"], "'qwen3' may be any of qwen3-0.6b, "),
        (&["models", "llama-3.1"], "llama-3.1-70b"),
        (&["generate", "--prompt", "x", "--device", "sim:h100"], "'h100' may be any of H100-"),
    ] {
        let (code, _, said) = ended(words);
        assert!(code == Some(2) && said.contains(told), "{words:?}: {code:?} {said}");
    }
    let fit = ["fit", "--device", "rtx4090", "Qwen/Qwen3-0.6B", "--dtype", "bf16", "--context", "2k"];
    let (code, out, said) = ended(&fit);
    assert!(code == Some(0) && out.contains("qwen3-0.6b") && out.contains("2000 tokens"), "{out}{said}");
}

#[test]
fn units_are_read_by_all_commands() {
    let (code, out, said) = ended(&[
        "serve",
        "--dry-run",
        "--ttft-slo",
        "500ms",
        "--drain-s",
        "1m",
        "--kv-memory",
        "4GB",
        "--requests",
        "1k",
        "--json",
    ]);
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("500ms") && out.contains("4GB"), "{out}");
    let (code, _, said) = ended(&["serve", "--dry-run", "--ttft-slo", "500 parsecs"]);
    assert!(code == Some(2) && said.contains("500ms, 90s, 10m or 2h"), "{said}");
}

#[test]
fn completions_offer_parts_models_and_files() {
    let (code, script, said) = ended(&["completions", "bash"]);
    assert_eq!(code, Some(0), "{said}");
    let offered = |words: &[&str]| {
        let words: String = words.iter().map(|word| format!("'{word}' ")).collect();
        let asked = format!(
            "{script}\nCOMP_WORDS=({words})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
             _mixfleet mixfleet \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"\necho \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash").args(["-c", &asked]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(offered(&["mixfleet", "compare", "--model", "qwen3-0"]).trim(), "qwen3-0.6b");
    assert!(offered(&["mixfleet", "compare", "l40"]).contains("l40s"));
    assert!(offered(&["mixfleet", "serve", "--fleet", "Carg"]).contains("Cargo.toml"), "files of this crate");
    assert!(offered(&["mixfleet", "serve", "--rebalance-h"]).contains("--rebalance-high"));
}

#[test]
fn manual_pages_have_examples_and_exit_codes() {
    let folder = scratch("habits-man");
    let (code, _, said) = ended(&["man", folder.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    let page = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let serve = page("mixfleet-serve.1");
    for section in [".SH NAME", ".SH OPTIONS", ".SH EXAMPLES", ".SH \"EXIT STATUS\"", "rebalance\\-high"] {
        assert!(serve.contains(section), "{section}");
    }
    assert!(page("mixfleet-trace-stats.1").contains("mixfleet trace stats trace.jsonl"));
    assert!(page("mixfleet.1").contains("2: usage"));
    assert!(!folder.join("mixfleet-check-files.1").exists());
}

#[test]
fn a_bench_whose_requests_fail_fails() {
    let server = Server::start(&["--device", "cpu"]);
    let url = format!("http://{}", server.address);
    let asked = ["bench", "--against", &url, "--served-model", "nope", "--clients", "1", "--requests", "2"];
    let (code, out, said) = ended(&asked);
    assert_eq!(code, Some(1), "{out}{said}");
    assert!(said.contains("2 requests failed") && out.contains("2 times"), "{out}{said}");
    assert!(!out.contains("0.00"), "{out}");
}

#[test]
fn a_server_listens_at_its_host_and_port() {
    let server = Server::start(&["--device", "cpu", "--host", "localhost", "--port", "0"]);
    assert!(
        server.address.starts_with("127.0.0.1:") || server.address.starts_with("[::1]:"),
        "{}",
        server.address
    );
}

#[test]
fn a_server_without_engines_says_that_it_waits_for_them() {
    let mut command = mixfleet();
    command.args(["serve", "--worker-engine", "vllm:http://127.0.0.1:9", "--port", "0"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let address = loop {
        let mut line = String::new();
        assert!(log.read_line(&mut line).unwrap() > 0, "it ended");
        if let Some((_, rest)) = line.split_once("address=") {
            assert!(line.contains("no external engine has answered yet"), "{line}");
            break rest.split_whitespace().next().unwrap().to_owned();
        }
    };
    let mut stream = TcpStream::connect(&address).unwrap();
    write!(stream, "GET /v1/models HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // before and after the first probe
    let says = ["no external engine has answered yet", "no engine answers: vllm:127.0.0.1:9 is down"];
    assert!(
        answer.starts_with("HTTP/1.1 503") && says.iter().any(|words| answer.contains(words)),
        "{answer}"
    );
}
