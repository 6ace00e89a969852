//! Many rows of `x` in bf16 on the tiles of AMX (Intel's Architecture Instruction Set Extensions reference,
//! chapter 3): a tile has 16 rows of 64 bytes, and one instruction multiplies two of them.
//!
//! Rows of weights, as they lie in memory, are the left-hand tiles, so that packing them copies whole lines.
//! `x` is packed once per command into right-hand tiles, `[k pairs, 16 rows of x]`. A worker packs a panel of
//! weight rows, which stays in its L2 while all of `x` passes; a chunk of two tiles of `x` stays in the L1
//! while all rows of the panel meet it.

use super::packed::{PackSource, TRANSPOSE_WORDS, transpose};
use super::rows::{AHEAD_BYTES, PARTS};
use super::{GemmShape, Operands, finish};
use crate::kernels::quantised::QuantisedRows;
use crate::kernels::round_up;
use crate::kernels::simd::{Simd, SimdTask};
use std::arch::asm;
use std::ops::Range;

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Elements of k in a row of a tile of bf16.
const DEPTH: usize = 32;
/// Bytes of a tile.
const BYTES: usize = 1024;
/// Words of a tile.
const WORDS: usize = BYTES / 4;
/// Tiles of k whose products are summed before the sums are put aside.
const CHUNK: usize = 16;
/// Rows of `x` whose sums are kept at a time.
const X_ROWS: usize = 512;
/// Elements that are rounded at a time on the way into a panel.
const STAGE: usize = 512;

/// Returns the tiles of k.
fn steps(k: usize) -> usize {
    k.div_ceil(DEPTH)
}

/// Returns the tiles of rows of `x`.
pub(crate) fn x_tiles(m: usize) -> usize {
    m.div_ceil(ROWS)
}

/// Returns the words that packed `x` takes.
pub(crate) fn packed_words(shape: &GemmShape) -> usize {
    x_tiles(shape.m) * tile_words(shape.k)
}

/// Returns the weight rows of a panel, which give each worker several panels where there are enough rows.
/// With few rows of `x` most of the time goes into packing, and a panel stays well within a common L2.
pub(crate) fn panel_rows(shape: &GemmShape, workers: usize) -> usize {
    const FEW_ROWS_BYTES: usize = 512 << 10;
    let few = shape.m <= ROWS;
    let fits = |rows: &usize| shape.n >= 4 * workers * rows && (!few || rows * 2 * shape.k <= FEW_ROWS_BYTES);
    [128, 64].into_iter().find(fits).unwrap_or(2 * ROWS)
}

/// Returns the words that packed rows take of `shape.m` choices, sorted by expert: an expert's last tile may
/// have a single row.
pub(crate) fn packed_words_of_experts(shape: &GemmShape, experts: usize) -> usize {
    packed_words(shape) + experts.min(shape.m) * tile_words(shape.k)
}

/// Returns the words of 16 packed rows of `x`.
pub(crate) fn tile_words(k: usize) -> usize {
    steps(k) * WORDS
}

/// A task that packs tiles of `x`.
pub(crate) struct TileX {
    pub(crate) shape: GemmShape,
    pub(crate) operands: Operands,
    pub(crate) tiles: Range<usize>,
    pub(crate) packed: *mut f32,
    /// Scratch memory of [`TileX::SCRATCH_WORDS`] words.
    pub(crate) scratch: *mut f32,
}

impl TileX {
    /// Number of scratch words required.
    pub(crate) const SCRATCH_WORDS: usize = TRANSPOSE_WORDS;
}

impl SimdTask for TileX {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let GemmShape { m, k, x, .. } = self.shape;
        for tile in self.tiles {
            let first = tile * ROWS;
            let start = self.operands.x.at(x, first * k);
            let source =
                PackSource { start, row_bytes: 2 * k, dtype: x, elements: k, word: x, quantised: None };
            let words = 0..steps(k) * ROWS;
            // SAFETY: tiles of rows lie one behind the other; x has rows first..m.
            unsafe {
                let to = self.packed.add(tile * steps(k) * WORDS);
                transpose::<S>(&source, (m - first).min(ROWS), ROWS, words, to, self.scratch);
            }
        }
    }
}

