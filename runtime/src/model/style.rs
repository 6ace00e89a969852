//! Differences of a configuration's layers from Llama's besides the shape: which layers are rotated, and the
//! multipliers of the residual stream, scores and logits.

use super::config::Rope;
use super::error::Result;
use super::family::{Family, QkNorm, StreamScales};
use super::fields::Fields;
use super::rope::{self, RopeSize};
use mixfleet_hal::cast::to_f32;
use mixfleet_scheduler::layers::{LayerRope, LayerStyle, NormPlacement};
use serde_json::Value;

/// Multipliers of a model whose residual stream is rescaled.
///
/// The stream is kept divided by a factor, so that sums need no multiplication: Granite's
/// `residual_multiplier`, or in Gemma 3 the multiplier of embeddings. Norms of the stream cancel the
/// division; their epsilon is divided by the square of the factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelScales {
    /// Epsilon of the norms of the residual stream.
    pub stream_eps: f32,
    /// Factor of embeddings.
    pub embedding: f32,
    /// Factor of the weights of norms after attention and after the MLP.
    pub branch: f32,
    /// Factor of the weights of the last norm.
    pub last_norm: f32,
    /// Factor of scores beside `1/sqrt(head_dim)`. The cosines and sines of the rope carry its square root.
    pub score: f32,
    /// Soft cap of scores.
    pub score_cap: Option<f32>,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
}

impl ModelScales {
    /// Returns the neutral multipliers.
    pub(super) fn none(norm_eps: f32) -> Self {
        ModelScales {
            stream_eps: norm_eps,
            embedding: 1.0,
            branch: 1.0,
            last_norm: 1.0,
            score: 1.0,
            score_cap: None,
            logit_cap: None,
        }
    }

    /// Reads the multipliers of a family.
    ///
    /// # Errors
    /// The error names the field.
    pub(super) fn parse(
        fields: &Fields,
        family: &Family,
        norm_eps: f32,
        [hidden, head_dim]: [u32; 2],
    ) -> Result<Self> {
        let none = ModelScales::none(norm_eps);
        let factor = |field: &str| -> Result<f64> { Ok(fields.positive(field)?.unwrap_or(1.0)) };
        match family.scales {
            StreamScales::None => Ok(none),
            // the stream is divided by the multiplier of embeddings: norms after blocks carry the inverse
            StreamScales::Gemma if family.layout.norms.placement() == NormPlacement::Around => {
                let [score_cap, logit_cap] = soft_caps(fields, family)?;
                let before = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
                Ok(ModelScales {
                    stream_eps: to_f32(f64::from(norm_eps) / f64::from(hidden)),
                    branch: to_f32(1.0 / f64::from(hidden).sqrt()),
                    score: to_f32((f64::from(head_dim) / before).sqrt()),
                    score_cap,
                    logit_cap,
                    ..none
                })
            }
            StreamScales::Gemma => Ok(ModelScales { embedding: to_f32(f64::from(hidden).sqrt()), ..none }),
            StreamScales::Granite => {
                let residual = factor("residual_multiplier")?;
                Ok(ModelScales {
                    stream_eps: to_f32(f64::from(norm_eps) / (residual * residual)),
                    embedding: to_f32(factor("embedding_multiplier")? / residual),
                    last_norm: to_f32(1.0 / factor("logits_scaling")?),
                    score: to_f32(factor("attention_multiplier")? * f64::from(head_dim).sqrt()),
                    ..none
                })
            }
        }
    }

    /// Returns the rope with the factor of scores applied.
    pub(super) fn scaled(&self, rope: Rope) -> Rope {
        Rope { scale: rope.scale * self.score.sqrt(), ..rope }
    }
}

/// Reads the soft caps of scores and of logits.
fn soft_caps(fields: &Fields, family: &Family) -> Result<[Option<f32>; 2]> {
    let defaults = if family.model_type == "gemma2" { [Some(50.0), Some(30.0)] } else { [None; 2] };
    let read = |field: &str, default: Option<f64>| -> Result<Option<f32>> {
        let cap = if fields.has(field) { fields.positive(field)? } else { default };
        Ok(cap.map(to_f32))
    };
    Ok([read(SCORE_CAP, defaults[0])?, read(LOGIT_CAP, defaults[1])?])
}

const SCORE_CAP: &str = "attn_logit_softcapping";
const LOGIT_CAP: &str = "final_logit_softcapping";

/// The ropes of a model, and which of them each layer uses; an empty `of_layers` means `main` in all.
pub(super) struct ModelRopes {
    pub(super) main: Rope,
    pub(super) second: Option<Rope>,
    pub(super) of_layers: Vec<LayerRope>,
}

