//! `hwtests/gpu.sh`, from the folder that it packs to its report, over the CUDA driver in host memory of
//! `backends/cuda/tests`: what a rented machine with a GPU is used for must work at the first try.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

#[allow(dead_code, reason = "the tests of the backend use all of it")]
#[path = "../../../backends/cuda/tests/driver/libraries.rs"]
pub(crate) mod libraries;

use crate::common::{fixture, golden, mixfleet, scratch, unserved};
use serde_json::{Value, json};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn script() -> PathBuf {
    root().join("hwtests/gpu.sh")
}

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// A machine with a GPU, as far as the script sees one: the driver's library, a Python of `/opt` with
/// NVIDIA's wheels and without torch, a sanitizer, and the packed folder.
struct Machine {
    home: PathBuf,
    fake: &'static Path,
}

impl Machine {
    /// None, with a message, where something is missing to make it.
    fn new(name: &str) -> Option<Self> {
        let Some(fake) = libraries::directory(libraries::Driver::New) else {
            println!("SKIPPED: the fake driver needs g++ on x86-64 Linux");
            return None;
        };
        if let Some(missing) = ["bash", "python3", "tar", "timeout"].into_iter().find(|name| !runs(name)) {
            println!("SKIPPED: gpu.sh needs {missing}");
            return None;
        }
        let machine = Machine { home: scratch(name), fake };
        let wheels = machine.home.join("opt/torch/.venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        let driver = machine.home.join("driver");
        std::fs::create_dir_all(&wheels).unwrap();
        std::fs::create_dir_all(&driver).unwrap();
        for entry in std::fs::read_dir(fake).unwrap() {
            let file = entry.unwrap().path();
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with("lib") {
                let to = if name.starts_with("libcuda.") { &driver } else { &wheels };
                symlink(&file, to.join(name)).unwrap();
            }
        }
        let packages = wheels.parent().and_then(Path::parent).and_then(Path::parent).unwrap().to_owned();
        machine.write("python", &format!("PYTHONPATH={} exec python3 \"$@\"", packages.display()));
        // as the real one does, it runs what stands behind its options
        machine.write(
            "sanitizer",
            "while [ \"${1#-}\" != \"$1\" ]; do case $1 in *=*) ;; --tool|--target-processes|--error-exitcode) shift;; esac; shift; done\n\
             \"$@\"; rc=$?; echo '========= ERROR SUMMARY: 0 errors'; exit $rc",
        );
        // it waits for a file, as a step that takes long
        machine.write("slow-sanitizer", "while [ ! -e \"${0%/*}/done\" ]; do sleep 0.1; done");
        machine.write("mixfleet", &format!("exec {} \"$@\"", mixfleet().get_program().display()));
        Some(machine)
    }

    fn write(&self, name: &str, text: &str) {
        let file = self.home.join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Packs a folder with a fixture of one short case, beside one that is refused.
    fn pack(&self) {
        let fixtures = self.home.join("fixtures");
        let served = fixture("llama-gqa-f32");
        let refused = unserved(&self.home);
        for source in [&served, &refused] {
            let to = fixtures.join(source.file_name().unwrap());
            std::fs::create_dir_all(&to).unwrap();
            for entry in std::fs::read_dir(source).unwrap() {
                let file = entry.unwrap().path();
                std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
            }
            let case = &golden(&served)["cases"][0];
            let ids = &case["greedy_ids"].as_array().unwrap()[..3];
            let case = json!({"prompt_ids": case["prompt_ids"], "greedy_ids": ids, "min_margin": case["min_margin"]});
            std::fs::write(to.join("golden.json"), json!({"cases": [case]}).to_string()).unwrap();
        }
        let packed = Command::new(script())
            .args(["pack", self.home.join("packed").to_str().unwrap()])
            .env("MIXFLEET", self.home.join("mixfleet"))
            .env("FIXTURES", fixtures)
            .output()
            .unwrap();
        let said = text(&packed);
        assert!(packed.status.success() && said.contains(" MB, including the binary"), "{said}");
        let kept: Vec<_> = std::fs::read_dir(self.home.join("packed/fixtures")).unwrap().collect();
        assert_eq!(kept.len(), 1, "only the served files");
    }

    /// The script in the packed folder, with options that make it short.
    fn call(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.home.join("packed/hwtests/gpu.sh"));
        command
            .args(arguments)
            .env("FAKE_CUDA_DIRECTORY", self.fake)
            .env("MIXFLEET_CUDA_LIBRARIES", self.home.join("driver"))
            .env("PYTHON", self.home.join("python"))
            .env("SANITIZER", self.home.join("sanitizer"))
            .env("OUT", self.home.join("out"))
            .env("RAW", self.home.join("raw"))
            .envs([("CONFORMANCE", "l1.fill,l1.copy"), ("SANITIZED", "l1.fill"), ("GOLDEN", "cuda cpu,cuda")])
            .envs([("GOALS", "launch.empty"), ("PROFILE", "--quick --only launch.empty")])
            .envs([("DECODE_MODEL", "fixtures/llama-gqa-f32"), ("DECODE_BATCHES", "2 1")])
            .envs([("DECODE_PROMPT", "5"), ("DECODE_TOKENS", "4"), ("DECODE_KV_GIB", "0.02")])
            .env("ARCHIVE_EVERY_S", "1");
        command
    }

    /// A file of an archive; none if there is no such archive or file in it.
    fn archived(&self, call: &str, file: &str) -> Option<String> {
        let archive = self.home.join(format!("out/gpu-{call}.tar.gz"));
        let output = Command::new("tar").arg("-xzOf").arg(archive).arg(format!("./{file}")).output().unwrap();
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Every step's name and how it ended.
fn steps(table: &str) -> Vec<(&str, &str)> {
    table
        .lines()
        .map(|line| line.split_once('\t').unwrap())
        .map(|(n, r)| (n, r.split('\t').next().unwrap()))
        .collect()
}

#[test]
fn three_calls_measure_everything_and_leave_archives_for_a_report() {
    let Some(machine) = Machine::new("gpu-calls") else { return };
    machine.pack();
    let mut said = Vec::new();
    for call in ["1", "2", "3"] {
        let output = machine.call(&[call]).output().unwrap();
        said.push(text(&output));
        assert!(output.status.success(), "{}", said.concat());
    }
    let table = machine.archived("3", "steps.tsv").unwrap();
    let expected = [
        ("devices", "passed"),
        ("conformance", "passed"),
        ("sanitizer-racecheck-fill", "passed"),
        ("sanitizer-memcheck-fill", "passed"),
        ("sanitizer-synccheck-fill", "passed"),
        ("golden", "passed"),
        ("peers", "skipped"),
        ("goals", "passed"),
        ("profile", "passed"),
        ("decode-greedy", "passed"),
        ("decode-sampled", "passed"),
        ("report", "passed"),
    ];
    assert_eq!(steps(&table), expected, "{}", said.concat());
    assert!(said[0].contains("Fake GPU"), "{}", said[0]);
    assert!(
        said[1].contains("SKIPPED: peers:") && said[1].contains("torch cannot be imported"),
        "{}",
        said[1]
    );
    assert!(
        machine.archived("1", "golden.log").unwrap().contains("2 good, 0 close, 0 bad, 0 skipped, 0 not run")
    );

    let archives = ["1", "2", "3"].map(|call| machine.home.join(format!("out/gpu-{call}.tar.gz")));
    let report = report(&archives);
    for expected in [
        "- Fake GPU",
        "| conformance | passed |",
        "- conformance: ",
        "`ERROR SUMMARY: 0 errors`",
        "- golden tokens: 2 good",
        "Not measured: step `peers`, skipped",
        "| greedy | 1 | ",
        "| sampled | 2 | ",
        "1 of 1 points measured",
    ] {
        assert!(report.contains(expected), "no '{expected}' in\n{report}");
    }
}

#[test]
fn two_members_on_one_gpu_are_timed_beside_one_device() {
    let Some(machine) = Machine::new("gpu-members") else { return };
    machine.pack();
    let said = text(&machine.call(&["members"]).output().unwrap());
    let table = machine.archived("steps", "steps.tsv").unwrap();
    assert_eq!(steps(&table), [("members-golden", "passed"), ("members", "passed")], "{said}");
    assert!(said.contains("1 good, 0 close, 0 bad, 0 skipped, 0 not run"), "{said}");
    let report = report(&[machine.home.join("out/gpu-steps.tar.gz")]);
    for expected in ["| `cuda:0` | 2 | ", "| `tp:cuda,cuda:0` | 1 | ", "Golden tokens: 1 good"] {
        assert!(report.contains(expected), "no '{expected}' in\n{report}");
    }
}

fn report(paths: &[PathBuf]) -> String {
    text(&Command::new("python3").arg(root().join("hwtests/gpu/report.py")).args(paths).output().unwrap())
}

/// What a machine with a GPU and torch gives, the last line of each file cut off.
#[test]
fn a_report_sets_ours_beside_torchs_and_beside_the_roofline() {
    if !runs("python3") {
        return println!("SKIPPED: there is no python3");
    }
    let folder = scratch("gpu-report");
    let write = |name: &str, lines: &[Value]| {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(folder.join(name), format!("{}\n{{\"name\": \"cut", lines.join("\n"))).unwrap();
    };
    std::fs::write(folder.join("steps.tsv"), "peers\tcut\t240\tafter its limit of 240 s\n").unwrap();
    let point = |id: &str, flops: f64, bytes: f64| json!({"id": id, "status": "ok", "seconds": {"median": 1e-3}, "flops": flops, "bytes": bytes});
    let goals = [
        point("gemm.bf16.m512.n4096.k4096", 6e11, 0.0),
        point("memory_read.1GiB", 0.0, 3e9),
        point("attn_decode.bf16.b1.c16384.gqa8", 0.0, 2.4e9),
    ];
    std::fs::write(folder.join("goals.json"), json!({"points": goals}).to_string()).unwrap();
    let gemm = json!({"name": "gemm", "m": 512, "n": 4096, "k": 4096, "flops": 6e11, "median_s": 0.75e-3});
    write("peers.jsonl", &[json!({"device": "H100", "torch": "2.11", "cuda": "13.0"}), gemm]);
    let run = ["--prompt-ids", "1", "--max-tokens", "2", "--batch", "1"];
    write("decode-greedy.runs", &[json!(run)]);
    let answer = json!({"prompt_ids": [1], "tokens_per_s": 100.0, "tbt_s": 0.01, "ttft_s": 0.02});
    write("decode-greedy.log", &[answer]);
    std::fs::write(folder.join("decode-model.txt"), "random:llama-3.1-8b\n").unwrap();
    let report = report(&[folder]);
    for expected in [
        "| peers | cut | 240 | after its limit of 240 s |",
        "H100, torch 2.11, CUDA 13.0",
        "| 512 x 4096 x 4096 | 600.00 | 800.00 | 0.75 |",
        "| batch 1 | 2.40 | 0.80 | - | - |",
        // 15.0 GB at 3 TB/s are 5 ms of 10
        "| greedy | 1 | 100.0 | 10.00 | 20.0 | 0.50 |",
        "Not measured: step `sanitizer`, not run",
    ] {
        assert!(report.contains(expected), "no '{expected}' in\n{report}");
    }
}

#[test]
fn what_was_made_until_a_call_is_ended_is_in_its_archive() {
    let Some(machine) = Machine::new("gpu-ended") else { return };
    machine.pack();
    for signal in ["TERM", "KILL"] {
        let _ = std::fs::remove_dir_all(machine.home.join("out"));
        let mut call = machine
            .call(&["devices", "conformance", "sanitizer", "golden"])
            .env("SANITIZER", machine.home.join("slow-sanitizer"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // half of the steps are done, and one runs whose log is archived
        while machine.archived("steps", "sanitizer-racecheck-fill.log").is_none() {
            assert!(call.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(50));
        }
        let killed = Command::new("kill").args(["-s", signal, &call.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let status = call.wait().unwrap();
        let table = machine.archived("steps", "steps.tsv").unwrap();
        let mut expected = vec![("devices", "passed"), ("conformance", "passed")];
        match signal {
            "TERM" => {
                assert_eq!(status.code(), Some(143));
                expected.push(("sanitizer-racecheck-fill", "cut"));
            }
            _ => assert_eq!(status.signal(), Some(9)),
        }
        assert!(steps(&table).ends_with(&expected), "{signal}: {table}");
        let results = machine.archived("steps", "validation/results.json").unwrap();
        assert!(results.contains("l1.fill"), "{results}");
        assert_eq!(machine.archived("steps", "golden.log"), None, "not begun");
        // the rest stays, for the next try to write over
        for file in ["steps.tsv", "sanitizer-racecheck-fill.log"] {
            std::fs::remove_file(machine.home.join("raw").join(file)).unwrap();
        }
    }
    std::fs::write(machine.home.join("done"), "").unwrap();
}

#[test]
fn the_limits_of_the_steps_leave_a_call_time_to_end() {
    let output = Command::new(script()).arg("plan").output().unwrap();
    let mut sums = std::collections::BTreeMap::new();
    for line in text(&output).lines() {
        let [call, _, limit_s] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        *sums.entry(call.to_owned()).or_insert(0) += limit_s.parse::<u32>().unwrap();
    }
    assert_eq!(sums.keys().collect::<Vec<_>>(), ["1", "2", "3", "more"]);
    assert!(sums.values().all(|&sum| sum <= 550), "{sums:?}: a call is 600 s");
}

#[test]
fn what_torch_compiles_is_measured_last() {
    if !runs("python3") {
        return println!("SKIPPED: there is no python3");
    }
    let output =
        Command::new("python3").arg(root().join("hwtests/gpu/peers.py")).arg("--plan").output().unwrap();
    let plan = text(&output);
    let kinds: Vec<&str> = plan.lines().map(|line| line.split(' ').next().unwrap()).collect();
    let first = kinds.iter().position(|kind| *kind == "compiled").expect(&plan);
    assert!(first > 0 && kinds[first..].iter().all(|kind| *kind == "compiled"), "{plan}");
    assert!(kinds[..first].contains(&"sdpa") && kinds[..first].contains(&"gemm"), "{plan}");
}

#[cfg(feature = "opencl")]
#[test]
fn a_binary_that_links_more_than_every_machine_has_is_not_packed() {
    let to = scratch("gpu-hard");
    let program = mixfleet().get_program().to_owned();
    let output = Command::new(script()).arg("pack").arg(&to).env("MIXFLEET", program).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("libOpenCL") && said.contains("cargo build --release -p mixfleet"), "{said}");
}
