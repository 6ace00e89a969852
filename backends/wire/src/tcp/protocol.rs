//! The messages of the two ends, with little-endian numbers.
//!
//! A stream begins with a [`TcpHello`] and its [`Welcome`]. Then the user sends frames: a [`FrameHeader`],
//! its [`Range`]s of the owner's region and, for a write, their bytes. The owner handles them in order and
//! answers each with a [`FrameReply`], followed by the bytes for a read.

use crate::key::{KEY_BYTES, RegionKey};
use crate::one_sided::Direction;
#[cfg(any(test, feature = "testing"))]
use crate::padded::padded;

/// Magic number; its last byte is the version, which changes with every change of this file.
const MAGIC: [u8; 8] = *b"mfwire\0\x01";

/// Maximum number of ranges in a frame; together with the head they fit one vectored call (1024 parts on
/// Linux).
pub(super) const RANGES_MAX: usize = 512;
/// Maximum payload of a frame in bytes; real frames have a few MiB.
pub(super) const PAYLOAD_BYTES_MAX: u64 = 64 << 20;

/// The user's first message on a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TcpHello {
    pub(super) key: RegionKey,
    pub(super) epoch: u64,
    /// Index of the stream within its connection.
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

    /// Decodes a hello; `None` for another version or another protocol.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let key = RegionKey(part::<KEY_BYTES>(bytes, 8));
        let (epoch, stream) = (u64::from_le_bytes(part(bytes, 24)), u16::from_le_bytes(part(bytes, 32)));
        (part(bytes, 0) == MAGIC).then_some(TcpHello { key, epoch, stream })
    }
}

/// The owner's reply to a hello; after a refusal it closes the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// The reply, as encoded by [`GrantStatus`](crate::answer::GrantStatus).
    pub(super) answer: u8,
    /// Length of the region in bytes.
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

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) direction: Direction,
    /// Number of ranges that follow.
    pub(super) ranges: u16,
    /// Sequence number of the frame on its stream.
    pub(super) frame: u64,
}

impl FrameHeader {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        two(self.direction as u64 | u64::from(self.ranges) << 16, self.frame)
    }

    /// Decodes a header; `None` if it is malformed.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let directions = [Direction::Write, Direction::Read];
        let direction = directions.into_iter().find(|&direction| direction as u8 == bytes[0])?;
        let ranges = u16::from_le_bytes(part(bytes, 2));
        let frame = u64::from_le_bytes(part(bytes, 8));
        (usize::from(ranges) <= RANGES_MAX).then_some(FrameHeader { direction, ranges, frame })
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

/// The owner's reply to a frame; after a refusal it closes the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameReply {
    pub(super) refused: bool,
    pub(super) frame: u64,
}

impl FrameReply {
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
        Some(FrameReply { refused, frame: u64::from_le_bytes(part(bytes, 8)) })
    }
}

/// Parses `bytes` as each message.
///
/// # Panics
/// If a message differs after a round trip, or announces more than its reader accepts.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_words(bytes: &[u8]) {
    if let Some(hello) = TcpHello::decode(&padded(bytes)) {
        assert!(TcpHello::decode(&hello.encode()) == Some(hello));
    }
    if let Some(frame) = FrameHeader::decode(&padded(bytes)) {
        assert!(
            usize::from(frame.ranges) <= RANGES_MAX && FrameHeader::decode(&frame.encode()) == Some(frame)
        );
    }
    if let Some(done) = FrameReply::decode(&padded(bytes)) {
        assert_eq!(FrameReply::decode(&done.encode()), Some(done));
    }
    let welcome = Welcome::decode(&padded(bytes));
    assert_eq!(Welcome::decode(&welcome.encode()), welcome);
    assert_eq!(Range::decode(&padded(bytes)).encode(), padded(bytes));
}

fn two(first: u64, second: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

/// Returns `N` bytes starting at `at`.
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
            let direction = if odd { Direction::Read } else { Direction::Write };
            let head = FrameHeader { direction, ranges: ranges as u16, frame: b };
            prop_assert_eq!(FrameHeader::decode(&head.encode()), Some(head));
            let range = Range { offset: a, bytes: b };
            prop_assert_eq!(Range::decode(&range.encode()), range);
            let done = FrameReply { refused: odd, frame: a };
            prop_assert_eq!(FrameReply::decode(&done.encode()), Some(done));
        }
    }
}
