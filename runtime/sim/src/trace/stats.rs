//! Statistics of a trace: lengths, arrivals, and hit rates of caches of several sizes.

use super::{Repairs, Request};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy};
use mixfleet_scheduler::table::IdMap;
use serde::Serialize;
use std::collections::BTreeMap;

/// Capacities of Mooncake's table 1 (arXiv v3), in blocks of the trace.
pub const CAPACITIES_BLOCKS: [usize; 5] = [1_000, 10_000, 30_000, 50_000, 100_000];

/// Coefficients of the prefill time of n tokens, p of them reused: `a (n - p) + b (n^2 - p^2)` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PrefillFit {
    /// The coefficient a, in seconds.
    pub per_token: f64,
    /// The coefficient b, in seconds.
    pub per_token_squared: f64,
}

impl PrefillFit {
    /// Time of a prompt of `prompt` tokens whose first `reused` are reused.
    pub fn time(self, prompt: u32, reused: u32) -> Seconds {
        let (n, p) = (f64::from(prompt), f64::from(reused));
        Seconds(self.per_token * (n - p) + self.per_token_squared * (n * n - p * p))
    }
}

/// The counts.
#[derive(Clone, Debug)]
pub struct StatsOptions {
    /// Tokens per block of the chains; 0 if the trace has no chains.
    pub block_tokens: u32,
    /// Cache sizes in blocks.
    pub capacities_blocks: Vec<usize>,
    /// Eviction policies.
    pub policies: Vec<CachePolicy>,
    /// Adds the mean time of a prompt without a cache and with an infinite one.
    pub prefill: Option<PrefillFit>,
}

/// Counts requests one by one. It needs memory for the caches, a count per distinct length, and a key per
/// distinct block (9 to 18 bytes) for the infinite cache.
pub struct TraceTally {
    options: StatsOptions,
    requests: u64,
    first: Seconds,
    last: Seconds,
    prompts: Histogram,
    outputs: Histogram,
    block_references: u64,
    /// What a cache that keeps every block holds.
    held: IdMap<()>,
    infinite: Hits,
    caches: Vec<(CachePolicy, usize, BlockCache, Hits)>,
    evicted: Vec<BlockHash>,
    prefill: [Seconds; 2],
}

impl TraceTally {
    /// An empty tally.
    pub fn new(options: StatsOptions) -> Self {
        let pairs = options
            .policies
            .iter()
            .flat_map(|&policy| options.capacities_blocks.iter().map(move |&capacity| (policy, capacity)));
        let cache =
            |(policy, capacity)| (policy, capacity, BlockCache::new(capacity, policy), Hits::default());
        TraceTally {
            caches: pairs.map(cache).collect(),
            options,
            requests: 0,
            first: Seconds::ZERO,
            last: Seconds::ZERO,
            prompts: Histogram::default(),
            outputs: Histogram::default(),
            block_references: 0,
            held: IdMap::default(),
            infinite: Hits::default(),
            evicted: Vec::new(),
            prefill: [Seconds::ZERO; 2],
        }
    }

    /// Counts one request. Each cache first reports its hits on the prompt, then stores all of it.
    pub fn add(&mut self, request: &Request) {
        if self.requests == 0 {
            self.first = request.at;
        }
        self.last = request.at;
        self.requests += 1;
        self.prompts.add(request.prompt_tokens);
        self.outputs.add(request.output_tokens);
        self.block_references += request.chain.len() as u64;
        let reused = |blocks| request.reused_tokens(blocks, self.options.block_tokens);
        let blocks = request.chain.iter().take_while(|key| self.held.contains(key.0)).count();
        for key in &request.chain[blocks..] {
            self.held.insert(key.0, ());
        }
        self.infinite.add(blocks, reused(blocks));
        if let Some(fit) = self.options.prefill {
            self.prefill[0] += fit.time(request.prompt_tokens, 0);
            self.prefill[1] += fit.time(request.prompt_tokens, reused(blocks));
        }
        for (_, _, cache, hits) in &mut self.caches {
            let blocks = cache.longest_prefix(&request.chain);
            hits.add(blocks, reused(blocks));
            self.evicted.clear();
            cache.insert(&request.chain, &mut self.evicted);
        }
    }

