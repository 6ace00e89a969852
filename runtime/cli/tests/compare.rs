//! `mixfleet compare` and `mixfleet parts` from outside.

use crate::common;
use mixfleet_hal::DType;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

fn mixfleet(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mixfleet")).args(arguments).output().expect("the binary runs")
}

fn json(arguments: &[&str]) -> Value {
    let output = mixfleet(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).expect("JSON on standard output")
}

fn device<'a>(document: &'a Value, name: &str) -> &'a Value {
    let devices = document["devices"].as_array().expect("devices");
    devices.iter().find(|device| device["name"] == name).expect("the device")
}

fn job<'a>(device: &'a Value, name: &str) -> &'a Value {
    device["jobs"].as_array().expect("jobs").iter().find(|job| job["job"] == name).expect("the job")
}

fn file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).expect("a writable directory");
    path
}

const H100_AT_2_69: [&str; 2] = ["--usd-per-hour", "H100-SXM-80GB=2.69"];

/// hetero-papers 4(i): an RTX 4090 beats an H100 at $2.69 for attention bytes below $0.83.
#[test]
fn the_break_even_of_the_rtx_4090_is_the_published_one() {
    let mut arguments = vec!["compare", "--json", "--model", "llama-3.1-70b", "rtx-4090", "h100-sxm-80gb"];
    arguments.extend(H100_AT_2_69);
    let document = json(&arguments);
    assert_eq!(document["schema"], "mixfleet.compare/1");
    assert_eq!(document["basis"], "published");
    let attention = job(device(&document, "RTX-4090"), "attention");
    let break_even = attention["break_even_usd_per_hour"].as_f64().expect("a price");
    assert!((break_even / 0.83 - 1.0).abs() < 0.05, "{break_even}");
    assert_eq!(attention["rival"], "H100-SXM-80GB");
}

#[test]
fn words_name_the_price_below_which_a_part_wins() {
    let mut arguments = vec!["compare", "--model", "Llama-3.1-8B", "rtx-4090", "l40s", "h100-sxm-80gb"];
    arguments.extend(H100_AT_2_69);
    let output = mixfleet(&arguments);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.contains("is the cheapest attention of these 3 below $0.8"), "{text}");
    assert!(text.contains("published kernel times, of the part or of its nearest relatives"), "{text}");
    let line = |end: &str| text.lines().find(|line| line.starts_with("RTX-4090") && line.ends_with(end));
    assert!(line(" %").is_some(), "the likely error of the times is not said: {text}");
    assert!(line("built-in median of 5 smaller clouds, 2026-09-25").is_some(), "{text}");
    let (speeds, dollars) = (text.find("prompt t/s").unwrap(), text.find("what 1 $/h buys").unwrap());
    assert!(speeds < dollars, "{text}");
    let long = |line: &&str| line.len() > 80 && line.trim_start().contains("  ");
    assert_eq!(text.lines().find(long), None, "{text}");
}

#[test]
fn no_line_mixes_origins_and_a_measurement_beside_claims_is_flagged() {
    let roof =
        DeviceProfile::roof(vec![(DType::Bf16, FlopPerSecond(100e12))], BytesPerSecond(800e9), Bytes(24e9));
    let profile = DeviceProfile { fingerprint: "a new part".into(), ..roof };
    let path = file("newpart.json", &serde_json::to_string(&profile).expect("JSON"));
    let path = path.to_str().expect("UTF-8");
    let common = ["compare", "--json", "--model", "llama-3.1-8b", "--usd-per-hour", "newpart=0.4"];
    let document = json(&[&common[..], &[path, "L4"]].concat());
    assert_eq!(document["basis"], "mixed");
    let origins = |name: &str| -> Vec<String> {
        let lines = device(&document, name)["per_dollar"].as_array().expect("lines").clone();
        lines.iter().map(|line| line["origin"].as_str().expect("a word").to_string()).collect()
    };
    assert_eq!(origins("newpart"), ["measured"]);
    assert_eq!(origins("L4"), ["datasheet"]);
    assert_eq!(device(&document, "newpart")["per_dollar"][0]["bytes_per_second"], 2e12);
    let both = format!("L4={path}");
    let measured = json(&[&common[..], &[path, "--profile", &both]].concat());
    assert_eq!(measured["basis"], "measured");
}

