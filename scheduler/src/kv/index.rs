//! Which instance holds which prefix.

use super::BlockHash;
use crate::fleet::InstanceId;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// A table by block key.
pub type BlockMap<V> = HashMap<BlockHash, V, BuildHasherDefault<AsIs>>;

/// Block keys are hashes already, and seeded ones: they index the table as they are. (The standard
/// hasher draws its seed from the system, which would let two runs of one event log differ.)
#[derive(Clone, Copy, Debug, Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Which instances hold which blocks, from their store, evict and clear events. Storing twice is
/// storing once; evicting what is not held does nothing.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    /// Holders sorted by id.
    holders: BlockMap<Vec<InstanceId>>,
}

impl PrefixIndex {
    /// `instance` holds these blocks now.
    pub fn store(&mut self, instance: InstanceId, hashes: &[BlockHash]) {
        for &hash in hashes {
            let holders = self.holders.entry(hash).or_default();
            if let Err(place) = holders.binary_search(&instance) {
                holders.insert(place, instance);
            }
        }
    }

    /// `instance` no longer holds these blocks.
    pub fn evict(&mut self, instance: InstanceId, hashes: &[BlockHash]) {
        for hash in hashes {
            if let Some(holders) = self.holders.get_mut(hash) {
                holders.retain(|&holder| holder != instance);
                if holders.is_empty() {
                    self.holders.remove(hash);
                }
            }
        }
    }

    /// `instance` holds nothing any more. Walks the whole index: a rare event pays, not every block.
    pub fn clear(&mut self, instance: InstanceId) {
        self.holders.retain(|_, holders| {
            holders.retain(|&holder| holder != instance);
            !holders.is_empty()
        });
    }

    /// For each instance that holds the first block of `chain`: how many blocks from the start it
    /// holds without a gap.
    pub fn longest_prefixes(&self, chain: &[BlockHash]) -> BTreeMap<InstanceId, u32> {
        let mut lengths = BTreeMap::new();
        let mut alive: Vec<InstanceId> = Vec::new();
        for (i, hash) in chain.iter().enumerate() {
            let holders = self.holders.get(hash).map_or(&[][..], Vec::as_slice);
            if i == 0 {
                alive = holders.to_vec();
            } else {
                alive.retain(|instance| holders.binary_search(instance).is_ok());
            }
            if alive.is_empty() {
                break;
            }
            lengths.extend(alive.iter().map(|&instance| (instance, i as u32 + 1)));
        }
        lengths
    }

    /// Distinct blocks that anyone holds.
    pub fn blocks(&self) -> usize {
        self.holders.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Debug)]
    enum Change {
        Store(u32, Vec<u64>),
        Evict(u32, Vec<u64>),
        Clear(u32),
    }

    fn change() -> impl Strategy<Value = Change> {
        let hashes = || proptest::collection::vec(0u64..12, 0..8);
        prop_oneof![
            4 => (0u32..4, hashes()).prop_map(|(i, h)| Change::Store(i, h)),
            2 => (0u32..4, hashes()).prop_map(|(i, h)| Change::Evict(i, h)),
            1 => (0u32..4).prop_map(Change::Clear),
        ]
    }

    fn keys(hashes: &[u64]) -> Vec<BlockHash> {
        hashes.iter().map(|&h| BlockHash(h)).collect()
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_set_of_pairs(
            changes in proptest::collection::vec(change(), 0..40),
            chain in proptest::sample::subsequence((0u64..12).collect::<Vec<_>>(), 0..12),
        ) {
            let mut index = PrefixIndex::default();
            let mut pairs: BTreeSet<(u32, u64)> = BTreeSet::new();
            for change in changes {
                match change {
                    Change::Store(i, hashes) => {
                        index.store(InstanceId(i), &keys(&hashes));
                        pairs.extend(hashes.iter().map(|&h| (i, h)));
                    }
                    Change::Evict(i, hashes) => {
                        index.evict(InstanceId(i), &keys(&hashes));
                        pairs.retain(|&(j, h)| i != j || !hashes.contains(&h));
                    }
                    Change::Clear(i) => {
                        index.clear(InstanceId(i));
                        pairs.retain(|&(j, _)| i != j);
                    }
                }
            }
            let naive: BTreeMap<InstanceId, u32> = (0..4)
                .map(|i| (InstanceId(i), chain.iter().take_while(|&&h| pairs.contains(&(i, h))).count() as u32))
                .filter(|&(_, blocks)| blocks > 0)
                .collect();
            prop_assert_eq!(index.longest_prefixes(&keys(&chain)), naive);
            let distinct: BTreeSet<u64> = pairs.iter().map(|&(_, h)| h).collect();
            prop_assert_eq!(index.blocks(), distinct.len());
        }
    }
}
