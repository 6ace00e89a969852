//! The inside of a KV page, and moving rows in and out of it.
//!
//! A page holds, for each KV head, `page_tokens * head_dim` elements, laid out as the panel that
//! attention multiplies with ([`super::panel`]): words of two neighbours along the contraction where
//! the dtype has 16 bits. Keys contract over the head's dimensions, values over tokens:
//!
//! - keys: word row = pair of dimensions, column = token;
//! - values: word row = pair of tokens, column = dimension.
//!
//! Where the contraction is odd, or the dtype is f32, a word row is one dimension or one token. So it is with
//! codes of eight bits, behind which a block has the scale of each token.
//!
//! Keys that contain their values are stored as keys alone; attention copies their values out of them.

use super::elementwise::convert_row;
use super::{KernelWorker, OperandSpan};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::scaled::SCALE_BYTES;
use mixfleet_hal::{DType, Error, Result};

/// Shape and memory of a layer's keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagedKv {
    pub(crate) k: OperandSpan,
    pub(crate) v: OperandSpan,
    pub(crate) dtype: DType,
    pub(crate) page_tokens: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Length of a value.
    pub(crate) value_dim: usize,
    /// Whether values are the first numbers of keys; `v` is then `k`.
    pub(crate) latent: bool,
    /// What scores are multiplied by.
    pub(crate) scale: f32,
    /// Soft cap of scores.
    pub(crate) cap: Option<f32>,
}

impl PagedKv {
    /// Rows of a token.
    fn units(&self) -> usize {
        if self.latent { self.kv_heads } else { 2 * self.kv_heads }
    }

    /// Whether a row of a token is a key, and its head.
    fn unit(&self, unit: usize) -> (bool, usize) {
        if self.latent { (true, unit) } else { (unit.is_multiple_of(2), unit / 2) }
    }

    fn size(&self) -> usize {
        to_usize(self.dtype.size_bytes())
    }

    /// Returns the bytes of one head's part of a page.
    pub(crate) fn block_bytes(&self) -> usize {
        self.page_tokens * head_bytes(self.dtype, self.head_dim)
    }

    /// Returns where in a block the scale of a token is.
    pub(crate) fn scale_at(&self, token: usize) -> usize {
        self.page_tokens * self.head_dim + token * SCALE_BYTES
    }

    /// Returns the number of pages that both keys and values have.
    pub(crate) fn pages(&self) -> usize {
        let page_bytes = self.block_bytes() * self.kv_heads;
        self.k.bytes.min(self.v.bytes).checked_div(page_bytes).unwrap_or(0)
    }

    /// Whether key words hold two dimensions.
    pub(crate) fn k_paired(&self) -> bool {
        self.size() == 2 && self.head_dim.is_multiple_of(2)
    }

    /// Whether value words hold two tokens.
    pub(crate) fn v_paired(&self) -> bool {
        self.size() == 2 && self.page_tokens.is_multiple_of(2)
    }

    /// Returns the index of key element (token, dim) within a head's block.
    pub(crate) fn k_index(&self, token: usize, dim: usize) -> usize {
        if self.k_paired() {
            (dim / 2 * self.page_tokens + token) * 2 + dim % 2
        } else {
            dim * self.page_tokens + token
        }
    }

    /// Returns the index of value element (token, dim) within a head's block.
    pub(crate) fn v_index(&self, token: usize, dim: usize) -> usize {
        if self.v_paired() {
            (token / 2 * self.head_dim + dim) * 2 + token % 2
        } else {
            token * self.head_dim + dim
        }
    }

    /// Returns page and offset of a slot.
    fn place(&self, slot: u32) -> Result<(usize, usize)> {
        let (page, offset) = (slot as usize / self.page_tokens, slot as usize % self.page_tokens);
        if page >= self.pages() {
            let slots = self.pages() * self.page_tokens;
            return Err(Error::invalid(format!("slot {slot}, but the pool has {slots} slots")));
        }
        Ok((page, offset))
    }
}

/// Bytes of a head of one token, with its scale if it has one.
pub(crate) fn head_bytes(dtype: DType, head_dim: usize) -> usize {
    let scale = if dtype.is_scaled() { SCALE_BYTES } else { 0 };
    head_dim * to_usize(dtype.size_bytes()) + scale
}

/// Copies element `from[i * from_stride]` to `to[i * to_stride]`, strides in elements of `T`.
///
/// # Safety
/// All elements exist; no overlap.
#[inline(always)]
unsafe fn strided<T: Copy>(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize, count: usize) {
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    for i in 0..count {
        // SAFETY: the caller's promise.
        unsafe { to.add(i * to_stride).write_unaligned(from.add(i * from_stride).read_unaligned()) };
    }
}

/// The direction in which rows are copied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyDirection {
    IntoPool,
    OutOfPool,
}

