//! Quantised weights: one description for all formats of checkpoints.
//!
//! A matrix `[rows, columns]` is stored as codes of 4 to 8 bits, with a scale for each group of
//! `group_rows x group_columns` weights (groups at the edges may be partial), and what else its [`Quantised`]
//! says. Loaders map each vendor's format to it, without a copy where the layout is already this one:
//!
//! - Codes lie row by row, neighbouring columns next to each other, the first one in the low bits of a 32-bit
//!   word. Those of 5 and 6 bits are apart in a plane of their low four bits and one of the others. That is
//!   the order of compressed-tensors, of the OCP Microscaling formats and of NVFP4, which are used in place.
//! - Scales are `[matrices, groups of rows, groups of columns]` numbers of a dtype, or 8-bit integers, four
//!   to a word, to be multiplied by an f16 for each [`SUPER_COLUMNS`] columns of a row (the K formats of
//!   GGUF).
//! - Zero points are numbers of the scales' dtype, which is exact. Scales of eight bits of exponent alone
//!   (E8M0) are stored as bf16, which is exact too.

use crate::cast::to_usize;
use crate::{DType, WeightFormat};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Columns of a row that share the f16 factors of integer scales.
pub const SUPER_COLUMNS: u32 = 256;

/// What a code of a weight stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum CodeKind {
    /// An unsigned integer of 4 bits, whose middle is 8.
    U4,
    /// An unsigned integer of 5 bits, whose middle is 16.
    U5,
    /// An unsigned integer of 6 bits, whose middle is 32.
    U6,
    /// A signed integer of 8 bits, whose middle is 0.
    I8,
    /// A float of 2 exponent bits and 1 fraction bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (OCP
    /// Microscaling Formats 1.0).
    E2m1,
    /// [`DType::F8E4m3`].
    E4m3,
}

impl CodeKind {
    /// All kinds.
    pub const ALL: [CodeKind; 6] =
        [CodeKind::U4, CodeKind::U5, CodeKind::U6, CodeKind::I8, CodeKind::E2m1, CodeKind::E4m3];

    /// Bits of a code in the plane `codes`.
    pub const fn low_bits(self) -> u32 {
        match self {
            CodeKind::U4 | CodeKind::U5 | CodeKind::U6 | CodeKind::E2m1 => 4,
            CodeKind::I8 | CodeKind::E4m3 => 8,
        }
    }

    /// Bits of a code in the plane `high`.
    pub const fn high_bits(self) -> u32 {
        match self {
            CodeKind::U5 => 1,
            CodeKind::U6 => 2,
            CodeKind::U4 | CodeKind::I8 | CodeKind::E2m1 | CodeKind::E4m3 => 0,
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        self.low_bits() + self.high_bits()
    }

    /// Whether it is an integer, which zero points and minima need.
    pub const fn is_integer(self) -> bool {
        !matches!(self, CodeKind::E2m1 | CodeKind::E4m3)
    }

    /// The code that stands for zero without a zero point, as a number.
    pub const fn middle(self) -> u32 {
        match self {
            CodeKind::U4 => 8,
            CodeKind::U5 => 16,
            CodeKind::U6 => 32,
            CodeKind::I8 | CodeKind::E2m1 | CodeKind::E4m3 => 0,
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            CodeKind::U4 => "u4",
            CodeKind::U5 => "u5",
            CodeKind::U6 => "u6",
            CodeKind::I8 => "i8",
            CodeKind::E2m1 => "e2m1",
            CodeKind::E4m3 => "e4m3",
        }
    }

    /// The number that a code stands for, before scale and zero point.
    pub fn value(self, code: u32) -> f64 {
        const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let byte = code.to_le_bytes()[0];
        match self {
            CodeKind::U4 | CodeKind::U5 | CodeKind::U6 => f64::from(code),
            CodeKind::I8 => f64::from(byte.cast_signed()),
            CodeKind::E2m1 if code & 8 == 0 => E2M1[(code & 7) as usize],
            CodeKind::E2m1 => -E2M1[(code & 7) as usize],
            CodeKind::E4m3 => DType::F8E4m3.decode(&[byte])[0],
        }
    }
}

/// How scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ScaleKind {
    /// As f32.
    F32,
    /// As bf16.
    Bf16,
    /// As f16.
    F16,
    /// As E4M3.
    E4m3,
    /// As signed 8-bit integers below an f16 for each [`SUPER_COLUMNS`] columns of a row.
    I8,
}

impl ScaleKind {
    /// All kinds.
    pub const ALL: [ScaleKind; 5] =
        [ScaleKind::F32, ScaleKind::Bf16, ScaleKind::F16, ScaleKind::E4m3, ScaleKind::I8];

