//! WGSL sources and their specialisations.

use mixfleet_hal::DType;
use std::fmt::{Display, Write};

const COMMON: &str = include_str!("kernels/common.wgsl");
const REDUCE_GROUPS: &str = include_str!("kernels/reduce_groups.wgsl");
const REDUCE_SUBGROUPS: &str = include_str!("kernels/reduce_subgroups.wgsl");
const CODES: &str = include_str!("kernels/codes.wgsl");
const CODE_WEIGHTS: &str = include_str!("kernels/code_weights.wgsl");
const GROUPED: &str = include_str!("kernels/grouped.wgsl");
const WEIGHTS: &str = include_str!("kernels/weights.wgsl");
const INPUTS: &str = include_str!("kernels/inputs.wgsl");
const TILES: &str = include_str!("kernels/tiles.wgsl");
const MATRIX_TILES: &str = include_str!("kernels/matrix_tiles.wgsl");

/// A source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ShaderFile {
    Elements,
    Rows,
    Sample,
    Gemm,
    Quantised,
    Kv,
    KvScaled,
    Attention,
    Merge,
    Route,
    Grouped,
    GroupedCodes,
}

impl ShaderFile {
    pub(crate) const ALL: [ShaderFile; 12] = [
        ShaderFile::Elements,
        ShaderFile::Rows,
        ShaderFile::Sample,
        ShaderFile::Gemm,
        ShaderFile::Quantised,
        ShaderFile::Kv,
        ShaderFile::KvScaled,
        ShaderFile::Attention,
        ShaderFile::Merge,
        ShaderFile::Route,
        ShaderFile::Grouped,
        ShaderFile::GroupedCodes,
    ];

    /// Its text, and what it has in common with others before that. Kernels by matrices have `MATRIX_TILES`
    /// in place of `TILES`.
    const fn texts(self) -> &'static [&'static str] {
        match self {
            ShaderFile::Elements => &[include_str!("kernels/elements.wgsl")],
            ShaderFile::Rows => &[include_str!("kernels/rows.wgsl")],
            ShaderFile::Sample => &[include_str!("kernels/sample.wgsl")],
            ShaderFile::Gemm => &[INPUTS, WEIGHTS, TILES, include_str!("kernels/gemm.wgsl")],
            ShaderFile::Quantised => &[CODES, include_str!("kernels/quantised.wgsl")],
            ShaderFile::Kv => &[include_str!("kernels/kv.wgsl")],
            ShaderFile::KvScaled => &[include_str!("kernels/kv_scaled.wgsl")],
            ShaderFile::Attention => &[include_str!("kernels/attention.wgsl")],
            ShaderFile::Merge => &[include_str!("kernels/merge.wgsl")],
            ShaderFile::Route => &[include_str!("kernels/route.wgsl")],
            ShaderFile::Grouped => &[INPUTS, WEIGHTS, TILES, GROUPED],
            ShaderFile::GroupedCodes => &[INPUTS, CODES, CODE_WEIGHTS, TILES, GROUPED],
        }
    }

    /// Constants that a source needs even if the entry point in use does not.
    const fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            ShaderFile::Elements => &[("UNIT", "1u"), ("OWN", "1u")],
            ShaderFile::Kv => &[("POOLS", "2u")],
            ShaderFile::Grouped | ShaderFile::GroupedCodes => &[("WIDE", "false")],
            ShaderFile::Gemm => &[("WIDE", "false"), ("ROWS", "1u")],
            _ => &[],
        }
    }
}

/// The value of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Value {
    Number(u32),
    Flag(bool),
    Type(DType),
}

impl Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Number(number) => write!(f, "{number}u"),
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Type(DType::Bf16) => f.write_str("BF16"),
            Value::Type(DType::F16) => f.write_str("F16"),
            Value::Type(DType::F8E4m3) => f.write_str("F8E4M3"),
            Value::Type(DType::I8) => f.write_str("I8"),
            Value::Type(_) => f.write_str("F32"),
        }
    }
}

/// Edge length of a tile of a product of many rows, and the threads that share it.
pub(crate) const TILE: u32 = 64;
pub(crate) const TILE_GROUP: u32 = 256;

/// Matrices of f16, with sums of f32, that the subgroups of an adapter multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatrixUnit {
    /// Rows and columns of each, 8 or 16.
    pub(crate) edge: u32,
    /// Matrices of sums that a subgroup has of a tile.
    pub(crate) parts: u32,
}

