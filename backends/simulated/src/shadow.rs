//! Previous contents of memory, for stale faults.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Buffer, Slice};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Previous bytes of one range of a buffer.
struct Before {
    offset: u64,
    bytes: Vec<u8>,
}

/// The last overwritten bytes of every live buffer. A later write that overlaps an earlier one replaces it
/// whole, so stale bytes may be forgotten but are never invented.
#[derive(Default)]
pub(crate) struct Shadow {
    /// Keyed by address; the `Weak` prevents reuse of the address.
    buffers: HashMap<usize, (Weak<dyn Buffer>, Vec<Before>)>,
    /// Number of buffers at the last sweep for dead ones.
    swept: usize,
}

fn address(slice: &Slice) -> usize {
    Arc::as_ptr(&slice.buffer).cast::<()>() as usize
}

impl Shadow {
    /// Records that `slice` held `bytes` before the write that follows.
    pub(crate) fn remember(&mut self, slice: &Slice, bytes: Vec<u8>) {
        if self.buffers.len() > 2 * self.swept + 16 {
            self.buffers.retain(|_, (buffer, _)| buffer.strong_count() > 0);
            self.swept = self.buffers.len();
        }
        let fresh = || (Arc::downgrade(&slice.buffer), Vec::new());
        let (_, ranges) = self.buffers.entry(address(slice)).or_insert_with(fresh);
        let end = slice.offset + slice.bytes;
        ranges.retain(|r| r.offset + r.bytes.len() as u64 <= slice.offset || end <= r.offset);
        ranges.push(Before { offset: slice.offset, bytes });
    }

    /// Returns the parts of `slice` that were written, latest first, each with its previous contents.
    pub(crate) fn before(&self, slice: &Slice) -> Vec<(Slice, Vec<u8>)> {
        let Some((_, ranges)) = self.buffers.get(&address(slice)) else { return Vec::new() };
        let end = slice.offset + slice.bytes;
        let part = |r: &Before| {
            let from = r.offset.max(slice.offset);
            let to = (r.offset + r.bytes.len() as u64).min(end);
            (from < to).then(|| {
                let old = r.bytes[to_usize(from - r.offset)..to_usize(to - r.offset)].to_vec();
                (slice.range(from - slice.offset, to - from), old)
            })
        };
        ranges.iter().rev().filter_map(part).collect()
    }
}
