//! Converts block keys to another block size.

use mixfleet_hal::random::bits;
use mixfleet_scheduler::kv::BlockHash;

/// The chain of a prompt of `prompt_tokens` in blocks of `to` tokens, from the chain in blocks of `from`
/// tokens.
pub(super) fn rechain(chain: &[BlockHash], prompt_tokens: u32, from: u32, to: u32) -> Vec<BlockHash> {
    assert!(from > 0 && to > 0, "a block has at least one token");
    if from == to || chain.is_empty() {
        return chain.to_vec();
    }
    let step = greatest_common_divisor(from, to);
    let (pieces, group) = ((from / step) as usize, (to / step) as usize);
    // Whether the last key covers the prompt's end; a partial block counts then.
    let to_the_end = chain.len() as u64 * u64::from(from) >= u64::from(prompt_tokens);
    let fine_count = match to_the_end {
        true => prompt_tokens.div_ceil(step) as usize,
        false => chain.len() * pieces,
    };
    let fine = |i: usize| derive(chain[i / pieces], i % pieces, pieces);
    let coarse_count = if to_the_end { fine_count.div_ceil(group) } else { fine_count / group };
    let key = |j: usize| {
        let members = j * group..((j + 1) * group).min(fine_count);
        let (first, rest) = (fine(members.start), members.start + 1..members.end);
        rest.fold(first, |key, i| BlockHash(bits(key.0, fine(i).0)))
    };
    (0..coarse_count).map(key).collect()
}

/// Key of the part `piece` of `pieces` parts of the block `key`. The last part keeps the block's own key,
/// since both stand for the prefix up to there.
fn derive(key: BlockHash, piece: usize, pieces: usize) -> BlockHash {
    if piece + 1 == pieces { key } else { BlockHash(bits(key.0, piece as u64)) }
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The chain of `tokens`, including a partial last block if `tail`: each key covers all tokens before it.
    fn chain(tokens: &[u8], block: u32, tail: bool) -> Vec<BlockHash> {
        let ends = (1..=tokens.len())
            .filter(|end| end.is_multiple_of(block as usize) || (tail && *end == tokens.len()));
        // The length distinguishes a partial block from the start of a full one.
        let key = |end: usize| tokens[..end].iter().fold(end as u64, |key, &token| bits(key, token.into()));
        ends.map(|end| BlockHash(key(end))).collect()
    }

    fn shared(a: &[BlockHash], b: &[BlockHash]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    proptest! {
        #[test]
        fn sharing_survives_as_far_as_whole_blocks_tell(
            a in proptest::collection::vec(0u8..2, 1..200),
            b in proptest::collection::vec(0u8..2, 1..200),
            common in 0usize..200,
            from in 1u32..24,
            to in 1u32..24,
            tail in any::<bool>(),
        ) {
            let mut b = b;
            let common = common.min(a.len()).min(b.len());
            b[..common].copy_from_slice(&a[..common]);
            let (old_a, old_b) = (chain(&a, from, tail), chain(&b, from, tail));
            let (new_a, new_b) =
                (rechain(&old_a, a.len() as u32, from, to), rechain(&old_b, b.len() as u32, from, to));
            let covers = |old: &[BlockHash], tokens: &[u8]| old.len() * from as usize >= tokens.len();
            let expected = |old: &[BlockHash], tokens: &[u8]| match covers(old, tokens) {
                true => tokens.len().div_ceil(to as usize),
                false => old.len() * from as usize / to as usize,
            };
            prop_assert_eq!(new_a.len(), expected(&old_a, &a));
            prop_assert_eq!(new_b.len(), expected(&old_b, &b));
            let known = shared(&old_a, &old_b);
            if a == b {
                prop_assert_eq!(new_a, new_b);
            } else {
                // Tokens that the old chains show to be shared; a shared end is that of the shorter prompt.
                let tokens = (known * from as usize).min(a.len()).min(b.len());
                prop_assert_eq!(shared(&new_a, &new_b), tokens / to as usize);
            }
        }
    }

    #[test]
    fn known_sizes() {
        let keys: Vec<BlockHash> = (0..3).map(BlockHash).collect();
        // 1,100 tokens: two whole blocks of 512 and one of 76 tokens.
        assert_eq!(rechain(&keys, 1100, 512, 512), keys);
        assert_eq!(rechain(&keys, 1100, 512, 1024).len(), 2);
        assert_eq!(rechain(&keys, 1100, 512, 16).len(), 69);
        assert_eq!(rechain(&keys, 1100, 512, 768).len(), 2);
        // The same keys of a longer prompt contain no information about its end.
        assert_eq!(rechain(&keys, 5000, 512, 1024).len(), 1);
        assert_eq!(rechain(&[], 5000, 512, 1024), []);
    }
}
