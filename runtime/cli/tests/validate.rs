//! `mixfleet validate` from outside: child processes of the real binary, exit codes, the report's folder.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

fn validate(arguments: &[&str]) -> Output {
    mixfleet().arg("validate").args(arguments).output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&text).into_owned()
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

fn results(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("results.json")).expect("a report");
    serde_json::from_str(&text).expect("JSON")
}

fn case<'a>(results: &'a Value, id: &str) -> &'a Value {
    let cases = results["cases"].as_array().expect("cases");
    cases.iter().find(|case| case["id"] == id).unwrap_or_else(|| panic!("{id} in {results:#}"))
}

#[test]
fn a_part_of_the_levels_passes_on_the_cpu_and_leaves_a_folder_that_carries_on() {
    let folder = scratch("validate-cpu").join("report");
    let only = "l0,l1.fill,l1.order,l2.random";
    let arguments =
        ["--device", "cpu", "--level", "2", "--only", only, "--memory", "2MiB", "--out", path(&folder)];
    let output = validate(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let report = results(&folder);
    assert_eq!(report["schema"], "mixfleet.validation/1");
    assert_eq!(report["verdict"], "partial");
    for id in ["l0.identity", "l1.order", "l2.random"] {
        assert_eq!(case(&report, id)["status"], "pass", "{id}");
    }
    for name in ["junit.xml", "report.html", "environment.json", "log.jsonl", "SHA256SUMS"] {
        assert!(folder.join(name).metadata().expect(name).len() > 100, "{name}");
    }
    let environment: Value =
        serde_json::from_slice(&std::fs::read(folder.join("environment.json")).unwrap()).unwrap();
    assert!(environment["began_at"].as_str().unwrap().ends_with('Z'), "{environment:#}");

    let again = validate(&arguments);
    assert_eq!(again.status.code(), Some(2), "an old log is not overwritten: {}", said(&again));
    // completed cases are not repeated: the log grows by nothing but the line that ends a torn one
    let log = || std::fs::read_to_string(folder.join("log.jsonl")).unwrap();
    let before = log();
    let resumed = validate(&[&arguments[..], &["--resume"]].concat());
    assert_eq!(resumed.status.code(), Some(0), "{}", said(&resumed));
    assert_eq!(log().trim_end(), before.trim_end());
    let mut other = arguments.to_vec();
    other[7] = "4MiB";
    let refused = validate(&[&other[..], &["--resume"]].concat());
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
}

const POINT: &str = "memory_write.256KiB";

#[test]
fn a_claim_that_lies_fails_with_both_numbers_and_an_honest_one_does_not() {
    let folder = scratch("validate-claims");
    let part = folder.join("part.toml");
    let only = format!("l3.{POINT}");
    for (value, code) in [("1e9", 1), ("1e-9", 0)] {
        let text = format!(
            "match = {{ name = \".\" }}\n[[claim]]\npoint = \"{POINT}\"\nvalue = {value}\nunit = \"TB/s\"\n\
             at_least = 0.9\nsource = \"a test\"\n"
        );
        std::fs::write(&part, text).unwrap();
        let output = validate(&["--device", "cpu", "--only", &only, "--part", path(&part)]);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        let words = said(&output);
        assert!(words.contains(&format!("claim {POINT}: ")), "{words}");
        assert_eq!(code == 1, words.contains("claimed 1000000000 TB/s"), "{words}");
    }
}

#[test]
fn faults_in_a_device_fail_its_validation() {
    let folder = scratch("validate-faults");
    let plan = folder.join("plan.json");
    for (fault, status) in [("bit_flip", "fail"), ("hang", "timeout")] {
        let rules = format!(r#"{{"seed": 1, "rules": [{{"fault": "{fault}", "probability": 1.0}}]}}"#);
        std::fs::write(&plan, rules).unwrap();
        let device = format!("sim:rtx-4090,compute,dilation:1,faults:{}", plan.display());
        let output = validate(&["--device", &device, "--level", "1", "--only", "l1.order", "--json"]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON on standard output");
        assert_eq!(case(&report, "l1.order")["status"], status, "{report:#}");
    }
}

#[test]
fn what_cannot_run_is_told_apart_from_what_fails() {
    let absent = validate(&["--device", "cpu@100000", "--level", "1", "--only", "l1.fill"]);
    assert_eq!(absent.status.code(), Some(2), "{}", said(&absent));
    assert!(said(&absent).contains("cannot open device 'cpu@100000'"), "{}", said(&absent));
    let part = scratch("validate-usage").join("part.toml");
    std::fs::write(&part, "match = { nam = \"x\" }").unwrap();
    let loose = part.with_file_name("loose.toml");
    let text = "match = { name = \".\" }\n[[waiver]]\ncase = \"*\"\nreason = \"x\"\nuntil = 2099-01-01\n";
    std::fs::write(&loose, text).unwrap();
    let cases: [(&[&str], &str); 7] = [
        (&["--device", "cpu", "--part", path(&loose)], "would waive everything"),
        (&["--device", "sim:rtx-4090"], "add ',compute': sim:rtx-4090,compute"),
        (&["--device", "cpu", "--part", path(&part)], "did you mean 'name'?"),
        (&["--device", "cpu", "--only", "l1.gem"], "groups: l0.discover"),
        (&["--device", "cpu", "--level", "7"], "from 0 to 6"),
        (&["--device", "cpu", "--soak", "10"], "such as 30s"),
        (&["--device", "cpu", "--memory", "10XB"], "such as 512MiB"),
    ];
    for (arguments, words) in cases {
        let output = validate(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", said(&output));
        assert!(said(&output).contains(words), "{arguments:?}: {}", said(&output));
    }
    std::fs::write(&part, "match = { name = \"^another part$\" }").unwrap();
    let other = validate(&["--device", "cpu", "--only", "l1.fill", "--part", path(&part)]);
    assert_eq!(other.status.code(), Some(2), "{}", said(&other));
    assert!(said(&other).contains("another part"), "{}", said(&other));
}

#[test]
fn the_help_fits_a_screen() {
    let output = validate(&["-h"]);
    let text = said(&output);
    assert!(text.lines().count() <= 40, "{text}");
    assert!(!text.contains("--child"), "{text}");
}
