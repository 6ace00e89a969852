//! Checkpoints that are odd, that change, and that are like each other, under the binary.

#![cfg(target_os = "linux")]

use crate::common;
use crate::common::server::Server;
use mixfleet_hal::DType;
use mixfleet_runtime::model::RandomCheckpoint;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

/// A checkpoint whose first layer has MLP tensors of 128 KiB each.
fn checkpoint(name: &str) -> PathBuf {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 261, "max_position_embeddings": 4096,
    });
    let config = config.as_object().expect("an object").clone();
    let directory = common::scratch(name);
    RandomCheckpoint { config, dtype: DType::F32, seed: 5 }.write(&directory, 1).unwrap();
    directory
}

fn weights(checkpoint: &Path) -> PathBuf {
    checkpoint.join("model.safetensors")
}

/// Gives the weights another time of change: two writes may be closer together than the file system's clock
/// tells.
fn touch(checkpoint: &Path, seconds: u64) {
    let file = File::options().write(true).open(weights(checkpoint)).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
}

fn start(model: &Path, more: &[&str]) -> Server {
    let model =
        ["--model", model.to_str().expect("UTF-8"), "--name", "m", "--device", "cpu", "--kv-memory", "0.01"];
    Server::with(&[&model, more].concat())
}

fn ask(server: &Server, prompt: &[u32], tokens: u32) -> (u16, Value) {
    let request =
        json!({"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
    server.post("/v1/completions", &request)
}

fn text(answer: &Value) -> String {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_string()
}

fn status(server: &Server, path: &str) -> u16 {
    server.call("GET", path, "", "").0
}

#[test]
fn a_checkpoint_says_how_it_is_sampled_from_where_a_request_does_not() {
    let checkpoint = checkpoint("generation-config");
    let draw = |server: &Server, more: Value| {
        let mut request = json!({"model": "m", "prompt": [5, 6, 7], "max_tokens": 24, "ignore_eos": true});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = server.post("/v1/completions", &request);
        assert_eq!(status, 200, "{answer}");
        text(&answer)
    };
    let server = start(&checkpoint, &[]);
    let greedy = draw(&server, json!({"temperature": 0}));
    assert_ne!(draw(&server, json!({"seed": 1})), greedy, "by default the temperature is 1");
    drop(server);
    fs::write(checkpoint.join("generation_config.json"), r#"{"temperature": 0.0, "top_k": 20}"#).unwrap();
    let server = start(&checkpoint, &[]);
    assert_eq!(draw(&server, json!({"seed": 1})), greedy);
    assert_ne!(draw(&server, json!({"seed": 1, "temperature": 1, "top_k": -1})), greedy);
}

#[test]
fn a_checkpoint_cut_under_a_server_ends_requests_with_an_error_and_not_the_server() {
    let model = checkpoint("cut");
    let mut server = start(&model, &[]);
    let prompt: Vec<u32> = (5..60).collect();
    let (before, answer) = ask(&server, &prompt, 20);
    assert_eq!((before, status(&server, "/health")), (200, 200), "{answer}");
    let right = text(&answer);
    // A long answer is in progress when the file is truncated: it ends with all of its tokens or with an
    // error.
    let mut stream = server.connect();
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 3000, "temperature": 0, "ignore_eos": true, "stream": true});
    let body = body.to_string();
    write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    File::options().write(true).open(weights(&model)).unwrap().set_len(5000).unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"error\"") || rest.contains("\"finish_reason\":\"length\""), "{rest}");

    for round in 0..5 {
        let (code, answer) = ask(&server, &prompt, 20);
        assert!(code >= 500, "round {round}: {code} {answer}");
        assert!(answer["error"]["message"].as_str().is_some_and(|said| !said.is_empty()), "{answer}");
        assert_ne!(answer["choices"][0]["text"].as_str(), Some(right.as_str()));
    }
    assert_eq!(status(&server, "/live"), 200);
    // Not now, and not once the device that failed has been tried again.
    assert_ne!(status(&server, "/health"), 200);
    server.wait_for("retrying with backoff");
    assert_ne!(status(&server, "/health"), 200);
    assert_eq!(server.child.try_wait().unwrap(), None, "it lives");
    server.signal();
    let seen = std::mem::take(&mut server.seen);
    let log = seen + &server.wait().1;
    assert!(
        log.contains("model.safetensors") && log.contains("start again"),
        "the log names the file: {log}"
    );
}

