//! `mixfleet serve` on GPUs as large as real ones: the CUDA driver in host memory of `backends/cuda/tests`
//! has their names and memory, counts allocations, stores no bytes and computes nothing. So any machine shows
//! effects of a device's size, but neither results nor speed.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common::server::Server;
use crate::common::{mixfleet, scratch};
use crate::gpu::libraries;
use serde_json::json;
use std::process::{Command, Stdio};

const MIB: u64 = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;
/// Memory that a context takes before anything is allocated.
const CONTEXT_BYTES: &str = "600000000";
/// Weights of Llama 3.1 8B in bf16.
const WEIGHT_BYTES: f64 = 16.06e9;

/// `mixfleet serve` on such a device; none, with a message, where the driver cannot be compiled.
fn serve(cache: &str, name: &str, memory_mib: u64, arguments: &[&str]) -> Option<Command> {
    let Some(driver) = libraries::directory(libraries::Driver::New) else {
        println!("SKIPPED: the fake driver needs g++ on x86-64 Linux");
        return None;
    };
    let mut command = mixfleet();
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--device", "cuda"])
        .args(arguments)
        .env("LD_LIBRARY_PATH", driver)
        .env("XDG_CACHE_HOME", cache)
        .env("FAKE_CUDA_DIRECTORY", driver)
        .envs([("FAKE_CUDA_HOLLOW", "1"), ("FAKE_CUDA_NAME", name)])
        .env("FAKE_CUDA_MEMORY_BYTES", (memory_mib * MIB).to_string())
        .env("FAKE_CUDA_CONTEXT_BYTES", CONTEXT_BYTES)
        .stderr(Stdio::piped());
    Some(command)
}

/// The first line of its log that contains `words`.
fn logged<'a>(log: &'a str, words: &str) -> &'a str {
    log.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("no '{words}' in {log}"))
}

/// A number of such a line.
fn number(line: &str, name: &str) -> f64 {
    let (_, rest) = line.split_once(&format!(" {name}=")).unwrap_or_else(|| panic!("no {name} in {line}"));
    rest.split(' ').next().unwrap().trim().parse().unwrap()
}

/// Llama 3.1 8B in bf16 without a flag for sizes, up to where it is ready: weights, KV, activations and
/// graphs fit. vLLM's KV is what its defaults leave: see docs/results/defaults.md.
#[test]
fn an_8b_model_is_served_on_parts_from_24_gb_with_sizes_of_their_own() {
    let cache = scratch("hollow-parts");
    let parts = [
        ("NVIDIA GeForce RTX 4090", 24_564, 1024, 40),
        ("NVIDIA L40S", 46_068, 4096, 192),
        ("NVIDIA H100 80GB HBM3", 81_559, 2048, 256),
        ("NVIDIA H200", 143_771, 2048, 256),
    ];
    for (name, memory_mib, chunk, sequences) in parts {
        let arguments = ["--model", "random:llama-3.1-8b"];
        let Some(mut command) = serve(cache.to_str().unwrap(), name, memory_mib, &arguments) else { return };
        let server = Server::spawned(command.spawn().unwrap());
        let sized = logged(&server.seen, " sized; ");
        println!("{name}: {sized}");
        let got = ["chunk", "sequences"].map(|field| number(sized, field));
        assert_eq!(got, [f64::from(chunk), f64::from(sequences)], "{name}");
        assert!(sized.contains("FLOP/B"), "{name}: {sized}");
        let kv_gib = number(sized, "kv_gib");
        let vllm_gib = 0.9 * (memory_mib * MIB) as f64 / GIB - WEIGHT_BYTES / GIB - 0.56;
        assert!((0.9..=1.05).contains(&(kv_gib / vllm_gib)), "{name}: {kv_gib} and {vllm_gib} GiB");
        // the smallest has room for a long conversation
        let tokens = number(logged(&server.seen, " predicted "), "kv_tokens");
        assert!(tokens > 40_000.0 && tokens * 131_072.0 <= kv_gib * GIB * 1.01, "{name}: {tokens} tokens");
        // the driver's times are none of the part
        let mut warned = server.seen.lines().filter(|line| line.contains(" WARN "));
        assert!(warned.all(|line| line.contains("calibration is far from")), "{name}: {}", server.seen);
    }
}

#[test]
fn a_clock_that_is_held_down_is_warned_of() {
    let cache = scratch("hollow-clock");
    for (set_mhz, is_low) in [("1755", false), ("1200", true)] {
        let Some(mut command) = serve(cache.to_str().unwrap(), "NVIDIA H100 80GB HBM3", 81_559, &[]) else {
            return;
        };
        let child = command.env("FAKE_NVML_SET_MHZ", set_mhz).spawn().unwrap();
        let server = Server::spawned(child);
        let warned = server.seen.lines().find(|line| line.contains("the clock is limited to"));
        assert_eq!(warned.is_some(), is_low, "{}", server.seen);
        if let Some(line) = warned {
            assert!(line.contains(" WARN ") && line.contains("1200 of 1980 MHz"), "{line}");
            assert!(line.contains("nvidia-smi -rgc"), "{line}");
        }
    }
}

/// In two starts: the first one calibrates, which runs many kernels; the second one knows the device.
#[test]
fn a_request_needs_no_kernel_that_was_not_looked_up_before_the_server_is_ready() {
    let cache = scratch("hollow-warm");
    for _ in 0..2 {
        let arguments = ["--model", "random:qwen2.5-0.5b", "--name", "q"];
        let Some(mut command) = serve(cache.to_str().unwrap(), "NVIDIA L40S", 46_068, &arguments) else {
            return;
        };
        let server = Server::spawned(command.env("FAKE_CUDA_TELL", "1").spawn().unwrap());
        let seen = server.seen.clone();
        assert!(seen.contains("fake driver: looks up") && seen.contains("fake driver: records"), "{seen}");
        let long = "x".repeat(500);
        let plain = json!({"model": "q", "prompt": "Hello", "max_tokens": 8, "ignore_eos": true});
        let filtered = json!({"model": "q", "prompt": long, "max_tokens": 8, "ignore_eos": true, "top_p": 0.9,
            "frequency_penalty": 0.5, "logprobs": 3});
        for body in [plain, filtered] {
            let (status, answer) = server.post("/v1/completions", &body);
            assert_eq!(status, 200, "{answer}");
            assert_eq!(answer["usage"]["completion_tokens"], 8, "{answer}");
        }
        server.signal();
        let (_, rest) = server.wait();
        let late: Vec<&str> = rest.lines().filter(|line| line.starts_with("fake driver: ")).collect();
        let kernels = late.iter().filter(|line| !line.ends_with(" records a graph")).count();
        assert_eq!(kernels, 0, "{late:?}");
        // one kind of step is not recorded before: the one with this many log-probabilities
        assert!(late.len() <= 1, "{late:?}");
    }
}
