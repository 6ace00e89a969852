//! AVX-512 (F, BW, VL, DQ): sixteen lanes; with AVX512-BF16 and VNNI also dot products of 16 bits.

use super::{Simd, SimdTask};
use std::arch::x86_64::*;

/// The level; `BF16` where `vdpbf16ps` and `vpdpwssd` are present.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const BF16: bool>;

/// # Safety
/// The level is present, and the task's pointers are valid.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run<T: SimdTask>(task: T) -> T::Out {
    // SAFETY: the caller's promise.
    unsafe { task.run::<Avx512<false>>() }
}

/// # Safety
/// The level with AVX512-BF16 and AVX512-VNNI is present, and the task's pointers are valid.
#[target_feature(enable = "avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run_bf16<T: SimdTask>(task: T) -> T::Out {
    // SAFETY: the caller's promise.
    unsafe { task.run::<Avx512<true>>() }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The numbers of codes of four bits.
const NIBBLES: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
/// The numbers of E2M1.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// For a shuffle of the bytes of four words: zeros, and byte 0 on top.
const TOP_BYTES: [u32; 16] = {
    const FOUR: [u32; 4] = [0x0080_8080, 0x0480_8080, 0x0880_8080, 0x0C80_8080];
    let (mut words, mut i) = ([0; 16], 0);
    while i < 16 {
        words[i] = FOUR[i % 4];
        i += 1;
    }
    words
};
const LANE_NUMBERS: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

