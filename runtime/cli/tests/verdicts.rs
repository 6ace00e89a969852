//! What `mixfleet simulate` concludes of a fleet: whether it serves, what it costs by other prices, what
//! binds it, what one instance more brings, and how it compares with another.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// A pool that computes prompts on one L40S, at a stated rent.
const PREFILL: &str =
    "[[pool]]\nname = 'p'\nrole = 'prefill'\ndevice = 'L40S'\nusd_per_hour = 2.0\ncache_tokens = 1_000_000\n";
/// A pool that decodes on two L4.
const DECODE: &str = "[[pool]]\nname = 'd'\nrole = 'decode'\ndevice = 'L4'\ndevices_per_instance = 2\ncache_tokens = 1_000_000\n";
/// Prompts of 1 ms a token: a thousand requests of two thousand tokens take half an hour.
const SLOW: &str = "calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 0.0 } }\n";

fn write(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn fleet(directory: &Path, name: &str, pools: &str) -> PathBuf {
    let text =
        format!("version = 1\n[model]\nname = 'llama-3.1-8b'\n[slo]\nttft_s = 5.0\ntbt_s = 0.1\n{pools}");
    write(directory, name, &text)
}

/// A trace of a hundred requests in 99 intervals, every tenth with a long prompt.
fn trace(directory: &Path, interval_s: f64, long: u32) -> PathBuf {
    let line = |i: u32| {
        let (at_ms, tokens) = (f64::from(i) * interval_s * 1e3, if i % 10 == 9 { long } else { 1000 });
        let blocks: Vec<String> =
            (0..tokens.div_ceil(512)).map(|block| (i * 1000 + block).to_string()).collect();
        let blocks = blocks.join(",");
        format!(
            "{{\"timestamp\": {at_ms:.0}, \"input_length\": {tokens}, \"output_length\": 20, \"hash_ids\": [{blocks}]}}\n"
        )
    };
    write(directory, "trace.jsonl", &(0..100).map(line).collect::<String>())
}

fn simulate(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = mixfleet();
    command.args(["simulate", "--trace", "trace.jsonl"]).args(arguments);
    command.current_dir(directory).output().unwrap()
}

fn succeeds(directory: &Path, arguments: &[&str]) -> String {
    let output = simulate(directory, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(directory: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeds(directory, &[arguments, &["--json"]].concat())).unwrap()
}

fn fails(directory: &Path, arguments: &[&str], code: i32, says: &[&str]) {
    let output = simulate(directory, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty());
    for word in says {
        assert!(error.contains(word), "{word}: {error}");
    }
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path}: {value:#}"))
}

#[test]
fn a_fleet_that_cannot_serve_is_refused_with_the_reason() {
    let directory = scratch("verdicts-refused");
    trace(&directory, 1.0, 8000);
    for (pools, code, says) in [
        (DECODE.to_owned(), 3, "no pool computes prompts"),
        (PREFILL.to_owned(), 3, "no pool decodes"),
        (
            DECODE.replace("cache_tokens = 1_000_000\n", "").replace("= 2", "= 1").replace("L4'", "T4'"),
            3,
            "does not fit",
        ),
        // Prompt and answer of 4096 tokens at most, as is assumed of all.
        (
            format!("{PREFILL}{}", DECODE.replace("1_000_000", "3000")),
            1,
            "can serve none of the 100 requests: up to 12096 tokens of KV are needed",
        ),
    ] {
        let fleet = fleet(&directory, "FLEET.toml", &pools);
        fails(&directory, &["--fleet", fleet.to_str().unwrap()], code, &[says]);
    }
    fleet(&directory, "FLEET.toml", &format!("{PREFILL}{}", DECODE.replace("1_000_000", "9000")));
    let text = succeeds(&directory, &["--fleet", "FLEET.toml"]);
    assert!(text.contains("10 rejected: too_large: up to 12096 tokens of KV are needed"), "{text}");
    assert!(text.contains("the largest instance holds 8992"), "{text}");
    fails(&directory, &["--fleet", "FLEET.toml", "--limit", "0"], 1, &["no request to simulate"]);
    fails(
        &directory,
        &["--fleet", "FLEET.toml", "--limit", "0", "--capacity"],
        1,
        &["no request to simulate"],
    );
}

#[test]
fn a_dash_and_null_stand_where_nothing_was_completed() {
    let directory = scratch("verdicts-nothing");
    trace(&directory, 1.0, 8000);
    let path = fleet(&directory, "FLEET.toml", &format!("{PREFILL}{SLOW}{DECODE}"));
    let text = std::fs::read_to_string(&path).unwrap().replace("ttft_s = 5.0", "ttft_s = 0.5");
    std::fs::write(&path, text).unwrap();
    let results = json(&directory, &["--fleet", "FLEET.toml"]);
    assert_eq!((number(&results, "/completed"), number(&results, "/slo_attainment")), (0.0, 0.0));
    for key in
        ["ttft_s", "tpot_s", "tbt_s", "e2e_s", "usd_rent_per_million_tokens", "usd_busy_per_million_tokens"]
    {
        assert!(results[key].is_null(), "{key}: {results:#}");
    }
    let text = succeeds(&directory, &["--fleet", "FLEET.toml", "--html", "page.html"]);
    assert!(text.contains("no pool did any work\n") && text.contains("TTFT missed by "), "{text}");
    for name in ["TTFT", "TPOT", "TBT", "latency", "throughput", "prefix hit"] {
        let line = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        assert!(line.trim_end().ends_with(" -"), "{line}");
    }
    let page = std::fs::read_to_string(directory.join("page.html")).unwrap();
    assert!(page.contains("nothing was completed") && !page.contains("0.0000"), "{page}");
}

#[test]
fn a_list_of_prices_replaces_all_others_and_a_part_without_an_offer_is_named() {
    let directory = scratch("verdicts-prices");
    trace(&directory, 1.0, 8000);
    fleet(&directory, "FLEET.toml", &format!("{PREFILL}{DECODE}"));
    let own = json(&directory, &["--fleet", "FLEET.toml"]);
    assert_eq!(own["simulated"]["pools"][0]["price_from"], "stated in the fleet file");
    assert!(own["simulated"]["prices"].is_null());
    write(
        &directory,
        "offers.csv",
        "device_id,price_hourly,cloud,date,source\nL40S,0.8,acme,2026-11-01,acme's list\nL4,0.25,acme,2026-11-02,acme's list\n",
    );
    let other = json(&directory, &["--fleet", "FLEET.toml", "--prices", "offers.csv"]);
    assert_eq!(number(&other, "/simulated/usd_per_hour"), 0.8 + 2.0 * 0.25);
    let pools = &other["simulated"]["pools"];
    assert_eq!(
        (&pools[0]["price_from"], &pools[1]["price_from"]),
        (&"acme's list, 2026-11-01".into(), &"acme's list, 2026-11-02".into())
    );
    assert_eq!(other["simulated"]["prices"], "offers.csv");
    let rent = number(&other, "/simulated/usd_per_hour") * number(&other, "/simulated_s") / 3600.0;
    assert!((number(&other, "/usd_rent") / rent - 1.0).abs() < 1e-6);
    let text = succeeds(&directory, &["--fleet", "FLEET.toml", "--prices", "offers.csv"]);
    for word in [
        "  prices           offers.csv",
        "$0.500 per hour each, acme's list, 2026-11-02",
        "rent             $1.30 per hour: $",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    // Only what states its own rent may be missing.
    write(&directory, "one.csv", "device_id,price_hourly\nL4,0.25\n");
    let mixed = json(&directory, &["--fleet", "FLEET.toml", "--prices", "one.csv"]);
    assert_eq!(mixed["simulated"]["pools"][0]["price_from"], "stated in the fleet file");
    write(&directory, "one.csv", "device_id,price_hourly\nL40S,0.8\nL44,1.0\n");
    let says = ["pool 'd'", "no offer for its part L4;", "no part is called 'L44'"];
    fails(&directory, &["--fleet", "FLEET.toml", "--prices", "one.csv"], 3, &says);
}

#[test]
fn the_bottleneck_and_the_best_addition_are_named() {
    let directory = scratch("verdicts-bottleneck");
    // A request takes its prompt a second, and they come twice as fast.
    trace(&directory, 0.5, 1000);
    fleet(&directory, "FLEET.toml", &format!("{PREFILL}{SLOW}{DECODE}"));
    let arguments = ["--fleet", "FLEET.toml", "--add", "--html", "page.html"];
    let results = json(&directory, &arguments);
    let bottleneck = &results["bottleneck"];
    assert_eq!(
        (&bottleneck["pool"], &bottleneck["resource"]),
        (&"p".into(), &"prompts".into()),
        "{bottleneck}"
    );
    assert!(bottleneck["binds"] == true && number(bottleneck, "/used") > 0.8, "{bottleneck}");
    assert!(number(&results, "/pools/0/used/prompts") > 0.8);
    let added = results["additions"]["each"].as_array().unwrap();
    let attained: Vec<f64> = added.iter().map(|addition| number(addition, "/slo_attainment")).collect();
    assert!(
        attained[0] > number(&results, "/slo_attainment") + 0.3 && attained[1] < attained[0],
        "{added:?}"
    );
    assert_eq!(results["additions"]["cheapest"], "p");
    let text = succeeds(&directory, &arguments);
    assert!(
        text.contains("  bottleneck       prompts of p, ") && text.contains("  best addition    p, "),
        "{text}"
    );
    let page = std::fs::read_to_string(directory.join("page.html")).unwrap();
    for word in [
        "prompts of p, ",
        "Best addition: p",
        ">utilisation (1: all of the time)</text>",
        ">requests per second</text>",
    ] {
        assert!(page.contains(word), "{word}");
    }
    // An addition is the fleet file with one instance more.
    fleet(&directory, "FLEET.toml", &format!("{PREFILL}count = 2\n{SLOW}{DECODE}"));
    assert_eq!(number(&json(&directory, &["--fleet", "FLEET.toml"]), "/slo_attainment"), attained[0]);
}

#[test]
fn fleets_are_compared_each_by_its_own_scheduling() {
    let directory = scratch("verdicts-compared");
    trace(&directory, 0.5, 1000);
    fleet(&directory, "one.toml", &format!("{PREFILL}{SLOW}{DECODE}"));
    fleet(
        &directory,
        "two.toml",
        &format!("{PREFILL}count = 2\n{SLOW}{DECODE}[scheduling]\nadmit = 'none'\n"),
    );
    let both = json(&directory, &["--fleet", "one.toml", "--fleet", "two.toml"]);
    for (at, path) in ["one.toml", "two.toml"].iter().enumerate() {
        let mut alone = json(&directory, &["--fleet", path]);
        alone.as_object_mut().unwrap().remove("wall_s");
        assert_eq!(both[at], alone, "{path}");
    }
    assert_eq!(both[1]["simulated"]["admission"], "none");
    assert!(number(&both[1], "/slo_attainment") > number(&both[0], "/slo_attainment"));
    let good = number(&both[0], "/requests") - number(&both[0], "/missed");
    assert!(
        (number(&both[0], "/good_requests_per_usd") * number(&both[0], "/usd_rent") / good - 1.0).abs()
            < 1e-9
    );
    let text = succeeds(&directory, &["--fleet", "one.toml", "--fleet", "two.toml"]);
    let rows: Vec<&str> =
        text.lines().filter(|line| line.starts_with("one.toml") || line.starts_with("two.toml")).collect();
    assert!(rows.len() == 2 && rows[0].contains("prompts of p"), "{text}");
    for (more, says) in
        [("--capacity", "--capacity is for one --fleet"), ("--html=a.html", "--html is for one --fleet")]
    {
        fails(&directory, &["--fleet", "one.toml", "--fleet", "two.toml", more], 2, &[says]);
    }
}

#[test]
fn a_capacity_that_does_not_exist_is_said_with_the_requests_that_miss() {
    let directory = scratch("verdicts-capacity");
    trace(&directory, 10.0, 8000);
    fleet(&directory, "FLEET.toml", &format!("{PREFILL}{SLOW}{DECODE}"));
    let says = [
        "at any speed-up",
        "where 90.00 %",
        "the TTFT by 10 requests with prompts of 8000 tokens (at best 8.0",
        "of 5 s",
    ];
    for admit in ["prediction", "none"] {
        fails(&directory, &["--fleet", "FLEET.toml", "--capacity", "--admit", admit], 1, &says);
    }
    assert!(simulate(&directory, &["--fleet", "FLEET.toml", "--capacity=0.9"]).status.success());
}