impl PagedKv {
    /// Copies one head's key or value of one token between its page and a dense row of the same dtype.
    ///
    /// # Safety
    /// The pages are locked as `way` needs; `page`, `offset` and `head` are in range; `row` holds
    /// [`head_bytes`].
    unsafe fn move_row(
        &self,
        keys: bool,
        page: usize,
        offset: usize,
        head: usize,
        row: *mut u8,
        way: CopyDirection,
    ) {
        let pool = if keys { self.k } else { self.v };
        let block = pool.start.wrapping_add((page * self.kv_heads + head) * self.block_bytes());
        let size = self.size();
        let paired_keys = keys && self.k_paired();
        let (first, stride) = match (keys, paired_keys) {
            (true, true) => (offset * 2, self.page_tokens),
            (true, false) => (offset, self.page_tokens),
            (false, _) => (self.v_index(offset, 0), if self.v_paired() { 2 } else { 1 }),
        };
        let place = block.wrapping_add(first * size);
        // a word of two dimensions moves as one u32
        let (count, wide) = if paired_keys { (self.head_dim / 2, true) } else { (self.head_dim, size == 4) };
        let (from, from_stride, to, to_stride) = match way {
            CopyDirection::IntoPool => (row.cast_const(), 1, place, stride),
            CopyDirection::OutOfPool => (place.cast_const(), stride, row, 1),
        };
        // SAFETY: the caller's promise; the indices above stay inside the block.
        unsafe {
            if self.dtype.is_scaled() {
                strided::<u8>(from, from_stride, to, to_stride, count);
                let (scale, stored) = (row.add(count), block.add(self.scale_at(offset)));
                match way {
                    CopyDirection::IntoPool => scale.copy_to_nonoverlapping(stored, SCALE_BYTES),
                    CopyDirection::OutOfPool => stored.copy_to_nonoverlapping(scale, SCALE_BYTES),
                }
            } else if wide {
                strided::<u32>(from, from_stride, to, to_stride, count);
            } else {
                strided::<u16>(from, from_stride, to, to_stride, count);
            }
        }
    }
}

/// Dense rows outside the pool: of token `t` and head `h`, keys start at head `t * per_token + h` of `k` and
/// values `v_first` heads behind that of `v`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense {
    pub(crate) k: OperandSpan,
    pub(crate) v: OperandSpan,
    pub(crate) dtype: DType,
    /// Heads between a token's row and the next token's.
    pub(crate) per_token: usize,
    /// Heads between a token's first key and its first value within `v`.
    pub(crate) v_first: usize,
}

impl Dense {
    fn row(&self, keys: bool, token: usize, head: usize, head_dim: usize) -> *mut u8 {
        let (span, first) = if keys { (self.k, 0) } else { (self.v, self.v_first) };
        let at = (token * self.per_token + first + head) * head_bytes(self.dtype, head_dim);
        span.at(DType::I8, at) // a byte
    }
}

/// Stores dense rows at their slots. Work is split by head, so that two tokens with the same slot are handled
/// by one worker and the later token wins.
pub(crate) fn store(
    worker: &mut KernelWorker<'_>,
    pools: &PagedKv,
    dense: &Dense,
    slots: OperandSpan,
    tokens: usize,
) -> Result<()> {
    let head_dim = pools.head_dim;
    // a row in the KV dtype, behind the words that `convert_row` may use
    let mut row = vec![0u8; head_bytes(pools.dtype, head_dim)];
    for unit in worker.share(pools.units()) {
        let (keys, head) = pools.unit(unit);
        for token in 0..tokens {
            // SAFETY: `slots` holds `tokens` elements.
            let (page, offset) =
                pools.place(unsafe { slots.u32(token) }).map_err(|e| e.context("kv slots"))?;
            let from = dense.row(keys, token, head, head_dim);
            convert_row(worker, from, dense.dtype, row.as_mut_ptr(), pools.dtype, head_dim);
            // SAFETY: `PagedKv::place` checked the slot; this worker alone writes this head.
            unsafe { pools.move_row(keys, page, offset, head, row.as_mut_ptr(), CopyDirection::IntoPool) };
        }
    }
    Ok(())
}

/// Gathers slots into dense rows.
pub(crate) fn gather(
    worker: &mut KernelWorker<'_>,
    pools: &PagedKv,
    dense: &Dense,
    slots: OperandSpan,
    tokens: usize,
) -> Result<()> {
    let head_dim = pools.head_dim;
    let mut row = vec![0u8; head_bytes(pools.dtype, head_dim)];
    for token in worker.share(tokens) {
        // SAFETY: `slots` holds `tokens` elements.
        let (page, offset) = pools.place(unsafe { slots.u32(token) }).map_err(|e| e.context("kv slots"))?;
        for unit in 0..pools.units() {
            let (keys, head) = pools.unit(unit);
            // SAFETY: `PagedKv::place` checked the slot.
            unsafe { pools.move_row(keys, page, offset, head, row.as_mut_ptr(), CopyDirection::OutOfPool) };
            let to = dense.row(keys, token, head, head_dim);
            convert_row(worker, row.as_ptr(), pools.dtype, to, dense.dtype, head_dim);
        }
    }
    Ok(())
}
