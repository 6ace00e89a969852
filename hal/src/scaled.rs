//! Keys and values of eight bits, with a scale for each head of each token.
//!
//! A head is `head_dim` codes of [`DType::F8E4m3`] or [`DType::I8`] and, behind them, its scale as an f32
//! (little endian). An element is its code times the scale. So it is in the wire layout of KV; in its pages a
//! backend puts the same bytes where it likes.
//!
//! The scale of a head is the least power of two that brings its largest magnitude to at most the largest
//! code; codes are rounded to nearest, ties to even. Multiplying by such a scale, or by its inverse, never
//! rounds: all devices write the same codes, and eight-bit KV that passed through a wider type is unchanged.
//! Magnitudes below 2^-100 count as 2^-100, so that no scale is subnormal. A head with an element that is not
//! finite has NaN as its scale.

use crate::DType;
use crate::cast::low_u8;

/// Bytes of a scale.
pub const SCALE_BYTES: usize = 4;

/// The smallest magnitude that determines a scale: 2^-100.
const LEAST: f32 = f32::from_bits(27 << 23);

/// The scale of a head whose largest magnitude this is.
pub fn scale(dtype: DType, largest: f32) -> f32 {
    if !largest.is_finite() {
        return f32::NAN;
    }
    // what carries a fraction above that of the largest code into the exponent, and this code's exponent
    let (carry, exponent) = if dtype == DType::I8 { (0x01_FFFF, 6) } else { (0x1F_FFFF, 8) };
    let bits = (largest.max(LEAST).to_bits() + carry) & 0x7F80_0000;
    f32::from_bits(bits - (exponent << 23))
}

/// The code nearest to `value`, which is no larger than the largest one.
#[inline(always)]
pub fn code(dtype: DType, value: f32) -> u8 {
    if dtype == DType::I8 {
        // 1.5 * 2^23: the sum has no fraction
        return low_u8((value + 12_582_912.0).to_bits().into());
    }
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // below 2^-6 a step is 2^-9, which is that of sums with 2^14
    let small = (f32::from_bits(magnitude) + 16_384.0).to_bits();
    let rounded = (magnitude + 0x7_FFFF + (magnitude >> 20 & 1)) >> 20;
    let code = if magnitude < 0x3C80_0000 { small } else { rounded.wrapping_sub(120 << 3) };
    low_u8((code & 0x7F | bits >> 24 & 0x80).into())
}

/// The number that a code stands for, before its scale.
#[inline(always)]
pub fn number(dtype: DType, code: u8) -> f32 {
    if dtype == DType::I8 {
        return f32::from(code.cast_signed());
    }
    let magnitude = u32::from(code & 0x7F);
    let small = magnitude as f32 * f32::from_bits(0x3B00_0000);
    let large = f32::from_bits((magnitude << 20) + 0x3C00_0000);
    let value = if magnitude < 8 { small } else { large };
    let value = if magnitude == 0x7F { f32::NAN } else { value };
    if code & 0x80 == 0 { value } else { -value }
}

/// Writes a head as codes and their scale; `to` has four bytes more than `head` has elements.
#[inline(always)]
pub fn encode(dtype: DType, head: &[f32], to: &mut [u8]) {
    let largest = head.iter().fold(0.0, |largest: f32, v| largest.max(v.abs()));
    let is_finite = head.iter().fold(true, |all, v| all & v.is_finite());
    let scale = scale(dtype, if is_finite { largest } else { f32::NAN });
    let inverse = 1.0 / scale;
    let (codes, stored) = to.split_at_mut(head.len());
    for (to, &value) in codes.iter_mut().zip(head) {
        *to = if is_finite { code(dtype, value * inverse) } else { 0 };
    }
    stored.copy_from_slice(&scale.to_le_bytes());
}

