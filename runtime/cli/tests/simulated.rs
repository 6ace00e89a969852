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
    // a part that is not known is a mistake, one that fails is not
    assert!(matches!(output.status.code(), Some(2 | 3)), "{:?}", output.status);
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
fn parts_that_share_a_model_answer_as_one_and_take_the_time_of_all() {
    let one = generate(&["--device", "sim:L4"]).unwrap();
    let two = "(tp:sim:L4,sim:L4)";
    let groups =
        ["tp:sim:L4,sim:L4".into(), format!("pp:{two},{two}"), "attn:sim:L4,sim:L40S,sim:L40S".into()];
    for group in &groups {
        let answer = generate(&["--device", group]).unwrap();
        assert_eq!((&answer["ids"], &answer["placement"]["decode"]), (&one["ids"], &Value::from(&group[..])));
    }
    // no part of 24 GB holds it, and 8 parts read their shares at the same time
    let big = |device: &str| generate(&["--model", "random:llama-3.1-70b", "--device", device]);
    let four = "(tp:sim:RTX-4090,sim:RTX-4090,sim:RTX-4090,sim:RTX-4090)";
    let answer = big(&format!("pp:{four},{four}")).unwrap();
    let (tbt, read_by_one) = (answer["tbt_s"].as_f64().unwrap(), 141.1e9 / 1.008e12);
    assert!(tbt > read_by_one / 4.0 && tbt < read_by_one, "{tbt}");
}

#[test]
fn a_directory_without_weights_is_enough_and_what_does_not_fit_is_told_what_would() {
    let directory = scratch("simulated-config");
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 14,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    });
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
    let tokenizer = "../fuzz/corpus/tokenizer_json/word_level.json";
    let tokenizer = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(tokenizer);
    std::fs::copy(tokenizer, directory.join("tokenizer.json")).unwrap();
    let run = |device: &str| {
        let output = mixfleet()
            .args(["generate", "--json", "--ignore-eos", "--prompt-ids", "1,2,3", "--max-tokens", "5"])
            .args(["--random-weights", "--kv-memory", "0.1", "--model", directory.to_str().unwrap()])
            .args(["--device", device])
            .output()
            .unwrap();
        (output.status.code(), output)
    };
    // 24 GB
    let (code, output) = run("tp:sim:T4,sim:T4");
    assert_eq!(code, Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["ids"].as_array().unwrap().len(), 5);
    // only one of these has the weights
    let (code, output) = run("attn:sim:T4,sim:T4");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("does not fit") && error.contains("it fits as tp:sim:T4,sim:T4"), "{error}");
}

#[test]
fn what_cannot_be_opened_is_explained() {
    let message = generate(&["--device", "sim:rtx-409"]).unwrap_err();
    assert!(message.contains("closest: RTX-4090"), "{message}");
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
    assert!(message.contains("is not a fault plan"), "{message}");
}

#[test]
fn the_list_of_devices_has_one_line_for_all_of_them() {
    let output = mixfleet().arg("devices").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("sim:")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines[0].contains("sim:PART") && lines[0].contains("sim:rtx-4090"), "{}", lines[0]);
}
