//! Mooncake's JSONL: `{timestamp ms, input_length, output_length, hash_ids}`.

use super::read::{Draft, Lengths};
use mixfleet_hal::random::bits;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use serde::Deserialize;

/// Block size of the published traces (FAST'25, appendix A).
pub(super) const BLOCK_TOKENS: u32 = 512;

/// Distinguishes these keys from those of other sources.
const KEY_SEED: u64 = 0x6d6f_6f6e_6361_6b65;

/// The key of a `hash_ids` entry. Entries are small consecutive numbers; hash tables expect keys to be
/// hashes, so they are spread one-to-one over 64 bits.
pub fn key_of(hash_id: u64) -> BlockHash {
    BlockHash(bits(KEY_SEED, hash_id))
}

/// The fields of a line that are used; some producers add others.
#[derive(Deserialize)]
struct MooncakeRequest {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// The request of a line whose hashes are of blocks of `block_tokens`, or what is wrong with it.
pub(super) fn parse(line: &[u8], block_tokens: u32) -> Result<Draft, String> {
    let line: MooncakeRequest = serde_json::from_slice(line).map_err(|cause| cause.to_string())?;
    let lengths = Lengths::new(line.input_length, line.output_length)?;
    let blocks_max = lengths.prompt.div_ceil(block_tokens) as usize;
    if line.hash_ids.len() > blocks_max {
        return Err(format!(
            "{} hash_ids for {} tokens, which fill {blocks_max} blocks of {} (smaller blocks: --block-tokens)",
            line.hash_ids.len(),
            lengths.prompt,
            block_tokens
        ));
    }
    if !(line.timestamp.is_finite() && line.timestamp >= 0.0) {
        return Err(format!("timestamp {} is not a time", line.timestamp));
    }
    let chain = line.hash_ids.into_iter().map(key_of).collect();
    Ok(Draft { at: Seconds(line.timestamp / 1e3), lengths, chain, class: None })
}
