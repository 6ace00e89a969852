//! Keys and values of one page as panels: in place if whole vectors fit, or else as a copy.

use super::{SEGMENT, Tile};
use crate::kernels::kv::PagedKv;
use crate::kernels::round_up;
use crate::kernels::simd::Simd;
use mixfleet_hal::{DType, Error, Result, scaled};
use std::ops::Range;

/// Some keys of one page, as panels.
#[derive(Clone, Copy)]
pub(super) struct PageSegment {
    /// Keys: row = dimension word, column = token.
    pub(super) k: *const u8,
    pub(super) k_stride: usize,
    /// Values: row = token word, column = dimension.
    pub(super) v: *const u8,
    pub(super) v_stride: usize,
    pub(super) tokens: usize,
}

/// The keys and values of one page, from a token on.
#[derive(Clone, Copy)]
struct PageBlock {
    k: *const u8,
    v: *const u8,
    /// The token's place in the page.
    offset: usize,
}

/// A matrix of f32 in scratch.
#[derive(Clone, Copy)]
struct WidePanel {
    start: *mut f32,
    stride: usize,
}

/// Returns the keys of one page from `token` on. Values outside `visible` become zeros in a copy.
#[inline(always)]
pub(super) unsafe fn segment<S: Simd>(
    task: &Tile<'_>,
    token: usize,
    step: usize,
    visible: &Range<usize>,
    direct: bool,
    spare: &mut *mut f32,
) -> Result<PageSegment> {
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
    let used = visible.start.max(token) - token..visible.end.min(token + tokens) - token;
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
        Ok(PageSegment { k: k.add(offset * 4), k_stride: pools.page_tokens * 4, v, v_stride, tokens })
    }
}

/// Prefetches the keys and values of the page that begins at `token`, if one does.
#[inline(always)]
pub(super) unsafe fn prefetch<S: Simd>(task: &Tile<'_>, token: usize, high: usize) {
    let pools = task.pools;
    let index = token / pools.page_tokens;
    if token >= high || !token.is_multiple_of(pools.page_tokens) || index >= task.table.bytes / 4 {
        return;
    }
    // SAFETY: the table holds more than `index` entries. The page is not checked yet: a prefetch of a
    // wrong address does nothing.
    unsafe {
        let page = task.table.u32(index) as usize;
        let block = (page * pools.kv_heads + task.kv_head).wrapping_mul(pools.block_bytes());
        for line in (0..pools.block_bytes().min(16 << 10)).step_by(64) {
            S::prefetch(pools.k.start.wrapping_add(block.wrapping_add(line)));
            S::prefetch(pools.v.start.wrapping_add(block.wrapping_add(line)));
        }
    }
}

/// A copy of a segment's values with zeros for the tokens that are not `used`.
#[inline(always)]
unsafe fn trimmed(
    pools: &PagedKv,
    v: *const u8,
    tokens: usize,
    used: Range<usize>,
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
    pools: &PagedKv,
    k: *const u8,
    v: *const u8,
    offset: usize,
    tokens: usize,
    used: Range<usize>,
    spare: *mut f32,
) -> PageSegment {
    let (columns, dims) = (round_up(tokens, S::LANES), round_up(pools.value_dim, S::LANES));
    let values = spare.wrapping_add(pools.head_dim * SEGMENT);
    // SAFETY: all indices are inside the block; spare holds two padded panels.
    unsafe {
        std::ptr::write_bytes(spare, 0, pools.head_dim * columns);
        std::ptr::write_bytes(values, 0, tokens * dims);
        if pools.dtype.is_scaled() {
            let block = PageBlock { k, v, offset };
            let keys = WidePanel { start: spare, stride: columns };
            let values = WidePanel { start: values, stride: dims };
            match pools.dtype {
                DType::I8 => decoded(pools, DType::I8, block, used, keys, values),
                other => decoded(pools, other, block, used, keys, values),
            }
        } else {
            for t in used {
                for d in 0..pools.head_dim {
                    *spare.add(d * columns + t) = element(pools.dtype, k, pools.k_index(offset + t, d));
                }
                for d in 0..pools.value_dim {
                    *values.add(t * dims + d) = match pools.latent {
                        true => *spare.add(d * columns + t),
                        false => element(pools.dtype, v, pools.v_index(offset + t, d)),
                    };
                }
            }
        }
    }
    PageSegment { k: spare.cast(), k_stride: columns * 4, v: values.cast(), v_stride: dims * 4, tokens }
}

/// Writes the codes of some tokens of a block times their scales into rows of keys and of values.
#[inline(always)]
unsafe fn decoded(
    pools: &PagedKv,
    dtype: DType,
    block: PageBlock,
    used: Range<usize>,
    keys: WidePanel,
    values: WidePanel,
) {
    let PageBlock { k, v, offset } = block;
    let scale = |block: *const u8, t: usize| {
        // SAFETY: the caller's tokens are inside the block.
        unsafe { block.add(pools.scale_at(offset + t)).cast::<f32>().read_unaligned() }
    };
    let count = used.len();
    let mut scales = [0f32; SEGMENT];
    for (i, to) in scales[..count].iter_mut().enumerate() {
        *to = scale(k, used.start + i);
    }
    // SAFETY: all indices are inside the block; keys and values hold the caller's rows.
    unsafe {
        for d in 0..pools.head_dim {
            let codes = std::slice::from_raw_parts(k.add(pools.k_index(offset + used.start, d)), count);
            let to = std::slice::from_raw_parts_mut(keys.start.add(d * keys.stride + used.start), count);
            for ((to, &code), scale) in to.iter_mut().zip(codes).zip(&scales) {
                *to = scaled::number(dtype, code) * scale;
            }
        }
        for t in used {
            let codes = std::slice::from_raw_parts(v.add(pools.v_index(offset + t, 0)), pools.head_dim);
            let to = std::slice::from_raw_parts_mut(values.start.add(t * values.stride), pools.head_dim);
            let scale = scale(v, t);
            for (to, &code) in to.iter_mut().zip(codes) {
                *to = scaled::number(dtype, code) * scale;
            }
        }
    }
}

/// One element, widened.
#[inline(always)]
unsafe fn element(dtype: DType, block: *const u8, index: usize) -> f32 {
    // SAFETY: the caller's index is inside the block.
    unsafe {
        match dtype {
            DType::Bf16 => half::bf16::from_bits(block.cast::<u16>().add(index).read_unaligned()).to_f32(),
            DType::F16 => half::f16::from_bits(block.cast::<u16>().add(index).read_unaligned()).to_f32(),
            DType::F32 | DType::U32 | DType::F8E4m3 | DType::I8 => {
                block.cast::<f32>().add(index).read_unaligned()
            }
        }
    }
}
