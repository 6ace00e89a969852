//! NEON: eight lanes in two registers, so that 32 registers hold as much as the 16 of AVX2; where present
//! also dot products of bytes and of bf16, whose intrinsics are not stable.

use super::{Simd, SimdTask};
use std::arch::aarch64::*;
use std::arch::asm;

/// The level; `DOT` where `sdot` is present, `BF16` where `bfdot` and `bfcvtn` are.
#[derive(Clone, Copy)]
pub(super) struct Neon<const DOT: bool, const BF16: bool>;

type NeonVector = [float32x4_t; 2];

/// # Safety
/// The level is present, and the task's pointers are valid.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<T: SimdTask>(task: T) -> T::Out {
    // SAFETY: the caller's promise.
    unsafe { task.run::<Neon<false, false>>() }
}

/// # Safety
/// The level with dot products of bytes is present, and the task's pointers are valid.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn run_dot<T: SimdTask>(task: T) -> T::Out {
    // SAFETY: the caller's promise.
    unsafe { task.run::<Neon<true, false>>() }
}

/// # Safety
/// The level with dot products of bytes and of bf16 is present, and the task's pointers are valid.
#[target_feature(enable = "neon,dotprod,bf16")]
pub(super) unsafe fn run_bf16<T: SimdTask>(task: T) -> T::Out {
    // SAFETY: the caller's promise.
    unsafe { task.run::<Neon<true, true>>() }
}

#[inline(always)]
fn each(f: impl Fn(usize) -> float32x4_t) -> NeonVector {
    [f(0), f(1)]
}

#[inline(always)]
fn words(v: float32x4_t) -> uint32x4_t {
    // SAFETY: the level is present wherever this is called, and the bits are those of either type.
    unsafe { vreinterpretq_u32_f32(v) }
}

#[inline(always)]
fn of_words(words: uint32x4_t) -> float32x4_t {
    // SAFETY: as for `words`.
    unsafe { vreinterpretq_f32_u32(words) }
}

