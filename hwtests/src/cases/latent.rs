//! Latent attention: keys that contain their values, and operations that split rows, rotate parts of them and
//! join them again.

use super::{CaseBuilder, CaseHeads, PrefillMask, TokenSpread, two_dtypes};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{ColumnsOf, DType, KvShape, LatentKv, OpSig, RotaryPart, Scalar};

/// A key's length and its value's: such that whole vectors fit, and not; and those of DeepSeek.
const LENGTHS: [(u32, u32); 4] = [(48, 32), (36, 24), (17, 9), (576, 512)];

/// Shape of heads over latents.
#[derive(Clone, Copy)]
struct LatentCaseHeads {
    heads: u32,
    head_dim: u32,
    rank: u32,
}

impl CaseBuilder {
    pub(super) fn latent(&mut self) {
        self.parts();
        let p = self.page_tokens;
        for (x, kv) in two_dtypes() {
            self.latents(
                &[(5, 9), (1, 40), (17, 17)],
                LatentCaseHeads { heads: 4, head_dim: 48, rank: 32 },
                p,
                x,
                kv,
            );
        }
        let (x, kv) = (DType::F32, DType::Bf16);
        for (head_dim, rank) in LENGTHS {
            for heads in if self.full { &[1, 3, 13, 16][..] } else { &[13] } {
                let shape = LatentCaseHeads { heads: *heads, head_dim, rank };
                self.latents(&[(1, 70), (3, 33), (9, 9)], shape, p, x, kv);
            }
        }
        for page_tokens in self.page_sizes() {
            for (x, kv) in [(x, kv), (DType::Bf16, DType::Bf16), (x, x)] {
                let shape = LatentCaseHeads { heads: 6, head_dim: 48, rank: 32 };
                self.latents(&[(2, page_tokens + 1), (1, 300)], shape, page_tokens, x, kv);
            }
        }
    }

    /// Everything that works on such pages.
    fn latents(
        &mut self,
        spread: &[(u32, u32)],
        shape: LatentCaseHeads,
        page_tokens: u32,
        x: DType,
        dtype: DType,
    ) {
        let LatentCaseHeads { heads, head_dim, rank } = shape;
        // not that of the length
        let latent = Some(LatentKv { rank, scale: Scalar(0.21) });
        let kv = KvShape { kv_heads: 1, head_dim, page_tokens, dtype, latent };
        let shape = CaseHeads { ratio: heads, kv_heads: 1, head_dim };
        self.prefill_over(spread, shape, kv, PrefillMask::NONE, x);
        let longest = spread.iter().map(|s| s.1).max().unwrap_or(0);
        let ranges: Vec<(u32, u32)> = spread.iter().map(|&(first, end)| (first - 1, end)).collect();
        let sig = OpSig::AttnDecode {
            sequences: to_u32(ranges.len()),
            kv_tokens: ranges.iter().map(|(first, end)| u64::from(end - first)).sum(),
            heads,
            pages_max: longest.div_ceil(page_tokens) + 1,
            x,
            kv,
            cap: None,
        };
        self.push(sig, TokenSpread::Ranges(ranges));
        let (tokens, wire) = (page_tokens + 1, x);
        self.even(OpSig::KvWrite { tokens, x, kv });
        self.even(OpSig::KvGather { tokens, wire, kv });
        self.even(OpSig::KvScatter { tokens, wire, kv });
    }

    /// Rotated parts of heads, and columns.
    fn parts(&mut self) {
        for x in DType::FLOATS {
            for (head_dim, first, length) in [(48, 32, 16), (9, 1, 6), (16, 0, 8), (80, 12, 68), (3, 1, 2)] {
                for interleaved in [false, true] {
                    let part = Some(RotaryPart { first, length, interleaved });
                    self.even(OpSig::Rope { tokens: 3, heads: 5, head_dim, part, x });
                }
            }
            for (cols, from, to) in
                [(16, (48, 32), (16, 0)), (32, (32, 0), (48, 0)), (3, (7, 2), (5, 1)), (1, (1, 0), (9, 8))]
            {
                let of = |(row, first)| ColumnsOf { row, first };
                for rows in [1, 7, 33] {
                    self.even(OpSig::CopyColumns { rows, cols, from: of(from), to: of(to), x });
                }
            }
        }
    }
}
