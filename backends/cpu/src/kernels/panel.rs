//! The register tile that GEMM and attention share.
//!
//! A *panel* is the right-hand operand: rows of 32-bit words, one row per step of the contraction, one
//! column per output. A word is one f32, or two neighbouring elements of the contraction in 16 bits.

use super::simd::Simd;

/// How packed words enter a sum.
pub(crate) trait Panel<S: Simd>: Copy {
    /// Words of the left-hand operand per word of the panel.
    const STEPS: usize;
    /// Elements of the contraction per word of the panel.
    const PER_WORD: usize;
    /// Returns the panel's operand for step `step`.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn part(words: S::V, step: usize) -> S::V;
    /// Computes `acc + a * b`.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V;
}

/// f32 words on both sides.
#[derive(Clone, Copy)]
pub(crate) struct WordF32;
/// Pairs of bf16 in the panel, f32 on the left.
#[derive(Clone, Copy)]
pub(crate) struct PairBf16;
/// Pairs of f16 in the panel, f32 on the left.
#[derive(Clone, Copy)]
pub(crate) struct PairF16;
/// Pairs of bf16 on both sides.
#[derive(Clone, Copy)]
pub(crate) struct DotBf16;

// SAFETY (all blocks below): register arithmetic only; the level is present by the trait's contract.
impl<S: Simd> Panel<S> for WordF32 {
    const STEPS: usize = 1;
    const PER_WORD: usize = 1;
    #[inline(always)]
    unsafe fn part(words: S::V, _step: usize) -> S::V {
        words
    }
    #[inline(always)]
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::fma(a, b, acc) }
    }
}

impl<S: Simd> Panel<S> for PairBf16 {
    const STEPS: usize = 2;
    const PER_WORD: usize = 2;
    #[inline(always)]
    unsafe fn part(words: S::V, step: usize) -> S::V {
        // SAFETY: see above.
        unsafe { if step == 0 { S::bf16_low(words) } else { S::bf16_high(words) } }
    }
    #[inline(always)]
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::fma(a, b, acc) }
    }
}

impl<S: Simd> Panel<S> for PairF16 {
    const STEPS: usize = 2;
    const PER_WORD: usize = 2;
    #[inline(always)]
    unsafe fn part(words: S::V, step: usize) -> S::V {
        // SAFETY: see above.
        unsafe { if step == 0 { S::f16_low(words) } else { S::f16_high(words) } }
    }
    #[inline(always)]
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::fma(a, b, acc) }
    }
}

impl<S: Simd> Panel<S> for DotBf16 {
    const STEPS: usize = 1;
    const PER_WORD: usize = 2;
    #[inline(always)]
    unsafe fn part(words: S::V, _step: usize) -> S::V {
        words
    }
    #[inline(always)]
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::dot_bf16(acc, a, b) }
    }
}

/// The left-hand operand of a tile: word (row, step) is at `at[row * row_stride + step * step_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub(crate) at: *const f32,
    pub(crate) row_stride: usize,
    pub(crate) step_stride: usize,
}

/// `acc[i][j] += sum over words of left[i] * panel[j]`, for `M` rows and `N` vectors of columns.
///
/// # Safety
/// `left` holds `M` rows of `words * STEPS` words; `panel` holds `words` rows of `N` vectors, `stride`
/// bytes apart.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, P: Panel<S>, const M: usize, const N: usize>(
    acc: &mut [[S::V; N]; M],
    left: Left,
    panel: *const u8,
    stride: usize,
    words: usize,
) {
    let mut row = panel;
    let mut a = left.at;
    for _ in 0..words {
        // SAFETY: the caller's promise.
        unsafe {
            let mut b = [S::splat(0.0); N];
            for (j, b) in b.iter_mut().enumerate() {
                *b = S::load(row.cast::<f32>().add(j * S::LANES));
            }
            for step in 0..P::STEPS {
                let mut parts = b;
                for part in &mut parts {
                    *part = P::part(*part, step);
                }
                for (i, acc) in acc.iter_mut().enumerate() {
                    let x = S::splat(a.add(i * left.row_stride).read_unaligned());
                    for (acc, part) in acc.iter_mut().zip(&parts) {
                        *acc = P::mac(*acc, x, *part);
                    }
                }
                a = a.add(left.step_stride);
            }
            row = row.add(stride);
        }
    }
}

/// Returns the rows of the largest tile, whose accumulators of two columns fill the registers (16 or 32 of
/// them).
#[inline(always)]
pub(crate) const fn tile_rows_max<S: Simd>() -> usize {
    if S::LANES == 16 { 12 } else { 6 }
}

/// Returns the smallest tile height for `rows <= tile_rows_max` rows: 1, 4, 6 (8 lanes), 8 or 12 (16).
#[inline(always)]
pub(crate) const fn tile_rows<S: Simd>(rows: usize) -> usize {
    match (rows, S::LANES == 16) {
        (0 | 1, _) => 1,
        (2..=4, _) => 4,
        (_, false) => 6,
        (5..=8, true) => 8,
        (_, true) => 12,
    }
}

/// Calls `$f::<S, .., M>` with `M` = `$rows`, which is one of [`tile_rows`]'s results.
macro_rules! with_rows {
    ($s:ident, $rows:expr, $f:ident::<$($generic:ty),*>($($arg:expr),* $(,)?)) => {
        match $rows {
            1 => $f::<$($generic,)* 1>($($arg),*),
            4 => $f::<$($generic,)* 4>($($arg),*),
            _ if $s::LANES == 8 => $f::<$($generic,)* 6>($($arg),*),
            8 => $f::<$($generic,)* 8>($($arg),*),
            _ => $f::<$($generic,)* 12>($($arg),*),
        }
    };
}
pub(crate) use with_rows;