#[test]
fn a_checkpoint_written_over_under_a_server_gives_no_answer_of_the_other_weights() {
    let model = checkpoint("written");
    let server = start(&model, &[]);
    let prompt: Vec<u32> = (5..60).collect();
    assert_eq!(ask(&server, &prompt, 20).0, 200);
    let bytes = fs::read(weights(&model)).unwrap();
    fs::write(weights(&model), bytes).unwrap();
    touch(&model, 1);
    let (code, answer) = ask(&server, &prompt, 20);
    assert!(code >= 500, "{code} {answer}");
    assert_eq!(status(&server, "/live"), 200);
}

#[test]
fn a_checkpoint_that_is_touched_serves_on_once_its_bytes_were_hashed_again_and_a_changed_one_never() {
    let model = checkpoint("touched");
    let directory = common::scratch("touched-kv");
    let mut server = start_with_disk(&model, &directory);
    server.wait_for("disk is in use");
    let prompt: Vec<u32> = (5..60).collect();
    let (code, answer) = ask(&server, &prompt, 20);
    assert_eq!(code, 200, "{answer}");
    let right = text(&answer);
    touch(&model, 1);
    let again = Instant::now();
    loop {
        let (code, answer) = ask(&server, &prompt, 20);
        if code == 200 {
            assert_eq!(text(&answer), right);
            break;
        }
        assert!(code >= 500 && again.elapsed() < Duration::from_secs(60), "{code} {answer}");
        std::thread::sleep(Duration::from_millis(100));
    }
    change_behind_the_start(&model);
    // Not when they were hashed, and not when they were hashed again.
    for seconds in [2, 3] {
        server.seen.clear();
        touch(&model, seconds);
        server.wait_for("the weights have changed");
        for _ in 0..30 {
            assert!(ask(&server, &prompt, 20).0 >= 500);
        }
    }
}

#[test]
fn a_checkpoint_replaced_by_rename_does_not_disturb_a_server() {
    let model = checkpoint("replaced");
    let server = start(&model, &[]);
    let prompt: Vec<u32> = (5..60).collect();
    let before = ask(&server, &prompt, 20);
    fs::write(model.join("new"), b"something else").unwrap();
    fs::rename(model.join("new"), weights(&model)).unwrap();
    let after = ask(&server, &prompt, 20);
    assert_eq!((after.0, text(&after.1)), (200, text(&before.1)));
}

/// Flips bits of the last tensor bytes of an MLP matrix: behind its first 64 KiB.
fn change_behind_the_start(model: &Path) {
    let mut file = File::options().read(true).write(true).open(weights(model)).unwrap();
    let mut length = [0; 8];
    file.read_exact(&mut length).unwrap();
    let start = 8 + u64::from_le_bytes(length);
    let mut header = vec![0; start as usize - 8];
    file.read_exact(&mut header).unwrap();
    let header: Value = serde_json::from_slice(&header).unwrap();
    for matrix in ["gate_proj", "up_proj", "down_proj"] {
        let offsets = &header[format!("model.layers.0.mlp.{matrix}.weight")]["data_offsets"];
        let (begin, end) = (offsets[0].as_u64().unwrap() + (64 << 10), offsets[1].as_u64().unwrap());
        let mut bytes = vec![0; (end - begin) as usize];
        file.seek(SeekFrom::Start(start + begin)).unwrap();
        file.read_exact(&mut bytes).unwrap();
        // Signs and halves: the values stay sane, and are others.
        bytes.chunks_mut(4).for_each(|value| value[3] ^= 0x80);
        file.seek(SeekFrom::Start(start + begin)).unwrap();
        file.write_all(&bytes).unwrap();
    }
}

/// Six blocks of 32 tokens on the device, three in host memory, the rest in `directory`.
fn tiers(directory: &Path) -> Vec<String> {
    let block_gib = 2.0 * 2.0 * 2.0 * 16.0 * 4.0 * 32.0 / f64::from(1 << 30);
    let directory = directory.to_str().expect("UTF-8");
    let gib = |blocks: f64| (blocks * block_gib * 1.001).to_string();
    ["--kv-memory", &gib(6.0), "--kv-dram", &gib(3.0), "--kv-ssd", directory, "--kv-ssd-gib", "0.01"]
        .map(str::to_string)
        .to_vec()
}

fn start_with_disk(model: &Path, directory: &Path) -> Server {
    let more = tiers(directory);
    let model = ["--model", model.to_str().expect("UTF-8"), "--name", "m", "--device", "cpu"];
    let mut words: Vec<&str> = model.to_vec();
    words.extend(more.iter().map(String::as_str));
    Server::with(&words)
}

