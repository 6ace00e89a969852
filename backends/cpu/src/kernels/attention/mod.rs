//! Attention over pages: one tile of query rows against a range of keys, with the running maximum and sum of
//! the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
//!
//! A tile's rows are queries that share a KV head, so each page is read once for all of them. Where queries
//! and pool are bf16, `q . k` uses the bf16 dot product (its products are exact in f32). So does `p . v` in
//! prefill, with weights rounded to bf16: each errs by 2^-9 relative, as in matrix units. In decode the
//! weights stay f32, so that parts recombine to 1e-5. Keys outside a row's range have probability zero, and
//! values outside the tile's range are never multiplied, so unused slots of a page may hold anything, even
//! NaN. Codes of eight bits become f32 in a copy, which loses nothing.

pub(crate) mod decode;
pub(crate) mod merge;
mod page;
pub(crate) mod prefill;
mod softmax;

use super::convert::{load, load_part};
use super::kv::PagedKv;
use super::panel::{DotBf16, Left, PairBf16, PairF16, Panel, WordF32, tile, tile_rows, with_rows};
use super::simd::{Simd, SimdTask};
use super::{OperandSpan, round_up};
use crate::isa::Isa;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, Result};
use page::{PageSegment, prefetch, segment};
pub(crate) use softmax::scalar_exp;
use softmax::softmax;

/// Keys per pass of the softmax: scores of 12 rows then take 12 KiB.
const BLOCK: usize = 256;
/// Maximum number of keys of one page handled at a time.
const SEGMENT: usize = 64;
/// Maximum number of rows in a tile, at any level.
pub(crate) const ROWS_MAX: usize = 12;

/// One tile's work.
pub(crate) struct Tile<'a> {
    pub(crate) pools: &'a PagedKv,
    /// Page of each of the sequence's tokens: `pages_max` entries.
    pub(crate) table: OperandSpan,
    pub(crate) kv_head: usize,
    /// Visible keys of each row; at most [`ROWS_MAX`] rows.
    pub(crate) ranges: &'a [(usize, usize)],
    /// Dtype of the queries.
    pub(crate) x: DType,
    /// First element of each row's query.
    pub(crate) queries: &'a [*const u8],
    /// Whether to prefetch the next page, since pages come from memory and not from a cache.
    pub(crate) prefetch: bool,
    /// Whether probabilities may be rounded to the queries' dtype.
    pub(crate) round_weights: bool,
}

/// Scratch memory of a tile; all rows have the stride given in the name.
#[derive(Clone, Copy)]
pub(crate) struct TileScratch {
    /// Queries, packed: `[head_dim words, rows]`.
    q: *mut f32,
    /// Scores, then probabilities: `[rows, BLOCK]`.
    scores: *mut f32,
    /// Un-normalised output: `[rows, value_dim padded]`.
    pub(crate) out: *mut f32,
    /// Two segments of keys and of values.
    spare: *mut f32,
}

impl TileScratch {
    /// Returns the number of words that a tile needs at any level.
    pub(crate) fn words(pools: &PagedKv) -> usize {
        let dim = round_up(pools.head_dim, 16);
        ROWS_MAX * (2 * dim + BLOCK) + 3 * SEGMENT * dim
    }

    /// Lays out the memory at `at`, which has [`TileScratch::words`] words.
    pub(crate) fn new(at: *mut f32, pools: &PagedKv) -> Self {
        let dim = round_up(pools.head_dim, 16);
        let scores = at.wrapping_add(ROWS_MAX * dim);
        let out = scores.wrapping_add(ROWS_MAX * BLOCK);
        TileScratch { q: at, scores, out, spare: out.wrapping_add(ROWS_MAX * dim) }
    }
}

/// The running maximum and sum of each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftmaxStats {
    pub(crate) max: [f32; ROWS_MAX],
    pub(crate) sum: [f32; ROWS_MAX],
}

/// Runs a tile: `room.out[row]`, of `value_dim` words padded to whole vectors of `isa`, becomes the
/// un-normalised output.
///
/// # Safety
/// Pools and table are locked for reading; queries hold `head_dim` elements.
pub(crate) unsafe fn attend(isa: Isa, tile: &Tile<'_>, room: TileScratch) -> Result<SoftmaxStats> {
    // SAFETY: the caller's promise.
    unsafe { isa.run(Attend { tile, room }) }
}

