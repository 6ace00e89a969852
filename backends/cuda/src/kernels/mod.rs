//! Kernel sources, and how a program is assembled from them.

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, Scalar};

/// Includes a source that several kinds of GPU share.
macro_rules! portable {
    ($file:literal) => {
        include_str!(concat!("../../portable/", $file))
    };
}

/// Device intrinsics that kernels use beyond C; a test replaces this text by functions for the CPU.
pub const DEVICE: &str = include_str!("device.h");

const FEW_ROWS: &str = concat!(include_str!("few_rows_ends.h"), include_str!("few_rows.h"));
const DECODE: &str = concat!(portable!("scaled.h"), portable!("keys.h"), include_str!("decode.h"));
const PREFILL: &str = concat!(portable!("scaled.h"), portable!("keys.h"), include_str!("prefill.h"));

/// A source file, without macros and prologue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelSource {
    /// `add`, `silu_mul`, `gelu_mul`, `clamped_swiglu`, `combine`, `rope`, `embed`.
    Elements,
    /// `kv_write`, `kv_gather`, `kv_scatter`.
    Kv,
    /// `kv_write`, `kv_gather`, `kv_scatter` where one side has eight bits.
    KvScaled,
    /// `rope_kv`: rope of queries and keys, and `kv_write` of those keys and their values.
    RopeKv,
    /// `attn_merge`.
    Merge,
    /// `rms_norm`.
    Rows,
    /// `sample`.
    Sample,
    /// `gemv` and `gemm` for any dtypes and shapes.
    Gemm,
    /// `route` and `route_order`.
    Route,
    /// `grouped_few` and `grouped_many` for any dtypes and shapes.
    Grouped,
    /// `grouped_few` and `grouped_many` with quantised weights of any format.
    GroupedCodes,
    /// `quantised_gemm` and `quantised_embed` for any format.
    Quantised,
    /// `quantised_few_rows` on tensor cores.
    FewRowsCodes,
    /// `widen`: quantised weights as a matrix of floats.
    Widen,
    /// `gemm_few_rows` on tensor cores.
    FewRows,
    /// `gemm_few_rows_of_one_x`: several products of the same rows.
    FewRowsOfOneX,
    /// `gemm_few_rows_gated`: gate and up products with their `silu_mul`.
    FewRowsGated,
    /// `attn_prefill` for any dtypes and shapes.
    Attention,
    /// `attn_prefill_mma` on tensor cores.
    PrefillMma,
    /// `attn_prefill_wgmma` on Hopper's tensor cores.
    PrefillWgmma,
    /// `attn_decode` for any dtypes and shapes.
    Decode,
    /// `attn_decode_mma` on tensor cores.
    DecodeMma,
    /// `attn_decode_latent` and `attn_prefill_latent` on tensor cores.
    LatentMma,
    /// `attn_combine`, after either decode kernel, or with `attn_merge` in it.
    Combine,
}

impl KernelSource {
    /// Returns the name of its file, for messages.
    pub fn name(self) -> &'static str {
        match self {
            KernelSource::Elements => "elements.c",
            KernelSource::Kv => "kv.c",
            KernelSource::KvScaled => "kv_scaled.c",
            KernelSource::RopeKv => "rope_kv.cu",
            KernelSource::Merge => "merge.c",
            KernelSource::Rows => "rows.c",
            KernelSource::Sample => "sample.c",
            KernelSource::Gemm => "gemm.c",
            KernelSource::Route => "route.c",
            KernelSource::Grouped | KernelSource::GroupedCodes => "grouped.c",
            KernelSource::Quantised => "quantised.c",
            KernelSource::FewRowsCodes => "few_rows_codes.cu",
            KernelSource::Widen => "widen.cu",
            KernelSource::FewRows => "few_rows.cu",
            KernelSource::FewRowsOfOneX => "few_rows_of_one_x.cu",
            KernelSource::FewRowsGated => "few_rows_gated.cu",
            KernelSource::Attention => "attention.c",
            KernelSource::PrefillMma => "prefill_mma.cu",
            KernelSource::PrefillWgmma => "prefill_wgmma.cu",
            KernelSource::Decode => "decode.cu",
            KernelSource::DecodeMma => "decode_mma.cu",
            KernelSource::LatentMma => "latent_mma.cu",
            KernelSource::Combine => "combine.cu",
        }
    }

    fn texts(self) -> &'static [&'static str] {
        match self {
            KernelSource::Elements => &[portable!("rotate.h"), portable!("elements.c")],
            KernelSource::Kv => &[portable!("kv.c")],
            KernelSource::KvScaled => &[portable!("scaled.h"), portable!("kv_scaled.c")],
            KernelSource::RopeKv => &[portable!("rotate.h"), portable!("kv.c"), include_str!("rope_kv.cu")],
            KernelSource::Merge => &[portable!("merge.c")],
            KernelSource::Rows => &[portable!("rows.c")],
            KernelSource::Sample => &[portable!("sample.c")],
            KernelSource::Gemm => &[portable!("gemm.h"), portable!("tiles.h"), portable!("gemm.c")],
            KernelSource::Route => &[portable!("route.c")],
            KernelSource::Grouped => &[portable!("grouped.h"), portable!("tiles.h"), portable!("grouped.c")],
            KernelSource::GroupedCodes => {
                &[portable!("codes.h"), portable!("grouped.h"), portable!("tiles.h"), portable!("grouped.c")]
            }
            KernelSource::Quantised => &[portable!("gemm.h"), portable!("codes.h"), portable!("quantised.c")],
            KernelSource::FewRowsCodes => &[
                portable!("gemm.h"),
                portable!("codes.h"),
                include_str!("expand.h"),
                include_str!("few_rows_ends.h"),
                include_str!("few_rows_codes.cu"),
            ],
            KernelSource::Widen => {
                &[portable!("codes.h"), include_str!("expand.h"), include_str!("widen.cu")]
            }
            KernelSource::FewRows => &[portable!("gemm.h"), FEW_ROWS, include_str!("few_rows.cu")],
            KernelSource::FewRowsOfOneX => {
                &[portable!("gemm.h"), FEW_ROWS, include_str!("few_rows_of_one_x.cu")]
            }
            KernelSource::FewRowsGated => &[portable!("gemm.h"), FEW_ROWS, include_str!("few_rows_gated.cu")],
            KernelSource::Attention => {
                &[portable!("scaled.h"), portable!("keys.h"), portable!("attention.c")]
            }
            KernelSource::PrefillMma => &[PREFILL, include_str!("prefill_mma.cu")],
            KernelSource::PrefillWgmma => &[PREFILL, include_str!("prefill_wgmma.cu")],
            KernelSource::Decode => &[DECODE, include_str!("decode.cu")],
            KernelSource::DecodeMma => &[DECODE, include_str!("decode_mma.cu")],
            KernelSource::LatentMma => &[DECODE, include_str!("latent_mma.cu")],
            KernelSource::Combine => &[DECODE, include_str!("combine.cu")],
        }
    }
}

