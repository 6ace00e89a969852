use super::*;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeSet;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Block {
    key: u64,
    uses: u32,
    depth: usize,
    used_at: u32,
    pins: u32,
}

/// A reference implementation as a list that is searched.
struct Naive {
    capacity: usize,
    policy: CachePolicy,
    blocks: Vec<Block>,
    clock: u32,
}

impl Naive {
    fn find(&mut self, key: u64) -> Option<&mut Block> {
        self.blocks.iter_mut().find(|block| block.key == key)
    }

    fn stamp(&mut self, chain: &[u64], uses: u32) {
        for &key in chain.iter().rev() {
            self.clock += 1;
            let clock = self.clock;
            if let Some(block) = self.find(key) {
                block.uses += uses;
                block.used_at = clock;
            }
        }
    }

    fn insert(&mut self, chain: &[u64]) -> Vec<u64> {
        self.stamp(chain, 1);
        let mut evicted = Vec::new();
        for (depth, &key) in chain.iter().enumerate() {
            if self.find(key).is_some() {
                continue;
            }
            if self.blocks.len() == self.capacity {
                let policy = self.policy;
                let order = |block: &Block| match policy {
                    CachePolicy::Lru => (0, Reverse(0), block.used_at),
                    CachePolicy::Lfu => (block.uses, Reverse(0), block.used_at),
                    CachePolicy::LengthAware => (block.uses, Reverse(block.depth), block.used_at),
                };
                let free = |block: &&Block| block.pins == 0 && !chain.contains(&block.key);
                let Some(victim) = self.blocks.iter().filter(free).min_by_key(|b| order(b)).cloned() else {
                    break;
                };
                self.blocks.retain(|block| block.key != victim.key);
                evicted.push(victim.key);
            }
            self.blocks.push(Block { key, uses: 1, depth, used_at: 0, pins: 0 });
        }
        self.stamp(chain, 0);
        evicted
    }
}

/// Prompts in a tree of fan-out 3 with key = path, so that equal keys have equal prefixes.
fn chain() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(0u64..3, 0..7).prop_map(|path| {
        path.iter()
            .scan(1, |key, step| {
                *key = *key * 4 + step;
                Some(*key)
            })
            .collect()
    })
}

fn policy() -> impl Strategy<Value = CachePolicy> {
    prop_oneof![Just(CachePolicy::Lru), Just(CachePolicy::Lfu), Just(CachePolicy::LengthAware)]
}

fn keys(chain: &[u64]) -> Vec<BlockHash> {
    chain.iter().map(|&key| BlockHash(key)).collect()
}