/// [`attend`] as a task, compiled once per level for both kinds of attention.
struct Attend<'a> {
    tile: &'a Tile<'a>,
    room: TileScratch,
}

impl SimdTask for Attend<'_> {
    type Out = Result<SoftmaxStats>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Result<SoftmaxStats> {
        let (task, room, pools) = (self.tile, self.room, self.tile.pools);
        // the panels of a page can be used in place if whole vectors fit its rows
        let fits = pools.page_tokens.is_multiple_of(16) && pools.head_dim.is_multiple_of(16);
        // values in keys lie across them, and codes have scales
        let direct = fits && !pools.latent && !pools.dtype.is_scaled();
        let dot = direct && S::DOT_BF16 && task.x == DType::Bf16 && pools.dtype == DType::Bf16;
        let rows = tile_rows::<S>(task.ranges.len());
        // a page that is copied is widened on the way
        let panels = if direct { pools.dtype } else { DType::F32 };
        // SAFETY: the caller's promise.
        unsafe {
            pack_queries::<S>(task, room.q, rows, dot);
            match panels {
                DType::Bf16 if dot && task.round_weights => {
                    with_rows!(S, rows, run::<S, DotBf16, DotBf16>(task, room, direct))
                }
                DType::Bf16 if dot => with_rows!(S, rows, run::<S, DotBf16, PairBf16>(task, room, direct)),
                DType::Bf16 => with_rows!(S, rows, run::<S, PairBf16, PairBf16>(task, room, direct)),
                DType::F16 => with_rows!(S, rows, run::<S, PairF16, PairF16>(task, room, direct)),
                DType::F32 | DType::U32 | DType::F8E4m3 | DType::I8 => {
                    with_rows!(S, rows, run::<S, WordF32, WordF32>(task, room, direct))
                }
            }
        }
    }
}

/// Packs queries as words `[head_dim words, rows]`, with zeros for rows that do not exist.
#[inline(always)]
unsafe fn pack_queries<S: Simd>(task: &Tile<'_>, to: *mut f32, rows: usize, dot: bool) {
    let dim = task.pools.head_dim;
    let words = if dot { dim / 2 } else { dim };
    let size = to_usize(task.x.size_bytes());
    // SAFETY: queries hold head_dim elements; `to` holds words * rows words.
    unsafe {
        std::ptr::write_bytes(to, 0, words * rows);
        for (row, &query) in task.queries.iter().enumerate() {
            if dot {
                for w in 0..words {
                    *to.add(w * rows + row) = query.cast::<f32>().add(w).read_unaligned();
                }
                continue;
            }
            let mut d = 0;
            while d < dim {
                let n = (dim - d).min(S::LANES);
                let at = query.add(d * size);
                let v = if n == S::LANES { load::<S>(task.x, at) } else { load_part::<S>(task.x, at, n) };
                let mut wide = [0f32; 16];
                S::store(wide.as_mut_ptr(), v);
                for (i, &value) in wide[..n].iter().enumerate() {
                    *to.add((d + i) * rows + row) = value;
                }
                d += S::LANES;
            }
        }
    }
}

/// Processes all blocks of keys in order.
#[inline(always)]
unsafe fn run<S: Simd, K: Panel<S>, V: Panel<S>, const M: usize>(
    task: &Tile<'_>,
    room: TileScratch,
    direct: bool,
) -> Result<SoftmaxStats> {
    let pools = task.pools;
    let dim = round_up(pools.value_dim, S::LANES);
    let (low, high) = union(task.ranges);
    let mut stats = SoftmaxStats { max: [f32::NEG_INFINITY; ROWS_MAX], sum: [0.0; ROWS_MAX] };
    // SAFETY: room is laid out for these shapes.
    unsafe {
        std::ptr::write_bytes(room.out, 0, M * dim);
        let step = pools.page_tokens.min(SEGMENT);
        let mut token = low - (low % pools.page_tokens) % step;
        while token < high {
            let first = token;
            let mut segments =
                [PageSegment { k: room.q.cast(), k_stride: 0, v: room.q.cast(), v_stride: 0, tokens: 0 };
                    BLOCK / 16];
            let (mut count, mut spare) = (0, room.spare);
            while token < high
                && token - first + step <= BLOCK
                && count < segments.len()
                && (direct || count == 0)
            {
                let segment = segment::<S>(task, token, step, &(low..high), direct, &mut spare)?;
                if task.prefetch && direct {
                    prefetch::<S>(task, token + segment.tokens, high);
                }
                scores::<S, K, M>(&segment, room, token - first, pools.head_dim);
                segments[count] = segment;
                count += 1;
                token += segment.tokens;
            }
            let alpha = softmax::<S, V, M>(task, room.scores, first, token - first, &mut stats);
            values::<S, V, M>(&segments[..count], room, &alpha, dim);
        }
    }
    Ok(stats)
}