// SAFETY (all blocks below): the level is present and pointers are valid, by the trait's contract.
impl<const BF16: bool> Simd for Avx512<BF16> {
    const LANES: usize = 16;
    const DOT_BF16: bool = BF16;
    const DOT_I16: bool = true;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: __m512) {
        // not vcvtneps2bf16: it flushes subnormals
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let bits = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits)));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16_flushing(to: *mut u16, v: __m512) {
        // SAFETY: see above; BF16 says that the instruction is present.
        unsafe {
            if BF16 {
                let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
                _mm256_storeu_si256(to.cast(), halves);
            } else {
                Self::store_bf16(to, v);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: __m512) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<NEAREST>(v)) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(v) }
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, [a, b, c, d]: [__m512; 4]) {
        // SAFETY: see above; `to` has room for four.
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            // every 128-bit lane: partial sums of a, b, c, d
            let all = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xEE>(ab, cd));
            let half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all));
            _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half)));
        }
    }
    #[inline(always)]
    unsafe fn max_lane(v: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(v) }
    }
    #[inline(always)]
    unsafe fn round(v: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_roundscale_ps::<NEAREST>(v) }
    }
    #[inline(always)]
    unsafe fn scale(v: __m512, n: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_scalef_ps(v, n) }
    }
    #[inline(always)]
    unsafe fn zero_below(v: __m512, x: __m512, least: f32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(least));
            _mm512_maskz_mov_ps(kept, v)
        }
    }
    #[inline(always)]
    unsafe fn bf16_low(words: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(words))) }
    }
    #[inline(always)]
    unsafe fn bf16_high(words: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_and_ps(words, _mm512_castsi512_ps(_mm512_set1_epi32(0xFFFF_0000_u32.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn f16_low(words: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(words))) }
    }
    #[inline(always)]
    unsafe fn f16_high(words: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(words)))) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above; the three types are the same 64 bytes, and BF16 says that the
        // instruction is present.
        unsafe {
            if BF16 {
                _mm512_dpbf16_ps(
                    acc,
                    std::mem::transmute::<__m512, __m512bh>(a),
                    std::mem::transmute::<__m512, __m512bh>(b),
                )
            } else {
                let low = Self::fma(Self::bf16_low(a), Self::bf16_low(b), acc);
                Self::fma(Self::bf16_high(a), Self::bf16_high(b), low)
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above; VNNI is present with BF16.
        unsafe {
            let [acc, a, b] = [acc, a, b].map(|v| _mm512_castps_si512(v));
            let sum = if BF16 {
                _mm512_dpwssd_epi32(acc, a, b)
            } else {
                _mm512_add_epi32(acc, _mm512_madd_epi16(a, b))
            };
            _mm512_castsi512_ps(sum)
        }
    }
    #[inline(always)]
    unsafe fn shifted(words: __m512, bits: u32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let count = _mm512_set1_epi32(bits.cast_signed());
            _mm512_castsi512_ps(_mm512_srlv_epi32(_mm512_castps_si512(words), count))
        }
    }
    #[inline(always)]
    unsafe fn shifted_left(words: __m512, bits: u32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let count = _mm512_set1_epi32(bits.cast_signed());
            _mm512_castsi512_ps(_mm512_sllv_epi32(_mm512_castps_si512(words), count))
        }
    }
    #[inline(always)]
    unsafe fn masked(words: __m512, mask: u32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_and_ps(words, _mm512_castsi512_ps(_mm512_set1_epi32(mask.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_or_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn number(words: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(words)) }
    }
    #[inline(always)]
    unsafe fn byte_on_top(words: __m512, byte: u32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let first = _mm512_loadu_si512(TOP_BYTES.as_ptr().cast());
            let bytes = _mm512_add_epi32(first, _mm512_set1_epi32((byte << 24).cast_signed()));
            _mm512_cvtepi32_ps(_mm512_shuffle_epi8(_mm512_castps_si512(words), bytes))
        }
    }
    #[inline(always)]
    unsafe fn nibble_pair(words: __m512, table: &[u16; 32]) -> __m512 {
        // SAFETY: see above; the lookup takes the lowest five bits of 16.
        unsafe {
            let table = _mm512_loadu_si512(table.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_castps_si512(words), table))
        }
    }
    #[inline(always)]
    unsafe fn nibble<const MIDDLE: u32>(words: __m512) -> __m512 {
        // SAFETY: see above; the lookup takes the lowest four bits.
        unsafe {
            let table = _mm512_sub_ps(_mm512_loadu_ps(NIBBLES.as_ptr()), _mm512_set1_ps(MIDDLE as f32));
            _mm512_permutexvar_ps(_mm512_castps_si512(words), table)
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_castsi512_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_interleaved(to: *mut f32, [a, b]: [__m512; 2]) {
        // SAFETY: see above; from 16 on, lanes are those of the second.
        unsafe {
            for half in 0..2 {
                let lanes = _mm512_loadu_si512(LANE_NUMBERS.as_ptr().cast());
                let of = _mm512_add_epi32(_mm512_srli_epi32::<1>(lanes), _mm512_set1_epi32(8 * half));
                let odd = _mm512_slli_epi32::<4>(_mm512_and_si512(lanes, _mm512_set1_epi32(1)));
                let turns = _mm512_permutex2var_ps(a, _mm512_or_si512(of, odd), b);
                _mm512_storeu_ps(to.offset(16 * half as isize), turns);
            }
        }
    }
    #[inline(always)]
    unsafe fn e2m1(words: __m512) -> __m512 {
        // SAFETY: see above; the lookup takes the lowest four bits.
        unsafe { _mm512_permutexvar_ps(_mm512_castps_si512(words), _mm512_loadu_ps(E2M1.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn spread_words(words: __m512, log2: u32, width: u32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let lanes = _mm512_loadu_si512(LANE_NUMBERS.as_ptr().cast());
            let of = _mm512_srlv_epi32(lanes, _mm512_set1_epi32(log2.cast_signed()));
            let left = _mm512_and_si512(lanes, _mm512_set1_epi32((1 << log2) - 1));
            let count = _mm512_mullo_epi32(left, _mm512_set1_epi32(width.cast_signed()));
            let spread = _mm512_permutexvar_ps(of, words);
            _mm512_castsi512_ps(_mm512_srlv_epi32(_mm512_castps_si512(spread), count))
        }
    }
    #[inline(always)]
    unsafe fn spread(from: *const f32, log2: u32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let lanes = _mm512_loadu_si512(LANE_NUMBERS.as_ptr().cast());
            let of = _mm512_srlv_epi32(lanes, _mm512_set1_epi32(log2.cast_signed()));
            _mm512_permutexvar_ps(of, _mm512_loadu_ps(from))
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
        // SAFETY: see above; the block has 16 rows of 16 words on both sides.
        unsafe {
            let mut r = [_mm512_setzero_ps(); 16];
            for (i, row) in r.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * from_stride).cast());
            }
            let mut s = r;
            for i in 0..8 {
                s[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                s[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            // r[4q + c] holds, per 128-bit lane l, column 4l + c of rows 4q..4q+4
            for q in (0..16).step_by(4) {
                r[q] = _mm512_shuffle_ps::<0x44>(s[q], s[q + 2]);
                r[q + 1] = _mm512_shuffle_ps::<0xEE>(s[q], s[q + 2]);
                r[q + 2] = _mm512_shuffle_ps::<0x44>(s[q + 1], s[q + 3]);
                r[q + 3] = _mm512_shuffle_ps::<0xEE>(s[q + 1], s[q + 3]);
            }
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4::<0x88>(r[c], r[c + 4]);
                let odd = _mm512_shuffle_f32x4::<0xDD>(r[c], r[c + 4]);
                let even2 = _mm512_shuffle_f32x4::<0x88>(r[c + 8], r[c + 12]);
                let odd2 = _mm512_shuffle_f32x4::<0xDD>(r[c + 8], r[c + 12]);
                let columns = [
                    _mm512_shuffle_f32x4::<0x88>(even, even2),
                    _mm512_shuffle_f32x4::<0x88>(odd, odd2),
                    _mm512_shuffle_f32x4::<0xDD>(even, even2),
                    _mm512_shuffle_f32x4::<0xDD>(odd, odd2),
                ];
                for (i, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add((c + 4 * i) * to_stride).cast(), column);
                }
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
