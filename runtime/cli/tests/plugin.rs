//! A backend in C through the binary: listed, validated and served on.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common::server::Server;
use crate::common::{mixfleet, scratch};
use crate::made::libraries;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn with(library: &Path, words: &[&str]) -> Output {
    mixfleet().arg("--backend").arg(library).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_library_in_c_is_a_device_like_any_other() {
    let Some(folder) = libraries() else { return };
    let loops = folder.join("loops.so");
    let listed = with(&loops, &["devices", "--json"]);
    assert!(listed.status.success(), "{}", text(&listed.stderr));
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let device = listed["devices"].as_array().unwrap().iter().find(|device| device["id"] == "loops:0");
    let device = device.unwrap_or_else(|| panic!("{listed}"));
    assert_eq!((&device["backend"], &device["name"]), (&json!("loops"), &json!("loops in C")));

    // by the environment, and a folder of libraries; the other library is not run unless it is used
    let listed =
        mixfleet().env("MIXFLEET_BACKENDS", folder).env("MIXFLEET_HOSTILE", "none").arg("devices").output();
    let listed = text(&listed.unwrap().stdout);
    assert!(listed.contains("loops:0") && listed.contains("no card is plugged in"), "{listed}");

    let mut serve = mixfleet();
    serve.arg("--backend").arg(&loops).args(["serve", "--listen", "127.0.0.1:0", "--kv-memory", "0.02"]);
    let served = serve.args(["--device", "loops:0"]).stderr(Stdio::piped()).spawn().unwrap();
    let served = Server::spawned(served);
    assert!(served.seen.contains("loops.so"), "whose code runs here is not said: {}", served.seen);
    let own = Server::start(&["--device", "cpu"]);
    let request = json!({"model": "mixfleet-random", "prompt": "a fleet of", "max_tokens": 12, "temperature": 0,
        "ignore_eos": true});
    let answers = [&served, &own].map(|server| server.post("/v1/completions", &request));
    assert_eq!((answers[0].0, answers[1].0), (200, 200), "{answers:?}");
    assert_eq!(answers[0].1["choices"][0]["text"], answers[1].1["choices"][0]["text"]);
}

#[test]
fn a_library_is_validated_as_parts_are() {
    let Some(folder) = libraries() else { return };
    let valid =
        with(&folder.join("loops.so"), &["validate", "--device", "loops:0", "--level", "1", "--json"]);
    assert!(valid.status.success(), "{}{}", text(&valid.stdout), text(&valid.stderr));
    let report: Value = serde_json::from_slice(&valid.stdout).unwrap();
    let failed: Vec<&Value> =
        report["cases"].as_array().unwrap().iter().filter(|c| c["status"] == "fail").collect();
    assert!(failed.is_empty(), "{failed:?}");
    // without a device the library's is meant, and the advice names it
    let part = scratch("plugin-part").join("part.toml");
    let begun = with(&folder.join("loops.so"), &["validate", "--init-part", part.to_str().unwrap()]);
    let advice = text(&begun.stderr);
    assert!(advice.contains("loops.so validate --device loops:0 --part "), "{advice}");
    let passed = report["cases"].as_array().unwrap().iter().filter(|c| c["status"] == "pass").count();
    assert!(passed > 100, "{passed} cases passed");
    let words = ["validate", "--device", "loops:0", "--level", "6", "--only", "l6", "--json"];
    let served = with(&folder.join("loops.so"), &words);
    assert!(served.status.success(), "{}{}", text(&served.stdout), text(&served.stderr));
}

/// docs/how-to/add-a-backend.md says how few lines of C a first PASS of level 1 takes.
#[test]
fn the_first_library_passes_level_1_in_300_lines() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hwtests/plugin/first.c");
    let lines = std::fs::read_to_string(source).unwrap().lines().count();
    assert!(lines <= 300, "first.c has {lines} lines");
    let Some(folder) = libraries() else { return };
    let words = ["validate", "--device", "first:0", "--level", "1", "--json"];
    let valid = with(&folder.join("first.so"), &words);
    assert_eq!(valid.status.code(), Some(0), "{}{}", text(&valid.stdout), text(&valid.stderr));
    let report: Value = serde_json::from_slice(&valid.stdout).unwrap();
    let cases = report["cases"].as_array().unwrap();
    let count = |status: &str| cases.iter().filter(|case| case["status"] == status).count();
    // everything that 32-bit floats have, and none of what it refuses counts against it
    assert_eq!(count("fail"), 0, "{report}");
    assert!(count("pass") > 45 && count("unsupported") > 300, "{} pass", count("pass"));
    // an operation that it lacks would be missed
    for kind in ["gemm", "attn_prefill", "attn_decode", "attn_merge", "kv_scatter", "partition_by_tokens"] {
        let of_kind = |id: &str| id.strip_prefix("l1.").is_some_and(|id| id.starts_with(kind));
        let passed = |case: &&Value| of_kind(case["id"].as_str().unwrap()) && case["status"] == "pass";
        assert!(cases.iter().any(|case| passed(&case)), "no {kind} passed");
    }
}

#[test]
fn a_library_that_lies_takes_nothing_down() {
    let Some(folder) = libraries() else { return };
    let hostile = folder.join("hostile.so");
    let validated = |fault: &str| {
        let words =
            ["validate", "--device", "hostile:0", "--level", "1", "--only", "l1.gemm", "--timeout", "2s"];
        let output =
            mixfleet().env("MIXFLEET_HOSTILE", fault).arg("--backend").arg(&hostile).args(words).output();
        let output = output.unwrap();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = validated("honest");
    assert_eq!(code, Some(0), "{said}");
    for fault in ["garbage", "crash", "hang", "silent"] {
        let (code, said) = validated(fault);
        assert!(matches!(code, Some(1 | 3)), "{fault}: {code:?}: {said}");
    }
    let output =
        mixfleet().env("MIXFLEET_HOSTILE", "short").arg("--backend").arg(&hostile).arg("devices").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("24 bytes"), "{}", text(&output.stderr));
    let twice =
        mixfleet().args(["--backend"]).arg(&hostile).arg("--backend").arg(&hostile).arg("devices").output();
    let twice = twice.unwrap();
    assert!(text(&twice.stderr).contains("another backend named 'hostile'"), "{}", text(&twice.stderr));
}

/// The script has each step of docs/how-to/validate-your-part.md as a command.
#[test]
fn the_way_of_a_vendor() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hwtests/walkthrough.sh");
    let out = scratch("walkthrough");
    let mut command = Command::new("bash");
    let walked =
        command.arg(script).arg(&out).env("MIXFLEET", env!("CARGO_BIN_EXE_mixfleet")).output().unwrap();
    let said = text(&walked.stdout) + &text(&walked.stderr);
    if walked.status.code() == Some(3) {
        println!("{said}");
        return;
    }
    assert!(walked.status.success(), "{said}");
    for page in ["profile.html", "report-1/report.html", "diff-2.html", "diff-3.html", "compare.html"] {
        assert!(out.join(page).is_file(), "{page}: {said}");
    }
}
