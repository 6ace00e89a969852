//! Helpers that the tests share.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

pub(crate) mod full_loop;

use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::trace::Request;
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Preset, write_line};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The fleet that `text` describes, without profiles.
pub(crate) fn fleet_from(text: &str) -> FleetFile {
    let none = |path: &Path| Err(format!("{} is not needed here", path.display()));
    FleetFile::parse(text, Path::new(""), &none).unwrap_or_else(|error| panic!("{error}"))
}

/// Requests that arrive at random until `until_s`, `per_s` per second, with the prompt and output tokens that
/// `tokens` draws.
pub(crate) fn at_random(
    seed: u64,
    until_s: f64,
    per_s: f64,
    tokens: impl Fn(&mut Stream) -> (u64, u64),
) -> Vec<Request> {
    let mut random = Stream::new(seed);
    let (mut at_s, mut requests) = (0.0f64, Vec::new());
    while at_s < until_s {
        let (prompt_tokens, output_tokens) = tokens(&mut random);
        requests.push(Request {
            id: requests.len() as u64,
            at: Seconds(at_s),
            prompt_tokens: prompt_tokens as u32,
            output_tokens: output_tokens as u32,
            chain: Vec::new(),
            session: None,
            class: None,
        });
        at_s -= (1.0 - random.next_unit()).ln() / per_s;
    }
    requests
}

/// A fleet of LLaMA3-70B on 8 A800 per instance, by the fit of FAST'25 figure 14, with network interfaces of
/// `nic_gb_per_s` and the keys `slo` of the table of that name.
pub(crate) fn mooncake((prefill, decode): (u32, u32), nic_gb_per_s: f64, slo: &str) -> FleetFile {
    fleet_from(&format!(
        r#"
version = 1
[model]
name = "llama-3.1-70b"
[slo]
{slo}
[kv]
block_tokens = 512
[engine]
max_batched_tokens = 8192
max_prefill_tokens_beside_decode = 8192
max_sequences = 256
[[pool]]
name = "prefill"
role = "prefill"
count = {prefill}
device = "A100-SXM-80GB"
devices_per_instance = 8
usd_per_hour = 14.0
cache_tokens = 3_000_000
nic_gb_per_s = {nic_gb_per_s}
calibration = {{ prefill_s = {{ overhead = 0.08, per_token = 1.19e-4, per_token_squared = 7.467e-10 }} }}
[[pool]]
name = "decode"
role = "decode"
count = {decode}
device = "A100-SXM-80GB"
devices_per_instance = 8
usd_per_hour = 14.0
nic_gb_per_s = {nic_gb_per_s}
calibration = {{ decode_s = {{ base = 0.0262, per_sequence = 0.0, per_kv_token = 3.5e-8 }} }}
"#
    ))
}

/// A file of the data beside this clone, or none, with a message, if it is absent.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(path);
    if file.is_file() {
        return Some(file);
    }
    println!("SKIPPED: no ../shared/data/{path}");
    None
}

/// A generated conversation in Mooncake's format, which replaces the published one in a clone without shared
/// data.
pub(crate) fn generated(requests: u64, rate: f64) -> Vec<u8> {
    let options = GenerateOptions { requests, rate, seed: 16, arrivals: Arrivals::Poisson };
    let made = Generator::new(Preset::Conversation.model(), options);
    let mut made = made.unwrap_or_else(|error| panic!("{error}"));
    let (mut lines, mut hash_ids) = (Vec::new(), Vec::new());
    while let Some(request) = made.advance(&mut hash_ids) {
        write_line(&mut lines, &request, &hash_ids);
    }
    lines
}

/// Seeds for published traces: one for every change, `MIXFLEET_SIM_SEEDS` of them at night.
pub(crate) fn seeds() -> RangeInclusive<u64> {
    let wanted = std::env::var("MIXFLEET_SIM_SEEDS");
    1..=wanted.map_or(1, |count| count.parse().expect("MIXFLEET_SIM_SEEDS is a number of seeds"))
}
