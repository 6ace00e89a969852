//! GEMM with few rows of `x`, bound by memory: every weight row is read once, in place, and meets all rows of
//! `x` while it is in the cache.

use super::{GemmShape, Operands, finish};
use crate::kernels::convert::{load, load_part, widen};
use crate::kernels::round_up;
use crate::kernels::simd::{Simd, SimdTask};
use mixfleet_hal::DType;
use std::ops::Range;

/// Number of weight rows read side by side, enough streams to keep the memory busy.
const STREAMS: usize = 8;
/// Parts of the weight rows that are read at the same time for few rows of `x`, each one row behind the other
/// as they lie in memory. Measured on a Xeon with AMX, where a plain read in four parts is faster by a tenth
/// than in one.
pub(super) const PARTS: usize = 4;
/// Rows of `x` up to which weights are read in parts.
const PARTS_ROWS: usize = 4;
/// How far ahead the weights of each part are fetched into the L1.
pub(super) const AHEAD_BYTES: usize = 1024;
/// Number of weight rows per call of the epilogue.
const BLOCK: usize = 64;

/// A task that computes the output columns `columns` of all rows.
pub(crate) struct GemmRows {
    pub(crate) shape: GemmShape,
    pub(crate) operands: Operands,
    pub(crate) columns: Range<usize>,
    /// Scratch memory of [`GemmRows::scratch_words`] words.
    pub(crate) scratch: *mut f32,
}

impl GemmRows {
    /// Returns the number of scratch words: sums `[m, BLOCK]` for each part, and `x` in f32.
    pub(crate) fn scratch_words(shape: &GemmShape) -> usize {
        Self::sums(shape) + shape.m * round_up(shape.k, 16)
    }

    fn sums(shape: &GemmShape) -> usize {
        shape.m * BLOCK * if shape.m <= PARTS_ROWS { PARTS } else { 1 }
    }
}

/// How `x` and the weight are loaded as vectors.
trait LoadVectors<S: Simd> {
    /// Elements of k per vector.
    const ELEMENTS: usize;
    /// Bytes of an element of `x`.
    const X_BYTES: usize;
    /// Bytes of an element of the weight.
    const W_BYTES: usize;
    unsafe fn x(from: *const u8) -> S::V;
    unsafe fn w(from: *const u8) -> S::V;
    unsafe fn x_part(from: *const u8, count: usize) -> S::V;
    unsafe fn w_part(from: *const u8, count: usize) -> S::V;
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V;
}

