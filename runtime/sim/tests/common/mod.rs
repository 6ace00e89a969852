//! Helpers that the tests share.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

mod drawn;
pub(crate) mod full_loop;

pub(crate) use drawn::{at_random, fleet_from};

use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Preset, write_line};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

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
