//! Mooncake's JSONL: `{timestamp ms, input_length, output_length, hash_ids}`.

use super::read::{Draft, Lengths};
use mixfleet_hal::random::bits;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use serde::Deserialize;

/// Block size of the published traces (FAST'25, appendix A).
pub(super) const BLOCK_TOKENS: u32 = 512;

/// Block size of Alibaba's Qwen traces, which have the same keys and seconds.
pub(super) const BAILIAN_BLOCK_TOKENS: u32 = 16;

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

/// The request of a line whose hashes are of blocks of `block_tokens`, with this many time units per second;
/// or the fault.
pub(super) fn parse(line: &[u8], block_tokens: u32, per_second: f64) -> Result<Draft, String> {
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
    if per_second > 1.0 && line.timestamp.fract() != 0.0 {
        let at = line.timestamp;
        return Err(format!(
            "timestamp {at} is no whole number of milliseconds, so that it may be seconds: write {}",
            at * 1e3
        ));
    }
    let chain = line.hash_ids.into_iter().map(key_of).collect();
    Ok(Draft { at: Seconds(line.timestamp / per_second), lengths, chain, class: None })
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::*;

    #[test]
    fn seconds_and_milliseconds_are_told_apart_by_keys() {
        let ours = br#"{"timestamp": 1500, "input_length": 40, "output_length": 20, "hash_ids": [8]}"#;
        let theirs = br#"{"chat_id": 7, "parent_chat_id": 3, "timestamp": 1500, "input_length": 40, "output_length": 20,
            "turn": 2, "hash_ids": [8, 9, 10]}"#;
        assert_eq!(Format::detect(ours), Ok(Format::Mooncake));
        assert_eq!(Format::detect(theirs), Ok(Format::Bailian));
        assert_eq!(parse(ours, BLOCK_TOKENS, 1e3).map(|draft| draft.at), Ok(Seconds(1.5)));
        assert_eq!(parse(theirs, BAILIAN_BLOCK_TOKENS, 1.0).map(|draft| draft.at), Ok(Seconds(1500.0)));
        let in_doubt = br#"{"timestamp": 0.25, "input_length": 40, "output_length": 20, "hash_ids": []}"#;
        assert!(parse(in_doubt, BLOCK_TOKENS, 1e3).err().is_some_and(|error| error.contains("write 250")));
        assert!(parse(theirs, BLOCK_TOKENS, 1e3).is_err(), "three blocks of 512 for 40 tokens");
    }
}