impl MatrixUnit {
    /// Divides a tile among subgroups of up to `subgroup` threads, whose matrices are all in one row of the
    /// tile; `None` if that would be too few subgroups.
    pub(crate) fn new(edge: u32, subgroup: u32) -> Option<MatrixUnit> {
        let across = TILE / edge;
        let parts = (across * across).div_ceil(TILE_GROUP / subgroup.clamp(1, TILE_GROUP));
        across.is_multiple_of(parts).then_some(MatrixUnit { edge, parts })
    }
}

/// A specialised kernel, which is the key of the pipeline cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub(crate) file: ShaderFile,
    pub(crate) entry: &'static str,
    /// Threads per workgroup.
    pub(crate) group: u32,
    /// Values that are summed over a workgroup at once; 0 for none.
    pub(crate) sums: u32,
    /// What the adapter multiplies the matrices of a tile with, if the kernel does.
    pub(crate) matrices: Option<MatrixUnit>,
    consts: Vec<(&'static str, Value)>,
}

impl Kernel {
    pub(crate) fn new(file: ShaderFile, entry: &'static str, group: u32) -> Kernel {
        Kernel { file, entry, group, sums: 0, matrices: None, consts: Vec::new() }
    }

    fn with(mut self, name: &'static str, value: Value) -> Kernel {
        self.consts.push((name, value));
        self
    }

    /// Adds a numeric constant.
    pub(crate) fn number(self, name: &'static str, value: u32) -> Kernel {
        self.with(name, Value::Number(value))
    }

    /// Adds a boolean constant.
    pub(crate) fn flag(self, name: &'static str, value: bool) -> Kernel {
        self.with(name, Value::Flag(value))
    }

    /// Adds the dtype of an operand: `D0` .. `D5`, `OUT`.
    pub(crate) fn dtype(self, name: &'static str, dtype: DType) -> Kernel {
        self.with(name, Value::Type(dtype))
    }

    pub(crate) fn summing(mut self, sums: u32) -> Kernel {
        self.sums = sums;
        self
    }

    pub(crate) fn by_matrices(mut self, unit: MatrixUnit) -> Kernel {
        self.matrices = Some(unit);
        self
    }

    /// Returns the whole source text.
    pub(crate) fn source(&self, subgroups: bool) -> String {
        let mut text = self.matrices.map_or_else(String::new, |MatrixUnit { edge, parts }| {
            format!(
                "enable f16;\nenable wgpu_cooperative_matrix;\n\
                 alias Across = coop_mat{edge}x{edge}<f16, A>;\n\
                 alias Down = coop_mat{edge}x{edge}<f16, B>;\n\
                 alias Part = coop_mat{edge}x{edge}<f32, C>;\n\
                 const EDGE = {edge}u;\nconst PARTS = {parts}u;\n"
            )
        });
        let mut constant = |name: &str, value: &dyn Display| {
            // writing to a string does not fail
            let _ = writeln!(text, "const {name} = {value};");
        };
        constant("GROUP", &Value::Number(self.group));
        constant("SUMS", &Value::Number(self.sums.max(1)));
        for (name, value) in &self.consts {
            constant(name, value);
        }
        let types = ["D0", "D1", "D2", "D4", "D5", "OUT"].map(|name| (name, "F32"));
        for (name, value) in types.iter().chain(self.file.defaults()) {
            if !self.consts.iter().any(|(own, _)| own == name) {
                constant(name, value);
            }
        }
        let by_matrices = self.matrices.is_some();
        let reduce = if by_matrices || subgroups && self.sums > 0 { REDUCE_SUBGROUPS } else { REDUCE_GROUPS };
        let mut all = vec![text.as_str(), COMMON, reduce];
        all.extend(self.file.texts().iter().map(|&text| match text == TILES && by_matrices {
            true => MATRIX_TILES,
            false => text,
        }));
        all.join("\n")
    }
}

/// Returns a digest of all sources (FNV-1a).
pub(crate) fn digest() -> u64 {
    let own = ShaderFile::ALL.into_iter().flat_map(|file| file.texts()).copied();
    let texts = [COMMON, REDUCE_GROUPS, REDUCE_SUBGROUPS, MATRIX_TILES].into_iter().chain(own);
    let bytes = texts.flat_map(str::bytes);
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}
