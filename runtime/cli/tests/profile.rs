//! `mixfleet profile` from outside.

use crate::common::{mixfleet, scratch};
use serde_json::Value;

#[test]
fn a_budget_of_points_is_kept_and_the_error_to_expect_is_told_everywhere() {
    let file = scratch("profile-budget").join("profile.json");
    let output = mixfleet()
        .args(["profile", "--quick", "--budget", "12", "--device", "cpu@0", "--json", "--device-profile"])
        .arg(&file)
        .args(["--only", "gemm.bf16.m*.n2048.*,attn_decode.bf16.b1.c512.*,attn_prefill.*,memory_read.4MiB"])
        .output()
        .unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{why}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let points = document["points"].as_array().unwrap();
    let limited = |point: &&Value| point["group"] != "memory" && point["status"] == "ok";
    let measured = points.iter().filter(limited).count();
    assert!((3..=12).contains(&measured), "{measured} points");
    assert!(points.iter().any(|point| point["status"] == "skipped"));
    let expected = document["expected"].as_array().unwrap();
    assert!(expected.iter().any(|kind| kind["op"] == "gemm"), "{expected:?}");
    let profile: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(profile["points"].as_array().unwrap().len() > measured);
    let evidence = profile["provenance"]["evidence"].as_array().unwrap();
    let of = |all: &[Value]| all.iter().find(|one| one["op"] == "gemm").map(|one| one["error"].clone());
    assert_eq!(of(evidence), of(expected));
}

#[test]
fn a_budget_that_tells_nothing_is_refused_and_the_help_fits_a_screen() {
    let output = mixfleet().args(["profile", "--budget", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let help = mixfleet().args(["profile", "-h"]).output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(help.contains("--budget") && help.lines().count() <= 40, "{help}");
}
