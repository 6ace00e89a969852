//! What the two ends say to each other, in little-endian numbers.
//!
//! A stream begins with a [`Hello`] and its [`Welcome`]. Then the user sends frames: a [`Head`], its
//! [`Range`]s of the owner's region, and for a write their bytes. The owner takes them in order and answers
//! each with a [`Done`], for a read followed by the bytes.

use crate::fuzzed::head;
use crate::key::{KEY_BYTES, RegionKey};

/// The last byte is the version: it changes with every change of this file.
const MAGIC: [u8; 8] = *b"mfwire\0\x01";

/// Ranges in a frame. With the head they fit one vectored call (1024 parts on Linux).
pub(super) const RANGES_MAX: usize = 512;
/// Bytes of a frame's payload: nobody sends more than some MiB.
pub(super) const PAYLOAD_BYTES_MAX: u64 = 64 << 20;

/// The user's first word on a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TcpHello {
    pub(super) key: RegionKey,
    pub(super) epoch: u64,
    /// Which of the way's streams this is.
    pub(super) stream: u16,
}

impl TcpHello {
    pub(super) const BYTES: usize = 40;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.key.0);
        bytes[24..32].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[32..34].copy_from_slice(&self.stream.to_le_bytes());
        bytes
    }

    /// None for another version, or somebody who speaks something else.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let key = RegionKey(part::<KEY_BYTES>(bytes, 8));
        let (epoch, stream) = (u64::from_le_bytes(part(bytes, 24)), u16::from_le_bytes(part(bytes, 32)));
        (part(bytes, 0) == MAGIC).then_some(TcpHello { key, epoch, stream })
    }
}

/// The owner's answer to a hello; it closes the stream after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// An [`Answer`](crate::answer::Answer).
    pub(super) answer: u8,
    /// Length of the region.
    pub(super) bytes: u64,
}

impl Welcome {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        two(u64::from(self.answer), self.bytes)
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Welcome { answer: bytes[0], bytes: u64::from_le_bytes(part(bytes, 8)) }
    }
}

/// What a frame wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Write = 1,
    Read = 2,
}

/// The start of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) verb: Verb,
    /// Number of ranges that follow.
    pub(super) ranges: u16,
    /// Number of the frame on its stream.
    pub(super) frame: u64,
}

impl Head {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        two(self.verb as u64 | u64::from(self.ranges) << 16, self.frame)
    }

    /// None when it is not what a user sends.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let verb = [Verb::Write, Verb::Read].into_iter().find(|&verb| verb as u8 == bytes[0])?;
        let ranges = u16::from_le_bytes(part(bytes, 2));
        let frame = u64::from_le_bytes(part(bytes, 8));
        (usize::from(ranges) <= RANGES_MAX).then_some(Head { verb, ranges, frame })
    }
}

/// A range of the owner's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Range {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        two(self.offset, self.bytes)
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Range { offset: u64::from_le_bytes(part(bytes, 0)), bytes: u64::from_le_bytes(part(bytes, 8)) }
    }
}

/// The owner's answer to a frame; it closes the stream after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) refused: bool,
    pub(super) frame: u64,
}

impl Done {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        two(if self.refused { 2 } else { 1 }, self.frame)
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let refused = match bytes[0] {
            1 => false,
            2 => true,
            _ => return None,
        };
        Some(Done { refused, frame: u64::from_le_bytes(part(bytes, 8)) })
    }
}

/// Reads `bytes` as each word.
///
/// # Panics
/// When a word is another one once it is written and read again, or announces more than its reader has room for.
pub(crate) fn check_words(bytes: &[u8]) {
    if let Some(hello) = TcpHello::decode(&head(bytes)) {
        assert!(TcpHello::decode(&hello.encode()) == Some(hello));
    }
    if let Some(frame) = Head::decode(&head(bytes)) {
        assert!(usize::from(frame.ranges) <= RANGES_MAX && Head::decode(&frame.encode()) == Some(frame));
    }
    if let Some(done) = Done::decode(&head(bytes)) {
        assert_eq!(Done::decode(&done.encode()), Some(done));
    }
    let welcome = Welcome::decode(&head(bytes));
    assert_eq!(Welcome::decode(&welcome.encode()), welcome);
    assert_eq!(Range::decode(&head(bytes)).encode(), head(bytes));
}

fn two(first: u64, second: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

/// `N` bytes from `at` on.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as many bytes as were cut out")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(key: [u8; 16], a: u64, b: u64, stream: u16, ranges in 0..=RANGES_MAX, odd: bool) {
            let hello = TcpHello { key: RegionKey(key), epoch: a, stream };
            prop_assert!(TcpHello::decode(&hello.encode()) == Some(hello));
            let welcome = Welcome { answer: stream as u8, bytes: a };
            prop_assert_eq!(Welcome::decode(&welcome.encode()), welcome);
            let verb = if odd { Verb::Read } else { Verb::Write };
            let head = Head { verb, ranges: ranges as u16, frame: b };
            prop_assert_eq!(Head::decode(&head.encode()), Some(head));
            let range = Range { offset: a, bytes: b };
            prop_assert_eq!(Range::decode(&range.encode()), range);
            let done = Done { refused: odd, frame: a };
            prop_assert_eq!(Done::decode(&done.encode()), Some(done));
        }
    }
}