proptest! {
    #[test]
    fn it_agrees_with_a_list_and_keeps_prefixes(
        policy in policy(),
        capacity in prop_oneof![4 => 0usize..12, 1 => Just(usize::MAX)],
        steps in proptest::collection::vec((0u8..6, chain()), 0..80),
    ) {
        let mut cache = BlockCache::new(capacity, policy);
        let mut naive = Naive { capacity, policy, blocks: Vec::new(), clock: 0 };
        let mut pinned: Vec<Vec<u64>> = Vec::new();
        for (what, chain) in steps {
            match what {
                0..=2 => {
                    let mut evicted = Vec::new();
                    cache.insert(&keys(&chain), &mut evicted);
                    prop_assert_eq!(evicted, keys(&naive.insert(&chain)));
                }
                3 => {
                    cache.touch(&keys(&chain));
                    naive.stamp(&chain, 1);
                }
                4 => {
                    let blocks = cache.pin(&keys(&chain));
                    prop_assert_eq!(blocks, cache.longest_prefix(&keys(&chain)));
                    for &key in &chain[..blocks] {
                        naive.find(key).expect("a held block is in the list too").pins += 1;
                    }
                    pinned.push(chain[..blocks].to_vec());
                }
                _ => {
                    let chain = pinned.pop().unwrap_or_default();
                    cache.unpin(&keys(&chain));
                    for &key in &chain {
                        naive.find(key).expect("pinned blocks are never evicted").pins -= 1;
                    }
                    naive.stamp(&chain, 0);
                }
            }
            let held: BTreeSet<u64> = cache.iter().map(|key| key.0).collect();
            prop_assert_eq!(&held, &naive.blocks.iter().map(|block| block.key).collect());
            prop_assert_eq!(cache.len(), held.len());
            prop_assert!(cache.len() <= capacity);
            let parent = |key: u64| key / 4;
            prop_assert!(held.iter().all(|&key| parent(key) == 1 || held.contains(&parent(key))));
        }
    }

    #[test]
    fn pinning_a_chain_block_by_block_is_inserting_it(
        policy in policy(),
        capacity in 0usize..12,
        chains in proptest::collection::vec(chain(), 0..40),
    ) {
        let mut whole = BlockCache::new(capacity, policy);
        let mut pieces = BlockCache::new(capacity, policy);
        for chain in chains {
            let chain = keys(&chain);
            let (mut evicted, mut gone) = (Vec::new(), Vec::new());
            whole.insert(&chain, &mut evicted);
            let held = pieces.longest_prefix(&chain);
            for (depth, &key) in chain[..held].iter().enumerate() {
                pieces.insert_pinned(key, depth as u32, &mut gone);
            }
            let rest = chain.iter().enumerate().skip(held);
            let taken = rest.take_while(|&(depth, &key)| pieces.insert_pinned(key, depth as u32, &mut gone));
            let held = held + taken.count();
            pieces.unpin(&chain[..held]);
            prop_assert_eq!(&evicted, &gone);
            prop_assert!(whole.by_worth().eq(pieces.by_worth()));
            prop_assert_eq!((pieces.pinned(), pieces.by_worth().count()), (0, pieces.len()));
        }
        let mut order = Vec::new();
        let expected: Vec<BlockHash> = whole.by_worth().collect();
        whole.set_capacity(0, &mut order);
        prop_assert_eq!(order, expected);
    }

    #[test]
    fn malformed_chains_do_no_harm(
        policy in policy(),
        capacity in 0usize..6,
        chains in proptest::collection::vec(proptest::collection::vec(0u64..8, 0..8), 0..40),
    ) {
        // Keys that occur twice in a chain, at other depths than before, and unpinned without a pin.
        let mut cache = BlockCache::new(capacity, policy);
        let mut held = BTreeSet::new();
        for chain in chains {
            let mut evicted = Vec::new();
            cache.insert(&keys(&chain), &mut evicted);
            cache.unpin(&keys(&chain));
            held.extend(chain.iter().map(|&key| BlockHash(key)).filter(|&key| cache.contains(key)));
            held.retain(|key| !evicted.contains(key));
            prop_assert_eq!(&held, &cache.iter().collect());
            prop_assert!(cache.len() <= capacity);
        }
    }
}

#[test]
fn the_front_of_a_chain_that_does_not_fit_is_held() {
    for policy in [CachePolicy::Lru, CachePolicy::Lfu, CachePolicy::LengthAware] {
        let mut cache = BlockCache::new(3, policy);
        cache.insert(&keys(&[1, 2, 3, 4, 5]), &mut Vec::new());
        assert_eq!(cache.longest_prefix(&keys(&[1, 2, 3, 4, 5])), 3);
        let mut evicted = Vec::new();
        cache.insert(&keys(&[1, 9]), &mut evicted);
        assert_eq!(evicted, keys(&[3]), "{policy:?}");
    }
}

#[test]
fn what_is_removed_is_gone_even_if_it_is_pinned() {
    let mut cache = BlockCache::new(4, CachePolicy::Lru);
    cache.insert(&keys(&[1, 2, 3]), &mut Vec::new());
    assert_eq!(cache.pin(&keys(&[1])), 1);
    assert!(cache.remove(BlockHash(1)) && cache.remove(BlockHash(2)) && !cache.remove(BlockHash(2)));
    cache.unpin(&keys(&[1]));
    assert_eq!((cache.len(), cache.pinned()), (1, 0));
    assert!(cache.by_worth().eq([BlockHash(3)]));
    cache.insert(&keys(&[4, 5, 6]), &mut Vec::new());
    assert_eq!(cache.len(), 4);
}

#[test]
fn a_smaller_capacity_evicts_what_is_not_pinned() {
    let mut cache = BlockCache::new(6, CachePolicy::Lru);
    cache.insert(&keys(&[1, 2, 3]), &mut Vec::new());
    cache.insert(&keys(&[7, 8, 9]), &mut Vec::new());
    assert_eq!((cache.pin(&keys(&[1, 2])), cache.pinned()), (2, 2));
    let mut evicted = Vec::new();
    cache.set_capacity(3, &mut evicted);
    assert_eq!(evicted, keys(&[3, 9, 8]));
    cache.set_capacity(0, &mut evicted);
    assert_eq!((cache.len(), cache.pinned()), (2, 2), "pinned blocks stay");
    cache.unpin(&keys(&[1, 2]));
    assert_eq!(cache.pinned(), 0);
    cache.set_capacity(1, &mut evicted);
    assert_eq!(evicted, keys(&[3, 9, 8, 7, 2]));
}
