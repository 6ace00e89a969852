//! Reports of `validate` from outside: their first line, compared, signed, of all devices, and what to start
//! from.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common::{mixfleet, scratch};
use minisign::KeyPair;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

/// The end of a command: its status, and what it said on standard output and standard error.
fn ended(words: &[&str]) -> (Option<i32>, String, String) {
    in_text(&mixfleet().args(words).output().expect("the binary runs"))
}

fn in_text(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// A device whose every operation flips a bit.
fn faulty(folder: &Path) -> String {
    let plan = folder.join("plan.json");
    fs::write(&plan, r#"{"seed": 1, "rules": [{"fault": "bit_flip", "probability": 1.0}]}"#).unwrap();
    format!("sim:rtx-4090,compute,dilation:1,faults:{}", plan.display())
}

const SOME: &str = "l1.rms_norm,l1.fill";

#[test]
fn a_failure_is_in_the_first_line_with_its_worst_error() {
    let folder = scratch("reports-failure");
    let out = folder.join("report");
    let (code, told, said) =
        ended(&["validate", "--device", &faulty(&folder), "--only", SOME, "--out", text(&out)]);
    assert_eq!(code, Some(1), "{said}");
    let first = told.lines().next().unwrap();
    assert!(first.contains("FAIL: l1.rms_norm.") && first.contains(" more)"), "{first}");
    let last = said.lines().last().unwrap();
    assert!(last.starts_with("FAIL; report: ") && last.ends_with("report.html"), "{last}");
    let report: Value = serde_json::from_slice(&fs::read(out.join("results.json")).unwrap()).unwrap();
    let worst = report["levels"][0]["error_of_bound_max"].as_f64().unwrap();
    assert!(worst > 1.0, "{worst}");
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("FAIL: l1.rms_norm.") && page.contains("build: "), "{page}");
}

#[test]
fn two_reports_are_compared_and_only_what_broke_fails() {
    let folder = scratch("reports-diff");
    let [good, bad] = ["good", "bad"].map(|name| folder.join(name));
    for (device, out, want) in [("cpu", &good, Some(0)), (&faulty(&folder), &bad, Some(1))] {
        let (code, _, said) = ended(&["validate", "--device", device, "--only", SOME, "--out", text(out)]);
        assert_eq!(code, want, "{said}");
    }
    let page = folder.join("diff.html");
    let (code, told, said) = ended(&["validate", "diff", text(&good), text(&bad), "--html", text(&page)]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        told.contains("passed before and fail now") && said.contains("the first: l1.rms_norm."),
        "{told}{said}"
    );
    assert!(fs::read_to_string(page).unwrap().contains("Passed before, fails now"));

    // a fixed failure, and equal reports, are no failures
    let (code, told, said) =
        ended(&["validate", "diff", text(&bad), text(&good.join("results.json")), "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let diff: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(diff["schema"], "mixfleet.validation-diff/1");
    assert!(!diff["mended"].as_array().unwrap().is_empty() && diff["broke"].as_array().unwrap().is_empty());
    assert_eq!(ended(&["validate", "diff", text(&good), text(&good)]).0, Some(0));
    let (code, _, said) = ended(&["validate", "diff", text(&good), text(&folder.join("none"))]);
    assert!(code == Some(2) && said.contains("none"), "{said}");
}

#[test]
fn a_part_file_to_start_from_is_one_that_is_taken() {
    let folder = scratch("reports-part");
    let part = folder.join("part.toml");
    let device = "sim:rtx-4090,compute,dilation:1";
    let (code, _, said) = ended(&["validate", "--init-part", text(&part), "--device", device]);
    assert!(code == Some(0) && said.contains("RTX 4090"), "{said}");
    let written = fs::read_to_string(&part).unwrap();
    assert!(
        written.contains("value = 1008") && written.contains("gemm.bf16."),
        "of the datasheet: {written}"
    );
    let words = ["validate", "--device", device, "--level", "1", "--only", "l1.fill", "--part", text(&part)];
    let (code, _, said) = ended(&words);
    assert_eq!(code, Some(0), "{said}");
    let (code, _, said) = ended(&["validate", "--init-part", text(&part), "--device", device]);
    assert!(code == Some(2) && said.contains("exists already"), "{said}");
    assert_eq!(fs::read_to_string(&part).unwrap(), written);

    let (profile, measured) = (folder.join("profile.json"), folder.join("measured.toml"));
    let point = "memory_read.256KiB";
    let words = ["profile", "--device", "cpu", "--quick", "--only", point, "--out", text(&profile)];
    assert_eq!(ended(&words).0, Some(0));
    let (code, _, said) = ended(&["validate", "--init-part", text(&measured), "--profile", text(&profile)]);
    assert_eq!(code, Some(0), "{said}");
    assert!(fs::read_to_string(&measured).unwrap().contains(point));
    let only = format!("l3.{point}");
    let (code, told, said) =
        ended(&["validate", "--device", "cpu", "--only", &only, "--part", text(&measured)]);
    // how fast the machine is now decides between a pass and a fail
    assert!(matches!(code, Some(0 | 1)) && told.contains(&format!("claim {point}: ")), "{told}{said}");
    let (code, _, said) = ended(&["validate", "--profile", text(&profile)]);
    assert!(code == Some(2) && said.contains("--init-part"), "{said}");
}

#[test]
fn all_devices_have_a_report_each_and_a_summary() {
    let folder = scratch("reports-all").join("all");
    let output =
        mixfleet().args(["validate", "--all-devices", "--only", SOME, "--out", text(&folder)]).output();
    let (code, told, said) = in_text(&output.unwrap());
    assert_eq!(code, Some(0), "{told}{said}");
    let summary: Value = serde_json::from_slice(&fs::read(folder.join("summary.json")).unwrap()).unwrap();
    let devices = summary["devices"].as_array().unwrap();
    assert!(devices.iter().any(|device| device["device"] == "cpu"), "{summary}");
    let page = fs::read_to_string(folder.join("index.html")).unwrap();
    for device in devices {
        let report = folder.join(device["report"].as_str().unwrap());
        assert!(report.is_file() && report.with_file_name("report.html").is_file(), "{device}");
        let name = device["device"].as_str().unwrap();
        assert!(told.contains(&format!("{name}: PARTIAL")) && page.contains(name), "{told}");
    }
    let (code, _, said) = ended(&["validate", "--all-devices", "--device", "cpu"]);
    assert!(code == Some(2) && said.contains("cannot be used with"), "{said}");
}

/// The cores by each backend that drives them here: three drivers at once.
#[test]
fn devices_that_are_named_have_a_report_each() {
    let (_, told, _) = ended(&["devices", "--json"]);
    let found: Value = serde_json::from_str(&told).unwrap();
    let found: Vec<&str> =
        found["devices"].as_array().unwrap().iter().map(|device| device["id"].as_str().unwrap()).collect();
    let mut devices = vec!["cpu"];
    for device in ["opencl:0", "wgpu:0"] {
        match found.contains(&device) {
            true => devices.push(device),
            false => println!("SKIPPED: no {device} here"),
        }
    }
    // one more, so that there are several anywhere
    devices.push("sim:rtx-4090,compute,dilation:1");
    let folder = scratch("reports-several").join("all");
    let mut words =
        vec!["validate", "--only", "l1.fill,l2.random", "--memory", "1MiB", "--out", text(&folder)];
    words.extend(devices.iter().flat_map(|device| ["--device", device]));
    let (code, told, said) = ended(&words);
    assert_eq!(code, Some(0), "{told}{said}");
    let summary: Value = serde_json::from_slice(&fs::read(folder.join("summary.json")).unwrap()).unwrap();
    let reported: Vec<(&str, &str)> = summary["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|device| (device["device"].as_str().unwrap(), device["verdict"].as_str().unwrap()))
        .collect();
    assert_eq!(reported, devices.iter().map(|device| (*device, "partial")).collect::<Vec<_>>());
    for device in summary["devices"].as_array().unwrap() {
        let report: Value =
            serde_json::from_slice(&fs::read(folder.join(device["report"].as_str().unwrap())).unwrap())
                .unwrap();
        let passed =
            report["cases"].as_array().unwrap().iter().filter(|case| case["status"] == "pass").count();
        assert!(passed >= 4, "{device}: {passed} cases passed");
    }
    let twice = ended(&["validate", "--device", "cpu", "--device", "cpu"]);
    assert!(twice.0 == Some(2) && twice.2.contains("named twice"), "{}", twice.2);
    let claims = ended(&["validate", "--device", "cpu", "--device", "cpu@0", "--part", "part.toml"]);
    assert!(claims.0 == Some(2) && claims.2.contains("--part is for one device"), "{}", claims.2);
}

#[test]
fn a_signed_report_is_told_from_a_changed_one() {
    let folder = scratch("reports-signed");
    let made = KeyPair::generate_unencrypted_keypair().unwrap();
    let (secret, public) = (folder.join("secret.key"), folder.join("public.key"));
    fs::write(&secret, made.sk.to_box(None).unwrap().into_string()).unwrap();
    fs::write(&public, made.pk.to_box().unwrap().into_string()).unwrap();
    let report = folder.join("report");
    let words =
        ["validate", "--device", "cpu", "--only", "l1.fill", "--sign", text(&secret), "--out", text(&report)];
    let (code, told, said) = ended(&words);
    assert!(code == Some(0) && told.contains("SHA256SUMS.minisig"), "{told}{said}");
    let verified = |key: &str| ended(&["validate", "verify", text(&report), "--key", key]);
    let (code, told, said) = verified(text(&public));
    assert!(
        code == Some(0) && told.contains("signed: mixfleet validation of") && told.contains("partial"),
        "{said}"
    );
    assert_eq!(verified(&made.pk.to_base64()).0, Some(0), "the key itself");
    let other = KeyPair::generate_unencrypted_keypair().unwrap().pk.to_base64();
    assert_eq!(verified(&other).0, Some(1));
    assert_eq!(verified("no such key").0, Some(2));

    // a file beside the signed ones
    let extra = report.join("notes.html");
    fs::write(&extra, "looks signed").unwrap();
    let (code, _, said) = verified(text(&public));
    assert!(code == Some(1) && said.contains("notes.html is in the folder of a signed report"), "{said}");
    fs::remove_file(extra).unwrap();

    // a file that changed, then one whose checksum was changed with it
    let results = report.join("results.json");
    let changed = fs::read_to_string(&results).unwrap().replace("partial", "pass");
    fs::write(&results, &changed).unwrap();
    let (code, _, said) = verified(text(&public));
    assert!(code == Some(1) && said.contains("results.json is not as it was signed"), "{said}");
    let sums = report.join("SHA256SUMS");
    let sum = mixfleet_hwtests::validate::sha256(changed.as_bytes());
    let old = fs::read_to_string(&sums).unwrap();
    let line = old.lines().find(|line| line.ends_with("results.json")).unwrap();
    fs::write(&sums, old.replace(line, &format!("{sum}  results.json"))).unwrap();
    let (code, _, said) = verified(text(&public));
    assert!(code == Some(1) && said.contains("minisig"), "{said}");

    // a key with a password, without a terminal
    let locked = KeyPair::generate_encrypted_keypair(Some("secret".to_owned())).unwrap();
    fs::write(&secret, locked.sk.to_box(None).unwrap().into_string()).unwrap();
    let words = ["validate", "--device", "cpu", "--only", "l1.fill", "--sign", text(&secret)];
    let (code, _, said) = ended(&words);
    assert!(code == Some(2) && said.contains("MIXFLEET_SIGN_PASSWORD"), "{said}");
}

#[test]
fn a_trace_has_a_page() {
    let folder = scratch("reports-trace");
    let (trace, page) = (folder.join("trace.jsonl"), folder.join("trace.html"));
    let line = |at: u64| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": 1000, \"output_length\": 9, \"hash_ids\": [0, {at}]}}\n"
        )
    };
    fs::write(&trace, (0..50).map(line).collect::<String>()).unwrap();
    let (code, told, said) = ended(&["trace", "stats", text(&trace), "--html", text(&page)]);
    assert!(code == Some(0) && told.contains("50 requests"), "{said}");
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.contains("share of prompt tokens over blocks of a cache") && page.contains("Lengths"),
        "{page}"
    );
}
