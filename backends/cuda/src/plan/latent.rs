//! The tensor-core kernels of attention to latents: whether they take an operation, and in which blocks.

use super::{DeviceRange, PlanTarget, VEC_BYTES};
use mixfleet_hal::{DType, KvShape};

/// Keys in each of the two buffers of a block.
const TILE: u32 = 32;

/// A block of `attn_decode_latent` or `attn_prefill_latent`, which reads a key once for all of its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LatentBlock {
    /// Heads, by 16.
    pub(super) row_tiles: u32,
    /// Dynamic shared memory: queries, two tiles of keys, and scores.
    pub(super) shared_bytes: u32,
}

impl LatentBlock {
    fn new(row_tiles: u32, kv: &KvShape) -> LatentBlock {
        let (heads, row) = (16 * row_tiles, kv.head_dim.next_multiple_of(64));
        LatentBlock { row_tiles, shared_bytes: (heads + 2 * TILE) * row * 2 + heads * (TILE + 8) * 4 }
    }

    /// The block for `heads` heads over latents, none if the kernels do not take them: 32 heads if there are
    /// more than 16 and shared memory allows it.
    pub(super) fn of(
        heads: u32,
        x: DType,
        kv: &KvShape,
        operands: &[DeviceRange],
        target: &PlanTarget,
    ) -> Option<LatentBlock> {
        let aligned = operands.iter().all(|place| place.address.is_multiple_of(VEC_BYTES));
        let whole = kv.head_dim.is_multiple_of(8) && kv.value_dim().is_multiple_of(32);
        let is_taken = target.capability >= 80
            && kv.latent.is_some()
            && x == kv.dtype
            && matches!(x, DType::Bf16 | DType::F16)
            && whole
            && aligned;
        let fits = |block: &LatentBlock| block.shared_bytes + 1024 <= target.shared_bytes_max;
        let sizes = if heads > 16 { &[2, 1][..] } else { &[1] };
        is_taken.then(|| sizes.iter().map(|tiles| LatentBlock::new(*tiles, kv)).find(fits)).flatten()
    }

    /// Query heads that share one read of a key.
    pub(super) fn heads(self) -> u32 {
        16 * self.row_tiles
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::HOPPER;
    use super::*;
    use mixfleet_hal::{LatentKv, Scalar};

    /// Two blocks of 32 heads fill the shared memory of a multiprocessor of Hopper, and one of 16 that of
    /// parts with 99 KiB for a block.
    #[test]
    fn blocks_of_deepseek_fit_parts_with_little_and_much_shared_memory() {
        let latent = Some(LatentKv { rank: 512, scale: Scalar(0.1) });
        let kv = KvShape { kv_heads: 1, head_dim: 576, page_tokens: 16, dtype: DType::Bf16, latent };
        let target = |shared_bytes_max| PlanTarget { shared_bytes_max, ..HOPPER };
        let of = |heads, kv: &KvShape, bytes| LatentBlock::of(heads, DType::Bf16, kv, &[], &target(bytes));
        let large = of(128, &kv, 232_448).unwrap();
        assert_eq!((large.heads(), 2 * (large.shared_bytes + 1024)), (32, 228 << 10));
        assert_eq!(of(16, &kv, 232_448).map(LatentBlock::heads), Some(16));
        assert_eq!(of(128, &kv, 101_376).map(LatentBlock::heads), Some(16));
        assert_eq!(of(128, &kv, 49_152), None);
        assert_eq!(of(128, &KvShape { latent: None, ..kv }, 232_448), None);
        assert_eq!(of(128, &KvShape { head_dim: 575, ..kv }, 232_448), None);
    }
}
