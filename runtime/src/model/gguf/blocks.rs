//! The bytes of ggml's blocks of weights, as the arrays of [`mixfleet_hal::quantised`].

use super::super::repack::powers;
use super::grids;
use super::kinds::GgmlKind;
use half::f16;

/// An array of quantised weights that blocks are decoded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockPart {
    Codes,
    High,
    Scales,
    Zeros,
    Supers,
}

/// The values of the codes of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Weights of a super-block.
const SUPER: usize = 256;

/// The weights of a super-block of a lattice type: each an integer, times the scale of its group.
struct Lattice {
    integers: [i8; SUPER],
    /// Integers of groups of 16 or of 32.
    scales: [f32; 16],
}

impl GgmlKind {
    /// Appends a block's part of an array.
    ///
    /// Low nibbles of 16 bytes are weights 0 to 15 and high ones 16 to 31, of Q4_K and Q5_K likewise of 32
    /// bytes and 64 weights, whose bit i of `qh` belongs to 32 weights i. Pairs of bits of Q2_K, Q3_K, Q6_K
    /// and TQ2_0 are four quarters of 128 weights.
    pub(super) fn append(self, block: &[u8], part: BlockPart, out: &mut Vec<u8>) {
        use BlockPart::{Codes, High, Scales, Zeros};
        use GgmlKind as Kind;
        match (self, part) {
            (Kind::Q4_0 | Kind::Q4_1 | Kind::Q5_0 | Kind::Q5_1 | Kind::Q8_0 | Kind::Iq4Nl, Scales) => {
                out.extend_from_slice(&block[..2]);
            }
            (Kind::Q4_1 | Kind::Q5_1, Zeros) => out.extend([block[2], block[3] ^ 0x80]),
            (Kind::Q8_0, Codes) => out.extend_from_slice(&block[2..34]),
            (Kind::Q4_0, Codes) => put_halves(&block[2..18], out),
            (Kind::Q4_1, Codes) => put_halves(&block[4..20], out),
            (Kind::Q5_0, Codes) => put_halves(&block[6..22], out),
            (Kind::Q5_0, High) => out.extend_from_slice(&block[2..6]),
            (Kind::Q5_1, Codes) => put_halves(&block[8..24], out),
            (Kind::Q5_1, High) => out.extend_from_slice(&block[4..8]),
            (Kind::Iq4Nl, Codes) => out.extend(iq4(&block[2..18])),
            (Kind::Mxfp4, Scales) => out.extend(powers(&block[..1])),
            (Kind::Mxfp4, Codes) => put_halves(&block[1..17], out),
            (Kind::Nvfp4, Scales) => out.extend(block[..4].iter().map(|scale| unsigned_e4m3(*scale))),
            (Kind::Nvfp4, Codes) => block[4..].chunks(8).for_each(|eight| put_halves(eight, out)),
            (Kind::Tq1_0, Scales) => out.extend_from_slice(&block[52..54]),
            (Kind::Tq2_0, Scales) => out.extend_from_slice(&block[64..66]),
            (Kind::Tq1_0, Codes) => put_pairs(tq1_codes(block), out),
            // -1 to 2 about the middle, which is 8
            (Kind::Tq2_0, Codes) => put_pairs(pairs_of_bits(&block[..64]).map(|two| two + 7), out),
            (Kind::Q4K | Kind::Q5K | Kind::Q6K, _) => self.append_large(block, part, out),
            (Kind::Q2K | Kind::Q3K | Kind::Iq4Xs | Kind::Iq3S, _) => self.append_small(block, part, out),
            (_, Codes) => out.extend(self.lattice(block).integers.map(i8::cast_unsigned)),
            (_, Scales) => {
                let scales = self.lattice(block).scales;
                let groups = if matches!(self, Kind::Iq1M | Kind::Iq2Xs | Kind::Iq2S) { 16 } else { 8 };
                out.extend(scales[..groups].iter().flat_map(|scale| scale.to_le_bytes()));
            }
            _ => {}
        }
    }

