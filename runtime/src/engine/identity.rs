//! The identity of KV: model, tokenizer and the fleet's secret.

use mixfleet_hal::{DType, random};
use mixfleet_scheduler::kv::hash::{Namespace, PrefixHasher};
use twox_hash::XxHash3_64;

/// The part of the identity that does not depend on the device.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Digest of configuration and weights.
    pub model_digest: String,
    /// Digest of the tokenizer.
    pub tokenizer_digest: String,
    /// Secret key of block hashes, so that they cannot be forged.
    pub secret: [u8; 16],
}

impl Identity {
    /// An identity with a secret from 128 random bits.
    pub fn new(model_digest: String, tokenizer_digest: String, random_bits: [u64; 2]) -> Self {
        let mut secret = [0; 16];
        secret[..8].copy_from_slice(&random::bits(random_bits[0], 0).to_le_bytes());
        secret[8..].copy_from_slice(&random::bits(random_bits[1], 1).to_le_bytes());
        Identity { model_digest, tokenizer_digest, secret }
    }

    /// Digest of everything that two processes must have in common to use each other's KV of dtype `kv`.
    pub fn namespace(&self, kv: DType) -> u64 {
        self.digest(kv, &self.secret)
    }

    /// The same without the secret, for processes that have none in common.
    pub fn open_namespace(&self, kv: DType) -> u64 {
        self.digest(kv, &[])
    }

    fn digest(&self, kv: DType, secret: &[u8]) -> u64 {
        let kv = kv.to_string();
        let fields = [self.model_digest.as_bytes(), self.tokenizer_digest.as_bytes(), kv.as_bytes(), secret];
        let length = |field: &&[u8]| (field.len() as u64).to_le_bytes();
        XxHash3_64::oneshot(
            &fields.iter().flat_map(|field| [&length(field), *field].concat()).collect::<Vec<u8>>(),
        )
    }

    /// Hashes the blocks of KV of dtype `kv`, shared by all requests with the same salt.
    pub(crate) fn hasher(&self, kv_dtype: DType, cache_salt: Option<String>) -> PrefixHasher {
        let Identity { model_digest, tokenizer_digest, secret } = self;
        let namespace = Namespace {
            model_digest: model_digest.clone(),
            tokenizer_digest: tokenizer_digest.clone(),
            kv_dtype,
            cache_salt,
        };
        PrefixHasher::new(secret, &namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_counts_in_a_namespace_and_nothing_runs_into_the_next() {
        let of = |model: &str, tokenizer: &str, bit| Identity::new(model.into(), tokenizer.into(), [bit, 0]);
        let one = of("ab", "c", 0).namespace(DType::F32);
        assert_eq!(one, of("ab", "c", 0).namespace(DType::F32));
        assert_ne!(one, of("a", "bc", 0).namespace(DType::F32));
        assert_ne!(one, of("ab", "c", 1).namespace(DType::F32));
        assert_ne!(one, of("ab", "c", 0).namespace(DType::Bf16));
        let open = of("ab", "c", 0).open_namespace(DType::F32);
        assert_eq!(open, of("ab", "c", 1).open_namespace(DType::F32), "the secret does not count there");
        assert_ne!(open, of("a", "bc", 0).open_namespace(DType::F32));
        assert_ne!(open, of("ab", "c", 0).open_namespace(DType::Bf16));
    }
}
