//! Extreme numbers in a fleet file, a trace and options give an error or a finite result, after a bounded
//! time.

use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Choices, Results, Setup, run};
use mixfleet_sim::trace::generate::{Arrivals, GenerateError, GenerateOptions, Generator, Preset};
use mixfleet_sim::trace::{ReadOptions, Request, Requests, TIME_S_MAX, Trace, TraceError};
use std::path::{Path, PathBuf};

/// A fleet file with every key that takes a number.
const FLEET: &str = r#"
version = 1
[model]
layers = 32
hidden = 4096
heads = 32
kv_heads = 8
head_dim = 128
intermediate = 14336
vocab = 128256
kv_bytes_per_token = 131072.0
weight_bytes = 16e9
[slo]
ttft_s = 30.0
tbt_s = 0.1
[kv]
block_tokens = 512
replicate_gb_per_s = 1.0
[engine]
max_batched_tokens = 8192
max_prefill_tokens_beside_decode = 8192
max_sequences = 256
[rebalance]
high = 0.9
low = 0.3
hold_s = 10.0
[[pool]]
name = "prefill"
role = "prefill"
count = 2
device = "L40S"
devices_per_instance = 1
pipeline_stages = 2
pipeline_chunk_tokens = 1024
usd_per_hour = 0.8
dram_tokens = 100000
dram_gb_per_s = 25.0
ssd_bytes = 1e12
ssd_gb_per_s = 5.0
nic_gb_per_s = 12.5
[[pool]]
name = "decode"
role = "decode"
flexible = true
count = 2
usd_per_hour = 1.1
cache_tokens = 200000
dram_bytes = 1e11
calibration = { prefill_s = { overhead = 0.01, per_token = 1e-4, per_token_squared = 1e-10 }, decode_s = { base = 0.02, per_sequence = 1e-4, per_kv_token = 1e-8 } }
[[link]]
from = "prefill"
gb_per_s = 10.0
latency_s = 1e-4
usd_per_gb = 0.01
[[class]]
name = "jobs"
share = 0.2
deadline_s = 600.0
[[class]]
name = "readers"
label = "r*"
ttft_s = 2.0
tbt_s = 0.05
"#;

const EXTREMES: [&str; 29] = [
    "0",
    "0.0",
    "-0.0",
    "-1",
    "-1.5",
    "1",
    "3",
    "1e-320",
    "5e-324",
    "1e-300",
    "1e-30",
    "1e-15",
    "1e-9",
    "1e-6",
    "1000.5",
    "65536",
    "4294967295",
    "4294967296",
    "4000000000",
    "9223372036854775807",
    "1e6",
    "1e9",
    "1e15",
    "1e18",
    "1e300",
    "1e305",
    "1.7976931348623157e308",
    "nan",
    "inf",
];

/// The ranges of `FLEET`'s numbers.
fn numbers() -> Vec<std::ops::Range<usize>> {
    let mut places = Vec::new();
    for (at, _) in FLEET.match_indices(" = ") {
        let start = at + 3;
        let length = FLEET[start..].find([',', ' ', '\n']).unwrap_or(0);
        if FLEET[start..start + length].parse::<f64>().is_ok() && !FLEET[..at].ends_with("version") {
            places.push(start..start + length);
        }
    }
    places
}

fn parse(text: &str) -> Result<FleetFile, String> {
    let none = |path: &Path| Err(format!("{} is not needed here", path.display()));
    FleetFile::parse(text, Path::new(""), &none).map_err(|error| error.to_string())
}

fn requests() -> Vec<Request> {
    let options = GenerateOptions { requests: 12, rate: 2.0, seed: 3, arrivals: Arrivals::Poisson };
    Generator::new(Preset::Conversation.model(), options).unwrap().collect()
}

fn play(file: &FleetFile, requests: Vec<Request>) -> Result<Results, TraceError> {
    let choices = Choices { policy: Policy::PerDollar, admission: Admission::None, seed: 1 };
    run(&Setup::new(file, choices), requests.into_iter().map(Ok).speedup(1.0), &mut ())
}

/// Keys that are null where nothing was completed.
const DISTRIBUTIONS: [&str; 4] = ["ttft_s", "tpot_s", "tbt_s", "e2e_s"];

/// Whether serde_json has written no null for a number.
fn is_finite(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Array(values) => values.iter().all(is_finite),
        serde_json::Value::Object(fields) => {
            let may_be_null = |key: &str| !key.ends_with("_s") || DISTRIBUTIONS.contains(&key);
            fields.iter().all(|(key, value)| is_finite(value) && (may_be_null(key) || !value.is_null()))
        }
        _ => true,
    }
}

