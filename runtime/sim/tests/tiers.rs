//! Host memory and disks below the devices' KV caches.

#![allow(clippy::print_stdout)]

use crate::common::{fleet_from, generated, shared};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Action, Admission, Terms};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_sim::simulate::{Choices, Observer, Results, Setup, run};
use mixfleet_sim::trace::{ReadOptions, Request, Requests, Trace};
use std::io::Cursor;

/// One instance of `blocks` blocks; a prompt token takes `per_token` seconds, decoding almost nothing.
fn setup(blocks: u64, per_token: f64, tiers: &str) -> Setup {
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
name = "one"
usd_per_hour = 1.0
cache_tokens = {}
{tiers}
calibration = {{ prefill_s = {{ overhead = 0.0, per_token = {per_token:e}, per_token_squared = 0.0 }}, decode_s = {{ base = 1e-9, per_sequence = 0.0, per_kv_token = 0.0 }} }}
"#,
        blocks * 512
    );
    let choices = Choices { admission: Admission::None, ..Choices::default() };
    Setup { max_tokens: 1, ..Setup::new(&fleet_from(&text), choices) }
}

/// A prompt of `blocks` blocks and two tokens more, which begins with `document`.
fn prompt(id: u64, at_s: f64, document: u64, blocks: u64) -> Request {
    Request {
        id,
        at: Seconds(at_s),
        prompt_tokens: blocks as u32 * 512 + 2,
        output_tokens: 1,
        chain: (0..blocks).map(|i| BlockHash(document << 32 | i)).collect(),
        session: None,
        class: None,
    }
}

#[derive(Default)]
struct Seen {
    terms: Vec<Terms>,
    ttft_s: Vec<f64>,
}

impl Observer for Seen {
    fn decided(&mut self, _: f64, action: &Action) {
        let Action::Place { explanation, .. } = action else { panic!("{action:?}") };
        self.terms.push(explanation.chosen().unwrap().terms.unwrap());
    }

    fn finished(&mut self, _: f64, answer: &mixfleet_sim::simulate::AnswerTimes) {
        self.ttft_s.push(answer.ttft_s);
    }
}

fn play(setup: &Setup, requests: Vec<Request>) -> (Results, Seen) {
    let mut seen = Seen::default();
    let results = run(setup, requests.into_iter().map(Ok), &mut seen).unwrap();
    (results, seen)
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9, "{a} is not {b}");
}

#[test]
fn what_the_devices_gave_up_is_loaded_and_the_load_is_predicted() {
    // The second prompt's 9 blocks leave one of the first one's 4 on the device.
    let requests = || vec![prompt(1, 0.0, 1, 4), prompt(2, 10.0, 2, 8), prompt(3, 20.0, 1, 4)];
    let block_s = 512.0 * 131_072.0 * 1e-9;

    let (alone, seen) = play(&setup(10, 1e-3, ""), requests());
    close(seen.ttft_s[2], 1e-3 * (3.0 * 512.0 + 2.0));
    close(alone.prefix_hit_from.device, 512.0 / (16.0 * 512.0 + 6.0));

    let dram = setup(10, 1e-3, "dram_tokens = 51200\ndram_gb_per_s = 1.0");
    let (results, seen) = play(&dram, requests());
    assert_eq!(seen.terms[2].cached_tokens, 2048);
    close(seen.terms[2].pull_s, 3.0 * block_s);
    close(seen.ttft_s[2], 3.0 * block_s + 2e-3);
    close(seen.ttft_s[2], seen.terms[2].ttft_s);
    close(results.prefix_hit_from.dram, 3.0 * results.prefix_hit_from.device);
    close(results.prefix_hit_from.dram + results.prefix_hit_from.device, results.prefix_hit.token);

    // Host memory keeps the two latest, the disk has the other.
    let both = "dram_tokens = 1024\ndram_gb_per_s = 1.0\nssd_tokens = 51200\nssd_gb_per_s = 0.25";
    let (results, seen) = play(&setup(10, 1e-3, both), requests());
    close(seen.terms[2].pull_s, 4.0 * block_s);
    close(seen.ttft_s[2], 4.0 * block_s + 2e-3);
    close(results.prefix_hit_from.dram, 2.0 * results.prefix_hit_from.ssd);
}

#[test]
fn a_load_comes_after_the_queue_as_predicted() {
    let dram = setup(40, 1e-3, "dram_tokens = 51200\ndram_gb_per_s = 1.0");
    // 3 fills the device and evicts 1; nothing else runs while the blocks of 5 are loaded.
    let requests =
        vec![prompt(1, 0.0, 1, 4), prompt(3, 10.0, 3, 38), prompt(4, 40.0, 4, 8), prompt(5, 40.1, 1, 4)];
    let (results, seen) = play(&dram, requests);
    assert!(results.prefix_hit_from.dram > 0.0, "{results:?}");
    assert_eq!(seen.terms[3].cached_tokens, 2048);
    assert!(seen.terms[3].queue_s > 3.0 && seen.terms[3].pull_s > 0.1, "{:?}", seen.terms[3]);
    close(seen.ttft_s[3], seen.terms[3].ttft_s);
}

/// Compares a cache of a fiftieth above tiers of the rest with one of `blocks` blocks, on the requests of
/// `trace`.
fn assert_hits_like_one_large_cache(trace: &dyn Fn() -> Trace, blocks: u64) {
    let hits = |setup: &Setup| {
        run(setup, trace().jitter(Seconds(3.0), 1), &mut ()).unwrap_or_else(|error| panic!("{error}"))
    };
    let free = |tier: &str, blocks: u64| format!("{tier}_tokens = {}\n{tier}_gb_per_s = 1e9", blocks * 512);
    let fiftieth = blocks / 50;
    let whole = hits(&setup(51 * fiftieth, 1e-12, ""));
    let alone = hits(&setup(fiftieth, 1e-12, ""));
    let dram = hits(&setup(fiftieth, 1e-12, &free("dram", blocks)));
    let both = format!("{}\n{}", free("dram", 10 * fiftieth), free("ssd", 40 * fiftieth));
    let three = hits(&setup(fiftieth, 1e-12, &both));
    let token = |results: &Results| results.prefix_hit.token;
    println!(
        "of {blocks} blocks: all {:.4}, a fiftieth {:.4}, above the rest {:.4}, above a fifth and the rest {:.4}",
        token(&whole),
        token(&alone),
        token(&dram),
        token(&three)
    );
    assert!(token(&alone) < 0.8 * token(&whole));
    assert!((token(&dram) - token(&whole)).abs() < 0.005 && (token(&three) - token(&whole)).abs() < 0.01);
    assert!(dram.prefix_hit_from.dram > dram.prefix_hit_from.device);
    let from = three.prefix_hit_from;
    assert!(from.ssd > 0.0 && (from.device + from.dram + from.ssd - token(&three)).abs() < 1e-12);
}

#[test]
fn a_small_cache_above_a_large_tier_hits_like_one_large_cache() {
    let Some(path) = shared("traces/mooncake-conversation.jsonl.zst") else { return };
    let open = || Trace::open(&path, ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    assert_hits_like_one_large_cache(&open, 50_000);
}

#[test]
fn tiers_of_a_generated_conversation_hit_like_one_large_cache() {
    let lines = generated(1500, 3.4);
    let open =
        || Trace::from_reader("t", Cursor::new(lines.clone()), ReadOptions::default()).expect("a trace");
    assert_hits_like_one_large_cache(&open, 20_000);
}
