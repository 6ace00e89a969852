//! `mixfleet profile import` and `check` from outside, and the commands that use their files.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Output;

fn run(directory: &Path, words: &[&str]) -> Output {
    mixfleet().args(words).current_dir(directory).output().unwrap()
}

fn succeeds(directory: &Path, words: &[&str]) -> String {
    let output = run(directory, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn fails(directory: &Path, words: &[&str], code: i32) -> String {
    let output = run(directory, words);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {error}");
    error
}

/// A table of products as aiconfigurator publishes it, of a part with 100 TFLOP/s and 1 TB/s.
fn table() -> String {
    let mut text = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n".to_owned();
    for m in [1u32, 16, 64, 256, 1024, 4096] {
        for (n, k) in [(4096u32, 4096u32), (6144, 4096), (28672, 4096), (4096, 14336), (128_256, 4096)] {
            let (m_, n_, k_) = (f64::from(m), f64::from(n), f64::from(k));
            let (flops, bytes) = (2.0 * m_ * n_ * k_, 2.0 * (m_ * n_ + m_ * k_ + n_ * k_));
            let ms = 1e3 * (5e-6 + flops / 1e14 + bytes / 1e12);
            let _ = writeln!(text, "VLLM,0.24.0,NVIDIA L40S,gemm,torch,bfloat16,{m},{n},{k},{ms}");
        }
    }
    text + "VLLM,0.24.0,NVIDIA L40S,gemm,torch,nvfp4,1,8,8,0.01\n"
}

const FLEET: &str =
    "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"a\"\ndevice = \"l40s.json\"\n";

#[test]
fn an_imported_part_is_checked_compared_simulated_and_served_by() {
    let directory = scratch("import");
    std::fs::write(directory.join("gemm_perf.txt"), table()).unwrap();
    let import = ["profile", "import", "--from", "aiconfigurator", "gemm_perf.txt", "--out", "l40s.json"];
    let text = succeeds(&directory, &import);
    for word in ["NVIDIA L40S, vllm/0.24.0: 30 rows", "MAPE", "left out: gemm rows with gemm_dtype nvfp4 (1)"]
    {
        assert!(text.contains(word), "{word}\n{text}");
    }
    let document: Value =
        serde_json::from_str(&succeeds(&directory, &[&import[..], &["--json"]].concat())).unwrap();
    assert_eq!((&document["wrote"], &document["rows"]), (&"mixfleet.device-profile/1".into(), &30.into()));
    assert!(document["held_out"][0]["error"].as_f64().unwrap() < 0.1, "{document:#}");

    let text = succeeds(&directory, &["profile", "check", "l40s.json"]);
    assert!(
        text.contains("l40s.json conforms to mixfleet.device-profile/1: L40S")
            || text.contains("NVIDIA L40S")
    );
    let text = succeeds(&directory, &["compare", "--model", "llama-3.1-8b", "l40s.json", "L4"]);
    assert!(text.contains("L40S") && text.contains("measured"), "{text}");
    std::fs::write(directory.join("FLEET.toml"), FLEET).unwrap();
    let closed = ["simulate", "--fleet", "FLEET.toml", "--closed-loop", "4", "--input-tokens", "100..200"];
    let lengths = ["--output-tokens", "20", "--requests", "30", "--think-s", "0.2", "--json"];
    let lengths = [&lengths[..], &["--requests-out", "run.jsonl"]].concat();
    let results: Value =
        serde_json::from_str(&succeeds(&directory, &[&closed[..], &lengths].concat())).unwrap();
    assert_eq!(results["completed"], 30);
    assert!(results["output_tokens_per_s"].as_f64().unwrap() > 0.0);
    // What the simulator wrote it predicts: after a pause, no request arrives just when a step ends.
    let against = ["simulate", "--fleet", "FLEET.toml", "--against", "run.jsonl"];
    let text = succeeds(&directory, &against);
    assert!(text.contains("against the recorded run: 30 of 30 requests"), "{text}");
    let errors: Value =
        serde_json::from_str(&succeeds(&directory, &[&against[..], &["--json"]].concat())).unwrap();
    assert!(errors["against"]["e2e"]["mean_off"].as_f64().unwrap().abs() < 1e-9, "{:#}", errors["against"]);
    let ids = [
        "generate",
        "--device",
        "sim:l40s.json",
        "--kv-memory",
        "0.02",
        "--prompt",
        "x",
        "--max-tokens",
        "2",
    ];
    succeeds(&directory, &ids);
}

#[test]
fn a_file_that_is_no_profile_fails_the_check_with_the_fields_names() {
    let directory = scratch("check");
    std::fs::write(directory.join("gemm_perf.txt"), table()).unwrap();
    let import = ["profile", "import", "--from", "aiconfigurator", "gemm_perf.txt", "--out", "a.json"];
    succeeds(&directory, &import);
    let profile: Value = serde_json::from_slice(&std::fs::read(directory.join("a.json")).unwrap()).unwrap();
    let check = |change: &dyn Fn(&mut Value)| {
        let mut changed = profile.clone();
        change(&mut changed);
        std::fs::write(directory.join("b.json"), changed.to_string()).unwrap();
        let output = run(&directory, &["profile", "check", "b.json", "--json"]);
        (output.status.code(), serde_json::from_slice::<Value>(&output.stdout).unwrap())
    };
    let (code, document) =
        check(&|profile| drop(profile["points"][3].as_object_mut().unwrap().remove("time")));
    assert_eq!((code, &document["conforms"]), (Some(1), &false.into()));
    assert!(document["errors"][0].as_str().unwrap().starts_with("points[3].time is missing; add it: Median"));
    let (code, document) = check(&|profile| profile["owner"] = "me".into());
    assert_eq!((code, &document["warnings"][0]), (Some(0), &"owner is unknown and ignored".into()));
    assert!(fails(&directory, &["profile", "check", "gemm_perf.txt"], 1).contains("not JSON"));
    assert!(fails(&directory, &["profile", "check", "none.json"], 3).contains("cannot read none.json"));

    let of = |from: &str, path: &str, more: &[&str], code: i32| {
        let words = ["profile", "import", "--from", from, path, "--out", "c.json"];
        let error = fails(&directory, &[&words[..], more].concat(), code);
        assert!(!directory.join("c.json").exists());
        error
    };
    assert!(of("aiconfigurator", "none.txt", &[], 3).contains("none.txt"));
    assert!(of("aiconfigurator", "gemm_perf.txt", &["--device", "L4"], 2).contains("--device 'NVIDIA L40S'"));
    assert!(of("aiconfigurator", "gemm_perf.txt", &["--part", "L41"], 2).contains("closest: L4"));
    assert!(of("llmservingsim", ".", &[], 3).contains("dense.csv"));
    assert!(of("aiconfigurator", "gemm_perf.txt", &["--as", "engine"], 2).contains("leave --as out"));
}
