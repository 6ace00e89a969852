//! AVX2 with FMA and F16C: eight lanes.

use super::{Simd, SimdTask};
use std::arch::x86_64::*;

/// The level of every x86 server since 2013.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// # Safety
/// The level is present, and the task's pointers are valid.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<T: SimdTask>(task: T) -> T::Out {
    // SAFETY: the caller's promise.
    unsafe { task.run::<Avx2>() }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The magnitudes of E2M1.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
const LANE_NUMBERS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

// SAFETY (all blocks below): the level is present and pointers are valid, by the trait's contract.
impl Simd for Avx2 {
    const LANES: usize = 8;
    const DOT_BF16: bool = false;
    const DOT_I16: bool = false;
    type V = __m256;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: __m256) {
        // SAFETY: see above.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let top = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let halves = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(top, top));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(halves));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: __m256) {
        // SAFETY: see above.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, [a, b, c, d]: [__m256; 4]) {
        // SAFETY: see above; `to` has room for four.
        unsafe {
            let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            _mm_storeu_ps(to, sums);
        }
    }
    #[inline(always)]
    unsafe fn max_lane(v: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn round(v: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_round_ps::<NEAREST>(v) }
    }
    #[inline(always)]
    unsafe fn scale(v: __m256, n: __m256) -> __m256 {
        // in two factors, because 2^-150 and 2^128 are no normal numbers
        // SAFETY: see above.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            let first = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias)));
            let second = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias)));
            _mm256_mul_ps(_mm256_mul_ps(v, first), second)
        }
    }
    #[inline(always)]
    unsafe fn zero_below(v: __m256, x: __m256, least: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(least))) }
    }
    #[inline(always)]
    unsafe fn bf16_low(words: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(words))) }
    }
    #[inline(always)]
    unsafe fn bf16_high(words: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32(0xFFFF_0000_u32.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn f16_low(words: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_and_si256(_mm256_castps_si256(words), _mm256_set1_epi32(0xFFFF));
            let halves = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(halves))
        }
    }
    #[inline(always)]
    unsafe fn f16_high(words: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(words));
            let halves = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm256_cvtph_ps(_mm256_castsi256_si128(halves))
        }
    }
    #[inline(always)]
    unsafe fn shifted(words: __m256, bits: u32) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let count = _mm256_set1_epi32(bits.cast_signed());
            _mm256_castsi256_ps(_mm256_srlv_epi32(_mm256_castps_si256(words), count))
        }
    }
    #[inline(always)]
    unsafe fn shifted_left(words: __m256, bits: u32) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let count = _mm256_set1_epi32(bits.cast_signed());
            _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_castps_si256(words), count))
        }
    }
    #[inline(always)]
    unsafe fn masked(words: __m256, mask: u32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32(mask.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn or(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_or_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn number(words: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtepi32_ps(_mm256_castps_si256(words)) }
    }
    #[inline(always)]
    unsafe fn byte_on_top(words: __m256, byte: u32) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let count = _mm256_set1_epi32((24 - 8 * byte).cast_signed());
            let top = _mm256_sllv_epi32(_mm256_castps_si256(words), count);
            let mask = _mm256_set1_epi32(0xFF00_0000_u32.cast_signed());
            _mm256_cvtepi32_ps(_mm256_and_si256(top, mask))
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_castsi256_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_interleaved(to: *mut f32, [a, b]: [__m256; 2]) {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(to.add(8), _mm256_permute2f128_ps::<0x31>(low, high));
        }
    }
    #[inline(always)]
    unsafe fn e2m1(words: __m256) -> __m256 {
        // SAFETY: see above; the lookup takes the lowest three bits.
        unsafe {
            let words = _mm256_castps_si256(words);
            let magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1.as_ptr()), words);
            let sign = _mm256_slli_epi32::<28>(_mm256_and_si256(words, _mm256_set1_epi32(8)));
            _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
        }
    }
    #[inline(always)]
    unsafe fn spread_words(words: __m256, log2: u32, width: u32) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let lanes = _mm256_loadu_si256(LANE_NUMBERS.as_ptr().cast());
            let of = _mm256_srlv_epi32(lanes, _mm256_set1_epi32(log2.cast_signed()));
            let left = _mm256_and_si256(lanes, _mm256_set1_epi32((1 << log2) - 1));
            let count = _mm256_mullo_epi32(left, _mm256_set1_epi32(width.cast_signed()));
            let spread = _mm256_permutevar8x32_ps(words, of);
            _mm256_castsi256_ps(_mm256_srlv_epi32(_mm256_castps_si256(spread), count))
        }
    }
    #[inline(always)]
    unsafe fn spread(from: *const f32, log2: u32) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let lanes = _mm256_loadu_si256(LANE_NUMBERS.as_ptr().cast());
            let of = _mm256_srlv_epi32(lanes, _mm256_set1_epi32(log2.cast_signed()));
            _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), of)
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
        // SAFETY: see above; the block has 8 rows of 8 words on both sides.
        unsafe {
            let mut r = [_mm256_setzero_ps(); 8];
            for (i, row) in r.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(from.add(i * from_stride).cast());
            }
            let mut s = r;
            for i in 0..4 {
                s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            for i in 0..2 {
                let q = 4 * i;
                r[q] = _mm256_shuffle_ps::<0x44>(s[q], s[q + 2]);
                r[q + 1] = _mm256_shuffle_ps::<0xEE>(s[q], s[q + 2]);
                r[q + 2] = _mm256_shuffle_ps::<0x44>(s[q + 1], s[q + 3]);
                r[q + 3] = _mm256_shuffle_ps::<0xEE>(s[q + 1], s[q + 3]);
            }
            for i in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(r[i], r[i + 4]);
                let high = _mm256_permute2f128_ps::<0x31>(r[i], r[i + 4]);
                _mm256_storeu_ps(to.add(i * to_stride).cast(), low);
                _mm256_storeu_ps(to.add((i + 4) * to_stride).cast(), high);
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: see above; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(at: *const u8) {
        // SAFETY: see above; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