    /// The statistics, including the reader's repairs.
    pub fn finish(self, format: &'static str, repairs: Repairs) -> Stats {
        let tokens = self.prompts.sum();
        let rates = |hits: Hits| HitRates {
            block: ratio(hits.blocks, self.block_references),
            token: ratio(hits.tokens, tokens),
        };
        let by_policy = |wanted: CachePolicy| {
            let caches = self.caches.iter().filter(|(policy, ..)| *policy == wanted);
            caches.map(|(_, capacity, _, hits)| (*capacity, rates(*hits))).collect::<ByCapacity>()
        };
        let wanted = |policy| self.options.policies.contains(&policy).then(|| by_policy(policy));
        let duration = self.last - self.first;
        let requests = self.requests as f64;
        Stats {
            schema: "mixfleet.trace-stats/1",
            format,
            requests: self.requests,
            duration_s: duration.0,
            requests_per_s: Some(requests / duration.0).filter(|rate| rate.is_finite()),
            input_tokens: self.prompts.lengths(),
            output_tokens: self.outputs.lengths(),
            block_tokens: (self.options.block_tokens > 0).then_some(self.options.block_tokens),
            blocks: Blocks { references: self.block_references, distinct: self.held.len() as u64 },
            prefix_hit: PrefixHit {
                infinite: rates(self.infinite),
                lru: wanted(CachePolicy::Lru),
                lfu: wanted(CachePolicy::Lfu),
                length_aware: wanted(CachePolicy::LengthAware),
            },
            prefill_s: self.options.prefill.map(|fit| PrefillTimes {
                fit,
                no_cache: self.prefill[0].0 / requests.max(1.0),
                infinite_cache: self.prefill[1].0 / requests.max(1.0),
            }),
            repairs,
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Hits {
    blocks: u64,
    tokens: u64,
}

impl Hits {
    fn add(&mut self, blocks: usize, tokens: u32) {
        self.blocks += blocks as u64;
        self.tokens += u64::from(tokens);
    }
}

/// Counts by length: exact quantiles in memory that depends only on the number of distinct lengths.
#[derive(Default)]
struct Histogram {
    counts: BTreeMap<u32, u64>,
}

impl Histogram {
    fn add(&mut self, length: u32) {
        *self.counts.entry(length).or_default() += 1;
    }

    fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    fn sum(&self) -> u64 {
        self.counts.iter().map(|(&length, &count)| u64::from(length) * count).sum()
    }

    /// The least length that at least a share `p` of the requests does not exceed (nearest rank).
    fn quantile(&self, p: f64) -> u32 {
        let rank = to_u64((p * self.count() as f64).ceil().max(1.0));
        let mut below = 0;
        let found = self.counts.iter().find(|&(_, &count)| {
            below += count;
            below >= rank
        });
        found.map_or(0, |(&length, _)| length)
    }

    fn lengths(&self) -> Lengths {
        Lengths {
            mean: ratio(self.sum(), self.count()),
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
            max: self.quantile(1.0),
        }
    }
}

/// A share; 0 of nothing.
pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Statistics of a trace.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    /// Name and version of this document.
    pub schema: &'static str,
    /// The detected format of the file.
    pub format: &'static str,
    /// Number of requests.
    pub requests: u64,
    /// Time from the first arrival to the last.
    pub duration_s: f64,
    /// Requests divided by the duration; none if all arrive nearly at once.
    pub requests_per_s: Option<f64>,
    /// Lengths of prompts.
    pub input_tokens: Lengths,
    /// Lengths of answers.
    pub output_tokens: Lengths,
    /// Tokens per block; none if the trace has no information about prefixes, and all hits are 0.
    pub block_tokens: Option<u32>,
    /// Blocks of all prompts.
    pub blocks: Blocks,
    /// Hit rates of one cache for all requests.
    pub prefix_hit: PrefixHit,
    /// Mean prefill time of a prompt, if a fit was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_s: Option<PrefillTimes>,
    /// The reader's repairs.
    pub repairs: Repairs,
}

/// A distribution of lengths in tokens; quantiles by nearest rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the fields say it")]
pub struct Lengths {
    pub mean: f64,
    pub p50: u32,
    pub p90: u32,
    pub p99: u32,
    pub max: u32,
}

/// Blocks of all prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Blocks {
    /// Number of blocks, each counted as often as it occurs.
    pub references: u64,
    /// Number of distinct blocks.
    pub distinct: u64,
}

/// Shares of the work that a cache saves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HitRates {
    /// Share of all block references.
    pub block: f64,
    /// Share of all prompt tokens: hit blocks times the block size, at most the prompt.
    pub token: f64,
}

