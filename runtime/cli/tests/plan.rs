//! `mixfleet plan` from outside.

mod engines;
mod instances;
mod refusals;

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
    let of_instance = |pool: &Value| {
        let count = |of: &Value, key: &str| if of["part"] == part { of[key].as_u64().unwrap() } else { 0 };
        count(pool, "devices_per_instance") + count(&pool["attention"], "devices")
    };
    pools(fleet).iter().map(|pool| pool["count"].as_u64().unwrap() * of_instance(pool)).sum()
}

/// Rent of all instances of a pool.
fn rent(pool: &Value) -> f64 {
    let of = |pool: &Value, devices: &str| number(&pool[devices]) * number(&pool["usd_per_hour_of_device"]);
    let attention = &pool["attention"];
    let attends = if attention.is_null() { 0.0 } else { of(attention, "devices") };
    number(&pool["count"]) * (of(pool, "devices_per_instance") + attends)
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
    assert!(prices.windows(2).all(|pair| pair[0] <= pair[1]), "{prices:?}");
    let lends = |fleet: &Value| pools(fleet).iter().any(|pool| !pool["attention_spare"].is_null());
    // the bound does not count attention on devices that compute prompts
    let least = fleets.iter().zip(&prices).find(|(fleet, _)| !lends(fleet));
    assert!(least.is_none_or(|(_, price)| bound <= *price), "{bound} {prices:?}");
    for fleet in fleets {
        assert!(
            number(&fleet["attained"]) >= attain && fleet["no_instance_can_be_spared"] == true,
            "{fleet:#}"
        );
        let rents = pools(fleet).iter().map(rent);
        assert!((rents.sum::<f64>() - number(&fleet["usd_per_hour"])).abs() < 1e-6, "{fleet:#}");
        for pool in pools(fleet) {
            assert!(["prefill", "decode", "auto"].contains(&pool["role"].as_str().unwrap()), "{pool}");
            assert!(pool["count"].as_u64().unwrap() > 0 && !pool["price_from"].as_str().unwrap().is_empty());
        }
    }
    // the engine is checked before the model
    let none = match document["engine"] == "mixfleet" {
        true if document["model"] == "deepseek-v3" => Some("per byte of KV"),
        true => None,
        false => Some("has no devices that attend"),
    };
    let apart = &document["attention_apart"];
    if let Some(why) = none {
        assert!(apart["none"].as_str().unwrap().contains(why), "{apart}");
    } else if let Some(at) = apart["fleet"].as_u64() {
        let fleet = &fleets[at as usize];
        assert_eq!(apart["usd_per_hour"], fleet["usd_per_hour"]);
        assert!(pools(fleet).iter().any(|pool| !pool["attention"].is_null()), "{fleet}");
    }
    let spare = &document["attention_spare"];
    if let Some(why) = none {
        assert!(spare["none"].as_str().unwrap().contains(why), "{spare}");
    } else if let Some(at) = spare["fleet"].as_u64() {
        assert_eq!(spare["usd_per_hour"], fleets[at as usize]["usd_per_hour"]);
        assert!(lends(&fleets[at as usize]), "{spare}");
    } else {
        assert!(spare["none"].is_string() || spare["usd_per_hour_by_rates"].is_number(), "{spare}");
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
    let one_is_first = document["homogeneous"]["usd_per_hour"] == document["fleets"][0]["usd_per_hour"];
    assert_ne!(one_is_first, out.join("homogeneous.toml").exists());
    let text = std::fs::read_to_string(&file).unwrap();
    // the 4090s and L40S are cards with the whole model each, so that mixfleet's own workers start the fleet
    started_by_compose_and_kubernetes(&out, &document["fleets"][0]);
    let mut tried = 0;
    for pool in 0..pools(&document["fleets"][0]).len() {
        let Some(fewer) = with_one_less(&text, pool) else { continue };
        let fewer = PathBuf::from(write(&directory, "fewer.toml", &fewer));
        assert!(simulated(&fewer, &trace, &[]) < 0.99, "{text}");
        tried += 1;
    }
    assert!(tried > 0, "{text}");
    assert_eq!(planned(&arguments, &[]), document, "one input, one plan");
    let under = &document["fleets"][0]["attained_under"]["load"];
    let loaded: Vec<f64> =
        ["1.25", "1.5"].map(|factor| simulated(&file, &trace, &["--speedup", factor])).into();
    assert_eq!(loaded, [0, 1].map(|at| number(&under[at]["attained"])), "{under}");
    let slack = number(&document["fleets"][0]["slack"]["load"]);
    assert_eq!(slack, if loaded[0] < 0.99 { 1.0 } else { 1.25 }, "{loaded:?}");
    let robust = &document["fleets"][document["most_robust"].as_u64().unwrap() as usize];
    assert!(number(&robust["usd_per_hour"]) <= 1.05 * number(&document["fleets"][0]["usd_per_hour"]));

    let output = run(&arguments, &[]);
    let table = String::from_utf8(output.stdout).unwrap();
    for word in ["lower bound", "of one part", "$/Mt out", "attained", "slack", "prices", "break-evens"] {
        assert!(table.contains(word), "{word}: {table}");
    }
}

/// The block lists behind `key:` in a YAML file, item by item.
pub(crate) fn lists(text: &str, key: &str) -> Vec<Vec<String>> {
    let lines: Vec<&str> = text.lines().collect();
    let heads = (0..lines.len()).filter(|at| lines[*at].trim() == key);
    let item = |line: &&str| line.trim_start().starts_with("- ");
    let list = |at: usize| lines[at + 1..].iter().copied().take_while(item);
    let word = |line: &str| {
        let text = &line.trim_start()[2..];
        serde_json::from_str(text).unwrap_or_else(|_| text.to_owned())
    };
    heads.map(|at| list(at).map(word).collect()).collect()
}

fn started_by_compose_and_kubernetes(out: &Path, fleet: &Value) {
    let compose = std::fs::read_to_string(out.join("compose.yaml")).unwrap();
    let workers = std::fs::read_to_string(out.join("workers.yaml")).unwrap();
    let count = |of: &Value| number(&of["count"]) as usize;
    let instances: usize = pools(fleet).iter().map(count).sum();
    let ours: Vec<_> = lists(&compose, "command:").into_iter().filter(|words| words[0] != "etcd").collect();
    assert_eq!(ours.len(), 1 + pools(fleet).len(), "{compose}");
    let devices = ours.iter().flatten().filter(|word| *word == "--device").count();
    assert_eq!(devices, instances, "{compose}");
    let pods = lists(&workers, "args:");
    assert_eq!(pods.len(), pools(fleet).len(), "{workers}");
    for (pool, words) in pools(fleet).iter().zip(&pods) {
        let role = words.iter().position(|word| word == "--role").unwrap();
        assert_eq!(words[role + 1], pool["role"].as_str().unwrap(), "{words:?}");
        let name = format!("{}-{}", words[role + 1], pool["part"].as_str().unwrap().to_ascii_lowercase());
        assert!(workers.contains(&format!("name: mixfleet-{name}\n")), "{name}: {workers}");
        assert!(workers.contains(&format!("  replicas: {}\n", count(pool))), "{workers}");
    }
    // a label in the metadata, the selector and the template, and what nodes are selected by
    let labels = workers.lines().filter(|line| line.trim_start().starts_with("mixfleet/part: "));
    assert_eq!(labels.count(), 4 * pods.len(), "{workers}");
    if cfg!(feature = "fleet") {
        for words in ours.iter().chain(&pods) {
            let output = mixfleet().args(words).arg("--help").output().unwrap();
            assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
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
    let page = directory.join("plan.html");
    let files = ["--out", out.to_str().unwrap(), "--html", page.to_str().unwrap(), "--engine", "vllm"];
    let document = planned(&of_trace, &files);
    let first = &document["fleets"][0];
    let launch = std::fs::read_to_string(out.join("vllm.sh")).unwrap();
    let lines = launch
        .lines()
        .filter(|line| line.starts_with("vllm serve \"$MODEL\" ") && line.contains("--dtype bfloat16"));
    assert_eq!(lines.count(), pools(first).len(), "{launch}");
    let split = pools(first).iter().filter(|pool| pool["role"] != "auto").count();
    assert_eq!(launch.matches("NixlConnector").count(), split, "{launch}");
    let page = std::fs::read_to_string(page).unwrap();
    // rent against attainment, and prices of two parts
    assert!(page.matches("<svg").count() >= 2 && page.contains(">chosen</text>"), "{page}");
    let parts: std::collections::BTreeSet<&str> = (document["fleets"].as_array().unwrap().iter())
        .flat_map(pools)
        .map(|pool| pool["part"].as_str().unwrap())
        .collect();
    assert_eq!(page.contains("The cheapest fleet at other prices"), parts.len() > 1);
    is_sound(&document, 0.95);
    assert!(simulated(&out.join("FLEET.toml"), &trace, &["--jitter"]) >= 0.95);
    // more of the same load needs no less
    let more = planned(&of_trace, &["--headroom", "0.5", "--engine", "vllm"]);
    assert!(number(&more["lower_bound_usd_per_hour"]) >= number(&document["lower_bound_usd_per_hour"]));
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
    let out = directory.join("out");
    let limited = planned(&STEADY, &["--inventory", &stock, "--out", out.to_str().unwrap()]);
    is_sound(&limited, 0.99);
    let one = &limited["homogeneous"];
    assert_ne!(*one, limited["fleets"][0], "two cards of one part are cheaper beside one of another");
    let attained = simulated(&out.join("homogeneous.toml"), &out.join("load.jsonl"), &[]);
    assert_eq!(attained, number(&one["attained"]), "the best of one part is written too");
    for fleet in limited["fleets"].as_array().unwrap() {
        assert!(devices(fleet, "RTX-4090") < taken, "{fleet:#}");
    }
    assert!(number(&limited["fleets"][0]["usd_per_hour"]) >= number(&free["fleets"][0]["usd_per_hour"]));

    let one = write(&directory, "one.csv", "device_id,count\nRTX-4090,1\n");
    let mut many = STEADY;
    many[4] = "100";
    let words = ["the inventory binds", "% of the load", "RTX-4090", "more it would carry all"];
    fails(&run(&many, &["--inventory", &one]), 1, &words);
}

/// One request in eleven days takes an instance as one per second does, and a million per second take more
/// than a simulation.
#[test]
fn the_least_and_the_largest_loads_have_an_answer() {
    let mut load = STEADY;
    load[4] = "0.000001";
    let least = planned(&load, &[]);
    let pools = least["fleets"][0]["pools"].as_array().unwrap();
    assert!(!pools.is_empty() && pools.iter().all(|pool| pool["count"] == 1), "{least:#}");
    load[4] = "1000000";
    fails(&run(&load, &[]), 1, &["instances or more, and a simulation takes 10000"]);
}

/// Parts that only a marketplace or a paper prices are named, and taken only on request.
#[test]
fn default_plans_take_parts_that_providers_list() {
    let mut all = STEADY.to_vec();
    let parts = all.iter().position(|argument| *argument == "--parts").expect("named parts");
    all.drain(parts..parts + 2);
    *all.last_mut().expect("a budget") = "10";
    let unlisted = |more: &[&str]| {
        let output = run(&all, &[more, &["--json"]].concat());
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON on standard output");
        let names = document["unlisted"].as_array().expect("names").clone();
        for fleet in document["fleets"].as_array().expect("fleets") {
            for name in &names {
                assert_eq!(devices(fleet, name.as_str().unwrap()), 0, "{name}");
            }
        }
        names
    };
    let estimates = ["A800-SXM-80GB", "H800-SXM-80GB", "H20-96GB"];
    let has = |names: &[Value], id: &str| names.iter().any(|name| name == id);
    let default = unlisted(&[]);
    assert!(has(&default, "RTX-3060-12GB") && estimates.iter().all(|id| has(&default, id)), "{default:?}");
    let market = unlisted(&["--marketplaces"]);
    assert!(!has(&market, "RTX-3060-12GB") && estimates.iter().all(|id| has(&market, id)), "{market:?}");
    assert!(unlisted(&["--marketplaces", "--estimates"]).is_empty());
}

#[test]
fn several_models_share_an_inventory_and_each_has_its_own_load_and_files() {
    let directory = scratch("plan-several");
    // the model that comes second needs two of the three L40S, which hold more than all RTX 4090
    let stock = write(&directory, "stock.csv", "device_id,count\nL40S,3\nRTX-4090,2\n");
    let mut two = STEADY.to_vec();
    (two[2], two[4]) = ("llama-3.1-8b,qwen3-30b-a3b", "5,2");
    let out = directory.join("out");
    let document = planned(&two, &["--inventory", &stock, "--out", out.to_str().unwrap()]);
    assert_eq!(document["schema"], "mixfleet.plans/1");
    let plans = document["plans"].as_array().unwrap();
    let models: Vec<&str> = plans.iter().map(|plan| plan["model"].as_str().unwrap()).collect();
    assert_eq!(models, ["llama-3.1-8b", "qwen3-30b-a3b"]);
    assert!(plans.iter().all(|plan| plan["complete"] == true));
    let firsts: Vec<&Value> = plans.iter().map(|plan| &plan["fleets"][0]).collect();
    for (part, most) in [("L40S", 3), ("RTX-4090", 2)] {
        assert!(firsts.iter().map(|first| devices(first, part)).sum::<u64>() <= most, "{document:#}");
    }
    assert!(devices(firsts[1], "L40S") >= 2, "{document:#}");
    let usd: f64 = firsts.iter().map(|first| number(&first["usd_per_hour"])).sum();
    assert!((number(&document["usd_per_hour"]) - usd).abs() < 1e-9);
    assert_eq!(plans[0]["load"]["requests_per_s"], 5.0);
    assert_eq!(plans[1]["load"]["requests_per_s"], 2.0);
    for (model, load) in models.iter().zip(["5", "2"]) {
        let fleet = std::fs::read_to_string(out.join(model).join("FLEET.toml")).unwrap();
        assert!(fleet.contains(&format!("name = \"{model}\"")), "{load}: {fleet}");
    }
    // what no fleet serves does not keep the other's plan back
    two[4] = "5,200";
    let short = run(&two, &["--inventory", &stock, "--json"]);
    let error = fails(&short, 1, &["no fleet was found", "the inventory binds"]);
    let document: Value = serde_json::from_slice(&short.stdout).unwrap();
    assert!(document["usd_per_hour"].is_null() && !document["plans"][0]["fleets"][0].is_null(), "{error}");
    two[4] = "5,2,1";
    fails(&run(&two, &[]), 2, &["--rate: 3 for 2 models"]);
    (two[2], two[4]) = ("llama-3.1-8b,llama-3.1-8b", "5");
    fails(&run(&two, &[]), 2, &["is there twice"]);
}

#[test]
fn host_memory_for_kv_is_rented_where_it_saves_more_than_it_costs() {
    let directory = scratch("plan-tiers");
    let (trace, out) = (directory.join("t.jsonl"), directory.join("out"));
    let (trace, out) = (trace.to_str().unwrap(), out.to_str().unwrap());
    let generated = ["trace", "generate", "--requests", "800", "--rate", "2", "--hit-target", "0.5"];
    let output = run(&generated, &["--seed", "6", "--out", trace]);
    assert!(output.status.success(), "{output:?}");
    let mut of_trace = vec!["plan", "--model", "llama-3.1-8b", "--trace", trace, "--jitter", "--ttft", "20"];
    of_trace.extend("--tbt 0.1 --attain 0.9 --parts A10G --budget-s 600 --dram 512".split(' '));
    let document = planned(&of_trace, &["--dram-usd", "0.0005", "--out", out]);
    let fleets = document["fleets"].as_array().unwrap();
    let (first, tiers) = (&fleets[0], |fleet: &Value| number(&fleet["kv_tiers"]["dram_gib"]));
    let without = fleets.iter().find(|fleet| tiers(fleet) == 0.0).unwrap();
    assert_eq!((tiers(first), number(&first["kv_tiers"]["ssd_gib"])), (512.0, 0.0), "{first:#}");
    assert!(number(&first["usd_per_hour"]) < number(&without["usd_per_hour"]), "{document:#}");
    let with_memory = pools(first).iter().filter(|pool| pool["role"] != "decode");
    let rent: f64 = with_memory.map(|pool| 512.0 * 0.0005 * number(&pool["count"])).sum();
    assert!((number(&first["kv_tiers"]["usd_per_hour"]) - rent).abs() < 1e-9, "{first:#}");
    let devices = 1.006 * devices(first, "A10G") as f64;
    assert!((number(&first["usd_per_hour"]) - devices - rent).abs() < 1e-6, "{first:#}");
    let fleet = Path::new(out).join("FLEET.toml");
    assert!(simulated(&fleet, Path::new(trace), &["--jitter"]) >= 0.9);
    let kept = std::fs::read_to_string(fleet).unwrap();
    assert!(kept.contains("dram_bytes = 549755813888.0"), "{kept}");
    fails(&run(&of_trace, &[]), 2, &["--dram-usd"]);

    // one node with all the memory costs less than a part of the memory for each
    let document = planned(&of_trace, &["--dram-usd", "0.0012", "--kv-nodes", "1", "--out", out]);
    let first = &document["fleets"][0];
    assert_eq!((number(&first["kv_tiers"]["kv_nodes"]), tiers(first)), (1.0, 512.0), "{document:#}");
    assert!((number(&first["kv_tiers"]["usd_per_hour"]) - 512.0 * 0.0012).abs() < 1e-9, "{first:#}");
    assert!(simulated(&Path::new(out).join("FLEET.toml"), Path::new(trace), &["--jitter"]) >= 0.9);
    let kept = std::fs::read_to_string(Path::new(out).join("FLEET.toml")).unwrap();
    assert!(kept.contains("role = \"kv\"\ncount = 1\n"), "{kept}");
}

#[test]
fn spot_offers_have_spares_and_kv_leaves_a_region_only_over_a_link() {
    let directory = scratch("plan-spot");
    let prices = write(
        &directory,
        "prices.csv",
        "device_id,price_hourly,spot_hourly\nL40S,0.913,\nRTX-4090,0.38,0.2\n",
    );
    let document = planned(&STEADY, &["--prices", &prices, "--spot", "1"]);
    is_sound(&document, 0.99);
    let first = pools(&document["fleets"][0]);
    assert!(first.iter().all(|pool| pool["spot"] == true && number(&pool["count"]) >= 2.0), "{first:?}");
    assert_eq!(document["without_offer"], serde_json::json!([]), "an L40S is not rented out as spot");
    // a part in the first fleet leaves it above its price, another part enters it below
    for known in document["break_evens"].as_array().unwrap() {
        let own = number(&known["usd_per_hour"]);
        let is_in = first.iter().any(|pool| pool["part"] == known["part"] && pool["spot"] == known["spot"]);
        let at = known["break_even_usd_per_hour"].as_f64();
        assert!(at.is_none_or(|at| if is_in { at >= own } else { at <= own }), "{known}");
        assert!(at.is_some() || !is_in, "another fleet was simulated: {known}");
    }
    let mut hopeless = STEADY;
    hopeless[10] = "0.0001";
    fails(&run(&hopeless, &["--spot", "0"]), 1, &["there is no spot offer", "TTFT binds"]);

    let stock = "device_id,count,region,spot\nL40S,2,us,no\nRTX-4090,1,EU,yes\n";
    let stock = write(&directory, "stock.csv", stock);
    let links = |text: &str| write(&directory, "links.csv", &format!("from,to,gb_per_s,usd_per_gb{text}"));
    let link = links("\neu,us,10,0.001\n");
    let out = directory.join("out");
    let linked =
        ["--prices", &prices, "--inventory", &stock, "--links", &link, "--out", out.to_str().unwrap()];
    let document = planned(&STEADY, &linked);
    let regions = |fleet: &Value| pools(fleet).iter().map(|pool| pool["region"].clone()).collect::<Vec<_>>();
    let fleets = document["fleets"].as_array().unwrap();
    let crossing = fleets.iter().find(|fleet| regions(fleet) == ["eu", "us"]).unwrap();
    assert_eq!((devices(crossing, "RTX-4090"), devices(crossing, "L40S")), (1, 1), "{crossing:#}");
    // prompts of 1500 tokens of 131,072 bytes, five times a second, beside $0.2 and $0.913
    let usd = 1.113 + 5.0 * 1500.0 * 131_072.0 / 1e9 * 3600.0 * 0.001;
    assert!((number(&crossing["usd_per_hour"]) - usd).abs() < 1e-6, "{crossing:#}");
    let unlinked = run(&STEADY, &["--prices", &prices, "--inventory", &stock, "--json"]);
    fails(&unlinked, 0, &["no link joins eu, us"]);
    let document: Value = serde_json::from_slice(&unlinked.stdout).unwrap();
    let fleets = document["fleets"].as_array().unwrap();
    let whole = |pool: &Value| pool["role"] == "auto";
    assert!(
        fleets
            .iter()
            .all(|fleet| regions(fleet).windows(2).all(|two| two[0] == two[1])
                || pools(fleet).iter().all(whole))
    );
    let bad = links("\neu,u s,10,0.1\n");
    fails(&run(&STEADY, &["--inventory", &stock, "--links", &bad]), 3, &["links.csv:2", "region 'u s'"]);
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

/// The likely error of a part with laws is some percent, and a fleet for slower devices is no cheaper.
#[test]
fn more_confidence_is_a_dearer_bound_and_what_is_owned_is_kept_or_switched_off() {
    let directory = scratch("plan-have");
    let out = directory.join("out");
    let free = planned(&STEADY, &["--out", out.to_str().unwrap()]);
    let sure = planned(&STEADY, &["--confidence", "0.95"]);
    is_sound(&sure, 0.99);
    let bound = |document: &Value| number(&document["lower_bound_usd_per_hour"]);
    // of a fleet that is large enough for it to show in whole instances
    let (mut large, budget) = (STEADY, "0.000001");
    (large[4], large[16]) = ("100", budget);
    let [half, most] = ["0.5", "0.95"].map(|confidence| {
        let output = run(&large, &["--json", "--confidence", confidence]);
        bound(&serde_json::from_slice(&output.stdout).unwrap())
    });
    assert!(most > 1.02 * half, "{most} {half}");
    assert!(number(&sure["fleets"][0]["usd_per_hour"]) >= number(&free["fleets"][0]["usd_per_hour"]));

    let best = &free["fleets"][0];
    let file = std::fs::read_to_string(out.join("FLEET.toml")).unwrap();
    let owned = write(&directory, "owned.toml", &file);
    let kept = planned(&STEADY, &["--have", &owned]);
    let first = &kept["fleets"][0];
    assert_eq!((number(&first["usd_per_hour"]), bound(&kept)), (0.0, 0.0), "{first:#}");
    for change in first["changes"].as_array().unwrap() {
        let id = change["part"].as_str().unwrap();
        assert_eq!(change["devices_owned"].as_u64().unwrap(), devices(best, id), "{change}");
        assert_eq!(change["devices_planned"].as_u64().unwrap(), devices(first, id), "{change}");
    }
    // of a lone device more is added, and only that is paid
    let one = format!("{}count = 1\ndevice = \"RTX-4090\"\n", file.split("count = ").next().unwrap());
    let one = write(&directory, "one.toml", &one);
    let more = planned(&STEADY, &["--have", &one]);
    for fleet in more["fleets"].as_array().unwrap() {
        let paid = pools(fleet).iter().map(rent);
        let price = number(&break_even(&free, "RTX-4090")["usd_per_hour"]);
        let sunk = if devices(fleet, "RTX-4090") > 0 { price } else { 0.0 };
        assert!((paid.sum::<f64>() - sunk - number(&fleet["usd_per_hour"])).abs() < 1e-6, "{fleet:#}");
    }
    assert!(bound(&more) < bound(&free));
}

fn break_even<'a>(document: &'a Value, part: &str) -> &'a Value {
    let all = document["break_evens"].as_array().unwrap();
    all.iter().find(|known| known["part"] == part).unwrap()
}

#[test]
fn a_workload_by_the_hour_is_planned_for_its_dearest_hour_and_says_what_the_others_save() {
    let directory = scratch("plan-hours");
    let hours = "requests_per_s,input_tokens,output_tokens\n2,1500,150\n12,1500,150\n0,1500,150\n5,1400,160\n0.0001,1500,150\n";
    let hours = write(&directory, "hours.csv", hours);
    let mut arguments = [&STEADY[..3], &STEADY[9..]].concat();
    arguments.extend(["--workload", &hours]);
    let document = planned(&arguments, &[]);
    is_sound(&document, 0.99);
    let planned_hours = document["hours"].as_array().unwrap();
    let usd: Vec<f64> = planned_hours.iter().map(|hour| number(&hour["usd_per_hour"])).collect();
    assert!(usd.len() == 5 && usd[2] == 0.0 && usd[4] > 0.0 && usd[0] < usd[3] && usd[3] < usd[1], "{usd:?}");
    let saved = 1.0 - usd.iter().sum::<f64>() / 5.0 / usd[1];
    assert!((number(&document["saved_by_the_hour"]) - saved).abs() < 1e-9);
    assert!((number(&document["load"]["requests_per_s"]) - 12.0).abs() < 1e-6);
    let bound = |value: &Value| number(&value["lower_bound_usd_per_hour"]);
    // that of an hour divides instances
    assert!(bound(&document) >= bound(&planned_hours[1]) - 1e-9);
    let table = String::from_utf8(run(&arguments, &[]).stdout).unwrap();
    assert!(table.contains("by the hour") && table.contains("hour 1 of 5"), "{table}");
}
