//! Requests that cannot be planned, and their errors.

use super::{STEADY, fails, number, run, write};
use crate::common::mixfleet;
use crate::common::scratch;
use serde_json::Value;

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

    let trace = scratch("plan-short").join("short.jsonl");
    let mut generate = mixfleet();
    generate.args(["trace", "generate", "--requests", "20", "--rate", "20", "--out"]).arg(&trace);
    assert!(generate.status().unwrap().success());
    let of_trace = ["plan", "--model", "llama-3.1-8b", "--ttft", "0.001", "--tbt", "0.1", "--parts", "L40S"];
    let short = run(&of_trace, &["--trace", trace.to_str().unwrap()]);
    fails(&short, 1, &["warning: the requests arrive within", "--limit", "TTFT binds"]);
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
    fails(&run(&but(2, "llama-4-scout"), &[]), 2, &["--model", "does not serve llama-4-scout", "--engine"]);
    fails(&run(&but(14, "RTX-4091"), &[]), 2, &["--parts", "closest: RTX-4090"]);
    fails(&run(&but(4, "0"), &[]), 2, &["--rate"]);
    fails(&run(&but(10, "-1"), &[]), 2, &["--ttft"]);
    fails(&run(&STEADY, &["--attain", "1.5"]), 2, &["--attain"]);
    fails(&run(&STEADY, &["--confidence", "0.3"]), 2, &["--confidence", "0.5 to 0.999"]);
    fails(&run(&STEADY, &["--expert-skew", "-1"]), 2, &["--expert-skew", "0 or more"]);
    fails(&run(&STEADY, &["--have", "none.toml"]), 3, &["--have none.toml"]);
    let hours = write(&directory, "hours.csv", "requests_per_s,input_tokens,output_tokens\n1,0,9\n");
    let of_hours = ["plan", "--model", "llama-3.1-8b", "--ttft", "1", "--tbt", "0.1", "--workload", &hours];
    fails(&run(&of_hours, &[]), 3, &["hours.csv, hour 1", "tokens"]);
    fails(&run(&STEADY, &["--trace", "t.jsonl"]), 2, &["--trace", "--rate"]);
    let no_load = ["plan", "--model", "llama-3.1-8b", "--ttft", "1", "--tbt", "0.1"];
    fails(&run(&no_load, &[]), 2, &["--trace, --workload, or --rate"]);
    let page = directory.join("none").join("plan.html");
    fails(&run(&STEADY, &["--html", page.to_str().unwrap()]), 3, &["cannot write", "plan.html"]);
    let prices = write(&directory, "prices.csv", "device_id,price_hourly\nH20-96GB,0.8\n");
    fails(&run(&STEADY, &["--prices", &prices]), 2, &["--prices"]);
    let prices = write(&directory, "unknown.csv", "device_id,price_hourly\nV100-SXM2-16GB,0.1\n");
    fails(
        &run(&STEADY[..13], &["--prices", &prices]),
        2,
        &["no published kernel times", "--parts V100-SXM2-16GB"],
    );
    let stock = write(&directory, "stock.csv", "device_id,count\nL40S,many\n");
    fails(&run(&STEADY, &["--inventory", &stock]), 3, &["stock.csv:2", "device_id and count"]);
}
