//! Parsers of the simulator's input files.

use super::refused;
use mixfleet_hal::DType;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_sim::engine_profile::EngineProfile;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Choices, Results, Setup, run};
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Preset};
use mixfleet_sim::trace::stats::{StatsOptions, TraceTally};
use mixfleet_sim::trace::{ReadOptions, Request, Requests, TIME_S_MAX, TOKENS_MAX, Trace, TraceError};
use serde_json::Value;
use std::io::Cursor;
use std::path::Path;
use std::sync::LazyLock;

/// Maximum number of a trace's requests that are checked.
const REQUESTS_MAX: usize = 2000;

fn parse(text: &str) -> Result<FleetFile, mixfleet_sim::fleet_file::FleetFileError> {
    let rates = vec![(DType::Bf16, FlopPerSecond(1e14)), (DType::F32, FlopPerSecond(1e13))];
    let profile = DeviceProfile::roof(rates, BytesPerSecond(1e12), Bytes(8e10));
    FleetFile::parse(text, Path::new("no directory"), &move |_| Ok(profile.clone()))
}

fn play(
    file: &FleetFile,
    requests: impl Iterator<Item = Result<Request, TraceError>>,
) -> Result<Results, TraceError> {
    let choices = Choices { policy: Policy::PerDollar, admission: Admission::None, seed: 1 };
    run(&Setup::new(file, choices), requests, &mut ())
}

/// Keys that are null where nothing was completed.
const DISTRIBUTIONS: [&str; 4] = ["ttft_s", "tpot_s", "tbt_s", "e2e_s"];

/// Whether a document has only finite numbers; JSON has null in place of others.
fn is_finite(value: &Value) -> bool {
    match value {
        Value::Array(values) => values.iter().all(is_finite),
        Value::Object(fields) => {
            let may_be_null = |key: &str| !key.ends_with("_s") || DISTRIBUTIONS.contains(&key);
            fields.iter().all(|(key, value)| is_finite(value) && (may_be_null(key) || !value.is_null()))
        }
        _ => true,
    }
}

/// Checks that results are finite, with plausible times.
fn check(results: &Results) -> bool {
    assert!(is_finite(&serde_json::to_value(results).expect("results are JSON")), "{results:?}");
    for time in [&results.ttft_s, &results.e2e_s] {
        assert!((0.0..=TIME_S_MAX).contains(&time.mean), "{results:?}");
    }
    assert!(results.completed == 0 || results.ttft_s.mean > 0.0, "TTFT 0: {results:?}");
    true
}

/// Checks that an accepted fleet can be simulated, with finite results or an error.
pub(super) fn fleet_file(bytes: &[u8]) -> bool {
    let file = match parse(&String::from_utf8_lossy(bytes)) {
        Ok(file) => file,
        Err(error) => return refused(&error),
    };
    let options = GenerateOptions { requests: 12, rate: 2.0, seed: 3, arrivals: Arrivals::Poisson };
    let requests = Generator::new(Preset::Conversation.model(), options).expect("sensible options");
    match play(&file, requests.map(Ok)) {
        Ok(results) => check(&results),
        Err(error) => refused(&error),
    }
}

/// Checks that an accepted profile of an engine makes tables, and is unchanged after it is written and read.
pub(super) fn engine_profile(bytes: &[u8]) -> bool {
    match EngineProfile::from_json(&String::from_utf8_lossy(bytes)) {
        Ok(None) => false,
        Ok(Some(profile)) => {
            let text = serde_json::to_string(&profile).expect("a profile is JSON");
            assert_eq!(EngineProfile::from_json(&text), Ok(Some(profile)));
            true
        }
        Err(error) => refused(&error),
    }
}

static FLEET: LazyLock<FleetFile> = LazyLock::new(|| {
    let text = include_str!("../../corpus/fleet_file/every_number.toml");
    parse(text).expect("an input of the corpus")
});

fn open(bytes: Vec<u8>) -> Result<Trace, TraceError> {
    Trace::from_reader("trace", Cursor::new(bytes), ReadOptions::default())
}

/// Checks that requests are in order, with plausible lengths and times, and are unchanged after they are
/// written and read.
pub(super) fn trace(bytes: &[u8]) -> bool {
    let mut trace = match open(bytes.to_vec()) {
        Ok(trace) => trace,
        Err(error) => return refused(&error),
    };
    let block_tokens = trace.block_tokens();
    let mut tally = TraceTally::new(StatsOptions {
        block_tokens: block_tokens.unwrap_or(0),
        capacities_blocks: vec![10],
        policies: vec![CachePolicy::Lru],
        prefill: None,
    });
    let (mut last, mut written, mut lengths) = (Seconds::ZERO, Vec::new(), Vec::new());
    for (at, request) in trace.by_ref().take(REQUESTS_MAX).enumerate() {
        let request = match request {
            Ok(request) => request,
            Err(error) => return refused(&error),
        };
        assert_eq!(request.id, at as u64);
        assert!(request.at >= last && request.at.0 <= TIME_S_MAX, "{request:?}");
        last = request.at;
        for tokens in [request.prompt_tokens, request.output_tokens] {
            assert!((1..=TOKENS_MAX).contains(&tokens), "{request:?}");
        }
        assert!(request.chain.is_empty() || block_tokens.is_some());
        if let Some(block) = block_tokens {
            assert!(request.chain.len() <= request.prompt_tokens.div_ceil(block) as usize, "{request:?}");
            let finer = request.clone().rechain(block, 96);
            assert!(finer.chain.len() <= request.prompt_tokens.div_ceil(96) as usize, "{finer:?}");
        }
        tally.add(&request);
        lengths.push((request.prompt_tokens, request.output_tokens));
        mixfleet_sim::trace::generate::write_line(&mut written, &request, &[]);
    }
    let stats = tally.finish("any", trace.repairs());
    assert!(stats.duration_s.is_finite() && stats.requests_per_s.is_none_or(f64::is_finite), "{stats:?}");
    let again = open(written).expect("a written file can be opened");
    let again = again.map(|request| request.expect("a written request can be read"));
    assert!(again.map(|request| (request.prompt_tokens, request.output_tokens)).eq(lengths));
    let requests = open(bytes.to_vec()).expect("it could be opened").take(50);
    match play(&FLEET, requests.jitter(Seconds(1e3), 1).speedup(2.0)) {
        Ok(results) => check(&results),
        Err(error) => refused(&error),
    }
}