macro_rules! widened {
    ($name:ident, $dtype:expr) => {
        /// f32 arithmetic on a weight that is widened as it is loaded.
        struct $name;
        // SAFETY (all blocks): pointers are valid and the level is present, by the callers' promise.
        impl<S: Simd> LoadVectors<S> for $name {
            const ELEMENTS: usize = S::LANES;
            const X_BYTES: usize = 4;
            #[expect(clippy::cast_possible_truncation, reason = "a constant, 4 at most")]
            const W_BYTES: usize = $dtype.size_bytes() as usize;
            #[inline(always)]
            unsafe fn x(from: *const u8) -> S::V {
                // SAFETY: see above.
                unsafe { S::load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn w(from: *const u8) -> S::V {
                // SAFETY: see above.
                unsafe { load::<S>($dtype, from) }
            }
            #[inline(always)]
            unsafe fn x_part(from: *const u8, count: usize) -> S::V {
                // SAFETY: see above.
                unsafe { load_part::<S>(DType::F32, from, count) }
            }
            #[inline(always)]
            unsafe fn w_part(from: *const u8, count: usize) -> S::V {
                // SAFETY: see above.
                unsafe { load_part::<S>($dtype, from, count) }
            }
            #[inline(always)]
            unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V {
                // SAFETY: see above.
                unsafe { S::fma(a, b, acc) }
            }
        }
    };
}
widened!(FromF32, DType::F32);
widened!(FromBf16, DType::Bf16);
widened!(FromF16, DType::F16);

/// Pairs of bf16 on both sides.
struct Bf16Pairs;

/// Loads the first `count < 2 * LANES` bf16, followed by zeros.
///
/// # Safety
/// `from` holds them.
#[inline(always)]
unsafe fn pairs_part<S: Simd>(from: *const u8, count: usize) -> S::V {
    let mut padded = [0u8; 64];
    // SAFETY: fewer than 32 elements of 2 bytes fit 64 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count * 2);
        S::load(padded.as_ptr().cast())
    }
}

// SAFETY (all blocks): pointers are valid and the level is present, by the callers' promise.
impl<S: Simd> LoadVectors<S> for Bf16Pairs {
    const ELEMENTS: usize = 2 * S::LANES;
    const X_BYTES: usize = 2;
    const W_BYTES: usize = 2;
    #[inline(always)]
    unsafe fn x(from: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn w(from: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn x_part(from: *const u8, count: usize) -> S::V {
        // SAFETY: see above.
        unsafe { pairs_part::<S>(from, count) }
    }
    #[inline(always)]
    unsafe fn w_part(from: *const u8, count: usize) -> S::V {
        // SAFETY: see above.
        unsafe { pairs_part::<S>(from, count) }
    }
    #[inline(always)]
    unsafe fn mac(acc: S::V, a: S::V, b: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::dot_bf16(acc, a, b) }
    }
}

impl SimdTask for GemmRows {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let dot = S::DOT_BF16 && self.shape.x == DType::Bf16 && self.shape.weight == DType::Bf16;
        // SAFETY: the creator of the task guarantees valid operands.
        unsafe {
            match self.shape.weight {
                DType::Bf16 if dot => stream::<S, Bf16Pairs>(&self, self.operands.x.start),
                weight => {
                    let x = self.x_in_f32::<S>();
                    match weight {
                        DType::Bf16 => stream::<S, FromBf16>(&self, x),
                        DType::F16 => stream::<S, FromF16>(&self, x),
                        DType::F32 | DType::U32 | DType::F8E4m3 | DType::I8 => stream::<S, FromF32>(&self, x),
                    }
                }
            }
        }
    }
}

impl GemmRows {
    /// Returns `x` as dense f32 rows, in place or widened into scratch.
    #[inline(always)]
    unsafe fn x_in_f32<S: Simd>(&self) -> *const u8 {
        let GemmShape { m, k, x, .. } = self.shape;
        if x == DType::F32 {
            return self.operands.x.start;
        }
        // SAFETY: scratch holds m * k words behind the sums; x holds m * k elements.
        unsafe {
            let wide = self.scratch.add(Self::sums(&self.shape));
            widen::<S>(x, self.operands.x.start, wide, m * k);
            wide.cast()
        }
    }
}

/// Computes all columns of the task, block by block.
#[inline(always)]
unsafe fn stream<S: Simd, L: LoadVectors<S>>(task: &GemmRows, x: *const u8) {
    let GemmRows { shape, operands, columns, scratch: sums, .. } = task;
    let row_bytes = shape.k * L::W_BYTES;
    // SAFETY: the caller's promise.
    unsafe {
        match shape.m {
            1 => return in_parts::<S, L, 1>(task, x),
            2 => return in_parts::<S, L, 2>(task, x),
            // there are registers enough for the sums
            3 if S::LANES == 16 => return in_parts::<S, L, 3>(task, x),
            4 if S::LANES == 16 => return in_parts::<S, L, 4>(task, x),
            _ => {}
        }
    }
    let end = operands.weight.start.wrapping_add(columns.end * row_bytes).cast_const();
    let mut block = columns.start;
    while block < columns.end {
        let count = (columns.end - block).min(BLOCK);
        let mut j = 0;
        // SAFETY: weight rows block..block + count exist; sums holds [m, BLOCK].
        unsafe {
            while j < count {
                let w = operands.weight.start.add((block + j) * row_bytes);
                let sums = sums.add(j);
                if count - j >= STREAMS {
                    octet::<S, L>(shape, x, w, end, sums);
                    j += STREAMS;
                } else {
                    let nothing = RowPrefetch { at: w, lines: 0 };
                    for i in 0..shape.m {
                        let x = x.add(i * shape.k * L::X_BYTES);
                        dot::<S, L, 1, 1>(shape, x, w, nothing, sums.add(i * BLOCK));
                    }
                    j += 1;
                }
            }
            for i in 0..shape.m {
                finish::<S>(shape, operands, sums.add(i * BLOCK), i, block, count);
            }
        }
        block += count;
    }
}

/// The products of all weight rows, in [`PARTS`] streams, and `X` rows of `x`.
#[inline(always)]
unsafe fn in_parts<S: Simd, L: LoadVectors<S>, const X: usize>(task: &GemmRows, x: *const u8) {
    let GemmRows { shape, operands, columns: Range { start, end }, scratch: sums } = task;
    let part = (end - start).div_ceil(PARTS);
    let row = |row: usize| operands.weight.start.wrapping_add(row.min(end - 1) * shape.k * L::W_BYTES);
    for block in (0..part).step_by(BLOCK) {
        let count = (part - block).min(BLOCK);
        // SAFETY: weight rows below `end` exist; sums hold [X, PARTS, BLOCK].
        unsafe {
            for j in 0..count {
                let rows = std::array::from_fn(|p| row(start + p * part + block + j).cast_const());
                let lanes = side_by_side::<S, L, X>(shape.k, x, rows);
                for (i, lanes) in lanes.into_iter().enumerate() {
                    let mut totals = [0f32; PARTS];
                    S::store_sums(totals.as_mut_ptr(), lanes);
                    for (p, total) in totals.into_iter().enumerate() {
                        *sums.add((i * PARTS + p) * BLOCK + j) = total;
                    }
                }
            }
            for (p, first) in (0..PARTS).map(|p| (p, start + p * part + block)) {
                for i in 0..if first < *end { X } else { 0 } {
                    let (sums, count) = (sums.add((i * PARTS + p) * BLOCK), count.min(end - first));
                    finish::<S>(shape, operands, sums, i, first, count);
                }
            }
        }
    }
}

/// Sums by lane of the products of weight rows and rows of `x` of `k` elements, and prefetches the next rows.
#[inline(always)]
unsafe fn side_by_side<S: Simd, L: LoadVectors<S>, const X: usize>(
    k: usize,
    x: *const u8,
    rows: [*const u8; PARTS],
) -> [[S::V; PARTS]; X] {
    // SAFETY: the caller's promise: rows of k elements.
    unsafe {
        let mut acc = [[S::splat(0.0); PARTS]; X];
        let x = |i: usize, column: usize| x.add((i * k + column) * L::X_BYTES);
        let mut c = 0;
        while c + L::ELEMENTS <= k {
            for p in 0..PARTS {
                let w = rows[p].add(c * L::W_BYTES);
                S::prefetch_near(w.wrapping_add(AHEAD_BYTES));
                let w = L::w(w);
                for (i, acc) in acc.iter_mut().enumerate() {
                    acc[p] = L::mac(acc[p], L::x(x(i, c)), w);
                }
            }
            c += L::ELEMENTS;
        }
        if c < k {
            for p in 0..PARTS {
                let w = L::w_part(rows[p].add(c * L::W_BYTES), k - c);
                for (i, acc) in acc.iter_mut().enumerate() {
                    acc[p] = L::mac(acc[p], L::x_part(x(i, c), k - c), w);
                }
            }
        }
        acc
    }
}

/// What a call of [`dot`] should prefetch.
#[derive(Clone, Copy)]
struct RowPrefetch {
    at: *const u8,
    /// Number of cache lines per vector of k.
    lines: usize,
}

/// Multiplies eight weight rows with all rows of `x`, while prefetching the next eight into the L2 in equal
/// parts per call of [`dot`]. Arithmetic and memory overlap even if several calls share rows.
#[inline(always)]
unsafe fn octet<S: Simd, L: LoadVectors<S>>(
    shape: &GemmShape,
    x: *const u8,
    w: *const u8,
    end: *const u8,
    sums: *mut f32,
) {
    let (x_row, w_row) = (shape.k * L::X_BYTES, shape.k * L::W_BYTES);
    let next = w.wrapping_add(STREAMS * w_row);
    let wide = if S::LANES == 16 { 4 } else { 2 };
    let calls = 2 * shape.m.div_ceil(wide);
    let lines = (STREAMS * L::ELEMENTS * L::W_BYTES / 64 / calls).max(1);
    // nothing belongs to this weight behind the last whole octet
    let lines = if next.wrapping_add(STREAMS * w_row) <= end { lines } else { 0 };
    let mut ahead = RowPrefetch { at: next, lines };
    let part = lines * 64 * (shape.k / L::ELEMENTS);
    // SAFETY: the caller's promise: eight rows of weight, m rows of x, sums [m, BLOCK].
    unsafe {
        // four weight rows stay in the L1 while all rows of x pass
        for r in (0..STREAMS).step_by(4) {
            let (w, mut i) = (w.add(r * w_row), 0);
            while i < shape.m {
                let (x, sums) = (x.add(i * x_row), sums.add(i * BLOCK + r));
                match shape.m - i {
                    1 => dot::<S, L, 4, 1>(shape, x, w, ahead, sums),
                    left if left < wide || wide == 2 => dot::<S, L, 4, 2>(shape, x, w, ahead, sums),
                    _ => dot::<S, L, 4, 4>(shape, x, w, ahead, sums),
                }
                i += match shape.m - i {
                    1 => 1,
                    left if left < wide || wide == 2 => 2,
                    _ => 4,
                };
                ahead.at = ahead.at.wrapping_add(part);
            }
        }
    }
}

/// `sums[i * BLOCK + r] = w[r] . x[i]` for `R` weight rows and `X` rows of `x`.
#[inline(always)]
unsafe fn dot<S: Simd, L: LoadVectors<S>, const R: usize, const X: usize>(
    shape: &GemmShape,
    x: *const u8,
    w: *const u8,
    mut ahead: RowPrefetch,
    sums: *mut f32,
) {
    let (x_row, w_row) = (shape.k * L::X_BYTES, shape.k * L::W_BYTES);
    let whole = shape.k - shape.k % L::ELEMENTS;
    // SAFETY: the caller's promise: R rows of weight, X rows of x, each of k elements.
    unsafe {
        let mut acc = [[S::splat(0.0); X]; R];
        let mut c = 0;
        while c < whole {
            for line in 0..ahead.lines {
                S::prefetch(ahead.at.wrapping_add(line * 64));
            }
            ahead.at = ahead.at.wrapping_add(ahead.lines * 64);
            let mut xs = [S::splat(0.0); X];
            for (i, v) in xs.iter_mut().enumerate() {
                *v = L::x(x.add(i * x_row + c * L::X_BYTES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let at = r * w_row + c * L::W_BYTES;
                let v = L::w(w.add(at));
                for (acc, x) in acc.iter_mut().zip(&xs) {
                    *acc = L::mac(*acc, *x, v);
                }
            }
            c += L::ELEMENTS;
        }
        if c < shape.k {
            let rest = shape.k - c;
            for (r, acc) in acc.iter_mut().enumerate() {
                let v = L::w_part(w.add(r * w_row + c * L::W_BYTES), rest);
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = L::mac(*acc, L::x_part(x.add(i * x_row + c * L::X_BYTES), rest), v);
                }
            }
        }
        // four sums at a time; a single row uses the same order of additions
        for r in (0..R).step_by(4) {
            for i in 0..X {
                let mut four = [S::splat(0.0); 4];
                for (four, acc) in four.iter_mut().zip(&acc[r..]) {
                    *four = acc[i];
                }
                let mut totals = [0f32; 4];
                S::store_sums(totals.as_mut_ptr(), four);
                std::ptr::copy_nonoverlapping(totals.as_ptr(), sums.add(i * BLOCK + r), R.min(4));
            }
        }
    }
}
