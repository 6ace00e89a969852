//! Several GPUs as one instance, over the CUDA driver in host memory of `backends/cuda/tests`: whole models,
//! and what the log says of how their members exchange.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common::server::Server;
use crate::common::{fixture, golden, ids, mixfleet, scratch};
use crate::gpu::libraries;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// The binary with three GPUs, of whose copies to each other the driver says this; none, with a message,
/// where the driver cannot be compiled.
fn with_gpus(cache: &Path, peers: &str) -> Option<Command> {
    let Some(driver) = libraries::directory(libraries::Driver::New) else {
        println!("SKIPPED: the fake driver needs g++ on x86-64 Linux");
        return None;
    };
    let mut command = mixfleet();
    command
        .env("LD_LIBRARY_PATH", driver)
        .env("XDG_CACHE_HOME", cache)
        .env("FAKE_CUDA_DIRECTORY", driver)
        .envs([("FAKE_CUDA_DEVICES", "3"), ("FAKE_CUDA_PEERS", peers)]);
    Some(command)
}

#[test]
fn several_gpus_as_one_instance_give_the_golden_tokens_whether_they_reach_each_other_or_not() {
    let (cache, fixture) = (scratch("peers-golden"), fixture("llama-gqa-f32"));
    let golden = golden(&fixture);
    let case = &golden["cases"][0];
    let prompt: Vec<String> = ids(&case["prompt_ids"]).iter().map(u32::to_string).collect();
    let expected = ids(&case["greedy_ids"])[..12].to_vec();
    let (two, three) = ("tp:cuda:0,cuda:1", "tp:cuda:0,cuda:1,cuda:2");
    let stages = "pp:(tp:cuda:0,cuda:1),cuda:2";
    // two members of one GPU as well, and one beside another backend
    for (devices, peers) in
        [(two, ""), (two, "none"), (three, ""), (stages, ""), ("tp:cuda,cuda:0", ""), ("pp:cuda:1,cpu", "")]
    {
        let Some(mut command) = with_gpus(&cache, peers) else { return };
        let output = command
            .args(["generate", "--json", "--ignore-eos", "--temperature", "0", "--device", devices])
            .args(["--activations", "f32", "--kv-dtype", "f32", "--kv-memory", "0.02", "--chunk", "16"])
            .args(["--max-tokens", &expected.len().to_string(), "--prompt-ids", &prompt.join(",")])
            .arg("--model")
            .arg(&fixture)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{devices}: {errors}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(ids(&answer["ids"]), expected, "{devices}, peers '{peers}'");
    }
}

#[test]
fn the_log_says_which_way_members_exchange_and_why_not_the_other_one() {
    let cache = scratch("peers-log");
    let between = "by copies between devices";
    let expected = [
        ("tp:cuda:0,cuda:1", "", vec![("sums of one instance", "cuda:0,cuda:1", between)]),
        (
            "tp:cuda:0,cuda:1",
            "none",
            vec![("cuda:0 does not reach the memory of cuda:1", "cuda:0,cuda:1", "through host memory")],
        ),
        (
            "tp:cuda:0,cuda:1",
            "lost",
            vec![("the copy from cuda:0 to cuda:1 did not arrive", "cuda:0,cuda:1", "through host memory")],
        ),
        (
            "pp:(tp:cuda:0,cuda:1),cuda:2",
            "",
            vec![
                ("sums of one instance", "cuda:0,cuda:1", between),
                ("the residual stream of one instance", "cuda:0 to cuda:2", between),
            ],
        ),
    ];
    for (devices, peers, lines) in expected {
        let Some(mut command) = with_gpus(&cache, peers) else { return };
        command.args(["serve", "--listen", "127.0.0.1:0", "--device", devices, "--kv-memory", "0.02"]);
        // short steps, since emulated kernels take long
        command.args(["--chunk", "16", "--sequences", "2"]);
        let server = Server::spawned(command.stderr(Stdio::piped()).spawn().unwrap());
        for (what, which, how) in lines {
            let said = |line: &str| {
                line.contains(what) && line.contains(&format!("devices=\"{which}\"")) && line.contains(how)
            };
            assert!(
                server.seen.lines().any(said),
                "{devices}, peers '{peers}': no {what}, {which}, {how} in\n{}",
                server.seen
            );
        }
    }
}
