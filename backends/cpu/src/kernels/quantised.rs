//! Quantised weights as the kernels see them, and their rows in f32.

use super::convert::{narrow, widen};
use super::simd::{Simd, SimdTask};
use super::{KernelWorker, OperandSpan, round_up};
use half::{bf16, f16};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::quantised::SUPER_COLUMNS;
use mixfleet_hal::{CodeKind, DType, Error, Quantised, Result, ScaleKind, ZeroKind};

/// The arrays of quantised weights `[rows, columns]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantisedRows {
    pub(crate) kind: Quantised,
    pub(crate) columns: usize,
    pub(crate) codes: OperandSpan,
    pub(crate) high: OperandSpan,
    scales: OperandSpan,
    zeros: OperandSpan,
    supers: OperandSpan,
    outer: OperandSpan,
}

/// Numbers of E2M1 codes.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

impl QuantisedRows {
    /// From the operands that form the weight's arrays, and the operands after them.
    pub(crate) fn of(kind: Quantised, columns: usize, args: &[OperandSpan]) -> (Self, &[OperandSpan]) {
        let mut rest = args;
        let mut take = |present: bool| match rest.split_first() {
            Some((first, after)) if present => {
                rest = after;
                *first
            }
            _ => OperandSpan::EMPTY,
        };
        let codes = take(true);
        let high = take(kind.code.high_bits() > 0);
        let scales = take(true);
        let zeros = take(kind.zero != ZeroKind::Middle);
        let supers = take(kind.supers() > 0);
        let outer = take(kind.outer);
        (QuantisedRows { kind, columns, codes, high, scales, zeros, supers, outer }, rest)
    }

    /// The weights from row `first` of matrix `which`, where matrices have `rows` rows. Row `first` begins a
    /// group of rows, or the rows read from there on end with the group.
    pub(crate) fn part(&self, rows: usize, which: usize, first: usize) -> Self {
        let row = which * rows + first;
        let group_rows = self.kind.group_rows as usize;
        let group = which * rows.div_ceil(group_rows) + first / group_rows;
        let from = |span: OperandSpan, bytes: usize| match span.bytes {
            0 => span,
            _ => OperandSpan { start: span.start.wrapping_add(bytes), bytes: span.bytes - bytes },
        };
        let scale_bytes = match self.kind.scale.dtype() {
            Some(dtype) => self.row_groups() * to_usize(dtype.size_bytes()),
            None => self.row_groups().next_multiple_of(4),
        };
        let super_bytes = self.columns.div_ceil(SUPER_COLUMNS as usize) * self.kind.supers() as usize * 2;
        QuantisedRows {
            codes: from(self.codes, row * self.row_words() * 4),
            high: from(self.high, row * self.high_row_words() * 4),
            scales: from(self.scales, group * scale_bytes),
            zeros: from(self.zeros, group * scale_bytes),
            supers: from(self.supers, row * super_bytes),
            outer: from(self.outer, which * 4),
            ..*self
        }
    }

    /// Words of a row of codes.
    pub(crate) fn row_words(&self) -> usize {
        self.columns * self.kind.code.low_bits() as usize / 32
    }

    /// Words of a row of high bits.
    pub(crate) fn high_row_words(&self) -> usize {
        self.columns * self.kind.code.high_bits() as usize / 32
    }

    /// Groups of a row.
    pub(crate) fn row_groups(&self) -> usize {
        self.columns.div_ceil(self.kind.group_columns as usize)
    }

    /// The middle of codes from which it is not subtracted one by one.
    #[inline(always)]
    fn middle(&self) -> f32 {
        match self.kind.code {
            CodeKind::U5 | CodeKind::U6 => f32_of(self.kind.code.middle()),
            _ => 0.0,
        }
    }

    /// Whether something is subtracted from scaled codes.
    pub(crate) fn has_zeros(&self) -> bool {
        self.kind.zero != ZeroKind::Middle || self.middle() != 0.0
    }