#[test]
fn offers_from_a_file_replace_built_in_prices_and_mistakes_name_the_line() {
    let offers = file(
        "offers.csv",
        "device_id,gpu_count,price_hourly,cloud,date\nL4,2,0.5,acme,2026-10-01\nL4,1,0.35,other,2026-10-03\n",
    );
    let offers = offers.to_str().expect("UTF-8");
    let document = json(&["compare", "--json", "--model", "qwen3-8b", "L4", "L40S", "--prices", offers]);
    let price = &device(&document, "L4")["price"];
    assert_eq!(price["usd_per_hour"], 0.3);
    assert_eq!(price["basis"], "median of providers, 2 offers, 2026-10-01 to 2026-10-03");
    assert_eq!(device(&document, "L40S")["price"], Value::Null);
    let all = json(&["compare", "--json", "--model", "qwen3-8b", "--prices", offers]);
    assert_eq!(all["devices"].as_array().map(Vec::len), Some(1), "{all:#}");

    let odd = file("odd.csv", "device_id,price_hourly\nL40X,0.5\n");
    let odd = ["compare", "--json", "--model", "qwen3-8b", "L4", "--prices", odd.to_str().expect("UTF-8")];
    let warned = json(&odd)["warnings"][0].as_str().expect("a warning").to_string();
    assert!(warned.contains("odd.csv:2: no part is called 'L40X'"), "{warned}");
    assert!(String::from_utf8_lossy(&mixfleet(&odd).stderr).contains(&warned));

    let broken = file("broken.csv", "device_id,price_hourly\nL4,0.5\nL4,cheap\n");
    let output =
        mixfleet(&["compare", "--model", "qwen3-8b", "L4", "--prices", broken.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("broken.csv:3: column price_hourly: 'cheap'"), "{error}");
}

#[test]
fn mistakes_on_the_command_line_are_usage_errors_with_a_hint() {
    for (arguments, hint) in [
        (&["--model", "glm-5", "L4"][..], "chooses keys by an index"),
        (&["--model", "qwen3-8b", "L4", "--dtype", "int3"], "known: f32"),
        (&["--model", "qwen3-8b", "L4", "--kv-dtype", "u32"], "KV is in f32"),
        (&["--model", "lama-3.1-8b", "L4"], "closest: llama-3.1-8b"),
        (&["--model", "qwen3-8b", "rtx4099"], "closest: RTX-4090"),
        (&["--model", "qwen3-8b", "L4", "--usd-per-hour", "L40=1"], "compared are L4"),
        (&["--model", "qwen3-8b", "L4", "--usd-per-hour", "L4=0"], "no comparison"),
        (&["--model", "qwen3-8b", "L4", "--usd-per-hour", "0.3"], "expected PART=USD"),
        (&["--model", "qwen3-8b", "L4", "--usd-per-hour", "L4=1e-300"], "below"),
        (&["--model", "qwen3-8b", "L4", "--profile", "L4"], "PART=FILE"),
    ] {
        let output = mixfleet(&[&["compare"], arguments].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(hint), "{arguments:?}: {error}");
    }
}

#[test]
fn without_parts_all_priced_ones_are_compared_and_one_without_a_price_is_shown() {
    let all = json(&["compare", "--json", "--model", "llama-3.1-8b"]);
    assert!(all["devices"].as_array().expect("devices").len() > 30);
    let text = mixfleet(&["compare", "--model", "llama-3.1-8b"]).stdout;
    let text = String::from_utf8(text).expect("UTF-8");
    assert!(text.contains("parts are cheapest at nothing; to see"), "{text}");
    assert!(text.contains("not compared, since no offer is known"), "{text}");
    let without: Vec<&str> =
        all["without_offer"].as_array().expect("ids").iter().filter_map(Value::as_str).collect();
    assert!(["L20", "MI355X", "GAUDI3"].iter().all(|id| without.contains(id)), "{without:?}");
    let unpriced = json(&["compare", "--json", "--model", "llama-3.1-8b", "gaudi3", "L4"]);
    let gaudi = device(&unpriced, "GAUDI3");
    assert_eq!((&gaudi["price"], &gaudi["class"]), (&Value::Null, &Value::Null));
    assert!(job(gaudi, "decode")["break_even_usd_per_hour"].as_f64().expect("a price") > 0.0);
    assert_eq!(device(&unpriced, "L4")["class"], "both");
}

/// The position of a device in a document.
fn place(document: &Value, name: &str) -> usize {
    document["devices"]
        .as_array()
        .expect("devices")
        .iter()
        .position(|device| device["name"] == name)
        .expect(name)
}

/// A V100 at its price decodes for less than others by its datasheet, but its kernel times are not published.
#[test]
fn a_part_in_doubt_comes_after_the_others_and_is_named() {
    let two = ["compare", "--model", "llama-3.1-8b", "V100-SXM2-16GB", "L40S"];
    let document = json(&[&two[..], &["--json"]].concat());
    let cost =
        |name: &str| device(&document, name)["usd_per_million_output_tokens"].as_f64().expect("dollars");
    assert!(cost("V100-SXM2-16GB") < cost("L40S"), "{document:#}");
    assert!(place(&document, "L40S") < place(&document, "V100-SXM2-16GB"));
    assert_eq!(device(&document, "V100-SXM2-16GB")["in_doubt"], true);
    assert_eq!(device(&document, "L40S")["in_doubt"], false);
    let text = String::from_utf8(mixfleet(&two).stdout).expect("UTF-8");
    assert!(text.contains("the times of V100-SXM2-16GB are off: they come last"), "{text}");
    assert!(text.contains("V100-SXM2-16GB (its likely error is not known)"), "{text}");
    let all = json(&["compare", "--json", "--model", "llama-3.1-8b"]);
    let devices = all["devices"].as_array().expect("devices");
    let sorted = |in_doubt: bool| {
        let of = devices.iter().filter(|device| device["in_doubt"] == in_doubt);
        let costs: Vec<f64> =
            of.filter_map(|device| device["usd_per_million_output_tokens"].as_f64()).collect();
        costs.windows(2).all(|pair| pair[0] <= pair[1])
    };
    assert!(sorted(false) && sorted(true) && devices[0]["in_doubt"] == false, "{all:#}");
}

#[test]
fn objectives_bound_batches_and_rule_parts_out() {
    let with = |more: &[&str]| {
        let common = ["compare", "--json", "--model", "llama-3.1-8b", "L40S", "H100-SXM-80GB"];
        json(&[&common[..], more].concat())
    };
    let (free, bound) = (with(&[]), with(&["--tbt", "0.03", "--ttft", "1000"]));
    assert_eq!((&bound["demand"]["tbt_s"], &free["demand"]["tbt_s"]), (&0.03.into(), &Value::Null));
    let decode = |document: &Value| job(device(document, "L40S"), "decode").clone();
    let number = |value: &Value, key: &str| value[key].as_f64().expect("a number");
    let (free, bound) = (decode(&free), decode(&bound));
    assert!(number(&free, "latency_s") > 0.03 && number(&bound, "latency_s") <= 0.03, "{free} {bound}");
    assert!(number(&bound, "batch") < number(&free, "batch") && number(&bound, "batch") >= 1.0);
    assert!(number(&bound, "usd_per_unit") > number(&free, "usd_per_unit"));
    let none = with(&["--tbt", "0.001", "--ttft", "0.001"]);
    for (name, says) in [("decode", "a decode step of one sequence takes"), ("prefill", "a prompt takes")] {
        let unable = job(device(&none, "L40S"), name)["unable"].as_str().expect("a reason").to_owned();
        assert!(unable.contains(says) && unable.ends_with("the objective is 0.001 s"), "{unable}");
    }
    assert!(device(&none, "L40S")["usd_per_million_output_tokens"].is_null());
}

#[test]
fn the_comparison_is_a_page_too() {
    let page = file("compare.html", "");
    let arguments = ["compare", "--model", "llama-3.1-8b", "L4", "L40S", "--tbt", "0.1", "--html"];
    let output = mixfleet(&[&arguments[..], &[page.to_str().expect("UTF-8")]].concat());
    assert!(output.status.success() && !output.stdout.is_empty());
    let page = std::fs::read_to_string(page).expect("the page");
    assert!(page.starts_with("<!doctype html>"));
    for word in [
        "decode, $/Mtoken out",
        "aria-label=\"cost of decode\"",
        "the rent below which it decodes",
        "built-in median of 9 smaller clouds, 2026-09-25",
        "steps within 0.1 s",
        "L40S",
    ] {
        assert!(page.contains(word), "{word}");
    }
    let nowhere = mixfleet(&[&arguments[..], &["no/such/place.html"]].concat());
    assert_eq!(nowhere.status.code(), Some(3));
}

#[test]
fn a_checkpoint_directory_gives_the_shape() {
    for fixture in common::fixtures().into_iter().filter(|fixture| fixture.is_dir()) {
        let path = fixture.to_str().expect("UTF-8");
        let document = json(&["compare", "--json", "--model", path, "L4"]);
        let weights = document["model"]["weight_bytes"].as_f64().expect("bytes");
        let stored: u64 = std::fs::read_dir(&fixture)
            .expect("a directory")
            .map(|entry| entry.expect("an entry"))
            .filter(|entry| entry.path().extension().is_some_and(|kind| kind == "safetensors"))
            .map(|entry| entry.metadata().expect("metadata").len())
            .sum();
        // the up-projections of latents are kept decoded, and keys are made by a matrix of their own
        let config = std::fs::read_to_string(fixture.join("config.json")).expect("a configuration");
        let most = stored as f64 * if config.contains("kv_lora_rank") { 1.1 } else { 1.0 };
        assert!(weights <= most && weights > 0.7 * stored as f64, "{path}: {weights} of {stored}");
    }
}

#[test]
fn the_catalog_is_listed_with_sources() {
    let document = json(&["parts", "--json"]);
    assert_eq!(document["schema"], "mixfleet.parts/1");
    let parts = document["parts"].as_array().expect("parts");
    assert!(parts.len() >= 60);
    assert!(parts.iter().all(|part| part["sources"].as_str().is_some_and(|text| !text.is_empty())));
    let text = String::from_utf8(mixfleet(&["parts"]).stdout).expect("UTF-8");
    assert!(text.contains("RTX-4090") && text.lines().count() > 60);
    assert!(text.contains("C: one source"), "{text}");
}

/// The formats of weights and KV affect the comparison: bytes, batches that fit, and time.
#[test]
fn a_mixture_is_compared_in_every_format() {
    let compare = |more: &[&str]| {
        let common = ["compare", "--json", "--model", "qwen3-30b-a3b", "H100-SXM-80GB", "L4"];
        json(&[&common[..], more].concat())
    };
    let decode = |document: &Value| {
        job(device(document, "H100-SXM-80GB"), "decode")["device_seconds_per_unit"].as_f64().expect("seconds")
    };
    let wide = compare(&[]);
    assert_eq!(
        (&wide["model"]["dtype"], &wide["model"]["kv_bytes_per_token"]),
        (&"bf16".into(), &98_304.into())
    );
    let (mut bytes, mut seconds) = (wide["model"]["weight_bytes"].as_f64().expect("bytes"), decode(&wide));
    for dtype in ["fp8", "nvfp4", "mxfp4", "int4"] {
        let document = compare(&["--dtype", dtype, "--kv-dtype", "bf16"]);
        assert_eq!(document["model"]["dtype"], dtype);
        let (less, faster) = (document["model"]["weight_bytes"].as_f64().expect("bytes"), decode(&document));
        assert!(less < bytes && faster < seconds * 1.02, "{dtype}: {less} {faster} after {bytes} {seconds}");
        (bytes, seconds) = (less, faster);
    }
    assert_eq!(compare(&["--dtype", "fp8"])["model"]["kv_dtype"], "f8e4m3");
    let narrow = compare(&["--dtype", "int4", "--kv-dtype", "fp8"]);
    // 128 codes and four bytes of scale a head
    assert_eq!(narrow["model"]["kv_bytes_per_token"], 50_688);
    assert!(decode(&narrow) < seconds);
}

#[test]
fn models_are_listed_with_sources_and_one_is_described() {
    let document = json(&["models", "--json"]);
    assert_eq!(document["schema"], "mixfleet.models/1");
    let models = document["models"].as_array().expect("models");
    assert!(models.len() >= 45);
    assert!(models.iter().all(|model| model["source"].as_str().is_some_and(|text| text.contains('/'))));
    let one = json(&["models", "DeepSeek-V3", "--json"]);
    let one = &one["models"][0];
    assert_eq!(one["kv_bytes_per_token"]["bf16"], 70_272);
    let resident = one["parameters"]["resident"].as_f64().expect("a number");
    assert!((resident / 671e9 - 1.0).abs() < 0.005, "{resident}");
    let text = String::from_utf8(mixfleet(&["models", "deepseek-v3"]).stdout).expect("UTF-8");
    assert!(text.contains("8 of 256 experts of 2048") && text.contains("KV rank 512"), "{text}");
    let list = String::from_utf8(mixfleet(&["models"]).stdout).expect("UTF-8");
    assert_eq!(list.lines().count(), models.len() + 2);
    let output = mixfleet(&["models", "deepseek-v33"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("deepseek-v3"));
}
