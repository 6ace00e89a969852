//! Hashes of KV slots, which cover every byte that attention reads but are computed once per write.

use crate::digest::{decoded, mix, of_values};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, KvShape, Slice};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a buffer is divided into pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// Offset and length of the KV in its buffer.
    offset: u64,
    bytes: u64,
    row_bytes: u64,
    page_tokens: u64,
    dtype: DType,
    head_dim: u32,
}

impl Division {
    pub(crate) fn new(pool: &Slice, kv: KvShape) -> Self {
        Division {
            offset: pool.offset,
            bytes: pool.bytes,
            row_bytes: kv.row() * kv.dtype.size_bytes(),
            page_tokens: u64::from(kv.page_tokens),
            dtype: kv.dtype,
            head_dim: kv.head_dim,
        }
    }

    fn slots(&self) -> u64 {
        self.bytes / self.row_bytes.max(1)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.slots() / self.page_tokens.max(1)
    }
}

/// Cached hashes of the slots of paged KV. Vectors of zeros cost no memory until they are written.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) division: Division,
    /// A number unique to this value.
    stamp: u64,
    /// Hash per slot; 0 if unknown.
    hashes: Vec<u64>,
    /// Write count per page.
    writes: Vec<u64>,
    /// Stamp of the values that the sums belong to.
    partner: u64,
    /// Per page, the sum over its slots of the joint hash of key and value, and one more than the write
    /// counts of both pages that it is valid for.
    sums: Vec<u64>,
    valid: Vec<[u64; 2]>,
}

impl Slots {
    pub(crate) fn new(division: Division) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (slots, pages) = (to_usize(division.slots()), to_usize(division.pages()));
        Slots {
            division,
            stamp: NEXT.fetch_add(1, Ordering::Relaxed),
            hashes: vec![0; slots],
            writes: vec![0; pages],
            partner: 0,
            sums: vec![0; pages],
            valid: vec![[0; 2]; pages],
        }
    }

    /// Invalidates the hashes of a range of the buffer that was written.
    pub(crate) fn forget(&mut self, range: &Range<usize>) {
        let Division { offset, bytes, row_bytes, page_tokens, .. } = self.division;
        let start = (range.start as u64).max(offset);
        let end = (range.end as u64).min(offset + bytes);
        if start >= end || row_bytes == 0 {
            return;
        }
        let first = (start - offset) / row_bytes;
        let last = ((end - offset).div_ceil(row_bytes)).min(self.hashes.len() as u64);
        self.hashes[to_usize(first)..to_usize(last)].fill(0);
        let pages = first / page_tokens..last.div_ceil(page_tokens);
        self.writes[to_usize(pages.start)..to_usize(pages.end)].iter_mut().for_each(|writes| *writes += 1);
    }

    /// Returns the hash of `slot`, computing it from `buffer` unless it is known.
    fn hash(&mut self, buffer: &[u8], slot: u64) -> u64 {
        let known = self.hashes[to_usize(slot)];
        if known != 0 {
            return known;
        }
        let Division { offset, row_bytes, dtype, head_dim, .. } = self.division;
        let at = to_usize(offset + slot * row_bytes);
        let row = &buffer[at..at + to_usize(row_bytes)];
        let hash = match dtype.is_scaled() {
            true => of_values(0, DType::F32, &decoded(dtype, head_dim, row)),
            false => of_values(0, dtype, row),
        };
        let hash = hash.max(1);
        self.hashes[to_usize(slot)] = hash;
        hash
    }
}

/// The slots of keys and of values, with their bytes.
pub(crate) struct SlotPools<'a> {
    pub(crate) keys: (&'a mut Slots, &'a [u8]),
    /// None where keys contain them.
    pub(crate) values: Option<(&'a mut Slots, &'a [u8])>,
}

impl SlotPools<'_> {
    /// Returns the joint hash of the key and the value in `slot`.
    pub(crate) fn slot(&mut self, slot: u64) -> u64 {
        let key = self.keys.0.hash(self.keys.1, slot);
        let value = self.values.as_mut().map_or(key, |(slots, bytes)| slots.hash(bytes, slot));
        mix(key, value.rotate_left(32))
    }

    /// Returns the sum over the slots of `page`.
    fn page(&mut self, page: u64) -> u64 {
        let at = to_usize(page);
        let keys = &mut *self.keys.0;
        let (stamp, written) = match &self.values {
            Some((values, _)) => (values.stamp, values.writes[at]),
            None => (keys.stamp, keys.writes[at]),
        };
        if keys.partner != stamp {
            keys.partner = stamp;
            keys.valid.fill([0; 2]);
        }
        let writes = [keys.writes[at] + 1, written + 1];
        if keys.valid[at] != writes {
            let tokens = keys.division.page_tokens;
            let sum = (page * tokens..(page + 1) * tokens)
                .fold(0u64, |sum, slot| sum.wrapping_add(self.slot(slot)));
            self.keys.0.sums[at] = sum;
            self.keys.0.valid[at] = writes;
        }
        self.keys.0.sums[at]
    }

    /// Returns the slot of a sequence's token at `position`.
    pub(crate) fn slot_at(&self, pages: &[u32], position: u64) -> u64 {
        let tokens = self.keys.0.division.page_tokens;
        u64::from(pages[to_usize(position / tokens)]) * tokens + position % tokens
    }

    /// Returns the sum over a sequence's tokens in `range`. `pages` must cover it and stay inside the KV.
    pub(crate) fn sum(&mut self, pages: &[u32], range: Range<u64>) -> u64 {
        let tokens = self.keys.0.division.page_tokens;
        let mut sum = 0u64;
        let mut at = range.start;
        while at < range.end {
            let term = if at.is_multiple_of(tokens) && at + tokens <= range.end {
                let page = u64::from(pages[to_usize(at / tokens)]);
                at += tokens;
                self.page(page)
            } else {
                let slot = self.slot_at(pages, at);
                at += 1;
                self.slot(slot)
            };
            sum = sum.wrapping_add(term);
        }
        sum
    }
}
