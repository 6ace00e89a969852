//! Whose KV is whose.

use mixfleet_hal::random;

/// What belongs to the model, not to a device.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Digest of configuration and weights.
    pub model_digest: String,
    /// Digest of the tokenizer.
    pub tokenizer_digest: String,
    /// Makes block hashes hard to aim at.
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
}