/// A task that computes a panel of output columns for all rows. Only for a level with tiles.
pub(crate) struct TilePanel<'a> {
    pub(crate) shape: GemmShape,
    pub(crate) operands: Operands,
    /// The weights, if they are quantised.
    pub(crate) quantised: Option<QuantisedRows>,
    /// Output columns, as many as [`panel_rows`] says except for the last ones.
    pub(crate) columns: Range<usize>,
    /// First output column of the worker's next panel, whose weights are prefetched.
    pub(crate) next: usize,
    /// The output's row of each row of `x`, unless they are the same.
    pub(crate) out_rows: Option<&'a [usize]>,
    pub(crate) packed: *const f32,
    /// Scratch memory of [`TilePanel::scratch_words`] words.
    pub(crate) scratch: *mut f32,
}

impl TilePanel<'_> {
    /// Returns the scratch words required for panels of `rows`: the panel, sums, rows of the output, and a
    /// stage for weights that are not bf16.
    pub(crate) fn scratch_words(shape: &GemmShape, rows: usize) -> usize {
        let rows = round_up(rows, 2 * ROWS);
        let sums = round_up(shape.m.min(X_ROWS), 2 * ROWS) * rows;
        rows * steps(shape.k) * ROWS + sums + 2 * ROWS * rows + STAGE
    }
}

impl SimdTask for TilePanel<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (m, steps) = (self.shape.m, steps(self.shape.k));
        let rows = round_up(self.columns.len(), 2 * ROWS);
        // SAFETY: scratch is laid out as `scratch_words` counts it; operands are as the shape says.
        unsafe {
            let panel = self.scratch;
            let sums = panel.add(rows * steps * ROWS);
            let out = sums.add(round_up(m.min(X_ROWS), 2 * ROWS) * rows);
            self.pack::<S>(rows, panel, out.add(2 * ROWS * rows));
            configure();
            let mut ahead = self.ahead(rows);
            for first in (0..m).step_by(X_ROWS) {
                let last = (first + X_ROWS).min(m);
                for from in (0..steps).step_by(CHUNK) {
                    let chunk = from..(from + CHUNK).min(steps);
                    for x in (first..last).step_by(2 * ROWS) {
                        let sums = sums.add((x - first) * rows);
                        self.multiply(rows, x, chunk.clone(), panel, sums, &mut ahead);
                        if chunk.end == steps {
                            self.write::<S>(rows, x, sums, out);
                        }
                    }
                }
            }
            release();
        }
    }
}

/// Lines to fetch into the L2, in equal parts per multiplication of tiles.
#[derive(Clone, Copy)]
struct L2Prefetch {
    at: *const u8,
    end: *const u8,
}