/// Reads a head; `from` has four bytes more than `head` has elements.
///
/// # Panics
/// If it has fewer.
#[inline(always)]
pub fn decode(dtype: DType, from: &[u8], head: &mut [f32]) {
    let (codes, stored) = from.split_at(head.len());
    let scale = f32::from_le_bytes(*stored.first_chunk().expect("four bytes of a scale"));
    for (value, &code) in head.iter_mut().zip(codes) {
        *value = number(dtype, code) * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cast::to_f32;
    use crate::random::Stream;

    const DTYPES: [DType; 2] = [DType::F8E4m3, DType::I8];

    fn largest(dtype: DType) -> f32 {
        if dtype == DType::I8 { 127.0 } else { 448.0 }
    }

    #[test]
    fn codes_are_those_of_the_dtype() {
        let mut stream = Stream::new(1);
        for dtype in DTYPES {
            for bits in 0..=255 {
                let want = dtype.decode(&[bits])[0];
                let got = f64::from(number(dtype, bits));
                assert!(got == want || got.is_nan() && want.is_nan(), "{dtype} {bits:#x}: {got} {want}");
            }
            let most = largest(dtype);
            let ties = (0..4096).map(|i| i as f32 / 4096.0 * most);
            let small = (0..64).map(|i| i as f32 / 4096.0);
            let random = (0..10_000).map(|_| to_f32(stream.next_normal()) * most / 6.0);
            for value in ties.chain(small).chain(random).map(|v| v.clamp(-most, most)) {
                for value in [value, -value] {
                    let mut want = Vec::new();
                    dtype.encode(value.into(), &mut want);
                    let same = number(dtype, code(dtype, value)) == number(dtype, want[0]);
                    assert!(same, "{dtype} {value}: {:#x} {:#x}", code(dtype, value), want[0]);
                }
            }
        }
    }

    #[test]
    fn a_scale_is_the_least_power_of_two_that_suffices() {
        for dtype in DTYPES {
            let most = largest(dtype);
            for value in
                [1e-20f32, 0.37, 1.0, 1.75, 1.750_001, 1.984_375, 1.99, 127.0, 448.0, 449.0, f32::MAX]
            {
                let scale = scale(dtype, value);
                assert_eq!(scale.to_bits() & 0x7F_FFFF, 0, "{dtype} {value}: {scale}");
                assert!(value / scale <= most && value / (scale / 2.0) > most, "{dtype} {value}: {scale}");
            }
            assert_eq!(scale(dtype, 0.0), scale(dtype, LEAST));
            assert!(scale(dtype, f32::INFINITY).is_nan() && scale(dtype, f32::NAN).is_nan());
        }
    }

    #[test]
    fn a_head_comes_back_within_half_a_step_and_then_stays() {
        let mut stream = Stream::new(2);
        for dtype in DTYPES {
            for factor in [1e-30, 1e-3, 1.0, 1e30f32] {
                let head: Vec<f32> = (0..64).map(|_| to_f32(stream.next_normal()) * factor).collect();
                let (mut bytes, mut back) = (vec![0; 68], vec![0.0; 64]);
                encode(dtype, &head, &mut bytes);
                decode(dtype, &bytes, &mut back);
                let scale = f32::from_le_bytes(*bytes[64..].first_chunk().unwrap());
                for (&value, &got) in head.iter().zip(&back) {
                    let step = match dtype {
                        DType::I8 => 0.5 * scale,
                        _ => (value.abs() / 16.0).max(scale / 1024.0),
                    };
                    assert!((value - got).abs() <= step, "{dtype}: {value} became {got}");
                }
                let (mut again, mut twice) = (vec![0; 68], vec![0.0; 64]);
                encode(dtype, &back, &mut again);
                decode(dtype, &again, &mut twice);
                assert_eq!(twice, back);
                // bf16 has a bit for each of a code
                let narrow: Vec<f32> = back.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
                assert_eq!(narrow, back);
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_makes_a_head_nan() {
        for dtype in DTYPES {
            let (mut bytes, mut back) = ([0xFF; 8], [1.0; 4]);
            encode(dtype, &[0.0; 4], &mut bytes);
            decode(dtype, &bytes, &mut back);
            assert_eq!(back, [0.0; 4]);
            for value in [f32::NAN, f32::INFINITY] {
                encode(dtype, &[1.0, value, 2.0, 3.0], &mut bytes);
                decode(dtype, &bytes, &mut back);
                assert!(back.iter().all(|v| v.is_nan()));
            }
        }
    }
}
