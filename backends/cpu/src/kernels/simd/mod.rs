//! Vectors of f32 behind one trait, so that every kernel is written once and compiled per level.
//!
//! A kernel is a [`SimdTask`]: its body is generic over [`Simd`] and `#[inline(always)]`, and
//! [`Isa::run`] calls it inside a function that enables the level's instructions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::isa::Isa;

/// Vectors of `LANES` f32, and 32-bit words in the same registers. A word is one f32 or two neighbouring
/// 16-bit floats.
///
/// # Safety
/// Every function needs the level's instructions to be present, and memory operands to be valid for
/// the lanes they touch. No alignment is needed.
pub(crate) trait Simd: Copy + 'static {
    /// Lanes of a vector.
    const LANES: usize;
    /// `dot_bf16` is one instruction: two products per lane at the price of one.
    const DOT_BF16: bool;
    /// [`nibble_pair`](Simd::nibble_pair) and [`dot_i16`](Simd::dot_i16) are one or two instructions.
    const DOT_I16: bool;
    /// [`nibble_bytes`](Simd::nibble_bytes) and [`dot_i8`](Simd::dot_i8) are one or two instructions.
    const DOT_I8: bool = false;
    /// The vector.
    type V: Copy;

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// Rounds to nearest even.
    unsafe fn store_bf16(to: *mut u16, v: Self::V);
    /// As `store_bf16`, but may flush subnormals to zero.
    #[inline(always)]
    unsafe fn store_bf16_flushing(to: *mut u16, v: Self::V) {
        // SAFETY: as for the caller.
        unsafe { Self::store_bf16(to, v) }
    }
    /// Rounds to nearest even.
    unsafe fn store_f16(to: *mut u16, v: Self::V);

    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` when either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` when either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn sum(v: Self::V) -> f32;
    /// The sums of four vectors, to four neighbouring f32. Each is added in the same order.
    unsafe fn store_sums(to: *mut f32, v: [Self::V; 4]);
    unsafe fn max_lane(v: Self::V) -> f32;
    /// To the nearest integer.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `v * 2^n` for integral `n` in -150..=128, rounded once at most into the subnormals.
    unsafe fn scale(v: Self::V, n: Self::V) -> Self::V;
    /// `v` where `x` is not less than `least`, else 0.
    unsafe fn zero_below(v: Self::V, x: Self::V, least: f32) -> Self::V;

    /// The lower bf16 of every word.
    unsafe fn bf16_low(words: Self::V) -> Self::V;
    /// The upper bf16 of every word.
    unsafe fn bf16_high(words: Self::V) -> Self::V;
    /// The lower f16 of every word.
    unsafe fn f16_low(words: Self::V) -> Self::V;
    /// The upper f16 of every word.
    unsafe fn f16_high(words: Self::V) -> Self::V;
    /// `acc + a.low * b.low + a.high * b.high` over words of two bf16.
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: as for the caller.
        unsafe {
            let low = Self::fma(Self::bf16_low(a), Self::bf16_low(b), acc);
            Self::fma(Self::bf16_high(a), Self::bf16_high(b), low)
        }
    }

    /// `acc + a.low * b.low + a.high * b.high` over words of two signed 16-bit integers; `acc` is of 32 bits.
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        let add = |sum: u32, a: u32, b: u32| {
            let (a, b) = (a.cast_signed(), b.cast_signed());
            let low = (a << 16 >> 16) * (b << 16 >> 16);
            sum.wrapping_add_signed(low).wrapping_add_signed((a >> 16) * (b >> 16))
        };
        // SAFETY: as for the caller.
        unsafe { Self::lane_by_lane(acc, a, b, add) }
    }

    /// `acc` and the products of four signed bytes of either word; `acc` is of 32 bits.
    #[inline(always)]
    unsafe fn dot_i8(acc: Self::V, a: Self::V, b: Self::V) -> Self::V {
        let add = |sum: u32, a: u32, b: u32| {
            let bytes = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
            let products = bytes.map(|(a, b)| i32::from(a.cast_signed()) * i32::from(b.cast_signed()));
            products.fold(sum, u32::wrapping_add_signed)
        };
        // SAFETY: as for the caller.
        unsafe { Self::lane_by_lane(acc, a, b, add) }
    }

    /// `add` of the three words in each lane.
    #[inline(always)]
    unsafe fn lane_by_lane(
        acc: Self::V,
        a: Self::V,
        b: Self::V,
        add: impl Fn(u32, u32, u32) -> u32,
    ) -> Self::V {
        let mut lanes = [[0u32; 16]; 3];
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            for (lanes, v) in lanes.iter_mut().zip([acc, a, b]) {
                Self::store(lanes.as_mut_ptr().cast(), v);
            }
            let [mut sums, a, b] = lanes;
            for (sum, (a, b)) in sums.iter_mut().zip(a.into_iter().zip(b)) {
                *sum = add(*sum, a, b);
            }
            Self::load(sums.as_ptr().cast())
        }
    }

    /// Every word shifted right by `bits`, with zeros from the left.
    unsafe fn shifted(words: Self::V, bits: u32) -> Self::V;
    /// Every word shifted left by `bits`.
    unsafe fn shifted_left(words: Self::V, bits: u32) -> Self::V;
    /// The bits of every word that are in `mask`.
    unsafe fn masked(words: Self::V, mask: u32) -> Self::V;
    /// The bits of either word.
    unsafe fn or(a: Self::V, b: Self::V) -> Self::V;
    /// Every word, a signed integer, as a float.
    unsafe fn number(words: Self::V) -> Self::V;
    /// Byte `byte` of every word, a signed integer, times 2^24, as a float.
    unsafe fn byte_on_top(words: Self::V, byte: u32) -> Self::V;
    /// The lowest four bits of every word less `MIDDLE`, as a float.
    #[inline(always)]
    unsafe fn nibble<const MIDDLE: u32>(words: Self::V) -> Self::V {
        // SAFETY: as for the caller.
        unsafe {
            let number = Self::number(Self::masked(words, 15));
            if MIDDLE == 0 { number } else { Self::sub(number, Self::splat(MIDDLE as f32)) }
        }
    }
    /// `LANES` bytes as words.
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::V {
        let mut lanes = [0u32; 16];
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            for (i, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
                *lane = u32::from(from.add(i).read());
            }
            Self::load(lanes.as_ptr().cast())
        }
    }
    /// Writes the lanes of both by turns.
    #[inline(always)]
    unsafe fn store_interleaved(to: *mut f32, v: [Self::V; 2]) {
        let mut lanes = [[0f32; 16]; 2];
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            Self::store(lanes[0].as_mut_ptr(), v[0]);
            Self::store(lanes[1].as_mut_ptr(), v[1]);
            for i in 0..2 * Self::LANES {
                *to.add(i) = lanes[i % 2][i / 2];
            }
        }
    }
    /// The lowest four bits of every word, which are E2M1, as a float.
    unsafe fn e2m1(words: Self::V) -> Self::V;
    /// Entry `bits % 32` of `table` for either half of every word. Entries 16 on are as those before them.
    #[inline(always)]
    unsafe fn nibble_pair(words: Self::V, table: &[u16; 32]) -> Self::V {
        let mut lanes = [0u32; 16];
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            Self::store(lanes.as_mut_ptr().cast(), words);
            for lane in &mut lanes {
                let (low, high) = (table[(*lane % 32) as usize], table[(*lane >> 16) as usize % 32]);
                *lane = u32::from(high) << 16 | u32::from(low);
            }
            Self::load(lanes.as_ptr().cast())
        }
    }
    /// The entry of `table` for the upper or the lower four bits of every byte.
    #[inline(always)]
    unsafe fn nibble_bytes<const UPPER: bool>(words: Self::V, table: &[i8; 16]) -> Self::V {
        let mut lanes = [0u32; 16];
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            Self::store(lanes.as_mut_ptr().cast(), words);
            for lane in &mut lanes {
                let codes = lane.to_le_bytes().map(|byte| if UPPER { byte >> 4 } else { byte & 15 });
                *lane = u32::from_le_bytes(codes.map(|code| table[usize::from(code)].cast_unsigned()));
            }
            Self::load(lanes.as_ptr().cast())
        }
    }
    /// Lane i is number `i >> log2` in memory, which holds `LANES` of them.
    #[inline(always)]
    unsafe fn spread(from: *const f32, log2: u32) -> Self::V {
        let mut lanes = [0f32; 16];
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            for (i, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
                *lane = *from.add(i >> log2);
            }
            Self::load(lanes.as_ptr())
        }
    }

    /// Lane i is word `i >> log2`, shifted right by `width` times what is left of i.
    #[inline(always)]
    unsafe fn spread_words(words: Self::V, log2: u32, width: u32) -> Self::V {
        let (mut from, mut lanes) = ([0u32; 16], [0u32; 16]);
        // SAFETY: as for the caller; no level has more than 16 lanes.
        unsafe {
            Self::store(from.as_mut_ptr().cast(), words);
            let mut left = 0;
            for (i, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
                *lane = from[i >> log2] >> (width * left);
                left = (left + 1) & ((1 << log2) - 1);
            }
            Self::load(lanes.as_ptr().cast())
        }
    }

    /// Transposes a block of `LANES` by `LANES` words. Strides in bytes.
    unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize);
    /// Hints that the line at `at` is needed in the L2; any address is allowed.
    unsafe fn prefetch(at: *const u8);
    /// Hints that the line at `at` is needed in the L1 soon; any address is allowed.
    unsafe fn prefetch_near(at: *const u8);
}

