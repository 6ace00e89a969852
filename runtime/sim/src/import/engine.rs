//! The operations in the profile of a serving engine, by the shape of the model that it ran.

use crate::engine_profile::EngineProfile;
use mixfleet_hal::catalog::LawKind;
use mixfleet_hal::profile::Point;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, OpSig};
use mixfleet_scheduler::cost::ModelShape;

/// The products and the attention of `profile` as points, for a model of this shape. Steps of prompts beside
/// decoding sequences are no operation of their own and are left out, and so are small operations.
///
/// # Errors
/// A message, if the model cannot be split over as many devices, or if attention has mean keys.
pub fn operations(profile: &EngineProfile, shape: &ModelShape) -> Result<Vec<Point>, String> {
    shape.check_split(profile.devices)?;
    let own = if profile.devices > 1 { shape.split(profile.devices) } else { shape.clone() };
    let (heads, kv) = (own.heads, own.kv_shape());
    let weight = |layer: &str| {
        let (q, hidden, inner) = (heads * kv.head_dim, own.hidden, own.intermediate);
        match layer {
            "qkv_proj" => Some((q + 2 * kv.kv_heads * kv.head_dim, hidden)),
            "o_proj" => Some((hidden, q)),
            "gate_up_proj" => Some((2 * inner, hidden)),
            "down_proj" => Some((hidden, inner)),
            "lm_head" => Some((own.vocab, hidden)),
            _ => None,
        }
    };
    let mut points = Vec::new();
    let mut add = |kind: LawKind, dtype: DType, sizes: &[u32], time: Seconds| {
        let Some(mut sig) = kind.sig(dtype, sizes) else { return };
        if let OpSig::AttnDecode { kv: of, .. } | OpSig::AttnPrefill { kv: of, .. } = &mut sig {
            of.head_dim = kv.head_dim;
        }
        points.push(Point { sig, time });
    };
    for (layer, rows) in profile.dense.iter().chain(&profile.per_sequence) {
        let Some((n, k)) = weight(layer) else { continue };
        rows.iter().for_each(|(m, time)| add(LawKind::Gemm, own.weight, &[*m, n, k], *time));
    }
    for at in &profile.attention {
        let (tokens, sequences) = (at.prefill_tokens, at.decode_sequences);
        match (tokens, sequences) {
            (0, 0) => {}
            (0, _) => {
                let sizes = [sequences, at.decode_context, heads, kv.kv_heads];
                add(LawKind::AttnDecode, own.kv, &sizes, at.seconds);
            }
            (_, 0) => {
                // the mean key counts half of the chunk
                let halves = if profile.mean_keys { tokens / 2 } else { 0 };
                let Some(past) = at.prefill_context.checked_sub(halves) else { continue };
                add(LawKind::AttnPrefill, own.kv, &[1, tokens, past, heads, kv.kv_heads], at.seconds);
            }
            _ => {}
        }
    }
    if points.is_empty() {
        return Err(
            "its tables name no layer of a dense decoder (qkv_proj, o_proj, gate_up_proj, ...)".into()
        );
    }
    Ok(points)
}
