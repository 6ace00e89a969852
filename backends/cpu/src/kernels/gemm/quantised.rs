//! Few rows of `x` with quantised weights: every code is read once, turned into a number in a register, and
//! meets all rows of `x` there.
//!
//! A vector of words holds a code of each bit position for neighbouring columns `codes per word` apart. So
//! `x` is put in that order once, and code j of all words is one shift away. Scales multiply the sum of a
//! vector's products, and zero points or minima the sum of its `x`.
//!
//! Where codes are integers and `x` is bf16, products are of integers: the numbers of `x` that meet a word
//! become integers of 16 bits times a power of two. That is exact for those of at least 2^-7 of the largest
//! of the word, and within 2^-15 of the largest for the others. Where bytes are multiplied, each integer has
//! 15 bits in two bytes, so that this is 2^-6 and 2^-14.

use super::codes::{CodeWords, FloatBytes, FloatNibbles, Nibbles, SignedBytes, TwoPlanes, bits};
use super::rows::{AHEAD_BYTES, PARTS};
use super::{GemmShape, Operands, finish};
use crate::kernels::convert::{load_part, widen};
use crate::kernels::quantised::QuantisedRows;
use crate::kernels::round_up;
use crate::kernels::simd::{Simd, SimdTask};
use mixfleet_hal::{CodeKind, DType, Quantised, ZeroKind};
use std::ops::Range;

/// Weight rows whose sums are kept before they are written.
const BLOCK: usize = 64;
/// Weight rows read side by side.
const STREAMS: usize = PARTS;
/// Rows of `x` that meet a number at a time, unless there is only one.
const X_ROWS: usize = 4;
/// Lanes of the widest vector, to which scratch is padded.
const PAD: usize = 16;
/// A group of this many words, as a power of two, is the whole row.
const WHOLE_ROW: u32 = 31;

/// A task that computes the output columns `columns` of all rows.
pub(crate) struct QuantisedFewRows {
    pub(crate) shape: GemmShape,
    pub(crate) operands: Operands,
    pub(crate) weights: QuantisedRows,
    pub(crate) columns: Range<usize>,
    /// Whether scratch holds `x` in order from other columns of the same product.
    pub(crate) is_ordered: bool,
    /// Scratch memory of [`QuantisedFewRows::scratch_words`] words.
    pub(crate) scratch: *mut f32,
}

/// The words of a group as a power of two; none for a length that is no power of two.
fn group_words_log2(kind: &Quantised, columns: usize) -> Option<u32> {
    let group = kind.group_columns as usize;
    let per_word = (32 / kind.code.low_bits()) as usize;
    match group {
        _ if group >= columns => Some(WHOLE_ROW),
        _ if group.is_multiple_of(per_word) && (group / per_word).is_power_of_two() => {
            Some((group / per_word).trailing_zeros())
        }
        _ => None,
    }
}

/// Sizes of the parts of scratch, in words.
#[derive(Clone, Copy)]
struct QuantisedScratchLayout {
    x_row: usize,
    sums_row: usize,
    scales: usize,
}

impl QuantisedScratchLayout {
    fn of(weights: &QuantisedRows) -> Self {
        let words = round_up(weights.row_words().max(1), PAD);
        let per_word = (32 / weights.kind.code.low_bits()) as usize;
        QuantisedScratchLayout {
            x_row: (words * per_word).max(round_up(weights.columns, PAD)),
            sums_row: words,
            scales: round_up(weights.row_groups(), PAD) + PAD,
        }
    }
}

impl QuantisedFewRows {
    /// Returns the scratch words required: `x` in order, its sums, scales and zeros of some rows, sums of
    /// products, and a row in f32.
    pub(crate) fn scratch_words(shape: &GemmShape, weights: &QuantisedRows) -> usize {
        let QuantisedScratchLayout { x_row, sums_row, scales } = QuantisedScratchLayout::of(weights);
        let m = padded_rows(shape.m);
        m * (x_row + sums_row) + m.max(STREAMS) * BLOCK + 2 * STREAMS * scales + x_row
    }
}