    /// Writes the scale of each group of a row, and what to subtract from each of its scaled codes: a scaled
    /// zero point or a minimum, or nothing where the middle is zero.
    ///
    /// # Safety
    /// The arrays are as large as their description says; `scales` and `zeros` have room for the groups of a
    /// row, and `spare` for the factors of its super-blocks, each rounded up to a vector.
    #[inline(always)]
    pub(crate) unsafe fn scales_of<S: Simd>(
        &self,
        row: usize,
        scales: *mut f32,
        zeros: *mut f32,
        spare: *mut f32,
    ) {
        let groups = self.row_groups();
        let at = row / self.kind.group_rows as usize * groups;
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind.scale.dtype() {
                None => self.integer_scales::<S>(row, scales, zeros, spare),
                Some(dtype) => {
                    read_scales::<S>(dtype, self.scales.at(dtype, at), scales, groups);
                    if self.kind.zero != ZeroKind::Middle {
                        read_scales::<S>(dtype, self.zeros.at(dtype, at), zeros, groups);
                    }
                }
            }
            if self.kind.outer {
                let outer = S::splat(read_f32(self.outer, 0));
                each::<S>(groups, scales, |_, scale| S::mul(scale, outer));
                if self.kind.zero == ZeroKind::Minima {
                    each::<S>(groups, zeros, |_, zero| S::mul(zero, outer));
                }
            }
            match self.kind.zero {
                ZeroKind::Minima => {}
                ZeroKind::Points => each::<S>(groups, zeros, |i, zero| S::mul(zero, S::load(scales.add(i)))),
                ZeroKind::Middle if self.middle() == 0.0 => {}
                ZeroKind::Middle => {
                    let middle = S::splat(self.middle());
                    each::<S>(groups, zeros, |i, _| S::mul(S::load(scales.add(i)), middle));
                }
            }
        }
    }

    /// The scales and minima of the K formats, before the outer scale.
    #[inline(always)]
    unsafe fn integer_scales<S: Simd>(&self, row: usize, scales: *mut f32, zeros: *mut f32, spare: *mut f32) {
        let row_bytes = self.row_groups().next_multiple_of(4);
        let (supers, per) = (self.kind.supers() as usize, (SUPER_COLUMNS / self.kind.group_columns) as usize);
        let blocks = self.columns / SUPER_COLUMNS as usize;
        // SAFETY: the caller's promise.
        unsafe {
            widen::<S>(DType::F16, self.supers.at(DType::F16, row * blocks * supers), spare, blocks * supers);
            let numbers = |span: OperandSpan, which: usize, to: *mut f32| {
                let from = span.start.add(row * row_bytes).cast::<i8>();
                // eight at a time: a super-block has 8 or 16
                for first in (0..blocks * per).step_by(8) {
                    let factor = *spare.add(first / per * supers + which);
                    // read before they are written, or the compiler takes one at a time
                    let eight = from.add(first).cast::<[i8; 8]>().read();
                    to.add(first).cast::<[f32; 8]>().write(eight.map(|number| f32::from(number) * factor));
                }
            };
            numbers(self.scales, 0, scales);
            if supers > 1 {
                numbers(self.zeros, 1, zeros);
            }
        }
    }

    /// Writes weights of a row from column `from` on in f32, with their scales read on the way.
    ///
    /// # Safety
    /// As for [`scales_of`](Self::scales_of), and `to` has room for `count` numbers.
    #[inline(always)]
    pub(crate) unsafe fn widen<S: Simd>(&self, row: usize, from: usize, count: usize, to: *mut f32) {
        let group_columns = self.kind.group_columns as usize;
        let mut column = from;
        // SAFETY: the caller's promise.
        unsafe {
            while column < from + count {
                let group = column / group_columns;
                let end = ((group + 1).saturating_mul(group_columns)).min(from + count);
                let (scale, zero) = self.scale_of(row, group);
                self.widen_group::<S>(row, column, end - column, scale, zero, to.add(column - from));
                column = end;
            }
        }
    }

    /// Writes `count` weights of a row from a column on, which share a scale.
    #[inline(always)]
    unsafe fn widen_group<S: Simd>(
        &self,
        row: usize,
        column: usize,
        count: usize,
        scale: f32,
        zero: f32,
        to: *mut f32,
    ) {
        let mut done = 0;
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind.code {
                CodeKind::I8 | CodeKind::E4m3 => {
                    let codes = self.codes.start.add(row * self.columns + column);
                    let signed = self.kind.code == CodeKind::I8;
                    for i in 0..count {
                        let code = codes.add(i).read();
                        let number = if signed { f32::from(code.cast_signed()) } else { e4m3(code) };
                        *to.add(i) = number * scale - zero;
                    }
                    return;
                }
                CodeKind::U4 | CodeKind::E2m1 if column.is_multiple_of(2) => {
                    let bytes = self.codes.start.add(4 * row * self.row_words() + column / 2);
                    let (scale, zero) = (S::splat(scale), S::splat(zero));
                    while done + 2 * S::LANES <= count {
                        let words = S::load_bytes(bytes.add(done / 2));
                        let mut numbers = [words, S::shifted(words, 4)];
                        for number in &mut numbers {
                            *number = match (self.kind.code, self.kind.zero) {
                                (CodeKind::E2m1, _) => S::e2m1(*number),
                                (_, ZeroKind::Middle) => S::nibble::<8>(*number),
                                _ => S::nibble::<0>(*number),
                            };
                            *number = S::sub(S::mul(*number, scale), zero);
                        }
                        S::store_interleaved(to.add(done), numbers);
                        done += 2 * S::LANES;
                    }
                }
                CodeKind::U5 | CodeKind::U6 if column.is_multiple_of(8) => {
                    let bits = self.kind.code.high_bits() as usize;
                    let words = self.codes.start.cast::<u32>().add(row * self.row_words() + column / 8);
                    let high = self.high.start.add(4 * row * self.high_row_words() + column / 8 * bits);
                    while done + 8 <= count {
                        let word = words.add(done / 8).read_unaligned();
                        let high = high.add(done / 8 * bits);
                        let high = match bits {
                            1 => u32::from(high.read()),
                            _ => u32::from(high.cast::<u16>().read_unaligned()),
                        };
                        for j in 0..8 {
                            let top = high >> (j * bits) & ((1 << bits) - 1);
                            *to.add(done + j) = f32_of(word >> (4 * j) & 15 | top << 4) * scale - zero;
                        }
                        done += 8;
                    }
                }
                _ => {}
            }
            for i in done..count {
                *to.add(i) = self.number(row, column + i) * scale - zero;
            }
        }
    }

    /// The scale of a group of a row, and what to subtract from each of its scaled codes.
    #[inline(always)]
    unsafe fn scale_of(&self, row: usize, group: usize) -> (f32, f32) {
        let groups = self.row_groups();
        // SAFETY: the caller's promise.
        unsafe {
            let outer = if self.kind.outer { read_f32(self.outer, 0) } else { 1.0 };
            if self.kind.scale == ScaleKind::I8 {
                let supers = self.kind.supers() as usize;
                let blocks = self.columns / SUPER_COLUMNS as usize;
                let block = group / (SUPER_COLUMNS / self.kind.group_columns) as usize;
                let at = (row * blocks + block) * supers;
                let integer = |span: OperandSpan| {
                    f32::from(span.start.add(row * groups.next_multiple_of(4) + group).cast::<i8>().read())
                };
                let scale = integer(self.scales) * (read_f16(self.supers, at) * outer);
                let zero = match supers {
                    1 => scale * self.middle(),
                    _ => integer(self.zeros) * (read_f16(self.supers, at + 1) * outer),
                };
                return (scale, zero);
            }
            let at = row / self.kind.group_rows as usize * groups + group;
            let scale = read_scale(self.kind.scale, self.scales, at) * outer;
            let zero = match self.kind.zero {
                ZeroKind::Middle => scale * self.middle(),
                ZeroKind::Points => read_scale(self.kind.scale, self.zeros, at) * scale,
                ZeroKind::Minima => read_scale(self.kind.scale, self.zeros, at) * outer,
            };
            (scale, zero)
        }
    }

    /// The number that a code stands for, less the middle where that is zero and the code has four bits: of
    /// wider ones it is subtracted as a zero point is.
    ///
    /// # Safety
    /// As for [`scales_of`](Self::scales_of).
    #[inline(always)]
    unsafe fn number(&self, row: usize, column: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let (codes, words) = (self.codes.start, self.row_words());
            let nibble = |word: u32| word >> (4 * (column % 8)) & 15;
            let low =
                |span: OperandSpan| span.start.cast::<u32>().add(row * words + column / 8).read_unaligned();
            let high = |bits: usize| {
                let per = 32 / bits;
                let word = self.high.u32(row * self.high_row_words() + column / per);
                (word >> (bits * (column % per)) & ((1 << bits) - 1)) << 4
            };
            let byte = || codes.add(row * self.columns + column).read();
            match self.kind.code {
                CodeKind::U4 if self.kind.zero == ZeroKind::Middle => f32_of(nibble(low(self.codes))) - 8.0,
                CodeKind::U4 => f32_of(nibble(low(self.codes))),
                CodeKind::U5 => f32_of(nibble(low(self.codes)) | high(1)),
                CodeKind::U6 => f32_of(nibble(low(self.codes)) | high(2)),
                CodeKind::I8 => f32::from(byte().cast_signed()),
                CodeKind::E2m1 => E2M1[nibble(low(self.codes)) as usize],
                CodeKind::E4m3 => e4m3(byte()),
            }
        }
    }
}

