//! Attention over pages: one tile of query rows against a range of keys, with the running maximum and
//! sum of the online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
//!
//! A tile's rows are queries that share a KV head, so each page is read once for all of them. Where
//! queries and pool are bf16, `q . k` uses the bf16 dot product (its products are exact in f32). So does
//! `p . v` in prefill, with weights rounded to bf16: each errs by 2^-9 relative, as in matrix units. In
//! decode the weights stay f32, so that parts recombine to 1e-5. Keys outside a row's range have probability zero, and values outside the
//! tile's range are never multiplied: what lies in a page's unused slots does not matter, be it NaN.

pub(crate) mod decode;
pub(crate) mod merge;
pub(crate) mod prefill;

use super::convert::{load, load_part};
use super::kv::Pools;
use super::panel::{DotBf16, Left, PairBf16, PairF16, Panel, WordF32, tile, tile_rows, with_rows};
use super::simd::{Simd, Task, exp};
use super::{Span, round_up};
use crate::isa::Isa;
use mixfleet_hal::{DType, Error, Result};

/// Keys per pass of the softmax: scores of 12 rows then take 12 KiB.
const BLOCK: usize = 256;
/// Most keys of one page that are handled at a time.
const SEGMENT: usize = 64;
/// Most rows of a tile at any level.
pub(crate) const ROWS_MAX: usize = 12;

/// One tile's work.
pub(crate) struct Tile<'a> {
    pub(crate) pools: &'a Pools,
    /// Page of each of the sequence's tokens: `pages_max` entries.
    pub(crate) table: Span,
    pub(crate) kv_head: usize,
    /// Visible keys of each row; at most [`ROWS_MAX`] rows.
    pub(crate) ranges: &'a [(usize, usize)],
    /// Dtype of the queries.
    pub(crate) x: DType,
    /// First element of each row's query.
    pub(crate) queries: &'a [*const u8],
    /// Probabilities may be rounded to the queries' dtype.
    pub(crate) round_weights: bool,
}

/// A tile's scratch. All rows have the stride that the name says.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    /// Queries, packed: `[head_dim words, rows]`.
    q: *mut f32,
    /// Scores, then probabilities: `[rows, BLOCK]`.
    scores: *mut f32,
    /// Un-normalised output: `[rows, head_dim padded]`.
    pub(crate) out: *mut f32,
    /// Two segments of keys and of values.
    spare: *mut f32,
}

impl Room {
    /// Words that a tile needs at any level.
    pub(crate) fn words(pools: &Pools) -> usize {
        let dim = round_up(pools.head_dim, 16);
        ROWS_MAX * (2 * dim + BLOCK) + 3 * SEGMENT * dim
    }

    /// Lays out `at`, which has [`Room::words`] words.
    pub(crate) fn new(at: *mut f32, pools: &Pools) -> Self {
        let dim = round_up(pools.head_dim, 16);
        let scores = at.wrapping_add(ROWS_MAX * dim);
        let out = scores.wrapping_add(ROWS_MAX * BLOCK);
        Room { q: at, scores, out, spare: out.wrapping_add(ROWS_MAX * dim) }
    }
}

/// The running maximum and sum of each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stats {
    pub(crate) max: [f32; ROWS_MAX],
    pub(crate) sum: [f32; ROWS_MAX],
}

/// Some keys of one page, as panels.
#[derive(Clone, Copy)]
struct Segment {
    /// Keys: row = dimension word, column = token.
    k: *const u8,
    k_stride: usize,
    /// Values: row = token word, column = dimension.
    v: *const u8,
    v_stride: usize,
    tokens: usize,
}

/// Runs a tile: `room.out[row]`, of `head_dim` words padded to whole vectors of `isa`, becomes the
/// un-normalised output.
///
/// # Safety
/// Pools and table are locked for reading; queries hold `head_dim` elements.
pub(crate) unsafe fn attend(isa: Isa, tile: &Tile<'_>, room: Room) -> Result<Stats> {
    // SAFETY: the caller's promise.
    unsafe { isa.run(Attend { tile, room }) }
}

/// [`attend`] as a task: compiled once per level for both kinds of attention.
struct Attend<'a> {
    tile: &'a Tile<'a>,
    room: Room,
}

