//! The time of single operations of the prefix index and of the block caches.
//!
//! `cargo bench -p mixfleet-scheduler --bench index`

#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mixfleet_hal::random::bits;
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy, PrefixIndex, Prefixes, Tier};
use std::hint::black_box;

fn chain(seed: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|block| BlockHash(bits(seed, block))).collect()
}

/// A chain of 100 blocks in which instances `0..holders(i)` hold block i.
fn held_by(holders: impl Fn(u32) -> u32) -> (PrefixIndex, Vec<BlockHash>) {
    let mut index = PrefixIndex::default();
    let blocks = chain(1, 100);
    for (i, &block) in blocks.iter().enumerate() {
        for instance in 0..holders(i as u32) {
            index.store(InstanceId(instance), Tier::Device, &[block]);
        }
    }
    (index, blocks)
}

fn lookups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup of 100 blocks");
    group.throughput(Throughput::Elements(100));
    let cases = [
        ("held by one", held_by(|_| 1)),
        ("held by 1000", held_by(|_| 1000)),
        ("4 blocks by 1000, the rest by 4", held_by(|i| if i < 4 { 1000 } else { 4 })),
        ("each block by 10 fewer of 1000", held_by(|i| 1000 - 10 * i)),
        ("held by none", (PrefixIndex::default(), chain(1, 100))),
    ];
    for (name, (index, blocks)) in &cases {
        let mut answer = Prefixes::default();
        group.bench_function(*name, |bencher| bencher.iter(|| index.lookup(black_box(blocks), &mut answer)));
    }
}

fn changes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("store and evict 24 blocks");
    group.throughput(Throughput::Elements(48));
    for held in [0, 1_000_000] {
        let mut index = PrefixIndex::default();
        index.store(InstanceId(0), Tier::Device, &chain(1, held));
        let mut seed = 2;
        group.bench_function(BenchmarkId::from_parameter(held), |bencher| {
            bencher.iter(|| {
                seed += 1;
                let blocks = chain(seed, 24);
                index.store(InstanceId(1), Tier::Device, &blocks);
                index.evict(InstanceId(1), Tier::Device, &blocks);
            });
        });
    }
}

fn caches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("insert 24 blocks into a full cache of 10,000");
    group.throughput(Throughput::Elements(24));
    for policy in [CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::LengthAware] {
        let mut cache = BlockCache::new(10_000, policy);
        let (mut seed, mut evicted) = (0, Vec::new());
        group.bench_function(format!("{policy:?}"), |bencher| {
            bencher.iter(|| {
                seed += 1;
                evicted.clear();
                // Every second chain is one of a hundred that recur.
                let which = if seed % 2 == 0 { seed } else { bits(9, seed) % 100 };
                cache.insert(&chain(which, 24), &mut evicted);
            });
        });
    }
}

criterion_group!(benches, lookups, changes, caches);
criterion_main!(benches);
