//! Tensor types of ggml, and the device layout of each.
//!
//! | becomes | types | bits a weight on a device (in the file) |
//! |---|---|---|
//! | the same dtype | F32, F16, BF16 | as in the file |
//! | codes of 4 bits, f16 scales of 32 | Q4_0; Q4_1 with minima | 4.5; 5 (the same) |
//! | codes of 5 bits, f16 scales of 32 | Q5_0; Q5_1 with minima | 5.5; 6 (the same) |
//! | codes of 8 bits, f16 scales of 32 | Q8_0; IQ4_NL | 8.5 (8.5; 4.5) |
//! | codes of 4 bits, integer scales | Q2_K, Q3_K, Q4_K | 5.1, 4.6, 4.6 (2.6, 3.4, 4.5) |
//! | codes of 5 and 6 bits, integer scales | Q5_K, Q6_K | 5.6, 6.6 (5.5, 6.6) |
//! | codes of 8 bits, integer scales | IQ4_XS, IQ3_S | 8.3 (4.3, 3.4) |
//! | codes of 8 bits, f32 scales of 32 | IQ3_XXS, IQ2_XXS, IQ1_S | 9 (3.1, 2.1, 1.6) |
//! | codes of 8 bits, f32 scales of 16 | IQ2_XS, IQ2_S, IQ1_M | 10 (2.3, 2.6, 1.8) |
//! | codes of 4 bits, an f16 scale of 256 | TQ1_0, TQ2_0 | 4.1 (1.7, 2.1) |
//! | E2M1 with powers of two, or E4M3 scales | MXFP4; NVFP4 | 4.5 (4.25; 4.5) |
//!
//! Each conversion is exact: a weight on a device is the number in the file.

use mixfleet_hal::{CodeKind, DType, Quantised, ScaleKind, ZeroKind};

/// A type of ggml that tensors in files have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GgmlKind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Tq1_0,
    Tq2_0,
    Mxfp4,
    Nvfp4,
}

/// A type with its number in files, its name, and the weights and bytes of a block.
struct Described(GgmlKind, u32, &'static str, u64, usize);

const ALL: [Described; 26] = [
    Described(GgmlKind::F32, 0, "F32", 1, 4),
    Described(GgmlKind::F16, 1, "F16", 1, 2),
    Described(GgmlKind::Q4_0, 2, "Q4_0", 32, 18),
    Described(GgmlKind::Q4_1, 3, "Q4_1", 32, 20),
    Described(GgmlKind::Q5_0, 6, "Q5_0", 32, 22),
    Described(GgmlKind::Q5_1, 7, "Q5_1", 32, 24),
    Described(GgmlKind::Q8_0, 8, "Q8_0", 32, 34),
    Described(GgmlKind::Q2K, 10, "Q2_K", 256, 84),
    Described(GgmlKind::Q3K, 11, "Q3_K", 256, 110),
    Described(GgmlKind::Q4K, 12, "Q4_K", 256, 144),
    Described(GgmlKind::Q5K, 13, "Q5_K", 256, 176),
    Described(GgmlKind::Q6K, 14, "Q6_K", 256, 210),
    Described(GgmlKind::Iq2Xxs, 16, "IQ2_XXS", 256, 66),
    Described(GgmlKind::Iq2Xs, 17, "IQ2_XS", 256, 74),
    Described(GgmlKind::Iq3Xxs, 18, "IQ3_XXS", 256, 98),
    Described(GgmlKind::Iq1S, 19, "IQ1_S", 256, 50),
    Described(GgmlKind::Iq4Nl, 20, "IQ4_NL", 32, 18),
    Described(GgmlKind::Iq3S, 21, "IQ3_S", 256, 110),
    Described(GgmlKind::Iq2S, 22, "IQ2_S", 256, 82),
    Described(GgmlKind::Iq4Xs, 23, "IQ4_XS", 256, 136),
    Described(GgmlKind::Iq1M, 29, "IQ1_M", 256, 56),
    Described(GgmlKind::Bf16, 30, "BF16", 1, 2),
    Described(GgmlKind::Tq1_0, 34, "TQ1_0", 256, 54),
    Described(GgmlKind::Tq2_0, 35, "TQ2_0", 256, 66),
    Described(GgmlKind::Mxfp4, 39, "MXFP4", 32, 17),
    Described(GgmlKind::Nvfp4, 40, "NVFP4", 64, 36),
];

/// Type names without readable weights: their number in files, and the reason.
const OTHERS: [(u32, &str); 9] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (41, "Q1_0"),
    (4, "Q4_2"),
];

