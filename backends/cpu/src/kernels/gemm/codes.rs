//! Unpacks the codes of quantised weights in registers: one code of each 32-bit word at a time, two as 16-bit
//! integers, or four as bytes.

use crate::kernels::simd::Simd;

/// How codes become numbers.
pub(super) trait CodeWords<S: Simd> {
    /// Codes in a word.
    const PER_WORD: usize;
    /// Bits of a code in the plane of high bits.
    const HIGH_BITS: usize;
    /// What the sum of products is multiplied with beside its scale.
    const FACTOR: f32 = 1.0;
    /// Whether numbers are integers times [`INTEGER_FACTOR`](Self::INTEGER_FACTOR), as in
    /// [`pair`](Self::pair) and [`quad`](Self::quad).
    const HAS_INTEGERS: bool = false;
    /// A number over its integer.
    const INTEGER_FACTOR: f32 = 1.0;
    /// The number of code `j` of each word over [`FACTOR`](Self::FACTOR), whose high bits lie in the same
    /// lane of `high`.
    unsafe fn number(words: S::V, high: S::V, j: usize) -> S::V;
    /// The integers of codes `j` and `j + PER_WORD / 2` of each word, of 16 bits each.
    #[inline(always)]
    unsafe fn pair(words: S::V, _high: S::V, _j: usize) -> S::V {
        words
    }
    /// The integers of every code `PER_WORD / 4` codes from the next, `j` and on, of 8 bits each.
    #[inline(always)]
    unsafe fn quad(words: S::V, _high: S::V, _j: usize) -> S::V {
        words
    }
}

/// Codes of four bits less `MIDDLE`.
pub(super) struct Nibbles<const MIDDLE: u32>;
/// Codes of four bits and `BITS` more in a plane of their own.
pub(super) struct TwoPlanes<const BITS: usize>;
/// Signed bytes.
pub(super) struct SignedBytes;
/// E2M1.
pub(super) struct FloatNibbles;
/// E4M3.
pub(super) struct FloatBytes;

/// Integers of codes of four bits, twice, so that a fifth bit does not matter.
const fn pair_table(numbers: [i8; 16]) -> [u16; 32] {
    let (mut table, mut i) = ([0; 32], 0);
    while i < 32 {
        table[i] = (numbers[i % 16] as i16).cast_unsigned();
        i += 1;
    }
    table
}

/// Twice the numbers of E2M1.
static E2M1_BYTES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
static E2M1_PAIRS: [u16; 32] = pair_table(E2M1_BYTES);
/// Codes as they are, and less 8.
static NIBBLE_BYTES: [[i8; 16]; 2] = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7],
];
static NIBBLE_PAIRS: [[u16; 32]; 2] = [pair_table(NIBBLE_BYTES[0]), pair_table(NIBBLE_BYTES[1])];

/// The entries of `table` for the lower four bits of every byte, or for the upper ones.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn nibbles_of_bytes<S: Simd>(words: S::V, upper: bool, table: &[i8; 16]) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        if upper { S::nibble_bytes::<true>(words, table) } else { S::nibble_bytes::<false>(words, table) }
    }
}

#[inline(always)]
pub(super) fn bits(count: usize) -> u32 {
    mixfleet_hal::cast::to_u32(count)
}

// SAFETY (all blocks): register arithmetic only; the level is present by the callers' promise.
impl<S: Simd, const MIDDLE: u32> CodeWords<S> for Nibbles<MIDDLE> {
    const PER_WORD: usize = 8;
    const HIGH_BITS: usize = 0;
    #[inline(always)]
    unsafe fn number(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::nibble::<MIDDLE>(S::shifted(words, bits(4 * j))) }
    }
    const HAS_INTEGERS: bool = true;
    #[inline(always)]
    unsafe fn pair(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::nibble_pair(S::shifted(words, bits(4 * j)), &NIBBLE_PAIRS[(MIDDLE / 8) as usize]) }
    }
    #[inline(always)]
    unsafe fn quad(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { nibbles_of_bytes::<S>(words, j == 1, &NIBBLE_BYTES[(MIDDLE / 8) as usize]) }
    }
}

