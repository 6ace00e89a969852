//! Hot prefixes are copied to further instances ahead of demand.

#![allow(clippy::print_stdout)]

use crate::common::fleet_from;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_sim::simulate::{Choices, Replicated, Results, Setup, run};
use mixfleet_sim::trace::Request;

/// Number of blocks of a system prompt, and the time for which each one is used.
const BLOCKS: u64 = 16;
const FASHION_S: f64 = 120.0;

/// Eight instances that take 0.5 ms per prompt token and hold `blocks`, joined by `nic_gb_per_s`.
fn setup(blocks: u64, nic_gb_per_s: f64, kv: &str) -> Setup {
    let text = format!(
        r#"
version = 1
[model]
layers = 32
kv_bytes_per_token = 131072
[kv]
block_tokens = 512
{kv}
[engine]
max_batched_tokens = 8192
max_prefill_tokens_beside_decode = 8192
max_sequences = 256
[[pool]]
name = "all"
count = 8
cache_tokens = {}
nic_gb_per_s = {nic_gb_per_s}
calibration = {{ prefill_s = {{ overhead = 0.0, per_token = 5e-4, per_token_squared = 0.0 }}, decode_s = {{ base = 1e-3, per_sequence = 0.0, per_kv_token = 0.0 }} }}
"#,
        blocks * 512
    );
    let choices = Choices { policy: Policy::CacheAware, admission: Admission::None, seed: 1 };
    Setup::new(&fleet_from(&text), choices)
}

/// Short questions that arrive at random for 20 minutes, each after the current system prompt: one every five
/// seconds while it is new, then 15 per second, which is work for one and a half instances.
fn questions() -> Vec<Request> {
    let mut random = Stream::new(9);
    let mut requests = Vec::new();
    let mut at_s = 0.0;
    while at_s < 10.0 * FASHION_S {
        let system = (at_s / FASHION_S) as u64;
        requests.push(Request {
            id: requests.len() as u64,
            at: Seconds(at_s),
            prompt_tokens: BLOCKS as u32 * 512 + 200,
            output_tokens: 2,
            chain: (0..BLOCKS).map(|block| BlockHash(system << 32 | block)).collect(),
            session: None,
            class: None,
        });
        let per_s = if at_s % FASHION_S < 0.5 * FASHION_S { 0.2 } else { 15.0 };
        at_s -= (1.0 - random.next_unit()).ln() / per_s;
    }
    requests
}

fn play(setup: &Setup, requests: &[Request]) -> Results {
    run(setup, requests.iter().cloned().map(Ok), &mut ()).unwrap()
}

fn sent(results: &Results) -> Replicated {
    results.replicated.expect("the fleet makes copies")
}

#[test]
fn questions_behind_a_system_prompt_wait_less_and_hit_more() {
    let requests = questions();
    let play = |kv| play(&setup(8 * BLOCKS, 2.0, kv), &requests);
    let (without, with) = (play(""), play("replicate_gb_per_s = 1.0"));
    assert_eq!(without.replicated, None);
    let copies = sent(&with);
    let hits = (without.prefix_hit.token, with.prefix_hit.token);
    let ttft_s = (without.ttft_s.mean, with.ttft_s.mean);
    println!("hits {hits:.4?}, mean TTFT {ttft_s:.3?} s, {copies:?}");
    assert!(hits.1 > hits.0, "{hits:?}");
    assert!(ttft_s.1 < 0.9 * ttft_s.0, "{ttft_s:?} {copies:?}");
    assert!(copies.copies > 10 && copies.dropped == 0, "{copies:?}");
    // The network carries nothing else, and no more than the budget.
    assert_eq!(with.kv_bytes_moved.values().sum::<f64>(), copies.bytes);
    assert!(copies.bytes <= 1e9 * (with.simulated_s + 30.0), "{copies:?}");
    assert_eq!(with, play("replicate_gb_per_s = 1.0"));
}

#[test]
fn links_too_slow_for_what_is_lost_carry_no_copies() {
    // A system prompt takes 4.1 s to compute, and 1074 s over this link: longer than all requests together
    // wait for it.
    let results = play(&setup(8 * BLOCKS, 0.001, "replicate_gb_per_s = 1.0"), &questions());
    assert_eq!(sent(&results), Replicated::default());
}
