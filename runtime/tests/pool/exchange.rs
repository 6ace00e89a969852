//! KV as frames for external engines: frames of one process are accepted by another bit by bit, and nothing
//! else is.

use super::support::make_region;
use mixfleet_hal::DType;
use mixfleet_hal::op::KvShape;
use mixfleet_hal::random::Stream;
use mixfleet_runtime::engine::Identity;
use mixfleet_runtime::kv_exchange::{ExchangePrompt, KvExchange, KvExchangeParts, KvRefusal};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::pool::{Kept, Pool, PoolConfig};
use proptest::prelude::*;

const KV: KvShape = KvShape { kv_heads: 2, head_dim: 3, page_tokens: 4, dtype: DType::F32, latent: None };
const LAYERS: u32 = 2;
/// Bytes of a block and of its frame.
const BLOCK_BYTES: usize = 2 * 4 * 2 * 2 * 3 * 4;
const FRAME_BYTES: usize = BLOCK_BYTES + 48 + 4 * 4;

/// A process with its own secret, and room for this many blocks.
fn exchange(secret: u64, model: &str, blocks: u64) -> KvExchange {
    let block_bytes = u64::from(LAYERS * KV.page_tokens) * KV.wire_token_bytes(KV.dtype);
    let config = PoolConfig {
        block_bytes,
        block_tokens: KV.page_tokens,
        namespace: 0,
        dram_bytes: blocks * block_bytes,
        ssd: None,
    };
    let parts = KvExchangeParts {
        url: "http://here:1".into(),
        identity: Identity::new("shape".into(), "tokenizer".into(), [secret, 0]),
        layers: LAYERS,
        kv: KV,
        pools: vec![Pool::new(config, &make_region).unwrap()],
        metrics: Metrics::new(),
    };
    let exchange = parts.open().unwrap();
    assert!(
        exchange.described().is_none() && exchange.prompt(vec![1; 9], None).is_none(),
        "no namespace yet"
    );
    exchange.know(model.into());
    assert_eq!(exchange.frame_bytes(), Some(FRAME_BYTES));
    exchange
}

fn prompt(exchange: &KvExchange, seed: u64, tokens: u32) -> ExchangePrompt {
    let mut random = Stream::new(seed);
    exchange.prompt((0..tokens).map(|_| random.below(50) as u32).collect(), None).unwrap()
}

/// Frames of all whole blocks of a prompt, with any KV: those of a process that has it.
fn frames(seed: u64, tokens: u32) -> Vec<Vec<u8>> {
    let maker = exchange(99, "weights", 64);
    let asked = prompt(&maker, seed, tokens);
    let mut random = Stream::new(seed ^ 0xfeed);
    let made = (0..asked.blocks()).map(|block| {
        let kv: Vec<u8> = (0..BLOCK_BYTES).map(|_| random.below(256) as u8).collect();
        asked.frame(block, &kv).unwrap()
    });
    made.collect()
}

/// What a process gives of a prompt, a frame each.
fn given(exchange: &KvExchange, prompt: &ExchangePrompt, first: usize) -> Vec<Vec<u8>> {
    let (bytes, mut all) = (exchange.frame_bytes().unwrap(), Vec::new());
    loop {
        // two at a time
        let next = exchange.frames(prompt, first + all.len(), 2 * bytes);
        assert!(next.len().is_multiple_of(bytes) && next.len() <= 2 * bytes, "{} bytes", next.len());
        if next.is_empty() {
            return all;
        }
        all.extend(next.chunks(bytes).map(<[u8]>::to_vec));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_was_taken_is_given_bit_by_bit_and_in_order(seed: u64, tokens in 4u32..60, room in 1u64..20, first in 0usize..16) {
        let frames = frames(seed, tokens);
        let here = exchange(1, "weights", room);
        let asked = prompt(&here, seed, tokens);
        prop_assert_eq!(given(&here, &asked, 0).len(), 0);
        for (block, frame) in frames.iter().enumerate() {
            prop_assert_eq!(here.take(&asked, block, frame), Ok(Kept::Stored));
        }
        here.settle(&asked, frames.len());
        let expected = if frames.len() as u64 <= room { &frames[first.min(frames.len())..] } else { &[] };
        // of a prompt that is longer than host memory the beginning has gone
        prop_assert_eq!(&given(&here, &asked, first)[..], expected);
        for (block, frame) in frames.iter().enumerate().filter(|_| frames.len() as u64 <= room) {
            prop_assert_eq!(here.take(&asked, block, frame), Ok(Kept::Held));
        }
    }

    #[test]
    fn a_frame_that_is_not_the_block_is_refused_and_nothing_of_it_is_kept(
        seed: u64,
        bit in 0..FRAME_BYTES * 8,
        cut in 0..FRAME_BYTES,
        other: u64,
    ) {
        let frames = frames(seed, 12);
        let here = exchange(1, "weights", 8);
        let asked = prompt(&here, seed, 12);
        let mut flipped = frames[1].clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let damaged = |frame: &[u8], block| matches!(here.take(&asked, block, frame), Err(KvRefusal::Damaged(_)));
        prop_assert!(damaged(&flipped, 1), "bit {}", bit);
        prop_assert!(damaged(&frames[1][..cut], 1) && damaged(&[&frames[1][..], &[0]].concat(), 1));
        prop_assert!(damaged(&frames[1], 0) && damaged(&frames[1], 2), "in another place");
        prop_assert_eq!(here.take(&asked, 3, &frames[2]), Err(KvRefusal::NoSuchBlock));
        prop_assume!(other != seed);
        let another = prompt(&here, other, 12);
        prop_assert!(here.take(&another, 1, &frames[1]).is_err(), "of another prompt");
        let finetuned = exchange(1, "other weights", 8);
        let there = prompt(&finetuned, seed, 12);
        prop_assert_eq!(
            finetuned.take(&there, 1, &frames[1]),
            Err(KvRefusal::Damaged("it is of another namespace"))
        );
        for (exchange, prompt) in [(&here, &asked), (&finetuned, &there)] {
            prop_assert_eq!(given(exchange, prompt, 0).len(), 0);
        }
    }
}

#[test]
fn a_part_of_the_cache_is_read_and_written_by_those_who_name_its_salt() {
    let (frames, here) = (frames(5, 12), exchange(1, "weights", 8));
    let tokens: Vec<u32> = {
        let mut random = Stream::new(5);
        (0..12).map(|_| random.below(50) as u32).collect()
    };
    let of = |salt: Option<&str>| here.prompt(tokens.clone(), salt.map(str::to_owned)).unwrap();
    for (block, frame) in frames.iter().enumerate() {
        assert_eq!(here.take(&of(Some("a")), block, frame), Ok(Kept::Stored));
    }
    assert_eq!(given(&here, &of(Some("a")), 0), frames);
    assert!(given(&here, &of(Some("b")), 0).is_empty() && given(&here, &of(None), 0).is_empty());
}

#[test]
fn a_block_is_given_only_with_all_before_it() {
    let (frames, here) = (frames(6, 16), exchange(1, "weights", 8));
    let asked = prompt(&here, 6, 16);
    for block in [0, 2, 3] {
        assert_eq!(here.take(&asked, block, &frames[block]), Ok(Kept::Stored));
    }
    assert!(given(&here, &asked, 2).is_empty(), "the second one is not there");
    assert_eq!(given(&here, &asked, 0), frames[..1]);
    assert_eq!(here.take(&asked, 1, &frames[1]), Ok(Kept::Stored));
    assert_eq!(given(&here, &asked, 1), frames[1..]);
}
