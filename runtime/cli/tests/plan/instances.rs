//! What instances of a plan store weights in, and how their devices share them.

use super::{STEADY, fails, is_sound, number, planned, pools, run, simulated};
use crate::common::scratch;
use serde_json::Value;

/// An L40S multiplies 8 bits at twice the rate, so that this load takes fewer of them.
#[test]
fn the_cheapest_dtype_is_chosen_and_named_wherever_a_fleet_is() {
    let out = scratch("plan-dtype").join("out");
    let mut arguments = [&STEADY[..], &["--engine", "vllm"]].concat();
    (arguments[4], arguments[14]) = ("12", "L40S");
    let document = planned(&arguments, &["--dtype", "bf16,fp8,bf16"]);
    is_sound(&document, 0.99);
    let fleets = document["fleets"].as_array().unwrap();
    assert_eq!(document["dtypes"], serde_json::json!(["bf16", "fp8"]));
    assert!(document["dtype"] == "fp8" && fleets[0]["dtype"] == "fp8", "{document:#}");
    let alone = planned(&arguments, &[]);
    assert!(alone["dtype"] == "bf16" && alone["dtypes"] == serde_json::json!(["bf16"]));
    // of so few instances both dtypes may need as many
    assert!(number(&fleets[0]["usd_per_hour"]) <= number(&alone["fleets"][0]["usd_per_hour"]), "{alone:#}");
    let bound = |document: &Value| number(&document["lower_bound_usd_per_hour"]);
    assert!(bound(&document) < bound(&alone));

    let files = ["--dtype", "bf16,fp8", "--out", out.to_str().unwrap()];
    let table = String::from_utf8(run(&arguments, &files).stdout).unwrap();
    assert!(table.contains("in bf16 or fp8, engine vllm") && table.contains(", fp8"), "{table}");
    let file = std::fs::read_to_string(out.join("FLEET.toml")).unwrap();
    assert!(file.contains("dtype = \"fp8\""), "{file}");
    let attained = simulated(&out.join("FLEET.toml"), &out.join("load.jsonl"), &[]);
    assert_eq!(attained, number(&fleets[0]["attained"]));
    let launch = std::fs::read_to_string(out.join("vllm.sh")).unwrap();
    assert!(launch.contains("--quantization fp8"), "{launch}");
    fails(&run(&STEADY, &["--dtype", "bf16,int3"]), 2, &["--dtype", "int3", "nvfp4"]);
}

/// 671B parameters in 8 bits are more than 8 H100s hold.
#[test]
fn a_model_that_no_server_holds_is_planned_in_stages_and_by_experts_and_simulates() {
    let out = scratch("plan-stages").join("out");
    let mut arguments = [&STEADY[..], &["--engine", "vllm", "--out", out.to_str().unwrap()]].concat();
    (arguments[2], arguments[4], arguments[14]) = ("deepseek-v3", "1", "H100-SXM-80GB");
    (arguments[10], arguments[12]) = ("5", "0.15");
    let document = planned(&arguments, &["--dtype", "fp8"]);
    is_sound(&document, 0.99);
    let first = &document["fleets"][0];
    for pool in pools(first) {
        let devices = pool["devices_per_instance"].as_u64().unwrap();
        assert!(devices >= 16 && pool["pipeline_stages"].as_u64() == Some(devices / 8), "{pool}");
    }
    assert!(pools(first).iter().any(|pool| pool["expert_parallel"] == true), "{first:#}");
    let file = std::fs::read_to_string(out.join("FLEET.toml")).unwrap();
    assert!(file.contains("devices_per_instance = 8\n") && file.contains("pipeline_stages = 2\n"), "{file}");
    assert!(file.contains("expert_parallel = true\n"), "{file}");
    let attained = simulated(&out.join("FLEET.toml"), &out.join("load.jsonl"), &[]);
    assert_eq!(attained, number(&first["attained"]));
    let launch = std::fs::read_to_string(out.join("vllm.sh")).unwrap();
    let words = "--data-parallel-size 8 --enable-expert-parallel --pipeline-parallel-size 2";
    assert!(launch.contains(words), "{launch}");
}
