//! Users that do not follow the protocol: they are cut off, and nothing panics.

use crate::code::{put, put_bytes, put_sig};
use crate::frame::{FrameReader, put_frame};
use crate::fuzzed;
use crate::protocol::{DATA_BYTES_MAX, FRAME_BYTES_MAX, ask};
use mixfleet_hal::{Backend, DType, Error, KvShape, OpSig, Result};
use mixfleet_wire::{Duplex, DuplexListener, LinkAddress, Security};
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);

/// Buffer 1 has this many bytes, and there are queues 1 and 2.
const BYTES: u64 = 1 << 12;

fn frame(kind: u8, fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    let filled = put_frame(&mut out, kind, 0, |out| {
        fill(out);
        Ok::<(), Error>(())
    });
    filled.unwrap();
    out
}

fn numbers(kind: u8, numbers: &[u64]) -> Vec<u8> {
    frame(kind, |out| numbers.iter().for_each(|&number| put(out, number)))
}

/// A port, and a socket file.
fn addresses() -> Vec<LinkAddress> {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("mixfleet-hostile-{}-{number}", std::process::id()));
    let mut all = vec![fuzzed::port()];
    if cfg!(target_os = "linux") {
        all.push(LinkAddress::Unix(path));
    }
    all
}

/// The outcome for a user that sends these bytes after it has a buffer and queues, and then leaves: the same
/// over every connection.
fn served(bytes: &[u8]) -> Result<()> {
    let device = mixfleet_cpu::CpuBackend.open("cpu@0").unwrap();
    let known = [
        numbers(ask::ALLOC, &[1, 1, BYTES, 2]),
        numbers(ask::OPEN_QUEUE, &[2, 1]),
        numbers(ask::OPEN_QUEUE, &[3, 2]),
    ];
    let bytes = [&known.concat(), bytes].concat();
    let outcomes = addresses().into_iter().map(|address| {
        let outcome = fuzzed::served(&*device, &address, &bytes);
        if let LinkAddress::Unix(path) = address {
            std::fs::remove_file(path).unwrap();
        }
        outcome
    });
    let outcomes: Vec<_> = outcomes.collect();
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
    outcomes.into_iter().next().expect("there is a port")
}

fn command(sig: &OpSig, operands: &[u64]) -> Vec<u8> {
    frame(ask::SUBMIT, |out| {
        [1, 0, 1].into_iter().for_each(|number| put(out, number));
        put_sig(out, sig).unwrap();
        operands.iter().for_each(|&number| put(out, number));
    })
}

#[test]
fn what_nobody_sends_who_follows_the_protocol_ends_the_connection() {
    const KV: KvShape = KvShape { kv_heads: 1, head_dim: 4, page_tokens: 4, dtype: DType::F32, latent: None };
    let add = OpSig::Add { elements: 4, x: DType::F32 };
    let huge =
        |head_dim| OpSig::Rope { tokens: u32::MAX, heads: u32::MAX, head_dim, x: DType::F32, part: None };
    let cases: [(&str, Vec<u8>); 25] = [
        ("an unknown kind", numbers(99, &[1])),
        ("no kind", vec![0, 0, 0, 0]),
        ("a length beyond all bounds", vec![255; 4]),
        ("a number without an end", frame(ask::FREE, |out| out.extend([0x80; 11]))),
        ("too little", numbers(ask::ALLOC, &[4])),
        ("too much", numbers(ask::FREE, &[1, 1])),
        ("a buffer twice", numbers(ask::ALLOC, &[4, 1, 8, 0])),
        ("no such usage", numbers(ask::ALLOC, &[4, 9, 8, 4])),
        ("a queue twice", numbers(ask::OPEN_QUEUE, &[4, 1])),
        ("a write to no buffer", numbers(ask::WRITE, &[7, 0, 1])),
        ("a write beyond a buffer", numbers(ask::WRITE, &[1, BYTES, 1])),
        ("a write that wraps", numbers(ask::WRITE, &[1, u64::MAX, 1])),
        ("a read of no buffer", numbers(ask::READ, &[4, 7, 0, 4])),
        ("a read beyond a buffer", numbers(ask::READ, &[4, 1, 1, BYTES])),
        ("a read that wraps", numbers(ask::READ, &[4, 1, u64::MAX, 2])),
        ("a read of too much", numbers(ask::READ, &[4, 1, 0, DATA_BYTES_MAX as u64 + 1])),
        ("a batch for no queue", numbers(ask::SUBMIT, &[9, 0, 0])),
        ("more results than may be", numbers(ask::SUBMIT, &[1, 65, 1, 0, 0])),
        ("more commands than bytes", numbers(ask::SUBMIT, &[1, 0, u64::MAX])),
        ("an unknown operation", frame(ask::SUBMIT, |out| out.extend([1, 0, 1, 200]))),
        ("operands beyond a buffer", command(&add, &[1, 0, 1, 64, 1, BYTES - 8])),
        ("operands that overlap", command(&add, &[1, 0, 1, 16, 1, 8])),
        ("a product that wraps", command(&huge(1 << 31), &[1, 0, 1, 0])),
        ("pages of no bytes", command(&OpSig::KvGather { tokens: 1, kv: KV, wire: DType::F32 }, &[1; 12])),
        ("no such recorded batch", numbers(ask::REPLAY, &[1, 1])),
    ];
    for (what, bytes) in cases {
        assert!(served(&bytes).is_err(), "{what}");
    }
    // a hello again, and half a message
    assert!(served(&frame(1, |out| put_bytes(out, b"mixfleet"))).is_err());
    assert!(served(&[9, 0, 0, 0, ask::FREE]).is_ok(), "it just left");
}

#[test]
fn a_length_takes_no_memory_before_its_bytes_arrive() {
    let mut reader = FrameReader::new(FRAME_BYTES_MAX);
    let listener = DuplexListener::bind(&fuzzed::port(), Security::LoopbackOnly, LONG).unwrap();
    let deadline = Instant::now() + LONG;
    let user = Duplex::call(listener.address(), &Security::LoopbackOnly, LONG, deadline).unwrap();
    let (link, _pending) = listener.accept().unwrap().welcome(deadline).unwrap();
    let length = u32::try_from(FRAME_BYTES_MAX).unwrap().to_le_bytes();
    user.send(&[&length, &[1]], LONG, &mut || Ok(false)).unwrap();
    let soon = Instant::now() + Duration::from_millis(20);
    assert!(reader.next(&link, Some(soon)).unwrap().is_none());
    assert!(reader.held_bytes() < 4 << 20, "{} bytes", reader.held_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_bytes_lead_to_a_panic(
        messages in proptest::collection::vec((0u8..15, proptest::collection::vec(0u8..24, 0..40)), 1..20)
    ) {
        let bytes = messages.into_iter().map(|(kind, body)| frame(kind, |out| out.extend(body)));
        let _ = served(&bytes.collect::<Vec<_>>().concat());
    }
}
