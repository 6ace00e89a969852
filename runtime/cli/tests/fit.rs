//! `mixfleet fit` from outside.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

fn fit(arguments: &[&str], cache: &str) -> Output {
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(cache);
    let mut command = Command::new(env!("CARGO_BIN_EXE_mixfleet"));
    command.arg("fit").args(arguments).env("XDG_CACHE_HOME", cache).output().expect("the binary runs")
}

fn document(arguments: &[&str], cache: &str) -> Value {
    let output = fit(&[arguments, &["--json"]].concat(), cache);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).expect("JSON on standard output")
}

fn row<'a>(document: &'a Value, model: &str, weights: &str) -> Option<&'a Value> {
    let rows = document["fits"].as_array().expect("rows");
    rows.iter().find(|row| row["model"] == model && row["weights"] == weights)
}

#[test]
fn a_24_gb_card_holds_8b_in_bf16_and_70b_in_nothing() {
    let document = document(&["--device", "rtx-4090"], "fit-card");
    assert_eq!(document["schema"], "mixfleet.fit/1");
    let small = row(&document, "llama-3.1-8b", "bf16").expect("8B fits");
    let weights = small["weight_bytes"].as_f64().expect("bytes");
    // 131,072 bytes of KV a token: 2 x 32 layers x 8 heads x 128 x 2 bytes
    let room = document["memory_bytes"].as_f64().expect("bytes") * document["memory_share"].as_f64().unwrap();
    assert_eq!(small["kv_tokens"].as_f64().unwrap(), ((room - weights) / 131_072.0).floor());
    assert!((weights / 16.06e9 - 1.0).abs() < 0.01, "{weights}");
    // decode reads all weights but the embedding's 1.05 GB for a token, at 1,008 GB/s at most (datasheet)
    let rate = small["decode_tokens_per_s"].as_f64().expect("a rate");
    let roof = 1008e9 / (weights - 1.05e9);
    assert!(rate < roof && rate > 0.7 * roof, "{rate} tokens/s, and the roof is {roof}");
    let eight = small["decode_8_tokens_per_s"].as_f64().expect("eight sequences fit");
    assert!(eight > 4.0 * rate && eight < 8.0 * rate, "{eight} of {rate}");
    for weights in ["bf16", "fp8", "int4"] {
        assert!(row(&document, "llama-3.1-70b", weights).is_none(), "{weights}");
    }
    let large = document["too_large"].as_array().expect("models");
    let large = large.iter().find(|model| model["model"] == "llama-3.1-70b").expect("70B is named");
    assert_eq!(large["weights"], "int4");
}

#[test]
fn smaller_formats_decode_faster_and_leave_more_room() {
    let document = document(&["--device", "l40s", "qwen3-8b"], "fit-formats");
    let numbers = |weights: &str| {
        let row = row(&document, "qwen3-8b", weights).expect("it fits");
        [row["decode_tokens_per_s"].as_f64().unwrap(), row["kv_tokens"].as_f64().unwrap()]
    };
    let [bf16, fp8, int4] = ["bf16", "fp8", "int4"].map(numbers);
    assert!(bf16[0] < fp8[0] && fp8[0] < int4[0], "{bf16:?} {fp8:?} {int4:?}");
    // beside fp8 weights KV is in fp8, half of bf16's
    assert!(bf16[1] < int4[1] && int4[1] < fp8[1] && fp8[1] > 2.0 * bf16[1], "{bf16:?} {fp8:?} {int4:?}");
}

/// Published kernel times of narrow formats are of large shapes, and a step of a small model has small ones.
#[test]
fn a_format_gains_no_more_than_the_bytes_it_saves() {
    for device in ["rtx-4090", "l40s", "h100-sxm", "b200-sxm", "t4"] {
        let document = document(&["--device", device, "qwen2.5-0.5b"], &format!("fit-small-{device}"));
        for rate in ["decode_tokens_per_s", "decode_8_tokens_per_s"] {
            let [bf16, fp8, int4] = ["bf16", "fp8", "int4"].map(|weights| {
                row(&document, "qwen2.5-0.5b", weights).expect("it fits")[rate].as_f64().unwrap()
            });
            assert!(fp8 <= 2.0 * bf16 && int4 <= 4.0 * bf16, "{device} {rate}: {bf16} {fp8} {int4}");
        }
    }
}

/// The catalog assumes what launches take. On an H200 our engine decoded 8B at 230.7 tokens/s (2026-11-27).
#[test]
fn the_error_of_a_part_grows_with_the_share_of_launches() {
    let document = document(&["--device", "h200-sxm", "--context", "128", "--dtype", "bf16"], "fit-launches");
    let number = |model: &str, field: &str| row(&document, model, "bf16").expect("it fits")[field].as_f64();
    let [small, large] = ["qwen2.5-0.5b", "llama-3.1-8b"].map(|model| number(model, "error").expect("known"));
    assert!(small > 1.5 * large && large > 0.04, "{small} {large}");
    let off = 1.0 - number("llama-3.1-8b", "decode_tokens_per_s").expect("a rate") / 230.7;
    assert!(off.abs() < 2.0 * large, "{off} off, and {large} is likely");
}

#[test]
fn a_device_of_this_machine_is_measured_once() {
    let asked = ["--device", "cpu", "qwen3-0.6b", "--dtype", "bf16"];
    let first = fit(&[&asked[..], &["--again"]].concat(), "fit-own");
    let second = fit(&asked, "fit-own");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(first.status.success() && second.status.success(), "{}", text(&first.stderr));
    assert!(text(&first.stderr).contains("measuring"), "{}", text(&first.stderr));
    assert!(!text(&second.stderr).contains("measuring"), "{}", text(&second.stderr));
    assert_eq!(text(&first.stdout), text(&second.stdout));
    assert!(text(&first.stdout).contains("qwen3-0.6b  bf16"), "{}", text(&first.stdout));
}

#[test]
fn unknown_devices_and_models_are_usage_errors() {
    for (arguments, message) in [
        (&["--device", "rtx-4091"][..], "no part is called 'rtx-4091'; closest: RTX-4090"),
        (&["--device", "l4", "qwen3-9b"][..], "closest"),
    ] {
        let output = fit(arguments, "fit-errors");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.contains(message), "{errors}");
    }
}