impl ModelRopes {
    /// Reads the ropes of a family whose layers have these windows.
    ///
    /// # Errors
    /// The error names the field.
    pub(super) fn parse(
        fields: &Fields,
        family: &Family,
        size: RopeSize,
        windows: &[Option<u32>],
    ) -> Result<Self> {
        if let Some(sliding) = family.sliding_rope {
            let defaults = [family.rope, sliding];
            let [main, second] = rope::parse_by_kind(fields, size, defaults, "rope_local_base_freq")?;
            if main == second {
                return Ok(ModelRopes { main, second: None, of_layers: Vec::new() });
            }
            let of =
                |window: &Option<u32>| if window.is_some() { LayerRope::Second } else { LayerRope::Main };
            return Ok(ModelRopes {
                main,
                second: Some(second),
                of_layers: windows.iter().map(of).collect(),
            });
        }
        let mut main = rope::parse(fields, size, family.rope)?;
        // a rotation by zero still carries the factor of scores
        if family.model_type == "granitemoehybrid" && fields.text("position_embedding_type")? != Some("rope")
        {
            main.inv_freq.fill(0.0);
        }
        let of_layers = match family.model_type {
            "smollm3" => bare_layers(fields, windows.len())?,
            // if some layers have a window, those without one are not rotated
            "exaone4" if !fields.has("sliding_window") || fields.get("sliding_window").is_some() => {
                let of = |window: &Option<u32>| match window {
                    Some(_) => LayerRope::Main,
                    None => LayerRope::Absent,
                };
                windows.iter().map(of).collect()
            }
            _ => Vec::new(),
        };
        Ok(ModelRopes { main, second: None, of_layers })
    }
}

/// Reads which layers have no rope: from `no_rope_layers` (0: none), or else `no_rope_layer_interval`.
fn bare_layers(fields: &Fields, layers: usize) -> Result<Vec<LayerRope>> {
    const FIELD: &str = "no_rope_layers";
    let of = |is_rotated: bool| if is_rotated { LayerRope::Main } else { LayerRope::Absent };
    if let Some(list) = fields.numbers(FIELD)? {
        if list.len() < layers || list.iter().any(|is_rotated| *is_rotated > 1) {
            let problem = format!("expected a 0 or 1 for each of {layers} layers");
            return Err(fields.error(FIELD, problem));
        }
        return Ok(list.into_iter().take(layers).map(|is_rotated| of(is_rotated == 1)).collect());
    }
    let every = fields.count("no_rope_layer_interval", u32::MAX)?.unwrap_or(4) as usize;
    Ok((1..=layers).map(|layer| of(!layer.is_multiple_of(every))).collect())
}

/// The style of a family's layers.
pub(super) fn layer_style(family: &Family, scales: &ModelScales, ropes: Vec<LayerRope>) -> LayerStyle {
    LayerStyle {
        norms: family.layout.norms.placement(),
        whole_qk_norm: family.qk_norm == QkNorm::Whole,
        gelu: family.gelu,
        scaled_embedding: scales.embedding != 1.0,
        capped_scores: scales.score_cap.is_some(),
        capped_logits: scales.logit_cap.is_some(),
        ropes,
    }
}

const GRANITES: [&str; 4] = ["granite", "granitemoe", "granitemoehybrid", "granitemoeshared"];

/// Fields that change a model's computation, their neutral values, and the families that read them. Other
/// families refuse other values.
const EFFECTS: [(&str, Harmless, &[&str]); 20] = [
    ("embedding_multiplier", Harmless::One, &GRANITES),
    ("residual_multiplier", Harmless::One, &GRANITES),
    ("attention_multiplier", Harmless::None, &GRANITES),
    ("logits_scaling", Harmless::One, &GRANITES),
    ("logit_scale", Harmless::One, &[]),
    ("query_pre_attn_scalar", Harmless::None, &["gemma2", "gemma3_text"]),
    (SCORE_CAP, Harmless::None, &["gemma2", "gemma3_text"]),
    (LOGIT_CAP, Harmless::None, &["gemma2", "gemma3_text"]),
    ("attn_temperature_tuning", Harmless::False, &[]),
    ("attention_chunk_size", Harmless::None, &[]),
    ("no_rope_layers", Harmless::None, &["smollm3"]),
    ("clip_qkv", Harmless::None, &[]),
    ("alibi", Harmless::False, &[]),
    ("use_parallel_residual", Harmless::False, &[]),
    ("parallel_attn", Harmless::False, &[]),
    ("use_bidirectional_attention", Harmless::False, &[]),
    ("qk_layernorm", Harmless::False, &[]),
    ("use_qk_norm", Harmless::False, &["glm4_moe", "minimax_m2"]),
    ("sandwich_norm", Harmless::False, &[]),
    ("rotary_dim", Harmless::None, &["minimax_m2"]),
];

/// A neutral value of a field, besides absence.
#[derive(Clone, Copy)]
enum Harmless {
    /// Absence alone.
    None,
    One,
    False,
}

/// Refuses fields that would change answers and that this family does not read.
///
/// # Errors
/// The error names the field.
pub(super) fn check_effects(fields: &Fields, family: &Family) -> Result<()> {
    for (field, harmless, read_by) in EFFECTS {
        let Some(value) = fields.get(field).filter(|_| !read_by.contains(&family.model_type)) else {
            continue;
        };
        let (is_harmless, but) = match harmless {
            Harmless::None => (false, "not supported in this family"),
            Harmless::One => (value.as_f64() == Some(1.0), "not supported in this family; supported: 1"),
            Harmless::False => {
                (*value == Value::Bool(false), "not supported in this family; supported: false")
            }
        };
        if !is_harmless {
            return Err(fields.error(field, format!("{value}: {but}")));
        }
    }
    Ok(())
}
