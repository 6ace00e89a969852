//! Many rows of `x`: a blocked kernel over packed operands (Goto & van de Geijn 2008).
//!
//! Both operands become 32-bit words, one f32 or a pair of bf16 along k. `x` is packed once per command
//! into tiles `[k words, tile rows]`; a worker packs one panel of weight rows at a time, `[k words,
//! 2 * LANES]`, which stays in its L2 while all tiles of `x` pass. No packed weight outlives its panel.

use super::{GemmShape, Operands, finish};
use crate::kernels::convert::widen;
use crate::kernels::panel::{DotBf16, Left, Panel, WordF32, tile, tile_rows, tile_rows_max, with_rows};
use crate::kernels::quantised::QuantisedRows;
use crate::kernels::round_up;
use crate::kernels::simd::{Simd, SimdTask};
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_usize;
use std::ops::Range;

/// Words of k per pass: a panel of 32 columns then takes 256 KiB, a quarter of a common L2.
const DEPTH: usize = 2048;
/// Elements widened at a time on the way into a panel.
const CHUNK: usize = 256;

/// Returns the words of k for elements of `dtype` (the packed one).
pub(crate) fn words(dtype: DType, elements: usize) -> usize {
    if dtype == DType::Bf16 { elements.div_ceil(2) } else { elements }
}

/// Rounds the rows of `x` up to whole tiles.
#[inline(always)]
fn padded_rows<S: Simd>(m: usize) -> usize {
    let most = tile_rows_max::<S>();
    let rest = m % most;
    m - rest + if rest > 0 { tile_rows::<S>(rest) } else { 0 }
}

/// Returns the words that packed `x` takes at any level; tiles add at most 3 rows.
pub(crate) fn packed_words(shape: &GemmShape, dtype: DType) -> usize {
    (shape.m + 4) * words(dtype, shape.k) + 16
}

/// Returns the number of tiles of `x` at any level.
pub(crate) fn tiles(m: usize, lanes: usize) -> usize {
    m.div_ceil(if lanes == 16 { 12 } else { 6 })
}

/// Rows of words to transpose: f32 or pairs, direct or widened first.
pub(super) struct PackSource {
    pub(super) start: *const u8,
    pub(super) row_bytes: usize,
    pub(super) dtype: DType,
    /// Number of elements per row.
    pub(super) elements: usize,
    /// Dtype of the words.
    pub(super) word: DType,
    /// The quantised weights that hold the rows, and the first row.
    pub(super) quantised: Option<(QuantisedRows, usize)>,
}

/// `to[word * width + row]` = word `word` of source row `row`, for `rows <= width` rows and words
/// `range`; missing rows and elements are zero. `width` is at most `2 * LANES`.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(
    source: &PackSource,
    rows: usize,
    width: usize,
    range: Range<usize>,
    to: *mut f32,
    scratch: *mut f32,
) {
    let per_word = if source.word == DType::Bf16 { 2 } else { 1 };
    let size = to_usize(source.dtype.size_bytes());
    let direct = source.word == source.dtype && source.quantised.is_none();
    // scratch: LANES rows of CHUNK words, then one block of LANES * LANES
    let (staged, block) = (scratch, scratch.wrapping_add(S::LANES * CHUNK));
    let mut group = 0;
    while group < width {
        let lanes = (width - group).min(S::LANES);
        let present = rows.saturating_sub(group).min(lanes);
        let mut word = range.start;
        while word < range.end {
            let count = (range.end - word).min(CHUNK);
            let element = word * per_word;
            let (mut from, mut stride) =
                (source.start.wrapping_add(group * source.row_bytes + element * size), source.row_bytes);
            let complete = count.is_multiple_of(S::LANES) && element + count * per_word <= source.elements;
            // SAFETY: reads stay in the `present` rows' elements; staged rows hold CHUNK words.
            unsafe {
                if !(direct && complete && present == S::LANES) {
                    for r in 0..S::LANES {
                        let row = staged.add(r * CHUNK);
                        if r < present && source.quantised.is_some() {
                            stage_quantised::<S>(source, group + r, element, row, count);
                        } else if r < present {
                            stage::<S>(source, from.wrapping_add(r * source.row_bytes), element, row, count);
                        } else {
                            std::ptr::write_bytes(row, 0, round_up(count, S::LANES));
                        }
                    }
                    (from, stride) = (staged.cast(), CHUNK * 4);
                }
                let mut w = 0;
                while w < count {
                    let target = to.add((word - range.start + w) * width + group);
                    let left = (count - w).min(S::LANES);
                    if lanes == S::LANES && left == S::LANES {
                        S::transpose(from.add(w * 4), stride, target.cast(), width * 4);
                    } else {
                        S::transpose(from.add(w * 4), stride, block.cast(), S::LANES * 4);
                        for r in 0..left {
                            std::ptr::copy_nonoverlapping(
                                block.add(r * S::LANES),
                                target.add(r * width),
                                lanes,
                            );
                        }
                    }
                    w += S::LANES;
                }
            }
            word += count;
        }
        group += S::LANES;
    }
}

