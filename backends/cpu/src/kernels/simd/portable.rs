//! Plain Rust: eight lanes that the compiler maps to what the target has.

use super::Simd;
use half::{bf16, f16};

/// The level that runs everywhere.
#[derive(Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 8;
type PortableVector = [f32; LANES];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> PortableVector {
    let mut v = [0.0; LANES];
    for (i, lane) in v.iter_mut().enumerate() {
        *lane = f(i);
    }
    v
}

/// 2^n for n in -126..=127.
#[inline(always)]
fn power(n: i32) -> f32 {
    f32::from_bits((n + 127).cast_unsigned() << 23)
}

// SAFETY (all blocks below): pointers are valid for LANES elements, by the trait's contract.
impl Simd for Portable {
    const LANES: usize = LANES;
    const DOT_BF16: bool = false;
    const DOT_I16: bool = false;
    type V = PortableVector;

    #[inline(always)]
    unsafe fn splat(value: f32) -> PortableVector {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> PortableVector {
        // SAFETY: see above.
        unsafe { from.cast::<PortableVector>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: PortableVector) {
        // SAFETY: see above.
        unsafe { to.cast::<PortableVector>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> PortableVector {
        // SAFETY: see above.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| f32::from_bits(u32::from(bits[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> PortableVector {
        // SAFETY: see above.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| f16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: PortableVector) {
        // SAFETY: see above.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(v.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: PortableVector) {
        // SAFETY: see above.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(v.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn add(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn fma(a: PortableVector, b: PortableVector, c: PortableVector) -> PortableVector {
        // `mul_add` is a library call where the target has no such instruction
        each(|i| if cfg!(target_arch = "aarch64") { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    unsafe fn sum(v: PortableVector) -> f32 {
        let four = [v[0] + v[4], v[1] + v[5], v[2] + v[6], v[3] + v[7]];
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, v: [PortableVector; 4]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: see above; `to` has room for four.
            unsafe { to.add(i).write_unaligned(Self::sum(v)) };
        }
    }
    #[inline(always)]
    unsafe fn max_lane(v: PortableVector) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    unsafe fn round(v: PortableVector) -> PortableVector {
        // adding 1.5 * 2^23 pushes the fraction out; exact for the |v| < 2^22 that exp needs
        const MAGIC: f32 = 12_582_912.0;
        each(|i| (v[i] + MAGIC) - MAGIC)
    }
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "a whole number")]
    unsafe fn scale(v: PortableVector, n: PortableVector) -> PortableVector {
        // in two factors, because 2^-150 and 2^128 are no normal numbers
        each(|i| {
            let n = n[i] as i32;
            v[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }
    #[inline(always)]
    unsafe fn zero_below(v: PortableVector, x: PortableVector, least: f32) -> PortableVector {
        each(|i| if x[i] < least { 0.0 } else { v[i] })
    }
    #[inline(always)]
    unsafe fn bf16_low(words: PortableVector) -> PortableVector {
        each(|i| f32::from_bits(words[i].to_bits() << 16))
    }
    #[inline(always)]
    unsafe fn bf16_high(words: PortableVector) -> PortableVector {
        each(|i| f32::from_bits(words[i].to_bits() & 0xFFFF_0000))
    }
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
    unsafe fn f16_low(words: PortableVector) -> PortableVector {
        each(|i| f16::from_bits(words[i].to_bits() as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn f16_high(words: PortableVector) -> PortableVector {
        each(|i| f16::from_bits((words[i].to_bits() >> 16) as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn shifted(words: PortableVector, bits: u32) -> PortableVector {
        each(|i| f32::from_bits(words[i].to_bits() >> bits))
    }
    #[inline(always)]
    unsafe fn shifted_left(words: PortableVector, bits: u32) -> PortableVector {
        each(|i| f32::from_bits(words[i].to_bits() << bits))
    }
    #[inline(always)]
    unsafe fn masked(words: PortableVector, mask: u32) -> PortableVector {
        each(|i| f32::from_bits(words[i].to_bits() & mask))
    }
    #[inline(always)]
    unsafe fn or(a: PortableVector, b: PortableVector) -> PortableVector {
        each(|i| f32::from_bits(a[i].to_bits() | b[i].to_bits()))
    }
    #[inline(always)]
    unsafe fn number(words: PortableVector) -> PortableVector {
        each(|i| words[i].to_bits().cast_signed() as f32)
    }
    #[inline(always)]
    unsafe fn byte_on_top(words: PortableVector, byte: u32) -> PortableVector {
        each(|i| 16_777_216.0 * f32::from(words[i].to_bits().to_le_bytes()[byte as usize].cast_signed()))
    }
    #[inline(always)]
    unsafe fn e2m1(words: PortableVector) -> PortableVector {
        const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        each(|i| {
            let bits = words[i].to_bits();
            let magnitude = MAGNITUDES[(bits & 7) as usize];
            if bits & 8 == 0 { magnitude } else { -magnitude }
        })
    }
    #[inline(always)]
    unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
        for i in 0..LANES {
            for j in 0..LANES {
                // SAFETY: the block has LANES rows of LANES words on both sides.
                unsafe {
                    let word = from.add(i * from_stride + j * 4).cast::<u32>().read_unaligned();
                    to.add(j * to_stride + i * 4).cast::<u32>().write_unaligned(word);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_near(_at: *const u8) {}
}
