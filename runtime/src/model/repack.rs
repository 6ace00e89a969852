//! The bytes of quantised weights, from the layouts of checkpoints to that of [`mixfleet_hal::quantised`].
//!
//! Codes of four bits are nibbles of 32-bit words. AWQ packs neighbouring output features of an input
//! feature into a word, in the order 0, 2, 4, 6, 1, 3, 5, 7, and GPTQ neighbouring input features of an
//! output feature, both with the input features as rows. compressed-tensors packs zero points along the rows.

use mixfleet_hal::DType;

/// The column that nibble i of a word of AWQ holds.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(4 * at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_le_bytes(*word))
}

fn nibble(word: u32, at: usize) -> u32 {
    word >> (4 * at) & 15
}

/// Transposes a matrix `[rows, columns]` of elements of `element_bytes` bytes.
pub(super) fn transposed(bytes: &[u8], rows: usize, element_bytes: usize) -> Vec<u8> {
    let columns = bytes.len() / (rows * element_bytes).max(1);
    let mut out = Vec::with_capacity(bytes.len());
    for column in 0..columns {
        for row in 0..rows {
            out.extend_from_slice(&bytes[(row * columns + column) * element_bytes..][..element_bytes]);
        }
    }
    out
}

/// The codes of AWQ, `[inputs, outputs / 8]` words, as rows of outputs: `[outputs, inputs / 8]` words.
pub(super) fn awq_codes(bytes: &[u8], inputs: usize) -> Vec<u8> {
    let row_words = bytes.len() / (4 * inputs).max(1);
    let mut out = vec![0u32; row_words * inputs];
    let out_row = inputs / 8;
    for input in 0..inputs {
        for at in 0..row_words {
            let packed = word(bytes, input * row_words + at);
            for (place, &column) in AWQ_ORDER.iter().enumerate() {
                let output = at * 8 + column;
                out[output * out_row + input / 8] |= nibble(packed, place) << (4 * (input % 8));
            }
        }
    }
    out.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Packing of four-bit zero points into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroPacking {
    /// `[groups, outputs / 8]`, in AWQ's order.
    Awq,
    /// `[groups, outputs / 8]`, in order, minus one.
    GptqLessOne,
    /// `[outputs / 8, groups]`, in order.
    Rows,
}

/// Zero points `[outputs, groups]` as numbers of a dtype.
pub(super) fn zero_points(
    bytes: &[u8],
    packing: ZeroPacking,
    (outputs, groups): (usize, usize),
    dtype: DType,
) -> Vec<u8> {
    let row_words = outputs.div_ceil(8);
    let mut out = Vec::new();
    for output in 0..outputs {
        for group in 0..groups {
            let place = output % 8;
            let zero = match packing {
                ZeroPacking::Awq => {
                    let place = AWQ_ORDER.iter().position(|column| *column == place).unwrap_or_default();
                    nibble(word(bytes, group * row_words + output / 8), place)
                }
                ZeroPacking::GptqLessOne => nibble(word(bytes, group * row_words + output / 8), place) + 1,
                ZeroPacking::Rows => nibble(word(bytes, output / 8 * groups + group), place),
            };
            dtype.encode(f64::from(zero), &mut out);
        }
    }
    out
}

/// Powers of two, by exponents of eight bits (E8M0), as bf16.
pub(super) fn powers(bytes: &[u8]) -> Vec<u8> {
    // below 2^-126 a bf16 has no exponent bits; 255 is no number
    let bits = |&exponent: &u8| match exponent {
        0 => 0x0040,
        255 => 0x7FC0,
        other => u16::from(other) << 7,
    };
    bytes.iter().flat_map(|exponent| bits(exponent).to_le_bytes()).collect()
}

/// The reciprocal of each f32.
pub(super) fn reciprocals(bytes: &[u8]) -> Vec<u8> {
    words(bytes).flat_map(|bits| (1.0 / f32::from_bits(bits)).to_le_bytes()).collect()
}

/// Rows of equal lengths; row i of the result is row `order(i)`.
pub(super) fn reordered(bytes: &[u8], rows: usize, order: impl Fn(usize) -> usize) -> Vec<u8> {
    let row_bytes = bytes.len() / rows.max(1);
    (0..rows).flat_map(|row| bytes[order(row) * row_bytes..][..row_bytes].iter().copied()).collect()
}

/// The row of a GGUF file's queries or keys of a Llama that is row `row` of a checkpoint's: GGUF stores a
/// head's rows as rotated pairs, checkpoints store the first half before the second.
pub(super) fn unpaired(row: usize, head_dim: usize) -> usize {
    let (head, at) = (row / head_dim, row % head_dim);
    head * head_dim + at % (head_dim / 2) * 2 + at / (head_dim / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn awq_columns_become_rows() {
        // 8 inputs of 8 outputs: the code of input i and output o is (3 i + o) % 16
        let code = |input: usize, output: usize| ((3 * input + output) % 16) as u32;
        let pack = |input: usize| {
            AWQ_ORDER.iter().enumerate().fold(0, |word, (at, &output)| word | code(input, output) << (4 * at))
        };
        let packed = bytes(&std::array::from_fn::<_, 8, _>(pack));
        let rows = awq_codes(&packed, 8);
        for (output, row) in words(&rows).enumerate() {
            for input in 0..8 {
                assert_eq!(nibble(row, input), code(input, output), "{input} {output}");
            }
        }
        let zeros = zero_points(&bytes(&[pack(0), pack(1)]), ZeroPacking::Awq, (8, 2), DType::F32);
        let expected: Vec<f64> =
            (0..8).flat_map(|output| [code(0, output), code(1, output)]).map(f64::from).collect();
        assert_eq!(DType::F32.decode(&zeros), expected);
    }

    #[test]
    fn zero_points_of_the_other_packings() {
        let packed = bytes(&[0x7654_3210, 0x0000_00FF]);
        let gptq = zero_points(&packed, ZeroPacking::GptqLessOne, (8, 2), DType::Bf16);
        assert_eq!(DType::Bf16.decode(&gptq)[..6], [1.0, 16.0, 2.0, 16.0, 3.0, 1.0]);
        let rows = zero_points(&packed, ZeroPacking::Rows, (8, 2), DType::Bf16);
        assert_eq!(DType::Bf16.decode(&rows)[..6], [0.0, 15.0, 1.0, 15.0, 2.0, 0.0]);
    }

    #[test]
    fn powers_of_two_are_exact_in_bf16() {
        let decoded = DType::Bf16.decode(&powers(&(0..255).collect::<Vec<u8>>()));
        for (exponent, value) in decoded.into_iter().enumerate() {
            assert_eq!(value, f64::from(exponent as u32 as f32 - 127.0).exp2(), "{exponent}");
        }
        assert!(DType::Bf16.decode(&powers(&[255]))[0].is_nan());
    }

    #[test]
    fn pairs_of_a_head_become_halves() {
        assert_eq!(Vec::from_iter((0..8).map(|row| unpaired(row, 4))), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(reordered(&[1, 2, 3, 4], 4, |row| 3 - row), [4, 3, 2, 1]);
        assert_eq!(transposed(&[1, 2, 3, 4, 5, 6], 2, 1), [1, 4, 2, 5, 3, 6]);
    }
}
