//! Digests: what a simulated activation row carries instead of activations.
//!
//! A row's digest is 64 bits that stand in its first elements as small integers, which every
//! floating-point type holds exactly: 8 bits in each of the first 8 elements, 4 bits in each of the
//! first 16 where the type has but 8 bits. A shorter row holds what fits. A digest is read as a hash of
//! the *values* of these elements: any changed bit gives another digest, a conversion of dtype does not.

use half::f16;
use mixfleet_hal::cast::{to_u8, to_usize};
use mixfleet_hal::{DType, scaled};
use std::sync::LazyLock;

const KEY: [u64; 4] =
    [0xA076_1D64_78BD_642F, 0xE703_7ED1_A0B4_28DB, 0x8EBC_6AF0_9C88_C6E3, 0x5899_65CC_7537_4CC3];

/// Heads of eight bits as f32.
pub(crate) fn decoded(dtype: DType, head_dim: u32, bytes: &[u8]) -> Vec<u8> {
    let mut head = vec![0.0; head_dim as usize];
    let mut out = Vec::with_capacity(bytes.len() * 4);
    for coded in bytes.chunks_exact(head.len() + scaled::SCALE_BYTES) {
        scaled::decode(dtype, coded, &mut head);
        head.iter().for_each(|value| out.extend(value.to_le_bytes()));
    }
    out
}

/// Mixes two 64-bit numbers into one: the folded 128-bit product (as in wyhash).
#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
#[inline]
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ KEY[0]) * u128::from(b ^ KEY[1]);
    (product as u64) ^ (product >> 64) as u64
}

