//! The format of a block on the disk and between engines, and the only code that decides whether bytes may be
//! served as a block.
//!
//! A frame is the payload, then a trailer of 48 bytes plus 4 per token, little endian: magic (8), version
//! (4), tokens (4), namespace (8), block hash (8), XXH3-64 of the payload (8), token ids (4 each), XXH3-64 of
//! the trailer so far (8). The trailer comes last, so that a write that was cut short has none, or an old one
//! that names another block or other bytes.

use mixfleet_hal::cast::to_u32;
use mixfleet_scheduler::kv::BlockHash;
use twox_hash::XxHash3_64;

/// Version of frame, journal and directory: one number, since they are read together.
pub(super) const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"mxfKVblk";
const FIXED_BYTES: usize = 40;
const DIGEST_BYTES: usize = 8;

/// What all blocks of a pool have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) block_bytes: usize,
    pub(crate) block_tokens: usize,
    pub(crate) namespace: u64,
}

/// Why bytes may not be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameRefusal {
    /// They differ from the stored bytes: torn, corrupted, or another block's. The block must be dropped.
    Damaged(&'static str),
    /// They are intact but belong to another prompt with the same hash.
    OtherTokens,
}

/// Checks whether a block that was stored for the tokens `held` may be served to a prompt with the tokens
/// `asked` in its place.
///
/// # Errors
/// [`FrameRefusal::OtherTokens`].
pub(super) fn check_tokens(held: &[u32], asked: &[u32]) -> Result<(), FrameRefusal> {
    if held == asked { Ok(()) } else { Err(FrameRefusal::OtherTokens) }
}

impl Layout {
    pub(crate) fn frame_bytes(&self) -> usize {
        self.block_bytes + FIXED_BYTES + 4 * self.block_tokens + DIGEST_BYTES
    }

    /// Appends the trailer to a payload whose XXH3-64 is `digest`.
    pub(crate) fn add_trailer(&self, frame: &mut Vec<u8>, hash: BlockHash, tokens: &[u32], digest: u64) {
        let start = frame.len();
        frame.extend_from_slice(MAGIC);
        frame.extend_from_slice(&VERSION.to_le_bytes());
        frame.extend_from_slice(&to_u32(tokens.len()).to_le_bytes());
        frame.extend_from_slice(&self.namespace.to_le_bytes());
        frame.extend_from_slice(&hash.0.to_le_bytes());
        frame.extend_from_slice(&digest.to_le_bytes());
        frame.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        let trailer = XxHash3_64::oneshot(&frame[start..]);
        frame.extend_from_slice(&trailer.to_le_bytes());
    }

    /// Checks whether the payload in `frame` is the block `hash` of a prompt with `tokens` in this place, and
    /// returns the XXH3-64 of the payload.
    ///
    /// # Errors
    /// A [`FrameRefusal`]. Damage takes precedence over other tokens, since the token ids of damaged bytes
    /// mean nothing.
    pub(crate) fn check(&self, frame: &[u8], hash: BlockHash, tokens: &[u32]) -> Result<u64, FrameRefusal> {
        if frame.len() != self.frame_bytes() {
            return Err(FrameRefusal::Damaged("its length is not that of a block"));
        }
        let (payload, trailer) = frame.split_at(self.block_bytes);
        let (trailer, own) = trailer.split_at(trailer.len() - DIGEST_BYTES);
        if own != XxHash3_64::oneshot(trailer).to_le_bytes() {
            return Err(FrameRefusal::Damaged("its trailer does not match its checksum"));
        }
        let mut rest = trailer;
        for (expected, why) in [
            (&MAGIC[..], "it is no block of this format"),
            (&VERSION.to_le_bytes(), "it has another version of the format"),
            (&to_u32(self.block_tokens).to_le_bytes(), "it has another number of tokens"),
            (&self.namespace.to_le_bytes(), "it is of another namespace"),
            (&hash.0.to_le_bytes(), "another block is in its place"),
        ] {
            rest = rest.strip_prefix(expected).ok_or(FrameRefusal::Damaged(why))?;
        }
        let (digest, ids) = rest.split_at(DIGEST_BYTES);
        let actual = XxHash3_64::oneshot(payload);
        if digest != actual.to_le_bytes() {
            return Err(FrameRefusal::Damaged("its payload does not match its checksum"));
        }
        let held: Vec<u32> =
            ids.chunks_exact(4).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect();
        check_tokens(&held, tokens).map(|()| actual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYOUT: Layout = Layout { block_bytes: 24, block_tokens: 3, namespace: 7 };

    fn frame(payload: &[u8], hash: BlockHash, tokens: &[u32]) -> Vec<u8> {
        let mut frame = payload.to_vec();
        LAYOUT.add_trailer(&mut frame, hash, tokens, XxHash3_64::oneshot(payload));
        frame
    }

    #[test]
    fn a_block_is_served_to_its_own_prompt_alone() {
        let payload = [5; 24];
        let whole = frame(&payload, BlockHash(9), &[1, 2, 3]);
        assert_eq!(whole.len(), LAYOUT.frame_bytes());
        assert_eq!(LAYOUT.check(&whole, BlockHash(9), &[1, 2, 3]), Ok(XxHash3_64::oneshot(&payload)));
        assert_eq!(LAYOUT.check(&whole, BlockHash(9), &[1, 2, 4]), Err(FrameRefusal::OtherTokens));
        assert!(matches!(LAYOUT.check(&whole, BlockHash(8), &[1, 2, 3]), Err(FrameRefusal::Damaged(_))));
        let other = Layout { namespace: 8, ..LAYOUT };
        assert!(matches!(other.check(&whole, BlockHash(9), &[1, 2, 3]), Err(FrameRefusal::Damaged(_))));
    }

    #[test]
    fn every_single_bit_counts() {
        let whole = frame(&[5; 24], BlockHash(9), &[1, 2, 3]);
        for bit in 0..whole.len() * 8 {
            let mut rotten = whole.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(LAYOUT.check(&rotten, BlockHash(9), &[1, 2, 3]), Err(FrameRefusal::Damaged(_))),
                "bit {bit}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_torn_frame_is_damaged(cut in 0usize..84, old in proptest::collection::vec(any::<u8>(), 24)) {
            let new = frame(&[5; 24], BlockHash(9), &[1, 2, 3]);
            for before in [vec![0; new.len()], frame(&old, BlockHash(4), &[7, 8, 9])] {
                let torn = [&new[..cut], &before[cut..]].concat();
                // The old bytes may have been the same.
                prop_assume!(torn != new);
                prop_assert!(matches!(LAYOUT.check(&torn, BlockHash(9), &[1, 2, 3]), Err(FrameRefusal::Damaged(_))));
            }
            prop_assert!(LAYOUT.check(&new[..cut], BlockHash(9), &[1, 2, 3]).is_err());
        }
    }
}