/// A code as a float; exact, since codes are small.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "at most 63")]
fn f32_of(code: u32) -> f32 {
    code as f32
}

/// The number of an E4M3 code: its bits as an f32 whose exponent is 120 too small.
#[inline(always)]
pub(crate) fn e4m3(code: u8) -> f32 {
    const SHIFT: f32 = 1.329_228e36; // 2^120
    if code & 0x7F == 0x7F {
        return f32::NAN;
    }
    let code = u32::from(code);
    f32::from_bits((code & 0x80) << 24 | (code & 0x7F) << 20) * SHIFT
}

unsafe fn read_f32(span: OperandSpan, index: usize) -> f32 {
    // SAFETY: the caller's promise that the span has the element.
    unsafe { span.at(DType::F32, index).cast::<f32>().read_unaligned() }
}

unsafe fn read_f16(span: OperandSpan, index: usize) -> f32 {
    // SAFETY: the caller's promise that the span has the element.
    f16::from_bits(unsafe { span.at(DType::F16, index).cast::<u16>().read_unaligned() }).to_f32()
}

/// Widens scales; vector reads do not support E4M3.
#[inline(always)]
unsafe fn read_scales<S: Simd>(dtype: DType, from: *const u8, to: *mut f32, count: usize) {
    // SAFETY: the caller's promise that both have as many elements.
    unsafe {
        if dtype == DType::F8E4m3 {
            for i in 0..count {
                *to.add(i) = e4m3(from.add(i).read());
            }
        } else {
            widen::<S>(dtype, from, to, count);
        }
    }
}

