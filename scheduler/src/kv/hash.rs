//! The prefix hash chain: equal keys mean equal prefixes.
//!
//! With S the seed, `local[i] = XXH3-64(token ids of block i as u32 LE, S)`, `key[0] = local[0]` and `key[i]
//! = XXH3-64(key[i-1] LE, local[i] LE, S)`: the form that public KV event indexers use, so that theirs and
//! ours can be compared. S is derived from the fleet's secret and the namespace.
//!
//! XXH3 is not cryptographic and prompts determine the hashed content. The secret makes collisions hard to
//! construct; code that reuses KV on a hit compares the token ids as well.

use mixfleet_hal::DType;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// Key of one KV block *and everything before it* in its sequence and namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Everything that must be equal before KV may be shared.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Namespace {
    /// Digest of the weights and the configuration.
    pub model_digest: String,
    /// Digest of the tokenizer.
    pub tokenizer_digest: String,
    /// Dtype in which KV is stored.
    pub kv_dtype: DType,
    /// Separates tenants; taken from the request.
    pub cache_salt: Option<String>,
}

/// Hashes token sequences of one namespace of one fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixHasher {
    seed: u64,
}

impl PrefixHasher {
    /// The hasher of `namespace` under the fleet's `secret` (any length; 16 random bytes are enough).
    pub fn new(secret: &[u8], namespace: &Namespace) -> Self {
        let mut framed = Vec::new();
        // The length prefixes distinguish ("ab", "c") from ("a", "bc").
        let mut frame = |field: &[u8]| {
            framed.extend((field.len() as u64).to_le_bytes());
            framed.extend(field);
        };
        frame(secret);
        frame(namespace.model_digest.as_bytes());
        frame(namespace.tokenizer_digest.as_bytes());
        frame(namespace.kv_dtype.name().as_bytes());
        match &namespace.cache_salt {
            None => frame(&[0]),
            Some(salt) => {
                frame(&[1]);
                frame(salt.as_bytes());
            }
        }
        PrefixHasher { seed: XxHash3_64::oneshot(&framed) }
    }

    /// The hasher of an open namespace: every process that knows its number computes the same keys.
    pub fn open(namespace: u64) -> Self {
        PrefixHasher { seed: namespace }
    }

    /// Keys of the full blocks of `tokens`; key i covers blocks 0..=i. A partial last block has none.
    ///
    /// # Panics
    /// When `block_tokens` is 0.
    pub fn chain(&self, tokens: &[u32], block_tokens: u32) -> Vec<BlockHash> {
        let mut chain = self.start(block_tokens);
        chain.extend(tokens);
        chain.hashes
    }

    /// An empty chain, to be extended as tokens are generated.
    ///
    /// # Panics
    /// When `block_tokens` is 0.
    pub fn start(&self, block_tokens: u32) -> Chain {
        assert!(block_tokens > 0, "a block has at least one token");
        Chain { hasher: *self, block_tokens, hashes: Vec::new(), tail: Vec::new() }
    }

    /// The key of a full block that follows the block with key `before` (none for the first block).
    pub fn next(&self, before: Option<BlockHash>, block: &[u32]) -> BlockHash {
        let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
        let local = XxHash3_64::oneshot_with_seed(self.seed, &bytes);
        let Some(BlockHash(before)) = before else {
            return BlockHash(local);
        };
        let mut pair = [0; 16];
        pair[..8].copy_from_slice(&before.to_le_bytes());
        pair[8..].copy_from_slice(&local.to_le_bytes());
        BlockHash(XxHash3_64::oneshot_with_seed(self.seed, &pair))
    }
}

/// The keys of a growing sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    hasher: PrefixHasher,
    block_tokens: u32,
    hashes: Vec<BlockHash>,
    tail: Vec<u32>,
}

impl Chain {
    /// Appends tokens; blocks get keys as they fill up.
    pub fn extend(&mut self, mut tokens: &[u32]) {
        while !tokens.is_empty() {
            let missing = self.block_tokens as usize - self.tail.len();
            let (now, later) = tokens.split_at(missing.min(tokens.len()));
            self.tail.extend_from_slice(now);
            tokens = later;
            if self.tail.len() == self.block_tokens as usize {
                self.hashes.push(self.hasher.next(self.hashes.last().copied(), &self.tail));
                self.tail.clear();
            }
        }
    }

