//! Mooncake's JSONL: `{timestamp ms, input_length, output_length, hash_ids}`.

use super::read::{Draft, Lengths};
use super::{DATE_S_MAX, TIME_S_MAX, UNIX_S_MIN};
use mixfleet_hal::random::bits;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use serde::Deserialize;
use serde::de::IgnoredAny;

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
    timestamp: Option<serde_json::Number>,
    delay: Option<IgnoredAny>,
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
    let (ids, blocks) = (line.hash_ids.len(), lengths.prompt.div_ceil(block_tokens) as usize);
    // some producers leave the last block out unless it is full
    let full = (lengths.prompt / block_tokens) as usize;
    if ids > blocks || ids > 0 && ids < full {
        let prompt = lengths.prompt;
        return Err(format!(
            "{ids} hash_ids for {prompt} tokens, which fill {blocks} blocks of {block_tokens} (other blocks: --block-tokens)"
        ));
    }
    let at = at(&line, per_second)?;
    let chain = line.hash_ids.into_iter().map(key_of).collect();
    Ok(Draft { at, lengths, chain, class: None })
}

/// The arrival of a request, in a file with this many time units per second.
fn at(line: &MooncakeRequest, per_second: f64) -> Result<Seconds, String> {
    let Some(timestamp) = &line.timestamp else {
        return Err(match line.delay {
            Some(_) => "a turn with a 'delay' instead of a timestamp (aiperf) is not supported".into(),
            None => "missing field `timestamp`".into(),
        });
    };
    let at = timestamp.as_f64().unwrap_or(f64::NAN);
    if !(at.is_finite() && at >= 0.0) {
        return Err(format!("timestamp {timestamp} is not a time"));
    }
    // exact numbers of milliseconds are whole; guidellm and others write seconds under the same keys
    if per_second > 1.0 && timestamp.is_f64() && (at < TIME_S_MAX || at.fract() != 0.0) {
        return Err(format!(
            "timestamp {timestamp} is written as a fraction, so that it may be in seconds: write milliseconds as a whole number, {:.0} if so",
            at * 1e3
        ));
    }
    if at / per_second > DATE_S_MAX {
        return Err(format!(
            "timestamp {timestamp} is no date in this unit; is it in micro- or nanoseconds?"
        ));
    }
    Ok(Seconds(at / per_second))
}

/// Refuses a first timestamp in milliseconds that is rather a date in seconds.
pub(super) fn check_first(line: &[u8]) -> Result<(), String> {
    let Ok(line) = serde_json::from_slice::<MooncakeRequest>(line) else { return Ok(()) };
    match line.timestamp.and_then(|timestamp| timestamp.as_f64()) {
        Some(at) if (UNIX_S_MIN..DATE_S_MAX / 10.0).contains(&at) => Err(format!(
            "timestamp {at} may be Unix time in seconds: write milliseconds, {at}000 if so, or begin nearer to 0"
        )),
        _ => Ok(()),
    }
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
        for (at, says) in [("0.25", " 250 if so"), ("30.0", " 30000 if so")] {
            let in_doubt = format!(r#"{{"timestamp": {at}, "input_length": 40, "output_length": 20}}"#);
            let error = parse(in_doubt.as_bytes(), BLOCK_TOKENS, 1e3).err();
            assert!(error.as_ref().is_some_and(|error| error.contains(says)), "{at}: {error:?}");
        }
        assert!(parse(theirs, BLOCK_TOKENS, 1e3).is_err(), "three blocks of 512 for 40 tokens");
    }

    #[test]
    fn dates_are_told_from_times_since_a_start() {
        let line = |at: u64| format!(r#"{{"timestamp": {at}, "input_length": 40, "output_length": 20}}"#);
        assert!(check_first(line(1_700_000_000).as_bytes()).is_err(), "seconds");
        assert!(check_first(line(1_700_000_000_000).as_bytes()).is_ok(), "milliseconds");
        assert!(check_first(line(27_482).as_bytes()).is_ok());
        for at in [1_700_000_000_000_000, 1_700_000_000_000_000_000] {
            let error = parse(line(at).as_bytes(), BLOCK_TOKENS, 1e3).err();
            assert!(error.as_ref().is_some_and(|error| error.contains("nanoseconds")), "{error:?}");
        }
    }

    #[test]
    fn blocks_of_another_size_are_told_by_their_number() {
        let line = |ids: usize| {
            let ids: Vec<usize> = (0..ids).collect();
            format!(r#"{{"timestamp": 0, "input_length": 2100, "output_length": 2, "hash_ids": {ids:?}}}"#)
        };
        // 2,100 tokens fill four blocks of 512, and a part of another
        for (ids, is_read) in [(0, true), (3, false), (4, true), (5, true), (6, false)] {
            let read = parse(line(ids).as_bytes(), BLOCK_TOKENS, 1e3);
            assert_eq!(read.is_ok(), is_read, "{ids}: {:?}", read.err());
        }
        assert!(parse(line(3).as_bytes(), 1024, 1e3).is_ok());
        let turn = br#"{"session_id": "a", "delay": 500, "input_length": 9, "output_length": 4}"#;
        assert!(parse(turn, BLOCK_TOKENS, 1e3).err().is_some_and(|error| error.contains("aiperf")));
    }
}
