//! Results that came with the end of a batch, until they are read.

use crate::frame::MessageBody;
use mixfleet_hal::cast::to_usize;
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of kept results; older ones are read again on demand.
const KEPT_MAX: usize = 64;

/// A range of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferRange {
    pub(crate) buffer: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl BufferRange {
    pub(crate) fn overlaps(&self, other: &BufferRange) -> bool {
        self.buffer == other.buffer
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// A result that is expected with the end of a batch.
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) place: BufferRange,
    /// Whether something that was sent later writes there.
    pub(crate) is_stale: bool,
}

/// Bytes of buffers that nothing has written since they were sent.
#[derive(Default)]
pub(crate) struct Fetched {
    kept: Vec<(BufferRange, Arc<MessageBody>, Range<usize>)>,
}

impl Fetched {
    /// Files the results of a batch, which are the end of `body`. False if they are of another length.
    pub(crate) fn file(&mut self, expected: &[Expected], body: MessageBody, from: usize) -> bool {
        let all: u64 = expected.iter().map(|expected| expected.place.bytes).sum();
        if (body.len() - from) as u64 != all {
            return false;
        }
        if expected.is_empty() {
            return true;
        }
        let (body, mut at) = (Arc::new(body), from);
        for Expected { place, is_stale } in expected {
            let end = at + to_usize(place.bytes);
            if !is_stale {
                self.kept.push((*place, body.clone(), at..end));
            }
            at = end;
        }
        let excess = self.kept.len().saturating_sub(KEPT_MAX);
        self.kept.drain(..excess);
        true
    }

    /// Moves the fetched bytes of `place` to `data`. Returns the memory that this frees.
    pub(crate) fn take(&mut self, place: &BufferRange, data: &mut [u8]) -> Option<Option<MessageBody>> {
        let at = self.kept.iter().position(|(other, ..)| other == place)?;
        let (_, body, range) = self.kept.remove(at);
        data.copy_from_slice(&body[range]);
        Some(Arc::into_inner(body))
    }

    /// Forgets bytes that are now overwritten.
    pub(crate) fn forget(&mut self, written: &BufferRange) {
        self.kept.retain(|(place, ..)| !place.overlaps(written));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(buffer: u64, offset: u64, bytes: u64) -> BufferRange {
        BufferRange { buffer, offset, bytes }
    }

    #[test]
    fn places_overlap_by_buffer_and_range() {
        let middle = place(1, 10, 10);
        assert!(middle.overlaps(&place(1, 19, 1)) && middle.overlaps(&place(1, 0, 30)));
        for apart in [place(2, 10, 10), place(1, 0, 10), place(1, 20, 5)] {
            assert!(!middle.overlaps(&apart), "{apart:?}");
        }
    }
}