impl Task for Attend<'_> {
    type Out = Result<Stats>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Result<Stats> {
        let (task, room, pools) = (self.tile, self.room, self.tile.pools);
        // the panels of a page can be used in place when whole vectors fit its rows
        let direct = pools.page_tokens.is_multiple_of(16) && pools.head_dim.is_multiple_of(16);
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
                DType::F32 | DType::U32 => {
                    with_rows!(S, rows, run::<S, WordF32, WordF32>(task, room, direct))
                }
            }
        }
    }
}

/// Queries as words `[head_dim words, rows]`; rows that do not exist are zero.
#[inline(always)]
unsafe fn pack_queries<S: Simd>(task: &Tile<'_>, to: *mut f32, rows: usize, dot: bool) {
    let dim = task.pools.head_dim;
    let words = if dot { dim / 2 } else { dim };
    let size = task.x.size_bytes() as usize;
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

/// All blocks of keys in order.
#[inline(always)]
unsafe fn run<S: Simd, K: Panel<S>, V: Panel<S>, const M: usize>(
    task: &Tile<'_>,
    room: Room,
    direct: bool,
) -> Result<Stats> {
    let pools = task.pools;
    let dim = round_up(pools.head_dim, S::LANES);
    let (low, high) = union(task.ranges);
    let mut stats = Stats { max: [f32::NEG_INFINITY; ROWS_MAX], sum: [0.0; ROWS_MAX] };
    // SAFETY: room is laid out for these shapes.
    unsafe {
        std::ptr::write_bytes(room.out, 0, M * dim);
        let step = pools.page_tokens.min(SEGMENT);
        let mut token = low - (low % pools.page_tokens) % step;
        while token < high {
            let first = token;
            let mut segments =
                [Segment { k: room.q.cast(), k_stride: 0, v: room.q.cast(), v_stride: 0, tokens: 0 };
                    BLOCK / 16];
            let (mut count, mut spare) = (0, room.spare);
            while token < high
                && token - first + step <= BLOCK
                && count < segments.len()
                && (direct || count == 0)
            {
                let segment = segment::<S>(task, token, step, (low, high), direct, &mut spare)?;
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

/// The keys that any row sees.
fn union(ranges: &[(usize, usize)]) -> (usize, usize) {
    let visible = ranges.iter().filter(|(a, b)| a < b);
    let low = visible.clone().map(|r| r.0).min().unwrap_or(0);
    (low, visible.map(|r| r.1).max().unwrap_or(0))
}

/// The keys of one page from `token` on. Values outside `low..high` become zeros in a copy.
#[inline(always)]
unsafe fn segment<S: Simd>(
    task: &Tile<'_>,
    token: usize,
    step: usize,
    (low, high): (usize, usize),
    direct: bool,
    spare: &mut *mut f32,
) -> Result<Segment> {
    let pools = task.pools;
    let offset = token % pools.page_tokens;
    let tokens = step.min(pools.page_tokens - offset);
    let index = token / pools.page_tokens;
    if index >= task.table.bytes / 4 {
        return Err(Error::invalid(format!(
            "attention: key {token} lies beyond the page table's {} pages",
            task.table.bytes / 4
        )));
    }
    // SAFETY: the table holds more than `index` entries.
    let page = unsafe { task.table.u32(index) } as usize;
    if page >= pools.pages() {
        return Err(Error::invalid(format!(
            "attention: page {page}, but the pool has {} pages",
            pools.pages()
        )));
    }
    let block = (page * pools.kv_heads + task.kv_head) * pools.block_bytes();
    let (k, v) = (pools.k.start.wrapping_add(block), pools.v.start.wrapping_add(block));
    let used = low.max(token) - token..high.min(token + tokens) - token;
    // SAFETY: the page is inside the pool; spare has room for the copies that a block can need.
    unsafe {
        if !direct {
            return Ok(widened::<S>(pools, k, v, offset, tokens, used, *spare));
        }
        let per_word = if pools.v_paired() { 2 } else { 1 };
        let v_stride = pools.head_dim * 4;
        let mut v = v.add(offset / per_word * v_stride).cast_const();
        if used.len() < tokens {
            v = trimmed(pools, v, tokens, used, *spare);
            *spare = spare.add(SEGMENT * pools.head_dim);
        }
        Ok(Segment { k: k.add(offset * 4), k_stride: pools.page_tokens * 4, v, v_stride, tokens })
    }
}

/// A copy of a segment's values with zeros for the tokens that are not `used`.
#[inline(always)]
unsafe fn trimmed(
    pools: &Pools,
    v: *const u8,
    tokens: usize,
    used: std::ops::Range<usize>,
    spare: *mut f32,
) -> *const u8 {
    let per_word = if pools.v_paired() { 2 } else { 1 };
    let row_words = pools.head_dim;
    // SAFETY: `tokens / per_word` word rows exist on both sides.
    unsafe {
        for row in 0..tokens / per_word {
            let (from, to) = (v.cast::<u32>().add(row * row_words), spare.cast::<u32>().add(row * row_words));
            let mask = (0..per_word)
                .filter(|i| used.contains(&(row * per_word + i)))
                .fold(0u32, |mask, i| mask | if per_word == 1 { u32::MAX } else { 0xFFFF << (16 * i) });
            for i in 0..row_words {
                *to.add(i) = from.add(i).read_unaligned() & mask;
            }
        }
    }
    spare.cast()
}

/// A segment of a page whose shape does not fit vectors: both panels widened to f32 and padded.
#[inline(always)]
unsafe fn widened<S: Simd>(
    pools: &Pools,
    k: *const u8,
    v: *const u8,
    offset: usize,
    tokens: usize,
    used: std::ops::Range<usize>,
    spare: *mut f32,
) -> Segment {
    let (columns, dims) = (round_up(tokens, S::LANES), round_up(pools.head_dim, S::LANES));
    let values = spare.wrapping_add(pools.head_dim * SEGMENT);
    // SAFETY: all indices are inside the block; spare holds two padded panels.
    unsafe {
        std::ptr::write_bytes(spare, 0, pools.head_dim * columns);
        std::ptr::write_bytes(values, 0, tokens * dims);
        for t in used {
            for d in 0..pools.head_dim {
                *spare.add(d * columns + t) = element(pools.dtype, k, pools.k_index(offset + t, d));
                *values.add(t * dims + d) = element(pools.dtype, v, pools.v_index(offset + t, d));
            }
        }
    }
    Segment { k: spare.cast(), k_stride: columns * 4, v: values.cast(), v_stride: dims * 4, tokens }
}

/// One element, widened.
#[inline(always)]
unsafe fn element(dtype: DType, block: *const u8, index: usize) -> f32 {
    // SAFETY: the caller's index is inside the block.
    unsafe {
        match dtype {
            DType::Bf16 => half::bf16::from_bits(block.cast::<u16>().add(index).read_unaligned()).to_f32(),
            DType::F16 => half::f16::from_bits(block.cast::<u16>().add(index).read_unaligned()).to_f32(),
            DType::F32 | DType::U32 => block.cast::<f32>().add(index).read_unaligned(),
        }
    }
}

/// `scores[row][column..] = q[row] . k` for a segment's keys.
#[inline(always)]
unsafe fn scores<S: Simd, K: Panel<S>, const M: usize>(
    segment: &Segment,
    room: Room,
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

/// Turns scores of `count` keys from `first` on into probabilities relative to the rows' new maxima;
/// returns the factors that bring what was summed before to the same base.
#[inline(always)]
unsafe fn softmax<S: Simd, V: Panel<S>, const M: usize>(
    task: &Tile<'_>,
    scores: *mut f32,
    first: usize,
    count: usize,
    stats: &mut Stats,
) -> [f32; M] {
    let scale = 1.0 / (task.pools.head_dim as f32).sqrt();
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
            for i in (0..a).chain(b..columns) {
                *row_scores.add(i) = f32::NEG_INFINITY;
            }
            let old = stats.max[row];
            let new = row_max::<S>(row_scores, columns, scale, old);
            // all scores are -inf: nothing to see, and no base to subtract
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
                // pairs of bf16, behind the place that was just read
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

/// `e^x` by the vector function, so that every path rounds alike.
#[inline(always)]
pub(crate) unsafe fn scalar_exp<S: Simd>(x: f32) -> f32 {
    // SAFETY: the level is present by the caller's promise; the array holds LANES lanes.
    unsafe {
        let mut lanes = [0f32; 16];
        S::store(lanes.as_mut_ptr(), exp::<S>(S::splat(x)));
        lanes[0]
    }
}

/// `out = out * alpha + p . v` over a block's segments.
#[inline(always)]
unsafe fn values<S: Simd, V: Panel<S>, const M: usize>(
    segments: &[Segment],
    room: Room,
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
    segments: &[Segment],
    room: Room,
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