impl TilePanel<'_> {
    /// Copies weight rows into tiles `[rows / 16, steps]`, with zeros for rows and columns that are not
    /// there.
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, rows: usize, panel: *mut f32, stage: *mut f32) {
        let GemmShape { k, weight, .. } = self.shape;
        let steps = steps(k);
        // SAFETY: the caller's promise: the panel has room for `rows`, the stage for STAGE numbers.
        unsafe {
            let to = |r: usize, step: usize| panel.add((r / ROWS * steps + step) * WORDS + r % ROWS * ROWS);
            for r in self.columns.len()..rows {
                (0..steps).for_each(|step| std::ptr::write_bytes(to(r, step), 0, ROWS));
            }
            if let Some(weights) = &self.quantised {
                for r in 0..self.columns.len() {
                    for from in (0..k).step_by(STAGE) {
                        let count = (k - from).min(STAGE);
                        weights.widen::<S>(self.columns.start + r, from, count, stage);
                        std::ptr::write_bytes(stage.add(count), 0, round_up(count, DEPTH) - count);
                        for part in (0..count).step_by(DEPTH) {
                            let to = to(r, (from + part) / DEPTH).cast::<u16>();
                            for half in (0..DEPTH).step_by(S::LANES) {
                                S::store_bf16(to.add(half), S::load(stage.add(part + half)));
                            }
                        }
                    }
                }
                return;
            }
            let start =
                |r: usize| self.operands.weight.at(weight, (self.columns.start + r) * k).cast::<u16>();
            let (whole, quarter) = (k / DEPTH, rows / PARTS);
            for first in 0..quarter {
                for step in 0..whole {
                    for r in (first..self.columns.len()).step_by(quarter) {
                        let from = start(r).add(step * DEPTH);
                        S::prefetch_near(from.cast::<u8>().wrapping_add(AHEAD_BYTES));
                        S::store(to(r, step), S::load(from.cast()));
                    }
                }
                for r in (first..self.columns.len()).step_by(quarter).filter(|_| whole < steps) {
                    std::ptr::write_bytes(to(r, whole), 0, ROWS);
                    let (from, to) = (start(r).add(whole * DEPTH), to(r, whole).cast());
                    std::ptr::copy_nonoverlapping(from, to, k - whole * DEPTH);
                }
            }
        }
    }

    /// What the worker reads next.
    fn ahead(&self, rows: usize) -> L2Prefetch {
        let GemmShape { n, k, weight, .. } = self.shape;
        let (start, end) = (self.next.min(n), (self.next + rows).min(n));
        if self.quantised.is_some() {
            return L2Prefetch { at: std::ptr::null(), end: std::ptr::null() };
        }
        let at = |row: usize| self.operands.weight.at(weight, row * k).cast_const();
        L2Prefetch { at: at(start), end: at(end) }
    }

    /// Adds what a chunk of k contributes to the sums of two tiles of `x`, from row `x` on: `[rows / 32, 4]`
    /// tiles `[16 weight rows, 16 rows of x]`.
    #[inline(always)]
    unsafe fn multiply(
        &self,
        rows: usize,
        x: usize,
        chunk: Range<usize>,
        panel: *const f32,
        sums: *mut f32,
        ahead: &mut L2Prefetch,
    ) {
        let steps = steps(self.shape.k);
        let right = self.packed.wrapping_add((x / ROWS * steps + chunk.start) * WORDS);
        let is_single = self.shape.m - x <= ROWS;
        for block in 0..rows / (2 * ROWS) {
            let left = panel.wrapping_add((2 * block * steps + chunk.start) * WORDS);
            let fetched = if ahead.at < ahead.end { 128 } else { 0 };
            let block = TileBlock {
                left,
                left_stride: steps * BYTES,
                right,
                right_stride: if is_single { 0 } else { steps * BYTES },
                steps: chunk.len(),
                sums: sums.wrapping_add(block * 4 * WORDS),
                adds: chunk.start > 0,
                fetch: ahead.at,
                fetched,
            };
            ahead.at = ahead.at.wrapping_add(fetched * chunk.len());
            // SAFETY: the caller's promise: the panel has two tiles of rows, packed x one or two.
            unsafe { if is_single { block.narrow() } else { block.wide() } }
        }
    }

    /// Writes the finished sums of two tiles of `x`.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, rows: usize, x: usize, sums: *const f32, out: *mut f32) {
        let count = (self.shape.m - x).min(2 * ROWS);
        // SAFETY: the caller's promise; `out` has room for 32 rows of the panel's columns.
        unsafe {
            for tile in 0..rows / ROWS {
                for right in 0..count.div_ceil(ROWS) {
                    let from = sums.add((tile / 2 * 4 + tile % 2 * 2 + right) * WORDS);
                    let to = out.add(right * ROWS * rows + tile * ROWS);
                    for at in (0..ROWS).step_by(S::LANES) {
                        for to_row in (0..ROWS).step_by(S::LANES) {
                            let from = from.add(at * ROWS + to_row).cast();
                            S::transpose(from, ROWS * 4, to.add(to_row * rows + at).cast(), rows * 4);
                        }
                    }
                }
            }
            for row in 0..count {
                let (column, columns) = (self.columns.start, self.columns.len());
                let to = self.out_rows.map_or(x + row, |rows| rows[x + row]);
                finish::<S>(&self.shape, &self.operands, out.add(row * rows), to, column, columns);
            }
        }
    }
}