// SAFETY (all blocks): register arithmetic only; the level is present by the callers' promise.
impl<S: Simd, const BITS: usize> CodeWords<S> for TwoPlanes<BITS> {
    const PER_WORD: usize = 8;
    const HIGH_BITS: usize = BITS;
    #[inline(always)]
    unsafe fn number(words: S::V, high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe {
            let low = S::masked(S::shifted(words, bits(4 * j)), 15);
            let high = S::masked(S::shifted(high, bits(BITS * j)), (1 << BITS) - 1);
            S::number(S::or(low, S::shifted_left(high, 4)))
        }
    }
    const HAS_INTEGERS: bool = true;
    #[inline(always)]
    unsafe fn pair(words: S::V, high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe {
            let low = S::masked(S::shifted(words, bits(4 * j)), 0x000F_000F);
            // codes 4 to 7 in the upper half
            let upper = S::masked(S::shifted_left(high, bits(16 - 4 * BITS)), 0xFFFF_0000);
            let halves = S::or(upper, S::masked(high, 0xFFFF));
            let moved = match BITS * j {
                right if right > 4 => S::shifted(halves, bits(right - 4)),
                right => S::shifted_left(halves, bits(4 - right)),
            };
            let mask = ((1 << BITS) - 1) << 4;
            S::or(low, S::masked(moved, mask << 16 | mask))
        }
    }
    #[inline(always)]
    unsafe fn quad(words: S::V, high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe {
            let low = S::masked(S::shifted(words, bits(4 * j)), 0x0F0F_0F0F);
            // two neighbouring codes in the low bits of every byte
            let apart = |v, by, mask| S::masked(S::or(v, S::shifted_left(v, by)), mask);
            let spread = match BITS {
                1 => apart(apart(S::masked(high, 0xFF), 12, 0x000F_000F), 6, 0x0303_0303),
                _ => apart(apart(S::masked(high, 0xFFFF), 8, 0x00FF_00FF), 4, 0x0F0F_0F0F),
            };
            let mask = ((1 << BITS) - 1) * 0x0101_0101;
            let of = S::masked(S::shifted(spread, bits(BITS * j)), mask);
            S::or(low, S::shifted_left(of, 4))
        }
    }
}

// SAFETY (all blocks): register arithmetic only; the level is present by the callers' promise.
impl<S: Simd> CodeWords<S> for SignedBytes {
    const PER_WORD: usize = 4;
    const HIGH_BITS: usize = 0;
    const FACTOR: f32 = 1.0 / 16_777_216.0;
    #[inline(always)]
    unsafe fn number(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::byte_on_top(words, bits(j)) }
    }
    /// A code is its own byte; as pairs they are no cheaper than numbers.
    const HAS_INTEGERS: bool = S::DOT_I8;
}

// SAFETY (all blocks): register arithmetic only; the level is present by the callers' promise.
impl<S: Simd> CodeWords<S> for FloatNibbles {
    const PER_WORD: usize = 8;
    const HIGH_BITS: usize = 0;
    #[inline(always)]
    unsafe fn number(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::e2m1(S::shifted(words, bits(4 * j))) }
    }
    const HAS_INTEGERS: bool = true;
    const INTEGER_FACTOR: f32 = 0.5;
    #[inline(always)]
    unsafe fn pair(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::nibble_pair(S::shifted(words, bits(4 * j)), &E2M1_PAIRS) }
    }
    #[inline(always)]
    unsafe fn quad(words: S::V, _high: S::V, j: usize) -> S::V {
        // SAFETY: see above.
        unsafe { nibbles_of_bytes::<S>(words, j == 1, &E2M1_BYTES) }
    }
}

// SAFETY (all blocks): register arithmetic only; the level is present by the callers' promise.
impl<S: Simd> CodeWords<S> for FloatBytes {
    const PER_WORD: usize = 4;
    const HIGH_BITS: usize = 0;
    #[inline(always)]
    unsafe fn number(words: S::V, _high: S::V, j: usize) -> S::V {
        const SHIFT: f32 = 1.329_228e36; // 2^120, by which the exponent of these bits is too small
        // SAFETY: see above.
        unsafe {
            let code = S::shifted(words, bits(8 * j));
            let sign = S::shifted_left(S::masked(code, 0x80), 24);
            let magnitude = S::shifted_left(S::masked(code, 0x7F), 20);
            S::mul(S::or(sign, magnitude), S::splat(SHIFT))
        }
    }
}
