//! `mixfleet topo` and `mixfleet devices` as users meet them.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

fn mixfleet(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mixfleet")).args(args).output().expect("the binary starts")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&mixfleet(args))).expect("a JSON document")
}

/// A file that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("mixfleet-{name}-{}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a UTF-8 path")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_recorded_machine_is_shown_again() {
    let file = Scratch::new("recording.json");
    let live = json(&["topo", "--json", "--record", file.path()]);
    let replayed = json(&["topo", "--json", "--from", file.path()]);
    assert_eq!(live["schema"], "mixfleet.topo/1");
    for part in ["sockets", "nodes", "caches", "pci", "bridges", "nets", "rdma", "memory_bytes", "cpu_model"]
    {
        assert_eq!(live["topology"][part], replayed["topology"][part], "{part}");
    }
    assert_eq!(live["conditions"], replayed["conditions"]);
    let shown = text(&mixfleet(&["topo", "--from", file.path()]));
    assert!(shown.contains("socket 0:"), "{shown}");
}

#[test]
fn what_is_no_recording_is_refused() {
    let file = Scratch::new("other.json");
    for (content, cause) in [("{", "is no recording"), (r#"{"schema": "mixfleet.machine/0"}"#, "machine/0")] {
        std::fs::write(&file.0, content).expect("a writable file");
        let output = mixfleet(&["topo", "--from", file.path()]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert!(message.contains(cause) && message.contains(file.path()), "{message}");
    }
}

#[test]
fn devices_say_which_are_one_part_and_what_is_absent() {
    let document = json(&["devices", "--json"]);
    let devices = document["devices"].as_array().expect("a list");
    let cpus = devices.iter().filter(|device| device["kind"] == "cpu").count();
    let same = document["same_parts"].as_array().expect("a list");
    let host = same.iter().find(|part| part["reason"] == "the host's cores");
    let shown = host.map_or(1, |part| part["devices"].as_array().expect("a list").len());
    assert_eq!(shown, cpus, "all CPUs are the host's cores: {document:#}");
    for absent in document["absent"].as_array().expect("a list") {
        assert!(absent["reason"].as_str().is_some_and(|reason| reason.len() > 10), "{absent}");
    }
}