/// Two tiles of weight rows times one or two tiles of `x`, over `steps` tiles of k.
struct TileBlock {
    left: *const f32,
    left_stride: usize,
    right: *const f32,
    right_stride: usize,
    steps: usize,
    sums: *mut f32,
    /// Whether the products are added to the sums.
    adds: bool,
    /// Two lines from here on are fetched per step, `fetched` bytes apart.
    fetch: *const u8,
    fetched: usize,
}

impl TileBlock {
    /// With two tiles of `x`.
    ///
    /// # Safety
    /// The tiles are there, and tiles are [configured](configure).
    #[inline(always)]
    unsafe fn wide(self) {
        // SAFETY: the caller's promise; a prefetch never faults.
        unsafe {
            asm!(
                "test {adds}, {adds}",
                "jz 2f",
                "tileloadd tmm0, [{sums} + {line}]",
                "tileloadd tmm1, [{sums} + {line} + 1024]",
                "tileloadd tmm2, [{sums} + {line} + 2048]",
                "tileloadd tmm3, [{sums} + {line} + 3072]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm4, [{left} + {line}]",
                "tileloadd tmm6, [{right} + {line}]",
                "prefetcht1 [{fetch}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right2} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{left2} + {line}]",
                "prefetcht1 [{fetch} + 64]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 1024",
                "add {left2}, 1024",
                "add {right}, 1024",
                "add {right2}, 1024",
                "add {fetch}, {fetched}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{sums} + {line}], tmm0",
                "tilestored [{sums} + {line} + 1024], tmm1",
                "tilestored [{sums} + {line} + 2048], tmm2",
                "tilestored [{sums} + {line} + 3072], tmm3",
                adds = in(reg) usize::from(self.adds),
                sums = in(reg) self.sums,
                line = in(reg) 64usize,
                left = inout(reg) self.left => _,
                left2 = inout(reg) self.left.byte_add(self.left_stride) => _,
                right = inout(reg) self.right => _,
                right2 = inout(reg) self.right.byte_add(self.right_stride) => _,
                fetch = inout(reg) self.fetch => _,
                fetched = in(reg) self.fetched,
                steps = inout(reg) self.steps => _,
                options(nostack),
            );
        }
    }

    /// With one tile of `x`.
    ///
    /// # Safety
    /// As for [`wide`](Self::wide).
    #[inline(always)]
    unsafe fn narrow(self) {
        // SAFETY: the caller's promise; a prefetch never faults.
        unsafe {
            asm!(
                "test {adds}, {adds}",
                "jz 2f",
                "tileloadd tmm0, [{sums} + {line}]",
                "tileloadd tmm2, [{sums} + {line} + 2048]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm2",
                "3:",
                "tileloadd tmm6, [{right} + {line}]",
                "tileloadd tmm4, [{left} + {line}]",
                "prefetcht1 [{fetch}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{left2} + {line}]",
                "prefetcht1 [{fetch} + 64]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "add {left}, 1024",
                "add {left2}, 1024",
                "add {right}, 1024",
                "add {fetch}, {fetched}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{sums} + {line}], tmm0",
                "tilestored [{sums} + {line} + 2048], tmm2",
                adds = in(reg) usize::from(self.adds),
                sums = in(reg) self.sums,
                line = in(reg) 64usize,
                left = inout(reg) self.left => _,
                left2 = inout(reg) self.left.byte_add(self.left_stride) => _,
                right = inout(reg) self.right => _,
                fetch = inout(reg) self.fetch => _,
                fetched = in(reg) self.fetched,
                steps = inout(reg) self.steps => _,
                options(nostack),
            );
        }
    }
}

/// The configuration of eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIGURATION: Configuration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        (row_bytes[tile], rows[tile]) = (64, 16);
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// Makes the tiles of this thread usable.
///
/// # Safety
/// The processor has tiles and the system lets this process use them.
#[inline(always)]
unsafe fn configure() {
    // SAFETY: the caller's promise; no code of the compiler uses tiles.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, preserves_flags)) }
}

/// Gives the tiles back, so that the system need not save them.
///
/// # Safety
/// As for [`configure`].
#[inline(always)]
unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}
