//! How weights are stored: plainly in a dtype, or quantised with scales.
//!
//! A [`WeightFormat`] says what a cost model needs to know, namely bits per weight and whose arithmetic rate
//! applies. It is no operand of an operation.

use crate::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A quantised format of weights, with the layout of scales that checkpoints commonly have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    /// E4M3 with an f32 scale for each 128 x 128 weights (DeepSeek-V3, arXiv 2412.19437).
    Fp8,
    /// Integers with a 16-bit scale for each output feature, whose share of the bits is neglected.
    Int8,
    /// Integers with a 16-bit scale and a 4-bit zero point for each 128 weights (AWQ, GPTQ).
    Int4,
    /// E2M1 with an 8-bit exponent for each 32 weights (OCP Microscaling Formats 1.0).
    Mxfp4,
    /// E2M1 with an E4M3 scale for each 16 weights.
    Nvfp4,
}

impl WeightFormat {
    /// All formats, by falling size.
    pub const ALL: [WeightFormat; 5] =
        [WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Nvfp4, WeightFormat::Mxfp4, WeightFormat::Int4];

    /// Bits of a weight with its share of the scales.
    pub const fn bits(self) -> f64 {
        match self {
            WeightFormat::Fp8 => 8.0 + 32.0 / (128.0 * 128.0),
            WeightFormat::Int8 => 8.0,
            WeightFormat::Int4 => 4.0 + (16.0 + 4.0) / 128.0,
            WeightFormat::Mxfp4 => 4.0 + 8.0 / 32.0,
            WeightFormat::Nvfp4 => 4.0 + 8.0 / 16.0,
        }
    }

    /// Lower-case name, as used on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            WeightFormat::Fp8 => "fp8",
            WeightFormat::Int8 => "int8",
            WeightFormat::Int4 => "int4",
            WeightFormat::Mxfp4 => "mxfp4",
            WeightFormat::Nvfp4 => "nvfp4",
        }
    }
}

/// How a model's weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredAs {
    /// Everything in this dtype, which is that of the activations too.
    Plain(DType),
    /// The matrices of the layers in this format; embeddings, LM head, norms and activations in bf16.
    Quantised(WeightFormat),
}

impl StoredAs {
    /// What [`StoredAs::from_str`] reads.
    pub const NAMES: [&str; 8] = ["f32", "bf16", "f16", "fp8", "int8", "int4", "mxfp4", "nvfp4"];

    /// Dtype of activations, and of the weights that no format applies to.
    pub const fn plain(self) -> DType {
        match self {
            StoredAs::Plain(dtype) => dtype,
            StoredAs::Quantised(_) => DType::Bf16,
        }
    }

    /// Dtype of the KV, unless it is stated: that of the weights where KV can have it.
    pub const fn kv(self) -> DType {
        match self {
            StoredAs::Plain(dtype) => dtype,
            StoredAs::Quantised(WeightFormat::Fp8) => DType::F8E4m3,
            StoredAs::Quantised(_) => DType::Bf16,
        }
    }

    /// The quantised format, if there is one.
    pub const fn format(self) -> Option<WeightFormat> {
        match self {
            StoredAs::Plain(_) => None,
            StoredAs::Quantised(format) => Some(format),
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            StoredAs::Plain(dtype) => dtype.name(),
            StoredAs::Quantised(format) => format.name(),
        }
    }
}

impl fmt::Display for StoredAs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StoredAs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let format = WeightFormat::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(text));
        match (format, text.parse()) {
            (Some(format), _) => Ok(StoredAs::Quantised(format)),
            (None, Ok(DType::F8E4m3)) => Ok(StoredAs::Quantised(WeightFormat::Fp8)),
            (None, Ok(dtype)) if DType::FLOATS.contains(&dtype) => Ok(StoredAs::Plain(dtype)),
            _ => Err(format!("unknown dtype '{text}'; known: {}", StoredAs::NAMES.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_both_names_of_fp8_are_one() {
        for name in StoredAs::NAMES {
            assert_eq!(name.parse::<StoredAs>().map(StoredAs::name), Ok(name));
        }
        assert_eq!("F8E4M3".parse(), Ok(StoredAs::Quantised(WeightFormat::Fp8)));
        for bad in ["u32", "int3", ""] {
            assert!(bad.parse::<StoredAs>().unwrap_err().contains("known: f32"), "{bad}");
        }
    }

    #[test]
    fn scales_count() {
        let bits = WeightFormat::ALL.map(WeightFormat::bits);
        assert!(bits.is_sorted_by(|a, b| a >= b), "{bits:?}");
        assert_eq!([WeightFormat::Mxfp4, WeightFormat::Nvfp4].map(WeightFormat::bits), [4.25, 4.5]);
    }
}
