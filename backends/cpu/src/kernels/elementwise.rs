//! Operations on independent rows or elements. They run in f32 on cache-resident pieces, so one body serves
//! every combination of dtypes.

use super::convert::{load, load_part, narrow, store, store_part, widen};
use super::kv::head_bytes;
use super::simd::{Simd, SimdTask, exp};
use super::{KernelWorker, OperandSpan, round_up};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, Error, Result, RotaryPart, scaled};
use std::ops::Range;

/// Elements in the widest vector of any level, to which scratch rows are padded.
const PAD: usize = 16;

/// Copies rows of a table by index.
pub(crate) fn embed(
    worker: &mut KernelWorker<'_>,
    args: &[OperandSpan],
    tokens: usize,
    vocab: u32,
    hidden: usize,
    from: DType,
    to: DType,
) -> Result<()> {
    let [ids, table, out] = [args[0], args[1], args[2]];
    for token in worker.share(tokens) {
        // SAFETY: `ids` holds `tokens` elements.
        let id = unsafe { ids.u32(token) };
        if id >= vocab {
            return Err(Error::invalid(format!(
                "embed: id {id} at position {token}, but the table has {vocab} rows"
            )));
        }
        let (source, target) = (table.at(from, id as usize * hidden), out.at(to, token * hidden));
        convert_row(worker, source, from, target, to, hidden);
    }
    Ok(())
}

/// Copies `count` elements with conversion; of eight bits they are a head, with its scale.
pub(crate) fn convert_row(
    worker: &mut KernelWorker<'_>,
    from: *const u8,
    from_dtype: DType,
    to: *mut u8,
    to_dtype: DType,
    count: usize,
) {
    // SAFETY: callers pass pointers into operands with `count` elements behind each, which `Cmd::new`
    // has checked not to overlap.
    unsafe {
        if from_dtype == to_dtype {
            std::ptr::copy_nonoverlapping(from, to, head_bytes(to_dtype, count));
            return;
        }
        let row = worker.scratch.words(round_up(count, PAD));
        worker.isa.run(ConvertRow { from, from_dtype, row, to, to_dtype, count });
    }
}

struct ConvertRow {
    from: *const u8,
    from_dtype: DType,
    row: *mut f32,
    to: *mut u8,
    to_dtype: DType,
    count: usize,
}