/// Rows of `x`, padded with zero rows to a multiple.
fn padded_rows(m: usize) -> usize {
    if m == 1 { 1 } else { round_up(m, X_ROWS) }
}

impl SimdTask for QuantisedFewRows {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let kind = self.weights.kind;
        let Some(group_log2) = group_words_log2(&kind, self.weights.columns) else {
            // SAFETY: the creator of the task guarantees valid operands.
            return unsafe { row_by_row::<S>(&self) };
        };
        let centred = kind.zero == ZeroKind::Middle;
        // SAFETY: the creator of the task guarantees valid operands.
        unsafe {
            match (kind.code, centred) {
                (CodeKind::U4, true) => stream::<S, Nibbles<8>>(&self, group_log2),
                (CodeKind::U4, false) => stream::<S, Nibbles<0>>(&self, group_log2),
                (CodeKind::U5, _) => stream::<S, TwoPlanes<1>>(&self, group_log2),
                (CodeKind::U6, _) => stream::<S, TwoPlanes<2>>(&self, group_log2),
                (CodeKind::I8, _) => stream::<S, SignedBytes>(&self, group_log2),
                (CodeKind::E2m1, _) => stream::<S, FloatNibbles>(&self, group_log2),
                (CodeKind::E4m3, _) => stream::<S, FloatBytes>(&self, group_log2),
            }
        }
    }
}

/// The addresses of the parts of scratch.
#[derive(Clone, Copy)]
struct QuantisedScratch {
    x: *mut f32,
    x_sums: *mut f32,
    scales: *mut f32,
    zeros: *mut f32,
    sums: *mut f32,
    /// Room for a row in f32.
    row: *mut f32,
    layout: QuantisedScratchLayout,
}

impl QuantisedScratch {
    unsafe fn of(task: &QuantisedFewRows) -> Self {
        let layout = QuantisedScratchLayout::of(&task.weights);
        let m = padded_rows(task.shape.m);
        // SAFETY: scratch is as large as `scratch_words` says.
        unsafe {
            let x = task.scratch;
            let x_sums = x.add(m * layout.x_row);
            let scales = x_sums.add(m * layout.sums_row);
            let zeros = scales.add(STREAMS * layout.scales);
            let sums = zeros.add(STREAMS * layout.scales);
            QuantisedScratch { x, x_sums, scales, zeros, sums, row: sums.add(m.max(STREAMS) * BLOCK), layout }
        }
    }

    /// Reads the scales and zeros of a weight row into those of row `at` of [`STREAMS`].
    #[inline(always)]
    unsafe fn read_scales<S: Simd>(&self, task: &QuantisedFewRows, row: usize, at: usize) {
        let at = at * self.layout.scales;
        // SAFETY: scratch is as large as `scratch_words` says.
        unsafe { task.weights.scales_of::<S>(row, self.scales.add(at), self.zeros.add(at), self.row) };
    }
}

/// Widened rows and plain products, for groups of odd lengths.
#[inline(always)]
unsafe fn row_by_row<S: Simd>(task: &QuantisedFewRows) {
    let GemmShape { m, k, x, .. } = task.shape;
    // SAFETY: scratch is laid out as `QuantisedScratch` says; operands are as the shape says.
    unsafe {
        let parts = QuantisedScratch::of(task);
        let padded = round_up(k, PAD);
        for i in 0..m {
            let to = parts.x.add(i * parts.layout.x_row);
            std::ptr::write_bytes(to.add(k), 0, padded - k);
            widen::<S>(x, task.operands.x.at(x, i * k), to, k);
        }
        std::ptr::write_bytes(parts.row.add(k), 0, padded - k);
        for n in task.columns.clone() {
            task.weights.widen::<S>(n, 0, k, parts.row);
            for i in 0..m {
                let x = parts.x.add(i * parts.layout.x_row);
                let (mut acc, mut c) = (S::splat(0.0), 0);
                while c < k {
                    acc = S::fma(S::load(x.add(c)), S::load(parts.row.add(c)), acc);
                    c += S::LANES;
                }
                let mut sums = [0f32; PAD];
                sums[0] = S::sum(acc);
                finish::<S>(&task.shape, &task.operands, sums.as_ptr(), i, n, 1);
            }
        }
    }
}

