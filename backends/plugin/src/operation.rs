//! Operations as the library gets them: in the structs of a C interface, whose layout is promised to
//! libraries that were compiled against it, and so not by [`OpSig::code`](mixfleet_hal::OpSig::code).

use crate::abi::MixfleetOp;
use crate::shapes::*;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::op::{KvShape, LatentKv};
use mixfleet_hal::{DType, ExpertRouting, GroupedRows, MatrixKind, OpSig, RotaryPart, Scoring};

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

#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
fn shape(sig: &OpSig) -> Option<(u32, MixfleetShape)> {
    let latent = sig.kv().and_then(|kv| kv.latent);
    let of_kv = |plain, of_latents| if latent.is_some() { of_latents } else { plain };
    Some(match *sig {
        // the interface has none of these
        OpSig::GroupedGemm { weight: MatrixKind::Quantised(_), .. }
        | OpSig::GeluMul { .. }
        | OpSig::SoftCap { .. }
        | OpSig::AttnPrefill { cap: Some(_), .. }
        | OpSig::AttnDecode { cap: Some(_), .. }
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
        OpSig::Rope { tokens, heads, head_dim, part: Some(part), x } => {
            let (RotaryPart { first, length, interleaved }, x) = (part, dtype(x));
            let interleaved = interleaved.into();
            let rope = MixfleetRopePart { tokens, heads, head_dim, x, first, length, interleaved };
            (MIXFLEET_ROPE_PART, shape!(rope_part: rope))
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            let [(from_row, from_first), (to_row, to_first)] = [from, to].map(|of| (of.row, of.first));
            let x = dtype(x);
            let columns = MixfleetColumns { rows, cols, from_row, from_first, to_row, to_first, x };
            (MIXFLEET_COPY_COLUMNS, shape!(columns: columns))
        }
        OpSig::KvWrite { tokens, x, kv } => {
            let kind = of_kv(MIXFLEET_KV_WRITE, MIXFLEET_LATENT_WRITE);
            (kind, shape!(kv_write: MixfleetKvWrite { tokens, x: dtype(x), kv: pages(kv) }))
        }
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window,
            sinks,
            x,
            kv,
            cap: None,
        } => {
            let (window, x, kv) = (window.unwrap_or(0), dtype(x), pages(kv));
            let attention =
                MixfleetAttnPrefill { pairs, kv_tokens, tokens, sequences, heads, pages_max, window, x, kv };
            match (latent, sinks) {
                (None, false) => (MIXFLEET_ATTN_PREFILL, shape!(attn_prefill: attention)),
                (None, true) => (MIXFLEET_SINK_PREFILL, shape!(attn_prefill: attention)),
                (Some(LatentKv { rank, scale }), false) => {
                    let prefill = MixfleetLatentPrefill { attention, rank, scale: scale.0 };
                    (MIXFLEET_LATENT_PREFILL, shape!(latent_prefill: prefill))
                }
                // no model has both
                (Some(_), true) => return None,
            }
        }
        OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv, cap: None } => {
            let (x, kv) = (dtype(x), pages(kv));
            let attention = MixfleetAttnDecode { kv_tokens, sequences, heads, pages_max, x, kv };
            match latent {
                None => (MIXFLEET_ATTN_DECODE, shape!(attn_decode: attention)),
                Some(LatentKv { rank, scale }) => {
                    let decode = MixfleetLatentDecode { attention, rank, scale: scale.0 };
                    (MIXFLEET_LATENT_DECODE, shape!(latent_decode: decode))
                }
            }
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks, out } => {
            let merge = MixfleetAttnMerge { parts, rows, head_dim, out: dtype(out) };
            match sinks {
                0 => (MIXFLEET_ATTN_MERGE, shape!(attn_merge: merge)),
                _ => (MIXFLEET_SINK_MERGE, shape!(sink_merge: MixfleetSinkMerge { merge, sinks })),
            }
        }
        OpSig::ClampedSwiglu { elements, alpha, limit, x } => {
            let (alpha, limit, x) = (alpha.0, limit.0, dtype(x));
            let swiglu = MixfleetClampedSwiglu { elements, alpha, limit, x };
            (MIXFLEET_CLAMPED_SWIGLU, shape!(clamped_swiglu: swiglu))
        }
        OpSig::Route { tokens, bias, routing } => {
            (MIXFLEET_ROUTE, shape!(route: route(tokens, bias, routing)))
        }
        OpSig::GroupedGemm { grouped, n, k, x, weight: MatrixKind::Plain(weight), out, bias } => {
            // the interface has no share of a layer's experts
            let GroupedRows { choices, fan, experts, touched, others: 0 } = grouped else { return None };
            let (x, weight, out, bias) = (dtype(x), dtype(weight), dtype(out), bias.into());
            let product = MixfleetGroupedGemm { choices, fan, experts, touched, n, k, x, weight, out, bias };
            (MIXFLEET_GROUPED_GEMM, shape!(grouped_gemm: product))
        }
        OpSig::Combine { tokens, active, cols, x, accumulate } => {
            let (x, accumulate) = (dtype(x), accumulate.into());
            (MIXFLEET_COMBINE, shape!(combine: MixfleetCombine { tokens, active, cols, x, accumulate }))
        }
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
            (of_kv(MIXFLEET_KV_GATHER, MIXFLEET_LATENT_GATHER), shape!(kv_move: kv_move))
        }
        OpSig::KvScatter { tokens, kv, wire } => {
            let kv_move = MixfleetKvMove { tokens, wire: dtype(wire), kv: pages(kv) };
            (of_kv(MIXFLEET_KV_SCATTER, MIXFLEET_LATENT_SCATTER), shape!(kv_move: kv_move))
        }
    })
}

fn route(tokens: u32, bias: bool, routing: ExpertRouting) -> MixfleetRoute {
    let ExpertRouting { experts, active, scoring, groups, groups_active, group_best, normalise, scale } =
        routing;
    MixfleetRoute {
        tokens,
        experts,
        active,
        bias: bias.into(),
        scoring: match scoring {
            Scoring::Softmax => 0,
            Scoring::Sigmoid => 1,
        },
        groups,
        groups_active,
        group_best,
        normalise: normalise.into(),
        scale: scale.0,
    }
}
