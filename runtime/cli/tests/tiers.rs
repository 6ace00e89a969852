//! KV below a real device: golden answers from host memory, from the disk, and from the disk of the process
//! before.

use crate::common;
use crate::common::server::Server;
use serde_json::{Value, json};
use std::path::Path;

/// In f32 a token of the fixture has 768 bytes of KV, a block of the CPU's 32 tokens 24 KiB.
const GIB: f64 = (1u64 << 30) as f64;
const BLOCK_GIB: f64 = 768.0 * 32.0 / GIB;

fn start(model: &str, directory: &str) -> Server {
    // 6 blocks hold one answer of 132 + 48 tokens; host memory 3, so that half of it goes to the disk
    // immediately.
    let [device, dram] = [6.0, 3.0].map(|blocks| (blocks * BLOCK_GIB * 1.001).to_string());
    Server::with(&[
        "--model",
        model,
        "--device",
        "cpu",
        "--activations",
        "f32",
        "--kv-dtype",
        "f32",
        "--kv-memory",
        &device,
        "--kv-dram",
        &dram,
        "--kv-ssd",
        directory,
        "--kv-ssd-gib",
        "0.01",
    ])
}

fn ask(server: &Server, prompt: &[u32]) -> String {
    let request = json!({"model": "llama-gqa-f32", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": true});
    let (status, answer) = server.post("/v1/completions", &request);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().expect("text").to_string()
}

/// Blocks that came from `tier`.
fn hits(server: &Server, tier: &str) -> u64 {
    let (_, metrics) = server.call("GET", "/metrics", "", "");
    let its = |line: &&str| {
        line.starts_with("mixfleet_kv_tier_hits_total{") && line.contains(&format!("tier=\"{tier}\""))
    };
    metrics.lines().filter(its).map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// What the model says alone, which begins with the golden tokens.
fn golden(model: &Path, case: &Value) -> String {
    let prompt = common::ids(&case["prompt_ids"]);
    let request = common::Generate {
        model,
        prompt_ids: &prompt,
        max_tokens: 48,
        prefill: "cpu",
        decode: "cpu",
        further: &[],
    };
    let answer = common::generate(&request);
    assert_eq!(common::ids(&answer["ids"]), common::ids(&case["greedy_ids"]));
    answer["text"].as_str().expect("text").to_string()
}

#[test]
fn golden_answers_come_from_host_memory_and_disk_and_outlive_the_process() {
    let model = common::fixture("llama-gqa-f32");
    let case = &common::golden(&model)["cases"][5];
    let expected = golden(&model, case);
    let prompt = common::ids(&case["prompt_ids"]);
    assert_eq!(prompt.len(), 132);
    // Each as long as the golden one, and like no other from the first token on.
    let other = |shift: u32| prompt.iter().map(|token| (token + shift) % 512).collect::<Vec<u32>>();
    let others = [other(1), other(2)];
    let directory = common::scratch("tiers");
    let (model, directory) =
        (model.to_str().expect("a path in UTF-8"), directory.to_str().expect("the same"));

    let mut first = start(model, directory);
    first.wait_for("disk is in use");
    for round in 0..2 {
        assert_eq!(ask(&first, &prompt), expected, "round {round}");
        others.iter().for_each(|other| _ = ask(&first, other));
    }
    assert!(hits(&first, "dram") + hits(&first, "ssd") >= 4, "nothing came back");
    assert!(hits(&first, "ssd") > 0, "nothing came from the disk");
    first.signal();
    assert!(first.wait().0.success());

    let mut second = start(model, directory);
    second.wait_for("disk is in use");
    assert_eq!(ask(&second, &prompt), expected);
    assert_eq!(hits(&second, "ssd"), 4, "all that can be reused of 132 tokens");
}

#[test]
fn tiers_that_cannot_be_meant_are_usage_errors() {
    for (arguments, said) in [
        (vec!["--kv-dram", "0"], "is not an amount of memory"),
        (vec!["--kv-dram", "nan"], "is not an amount of memory"),
        (vec!["--kv-ssd", "somewhere"], "--kv-dram"),
        (vec!["--kv-dram", "1", "--kv-ssd", "somewhere"], "--kv-ssd-gib"),
    ] {
        let output =
            common::mixfleet().args(["serve", "--listen", "127.0.0.1:0"]).args(&arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.contains(said), "{arguments:?}: {errors}");
    }
}

/// A server that keeps KV in `directory`, which ends at once where it may not.
#[cfg(unix)]
fn refused(directory: &Path) -> String {
    let directory = directory.to_str().expect("a path in UTF-8");
    let arguments =
        ["--kv-memory", "0.02", "--kv-dram", "0.01", "--kv-ssd", directory, "--kv-ssd-gib", "0.01"];
    let output =
        common::mixfleet().args(["serve", "--listen", "127.0.0.1:0"]).args(arguments).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[cfg(unix)]
fn a_directory_for_kv_that_is_not_this_users_alone_ends_the_start_with_what_to_do() {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    let directory = common::scratch("exposed");
    fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    let said = refused(&directory);
    assert!(said.contains("others may write to it") && said.contains("chmod 700"), "{said}");
    fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    symlink("/etc/hostname", directory.join("secret")).unwrap();
    let said = refused(&directory);
    assert!(said.contains("`secret`") && said.contains("symbolic link"), "{said}");
    fs::remove_file(directory.join("secret")).unwrap();
    fs::write(directory.join("cpu"), "a file in its place").unwrap();
    let said = refused(&directory);
    assert!(said.contains("--kv-ssd") && said.contains("cpu"), "{said}");
    if chown(&directory, Some(12345), None).is_err() {
        eprintln!("NOT RUN: only root can give a directory away");
        return;
    }
    let said = refused(&directory);
    assert!(said.contains("belongs to user 12345") && said.contains("chown"), "{said}");
}

#[test]
#[cfg(unix)]
fn the_secret_and_the_blocks_of_a_directory_are_closed_to_others() {
    use std::os::unix::fs::MetadataExt;
    let directory = common::scratch("closed");
    std::fs::remove_dir_all(&directory).unwrap();
    let path = directory.to_str().expect("a path in UTF-8");
    let arguments = ["--kv-dram", "0.01", "--kv-ssd", path, "--kv-ssd-gib", "0.01"];
    let mut server = Server::start(&arguments);
    server.wait_for("disk is in use");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    let mut files = 0;
    for entry in std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            assert_eq!(mode(&entry), 0o700, "{entry:?}");
            for file in std::fs::read_dir(&entry).unwrap().map(|file| file.unwrap().path()) {
                assert_eq!(mode(&file), 0o600, "{file:?}");
                files += 1;
            }
        } else {
            assert_eq!(mode(&entry), 0o600, "{entry:?}");
        }
    }
    assert!(mode(&directory) == 0o700 && files >= 3, "{files} files");
}