/// Stages `count` words of one row from element `element` on, zero-padded to whole vectors.
#[inline(always)]
unsafe fn stage<S: Simd>(source: &PackSource, from: *const u8, element: usize, to: *mut f32, count: usize) {
    // SAFETY: `to` holds CHUNK words, count <= CHUNK, and reads stop at the row's last element.
    unsafe {
        let pairs = source.word == DType::Bf16;
        let wanted = if pairs { 2 * count } else { count };
        let elements = (source.elements - element).min(wanted);
        if elements < wanted || !count.is_multiple_of(S::LANES) {
            std::ptr::write_bytes(to, 0, round_up(count, S::LANES));
        }
        if pairs {
            std::ptr::copy_nonoverlapping(from, to.cast::<u8>(), elements * 2);
        } else {
            widen::<S>(source.dtype, from, to, elements);
        }
    }
}

/// As [`stage`], from row `row` of quantised weights, in f32.
#[inline(always)]
unsafe fn stage_quantised<S: Simd>(
    source: &PackSource,
    row: usize,
    element: usize,
    to: *mut f32,
    count: usize,
) {
    let Some((weights, first)) = source.quantised else { return };
    let elements = (source.elements - element).min(count);
    // SAFETY: as for `stage`.
    unsafe {
        std::ptr::write_bytes(to.add(elements), 0, CHUNK - elements);
        weights.widen::<S>(first + row, element, elements, to);
    }
}

/// Words of scratch that [`transpose`] needs at any level.
pub(super) const TRANSPOSE_WORDS: usize = 16 * CHUNK + 256;

/// A task that packs the tiles `tiles` of `x`.
pub(crate) struct PackX {
    pub(crate) shape: GemmShape,
    pub(crate) operands: Operands,
    pub(crate) dtype: DType,
    pub(crate) tiles: Range<usize>,
    pub(crate) packed: *mut f32,
    /// Scratch memory of [`PackX::SCRATCH_WORDS`] words.
    pub(crate) scratch: *mut f32,
}

impl PackX {
    /// Number of scratch words required.
    pub(crate) const SCRATCH_WORDS: usize = TRANSPOSE_WORDS;
}

impl SimdTask for PackX {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let GemmShape { m, k, x, .. } = self.shape;
        let size = to_usize(x.size_bytes());
        let depth = words(self.dtype, k);
        for t in self.tiles {
            let first = t * tile_rows_max::<S>();
            let rows = (m - first).min(tile_rows_max::<S>());
            let source = PackSource {
                start: self.operands.x.at(x, first * k),
                row_bytes: k * size,
                dtype: x,
                elements: k,
                word: self.dtype,
                quantised: None,
            };
            // SAFETY: tiles lie one behind the other, each `depth` words deep; x has rows first..first +
            // rows.
            unsafe {
                let to = self.packed.add(first * depth);
                transpose::<S>(&source, rows, tile_rows::<S>(rows), 0..depth, to, self.scratch);
            }
        }
    }
}