/// Returns a digest of arbitrary bytes.
pub(crate) fn of_bytes(seed: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut hash = mix(seed, bytes.len() as u64);
    for &word in words {
        hash = mix(hash, u64::from_le_bytes(word));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(hash, u64::from_le_bytes(last))
}

/// Returns a digest of the values of a row of any length, which is the same in every dtype that can hold
/// them.
pub(crate) fn of_values(seed: u64, dtype: DType, row: &[u8]) -> u64 {
    match dtype {
        DType::F32 | DType::U32 => folded(seed, row.as_chunks::<4>().0, u32::from_le_bytes),
        DType::Bf16 => folded(seed, row.as_chunks::<2>().0, |b| u32::from(u16::from_le_bytes(b)) << 16),
        DType::F16 => folded(seed, row.as_chunks::<2>().0, |b| f16::from_le_bytes(b).to_f32().to_bits()),
        DType::F8E4m3 => folded(seed, row.as_chunks::<1>().0, |[b]| EIGHT_BITS[usize::from(b)]),
        DType::I8 => folded(seed, row.as_chunks::<1>().0, |[b]| f32::from(b.cast_signed()).to_bits()),
    }
}

/// Returns the bits of the f32 with an element's value.
pub(crate) fn value_bits(dtype: DType, element: &[u8]) -> u32 {
    match (dtype, element) {
        (DType::Bf16, &[a, b]) => u32::from(u16::from_le_bytes([a, b])) << 16,
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32().to_bits(),
        (DType::F8E4m3, &[code]) => EIGHT_BITS[usize::from(code)],
        (DType::I8, &[code]) => f32::from(code.cast_signed()).to_bits(),
        (_, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    }
}

/// Bits of the f32 that each code of f8e4m3 stands for.
static EIGHT_BITS: LazyLock<[u32; 256]> = LazyLock::new(|| {
    let values = DType::F8E4m3.decode(&std::array::from_fn::<u8, 256, _>(to_u8));
    std::array::from_fn(|code| half::f16::from_f64(values[code]).to_f32().to_bits())
});

/// The f8e4m3 codes of 0 to 16.
const SMALL_CODES: [u8; 17] =
    [0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58];

/// Folds with four independent chains, which keep the multiplier busy.
fn folded<const N: usize>(seed: u64, elements: &[[u8; N]], value: impl Fn([u8; N]) -> u32) -> u64 {
    let word = |pair: &[[u8; N]]| {
        let high = pair.get(1).map_or(0, |&element| value(element));
        u64::from(value(pair[0])) | u64::from(high) << 32
    };
    // not the keys themselves, since `mix` would cancel them and multiply by zero
    let mut chains = KEY.map(|key| key.rotate_left(17) ^ seed);
    let (blocks, rest) = elements.as_chunks::<8>();
    for block in blocks {
        for (chain, pair) in chains.iter_mut().zip(block.chunks_exact(2)) {
            *chain = mix(*chain, word(pair));
        }
    }
    for (chain, pair) in chains.iter_mut().zip(rest.chunks(2)) {
        *chain = mix(*chain, word(pair));
    }
    let sum = mix(mix(chains[0], chains[1]), mix(chains[2], chains[3]));
    mix(sum, elements.len() as u64)
}

/// Returns how many elements of a row hold its digest, and how many bits each.
pub(crate) const fn lanes(dtype: DType) -> (usize, u32) {
    match dtype {
        DType::F8E4m3 | DType::I8 => (16, 4),
        _ => (8, 8),
    }
}

/// Returns the bytes of the elements that hold the digest of a row of `row_bytes` bytes.
pub(crate) fn lane_bytes(dtype: DType, row_bytes: usize) -> usize {
    (lanes(dtype).0 * to_usize(dtype.size_bytes())).min(row_bytes)
}

/// Reads the digest from the first elements of `row`.
pub(crate) fn read(dtype: DType, row: &[u8]) -> u64 {
    of_values(0, dtype, &row[..lane_bytes(dtype, row.len())])
}

/// Writes `digest` to the first elements of `row`.
#[inline]
pub(crate) fn write(dtype: DType, row: &mut [u8], digest: u64) {
    let (_, bits) = lanes(dtype);
    let lanes = lane_bytes(dtype, row.len());
    let mut left = digest;
    for element in row[..lanes].chunks_exact_mut(to_usize(dtype.size_bytes())) {
        put_small(dtype, element, to_u8(left & ((1 << bits) - 1)));
        left >>= bits;
    }
}

/// Encodes a small integer, which the dtype holds exactly (f8e4m3: up to 16, i8: up to 127).
#[inline]
pub(crate) fn put_small(dtype: DType, element: &mut [u8], value: u8) {
    match dtype {
        DType::F32 => element.copy_from_slice(&f32::from(value).to_le_bytes()),
        DType::Bf16 => element.copy_from_slice(&f32::from(value).to_le_bytes()[2..]),
        DType::F16 => element.copy_from_slice(&f16::from_f32(f32::from(value)).to_le_bytes()),
        DType::U32 => element.copy_from_slice(&u32::from(value).to_le_bytes()),
        DType::F8E4m3 => element[0] = SMALL_CODES[usize::from(value.min(16))],
        DType::I8 => element[0] = value.min(127),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3];

    fn row(dtype: DType, digest: u64, elements: usize) -> Vec<u8> {
        let mut row = vec![0; elements * dtype.size_bytes() as usize];
        write(dtype, &mut row, digest);
        row
    }

    #[test]
    fn a_digest_reads_the_same_in_the_wide_dtypes_and_from_longer_rows() {
        let want = read(DType::F32, &row(DType::F32, 0x0123_4567_89AB_CDEF, 8));
        for dtype in DType::FLOATS {
            for elements in [8, 9, 100] {
                assert_eq!(read(dtype, &row(dtype, 0x0123_4567_89AB_CDEF, elements)), want, "{dtype}");
            }
        }
    }

    #[test]
    fn every_bit_of_the_lanes_counts() {
        for dtype in ALL {
            for elements in [1, 3, 16] {
                let mut row = row(dtype, 0xFEDC_BA98_7654_3210, elements);
                let before = read(dtype, &row);
                for bit in 0..lane_bytes(dtype, row.len()) * 8 {
                    row[bit / 8] ^= 1 << (bit % 8);
                    assert_ne!(read(dtype, &row), before, "{dtype}, bit {bit} of {elements} elements");
                    row[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }

    #[test]
    fn small_integers_are_exact() {
        for dtype in ALL {
            for value in 0..=if dtype == DType::F8E4m3 { 16 } else { 255 } {
                let mut element = vec![0; dtype.size_bytes() as usize];
                put_small(dtype, &mut element, value);
                assert_eq!(dtype.decode(&element), [f64::from(value)], "{dtype}");
            }
        }
    }

    #[test]
    fn values_hash_the_same_in_every_dtype_and_differ_by_order_and_length() {
        let encode = |dtype: DType, values: &[u8]| {
            let mut bytes = Vec::new();
            values.iter().for_each(|&v| dtype.encode(f64::from(v), &mut bytes));
            bytes
        };
        let values: Vec<u8> = (0..37).map(|i| i * 7 % 16).collect();
        let want = of_values(5, DType::F32, &encode(DType::F32, &values));
        for dtype in ALL {
            assert_eq!(of_values(5, dtype, &encode(dtype, &values)), want, "{dtype}");
        }
        let mut swapped = values.clone();
        swapped.swap(1, 30);
        assert_ne!(of_values(5, DType::F32, &encode(DType::F32, &swapped)), want);
        assert_ne!(of_values(5, DType::F32, &encode(DType::F32, &values[..36])), want);
        assert_ne!(of_values(6, DType::F32, &encode(DType::F32, &values)), want);
    }
}