/// Four f16 as f32.
#[inline(always)]
unsafe fn from_f16(halves: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: register arithmetic of the level.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {halves:v}.4h", wide = lateout(vreg) wide, halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four f32 as f16, rounded to nearest even.
#[inline(always)]
unsafe fn to_f16(v: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: register arithmetic of the level.
    unsafe {
        asm!("fcvtn {halves:v}.4h, {v:v}.4s", halves = lateout(vreg) halves, v = in(vreg) v,
            options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

/// Four f32 as bf16, rounded to nearest even.
#[inline(always)]
unsafe fn to_bf16<const BF16: bool>(v: float32x4_t) -> uint16x4_t {
    // SAFETY: register arithmetic of the level; BF16 says that the instruction is present.
    unsafe {
        if BF16 {
            let halves;
            asm!(".arch_extension bf16", "bfcvtn {halves:v}.4h, {v:v}.4s",
                halves = lateout(vreg) halves, v = in(vreg) v,
                options(pure, nomem, nostack, preserves_flags));
            return halves;
        }
        let bits = words(v);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
    }
}

/// Lane i is lane `i >> log2`.
#[inline(always)]
unsafe fn repeated([low, high]: NeonVector, log2: u32) -> NeonVector {
    // SAFETY: register arithmetic of the level.
    unsafe {
        match log2 {
            0 => [low, high],
            1 => [vzip1q_f32(low, low), vzip2q_f32(low, low)],
            2 => [vdupq_laneq_f32::<0>(low), vdupq_laneq_f32::<1>(low)],
            _ => [vdupq_laneq_f32::<0>(low); 2],
        }
    }
}

/// Bytes 3 and 2 of the numbers of E2M1 as f32, whose other bytes are zero.
static E2M1_BYTES: [u8; 32] = [
    0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0, //
    0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0, 0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
];
const LANE_NUMBERS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

// SAFETY (all blocks below): the level is present and pointers are valid, by the trait's contract.
impl<const DOT: bool, const BF16: bool> Simd for Neon<DOT, BF16> {
    const LANES: usize = 8;
    const DOT_BF16: bool = BF16;
    const DOT_I16: bool = false;
    const DOT_I8: bool = DOT;
    type V = NeonVector;

    #[inline(always)]
    unsafe fn splat(value: f32) -> NeonVector {
        // SAFETY: see above.
        unsafe { [vdupq_n_f32(value); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> NeonVector {
        // SAFETY: see above.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, [low, high]: NeonVector) {
        // SAFETY: see above.
        unsafe {
            vst1q_f32(to, low);
            vst1q_f32(to.add(4), high);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> NeonVector {
        // SAFETY: see above.
        unsafe {
            let (zeros, halves) = (vdupq_n_u16(0), vld1q_u16(from));
            [vzip1q_u16(zeros, halves), vzip2q_u16(zeros, halves)].map(|v| vreinterpretq_f32_u16(v))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> NeonVector {
        // SAFETY: see above.
        unsafe {
            let halves = vld1q_u16(from);
            [from_f16(vget_low_u16(halves)), from_f16(vget_high_u16(halves))]
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, [low, high]: NeonVector) {
        // SAFETY: see above.
        unsafe { vst1q_u16(to, vcombine_u16(to_bf16::<BF16>(low), to_bf16::<BF16>(high))) }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, [low, high]: NeonVector) {
        // SAFETY: see above.
        unsafe { vst1q_u16(to, vcombine_u16(to_f16(low), to_f16(high))) }
    }
    #[inline(always)]
    unsafe fn add(a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vaddq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn sub(a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vsubq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn mul(a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn div(a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vdivq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn max(a: NeonVector, b: NeonVector) -> NeonVector {
        // not `fmax`, which is NaN when `a` is
        // SAFETY: see above.
        each(|i| unsafe { vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn min(a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn fma(a: NeonVector, b: NeonVector, c: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn sum([low, high]: NeonVector) -> f32 {
        // SAFETY: see above.
        unsafe { vaddvq_f32(vaddq_f32(low, high)) }
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, v: [NeonVector; 4]) {
        // SAFETY: see above; `to` has room for four.
        unsafe {
            let [a, b, c, d] = v.map(|[low, high]| vaddq_f32(low, high));
            vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
        }
    }
    #[inline(always)]
    unsafe fn max_lane([low, high]: NeonVector) -> f32 {
        // SAFETY: see above.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(low, high)) }
    }
    #[inline(always)]
    unsafe fn round(v: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vrndnq_f32(v[i]) })
    }
    #[inline(always)]
    unsafe fn scale(v: NeonVector, n: NeonVector) -> NeonVector {
        // in two factors, because 2^-150 and 2^128 are no normal numbers
        // SAFETY: see above.
        each(|i| unsafe {
            let (bias, n) = (vdupq_n_s32(127), vcvtq_s32_f32(n[i]));
            let half = vshrq_n_s32::<1>(n);
            let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, bias)));
            vmulq_f32(vmulq_f32(v[i], power(half)), power(vsubq_s32(n, half)))
        })
    }
    #[inline(always)]
    unsafe fn zero_below(v: NeonVector, x: NeonVector, least: f32) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { of_words(vbicq_u32(words(v[i]), vcltq_f32(x[i], vdupq_n_f32(least)))) })
    }
    #[inline(always)]
    unsafe fn bf16_low(v: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { of_words(vshlq_n_u32::<16>(words(v[i]))) })
    }
    #[inline(always)]
    unsafe fn bf16_high(v: NeonVector) -> NeonVector {
        // SAFETY: see above.
        unsafe { Self::masked(v, 0xFFFF_0000) }
    }
    #[inline(always)]
    unsafe fn f16_low(v: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { from_f16(vmovn_u32(words(v[i]))) })
    }
    #[inline(always)]
    unsafe fn f16_high(v: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { from_f16(vshrn_n_u32::<16>(words(v[i]))) })
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: NeonVector, a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above; BF16 says that the instruction is present.
        unsafe {
            if !BF16 {
                let low = Self::fma(Self::bf16_low(a), Self::bf16_low(b), acc);
                return Self::fma(Self::bf16_high(a), Self::bf16_high(b), low);
            }
            each(|i| {
                let mut sum = acc[i];
                asm!(".arch_extension bf16", "bfdot {sum:v}.4s, {a:v}.8h, {b:v}.8h",
                    sum = inlateout(vreg) sum, a = in(vreg) a[i], b = in(vreg) b[i],
                    options(pure, nomem, nostack, preserves_flags));
                sum
            })
        }
    }
    #[inline(always)]
    unsafe fn shifted(v: NeonVector, bits: u32) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { of_words(vshlq_u32(words(v[i]), vdupq_n_s32(-bits.cast_signed()))) })
    }
    #[inline(always)]
    unsafe fn shifted_left(v: NeonVector, bits: u32) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { of_words(vshlq_u32(words(v[i]), vdupq_n_s32(bits.cast_signed()))) })
    }
    #[inline(always)]
    unsafe fn masked(v: NeonVector, mask: u32) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { of_words(vandq_u32(words(v[i]), vdupq_n_u32(mask))) })
    }
    #[inline(always)]
    unsafe fn or(a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { of_words(vorrq_u32(words(a[i]), words(b[i]))) })
    }
    #[inline(always)]
    unsafe fn number(v: NeonVector) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe { vcvtq_f32_s32(vreinterpretq_s32_f32(v[i])) })
    }
    #[inline(always)]
    unsafe fn byte_on_top(v: NeonVector, byte: u32) -> NeonVector {
        // SAFETY: see above; a lookup beyond byte 15 is zero.
        each(|i| unsafe {
            let first = vreinterpretq_u32_u8(vcombine_u8(
                vcreate_u8(0x04FF_FFFF_00FF_FFFF),
                vcreate_u8(0x0CFF_FFFF_08FF_FFFF),
            ));
            let bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(byte << 24)));
            vcvtq_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(v[i]), bytes)))
        })
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> NeonVector {
        // SAFETY: see above.
        unsafe {
            let wide = vmovl_u8(vld1_u8(from));
            [vmovl_u16(vget_low_u16(wide)), vmovl_high_u16(wide)].map(of_words)
        }
    }
    #[inline(always)]
    unsafe fn store_interleaved(to: *mut f32, [a, b]: [NeonVector; 2]) {
        // SAFETY: see above.
        unsafe {
            vst2q_f32(to, float32x4x2_t(a[0], b[0]));
            vst2q_f32(to.add(8), float32x4x2_t(a[1], b[1]));
        }
    }
    #[inline(always)]
    unsafe fn e2m1(v: NeonVector) -> NeonVector {
        // SAFETY: see above; a lookup beyond byte 31 is zero.
        each(|i| unsafe {
            let table = uint8x16x2_t(vld1q_u8(E2M1_BYTES.as_ptr()), vld1q_u8(E2M1_BYTES.as_ptr().add(16)));
            let code = vandq_u32(words(v[i]), vdupq_n_u32(15));
            let bytes = vmlaq_u32(vdupq_n_u32(0x0010_FFFF), code, vdupq_n_u32(0x0101_0000));
            vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)))
        })
    }
    #[inline(always)]
    unsafe fn spread_words(v: NeonVector, log2: u32, width: u32) -> NeonVector {
        // SAFETY: see above.
        unsafe {
            let spread = repeated(v, log2);
            each(|i| {
                let lanes = vld1q_u32(LANE_NUMBERS.as_ptr().add(4 * i));
                let left = vandq_u32(lanes, vdupq_n_u32((1 << log2) - 1));
                let count = vnegq_s32(vreinterpretq_s32_u32(vmulq_n_u32(left, width)));
                of_words(vshlq_u32(words(spread[i]), count))
            })
        }
    }
    #[inline(always)]
    unsafe fn spread(from: *const f32, log2: u32) -> NeonVector {
        // SAFETY: see above.
        unsafe { repeated(Self::load(from), log2) }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
        // SAFETY: see above; the block has 8 rows of 8 words on both sides.
        unsafe {
            for (row, column) in [(0, 0), (0, 4), (4, 0), (4, 4)] {
                let r: [float32x4_t; 4] =
                    std::array::from_fn(|i| vld1q_f32(from.add((row + i) * from_stride + column * 4).cast()));
                let pairs = |a, b| {
                    let (even, odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
                    [vreinterpretq_f64_f32(even), vreinterpretq_f64_f32(odd)]
                };
                let ([a, b], [c, d]) = (pairs(r[0], r[1]), pairs(r[2], r[3]));
                let columns = [vtrn1q_f64(a, c), vtrn1q_f64(b, d), vtrn2q_f64(a, c), vtrn2q_f64(b, d)];
                for (i, v) in columns.into_iter().enumerate() {
                    let to = to.add((column + i) * to_stride + row * 4);
                    vst1q_f32(to.cast(), vreinterpretq_f32_f64(v));
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch never faults and changes no memory.
        unsafe {
            asm!("prfm pldl2keep, [{at}]", at = in(reg) at.addr(), options(nomem, nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn prefetch_near(at: *const u8) {
        // SAFETY: a prefetch never faults and changes no memory.
        unsafe {
            asm!("prfm pldl1keep, [{at}]", at = in(reg) at.addr(), options(nomem, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn dot_i8(acc: NeonVector, a: NeonVector, b: NeonVector) -> NeonVector {
        // SAFETY: see above; DOT says that the instruction is present.
        each(|i| unsafe {
            if !DOT {
                let [a, b] = [a[i], b[i]].map(|v| vreinterpretq_s8_f32(v));
                let low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
                let sums = vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b)));
                return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(acc[i]), sums));
            }
            let mut sum = acc[i];
            asm!(".arch_extension dotprod", "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
                sum = inlateout(vreg) sum, a = in(vreg) a[i], b = in(vreg) b[i],
                options(pure, nomem, nostack, preserves_flags));
            sum
        })
    }
    #[inline(always)]
    unsafe fn nibble_bytes<const UPPER: bool>(v: NeonVector, table: &[i8; 16]) -> NeonVector {
        // SAFETY: see above.
        each(|i| unsafe {
            let bytes = vreinterpretq_u8_f32(v[i]);
            let codes = if UPPER { vshrq_n_u8::<4>(bytes) } else { vandq_u8(bytes, vdupq_n_u8(15)) };
            vreinterpretq_f32_s8(vqtbl1q_s8(vld1q_s8(table.as_ptr()), codes))
        })
    }
}