/// Computes all columns of the task.
#[inline(always)]
unsafe fn stream<S: Simd, C: CodeWords<S>>(task: &QuantisedFewRows, group_log2: u32) {
    let m = task.shape.m;
    // SAFETY: scratch is laid out as `QuantisedScratch` says; operands are as the shape says.
    unsafe {
        let parts = QuantisedScratch::of(task);
        let at_once = match C::HAS_INTEGERS && task.shape.x == DType::Bf16 {
            true if S::DOT_I8 => 4,
            true if S::DOT_I16 => 2,
            _ => 1,
        };
        if !task.is_ordered {
            order_x::<S, C>(task, &parts, at_once);
            // behind the groups of a row, scales meet zeros: they must be numbers
            std::ptr::write_bytes(parts.scales, 0, 2 * STREAMS * parts.layout.scales);
        }
        if m == 1 {
            return match at_once {
                4 if S::DOT_I8 => single::<S, C, 4>(task, &parts, group_log2),
                2 if S::DOT_I16 => single::<S, C, 2>(task, &parts, group_log2),
                _ => single::<S, C, 1>(task, &parts, group_log2),
            };
        }
        let end = task.columns.end;
        for block in task.columns.clone().step_by(BLOCK) {
            let count = (end - block).min(BLOCK);
            for j in (0..count).step_by(STREAMS) {
                let lines = WeightStreams { first: block + j, step: 1, end };
                (0..STREAMS).for_each(|r| parts.read_scales::<S>(task, lines.row(r), r));
                for i in (0..m).step_by(X_ROWS) {
                    let sums = parts.sums.add(i * BLOCK + j);
                    match at_once {
                        4 if S::DOT_I8 => {
                            products::<S, C, X_ROWS, 4>(task, &parts, lines, group_log2, i, sums, 1);
                        }
                        2 if S::DOT_I16 => {
                            products::<S, C, X_ROWS, 2>(task, &parts, lines, group_log2, i, sums, 1);
                        }
                        _ => products::<S, C, X_ROWS, 1>(task, &parts, lines, group_log2, i, sums, 1),
                    }
                }
            }
            for i in 0..m {
                finish::<S>(&task.shape, &task.operands, parts.sums.add(i * BLOCK), i, block, count);
            }
        }
    }
}

/// [`STREAMS`] weight rows, `step` apart; the last one replaces those past the end.
#[derive(Clone, Copy)]
struct WeightStreams {
    first: usize,
    step: usize,
    /// The row behind the last one.
    end: usize,
}

impl WeightStreams {
    #[inline(always)]
    fn row(&self, r: usize) -> usize {
        (self.first + r * self.step).min(self.end - 1)
    }
}

