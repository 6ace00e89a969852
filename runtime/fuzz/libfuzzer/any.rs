//! The target that MIXFLEET_FUZZ_TARGET selects, under libFuzzer.

#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<&mixfleet_fuzz::Target> = LazyLock::new(mixfleet_fuzz::libfuzzer::chosen);

libfuzzer_sys::fuzz_target!(
    init: mixfleet_fuzz::libfuzzer::forgive_caught_panics(),
    |bytes: &[u8]| mixfleet_fuzz::libfuzzer::check(*TARGET, bytes)
);