/// A kernel body, generic over the level.
pub(crate) trait SimdTask {
    /// What it returns.
    type Out;
    /// The body; must be `#[inline(always)]`, or the level's instructions are not used in it.
    ///
    /// # Safety
    /// The level's instructions are present, and the task's own pointers are valid.
    unsafe fn run<S: Simd>(self) -> Self::Out;
}

impl Isa {
    /// Runs `task` at this level.
    ///
    /// # Safety
    /// The task's pointers are valid. (A value of `Isa` exists only for levels that are present.)
    pub(crate) unsafe fn run<T: SimdTask>(self, task: T) -> T::Out {
        // SAFETY: `Isa` is only made by detection; the rest is the caller's promise.
        unsafe {
            match self {
                Isa::Portable => task.run::<portable::Portable>(),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::run(task),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::run(task),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Amx => avx512::run_bf16(task),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => neon::run(task),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonDot => neon::run_dot(task),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonBf16 => neon::run_bf16(task),
            }
        }
    }
}

/// Below it `e^x` is no normal number (-126 ln 2 = -87.3365), and processors take a hundred cycles and more
/// for an operation with such a result.
const EXP_ARG_MIN: f32 = -87.33;

/// `e^x`, relative error below 2.5e-7 (checked against f64 in the tests); 0 below [`EXP_ARG_MIN`].
///
/// Range reduction by ln 2 in two parts (Cody & Waite 1980) and the degree-6 polynomial of Cephes'
/// `expf` (Moshier 1992).
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: register arithmetic only.
    unsafe {
        let unclamped = x;
        let x = S::min(S::splat(89.0), S::max(S::splat(EXP_ARG_MIN), x));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::zero_below(S::scale(p, n), unclamped, EXP_ARG_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ExpAll<'a>(&'a [f32], &'a mut [f32]);
    impl SimdTask for ExpAll<'_> {
        type Out = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for (x, y) in self.0.chunks_exact(S::LANES).zip(self.1.chunks_exact_mut(S::LANES)) {
                // SAFETY: both chunks hold LANES elements.
                unsafe { S::store(y.as_mut_ptr(), exp::<S>(S::load(x.as_ptr()))) };
            }
        }
    }

    #[test]
    fn exp_is_within_its_stated_error_on_every_level() {
        let mut x: Vec<f32> = (0..64_000).map(|i| -87.0 + 175.0 * i as f32 / 64_000.0).collect();
        x.extend([0.0, -0.0, f32::NEG_INFINITY, -1e30, -87.34, 1e30, f32::INFINITY, f32::NAN]);
        x.extend([0.0; 8]);
        for isa in Isa::available() {
            let mut y = vec![0.0; x.len()];
            // SAFETY: the slices are valid.
            unsafe { isa.run(ExpAll(&x, &mut y)) };
            for (&x, &y) in x.iter().zip(&y).take(64_000) {
                let exact = f64::from(x).exp();
                assert!((f64::from(y) - exact).abs() <= 2.5e-7 * exact, "{isa}: exp({x}) = {y}, not {exact}");
            }
            assert_eq!(y[64_000..64_007], [1.0, 1.0, 0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY], "{isa}");
            assert!(y[64_007].is_nan(), "{isa}: exp(NaN)");
        }
    }

    struct Words<'a>(&'a [u32], &'a mut [u32]);
    impl SimdTask for Words<'_> {
        type Out = usize;
        #[inline(always)]
        unsafe fn run<S: Simd>(self) -> usize {
            let stride = S::LANES * 4;
            // SAFETY: both slices hold 256 words, enough for the widest level.
            unsafe { S::transpose(self.0.as_ptr().cast(), stride, self.1.as_mut_ptr().cast(), stride) };
            S::LANES
        }
    }

    struct DotI16<'a>([&'a [u32]; 3], &'a mut [u32]);
    impl SimdTask for DotI16<'_> {
        type Out = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for i in (0..16).step_by(S::LANES) {
                // SAFETY: all slices hold 16 words.
                unsafe {
                    let [acc, a, b] = self.0.map(|words| S::load(words.as_ptr().add(i).cast()));
                    S::store(self.1.as_mut_ptr().add(i).cast(), S::dot_i16(acc, a, b));
                }
            }
        }
    }

    #[test]
    fn products_of_16_bits_are_exact_on_every_level() {
        let words = |factor: u32| (0..16).map(|i: u32| i.wrapping_mul(factor)).collect::<Vec<u32>>();
        let (acc, a, b) = (words(0x0001_2345), words(0x9E37_79B1), words(0x85EB_CA6B));
        for isa in Isa::available() {
            let mut sums = [0; 16];
            // SAFETY: the slices are valid.
            unsafe { isa.run(DotI16([&acc, &a, &b], &mut sums)) };
            for (i, &sum) in sums.iter().enumerate() {
                let [acc, a, b, sum] = [acc[i], a[i], b[i], sum].map(|word| i64::from(word.cast_signed()));
                let low = |word: i64| (word & 0xFFFF) - ((word & 0x8000) << 1);
                assert_eq!(sum, acc + low(a) * low(b) + (a >> 16) * (b >> 16), "{isa} {i}");
            }
        }
    }

    struct Bytes<'a>([&'a [u32; 16]; 3], &'a [i8; 16], &'a mut [[u32; 16]; 3]);
    impl SimdTask for Bytes<'_> {
        type Out = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for i in (0..16).step_by(S::LANES) {
                // SAFETY: all arrays hold 16 words.
                unsafe {
                    let [acc, a, b] = self.0.map(|words| S::load(words.as_ptr().add(i).cast()));
                    let of = [
                        S::dot_i8(acc, a, b),
                        S::nibble_bytes::<false>(a, self.1),
                        S::nibble_bytes::<true>(a, self.1),
                    ];
                    for (to, v) in self.2.iter_mut().zip(of) {
                        S::store(to.as_mut_ptr().add(i).cast(), v);
                    }
                }
            }
        }
    }

    #[test]
    fn products_of_bytes_and_tables_of_nibbles_are_exact_on_every_level() {
        let words = |factor: u32| std::array::from_fn(|i| (i as u32).wrapping_mul(factor) ^ 0x8000_807F);
        let (acc, a, b): ([u32; 16], [u32; 16], [u32; 16]) =
            (words(0x0001_2345), words(0x9E37_79B1), words(0x85EB_CA6B));
        let table = std::array::from_fn(|i| (17 * i as i32 - 128) as i8);
        for isa in Isa::available() {
            let mut got = [[0; 16]; 3];
            // SAFETY: the arrays are valid.
            unsafe { isa.run(Bytes([&acc, &a, &b], &table, &mut got)) };
            for i in 0..16 {
                let bytes = |word: u32| word.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
                let products = bytes(a[i]).into_iter().zip(bytes(b[i])).map(|(a, b)| a * b);
                assert_eq!(got[0][i], acc[i].wrapping_add_signed(products.sum()), "{isa} {i}");
                for (upper, got) in [(0, got[1][i]), (4, got[2][i])] {
                    let of = a[i].to_le_bytes().map(|byte| table[usize::from(byte >> upper & 15)]);
                    assert_eq!(got.to_le_bytes(), of.map(i8::cast_unsigned), "{isa} {i} {upper}");
                }
            }
        }
    }

    #[test]
    fn transpose_swaps_rows_and_columns() {
        let from: Vec<u32> = (0..256).collect();
        for isa in Isa::available() {
            let mut to = vec![0; 256];
            // SAFETY: the slices are valid.
            let lanes = unsafe { isa.run(Words(&from, &mut to)) };
            for i in 0..lanes {
                for j in 0..lanes {
                    assert_eq!(to[j * lanes + i], from[i * lanes + j], "{isa} {i} {j}");
                }
            }
        }
    }
}