    /// The dtype of a scale; none for integers, which are packed in words.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            ScaleKind::F32 => Some(DType::F32),
            ScaleKind::Bf16 => Some(DType::Bf16),
            ScaleKind::F16 => Some(DType::F16),
            ScaleKind::E4m3 => Some(DType::F8E4m3),
            ScaleKind::I8 => None,
        }
    }

    /// Scales of this dtype; none where scales cannot have it.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(ScaleKind::F32),
            DType::Bf16 => Some(ScaleKind::Bf16),
            DType::F16 => Some(ScaleKind::F16),
            DType::F8E4m3 => Some(ScaleKind::E4m3),
            DType::I8 | DType::U32 => None,
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ScaleKind::F32 => "f32",
            ScaleKind::Bf16 => "bf16",
            ScaleKind::F16 => "f16",
            ScaleKind::E4m3 => "e4m3",
            ScaleKind::I8 => "i8",
        }
    }
}

/// Which weight is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ZeroKind {
    /// That of the middle code: `scale * (code - middle)`.
    Middle,
    /// That of a zero point for each group: `scale * (code - zero)`.
    Points,
    /// A minimum for each group is subtracted: `scale * code - minimum`.
    Minima,
}

impl ZeroKind {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ZeroKind::Middle => "middle",
            ZeroKind::Points => "points",
            ZeroKind::Minima => "minima",
        }
    }
}

/// How the weights of a matrix are quantised. The [module](self) documentation lists the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Quantised {
    /// What a code stands for.
    pub code: CodeKind,
    /// Rows that share a scale.
    pub group_rows: u32,
    /// Columns that share a scale; at least as many as there are if a whole row does.
    pub group_columns: u32,
    /// How scales are stored.
    pub scale: ScaleKind,
    /// Which weight is zero.
    pub zero: ZeroKind,
    /// Whether an f32 for each matrix multiplies all of its scales.
    pub outer: bool,
}

/// One of the arrays that quantised weights consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantisedPart {
    /// Its name: `codes`, `high`, `scales`, `zeros`, `supers` or `outer`.
    pub name: &'static str,
    /// Element type of the array; packed codes are held in 32-bit words.
    pub dtype: DType,
    /// Elements per row of the array.
    pub columns: u64,
    /// Rows of all matrices together.
    pub rows: u64,
}

impl QuantisedPart {
    /// Its elements.
    pub fn elements(&self) -> u64 {
        self.rows.saturating_mul(self.columns)
    }
}

impl Quantised {
    /// Microscaling FP4: E2M1 with a power of two for each 32 columns of a row.
    pub const MXFP4: Quantised = Self::in_rows(CodeKind::E2m1, 32, ScaleKind::Bf16, ZeroKind::Middle);

    /// E2M1 with an E4M3 scale for each 16 columns of a row, below an f32.
    pub const NVFP4: Quantised =
        Quantised { outer: true, ..Self::in_rows(CodeKind::E2m1, 16, ScaleKind::E4m3, ZeroKind::Middle) };

    /// Codes with a scale for each `group_columns` columns of each row.
    pub const fn in_rows(code: CodeKind, group_columns: u32, scale: ScaleKind, zero: ZeroKind) -> Self {
        Quantised { code, group_rows: 1, group_columns, scale, zero, outer: false }
    }

    /// The format as which cost models price it.
    pub const fn format(&self) -> WeightFormat {
        match (self.code, self.scale) {
            (CodeKind::U4, _) => WeightFormat::Int4,
            (CodeKind::U5 | CodeKind::U6 | CodeKind::I8, _) => WeightFormat::Int8,
            (CodeKind::E2m1, ScaleKind::E4m3) => WeightFormat::Nvfp4,
            (CodeKind::E2m1, _) => WeightFormat::Mxfp4,
            (CodeKind::E4m3, _) => WeightFormat::Fp8,
        }
    }

    /// Groups along the rows and along the columns of a matrix.
    pub fn groups(&self, rows: u32, columns: u32) -> (u32, u32) {
        (rows.div_ceil(self.group_rows.max(1)), columns.div_ceil(self.group_columns.max(1)))
    }

    /// Numbers below the f16 factors of [`SUPER_COLUMNS`] columns: the scale's, and the minimum's if there
    /// are minima.
    pub const fn supers(&self) -> u32 {
        match (self.scale, self.zero) {
            (ScaleKind::I8, ZeroKind::Minima) => 2,
            (ScaleKind::I8, _) => 1,
            _ => 0,
        }
    }

