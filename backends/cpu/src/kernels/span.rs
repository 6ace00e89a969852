//! Operand memory as the kernels see it.

use mixfleet_hal::DType;
use mixfleet_hal::cast::to_usize;

/// The bytes of one operand. Its creator guarantees that they are valid, locked during the run, and written
/// by at most one worker per byte between two barriers. Alignment is not guaranteed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandSpan {
    /// Address of the first byte.
    pub(crate) start: *mut u8,
    /// Length in bytes.
    pub(crate) bytes: usize,
}

// SAFETY: a span is an address; dereferencing it is unsafe and argued where it happens.
unsafe impl Send for OperandSpan {}
// SAFETY: as above.
unsafe impl Sync for OperandSpan {}

impl OperandSpan {
    /// An empty span.
    pub(crate) const EMPTY: OperandSpan = OperandSpan { start: std::ptr::null_mut(), bytes: 0 };

    /// Returns the address of element `index` of `dtype`.
    #[inline(always)]
    pub(crate) fn at(self, dtype: DType, index: usize) -> *mut u8 {
        debug_assert!(index * to_usize(dtype.size_bytes()) <= self.bytes);
        self.start.wrapping_add(index * to_usize(dtype.size_bytes()))
    }

    /// Returns element `index` of a span of u32.
    ///
    /// # Safety
    /// The span holds initialised memory that is not written concurrently, and more than `index` elements.
    #[inline(always)]
    pub(crate) unsafe fn u32(self, index: usize) -> u32 {
        debug_assert!(index * 4 + 4 <= self.bytes);
        // SAFETY: the caller's promise.
        unsafe { self.start.cast::<u32>().add(index).read_unaligned() }
    }

    /// Whether the spans share a byte.
    pub(crate) fn overlaps(self, other: OperandSpan) -> bool {
        let (a, b) = (self.start as usize, other.start as usize);
        a < b + other.bytes && b < a + self.bytes
    }
}

/// Scratch memory of a worker or a device, aligned to 64 bytes. It only grows.
#[derive(Debug, Default)]
pub(crate) struct AlignedScratch {
    lines: Vec<ScratchLine>,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct ScratchLine(#[allow(dead_code, reason = "read through pointers")] [u8; 64]);

impl AlignedScratch {
    /// Returns at least `words` words of 32 bits with arbitrary content. The pointer is valid until the next
    /// call.
    pub(crate) fn words(&mut self, words: usize) -> *mut f32 {
        let lines = words.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, ScratchLine([0; 64]));
        }
        self.lines.as_mut_ptr().cast()
    }
}