    /// Like `append`, for types with integer scales and codes of 4 to 6 bits.
    fn append_large(self, block: &[u8], part: BlockPart, out: &mut Vec<u8>) {
        use BlockPart::{Codes, High, Scales, Supers, Zeros};
        use GgmlKind as Kind;
        match (self, part) {
            (Kind::Q4K | Kind::Q5K, Supers) => out.extend_from_slice(&block[..4]),
            (Kind::Q4K | Kind::Q5K, Scales) => out.extend(scales_of_k(&block[4..16]).0),
            (Kind::Q4K | Kind::Q5K, Zeros) => out.extend(scales_of_k(&block[4..16]).1),
            (Kind::Q4K, Codes) => block[16..].chunks(32).for_each(|chunk| put_halves(chunk, out)),
            (Kind::Q5K, Codes) => block[48..].chunks(32).for_each(|chunk| put_halves(chunk, out)),
            (Kind::Q5K, High) => {
                for bit in 0..8 {
                    for eight in block[16..48].chunks(8) {
                        let bits = eight.iter().enumerate().map(|(i, byte)| (byte >> bit & 1) << i);
                        out.push(bits.fold(0, |all, bit| all | bit));
                    }
                }
            }
            (Kind::Q6K, Supers) => out.extend_from_slice(&block[208..210]),
            (Kind::Q6K, Scales) => out.extend_from_slice(&block[192..208]),
            (Kind::Q6K, Codes) => {
                for half in block[..128].chunks(64) {
                    for (shift, from) in
                        [(0, &half[..32]), (0, &half[32..]), (4, &half[..32]), (4, &half[32..])]
                    {
                        let pairs = from.chunks(2);
                        out.extend(pairs.map(|two| (two[0] >> shift & 15) | (two[1] >> shift & 15) << 4));
                    }
                }
            }
            (Kind::Q6K, High) => {
                for half in block[128..192].chunks(32) {
                    for shift in [0, 2, 4, 6] {
                        for four in half.chunks(4) {
                            let bits =
                                four.iter().enumerate().map(|(i, byte)| (byte >> shift & 3) << (2 * i));
                            out.push(bits.fold(0, |all, two| all | two));
                        }
                    }
                }
            }
            _ => {}
        }
    }

    /// Like `append`, for types with integer scales and other codes.
    fn append_small(self, block: &[u8], part: BlockPart, out: &mut Vec<u8>) {
        use BlockPart::{Codes, Scales, Supers, Zeros};
        use GgmlKind as Kind;
        match (self, part) {
            (Kind::Q2K, Supers) => out.extend_from_slice(&block[80..84]),
            (Kind::Q2K, Scales) => out.extend(block[..16].iter().map(|both| both & 15)),
            (Kind::Q2K, Zeros) => out.extend(block[..16].iter().map(|both| both >> 4)),
            (Kind::Q2K, Codes) => put_pairs(pairs_of_bits(&block[16..80]), out),
            (Kind::Q3K, Supers) => out.extend_from_slice(&block[108..110]),
            (Kind::Q3K, Scales) => out.extend(scales_of_q3(&block[96..108])),
            (Kind::Q3K, Codes) => {
                let low = pairs_of_bits(&block[32..96]);
                // -4 to 3 about the middle, which is 8: a clear third bit means 4 less
                let code = |(at, low): (usize, u8)| low + 4 + ((block[at % 32] >> (at / 32) & 1) << 2);
                put_pairs(low.enumerate().map(code), out);
            }
            (Kind::Iq4Xs, Supers) => out.extend_from_slice(&block[..2]),
            (Kind::Iq4Xs, Scales) => {
                let high = u16::from_le_bytes([block[2], block[3]]);
                let scale = |i: usize| {
                    let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
                    let high = (high >> (2 * i) & 3).to_le_bytes()[0];
                    (low | high << 4).wrapping_sub(32)
                };
                out.extend((0..8).map(scale));
            }
            (Kind::Iq4Xs, Codes) => block[8..].chunks(16).for_each(|chunk| out.extend(iq4(chunk))),
            (Kind::Iq3S, Supers) => out.extend_from_slice(&block[..2]),
            (Kind::Iq3S, Scales) => {
                let scale = |i: usize| 1 + 2 * (block[106 + i / 2] >> (4 * (i % 2)) & 15);
                out.extend((0..8).map(scale));
            }
            (Kind::Iq3S, Codes) => {
                let entry = |i: usize| {
                    let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
                    grids::IQ3_S.entry(usize::from(block[2 + i]) | high << 8)
                };
                let signs = |i: usize| block[74 + i / 2] >> (4 * (i % 2));
                for i in 0..SUPER / 4 {
                    out.extend(signed(entry(i), signs(i)).map(i8::cast_unsigned));
                }
            }
            _ => {}
        }
    }

