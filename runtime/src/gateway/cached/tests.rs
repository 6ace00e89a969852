//! What becomes of an engine's blocks, against a plain set of prefixes.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCK: u32 = 2;

fn test_hasher() -> PrefixHasher {
    hasher(&crate::env::SeededEnv::new(1), "m")
}

fn empty() -> EngineCache {
    EngineCache { block_tokens: BLOCK, ..EngineCache::default() }
}

fn stored(part: u32, parent: Option<u64>, blocks: &[u64], tokens: &[u32]) -> EngineKvChange {
    EngineKvChange::Stored {
        part,
        parent: parent.map(EngineBlock),
        blocks: blocks.iter().copied().map(EngineBlock).collect(),
        tokens: tokens.to_vec(),
        block_tokens: BLOCK,
    }
}

fn removed(part: u32, block: u64) -> EngineKvChange {
    EngineKvChange::Removed { part, blocks: vec![EngineBlock(block)] }
}

#[test]
fn keys_are_those_of_the_prompt() {
    let (hasher, mut cache) = (test_hasher(), empty());
    let chain = hasher.chain(&[1, 2, 3, 4, 5, 6], BLOCK);
    let first = cache.apply(&hasher, &stored(0, None, &[70, 71], &[1, 2, 3, 4]));
    assert_eq!(first, Some(KeysChange::Come(chain[..2].to_vec())));
    let next = cache.apply(&hasher, &stored(0, Some(71), &[72], &[5, 6]));
    assert_eq!(next, Some(KeysChange::Come(chain[2..].to_vec())));
    assert_eq!(cache.apply(&hasher, &removed(0, 72)), Some(KeysChange::Gone(chain[2..].to_vec())));
    assert_eq!(cache.apply(&hasher, &removed(0, 72)), None);
    // blocks after an unknown one are unknown, and blocks of another size do not count
    assert_eq!(cache.apply(&hasher, &stored(0, Some(72), &[73], &[7, 8])), None);
    let odd = EngineKvChange::Stored {
        part: 0,
        parent: None,
        blocks: vec![EngineBlock(9)],
        tokens: vec![1; 4],
        block_tokens: 4,
    };
    assert_eq!(cache.apply(&hasher, &odd), None);
    assert_eq!(cache.apply(&hasher, &EngineKvChange::Cleared { part: 0 }), Some(KeysChange::Cleared));
    assert_eq!(cache.apply(&hasher, &EngineKvChange::Cleared { part: 0 }), None);
    assert!(cache.known.is_empty() && cache.places.is_empty());
}

#[test]
fn a_block_that_was_stored_twice_stays_until_it_was_removed_twice() {
    let (hasher, mut cache) = (test_hasher(), empty());
    let key = hasher.chain(&[1, 2], BLOCK);
    assert_eq!(cache.apply(&hasher, &stored(0, None, &[7], &[1, 2])), Some(KeysChange::Come(key.clone())));
    assert_eq!(cache.apply(&hasher, &stored(0, None, &[7], &[1, 2])), None);
    // another rank has it too
    assert_eq!(cache.apply(&hasher, &stored(1, None, &[7], &[1, 2])), None);
    assert_eq!(cache.apply(&hasher, &removed(0, 7)), None);
    assert_eq!(cache.apply(&hasher, &removed(0, 7)), None);
    let lost = EngineKvChange::Lost { part: 1, cause: "x".into() };
    assert_eq!(cache.apply(&hasher, &lost), Some(KeysChange::Cleared));
    assert_eq!(cache.apply(&hasher, &stored(0, None, &[7], &[1, 2])), Some(KeysChange::Come(key)));
}

proptest! {
    #[test]
    fn the_keys_are_those_of_all_blocks_that_are_somewhere(
        steps in proptest::collection::vec((0..2_u32, 0..4_u32, 0..4_usize, any::<bool>()), 0..60),
    ) {
        let (hasher, mut cache, mut keys) = (test_hasher(), empty(), BTreeSet::new());
        // part and first token -> times that each prefix of three blocks was stored
        let mut model: BTreeMap<(u32, u32, usize), u32> = BTreeMap::new();
        for (part, first, depth, comes) in steps {
            let tokens: Vec<u32> = (0..3 * BLOCK).map(|at| first * 100 + at).collect();
            let name = |at: usize| u64::from(first) * 10 + at as u64;
            let change = match (comes, depth) {
                (_, 3) if !comes => {
                    model.retain(|(of, ..), _| *of != part);
                    EngineKvChange::Cleared { part }
                }
                (true, _) => {
                    let blocks: Vec<u64> = (0..3).map(name).collect();
                    (0..3).for_each(|at| *model.entry((part, first, at)).or_default() += 1);
                    stored(part, None, &blocks, &tokens)
                }
                (false, at) => {
                    if let Some(times) = model.get_mut(&(part, first, at)) {
                        *times -= 1;
                    }
                    model.retain(|_, times| *times > 0);
                    removed(part, name(at))
                }
            };
            match cache.apply(&hasher, &change) {
                Some(KeysChange::Come(come)) => come.into_iter().for_each(|key| assert!(keys.insert(key))),
                Some(KeysChange::Gone(gone)) => gone.iter().for_each(|key| assert!(keys.remove(key))),
                Some(KeysChange::Cleared) => keys.clear(),
                None => {}
            }
            let expected: BTreeSet<BlockHash> = model
                .keys()
                .map(|(_, first, at)| {
                    let tokens: Vec<u32> = (0..3 * BLOCK).map(|at| first * 100 + at).collect();
                    hasher.chain(&tokens, BLOCK)[*at]
                })
                .collect();
            prop_assert_eq!(&keys, &expected);
            prop_assert_eq!(cache.keys(), expected.into_iter().collect::<Vec<_>>());
        }
    }
}
