//! What a new user sees in the first hour: messages that are true, and text where a device is simulated.

use crate::common::server::Server;
use crate::common::{mixfleet, scratch};
use serde_json::json;
use std::process::{Command, Output, Stdio};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A server with the timing of a part.
fn simulated() -> Server {
    Server::with(&["--model", "random:llama-3.1-8b", "--name", "m", "--device", "sim:rtx-4090"])
}

#[test]
fn simulated_tokens_are_text() {
    let server = simulated();
    let messages = json!([{"role": "user", "content": "Where does prefill run?"}]);
    let (status, answer) =
        server.post("/v1/chat/completions", &json!({"model": "m", "max_tokens": 16, "messages": messages}));
    assert_eq!(status, 200, "{answer}");
    let content = answer["choices"][0]["message"]["content"].as_str().expect("a content");
    assert!(!content.trim().is_empty(), "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 16, "{answer}");
}

/// The same file predicts what `serve` does: without a size in it, `simulate` takes the size that `serve`
/// logs.
#[test]
fn serve_and_simulate_size_steps_alike() {
    let server = simulated();
    let (_, sized) = server.seen.split_once(" chunk=").unwrap_or_else(|| panic!("{}", server.seen));
    let served: u32 = sized.split_whitespace().next().unwrap().parse().unwrap();
    let directory = scratch("first-hour-steps");
    let run = |name: &str, engine: &str| -> String {
        let fleet = format!(
            "version = 1\n[model]\nname = 'llama-3.1-8b'\n[engine]\nname = 'mixfleet'\n{engine}\n[[pool]]\n\
             name = 'all'\ndevice = 'RTX-4090'\n"
        );
        std::fs::write(directory.join(name), fleet).unwrap();
        let words = "--closed-loop 2 --requests 8 --input-tokens 3000..4000 --output-tokens 16..32 --json";
        let mut command = mixfleet();
        command.args(["simulate", "--fleet", name]).args(words.split(' ')).current_dir(&directory);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        // all but the file's own name and digest
        text(&output.stdout).lines().filter(|line| !line.contains("\"fleet")).collect()
    };
    let sized = |tokens: u32| run("sized.toml", &format!("max_batched_tokens = {tokens}"));
    let own = run("own.toml", "");
    assert!(own == sized(served), "serve has steps of {served} tokens");
    assert!(own != sized(served / 2), "the size does not matter here");
}

#[test]
fn a_size_that_an_option_set_names_the_option() {
    let mut server = Server::start(&["--device", "cpu"]);
    server.wait_for("sized;");
    assert!(server.seen.contains("kv_from=\"--kv-memory\""), "{}", server.seen);
    assert!(!server.seen.contains("a quarter"), "{}", server.seen);
}

/// The number of SIGINT.
const INTERRUPT: u32 = 2;

/// Whether a process handles interrupts.
fn handles_interrupts(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & (1 << (INTERRUPT - 1)) != 0)
}

#[test]
fn a_plan_that_is_interrupted_does_not_blame_its_budget() {
    let words = "plan --model llama-3.1-8b --rate 6 --input-tokens 8000 --output-tokens 350 --ttft 5 --tbt 0.05 \
                 --parts RTX-4090,L40S,H100-SXM-80GB --budget-s 600";
    let mut command = mixfleet();
    command.args(words.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    while !handles_interrupts(child.id()) {
        assert!(child.try_wait().unwrap().is_none(), "it ended");
        std::thread::yield_now();
    }
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
    let Output { stdout, stderr, .. } = child.wait_with_output().unwrap();
    let said = text(&stdout) + &text(&stderr);
    assert!(
        said.contains("it was stopped before all was simulated") || said.contains("by a signal"),
        "{said}"
    );
    assert!(!said.contains("--budget-s"), "{said}");
}

#[test]
fn a_chat_with_a_server_that_is_not_there_says_what_to_do() {
    for command in ["chat", "bench"] {
        let output = mixfleet().args([command, "--against", "http://127.0.0.1:9"]).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{command}: {said}");
        for words in ["127.0.0.1:9", "'mixfleet serve'", "correct the address", "cannot be reached"] {
            assert!(said.contains(words), "{command}: no '{words}' in {said}");
        }
    }
}

/// Admission rejects every request, so that no pool works at all.
#[test]
fn an_objective_that_all_requests_miss_is_named_with_a_remedy() {
    let directory = scratch("first-hour-missed");
    let fleet = "version = 1\n[model]\nname = 'llama-3.1-8b'\n[slo]\nttft_s = 0.05\ntbt_s = 0.02\n[[pool]]\n\
                 name = 'all'\ndevice = 'RTX-4090'\n";
    std::fs::write(directory.join("fleet.toml"), fleet).unwrap();
    let words = "simulate --fleet fleet.toml --closed-loop 1 --requests 8 --input-tokens 3000..4000";
    let output = mixfleet().args(words.split(' ')).current_dir(&directory).output().unwrap();
    let said = text(&output.stdout);
    assert!(said.contains("TTFT missed by 8 of 8 requests; all is idle at times"), "{said}");
    assert!(said.contains("a faster part") && !said.contains("nothing binds"), "{said}");
}