    /// Keys of the full blocks so far.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Tokens in a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn namespace() -> Namespace {
        Namespace {
            model_digest: "m".into(),
            tokenizer_digest: "t".into(),
            kv_dtype: DType::Bf16,
            cache_salt: None,
        }
    }

    #[test]
    fn every_field_of_the_namespace_and_the_secret_separate() {
        let tokens: Vec<u32> = (0..32).collect();
        let base = namespace();
        let variants = [
            PrefixHasher::new(b"secret", &base),
            PrefixHasher::new(b"Secret", &base),
            PrefixHasher::new(b"secret", &Namespace { model_digest: "n".into(), ..base.clone() }),
            PrefixHasher::new(b"secret", &Namespace { tokenizer_digest: "u".into(), ..base.clone() }),
            PrefixHasher::new(b"secret", &Namespace { kv_dtype: DType::F16, ..base.clone() }),
            PrefixHasher::new(b"secret", &Namespace { cache_salt: Some(String::new()), ..base.clone() }),
            PrefixHasher::new(b"secret", &Namespace { cache_salt: Some("a".into()), ..base.clone() }),
            PrefixHasher::new(
                b"secret",
                &Namespace { model_digest: "mt".into(), tokenizer_digest: String::new(), ..base },
            ),
        ];
        let chains: Vec<_> = variants.iter().map(|h| h.chain(&tokens, 16)).collect();
        for (i, a) in chains.iter().enumerate() {
            for b in &chains[..i] {
                assert!(a.iter().all(|key| !b.contains(key)));
            }
        }
    }

    #[test]
    fn the_form_is_the_public_one() {
        let hasher = PrefixHasher::new(b"", &namespace());
        let chain = hasher.chain(&[1, 2, 3, 4, 5], 2);
        let local = |a: u32, b: u32| {
            XxHash3_64::oneshot_with_seed(hasher.seed, &[a.to_le_bytes(), b.to_le_bytes()].concat())
                .to_le_bytes()
        };
        assert_eq!(chain.len(), 2);
        assert_eq!(chain[0].0.to_le_bytes(), local(1, 2));
        assert_eq!(
            chain[1].0,
            XxHash3_64::oneshot_with_seed(hasher.seed, &[local(1, 2), local(3, 4)].concat())
        );
    }

    proptest! {
        #[test]
        fn keys_are_equal_exactly_where_prefixes_are(
            // Few distinct tokens, so that equal blocks at different positions are common.
            a in proptest::collection::vec(0u32..3, 0..64),
            b in proptest::collection::vec(0u32..3, 0..64),
            shared in 0usize..64,
            block_tokens in 1u32..9,
        ) {
            let mut b = b;
            let shared = shared.min(a.len()).min(b.len());
            b[..shared].copy_from_slice(&a[..shared]);
            let hasher = PrefixHasher::new(b"s", &namespace());
            let (keys_a, keys_b) = (hasher.chain(&a, block_tokens), hasher.chain(&b, block_tokens));
            prop_assert_eq!(keys_a.len(), a.len() / block_tokens as usize);
            for (i, key_a) in keys_a.iter().enumerate() {
                for (j, key_b) in keys_b.iter().enumerate() {
                    let end = |k: usize| (k + 1) * block_tokens as usize;
                    prop_assert_eq!(key_a == key_b, a[..end(i)] == b[..end(j)]);
                }
            }
        }

        #[test]
        fn growing_in_pieces_gives_the_same_keys(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u32>(), 0..40), 0..8),
            block_tokens in 1u32..20,
        ) {
            let hasher = PrefixHasher::new(b"s", &namespace());
            let mut chain = hasher.start(block_tokens);
            for piece in &pieces {
                chain.extend(piece);
            }
            let all = pieces.concat();
            let whole = hasher.chain(&all, block_tokens);
            prop_assert_eq!(chain.hashes(), &whole[..]);
            prop_assert_eq!(&chain.tail[..], &all[whole.len() * block_tokens as usize..]);
        }
    }
}