/// The products of the weight rows and the only row of `x`, in several streams, each of which reads its part
/// of the rows sequentially. On a Xeon with AMX this is 1.1 times as fast as one stream, and 1.2 times as
/// fast as interleaved neighbouring rows.
#[inline(always)]
unsafe fn single<S: Simd, C: CodeWords<S>, const AT_ONCE: usize>(
    task: &QuantisedFewRows,
    parts: &QuantisedScratch,
    group_log2: u32,
) {
    let Range { start, end } = task.columns;
    let step = (end - start).div_ceil(STREAMS);
    // SAFETY: as in `stream`.
    unsafe {
        for block in (0..step).step_by(BLOCK) {
            let count = (step - block).min(BLOCK);
            for j in 0..count {
                let lines = WeightStreams { first: start + block + j, step, end };
                (0..STREAMS).for_each(|r| parts.read_scales::<S>(task, lines.row(r), r));
                let sums = parts.sums.add(j);
                products::<S, C, 1, AT_ONCE>(task, parts, lines, group_log2, 0, sums, BLOCK);
            }
            for (r, first) in (0..STREAMS).map(|r| (r, start + r * step + block)) {
                if first < end {
                    let (sums, count) = (parts.sums.add(r * BLOCK), count.min(end - first));
                    finish::<S>(&task.shape, &task.operands, sums, 0, first, count);
                }
            }
        }
    }
}

/// Puts `x` in the order in which codes come, in f32 or in integers and padded with zeros, and sums it for
/// zero points. The powers of two of integers are in the second half of a row. Integers that meet four codes
/// at once are vectors of their upper bytes and of their lower ones by turns.
#[inline(always)]
unsafe fn order_x<S: Simd, C: CodeWords<S>>(
    task: &QuantisedFewRows,
    parts: &QuantisedScratch,
    at_once: usize,
) {
    let GemmShape { m, k, x, .. } = task.shape;
    let span = S::LANES * C::PER_WORD;
    let padded = round_up(k, span);
    // SAFETY: as in `stream`; a row of ordered `x`, and the stage for one, hold whole spans.
    unsafe {
        for i in 0..padded_rows(m) {
            std::ptr::write_bytes(parts.row.add(k), 0, padded - k);
            if i < m {
                widen::<S>(x, task.operands.x.at(x, i * k), parts.row, k);
            } else {
                std::ptr::write_bytes(parts.row, 0, k);
            }
            let (to, sums) =
                (parts.x.add(i * parts.layout.x_row), parts.x_sums.add(i * parts.layout.sums_row));
            for from in (0..padded).step_by(span) {
                for lane in 0..S::LANES {
                    let word = from / C::PER_WORD + lane;
                    let row = parts.row.add(word * C::PER_WORD).cast_const();
                    let values = std::slice::from_raw_parts(row, C::PER_WORD);
                    *sums.add(word) = values.iter().sum();
                    if at_once > 1 {
                        let scale = power_of_two(values, if at_once == 4 { 14 } else { 15 });
                        *to.add(parts.layout.x_row / 2 + word) = scale * C::INTEGER_FACTOR;
                        let apart = C::PER_WORD / at_once;
                        for (j, value) in values.iter().enumerate() {
                            let (step, part) = (j % apart, j / apart);
                            let integer = integer_of(value / scale);
                            if at_once == 2 {
                                let at = 2 * (step * S::LANES + lane) + part;
                                *to.add(from / 2).cast::<i16>().add(at) = integer;
                            } else {
                                let [low, _] = integer.to_le_bytes();
                                let [_, top] = (integer + 128).to_le_bytes();
                                let at = 4 * (2 * step * S::LANES + lane) + part;
                                let to = to.add(from / 2).cast::<u8>().add(at);
                                (*to, *to.add(4 * S::LANES)) = (top, low);
                            }
                        }
                    } else {
                        for (j, value) in values.iter().enumerate() {
                            *to.add(from + j * S::LANES + lane) = *value;
                        }
                    }
                }
            }
        }
    }
}

/// To the nearest integer; a NaN to zero.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "15 bits and a sign, by the power of two")]
fn integer_of(value: f32) -> i16 {
    value.round_ties_even() as i16
}

/// The power of two that turns numbers into integers whose largest has `width` bits and a sign; NaN if one is
/// infinite or NaN.
#[inline(always)]
fn power_of_two(values: &[f32], width: i32) -> f32 {
    /// Below it everything is treated as a multiple of 2^-114, or of slightly less.
    const LEAST_EXPONENT: i32 = 27;
    let largest = values.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0); // NaN is above all
    match (largest >> 23).cast_signed() {
        255 => f32::NAN,
        exponent => f32::from_bits((exponent.max(LEAST_EXPONENT) + 1 - width).cast_unsigned() << 23),
    }
}