/// Hit rates by policy and capacity.
#[derive(Clone, Debug, Serialize)]
pub struct PrefixHit {
    /// Hit rates of a cache that never evicts.
    pub infinite: HitRates,
    /// Hit rates of LRU eviction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lru: Option<ByCapacity>,
    /// Hit rates of LFU eviction, with counts of cached blocks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lfu: Option<ByCapacity>,
    /// Hit rates of [`CachePolicy::LengthAware`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length_aware: Option<ByCapacity>,
}

/// Hit rates by capacity in blocks.
pub type ByCapacity = BTreeMap<usize, HitRates>;

/// Mean prefill time of a prompt, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PrefillTimes {
    /// The coefficients of a prompt's time.
    #[serde(flatten)]
    pub fit: PrefillFit,
    /// Mean time without a cache.
    pub no_cache: f64,
    /// Mean time with an infinite cache of whole blocks.
    pub infinite_cache: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(prompt_tokens: u32, chain: &[u64]) -> Request {
        Request {
            id: 0,
            at: Seconds::ZERO,
            prompt_tokens,
            output_tokens: 1,
            chain: chain.iter().map(|&key| BlockHash(key)).collect(),
            session: None,
            class: None,
        }
    }

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let mut histogram = Histogram::default();
        (1..=200).rev().for_each(|length| histogram.add(length));
        let lengths = histogram.lengths();
        assert_eq!((lengths.p50, lengths.p90, lengths.p99, lengths.max), (100, 180, 198, 200));
        assert_eq!((lengths.mean, Histogram::default().lengths().p50), (100.5, 0));
    }

    #[test]
    fn a_hit_counts_whole_blocks_and_no_more_than_the_prompt() {
        let mut tally = TraceTally::new(StatsOptions {
            block_tokens: 10,
            capacities_blocks: vec![2],
            policies: vec![CachePolicy::Lru],
            prefill: Some(PrefillFit { per_token: 1.0, per_token_squared: 0.0 }),
        });
        // 25 tokens miss; the same 25 all hit; then 2 of 4 blocks hit.
        tally.add(&request(25, &[1, 2, 3]));
        tally.add(&request(25, &[1, 2, 3]));
        tally.add(&request(40, &[1, 2, 4, 5]));
        let stats = tally.finish("test", Repairs::default());
        assert_eq!(stats.prefix_hit.infinite, HitRates { block: 5.0 / 10.0, token: 45.0 / 90.0 });
        // The small cache keeps the first two blocks.
        let lru = stats.prefix_hit.lru.expect("asked for");
        assert_eq!(lru, BTreeMap::from([(2, HitRates { block: 4.0 / 10.0, token: 40.0 / 90.0 })]));
        let prefill = stats.prefill_s.expect("asked for");
        assert_eq!((prefill.no_cache, prefill.infinite_cache), (30.0, 15.0));
        assert_eq!((stats.blocks.references, stats.blocks.distinct), (10, 5));
        assert_eq!(stats.requests_per_s, None);
    }
}
