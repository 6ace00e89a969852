//! The statistics of a published trace, and of a generated one.

#![allow(clippy::print_stdout)]

use crate::common::{generated, shared};
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_sim::trace::stats::{
    ByCapacity, CAPACITIES_BLOCKS, PrefillFit, Stats, StatsOptions, TraceTally,
};
use mixfleet_sim::trace::{ReadOptions, Request, Requests, Trace};
use std::collections::HashSet;
use std::io::Cursor;

fn conversation(rechain: Option<u32>) -> Option<Stats> {
    let path = shared("traces/mooncake-conversation.jsonl.zst")?;
    let trace = Trace::open(&path, ReadOptions::default()).expect("a trace");
    let block_tokens = trace.block_tokens().expect("blocks");
    let to = rechain.unwrap_or(block_tokens);
    let mut tally = TraceTally::new(StatsOptions {
        block_tokens: to,
        capacities_blocks: if rechain.is_none() { CAPACITIES_BLOCKS.to_vec() } else { vec![] },
        policies: vec![CachePolicy::Lru, CachePolicy::Lfu],
        // This is LLaMA3-70B on 8 A800 (FAST'25, figure 14a), without the overhead of a request.
        prefill: Some(PrefillFit { per_token: 1.19e-4, per_token_squared: 7.467e-10 }),
    });
    for request in trace.rechain(block_tokens, to) {
        tally.add(&request.expect("a good line"));
    }
    Some(tally.finish("mooncake", Default::default()))
}

fn assert_rates(found: &Option<ByCapacity>, expected: [f64; 5]) {
    let found = found.as_ref().expect("counted");
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), CAPACITIES_BLOCKS);
    for ((capacity, rates), expected) in found.iter().zip(expected) {
        assert!((rates.block - expected).abs() < 0.0005, "{capacity}: {} for {expected}", rates.block);
    }
}

/// The expected rates are those of an independent replay of the trace, with its lengths.
#[test]
fn the_conversation_has_its_known_hit_rates() {
    let Some(stats) = conversation(None) else { return };
    let infinite = stats.prefix_hit.infinite;
    assert!((infinite.block - 0.3664).abs() < 0.0005, "{infinite:?}");
    assert!((infinite.token - 0.3736).abs() < 0.0005, "{infinite:?}");
    assert_rates(&stats.prefix_hit.lru, [0.0445, 0.2112, 0.3257, 0.3546, 0.3637]);
    assert_rates(&stats.prefix_hit.lfu, [0.0481, 0.1318, 0.2759, 0.3438, 0.3631]);
    assert_eq!((stats.blocks.references, stats.blocks.distinct), (288_500, 182_790));
    let lengths = (stats.input_tokens.p50, stats.input_tokens.p90, stats.input_tokens.p99);
    assert_eq!(lengths, (6_909, 27_367, 85_401));
    assert_eq!((stats.output_tokens.p50, stats.output_tokens.p99), (350, 1_120));
}

/// FAST'25 figure 8 gives 1.659 and 1.064 s for its own machines; the fit of its figure 14a gives these.
#[test]
fn the_conversation_has_its_known_prefill_times() {
    let Some(prefill) = conversation(Some(512)).and_then(|stats| stats.prefill_s) else { return };
    assert!((prefill.no_cache / 1.727 - 1.0).abs() < 0.005, "{prefill:?}");
    assert!((prefill.infinite_cache / 1.097 - 1.0).abs() < 0.005, "{prefill:?}");
}

#[test]
fn coarser_blocks_hit_less_and_finer_ones_the_same() {
    let (Some(coarse), Some(known), Some(fine)) =
        (conversation(Some(2048)), conversation(Some(512)), conversation(Some(128)))
    else {
        return;
    };
    let token = |stats: &Stats| stats.prefix_hit.infinite.token;
    assert!(token(&coarse) < token(&known) - 0.02, "{} {}", token(&coarse), token(&known));
    // Partial last blocks that are hit count up to the prompt's end in both.
    assert!((token(&fine) - token(&known)).abs() < 1e-9, "{} {}", token(&fine), token(&known));
}

/// The cached blocks, the least recently used first.
#[derive(Default)]
struct NaiveCache(Vec<u64>);

impl NaiveCache {
    /// Number of leading cached blocks of `chain`; all its blocks are then cached, up to `capacity`.
    fn hit_and_hold(&mut self, chain: &[u64], capacity: usize) -> usize {
        let hit = chain.iter().take_while(|key| self.0.contains(key)).count();
        self.0.retain(|key| !chain.contains(key));
        // A block is only useful after those before it, so the deepest is evicted first.
        self.0.extend(chain.iter().take(capacity).rev());
        let over = self.0.len().saturating_sub(capacity);
        self.0.drain(..over);
        hit
    }
}

/// On a trace that every clone has, hits equal those of a naive set and list.
#[test]
fn a_generated_conversation_hits_what_a_naive_replay_hits() {
    const CAPACITIES: [usize; 3] = [500, 2_000, 8_000];
    let lines = generated(600, 3.4);
    let read =
        || Trace::from_reader("t", Cursor::new(lines.clone()), ReadOptions::default()).expect("a trace");
    let requests: Vec<Request> = read().map(|request| request.expect("a good line")).collect();
    assert_eq!((requests.len(), read().block_tokens()), (600, Some(512)));
    let mut tally = TraceTally::new(StatsOptions {
        block_tokens: 512,
        capacities_blocks: CAPACITIES.to_vec(),
        policies: vec![CachePolicy::Lru],
        prefill: None,
    });
    let (mut held, mut caches) = (HashSet::new(), CAPACITIES.map(|_| NaiveCache::default()));
    let (mut references, mut tokens, mut infinite, mut infinite_tokens) = (0, 0, 0, 0);
    let mut hits = CAPACITIES.map(|_| 0);
    for request in &requests {
        tally.add(request);
        let chain: Vec<u64> = request.chain.iter().map(|key| key.0).collect();
        references += chain.len();
        tokens += u64::from(request.prompt_tokens);
        let hit = chain.iter().take_while(|key| held.contains(*key)).count();
        held.extend(chain.iter().copied());
        infinite += hit;
        infinite_tokens += (hit as u64 * 512).min(request.prompt_tokens.into());
        for ((cache, capacity), hits) in caches.iter_mut().zip(CAPACITIES).zip(&mut hits) {
            *hits += cache.hit_and_hold(&chain, capacity);
        }
    }
    let stats = tally.finish("mooncake", Default::default());
    assert_eq!((stats.blocks.references, stats.blocks.distinct), (references as u64, held.len() as u64));
    let found = stats.prefix_hit.infinite;
    assert_eq!(found.block, infinite as f64 / references as f64);
    assert_eq!(found.token, infinite_tokens as f64 / tokens as f64);
    let lru = stats.prefix_hit.lru.expect("counted");
    for ((capacity, found), hits) in lru.into_iter().zip(hits) {
        let expected = hits as f64 / references as f64;
        println!("{capacity} blocks: {} of the blocks hit, {expected} by the naive replay", found.block);
        assert!((found.block - expected).abs() < 0.005, "{capacity}: {} for {expected}", found.block);
    }
    assert!(hits[0] < hits[2], "the capacities make no difference: {hits:?}");
}