impl SimdTask for ConvertRow {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let ConvertRow { from, from_dtype, row, to, to_dtype, count } = self;
        // SAFETY: `convert_row` made the pointers; of eight bits are heads.
        unsafe {
            if from_dtype.is_scaled() {
                let head = std::slice::from_raw_parts(from, head_bytes(from_dtype, count));
                scaled::decode(from_dtype, head, std::slice::from_raw_parts_mut(row, count));
            } else {
                widen::<S>(from_dtype, from, row, count);
            }
            if to_dtype.is_scaled() {
                let head = std::slice::from_raw_parts_mut(to, head_bytes(to_dtype, count));
                scaled::encode(to_dtype, std::slice::from_raw_parts(row, count), head);
            } else {
                narrow::<S>(to_dtype, row, to, count);
            }
        }
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`.
pub(crate) struct RmsNorm {
    pub(crate) args: [OperandSpan; 3],
    pub(crate) rows: Range<usize>,
    pub(crate) cols: usize,
    pub(crate) eps: f32,
    pub(crate) dtypes: [DType; 3],
    /// Memory for two padded rows.
    pub(crate) scratch: *mut f32,
}

impl SimdTask for RmsNorm {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let RmsNorm { args: [x, weight, out], cols, dtypes, .. } = self;
        let padded = round_up(cols, PAD);
        // SAFETY: operands hold rows * cols and cols elements; scratch holds two padded rows.
        unsafe {
            let (row, scale) = (self.scratch, self.scratch.add(padded));
            widen::<S>(dtypes[1], weight.start, scale, cols);
            for r in self.rows {
                widen::<S>(dtypes[0], x.at(dtypes[0], r * cols), row, cols);
                let mut squares = [S::splat(0.0); 4];
                let mut i = 0;
                while i < cols {
                    let v = S::load(row.add(i));
                    let lane = i / S::LANES % 4;
                    squares[lane] = S::fma(v, v, squares[lane]);
                    i += S::LANES;
                }
                let total = S::add(S::add(squares[0], squares[1]), S::add(squares[2], squares[3]));
                let inverse = S::splat(1.0 / (S::sum(total) / cols as f32 + self.eps).sqrt());
                let mut i = 0;
                while i < cols {
                    let v = S::mul(S::mul(S::load(row.add(i)), inverse), S::load(scale.add(i)));
                    S::store(row.add(i), v);
                    i += S::LANES;
                }
                narrow::<S>(dtypes[2], row, out.at(dtypes[2], r * cols), cols);
            }
        }
    }
}

/// Rotary position embedding in place.
pub(crate) struct RopeKernel {
    pub(crate) x: OperandSpan,
    pub(crate) cos_sin: OperandSpan,
    pub(crate) tokens: Range<usize>,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) part: RotaryPart,
    pub(crate) dtype: DType,
}

impl SimdTask for RopeKernel {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let RopeKernel { x, cos_sin, heads, head_dim, part, dtype, .. } = self;
        let (half, size) = (part.length as usize / 2, to_usize(dtype.size_bytes()));
        for token in self.tokens {
            let cos = cos_sin.at(DType::F32, token * 2 * half);
            for head in 0..heads {
                let low = x.at(dtype, (token * heads + head) * head_dim + part.first as usize);
                let mut i = 0;
                if part.interleaved {
                    // SAFETY: as below.
                    unsafe { turn_neighbours::<S>(low, dtype, cos, half) };
                    continue;
                }
                // SAFETY: a head has two halves of `half` elements, the table row likewise.
                unsafe {
                    while i < half {
                        let n = (half - i).min(S::LANES);
                        let (pa, pb) = (low.add(i * size), low.add((half + i) * size));
                        let (a, b) = (load_n::<S>(dtype, pa, n), load_n::<S>(dtype, pb, n));
                        let c = load_n::<S>(DType::F32, cos.add(i * 4), n);
                        let s = load_n::<S>(DType::F32, cos.add((half + i) * 4), n);
                        store_n::<S>(dtype, pa, S::sub(S::mul(a, c), S::mul(b, s)), n);
                        store_n::<S>(dtype, pb, S::fma(b, c, S::mul(a, s)), n);
                        i += S::LANES;
                    }
                }
            }
        }
    }
}

/// Rotates `half` pairs of neighbours by the cosines, and the sines behind them, at `cos`.
///
/// # Safety
/// The operands have this many elements.
#[inline(always)]
unsafe fn turn_neighbours<S: Simd>(x: *mut u8, dtype: DType, cos: *const u8, half: usize) {
    let size = to_usize(dtype.size_bytes());
    for i in (0..half).step_by(PAD) {
        let n = (half - i).min(PAD);
        let (mut pairs, mut angles) = ([0f32; 2 * PAD], [[0f32; PAD]; 2]);
        // SAFETY: the caller's promise; vectors are at most `PAD` long.
        unsafe {
            let at = x.add(2 * i * size);
            widen::<S>(dtype, at, pairs.as_mut_ptr(), 2 * n);
            widen::<S>(DType::F32, cos.add(i * 4), angles[0].as_mut_ptr(), n);
            widen::<S>(DType::F32, cos.add((half + i) * 4), angles[1].as_mut_ptr(), n);
            for (j, [a, b]) in pairs.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (cos, sin) = (angles[0][j], angles[1][j]);
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
            narrow::<S>(dtype, pairs.as_ptr(), at, 2 * n);
        }
    }
}

/// A function of two operands of equal shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    /// Computes `a / (1 + exp(-a)) * b`.
    SiluMul,
    /// Computes `gelu(a) * b` in the form with tanh.
    GeluMul,
    /// Computes `a + b`.
    Add,
}

/// An element-wise function of two operands.
pub(crate) struct BinaryKernel {
    pub(crate) function: Binary,
    pub(crate) args: [OperandSpan; 3],
    pub(crate) range: Range<usize>,
    pub(crate) dtype: DType,
}

impl SimdTask for BinaryKernel {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let BinaryKernel { function, args: [a, b, out], range, dtype } = self;
        let mut i = range.start;
        while i < range.end {
            let n = (range.end - i).min(S::LANES);
            // SAFETY: the three operands hold `range.end` elements at least.
            unsafe {
                let x = load_n::<S>(dtype, a.at(dtype, i), n);
                let y = load_n::<S>(dtype, b.at(dtype, i), n);
                let result = match function {
                    Binary::Add => S::add(x, y),
                    Binary::SiluMul => {
                        let e = exp::<S>(S::sub(S::splat(0.0), x));
                        S::mul(S::div(x, S::add(S::splat(1.0), e)), y)
                    }
                    Binary::GeluMul => {
                        // 2 sqrt(2 / pi), and 0.044715 times it
                        let first = S::splat(1.595_769_2);
                        let third = S::splat(0.071_354_814);
                        let factor = S::add(first, S::mul(third, S::mul(x, x)));
                        let e = exp::<S>(S::sub(S::splat(0.0), S::mul(x, factor)));
                        S::mul(S::div(x, S::add(S::splat(1.0), e)), y)
                    }
                };
                store_n::<S>(dtype, out.at(dtype, i), result, n);
            }
            i += S::LANES;
        }
    }
}

/// `(clamp(up) + 1) * g / (1 + exp(-alpha g))` with `g = min(gate, limit)`, of pairs of gate and up.
pub(crate) struct ClampedSwiglu {
    pub(crate) gate_up: OperandSpan,
    pub(crate) out: OperandSpan,
    pub(crate) range: Range<usize>,
    pub(crate) alpha: f32,
    pub(crate) limit: f32,
    pub(crate) dtype: DType,
}

impl SimdTask for ClampedSwiglu {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let ClampedSwiglu { gate_up, out, range, alpha, limit, dtype } = self;
        let mut i = range.start;
        while i < range.end {
            let n = (range.end - i).min(S::LANES);
            let (mut pairs, mut gates, mut ups) = ([0f32; 2 * PAD], [0f32; PAD], [0f32; PAD]);
            // SAFETY: the operands hold 2 and 1 elements for each of the range, vectors at most `PAD`.
            unsafe {
                widen::<S>(dtype, gate_up.at(dtype, 2 * i), pairs.as_mut_ptr(), 2 * n);
                for (at, pair) in pairs.as_chunks::<2>().0.iter().enumerate() {
                    (gates[at], ups[at]) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
                }
                let (gate, up) = (S::load(gates.as_ptr()), S::load(ups.as_ptr()));
                let e = exp::<S>(S::mul(S::splat(-alpha), gate));
                let glu = S::div(gate, S::add(S::splat(1.0), e));
                store_n::<S>(dtype, out.at(dtype, i), S::mul(S::add(up, S::splat(1.0)), glu), n);
            }
            i += S::LANES;
        }
    }
}

/// `cap tanh(x / cap)` in place, of f32.
pub(crate) struct SoftCap {
    pub(crate) x: OperandSpan,
    pub(crate) range: Range<usize>,
    pub(crate) cap: f32,
}

impl SimdTask for SoftCap {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let SoftCap { x, range, cap } = self;
        let mut i = range.start;
        while i < range.end {
            let n = (range.end - i).min(S::LANES);
            // SAFETY: the operand holds `range.end` elements at least.
            unsafe {
                let v = load_n::<S>(DType::F32, x.at(DType::F32, i), n);
                store_n::<S>(DType::F32, x.at(DType::F32, i), soft_cap::<S>(v, cap), n);
            }
            i += S::LANES;
        }
    }
}

/// `cap tanh(x / cap)`, with `tanh(z) = 1 - 2 / (1 + exp(2 z))`.
#[inline(always)]
pub(crate) unsafe fn soft_cap<S: Simd>(x: S::V, cap: f32) -> S::V {
    // SAFETY: the level is present by the caller's promise.
    unsafe {
        let e = exp::<S>(S::mul(x, S::splat(2.0 / cap)));
        let rest = S::div(S::splat(2.0), S::add(S::splat(1.0), e));
        S::mul(S::splat(cap), S::sub(S::splat(1.0), rest))
    }
}

/// Loads `n <= LANES` elements.
///
/// # Safety
/// `from` holds them.
#[inline(always)]
pub(crate) unsafe fn load_n<S: Simd>(dtype: DType, from: *const u8, n: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if n == S::LANES { load::<S>(dtype, from) } else { load_part::<S>(dtype, from, n) } }
}

/// Stores `n <= LANES` elements.
///
/// # Safety
/// `to` has room for them.
#[inline(always)]
pub(crate) unsafe fn store_n<S: Simd>(dtype: DType, to: *mut u8, v: S::V, n: usize) {
    // SAFETY: the caller's promise.
    unsafe { if n == S::LANES { store::<S>(dtype, to, v) } else { store_part::<S>(dtype, to, v, n) } }
}
