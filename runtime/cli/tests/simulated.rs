//! Simulated parts through the binary.

use crate::common::{mixfleet, scratch};
use serde_json::Value;

fn generate(devices: &[&str]) -> Result<Value, String> {
    let output = mixfleet()
        .args(["generate", "--json", "--ignore-eos", "--prompt", "Once upon a time", "--max-tokens", "16"])
        .args(["--kv-memory", "0.02"])
        .args(devices)
        .output()
        .unwrap();
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).unwrap());
    }
    assert_eq!(output.status.code(), Some(3));
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn two_parts_answer_as_one_and_a_computing_one_as_the_cpu() {
    let one = generate(&["--device", "sim:L4"]).unwrap();
    let two = generate(&["--prefill", "sim:h100-sxm-80gb", "--decode", "sim:RTX-4090#2"]).unwrap();
    assert_eq!(two["ids"], one["ids"]);
    assert_eq!(one["ids"].as_array().unwrap().len(), 16);
    assert_eq!(two["placement"]["decode"], "sim:RTX-4090#2");
    let computed = generate(&["--device", "sim:rtx-4090,compute,dilation:20"]).unwrap();
    let cpu = generate(&["--device", "cpu"]).unwrap();
    assert_eq!(computed["ids"], cpu["ids"]);
}

#[test]
fn what_cannot_be_opened_is_explained() {
    let message = generate(&["--device", "sim:rtx-409"]).unwrap_err();
    assert!(message.contains("did you mean RTX-4090"), "{message}");
    let message = generate(&["--device", "sim:none.json"]).unwrap_err();
    assert!(message.contains("cannot read the profile none.json"), "{message}");
    let plan = scratch("simulated").join("plan.json");
    std::fs::write(&plan, r#"{"seed": 1, "rules": [{"fault": "fail", "probability": 1.0}]}"#).unwrap();
    let message = generate(&["--device", &format!("sim:l4,faults:{}", plan.display())]).unwrap_err();
    // where the calibration is not kept from before, it is what fails
    let lost = message.contains("its instance was lost") || message.contains("operation 0 failed as planned");
    assert!(lost, "{message}");
    std::fs::write(&plan, "{}").unwrap();
    let message = generate(&["--device", &format!("sim:l4,faults:{}", plan.display())]).unwrap_err();
    assert!(message.contains("is no plan of faults"), "{message}");
}

#[test]
fn the_list_of_devices_has_one_line_for_all_of_them() {
    let output = mixfleet().arg("devices").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("sim:")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines[0].contains("sim:PART") && lines[0].contains("sim:rtx-4090"), "{}", lines[0]);
}
