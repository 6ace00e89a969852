//! One pass of the online softmax over a block of scores.

use super::{BLOCK, SoftmaxStats, Tile};
use crate::kernels::elementwise::soft_cap;
use crate::kernels::kv::PagedKv;
use crate::kernels::panel::Panel;
use crate::kernels::round_up;
use crate::kernels::simd::{Simd, exp};

/// Turns the scores of `count` keys, starting at `first`, into probabilities relative to the rows' new
/// maxima, and returns the factors that rescale earlier sums to the same base.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, V: Panel<S>, const M: usize>(
    task: &Tile<'_>,
    scores: *mut f32,
    first: usize,
    count: usize,
    stats: &mut SoftmaxStats,
) -> [f32; M] {
    let PagedKv { scale, cap, .. } = *task.pools;
    // capped scores are already scaled
    let scale = if cap.is_some() { 1.0 } else { scale };
    let columns = round_up(count, S::LANES);
    let mut alpha = [1.0; M];
    for (row, alpha) in alpha.iter_mut().enumerate() {
        let (a, b) = task.ranges.get(row).copied().unwrap_or((0, 0));
        let a = a.saturating_sub(first).min(count);
        let b = b.saturating_sub(first).min(count);
        // SAFETY: a row holds BLOCK >= columns scores.
        unsafe {
            let row_scores = scores.add(row * BLOCK);
            if a >= b {
                std::ptr::write_bytes(row_scores, 0, columns);
                continue;
            }
            if let Some(cap) = cap {
                cap_row::<S>(row_scores, columns, task.pools.scale, cap);
            }
            for i in (0..a).chain(b..columns) {
                *row_scores.add(i) = f32::NEG_INFINITY;
            }
            let old = stats.max[row];
            let new = row_max::<S>(row_scores, columns, scale, old);
            // all scores are -inf, so there is no base to subtract
            let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
            let sum = row_exp::<S, V>(row_scores, columns, scale, base);
            let factor = if old == f32::NEG_INFINITY { 0.0 } else { scalar_exp::<S>(old - base) };
            *alpha = factor;
            stats.max[row] = new;
            stats.sum[row] = stats.sum[row] * factor + sum;
        }
    }
    alpha
}

/// `score = cap tanh(score * scale / cap)` in place.
#[inline(always)]
unsafe fn cap_row<S: Simd>(scores: *mut f32, columns: usize, scale: f32, cap: f32) {
    // SAFETY: the caller's promise: `columns` scores, a multiple of LANES.
    unsafe {
        let mut i = 0;
        while i < columns {
            let score = S::mul(S::load(scores.add(i)), S::splat(scale));
            S::store(scores.add(i), soft_cap::<S>(score, cap));
            i += S::LANES;
        }
    }
}

/// The largest of `old` and the scaled scores.
#[inline(always)]
unsafe fn row_max<S: Simd>(scores: *const f32, columns: usize, scale: f32, old: f32) -> f32 {
    // SAFETY: the caller's promise: `columns` scores, a multiple of LANES.
    unsafe {
        let mut best = S::splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i < columns {
            best = S::max(S::load(scores.add(i)), best);
            i += S::LANES;
        }
        // scale > 0 keeps the order
        old.max(S::max_lane(best) * scale)
    }
}

/// `score = exp(score * scale - base)` in place, as words of panel `V`'s left-hand side; returns the sum.
#[inline(always)]
unsafe fn row_exp<S: Simd, V: Panel<S>>(scores: *mut f32, columns: usize, scale: f32, base: f32) -> f32 {
    // SAFETY: the caller's promise: `columns` scores, a multiple of LANES.
    unsafe {
        let (scale, base) = (S::splat(scale), S::splat(-base));
        let mut sum = S::splat(0.0);
        let mut i = 0;
        while i < columns {
            let p = exp::<S>(S::fma(S::load(scores.add(i)), scale, base));
            if V::STEPS < V::PER_WORD {
                // pairs of bf16, behind the position just read
                S::store_bf16_flushing(scores.cast::<u16>().add(i), p);
            } else {
                S::store(scores.add(i), p);
            }
            sum = S::add(sum, p);
            i += S::LANES;
        }
        S::sum(sum)
    }
}

/// Computes `e^x` with the vector function, so that every path rounds alike.
#[inline(always)]
pub(crate) unsafe fn scalar_exp<S: Simd>(x: f32) -> f32 {
    // SAFETY: the level is present by the caller's promise; the array holds LANES lanes.
    unsafe {
        let mut lanes = [0f32; 16];
        S::store(lanes.as_mut_ptr(), exp::<S>(S::splat(x)));
        lanes[0]
    }
}