/// A task that computes one panel of output columns for all rows.
pub(crate) struct PanelOut {
    pub(crate) shape: GemmShape,
    pub(crate) operands: Operands,
    pub(crate) dtype: DType,
    pub(crate) panel: usize,
    /// The weights, if they are quantised.
    pub(crate) quantised: Option<QuantisedRows>,
    pub(crate) packed: *const f32,
    /// Scratch memory of [`PanelOut::scratch_words`] words.
    pub(crate) scratch: *mut f32,
}

impl PanelOut {
    /// Returns the scratch words required at any level: the panel, the sums, and room to transpose.
    pub(crate) fn scratch_words(shape: &GemmShape, dtype: DType) -> usize {
        32 * (DEPTH.min(words(dtype, shape.k)) + shape.m + 12) + TRANSPOSE_WORDS
    }
}

impl SimdTask for PanelOut {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let GemmShape { m, n, k, weight, .. } = self.shape;
        let width = 2 * S::LANES;
        let column = self.panel * width;
        let columns = (n - column).min(width);
        let depth = words(self.dtype, k);
        let source = PackSource {
            start: match self.quantised {
                Some(_) => std::ptr::null(),
                None => self.operands.weight.at(weight, column * k),
            },
            row_bytes: k * to_usize(weight.size_bytes()),
            dtype: weight,
            elements: k,
            word: self.dtype,
            quantised: self.quantised.map(|weights| (weights, column)),
        };
        // SAFETY: scratch is laid out as `scratch_words` counts it; operands are as the shape says.
        unsafe {
            let panel = self.scratch;
            let sums = panel.add(width * DEPTH.min(depth));
            let rest = sums.add(width * padded_rows::<S>(m));
            if depth == 0 {
                std::ptr::write_bytes(sums, 0, width * m);
            }
            let mut from = 0;
            let step = depth.div_ceil(depth.div_ceil(DEPTH).max(1)).next_multiple_of(16);
            while from < depth {
                let to = (from + step).min(depth);
                transpose::<S>(&source, columns, width, from..to, panel, rest);
                if self.dtype == DType::Bf16 {
                    all_tiles::<S, DotBf16>(&self, panel, sums, from..to, depth);
                } else {
                    all_tiles::<S, WordF32>(&self, panel, sums, from..to, depth);
                }
                from = to;
            }
            for row in 0..m {
                finish::<S>(&self.shape, &self.operands, sums.add(row * width), row, column, columns);
            }
        }
    }
}

/// Adds one panel's contribution to the sums of all tiles of `x`.
#[inline(always)]
unsafe fn all_tiles<S: Simd, P: Panel<S>>(
    task: &PanelOut,
    panel: *const f32,
    sums: *mut f32,
    range: Range<usize>,
    depth: usize,
) {
    let mut first = 0;
    while first < task.shape.m {
        let rows = tile_rows::<S>((task.shape.m - first).min(tile_rows_max::<S>()));
        // SAFETY: packed x holds this tile's `depth` rows of `rows` words; sums its rows.
        unsafe {
            let x = task.packed.add(first * depth + range.start * rows);
            let sums = sums.add(first * 2 * S::LANES);
            with_rows!(S, rows, one_tile::<S, P>(x, panel, sums, range.len(), range.start > 0));
        }
        first += rows;
    }
}

/// `sums[M, 2 * LANES] (+)= x tile . panel`.
#[inline(always)]
unsafe fn one_tile<S: Simd, P: Panel<S>, const M: usize>(
    x: *const f32,
    panel: *const f32,
    sums: *mut f32,
    words: usize,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); 2]; M];
        let left = Left { at: x, row_stride: 1, step_stride: M };
        tile::<S, P, M, 2>(&mut acc, left, panel.cast(), 2 * S::LANES * 4, words);
        for (i, row) in acc.iter().enumerate() {
            for (j, v) in row.iter().enumerate() {
                let to = sums.add((2 * i + j) * S::LANES);
                let v = if add { S::add(*v, S::load(to)) } else { *v };
                S::store(to, v);
            }
        }
    }
}