impl GgmlKind {
    /// The type with this number in files.
    pub(super) fn of(number: u32) -> Option<Self> {
        ALL.iter().find(|described| described.1 == number).map(|described| described.0)
    }

    /// All types, each by its name.
    pub(super) fn names() -> String {
        ALL.iter().map(|described| described.2).collect::<Vec<_>>().join(", ")
    }

    /// All types.
    #[cfg(test)]
    pub(super) fn all() -> impl Iterator<Item = GgmlKind> {
        ALL.iter().map(|described| described.0)
    }

    /// Returns the name of a ggml type id, also of unsupported types.
    pub(super) fn name_of(number: u32) -> String {
        let known = ALL.iter().find(|described| described.1 == number).map(|described| described.2);
        let known = known.or_else(|| OTHERS.iter().find(|other| other.0 == number).map(|other| other.1));
        known.map_or_else(|| format!("type {number} of ggml"), |name| format!("type {name}"))
    }

    fn described(self) -> &'static Described {
        // every type is in the table, as a test shows
        ALL.iter().find(|described| described.0 == self).unwrap_or(&ALL[0])
    }

    /// Name of the type.
    pub(super) fn name(self) -> &'static str {
        self.described().2
    }

    /// Weights in a block.
    pub(super) fn columns(self) -> u64 {
        self.described().3
    }

    /// Bytes of a block.
    pub(super) fn bytes(self) -> usize {
        self.described().4
    }

    /// The dtype, if weights are not quantised.
    pub(super) fn plain(self) -> Option<DType> {
        match self {
            GgmlKind::F32 => Some(DType::F32),
            GgmlKind::F16 => Some(DType::F16),
            GgmlKind::Bf16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// The quantised layout, if weights are quantised.
    pub(super) fn quantised(self) -> Option<Quantised> {
        use CodeKind::{I8, U4, U5, U6};
        use GgmlKind as Kind;
        use ScaleKind as Scale;
        use ZeroKind::{Middle, Minima};
        let of = Quantised::in_rows;
        Some(match self {
            Kind::F32 | Kind::F16 | Kind::Bf16 => return None,
            Kind::Q4_0 => of(U4, 32, Scale::F16, Middle),
            Kind::Q4_1 => of(U4, 32, Scale::F16, Minima),
            Kind::Q5_0 => of(U5, 32, Scale::F16, Middle),
            Kind::Q5_1 => of(U5, 32, Scale::F16, Minima),
            Kind::Q8_0 | Kind::Iq4Nl => of(I8, 32, Scale::F16, Middle),
            Kind::Q2K => of(U4, 16, Scale::I8, Minima),
            Kind::Q3K => of(U4, 16, Scale::I8, Middle),
            Kind::Q4K => of(U4, 32, Scale::I8, Minima),
            Kind::Q5K => of(U5, 32, Scale::I8, Minima),
            Kind::Q6K => of(U6, 16, Scale::I8, Middle),
            Kind::Iq4Xs | Kind::Iq3S => of(I8, 32, Scale::I8, Middle),
            Kind::Iq1S | Kind::Iq2Xxs | Kind::Iq3Xxs => of(I8, 32, Scale::F32, Middle),
            Kind::Iq1M | Kind::Iq2Xs | Kind::Iq2S => of(I8, 16, Scale::F32, Middle),
            Kind::Tq1_0 | Kind::Tq2_0 => of(U4, 256, Scale::F16, Middle),
            Kind::Mxfp4 => Quantised::MXFP4,
            Kind::Nvfp4 => Quantised::NVFP4,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_described_once_and_is_plain_or_quantised() {
        for kind in GgmlKind::all() {
            let Described(_, number, name, columns, bytes) = *kind.described();
            assert_eq!(GgmlKind::of(number), Some(kind), "{name}");
            assert!(kind.plain().is_some() != kind.quantised().is_some(), "{name}");
            assert_eq!((kind.columns(), kind.bytes(), kind.name()), (columns, bytes, name));
            let checked = kind.quantised().map_or(Ok(()), |quantised| quantised.check(256));
            assert_eq!(checked, Ok(()), "{name}");
        }
        assert_eq!(GgmlKind::name_of(41), "type Q1_0");
        assert_eq!(GgmlKind::name_of(99), "type 99 of ggml");
    }
}