    /// The weights of a block of the other types of a lattice; nothing of any other type.
    fn lattice(self, block: &[u8]) -> Lattice {
        let mut all = Lattice { integers: [0; SUPER], scales: [0.0; 16] };
        let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
        match self {
            GgmlKind::Iq2Xxs => {
                for (i, group) in block[2..].chunks(8).enumerate() {
                    let packed = word(&group[4..]);
                    all.scales[i] = d * odd(packed >> 28) * 0.125;
                    for (j, index) in group[..4].iter().enumerate() {
                        let entry = grids::IQ2_XXS.entry(usize::from(*index));
                        all.put(8 * (4 * i + j), &signed(entry, even_signs(packed >> (7 * j))));
                    }
                }
            }
            GgmlKind::Iq2Xs => {
                for (i, two) in block[2..66].chunks(2).enumerate() {
                    let packed = u32::from(two[0]) | u32::from(two[1]) << 8;
                    let entry = grids::IQ2_XS.entry((packed & 511) as usize);
                    all.put(8 * i, &signed(entry, even_signs(packed >> 9)));
                }
                all.half_byte_scales(d, &block[66..74]);
            }
            GgmlKind::Iq2S => {
                for i in 0..SUPER / 8 {
                    let high = usize::from(block[66 + i / 4] >> (2 * (i % 4)) & 3);
                    let entry = grids::IQ2_S.entry(usize::from(block[2 + i]) | high << 8);
                    all.put(8 * i, &signed(entry, block[34 + i]));
                }
                all.half_byte_scales(d, &block[74..82]);
            }
            GgmlKind::Iq3Xxs => {
                for i in 0..8 {
                    let packed = word(&block[66 + 4 * i..]);
                    all.scales[i] = d * odd(packed >> 28) * 0.25;
                    for j in 0..8 {
                        let entry = grids::IQ3_XXS.entry(usize::from(block[2 + 8 * i + j]));
                        let signs = even_signs(packed >> (7 * (j / 2))) >> (4 * (j % 2));
                        all.put(32 * i + 4 * j, &signed(entry, signs));
                    }
                }
            }
            GgmlKind::Iq1S => {
                for i in 0..8 {
                    let high = u32::from(block[34 + 2 * i]) | u32::from(block[35 + 2 * i]) << 8;
                    all.scales[i] = d * odd(high >> 12 & 7) * 0.125;
                    for j in 0..4 {
                        let index = usize::from(block[2 + 4 * i + j]) | (high as usize >> (3 * j) & 7) << 8;
                        all.put_third(8 * (4 * i + j), index, high & 0x8000 != 0);
                    }
                }
            }
            GgmlKind::Iq1M => all.iq1_m(block),
            _ => {}
        }
        all
    }
}

impl Lattice {
    fn put(&mut self, at: usize, integers: &[i8]) {
        self.integers[at..at + integers.len()].copy_from_slice(integers);
    }

    /// Eight weights of IQ1_S or IQ1_M: -1, 0 or 1, plus or minus an eighth.
    fn put_third(&mut self, at: usize, index: usize, is_less: bool) {
        let eighth = if is_less { -1 } else { 1 };
        self.put(at, &grids::IQ1_S.entry(index).map(|third| 8 * third + eighth));
    }

    /// Scales of 16 weights in four bits each.
    fn half_byte_scales(&mut self, d: f32, packed: &[u8]) {
        for (i, scale) in self.scales.iter_mut().enumerate() {
            *scale = d * odd(u32::from(packed[i / 2] >> (4 * (i % 2)) & 15)) * 0.125;
        }
    }

    /// IQ1_M, whose f16 scale is split among the high bits of its four words of scales.
    fn iq1_m(&mut self, block: &[u8]) {
        let words: [u16; 4] =
            std::array::from_fn(|i| u16::from_le_bytes([block[48 + 2 * i], block[49 + 2 * i]]));
        let bits = words.iter().enumerate().fold(0, |all, (i, word)| all | (word >> 12) << (4 * i));
        let d = f16::from_bits(bits).to_f32();
        for (i, scale) in self.scales.iter_mut().enumerate() {
            *scale = d * odd(u32::from(words[i / 4] >> (3 * (i % 4)) & 7)) * 0.125;
        }
        for i in 0..SUPER / 8 {
            let high = block[32 + i / 2] >> (4 * (i % 2)) & 15;
            let index = usize::from(block[i]) | usize::from(high & 7) << 8;
            self.put_third(8 * i, index, high & 8 != 0);
        }
    }
}

