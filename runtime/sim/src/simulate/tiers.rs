//! The tiers below an instance's devices: blocks evicted from the devices' cache go to host memory, and
//! blocks evicted from there to the disk. A loaded block stays in its tier, so that it need not be written
//! again.

use super::engine::Outcome;
use mixfleet_hal::units::Bytes;
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::kv::{BlockCache, BlockHash, CachePolicy, Tier};

/// The setup of a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierSetup {
    /// The tier, which is not that of the devices.
    pub tier: Tier,
    /// KV tokens that fit into it.
    pub tokens: u64,
    /// The cost of loading from it.
    pub cost: LinkCost,
}

struct Store {
    tier: Tier,
    cache: BlockCache,
    cost: LinkCost,
    /// Time until which its link to the devices is busy.
    free_s: f64,
}

/// The stores of one instance, the fastest first.
pub(super) struct Tiers {
    stores: Vec<Store>,
    block_bytes: f64,
}

/// Number of blocks by tier, in the order of [`Tier::ALL`].
pub(super) type ByTier = [usize; 3];

impl Tiers {
    pub(super) fn new(
        setups: &[TierSetup],
        block_tokens: u32,
        block_bytes: f64,
        policy: CachePolicy,
    ) -> Self {
        let blocks = |tokens: u64| usize::try_from(tokens / u64::from(block_tokens)).unwrap_or(usize::MAX);
        let mut stores: Vec<Store> = setups
            .iter()
            .filter(|setup| setup.tier != Tier::Device && blocks(setup.tokens) > 0)
            .map(|setup| Store {
                tier: setup.tier,
                cache: BlockCache::new(blocks(setup.tokens), policy),
                cost: setup.cost,
                free_s: 0.0,
            })
            .collect();
        stores.sort_by_key(|store| store.tier);
        Tiers { stores, block_bytes }
    }

    /// Stores blocks evicted from the devices' cache, in order: the deepest block of a chain comes first, and
    /// so is evicted first here. Returns how many left the devices for it.
    pub(super) fn take_in(&mut self, evicted: &[BlockHash], outcomes: &mut Vec<Outcome>) -> usize {
        let new = |store: &Store| evicted.iter().filter(|&&key| !store.cache.contains(key)).count();
        let copied = self.stores.first().map_or(0, new);
        let mut coming = evicted.to_vec();
        for Store { tier, cache, .. } in &mut self.stores {
            let (mut stored, mut lost) = (Vec::new(), Vec::new());
            for key in coming {
                let known = cache.contains(key);
                cache.insert(&[key], &mut lost);
                match cache.contains(key) {
                    true if !known => stored.push(key),
                    true => {}
                    false => lost.push(key),
                }
            }
            // A block may be stored and evicted at once.
            stored.retain(|&key| cache.contains(key));
            if !stored.is_empty() {
                outcomes.push(Outcome::Stored(*tier, stored));
            }
            if !lost.is_empty() {
                outcomes.push(Outcome::Evicted(*tier, lost.clone()));
            }
            coming = lost;
        }
        copied
    }

    /// Number of leading blocks of `chain` in each tier, each counted in its fastest one.
    pub(super) fn prefix(&self, chain: &[BlockHash]) -> ByTier {
        let mut blocks = [0; 3];
        for &key in chain {
            let Some(store) = self.stores.iter().find(|store| store.cache.contains(key)) else { break };
            blocks[store.tier as usize] += 1;
        }
        blocks
    }

    /// Time to load this many blocks of each tier, if nothing else is loaded.
    pub(super) fn time_s(&self, blocks: ByTier) -> f64 {
        let times = self.stores.iter().filter(|store| blocks[store.tier as usize] > 0).map(|store| {
            let bytes = blocks[store.tier as usize] as f64 * self.block_bytes;
            store.cost.time(Bytes(bytes)).0
        });
        times.fold(0.0, f64::max)
    }

    /// Loads the leading `blocks` of `chain`; returns when all are there. Tiers load concurrently, each one
    /// load after the other.
    pub(super) fn load(&mut self, now_s: f64, chain: &[BlockHash], blocks: ByTier) -> f64 {
        let mut ready_s = now_s;
        for store in &mut self.stores {
            let blocks = blocks[store.tier as usize];
            if blocks > 0 {
                let takes_s = store.cost.time(Bytes(blocks as f64 * self.block_bytes)).0;
                store.free_s = store.free_s.max(now_s) + takes_s;
                ready_s = ready_s.max(store.free_s);
                store.cache.touch(chain);
            }
        }
        ready_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[u64]) -> Vec<BlockHash> {
        keys.iter().map(|&key| BlockHash(key)).collect()
    }

    #[test]
    fn blocks_sink_tier_by_tier_and_each_move_is_told() {
        let setup = |tier, tokens, seconds_per_byte| {
            let cost = LinkCost { seconds_per_byte, ..LinkCost::default() };
            TierSetup { tier, tokens, cost }
        };
        let setups = [setup(Tier::Ssd, 20, 1.0), setup(Tier::Dram, 25, 0.1), setup(Tier::Device, 99, 0.0)];
        let mut tiers = Tiers::new(&setups, 10, 3.0, CachePolicy::Lru);
        let mut told = Vec::new();
        tiers.take_in(&keys(&[3, 2, 1]), &mut told);
        let said: Vec<(bool, Tier, Vec<BlockHash>)> = told
            .into_iter()
            .map(|outcome| match outcome {
                Outcome::Stored(tier, keys) => (true, tier, keys),
                Outcome::Evicted(tier, keys) => (false, tier, keys),
                _ => panic!("something else"),
            })
            .collect();
        let (dram, ssd) = (Tier::Dram, Tier::Ssd);
        let want = [(true, dram, keys(&[2, 1])), (false, dram, keys(&[3])), (true, ssd, keys(&[3]))];
        assert_eq!(said, want);
        assert_eq!(tiers.prefix(&keys(&[1, 2, 3, 4])), [0, 2, 1]);
        assert_eq!(tiers.prefix(&keys(&[4, 1])), [0, 0, 0]);
        // 6 bytes at 0.1 s beside 3 bytes at 1 s; the next load waits for the disk.
        assert!((tiers.load(5.0, &keys(&[1, 2, 3]), [0, 2, 1]) - 8.0).abs() < 1e-12);
        assert!((tiers.load(6.0, &keys(&[3]), [0, 0, 1]) - 11.0).abs() < 1e-12);
        assert!((tiers.load(6.0, &keys(&[1]), [0, 1, 0]) - 6.3).abs() < 1e-12);
    }
}