/// Replaces `count` numbers, rounded up to a vector, a vector at a time: `change` has the index of its first.
///
/// # Safety
/// There are as many numbers.
#[inline(always)]
unsafe fn each<S: Simd>(count: usize, numbers: *mut f32, change: impl Fn(usize, S::V) -> S::V) {
    let mut i = 0;
    while i < count {
        // SAFETY: the caller's promise.
        unsafe { S::store(numbers.add(i), change(i, S::load(numbers.add(i)))) };
        i += S::LANES;
    }
}

#[inline(always)]
unsafe fn read_scale(kind: ScaleKind, span: OperandSpan, index: usize) -> f32 {
    // SAFETY: the caller's promise that the span has the element.
    unsafe {
        match kind {
            ScaleKind::F32 => read_f32(span, index),
            ScaleKind::F16 => read_f16(span, index),
            ScaleKind::Bf16 => {
                bf16::from_bits(span.at(DType::Bf16, index).cast::<u16>().read_unaligned()).to_f32()
            }
            ScaleKind::E4m3 => e4m3(span.at(DType::F8E4m3, index).read()),
            ScaleKind::I8 => 0.0,
        }
    }
}

/// Copies rows of a quantised table by index.
pub(crate) fn embed(
    worker: &mut KernelWorker<'_>,
    args: &[OperandSpan],
    tokens: usize,
    vocab: u32,
    hidden: usize,
    table: Quantised,
    to: DType,
) -> Result<()> {
    let (table, rest) = QuantisedRows::of(table, hidden, &args[1..]);
    for token in worker.share(tokens) {
        // SAFETY: `ids` holds `tokens` elements.
        let id = unsafe { args[0].u32(token) };
        if id >= vocab {
            return Err(Error::invalid(format!(
                "embed: id {id} at position {token}, but the table has {vocab} rows"
            )));
        }
        let scratch = worker.scratch.words(round_up(hidden, 16));
        let target = rest[0].at(to, token * hidden);
        let row = EmbedRow { table, row: id as usize, scratch, to, target };
        // SAFETY: the table has `vocab` rows, `out` a row for each token, and scratch what a row needs.
        unsafe { worker.isa.run(row) };
    }
    Ok(())
}

struct EmbedRow {
    table: QuantisedRows,
    row: usize,
    scratch: *mut f32,
    to: DType,
    target: *mut u8,
}

impl SimdTask for EmbedRow {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let columns = self.table.columns;
        // SAFETY: `embed` made the pointers.
        unsafe {
            self.table.widen::<S>(self.row, 0, columns, self.scratch);
            narrow::<S>(self.to, self.scratch, self.target, columns);
        }
    }
}
