//! Operations as the library gets them.

use crate::abi::*;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::op::KvShape;
use mixfleet_hal::{DType, OpSig};

/// An operation without its operands; none for one that this version of the interface does not have.
pub(crate) fn of(sig: &OpSig) -> Option<MixfleetOp> {
    if sig.operands().iter().any(|operand| operand.dtype == DType::I8 || sig.has_scales(operand)) {
        return None;
    }
    let (kind, shape) = shape(sig)?;
    let struct_bytes = to_u32(size_of::<MixfleetOp>());
    Some(MixfleetOp { struct_bytes, kind, shape, args: std::ptr::null(), arg_count: 0, reserved: 0 })
}

fn dtype(of: DType) -> u32 {
    match of {
        DType::F32 => MIXFLEET_F32,
        DType::Bf16 => MIXFLEET_BF16,
        DType::F16 => MIXFLEET_F16,
        DType::F8E4m3 => MIXFLEET_F8E4M3,
        DType::U32 => MIXFLEET_U32,
        DType::I8 => u32::MAX, // which no operation that a library gets has
    }
}

fn pages(kv: KvShape) -> MixfleetKv {
    let KvShape { kv_heads, head_dim, page_tokens, dtype: of, .. } = kv;
    MixfleetKv { kv_heads, head_dim, page_tokens, dtype: dtype(of) }
}

/// A shape whose other bytes are zero.
macro_rules! shape {
    ($field:ident: $value:expr) => {{
        let mut shape = MixfleetShape { reserved: [0; 16] };
        shape.$field = $value;
        shape
    }};
}

fn shape(sig: &OpSig) -> Option<(u32, MixfleetShape)> {
    if sig.kv().is_some_and(|kv| kv.latent.is_some()) {
        return None;
    }
    Some(match *sig {
        OpSig::ClampedSwiglu { .. }
        | OpSig::CopyColumns { .. }
        | OpSig::Rope { part: Some(_), .. }
        | OpSig::Route { .. }
        | OpSig::GroupedGemm { .. }
        | OpSig::Combine { .. }
        | OpSig::AttnPrefill { sinks: true, .. }
        | OpSig::AttnMerge { sinks: 1.., .. }
        | OpSig::QuantisedEmbed { .. }
        | OpSig::QuantisedGemm { .. } => return None,
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            let (table, out) = (dtype(table), dtype(out));
            (MIXFLEET_EMBED, shape!(embed: MixfleetEmbed { tokens, vocab, hidden, table, out }))
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            let (eps, x, weight, out) = (eps.0, dtype(x), dtype(weight), dtype(out));
            (MIXFLEET_RMS_NORM, shape!(rms_norm: MixfleetRmsNorm { rows, cols, eps, x, weight, out }))
        }
        OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } => {
            let (x, weight, out) = (dtype(x), dtype(weight), dtype(out));
            let (bias, accumulate) = (bias.into(), accumulate.into());
            (MIXFLEET_GEMM, shape!(gemm: MixfleetGemm { m, n, k, x, weight, out, bias, accumulate }))
        }
        OpSig::Rope { tokens, heads, head_dim, part: None, x } => {
            (MIXFLEET_ROPE, shape!(rope: MixfleetRope { tokens, heads, head_dim, x: dtype(x) }))
        }
        OpSig::KvWrite { tokens, x, kv } => {
            (MIXFLEET_KV_WRITE, shape!(kv_write: MixfleetKvWrite { tokens, x: dtype(x), kv: pages(kv) }))
        }
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window,
            sinks: false,
            x,
            kv,
        } => {
            let (window, x, kv) = (window.unwrap_or(0), dtype(x), pages(kv));
            let attention =
                MixfleetAttnPrefill { pairs, kv_tokens, tokens, sequences, heads, pages_max, window, x, kv };
            (MIXFLEET_ATTN_PREFILL, shape!(attn_prefill: attention))
        }
        OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv } => {
            let (x, kv) = (dtype(x), pages(kv));
            let attention = MixfleetAttnDecode { kv_tokens, sequences, heads, pages_max, x, kv };
            (MIXFLEET_ATTN_DECODE, shape!(attn_decode: attention))
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks: 0, out } => (
            MIXFLEET_ATTN_MERGE,
            shape!(attn_merge: MixfleetAttnMerge { parts, rows, head_dim, out: dtype(out) }),
        ),
        OpSig::SiluMul { elements, x } => {
            (MIXFLEET_SILU_MUL, shape!(elements: MixfleetElements { elements, x: dtype(x) }))
        }
        OpSig::Add { elements, x } => {
            (MIXFLEET_ADD, shape!(elements: MixfleetElements { elements, x: dtype(x) }))
        }
        OpSig::Sample { rows, cols, history, tops } => {
            (MIXFLEET_SAMPLE, shape!(sample: MixfleetSample { rows, cols, history, tops }))
        }
        OpSig::Copy { bytes } => (MIXFLEET_COPY, shape!(bytes: MixfleetBytes { bytes, word: 0 })),
        OpSig::Fill { bytes, word } => (MIXFLEET_FILL, shape!(bytes: MixfleetBytes { bytes, word })),
        OpSig::KvGather { tokens, kv, wire } => {
            let kv_move = MixfleetKvMove { tokens, wire: dtype(wire), kv: pages(kv) };
            (MIXFLEET_KV_GATHER, shape!(kv_move: kv_move))
        }
        OpSig::KvScatter { tokens, kv, wire } => {
            let kv_move = MixfleetKvMove { tokens, wire: dtype(wire), kv: pages(kv) };
            (MIXFLEET_KV_SCATTER, shape!(kv_move: kv_move))
        }
    })
}
