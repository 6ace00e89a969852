//! Element types that host, devices and wire exchange.

use crate::cast::{to_f32, to_i32, to_u32};
use serde::{Deserialize, Serialize};

/// The type of one element. Floating-point types store weights, activations and KV; `U32` stores
/// token ids, positions, slots and page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// The upper 16 bits of an `F32`.
    Bf16,
    /// IEEE 754 half precision.
    F16,
    /// An 8-bit float with 4 exponent and 3 fraction bits, no infinities and a maximum of 448 (Micikevicius
    /// et al. 2022, "FP8 formats for deep learning"). Used for weights, for KV with a scale for each head
    /// (module `scaled`), and for arithmetic on parts that support it.
    F8E4m3,
    /// An integer from -127 to 127. Used for KV with a scale for each head (module `scaled`).
    I8,
    /// Unsigned 32-bit integer, for indices.
    U32,
}

impl DType {
    /// The floating-point types that every backend can store and compute with.
    pub const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
    /// The types that KV can be stored and sent as.
    pub const KV: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3, DType::I8];

    /// Whether KV of this type has a scale for each head ([`scaled`](crate::scaled)).
    pub const fn is_scaled(self) -> bool {
        matches!(self, DType::F8E4m3 | DType::I8)
    }

    /// Bytes of one element.
    pub const fn size_bytes(self) -> u64 {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::F8E4m3 | DType::I8 => 1,
        }
    }

    /// Lower-case name, as used on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F8E4m3 => "f8e4m3",
            DType::I8 => "i8",
            DType::U32 => "u32",
        }
    }

    /// The unit round-off, i.e. the largest relative error of rounding one value to this type; zero for
    /// integers.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => 1.0 / (1u64 << 24) as f64,
            DType::Bf16 => 1.0 / (1u64 << 8) as f64,
            DType::F16 => 1.0 / (1u64 << 11) as f64,
            DType::F8E4m3 => 1.0 / 16.0,
            DType::I8 | DType::U32 => 0.0,
        }
    }

    /// Appends `value`, rounded to this type, to `bytes` (little endian).
    pub fn encode(self, value: f64, bytes: &mut Vec<u8>) {
        match self {
            DType::F32 => bytes.extend(to_f32(value).to_le_bytes()),
            DType::Bf16 => bytes.extend(half::bf16::from_f64(value).to_le_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f64(value).to_le_bytes()),
            DType::F8E4m3 => bytes.push(f8e4m3_from_f64(value)),
            DType::I8 => bytes.extend(i8_from_f64(value).to_le_bytes()),
            DType::U32 => bytes.extend(to_u32(value).to_le_bytes()),
        }
    }

    /// Decodes every element of `bytes` (little endian), ignoring a trailing partial element.
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        match self {
            DType::F32 => {
                bytes.as_chunks::<4>().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect()
            }
            DType::U32 => {
                bytes.as_chunks::<4>().0.iter().map(|&b| f64::from(u32::from_le_bytes(b))).collect()
            }
            DType::F8E4m3 => bytes.iter().map(|&bits| f8e4m3_to_f64(bits)).collect(),
            DType::I8 => bytes.iter().map(|&bits| f64::from(bits.cast_signed())).collect(),
            DType::Bf16 => {
                bytes.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f64()).collect()
            }
            DType::F16 => {
                bytes.as_chunks::<2>().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f64()).collect()
            }
        }
    }
}

fn f8e4m3_to_f64(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 0xF), f64::from(bits & 0x7));
    let magnitude = match (exponent, bits & 0x7) {
        (0xF, 0x7) => f64::NAN,
        (0, _) => fraction / 8.0 * 2f64.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Rounds to nearest, ties to even, and saturates at the largest value.
fn f8e4m3_from_f64(value: f64) -> u8 {
    const LARGEST: u8 = 0x7E;
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7F;
    }
    let magnitude = value.abs();
    // the codes 0..=LARGEST are in the order of their values
    let mut below = 0;
    while below < LARGEST && f8e4m3_to_f64(below + 1) <= magnitude {
        below += 1;
    }
    if below == LARGEST {
        return sign | LARGEST;
    }
    let (low, high) = (magnitude - f8e4m3_to_f64(below), f8e4m3_to_f64(below + 1) - magnitude);
    let up = high < low || (high == low && below % 2 == 1);
    sign | (below + u8::from(up))
}

/// Rounds to nearest, ties to even, and saturates at 127 of either sign.
fn i8_from_f64(value: f64) -> i8 {
    i8::try_from(to_i32(value.round_ties_even())).unwrap_or(if value < 0.0 { -127 } else { 127 }).max(-127)
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "f32" | "float32" => Ok(DType::F32),
            "bf16" | "bfloat16" => Ok(DType::Bf16),
            "f16" | "float16" | "half" => Ok(DType::F16),
            "f8e4m3" | "fp8" => Ok(DType::F8E4m3),
            "i8" | "int8" => Ok(DType::I8),
            "u32" => Ok(DType::U32),
            other => Err(format!("unknown dtype '{other}'; known: f32, bf16, f16, fp8, int8")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_and_decode_are_inverse_on_representable_values() {
        for dtype in DType::FLOATS {
            let mut bytes = Vec::new();
            let values = [0.0, 1.0, -2.5, 0.15625, -65280.0];
            for v in values {
                dtype.encode(v, &mut bytes);
            }
            assert_eq!(bytes.len() as u64, dtype.size_bytes() * values.len() as u64);
            assert_eq!(dtype.decode(&bytes), values, "{dtype}");
        }
    }

    #[test]
    fn eight_bits_round_to_the_nearest_and_saturate() {
        let round = |value: f64| {
            let mut bytes = Vec::new();
            DType::F8E4m3.encode(value, &mut bytes);
            DType::F8E4m3.decode(&bytes)[0]
        };
        for bits in (0..=255u8).filter(|bits| bits & 0x7F != 0x7F) {
            assert_eq!(round(f8e4m3_to_f64(bits)), f8e4m3_to_f64(bits), "{bits:#x}");
        }
        assert_eq!([448.0, 1e9, -1e9, 0.0625].map(round), [448.0, 448.0, -448.0, 0.0625]);
        // between 16 and 18, and between 18 and 20: the even code
        assert_eq!([17.0, 19.0, 17.1, -18.9].map(round), [16.0, 20.0, 18.0, -18.0]);
        // half of the least subnormal goes to zero
        assert_eq!([2f64.powi(-10), 2f64.powi(-9)].map(round), [0.0, 2f64.powi(-9)]);
        assert!(round(f64::NAN).is_nan());
    }

    #[test]
    fn names_parse_back() {
        for dtype in DType::FLOATS.into_iter().chain([DType::F8E4m3, DType::I8, DType::U32]) {
            assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
        }
        assert!("int4".parse::<DType>().unwrap_err().contains("known"));
    }
}