/// Checks that results are finite and times plausible.
fn check(results: &Results) {
    assert!(is_finite(&serde_json::to_value(results).unwrap()), "{results:?}");
    let times = [&results.ttft_s, &results.e2e_s];
    assert!(times.iter().all(|time| (0.0..=TIME_S_MAX).contains(&time.mean)), "{results:?}");
    assert!(results.completed == 0 || results.ttft_s.mean > 0.0, "TTFT 0: {results:?}");
}

#[test]
fn the_fleet_of_these_tests_is_a_fleet() {
    assert!(numbers().len() >= 45, "{}", numbers().len());
    check(&play(&parse(FLEET).unwrap(), requests()).unwrap());
}

#[test]
fn every_extreme_in_every_number_of_a_fleet_file_is_refused_or_gives_finite_results() {
    let mut refused = 0;
    for place in numbers() {
        for value in EXTREMES {
            let mut text = FLEET.to_owned();
            text.replace_range(place.clone(), value);
            match parse(&text) {
                Err(error) => {
                    refused += 1;
                    assert!(!error.is_empty());
                }
                Ok(file) => {
                    if let Ok(results) = play(&file, requests()) {
                        check(&results);
                    }
                }
            }
        }
    }
    assert!(refused > 500, "{refused}");
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("mixfleet-extremes-{}-{name}", std::process::id()))
}

#[test]
fn layers_beyond_any_model_are_refused_before_memory_is_asked_for() {
    let error = parse(&FLEET.replace("layers = 32", "layers = 4000000000")).unwrap_err();
    assert!(error.contains("[model] layers: is 4000000000; it must be at most 4096"), "{error}");
    let many = parse(&FLEET.replace("count = 2", "count = 6000")).unwrap_err();
    assert!(many.contains("12000 instances in all"), "{many}");
    let bytes = parse(
        &FLEET.replace("kv_bytes_per_token = 131072.0", "kv_bytes_per_token = 1.0").replace("1e11", "1e18"),
    );
    assert!(bytes.unwrap_err().contains("pool 'decode': dram_bytes"));
}

#[test]
fn a_request_too_late_for_its_times_to_be_told_apart_is_refused() {
    let path = scratch("late");
    std::fs::write(
        &path,
        "{\"timestamp\": 1e305, \"input_length\": 700, \"output_length\": 9, \"hash_ids\": [1, 2]}\n",
    )
    .unwrap();
    let trace = Trace::open(&path, ReadOptions::default());
    let read: Result<Vec<Request>, _> = trace.and_then(|trace| trace.collect());
    std::fs::remove_file(&path).unwrap();
    let error = read.unwrap_err().to_string();
    assert!(error.contains("1e+305 is no date in this unit"), "{error}");
}

#[test]
fn a_speedup_that_puts_requests_beyond_time_is_refused() {
    let file = parse(FLEET).unwrap();
    let slow = requests().into_iter().map(Ok).speedup(1e-300);
    let setup = Setup::new(&file, Choices { policy: Policy::PerDollar, admission: Admission::None, seed: 1 });
    assert!(matches!(run(&setup, slow, &mut ()), Err(TraceError::Late { .. })));
}

#[test]
fn a_fleet_that_is_still_at_work_beyond_time_is_an_error() {
    let file = parse(&FLEET.replace("per_kv_token = 1e-8", "per_kv_token = 1e9")).unwrap();
    assert!(matches!(play(&file, requests()), Err(TraceError::Late { .. })));
}

#[test]
fn a_rate_at_which_a_trace_never_ends_is_refused() {
    let options = |rate, requests| GenerateOptions { requests, rate, seed: 1, arrivals: Arrivals::BURSTY };
    for preset in [Preset::Conversation, Preset::Agentic, Preset::Batch] {
        for rate in [0.0, -1.0, 5e-324, 1e-320, 1e-300, 1e-9, 1e5, 1e300, f64::INFINITY, f64::NAN] {
            let refused =
                |made: Result<Generator, GenerateError>| matches!(made, Err(GenerateError::Rate(_)));
            assert!(refused(Generator::new(preset.model(), options(rate, 3))), "{rate}");
            assert!(refused(Generator::with_hit_target(preset.model(), options(rate, 3), 0.5)), "{rate}");
        }
        for rate in [1e-6, 1e-3, 1.0, 10.0] {
            let made = Generator::new(preset.model(), options(rate, 20)).unwrap();
            assert_eq!(made.filter(|request| request.at.0.is_finite()).count(), 20, "{rate}");
        }
        let many = Generator::new(preset.model(), options(1e4, 1));
        assert!(preset != Preset::Agentic || matches!(many, Err(GenerateError::Before(_))));
        let endless = Generator::new(preset.model(), options(1e-6, u64::MAX));
        assert!(matches!(endless, Err(GenerateError::Duration(_))));
    }
}
