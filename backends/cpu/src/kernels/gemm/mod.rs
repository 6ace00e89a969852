//! `out = x . weight^T (+ bias) (+ out)`: few rows of `x` stream the weight once ([`rows`]), many rows
//! run a blocked kernel over packed operands ([`packed`]), on tiles where there are some (`tiles`).

mod codes;
pub(crate) mod packed;
pub(crate) mod quantised;
pub(crate) mod rows;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;

use super::OperandSpan;
use super::convert::{load, load_part, store, store_part};
use super::simd::Simd;
use crate::isa::Isa;
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_usize;

/// A Gemm's shape and dtypes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmShape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) x: DType,
    /// Dtype of the weight, and of the bias; f32 where the weights are quantised.
    pub(crate) weight: DType,
    pub(crate) is_quantised: bool,
    pub(crate) out: DType,
    pub(crate) bias: bool,
    pub(crate) accumulate: bool,
}

/// Memory layout of packed `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedForm {
    /// Tiles of words for the registers, of elements of this dtype.
    Words(DType),
    /// Tiles for the processor's own.
    Tiles,
}

/// Maximum number of rows of `x` for which streaming the weight beats packing. Measured on Zen 4; f32 packs
/// twice the bytes for half the arithmetic rate, so packing pays later.
const STREAMED_ROWS_DOT: usize = 24;
const STREAMED_ROWS_F32: usize = 48;
/// The same for tiles, measured on Sapphire Rapids.
const STREAMED_ROWS_TILES: usize = 4;
/// The same for tiles of quantised weights, which are widened for them.
const STREAMED_ROWS_TILES_QUANTISED: usize = 16;

impl GemmShape {
    /// Whether the blocked kernel runs it.
    pub(crate) fn is_packed(&self, isa: Isa) -> bool {
        self.m > if self.is_dot(isa) { STREAMED_ROWS_DOT } else { STREAMED_ROWS_F32 }
    }

    /// Whether tiles multiply it: `x` is bf16, and so are the weights, or they are rounded to it as they are
    /// read.
    fn is_tiled(&self, isa: Isa) -> bool {
        let is_bf16 = self.x == DType::Bf16 && (self.is_quantised || self.weight == DType::Bf16);
        let streamed = if self.is_quantised { STREAMED_ROWS_TILES_QUANTISED } else { STREAMED_ROWS_TILES };
        isa.has_tiles() && is_bf16 && self.m > streamed && self.k > 0
    }

    /// Returns how `x` is packed for it, unless weights stream past it as it is.
    pub(crate) fn packed_form(&self, isa: Isa) -> Option<PackedForm> {
        match self.is_tiled(isa) {
            true => Some(PackedForm::Tiles),
            false => self.is_packed(isa).then(|| PackedForm::Words(self.word_dtype(isa))),
        }
    }

    /// Whether both inputs enter as pairs of bf16 in one dot instruction. Otherwise both are widened to
    /// f32, exactly.
    pub(crate) fn is_dot(&self, isa: Isa) -> bool {
        isa.has_dot_bf16() && self.x == DType::Bf16 && self.weight == DType::Bf16
    }

    /// The dtype in which packed `x` is held.
    pub(crate) fn word_dtype(&self, isa: Isa) -> DType {
        if self.is_dot(isa) { DType::Bf16 } else { DType::F32 }
    }
}

/// Operands of a Gemm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) x: OperandSpan,
    pub(crate) weight: OperandSpan,
    pub(crate) bias: Option<OperandSpan>,
    pub(crate) out: OperandSpan,
}

impl Operands {
    /// From the operands of a product with quantised weights; `rest` follows the weights.
    pub(crate) fn quantised(shape: &GemmShape, x: OperandSpan, rest: &[OperandSpan]) -> Self {
        let bias = shape.bias.then(|| rest[0]);
        Operands { x, weight: OperandSpan::EMPTY, bias, out: rest[usize::from(shape.bias)] }
    }

    /// From the operand list of the op.
    pub(crate) fn new(shape: &GemmShape, args: &[OperandSpan]) -> Self {
        let bias = shape.bias.then(|| args[2]);
        Operands { x: args[0], weight: args[1], bias, out: args[2 + usize::from(shape.bias)] }
    }
}

/// Writes `count` finished sums to row `row` of `out`, from column `column` on.
///
/// # Safety
/// `sums` holds `count` rounded up to `LANES`; row and columns are inside `out`, which no other worker
/// touches there.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd>(
    shape: &GemmShape,
    operands: &Operands,
    sums: *const f32,
    row: usize,
    column: usize,
    count: usize,
) {
    let out = operands.out.at(shape.out, row * shape.n + column);
    let out_size = to_usize(shape.out.size_bytes());
    let mut i = 0;
    while i < count {
        let n = (count - i).min(S::LANES);
        let whole = n == S::LANES;
        // SAFETY: the caller's promise; bias holds n elements.
        unsafe {
            let mut v = S::load(sums.add(i));
            if let Some(bias) = operands.bias {
                let at = bias.at(shape.weight, column + i);
                let b = if whole { load::<S>(shape.weight, at) } else { load_part::<S>(shape.weight, at, n) };
                v = S::add(v, b);
            }
            let to = out.add(i * out_size);
            if shape.accumulate {
                let old = if whole { load::<S>(shape.out, to) } else { load_part::<S>(shape.out, to, n) };
                v = S::add(v, old);
            }
            if whole {
                store::<S>(shape.out, to, v);
            } else {
                store_part::<S>(shape.out, to, v, n);
            }
        }
        i += S::LANES;
    }
}