/// The value of a macro.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MacroValue {
    /// A dtype's name.
    Type(DType),
    /// A number.
    Number(u32),
    /// A float, by its bits.
    Float(u32),
}

impl std::fmt::Display for MacroValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MacroValue::Type(dtype) => f.write_str(dtype.name()),
            MacroValue::Number(number) => number.fmt(f),
            MacroValue::Float(bits) => write!(f, "{:?}f", f32::from_bits(*bits)),
        }
    }
}

/// What a macro may stand for.
pub(crate) trait Macro {
    /// Returns it as a value.
    fn value(&self) -> MacroValue;
}

impl Macro for DType {
    fn value(&self) -> MacroValue {
        MacroValue::Type(*self)
    }
}

impl Macro for u32 {
    fn value(&self) -> MacroValue {
        MacroValue::Number(*self)
    }
}

impl Macro for u64 {
    fn value(&self) -> MacroValue {
        MacroValue::Number(to_u32(*self))
    }
}

impl Macro for Scalar {
    fn value(&self) -> MacroValue {
        MacroValue::Float(self.0.to_bits())
    }
}

/// Maximum number of a program's macros.
const MACROS_MAX: usize = 14;

/// A source file with its macros, which is compiled once and cached. It holds no text, so that it is cheap to
/// make and to look up for every launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelProgram {
    /// The source file.
    pub body: KernelSource,
    macros: [Option<(&'static str, MacroValue)>; MACROS_MAX],
}

impl KernelProgram {
    /// Combines `body` with `macros`, given as names and values.
    pub(crate) fn new(body: KernelSource, macros: &[(&'static str, &dyn Macro)]) -> KernelProgram {
        debug_assert!(macros.len() <= MACROS_MAX, "{} has {} macros", body.name(), macros.len());
        let mut kept = [None; MACROS_MAX];
        for (kept, (name, value)) in kept.iter_mut().zip(macros) {
            *kept = Some((*name, value.value()));
        }
        KernelProgram { body, macros: kept }
    }

    /// Returns the macros as `#define` lines.
    pub fn macros(&self) -> String {
        self.macros.iter().flatten().map(|(name, value)| format!("#define {name} {value}\n")).collect()
    }

    /// Returns the whole source on top of `device`, which is [`DEVICE`] or a substitute.
    pub fn source(&self, device: &str) -> String {
        let macros = self.macros();
        let mut texts = vec![device, &macros, portable!("cuda.h"), portable!("common.h")];
        texts.extend(self.body.texts());
        texts.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// What names of operand lists stand for is started by one name, too.
    const LISTS: [(&str, &str); 3] = [
        ("OPERANDS", "START_OPERANDS;"),
        ("PREFILL_OPERANDS", "START_PREFILL;"),
        ("DECODE_OPERANDS", "START_DECODE;"),
    ];

    /// A kernel that is launched early must wait in every thread: before it ends, and before it uses an
    /// operand.
    #[test]
    fn every_kernel_starts_all_its_operands_before_it_can_end() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folders = [here.join("src/kernels"), here.join("../portable")];
        let mut kernels = 0;
        for file in folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()) {
            let file = file.unwrap().path();
            if !file.extension().is_some_and(|ending| ending == "cu" || ending == "c") {
                continue;
            }
            let text = fs::read_to_string(&file).unwrap();
            for kernel in text.split("\nKERNEL").skip(1) {
                let (head, body) = kernel.split_once(" {\n").expect("a body");
                let body = body.split("\n}").next().expect("an end");
                let started = body.split("return").next().unwrap_or(body);
                let operands = head.match_indices("READS(").chain(head.match_indices("WRITES("));
                let operands = operands.filter_map(|(at, _)| head[at..].split([',', ')']).nth(1));
                for operand in operands.map(str::trim) {
                    let start = format!("START({operand})");
                    assert!(started.contains(&start), "{}: {head}: no {start}", file.display());
                }
                let names: Vec<&str> = head.split(['(', ')', ',']).map(str::trim).collect();
                for (list, start) in LISTS {
                    // which starts what the compiler could load early, and has assembly for the rest
                    let apart = file.ends_with("prefill_mma.cu") && started.contains("START(query_start)");
                    let is_started = apart || started.contains(start);
                    assert!(!names.contains(&list) || is_started, "{}: {head}: no {start}", file.display());
                }
                assert!(started.contains("START"), "{}: {head}", file.display());
                kernels += 1;
            }
        }
        assert!(kernels >= 36, "{kernels}");
    }
}