/// `sums[i * BLOCK + r * sums_step]` = row `r` of `lines` times row `row + i` of `x`, for `X` rows of `x`.
#[inline(always)]
unsafe fn products<S: Simd, C: CodeWords<S>, const X: usize, const AT_ONCE: usize>(
    task: &QuantisedFewRows,
    parts: &QuantisedScratch,
    lines: WeightStreams,
    group_log2: u32,
    row: usize,
    sums: *mut f32,
    sums_step: usize,
) {
    const R: usize = STREAMS;
    let weights = &task.weights;
    let (words, has_zeros) = (weights.row_words(), weights.has_zeros());
    let codes = weights.codes.start.cast::<f32>();
    // SAFETY: as in `stream`; a row of codes has `words` words.
    unsafe {
        let x_row = parts.x.add(row * parts.layout.x_row).cast_const();
        let x_sums = parts.x_sums.add(row * parts.layout.sums_row);
        let rows: [usize; R] = std::array::from_fn(|r| lines.row(r));
        let mut acc = [[S::splat(0.0); X]; R];
        let mut word = 0;
        while word < words {
            let left = words - word;
            let (mut loaded, mut high) = ([S::splat(0.0); R], [S::splat(0.0); R]);
            for r in 0..R {
                let from = codes.add(rows[r] * words + word);
                let ahead = match X {
                    1 => from.cast::<u8>().wrapping_add(AHEAD_BYTES),
                    // reads beyond these rows stay inside the buffer
                    _ => codes.wrapping_add(lines.first * words + R * (word + words) + 16 * r).cast(),
                };
                S::prefetch_near(ahead);
                loaded[r] = if left >= S::LANES {
                    S::load(from)
                } else {
                    load_part::<S>(DType::F32, from.cast(), left)
                };
                if C::HIGH_BITS > 0 {
                    high[r] = high_words::<S>(weights, rows[r], word, C::HIGH_BITS);
                }
            }
            // words of `x` per word: numbers of 32, 16 or two times 8 bits
            let steps = if AT_ONCE == 1 { C::PER_WORD } else { C::PER_WORD / 2 };
            let x = x_row.add(word * steps);
            let part: [[S::V; X]; R] = match AT_ONCE {
                4 => std::array::from_fn(|r| {
                    bytes_at_once::<S, C, X>(loaded[r], high[r], x, parts.layout.x_row)
                }),
                _ => in_steps::<S, C, X, AT_ONCE>(loaded, high, x, parts.layout.x_row),
            };
            let group = word >> group_log2;
            for r in 0..R {
                let at = r * parts.layout.scales + group;
                let scale = spread::<S>(parts.scales.add(at), group_log2);
                for (i, (sum, part)) in acc[r].iter_mut().zip(part[r]).enumerate() {
                    let part = if AT_ONCE > 1 {
                        let powers = x_row.add(i * parts.layout.x_row + parts.layout.x_row / 2 + word);
                        let number = if AT_ONCE == 2 { S::number(part) } else { part };
                        S::mul(number, S::load(powers))
                    } else if C::FACTOR == 1.0 {
                        part
                    } else {
                        S::mul(part, S::splat(C::FACTOR))
                    };
                    *sum = S::fma(part, scale, *sum);
                }
                if has_zeros {
                    let zero = spread::<S>(parts.zeros.add(at), group_log2);
                    for (i, acc) in acc[r].iter_mut().enumerate() {
                        let sum = S::load(x_sums.add(i * parts.layout.sums_row + word));
                        *acc = S::sub(*acc, S::mul(zero, sum));
                    }
                }
            }
            word += S::LANES;
        }
        for (r, row) in acc.into_iter().enumerate() {
            for (i, sum) in row.into_iter().enumerate() {
                *sums.add(i * BLOCK + r * sums_step) = S::sum(sum);
            }
        }
    }
}

