//! Lists of byte ranges by address, for vectored I/O.

use mixfleet_hal::cast::to_usize;
use std::collections::VecDeque;

/// Parts that remain to be sent or received. The creator keeps their memory alive while they are in use.
#[derive(Default)]
pub(super) struct IovecQueue {
    list: VecDeque<libc::iovec>,
    bytes: u64,
}

// SAFETY: addresses are plain numbers; their user holds the memory, on any thread.
unsafe impl Send for IovecQueue {}

impl IovecQueue {
    /// Appends `bytes` bytes at `address`.
    pub(super) fn push(&mut self, address: *mut u8, bytes: u64) {
        if bytes > 0 {
            self.list.push_back(libc::iovec { iov_base: address.cast(), iov_len: to_usize(bytes) });
            self.bytes += bytes;
        }
    }

    /// Appends all of `other`.
    pub(super) fn append(&mut self, mut other: IovecQueue) {
        self.list.append(&mut other.list);
        self.bytes += other.bytes;
    }

    /// Returns the number of bytes left.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Removes `bytes` bytes from the front.
    pub(super) fn advance(&mut self, bytes: usize) {
        let mut left = bytes;
        self.bytes -= left as u64;
        while left > 0 {
            let first = self.list.front_mut().expect("as many bytes as were counted");
            if left < first.iov_len {
                // SAFETY: still inside the part.
                first.iov_base = unsafe { first.iov_base.cast::<u8>().add(left) }.cast();
                first.iov_len -= left;
                return;
            }
            left -= first.iov_len;
            self.list.pop_front();
        }
    }

    /// Calls `call` with the remaining ranges as iovecs, followed by `spare`.
    pub(super) fn with<T>(
        &mut self,
        spare: Option<libc::iovec>,
        call: impl FnOnce(&[libc::iovec]) -> T,
    ) -> T {
        self.list.extend(spare);
        let result = call(self.list.make_contiguous());
        if spare.is_some() {
            self.list.pop_back();
        }
        result
    }

    /// Returns address and length of the first range.
    pub(super) fn first(&self) -> Option<(*mut u8, usize)> {
        self.list.front().map(|part| (part.iov_base.cast(), part.iov_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_left_is_the_end_of_all(lengths in prop::collection::vec(0u64..20, 0..10), cuts in prop::collection::vec(0usize..30, 0..10)) {
            let mut bytes: Vec<u8> = (0..=200).collect();
            let mut parts = IovecQueue::default();
            let mut at = 0;
            for &length in &lengths {
                parts.push(bytes[at..].as_mut_ptr(), length);
                at += length as usize;
            }
            let mut gone = 0;
            for cut in cuts {
                let cut = cut.min(parts.bytes() as usize);
                parts.advance(cut);
                gone += cut;
                let left = parts.with(None, |list| {
                    // SAFETY: the parts lie in `bytes`.
                    let part = |part: &libc::iovec| unsafe {
                        std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len)
                    };
                    list.iter().flat_map(part).copied().collect::<Vec<u8>>()
                });
                prop_assert_eq!(&left[..], &bytes[gone..at]);
                prop_assert_eq!(parts.bytes() as usize, at - gone);
            }
        }
    }
}