    /// The arrays of `matrices` matrices of this size, in the order in which operations take them. They are
    /// `codes [matrices, rows, words]`; `high`, likewise, with codes of 5 and 6 bits; `scales [matrices,
    /// groups of rows, groups of columns]`, integers four to a word; `zeros`, likewise, with zero points or
    /// minima; `supers [matrices, rows, columns / 256, 1 or 2]` f16 with integer scales; `outer [matrices]`.
    pub fn parts(&self, matrices: u32, rows: u32, columns: u32) -> Vec<QuantisedPart> {
        let (matrices, all) = (u64::from(matrices), u64::from(matrices) * u64::from(rows));
        let part = |name, dtype, rows, columns| QuantisedPart { name, dtype, rows, columns };
        let words = |bits: u32| (u64::from(columns) * u64::from(bits)).div_ceil(32);
        let mut parts = vec![part("codes", DType::U32, all, words(self.code.low_bits()))];
        if self.code.high_bits() > 0 {
            parts.push(part("high", DType::U32, all, words(self.code.high_bits())));
        }
        let (group_rows, group_columns) = self.groups(rows, columns);
        let (dtype, columns_of_scales) = match self.scale.dtype() {
            Some(dtype) => (dtype, u64::from(group_columns)),
            None => (DType::U32, u64::from(group_columns).div_ceil(4)),
        };
        let scales = |name| part(name, dtype, matrices * u64::from(group_rows), columns_of_scales);
        parts.push(scales("scales"));
        if self.zero != ZeroKind::Middle {
            parts.push(scales("zeros"));
        }
        if self.supers() > 0 {
            let columns = u64::from(columns.div_ceil(SUPER_COLUMNS)) * u64::from(self.supers());
            parts.push(part("supers", DType::F16, all, columns));
        }
        if self.outer {
            parts.push(part("outer", DType::F32, 1, matrices));
        }
        parts
    }

    /// Number of arrays.
    pub const fn part_count(&self) -> usize {
        let high = (self.code.high_bits() > 0) as usize;
        let zeros = !matches!(self.zero, ZeroKind::Middle) as usize;
        2 + high + zeros + (self.supers() > 0) as usize + self.outer as usize
    }

    /// Bytes of `matrices` matrices of this size.
    pub fn bytes(&self, matrices: u32, rows: u32, columns: u32) -> u64 {
        MatrixKind::Quantised(*self).bytes(matrices, rows, columns)
    }

    /// Checks that the description is consistent, and that it can store rows of `columns` columns.
    ///
    /// # Errors
    /// A message that states the violation.
    pub fn check(&self, columns: u32) -> Result<(), String> {
        let whole = |of: u32, what: &str| match columns.is_multiple_of(of) {
            true => Ok(()),
            false => Err(format!("{columns} columns of {} weights are no whole number of {what}", self.code)),
        };
        if self.group_rows == 0 || self.group_columns == 0 {
            return Err("a group of no weights".to_owned());
        }
        if self.zero != ZeroKind::Middle && !self.code.is_integer() {
            return Err(format!("{} weights have no zero points", self.code));
        }
        whole(32 / self.code.low_bits(), "words")?;
        if self.code.high_bits() > 0 {
            whole(32 / self.code.high_bits(), "words")?;
        }
        if self.scale == ScaleKind::I8 {
            whole(SUPER_COLUMNS, "super-blocks of 256")?;
            let fits = SUPER_COLUMNS.is_multiple_of(self.group_columns) && self.group_columns <= 64;
            if self.group_rows != 1 || !fits || self.zero == ZeroKind::Points {
                return Err(
                    "integer scales need groups of 4 to 64 columns of one row, and no zero points".to_owned()
                );
            }
        }
        Ok(())
    }

