//! KV nodes take computed prefixes and lend them after the devices have evicted them.

#![allow(clippy::print_stdout)]

use crate::common::{fleet_from, generated};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::Admission;
use mixfleet_sim::simulate::{Choices, Results, Setup, run};
use mixfleet_sim::trace::{ReadOptions, Requests, Trace};
use std::io::Cursor;

/// Two instances of `blocks` blocks of 512 tokens, at 0.1 ms per prompt token, and the pools `more`.
fn setup(blocks: u64, more: &str) -> Setup {
    let text = format!(
        r#"
version = 1
[model]
layers = 32
kv_bytes_per_token = 131072
[kv]
block_tokens = 512
[engine]
max_batched_tokens = 8192
max_prefill_tokens_beside_decode = 8192
max_sequences = 256
[[pool]]
name = "two"
count = 2
usd_per_hour = 2.0
cache_tokens = {}
calibration = {{ prefill_s = {{ overhead = 0.0, per_token = 1e-4, per_token_squared = 0.0 }}, decode_s = {{ base = 1e-3, per_sequence = 1e-5, per_kv_token = 0.0 }} }}
{more}
"#,
        blocks * 512
    );
    Setup::new(&fleet_from(&text), Choices { admission: Admission::None, ..Choices::default() })
}

fn play(setup: &Setup, lines: &[u8]) -> Results {
    let trace =
        Trace::from_reader("t", Cursor::new(lines.to_vec()), ReadOptions::default()).expect("a trace");
    run(setup, trace.jitter(Seconds(3.0), 1), &mut ()).unwrap_or_else(|error| panic!("{error}"))
}

/// A fleet whose devices hold a tenth of the conversations' KV, with KV nodes for the rest, against one whose
/// devices hold all of it.
#[test]
fn a_kv_node_gives_the_hits_of_devices_with_as_much_memory() {
    let lines = generated(1500, 1.0);
    let node = |count: u32, blocks: u64, more: &str| {
        let tokens = blocks * 512;
        format!("[[pool]]\nname = \"memory\"\nrole = \"kv\"\ncount = {count}\ndram_tokens = {tokens}\n{more}")
    };
    let (small, large) = (play(&setup(400, ""), &lines), play(&setup(8_000, ""), &lines));
    let one = play(&setup(400, &node(1, 16_000, "usd_per_gib_hour = 0.005")), &lines);
    let two = play(&setup(400, &node(2, 8_000, "")), &lines);
    let disk = play(&setup(400, &node(1, 2_000, "ssd_tokens = 8000000")), &lines);
    let hit = |results: &Results| 100.0 * results.prefix_hit.token;
    for (name, results) in
        [("small", &small), ("large", &large), ("one node", &one), ("two nodes", &two), ("a disk", &disk)]
    {
        let (pulled, mean) = (100.0 * results.prefix_hit_from.pulled, results.ttft_s.mean);
        let taken = results.replicated.map(|taken| (taken.copies, taken.dropped));
        println!(
            "{name}: {:.1} % hit, {pulled:.1} % pulled, TTFT {mean:.3} s, taken {taken:?}",
            hit(results)
        );
    }
    assert!(hit(&small) < 0.8 * hit(&large), "there is nothing to gain");
    for with in [&one, &two, &disk] {
        assert!(hit(with) > hit(&large) - 1.0);
        assert!(with.ttft_s.mean < small.ttft_s.mean);
        assert_eq!(with.completed, small.completed);
    }
    let memory = |results: &Results| results.pools[1].clone();
    assert_eq!((memory(&one).prefill_device_s, memory(&one).decode_device_s), (0.0, 0.0));
    // 16,000 blocks of 64 MiB
    let usd = 1000.0 * 0.005 * one.simulated_s / 3600.0;
    assert!((memory(&one).usd_rent - usd).abs() < 1e-6 * usd, "{} {usd}", memory(&one).usd_rent);
    assert_eq!(one, play(&setup(400, &node(1, 16_000, "usd_per_gib_hour = 0.005")), &lines));
}

#[test]
fn a_node_behind_a_link_slower_than_computing_takes_nothing() {
    let lines = generated(300, 1.0);
    let slow = "[[pool]]\nname = \"memory\"\nrole = \"kv\"\ndram_tokens = 8000000\nnic_gb_per_s = 1.0";
    let (with, without) = (play(&setup(400, slow), &lines), play(&setup(400, ""), &lines));
    assert_eq!(with.replicated.unwrap().copies, 0);
    assert_eq!((with.prefix_hit, with.ttft_s), (without.prefix_hit, without.ttft_s));
}