fn metric(server: &Server, name: &str) -> u64 {
    let (_, metrics) = server.call("GET", "/metrics", "", "");
    let its = |line: &&str| line.starts_with(name) && line.contains("tier=\"ssd\"");
    metrics.lines().filter(its).map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

fn prompts() -> Vec<Vec<u32>> {
    (0..5).map(|seed: u32| (0..130).map(|at| 5 + (at * (7 + seed) + seed * 31) % 256).collect()).collect()
}

#[test]
fn weights_that_differ_behind_the_start_of_a_tensor_share_no_kv() {
    let (one, other) = (checkpoint("digest-one"), checkpoint("digest-other"));
    change_behind_the_start(&other);
    let directory = common::scratch("digest-kv");
    let asked = |server: &Server| -> Vec<String> {
        let answer = |prompt: &Vec<u32>| {
            let (status, answer) = ask(server, prompt, 24);
            assert_eq!(status, 200, "{answer}");
            text(&answer)
        };
        prompts().iter().map(answer).collect()
    };
    let mut first = start_with_disk(&one, &directory);
    first.wait_for("disk is in use");
    let of_one = asked(&first);
    assert!(metric(&first, "mixfleet_kv_tier_blocks{") > 5, "nothing went to the disk");
    first.signal();
    assert!(first.wait().0.success());

    let fresh = start(&other, &[]);
    let expected = asked(&fresh);
    drop(fresh);
    assert_ne!(of_one, expected, "weights that say the same show nothing");

    let mut second = start_with_disk(&other, &directory);
    second.wait_for("disk is in use");
    assert_eq!(metric(&second, "mixfleet_kv_tier_blocks{"), 0, "KV of the other weights is still there");
    assert_eq!(asked(&second), expected);
    assert_eq!(metric(&second, "mixfleet_kv_tier_hits_total{"), 0);
}

#[test]
fn a_second_start_reads_a_kept_digest_and_a_file_that_changed_is_hashed_again() {
    let model = checkpoint("kept");
    let directory = common::scratch("kept-kv");
    let cache = common::scratch("kept-cache");
    // A file that changed a moment ago may change again without a trace: its digest is not kept.
    std::thread::sleep(Duration::from_millis(300));
    let log = |wait_for: &str| {
        let more = tiers(&directory);
        let mut command = common::mixfleet();
        command.env("XDG_CACHE_HOME", &cache).args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--device",
            "cpu",
            "--model",
        ]);
        let mut server =
            Server::spawned(command.arg(&model).args(&more).stderr(Stdio::piped()).spawn().unwrap());
        if !wait_for.is_empty() {
            server.wait_for(wait_for);
        }
        server.signal();
        let seen = std::mem::take(&mut server.seen);
        seen + &server.wait().1
    };
    let computes = |log: &str| log.contains("computing the digest");
    let first = log("disk is in use");
    assert!(computes(&first), "{first}");
    let second = log("");
    assert!(!computes(&second), "{second}");
    let kept = fs::read_dir(cache.join("mixfleet")).unwrap().map(|entry| entry.unwrap().path());
    let kept: Vec<_> = kept.filter(|path| path.to_string_lossy().contains("digest-")).collect();
    assert_eq!(kept.len(), 1);
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&kept[0]).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // Write access for other users rules out sharing.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o622);
    fs::set_permissions(&kept[0], open).unwrap();
    assert!(computes(&log("disk is in use")));
    change_behind_the_start(&model);
    assert!(computes(&log("disk is in use")));
}

#[test]
fn a_part_of_a_checkpoint_that_is_no_regular_file_is_refused_and_does_not_hang() {
    for part in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        for kind in ["pipe", "directory"] {
            let model = checkpoint(&format!("irregular-{kind}-{part}"));
            let path = model.join(part);
            let _ = fs::remove_file(&path);
            match kind {
                "pipe" => {
                    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success())
                }
                _ => fs::create_dir(&path).unwrap(),
            }
            let mut command = common::mixfleet();
            command.args(["generate", "--prompt-ids", "7", "--max-tokens", "1", "--model"]).arg(&model);
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let start = Instant::now();
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if start.elapsed() > Duration::from_secs(60) => {
                        child.kill().unwrap();
                        panic!("{part} as a {kind}: hangs");
                    }
                    None => std::thread::sleep(Duration::from_millis(20)),
                }
            };
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            assert_eq!(status.code(), Some(3), "{part} as a {kind}: {said}");
            assert!(
                said.contains(part) && said.contains("expected a regular file"),
                "{part} as a {kind}: {said}"
            );
            fs::remove_dir_all(&model).unwrap();
        }
    }
}
