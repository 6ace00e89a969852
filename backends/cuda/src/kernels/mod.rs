//! The kernels' texts, and how a program is put together from them.

use std::fmt::Display;

/// A text that several kinds of GPU share.
macro_rules! portable {
    ($file:literal) => {
        include_str!(concat!("../../../portable/", $file))
    };
}

/// The instructions that kernels use beyond C; a test replaces this text by functions for the CPU.
pub const DEVICE: &str = include_str!("device.h");

const DECODE: &str = concat!(portable!("keys.h"), include_str!("decode.h"));

/// A program's text, without macros and prologue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Body {
    /// `add`, `silu_mul`, `rope`, `embed`.
    Elements,
    /// `kv_write`, `kv_gather`, `kv_scatter`.
    Kv,
    /// `attn_merge`.
    Merge,
    /// `rms_norm`, `argmax`.
    Rows,
    /// `gemv`, `gemm` for any dtypes and shapes.
    Gemm,
    /// `gemm_few_rows` on tensor cores.
    FewRows,
    /// `attn_prefill` for any dtypes and shapes.
    Attention,
    /// `attn_prefill_mma` on tensor cores.
    PrefillMma,
    /// `attn_decode` for any dtypes and shapes.
    Decode,
    /// `attn_decode_mma` on tensor cores.
    DecodeMma,
    /// `attn_combine`, after either decode kernel.
    Combine,
}

impl Body {
    /// The name of its file, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Body::Elements => "elements.c",
            Body::Kv => "kv.c",
            Body::Merge => "merge.c",
            Body::Rows => "rows.c",
            Body::Gemm => "gemm.c",
            Body::FewRows => "few_rows.cu",
            Body::Attention => "attention.c",
            Body::PrefillMma => "prefill_mma.cu",
            Body::Decode => "decode.cu",
            Body::DecodeMma => "decode_mma.cu",
            Body::Combine => "combine.cu",
        }
    }

    fn texts(self) -> &'static [&'static str] {
        match self {
            Body::Elements => &[portable!("elements.c")],
            Body::Kv => &[portable!("kv.c")],
            Body::Merge => &[portable!("merge.c")],
            Body::Rows => &[portable!("rows.c")],
            Body::Gemm => &[portable!("gemm.h"), portable!("gemm.c")],
            Body::FewRows => &[portable!("gemm.h"), include_str!("few_rows.cu")],
            Body::Attention => &[portable!("keys.h"), portable!("attention.c")],
            Body::PrefillMma => &[portable!("keys.h"), include_str!("prefill_mma.cu")],
            Body::Decode => &[DECODE, include_str!("decode.cu")],
            Body::DecodeMma => &[DECODE, include_str!("decode_mma.cu")],
            Body::Combine => &[DECODE, include_str!("combine.cu")],
        }
    }
}

/// A text with its macros: what is compiled once and kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Program {
    /// The text.
    pub body: Body,
    /// `#define` lines.
    pub macros: String,
}

impl Program {
    /// `body` with `macros`, as names and values.
    pub(crate) fn new(body: Body, macros: &[(&str, &dyn Display)]) -> Program {
        let macros = macros.iter().map(|(name, value)| format!("#define {name} {value}\n")).collect();
        Program { body, macros }
    }

    /// The whole source over `device`: [`DEVICE`], or what stands in for it.
    pub fn source(&self, device: &str) -> String {
        let mut texts = vec![device, &self.macros, portable!("cuda.h"), portable!("common.h")];
        texts.extend(self.body.texts());
        texts.join("\n")
    }
}