    /// The weights of `parts`, the decoded arrays of [`parts`](Self::parts), each with the largest term of
    /// the sum that it is: `(value, magnitude)`, `[matrices, rows, columns]`. A device may round in
    /// proportion to the magnitude. This is the oracle: slow, and no backend uses it.
    pub fn decode(&self, parts: &[&[f64]], matrices: u32, rows: u32, columns: u32) -> Vec<(f64, f64)> {
        let kinds = self.parts(matrices, rows, columns);
        let of = |name: &str| {
            let at = kinds.iter().position(|part| part.name == name);
            at.map(|at| DecodedArray { values: parts[at], row_values: to_usize(kinds[at].columns) })
        };
        let (codes, high, scales, zeros, supers, outer) =
            (of("codes"), of("high"), of("scales"), of("zeros"), of("supers"), of("outer"));
        let (group_rows, _) = self.groups(rows, columns);
        let mut all = Vec::new();
        for row in 0..matrices as usize * rows as usize {
            let (matrix, inner) = (row / rows as usize, row % rows as usize);
            let group_row = matrix * group_rows as usize + inner / self.group_rows as usize;
            let outer = outer.map_or(1.0, |array| array.values[matrix]);
            for column in 0..columns as usize {
                let mut code = codes.map_or(0, |plane| plane.field(row, column, self.code.low_bits()));
                code |= high.map_or(0, |plane| plane.field(row, column, self.code.high_bits())) << 4;
                let value = self.code.value(code);
                let group = column / self.group_columns as usize;
                let number = |array: Option<DecodedArray<'_>>, which: usize| match (array, supers) {
                    (None, _) => 0.0,
                    (Some(array), None) => array.values[group_row * array.row_values + group],
                    (Some(words), Some(supers)) => {
                        let integer = CodeKind::I8.value(words.field(group_row, group, 8));
                        let at = column / SUPER_COLUMNS as usize * self.supers() as usize + which;
                        integer * supers.values[row * supers.row_values + at]
                    }
                };
                let (scale, zero) = (number(scales, 0), number(zeros, 1));
                let (value, zero) = match self.zero {
                    ZeroKind::Middle => (scale * value, scale * f64::from(self.code.middle())),
                    ZeroKind::Points => (scale * value, scale * zero),
                    ZeroKind::Minima => (scale * value, zero),
                };
                all.push(((value - zero) * outer, (value.abs() + zero.abs()) * outer.abs()));
            }
        }
        all
    }
}

/// A decoded array of [`Quantised::parts`].
#[derive(Clone, Copy)]
struct DecodedArray<'a> {
    values: &'a [f64],
    row_values: usize,
}

impl DecodedArray<'_> {
    /// Returns an integer of `bits` bits from a row of 32-bit words.
    fn field(self, row: usize, column: usize, bits: u32) -> u32 {
        let per_word = (32 / bits) as usize;
        let word = crate::cast::to_u32(self.values[row * self.row_values + column / per_word]);
        word >> (bits * crate::cast::to_u32(column % per_word)) & ((1 << bits) - 1)
    }
}

impl fmt::Display for CodeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Quantised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quantised { code, group_rows, group_columns, scale, zero, outer } = *self;
        write!(f, "{code}/{group_rows}x{group_columns}/{}/{}", scale.name(), zero.name())?;
        if outer { f.write_str("/outer") } else { Ok(()) }
    }
}

/// How the weights of a matrix are stored: as numbers of a dtype, or quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum MatrixKind {
    /// One array of this dtype.
    Plain(DType),
    /// The arrays of [`Quantised::parts`].
    Quantised(Quantised),
}

impl MatrixKind {
    /// The arrays of `matrices` matrices of this size; a plain one is `weight`.
    pub fn parts(&self, matrices: u32, rows: u32, columns: u32) -> Vec<QuantisedPart> {
        match self {
            MatrixKind::Plain(dtype) => {
                let (rows, columns) = (u64::from(matrices) * u64::from(rows), u64::from(columns));
                vec![QuantisedPart { name: "weight", dtype: *dtype, columns, rows }]
            }
            MatrixKind::Quantised(quantised) => quantised.parts(matrices, rows, columns),
        }
    }

    /// Bytes of `matrices` matrices of this size.
    pub fn bytes(&self, matrices: u32, rows: u32, columns: u32) -> u64 {
        let parts = self.parts(matrices, rows, columns);
        let bytes = |part: &QuantisedPart| part.elements().saturating_mul(part.dtype.size_bytes());
        parts.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Dtype of the bias in a product with this weight.
    pub const fn bias(&self) -> DType {
        match self {
            MatrixKind::Plain(dtype) => *dtype,
            MatrixKind::Quantised(_) => DType::F32,
        }
    }

    /// Number of arrays.
    pub const fn part_count(&self) -> usize {
        match self {
            MatrixKind::Plain(_) => 1,
            MatrixKind::Quantised(quantised) => quantised.part_count(),
        }
    }

    /// The description, if the weights are quantised.
    pub const fn quantised(&self) -> Option<Quantised> {
        match self {
            MatrixKind::Plain(_) => None,
            MatrixKind::Quantised(quantised) => Some(*quantised),
        }
    }
}

impl fmt::Display for MatrixKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatrixKind::Plain(dtype) => dtype.fmt(f),
            MatrixKind::Quantised(quantised) => quantised.fmt(f),
        }
    }
}

#[cfg(test)]
#[path = "quantised_tests.rs"]
mod tests;