/// Returns twice a number plus one.
fn odd(number: u32) -> f32 {
    mixfleet_hal::cast::to_f32(f64::from(2 * number + 1))
}

fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

/// Eight signs from seven bits: the number of negative signs is even.
fn even_signs(packed: u32) -> u8 {
    let seven = packed & 127;
    (seven | (seven.count_ones() & 1) << 7).to_le_bytes()[0]
}

/// Numbers with the signs in the bits of `signs`, from the lowest on.
fn signed<const N: usize>(numbers: [i8; N], signs: u8) -> [i8; N] {
    std::array::from_fn(|i| if signs >> i & 1 == 0 { numbers[i] } else { -numbers[i] })
}

/// The values of IQ4_NL: low nibbles first, then high ones.
fn iq4(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    let number = |code: u8| IQ4[usize::from(code & 15)].cast_unsigned();
    bytes.iter().map(move |byte| number(*byte)).chain(bytes.iter().map(move |byte| number(byte >> 4)))
}

/// Two bits per weight: the lowest bits of all 32 bytes first, then the next bits.
fn pairs_of_bits(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    (0..4 * bytes.len()).map(|at| bytes[at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3)
}

/// The codes of TQ1_0, -1 to 1 about the middle, which is 8: five base-3 digits in a byte, as a fraction of
/// 256; the first digits of 32 bytes come first.
fn tq1_codes(block: &[u8]) -> impl Iterator<Item = u8> + '_ {
    let parts = [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)];
    let code = |byte: u8, power: u8| ((u16::from(byte.wrapping_mul(power)) * 3) >> 8).to_le_bytes()[0] + 7;
    parts.into_iter().flat_map(move |(bytes, count)| {
        let powers = [1u8, 3, 9, 27, 81].into_iter().take(count);
        powers.flat_map(move |power| bytes.iter().map(move |byte| code(*byte, power)))
    })
}

/// Nibbles in order, of codes one by one.
fn put_pairs(codes: impl Iterator<Item = u8>, out: &mut Vec<u8>) {
    let mut first = None;
    for code in codes {
        match first.take() {
            None => first = Some(code),
            Some(low) => out.push(low | code << 4),
        }
    }
}

/// Nibbles in order, of bytes whose low ones come before all high ones.
fn put_halves(bytes: &[u8], out: &mut Vec<u8>) {
    for shift in [0, 4] {
        out.extend(bytes.chunks(2).map(|two| (two[0] >> shift & 15) | (two[1] >> shift & 15) << 4));
    }
}

/// A scale of NVFP4, whose sign does not count, and whose largest code is zero.
fn unsigned_e4m3(scale: u8) -> u8 {
    match scale & 0x7F {
        0x7F => 0,
        other => other,
    }
}

/// The eight scales and minima of six bits in 12 bytes of a block of Q4_K or Q5_K.
fn scales_of_k(packed: &[u8]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut minima) = ([0; 8], [0; 8]);
    for i in 0..4 {
        (scales[i], minima[i]) = (packed[i] & 63, packed[i + 4] & 63);
        scales[i + 4] = (packed[i + 8] & 15) | (packed[i] >> 6) << 4;
        minima[i + 4] = (packed[i + 8] >> 4) | (packed[i + 4] >> 6) << 4;
    }
    (scales, minima)
}

/// The 16 scales of Q3_K: four bits of each in 8 bytes, two more in 4 bytes, and 32 subtracted.
fn scales_of_q3(packed: &[u8]) -> [u8; 16] {
    std::array::from_fn(|i| {
        let low = packed[i % 8] >> (4 * (i / 8)) & 15;
        let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        (low | high << 4).wrapping_sub(32)
    })
}

/// An array of rows of blocks, of which row i of the result is row `order(i)`.
pub(super) fn rows_of(
    kind: GgmlKind,
    bytes: &[u8],
    size: (usize, usize),
    part: BlockPart,
    order: impl Fn(usize) -> usize,
) -> Vec<u8> {
    let (rows, columns) = size;
    let row_bytes = columns / usize::try_from(kind.columns()).unwrap_or(1) * kind.bytes();
    let mut out = Vec::new();
    for row in 0..rows {
        let blocks = &bytes[order(row) * row_bytes..][..row_bytes];
        blocks.chunks(kind.bytes()).for_each(|block| kind.append(block, part, &mut out));
    }
    out
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