/// The products of a vector of packed words of each weight row with `X` rows of `x`, one or two codes of each
/// word at a time, in floats or in 32-bit integers.
#[inline(always)]
unsafe fn in_steps<S: Simd, C: CodeWords<S>, const X: usize, const AT_ONCE: usize>(
    words: [S::V; STREAMS],
    high: [S::V; STREAMS],
    x: *const f32,
    x_row: usize,
) -> [[S::V; X]; STREAMS] {
    // SAFETY: the caller's promise: rows of `x` hold what meets the words.
    unsafe {
        let mut part = [[S::splat(0.0); X]; STREAMS];
        for j in 0..C::PER_WORD / AT_ONCE {
            let mut xs = [S::splat(0.0); X];
            for (i, v) in xs.iter_mut().enumerate() {
                *v = S::load(x.add(i * x_row + j * S::LANES));
            }
            for r in 0..STREAMS {
                let number = match AT_ONCE {
                    2 => C::pair(words[r], high[r], j),
                    _ => C::number(words[r], high[r], j),
                };
                for i in 0..X {
                    part[r][i] = match AT_ONCE {
                        2 => S::dot_i16(part[r][i], number, xs[i]),
                        _ => S::fma(number, xs[i], part[r][i]),
                    };
                }
            }
        }
        part
    }
}

/// The products of a vector of packed words of a weight row with `X` rows of `x`, four codes of each word at
/// a time, in floats: at most 8 products of bytes fit 24 bits.
#[inline(always)]
unsafe fn bytes_at_once<S: Simd, C: CodeWords<S>, const X: usize>(
    words: S::V,
    high: S::V,
    x: *const f32,
    x_row: usize,
) -> [S::V; X] {
    // SAFETY: the caller's promise: rows of `x` hold what meets the words.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; X];
        for j in 0..C::PER_WORD / 4 {
            let quad = C::quad(words, high, j);
            for (i, sums) in sums.iter_mut().enumerate() {
                for (which, sum) in sums.iter_mut().enumerate() {
                    let bytes = S::load(x.add(i * x_row + (2 * j + which) * S::LANES));
                    *sum = S::dot_i8(*sum, quad, bytes);
                }
            }
        }
        let upper = S::splat(256.0);
        std::array::from_fn(|i| S::fma(S::number(sums[i][0]), upper, S::number(sums[i][1])))
    }
}

/// The numbers of the groups of a vector of words, each in the lanes of its group.
#[inline(always)]
unsafe fn spread<S: Simd>(from: *const f32, group_log2: u32) -> S::V {
    // SAFETY: the caller's promise: there is a number for each group, and room for a vector.
    unsafe { if 1usize << group_log2 >= S::LANES { S::splat(*from) } else { S::spread(from, group_log2) } }
}

/// The high bits of the codes of a vector of words, in the low bits of the same lane.
#[inline(always)]
unsafe fn high_words<S: Simd>(weights: &QuantisedRows, row: usize, word: usize, high_bits: usize) -> S::V {
    // eight codes of a word have a byte or two here
    let log2 = if high_bits == 1 { 2 } else { 1 };
    let (row_words, first) = (weights.high_row_words(), word >> log2);
    let count = (S::LANES >> log2).min(row_words - first);
    // SAFETY: the row has `row_words` words.
    unsafe {
        let at = row * row_words + first;
        let from = weights.high.start.cast::<f32>().add(at);
        // reading the next row's words is harmless; words past the last row do not exist
        let words = match weights.high.bytes >= 4 * (at + S::LANES) {
            true => S::load(from),
            false => load_part::<S>(DType::F32, from.cast(), count),
        };
        S::spread_words(words, log2, bits(8 * high_bits))
    }
}