/// Returns the range of keys that any row sees.
fn union(ranges: &[(usize, usize)]) -> (usize, usize) {
    let visible = ranges.iter().filter(|(a, b)| a < b);
    let low = visible.clone().map(|r| r.0).min().unwrap_or(0);
    (low, visible.map(|r| r.1).max().unwrap_or(0))
}

/// `scores[row][column..] = q[row] . k` for a segment's keys.
#[inline(always)]
unsafe fn scores<S: Simd, K: Panel<S>, const M: usize>(
    segment: &PageSegment,
    room: TileScratch,
    column: usize,
    head_dim: usize,
) {
    let left = Left { at: room.q, row_stride: 1, step_stride: M };
    let words = head_dim / K::PER_WORD;
    let mut c = 0;
    // SAFETY: the segment's rows hold `tokens` rounded up to LANES columns, and so do the scores.
    unsafe {
        while c < segment.tokens {
            let k = segment.k.add(c * 4);
            let to = room.scores.add(column + c);
            if segment.tokens - c > S::LANES {
                score_tile::<S, K, M, 2>(left, k, segment.k_stride, words, to);
                c += 2 * S::LANES;
            } else {
                score_tile::<S, K, M, 1>(left, k, segment.k_stride, words, to);
                c += S::LANES;
            }
        }
    }
}

/// # Safety
/// As for [`tile`]; `to` has `M` rows of `N` vectors at a stride of `BLOCK`.
#[inline(always)]
unsafe fn score_tile<S: Simd, K: Panel<S>, const M: usize, const N: usize>(
    left: Left,
    k: *const u8,
    stride: usize,
    words: usize,
    to: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; M];
        tile::<S, K, M, N>(&mut acc, left, k, stride, words);
        for (i, row) in acc.iter().enumerate() {
            for (j, v) in row.iter().enumerate() {
                S::store(to.add(i * BLOCK + j * S::LANES), *v);
            }
        }
    }
}

/// `out = out * alpha + p . v` over a block's segments.
#[inline(always)]
unsafe fn values<S: Simd, V: Panel<S>, const M: usize>(
    segments: &[PageSegment],
    room: TileScratch,
    alpha: &[f32; M],
    dim: usize,
) {
    let mut d = 0;
    // SAFETY: out has M rows of `dim` words, a multiple of LANES; value rows hold `dim` columns.
    unsafe {
        while d < dim {
            if dim - d > S::LANES {
                value_tile::<S, V, M, 2>(segments, room, alpha, dim, d);
                d += 2 * S::LANES;
            } else {
                value_tile::<S, V, M, 1>(segments, room, alpha, dim, d);
                d += S::LANES;
            }
        }
    }
}

/// # Safety
/// As for [`values`]; columns `d .. d + N * LANES` exist.
#[inline(always)]
unsafe fn value_tile<S: Simd, V: Panel<S>, const M: usize, const N: usize>(
    segments: &[PageSegment],
    room: TileScratch,
    alpha: &[f32; M],
    dim: usize,
    d: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; M];
        for (i, row) in acc.iter_mut().enumerate() {
            for (j, v) in row.iter_mut().enumerate() {
                *v = S::mul(S::load(room.out.add(i * dim + d + j * S::LANES)), S::splat(alpha[i]));
            }
        }
        let mut column = 0;
        for segment in segments {
            let left = Left {
                at: room.scores.add(column * V::STEPS / V::PER_WORD),
                row_stride: BLOCK,
                step_stride: 1,
            };
            let words = segment.tokens / V::PER_WORD;
            tile::<S, V, M, N>(&mut acc, left, segment.v.add(d * 4), segment.v_stride, words);
            column += segment.tokens;
        }
        for (i, row) in acc.iter().enumerate() {
            for (j, v) in row.iter().enumerate() {
                S::store(room.out.add(i * dim + d + j * S::LANES), *v);
            }
        }
    }
}
