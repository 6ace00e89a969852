//! `mixfleet plan` from outside.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Llama-3.1-8B at five requests a second, on parts that differ in what they do for less.
const STEADY: [&str; 17] = [
    "plan",
    "--model",
    "llama-3.1-8b",
    "--rate",
    "5",
    "--input-tokens",
    "1500",
    "--output-tokens",
    "150",
    "--ttft",
    "2",
    "--tbt",
    "0.1",
    "--parts",
    "L40S,RTX-4090",
    "--budget-s",
    "600",
];

fn run(arguments: &[&str], more: &[&str]) -> Output {
    mixfleet().args(arguments).args(more).output().unwrap()
}

/// The document of a plan that found a fleet.
fn planned(arguments: &[&str], more: &[&str]) -> Value {
    let output = run(arguments, &[more, &["--json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{more:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn fails(output: &Output, code: i32, says: &[&str]) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{error}");
    for word in says {
        assert!(error.contains(word), "{word}: {error}");
    }
    error
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

fn pools(fleet: &Value) -> &Vec<Value> {
    fleet["pools"].as_array().unwrap()
}

/// Devices of a part in a fleet.
fn devices(fleet: &Value, part: &str) -> u64 {
    let own = pools(fleet).iter().filter(|pool| pool["part"] == part);
    own.map(|pool| pool["count"].as_u64().unwrap() * pool["devices_per_instance"].as_u64().unwrap()).sum()
}

fn write(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Every fleet that is shown meets the objective, costs what its pools cost, and none costs less than the
/// bound.
fn is_sound(document: &Value, attain: f64) {
    assert_eq!(document["schema"], "mixfleet.plan/1");
    let fleets = document["fleets"].as_array().unwrap();
    let bound = number(&document["lower_bound_usd_per_hour"]);
    assert!(!fleets.is_empty() && document["complete"] == true, "{document:#}");
    let prices: Vec<f64> = fleets.iter().map(|fleet| number(&fleet["usd_per_hour"])).collect();
    assert!(prices.windows(2).all(|pair| pair[0] <= pair[1]) && bound <= prices[0], "{bound} {prices:?}");
    for fleet in fleets {
        assert!(
            number(&fleet["attained"]) >= attain && fleet["no_instance_can_be_spared"] == true,
            "{fleet:#}"
        );
        let rents = pools(fleet).iter().map(|pool| {
            let devices = number(&pool["count"]) * number(&pool["devices_per_instance"]);
            devices * number(&pool["usd_per_hour_of_device"])
        });
        assert!((rents.sum::<f64>() - number(&fleet["usd_per_hour"])).abs() < 1e-6, "{fleet:#}");
        for pool in pools(fleet) {
            assert!(["prefill", "decode", "auto"].contains(&pool["role"].as_str().unwrap()), "{pool}");
            assert!(pool["count"].as_u64().unwrap() > 0 && !pool["price_from"].as_str().unwrap().is_empty());
        }
    }
    let homogeneous = &document["homogeneous"];
    let part = &pools(homogeneous)[0]["part"];
    assert!(pools(homogeneous).iter().all(|pool| pool["part"] == *part));
    assert!(number(&homogeneous["usd_per_hour"]) >= prices[0]);
}

/// The share of requests that meet the objectives, by `mixfleet simulate`.
fn simulated(fleet: &Path, trace: &Path, more: &[&str]) -> f64 {
    let mut command = mixfleet();
    command.arg("simulate").arg("--json").arg("--fleet").arg(fleet).arg("--trace").arg(trace).args(more);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    number(&results["slo_attainment"])
}

/// The fleet file with one instance less of its pool of that number; none if that leaves the pool empty.
fn with_one_less(file: &str, pool: usize) -> Option<String> {
    let mut at = 0;
    let lines = file.lines().map(|line| match line.strip_prefix("count = ") {
        Some(count) => {
            at += 1;
            let count = count.parse::<u32>().unwrap() - u32::from(at - 1 == pool);
            format!("count = {count}\n")
        }
        None => format!("{line}\n"),
    });
    let text: String = lines.collect();
    (!text.contains("count = 0\n")).then_some(text)
}

#[test]
fn a_rate_is_planned_for_and_the_written_fleet_holds_in_simulate_with_nothing_to_spare() {
    let directory = scratch("plan-rate");
    let out = directory.join("out");
    let mut arguments = [&STEADY[..], &["--out", out.to_str().unwrap()]].concat();
    arguments[4] = "12";
    let document = planned(&arguments, &[]);
    is_sound(&document, 0.99);
    let (file, trace) = (out.join("FLEET.toml"), out.join("load.jsonl"));
    let attained = simulated(&file, &trace, &[]);
    assert_eq!(attained, number(&document["fleets"][0]["attained"]), "simulate sees what the plan saw");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut tried = 0;
    for pool in 0..pools(&document["fleets"][0]).len() {
        let Some(fewer) = with_one_less(&text, pool) else { continue };
        let fewer = PathBuf::from(write(&directory, "fewer.toml", &fewer));
        assert!(simulated(&fewer, &trace, &[]) < 0.99, "{text}");
        tried += 1;
    }
    assert!(tried > 0, "{text}");
    assert_eq!(planned(&arguments, &[]), document, "one input, one plan");

    let output = run(&arguments, &[]);
    let table = String::from_utf8(output.stdout).unwrap();
    for word in ["lower bound", "of one part", "$/Mt out", "attained", "prices"] {
        assert!(table.contains(word), "{word}: {table}");
    }
}

#[test]
fn a_trace_is_planned_for_and_the_written_fleet_holds_on_it() {
    let directory = scratch("plan-trace");
    let (trace, out) = (directory.join("t.jsonl"), directory.join("out"));
    let mut command = mixfleet();
    command
        .args(["trace", "generate", "--requests", "600", "--rate", "2", "--seed", "5", "--out"])
        .arg(&trace);
    assert!(command.status().unwrap().success());
    let of_trace = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--ttft",
        "10",
        "--tbt",
        "0.1",
        "--attain",
        "0.95",
        "--parts",
        "L40S,H100-SXM-80GB",
        "--budget-s",
        "600",
        "--trace",
        trace.to_str().unwrap(),
        "--jitter",
    ];
    let document = planned(&of_trace, &["--out", out.to_str().unwrap()]);
    is_sound(&document, 0.95);
    assert!(simulated(&out.join("FLEET.toml"), &trace, &["--jitter"]) >= 0.95);
    // more of the same load needs no less
    let more = planned(&of_trace, &["--headroom", "0.5"]);
    assert!(number(&more["lower_bound_usd_per_hour"]) > number(&document["lower_bound_usd_per_hour"]));
}

#[test]
fn what_has_no_offer_or_is_not_in_stock_is_not_taken() {
    let directory = scratch("plan-offers");
    let prices = write(&directory, "prices.csv", "device_id,price_hourly,date\nL40S,0.7,2026-10-01\n");
    let document = planned(&STEADY, &["--prices", &prices]);
    is_sound(&document, 0.99);
    assert_eq!(document["without_offer"], serde_json::json!(["RTX-4090"]));
    let price_from = pools(&document["fleets"][0])[0]["price_from"].as_str().unwrap();
    assert!(price_from.contains("2026-10-01"), "{price_from}");
    for fleet in document["fleets"].as_array().unwrap() {
        assert_eq!(devices(fleet, "RTX-4090"), 0);
    }

    let free = planned(&STEADY, &[]);
    let taken = devices(&free["fleets"][0], "RTX-4090");
    assert!(taken > 1, "{free:#}");
    let stock = format!("device_id,count\nrtx-4090,{}\nL40S,64\n", taken - 1);
    let stock = write(&directory, "stock.csv", &stock);
    let limited = planned(&STEADY, &["--inventory", &stock]);
    is_sound(&limited, 0.99);
    for fleet in limited["fleets"].as_array().unwrap() {
        assert!(devices(fleet, "RTX-4090") < taken, "{fleet:#}");
    }
    assert!(number(&limited["fleets"][0]["usd_per_hour"]) >= number(&free["fleets"][0]["usd_per_hour"]));

    let one = write(&directory, "one.csv", "device_id,count\nRTX-4090,1\n");
    let mut many = STEADY;
    many[4] = "100";
    fails(&run(&many, &["--inventory", &one]), 1, &["the inventory binds", "% of the load"]);
}

#[test]
fn an_objective_that_nothing_meets_is_told_with_what_binds_and_the_nearest() {
    let mut late = STEADY.to_vec();
    late[10] = "0.001";
    let output = run(&late, &["--json"]);
    fails(&output, 1, &["TTFT binds", "the nearest is"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["fleets"].as_array().unwrap().is_empty() && document["homogeneous"].is_null());
    let nearest = number(&document["shortfall"][0]["nearest_s"]);
    assert_eq!(document["shortfall"][0]["binds"], "ttft");
    assert!(nearest > 0.001 && nearest < 2.0, "{nearest}");

    let mut slow = STEADY.to_vec();
    slow[12] = "0.0001";
    fails(&run(&slow, &[]), 1, &["TBT binds"]);
    let mut large = STEADY.to_vec();
    large[2] = "llama-3.1-405b";
    large[14] = "RTX-4090";
    fails(&run(&large, &[]), 1, &["memory binds"]);
}

#[test]
fn mistakes_are_usage_errors_that_say_what_to_do() {
    let directory = scratch("plan-usage");
    let but = |at: usize, word: &'static str| {
        let mut words = STEADY.to_vec();
        words[at] = word;
        words
    };
    fails(&run(&but(2, "llama-9"), &[]), 2, &["--model"]);
    fails(&run(&but(14, "RTX-4091"), &[]), 2, &["--parts", "closest: RTX-4090"]);
    fails(&run(&but(4, "0"), &[]), 2, &["--rate"]);
    fails(&run(&but(10, "-1"), &[]), 2, &["--ttft"]);
    fails(&run(&STEADY, &["--attain", "1.5"]), 2, &["--attain"]);
    fails(&run(&STEADY, &["--trace", "t.jsonl"]), 2, &["--trace", "--rate"]);
    fails(&run(&["plan", "--model", "llama-3.1-8b", "--ttft", "1", "--tbt", "0.1"], &[]), 2, &["--trace"]);
    let prices = write(&directory, "prices.csv", "device_id,price_hourly\nH20-96GB,0.8\n");
    fails(&run(&STEADY, &["--prices", &prices]), 2, &["--prices"]);
    let stock = write(&directory, "stock.csv", "device_id,count\nL40S,many\n");
    fails(&run(&STEADY, &["--inventory", &stock]), 3, &["stock.csv:2", "device_id and count"]);
}

#[test]
fn a_budget_that_is_too_short_is_told_and_spares_are_there_beside_what_is_needed() {
    let mut short = STEADY;
    short[16] = "0.000001";
    let output = run(&short, &["--json"]);
    fails(&output, 1, &["a longer --budget-s"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["complete"] == false && document["fleets"].as_array().unwrap().is_empty());
    assert!(number(&document["lower_bound_usd_per_hour"]) > 0.0, "rates alone give the bound");

    let document = planned(&STEADY, &["--spares", "1"]);
    let rent = |document: &Value| number(&document["homogeneous"]["usd_per_hour"]);
    assert!(rent(&document) > rent(&planned(&STEADY, &[])));
    let fleets = document["fleets"].as_array().unwrap();
    assert!(fleets.iter().flat_map(pools).all(|pool| pool["count"].as_u64().unwrap() >= 2), "{document:#}");
}
