//! Devices of this machine in fleet files and comparisons: they take what serving measured on them.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

const MODEL: &str = "../../../shared/fixtures/llama-gqa-f32";

/// The shape of that model, and a processor.
const FLEET: &str = r#"
version = 1
[model]
name = "fixture"
layers = 3
hidden = 64
heads = 4
kv_heads = 2
head_dim = 16
intermediate = 160
vocab = 512
dtype = "f32"
[[pool]]
name = "here"
device = "cpu"
usd_per_hour = 0.5
cache_tokens = 100_000
"#;

fn run(home: &Path, arguments: &[&str]) -> Output {
    let mut command: Command = mixfleet();
    command.env("XDG_CACHE_HOME", home).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", said(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_device_of_this_machine_takes_what_serving_measured() {
    let home = scratch("own-devices");
    let [fleet, trace] = ["FLEET.toml", "trace.jsonl"].map(|name| home.join(name));
    std::fs::write(&fleet, FLEET).unwrap();
    let [fleet, trace] = [&fleet, &trace].map(|path| path.to_str().unwrap());
    let made = ["trace", "generate", "--requests", "20", "--rate", "5", "--seed", "2", "--out", trace];
    assert!(run(&home, &made).status.success());

    let simulate = ["simulate", "--trace", trace, "--fleet", fleet, "--json"];
    let compare = ["compare", "cpu", "--model", MODEL, "--usd-per-hour", "cpu=0.5", "--json"];
    for (command, code) in [(&simulate[..], 3), (&compare[..], 2)] {
        let output = run(&home, command);
        let says = "'mixfleet serve --device cpu --model ...' keeps one";
        assert_eq!(
            (output.status.code(), said(&output).matches(says).count()),
            (Some(code), 1),
            "{}",
            said(&output)
        );
    }

    let ids = ["--prompt-ids", "3,4,5,6", "--max-tokens", "2", "--ignore-eos", "--json"];
    let generate = ["generate", "--model", MODEL, "--prefill", "cpu", "--decode", "cpu"];
    json(&run(&home, &[&generate[..], &ids[..]].concat()));

    let simulated = json(&run(&home, &simulate));
    let pool = &simulated["pools"][0];
    let times_from = pool["times_from"].as_str().unwrap();
    assert!(times_from.starts_with("cpu: calibration of 20"), "{pool}");
    assert_eq!(simulated["requests"], 20, "{simulated}");
    let output = run(&home, &compare);
    assert!(said(&output).contains(times_from), "{}", said(&output));
    let compared = json(&output);
    assert_eq!(
        (&compared["basis"], &compared["devices"][0]["times_from"]),
        (&"measured".into(), &times_from.into())
    );
    let jobs = compared["devices"][0]["jobs"].as_array().unwrap();
    let time = |job: usize| jobs[job]["device_seconds_per_unit"].as_f64();
    assert!(time(0).unwrap() > 0.0 && time(1).unwrap() > 0.0, "{jobs:?}");
    assert_eq!(time(2), None, "attention was not measured by itself");
}
